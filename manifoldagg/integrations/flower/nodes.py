"""States and task queues of the nodes in a Flower run."""

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
    priority_queue: deque[Work] = field(default_factory=deque)
    queue: deque[Work] = field(default_factory=deque)
    message_id: str = ""
    work: Work | None = None
    wait_until: float = 0.0
    failures: int = 0
    last_was_priority: bool = False

    @property
    def next_queue(self) -> deque[Work]:
        """The queue of the node's next task. If both queues contain tasks, they alternate."""
        return (
            self.priority_queue if self.priority_queue and not (self.last_was_priority and self.queue) else self.queue
        )


class Nodes(Generic[Work]):
    """States of all nodes. Each node has a queue of tasks, and at most one message in flight.

    After a failure, a node backs off, which means that it receives no tasks for some time. This time doubles with each
    consecutive failure, up to a maximum.

    Args:
        initial_backoff: the backoff time after the first failure, in seconds.
        max_backoff: the maximum backoff time, in seconds.

    Attributes:
        present: the connected nodes.

    Example:
        >>> nodes = Nodes()
        >>> nodes.update_membership([7, 5])
        ([5, 7], {})
        >>> nodes.enqueue(5, "train")
        >>> nodes.ready(now=0.0)
        [(5, 'train')]
        >>> nodes.mark_sent(5, "message", "train", deadline=10.0)
        >>> nodes.ready(now=0.0), nodes.outstanding, nodes.complete("message", now=1.0, succeeded=True)
        ([], ['message'], (5, 'train'))
    """

    def __init__(self, initial_backoff: float = 0.1, max_backoff: float = 60.0) -> None:
        self._initial_backoff = initial_backoff
        self._max_backoff = max_backoff
        self._nodes: dict[int, _Node[Work]] = {}
        self._node_by_message: dict[str, int] = {}
        self.present = AvailableClients()

    @property
    def outstanding(self) -> list[str]:
        """The identifiers of the messages in flight, with the oldest message first."""
        return list(self._node_by_message)

    def update_membership(self, connected: Iterable[int]) -> tuple[list[int], dict[int, list[Work]]]:
        """Update the set of connected nodes.

        Returns:
            The new nodes, and a dict of the nodes that have disconnected with their unfinished tasks.
        """
        now = set(connected)
        left = {node: self._remove(node) for node in list(self.present) if node not in now}
        new = sorted(now - self._nodes.keys())
        for node in new:
            self._nodes[node] = _Node()
            self.present.add(node)
        return new, left

    def enqueue(self, node: int, work: Work, *, priority: bool = False) -> None:
        """Queue a task for a connected node.

        Tasks with `priority` have their own queue. If both queues contain tasks, the node receives tasks from the two
        queues alternately.
        """
        (self._nodes[node].priority_queue if priority else self._nodes[node].queue).append(work)

    def is_backing_off(self, node: int, now: float) -> bool:
        """Return whether the backoff time of a node has not ended yet."""
        found = self._nodes[node]
        return not found.message_id and found.wait_until > now

    def pending_work(self, node: int) -> list[Work]:
        """Return all tasks of a connected node, with the task in flight first."""
        found = self._nodes[node]
        return [*([found.work] if found.work is not None else []), *found.priority_queue, *found.queue]

    def ready(self, now: float) -> list[tuple[int, Work]]:
        """Return the free nodes with their next tasks."""
        free = [(node, x) for node, x in self._nodes.items() if not x.message_id and x.wait_until <= now]
        return [(node, x.next_queue[0]) for node, x in free if x.next_queue]

    def mark_sent(self, node: int, message_id: str, work: Work, deadline: float) -> None:
        """Mark the next task of a node as in flight.

        Args:
            node: a free node.
            message_id: the unique identifier of the message.
            work: the value to store in place of the queued task. `complete` returns this value.
            deadline: the time at which the task fails if no reply has arrived.
        """
        found = self._nodes[node]
        hurried = found.next_queue is found.priority_queue
        self.discard(node)
        found.last_was_priority = hurried
        found.message_id = message_id
        found.work = work
        found.wait_until = deadline
        self._node_by_message[message_id] = node

    def discard(self, node: int) -> None:
        """Remove the next task of a node from its queue."""
        self._nodes[node].next_queue.popleft()

    def lookup(self, message_id: str) -> tuple[int, Work] | None:
        """Return the node and the task of a message in flight, or `None`."""
        node = self._node_by_message.get(message_id)
        work = None if node is None else self._nodes[node].work
        return None if node is None or work is None else (node, work)

    def complete(self, message_id: str, now: float, *, succeeded: bool) -> tuple[int, Work]:
        """Mark the task of a message as completed, and return the node and the task.

        If the task has failed, the node backs off, which means that it receives no tasks for some time.
        """
        node = self._node_by_message.pop(message_id)
        found = self._nodes[node]
        work = found.work
        assert work is not None
        found.message_id = ""
        found.work = None
        found.wait_until = now
        if succeeded:
            found.failures = 0
        else:
            self.backoff(node, now)
        return node, work

    def backoff(self, node: int, now: float) -> None:
        """Start the backoff time of a node after a failure."""
        found = self._nodes[node]
        found.wait_until = now + min(
            self._initial_backoff * 2 ** min(found.failures, MAX_BACKOFF_DOUBLINGS), self._max_backoff
        )
        found.failures += 1

    def overdue(self, now: float) -> list[str]:
        """Return the identifiers of the messages whose deadline has passed."""
        return [message_id for message_id, node in self._node_by_message.items() if self._nodes[node].wait_until <= now]

    def shorten_deadline(self, message_id: str, deadline: float) -> None:
        """Set an earlier deadline for a message in flight."""
        if message_id in self._node_by_message:
            found = self._nodes[self._node_by_message[message_id]]
            found.wait_until = min(found.wait_until, deadline)

    def _remove(self, node: int) -> list[Work]:
        works = self.pending_work(node)
        self.present.discard(node)
        self._node_by_message.pop(self._nodes.pop(node).message_id, None)
        return works
