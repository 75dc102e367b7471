"""Asking: whom a server asks, and when, as its rule declares it."""

import abc
import bisect
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from manifoldagg._validation import check_count
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.types import Rule

__all__ = ["Asking", "Cohorts", "Continuous", "Drawn", "Present", "Routed", "asking", "declared", "few"]

LISTED = 5
"""How many clients a complaint lists."""


class Present(Sequence[int]):
    """Clients that are here: a set in a definite order, of which any can be had at once.

    The order follows from what was added and discarded, and says nothing. `changes` counts both.

    Example:
        >>> here = Present([3, 5, 7])
        >>> here.discard(3)
        >>> 3 in here, list(here), here.changes
        (False, [7, 5], 4)
    """

    def __init__(self, clients: Iterable[int] = ()) -> None:
        self._clients: list[int] = []
        self._places: dict[int, int] = {}
        self.changes = 0
        for client in clients:
            self.add(client)

    def __contains__(self, client: object) -> bool:
        return client in self._places

    def __len__(self) -> int:
        return len(self._clients)

    def __getitem__(self, place: Any) -> Any:
        return self._clients[place]

    def __deepcopy__(self, memo: object) -> "Present":
        twin = copy.copy(self)
        twin._clients = self._clients.copy()
        twin._places = self._places.copy()
        return twin

    def add(self, client: int) -> None:
        """With `client`, at the end; as it was if it is here."""
        if client not in self._places:
            self._places[client] = len(self._clients)
            self._clients.append(client)
            self.changes += 1

    def discard(self, client: int) -> None:
        """Without `client`, in whose place the last one comes; as it was if it is not here."""
        place = self._places.pop(client, None)
        if place is not None:
            last = self._clients.pop()
            if last != client:
                self._clients[place] = last
                self._places[last] = place
            self.changes += 1


class Asking(abc.ABC):
    """Who is asked next, whenever something has happened. What is told is told once, and in order.

    A client is `present` that takes tasks; who has left and finishes its last one is not. Every answer is a list of
    clients who are present, each as often as it is asked.
    """

    @abc.abstractmethod
    def begin(self, present: Present) -> list[int]:
        """Whom to ask at time 0."""

    @abc.abstractmethod
    def answered(self, client: int, accepted: bool, present: Present) -> list[int]:
        """A client has finished a task."""

    @abc.abstractmethod
    def lost(self, client: int, count: int, present: Present) -> list[int]:
        """A client is gone, and with it so many tasks."""

    @abc.abstractmethod
    def joined(self, client: int, present: Present) -> list[int]:
        """A client is here from now on."""


class Continuous(Asking):
    """All clients are asked at once, and who has answered is asked again; or `tasks` of them, drawn as others answer.

    Args:
        tasks: how many are under way at a time; the next client is drawn uniformly from those that are idle. One for
            each client by default, and nothing is drawn.
        generator: draws the clients.
    """

    def __init__(self, tasks: int | None, generator: np.random.Generator) -> None:
        self._tasks = tasks
        self._generator = generator
        self._busy: set[int] = set()
        # Where clients are drawn: who may be; some of them may have left.
        self._idle = Present()

    def begin(self, present: Present) -> list[int]:
        if self._tasks is None:
            self._busy.update(present)
            return list(present)
        for client in present:
            self._idle.add(client)
        return self._draw(present)

    def answered(self, client: int, accepted: bool, present: Present) -> list[int]:
        self._busy.discard(client)
        return self.joined(client, present)

    def lost(self, client: int, count: int, present: Present) -> list[int]:
        self._busy.discard(client)
        return [] if self._tasks is None else self._draw(present)

    def joined(self, client: int, present: Present) -> list[int]:
        free = client in present and client not in self._busy
        if self._tasks is None:
            self._busy.update([client] if free else [])
            return [client] if free else []
        if free:
            self._idle.add(client)
        return self._draw(present)

    def _draw(self, present: Present) -> list[int]:
        drawn: list[int] = []
        while len(self._busy) < (self._tasks or 0) and self._idle:
            client = self._idle[int(self._generator.integers(len(self._idle)))]
            self._idle.discard(client)
            if client in present:
                self._busy.add(client)
                drawn.append(client)
        return drawn


class Cohorts(Asking):
    """k clients are drawn, and everybody waits until k updates were accepted: then the next k are.

    They are drawn uniformly and without replacement. In place of what was refused or lost others are asked, once all
    that are under way have answered: those first that were not asked since the model moved.

    Args:
        cohort: k.
        generator: draws the clients.
    """

    def __init__(self, cohort: int, generator: np.random.Generator) -> None:
        self._cohort = cohort
        self._generator = generator
        self._missing = cohort
        self._out = 0
        self._asked: set[int] = set()

    def begin(self, present: Present) -> list[int]:
        return self._draw(present)

    def answered(self, client: int, accepted: bool, present: Present) -> list[int]:
        self._out -= 1
        self._missing -= accepted
        if not self._missing:
            self._missing = self._cohort
            self._asked = set()
        return self._draw(present)

    def lost(self, client: int, count: int, present: Present) -> list[int]:
        self._out -= count
        return self._draw(present)

    def joined(self, client: int, present: Present) -> list[int]:
        return self._draw(present)

    def _draw(self, present: Present) -> list[int]:
        if self._out:
            return []
        fresh = [client for client in present if client not in self._asked]
        drawn = _some(fresh, self._missing, self._generator)
        if len(drawn) < self._missing:
            again = [client for client in present if client in self._asked]
            drawn += _some(again, self._missing - len(drawn), self._generator)
        self._asked.update(drawn)
        self._out = len(drawn)
        return drawn


class Drawn(Asking):
    """Every client is asked once; whenever k updates were accepted, the rule draws who is asked next, busy or not.

    Where fewer than k are present all of them are asked. So they are drawn if nobody is under way any more.

    Args:
        draw: of the rule: k of the clients that it is given.
        cohort: k.
        tasks: how many are asked at first, drawn uniformly; all by default.
        generator: draws the clients.
    """

    def __init__(
        self,
        draw: Callable[[Sequence[int], np.random.Generator], list[int]],
        cohort: int,
        tasks: int | None,
        generator: np.random.Generator,
    ) -> None:
        def rule(present: Sequence[int], generator: np.random.Generator) -> list[int]:
            return draw(present, generator)

        # A function, and no method: a copy of this does not copy the rule.
        self._rule = rule
        self._cohort = cohort
        self._tasks = tasks
        self._generator = generator
        self._missing = cohort
        self._out = 0

    def begin(self, present: Present) -> list[int]:
        first = list(present) if self._tasks is None else _some(present, self._tasks, self._generator)
        self._out = len(first)
        return first

    def answered(self, client: int, accepted: bool, present: Present) -> list[int]:
        self._out -= 1
        self._missing -= accepted
        if not self._missing:
            self._missing = self._cohort
            return self._draw(present)
        return [] if self._out else self._draw(present)

    def lost(self, client: int, count: int, present: Present) -> list[int]:
        self._out -= count
        return [] if self._out else self._draw(present)

    def joined(self, client: int, present: Present) -> list[int]:
        return [] if self._out else self._draw(present)

    def _draw(self, present: Present) -> list[int]:
        everybody = list(present)
        drawn = everybody if len(present) < self._cohort else list(self._rule(everybody, self._generator))
        self._out += len(drawn)
        return drawn


class Routed(Asking):
    """So many tasks are under way, each at a client drawn by the routing of the rule, busy or not.

    Who is not present is not drawn; the others keep their shares relative to one another.

    Args:
        shares: of the tasks, by client.
        tasks: how many.
        generator: draws the clients.
    """

    def __init__(self, shares: Mapping[int, float], tasks: int, generator: np.random.Generator) -> None:
        self._shares = dict(shares)
        self._tasks = tasks
        self._generator = generator
        self._out = 0
        self._edges: list[float] = []
        self._known = -1

    def begin(self, present: Present) -> list[int]:
        return self._draw(present)

    def answered(self, client: int, accepted: bool, present: Present) -> list[int]:
        return self.lost(client, 1, present)

    def lost(self, client: int, count: int, present: Present) -> list[int]:
        self._out -= count
        return self._draw(present)

    def joined(self, client: int, present: Present) -> list[int]:
        return self._draw(present)

    def _draw(self, present: Present) -> list[int]:
        if not len(present):
            return []
        if self._known != present.changes:
            self._known = present.changes
            self._edges = list(accumulate(self._shares[client] for client in present))
        drawn = []
        while self._out < self._tasks:
            place = bisect.bisect_right(self._edges, self._generator.random() * self._edges[-1])
            drawn.append(present[min(place, len(present) - 1)])
            self._out += 1
        return drawn


def asking(rule: Rule, clients: Sequence[int], tasks: int | None, generator: np.random.Generator) -> Asking:
    """How a rule wants its clients to be asked; one that has a `rule` inside, as that one does.

    `routing` is [`Routed`][manifoldagg.federated.server.client_sampling.Routed], `draw` is
    [`Drawn`][manifoldagg.federated.server.client_sampling.Drawn], a `cohort` of more than 1 is
    [`Cohorts`][manifoldagg.federated.server.client_sampling.Cohorts], anything else
    [`Continuous`][manifoldagg.federated.server.client_sampling.Continuous].

    Args:
        rule: of the server.
        clients: all that will ever take part.
        tasks: how many are under way at a time, or are asked at first, where that can be chosen.
        generator: draws the clients; nothing else may draw from it.

    Raises:
        ArgumentError: if `tasks` is no positive integer, or not to be chosen; if the clients of a routing are others.
    """
    if tasks is not None:
        check_count("tasks", tasks)
    routing = declared(rule, "routing")
    if routing is not None:
        return Routed(_shares(routing, clients), len(clients) if tasks is None else tasks, generator)
    draw = declared(rule, "draw")
    if draw is not None:
        return Drawn(draw, rule.cohort, tasks, generator)
    if rule.cohort == 1:
        return Continuous(tasks, generator)
    if tasks is not None:
        raise ArgumentError(f"tasks: expected None, as {type(rule).__name__} waits for a cohort of {rule.cohort}")
    return Cohorts(rule.cohort, generator)


def declared(rule: Any, name: str) -> Any:
    """What a rule declares under a name, such as its `routing`, or the rule in it; `None` where neither does."""
    while rule is not None and not hasattr(rule, name):
        rule = getattr(rule, "rule", None)
    return None if rule is None else getattr(rule, name)


def _shares(routing: Mapping[Any, float], clients: Sequence[int]) -> Mapping[int, float]:
    """A routing of exactly these clients."""
    without = [client for client in clients if not routing.get(client, 0.0) > 0]
    if without:
        raise ArgumentError(f"rule: routing: expected a share for each client that takes part; none for {few(without)}")
    known = set(clients)
    others = [client for client in routing if client not in known]
    if others:
        raise ArgumentError(f"rule: routing: expected the clients that take part; none of them: {few(others)}")
    return routing


def few(clients: Sequence[Any]) -> str:
    """The first of them, for a complaint."""
    more = len(clients) - LISTED
    return ", ".join(repr(client) for client in clients[:LISTED]) + (f" and {more} more" if more > 0 else "")


def _some(clients: Sequence[int], count: int, generator: np.random.Generator) -> list[int]:
    """At most so many of them, drawn uniformly without replacement."""
    return [clients[i] for i in generator.permutation(len(clients))[:count]]
