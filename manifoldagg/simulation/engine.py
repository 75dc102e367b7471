"""A run under way: what each event of its course does to it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from manifoldagg.errors import DivergenceError
from manifoldagg.federated import Message, Payload, Server
from manifoldagg.simulation.cost import Evaluation, Spent
from manifoldagg.simulation.evaluation import Marks
from manifoldagg.simulation.event_loop import Answer, Ask, Course, Lost
from manifoldagg.simulation.executors.task_runner import Crew
from manifoldagg.simulation.federated_dataset import Key
from manifoldagg.simulation.in_flight import Desk
from manifoldagg.simulation.lookahead import Foresight
from manifoldagg.simulation.snapshot import Ledger, Stand
from manifoldagg.simulation.trace import Record

__all__ = ["Event", "UnderWay"]


@dataclass(frozen=True)
class Event:
    """One answered task, for who watches a run."""

    round: int
    client: int
    message: Message
    payload: Payload


@dataclass
class UnderWay:
    """A run, between two events.

    Attributes:
        about: what it follows from.
        course: who is asked and who answers.
        work: what a client is given, if it is asked now.
        foresight: what is told all that the course is told.
        server: that takes the updates.
        desk: the tickets that are out.
        crew: who trains.
        marks: the evaluations.
        ledger: what happened.
        spent: so far.
        started: when, in seconds of the wall clock, as if it had never been interrupted.
        watch: called with each answered task.
    """

    about: Mapping[str, Any]
    course: Course
    work: Callable[[int], float]
    foresight: Foresight
    server: Server
    desk: Desk
    crew: Crew
    marks: Marks
    ledger: Ledger
    spent: Spent
    started: float
    watch: Callable[[Event], None] | None

    @property
    def seconds(self) -> float:
        """Of wall-clock time so far, evaluation apart."""
        return time.perf_counter() - self.started - self.marks.seconds

    def turn(self) -> bool:
        """The next event, and whether it was an answer."""
        event = self.course.next()
        self.ledger.events += 1
        if isinstance(event, Ask):
            self._ask(event.client)
        elif isinstance(event, Lost):
            self._lose(event.keys)
        else:
            self._settle(event)
        return isinstance(event, Answer)

    def evaluated(self) -> Evaluation:
        """A row of the log: what the model is worth now, and the staleness of what came since the last one."""
        seen = self.marks.rows[-1].round
        return self.marks.take(self.server, self.spent, [task.staleness for task in self.ledger.trace[seen:]])

    def stand(self) -> Stand:
        """All that it needs to go on."""
        return Stand(
            about=self.about,
            server=self.server.snapshot(),
            out=self.desk.out,
            memories=self.crew.memories,
            spent=self.spent,
            ledger=self.ledger,
            events=self.ledger.events,
            asked=len(self.ledger.work),
            marks=self.marks,
            evaluated=len(self.marks.rows),
            by_client=self.marks.by_client,
            seconds=self.seconds,
            evaluation_seconds=self.marks.seconds,
        )

    def _ask(self, client: int) -> None:
        ticket = self.desk.dispatch(client)
        self.spent = replace(self.spent, bytes_down=self.spent.bytes_down + ticket.message.nbytes)
        units = self.work(client)
        key = self.course.give(client, units)
        self.ledger.work.append(units)
        self.foresight.gave(key, units)
        self.desk.give(key, ticket)
        self.crew.give(key, ticket.message)

    def _lose(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.server.drop(self.desk.take(key))
        self.foresight.lost(keys)
        self.crew.lose(keys)

    def _settle(self, event: Answer) -> None:
        ticket = self.desk.take(event.key)
        trace = self.ledger.trace
        trace.append(Record.of(event.done, self.server.version - ticket.version))
        sent = 0
        try:
            payload = self.crew.result(event.key)
        except DivergenceError:
            accepted = False
        else:
            sent = payload.nbytes
            if self.watch is not None:
                self.watch(Event(len(trace), event.key.client, ticket.message, payload))
            accepted = self.server.receive(ticket, payload).accepted
        if not accepted:
            self.server.drop(ticket)
        self.ledger.accepted.append(accepted)
        self.spent = replace(
            self.spent,
            round=len(trace),
            time=event.done.time,
            gradients=self.spent.gradients + self.crew.gradients,
            bytes_up=self.spent.bytes_up + sent,
            refused=self.spent.refused + (not accepted),
        )
        self.course.settle(accepted)
        self.foresight.settled(event.key, accepted)
