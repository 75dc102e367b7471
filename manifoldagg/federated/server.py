"""The server: one owner of the model, its versions and its clients, for every rule."""

import math
import secrets
import threading
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from manifoldagg.errors import (
    ArgumentError,
    ManifoldAggError,
    check_choice,
    check_count,
    check_finite,
    check_shape,
    is_finite,
)
from manifoldagg.federated.contract import Memory, Message, Payload, Rule, Update, check_rule
from manifoldagg.federated.store import Versions
from manifoldagg.manifolds import MASTER_DTYPES, Manifold, ParameterSpace

WEIGHTS = ("observed", "uniform")


@dataclass(frozen=True)
class Ticket:
    """Leave to train: what `receive` asks for again, the version it starts from, and the message."""

    id: str
    version: int
    message: Message


@dataclass(frozen=True)
class Receipt:
    r"""What became of an update.

    Attributes:
        accepted: whether the model moved (or will, for a rule that buffers).
        reason: why not; empty where accepted.
        version: of the server's model after it.
        staleness: $\tau - t$ in versions.
        weight: $w_i$ that the rule was given.
        cosine: between the update and the drift; NaN where one of them is zero.
        step: where on the curve the server went, $s$.
        norm: how far the model moved.
    """

    accepted: bool
    reason: str
    version: int
    staleness: int = 0
    weight: float = math.nan
    cosine: float = math.nan
    step: float = math.nan
    norm: float = math.nan


class Server:
    r"""Drives a rule: hands out models, takes updates, refuses what does not fit.

    A refused update leaves everything as it was, its ticket too: the client may try again, or you `drop` it.
    Models that go out are copies and payloads are only read: nobody else holds the server's memory. Every method
    may be called from any thread.

    Args:
        space: where the models live.
        rule: how the model moves.
        start: $\Theta^0$ (P,).
        weights: a client's share of the data $w_i$: a mapping client to samples, for
            $w_i = |D_i| / \sum_j |D_j|$; `"uniform"`, 1 / N; or `"observed"`, $|D_i| / (N \cdot$ mean of the
            $|D|$ seen$)$, with N the clients that were ever dispatched to.
        max_staleness: refuse what is staler than so many versions.

    Raises:
        ArgumentError: naming the argument that does not fit.

    Example:
        >>> import torch
        >>> from manifoldagg.federated import Payload
        >>> from manifoldagg.federated.rules import FedAsync
        >>> from manifoldagg.manifolds import Flat
        >>> server = Server(Flat(2), FedAsync(rate=0.5), torch.zeros(2))
        >>> ticket = server.dispatch("ward-7")
        >>> receipt = server.receive(ticket.id, Payload(torch.tensor([[2.0, 4.0]]), samples=10))
        >>> receipt.accepted, receipt.version, server.model
        (True, 1, tensor([1., 2.]))
        >>> server.receive(ticket.id, Payload(torch.tensor([[2.0, 4.0]]), samples=10)).reason
        'ticket: unknown, or used already'
    """

    def __init__(
        self,
        space: Manifold,
        rule: Rule,
        start: Float[Tensor, " P"],
        *,
        weights: str | Mapping[Any, int] = "observed",
        max_staleness: int | None = None,
    ) -> None:
        if not isinstance(space, Manifold):
            raise ArgumentError(f"space: expected a manifold, got {type(space).__name__}")
        if check_rule(rule).cohort != 1:
            raise ArgumentError(f"rule: expected an asynchronous rule (cohort 1), got cohort {rule.cohort}")
        if isinstance(weights, Mapping):
            for client, amount in weights.items():
                check_count(f"weights[{client!r}]", amount)
        else:
            check_choice("weights", weights, WEIGHTS)
        if max_staleness is not None:
            check_count("max_staleness", max_staleness, at_least=0)
        check_finite("start", check_shape("start", start, *space.shape))
        dtypes = (space.dtype,) if isinstance(space, ParameterSpace) else MASTER_DTYPES
        check_choice("start: dtype", start.dtype, dtypes)
        self.space, self.rule = space, rule
        self._weights = weights if isinstance(weights, str) else _shares(weights)
        self._max_staleness = max_staleness
        self._lock = threading.RLock()
        self._version = 0
        self._versions = Versions(start.detach().clone())
        self._state = rule.init(space, start.detach().clone())
        self._token = secrets.token_hex(4)
        self._issued = 0
        self._open: dict[str, tuple[Hashable, int]] = {}
        self._samples: dict[Hashable, int | None] = {}
        self._seen = self._seen_samples = 0
        self._memory: dict[Hashable, Memory] = {}
        self._history: list[dict[str, object]] = []
        self._refused: Counter[str] = Counter()

    @property
    def model(self) -> Float[Tensor, " P"]:
        """A copy of the current model (P,)."""
        with self._lock:
            return self._versions[self._version].clone()

    @property
    def version(self) -> int:
        """How often the model has moved."""
        return self._version

    @property
    def history(self) -> list[dict[str, object]]:
        """One row for each accepted update: the client and the fields of its receipt."""
        with self._lock:
            return [dict(row) for row in self._history]

    @property
    def refused(self) -> dict[str, int]:
        """How many updates were refused, by the field that was wrong."""
        with self._lock:
            return dict(self._refused)

    def dispatch(self, client: Hashable) -> Ticket:
        """Send a client to work on the current model.

        Raises:
            ArgumentError: if `client` is unhashable, or missing from the weights that were given up front.
        """
        try:
            hash(client)
        except TypeError:
            raise ArgumentError(f"client: expected a hashable name, got {client!r}") from None
        if isinstance(self._weights, dict) and client not in self._weights:
            raise ArgumentError(f"client: {client!r} has no entry in the weights that were given")
        with self._lock:
            current = self._versions[self._version]
            message = self.rule.message(self._state, current, self._memory.get(client))
            message = replace(
                message,
                start=message.start.clone(),
                tensors={name: tensor.clone() for name, tensor in message.tensors.items()},
            )
            ticket = Ticket(f"{self._token}-{self._issued}", self._version, message)
            self._samples.setdefault(client, None)
            self._issued += 1
            self._open[ticket.id] = (client, self._version)
            self._versions.hold(self._version)
            return ticket

    def receive(self, ticket_id: str, payload: Payload) -> Receipt:
        """Take what a client returns on a ticket.

        Returns:
            A receipt. Where it says `accepted=False`, `reason` names the field and nothing has changed.
        """
        with self._lock:
            try:
                return self._take(ticket_id, payload)
            except ManifoldAggError as error:
                reason = str(error)
                self._refused[reason.partition(":")[0].partition("[")[0]] += 1
                return Receipt(False, reason, self._version)

    def drop(self, ticket_id: str) -> None:
        """Give up on a ticket: its client will not answer.

        Raises:
            ArgumentError: if the ticket is unknown or was used.
        """
        with self._lock:
            _, version = self._holder(ticket_id)
            del self._open[ticket_id]
            self._versions.release(version)

    def _holder(self, ticket_id: str) -> tuple[Hashable, int]:
        if not isinstance(ticket_id, str) or ticket_id not in self._open:
            raise ArgumentError("ticket: unknown, or used already")
        return self._open[ticket_id]

    def _take(self, ticket_id: str, payload: Payload) -> Receipt:
        client, version = self._holder(ticket_id)
        staleness = self._version - version
        if self._max_staleness is not None and staleness > self._max_staleness:
            raise ArgumentError(f"staleness: expected at most {self._max_staleness}, got {staleness}")
        base, current = self._versions[version], self._versions[self._version]
        points, samples = self._admit(payload, current)
        update = Update(
            client=client,
            base=base,
            current=current,
            points=points,
            staleness=staleness,
            weight=self._weight(client, samples),
            samples=samples,
            tensors=payload.tensors,
            numbers=payload.numbers,
            memory=self._memory.get(client),
        )
        blank = self._versions.blank(current)
        state, outcome = self.rule.step(self.space, self._state, update, out=blank)
        if outcome.model is not None:
            check_shape("rule: new model", outcome.model, *self.space.shape)
            check_choice("rule: new model: dtype", outcome.model.dtype, (current.dtype,))
            if not is_finite(outcome.model):
                raise ArgumentError("points: the new model would not be finite")

        # Nothing above has changed the server; nothing below can fail.
        if outcome.model is not None:
            model = outcome.model if outcome.model is blank else blank.copy_(outcome.model)
            self._versions.add(self._version + 1, model)
            self._versions.release(self._version)
            self._version += 1
        self._state = state
        self._seen, self._seen_samples = self._counted(client, samples)
        self._samples[client] = samples
        self._memory[client] = outcome.memory
        del self._open[ticket_id]
        self._versions.release(version)
        numbers = {name: outcome.numbers.get(name, math.nan) for name in ("cosine", "step", "norm")}
        receipt = Receipt(True, "", self._version, staleness, update.weight, **numbers)
        self._history.append({"client": client, **asdict(receipt)})
        return receipt

    def _admit(self, payload: Payload, current: Tensor) -> tuple[Tensor, int]:
        """The checked points, on the server's device, and samples of a payload."""
        if not isinstance(payload, Payload):
            raise ArgumentError(f"payload: expected a Payload, got {type(payload).__name__}")
        points = check_shape("points", payload.points, None, *self.space.shape)
        if len(points) == 0:
            raise ArgumentError(f"points: expected (n, {current.shape[0]}) with n >= 1, got {tuple(points.shape)}")
        if points.dtype != current.dtype:
            raise ArgumentError(f"points: expected {current.dtype}, got {points.dtype}")
        points = check_finite("points", points.detach().to(current.device))
        return points, check_count("samples", payload.samples)

    def _weight(self, client: Hashable, samples: int) -> float:
        if isinstance(self._weights, dict):
            return self._weights[client]
        if self._weights == "uniform":
            return 1 / len(self._samples)
        seen, total = self._counted(client, samples)
        return samples * seen / (len(self._samples) * total)

    def _counted(self, client: Hashable, samples: int) -> tuple[int, int]:
        """How many clients have told their samples, and how many in all, with this one's latest word."""
        before = self._samples[client]
        return self._seen + (before is None), self._seen_samples - (before or 0) + samples


def _shares(samples: Mapping[Any, int]) -> dict[Hashable, float]:
    """Each client's part of all samples."""
    total = sum(samples.values())
    return {client: amount / total for client, amount in samples.items()}
