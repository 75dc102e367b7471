"""Protocols and data types of rules, trainers and averages.

One task of a client uses these types in this order:

1. The server sends a [`Ticket`][manifoldagg.federated.Ticket] with a [`Message`][manifoldagg.federated.Message] to the
   client.
2. The trainer of the client returns a [`Payload`][manifoldagg.federated.Payload].
3. The server combines the payload with its own data about the client, and passes this
   [`Update`][manifoldagg.federated.Update] to the rule.
4. The rule returns an [`Outcome`][manifoldagg.federated.Outcome].
5. The server sends a [`Receipt`][manifoldagg.federated.Receipt] to the client.

A rule never accesses a loss function, and a trainer never accesses the state of the server.
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
"""The prefix of the rejection reason of a busy server."""
State = Any
"""The state of a rule: a tree (nested dicts, lists, tuples) of tensors and numbers."""
ClientState = Any
"""The state that the server stores for one client: a tree of tensors and numbers."""
if TYPE_CHECKING:
    # The type depends on `accepts_tensor_lists` of the rule, which static types cannot express.
    Point: TypeAlias = Any
    Points: TypeAlias = Any
else:
    Point = Row
    Points = Float[Tensor, "n P"] | tuple[Row, ...]


@dataclass(frozen=True)
class Message:
    """Message that the server sends to a client, with the inputs of one training task.

    Attributes:
        start: the model from which training starts, as a vector (P,) of P parameters.
        tensors: additional tensors that the rule sends, by name.
        numbers: additional numbers that the rule sends, by name.
        buffers: the buffers of the model, such as running means, by name. Empty if the server stores no buffers.
        requested_buffers: the names of the buffers that the client must return.
        version: the version of the server model. Trainers with a learning-rate schedule, such as `Scheduled`, compute
            their rate from it. `None` if it is unknown.

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
        """The number of bytes of all tensors in the message."""
        return _total_nbytes(self.start, *self.tensors.values(), *self.buffers.values())


@dataclass(frozen=True)
class Payload:
    r"""Data that a client returns after one task.

    Attributes:
        points: the control points $\varphi_1, \dots, \varphi_n$ of a curve, with the shape (n, P). The last point
            $\varphi_n$ is the trained model. A client that trains a plain model returns one point.
        samples: the number of samples that the client trained on.
        tensors: additional tensors that the rule requires, by name.
        numbers: additional numbers that the rule requires, by name.
        client_state: the state of the trainer. It stays on the client. Pass it to the client's next call of `train`.
        buffers: the client's values of the buffers that the message requests, by name.
        base: the start model $\Theta^t$, with the shape (P,). A client returns the base only if the ticket was issued
            with `retain_base=False`, so that the server has not stored it.
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
        """The number of bytes of all tensors that the client sends to the server.

        The client state does not count, because it stays on the client.
        """
        base = () if self.base is None else (self.base,)
        return _total_nbytes(self.points, *self.tensors.values(), *self.buffers.values(), *base)


@dataclass(frozen=True)
class Update:
    r"""Input of a rule: the payload of a client, together with the server's data about this client.

    Models have the shape (P,). For a rule with `accepts_tensor_lists`, a model is a row instead, which is either a
    vector (P,) or a tuple of the tensors of a state dict.

    Attributes:
        client: the client that returned the payload.
        base: the model $\Theta^t$ of version $t$ from which the client started.
        current: the current server model $\Theta^\tau$ of version $\tau$.
        points: the control points $\varphi_1, \dots, \varphi_n$, with the shape (n, P). For a rule with
            `accepts_tensor_lists`, this is a tuple of n rows.
        staleness: the staleness $\tau - t$ in versions. The server computes it from the ticket.
        weight: the client's share $w_i$ of the training data.
        samples: the sample count of the payload, after the server has capped it.
        tensors: the additional tensors of the payload, by name.
        numbers: the additional numbers of the payload, by name.
        client_state: the state that the server stores for this client.
        share: the weight of the client before normalisation, such as its sample count. Rules use `share` for means over
            several updates, because `weight` changes when clients join. `None` if the share is unknown.
        is_pseudo_gradient: whether the points are pseudo-gradients $\Theta^t - \varphi_i$, as in an outer optimizer.
            Pseudo-gradients require a rule with `accepts_tensor_lists`.
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
    """Server step that adds a linear combination of vectors with known coefficients to the model.

    The server computes the new model and the inner products of the vectors in one pass over the parameters. It uses the
    inner products for checks and metrics. If the coefficients depended on them, the step would need a second pass.

    Attributes:
        frame: the vectors of the linear combination, on a flat space.
        metrics: a function that receives the Gram matrix, which contains the inner products of these vectors. The
            function checks the matrix and returns the metrics of the step.
    """

    frame: FrameRows
    metrics: Callable[[Gram], dict[str, float]]

    def metrics_within(self, gram: Gram) -> dict[str, float]:
        """Return the metrics of this step from a Gram matrix of its vectors, possibly followed by other vectors."""
        gram = gram.first_rows(len(self.frame.rows))
        self.frame.remember_norms(gram.matrix.diagonal().tolist())
        return self.metrics(gram)


@dataclass(frozen=True)
class Outcome:
    """Result of a rule for one update.

    Attributes:
        model: the new model as a vector (P,), or as the `Combination` that `Frame.move` returned. `None` if the rule
            has buffered the update, so that the model does not change.
        client_state: the next state of the client. `None` if the rule stores no client state.
        numbers: metrics for the receipt and the history, such as `cosine`, `step`, `norm` and `buffered`.
        state_is_finite: whether the rule guarantees that its state is finite, so that the server skips its own check.
            A wrapper that changes the outcome of another rule must set this field again.
        linear: the linear step if the coefficients of the step do not depend on inner products. The server adds the
            metrics of the linear step to `numbers`.
    """

    model: Point | Combination | None
    client_state: ClientState = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    state_is_finite: bool = False
    linear: LinearStep | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Ticket:
    """Ticket that `Server.dispatch` issues for one training task of a client.

    Attributes:
        id: the unique id of the ticket. Pass it to `Server.receive` together with the client's payload.
        version: the version of the server model when the task was dispatched.
        message: the message to the client, which is the input of its trainer.
        space: the space of the server's models.
    """

    id: str
    version: int
    message: Message
    space: Manifold | None = field(default=None, compare=False, repr=False)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model from which the client starts, as a state dict for `torch.nn.Module.load_state_dict`.

        If the server stores the buffers of the model, the state dict also contains these buffers.

        Raises:
            ArgumentError: if the space is not a `ParameterSpace`.
        """
        return check_parameter_space(self.space).state_dict(self.message.start, self.message.buffers or None)


@dataclass(frozen=True)
class Receipt:
    r"""Response of the server to an update.

    A metric that the rule does not compute is NaN.

    Attributes:
        accepted: whether the rule has applied or buffered the update.
        reason: the reason of a rejection. Empty if the update was accepted.
        version: the version of the server model after the update.
        staleness: the staleness of the update in versions. This is $\tau - t$, where $\tau$ is the version of the
            server model before the update, and $t$ is the version from which the client started.
        weight: the client's share $w_i$ of the training data.
        cosine: the cosine of the angle between two vectors: the displacement of the client's model from its base, and
            the drift of the server model from this base. It is NaN if one of them is zero.
        step: the position of the new model on the curve of the update.
        norm: the distance between the server models before and after the update.
        buffered: whether the rule has buffered the update, so that the server model is unchanged.
        clipped: whether the server has capped the sample count, or a limit or the rule has clipped the update.

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
        """Return the fields as a dictionary of JSON values. NaN and infinite numbers become `None`."""
        fields = vars(self).items()
        return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in fields}

    def check(self) -> "Receipt":
        """Raise an error if the server has rejected the update, and otherwise return this receipt.

        The message of the error is the reason for the rejection.

        Raises:
            BusyError: if the server was busy. The client may return the same update later.
            ArgumentError: if the update was rejected for another reason.
        """
        if self.accepted:
            return self
        if self.reason.startswith(BUSY_PREFIX):
            raise BusyError(self.reason)
        raise ArgumentError(self.reason)


@runtime_checkable
class Rule(Protocol):
    """Protocol for the rules with which a server computes its next model from a client's update.

    A rule is an immutable object, and its methods have no side effects. The server stores the state of the rule, passes
    it to each method, and replaces it by the state that `step` returns.

    A rule may have these optional attributes:

    - `tensors`: the additional tensors that a payload must contain, as a mapping from names to numbers of points. A
      number k means the shape (k, P), and `None` means the shape (P,).
    - `numbers`: the names of the additional numbers that a payload must contain.
    - `self_checked`: the names of the inputs whose finiteness the rule checks itself. The server then skips its own
      check. The name `"points"` includes the base.
    - `accepts_tensor_lists`: whether the rule needs only a Gram matrix and a linear combination of its inputs on flat
      spaces.

    The server rejects a payload with missing or unexpected tensors or numbers.

    A rule with `accepts_tensor_lists = True` reads models in place, without copying them into a vector:

    - A model is a row, which is either a vector (P,) or a tuple of the tensors of a state dict. The models `start`,
      `base` and `current` are rows, and `points` is a tuple of rows.
    - The server calls `plan(space, state, update)` instead of `step`. This method returns the same values but does not
      write to any tensor. It creates the new model with [`Frame.move`][manifoldagg.corrections.Frame.move], and the
      sums in the state with [`Frame.for_state`][manifoldagg.corrections.Frame.for_state]. These methods return
      descriptions of linear combinations. The server computes them after all checks have passed.
    """

    @property
    def cohort(self) -> int:
        """The number of updates that the rule needs for a step. It is 1 for an asynchronous rule."""

    def init(self, space: Manifold, start: Point) -> State:
        """Return the state of the rule before the first step. `start` is the initial model."""

    def message(
        self, space: Manifold, state: State, current: Float[Tensor, " P"], client_state: ClientState
    ) -> Message:
        """Return the message that the server sends to a client with its next task.

        The start model in the message may be `current`, the tensor of the server model, because the server copies the
        tensors of the message.
        """

    def step(
        self, space: Manifold, state: State, update: Update, *, out: Tensor | None = None
    ) -> tuple[State, Outcome]:
        """Process one update, and return the next state of the rule and the outcome.

        The caller owns the tensors of `update`. To store such a tensor in the state, the rule must clone it. The only
        tensor that the rule may write to is `out`, an optional output buffer for the new model.
        """


@runtime_checkable
class Trainer(Protocol):
    """Protocol for the local training of a client."""

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
        """Train a model on a client's data, and return the payload.

        Args:
            space: the space of the models.
            message: the message of the server. Training starts from `message.start`.
            loss: the loss function.
            batches: the batches of the client's data, which can be iterated repeatedly.
            client_state: the state in the payload of this client's previous task. `None` in the first task.
            generator: the random generator.
        """


@runtime_checkable
class Averaging(Protocol):
    """Protocol for an average over the versions of a server model."""

    @property
    def average(self) -> Float[Tensor, " P"] | None:
        """The current average as a vector (P,), or `None` before the first version."""

    def update(self, version: int, model: Float[Tensor, " P"]) -> None:
        """Add a new version of the model to the average.

        The method may store the tensor `model` but must not modify it. If the method receives the latest version a
        second time, the second call must have no effect. Such a call can follow an interrupt, for example a
        `KeyboardInterrupt` during the first call.
        """

    def state(self) -> Any:
        """Return the state of the average for `load`, as a tree of numbers and copied tensors."""

    def load(self, state: Any) -> None:
        """Restore a state that the method `state` returned."""


def _total_nbytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_rule_protocol(rule: Rule, hint: str = "") -> Rule:
    """Return `rule` if it is an instance with `cohort`, `init`, `message` and `step`.

    Args:
        rule: the rule to check.
        hint: the end of the error message if `rule` is not a rule.

    Raises:
        ArgumentError: if an attribute is missing, if `step` does not accept `out`, or if `rule` is a class.
    """
    if isinstance(rule, type):
        raise ArgumentError(f"rule: expected an instance, got the class {rule.__name__}; write {rule.__name__}()")
    # Attributes are checked by name, because `isinstance` with a protocol takes longer than a step of a small model.
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
    step = getattr(kind, "step", None)
    if step is None:  # an attribute of the instance
        return True
    given = inspect.signature(step).parameters
    return "out" in given or any(parameter.kind is parameter.VAR_KEYWORD for parameter in given.values())


def check_trainer(trainer: Trainer) -> Trainer:
    """Return `trainer` if it is an instance with a method `train`.

    Raises:
        ArgumentError: if the method `train` is missing, or if `trainer` is a class or a PyTorch module.
    """
    given: object = trainer
    # A PyTorch module has another method named `train`, so it would pass the `isinstance` check.
    if isinstance(given, type | torch.nn.Module) or not isinstance(given, Trainer):
        raise ArgumentError(f"trainer: expected an instance with `train`, got {short_repr(given)}")
    return trainer


def check_parameter_space(space: Manifold | None) -> ParameterSpace:
    """Return `space` if it is a `ParameterSpace`, whose points are models with named tensors.

    Raises:
        ArgumentError: if the space has another type.
    """
    if not isinstance(space, ParameterSpace):
        raise ArgumentError(f"space: expected a ParameterSpace, got {type(space).__name__}")
    return space


def accepts_tensor_lists(rule: Rule, space: Manifold) -> bool:
    """Return whether a rule accepts models as lists of tensors on the given space.

    If it does, the server calls the method `plan` of the rule with these lists. Otherwise, the server concatenates the
    tensors of each model into one vector and calls the method `step`.
    """
    return space.flat and has_plan(rule)


def has_plan(rule: Rule) -> bool:
    """Return whether the server can call the method `plan` of a rule, with models as lists of tensors.

    Otherwise, the server calls `step` with models as vectors. If a subclass overrides `step` but inherits `plan`, the
    result is false, because the inherited `plan` computes the step of the parent class.
    """
    return bool(getattr(rule, "accepts_tensor_lists", False)) and _defines_plan_last(type(rule))


@lru_cache(maxsize=256)
def _defines_plan_last(kind: type) -> bool:
    """Return whether the most derived class that defines `plan` or `step` defines `plan`."""
    classes = (vars(base) for base in kind.__mro__ if "plan" in vars(base) or "step" in vars(base))
    return "plan" in next(classes, ())


def check_averaging(averaging: Averaging | None) -> Averaging | None:
    """Return `averaging` if it implements the protocol `Averaging` or is `None`.

    Raises:
        ArgumentError: if the object lacks an attribute of `Averaging`, or if it would overwrite the server's model.
    """
    given: object = averaging
    if isinstance(given, type):
        raise ArgumentError(
            f"averaging: expected an instance, got the class {given.__name__}; write {given.__name__}(space)"
        )
    if averaging is not None and not isinstance(given, Averaging):
        missing = [name for name in ("average", "update", "state", "load") if not hasattr(averaging, name)]
        what = short_repr(given) if len(missing) > 2 else f"a {type(given).__name__} without {missing[0]}"
        raise ArgumentError(f"averaging: expected an object with average, update, state and load, got {what}")
    if getattr(averaging, "has_reset_points", False):
        raise ArgumentError("averaging: expected periodic=None, as an average cannot overwrite the server's model")
    return averaging


def extra_fields(rule: Rule) -> tuple[dict[str, int | None], tuple[str, ...]]:
    """Return the additional tensors and numbers that a rule requires in a payload.

    Returns:
        The mapping `tensors` from names to numbers of points, where `None` means a single point without a batch
        dimension, and the tuple `numbers` of names.

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
