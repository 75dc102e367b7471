"""Base classes of the server rules, which compute the next server model from client updates.

- `ServerRule` checks the options of a rule and the space of its models, and sends the current model to clients.
- `TangentRule` extends `ServerRule` for curved spaces. It has options for the transport of tangent vectors from one
  model to another.

Other modules define subclasses of `TangentRule`, such as `GramRule`, which takes one step for each update, and
`BufferedRule`, which takes one step along the mean of several updates.
"""

import abc
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor

from manifoldagg._validation import KeywordHints, check_choice, check_count, short_repr
from manifoldagg.corrections import Frame, Gram
from manifoldagg.corrections.combination import Combination
from manifoldagg.corrections.transport import DEFAULT_RUNGS, TRANSPORTS, Transporter
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.pytrees import materialize
from manifoldagg.federated.rules._geometry import in_float64
from manifoldagg.federated.rules._riemannian_step import exp_projected, tangents_at
from manifoldagg.federated.schedules import check_options
from manifoldagg.federated.step import measure
from manifoldagg.federated.types import ClientState, Message, Outcome, Point, State, Update
from manifoldagg.kernels.alloc import empty_like
from manifoldagg.manifolds import Manifold, check_point
from manifoldagg.manifolds.manifold import check_is_manifold

__all__ = ["ServerRule", "TangentRule", "commit", "move_to"]


@dataclass(frozen=True)
class ServerRule(KeywordHints, abc.ABC):
    """Base class for rules that count versions and send the current model to clients.

    A subclass implements `plan`, or `step` if it needs whole vectors. It declares its requirements with class
    attributes:

    - `needs_flat`: the operations of the rule that are undefined on curved leaves, as a plural noun for the error
      message. If the text is not empty, the rule rejects curved leaves.
    - `needs_linear_leaves`: the operations of the rule that need inner products and sums of points, as a plural noun.
      If the text is not empty, the rule rejects curved leaves except low-rank leaves.
    - `uses_drift`: whether a step depends on the drift $g$. If not, the server need not store the base of a stale
      update.
    - `not_private_because`: the reason why [`Private`][manifoldagg.federated.rules.Private] rejects the rule. If the
      text is empty, the rule can be private.
    - `rate_kind`: the unit of the option `rate`, which [`suggest_rate`][manifoldagg.federated.suggest_rate] reads:
        - `"share"`: a fraction of the distance to the client's model.
        - `"step"`: a factor that is multiplied by the client's weight.
        - `"mean"`: a factor of the mean of a buffer.
        - `"latest"`: a factor of the mean of the latest displacements of all clients.
        - `""`: any other unit.
    - `state_entries`: the names of all entries that the state can have. `aggregate` rejects a state with other entries,
      because it belongs to another rule. `None` allows every entry. Subclasses do not inherit the value, because they
      may add entries.
    """

    rate_kind: ClassVar[str] = ""
    state_entries: ClassVar[frozenset[str] | None] = None
    needs_flat: ClassVar[str] = ""
    needs_linear_leaves: ClassVar[str] = ""
    uses_drift: ClassVar[bool] = True
    not_private_because: ClassVar[str] = "its step is not a sum of updates"

    def __post_init__(self) -> None:
        check_options(self)

    def init(self, space: Manifold, start: Point) -> State:
        self.check_space(space, start)
        return {"version": 0}

    def message(self, space: Manifold, state: State, current: Tensor, client_state: ClientState) -> Message:
        return Message(current)

    def plan(self, space: Manifold, state: State, update: Update) -> tuple[State, Outcome]:
        """Prepare a step, and return the next state of the rule and the outcome (the new model and the metrics).

        The method does not compute the new model or new vectors of the state, such as a momentum. It returns
        `Combination` objects, which contain the vectors and coefficients of linear combinations. The caller computes
        them after all checks have passed, so that a rejected update leaves all tensors unchanged.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither `plan` nor `step`")

    def step(
        self, space: Manifold, state: State, update: Update, *, out: Tensor | None = None
    ) -> tuple[State, Outcome]:
        return commit(self.plan(space, state, update), out)

    def check_space(self, space: Manifold, start: Point) -> None:
        """Check that the rule supports a space.

        Raises:
            ArgumentError: if the space has leaves that the rule does not support.
        """
        if getattr(space, "flat", False):
            return
        check_is_manifold(space)
        if lacks := self.needs_flat or ("" if space.ambient else self.needs_linear_leaves):
            curved = ", ".join(str(leaf) for leaf in space.leaves(start) if not leaf.space.flat)
            name = type(self).__name__
            raise ArgumentError(f"space: expected flat leaves for the {lacks} of {name}, got curved leaves: {curved}")


@dataclass(frozen=True)
class TangentRule(ServerRule):
    """Base class for rules that support curved spaces by transporting tangent vectors.

    On a curved space, the displacement of an update is a tangent vector at the model from which the client started. A
    server step, however, starts at the current server model. The rule therefore transports each displacement to the
    current model.

    The option `transport` selects the method of transport. The option `rungs` is the number of steps of the approximate
    method `"ladder"`. [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected] describes both options.
    """

    transport: str | None = field(default=None, kw_only=True)
    rungs: int = field(default=DEFAULT_RUNGS, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transport is not None:
            check_choice("transport", self.transport, TRANSPORTS)
        check_count("rungs", self.rungs)

    def check_space(self, space: Manifold, start: Point) -> None:
        super().check_space(space, start)
        if self.transport is None and space.flat:
            return
        if not (space.flat or space.ambient):
            point = in_float64(space, check_point(space, start, name="start"))
            Transporter(space, point, point, self.transport, self.rungs).check()
        elif self.transport is not None and space.flat:
            raise ArgumentError(f"transport: expected None on a flat space, got {short_repr(self.transport)}")
        elif self.transport not in (None, "projection"):
            given = short_repr(self.transport)
            raise ArgumentError(f"transport: expected None or 'projection' for low-rank leaves, got {given}")


def commit(planned: tuple[State, Outcome], out: Tensor | None = None) -> tuple[State, Outcome]:
    """Complete a step that the method `plan` of a rule has prepared.

    In the result of `plan`, the new model and the new vectors of the rule's state can be linear combinations that have
    not been computed yet. The function computes them. If `out` is given, it writes the new model to `out`.
    """
    state, outcome = planned
    state, outcome, numbers = measure(state, outcome, dict(outcome.numbers), compute=out is None)
    # The state is computed before the new model, because writing to `out` may overwrite memory that the state reads.
    state = materialize(state)
    model: Any = outcome.model
    if isinstance(model, Combination):
        model = model.compute(out)
    elif not (model is None or out is None or model is out):
        model = out.copy_(model)
    return state, replace(outcome, model=model, numbers=numbers, linear=None)


def move_to(space: Manifold, current: Point, frame: Frame, gram: Gram, coefficients: list[float]) -> Any:
    r"""Move the current model along a tangent vector, and return the new model.

    The tangent vector $u$ is the linear combination of the vectors in `frame` with the given `coefficients`. The new
    model is $\exp_\Theta u$, where $\Theta$ is the current model.
    """
    if frame.transporter is None:
        return frame.move(gram, coefficients)
    here = frame.transporter.current
    (u,) = tangents_at(space, here, frame.combine(None, coefficients)[None])
    return empty_like(current).copy_(exp_projected(space, here, u))
