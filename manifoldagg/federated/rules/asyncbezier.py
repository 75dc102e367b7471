"""AsyncBezier: a step along the client's curve, transported to the current model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from manifoldagg._validation import check_choice, check_number, short_repr
from manifoldagg.corrections import AutoThreshold, Corrected, Correction, OrthoDC
from manifoldagg.curves import Bezier, Embedding, Simplex, Tunnel
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules._correction_rule import ScheduledRule
from manifoldagg.federated.rules._geometry import check_points, safe_sqrt
from manifoldagg.federated.rules._step_curve import PULL_BACK_MODES, StepCurve
from manifoldagg.federated.types import ClientState, Message, Outcome, State, Update
from manifoldagg.manifolds import Manifold

__all__ = ["AsyncBezier"]

AUTO = "auto"
CURVE_WEIGHT_GAIN = 0.02
"""The gain of the moving averages for the automatic curve weight, which average about 50 updates."""
PROGRESS_GAIN = 0.01
"""The minimum gain of the running mean of the progress, which is an average of about 100 updates."""
MAX_PROGRESS_RATIO = 100.0
"""The largest ratio between the progress of a client and the mean, in both directions."""
MIN_PROGRESS = 1e-100
MAX_PROGRESS = 1e100
"""The range of valid progress values. The ratio of two values in this range is finite and nonzero."""


@dataclass(frozen=True)
class AsyncBezier(ScheduledRule):
    r"""Asynchronous Bézier step (AsyncBezier): a step along the corrected Bézier curve of a client.

    After each update, the new model is the point

    $$\Theta^{\tau+1} = \iota_\psi(s), \qquad \psi = \exp_{\varphi_{\Theta^\tau}}(\pi v),
      \qquad \rho = S\, w_i\, \eta_g(\tau),$$

    on the curve $\iota_\psi$ with the corrected control points $\psi$. The correction $\pi$ is
    [`OrthoDC`][manifoldagg.corrections.OrthoDC], applied to the displacement $v$ of each control point. The step size
    $\rho$ is the product of the staleness penalty $S$, the client's data share $w_i$ and the rate $\eta_g$.

    The end of the curve is the candidate $\hat\Theta = \iota_\psi(1)$. By default, the position $s$ on the curve is the
    smallest $s$ with

    $$d(\iota_\psi(s), \Theta^\tau) = \rho\, d(\hat\Theta, \Theta^\tau),$$

    where $d$ is the length of the chord between two points. This equation is (12) of the paper. The general step (11)
    of the paper is a geodesic of the pulled-back metric, which has constant speed. On a curve, the general step
    therefore covers the fraction $\rho$ of the length:

    $$\int_0^s \|\iota_\psi'(t)\|\, dt = \rho \int_0^1 \|\iota_\psi'(t)\|\, dt.$$

    The option `pull_back="length"` selects the general step. Both steps are equal on a straight curve that does not
    turn back.

    For small $\rho$, the pull-back along the chord multiplies the step by the ratio of the length of the chord to the
    initial speed of the curve. This ratio differs between clients. If the curve follows the path of local training, use
    `pull_back="none"`. Then $s = \min(1, \rho)$, and the step approaches the client's gradient as $\rho \to 0$.

    AsyncBezier is the special case of the paper's AsyncManifold for a Bézier curve. The option `embedding` selects
    another case. Then $\iota_\psi(s)$ is a path of the embedding from $\Theta^\tau$ to its end point, whose image is
    the last control point. There are three kinds of paths:

    - The path of a tunnel is the curve that the tunnel surrounds.
    - The path of a simplex is the edge from the first to the last vertex.
    - The path of another embedding is $\iota_\psi(x(s))$, where its method `path_coordinates` computes $x(s)$.

    With `decay=1`, the rule is AsyncBezierED.

    Args:
        rate: the global rate $\eta_g$: a number or a function of the version $\tau$, such as a schedule of
            `manifoldagg.federated.schedules`.
        decay: the strength $\alpha \in [0, 1]$ of the staleness penalty $S$, which
            [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected] defines. With 0, $S = 1$.
        penalty_limit: the upper limit of $S$.
        overshoot: the behaviour for $\rho > 1$. `"clamp"` limits $\rho$ to 1. `"extend"` follows the curve beyond its
            end, which requires a flat space.
        threshold: the threshold $\vartheta \in [-1, 1]$ of OrthoDC. On a flat space, `"auto"` chooses -1, 0 or 1 for
            each update, as in [`AutoThreshold`][manifoldagg.corrections.AutoThreshold].
        transport: the transport of tangents on a curved space: `"parallel"`, `"ladder"` or `"projection"`. The default
            `None` uses parallel transport where a closed form exists, and a ladder otherwise. A flat space accepts only
            `None`.
        rungs: the number of rungs of a ladder.
        dominance: an optional [`Dominance`][manifoldagg.federated.rules.Dominance] penalty for clients that return
            updates often.
        pull_back: the computation of $s$ from $\rho$:

            - `"chord"`: the smallest $s$ at the fraction $\rho$ of the distance to the candidate.
            - `"length"`: the $s$ at the fraction $\rho$ of the length of the curve.
            - `"none"`: $s = \rho$.
            - `"conflict_free_prefix"`: $s = \rho\, a$, where $a$ is the fraction of the curve before its first conflict
              with the drift. A segment between consecutive points conflicts if its inner product with the drift is
              negative. The fraction always includes the first segment.
        curve_weight: the weight $\kappa \in [0, 1]$. The curve is $\kappa$ times the client's curve plus $1 - \kappa$
            times its chord. Without corrections, 0 gives the step of [`ASGD`][manifoldagg.federated.rules.ASGD].
            `"auto"` uses $\kappa = 1 - r$, clipped to [0, 1]. Here, $r$ is the mean cosine between displacements and
            drifts over about 50 updates, weighted by the product of both norms. The automatic weight is 0 before the
            first drift and increases as displacements and drifts agree less.
        normalise: whether clients with different local rates or numbers of steps have equal influence. If set, $\rho$
            is divided by the ratio of the client's progress $\eta_i K_i$, its local rate times its number of steps, to
            the running mean of the progress. The message and the payload contain the number `progress`, which the
            trainer [`Trajectory`][manifoldagg.federated.clients.Trajectory] returns.
        polygon: whether the points are the vertices of a polygon with equidistant parameters, such as the n points of
            `Trajectory(pieces=n)`. Otherwise, the points are the control points of a Bézier curve of degree n.
        embedding: the embedding whose control points clients return, such as `Tunnel(radius=0.1)` or
            `Simplex(vertices=3)`. Use the same embedding in the trainer
            [`Curve`][manifoldagg.federated.clients.Curve]. `None` selects a Bézier curve, and a tunnel is equivalent to
            `None`. If the embedding is not a Bézier curve, a tunnel or a simplex, the step also computes the n
            corrected control points, and the space must not have low-rank leaves.

    Raises:
        ArgumentError: if an option is out of range.

    Source: Manifold (6)-(12), Algorithm 1. An update with n control points reads n + 2 vectors twice and
    writes one vector.

    Cost: a step reads 8 words per parameter, writes 1 and allocates 0.

    Example:
        >>> AsyncBezier(threshold=1.0, rate=0.5).correction
        OrthoDC(threshold=1.0)
        >>> AsyncBezier(threshold="auto").correction
        AutoThreshold(decay=0.95)

        A step of half the parameter range along a path with two segments reaches the end of the first segment:

        >>> import torch
        >>> from manifoldagg.federated import Update
        >>> from manifoldagg.manifolds import Flat
        >>> start, path = torch.zeros(2), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        >>> rule = AsyncBezier(threshold=-1.0, rate=0.5, pull_back="none", polygon=True)
        >>> rule.step(Flat(2), rule.init(Flat(2), start), Update(0, start, start, path))[1].model
        tensor([1., 0.])
    """

    state_entries: ClassVar[frozenset[str] | None] = frozenset({"version", "correction", "product", "lengths"})
    single_point: ClassVar[bool] = False
    threshold: float | str = 1.0
    pull_back: str = field(default="chord", kw_only=True)
    curve_weight: float | str = field(default=1.0, kw_only=True)
    normalise: bool = field(default=False, kw_only=True)
    polygon: bool = field(default=False, kw_only=True)
    embedding: Embedding | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_or_auto("threshold", self.threshold, -1)
        _check_or_auto("curve_weight", self.curve_weight, 0)
        check_choice("pull_back", self.pull_back, PULL_BACK_MODES)
        if self.overshoot == "extend" and (self.polygon or self.pull_back == "conflict_free_prefix"):
            what = "a polygon" if self.polygon else "the conflict-free prefix"
            raise ArgumentError(f"overshoot: expected 'clamp', as {what} has no extension; got 'extend'")
        if self.embedding is not None:
            self._check_embedding(self.embedding)

    @property
    def accepts_tensor_lists(self) -> bool:  # type: ignore[override]  # depends on an option
        """Whether the rule accepts models as lists of tensors in place of vectors.

        This is the case if the option `embedding` is `None`, a Bézier curve, a tunnel or a simplex. Any other embedding
        can be evaluated only with vectors.
        """
        return self._curve_embedding is None

    @cached_property
    def correction(self) -> Correction:
        return AutoThreshold() if isinstance(self.threshold, str) else OrthoDC(self.threshold)

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of the numbers that a payload must contain."""
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

    def plan(self, space: Manifold, state: State, update: Update) -> tuple[State, Outcome]:
        if not (self.embedding is None or isinstance(self.embedding, Tunnel)):
            n = self.embedding.size - 1
            check_points(self, update, n, f"{n} control points")
        return super().plan(space, state, update)

    def step_curve(self, state: State) -> StepCurve:
        if isinstance(self.embedding, Simplex):
            # The path to the last vertex is a geodesic, as is the chord of a curve.
            return StepCurve(self.overshoot, self.pull_back, 0.0)
        if self._curve_embedding is not None:
            return StepCurve(self.overshoot, self.pull_back, embedding=self._curve_embedding)
        bend = _auto_curve_weight(state) if isinstance(self.curve_weight, str) else self.curve_weight
        return StepCurve(self.overshoot, self.pull_back, bend, self.polygon)

    @property
    def _curve_embedding(self) -> Embedding | None:
        """The embedding, or `None` if its path is a Bézier curve or a geodesic."""
        return None if isinstance(self.embedding, Bezier | Tunnel | Simplex) else self.embedding

    def _check_embedding(self, given: Embedding) -> None:
        if not isinstance(given, Embedding):
            raise ArgumentError(f"embedding: expected an Embedding or None, got {short_repr(given)}")
        if isinstance(given, Bezier | Tunnel):
            return
        name = type(given).__name__
        if self.polygon or self.curve_weight != 1:
            option = "polygon" if self.polygon else "curve_weight"
            raise ArgumentError(f"{option}: expected the default with the embedding {name}")
        if self.pull_back == "conflict_free_prefix":
            raise ArgumentError(f"pull_back: expected another mode with the embedding {name}, got {self.pull_back!r}")
        if self.overshoot == "extend" and not isinstance(given, Simplex):
            raise ArgumentError(f"overshoot: expected 'clamp' with the embedding {name}, got 'extend'")

    def next_state(self, state: State, update: Update, corrected: Corrected) -> dict[str, Any]:
        kept = super().next_state(state, update, corrected)
        if self.normalise:
            pace = _client_progress(update)
            mean = state.get("progress", pace)
            # The step uses the mean of previous updates only, so that a client cannot influence its own step.
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
    """Check that an option is a number in [`minimum`, 1] or `"auto"`.

    Raises:
        ArgumentError: if the option has another value. The message names the option.
    """
    if not isinstance(value, str):
        check_number(name, value, at_least=minimum, at_most=1)
    elif value != AUTO:
        raise ArgumentError(f"{name}: expected a number in [{minimum}, 1] or {AUTO!r}, got {short_repr(value)}")


def _client_progress(update: Update) -> float:
    """Return the progress of a client, which is its local learning rate times its number of local steps.

    The client reports the progress as a number in its payload.
    """
    return check_number(
        "numbers: progress", update.numbers.get("progress", 0.0), at_least=MIN_PROGRESS, at_most=MAX_PROGRESS
    )


def _clipped(progress: float, mean: float) -> float:
    """Clip a client's progress to within a factor `MAX_PROGRESS_RATIO` of the mean."""
    # The limit bounds the influence of a wrong value on later updates.
    return min(max(progress, mean / MAX_PROGRESS_RATIO), mean * MAX_PROGRESS_RATIO)


def _auto_curve_weight(state: State) -> float:
    """Return the weight of a client's curve relative to its chord for `curve_weight="auto"`."""
    # The weight is 1 minus the mean cosine between displacements and drifts in earlier updates. Before the first drift,
    # the mean is undefined, and the weight is 0.
    lengths = state.get("lengths", 0.0)
    return min(max(1 - state["product"] / lengths, 0.0), 1.0) if lengths > 0 else 0.0
