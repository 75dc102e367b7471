"""One run: a server, its clients and a scheduler in virtual time."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from manifoldagg.errors import ManifoldAggError, check_count
from manifoldagg.federated import Message, Payload, Rule, Server, Trainer
from manifoldagg.federated.contract import Memory
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.simulation.fairness import gini, theil
from manifoldagg.simulation.federation import Federation
from manifoldagg.simulation.priority import PriorityScheduler

__all__ = ["Event", "Exam", "Method", "Run", "run"]

SCHEDULE = 1
"""The stream of random numbers of the scheduler, under the seed of the federation."""


@dataclass(frozen=True)
class Method:
    """A rule and the trainer that feeds it, under the name that a reader knows it by."""

    name: str
    rule: Rule
    trainer: Trainer


@dataclass(frozen=True)
class Run:
    """What happened: accuracies of the server's model before round 1 and after each, and what was seen on the way.

    Attributes:
        accuracy: (rounds + 1), on the held-out samples of all clients together.
        clients: (rounds), who answered.
        staleness: (rounds), in versions.
        client_accuracy: of the best model, one for each client with held-out samples.
        refused: updates that the server refused, or whose training diverged.
        seconds: of wall-clock time.
    """

    accuracy: list[float]
    clients: list[int]
    staleness: list[int]
    client_accuracy: list[float]
    refused: int
    seconds: float = field(compare=False)

    @property
    def gini(self) -> float:
        """Of the clients' accuracies."""
        return gini(self.client_accuracy)

    @property
    def theil(self) -> float:
        """Of the clients' accuracies."""
        return theil(self.client_accuracy)

    def rounds_to(self, target: float) -> int | None:
        """After how many rounds the accuracy was first at least `target`; `None` if never."""
        return next((i for i, value in enumerate(self.accuracy) if value >= target), None)


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
    watch: Callable[[Event], None] | None = None,
    progress: Callable[[], None] | None = None,
) -> Run:
    """Train asynchronously in virtual time until the server has answered `rounds` tasks.

    Every client is dispatched at time 0. The order of events depends on the federation alone: a client's work
    is its number of minibatches, whatever a method makes of them.

    Args:
        federation: who holds what.
        method: a rule and its trainer.
        rounds: how many updates to take.
        watch: called with each answered task.
        progress: called once a round.

    Raises:
        ArgumentError: if `rounds` is not positive, or no client has samples.
    """
    check_count("rounds", rounds)
    started = time.perf_counter()
    model = federation.model()
    space = ParameterSpace.of(model)
    loss = space.loss(model, nn.functional.cross_entropy)
    sizes = {client: len(federation.train[client]) for client in federation.scheduled}
    server = Server(space, method.rule, space.point(model), weights=sizes)
    scheduler: PriorityScheduler[int] = PriorityScheduler(
        len(sizes), np.random.default_rng([federation.seed, SCHEDULE])
    )
    exam = Exam(federation, space)
    memories: dict[int, Memory] = {}

    tickets = {}
    dispatched = dict.fromkeys(sizes, 0)
    for client in sizes:
        tickets[client] = server.dispatch(client)
        scheduler.dispatch(client, len(federation.batches(client, 0)))
    graded = exam.grade(server.model)
    best = graded
    accuracy = [float(graded.mean())]
    who = []
    staleness = []
    refused = 0
    for round_ in range(1, rounds + 1):
        client = scheduler.next().client
        ticket = tickets.pop(client)
        batches = federation.batches(client, dispatched[client])
        generator = federation.generator(client, dispatched[client])
        late = server.version - ticket.version
        try:
            payload = method.trainer.train(
                space, ticket.message, loss, batches, memories.get(client), generator=generator
            )
        except ManifoldAggError:
            accepted = False
        else:
            memories[client] = payload.memory
            if watch is not None:
                watch(Event(round_, client, ticket.message, payload))
            accepted = server.receive(ticket.id, payload).accepted
        if not accepted:
            server.drop(ticket.id)
            refused += 1
        graded = exam.grade(server.model) if accepted else graded
        best = graded if graded.mean() > best.mean() else best
        accuracy.append(float(graded.mean()))
        who.append(client)
        staleness.append(late)
        tickets[client] = server.dispatch(client)
        dispatched[client] += 1
        scheduler.dispatch(client, len(batches))
        if progress is not None:
            progress()
    return Run(accuracy, who, staleness, exam.by_client(best), refused, time.perf_counter() - started)


class Exam:
    """Which held-out samples a model gets right."""

    def __init__(self, federation: Federation, space: ParameterSpace) -> None:
        self._held_out = [part for part in federation.held_out if len(part)]
        index = torch.from_numpy(np.concatenate(self._held_out))
        self._inputs = federation.task.inputs[index]
        self._labels = federation.task.labels[index]
        self._space = space
        self._model = federation.model().eval()

    def grade(self, point: Tensor) -> np.ndarray:
        """(held-out samples,) of booleans."""
        with torch.no_grad():
            guess: Tensor = self._space.load(self._model, point)(self._inputs).argmax(1)
        graded: np.ndarray = (guess == self._labels).numpy()
        return graded

    def by_client(self, graded: np.ndarray) -> list[float]:
        """The mean for each client that has held-out samples."""
        edges = np.cumsum([len(part) for part in self._held_out])[:-1]
        return [float(part.mean()) for part in np.split(graded, edges)]
