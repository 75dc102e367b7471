"""The message dispatcher of one run: it sends messages to nodes and collects their replies."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import flwr.app
from flwr.serverapp import Grid

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Server, Ticket
from manifoldagg.federated.server.client_sampling import AvailableClients, ClientSampler
from manifoldagg.integrations.flower.metrics import without_arrays
from manifoldagg.integrations.flower.nodes import Nodes

__all__ = ["MAX_REPLY_BYTES", "EvaluationRound", "MessageDispatcher"]

LOG = logging.getLogger("flwr")
MAX_REPLY_BYTES = 2**28
"""Bytes of replies that are held at a time."""
NODE_REFRESH_INTERVAL = 1.0
"""The interval between two queries of the connected nodes, in seconds."""
TTL_MARGIN = 60.0
"""Seconds, beside twice its timeout, that a message is valid for Flower."""
MAX_QUEUED_EVALUATIONS = 2
"""Rounds whose models a node has still to evaluate, at most: one of them in its hands, as a rule."""
LOST_REPLY_TIMEOUT = 10.0
"""The timeout in seconds after which a reply counts as lost and its node receives new work."""
UNREADABLE_REPLY_ERRORS = (AssertionError, AttributeError, EOFError, LookupError, TypeError, ValueError)
"""The exceptions that Flower raises for an invalid reply, as opposed to a lost connection."""
FlowerMessage: TypeAlias = flwr.app.Message


class _TrainTask(NamedTuple):
    """Training, on a ticket, of which only the id is kept when it has gone."""

    id: str
    ticket: Ticket | None = None


@dataclass(eq=False)
class EvaluationRound:
    """The federated evaluation of a round.

    Args:
        round: the round of the evaluated model.
        deadline: the end of the evaluation, whichever nodes have replied.
        num_pending: the number of pending replies.
        replies: that have come, without arrays.
    """

    round: int
    deadline: float
    num_pending: int = 0
    replies: list[FlowerMessage] = field(default_factory=list)


class _EvalTask(NamedTuple):
    evaluation: EvaluationRound
    message: FlowerMessage


class MessageDispatcher:
    """Sends messages to nodes, one at a time for each node, and matches their replies.

    Args:
        grid: of Flower.
        server: issues the tickets.
        largest_reply_bytes: bytes of the largest reply that is expected.
        poll_interval: the interval between two polls for replies, in seconds.
        accepts_node: whether a node may be asked to train.

    Attributes:
        nodes: which of them is free.
        evaluations: that are not over.
    """

    def __init__(
        self,
        grid: Grid,
        server: Server,
        *,
        largest_reply_bytes: int,
        poll_interval: float,
        accepts_node: Callable[[int], bool],
    ) -> None:
        self._grid = grid
        self._server = server
        self._largest_reply_bytes = max(largest_reply_bytes, 1)
        self._poll_interval = poll_interval
        self._accepts_node = accepts_node
        self._last_refresh = -NODE_REFRESH_INTERVAL
        self._last_full_poll = -math.inf
        self._max_reply_bytes = MAX_REPLY_BYTES
        self._inbox: deque[FlowerMessage] = deque()
        self._unpolled: list[str] = []
        self._is_idle = False
        self._scheduled: dict[int, _TrainTask | _EvalTask] = {}
        self._sampler: ClientSampler | None = None
        # Those that may be asked: who is here and does not rest.
        self._available = AvailableClients()
        self._backing_off: set[int] = set()
        self.nodes: Nodes[_TrainTask | _EvalTask] = Nodes()
        self.evaluations: list[EvaluationRound] = []

    def open(self, make_sampler: Callable[[list[int]], ClientSampler]) -> None:
        """Connect to the available nodes and dispatch the first tasks."""
        here, _ = self.nodes.update_membership(self._connected_nodes())
        self._available = AvailableClients(here)
        self._sampler = make_sampler(here)
        self._dispatch(self._sampler.start(self._available))

    def close(self) -> None:
        """Stop all training."""
        self._sampler = None
        for ticket in self._server.tickets:
            self._server.drop(ticket)

    def start_evaluation(self, evaluation: EvaluationRound, messages: Iterable[FlowerMessage]) -> None:
        """Queue an evaluation at each node, except at nodes that are several evaluations behind."""
        self.evaluations.append(evaluation)
        for message in messages:
            node = message.metadata.dst_node_id
            if node not in self.nodes.present:
                continue
            behind = sum(isinstance(work, _EvalTask) for work in self.nodes.pending_work(node))
            if behind < MAX_QUEUED_EVALUATIONS:
                self.nodes.enqueue(node, _EvalTask(evaluation, message), priority=True)
                evaluation.num_pending += 1

    def finished_evaluations(self) -> list[EvaluationRound]:
        """Return the newly finished evaluations, each once."""
        now = time.monotonic()
        over = [
            evaluation for evaluation in self.evaluations if not evaluation.num_pending or evaluation.deadline <= now
        ]
        self.evaluations = [evaluation for evaluation in self.evaluations if evaluation not in over]
        return over

    def train_tasks(self) -> list[tuple[int, Ticket]]:
        """Return the nodes that train next, with their tickets."""
        return [
            (node, work.ticket)
            for node, work in self._scheduled.items()
            if isinstance(work, _TrainTask) and work.ticket
        ]

    def send(self, configure: Callable[[], Iterable[FlowerMessage]]) -> None:
        """Send the due messages; `configure` builds those of `train_tasks`, and a node without one fails."""
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
            # Flower stores a reply that arrives in time while this process is busy.
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
                # What it holds besides is large, and on its way.
                kept = _TrainTask(work.id) if isinstance(work, _TrainTask) else work
                self.nodes.mark_sent(node, message.metadata.message_id, kept, deadline=now + timeouts[node])
        self._scheduled = {}
        # Last of all: others may be asked for them, and what is next for a node is not what was due any more.
        for node, work in unsent:
            self._on_work_finished(node, work)

    def ticket_id(self, message_id: str) -> str | None:
        """Return the id of the ticket of a message, or `None` if its reply is not awaited."""
        held = self.nodes.lookup(message_id)
        return held[1].id if held is not None and isinstance(held[1], _TrainTask) else None

    def next_reply(self) -> FlowerMessage | None:
        """Return the next reply to a task, to be followed by `complete`, or `None`."""
        if not self._inbox:
            self._poll()
        if not self._inbox:
            return None
        reply = self._inbox.popleft()
        name = reply.metadata.reply_to_message_id
        held = self.nodes.lookup(name)
        if held is None:
            return None
        node, work = held
        well = reply.has_content()
        if not well:
            LOG.warning("node %d: %s", node, reply.error.reason)
        if isinstance(work, _TrainTask) and self._sampler is not None:
            return reply
        if isinstance(work, _EvalTask):
            if well:
                reply.content = without_arrays(reply.content)
            work.evaluation.replies.append(reply)
        self.complete(name, succeeded=well)
        return None

    def complete(self, message_id: str, *, succeeded: bool) -> None:
        """Mark a message as answered, successfully or not; once for each message."""
        if self.nodes.lookup(message_id) is not None:
            node, work = self.nodes.complete(message_id, time.monotonic(), succeeded=succeeded)
            self._on_work_finished(node, work, succeeded)

    def _poll(self) -> None:
        """Poll for replies in batches of limited size, and wait between two polls of all messages."""
        if not self._unpolled:
            if self._is_idle:
                time.sleep(self._poll_interval)
            self._is_idle = True
            self._refresh_nodes()
            self._last_full_poll = time.monotonic()
            self._unpolled = self.nodes.outstanding
        most = max(1, self._max_reply_bytes // self._largest_reply_bytes)
        some, self._unpolled = self._unpolled[:most], self._unpolled[most:]
        for reply in self._pull_safe(some):
            self._is_idle = False
            self._inbox.append(reply)
            if reply.has_content():
                records = reply.content.array_records.values()
                self._largest_reply_bytes = max(
                    self._largest_reply_bytes, sum(len(x.data) for record in records for x in record.values())
                )

    def _pull_safe(self, message_ids: list[str]) -> list[FlowerMessage]:
        """Return the available replies to these messages."""
        try:
            return list(self._grid.pull_messages(message_ids)) if message_ids else []
        except UNREADABLE_REPLY_ERRORS as error:
            # One of them is expired, or junk on which Flower stumbles.
            if len(message_ids) > 1:
                # What it has handed out with it may be lost: these nodes get new work soon. From now on one by one.
                self._max_reply_bytes = 1
                brought = [reply for name in message_ids for reply in self._pull_safe([name])]
                for name in set(message_ids).difference(reply.metadata.reply_to_message_id for reply in brought):
                    self.nodes.shorten_deadline(name, time.monotonic() + LOST_REPLY_TIMEOUT)
                return brought
            LOG.warning("a reply cannot be read: %s", error)
            self.complete(message_ids[0], succeeded=False)
            return []

    def _refresh_nodes(self) -> None:
        """See who has come, gone, or kept its message for too long."""
        # Replies that arrived before the deadline are found by a full poll that starts after it.
        for name in self.nodes.overdue(self._last_full_poll):
            held = self.nodes.lookup(name)
            LOG.warning("node %d: has not replied in time", held[0] if held else 0)
            self.complete(name, succeeded=False)
        now = time.monotonic()
        self._add_nodes([node for node in sorted(self._backing_off) if not self.nodes.is_backing_off(node, now)])
        if now - self._last_refresh < NODE_REFRESH_INTERVAL:
            return
        new, left = self.nodes.update_membership(self._connected_nodes())
        for node, works in left.items():
            LOG.info("node %d: has left", node)
            self._available.discard(node)
            self._backing_off.discard(node)
            for work in works:
                self._cancel(work)
            if self._sampler is not None:
                count = sum(isinstance(work, _TrainTask) for work in works)
                self._dispatch(self._sampler.on_dropout(node, count, self._available))
        self._add_nodes(new)

    def _add_nodes(self, nodes: list[int]) -> None:
        """These may be asked from now on."""
        self._backing_off.difference_update(nodes)
        for node in nodes:
            self._available.add(node)
        for node in nodes:
            if self._sampler is not None:
                self._dispatch(self._sampler.on_join(node, self._available))

    def _connected_nodes(self) -> list[int]:
        self._last_refresh = time.monotonic()
        return [node for node in self._grid.get_node_ids() if self._accepts_node(node)]

    def _dispatch(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            ticket = self._server.dispatch(node)
            self.nodes.enqueue(node, _TrainTask(ticket.id, ticket))

    def _on_work_finished(self, node: int, work: _TrainTask | _EvalTask, succeeded: bool = False) -> None:
        """A node is done with its work, and somebody else may be asked."""
        if isinstance(work, _EvalTask) or not succeeded:
            self._cancel(work)
        if not succeeded:
            self._available.discard(node)
            self._backing_off.add(node)
        if isinstance(work, _TrainTask) and self._sampler is not None:
            self._dispatch(self._sampler.on_completion(node, succeeded, self._available))

    def _cancel(self, work: _TrainTask | _EvalTask) -> None:
        """Nobody waits for this any more."""
        if isinstance(work, _EvalTask):
            work.evaluation.num_pending -= 1
        else:
            with suppress(ArgumentError):  # a refusal may have ended it
                self._server.drop(work.id)

    def _is_cancelled(self, work: _TrainTask | _EvalTask) -> bool:
        """Whether what waits for a node is not to be done any more."""
        return self._sampler is None if isinstance(work, _TrainTask) else work.evaluation not in self.evaluations


def _with_fresh_ttl(message: FlowerMessage) -> FlowerMessage:
    """The same message, whose time begins now."""
    told = message.metadata
    return FlowerMessage(message.content, told.dst_node_id, told.message_type, ttl=told.ttl, group_id=told.group_id)
