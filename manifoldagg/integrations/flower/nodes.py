"""Nodes: which one is free, busy or at rest, and what waits for it. They know neither Flower nor a clock."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from manifoldagg.federated.server.client_sampling import Present

__all__ = ["Nodes"]

W = TypeVar("W")
DOUBLINGS = 30


@dataclass
class _Node(Generic[W]):
    """What is known of a node: what waits for it, before the rest and after, and what is on its way."""

    early: deque[W] = field(default_factory=deque)
    queue: deque[W] = field(default_factory=deque)
    letter: str = ""
    work: W | None = None
    until: float = 0.0
    failures: int = 0
    hurried: bool = False

    @property
    def first(self) -> deque[W]:
        """Where its next work waits: nothing comes before the rest twice in a row, where there is a rest."""
        return self.early if self.early and not (self.hurried and self.queue) else self.queue


class Nodes(Generic[W]):
    """A crowd of nodes, each of which has at most one letter in its hands.

    What a node is to do waits here until it is free. A node that fails rests, twice as long each time in a row.

    Args:
        rest: seconds after a first failure.
        longest: seconds of any rest.

    Attributes:
        present: the nodes that are here.

    Example:
        >>> nodes = Nodes()
        >>> nodes.meet([7, 5])
        ([5, 7], {})
        >>> nodes.ask(5, "train")
        >>> nodes.due(now=0.0)
        [(5, 'train')]
        >>> nodes.sent(5, "letter", "train", until=10.0)
        >>> nodes.due(now=0.0), nodes.letters, nodes.answered("letter", now=1.0, well=True)
        ([], ['letter'], (5, 'train'))
    """

    def __init__(self, rest: float = 0.1, longest: float = 60.0) -> None:
        self._rest = rest
        self._longest = longest
        self._nodes: dict[int, _Node[W]] = {}
        self._holders: dict[str, int] = {}
        self.present = Present()

    @property
    def letters(self) -> list[str]:
        """Those that are in somebody's hands, the oldest first."""
        return list(self._holders)

    def meet(self, here: Iterable[int]) -> tuple[list[int], dict[int, list[W]]]:
        """See who is here.

        Returns:
            Who is new; and who has left, with all that they had to do.
        """
        now = set(here)
        left = {node: self._leave(node) for node in list(self.present) if node not in now}
        new = sorted(now - self._nodes.keys())
        for node in new:
            self._nodes[node] = _Node()
            self.present.add(node)
        return new, left

    def ask(self, node: int, work: W, *, first: bool = False) -> None:
        """Let work wait for a node that is here, after the rest of its kind.

        What comes `first` is before what does not, but not twice in a row.
        """
        (self._nodes[node].early if first else self._nodes[node].queue).append(work)

    def is_resting(self, node: int, now: float) -> bool:
        """Whether it failed and gets no letter yet."""
        found = self._nodes[node]
        return not found.letter and found.until > now

    def works(self, node: int) -> list[W]:
        """All that a node that is here has to do, in its hands first."""
        found = self._nodes[node]
        return [*([found.work] if found.work is not None else []), *found.early, *found.queue]

    def due(self, now: float) -> list[tuple[int, W]]:
        """Who is free, and what each of them is to do next."""
        free = [(node, x) for node, x in self._nodes.items() if not x.letter and x.until <= now]
        return [(node, x.first[0]) for node, x in free if x.first]

    def sent(self, node: int, letter: str, work: W, until: float) -> None:
        """What was due is in the node's hands.

        Args:
            node: that was free.
            letter: unlike any other.
            work: what `answered` returns for it, in place of what waited.
            until: when nobody waits for it any more.
        """
        found = self._nodes[node]
        hurried = found.first is found.early
        self.skip(node)
        found.hurried = hurried
        found.letter, found.work, found.until = letter, work, until
        self._holders[letter] = node

    def skip(self, node: int) -> None:
        """What was due is not to be done any more."""
        self._nodes[node].first.popleft()

    def held(self, letter: str) -> tuple[int, W] | None:
        """Who has a letter in its hands, and its work; `None` where nobody has."""
        node = self._holders.get(letter)
        work = None if node is None else self._nodes[node].work
        return None if node is None or work is None else (node, work)

    def answered(self, letter: str, now: float, *, well: bool) -> tuple[int, W]:
        """A node has answered, or will not: it is free, or rests where it did not do well."""
        node = self._holders.pop(letter)
        found = self._nodes[node]
        work = found.work
        assert work is not None
        found.letter, found.work, found.until = "", None, now
        if well:
            found.failures = 0
        else:
            self.rest(node, now)
        return node, work

    def rest(self, node: int, now: float) -> None:
        """A node has failed, and gets nothing for a while."""
        found = self._nodes[node]
        found.until = now + min(self._rest * 2 ** min(found.failures, DOUBLINGS), self._longest)
        found.failures += 1

    def overdue(self, now: float) -> list[str]:
        """The letters for which nobody waits any more."""
        return [letter for letter, node in self._holders.items() if self._nodes[node].until <= now]

    def hurry(self, letter: str, until: float) -> None:
        """Wait no longer than this for an answer, if anybody has the letter."""
        if letter in self._holders:
            found = self._nodes[self._holders[letter]]
            found.until = min(found.until, until)

    def _leave(self, node: int) -> list[W]:
        works = self.works(node)
        self.present.discard(node)
        self._holders.pop(self._nodes.pop(node).letter, None)
        return works
