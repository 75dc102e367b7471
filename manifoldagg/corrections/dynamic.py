"""A correction of stale updates in three phases: first OrthoGrad, then `Tangent`, and finally OrthoPos.

The drift is the change of the server's model since the client started. An update conflicts with the drift if their
inner product is negative or zero. The phases handle updates as follows:

1. OrthoGrad removes the component along the drift from conflicting updates. Other updates stay unchanged.
2. `Tangent` leaves all updates unchanged.
3. OrthoPos removes the component along the drift from conflicting updates. It subtracts the drift from other updates.

By default, a phase ends when successive steps of the server's model increasingly cancel each other, as they do near a
minimum.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from manifoldagg._validation import check_choice, check_number, check_shape, short_repr
from manifoldagg.corrections.correction import Correction
from manifoldagg.corrections.delay import Tangent
from manifoldagg.corrections.frame import GRANULARITIES, Frame
from manifoldagg.corrections.gram import Gram, Matrix, detach_scalar
from manifoldagg.corrections.orthogonal import OrthoGrad, OrthoPos
from manifoldagg.errors import ArgumentError

__all__ = ["OrthoDyn"]

PHASES = ("gradient", "tangent", "position")


@dataclass(frozen=True)
class OrthoDyn(Correction):
    r"""A correction in three phases: OrthoGrad first, then `Tangent`, and finally OrthoPos near a minimum.

    Early in a run, the server's model moves in one direction. Near a minimum, it moves back and forth. By default, the
    correction detects this change from the straightness of the path. Let $u$ be the corrected displacement of the end
    point of an update, and let EMA denote an exponential moving average over the updates. The straightness

    $$r = \|\operatorname{EMA}(u)\| \,/\, \operatorname{EMA}(\|u\|) \in [0, 1]$$

    is 1 on a straight path and small on a circular path. A run begins with OrthoGrad. When $r$ falls below
    `upper - hysteresis`, the correction changes to `Tangent`. When $r$ falls below `lower - hysteresis`, it changes to
    OrthoPos. The correction never returns to an earlier phase.

    The state consists of the mean vector $\operatorname{EMA}(u)$, the mean length $\operatorname{EMA}(\|u\|)$, the
    phase and the number of updates. The mean vector is an additional row of the frame.

    Args:
        schedule: a function from the number of updates $\tau = 0, 1, \dots$ to `"gradient"`, `"tangent"` or
            `"position"`. If it is given, it selects the phase instead of $r$.
        upper: the threshold at which OrthoGrad ends.
        lower: the threshold at which OrthoPos begins.
        hysteresis: the margin below a threshold at which the phase changes.
        decay: the factor by which each update multiplies the weights of all earlier updates in the two averages.
        clip: whether to use the continuous form of OrthoPos.
        granularity: the granularity of the projections. $r$ always refers to the whole model.

    Raises:
        ArgumentError: if an option is out of range, or if the space is curved and no schedule is given. Steps in
            the tangent spaces of different points have no mean.

    Source: Report (16). The criterion $r$ is specific to this library.

    Example:
        >>> OrthoDyn(schedule=lambda version: "gradient" if version < 100 else "position").keeps_state
        True
    """

    schedule: Callable[[int], str] | None = None
    upper: float = field(default=0.5, kw_only=True)
    lower: float = field(default=0.3, kw_only=True)
    hysteresis: float = field(default=0.05, kw_only=True)
    decay: float = field(default=0.98, kw_only=True)
    clip: bool = field(default=False, kw_only=True)
    granularity: str = field(default="model", kw_only=True)

    keeps_state = True

    def __post_init__(self) -> None:
        if self.schedule is not None and not callable(self.schedule):
            raise ArgumentError(f"schedule: expected a function of an int, got {short_repr(self.schedule)}")
        check_number("upper", self.upper, at_least=0, at_most=1)
        check_number("lower", self.lower, at_least=0, at_most=self.upper)
        check_number("hysteresis", self.hysteresis, at_least=0, at_most=1)
        check_number("decay", self.decay, at_least=0, at_most=1)
        check_choice("granularity", self.granularity, GRANULARITIES)

    def extend(self, frame: Frame, state: Any = None) -> Frame:
        if self.schedule is not None:
            return frame
        frame.require_flat("OrthoDyn without a schedule, the mean of steps from different points,", sums_only=True)
        if state is None or "mean" not in state:
            # Before the first update, the mean is 0. A row minus itself is 0 and needs no memory.
            return frame.with_row("mean step", frame.current, frame.current)
        if not frame.ambient.leaves:
            check_shape("state['mean']", state["mean"], frame.size)
        return frame.with_row("mean step", state["mean"])

    def coefficients(self, gram: Gram, state: Any = None) -> tuple[Matrix, Any]:
        state = {"version": 0, "phase": "gradient", "length": 0.0} if state is None else state
        version = state["version"]
        phase = state["phase"]
        length = state["length"]
        if self.schedule is not None:
            phase = check_choice(f"schedule({version})", self.schedule(version), PHASES)
        # Without a schedule, the current phase corrects this update, and its result decides the next phase.
        matrix, _ = self.correction_for(phase).coefficients(gram)
        if self.schedule is None and gram.num_displacements:
            length, phase = self._update_phase(gram, matrix[..., -1, :], length, phase)
        return matrix, {**state, "version": version + 1, "phase": phase, "length": detach_scalar(length)}

    def correction_for(self, phase: str) -> Correction:
        """Return the correction of a phase."""
        if phase == "tangent":
            return Tangent()
        if phase == "gradient":
            return OrthoGrad(granularity=self.granularity)
        return OrthoPos(clip=self.clip, granularity=self.granularity)

    def update_state(self, frame: Frame, coefficients: Matrix, state: Any) -> Any:
        if self.schedule is not None or not frame.num_displacements:
            return state
        frame = frame.detach()
        # `frompyfunc` applies the function to each entry of an object array, whose entries may be tensors.
        weights = self._next_mean(np.frompyfunc(lambda c: float(detach_scalar(c)), 1, 1)(coefficients[..., -1, :]))
        # In half precision, a small contribution of one step would be rounded away.
        wide = torch.promote_types(frame.dtype, torch.float32)
        return {**state, "mean": frame.materialize(weights, wide)}

    def _next_mean(self, coefficients: Matrix) -> Matrix:
        """Return the coefficients of the next moving average of the server's steps."""
        # `coefficients` defines the current step. The last row of the frame is the previous average.
        after: Matrix = (1 - self.decay) * coefficients
        after[..., -1] = after[..., -1] + self.decay
        return after

    def _update_phase(self, gram: Gram, coefficients: Matrix, length: Any, phase: str) -> tuple[Any, str]:
        # The Gram matrix determines both norms, so no vector is formed.
        """Return the next mean length and the next phase.

        Args:
            gram: the Gram matrix of the rows.
            coefficients: the coefficients of the corrected displacement of the end point.
            length: the mean length before this update.
            phase: the phase that corrected this update.
        """
        step = gram.squared_norm(coefficients)
        mean = gram.squared_norm(self._next_mean(coefficients))
        # Rounding can make a square slightly negative. `0 * step` preserves the type of symbolic numbers.
        length = self.decay * length + (1 - self.decay) * max(step, 0 * step) ** 0.5
        # As long as no update has moved the model, the path has no direction.
        if length == 0:
            return length, phase
        straight = max(mean, 0 * mean) ** 0.5 / length
        if phase == "gradient" and straight < self.upper - self.hysteresis:
            phase = "tangent"
        # This is not an `elif`: a sharp drop of the straightness passes through both thresholds in one update.
        if phase == "tangent" and straight < self.lower - self.hysteresis:
            phase = "position"
        return length, phase
