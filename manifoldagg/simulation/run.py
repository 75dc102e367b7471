"""One run: a server, its clients and a scheduler in virtual time."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from manifoldagg.errors import ArgumentError, ManifoldAggError, check_count, check_number
from manifoldagg.federated import Message, Payload, Rule, Server, Trainer
from manifoldagg.federated.contract import Memory
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.simulation.fairness import gini, theil
from manifoldagg.simulation.partitions import dirichlet_partition
from manifoldagg.simulation.priority import PriorityScheduler
from manifoldagg.simulation.tasks import Batches, Task, seeded_model

__all__ = ["Event", "Exam", "Federation", "Method", "Run", "run"]

SPLIT, SCHEDULE, TRAINING = range(3)
"""Independent streams of random numbers under one seed."""


@dataclass(frozen=True)
class Method:
    """A rule and the trainer that feeds it, under the name that a reader knows it by."""

    name: str
    rule: Rule
    trainer: Trainer


@dataclass(frozen=True)
class Federation:
    """Who holds which samples, for training and held out.

    Attributes:
        task: what is learned.
        train: one array of sample positions a client.
        held_out: likewise, disjoint from `train`; together the test set.
        batch: samples a minibatch.
        seed: everything random in a run follows from it.
    """

    task: Task
    train: list[np.ndarray]
    held_out: list[np.ndarray]
    batch: int
    seed: int

    @staticmethod
    def split(
        task: Task, clients: int, *, concentration: float, seed: int, holdout: float = 0.2, batch: int = 16
    ) -> "Federation":
        """Split a task over clients by label, and hold out a part of every client's samples.

        Raises:
            ArgumentError: naming the argument that does not fit.
        """
        check_number("holdout", holdout, above=0, at_most=0.9)
        check_count("batch", batch)
        check_count("seed", seed, at_least=0)
        generator = np.random.default_rng([seed, SPLIT])
        parts = dirichlet_partition(task.labels.numpy(), clients, concentration, generator)
        shuffled = [generator.permutation(part) for part in parts]
        cuts = [round(holdout * len(part)) for part in shuffled]
        if not any(cuts):
            raise ArgumentError(
                f"clients: {clients} clients have too few samples each to hold out a part of {holdout:g}"
            )
        return Federation(
            task,
            train=[np.sort(part[cut:]) for part, cut in zip(shuffled, cuts, strict=True)],
            held_out=[np.sort(part[:cut]) for part, cut in zip(shuffled, cuts, strict=True)],
            batch=batch,
            seed=seed,
        )

    @property
    def scheduled(self) -> list[int]:
        """The clients that have something to train on; the others never take part."""
        return [client for client, part in enumerate(self.train) if len(part)]

    def batches(self, client: int, round_: int) -> Batches:
        """A client's minibatches in one round; their order depends on seed, client and round alone."""
        part = torch.from_numpy(self.train[client])
        generator = np.random.default_rng([self.seed, TRAINING, round_, client])
        return Batches(self.task.inputs[part], self.task.labels[part], self.batch, generator)

    def model(self) -> nn.Module:
        """The initial model, the same for every method."""
        return seeded_model(self.task.model, self.seed)


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
        batches = federation.batches(client, round_)
        seed = np.random.SeedSequence([federation.seed, TRAINING, round_]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(seed >> np.uint64(1)))
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
