"""A reproducible asynchronous run of a rule, which can use `step`, `Server` or `aggregate`."""

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manifoldagg.federated import (
    Message,
    Outcome,
    Payload,
    Receipt,
    Rule,
    Server,
    Ticket,
    Update,
    UpdateInfo,
    aggregate,
)
from manifoldagg.federated.types import ClientState, State, accepts_tensor_lists, extra_fields
from manifoldagg.manifolds import Manifold, ParameterSpace

__all__ = ["MakePayload", "RuleCase"]

MakePayload = Callable[[Message, torch.Generator], Payload]
"""A function that returns the payload of a client for a message of the rule."""
DISPLACEMENT = 0.1
"""The standard deviation of an entry of a client's displacement."""
MAX_SAMPLES = 9
"""The largest sample count of a generated payload."""


class ScheduledUpdate(NamedTuple):
    """One entry of the schedule of a run: which task returns an update, and which client starts the next task.

    Attributes:
        place: the position of the completed task in the list of tasks in flight.
        next_client: the client that starts a task after this update.
    """

    place: int
    next_client: Hashable


class Record(NamedTuple):
    """The record of one update that a server received from a client.

    Attributes:
        client: the client that returned the update.
        start_index: the number of updates that the server had received when it dispatched the task of the client.
        message: the message that the server sent to the client.
        payload: a copy of the payload that the client returned.
        receipt: the receipt that the server issued for the payload.
        model: the model (P,) of the server after the update.
    """

    client: Hashable
    start_index: int
    message: Message
    payload: Payload
    receipt: Receipt
    model: Tensor


@dataclass(frozen=True)
class RuleCase:
    """A reproducible asynchronous run of an aggregation rule, which `check_rule` uses as a test case.

    The seed determines the start model, the payloads (the values that the clients return), and the order in which the
    clients finish their tasks. The number of tasks in flight always equals the number of clients.

    The same run can be executed in three ways:

    - by direct calls of the rule (`direct_run`)
    - by a `Server` (`server_run`)
    - by calls of `aggregate` (`aggregate_run`)

    Args:
        rule: the rule.
        space: the space of the models.
        seed: the seed of all random draws.
        num_updates: the number of updates of the run.
        num_points: the number of control points of an update.
        clients: the names of the clients.
        make_payload: a function of the message and a random number generator that returns the payload of a client. By
            default, the payloads are random.
        by_tensor: whether the results of the rule may depend on the split of the model into tensors.

    Attributes:
        start: the start model (P,).
        schedule: the schedule of the updates.
    """

    rule: Rule
    space: Manifold
    seed: int = 0
    num_updates: int = 12
    num_points: int = 1
    clients: tuple[Hashable, ...] = ("client-1", "client-2", "client-3")
    make_payload: MakePayload | None = None
    by_tensor: bool = False
    start: Tensor = field(init=False, repr=False)
    schedule: tuple[ScheduledUpdate, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        dtype = self.space.dtype if isinstance(self.space, ParameterSpace) else torch.float64
        generator = self.generator(0)
        object.__setattr__(self, "start", self.space.random_point(generator=generator, dtype=dtype))
        draws = torch.randint(len(self.clients), (self.num_updates, 2), generator=generator).tolist()
        object.__setattr__(self, "schedule", tuple(ScheduledUpdate(place, self.clients[i]) for place, i in draws))

    def generator(self, index: int) -> torch.Generator:
        """Return a new random number generator with a seed that depends on the seed of the run and on `index`.

        In the simulated run, the generator with the index 0 draws the start model and the order of the updates. The
        generator with the index i + 1 draws the model and the other values that a client returns in update i.
        """
        return torch.Generator().manual_seed(2**20 * self.seed + index)

    @cached_property
    def sample_counts(self) -> dict[Hashable, int]:
        """The number of training samples of each client. The sum of these numbers is a power of 2.

        The weight of a client is its number of samples divided by the sum. For a power of 2, this division is exact.
        A mean of models is therefore bitwise the same, whether it is weighted by the numbers of samples or by the
        weights. This allows bitwise comparisons of `Server`, which passes both to a rule, with `aggregate`, which
        passes only the weights.
        """
        counts = list(range(1, len(self.clients)))
        total = 1
        while total <= sum(counts):
            total *= 2
        return dict(zip(self.clients, [*counts, total - sum(counts)], strict=True))

    @cached_property
    def requires_models_only(self) -> bool:
        return extra_fields(self.rule) == ({}, ())

    def payload(self, message: Message, index: int) -> Payload:
        """Return the payload of the update with the given index, in newly allocated memory."""
        generator = self.generator(index + 1)
        if self.make_payload is not None:
            return self.make_payload(message, generator)
        start = message.start
        tensors, numbers = extra_fields(self.rule)
        points = torch.stack([self._near(start, generator) for _ in range(self.num_points)])
        samples = int(torch.randint(1, MAX_SAMPLES + 1, (), generator=generator))
        shapes = {name: ([] if count is None else [count]) + [*start.shape] for name, count in tensors.items()}
        further = {name: _normal(shape, start, generator) for name, shape in shapes.items()}
        return Payload(points, samples, further, {name: message.numbers.get(name, 1.0) for name in numbers})

    def _near(self, start: Tensor, generator: torch.Generator) -> Tensor:
        if self.space.flat:
            return start + DISPLACEMENT * _normal([*start.shape], start, generator)
        return self.space.exp(start, DISPLACEMENT * self.space.random_tangent(start, generator))

    def direct_run(self) -> "DirectRun":
        """Start a run that calls the methods of the rule, and return it before its first update."""
        return DirectRun(self)

    def server_run(self, space: Manifold | None = None) -> "ServerRun":
        """Start a run of a new server, and return it before its first update.

        Args:
            space: the space of the server. The default is the space of the case.
        """
        server = Server(space or self.space, self.rule, self.start, weights=self.sample_counts)
        run = ServerRun(self, server)
        for client in self.clients:
            run.dispatch(client)
        return run

    def aggregate_run(self, space: ParameterSpace, records: list[Record]) -> "AggregateRun":
        """Start a run of `aggregate` on state dicts, and return it before its first update.

        Args:
            space: the space that defines the state dicts.
            records: the updates of a server run, which the run repeats.
        """
        return AggregateRun(self, space, records)


class DirectRun:
    """A run that calls the methods of the rule without a server."""

    def __init__(self, case: RuleCase) -> None:
        self.case = case
        self.state: State = case.rule.init(case.space, case.start.clone())
        self.current = case.start.clone()
        self.version = 0
        self.count = 0
        self.client_states: dict[Hashable, ClientState] = {}
        self.in_flight: list[tuple[Hashable, int, Tensor, Message]] = []
        for client in case.clients:
            self._dispatch(client)

    def message(self, client: Hashable) -> Message:
        return self.case.rule.message(self.case.space, self.state, self.current, self.client_states.get(client))

    def _dispatch(self, client: Hashable) -> None:
        # The rule receives copies, so that the run does not change if `message` writes to its inputs.
        inputs = copy.deepcopy((self.state, self.current, self.client_states.get(client)))
        sent = self.case.rule.message(self.case.space, *inputs)
        self.in_flight.append((client, self.version, self.current, replace(sent, start=sent.start.clone())))

    def next_update(self) -> Update:
        """Return the next update. Its base, current model and points are copies."""
        case = self.case
        client, version, base, message = self.in_flight.pop(case.schedule[self.count].place)
        payload = case.payload(message, self.count)
        counts = case.sample_counts
        rows = accepts_tensor_lists(case.rule, case.space)
        return Update(
            client=client,
            base=base.clone(),
            current=self.current.clone(),
            points=tuple(payload.points) if rows else payload.points,
            staleness=self.version - version,
            weight=counts[client] / sum(counts.values()),
            samples=payload.samples,
            tensors=payload.tensors,
            numbers=payload.numbers,
            client_state=self.client_states.get(client),
            share=float(counts[client]),
        )

    def apply(self, update: Update, state: State, outcome: Outcome) -> None:
        """Store the result of a step, and dispatch the next task."""
        self.state = state
        self.client_states[update.client] = outcome.client_state
        if outcome.model is not None:
            model: Any = outcome.model
            self.current = model.clone()
            self.version += 1
        next_client = self.case.schedule[self.count].next_client
        self.count += 1
        self._dispatch(next_client)


class ServerRun:
    """A simulated asynchronous run of a `Server` and its clients.

    The method `resumed` continues the run with another server, for example with one that was loaded from a file.
    """

    def __init__(self, case: RuleCase, server: Server) -> None:
        self.case = case
        self.server = server
        self.records: list[Record] = []
        self.in_flight: list[tuple[Hashable, int, Ticket]] = []

    def dispatch(self, client: Hashable) -> None:
        self.in_flight.append((client, len(self.records), self.server.dispatch(client)))

    def resumed(self, server: Server) -> "ServerRun":
        """Return a copy of the run that continues with a resumed server."""
        other = ServerRun(self.case, server)
        other.records = [*self.records]
        other.in_flight = [*self.in_flight]
        return other

    def next_task(self) -> tuple[Ticket, Payload]:
        """Return a ticket (the permission to return one update), and the update (payload) that belongs to it.

        The update is the next one of this run. The method does not send it to the server.
        """
        count = len(self.records)
        _, _, ticket = self.in_flight[self.case.schedule[count].place]
        return ticket, self.case.payload(ticket.message, count)

    def advance(self, num_updates: int) -> "ServerRun":
        """Send the next updates to the server, and return the run.

        Raises:
            ArgumentError: if the server rejects an update. The error message contains the reason.
        """
        for _ in range(num_updates):
            ticket, payload = self.next_task()
            turn = self.case.schedule[len(self.records)]
            original = replace(payload, points=payload.points.clone())
            receipt = self.server.receive(ticket, payload).check()
            client, start_index, _ = self.in_flight.pop(turn.place)
            self.records.append(Record(client, start_index, ticket.message, original, receipt, self.server.model))
            self.dispatch(turn.next_client)
        return self

    def finish(self) -> "ServerRun":
        return self.advance(self.case.num_updates - len(self.records))

    def contents(self) -> dict[str, Any]:
        """Return all parts of the server that an update can change, by name."""
        state = self.server.snapshot().server_state
        return {
            "model": self.server.model,
            "state": state.model_state.state,
            "client_states": {client: state.store.load(("client", client)) for client in self.case.clients},
            "version": self.server.version,
            "history": self.server.history,
            "weights": state.weights,
            "tickets": self.server.tickets,
        }


class AggregateRun:
    """A run of `aggregate` on state dicts, which repeats the updates of a server run."""

    def __init__(self, case: RuleCase, space: ParameterSpace, records: list[Record]) -> None:
        self.case = case
        self.space = space
        self.records = records
        self.state: State = None
        self.models = [space.state_dict(case.start)]

    def next_models(self) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
        """Return copies of the current model, the base and the update of the next step."""
        record = self.records[len(self.models) - 1]
        current, base = (_cloned(self.models[i]) for i in (-1, record.start_index))
        points = [self.space.state_dict(point) for point in record.payload.points]
        return current, base, points if len(points) > 1 else points[0]

    def step(self, current: Any, base: Any, update: Any, out: Any = None) -> tuple[Any, State, dict[str, float]]:
        """Call `aggregate` with the given models, as the next update of this run.

        This run repeats the recorded updates of a server. The other arguments of `aggregate`, such as the staleness and
        the weight, come from the record of the same update of the server.
        """
        record = self.records[len(self.models) - 1]
        return _aggregate(self.case.rule, self.state, current, base, update, record, self.space, out)

    def advance(self, num_updates: int) -> dict[str, float]:
        """Aggregate the next updates, and return the metrics of the last update."""
        metrics: dict[str, float] = {}
        for _ in range(num_updates):
            model, self.state, metrics = self.step(*self.next_models())
            self.models.append(model)
        return metrics

    @property
    def current(self) -> Tensor:
        return self.space.point(self.models[-1])


def _aggregate(
    rule: Rule, state: State, current: Any, base: Any, update: Any, record: Record, space: ParameterSpace, out: Any
) -> tuple[Any, State, dict[str, float]]:
    return aggregate(
        rule,
        state,
        current,
        base,
        update,
        info=UpdateInfo(
            client=record.client,
            staleness=record.receipt.staleness,
            weight=record.receipt.weight,
            samples=record.payload.samples,
        ),
        space=space,
        out=out,
    )


def _cloned(model: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.items()}


def _normal(shape: list[int], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=like.dtype)
