"""Rows: the tensors, or differences of tensors that are never stored, on which the kernels work; their checks."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from manifoldagg.errors import ArgumentError, check_count

__all__ = [
    "ACROSS",
    "Rows",
    "Subtrahend",
    "bounds",
    "check_coefficients",
    "check_row",
    "check_target",
    "flat",
    "is_spread",
    "is_transformed",
    "meshed",
]

Subtrahend = Tensor | Sequence[Tensor | None] | None
ACROSS: ContextVar["tuple[dist.ProcessGroup | None, tuple[int, ...]] | None"] = ContextVar("across", default=None)
"""The group of `across_ranks` and its replicated segments, within it."""


@dataclass(frozen=True, eq=False)
class Rows:
    """k vectors of length P: row i is `plus[i]`, or `plus[i] - minus[i]` where that is not `None`.

    `tensors` are all that are involved, each once.
    """

    plus: tuple[Tensor, ...]
    minus: tuple[Tensor | None, ...]
    tensors: tuple[Tensor, ...]

    @staticmethod
    def of(rows: Tensor | Sequence[Tensor], minus: Subtrahend = None) -> "Rows":
        """Check and pair `rows` with `minus`: one tensor for all rows, or one (or `None`) for each.

        Raises:
            ArgumentError: if a row is no floating vector, or lengths or devices differ.
        """
        if isinstance(rows, Tensor) and rows.ndim != 2:
            raise ArgumentError(f"rows: expected shape (k, P), got {tuple(rows.shape)}")
        plus = _listed("rows", rows)
        less = (minus,) * len(plus) if minus is None or isinstance(minus, Tensor) else _listed("minus", minus)
        if not plus:
            raise ArgumentError("rows: expected at least one row, got none")
        if len(less) != len(plus):
            raise ArgumentError(f"minus: expected one entry for each of {len(plus)} rows, got {len(less)}")
        distinct: dict[int, Tensor] = {}
        for name, group in (("rows", plus), ("minus", less)):
            for i, row in enumerate(group):
                if not (row is None and name == "minus") and id(row) not in distinct:
                    check_row(name, i, row, like=plus[0])
                    distinct[id(row)] = row
        return Rows(plus, less, tuple(distinct.values()))

    @property
    def size(self) -> int:
        """P, the length of a row."""
        return self.plus[0].shape[0]

    def materialise(self) -> Tensor:
        """The rows as one float64 tensor (k, P): plain torch, so that every transform sees through it."""
        return torch.stack(
            [a.double() if b is None else a.double() - b.double() for a, b in zip(self.plus, self.minus, strict=True)]
        )


def check_row(name: str, index: int | None, row: Tensor, *, like: Tensor) -> None:
    """A floating vector with the length and device of `like`, which is itself one, or this row.

    Raises:
        ArgumentError: naming the row.
    """
    if isinstance(row, Tensor) and row.dtype.is_floating_point and row.layout is torch.strided:
        if row is like:
            if row.ndim == 1 and not row.is_meta:
                return
        elif row.shape == like.shape and row.device == like.device:
            return
    name = name if index is None else f"{name}[{index}]"
    if not isinstance(row, Tensor) or not row.dtype.is_floating_point:
        kind = row.dtype if isinstance(row, Tensor) else type(row).__name__
        raise ArgumentError(f"{name}: expected a tensor of a floating dtype, got {kind}")
    if row.ndim != 1 or row.shape != like.shape:
        expected = f"({like.shape[0]},)" if like.ndim == 1 else "one dimension"
        raise ArgumentError(f"{name}: expected shape {expected}, got {tuple(row.shape)}")
    if row.layout is not torch.strided or row.is_meta:
        raise ArgumentError(f"{name}: expected a dense tensor with values, got {row.layout} on {row.device}")
    raise ArgumentError(f"{name}: expected device {like.device}, got {row.device}")


def check_target(out: Tensor, rows: Rows, base: Tensor | None) -> None:
    """`out`, a row, is apart from what is read, or the same entries.

    Raises:
        ArgumentError: if it shares a part of its memory with itself or what is read.
    """
    if out.shape[0] > 1 and out.stride(0) == 0:
        raise ArgumentError("out: expected entries with memory of their own, got an expanded tensor")
    low, high, stride = _span(out)
    for row in rows.tensors if base is None else (*rows.tensors, base):
        if row is out or row.data_ptr() >= high:
            continue
        start, stop, step = _span(row)
        if low >= stop or (start, step, row.dtype) == (low, stride, out.dtype):
            continue
        gap = (start - low) % stride
        if step != stride or not out.itemsize <= gap <= stride - row.itemsize:  # else between its entries
            raise ArgumentError("out: expected base or a row itself, or memory apart from theirs; got an overlap")


def bounds(segments: Sequence[int] | None, size: int) -> tuple[tuple[int, int], ...]:
    """Start and stop of each segment; `segments` are lengths that sum to `size`, `None` is one segment.

    Raises:
        ArgumentError: if the lengths do not sum to `size`.

    Example:
        >>> bounds([2, 0, 3], 5)
        ((0, 2), (2, 2), (2, 5))
    """
    if segments is None:
        return ((0, size),)
    edges = [0]
    if not isinstance(segments, Iterable):
        raise ArgumentError(f"segments: expected a sequence of lengths, got {segments!r}")
    for i, length in enumerate(segments):
        edges.append(edges[-1] + check_count(f"segments[{i}]", length, at_least=0))
    if edges[-1] != size:
        raise ArgumentError(f"segments: expected lengths that sum to {size}, got a sum of {edges[-1]}")
    return tuple(pairwise(edges))


def check_coefficients(coefficients: Any, s: int, k: int) -> Tensor | list[list[float]]:
    """Coefficients of shape (s, k): lists of floats, or a tensor where tensors were given.

    Raises:
        ArgumentError: if they are no numbers, or not so many.
    """
    try:
        if isinstance(coefficients, np.ndarray):
            coefficients = coefficients.tolist()
        if isinstance(coefficients, Tensor):
            factors = _real(coefficients)
        else:
            if isinstance(coefficients, str | bytes | Mapping | Set):
                raise TypeError(f"got {coefficients!r}")
            listed: list[Any] = list(coefficients)
            if _plain(listed, k):
                return [[float(c) for c in listed]] * s
            if len(listed) == s and all(_plain(line, k) for line in listed):
                return [[float(c) for c in line] for line in listed]
            factors = _stacked(listed)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentError(f"coefficients: expected numbers of shape (k,) or (S, k): {error}") from None
    if factors.ndim == 1:
        factors = factors.expand(s, -1)
    if tuple(factors.shape) != (s, k):
        raise ArgumentError(f"coefficients: expected shape ({s}, {k}), got {tuple(factors.shape)}")
    return factors


def is_transformed(tensors: Sequence[Tensor]) -> bool:
    """Whether a derivative or a functorch transform follows any of `tensors`.

    The fused kernels are inference-only: a custom operator would hand a transform silent zeros, so such
    calls take the plain torch path. So do calls that `torch.compile` traces, which sees through nothing else.
    """
    if torch.compiler.is_compiling():
        return True
    if torch.is_grad_enabled():
        for row in tensors:
            if row.requires_grad:
                return True
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(row).tangent is not None for row in tensors):
        return True
    within = torch._C._functorch.peek_interpreter_stack() is not None
    return within and any(torch._C._functorch.is_functorch_wrapped_tensor(row) for row in tensors)


def is_spread(*groups: Subtrahend) -> bool:
    """Whether this rank holds but pieces: one of these is a `DTensor`, or the call comes from within `across_ranks`."""
    return not torch.compiler.is_compiling() and (ACROSS.get() is not None or bool(meshed(groups)))


def meshed(groups: Iterable[Any]) -> list[Any]:
    """The `DTensor`s among tensors and sequences of them."""
    module = sys.modules.get("torch.distributed.tensor")
    return [] if module is None else [tensor for tensor in flat(groups) if isinstance(tensor, module.DTensor)]


def flat(groups: Iterable[Any]) -> Iterator[Any]:
    """Tensors and sequences of them, one by one."""
    return chain.from_iterable(group if isinstance(group, Sequence) else (group,) for group in groups)


def _listed(name: str, vectors: Any) -> tuple[Any, ...]:
    try:
        return tuple(vectors)
    except TypeError:
        raise ArgumentError(f"{name}: expected a sequence of tensors, got {type(vectors).__name__}") from None


def _span(row: Tensor) -> tuple[int, int, int]:
    """The addresses between which the entries of a vector lie, and from one to the next; all in bytes."""
    start = row.data_ptr()
    size = row.shape[0]
    item = row.itemsize
    stride = row.stride(0) * item if size > 1 else item
    return start, start + (size - 1) * stride + item if size else start, stride


def _plain(line: Any, k: int) -> bool:
    return isinstance(line, list | tuple) and len(line) == k and all(type(c) is float or type(c) is int for c in line)


def _stacked(numbers: Any) -> Tensor:
    """Nested numbers and tensors as one float64 tensor, which carries their derivatives."""
    if isinstance(numbers, Tensor):
        return _real(numbers).to("cpu", torch.float64)
    if isinstance(numbers, str | bytes | bool | np.bool_):
        raise TypeError(f"got {numbers!r}")
    if isinstance(numbers, Sequence):
        return torch.stack([_stacked(c) for c in numbers])
    return torch.tensor(float(numbers), dtype=torch.float64, device="cpu")


def _real(numbers: Tensor) -> Tensor:
    if numbers.is_complex() or numbers.dtype is torch.bool:
        raise TypeError(f"got {numbers.dtype}")
    return numbers
