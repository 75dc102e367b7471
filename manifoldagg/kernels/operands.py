"""Operands: rows that are vectors or unevaluated differences of vectors, and their checks."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from manifoldagg._validation import check_count
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels.alloc import empty_like
from manifoldagg.kernels.blocks import Blocks
from manifoldagg.kernels.tensor_list import Row, TensorList, as_float64, edges

__all__ = [
    "SHARD_GROUP",
    "Operand",
    "Operands",
    "Subtrahend",
    "address_ranges",
    "blocks_of",
    "bump_version",
    "check_coefficients",
    "check_no_alias",
    "check_target",
    "dtensors_in",
    "empty_like_row",
    "is_sharded",
    "iter_tensors",
    "needs_autograd_path",
    "segment_bounds",
]

Subtrahend = Tensor | Sequence[Row | None] | None
Operand = Tensor | TensorList
"""A row that was checked."""
SHARD_GROUP: ContextVar["tuple[dist.ProcessGroup | None, tuple[int, ...]] | None"] = ContextVar(
    "shard_group", default=None
)
"""The group of `across_ranks` and its replicated segments, within it."""

_requires_grad = attrgetter("requires_grad")


NON_DTENSOR_TYPES = frozenset({Tensor, torch.nn.Parameter, type(None)})
"""Of these types no `DTensor` is: tuples of hundreds of tensors are looked through at once."""
NO_DEVICE = torch.device("meta")
"""Where no row can be: rows have values."""


class Operands:
    """Validated rows: k rows of P entries, where row i is `plus[i]`, or `plus[i] - minus[i]` if that is not `None`.

    `gram` and `combine` accept an `Operands` in place of rows. They do not validate it again, and they describe each
    row once to the native library.

    Attributes:
        plus: vectors, or tensor lists of the same lengths.
        minus: the same, or `None`.
        distinct: all rows, each once.
        shape: (P,), the shape of a vector.
        size: P, the number of entries of a row.
        device: the common device.
        lengths: the lengths of the tensors of a tensor list; `None` if all rows are vectors.
        known: the validated rows by the `id` of the given rows, which `sources` keeps alive.
        descriptors: the descriptions of rows for the native library, by the `id` of the validated rows.
    """

    __slots__ = ("descriptors", "device", "distinct", "known", "lengths", "minus", "plus", "shape", "size", "sources")

    plus: tuple[Operand, ...]
    minus: tuple[Operand | None, ...]
    distinct: tuple[Operand, ...]
    sources: tuple[Any, ...]
    device: torch.device

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.size = 0
        self.device = NO_DEVICE
        self.lengths: tuple[int, ...] | None = None
        self.known: dict[int, Operand] = {}
        self.descriptors: dict[int, bytes | None] = {}

    @staticmethod
    def of(rows: Tensor | Sequence[Row], minus: Subtrahend = None) -> "Operands":
        """Check and pair `rows` with `minus`: one vector for all rows, or one row (or `None`) for each.

        Raises:
            ArgumentError: if a row is no floating vector nor a tuple of floating tensors, or lengths or devices differ.
        """
        if isinstance(rows, Tensor) and rows.ndim != 2:
            raise ArgumentError(f"rows: expected shape (k, P), got {tuple(rows.shape)}")
        plus = rows if type(rows) is tuple else _as_tuple("rows", rows)
        if minus is None or isinstance(minus, Tensor):
            less: tuple[Any, ...] = (minus,) * len(plus)
        else:
            less = minus if type(minus) is tuple else _as_tuple("minus", minus)
        if not plus:
            raise ArgumentError("rows: expected at least one row, got none")
        if len(less) != len(plus):
            raise ArgumentError(f"minus: expected one entry for each of {len(plus)} rows, got {len(less)}")
        found = Operands()
        found.sources = (*plus, *less)
        for name, group in (("rows", plus), ("minus", less)):
            for i, row in enumerate(group):
                if id(row) not in found.known and not (row is None and name == "minus"):
                    found.known[id(row)] = found.as_operand(name, row, i)
        return found._pair(plus, less)

    def select(self, indices: Sequence[int]) -> "Operands":
        """Return some of these rows."""
        return self._derive()._pair([self.plus[i] for i in indices], [self.minus[i] for i in indices])

    def with_minus(self, minus: Sequence[Row | None]) -> "Operands":
        """Return these rows with other subtrahends, each of which is one of the given rows."""
        return self._derive()._pair(self.plus, minus)

    def _derive(self) -> "Operands":
        """Return an object for rows among these, which shares what is known of them."""
        found = Operands()
        for name in ("descriptors", "device", "known", "lengths", "shape", "size", "sources"):
            setattr(found, name, getattr(self, name))
        return found

    def _pair(self, plus: Sequence[Row], minus: Sequence[Row | None]) -> "Operands":
        """Set the rows, given or validated."""
        known: dict[int, Any] = self.known
        self.plus = tuple([known.get(id(row), row) for row in plus])
        self.minus = tuple([None if row is None else known.get(id(row), row) for row in minus])
        self.distinct = tuple({id(row): row for row in (*self.plus, *self.minus) if row is not None}.values())
        return self

    def as_operand(self, name: str, row: Any, index: int | None = None) -> Operand:
        """Check a row against the first one.

        Raises:
            ArgumentError: naming the row, or the tensor in it.
        """
        if isinstance(row, Tensor):
            if self.device is NO_DEVICE and row.ndim == 1 and not row.is_meta:
                self.shape = row.shape
                self.size = row.shape[0]
                self.device = row.device
            fits = row.shape == self.shape and row.device == self.device
            if fits and row.dtype.is_floating_point and row.layout is torch.strided:
                return row
        elif isinstance(row, tuple) and row:
            line = row if isinstance(row, TensorList) else TensorList(row)
            with suppress(TypeError, AttributeError):  # of an entry that is not a tensor
                device = line.device
                if self.device is NO_DEVICE and device is not None:
                    self.size = line.size
                    self.shape = (self.size,)
                    self.device = device
                alike = line.size == self.size and device == self.device and self.lengths in (None, line.lengths)
                if alike and not ("torch.distributed.tensor" in sys.modules and dtensors_in((line,))):
                    self.lengths = line.lengths
                    return line
        raise ArgumentError(f"{name if index is None else f'{name}[{index}]'}{self._describe_error(row)}")

    def _describe_error(self, row: Any) -> str:
        """What is wrong with a row, or with the first tensor in it with which something is."""
        if not isinstance(row, tuple):
            fault = _tensor_error(row, self.device)
            real = isinstance(row, Tensor) and row.dtype.is_floating_point
            if real and (row.ndim != 1 or (self.device is not NO_DEVICE and row.shape != self.shape)):
                expected = "one dimension" if self.device is NO_DEVICE else f"({self.size},)"
                fault = f"expected shape {expected}, got {tuple(row.shape)}"
            return f": {fault}"
        if not row:
            return ": expected at least one tensor, got an empty tuple"
        lengths = self.lengths
        if lengths is not None and len(lengths) != len(row):
            return f": expected {len(lengths)} tensors, got {len(row)}"
        for i, tensor in enumerate(row):
            fault = _tensor_error(tensor, self.device)
            if fault is None and dtensors_in((tensor,)):
                fault = "expected a plain tensor, got a DTensor, of which whole vectors alone may be"
            if fault is None and lengths is not None and tensor.numel() != lengths[i]:
                fault = f"expected {lengths[i]} entries, got {tensor.numel()}"
            if fault is not None:
                return f"[{i}]: {fault}"
        return f": expected {self.size} entries, got {sum(tensor.numel() for tensor in row)}"

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The distinct dtypes."""
        found: set[torch.dtype] = set()
        for row in self.distinct:
            if isinstance(row, Tensor):
                found.add(row.dtype)
            else:
                found |= row.dtypes
        return found

    def materialise(self) -> Tensor:
        """Compute the rows as one float64 tensor (k, P) in plain torch, which supports every transform."""
        return torch.stack(
            [
                as_float64(a) if b is None else as_float64(a) - as_float64(b)
                for a, b in zip(self.plus, self.minus, strict=True)
            ]
        )

    def contiguous(self) -> "Operands":
        """Return these rows with copies of noncontiguous tensors."""
        if self.lengths is None or all(isinstance(row, Tensor) or row.is_contiguous for row in self.distinct):
            return self
        found = self._derive()
        found.known = {id(row): row if isinstance(row, Tensor) else row.contiguous() for row in self.distinct}
        found.descriptors = {}
        return found._pair(self.plus, self.minus)


def _tensor_error(tensor: Any, device: torch.device) -> str | None:
    if not isinstance(tensor, Tensor) or not tensor.dtype.is_floating_point:
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        return f"expected a tensor of a floating dtype, got {kind}"
    if tensor.layout is not torch.strided or tensor.is_meta:
        return f"expected a dense tensor with values, got {tensor.layout} on {tensor.device}"
    return f"expected device {device}, got {tensor.device}" if device not in (NO_DEVICE, tensor.device) else None


def empty_like_row(like: Operand) -> Operand:
    """Allocate a row like this one."""
    return like.new_empty() if isinstance(like, TensorList) else empty_like(like)


OVERLAP_ERROR = "out: expected base or a row itself, or memory apart from theirs; got an overlap"


def bump_version(out: Operand) -> None:
    """Increment the version of `out` after a write that torch did not see, so that autograd detects it."""
    tensors: Sequence[Tensor] = (out,) if isinstance(out, Tensor) else out
    if any(map(Tensor.is_inference, tensors)):
        tensors = [tensor for tensor in tensors if not tensor.is_inference()]
    torch.autograd.graph.increment_version(tensors)


def check_target(out: Operand, rows: Operands, base: Operand | None) -> None:
    """Check that `out`, a row, is disjoint from each operand or identical to it.

    Raises:
        ArgumentError: if it shares a part of its memory with itself or what is read.
    """
    read = rows.distinct if base is None else (*rows.distinct, base)
    if rows.lengths is not None:
        check_no_alias(out, read, rows.lengths)
        return
    assert isinstance(out, Tensor)
    if out.shape[0] > 1 and out.stride(0) == 0:
        raise ArgumentError("out: expected entries with memory of their own, got an expanded tensor")
    low, high, stride = _address_range(out)
    for row in read:
        assert isinstance(row, Tensor)
        if row is out or row.data_ptr() >= high:
            continue
        start, stop, step = _address_range(row)
        if low >= stop or (start, step, row.dtype) == (low, stride, out.dtype):
            continue
        gap = (start - low) % stride
        if step != stride or not out.itemsize <= gap <= stride - row.itemsize:  # else between its entries
            raise ArgumentError(OVERLAP_ERROR)


def blocks_of(segments: Sequence[int] | None, size: int) -> Blocks:
    """Return the blocks of `segments`, lengths that sum to `size`; `None` is one segment.

    Raises:
        ArgumentError: if the lengths do not sum to `size`.
    """
    if segments is None:
        return Blocks.of(((0, size),))
    if isinstance(segments, (list, tuple)) and set(map(type, segments)) <= {int}:
        return _blocks_of(tuple(segments), size)
    return Blocks.of(segment_bounds(segments, size))


@lru_cache(maxsize=64)
def _blocks_of(segments: tuple[int, ...], size: int) -> Blocks:
    """Kept, as checks and borders of some hundred segments take longer than the step of a small model."""
    return Blocks.of(segment_bounds(segments, size))


def check_no_alias(out: Operand, read: Sequence[Operand], lengths: tuple[int, ...]) -> None:
    """Check that a target of tensors is disjoint from each operand or identical to it.

    Raises:
        ArgumentError: if one shares a part of its memory with itself, another one, or what is read.
    """
    if (
        isinstance(out, TensorList)
        and out.disjoint_from
        and all(any(row is seen for seen in out.disjoint_from) for row in read)
    ):
        return
    starts, stops = address_ranges(out, lengths)
    order = np.argsort(starts, kind="stable")
    order = order[stops[order] > starts[order]]  # tensors without entries are nowhere
    low = starts[order]
    high = stops[order]
    folded = _self_overlaps(out) if isinstance(out, Tensor) else not out.is_contiguous and any(map(_self_overlaps, out))
    if folded or (high[:-1] > low[1:]).any():
        raise ArgumentError("out: expected tensors with memory of their own, got some that share it")
    for row in read:
        if row is out or len(order) == 0 or _are_disjoint(out, row):
            continue
        begin, end = address_ranges(row, lengths)
        # Of `out`, by address, the first tensor that ends behind where each begins: it is met, if any is.
        first = np.minimum(np.searchsorted(high, begin, side="right"), len(order) - 1)
        met = np.flatnonzero((low[first] < end) & (high[first] > begin) & (end > begin))
        same = (order[first[met]] == met) & (starts[met] == begin[met]) & (stops[met] == end[met])
        if not same.all() or not _have_same_dtypes(out, row, met):
            raise ArgumentError(OVERLAP_ERROR)


def _are_disjoint(out: Operand, row: Operand) -> bool:
    """Whether one of two rows of tensors ends before the other begins, as is usual of models made one after another."""
    if isinstance(out, Tensor) or isinstance(row, Tensor):
        return False
    return out.address_bounds[1] <= row.address_bounds[0] or row.address_bounds[1] <= out.address_bounds[0]


def _self_overlaps(tensor: Tensor) -> bool:
    """Whether several entries may lie at one address: a step from one to the next does not lead past those between."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if step <= reach:
            return True
        reach += step * (n - 1)
    return False


def address_ranges(row: Operand, lengths: tuple[int, ...]) -> np.ndarray:
    """Return the address range of each piece of a row: (2, n)."""
    if isinstance(row, TensorList):
        return row.address_ranges
    borders = edges(lengths)
    item = row.itemsize
    step = row.stride(0) * item
    starts = row.data_ptr() + borders[:-1] * step
    stops = np.where(borders[1:] > borders[:-1], row.data_ptr() + (borders[1:] - 1) * step + item, starts)
    return np.stack([starts, stops])


def _have_same_dtypes(out: Operand, row: Operand, pieces: np.ndarray) -> bool:
    """Whether these pieces of two rows have the same dtypes."""
    ours, theirs = ({x.dtype} if isinstance(x, Tensor) else x.dtypes for x in (out, row))
    if len(ours) == 1 and ours == theirs:
        return True
    return all(_dtype(out, i) == _dtype(row, i) for i in pieces.tolist())


def _dtype(row: Operand, piece: int) -> torch.dtype:
    return row.dtype if isinstance(row, Tensor) else row[piece].dtype


def segment_bounds(segments: Sequence[int] | None, size: int) -> tuple[tuple[int, int], ...]:
    """Return the start and the stop of each segment; `segments` are lengths that sum to `size`, `None` is one.

    Raises:
        ArgumentError: if the lengths do not sum to `size`.

    Example:
        >>> segment_bounds([2, 0, 3], 5)
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
    """Return coefficients of shape (s, k): lists of floats, or a tensor if tensors were given.

    Raises:
        ArgumentError: if they are not numbers, or not so many.
    """
    try:
        if isinstance(coefficients, np.ndarray):
            coefficients = coefficients.tolist()
        if isinstance(coefficients, Tensor):
            factors = _check_real(coefficients)
        else:
            # Tuples, where unions would do: the compiler of torch 2.6 does not take these.
            if isinstance(coefficients, (str, bytes, Mapping, Set)):
                raise TypeError(f"got {coefficients!r}")
            listed: list[Any] = list(coefficients)
            if _is_number_list(listed, k):
                return [[float(c) for c in listed]] * s
            if len(listed) == s and all(_is_number_list(line, k) for line in listed):
                return [[float(c) for c in line] for line in listed]
            factors = _stack_numbers(listed)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentError(f"coefficients: expected numbers of shape (k,) or (S, k): {error}") from None
    if factors.ndim == 1:
        factors = factors.expand(s, -1)
    if tuple(factors.shape) != (s, k):
        raise ArgumentError(f"coefficients: expected shape ({s}, {k}), got {tuple(factors.shape)}")
    return factors


def needs_autograd_path(tensors: Iterable[Row]) -> bool:
    """Return whether autograd or a functorch transform tracks any of `tensors`, vectors or tuples of them.

    The fused kernels are inference-only: a custom operator would hand a transform silent zeros, so such
    calls take the plain torch path. So do calls that `torch.compile` traces, which sees through nothing else.
    """
    if torch.compiler.is_compiling():
        return True
    if torch.is_grad_enabled():
        for row in tensors:
            if row.requires_grad if isinstance(row, Tensor) else any(map(_requires_grad, row)):
                return True
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(row).tangent is not None for row in iter_tensors(tensors)
    ):
        return True
    within = torch._C._functorch.peek_interpreter_stack() is not None
    return within and any(torch._C._functorch.is_functorch_wrapped_tensor(row) for row in iter_tensors(tensors))


def is_sharded(*groups: Subtrahend) -> bool:
    """Return whether this rank holds only shards: of a `DTensor`, or within `across_ranks`."""
    if torch.compiler.is_compiling():
        return False
    return SHARD_GROUP.get() is not None or ("torch.distributed.tensor" in sys.modules and bool(dtensors_in(groups)))


def dtensors_in(groups: Iterable[Any]) -> list[Any]:
    """Return the `DTensor`s among tensors and sequences of them."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return []
    found = []
    for group in groups:
        if isinstance(group, module.DTensor):
            found.append(group)
        elif isinstance(group, (tuple, list)) and not NON_DTENSOR_TYPES.issuperset(map(type, group)):
            found += dtensors_in(group)
    return found


def iter_tensors(groups: Iterable[Any]) -> Iterator[Any]:
    """Iterate over tensors, including those in nested sequences and tuples."""
    for group in groups:
        if isinstance(group, Tensor) or not isinstance(group, Sequence):
            yield group
        else:
            yield from iter_tensors(group)


def _as_tuple(name: str, vectors: Any) -> tuple[Any, ...]:
    try:
        return tuple(vectors)
    except TypeError:
        raise ArgumentError(f"{name}: expected a sequence of tensors, got {type(vectors).__name__}") from None


def _address_range(row: Tensor) -> tuple[int, int, int]:
    """The addresses between which the entries of a vector lie, and from one to the next; all in bytes."""
    start = row.data_ptr()
    size = row.shape[0]
    item = row.itemsize
    stride = row.stride(0) * item if size > 1 else item
    return start, start + (size - 1) * stride + item if size else start, stride


def _is_number_list(values: Any, k: int) -> bool:
    return (
        isinstance(values, (list, tuple))
        and len(values) == k
        and all(type(c) is float or type(c) is int for c in values)
    )


def _stack_numbers(numbers: Any) -> Tensor:
    """Nested numbers and tensors as one float64 tensor, which carries their derivatives."""
    if isinstance(numbers, Tensor):
        return _check_real(numbers).to("cpu", torch.float64)
    if isinstance(numbers, (str, bytes, bool, np.bool_)):
        raise TypeError(f"got {numbers!r}")
    if isinstance(numbers, Sequence):
        return torch.stack([_stack_numbers(c) for c in numbers])
    return torch.tensor(float(numbers), dtype=torch.float64, device="cpu")


def _check_real(numbers: Tensor) -> Tensor:
    if numbers.is_complex() or numbers.dtype is torch.bool:
        raise TypeError(f"got {numbers.dtype}")
    return numbers
