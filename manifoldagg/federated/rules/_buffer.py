"""Base class for buffered rules, which step along the mean displacement of several updates."""

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
from manifoldagg.manifolds import Manifold, ParameterSpace

__all__ = ["BufferMean", "BufferedRule"]


@dataclass(frozen=True, eq=False)
class BufferMean:
    r"""Mean $\bar\Delta$ of the updates in a buffer, each of which is the difference between two models.

    The class stores the mean as a linear combination of existing tensors. The method `step` adds this combination to
    the model directly, and needs no memory for the mean.

    Attributes:
        space: the space of the models.
        current: the current model $\Theta$.
        frame: the vectors of the linear combination, such as the last update and the sum of the earlier updates.
        coefficients: the coefficients of $\bar\Delta$ with respect to these vectors.
        gram: the inner products of these vectors.
    """

    space: Manifold
    current: Point
    frame: Frame
    coefficients: list[float]
    gram: Gram

    def iter_chunks(self, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Iterate over the mean in chunks, so that the whole vector is never in memory.

        Each item is a tuple of a chunk of the mean and the chunks of the tensors `others` at the same positions. The
        next iteration overwrites the chunk of the mean. The method supports only flat spaces.
        """
        rows: tuple[Any, ...] = self.frame.rows  # Rules that read chunks do not accept tensor lists.
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
        r"""Return the model after a step along the mean displacement, and the length of this step.

        The new model is $\exp_\Theta(\eta \bar\Delta)$, where $\Theta$ is the current model, $\bar\Delta$ is the mean
        displacement and $\eta$ is `rate`.
        """
        line = [rate * c for c in self.coefficients]
        norm = _norm_of(self.frame, self.gram, line)
        return move_to(self.space, self.current, self.frame, self.gram, line), norm


class BufferedRule(TangentRule):
    r"""Base class for rules that take one step $\frac{\eta_g}{A} \sum_i a_i \Delta_i$ after several updates.

    Here, $\Delta_i$ is the displacement of an update from the base of its client, $a_i$ is the weight of the update,
    $A$ is a divisor and $\eta_g$ is the rate. The state contains the weighted sum, the number of updates and their
    total weight, so the memory does not grow with the number of updates. Each update needs one `gram` and one
    `combine`.

    - On a curved space, the rule transports $\Delta_i$ to the current point and sums in float64. The current point does
      not change while the buffer fills.
    - For low-rank leaves, the sum is a sum of matrices, truncated to the `state_rank` of their spaces.
    - The sum is stored in units of the largest weight $a_i$ and is rounded once per update.
    - If the square of a sum of displacements as long as $\Delta_i$ would overflow, the rule rejects $\Delta_i$. The
      update of one client therefore cannot make the updates of other clients overflow.

    Updates change the state only through the sum. A `GaussianMechanism` can therefore clip the displacements and add
    noise to the sum.
    """

    rate: Rate
    rate_kind: ClassVar[str] = "mean"
    not_private_because: ClassVar[str] = ""

    @property
    @abc.abstractmethod
    def buffer_size(self) -> int:
        """The number of updates per step."""

    def update_weight(self, update: Update) -> float:
        """Return the weight $a_i$ of a displacement."""
        return 1.0

    def divisor(self, total: float) -> float:
        """Return the divisor $A$, where `total` is the sum of the weights $a_i$."""
        return total

    def step_size(self, state: State) -> float:
        r"""Return the rate $\eta_g$."""
        return rate_at(self.rate, state["version"])

    def apply_step(
        self, state: State, mean: BufferMean, rate: float, out: Tensor | None
    ) -> tuple[Any, float, dict[str, Any]]:
        r"""Compute the server step from the mean of the updates, after the last update of a buffer has arrived.

        By default, the step is the mean multiplied by `rate`. A subclass that computes a different step from the mean,
        such as an Adam step, overrides this method.

        Args:
            state: the state before the step.
            mean: the mean displacement of the buffer.
            rate: the rate $\eta_g$.
            out: an optional output buffer, for a subclass that computes whole vectors.

        Returns:
            The new model, its distance from the current model, and the changed entries of the state.
        """
        model, norm = mean.step(rate)
        return model, norm, {}

    def carried_displacements(self, space: ParameterSpace, state: State) -> list[list[tuple[float, Tensor]]]:
        """Return the step that the server would take with only the updates in the buffer.

        The result `[[(factor, vector)]]` represents the step `factor * vector`. The server checks that the model
        remains finite after this step. The result is empty if the buffer is empty, or if a subclass overrides
        `apply_step`.
        """
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
        """Plan a step, with optional differential privacy.

        Args:
            space: the space of the models.
            state: the state before the update.
            update: the update.
            mechanism: the mechanism that clips the displacements and adds noise to their sum. `None` does neither.
            out: an optional output buffer, for a subclass that computes whole vectors.

        Returns:
            The next state and the outcome, as in `plan`.
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
            # The sum is finite. The norm of each displacement is at most the square root of the largest finite number,
            # divided by the buffer size, and the sum is in units of the largest weight.
            finite = frame.transporter is None
            return waiting, Outcome(None, update.client_state, numbers, state_is_finite=finite, linear=rest)
        divisor = check_number("weight: sum over the buffer", self.divisor(total), above=0)
        rate = self.step_size(state)
        if mechanism is not None:
            frame, line = mechanism.add_noise(frame, line, unit, state["version"])
            gram = frame.gram()
        numbers |= {"buffered": 0.0, "rate": rate, "step": rate}
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
        return after | changes, Outcome(model, update.client_state, numbers | frame.diagnostics)

    def checked_length(self, frame: Frame, gram: Gram) -> float:
        """Return the norm of the displacement after checking it for overflow.

        Raises:
            ArgumentError: if the square of a sum of such displacements would overflow.
        """
        largest = safe_sqrt(torch.finfo(frame.dtype).max) / self.buffer_size
        return check_number("points: size of the displacement", safe_sqrt(gram.matrix[0, 0]), at_most=largest)

    def _linear_metrics(self, frame: Frame, gram: Gram, move: list[float] | None = None) -> dict[str, float]:
        self.checked_length(frame, gram)
        moved = {} if move is None else {"norm": _norm_of(frame, gram, move)}
        return {"cosine": gram.cosine} | moved


def _norm_of(frame: Frame, gram: Gram, coefficients: list[float]) -> float:
    """Return the norm of a linear combination of vectors, or an upper bound for it."""
    # The result is an upper bound if the frame contains only an upper bound for the norm of one of its vectors.
    if frame.unmeasured:
        return frame.norm_bound(np.array(coefficients, dtype=object))
    return safe_sqrt(Corrected.single(frame, gram, coefficients).inner_products()[0][0])
