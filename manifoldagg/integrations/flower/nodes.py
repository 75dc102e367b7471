"""Nodes: which one is free, busy or at rest, and what waits for it. They know neither Flower nor a clock."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from manifoldagg.federated.server.client_sampling import AvailableClients

__all__ = ["Nodes"]

Work = TypeVar("Work")
MAX_BACKOFF_DOUBLINGS = 30


@dataclass
class _Node(Generic[Work]):
    """What is known of a node: what waits for it, before the rest and after, and what is on its way."""

    priority_queue: deque[Work] = field(default_factory=deque)
    queue: deque[Work] = field(default_factory=deque)
    message_id: str = ""
    work: Work | None = None
    wait_until: float = 0.0
    failures: int = 0
    last_was_priority: bool = False

    @property
    def next_queue(self) -> deque[Work]:
        """Where its next work waits: nothing comes before the rest twice in a row, where there is a rest."""
        return (
            self.priority_queue if self.priority_queue and not (self.last_was_priority and self.queue) else self.queue
        )


class Nodes(Generic[Work]):
    """A crowd of nodes, each of which has at most one letter in its hands.

    What a node is to do waits here until it is free. A node that fails rests, twice as long each time in a row.

    Args:
        initial_backoff: seconds after a first failure.
        max_backoff: seconds of any rest.

    Attributes:
        present: the nodes that are here.

    Example:
        >>> nodes = Nodes()
        >>> nodes.update_membership([7, 5])
        ([5, 7], {})
        >>> nodes.enqueue(5, "train")
        >>> nodes.ready(now=0.0)
        [(5, 'train')]
        >>> nodes.mark_sent(5, "letter", "train", deadline=10.0)
        >>> nodes.ready(now=0.0), nodes.outstanding, nodes.complete("letter", now=1.0, succeeded=True)
        ([], ['letter'], (5, 'train'))
    """

    def __init__(self, initial_backoff: float = 0.1, max_backoff: float = 60.0) -> None:
        self._initial_backoff = initial_backoff
        self._max_backoff = max_backoff
        self._nodes: dict[int, _Node[Work]] = {}
        self._node_by_message: dict[str, int] = {}
        self.present = AvailableClients()

    @property
    def outstanding(self) -> list[str]:
        """Those that are in somebody's hands, the oldest first."""
        return list(self._node_by_message)

    def update_membership(self, connected: Iterable[int]) -> tuple[list[int], dict[int, list[Work]]]:
        """See who is here.

        Returns:
            Who is new; and who has left, with all that they had to do.
        """
        now = set(connected)
        left = {node: self._remove(node) for node in list(self.present) if node not in now}
        new = sorted(now - self._nodes.keys())
        for node in new:
            self._nodes[node] = _Node()
            self.present.add(node)
        return new, left

    def enqueue(self, node: int, work: Work, *, priority: bool = False) -> None:
        """Let work wait for a node that is here, after the rest of its kind.

        What comes `priority` is before what does not, but not twice in a row.
        """
        (self._nodes[node].priority_queue if priority else self._nodes[node].queue).append(work)

    def is_backing_off(self, node: int, now: float) -> bool:
        """Whether it failed and gets no letter yet."""
        found = self._nodes[node]
        return not found.message_id and found.wait_until > now

    def pending_work(self, node: int) -> list[Work]:
        """All that a node that is here has to do, in its hands first."""
        found = self._nodes[node]
        return [*([found.work] if found.work is not None else []), *found.priority_queue, *found.queue]

    def ready(self, now: float) -> list[tuple[int, Work]]:
        """Who is free, and what each of them is to do next."""
        free = [(node, x) for node, x in self._nodes.items() if not x.message_id and x.wait_until <= now]
        return [(node, x.next_queue[0]) for node, x in free if x.next_queue]

    def mark_sent(self, node: int, message_id: str, work: Work, deadline: float) -> None:
        """What was due is in the node's hands.

        Args:
            node: that was free.
            message_id: unlike any other.
            work: what `complete` returns for it, in place of what waited.
            deadline: when nobody waits for it any more.
        """
        found = self._nodes[node]
        hurried = found.next_queue is found.priority_queue
        self.discard(node)
        found.last_was_priority = hurried
        found.message_id, found.work, found.wait_until = message_id, work, deadline
        self._node_by_message[message_id] = node

    def discard(self, node: int) -> None:
        """What was due is not to be done any more."""
        self._nodes[node].next_queue.popleft()

    def lookup(self, message_id: str) -> tuple[int, Work] | None:
        """Who has a letter in its hands, and its work; `None` where nobody has."""
        node = self._node_by_message.get(message_id)
        work = None if node is None else self._nodes[node].work
        return None if node is None or work is None else (node, work)

    def complete(self, message_id: str, now: float, *, succeeded: bool) -> tuple[int, Work]:
        """A node has answered, or will not: it is free, or rests where it did not do well."""
        node = self._node_by_message.pop(message_id)
        found = self._nodes[node]
        work = found.work
        assert work is not None
        found.message_id, found.work, found.wait_until = "", None, now
        if succeeded:
            found.failures = 0
        else:
            self.backoff(node, now)
        return node, work

    def backoff(self, node: int, now: float) -> None:
        """A node has failed, and gets nothing for a while."""
        found = self._nodes[node]
        found.wait_until = now + min(
            self._initial_backoff * 2 ** min(found.failures, MAX_BACKOFF_DOUBLINGS), self._max_backoff
        )
        found.failures += 1

    def overdue(self, now: float) -> list[str]:
        """The letters for which nobody waits any more."""
        return [letter for letter, node in self._node_by_message.items() if self._nodes[node].wait_until <= now]

    def shorten_deadline(self, message_id: str, deadline: float) -> None:
        """Wait no longer than this for an answer, if anybody has the letter."""
        if message_id in self._node_by_message:
            found = self._nodes[self._node_by_message[message_id]]
            found.wait_until = min(found.wait_until, deadline)

    def _remove(self, node: int) -> list[Work]:
        works = self.pending_work(node)
        self.present.discard(node)
        self._node_by_message.pop(self._nodes.pop(node).message_id, None)
        return works
