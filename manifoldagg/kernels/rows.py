"""Rows: the tensors, or differences of tensors that are never stored, on which the kernels work."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd import forward_ad

from manifoldagg.errors import ArgumentError, check_count

Subtrahend = Tensor | Sequence[Tensor | None] | None


@dataclass(frozen=True)
class Rows:
    """k vectors of length P: row i is `plus[i]`, or `plus[i] - minus[i]` where that is not `None`."""

    plus: tuple[Tensor, ...]
    minus: tuple[Tensor | None, ...]

    @staticmethod
    def of(rows: Tensor | Sequence[Tensor], minus: Subtrahend = None) -> "Rows":
        """Check and pair `rows` with `minus`: one tensor for all rows, or one (or `None`) for each.

        Raises:
            ArgumentError: if a row is no floating vector, or lengths or devices differ.
        """
        if isinstance(rows, Tensor) and rows.ndim != 2:
            raise ArgumentError(f"rows: expected shape (k, P), got {tuple(rows.shape)}")
        plus = tuple(rows)
        less = (minus,) * len(plus) if minus is None or isinstance(minus, Tensor) else tuple(minus)
        if not plus:
            raise ArgumentError("rows: expected at least one row, got none")
        if len(less) != len(plus):
            raise ArgumentError(f"minus: expected one entry for each of {len(plus)} rows, got {len(less)}")
        for name, group in (("rows", plus), ("minus", less)):
            for i, row in enumerate(group):
                if row is not None:
                    check_row(f"{name}[{i}]", row, like=plus[0])
        return Rows(plus, less)

    @property
    def size(self) -> int:
        """P, the length of a row."""
        return self.plus[0].shape[0]

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor involved, once for each use."""
        return [*self.plus, *(row for row in self.minus if row is not None)]

    def materialise(self) -> Tensor:
        """The rows as one float64 tensor (k, P): plain torch, so that every transform sees through it."""
        return torch.stack(
            [a.double() if b is None else a.double() - b.double() for a, b in zip(self.plus, self.minus, strict=True)]
        )


def check_row(name: str, row: Tensor, *, like: Tensor) -> None:
    """A floating vector with the length and device of `like`.

    Raises:
        ArgumentError: naming the row.
    """
    if not isinstance(row, Tensor) or not row.dtype.is_floating_point:
        kind = row.dtype if isinstance(row, Tensor) else type(row).__name__
        raise ArgumentError(f"{name}: expected a tensor of a floating dtype, got {kind}")
    if row.ndim != 1 or row.shape != like.shape:
        expected = f"({like.shape[0]},)" if like.ndim == 1 else "one dimension"
        raise ArgumentError(f"{name}: expected shape {expected}, got {tuple(row.shape)}")
    if row.device != like.device:
        raise ArgumentError(f"{name}: expected device {like.device}, got {row.device}")


def bounds(segments: Sequence[int] | None, size: int) -> list[tuple[int, int]]:
    """Start and stop of each segment; `segments` are lengths that sum to `size`, `None` is one segment.

    Raises:
        ArgumentError: if the lengths do not sum to `size`.

    Example:
        >>> bounds([2, 0, 3], 5)
        [(0, 2), (2, 2), (2, 5)]
    """
    if segments is None:
        return [(0, size)]
    edges = [0]
    for i, length in enumerate(segments):
        edges.append(edges[-1] + check_count(f"segments[{i}]", length, at_least=0))
    if edges[-1] != size:
        raise ArgumentError(f"segments: expected lengths that sum to {size}, got a sum of {edges[-1]}")
    return list(pairwise(edges))


def is_transformed(tensors: Sequence[Tensor]) -> bool:
    """Whether a derivative or a functorch transform follows any of `tensors`.

    The fused kernels are inference-only: a custom operator would hand a transform silent zeros, so such
    calls take the plain torch path. So do calls that `torch.compile` traces, which sees through nothing else.
    """
    if torch.compiler.is_compiling():
        return True
    recording = torch.is_grad_enabled()
    return any(
        (recording and row.requires_grad)
        or torch._C._functorch.is_functorch_wrapped_tensor(row)
        or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(row).tangent is not None)
        for row in tensors
    )
