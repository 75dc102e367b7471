"""Buffered rules: they sum displacements on arrival, and the last update of a buffer moves the model."""

import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from manifoldagg._validation import check_number
from manifoldagg.corrections import Corrected, Frame, Gram
from manifoldagg.corrections.combination import Combination
from manifoldagg.federated.rules._base import TangentRule, commit, move_to
from manifoldagg.federated.rules._gaussian_mechanism import GaussianMechanism
from manifoldagg.federated.rules._geometry import (
    check_points,
    frame_from_update,
    safe_sqrt,
)
from manifoldagg.federated.schedules import Rate, rate_at
from manifoldagg.federated.types import LinearStep, Outcome, Point, State, Update
from manifoldagg.kernels import combine
from manifoldagg.kernels.alloc import empty_like
from manifoldagg.kernels.chunking import chunks
from manifoldagg.manifolds import Manifold

__all__ = ["BufferMean", "BufferedRule"]


@dataclass(frozen=True, eq=False)
class BufferMean:
    r"""Mean $\bar\Delta$ of a full buffer, a lazily computed tangent at the current model $\Theta$.

    Attributes:
        space: the space of the points.
        current: the current model $\Theta$.
        frame: the frame with the rows v and g and, after the first update, the previous sum.
        coefficients: the coefficients of the mean on these rows.
        gram: the inner products of these rows.
    """

    space: Manifold
    current: Point
    frame: Frame
    coefficients: list[float]
    gram: Gram

    def iter_chunks(self, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
        r"""Yield chunks of $\bar\Delta$ on a flat space together with the same chunks of `others`, to bound memory."""
        rows: tuple[Any, ...] = self.frame.rows  # vectors, as rules that use chunks do not accept tensor lists
        less: list[Any] = [row for row in self.frame.minus if row is not None]
        scratch = None
        for parts in chunks(self.current, *rows, *less, *others):
            lines = parts[1 : 1 + len(rows)]
            taken = iter(parts[1 + len(rows) :])
            minus = [None if row is None else next(taken) for row in self.frame.minus]
            if scratch is None:
                scratch = empty_like(parts[0])
            delta = combine(None, lines, self.coefficients, minus=minus, out=scratch[: len(parts[0])])
            yield delta, *taken

    def step(self, rate: float) -> tuple[Any, float]:
        r"""Return $\exp_\Theta(\eta \bar\Delta)$ and its distance from $\Theta$."""
        line = [rate * c for c in self.coefficients]
        norm = _norm_of(self.frame, self.gram, line)
        return move_to(self.space, self.current, self.frame, self.gram, line), norm


class BufferedRule(TangentRule):
    r"""A rule that sums displacements, then takes one step $\eta_g \cdot \frac1A \sum_i a_i \Delta_i$.

    $\Delta_i$ is the displacement from the client's own base. On a curved space, the rule transports it to the current
    point, which is constant while the buffer fills, and sums in float64. For low-rank leaves, the sum is a sum of
    matrices, truncated to the `state_rank` of their spaces.

    The state stores the sum as one tensor, and the number and the total weight of its terms. The sum is in units of the
    largest $a_i$ so far and is rounded once per update. Each update needs one `gram` and one `combine`.

    The rule rejects a displacement if the square of a sum of such displacements would overflow in the dtype of the
    model. So the update of one client cannot make the updates of other clients overflow.

    Updates affect the state only through this sum. A `mechanism` can therefore clip its terms and add noise to it.
    """

    rate: Rate
    rate_kind: ClassVar[str] = "mean"
    not_private_because: ClassVar[str] = ""

    @property
    @abc.abstractmethod
    def buffer_size(self) -> int:
        """The number of updates per step."""

    def update_weight(self, update: Update) -> float:
        """Return $a_i$, the weight of a displacement."""
        return 1.0

    def divisor(self, total: float) -> float:
        """Return $A$, where `total` is the sum of the $a_i$."""
        return total

    def step_size(self, state: State) -> float:
        r"""Return $\eta_g$."""
        return rate_at(self.rate, state["version"])

    def apply_step(
        self, state: State, mean: BufferMean, rate: float, out: Tensor | None
    ) -> tuple[Any, float, dict[str, Any]]:
        """Return the new model, its distance from the current model, and the changes of the state.

        The default is a step along the mean. A rule that computes its model from whole vectors may write it to `out`.
        """
        model, norm = mean.step(rate)
        return model, norm, {}

    def carried_displacements(self, state: State) -> list[list[tuple[float, Tensor]]]:
        """Return the contribution of the buffered updates to the next step: pairs of a factor and a displacement."""
        if "buffer" not in state or type(self).apply_step is not BufferedRule.apply_step:
            return []
        factor = self.step_size(state) * state["scale"] / (self.divisor(state["total"]) or 1.0)
        return [[(factor, state["buffer"])]]

    def init(self, space: Manifold, start: Point) -> State:
        return super().init(space, start) | {"count": 0, "total": 0.0}

    def plan(self, space: Manifold, state: State, update: Update) -> tuple[State, Outcome]:
        return self.plan_with_noise(space, state, update)

    def step(
        self, space: Manifold, state: State, update: Update, *, out: Tensor | None = None
    ) -> tuple[State, Outcome]:
        return commit(self.plan_with_noise(space, state, update, out=out), out)

    def plan_with_noise(
        self,
        space: Manifold,
        state: State,
        update: Update,
        mechanism: GaussianMechanism | None = None,
        *,
        out: Tensor | None = None,
    ) -> tuple[State, Outcome]:
        """Plan a step, with an optional `mechanism` that clips displacements and adds noise to their sum.

        `out` is an output buffer for the new model of a rule that needs whole vectors.
        """
        check_points(self, update)
        share = check_number("weight", self.update_weight(update), at_least=0)
        frame = frame_from_update(space, update, transport=self.transport, rungs=self.rungs)
        if "buffer" in state:
            frame = frame.with_row("buffer", state["buffer"], norm_only=True)
        linear = mechanism is None and frame.is_flat and type(self).apply_step is BufferedRule.apply_step
        gram = None if linear else frame.gram()
        numbers = {"weight": share}
        if gram is not None:
            length = self.checked_length(frame, gram)
            numbers["cosine"] = gram.cosine
        taken = share
        if mechanism is not None:
            taken, numbers["clip"] = mechanism.clipped_weight(share, length)
        count = state["count"] + 1
        total = check_number("weight: sum over the buffer", state["total"] + share)
        before = state.get("scale", share)
        unit = max(before, share)
        line = [taken / (unit or 1.0), 0.0, before / (unit or 1.0)][: len(frame.rows)]
        numbers["buffered"] = float(count)
        if count < self.buffer_size:
            buffer = frame.for_state(line)
            waiting = {**state, "count": count, "total": total, "scale": unit, "buffer": buffer}
            numbers |= frame.diagnostics
            rest = LinearStep(frame, lambda gram: self._linear_metrics(frame, gram)) if linear else None
            # The sum is finite: the norm of each displacement is at most the square root of the largest number divided
            # by the buffer size, and the sum is in units of the largest share.
            finite = frame.transporter is None
            return waiting, Outcome(None, update.client_state, numbers, state_is_finite=finite, linear=rest)
        divisor = check_number("weight: sum over the buffer", self.divisor(total), above=0)
        rate = self.step_size(state)
        if mechanism is not None:
            frame, line = mechanism.add_noise(frame, line, unit, state["version"])
            gram = frame.gram()
        numbers |= {"buffered": 0.0, "rate": rate, "step": rate} | frame.diagnostics
        after = {name: kept for name, kept in state.items() if name not in ("scale", "buffer")}
        after |= {"version": state["version"] + 1, "count": 0, "total": 0.0}
        line = [unit / divisor * c for c in line]
        if gram is None:
            move = [rate * c for c in line]
            step = Combination(frame, np.array(move, dtype=object), from_current=True)
            rest = LinearStep(frame, lambda gram: self._linear_metrics(frame, gram, move))
            return after, Outcome(step, update.client_state, numbers, linear=rest)
        mean = BufferMean(space, update.current, frame, line, gram)
        model, numbers["norm"], changes = self.apply_step(state, mean, rate, out)
        return after | changes, Outcome(model, update.client_state, numbers)

    def checked_length(self, frame: Frame, gram: Gram) -> float:
        """Return the norm of the displacement. Check that the square of a sum of such norms does not overflow."""
        largest = safe_sqrt(torch.finfo(frame.dtype).max) / self.buffer_size
        return check_number("points: size of the displacement", safe_sqrt(gram.matrix[0, 0]), at_most=largest)

    def _linear_metrics(self, frame: Frame, gram: Gram, move: list[float] | None = None) -> dict[str, float]:
        self.checked_length(frame, gram)
        moved = {} if move is None else {"norm": _norm_of(frame, gram, move)}
        return {"cosine": gram.cosine} | moved


def _norm_of(frame: Frame, gram: Gram, coefficients: list[float]) -> float:
    """Return the norm of a combination of the rows, or an upper bound if a row was not read."""
    if frame.unmeasured:
        return frame.norm_bound(np.array(coefficients, dtype=object))
    return safe_sqrt(Corrected.single(frame, gram, coefficients).inner_products()[0][0])
