"""One run: a course that says who is asked and who answers, clients that train, and a server, in virtual time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from manifoldagg.errors import ArgumentError, DivergenceError, check_choice, check_count
from manifoldagg.federated import Message, Payload, Rule, Server, Ticket, Trainer
from manifoldagg.federated.contract import check_rule
from manifoldagg.simulation.clocks.trace import Record
from manifoldagg.simulation.course import Ask, Lost
from manifoldagg.simulation.exam import Marks
from manifoldagg.simulation.fairness import gini, theil
from manifoldagg.simulation.federation import Federation, Key
from manifoldagg.simulation.foresight import Foresight
from manifoldagg.simulation.log import Evaluation, Spent, reached
from manifoldagg.simulation.scenario import Delays, Participations, Schedulers, course_of
from manifoldagg.simulation.workers.crew import Crew
from manifoldagg.simulation.workers.pool import Executors

__all__ = ["Event", "Method", "Run", "run"]

WORKS = ("data", "dispatched")


@dataclass(frozen=True)
class Method:
    """A rule and the trainer that feeds it, under the name that a reader knows it by.

    Attributes:
        name: distinct among the methods of a comparison.
        rule: or a function that makes one for the clients who take part, such as one with a routing of them.
        trainer: what they do.
        rate: where the rule has its global rate, such as `"rate"` or `"rule.rate"`, for who searches a better one;
            `None` where it is to stay as it is.
    """

    name: str
    rule: Rule | Callable[[Sequence[int]], Rule]
    trainer: Trainer
    rate: str | None = "rate"

    def bound(self, clients: Sequence[int]) -> "Method":
        """The method for these clients, its rule made.

        Raises:
            ArgumentError: if the rule or the trainer is none.
        """
        made: Any = self.rule
        if callable(made) and not hasattr(made, "step"):
            made = made(clients)
        if isinstance(self.trainer, type) or not isinstance(self.trainer, Trainer):
            raise ArgumentError(f"trainer: expected an instance with `train`, got {self.trainer!r}")
        return replace(self, rule=check_rule(made))


@dataclass(frozen=True)
class Run:
    """What happened: what the server's model was worth, and who trained when.

    Attributes:
        evaluations: the log, in order; the first is before round 1, the last after all.
        trace: (rounds), the task of each answer; staleness as the server counts it.
        client_accuracy: of the best model that was evaluated, one for each client with held-out samples.
        seconds: of wall-clock time, evaluation apart.
        evaluation_seconds: likewise, of evaluation.
    """

    evaluations: list[Evaluation]
    trace: list[Record[int]]
    client_accuracy: list[float]
    seconds: float = field(compare=False)
    evaluation_seconds: float = field(compare=False)

    @property
    def accuracy(self) -> list[float]:
        """Of each evaluation."""
        return [row.accuracy for row in self.evaluations]

    @property
    def evaluated(self) -> list[int]:
        """After how many rounds each evaluation was."""
        return [row.round for row in self.evaluations]

    @property
    def clients(self) -> list[int]:
        """(rounds), who answered."""
        return [task.client for task in self.trace]

    @property
    def staleness(self) -> list[int]:
        """(rounds), in versions."""
        return [task.staleness for task in self.trace]

    @property
    def times(self) -> list[float]:
        """(rounds), of the answers, in virtual seconds."""
        return [task.finished for task in self.trace]

    @property
    def refused(self) -> int:
        """Updates that the server refused, or whose training diverged."""
        return self.evaluations[-1].refused

    @property
    def gini(self) -> float:
        """Of the clients' accuracies."""
        return gini(self.client_accuracy)

    @property
    def theil(self) -> float:
        """Of the clients' accuracies."""
        return theil(self.client_accuracy)

    def rounds_to(self, target: float) -> int | None:
        """After how many rounds an accuracy of at least `target` was first seen; `None` if never."""
        row = reached(self.evaluations, target)
        return None if row is None else row.round


@dataclass(frozen=True)
class Event:
    """One answered task, for who watches a run."""

    round: int
    client: int
    message: Message
    payload: Payload


def run(
    federation: Federation,
    method: Method,
    *,
    rounds: int,
    scheduler: Schedulers = None,
    delays: Delays = None,
    participation: Participations = None,
    work: str = "data",
    tasks: int | None = None,
    every: int = 1,
    executor: Executors = None,
    watch: Callable[[Event], None] | None = None,
    progress: Callable[[], None] | None = None,
) -> Run:
    """Train in virtual time until the server has had `rounds` answers.

    Who is asked, and when, is what the rule declares: everybody at once, who has answered again; k clients, and the
    next k when these have answered; or as the rule draws or routes them.

    Args:
        federation: who holds what.
        method: a rule and its trainer.
        rounds: how many answers, accepted or not.
        scheduler: who finishes when: one that this run uses up, or a function of clients and a generator that makes
            one; a [`PriorityScheduler`][manifoldagg.simulation.PriorityScheduler] where neither it nor `delays` is
            given.
        delays: of [`IndependentClients`][manifoldagg.simulation.IndependentClients] in place of a scheduler: one for
            all, a mapping from clients, the path of measurements for
            [`Empirical.from_csv`][manifoldagg.simulation.Empirical], of which each client gets those of some device, or
            a function of clients and a generator.
        participation: changes of who takes part, or a function of clients and a generator that makes them. Those of
            clients without samples do not count.
        work: of a task: `"data"`, the client's minibatches, whatever a method makes of them, so that all methods see
            one order of events; or `"dispatched"`, the steps of its trainer, where that tells them.
        tasks: how many are under way at a time, as many as clients by default; for a rule that draws (`DeFedAvg`), how
            many are asked at first. A rule that waits for a cohort takes none.
        every: evaluate the model after so many rounds; before the first and after the last in any case.
        executor: what trains ahead, for the same results: an executor of any kind, or a function that makes one such as
            [`processes(2)`][manifoldagg.simulation.processes]. `None`: every task is trained here, when it is answered.
        watch: called with each answered task.
        progress: called once a round.

    Raises:
        ArgumentError: naming the argument that does not fit; if no client has samples; if nobody has a task any more
            before the rounds are over; and what trainers raise but for divergence.

    Example:
        >>> from manifoldagg.federated import rules, trainers
        >>> from manifoldagg.simulation import iid_partition, task
        >>> federation = Federation.split(task("digits"), 6, partition=iid_partition, seed=0)
        >>> method = Method("FedAvg", rules.FedAvg(cohort=3), trainers.Local(epochs=1))
        >>> found = run(federation, method, rounds=6, every=3)
        >>> found.evaluated, found.staleness
        ([0, 3, 6], [0, 0, 0, 0, 0, 0])
    """
    check_count("rounds", rounds)
    check_count("every", every)
    check_choice("work", work, WORKS)
    for name, told in (("watch", watch), ("progress", progress)):
        if told is not None and not callable(told):
            raise ArgumentError(f"{name}: expected a function, got {told!r}")
    if not isinstance(method, Method):
        raise ArgumentError(f"method: expected a Method, got {method!r}")
    clients = federation.scheduled
    if not clients:
        raise ArgumentError("federation: expected clients with samples, got none")
    if not any(map(len, federation.held_out)):
        raise ArgumentError("federation: expected clients with held-out samples, got none")
    started = time.perf_counter()
    method = method.bound(clients)
    rule: Any = method.rule
    course = course_of(federation, rule, scheduler=scheduler, delays=delays, participation=participation, tasks=tasks)
    sizes = {client: len(federation.train[client]) for client in clients}
    server = Server.of(federation.model(), rule, weights=sizes)
    marks = Marks(federation)
    desk = _Desk(server)
    steps = getattr(method.trainer, "steps_of", None) if work == "dispatched" else None

    def asked(client: int) -> float:
        length = federation.length(client)
        return float(length if steps is None else steps(desk.latest, length))

    foresight = Foresight(course, rounds, asked)
    trace: list[Record[int]] = []
    spent = Spent()
    marks.take(server, spent)
    with Crew(federation, method.trainer, executor, foresight) as crew:
        while spent.round < rounds:
            event = course.next()
            if isinstance(event, Ask):
                ticket = desk.dispatch(event.client)
                spent = replace(spent, bytes_down=spent.bytes_down + ticket.message.nbytes)
                units = asked(event.client)
                key = course.give(event.client, units)
                foresight.gave(key, units)
                desk.out[key] = ticket
                crew.give(key, ticket.message)
            elif isinstance(event, Lost):
                for key in event.keys:
                    server.drop(desk.out.pop(key))
                foresight.lost(event.keys)
                crew.lose(event.keys)
            else:
                key = event.key
                ticket = desk.out.pop(key)
                trace.append(Record.of(event.done, server.version - ticket.version))
                sent = 0
                try:
                    payload = crew.result(key)
                except DivergenceError:
                    accepted = False
                else:
                    sent = payload.nbytes
                    if watch is not None:
                        watch(Event(len(trace), key.client, ticket.message, payload))
                    accepted = server.receive(ticket, payload).accepted
                if not accepted:
                    server.drop(ticket)
                spent = replace(
                    spent,
                    round=len(trace),
                    time=event.done.time,
                    gradients=spent.gradients + crew.gradients,
                    bytes_up=spent.bytes_up + sent,
                    refused=spent.refused + (not accepted),
                )
                course.settle(accepted)
                foresight.settled(key, accepted)
                if spent.round % every == 0 or spent.round == rounds:
                    seen = marks.rows[-1].round
                    marks.take(server, spent, [task.staleness for task in trace[seen:]])
                if progress is not None:
                    progress()
    seconds = time.perf_counter() - started - marks.seconds
    return Run(marks.rows, trace, marks.by_client, seconds, marks.seconds)


class _Desk:
    """Where tickets are issued: those of one version share the tensors of their messages that are equal.

    Attributes:
        out: the tickets of the tasks that are under way.
        latest: the message of the last one.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._version = -1
        self._shared: dict[str, Tensor] = {}
        self.out: dict[Key, Ticket] = {}
        self.latest: Message

    def dispatch(self, client: int) -> Ticket:
        ticket = self._server.dispatch(client)
        if ticket.version != self._version:
            self._version = ticket.version
            self._shared = {}
        sent = ticket.message
        self.latest = replace(
            sent,
            start=self._share("start", sent.start),
            tensors={name: self._share(f"tensors: {name}", tensor) for name, tensor in sent.tensors.items()},
            buffers={name: self._share(f"buffers: {name}", tensor) for name, tensor in sent.buffers.items()},
        )
        return replace(ticket, message=self.latest)

    def _share(self, name: str, tensor: Tensor) -> Tensor:
        first = self._shared.setdefault(name, tensor)
        return first if torch.equal(first, tensor) else tensor
