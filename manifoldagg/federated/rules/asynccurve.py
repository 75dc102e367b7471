"""AsyncCurve: a server step along a quadratic Bézier curve that a client has trained.

The rule corrects the end of the curve for the steps of the server since the client started. The correction rotates the
line from the start to the end. By default, the rule rotates the middle control point in the same way.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from manifoldagg._validation import check_choice, check_count, check_number, short_repr
from manifoldagg.averaging.swa import update_mean
from manifoldagg.corrections import Corrected, Correction, OrthoDyn, rotate_control
from manifoldagg.corrections.gram import CANCELLATION_TOLERANCE, Matrix, lost_to_cancellation
from manifoldagg.corrections.rotation import rotation_coefficients
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules._base import ServerRule
from manifoldagg.federated.rules._geometry import check_points, frame_from_update, safe_sqrt
from manifoldagg.federated.rules.dominance import Dominance
from manifoldagg.federated.schedules import Rate, rate_at
from manifoldagg.federated.types import ClientState, Message, Outcome, State, Update
from manifoldagg.kernels import combine, gram
from manifoldagg.kernels.alloc import empty_like
from manifoldagg.manifolds import Manifold

__all__ = ["AsyncCurve"]

ORTHODYN = OrthoDyn()
CONTROL_MODES = ("rotate", "shift", "keep")
CONTROL_WEIGHTS = {"shift": [1.0, -0.5, 0.5], "keep": [1.0, 0.0, 0.0]}
"""The weights of the control point, of the old chord and of the new chord, for modes without a rotation."""


@dataclass(frozen=True)
class AsyncCurve(ServerRule):
    r"""Quadratic curve step (AsyncCurve): a step along a quadratic curve with a corrected end.

    After each update, the new model is the point at the parameter $s$ of a quadratic Bézier curve:

    $$\Theta^{\tau+1} = (1 - s)^2\, \Theta^\tau + 2 s (1 - s)\, \hat\varphi + s^2\, \hat\Theta,
      \qquad s = \min\bigl(1, \eta(\tau) / (N p_i)\bigr).$$

    The correction $\pi$ determines the end $\hat\Theta = \Theta^\tau + \pi(\Theta_i - \Theta^t)$. The control point
    $\varphi$ of the client then rotates with the chord (Report (17)):

    $$\hat\varphi = \tfrac12 (\Theta^\tau + \hat\Theta) + R\left(\varphi - \tfrac12 (\Theta^t + \Theta_i)\right).$$

    Here $R$ rotates the old chord $\Theta_i - \Theta^t$ to the direction of the new chord $\hat\Theta - \Theta^\tau$.
    For comparison, the option `control` has two alternatives:

    - `"shift"` moves the control point with the midpoint of the chord and does not rotate it: $R = I$. This equals
      `"rotate"` if the end has the tangent correction.
    - `"keep"` uses the control point as the client returned it: $\hat\varphi = \varphi$.

    The parameter $s$ does not depend on the staleness or on a distance. $p_i$ is the fraction of all updates that come
    from client i, as in [`Dominance`][manifoldagg.federated.rules.Dominance]. With `weighted`, the parameter is
    $s = \min(1, w_i\, \eta(\tau))$, where $w_i$ is the client's share of the data. The paper has both formulas:
    Algorithm 1 divides by $N p_i$, and (32) multiplies by $w_i$.

    The server sends moments for Adam to each client that has returned an update before:

    $$m = (\Theta^{\tau-1} - \Theta^\tau) / n_i, \qquad v = m \odot m.$$

    The moments come from the last step of the server before the dispatch. If the server dispatches a client directly
    after its update, this is the client's own step. $n_i$ is the number of batches per epoch. The client returns $n_i$
    as the number `batches` of its payload.

    Periodic averaging: the rule averages the versions $\tau \ge$ `start` with $\tau \equiv 0$ (mod `cycle`). Every
    `periodic` versions, the rule overwrites the model with the average and restarts the average. The result equals that
    of [`SWA`][manifoldagg.averaging.SWA] with `reset_point`. To average a whole run without overwriting the model, pass
    an `SWA` to the server.

    Participation:

    - A client that joins late starts without moments.
    - A client that failed or left keeps its count $c_i$. Its fraction of the updates decreases during the absence, so
      its next step is longer.
    - The drift of an update on an old ticket includes all steps since its dispatch.

    Args:
        clients: the number $N$ of clients.
        rate: the rate $\eta$: a number or a function of the version $\tau$. The paper uses cyclic rates.
        correction: the correction $\pi$ of the end. The default is [`OrthoDyn`][manifoldagg.corrections.OrthoDyn].
        smoothed: whether $p_i = (c_i + 1) / (k + N)$. Otherwise, $p_i = c_i / k$.
        control: the correction of the control point: `"rotate"`, `"shift"` or `"keep"`.
        weighted: whether the parameter is $w_i\, \eta(\tau)$ in place of $\eta(\tau) / (N p_i)$.
        start: the first version to average.
        cycle: the interval between averaged versions.
        offset: the number of versions by which the averaging is delayed. Algorithm 1 of the paper uses 1.
        periodic: the interval between overwritten versions. `None` disables the averaging.

    Raises:
        ArgumentError: if an option is out of range, or if the space is curved.

    Source: Report (16), (17), (31), and Algorithm 1 with two changes: $\hat\Theta$ is computed before $\hat\varphi$,
    and $\hat\varphi$ has the weight 2. The option `weighted` is (32). The option `control` follows Figure 3. The text
    of the report does not define the two alternatives.

    Cost: a step reads 16 words per parameter, writes 3 and allocates 2.

    Example:
        >>> AsyncCurve(clients=8, rate=0.5, periodic=20).correction.upper
        0.5
    """

    cohort: ClassVar[int] = 1
    needs_flat: ClassVar[str] = "rotated control points"
    self_checked: ClassVar[tuple[str, ...]] = ("points",)
    numbers: ClassVar[tuple[str, ...]] = ("batches",)
    clients: int
    rate: Rate = 1.0
    correction: Correction = field(default=ORTHODYN, kw_only=True)
    smoothed: bool = field(default=True, kw_only=True)
    control: str = field(default="rotate", kw_only=True)
    weighted: bool = field(default=False, kw_only=True)
    start: int = field(default=0, kw_only=True)
    cycle: int = field(default=1, kw_only=True)
    offset: int = field(default=0, kw_only=True)
    periodic: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("clients", self.clients)
        if not isinstance(self.correction, Correction):
            raise ArgumentError(f"correction: expected a Correction, got {short_repr(self.correction)}")
        check_choice("control", self.control, CONTROL_MODES)
        check_choice("weighted", self.weighted, (False, True))
        check_count("start", self.start, at_least=0)
        check_count("cycle", self.cycle)
        check_count("offset", self.offset, at_least=0)
        if self.periodic is not None:
            check_count("periodic", self.periodic)

    def message(self, space: Manifold, state: State, current: Tensor, client_state: ClientState) -> Message:
        if not client_state or "step" not in state:
            return Message(current)
        m = state["step"] / client_state["batches"]
        return Message(current, {"m": m, "v": m.square().clamp_(max=torch.finfo(m.dtype).max)})

    def step(
        self, space: Manifold, state: State, update: Update, *, out: Tensor | None = None
    ) -> tuple[State, Outcome]:
        check_points(self, update, 2, "control point and end")
        batches = check_number("numbers: batches", update.numbers.get("batches", 0), at_least=1)
        version = state["version"]
        base = update.base.detach()
        current = update.current.detach()
        control, theirs = update.points.detach()
        ends = replace(update, points=update.points[1:])
        frame = frame_from_update(space, ends, tensors=self.correction.granularity == "tensor")
        beside = ("control point", control, base)
        corrected = self.correction.apply(frame, state.get("correction"), auxiliary=beside)
        dominance = Dominance(self.clients, self.smoothed)
        rate = rate_at(self.rate, version)
        s = dominance.scaled_rate(rate, dominance.count_updates(update.client_state), version + 1)
        if self.weighted:
            s = min(1.0, update.weight * rate)
        line, norm = _step_coefficients(corrected, s, self.control)
        if line is None:
            end = corrected.combine(current, [1.0])
            turned = _move_control(self.control, control, base, theirs, current, end)
            model = combine(current, [turned, end], [2 * s * (1 - s), s * s], minus=current, out=out)
        else:
            model = corrected.frame.with_row(*beside).combine(current, line, out=out)
        averages = self._update_average(state, version + 1, model)
        moved = combine(None, [current], [1.0], minus=model)
        after = {"version": version + 1, "step": moved} | averages
        if self.correction.keeps_state:
            after["correction"] = corrected.state
        if norm is None or self._is_overwritten(version + 1):
            norm = safe_sqrt(gram([moved])[0, 0, 0].item())
        numbers = {"cosine": corrected.original_gram.cosine, "rate": rate, "step": s, "norm": norm}
        memory = dominance.next_client_state(update.client_state) | {"batches": batches}
        return after, Outcome(model, memory, numbers, state_is_finite=self._state_is_finite(corrected))

    def _state_is_finite(self, corrected: Corrected) -> bool:
        """Return whether the norms of the input vectors prove that the next state of the rule is finite.

        If these norms are small enough, no linear combination in the step can overflow. The server can then skip its
        own check of the state.
        """
        plain = not self.correction.keeps_state or isinstance(self.correction, OrthoDyn)
        if corrected.auxiliary is None or not plain or self.periodic is not None:
            return False
        matrix = corrected.gram.matrix
        squares = [*matrix.diagonal(), corrected.auxiliary[:, -1].sum()]
        limits = torch.finfo(corrected.frame.dtype)
        return sum(map(safe_sqrt, squares)) <= limits.max * limits.eps / 64

    def _is_overwritten(self, version: int) -> bool:
        """Return whether the rule replaces the model of this version by the average."""
        place = version - self.offset
        return self.periodic is not None and place > 0 and place % self.periodic == 0

    def _update_average(self, state: State, version: int, model: Tensor) -> dict[str, Any]:
        """Add the model to a running average if its version is due, and return the average for the rule's state.

        At the end of a period, the method copies the average to `model`. The returned dict is then empty, which starts
        a new average.
        """
        if self.periodic is None:
            return {}
        place = version - self.offset
        mean = state.get("average")
        count = state.get("averaged", 0)
        if place >= self.start and place % self.cycle == 0:
            if mean is None:
                mean = model.to(torch.float64, copy=True)
            else:
                mean = update_mean(mean, model, count + 1, out=empty_like(mean))
            count += 1
        if mean is None:
            return {}
        if self._is_overwritten(version):
            model.copy_(mean)
            return {}
        return {"average": mean, "averaged": count}


def _move_control(mode: str, control: Tensor, base: Tensor, theirs: Tensor, current: Tensor, end: Tensor) -> Tensor:
    """Return the control point of the new curve, which leads from `current` to `end`."""
    if mode == "keep":
        return control
    if mode == "shift":
        return combine(control, [current, end], [0.5, 0.5], minus=[base, theirs])
    return rotate_control(control, base, theirs, current, end)


def _step_coefficients(corrected: Corrected, s: float, mode: str) -> tuple[Matrix | None, float | None]:
    """Return the coefficients of the server step as a linear combination of k + 1 vectors, and its norm.

    The first k vectors are the rows of `corrected.frame`, such as the change of the client's model and that of the
    server model. The last vector leads from the client's start model to the middle control point of its curve.

    Returns:
        The coefficients (k + 1,), or (S, k + 1) for S named tensors, and the norm. If cancellation makes one of the two
        results inaccurate, this result is `None`. The caller then computes it from the vectors themselves.
    """
    left = corrected.gram.transform(corrected.coefficients).sum(0)
    if corrected.auxiliary is None or lost_to_cancellation(left, corrected.gram.matrix):
        return None, None
    chord = corrected.row_coefficients([1.0])
    rows = corrected.gram.parts
    beside = corrected.auxiliary
    square = beside[:, -1].sum()
    products = beside[:, :-1]
    along = (chord * products).sum()
    across = (chord * rows[:, 0]).sum()
    weights: list[Any] | None = CONTROL_WEIGHTS.get(mode)
    if weights is None:
        inner = [[square, products[:, 0].sum(), along], [0.0, rows[:, 0, 0].sum(), across], [0.0, 0.0, left[0, 0]]]
        weights = rotation_coefficients(inner)
        if weights is None:
            return None, None
    share = 2 * s * (1 - s)
    of_control, of_start, of_end = (share * weight for weight in weights)
    line: Matrix = (of_end + s * s) * chord
    line[..., 0] = line[..., 0] + of_start
    if mode == "keep":
        # The row of the control point starts at the base, and the step starts at the current model.
        drift = corrected.gram.num_displacements
        line[..., drift] = line[..., drift] - share
    crossed = of_control * (line * products).sum()
    mine = corrected.gram.transform(line[..., None, :]).sum()
    length = mine + 2 * crossed + of_control**2 * square
    known = length >= CANCELLATION_TOLERANCE * (mine + of_control**2 * square)
    last = np.full((*line.shape[:-1], 1), of_control, dtype=object)
    return np.concatenate([line, last], axis=-1), safe_sqrt(length) if known else None
