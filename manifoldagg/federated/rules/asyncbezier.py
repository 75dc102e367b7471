"""AsyncBezier: a step along the client's curve, transported to the current model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from manifoldagg._validation import check_choice, check_number, short_repr
from manifoldagg.corrections import AutoThreshold, Corrected, Correction, OrthoDC
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules._correction_rule import ScheduledRule
from manifoldagg.federated.rules._geometry import safe_sqrt
from manifoldagg.federated.rules._step_curve import PULL_BACK_MODES, StepCurve
from manifoldagg.federated.types import ClientState, Message, State, Update
from manifoldagg.manifolds import Manifold

__all__ = ["AsyncBezier"]

AUTO = "auto"
CURVE_WEIGHT_GAIN = 0.02
"""Of the means by which a curve weight is chosen: they look back over fifty updates."""
PROGRESS_GAIN = 0.01
"""Of the mean pace, once it is the mean of a hundred."""
MAX_PROGRESS_RATIO = 100.0
"""How many times the mean a pace may be, or the mean it."""
MIN_PROGRESS = 1e-100
MAX_PROGRESS = 1e100
"""A pace beyond these is none: ratios of what lies between are numbers."""


@dataclass(frozen=True)
class AsyncBezier(ScheduledRule):
    r"""Rule that steps along the corrected Bézier curve of a client.

    $\Theta^{\tau+1} = \iota_\psi(s)$ on the corrected curve $\psi = \exp_{\varphi_{\Theta^\tau}}(\pi v)$.

    $\pi$ is OrthoDC, control point by control point; the candidate is $\hat\Theta = \iota_\psi(1)$; the rate
    $\rho = S\, w_i\, \eta_g(\tau)$ is pulled back to the smallest $s$ with

    $$d(\iota_\psi(s), \Theta^\tau) = \rho\, d(\hat\Theta, \Theta^\tau).$$

    That weighs clients by the length of their chord over the speed of their curve. Where a curve follows the path of
    local training, $s = \min(1, \rho)$ itself (`pull_back="none"`) is the step that tends to the client's gradient as
    $\rho \to 0$.

    Options beside those below are those of
    [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected]; `decay=1` is AsyncBezierED.

    Args:
        threshold: $\vartheta \in [-1, 1]$ of OrthoDC; `"auto"` chooses -1, 0 or 1 at each update, on a flat space, by
            [`AutoThreshold`][manifoldagg.corrections.AutoThreshold].
        pull_back: `"chord"` is the distance above; `"none"`: $s = \rho$; `"conflict_free_prefix"`: $s = \rho\, a$,
            where $a$ is the part of the curve before the first leg, from one point to the next, whose product with the
            drift is negative, and one leg at least.
        curve_weight: $\kappa \in [0, 1]$: the curve is $\kappa$ times the client's and $1 - \kappa$ times its chord; 0
            is the step of [`ASGD`][manifoldagg.federated.rules.ASGD] where nothing is corrected. `"auto"`:
            $\kappa = 1 - r$ within [0, 1], where $r$ is the mean cosine of displacements and drifts over the
            last fifty updates, each weighed by both lengths. It is 0 before there has been a drift, and grows as the
            run agrees with itself no more.
        normalise: divide $\rho$ by the client's pace $\eta_i K_i$ over the running mean of paces, at which clients
            with different local rates or steps have one say. The message has the number `progress`, and the payload
            brings the client's, as [`Trajectory`][manifoldagg.federated.clients.Trajectory] does.
        polygon: read the points as the corners of a polygon, equally far apart in the parameter, such as the n points
            of `Trajectory(pieces=n)`; else as the control points of a Bézier curve of degree n.

    Raises:
        ArgumentError: naming the option that is out of range.

    Source: Manifold (9)-(12), Algorithm 1. Cost: with n control points, n + 2 vectors are read twice and one
    is written.

    Cost: an update that moves the model reads 8 words a parameter, writes 1 and makes 0.

    Example:
        >>> AsyncBezier(threshold=1.0, rate=0.5).correction
        OrthoDC(threshold=1.0)
        >>> AsyncBezier(threshold="auto").correction
        AutoThreshold(decay=0.95)

        The path of a client that has turned, halfway: its first leg.

        >>> import torch
        >>> from manifoldagg.federated import Update
        >>> from manifoldagg.manifolds import Flat
        >>> start, path = torch.zeros(2), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        >>> rule = AsyncBezier(threshold=-1.0, rate=0.5, pull_back="none", polygon=True)
        >>> rule.step(Flat(2), rule.init(Flat(2), start), Update(0, start, start, path))[1].model
        tensor([1., 0.])
    """

    single_point: ClassVar[bool] = False
    threshold: float | str = 1.0
    pull_back: str = field(default="chord", kw_only=True)
    curve_weight: float | str = field(default=1.0, kw_only=True)
    normalise: bool = field(default=False, kw_only=True)
    polygon: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_or_auto("threshold", self.threshold, -1)
        _check_or_auto("curve_weight", self.curve_weight, 0)
        check_choice("pull_back", self.pull_back, PULL_BACK_MODES)
        if self.overshoot == "extend" and (self.polygon or self.pull_back == "conflict_free_prefix"):
            what = "a polygon" if self.polygon else "the conflict-free prefix"
            raise ArgumentError(f"overshoot: expected 'clamp', as nothing follows the end of {what}; got 'extend'")

    @cached_property
    def correction(self) -> Correction:
        return AutoThreshold() if isinstance(self.threshold, str) else OrthoDC(self.threshold)

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of the numbers that payloads contain."""
        return ("progress",) if self.normalise else ()

    def message(self, space: Manifold, state: State, current: Tensor, client_state: ClientState) -> Message:
        return Message(current, numbers=dict.fromkeys(self.numbers, 1.0))

    def step_size(self, state: State, update: Update, penalty: Callable[[float], float]) -> float:
        rho = super().step_size(state, update, penalty)
        if not self.normalise:
            return rho
        pace = _client_progress(update)
        mean: float = state.get("progress", pace)
        return rho * mean / _clipped(pace, mean)

    def step_curve(self, state: State) -> StepCurve:
        bend = _auto_curve_weight(state) if isinstance(self.curve_weight, str) else self.curve_weight
        return StepCurve(self.overshoot, self.pull_back, bend, self.polygon)

    def next_state(self, state: State, update: Update, corrected: Corrected) -> dict[str, Any]:
        kept = super().next_state(state, update, corrected)
        if self.normalise:
            pace = _client_progress(update)
            mean = state.get("progress", pace)
            # The mean that a client meets is that of the others before it: it would else bear on its own step.
            gain = max(1 / (state["version"] + 1), PROGRESS_GAIN)
            kept["progress"] = mean + gain * (_clipped(pace, mean) - mean)
        if isinstance(self.curve_weight, str):
            n = corrected.original_gram.num_displacements
            inner = corrected.original_gram.matrix
            lengths = safe_sqrt(inner[n - 1, n - 1]) * safe_sqrt(inner[n, n])
            for name, value in (("product", inner[n - 1, n]), ("lengths", lengths)):
                before = state.get(name, 0.0)
                kept[name] = before + CURVE_WEIGHT_GAIN * (value - before)
        return kept


def _check_or_auto(name: str, value: float | str, minimum: int) -> None:
    """Validate a number in [least, 1], or `"auto"`.

    Raises:
        ArgumentError: naming it.
    """
    if not isinstance(value, str):
        check_number(name, value, at_least=minimum, at_most=1)
    elif value != AUTO:
        raise ArgumentError(f"{name}: expected a number in [{minimum}, 1] or {AUTO!r}, got {short_repr(value)}")


def _client_progress(update: Update) -> float:
    """Return the progress of a client along its gradient: the local rate times the steps."""
    return check_number(
        "numbers: progress", update.numbers.get("progress", 0.0), at_least=MIN_PROGRESS, at_most=MAX_PROGRESS
    )


def _clipped(progress: float, mean: float) -> float:
    """Clip a pace to a bounded distance from the mean of other clients, to limit the effect of one value."""
    return min(max(progress, mean / MAX_PROGRESS_RATIO), mean * MAX_PROGRESS_RATIO)


def _auto_curve_weight(state: State) -> float:
    """Return the weight of the curve beside its chord, from the agreement of the run so far."""
    lengths = state.get("lengths", 0.0)
    return min(max(1 - state["product"] / lengths, 0.0), 1.0) if lengths > 0 else 0.0
