"""Readings of a stale update: its displacement, its position, and an estimate of its displacement from here."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from manifoldagg._validation import check_number, check_shape, is_finite
from manifoldagg.corrections.correction import Correction
from manifoldagg.corrections.frame import Frame
from manifoldagg.corrections.gram import Gram, Matrix
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import Row
from manifoldagg.kernels.chunking import chunks
from manifoldagg.kernels.operands import needs_autograd_path

__all__ = ["DelayCompensated", "Position", "Tangent"]

EPSILON = 1e-7
"""Added to the mean square of the gradient under the root: Zheng et al."""


@dataclass(frozen=True)
class Tangent(Correction):
    r"""The displacement reading: $\pi v = v$ (ASGD).

    Source: Manifold (AsyncTan).
    """

    def coefficients(self, gram: Gram, state: Any = None) -> tuple[Matrix, Any]:
        return gram.identity(), state


@dataclass(frozen=True)
class Position(Correction):
    r"""The position reading: the displacement from the current model to the client's model (FedAsync).

    $$\pi v = v - g$$

    On a curved space it is $\log_{\Theta^\tau}(\exp_{\Theta^t} v)$, which differs from $v - g$ with $v$ transported at
    third order: the frame has these tangents as rows of their own. After another correction, $v$ is taken
    back to the base first.

    Source: Manifold (AsyncPos).

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> base, current, model = torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([3.0])
        >>> Position()(Flat(1), base, current, (model - base)[None])
        tensor([[2.]])
    """

    def adds_rows(self, frame: Frame) -> bool:
        return frame.transporter is not None

    def extend(self, frame: Frame, state: Any = None) -> Frame:
        passage = frame.transporter
        if passage is None:
            return frame
        original = frame.base_displacements
        if original is None:
            rows = torch.stack([frame.rows[i] for i in range(frame.num_displacements)])  # type: ignore[misc]  # vectors there
            original = passage.to_base(rows.view(-1, *passage.base.shape))
        for i, row in enumerate(passage.position(original).flatten(1)):
            frame = frame.with_row(f"p{i + 1}", row)
        return frame

    def coefficients(self, gram: Gram, state: Any = None) -> tuple[Matrix, Any]:
        lines = gram.identity()
        for i, line in enumerate(lines):
            if gram.extra:
                line[i] = 0
                line[gram.row_index(f"p{i + 1}")] = 1
            else:
                line[gram.num_displacements] = -1
        return lines, state


@dataclass(frozen=True)
class DelayCompensated(Correction):
    r"""First-order expansion of the client's gradient about the base, its Hessian replaced by $\lambda\, e \odot e$.

    With the gradient $e = -v$, $\pi v = -(e + \lambda\, e \odot e \odot g)$, that is

    $$\pi v = v - \lambda\; v \odot v \odot g.$$

    The products are rows of the frame, formed in float64, one for each displacement. With `adaptive` (DC-ASGD-a),
    $\lambda$ is $\lambda_0 / \sqrt{m + 10^{-7}}$ elementwise, with $m \leftarrow .95\, m + .05\, v \odot v$ of the
    last displacement, that is of the end point: the products are divided by the root. $m$ is the state.

    Args:
        strength: $\lambda \ge 0$, or $\lambda_0$.
        adaptive: scale by the mean square of the gradient.
        decay: of that mean.

    Raises:
        ArgumentError: if `strength` or `decay` is out of range; when applied to a curved space: an elementwise product
            depends on coordinates; if a mean square overflows.

    Source: Zheng et al. 2017, DC-ASGD-c and -a; Report (12).

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> base, current = torch.zeros(2), torch.tensor([1.0, 0.0])
        >>> DelayCompensated(0.5)(Flat(2), base, current, torch.tensor([[2.0, 3.0]]))
        tensor([[0., 3.]])
    """

    strength: float = 0.04
    adaptive: bool = field(default=False, kw_only=True)
    decay: float = field(default=0.95, kw_only=True)

    def __post_init__(self) -> None:
        check_number("strength", self.strength, at_least=0)
        check_number("decay", self.decay, at_least=0, at_most=1)

    @property
    def keeps_state(self) -> bool:  # type: ignore[override]  # of the option
        """Whether the mean square is tracked."""
        return self.adaptive

    def extend(self, frame: Frame, state: Any = None) -> Frame:
        frame.require_flat("DelayCompensated, an elementwise product,")
        n = frame.num_displacements
        if needs_autograd_path([tensor for row in (*frame.rows, *frame.minus) for tensor in _row_tensors(row)]):
            rows = self._products(frame, state)
        else:
            rows = [frame.empty_vector(torch.float64) for _ in range(n)]
            for part, known, targets in _frame_chunks(frame, state if self.adaptive else None, rows):
                for target, product in zip(targets, self._products(part, known), strict=True):
                    target.copy_(product)
        for i, row in enumerate(rows):
            frame = frame.with_row(_product_name(i), row)
        return frame

    def coefficients(self, gram: Gram, state: Any = None) -> tuple[Matrix, Any]:
        lines = gram.identity()
        for i, line in enumerate(lines):
            line[gram.row_index(_product_name(i))] = -self.strength
        return lines, state

    def update_state(self, frame: Frame, coefficients: Matrix, state: Any) -> Any:
        if not (self.adaptive and frame.num_displacements):
            return state
        wide = torch.promote_types(frame.dtype, torch.float32)
        square = frame.empty_vector(wide)
        for part, known, (target,) in _frame_chunks(frame.detach(), state, [square]):
            target.copy_(self._mean_square(part, known))
        if not is_finite(square):
            raise ArgumentError(f"points: expected displacements whose mean square is finite in {wide}")
        return {"mean_square": square}

    def _products(self, frame: Frame, state: Any) -> list[torch.Tensor]:
        r"""$v_i \odot v_i \odot g$, divided by the root of the mean square where that is followed."""
        n = frame.num_displacements
        scale = self._mean_square(frame, state).add_(EPSILON).sqrt_() if self.adaptive and n else None
        drift = frame.row(n)
        found = []
        for i in range(n):
            v = frame.row(i)
            row = v * v * drift
            found.append(row if scale is None else row / scale)
        return found

    def _mean_square(self, frame: Frame, state: Any) -> torch.Tensor:
        """The mean square with this update in it, in float64: a new tensor."""
        fresh = frame.row(frame.num_displacements - 1).square() * (1 - self.decay)
        if state is None:
            return fresh
        return fresh + self.decay * check_shape("state['mean_square']", state["mean_square"], *fresh.shape).double()


def _product_name(i: int) -> str:
    return f"v{i + 1}*v{i + 1}*g"


def _frame_chunks(
    frame: Frame, state: Any, others: list[torch.Tensor]
) -> Iterator[tuple[Frame, Any, tuple[torch.Tensor, ...]]]:
    """The frame, the mean square in the state and other vectors, window by window of each tensor of the rows."""
    known = []
    if state is not None:
        known.append(check_shape("state['mean_square']", state["mean_square"], frame.size))
    k = len(frame.rows)
    start = 0
    for j, piece in enumerate(_row_tensors(frame.current)):
        here = slice(start, start + piece.numel())
        start = here.stop
        rows = [_row_part(row, j, here) for row in frame.rows]
        less = [_row_part(row, j, here) for row in frame.minus if row is not None]
        for parts in chunks(*rows, *less, *(vector[here] for vector in (*known, *others))):
            taken = iter(parts[k:])
            minus = tuple(None if row is None else next(taken) for row in frame.minus)
            before = {"mean_square": next(taken)} if known else None
            yield replace(frame, rows=parts[:k], minus=minus, segments=None), before, tuple(taken)


def _row_tensors(row: Row | None) -> tuple[torch.Tensor, ...]:
    """What a row is made of."""
    return () if row is None else row if isinstance(row, tuple) else (row,)


def _row_part(row: Row, j: int, entries: slice) -> torch.Tensor:
    """The part of a row that lies in the tensor j of those that are tuples, as a vector."""
    return row[j].reshape(-1) if isinstance(row, tuple) else row[entries]
