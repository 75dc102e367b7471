"""Client samplers, which choose the clients that receive the next tasks, as the rule declares."""

import abc
import bisect
import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""The maximum number of clients in an error message."""


class AvailableClients(Sequence[int]):
    """Ordered set of the available clients, with constant-time access by index.

    The order is deterministic but arbitrary. `num_changes` counts additions and removals.

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
        """Remove `client`, if it is available, and move the last client to its position."""
        place = self._positions.pop(client, None)
        if place is not None:
            last = self._clients.pop()
            if last != client:
                self._clients[place] = last
                self._positions[last] = place
            self.num_changes += 1


class ClientSampler(abc.ABC):
    """Base class of samplers, which return the clients to dispatch to after each event.

    The caller reports each event once, in order. Every method returns a list of available clients, with one entry for
    each task to dispatch. A client is available if it accepts tasks.
    """

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator
        self._num_in_flight = 0

    def start(self, available: AvailableClients) -> list[int]:
        """Return the clients to dispatch to at time 0."""
        return self._draw(available)

    def on_completion(self, client: int, accepted: bool, available: AvailableClients) -> list[int]:
        """Handle a finished task of a client. The server may have accepted or rejected the update."""
        return self.on_dropout(client, 1, available)

    def on_dropout(self, client: int, count: int, available: AvailableClients) -> list[int]:
        """Handle a client that leaves and loses `count` tasks."""
        self._num_in_flight -= count
        return self._draw(available)

    def on_join(self, client: int, available: AvailableClients) -> list[int]:
        """Handle a client that becomes available."""
        return self._draw(available)

    def pop_stragglers(self) -> list[int]:
        """Return the clients whose tasks the caller must cancel, and forget these tasks.

        Call this method after each `on_completion`. The sampler does not count the cancelled tasks as in flight.
        """
        return []

    @abc.abstractmethod
    def _draw(self, available: AvailableClients) -> list[int]: ...


class AsyncSampler(ClientSampler):
    """Sampler that keeps `concurrency` tasks in flight, or one task for every client.

    Args:
        concurrency: the number of tasks in flight. The next client is drawn uniformly from the idle clients. With
            `None`, every client has one task in flight, and no client is drawn.
        generator: the random generator.
        refill: the number of free slots at which the sampler dispatches again, to all of them. If no task is in flight,
            the sampler dispatches at once.
    """

    def __init__(self, concurrency: int | None, generator: np.random.Generator, refill: int = 1) -> None:
        super().__init__(generator)
        self._concurrency = concurrency
        self._refill = refill
        self._busy: set[int] = set()
        # The clients without a task, some of which may have left.
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
        if self._concurrency is None:
            ready = [client for client in self._idle if client in available]
            if self._busy and len(ready) < self._refill:
                return []
            self._idle = AvailableClients()
            self._busy.update(ready)
            return ready
        drawn: list[int] = []
        if self._busy and self._concurrency - len(self._busy) < self._refill:
            return drawn
        while len(self._busy) < self._concurrency and self._idle:
            client = self._idle[int(self._generator.integers(len(self._idle)))]
            self._idle.discard(client)
            if client in available:
                self._busy.add(client)
                drawn.append(client)
        return drawn


class CohortSampler(ClientSampler):
    """Sampler that draws a cohort of clients, uniformly and without replacement, after each completed cohort.

    A cohort is complete when the server has accepted as many updates as the cohort has clients. With over-selection,
    the sampler dispatches to additional clients, and `pop_stragglers` returns the clients that have not finished when
    the cohort is complete.

    When no task is in flight, the sampler draws further clients for the rejected and lost updates. Clients that had no
    task in this cohort are drawn first.

    Args:
        cohort: the number of updates that complete a cohort.
        generator: the random generator.
        num_additional: the number of additional clients that receive a task at the start of each cohort.

    Example:
        >>> sampler = CohortSampler(1, np.random.default_rng(0), num_additional=1)
        >>> everyone = AvailableClients([0, 1])
        >>> first = sampler.start(everyone)
        >>> next_cohort = sampler.on_completion(first[0], True, everyone)
        >>> len(first), len(next_cohort), sampler.pop_stragglers() == [first[1]]
        (2, 2, True)
    """

    def __init__(self, cohort: int, generator: np.random.Generator, num_additional: int = 0) -> None:
        super().__init__(generator)
        self._cohort = cohort
        self._num_additional = num_additional
        self._num_missing = cohort
        self._sampled: set[int] = set()
        # The clients with a task in flight, in the order of dispatch.
        self._busy: dict[int, None] = {}
        self._stragglers: list[int] = []

    def on_completion(self, client: int, accepted: bool, available: AvailableClients) -> list[int]:
        self._num_missing -= accepted
        self._busy.pop(client, None)
        if not self._num_missing:
            self._num_missing = self._cohort
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
        # Additional clients start with a new cohort only, so they do not replace rejected or lost updates.
        wanted = self._num_missing + (0 if self._sampled else self._num_additional)
        fresh = [client for client in available if client not in self._sampled]
        drawn = _sample(fresh, wanted, self._generator)
        if len(drawn) < self._num_missing:
            again = [client for client in available if client in self._sampled]
            drawn += _sample(again, self._num_missing - len(drawn), self._generator)
        self._sampled.update(drawn)
        self._busy = dict.fromkeys(drawn)
        self._num_in_flight = len(drawn)
        return drawn


class RuleSampler(ClientSampler):
    """Sampler that dispatches to every client once, and then lets the rule draw cohorts of clients.

    The rule draws the next cohort when the server has accepted as many updates as a cohort has clients, or when no task
    is in flight. The rule may draw busy clients. If too few clients are available, all of them receive a task.

    Args:
        draw: the method of the rule, which draws a cohort from the given clients.
        cohort: the number of clients in a cohort.
        concurrency: the number of clients in the first dispatch, drawn uniformly. `None` means all clients.
        generator: the random generator.
    """

    def __init__(
        self,
        draw: Callable[[Sequence[int], np.random.Generator], list[int]],
        cohort: int,
        concurrency: int | None,
        generator: np.random.Generator,
    ) -> None:
        def rule(present: Sequence[int], generator: np.random.Generator) -> list[int]:
            return draw(present, generator)

        super().__init__(generator)
        # A deep copy of a bound method would copy the rule, but a deep copy of a function does not.
        self._draw_from_rule = rule
        self._cohort = cohort
        self._concurrency = concurrency
        self._num_missing = cohort

    def start(self, available: AvailableClients) -> list[int]:
        first = list(available) if self._concurrency is None else _sample(available, self._concurrency, self._generator)
        self._num_in_flight = len(first)
        return first

    def on_completion(self, client: int, accepted: bool, available: AvailableClients) -> list[int]:
        self._num_missing -= accepted
        return super().on_completion(client, accepted, available)

    def _draw(self, available: AvailableClients) -> list[int]:
        if self._num_missing and self._num_in_flight:
            return []
        self._num_missing = self._num_missing or self._cohort
        present = list(available)
        drawn = present if len(present) < self._cohort else list(self._draw_from_rule(present, self._generator))
        self._num_in_flight += len(drawn)
        return drawn


class RoutedSampler(ClientSampler):
    """Sampler that keeps `concurrency` tasks in flight, and draws clients from the routing of the rule.

    The sampler may draw busy clients. It does not draw unavailable clients, and the shares of the other clients keep
    their ratios.

    Args:
        shares: the share of the tasks of each client.
        concurrency: the number of tasks in flight.
        generator: the random generator.
        refill: the number of free slots at which the sampler dispatches again, to all of them.
    """

    def __init__(
        self, shares: Mapping[int, float], concurrency: int, generator: np.random.Generator, refill: int = 1
    ) -> None:
        super().__init__(generator)
        self._shares = dict(shares)
        self._concurrency = concurrency
        self._refill = refill
        self._cumulative_shares: list[float] = []
        self._seen_changes = -1

    def _draw(self, available: AvailableClients) -> list[int]:
        if not len(available) or (self._num_in_flight and self._concurrency - self._num_in_flight < self._refill):
            return []
        if self._seen_changes != available.num_changes:
            self._seen_changes = available.num_changes
            self._cumulative_shares = list(accumulate(self._shares[client] for client in available))
        drawn = []
        while self._num_in_flight < self._concurrency:
            place = bisect.bisect_right(self._cumulative_shares, self._generator.random() * self._cumulative_shares[-1])
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
    """Return the sampler that a rule, or the rule that it wraps, declares.

    | attribute of the rule | sampler |
    | --- | --- |
    | `routing` | [`RoutedSampler`][manifoldagg.federated.server.client_sampling.RoutedSampler] |
    | `draw` | [`RuleSampler`][manifoldagg.federated.server.client_sampling.RuleSampler] |
    | `cohort` above 1 | [`CohortSampler`][manifoldagg.federated.server.client_sampling.CohortSampler] |
    | otherwise | [`AsyncSampler`][manifoldagg.federated.server.client_sampling.AsyncSampler] |

    The attribute `over_selection` of a rule with a cohort is the fraction of additional clients.

    Args:
        rule: the rule of the server.
        clients: all clients that may participate.
        concurrency: the number of tasks in flight, or of clients in the first dispatch of a `RuleSampler`.
        generator: the random generator, which only the sampler may use.
        refill: the number of free slots at which the sampler dispatches again. The default is 1. A rule that waits for
            a cohort or draws its clients does not accept it.

    Raises:
        ArgumentError: if `concurrency` or `refill` is not a positive integer, if `refill` exceeds `concurrency`, if the
            rule does not allow a choice, or if the routing has other clients.
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
    if draw is None and rule.cohort == 1:
        return AsyncSampler(concurrency, generator, slots)
    if refill is not None:
        raise ArgumentError(f"refill: expected None, as {type(rule).__name__} decides when clients get tasks")
    over_selection = rule_attribute(rule, "over_selection") or 0.0
    if draw is not None:
        if over_selection:
            raise ArgumentError(f"rule: over_selection: expected 0, as {type(rule).__name__} draws its own clients")
        return RuleSampler(draw, rule.cohort, concurrency, generator)
    if concurrency is not None:
        raise ArgumentError(f"concurrency: expected None, as {type(rule).__name__} waits for a cohort of {rule.cohort}")
    # The small constant compensates for the rounding of products such as 1.1 * 30.
    return CohortSampler(rule.cohort, generator, math.ceil(over_selection * rule.cohort - 1e-9))


def rule_attribute(rule: Any, name: str) -> Any:
    """Return an attribute of a rule or of the rule that it wraps; `None` if neither has the attribute."""
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
    """Return the first names of a list for an error message."""
    more = len(clients) - MAX_LISTED
    return ", ".join(repr(client) for client in clients[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _sample(clients: Sequence[int], count: int, generator: np.random.Generator) -> list[int]:
    return [clients[i] for i in generator.permutation(len(clients))[:count]]
