"""Buffered rules: displacements are summed as they arrive, and the last one of a buffer moves the model."""

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
    r"""The mean $\bar\Delta$ of a full buffer, a tangent at the current model $\Theta$ that is computed lazily.

    Attributes:
        space: of the points.
        current: $\Theta$.
        frame: with the rows v, g and, beyond the first update, the sum before it.
        coefficients: the coefficients of the mean on these rows.
        gram: their inner products.
    """

    space: Manifold
    current: Point
    frame: Frame
    coefficients: list[float]
    gram: Gram

    def iter_chunks(self, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
        r"""Yield $\bar\Delta$ on a flat space by chunks, together with those of other vectors, to bound the memory."""
        rows: tuple[Any, ...] = self.frame.rows  # vectors: rules that need windows take no others
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

    $\Delta_i$ is taken against the client's own base. On a curved space it is transported to the current point, which
    rests while the rule waits, and summed there in float64. Where leaves are of low rank the sum is one of matrices, of
    which their spaces' `state_rank` is kept. The state has the sum as one tensor, in units of the
    largest $a_i$ so far and rounded once an update, the number and the total weight of its terms. One `gram` and one
    `combine` each, as for one update.

    A displacement is rejected that is so long that the square of a sum of such would overflow in the dtype of the
    model: what one client sends cannot make the updates of others overflow.

    Updates change nothing but that sum, which a `mechanism` can therefore bound and add noise to.
    """

    rate: Rate
    rate_kind: ClassVar[str] = "mean"
    not_private_because: ClassVar[str] = ""

    @property
    @abc.abstractmethod
    def buffer_size(self) -> int:
        """The number of updates of a step."""

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
        """Return the new model, its distance, and the changes of the state: by default a step along the mean.

        A rule that computes its model from whole vectors may write it into `out`.
        """
        model, norm = mean.step(rate)
        return model, norm, {}

    def carried_displacements(self, state: State) -> list[list[tuple[float, Tensor]]]:
        """Return what the waiting updates will add to the model, as terms of a sum: a factor and a displacement."""
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
        """Plan a step with an optional `mechanism` between displacements and their sum.

        `out` is memory for the new model of a rule that needs whole vectors.
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
            # Sums of displacements no longer than the root of the largest number, in units of the largest share.
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
        """Return the length of the displacement, after checking that the square of a sum of such does not overflow."""
        largest = safe_sqrt(torch.finfo(frame.dtype).max) / self.buffer_size
        return check_number("points: size of the displacement", safe_sqrt(gram.matrix[0, 0]), at_most=largest)

    def _linear_metrics(self, frame: Frame, gram: Gram, move: list[float] | None = None) -> dict[str, float]:
        self.checked_length(frame, gram)
        moved = {} if move is None else {"norm": _norm_of(frame, gram, move)}
        return {"cosine": gram.cosine} | moved


def _norm_of(frame: Frame, gram: Gram, coefficients: list[float]) -> float:
    """Return the norm of a combination of the rows, or a bound on it if a row was not read."""
    if frame.unmeasured:
        return frame.norm_bound(np.array(coefficients, dtype=object))
    return safe_sqrt(Corrected.single(frame, gram, coefficients).inner_products()[0][0])
