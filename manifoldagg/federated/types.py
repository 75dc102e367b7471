"""The protocols of rules, trainers and averaging, and the types that they exchange.

- A server sends a [`Message`][manifoldagg.federated.Message] to a client.
- A trainer returns a [`Payload`][manifoldagg.federated.Payload].
- The server adds its own data and passes an [`Update`][manifoldagg.federated.Update] to the rule.
- The rule returns an [`Outcome`][manifoldagg.federated.Outcome].
- A client receives a [`Ticket`][manifoldagg.federated.Ticket] before its task and a
  [`Receipt`][manifoldagg.federated.Receipt] after it.

A rule never has access to a loss, and a trainer never has access to the server's state.
"""

import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg._validation import check_count, short_repr
from manifoldagg.corrections import Gram
from manifoldagg.corrections.combination import Combination
from manifoldagg.corrections.rows import FrameRows
from manifoldagg.errors import ArgumentError, BusyError
from manifoldagg.kernels import Row
from manifoldagg.manifolds import Loss, Manifold, ParameterSpace

__all__ = [
    "Averaging",
    "ClientState",
    "LinearStep",
    "Message",
    "Outcome",
    "Payload",
    "Point",
    "Receipt",
    "Rule",
    "State",
    "Ticket",
    "Trainer",
    "Update",
    "accepts_tensor_lists",
    "check_averaging",
    "check_parameter_space",
    "check_rule_protocol",
    "check_trainer",
    "extra_fields",
    "has_plan",
]

BUSY_PREFIX = "server: busy"
"""The start of the reason of a rejection that does not depend on the update."""
State = Any
"""A tree (nested dicts, lists, tuples) of tensors and numbers that a rule threads through its steps."""
ClientState = Any
"""A tree of tensors and numbers that the server stores for one client."""
if TYPE_CHECKING:
    # Depends on `accepts_tensor_lists` of the rule, which static types cannot express.
    Point: TypeAlias = Any
    Points: TypeAlias = Any
else:
    Point = Row
    Points = Float[Tensor, "n P"] | tuple[Row, ...]


@dataclass(frozen=True)
class Message:
    """The input of a client's task.

    Attributes:
        start: the model to start from (P,).
        tensors: further tensors of the rule.
        numbers: further numbers of the rule.
        buffers: the model's buffers by name, if the server stores them.
        requested_buffers: the buffers that a client returns: those that the server does not leave unchanged.
        version: the version of the model, for schedules of trainers; `None` if it is unknown.

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
        """The size of its tensors in bytes, as transmitted."""
        return _total_nbytes(self.start, *self.tensors.values(), *self.buffers.values())


@dataclass(frozen=True)
class Payload:
    r"""The update that a client returns.

    Attributes:
        points: the control points $\varphi_1, \dots, \varphi_n$ as points (n, P); a plain model is n = 1.
        samples: the number of samples that it trained on.
        tensors: further tensors that its rule requires.
        numbers: further numbers that its rule requires.
        client_state: the state of the trainer; the host passes it to the next `train` of this client.
        buffers: the client's buffers by name, as the message requests them.
        base: $\Theta^t$ (P,), if the ticket was issued with `retain_base=False`, so that the server has not stored it.
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
        """The size of its tensors in bytes, without `client_state`, which is not transmitted."""
        base = () if self.base is None else (self.base,)
        return _total_nbytes(self.points, *self.tensors.values(), *self.buffers.values(), *base)


@dataclass(frozen=True)
class Update:
    r"""A payload together with the server's data about it.

    Attributes:
        client: the client that returned the payload.
        base: $\Theta^t$ (P,), the model from which the client started. For a rule with `accepts_tensor_lists`, a row of
            the kernels.
        current: $\Theta^\tau$ (P,), the current model, in the same form.
        points: as in the payload, (n, P). For a rule with `accepts_tensor_lists`, a tuple of n rows.
        staleness: $\tau - t$ in versions, as recorded by the server.
        weight: $w_i$, the client's share of the data.
        samples: as in the payload, after capping.
        tensors: as in the payload.
        numbers: as in the payload.
        client_state: the state that the server stores for this client.
        share: the unnormalised weight of the client. Dividing it by the current sum gives $w_i$. Means over several
            updates use it, so that they do not depend on the order of the updates. `None` if it is unknown.
        is_pseudo_gradient: whether the points are pseudo-gradients $\Theta^t - \varphi_i$, as in an outer optimizer.
            This is only possible for rules with `accepts_tensor_lists`, and reverses the sign of their frames.
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


@dataclass(frozen=True, eq=False)
class LinearStep:
    """A step whose coefficients do not depend on inner products. Only its metrics and checks need them.

    One pass over the parameters computes the combinations and the inner products.

    Attributes:
        frame: the frame of the combinations in the outcome and in the state. It is flat.
        metrics: the function that checks the Gram matrix of the frame and returns the metrics of the step.
    """

    frame: FrameRows
    metrics: Callable[[Gram], dict[str, float]]

    def metrics_within(self, gram: Gram) -> dict[str, float]:
        """Return the metrics, given the Gram matrix of a frame with additional rows after those of this frame."""
        gram = gram.first_rows(len(self.frame.rows))
        self.frame.remember_norms(gram.matrix.diagonal().tolist())
        return self.metrics(gram)


@dataclass(frozen=True)
class Outcome:
    """The result of a rule for one update.

    Attributes:
        model: the new model (P,), or the `Combination` that `Frame.move` returned. `None` if the update is buffered and
            the model did not move.
        client_state: the next client state; `None` if the rule stores none.
        numbers: the metrics for the receipt and the history: `cosine`, `step`, `norm`, `buffered` and others.
        state_is_finite: whether the rule guarantees that its state is finite, so that the server skips its own check. A
            wrapper that changes an outcome must set it again.
        linear: the frame and the metrics of a step whose coefficients do not depend on inner products. The metrics are
            added to `numbers` when the step is computed.
    """

    model: Point | Combination | None
    client_state: ClientState = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    state_is_finite: bool = False
    linear: LinearStep | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Ticket:
    """Permission to train: the identifier for `receive`, the version to start from, and the message.

    Attributes:
        id: a unique identifier.
        version: the version of the model to start from.
        message: the input of the trainer.
        space: the space of the server.
    """

    id: str
    version: int
    message: Message
    space: Manifold | None = field(default=None, compare=False, repr=False)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the start model as a state dict, with the buffers that the server stores, for `load_state_dict`.

        Raises:
            ArgumentError: if the space is not a `ParameterSpace`.
        """
        return check_parameter_space(self.space).state_dict(self.message.start, self.message.buffers or None)


@dataclass(frozen=True)
class Receipt:
    r"""The server's response to an update.

    Attributes:
        accepted: whether the rule applied or buffered the update.
        reason: the reason of a rejection; empty if the update was accepted.
        version: the version of the server's model after the update.
        staleness: $\tau - t$ in versions.
        weight: the $w_i$ of the update.
        cosine: the cosine between the update and the drift; NaN if one of them is zero.
        step: the position $s$ on the curve to which the model moved.
        norm: the distance that the model moved.
        buffered: whether the update was accepted into a buffer, and the model has not moved yet.
        clipped: whether the reported number of samples was capped, or the update was scaled down by a `clip` of the
            update limits or of the rule.

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
        """Return the fields by name, as JSON values. A number that is not finite becomes `None`."""
        fields = vars(self).items()
        return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in fields}

    def check(self) -> "Receipt":
        """Return the receipt itself if the update was accepted.

        Raises:
            BusyError: if it was rejected because the server was busy. The client may retry later.
            ArgumentError: if it was rejected for any other reason. The message is the reason.
        """
        if self.accepted:
            return self
        if self.reason.startswith(BUSY_PREFIX):
            raise BusyError(self.reason)
        raise ArgumentError(self.reason)


@runtime_checkable
class Rule(Protocol):
    """Protocol of a server rule: pure methods of an immutable value.

    A rule that requires more than points declares two further attributes. `tensors` is a mapping from the name of a
    tensor to its number of points ((k, P); `None` for a single point (P,)). `numbers` is a sequence of names. A payload
    must contain exactly these.

    A rule that only needs a Gram matrix and a linear combination on a flat space sets `accepts_tensor_lists = True`:

    - Its models are rows of the kernels: vectors (P,), or tuples of the tensors of a state dict. Tuples are read in
      place, and `aggregate` never flattens them.
    - `start`, `base` and `current` are one row each, and `points` is a tuple of rows.
    - The rule also has a method `plan(space, state, update)`, which writes nothing. It returns the same as `step`,
      except that the new model and the sums in the state are results of
      [`Frame.move`][manifoldagg.corrections.Frame.move] and
      [`Frame.for_state`][manifoldagg.corrections.Frame.for_state]. The server computes these after all checks have
      passed.

    `self_checked` contains the names of the inputs whose finiteness the rule checks itself: `"points"` (with the base)
    and further tensors. The server skips its own check for them.
    """

    @property
    def cohort(self) -> int:
        """The number of updates that a step needs: 1 for an asynchronous rule."""

    def init(self, space: Manifold, start: Point) -> State:
        """Return the state before the first step."""

    def message(
        self, space: Manifold, state: State, current: Float[Tensor, " P"], client_state: ClientState
    ) -> Message:
        """Return the message for a client. Its start is a point of `space`, such as `current`. The server copies it."""

    def step(
        self, space: Manifold, state: State, update: Update, *, out: Tensor | None = None
    ) -> tuple[State, Outcome]:
        """Process one update, which may only be buffered. The method writes to nothing except `out`, the memory for the
        new model.

        The caller owns the tensors of `update` and `out`. A rule must clone what it stores of them.
        """


@runtime_checkable
class Trainer(Protocol):
    """Protocol of a client's local training."""

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
        """Train from `message.start` on `batches`, which can be iterated repeatedly."""


@runtime_checkable
class Averaging(Protocol):
    """Protocol of an average over the versions of a server."""

    @property
    def average(self) -> Float[Tensor, " P"] | None:
        """The current average; `None` if it is empty."""

    def update(self, version: int, model: Float[Tensor, " P"]) -> None:
        """Add a new version. `model` may be stored, and must not be modified.

        After an interrupt, a server may pass the latest version again, which must have no effect.
        """

    def state(self) -> Any:
        """Return the state for `load`: a tree of tensors and numbers with their own memory."""

    def load(self, state: Any) -> None:
        """Restore a state that `state` returned."""


def _total_nbytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_rule_protocol(rule: Rule, hint: str = "") -> Rule:
    """Check that a rule is an instance with `cohort`, `init`, `message` and `step`.

    Args:
        rule: the rule to check.
        hint: the end of the error message for an object that is not a rule.

    Raises:
        ArgumentError: if a method is missing, if `step` does not accept `out`, or if `rule` is a class.
    """
    if isinstance(rule, type):
        raise ArgumentError(f"rule: expected an instance, got the class {rule.__name__}; write {rule.__name__}()")
    # By name, because `isinstance` with a protocol takes longer than a step of a small model.
    missing = [name for name in ("cohort", "init", "message", "step") if not hasattr(rule, name)]
    if len(missing) > 2:
        raise ArgumentError(
            f"rule: expected a rule of manifoldagg.federated.rules, got {short_repr(rule)}{hint and f'; {hint}'}"
        )
    kind = type(rule).__name__
    if missing:
        raise ArgumentError(
            f"rule: expected cohort, init, message and step, got a {kind} without {' and '.join(missing)}"
        )
    if not _accepts_out(type(rule)):
        raise ArgumentError(f"rule: step: expected (space, state, update, *, out=None), got a {kind} without out")
    check_count("rule: cohort", rule.cohort)
    return rule


@lru_cache(maxsize=256)
def _accepts_out(kind: type) -> bool:
    """Return whether the `step` of a rule class accepts `out`, the memory for the model."""
    step = getattr(kind, "step", None)
    if step is None:  # an attribute of the instance
        return True
    given = inspect.signature(step).parameters
    return "out" in given or any(parameter.kind is parameter.VAR_KEYWORD for parameter in given.values())


def check_trainer(trainer: Trainer) -> Trainer:
    """Check that a trainer is an instance with a `train` method.

    Raises:
        ArgumentError: if it has no `train` method, or if it is a class instead of an instance.
    """
    given: object = trainer
    # A module has a `train` method too.
    if isinstance(given, type | torch.nn.Module) or not isinstance(given, Trainer):
        raise ArgumentError(f"trainer: expected an instance with `train`, got {short_repr(given)}")
    return trainer


def check_parameter_space(space: Manifold | None) -> ParameterSpace:
    """Check that a space is a `ParameterSpace`, whose points are models with named tensors.

    Raises:
        ArgumentError: if it is another space.
    """
    if not isinstance(space, ParameterSpace):
        raise ArgumentError(f"space: expected a ParameterSpace, got {type(space).__name__}")
    return space


def accepts_tensor_lists(rule: Rule, space: Manifold) -> bool:
    """Return whether the server calls `plan` of a rule on this space, with rows as models, instead of `step`."""
    return space.flat and has_plan(rule)


def has_plan(rule: Rule) -> bool:
    """Return whether a rule accepts tensor lists in `plan`.

    The result is false for a subclass that overrides only `step`. The server then calls this `step` with whole vectors.
    """
    return bool(getattr(rule, "accepts_tensor_lists", False)) and _defines_plan_last(type(rule))


@lru_cache(maxsize=256)
def _defines_plan_last(kind: type) -> bool:
    """Return whether no subclass of the class that defines `plan` overrides `step`."""
    classes = (vars(base) for base in kind.__mro__ if "plan" in vars(base) or "step" in vars(base))
    return "plan" in next(classes, ())


def check_averaging(averaging: Averaging | None) -> Averaging | None:
    """Check an averaging object unless it is `None`.

    Raises:
        ArgumentError: if it lacks a method of `Averaging`, or if it resets the model.
    """
    given: object = averaging
    if averaging is not None and not isinstance(given, Averaging):
        missing = [name for name in ("average", "update", "state", "load") if not hasattr(averaging, name)]
        what = short_repr(given) if len(missing) > 2 else f"a {type(given).__name__} without {missing[0]}"
        raise ArgumentError(f"averaging: expected an object with average, update, state and load, got {what}")
    if getattr(averaging, "has_reset_points", False):
        raise ArgumentError("averaging: expected periodic=None, as an average cannot overwrite the server's model")
    return averaging


def extra_fields(rule: Rule) -> tuple[dict[str, int | None], tuple[str, ...]]:
    """Return the further tensors (name to number of points, `None` for one) and numbers that a rule requires.

    Raises:
        ArgumentError: if `tensors` is not such a mapping, or if `numbers` is not a sequence of names.
    """
    tensors = getattr(rule, "tensors", {})
    numbers = getattr(rule, "numbers", ())
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        raise ArgumentError(
            f"rule: tensors: expected a mapping from names to numbers of points, got {short_repr(tensors)}"
        )
    for name, count in tensors.items():
        if count is not None:
            check_count(f"rule: tensors: {name}", count)
    if isinstance(numbers, str) or not all(isinstance(name, str) for name in numbers):
        raise ArgumentError(f"rule: numbers: expected names, got {short_repr(numbers)}")
    return dict(tensors), tuple(numbers)
