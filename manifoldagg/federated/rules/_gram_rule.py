"""GramRule: the base class of rules that compute a step from a Gram matrix."""

import abc
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from manifoldagg._validation import short_repr
from manifoldagg.corrections import Corrected, Frame, Gram
from manifoldagg.corrections.combination import Combination
from manifoldagg.errors import RuleError
from manifoldagg.federated.rules._base import TangentRule
from manifoldagg.federated.rules._geometry import check_points, frame_from_update, safe_sqrt
from manifoldagg.federated.rules._riemannian_step import step_along_curve, tangents_at
from manifoldagg.federated.rules._step_curve import StepCurve
from manifoldagg.federated.types import ClientState, LinearStep, Outcome, State, Update
from manifoldagg.kernels.alloc import empty_like
from manifoldagg.manifolds import Manifold

__all__ = ["GramRule", "staleness_penalty"]


@dataclass(frozen=True)
class GramRule(TangentRule):
    r"""Base class for asynchronous rules that compute a step from the inner products of an update.

    $$\Theta^{\tau+1} = \Theta^\tau + \rho\, u, \qquad u = \sum_j c_j\, r_j, \qquad r = (v_1, \dots, v_n, g),$$

    where $v_i = \varphi_i - \Theta^t$ are the displacements of the client's models and $g = \Theta^\tau - \Theta^t$ is
    the drift of the server. The method `coefficients` computes $c$ from the inner products of these rows, and the
    method `rate` returns $\rho$.

    A subclass never accesses vectors, so it works on models of any format. One pass over the parameters reads the rows,
    and one pass writes the new model. On a curved space, $v_i = \log_{\Theta^t} \varphi_i$ is transported to
    $\Theta^\tau$, and the new model is $\exp_{\Theta^\tau}(\rho\, u)$.

    Use this class to write your own rule. To use a [`Correction`][manifoldagg.corrections.Correction] as a rule, write
    [`AsyncCorrected(correction=...)`][manifoldagg.federated.rules.AsyncCorrected].

    The state is a dict. Its entry `version` counts the steps. `coefficients` may add further entries.

    Class attributes:

    - `granularity`: `"model"` for one Gram matrix, or `"tensor"` for one Gram matrix per named tensor.
    - `single_point`: whether an update is one model (n = 1). If not, an update may be a curve with n control points.
    - `overshoot`: `"clamp"` limits $\rho$ to 1, and `"extend"` does not.
    - `fixed_coefficients`: the coefficients $c$ of $(v, g)$, if they are constants and the rate does not depend on
      inner products. One pass over the parameters is then enough. With `None`, the rule calls `coefficients`.

    Args:
        transport: the transport of tangents on a curved space: `"parallel"`, `"ladder"` or `"projection"`. The default
            `None` uses parallel transport where a closed form exists, and a ladder otherwise. A flat space accepts only
            `None`.
        rungs: the number of rungs of a ladder.

    Cost: a step reads 8 words per parameter, writes 1 and allocates 0.

    Example:
        This rule halves each displacement that conflicts with the drift:

        >>> import manifoldagg, torch
        >>> from manifoldagg.federated import GramRule
        >>> class HalveConflicts(GramRule):
        ...     def coefficients(self, gram, state):
        ...         conflicts = gram.matrix[0, 1] < 0  # <v, g>
        ...         return [0.5 if conflicts else 1.0, 0.0], state
        ...
        ...     def rate(self, state, update):
        ...         return 1 / (1 + update.staleness)
        >>> current, base, update = ([torch.tensor([x])] for x in (1.0, 0.0, -2.0))
        >>> manifoldagg.aggregate(HalveConflicts(), None, current, base, update, staleness=1)[0]
        [tensor([0.5000])]
    """

    cohort: ClassVar[int] = 1
    accepts_tensor_lists: ClassVar[bool] = True
    single_point: ClassVar[bool] = True
    not_private_because: ClassVar[str] = "every update moves the model; use FedBuff(1) instead"
    granularity = "model"
    overshoot = "clamp"
    fixed_coefficients: ClassVar[tuple[float, ...] | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        is_field = "rate" in inspect.get_annotations(cls) or not callable(cls.rate)
        if is_field and cls.step_size is GramRule.step_size:
            raise TypeError(
                f"{cls.__name__}.rate: expected a method rate(state, update), got a field; rename the field"
            )

    @abc.abstractmethod
    def coefficients(self, gram: Gram, state: State) -> tuple[Any, State]:
        r"""Return the coefficients $c$ of the rows, and the next state.

        Args:
            gram: the inner products of $v_1, \dots, v_n, g$.
            state: the state before the step. The method must not modify this value.

        Returns:
            A tuple of the coefficients and the next state. The caller updates the entry `version` of the state. The
            shape of the coefficients is (k,) with k = n + 1, or (m, k) for a curve with m control points. With
            granularity `"tensor"`, the shape is (S, m, k) for S named tensors.
        """

    def rate(self, state: State, update: Update) -> float:
        r"""Return the step size $\rho \ge 0$, the fraction of $u$ by which the model moves.

        Args:
            state: the state before the step.
            update: the update, with its `staleness`, `weight`, `samples` and `client`.
        """
        return 1.0

    def step_size(self, state: State, update: Update, penalty: Callable[[float], float]) -> float:
        r"""Return the step size $\rho$, the factor by which the rule scales the corrected displacement.

        By default, this is the result of the method `rate`. A subclass can multiply it by `penalty(strength)`, the
        staleness penalty of this update for a given strength.
        """
        return self.rate(state, update)

    def correct(self, frame: Frame, state: State) -> Corrected:
        """Return the corrected displacements of an update.

        Each corrected displacement is a linear combination of the displacements and the drift (the change of the server
        model since the client started). The method `coefficients` returns its coefficients.

        Raises:
            RuleError: if `coefficients` does not return a tuple of finite coefficients, one for each row, and a dict.
        """
        gram = frame.gram(self.granularity)
        result: Any = self.coefficients(gram, state)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
            raise RuleError(f"coefficients: expected a tuple of coefficients and a dict, got {short_repr(result)}")
        lines, after = result
        c = np.array(lines, dtype=object)
        if c.ndim not in (1, 2, 3) or c.shape[-1] != len(frame.rows):
            expected = f"{len(frame.rows)} numbers, one for each of {', '.join(frame.names)}"
            raise RuleError(f"coefficients: expected {expected}, got shape {c.shape}")
        try:
            finite = all(map(math.isfinite, c.flat))
        except (TypeError, ValueError, OverflowError):
            finite = False
        if not finite:
            raise RuleError(f"coefficients: expected finite numbers, got {short_repr(lines)}")
        return Corrected(frame, gram, np.atleast_2d(c), after, gram)

    def next_state(self, state: State, update: Update, corrected: Corrected) -> dict[str, Any]:
        """Return the entries of the next state other than `version`."""
        return dict(corrected.state)

    def client_state(self, update: Update) -> ClientState:
        """Return the next state of the client."""
        return update.client_state

    def step_curve(self, state: State) -> StepCurve:
        """Return the curve along which a step moves the server model.

        By default, this is a Bézier curve with the corrected displacements of the update as control points. The option
        `overshoot` of the rule determines whether step sizes above 1 lead beyond the end of the curve.
        """
        return StepCurve(self.overshoot)

    def plan(self, space: Manifold, state: State, update: Update) -> tuple[State, Outcome]:
        by_tensor = self.granularity == "tensor"
        if len(update.points) != 1:
            count, what = (1, "one model") if self.single_point else (None, "at least one control point")
            check_points(self, update, count, what)
        frame = frame_from_update(space, update, transport=self.transport, rungs=self.rungs, tensors=by_tensor)
        fixed = self.fixed_coefficients
        if fixed is not None and frame.is_flat and len(update.points) == 1:
            return self._plan_linear(frame, fixed, state, update)
        corrected = self.correct(frame, state)
        original = corrected.original_gram
        inner = corrected.inner_products()
        numbers = {"cosine": original.cosine}
        drift_products = original.drift_products

        def penalty(strength: float) -> float:
            if strength == 0:
                return 1.0
            drift = original.matrix[original.num_displacements, original.num_displacements]
            return staleness_penalty(strength, safe_sqrt(inner[-1][-1]), safe_sqrt(drift))

        rho = self._checked_step_size(state, update, penalty)
        memory = self.client_state(update)
        after = self.next_state(state, update, corrected) | {"version": state["version"] + 1}
        curve = self.step_curve(state)
        if frame.transporter is None and curve.embedding is None:
            s, weights, norm = curve.position(inner, drift_products, rho)
            model = corrected.move(weights)
        else:
            here = update.current if frame.transporter is None else frame.transporter.current
            u = curve.straighten(tangents_at(space, here, corrected.displacements()))
            s, reached, norm = step_along_curve(space, here, u, curve, curve.effective_rate(rho, drift_products))
            model = empty_like(update.current).copy_(reached)
        numbers |= {"rate": rho, "step": s, "norm": norm} | frame.diagnostics
        return after, Outcome(model, memory, numbers)

    def _plan_linear(
        self, frame: Frame, fixed: tuple[float, ...], state: State, update: Update
    ) -> tuple[State, Outcome]:
        rho = self._checked_step_size(state, update, _no_penalty)
        curve = StepCurve(self.overshoot)
        lines = np.array([fixed], dtype=object)
        weight = curve.position_on_line(rho)

        def metrics(gram: Gram) -> dict[str, float]:
            inner = Corrected(frame, gram, lines, None, gram).inner_products()
            s, _, norm = curve.position(inner, gram.drift_products, rho)
            return {"cosine": gram.cosine, "rate": rho, "step": s, "norm": norm}

        model = Combination(frame, np.array([weight * c for c in fixed], dtype=object), from_current=True)
        after = {"version": state["version"] + 1}
        return after, Outcome(model, self.client_state(update), linear=LinearStep(frame, metrics))

    def _checked_step_size(self, state: State, update: Update, penalty: Callable[[float], float]) -> float:
        rho = self.step_size(state, update, penalty)
        try:
            valid = 0 <= rho < math.inf
        except (TypeError, ValueError, RuntimeError):  # NumPy arrays raise `ValueError`, and tensors `RuntimeError`.
            valid = False
        if not valid:
            raise RuleError(f"rate: step size: expected a finite number >= 0, got {short_repr(rho)}")
        return rho


def _no_penalty(strength: float) -> float:
    raise RuleError("fixed_coefficients: expected None, because the rate depends on inner products")


def staleness_penalty(strength: float, candidate: float, drift: float) -> float:
    r"""Return the staleness penalty $S$, the factor by which a rule scales the step of a stale update.

    $$S = 1 + \alpha \Bigl( \frac{\|\Theta^\tau - \hat\Theta\|}{\|\Theta^t - \Theta^\tau\|} - 1 \Bigr)$$

    Here, $\alpha$ is the strength of the penalty. The numerator is the length of the unscaled step from the current
    model $\Theta^\tau$ to the candidate $\hat\Theta$. The denominator is the length of the drift from the client's
    start model $\Theta^t$ to $\Theta^\tau$. With $\alpha > 0$, $S$ is below 1 if the unscaled step is shorter than the
    drift, and above 1 if it is longer.

    Args:
        strength: the strength $\alpha$.
        candidate: $\|\Theta^\tau - \hat\Theta\|$, the distance from the current model to the new candidate.
        drift: $\|\Theta^t - \Theta^\tau\|$. If the drift is 0, $S$ is 1.

    Example:
        >>> staleness_penalty(1.0, candidate=1.0, drift=4.0)
        0.25
    """
    return 1.0 if drift == 0 else 1 + strength * (candidate / drift - 1)
