"""Client samplers, which choose the clients that receive the next training tasks.

The attributes of an aggregation rule determine which sampler the rule needs. The function `sampler_for` creates this
sampler.
"""

import abc
import bisect
import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from manifoldagg._validation import check_count
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.types import Rule

__all__ = [
    "AsyncSampler",
    "AvailableClients",
    "ClientSampler",
    "CohortSampler",
    "RoutedSampler",
    "RuleSampler",
    "rule_attribute",
    "sampler_for",
    "shorten",
]

MAX_LISTED = 5
"""The largest number of clients that an error message lists."""


class AvailableClients(Sequence[int]):
    """Ordered set of the available clients, which returns the client at an index in constant time.

    The order depends only on the sequence of additions and removals, so that random draws by index are reproducible.
    The attribute `num_changes` counts these additions and removals.

    Example:
        >>> here = AvailableClients([3, 5, 7])
        >>> here.discard(3)
        >>> 3 in here, list(here), here.num_changes
        (False, [7, 5], 4)
    """

    def __init__(self, clients: Iterable[int] = ()) -> None:
        self._clients: list[int] = []
        self._positions: dict[int, int] = {}
        self.num_changes = 0
        for client in clients:
            self.add(client)

    def __contains__(self, client: object) -> bool:
        return client in self._positions

    def __len__(self) -> int:
        return len(self._clients)

    def __getitem__(self, place: Any) -> Any:
        return self._clients[place]

    def __deepcopy__(self, memo: object) -> "AvailableClients":
        twin = copy.copy(self)
        twin._clients = self._clients.copy()
        twin._positions = self._positions.copy()
        return twin

    def add(self, client: int) -> None:
        """Add `client` at the end, unless it is already available."""
        if client not in self._positions:
            self._positions[client] = len(self._clients)
            self._clients.append(client)
            self.num_changes += 1

    def discard(self, client: int) -> None:
        """Remove `client` if it is available. The last client moves to its position."""
        place = self._positions.pop(client, None)
        if place is not None:
            last = self._clients.pop()
            if last != client:
                self._clients[place] = last
                self._positions[last] = place
            self.num_changes += 1


class ClientSampler(abc.ABC):
    """Base class of client samplers, which choose the clients that receive the next training tasks.

    A training loop reports each event to the sampler in the order of the events. For example, it calls `on_completion`
    after a client has finished a task. The methods `start`, `on_completion`, `on_dropout` and `on_join` return a list
    of clients, and the loop then dispatches one task for each entry of this list. Their argument `available` contains
    the clients that accept tasks. Only the sampler may use its random generator.
    """

    _num_in_flight = 0

    def start(self, available: AvailableClients) -> list[int]:
        """Return the clients of the first tasks. Call this method once, before all events."""
        return self._draw(available)

    def on_completion(self, client: int, accepted: bool, available: AvailableClients) -> list[int]:
        """Return the clients that receive the next tasks after a client has finished a task.

        `accepted` states whether the server has accepted the update of this client.
        """
        return self.on_dropout(client, 1, available)

    def on_dropout(self, client: int, count: int, available: AvailableClients) -> list[int]:
        """Return the clients of the next tasks after a client has left and has lost `count` tasks."""
        self._num_in_flight -= count
        return self._draw(available)

    def on_join(self, client: int, available: AvailableClients) -> list[int]:
        """Return the clients of the next tasks after a client has become available."""
        return self._draw(available)

    def pop_stragglers(self) -> list[int]:
        """Return the clients whose tasks the caller must cancel, because the other clients have completed the round.

        Call this method after each `on_completion`. The sampler no longer counts the returned tasks as in flight.
        """
        return []

    @abc.abstractmethod
    def _draw(self, available: AvailableClients) -> list[int]: ...


@dataclass(eq=False)
class AsyncSampler(ClientSampler):
    """Sampler for asynchronous rules, which keeps a fixed number of tasks in flight.

    Each client has at most one task at a time. The sampler draws the clients of new tasks uniformly at random from the
    clients without a task.

    Args:
        concurrency: the number of tasks in flight. `None` means one task for every available client, so that the
            sampler draws no random numbers.
        generator: the random generator.
        refill: the number of free slots for tasks at which the sampler fills all free slots. If no task is in flight,
            the sampler does not wait for this number.
    """

    concurrency: int | None
    generator: np.random.Generator
    refill: int = 1

    def __post_init__(self) -> None:
        self._busy: set[int] = set()
        # The clients without a task. Some of them may have left since they were added.
        self._idle = AvailableClients()

    def start(self, available: AvailableClients) -> list[int]:
        for client in available:
            self._idle.add(client)
        return self._draw(available)

    def on_completion(self, client: int, accepted: bool, available: AvailableClients) -> list[int]:
        self._busy.discard(client)
        return self.on_join(client, available)

    def on_dropout(self, client: int, count: int, available: AvailableClients) -> list[int]:
        self._busy.discard(client)
        return self._draw(available)

    def on_join(self, client: int, available: AvailableClients) -> list[int]:
        if client in available and client not in self._busy:
            self._idle.add(client)
        return self._draw(available)

    def _draw(self, available: AvailableClients) -> list[int]:
        if self.concurrency is None:
            ready = [client for client in self._idle if client in available]
            if self._busy and len(ready) < self.refill:
                return []
            self._idle = AvailableClients()
            self._busy.update(ready)
            return ready
        drawn: list[int] = []
        if self._busy and self.concurrency - len(self._busy) < self.refill:
            return drawn
        while len(self._busy) < self.concurrency and self._idle:
            client = self._idle[int(self.generator.integers(len(self._idle)))]
            self._idle.discard(client)
            if client in available:
                self._busy.add(client)
                drawn.append(client)
        return drawn


@dataclass(eq=False)
class CohortSampler(ClientSampler):
    """Sampler for synchronous rules, which draws a new cohort of clients for each round.

    The sampler draws clients uniformly and without replacement. A round ends when the server has accepted `cohort`
    updates.

    - Over-selection: the sampler also draws `num_additional` clients at the start of each round. At the end of the
      round, `pop_stragglers` returns the clients that have not finished.
    - Replacements: if all tasks have ended but updates are missing, because some were rejected or lost, the sampler
      draws further clients. It prefers clients that had no task in this round.

    Args:
        cohort: the number of accepted updates that complete a cohort.
        generator: the random generator.
        num_additional: the number of additional clients at the start of each cohort.

    Example:
        >>> sampler = CohortSampler(1, np.random.default_rng(0), num_additional=1)
        >>> everyone = AvailableClients([0, 1])
        >>> first = sampler.start(everyone)
        >>> next_cohort = sampler.on_completion(first[0], True, everyone)
        >>> len(first), len(next_cohort), sampler.pop_stragglers() == [first[1]]
        (2, 2, True)
    """

    cohort: int
    generator: np.random.Generator
    num_additional: int = 0

    def __post_init__(self) -> None:
        self._num_missing = self.cohort
        self._sampled: set[int] = set()
        # The clients with a task in flight, in the order of dispatch.
        self._busy: dict[int, None] = {}
        self._stragglers: list[int] = []

    def on_completion(self, client: int, accepted: bool, available: AvailableClients) -> list[int]:
        self._num_missing -= accepted
        self._busy.pop(client, None)
        if not self._num_missing:
            self._num_missing = self.cohort
            self._sampled = set()
            self._stragglers = list(self._busy)
            self._num_in_flight -= len(self._stragglers)
            self._busy = {}
        return super().on_completion(client, accepted, available)

    def on_dropout(self, client: int, count: int, available: AvailableClients) -> list[int]:
        self._busy.pop(client, None)
        return super().on_dropout(client, count, available)

    def pop_stragglers(self) -> list[int]:
        stragglers, self._stragglers = self._stragglers, []
        return stragglers

    def _draw(self, available: AvailableClients) -> list[int]:
        if self._num_in_flight:
            return []
        # Additional clients are drawn only at the start of a cohort, not as replacements.
        wanted = self._num_missing + (0 if self._sampled else self.num_additional)
        fresh = [client for client in available if client not in self._sampled]
        drawn = _sample(fresh, wanted, self.generator)
        if len(drawn) < self._num_missing:
            again = [client for client in available if client in self._sampled]
            drawn += _sample(again, self._num_missing - len(drawn), self.generator)
        self._sampled.update(drawn)
        self._busy = dict.fromkeys(drawn)
        self._num_in_flight = len(drawn)
        return drawn


@dataclass(eq=False)
class RuleSampler(ClientSampler):
    """Sampler for aggregation rules that select clients themselves, in a method `draw`.

    At the start, `concurrency` random clients receive one task each. Later, each client that `draw` returns receives
    one task, even if it is still training. The sampler calls `draw` in two cases:

    - The server has accepted `cohort` more updates.
    - No task is in flight.

    If fewer than `cohort` clients can receive tasks, each of them receives one, and the sampler does not call `draw`.

    Args:
        draw: the method `draw` of the rule. It receives the available clients and the generator, and returns the
            selected clients.
        cohort: the number of clients that `draw` selects.
        concurrency: the number of clients of the first tasks, which the sampler draws uniformly. `None` means all
            available clients.
        generator: the random generator.
    """

    draw: Callable[[Sequence[int], np.random.Generator], list[int]]
    cohort: int
    concurrency: int | None
    generator: np.random.Generator

    def __post_init__(self) -> None:
        draw = self.draw
        # `copy.deepcopy` of a bound method copies its rule, whereas `copy.deepcopy` of a function copies nothing.
        self.draw = lambda available, generator: draw(available, generator)
        self._num_missing = self.cohort

    def start(self, available: AvailableClients) -> list[int]:
        first = list(available) if self.concurrency is None else _sample(available, self.concurrency, self.generator)
        self._num_in_flight = len(first)
        return first

    def on_completion(self, client: int, accepted: bool, available: AvailableClients) -> list[int]:
        self._num_missing -= accepted
        return super().on_completion(client, accepted, available)

    def _draw(self, available: AvailableClients) -> list[int]:
        if self._num_missing and self._num_in_flight:
            return []
        self._num_missing = self._num_missing or self.cohort
        present = list(available)
        drawn = present if len(present) < self.cohort else list(self.draw(present, self.generator))
        self._num_in_flight += len(drawn)
        return drawn


@dataclass(eq=False)
class RoutedSampler(ClientSampler):
    """Sampler that draws each client with the probability that the aggregation rule specifies.

    These probabilities are the attribute `routing` of the rule. The sampler keeps `concurrency` tasks in flight, and
    may draw a client that is still training. If some clients are unavailable, it renormalises the probabilities of the
    available clients.

    Args:
        shares: the share of all tasks that each client receives.
        concurrency: the number of tasks in flight.
        generator: the random generator.
        refill: the number of free slots for tasks at which the sampler fills all free slots.
    """

    shares: Mapping[int, float]
    concurrency: int
    generator: np.random.Generator
    refill: int = 1

    def __post_init__(self) -> None:
        self._cumulative_shares: list[float] = []
        self._seen_changes = -1

    def _draw(self, available: AvailableClients) -> list[int]:
        if not len(available) or (self._num_in_flight and self.concurrency - self._num_in_flight < self.refill):
            return []
        if self._seen_changes != available.num_changes:
            self._seen_changes = available.num_changes
            self._cumulative_shares = list(accumulate(self.shares[client] for client in available))
        drawn = []
        while self._num_in_flight < self.concurrency:
            place = bisect.bisect_right(self._cumulative_shares, self.generator.random() * self._cumulative_shares[-1])
            drawn.append(available[min(place, len(available) - 1)])
            self._num_in_flight += 1
        return drawn


def sampler_for(
    rule: Rule,
    clients: Sequence[int],
    concurrency: int | None,
    generator: np.random.Generator,
    *,
    refill: int | None = None,
) -> ClientSampler:
    """Return the sampler that a rule declares by its attributes.

    If the rule wraps another rule, the function also reads the attributes of the wrapped rule. The first matching row
    of this table applies:

    | attribute of the rule | sampler |
    | --- | --- |
    | `routing` | [`RoutedSampler`][manifoldagg.federated.server.client_sampling.RoutedSampler] |
    | `draw` | [`RuleSampler`][manifoldagg.federated.server.client_sampling.RuleSampler] |
    | `cohort` above 1 | [`CohortSampler`][manifoldagg.federated.server.client_sampling.CohortSampler] |
    | otherwise | [`AsyncSampler`][manifoldagg.federated.server.client_sampling.AsyncSampler] |

    The attribute `over_selection` of a rule with a cohort is the number of additional clients as a fraction of the
    cohort. If it is positive, a cohort of 1 has a `CohortSampler` too.

    Args:
        rule: the rule of the server.
        clients: all clients that may participate.
        concurrency: the number of tasks in flight. For a `RuleSampler`, this is the number of clients of the first
            tasks. `None` means all clients.
        generator: the random generator, which only the sampler may use.
        refill: the number of free slots for tasks at which the sampler fills all free slots. `None` means 1. A rule
            that waits for a cohort or draws its clients requires `None`.

    Raises:
        ArgumentError: in any of these cases:

            - `concurrency` or `refill` is not a positive integer, or `refill` exceeds `concurrency`.
            - The rule determines its own concurrency or refill, but you passed a value.
            - The routing lacks a participating client or contains another client.
            - A rule that draws its clients has an over-selection.
    """
    if concurrency is not None:
        check_count("concurrency", concurrency)
    slots = 1 if refill is None else check_count("refill", refill)
    if concurrency is not None and slots > concurrency:
        raise ArgumentError(f"refill: expected at most concurrency = {concurrency}, got {slots}")
    routing = rule_attribute(rule, "routing")
    if routing is not None:
        return RoutedSampler(
            _check_routing(routing, clients), len(clients) if concurrency is None else concurrency, generator, slots
        )
    draw = rule_attribute(rule, "draw")
    over_selection = rule_attribute(rule, "over_selection") or 0.0
    if draw is None and rule.cohort == 1 and not over_selection:
        return AsyncSampler(concurrency, generator, slots)
    if refill is not None:
        raise ArgumentError(f"refill: expected None, as {type(rule).__name__} decides when clients get tasks")
    if draw is not None:
        if over_selection:
            raise ArgumentError(f"rule: over_selection: expected 0, as {type(rule).__name__} draws its own clients")
        return RuleSampler(draw, rule.cohort, concurrency, generator)
    if concurrency is not None:
        raise ArgumentError(f"concurrency: expected None, as {type(rule).__name__} waits for a cohort of {rule.cohort}")
    # The small constant corrects products that are rounded up. For example, 0.07 * 100 is slightly larger than 7.
    additional = min(over_selection * rule.cohort, float(len(clients)))
    return CohortSampler(rule.cohort, generator, math.ceil(additional - 1e-9))


def rule_attribute(rule: Any, name: str) -> Any:
    """Return an attribute of an aggregation rule or of a rule that it wraps.

    A rule may wrap another rule, which may wrap a third rule, and so on. The function returns the attribute of the
    outermost rule that has it, or `None` if no rule has it.
    """
    while rule is not None and not hasattr(rule, name):
        rule = getattr(rule, "rule", None)
    return None if rule is None else getattr(rule, name)


def _check_routing(routing: Mapping[Any, float], clients: Sequence[int]) -> Mapping[int, float]:
    without = [client for client in clients if not routing.get(client, 0.0) > 0]
    if without:
        raise ArgumentError(
            f"rule: routing: expected a share for each participating client; missing for {shorten(without)}"
        )
    known = set(clients)
    others = [client for client in routing if client not in known]
    if others:
        raise ArgumentError(f"rule: routing: expected the participating clients, got unknown ones: {shorten(others)}")
    return routing


def shorten(clients: Sequence[Any]) -> str:
    """Return the first five names and the number of further names, for an error message."""
    more = len(clients) - MAX_LISTED
    return ", ".join(repr(client) for client in clients[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _sample(clients: Sequence[int], count: int, generator: np.random.Generator) -> list[int]:
    return [clients[i] for i in generator.permutation(len(clients))[:count]]
