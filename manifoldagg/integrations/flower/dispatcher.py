"""The message dispatcher, which sends messages to nodes and fetches their replies."""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, TypeAlias

import flwr.app
from flwr.app import ArrayRecord, ConfigRecord, MessageType, RecordDict
from flwr.serverapp import Grid

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Server
from manifoldagg.federated.server.client_sampling import AvailableClients, ClientSampler
from manifoldagg.integrations.flower.nodes import Nodes
from manifoldagg.integrations.flower.reporting import RunReport

__all__ = ["MAX_REPLY_BYTES", "TASK_ENDED", "EvaluationRound", "MessageDispatcher"]

LOG = logging.getLogger("flwr")
MAX_REPLY_BYTES = 2**28
"""The maximum total size of the replies that one call fetches, in bytes."""
NODE_REFRESH_INTERVAL = 1.0
"""The time between two queries of the connected nodes, in seconds."""
TTL_MARGIN = 60.0
"""A margin in seconds. Flower stores a message for twice the timeout of its task plus this margin."""
MAX_QUEUED_EVALUATIONS = 2
"""The maximum number of evaluations per node that are queued or in flight."""
LOST_REPLY_TIMEOUT = 10.0
"""The remaining time in seconds until a task times out if Flower may have lost the reply."""
UNREADABLE_REPLY_ERRORS = (AssertionError, AttributeError, EOFError, LookupError, TypeError, ValueError)
"""The exceptions that Flower raises for an invalid reply. If the connection is lost, it raises other exceptions."""
MAX_ISOLATION_DOUBLINGS = 20
"""The maximum exponent n. The isolation of a node ends after 2^n readable replies."""
TASK_ENDED = "ticket: the task of this reply has already ended"
"""The rejection reason for a reply that arrives a second time, or after the end of its task."""
FlowerMessage: TypeAlias = flwr.app.Message


class _TrainTask(NamedTuple):
    """Training task that waits in the queue of a node, or that was sent to the node.

    Attributes:
        id: the id of the ticket that the server has issued for the task.
        records: the content of the message to the node. To save memory, it is `None` once the message has been sent.
    """

    id: str
    records: dict[str, ArrayRecord | ConfigRecord] | None = None


@dataclass(eq=False)
class EvaluationRound:
    """Evaluation of the model of one round on the nodes.

    Args:
        round: the round of the evaluated model.
        deadline: the value of `time.monotonic()` at which the evaluation ends, even if replies are missing.
        num_nodes: the number of nodes that evaluate.
        num_pending: the number of missing replies.
        replies: the received replies, without arrays.
    """

    round: int
    deadline: float
    num_nodes: int = 0
    num_pending: int = 0
    replies: list[FlowerMessage] = field(default_factory=list)


class _EvalTask(NamedTuple):
    evaluation: EvaluationRound
    message: FlowerMessage


class _Isolation:
    """Set of nodes that have sent unreadable replies. The dispatcher fetches their replies one at a time."""

    # One call of Flower can fetch the replies of many nodes. If Flower cannot parse one of these replies, all of them
    # may be lost. Therefore, the dispatcher isolates a node that has sent an unreadable reply. The first isolation ends
    # after two readable replies of the node. Each further unreadable reply doubles this number, up to a maximum. A node
    # that alternates between readable and unreadable replies therefore rarely causes the loss of other replies.

    def __init__(self) -> None:
        # The number of readable replies after which the isolation of each node ends.
        self._missing_replies: dict[int, int] = {}
        self._offences: Counter[int] = Counter()
        self.num_unreadable = 0

    def __contains__(self, node: int) -> bool:
        return node in self._missing_replies

    def on_unreadable(self, nodes: Iterable[int]) -> None:
        self.num_unreadable += 1
        for node in nodes:
            self._offences[node] += 1
            self._missing_replies[node] = 2 ** min(self._offences[node], MAX_ISOLATION_DOUBLINGS)

    def on_readable(self, node: int) -> None:
        if node in self._missing_replies:
            self._missing_replies[node] -= 1
            if not self._missing_replies[node]:
                del self._missing_replies[node]


class MessageDispatcher:
    """Dispatcher that sends tasks to Flower nodes, fetches their replies, and assigns each reply to its task.

    Each node works on at most one task at a time. Its other tasks wait in a queue.

    Args:
        grid: the grid of the `ServerApp`.
        server: the server that issues the tickets.
        report: the report that counts failed tasks.
        dispatch: a function that issues a ticket for a node. It returns the identifier of the ticket and the records
            of the message.
        bound_evaluation: a function that limits the size of the reply to an evaluation. Its argument is the content of
            the reply, and its result is the content to store.
        largest_reply_bytes: the size of the largest expected reply, in bytes.
        poll_interval: the time between two polls for replies, in seconds.
        accepts_node: a function that returns whether a node may participate in the run.

    Attributes:
        nodes: the states of the nodes.
        evaluations: the unfinished evaluations.
    """

    def __init__(
        self,
        grid: Grid,
        server: Server,
        report: RunReport,
        *,
        dispatch: Callable[[int], tuple[str, dict[str, ArrayRecord | ConfigRecord]]],
        bound_evaluation: Callable[[RecordDict], RecordDict],
        largest_reply_bytes: int,
        poll_interval: float,
        accepts_node: Callable[[int], bool],
    ) -> None:
        self._grid = grid
        self._server = server
        self._report = report
        self._issue = dispatch
        self._bound = bound_evaluation
        self._largest_reply_bytes = max(largest_reply_bytes, 1)
        self._poll_interval = poll_interval
        self._accepts_node = accepts_node
        self._last_refresh = -NODE_REFRESH_INTERVAL
        self._last_full_poll = -math.inf
        self._isolation = _Isolation()
        self._inbox: deque[FlowerMessage] = deque()
        self._unpolled: list[str] = []
        self._is_idle = False
        self._scheduled: dict[int, _TrainTask | _EvalTask] = {}
        self._sampler: ClientSampler | None = None
        # The nodes that are connected and do not back off.
        self._available = AvailableClients()
        self._backing_off: set[int] = set()
        self.nodes: Nodes[_TrainTask | _EvalTask] = Nodes()
        self.evaluations: list[EvaluationRound] = []

    def open(self, make_sampler: Callable[[list[int]], ClientSampler]) -> None:
        """Query the connected nodes, and dispatch the first tasks.

        Args:
            make_sampler: a function that returns the client sampler, given the connected nodes.
        """
        here, _ = self.nodes.update_membership(self._connected_nodes())
        self._available = AvailableClients(here)
        self._sampler = make_sampler(here)
        self._dispatch(self._sampler.start(self._available))

    def close(self) -> None:
        """Stop training and drop all tickets."""
        self._sampler = None
        for ticket in self._server.tickets:
            self._server.drop(ticket)

    def start_evaluation(self, evaluation: EvaluationRound, messages: Iterable[FlowerMessage]) -> None:
        """Queue the messages that ask nodes to evaluate the model.

        The method skips nodes that have disconnected, and nodes that already have `MAX_QUEUED_EVALUATIONS` unfinished
        evaluations.

        Args:
            evaluation: the evaluation. The method updates its counts of nodes and missing replies.
            messages: at most one message per node.
        """
        self.evaluations.append(evaluation)
        for message in messages:
            node = message.metadata.dst_node_id
            if node not in self.nodes.present:
                continue
            behind = sum(isinstance(work, _EvalTask) for work in self.nodes.pending_work(node))
            if behind < MAX_QUEUED_EVALUATIONS:
                self.nodes.enqueue(node, _EvalTask(evaluation, message), priority=True)
                evaluation.num_nodes += 1
                evaluation.num_pending += 1

    def finished_evaluations(self) -> list[EvaluationRound]:
        """Return the evaluations that have finished since the last call."""
        now = time.monotonic()
        over = [
            evaluation for evaluation in self.evaluations if not evaluation.num_pending or evaluation.deadline <= now
        ]
        self.evaluations = [evaluation for evaluation in self.evaluations if evaluation not in over]
        return over

    def train_tasks(self) -> list[tuple[int, dict[str, ArrayRecord | ConfigRecord]]]:
        """Return the nodes that receive a training task next, each with the content of its message.

        Call this method only within the callback `configure`, which you pass to `send`. At other times, the result is
        empty.
        """
        return [
            (node, work.records)
            for node, work in self._scheduled.items()
            if isinstance(work, _TrainTask) and work.records is not None
        ]

    def send(self, configure: Callable[[], Iterable[FlowerMessage]]) -> None:
        """Send the next task of each free node.

        A task fails if `configure` returns no message for it, or if Flower does not send the message. The node then
        backs off, which means that it receives no tasks for some time.

        Args:
            configure: a function that returns the messages for the training tasks that `train_tasks` returns.
        """
        due = dict(self.nodes.ready(time.monotonic()))
        for node in [node for node, work in due.items() if self._is_cancelled(work)]:
            self.nodes.discard(node)
            del due[node]
        self._scheduled = due
        messages = {node: _with_fresh_ttl(work.message) for node, work in due.items() if isinstance(work, _EvalTask)}
        if len(messages) < len(due):
            made = {message.metadata.dst_node_id: message for message in configure()}
            messages |= {node: message for node, message in made.items() if isinstance(due.get(node), _TrainTask)}
        timeouts = {node: message.metadata.ttl for node, message in messages.items()}
        for sealed in messages.values():
            # Flower deletes a reply after the time to live of its message. A longer time ensures that Flower keeps a
            # reply that arrives before the deadline until this process fetches it.
            sealed.metadata.ttl += sealed.metadata.ttl + TTL_MARGIN
        sent = set(self._grid.push_messages(messages.values())) if messages else set()
        now = time.monotonic()
        unsent = []
        for node, work in due.items():
            message = messages.get(node)
            if message is None or message.metadata.message_id not in sent:
                self.nodes.discard(node)
                self.nodes.backoff(node, now)
                unsent.append((node, work))
            else:
                # Release the records, because the message already contains them.
                kept = _TrainTask(work.id) if isinstance(work, _TrainTask) else work
                self.nodes.mark_sent(node, message.metadata.message_id, kept, deadline=now + timeouts[node])
        self._scheduled = {}
        # These calls follow after the loop, because they may enqueue new tasks for nodes that are still in `due`.
        for node, work in unsent:
            self._on_work_finished(node, work)

    def find_task(self, message_id: str) -> tuple[int, str] | None:
        """Find the training task of a message that was sent to a node.

        Returns:
            The node, and the id of the ticket. `None` if the task has ended, or if the message requests an evaluation.
        """
        held = self.nodes.lookup(message_id)
        return (held[0], held[1].id) if held is not None and isinstance(held[1], _TrainTask) else None

    def next_reply(self) -> FlowerMessage | None:
        """Fetch the next reply of a node, and return it if it belongs to an unfinished training task.

        The method processes all other replies itself, and returns `None`:

        - It stores the reply to an evaluation together with the other replies to this evaluation.
        - It ignores a reply to a task that has already ended. If this reply contains a trained model, the model counts
          as a rejected update.
        - After a call to `close`, it ignores all replies to training tasks.

        Returns:
            The reply to a training task, with content or an error. The caller must then call `complete`. The result is
                `None` if no reply has arrived or if the method itself has processed the reply.
        """
        if not self._inbox:
            self._poll()
        if not self._inbox:
            return None
        reply = self._inbox.popleft()
        name = reply.metadata.reply_to_message_id
        held = self.nodes.lookup(name)
        if held is None:
            if reply.has_content() and reply.metadata.message_type == MessageType.TRAIN:
                self._report.reject(reply.metadata.src_node_id, TASK_ENDED)
            return None
        work = held[1]
        well = reply.has_content()
        if not well:
            self._report_failure(name, "error", str(reply.error.reason))
        if isinstance(work, _TrainTask) and self._sampler is not None:
            return reply
        if isinstance(work, _EvalTask):
            if well:
                reply.content = self._bound(reply.content)
            work.evaluation.replies.append(reply)
        self.complete(name, succeeded=well)
        return None

    def complete(self, message_id: str, *, succeeded: bool) -> None:
        """Mark the task of a message as completed, and dispatch the tasks that the client sampler selects next.

        A second call for the same message has no effect.

        Args:
            message_id: the identifier of the message.
            succeeded: whether the task succeeded. After a failure, the node backs off.
        """
        if self.nodes.lookup(message_id) is not None:
            node, work = self.nodes.complete(message_id, time.monotonic(), succeeded=succeeded)
            self._on_work_finished(node, work, succeeded)

    def _poll(self) -> None:
        """Fetch the next batch of available replies from Flower, and add them to the inbox."""
        # Several batches form a full poll, which requests the replies to all messages in flight. If the last full poll
        # has found no reply, wait before the next one.
        if not self._unpolled:
            if self._is_idle:
                time.sleep(self._poll_interval)
            self._is_idle = True
            self._refresh_nodes()
            self._last_full_poll = time.monotonic()
            outstanding = self.nodes.outstanding
            self._unpolled = [name for name in outstanding if not self._is_isolated(name)]
            self._unpolled += [name for name in outstanding if self._is_isolated(name)]
        most = max(1, MAX_REPLY_BYTES // self._largest_reply_bytes)
        some = list(takewhile(lambda name: not self._is_isolated(name), self._unpolled[:most])) or self._unpolled[:1]
        self._unpolled = self._unpolled[len(some) :]
        for reply in self._pull_safe(some):
            self._is_idle = False
            self._inbox.append(reply)
            if reply.has_content():
                if (held := self.nodes.lookup(reply.metadata.reply_to_message_id)) is not None:
                    self._isolation.on_readable(held[0])
                records = reply.content.array_records.values()
                self._largest_reply_bytes = max(
                    self._largest_reply_bytes, sum(len(x.data) for record in records for x in record.values())
                )

    def _pull_safe(self, message_ids: list[str]) -> list[FlowerMessage]:
        """Fetch the available replies to some messages, except those that Flower cannot parse."""
        try:
            return list(self._grid.pull_messages(message_ids)) if message_ids else []
        except UNREADABLE_REPLY_ERRORS as error:
            # Flower could not parse one of the replies, or a reply has expired.
            nodes = [held[0] for name in message_ids if (held := self.nodes.lookup(name)) is not None]
            if len(message_ids) == 1:
                self._isolation.on_unreadable(nodes)
                self._report_failure(message_ids[0], "unreadable", f"{type(error).__name__}: {error}")
                self.complete(message_ids[0], succeeded=False)
                return []
            # One unreadable reply makes the whole call fail, and Flower may have deleted all replies of this call.
            # Fetch each reply that is still available in a call of its own.
            known = self._isolation.num_unreadable
            brought = [reply for name in message_ids for reply in self._pull_safe([name])]
            if self._isolation.num_unreadable == known:  # Flower has also deleted the unreadable reply.
                self._isolation.on_unreadable(nodes)
            for name in set(message_ids).difference(reply.metadata.reply_to_message_id for reply in brought):
                self.nodes.shorten_deadline(name, time.monotonic() + LOST_REPLY_TIMEOUT)
            return brought

    def _is_isolated(self, message_id: str) -> bool:
        """Return whether the reply to a message must be fetched in a call of its own."""
        held = self.nodes.lookup(message_id)
        # If the task of the message has ended, its node is unknown and may be isolated.
        return held is None or held[0] in self._isolation

    def _refresh_nodes(self) -> None:
        # A full poll that starts after the deadline finds all replies that arrived before the deadline.
        for name in self.nodes.overdue(self._last_full_poll):
            self._report_failure(name, "timeout", "no reply within the timeout of the task")
            self.complete(name, succeeded=False)
        now = time.monotonic()
        self._add_nodes([node for node in sorted(self._backing_off) if not self.nodes.is_backing_off(node, now)])
        if now - self._last_refresh < NODE_REFRESH_INTERVAL:
            return
        new, left = self.nodes.update_membership(self._connected_nodes())
        for node, works in left.items():
            LOG.info("node %d: disconnected", node)
            self._available.discard(node)
            self._backing_off.discard(node)
            for work in works:
                self._cancel(work)
            if self._sampler is not None:
                count = sum(isinstance(work, _TrainTask) for work in works)
                self._dispatch(self._sampler.on_dropout(node, count, self._available))
        self._add_nodes(new)

    def _add_nodes(self, nodes: list[int]) -> None:
        self._backing_off.difference_update(nodes)
        for node in nodes:
            self._available.add(node)
        for node in nodes:
            if self._sampler is not None:
                self._dispatch(self._sampler.on_join(node, self._available))

    def _report_failure(self, message_id: str, kind: str, reason: str) -> None:
        held = self.nodes.lookup(message_id)
        if held is not None:
            self._report.fail(held[0], kind, reason, in_evaluation=isinstance(held[1], _EvalTask))

    def _connected_nodes(self) -> list[int]:
        self._last_refresh = time.monotonic()
        return [node for node in self._grid.get_node_ids() if self._accepts_node(node)]

    def _dispatch(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            self.nodes.enqueue(node, _TrainTask(*self._issue(node)))

    def _on_work_finished(self, node: int, work: _TrainTask | _EvalTask, succeeded: bool = False) -> None:
        """Process the end of a node's task, and queue tasks for the nodes that the sampler selects."""
        if isinstance(work, _EvalTask) or not succeeded:
            self._cancel(work)
        if not succeeded:
            self._available.discard(node)
            self._backing_off.add(node)
        if isinstance(work, _TrainTask) and self._sampler is not None:
            self._dispatch(self._sampler.on_completion(node, succeeded, self._available))

    def _cancel(self, work: _TrainTask | _EvalTask) -> None:
        if isinstance(work, _EvalTask):
            work.evaluation.num_pending -= 1
        else:
            with suppress(ArgumentError):  # A final rejection has already closed the ticket.
                self._server.drop(work.id)

    def _is_cancelled(self, work: _TrainTask | _EvalTask) -> bool:
        return self._sampler is None if isinstance(work, _TrainTask) else work.evaluation not in self.evaluations


def _with_fresh_ttl(message: FlowerMessage) -> FlowerMessage:
    old = message.metadata
    return FlowerMessage(message.content, old.dst_node_id, old.message_type, ttl=old.ttl, group_id=old.group_id)
