"""The contract between the parts: what a rule is, what a trainer is, and what passes between them.

A server sends a [`Message`][manifoldagg.federated.Message], a trainer answers with a
[`Payload`][manifoldagg.federated.Payload], the server adds what only it knows and hands the rule an
[`Update`][manifoldagg.federated.Update]; the rule answers with an [`Outcome`][manifoldagg.federated.Outcome].
What clients keep in hand is a [`Ticket`][manifoldagg.federated.Ticket] and, after it, a
[`Receipt`][manifoldagg.federated.Receipt].
Rules never see a loss, trainers never see the server's state.
"""

import inspect
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg._validation import check_count
from manifoldagg.corrections.frame import Deferred, PendingStep
from manifoldagg.errors import ArgumentError, BusyError
from manifoldagg.kernels import Row
from manifoldagg.manifolds import Loss, Manifold, ParameterSpace

__all__ = [
    "Averaging",
    "ClientState",
    "Message",
    "Outcome",
    "Payload",
    "Point",
    "Receipt",
    "Rule",
    "State",
    "Target",
    "Ticket",
    "Trainer",
    "Update",
    "accepts_tensor_lists",
    "check_averaging",
    "check_parameter_space",
    "check_rule_protocol",
    "check_trainer",
    "extra_fields",
]

BUSY_PREFIX = "server: busy"
"""How a reason begins that says nothing against the update."""
State = Any
"""A tree (nested dicts, lists, tuples) of tensors and numbers that a rule threads through its steps."""
ClientState = Any
"""A tree of tensors and numbers that the server keeps for one client."""
if TYPE_CHECKING:
    # A rule knows which of the two it takes, as it says by `accepts_tensor_lists`; a type cannot.
    Point: TypeAlias = Any
    Points: TypeAlias = Any
    Target: TypeAlias = Any
else:
    Point = Row
    Points = Float[Tensor, "n P"] | tuple[Row, ...]
    Target = Row | Deferred | None


@dataclass(frozen=True)
class Message:
    """What a client gets.

    Attributes:
        start: the model to start from (P,).
        tensors: what the rule adds.
        numbers: likewise.
        buffers: the model's by name, where the server keeps them.
        requested_buffers: which of them a client sends back: those that the server does not leave as they are.
        version: of the model, which schedules of trainers go by; `None` where nobody told.

    Example:
        >>> Message(torch.zeros(10), {"m": torch.zeros(10, dtype=torch.float64)}, {"epochs": 3.0}).nbytes
        120
    """

    start: Float[Tensor, " P"]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    requested_buffers: tuple[str, ...] = ()
    version: int | None = None

    @property
    def nbytes(self) -> int:
        """Of its tensors: what it takes to send them as they are."""
        return _total_nbytes(self.start, *self.tensors.values(), *self.buffers.values())


@dataclass(frozen=True)
class Payload:
    r"""What a client returns.

    Attributes:
        points: the control points $\varphi_1, \dots, \varphi_n$ as points (n, P); a plain model is n = 1.
        samples: how many samples it trained on.
        tensors: further tensors that its rule asks for.
        numbers: further numbers that its rule asks for.
        client_state: what the trainer wants to find again; who drives the client hands it to the next `train`.
        buffers: the client's buffers by name, those that the message asks for.
        base: $\Theta^t$ (P,), where the ticket was issued with `retain_base=False`: the server has not kept it.
    """

    points: Float[Tensor, "n P"]
    samples: int
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    client_state: ClientState = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    base: Float[Tensor, " P"] | None = None

    @property
    def nbytes(self) -> int:
        """Of its tensors, but for the client's own `client_state`, which does not travel."""
        base = () if self.base is None else (self.base,)
        return _total_nbytes(self.points, *self.tensors.values(), *self.buffers.values(), *base)


@dataclass(frozen=True)
class Update:
    r"""A payload with what the server knows about it.

    Attributes:
        client: who sent it.
        base: $\Theta^t$ (P,), the model that the client started from; for a rule with `accepts_tensor_lists` a row, as
            the kernels take them.
        current: $\Theta^\tau$ (P,), the model now; likewise.
        points: as in the payload, (n, P); for a rule with `accepts_tensor_lists` a tuple of n rows.
        staleness: $\tau - t$ in versions, as the server recorded it.
        weight: $w_i$, the client's share of the data.
        samples: as in the payload, as far as they are believed.
        tensors: as in the payload.
        numbers: as in the payload.
        client_state: what the server keeps for this client.
        share: the client's data in the server's own measure, which $w_i$ divides by their sum at the time: means over
            several updates weigh by it, whatever the order in which they came. `None` where nobody knows it.
        is_pseudo_gradient: whether the points are pseudo-gradients $\Theta^t - \varphi_i$, as an outer optimiser has
            them; for rules with `accepts_tensor_lists` alone, whose frames are minus what they are else.
    """

    client: Hashable
    base: Point
    current: Point
    points: Points
    staleness: int = 0
    weight: float = 1.0
    samples: int = 1
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    client_state: ClientState = None
    share: float | None = None
    is_pseudo_gradient: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a rule makes of an update.

    Attributes:
        model: the new one, (P,), or of a rule with `accepts_tensor_lists` what `Frame.move` returned; `None`: the
            update is buffered, the model did not move.
        client_state: what the server keeps for this client from now on, `None` for nothing.
        numbers: for the receipt and the history: `cosine`, `step`, `norm`, `buffered` (how many updates wait), others.
        state_is_finite: whether the rule knows that what it keeps is finite: nobody looks at it then. Who changes an
            outcome of another rule says it anew.
    """

    model: Point | PendingStep | None
    client_state: ClientState = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    state_is_finite: bool = False


@dataclass(frozen=True)
class Ticket:
    """Leave to train: what `receive` asks for again, the version it starts from, and the message.

    Attributes:
        id: unlike any other.
        version: of the model to start from.
        message: what a trainer gets.
        space: of the server.
    """

    id: str
    version: int
    message: Message
    space: Manifold | None = field(default=None, compare=False, repr=False)

    def state_dict(self) -> dict[str, Tensor]:
        """The model to start from as a state dict, with the buffers that the server keeps, for `load_state_dict`.

        Raises:
            ArgumentError: if the space is no `ParameterSpace`.
        """
        return check_parameter_space(self.space).state_dict(self.message.start, self.message.buffers or None)


@dataclass(frozen=True)
class Receipt:
    r"""What became of an update.

    Attributes:
        accepted: whether the rule took it.
        reason: why not; empty where accepted.
        version: of the server's model after it.
        staleness: $\tau - t$ in versions.
        weight: $w_i$ that the rule was given.
        cosine: between the update and the drift; NaN where one of them is zero.
        step: where on the curve the server went, $s$.
        norm: how far the model moved.
        buffered: whether the update waits: it was accepted, and the model has not moved by it yet.
        clipped: whether more samples were claimed than were believed, so that the weight is that of the believed; or
            the update was longer than a `clip`, of the update limits or of the rule, and was scaled back.

    Example:
        >>> receipt = Receipt(False, "points: expected one model", version=3)
        >>> receipt.asdict()["cosine"] is None
        True
        >>> receipt.check()
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: points: expected one model
    """

    accepted: bool
    reason: str
    version: int
    staleness: int = 0
    weight: float = math.nan
    cosine: float = math.nan
    step: float = math.nan
    norm: float = math.nan
    buffered: bool = False
    clipped: bool = False

    def asdict(self) -> dict[str, Any]:
        """Its fields by name, fit for JSON: `None` for what is no finite number."""
        fields = vars(self).items()
        return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in fields}

    def check(self) -> "Receipt":
        """Itself, where the update was accepted.

        Raises:
            BusyError: if it was refused because the server was busy, and may be taken later.
            ArgumentError: if it was refused for any other reason, which it says.
        """
        if self.accepted:
            return self
        if self.reason.startswith(BUSY_PREFIX):
            raise BusyError(self.reason)
        raise ArgumentError(self.reason)


@runtime_checkable
class Rule(Protocol):
    """How a server moves: pure methods of a frozen value.

    A rule that wants more than points says so in two further attributes: `tensors`, a mapping from the name of a tensor
    to how many points it holds ((k, P); `None` for one, (P,)), and `numbers`, a sequence of names. A payload brings
    exactly these.

    A rule that on a flat space needs no more than a Gram matrix and a combination says `accepts_tensor_lists = True`.
    Its models are then rows, as the kernels take them: vectors (P,), or tuples of the tensors of a state dict where
    they lie, which `aggregate` never flattens. `start`, `base`, `current` and `out` are one each, `points` is a tuple
    of them. It forms its model by [`Frame.move`][manifoldagg.corrections.Frame.move], which looks first whether it
    would be finite; what it keeps it forms as vectors.

    What of `"points"` (and the base) and of its further tensors it measures itself, so that it fails where they are not
    finite, a rule names in `self_checked`: nobody reads them first.
    """

    @property
    def cohort(self) -> int:
        """1: asynchronous; k: waits for k updates."""

    def init(self, space: Manifold, start: Point) -> State:
        """The state before the first step."""

    def message(
        self, space: Manifold, state: State, current: Float[Tensor, " P"], client_state: ClientState
    ) -> Message:
        """What a client is sent. Its start is a point of `space`, such as `current` itself: the server copies it."""

    def step(self, space: Manifold, state: State, update: Update, *, out: Target = None) -> tuple[State, Outcome]:
        """Take one update, also where the model waits for more. Nothing is written but `out`, where the model may go.

        The tensors of `update` and `out` belong to the caller: what a rule keeps of them, it clones.
        """


@runtime_checkable
class Trainer(Protocol):
    """What a client does with a message and its data."""

    def train(
        self,
        space: Manifold,
        message: Message,
        loss: Loss,
        batches: Iterable[Any],
        client_state: ClientState,
        *,
        generator: torch.Generator,
    ) -> Payload:
        """Train from `message.start` on `batches`, which can be iterated again and again."""


@runtime_checkable
class Averaging(Protocol):
    """What listens to the versions of a server and averages some of them."""

    @property
    def average(self) -> Float[Tensor, " P"] | None:
        """The average so far; `None` where there is nothing in it."""

    def update(self, version: int, model: Float[Tensor, " P"]) -> None:
        """See a new version. `model` may be kept, and must not be written.

        A server that was interrupted tells the latest version again, which changes nothing.
        """

    def state(self) -> Any:
        """All that `load` needs to go on from here: a tree of tensors and numbers, none of them shared."""

    def load(self, state: Any) -> None:
        """Go on from what `state` returned."""


def _total_nbytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_rule_protocol(rule: Rule) -> Rule:
    """A rule: an instance that has `cohort`, `init`, `message` and `step`.

    Raises:
        ArgumentError: if something is missing, `step` takes no `out`, or a class or a name was given for an instance.
    """
    if isinstance(rule, type):
        raise ArgumentError(f"rule: expected an instance, got the class {rule.__name__}; write {rule.__name__}()")
    # By name: a look at the protocol takes longer than a step of a small model.
    if not all(hasattr(rule, name) for name in ("cohort", "init", "message", "step")):
        raise ArgumentError(f"rule: expected cohort, init, message and step; {rule!r} lacks some")
    if not _accepts_out(type(rule)):
        raise ArgumentError(
            f"rule: step: expected (space, state, update, *, out=None); that of {rule!r} takes no `out`"
        )
    check_count("rule: cohort", rule.cohort)
    return rule


@lru_cache(maxsize=256)
def _accepts_out(kind: type) -> bool:
    """Whether the `step` of such rules can be told where the model goes."""
    step = getattr(kind, "step", None)
    if step is None:  # an attribute of the instance
        return True
    given = inspect.signature(step).parameters
    return "out" in given or any(parameter.kind is parameter.VAR_KEYWORD for parameter in given.values())


def check_trainer(trainer: Trainer) -> Trainer:
    """A trainer: an instance that has `train`.

    Raises:
        ArgumentError: if it has not, or a class was given for an instance.
    """
    if isinstance(trainer, type) or not isinstance(trainer, Trainer):
        raise ArgumentError(f"trainer: expected an instance with `train`, got {trainer!r}")
    return trainer


def check_parameter_space(space: Manifold | None) -> ParameterSpace:
    """A space whose points are models with named tensors.

    Raises:
        ArgumentError: if it is another.
    """
    if not isinstance(space, ParameterSpace):
        raise ArgumentError(f"space: expected a ParameterSpace, got {type(space).__name__}")
    return space


def accepts_tensor_lists(rule: Rule, space: Manifold) -> bool:
    """Whether the rule takes models of this space as rows, that is as they lie in memory."""
    return bool(getattr(rule, "accepts_tensor_lists", False)) and space.flat


def check_averaging(averaging: Averaging | None) -> Averaging | None:
    """What listens to versions, if anything.

    Raises:
        ArgumentError: if it lacks a method of `Averaging`, or is one that overwrites the model.
    """
    if averaging is not None and not isinstance(averaging, Averaging):
        raise ArgumentError(f"averaging: expected `average`, `update`, `state` and `load`; {averaging!r} lacks some")
    if getattr(averaging, "has_reset_points", False):
        raise ArgumentError("averaging: expected periodic=None, as a listener cannot overwrite the server's model")
    return averaging


def extra_fields(rule: Rule) -> tuple[dict[str, int | None], tuple[str, ...]]:
    """The further tensors (name to number of points, `None` for one) and numbers that a rule asks for.

    Raises:
        ArgumentError: if its `tensors` is no such mapping, or its `numbers` are no names.
    """
    tensors = getattr(rule, "tensors", {})
    numbers = getattr(rule, "numbers", ())
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        raise ArgumentError(f"rule: tensors: expected a mapping from names to numbers of points, got {tensors!r}")
    for name, count in tensors.items():
        if count is not None:
            check_count(f"rule: tensors: {name}", count)
    if isinstance(numbers, str) or not all(isinstance(name, str) for name in numbers):
        raise ArgumentError(f"rule: numbers: expected names, got {numbers!r}")
    return dict(tensors), tuple(numbers)
