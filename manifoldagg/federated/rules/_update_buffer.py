"""Buffered rules that store each displacement separately, until the last one of a buffer moves the model."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from manifoldagg._validation import check_count, check_number
from manifoldagg.corrections import Frame, Gram
from manifoldagg.federated.rules._base import TangentRule, commit
from manifoldagg.federated.rules._geometry import check_points, frame_from_update, safe_sqrt
from manifoldagg.federated.rules.fedadam import model_distance
from manifoldagg.federated.schedules import Rate, Weight, rate_at, weight_at
from manifoldagg.federated.types import Outcome, Point, State, Update
from manifoldagg.kernels.alloc import empty_like
from manifoldagg.kernels.chunking import chunks
from manifoldagg.manifolds import Manifold

__all__ = ["CoordinateWiseRule", "StoredBufferRule", "oddeven_sort"]


class StoredBufferRule(TangentRule):
    r"""Rule that stores K displacements $\Delta_i$ and their $s_i = s(\tau - t_i)$, then takes one step by `combine`.

    $\Delta_i$ is taken against the client's own base, and on a curved space transported to the current point, which
    rests while the rule waits. Nothing that a client says of its weight counts. A displacement is rejected that is so
    long that the square of a sum of K such would overflow in the dtype of the model.
    """

    cohort: ClassVar[int] = 1
    rate_kind: ClassVar[str] = "mean"
    uses_drift: ClassVar[bool] = False
    size: int
    rate: Rate
    staleness: Weight

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("size", self.size)

    @abc.abstractmethod
    def combine(
        self,
        space: Manifold,
        update: Update,
        frame: Frame,
        stored: Mapping[str, Any],
        factors: Sequence[float],
        out: Tensor | None,
    ) -> tuple[Any, float, Gram]:
        r"""Return the new model, its distance, and inner products, the first two of which are those of the last update.

        Args:
            space: of the points.
            update: the last one.
            frame: of it.
            stored: the displacements before it, in the order in which they came.
            factors: $\eta_g s_i$ of each of these, then of the last one.
            out: memory for the new model of a rule that needs whole vectors.
        """

    def carried_displacements(self, state: State) -> list[list[tuple[float, Tensor]]]:
        """Return what each waiting update could add to the model: a factor and a displacement."""
        rate = rate_at(self.rate, state["version"])
        return [[(rate * state["factors"][name], row)] for name, row in state["displacements"].items()]

    def init(self, space: Manifold, start: Point) -> State:
        return super().init(space, start) | {"factors": {}, "displacements": {}}

    def step(
        self, space: Manifold, state: State, update: Update, *, out: Tensor | None = None
    ) -> tuple[State, Outcome]:
        return commit(self.plan(space, state, update, out=out), out)

    def plan(
        self, space: Manifold, state: State, update: Update, *, out: Tensor | None = None
    ) -> tuple[State, Outcome]:
        """Plan a step. A rule that needs whole vectors may write its model into `out`."""
        check_points(self, update)
        share = weight_at(self.staleness, update.staleness)
        frame = frame_from_update(space, update, transport=self.transport, rungs=self.rungs)
        held = state["displacements"]
        name = f"update {len(held) + 1}"
        if len(held) + 1 < self.size:
            gram = self.checked_gram(frame)
            waiting = {
                "version": state["version"],
                "factors": state["factors"] | {name: share},
                "displacements": held | {name: frame.for_state([1.0, 0.0])},
            }
            numbers = {"cosine": gram.cosine, "weight": share, "buffered": float(len(held) + 1)}
            # Displacements no longer than the root of the largest number.
            sound = frame.transporter is None
            return waiting, Outcome(None, update.client_state, numbers | frame.diagnostics, state_is_finite=sound)
        rate = rate_at(self.rate, state["version"])
        kept = [rate * s for s in (*state["factors"].values(), share)]
        model, norm, gram = self.combine(space, update, frame, held, kept, out)
        numbers = {"cosine": gram.cosine, "weight": share, "buffered": 0.0, "rate": rate, "step": rate, "norm": norm}
        after = {"version": state["version"] + 1, "factors": {}, "displacements": {}}
        return after, Outcome(model, update.client_state, numbers | frame.diagnostics)

    def checked_gram(self, frame: Frame) -> Gram:
        """Return the inner products of the rows, after checking the length of the first.

        Raises:
            ArgumentError: if it is.
        """
        gram = frame.gram()
        longest = safe_sqrt(torch.finfo(frame.dtype).max) / self.size
        check_number("points: size of the displacement", safe_sqrt(gram.matrix[0, 0]), at_most=longest)
        return gram


class CoordinateWiseRule(StoredBufferRule):
    """A `StoredBufferRule` that of each entry takes the mean of those in the middle, `num_trimmed` from either end.

    Windows of all displacements are sorted beside the model: no more is held than K of such.
    """

    self_checked: ClassVar[tuple[str, ...]] = ("points",)

    @property
    @abc.abstractmethod
    def num_trimmed(self) -> int:
        """Return the number of values to discard at either end."""

    def combine(
        self,
        space: Manifold,
        update: Update,
        frame: Frame,
        stored: Mapping[str, Any],
        factors: Sequence[float],
        out: Tensor | None,
    ) -> tuple[Any, float, Gram]:
        gram = self.checked_gram(frame)
        current: Any = update.current
        model: Any = empty_like(current) if out is None else out
        middle = slice(self.num_trimmed, self.size - self.num_trimmed)
        scratch: list[Tensor] = []
        for to, start, point, base, *rows in chunks(model, current, update.points[0], update.base, *stored.values()):
            if not scratch:
                scratch = [empty_like(start) for _ in range(self.size + 1)]
            lines = [line[: len(start)] for line in scratch]
            torch.sub(point, base, out=lines[len(rows)])
            for line, row, factor in zip(lines, (*rows, lines[len(rows)]), factors, strict=False):
                torch.mul(row, factor, out=line)
            first, *others = oddeven_sort(lines[:-1], lines[-1])[middle]
            mean = first.double()
            for line in others:
                mean.add_(line)
            to.copy_(mean.div_(len(others) + 1).add_(start))
        return model, model_distance(model, current), gram


def oddeven_sort(vectors: Sequence[Tensor], scratch: Tensor) -> list[Tensor]:
    """Sort vectors entrywise in place, with `scratch` as working memory.

    By exchanges of neighbours, K rounds of them: vectors are compared at the speed of memory, which for the few that
    wait is less than a sort of each entry takes.

    Example:
        >>> rows = [torch.tensor([3.0, 1.0]), torch.tensor([2.0, 2.0]), torch.tensor([1.0, 0.0])]
        >>> torch.stack(oddeven_sort(rows, torch.empty(2)))
        tensor([[1., 0.],
                [2., 1.],
                [3., 2.]])
    """
    ordered = [*vectors]
    for i in range(len(ordered)):
        for j in range(i % 2, len(ordered) - 1, 2):
            low, high = ordered[j], ordered[j + 1]
            torch.minimum(low, high, out=scratch)
            torch.maximum(low, high, out=high)
            ordered[j], scratch = scratch, low
    return ordered
