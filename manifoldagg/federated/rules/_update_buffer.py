"""Base classes for buffered rules that store each client's update separately, such as Byzantine-robust rules."""

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
from manifoldagg.manifolds import Manifold, ParameterSpace

__all__ = ["CoordinateWiseRule", "StoredBufferRule", "oddeven_sort"]


class StoredBufferRule(TangentRule):
    r"""Base class for rules that store K displacements and then compute one step from all of them.

    - The displacement $\Delta_i$ of an update is the difference between the model that client i returned and the model
      from which it started. On a curved space, the rule transports $\Delta_i$ to the current model, which does not
      change while the buffer fills.
    - If client i started at version $t_i$ and the update arrives at version $\tau$, its weight is $s(\tau - t_i)$ with
      the option `staleness` as the function $s$. Sample counts do not affect the weight.
    - The rule rejects $\Delta_i$ if it is extremely long: the squared norm of a sum of K such displacements would
      overflow in the dtype of the model.
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
        r"""Compute the step of a full buffer.

        Args:
            space: the space of the points.
            update: the last update.
            frame: the frame of the last update.
            stored: the stored displacements by name, in the order of arrival.
            factors: the factors $\eta_g s_i$ of the stored displacements and, at the end, of the last update.
            out: an optional output buffer for the new model.

        Returns:
            The new model, its distance from the current model, and the inner products of the rows. The first two rows
            are the displacement and the drift of the last update.
        """

    def carried_displacements(self, space: ParameterSpace, state: State) -> list[list[tuple[float, Tensor]]]:
        """Return the scaled displacement of each buffered update, as a list of `[(factor, vector)]`.

        The scaled displacement is `factor * vector`. An update adds at most this vector to the next step. The server
        adds each vector to the model separately, and checks that the results are finite.
        """
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
        """Plan a step. A subclass that computes whole vectors may write its model to `out`."""
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
            # The state is finite, because each stored norm is at most the square root of the largest finite number.
            sound = frame.transporter is None
            return waiting, Outcome(None, update.client_state, numbers | frame.diagnostics, state_is_finite=sound)
        rate = rate_at(self.rate, state["version"])
        kept = [rate * s for s in (*state["factors"].values(), share)]
        model, norm, gram = self.combine(space, update, frame, held, kept, out)
        numbers = {"cosine": gram.cosine, "weight": share, "buffered": 0.0, "rate": rate, "step": rate, "norm": norm}
        after = {"version": state["version"] + 1, "factors": {}, "displacements": {}}
        return after, Outcome(model, update.client_state, numbers | frame.diagnostics)

    def checked_gram(self, frame: Frame) -> Gram:
        """Return the inner products of the rows after checking the norm of the displacement.

        Raises:
            ArgumentError: if the square of a sum of K such displacements would overflow.
        """
        gram = frame.gram()
        longest = safe_sqrt(torch.finfo(frame.dtype).max) / self.size
        check_number("points: size of the displacement", safe_sqrt(gram.matrix[0, 0]), at_most=longest)
        return gram


class CoordinateWiseRule(StoredBufferRule):
    """Base class for rules that compute a trimmed mean of the buffered displacements for each coordinate.

    For each coordinate, the rule sorts the values of the K displacements, discards the `num_trimmed` smallest and the
    `num_trimmed` largest values, and averages the others. On a CPU, it processes a range of coordinates at a time, so
    its working memory does not grow with the model. On a GPU, it needs memory for more than K additional models.
    """

    self_checked: ClassVar[tuple[str, ...]] = ("points",)

    @property
    @abc.abstractmethod
    def num_trimmed(self) -> int:
        """The number of values to discard at each end."""

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
    """Sort the values of K vectors at each position, using `scratch` as additional memory.

    The first vector of the result contains the smallest value of each position, and the last vector contains the
    largest value. The result reuses the memory of the given vectors and of `scratch`.

    The algorithm is odd-even transposition sort: in each of K rounds, it compares neighbouring vectors and exchanges
    values that are in the wrong order. The comparisons run at memory bandwidth. For small K, this is faster than a
    separate sort for each position.

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
