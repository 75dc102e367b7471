"""Validation of the rows that the kernels `gram` and `combine` read and write.

A row is a vector, a tuple of tensors such as the parameters of a model, or an unevaluated difference of two of these.
The module checks shapes, dtypes, devices and overlapping memory once, so that the backends need not repeat these
checks.
"""

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
from manifoldagg.kernels.tensor_list import CPU, NULL_DESCRIPTOR, Row, TensorList, as_float64, describe_vector, edges

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
"""A validated row."""
SHARD_GROUP: ContextVar["tuple[dist.ProcessGroup | None, tuple[int, ...]] | None"] = ContextVar(
    "shard_group", default=None
)
"""The process group of the active `across_ranks` context, and the indices of its replicated segments."""

_requires_grad = attrgetter("requires_grad")

NON_DTENSOR_TYPES = frozenset({Tensor, torch.nn.Parameter, type(None)})
"""Types that are not `DTensor`s. Comparing types is a fast check for tuples with hundreds of tensors."""
PLAIN_ROW_TYPES = NON_DTENSOR_TYPES | {TensorList}
NUMBER_TYPES = frozenset({float, int})
NO_DEVICE = torch.device("meta")
"""A placeholder for an unknown device. No row is on the meta device, because rows have values."""


class Operands:
    """Validated rows for the kernels: row i is `plus[i] - minus[i]`, or `plus[i]` if `minus[i]` is `None`.

    [`gram`][manifoldagg.kernels.gram] and [`combine`][manifoldagg.kernels.combine] accept operands in place of rows and
    do not validate them again. Operands are valid during one step. The shape, dtype and storage of their tensors must
    not change in that time.

    Attributes:
        plus: the minuends: k vectors, or k tensor lists of equal lengths.
        minus: the subtrahends: one row or `None` for each minuend.
        distinct: all distinct rows.
        size: the number P of entries of a row; -1 before the first row.
        device: the common device.
        lengths: the lengths of the tensors in tensor lists; `None` if all rows are vectors.
        described: a mapping from the `id` of each row to the row and its descriptors for the native library. The
            references keep the ids valid.
        tables: the arguments of the native library: the number of pieces, their edges, and the descriptors of `plus`
            and `minus`. `None` before `prepare`, and for rows that the library cannot read.
    """

    plus: tuple[Operand, ...]
    minus: tuple[Operand | None, ...]
    distinct: tuple[Operand, ...]
    size: int = -1
    device: torch.device = NO_DEVICE
    lengths: tuple[int, ...] | None = None
    described: dict[int, tuple[Operand | None, bytes]]
    tables: tuple[int, bytes, bytes, bytes] | None = None

    @staticmethod
    def of(rows: Tensor | Sequence[Row], minus: Subtrahend = None) -> "Operands":
        """Validate vectors (rows), and optionally vectors that are subtracted from them.

        `minus` is `None`, a single vector that is subtracted from all rows, or a sequence that contains a vector or
        `None` for each row.

        Raises:
            ArgumentError: if a row is neither a floating vector nor a tuple of floating tensors, or if lengths or
                devices differ.
        """
        if isinstance(rows, Tensor) and rows.ndim != 2:
            raise ArgumentError(f"rows: expected shape (k, P), got {tuple(rows.shape)}")
        plus = rows if type(rows) is tuple else _as_tuple("rows", rows)
        subtrahends: tuple[Any, ...]
        if minus is None or isinstance(minus, Tensor):
            subtrahends = (minus,) * len(plus)
        else:
            subtrahends = minus if type(minus) is tuple else _as_tuple("minus", minus)
        if not plus:
            raise ArgumentError("rows: expected at least one row, got an empty sequence")
        if len(subtrahends) != len(plus):
            raise ArgumentError(f"minus: expected one entry for each of {len(plus)} rows, got {len(subtrahends)}")
        operands = Operands()
        operands.described = {}
        # A row that occurs several times is validated once. Identity also tells the backends to read it once.
        validated: dict[int, Operand] = {}
        for i, row in enumerate(plus):
            if id(row) not in validated:
                validated[id(row)] = operands.as_operand("rows", row, i)
        for i, row in enumerate(subtrahends):
            if row is not None and id(row) not in validated:
                validated[id(row)] = operands.as_operand("minus", row, i)
        return operands._paired(
            [validated[id(row)] for row in plus], [None if row is None else validated[id(row)] for row in subtrahends]
        )

    def select(self, indices: Sequence[int]) -> "Operands":
        """Return the rows at the given indices, with their subtrahends."""
        return self._paired([self.plus[i] for i in indices], [self.minus[i] for i in indices])

    def with_minus(self, minus: Sequence[Operand | None]) -> "Operands":
        """Return these rows with other subtrahends, each of which must be `None` or in `distinct`."""
        return self._paired(self.plus, minus)

    def _paired(self, plus: Sequence[Operand], minus: Sequence[Operand | None]) -> "Operands":
        """Build new operands from rows that these operands have already validated."""
        operands = Operands()
        operands.size = self.size
        operands.device = self.device
        operands.lengths = self.lengths
        # The descriptors are a cache that both objects share, so each row is described only once.
        operands.described = self.described
        operands.plus = tuple(plus)
        operands.minus = tuple(minus)
        operands.distinct = tuple({id(row): row for row in (*plus, *minus) if row is not None}.values())
        return operands

    def with_base_and_out(self, base: Row | None, out: Row | None) -> tuple["Operands", Operand | None, Operand | None]:
        """Validate two further rows for a linear combination of the rows in this object: the base and the target.

        The kernel adds the linear combination to `base`, and writes the sum into the target `out`. Both must have the
        same size and device as the rows in this object.

        Returns:
            The rows, the base and the target. If the base or the target is a list of tensors and the rows are vectors,
            the kernels process the vectors in pieces with the lengths of these tensors. The returned rows then contain
            the lengths.

        Raises:
            ArgumentError: if the base or the target is not a valid row.
        """
        # If vectors are divided into pieces, this must not change the caller's operands.
        cut = self.lengths is None and (isinstance(base, tuple) or isinstance(out, tuple))
        rows = self._paired(self.plus, self.minus) if cut else self
        start = next((row for row in self.distinct if row is base), None)
        if start is None and base is not None:
            start = rows.as_operand("base", base)
        return rows, start, None if out is None else rows.as_operand("out", out)

    def as_operand(self, name: str, row: Any, index: int | None = None) -> Operand:
        """Validate a row, and convert it to an operand, which is the form that the kernels accept.

        A row is either a vector, which is returned unchanged, or a tuple of tensors, which is converted to a
        `TensorList`. All rows must have the same length and device.

        Raises:
            ArgumentError: if the row is invalid. The message names the row, or the tensor in it.
        """
        # The first row determines the size and the device of all rows.
        if isinstance(row, Tensor):
            if self.device is NO_DEVICE and row.ndim == 1 and not row.is_meta:
                self.size = row.shape[0]
                self.device = row.device
            fits = row.shape == (self.size,) and row.device == self.device
            if fits and row.dtype.is_floating_point and row.layout is torch.strided:
                return row
        elif isinstance(row, tuple) and row:
            tensors = row if isinstance(row, TensorList) else TensorList(row)
            with suppress(TypeError, AttributeError):  # an entry is not a tensor
                device = tensors.device
                size = tensors.size
                if self.device is NO_DEVICE and device is not None:
                    self.size = size
                    self.device = device
                alike = self.size == size and device == self.device and self.lengths in (None, tensors.lengths)
                if alike and not ("torch.distributed.tensor" in sys.modules and dtensors_in((tensors,))):
                    if self.lengths is None:
                        self.lengths = tensors.lengths
                        self.described = {}  # Vectors have one descriptor per piece from here on.
                    return tensors
        raise ArgumentError(f"{name if index is None else f'{name}[{index}]'}{self._describe_error(row)}")

    def _describe_error(self, row: Any) -> str:
        """Return the end of the error message for a row that `as_operand` rejects."""
        if not isinstance(row, tuple):
            error = _tensor_error(row, self.device)
            is_float = isinstance(row, Tensor) and row.dtype.is_floating_point
            if is_float and (row.ndim != 1 or (self.device is not NO_DEVICE and row.shape != (self.size,))):
                expected = "one dimension" if self.device is NO_DEVICE else f"({self.size},)"
                error = f"expected shape {expected}, got {tuple(row.shape)}"
            return f": {error}"
        if not row:
            return ": expected at least one tensor, got an empty tuple"
        lengths = self.lengths
        if lengths is not None and len(lengths) != len(row):
            return f": expected {len(lengths)} tensors, got {len(row)}"
        for i, tensor in enumerate(row):
            error = _tensor_error(tensor, self.device)
            if error is None and dtensors_in((tensor,)):
                error = "expected a plain tensor, got a DTensor; only whole vectors may be DTensors"
            if error is None and lengths is not None and tensor.numel() != lengths[i]:
                error = f"expected {lengths[i]} entries, got {tensor.numel()}"
            if error is not None:
                return f"[{i}]: {error}"
        return f": expected {self.size} entries, got {sum(tensor.numel() for tensor in row)}"

    def materialise(self) -> Tensor:
        """Compute all differences `plus[i] - minus[i]` as one float64 tensor.

        For k differences of vectors with P entries, the shape is (k, P). The method uses only PyTorch operations. It
        therefore supports autograd and function transforms such as `vmap`.
        """
        pairs = zip(self.plus, self.minus, strict=True)
        return torch.stack([as_float64(a) if b is None else as_float64(a) - as_float64(b) for a, b in pairs])

    def prepare(self) -> "Operands":
        """Convert the rows to the form that the backends read.

        A row is a vector or a list of tensors. A vector can have any stride, but the tensors of a list must be
        contiguous. The method therefore copies the noncontiguous tensors of a list.

        For rows on the CPU, the method also stores the address, stride and dtype of each tensor in `tables`, which the
        backend `cpu` reads. If this backend does not support one of the tensors, `tables` is `None`.
        """
        if self.tables is not None:
            return self
        if self.device == CPU:
            descriptors = self.described
            # A missing subtrahend has one null descriptor for each piece, so the tables of `plus` and `minus` have
            # equal lengths.
            descriptors[id(None)] = None, NULL_DESCRIPTOR * (1 if self.lengths is None else len(self.lengths))
            for row in self.distinct:
                if id(row) not in descriptors:
                    if isinstance(row, TensorList):
                        descriptors[id(row)] = row, row.describe()
                    else:
                        descriptors[id(row)] = row, describe_vector(row, self.lengths)
            # An empty descriptor marks a row that the native library cannot read.
            plus = [descriptors[id(row)][1] for row in self.plus]
            minus = [descriptors[id(row)][1] for row in self.minus]
            if all(plus) and all(minus):
                lengths = self.lengths or (self.size,)
                self.tables = len(lengths), edges(lengths).tobytes(), b"".join(plus), b"".join(minus)
                return self
        # Backends read strided vectors, but they read the tensors of a list as contiguous memory.
        if self.lengths is None or all(isinstance(row, Tensor) or row.is_contiguous for row in self.distinct):
            return self
        contiguous = {id(row): row if isinstance(row, Tensor) else row.contiguous() for row in self.distinct}
        minus_rows = [None if row is None else contiguous[id(row)] for row in self.minus]
        copies = self._paired([contiguous[id(row)] for row in self.plus], minus_rows)
        copies.described = {}  # Copies are released after the call.
        return copies.prepare()


def _tensor_error(tensor: Any, device: torch.device) -> str | None:
    """Return why a tensor is not a valid row or part of a row, or `None` if it is valid."""
    if not isinstance(tensor, Tensor) or not tensor.dtype.is_floating_point:
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        return f"expected a tensor of a floating dtype, got {kind}"
    if tensor.layout is not torch.strided or tensor.is_meta:
        return f"expected a dense tensor with values, got {tensor.layout} on {tensor.device}"
    return f"expected device {device}, got {tensor.device}" if device not in (NO_DEVICE, tensor.device) else None


def empty_like_row(like: Operand) -> Operand:
    """Allocate a row with the type, shapes and dtypes of `like`."""
    return like.new_empty() if isinstance(like, TensorList) else empty_like(like)


OVERLAP_ERROR = "out: expected base, a row, or memory disjoint from theirs, got a partial overlap"


def bump_version(out: Operand) -> None:
    """Increment the autograd version of `out` after a write that torch did not register."""
    tensors: Sequence[Tensor] = (out,) if isinstance(out, Tensor) else out
    if any(map(Tensor.is_inference, tensors)):
        tensors = [tensor for tensor in tensors if not tensor.is_inference()]
    # Without this, a backward pass would use overwritten values without an error. Inference tensors have no version.
    torch.autograd.graph.increment_version(tensors)


def check_target(out: Operand, rows: Operands, base: Operand | None) -> None:
    """Check that the target `out` of a linear combination does not partially overlap an operand in memory.

    The target may occupy exactly the same memory as an operand, because each entry is read before it is written. With a
    partial overlap, a write could change an entry that is read later.

    Raises:
        ArgumentError: if `out` partially overlaps an operand or itself.
    """
    read = rows.distinct if base is None else (*rows.distinct, base)
    if rows.lengths is not None:
        check_no_alias(out, read, rows.lengths)
        return
    assert isinstance(out, Tensor)
    size = out.shape[0]
    # Several entries of an expanded tensor have the same address, so they cannot be written independently.
    if size > 1 and out.stride(0) == 0:
        raise ArgumentError("out: expected entries with memory of their own, got an expanded tensor")
    if size == 0:
        return
    low = out.data_ptr()
    # torch assigns an arbitrary stride to a vector with one entry, so such a stride is ignored.
    stride = out.stride(0) * out.itemsize if size > 1 else out.itemsize  # all values below are in bytes
    high = low + (size - 1) * stride + out.itemsize
    for row in read:
        assert isinstance(row, Tensor)
        start = row.data_ptr()
        if row is out or start >= high:
            continue
        step = row.stride(0) * row.itemsize if size > 1 else row.itemsize
        stop = start + (size - 1) * step + row.itemsize
        # An operand at exactly the addresses of `out` is safe, because each entry is read before it is written.
        if low >= stop or (start, step, row.dtype) == (low, stride, out.dtype):
            continue
        gap = (start - low) % stride
        # A row with the same stride may be interleaved with `out` without overlap.
        if step != stride or not out.itemsize <= gap <= stride - row.itemsize:
            raise ArgumentError(OVERLAP_ERROR)


def blocks_of(segments: Sequence[int], size: int) -> Blocks:
    """Return the blocks of segments with the given lengths.

    Raises:
        ArgumentError: if the lengths do not sum to `size`.
    """
    if isinstance(segments, (list, tuple)) and set(map(type, segments)) <= {int}:
        return _blocks_of(tuple(segments), size)
    return Blocks.of(segment_bounds(segments, size))


@lru_cache(maxsize=64)
def _blocks_of(segments: tuple[int, ...], size: int) -> Blocks:
    """Return the blocks of segments with the given lengths, using a cache."""
    # Validating hundreds of segments takes longer than a step of a small model, so the result is cached.
    return Blocks.of(segment_bounds(segments, size))


def check_no_alias(out: Operand, read: Sequence[Operand], lengths: tuple[int, ...]) -> None:
    """Check that a target with several tensors does not partially overlap the operands.

    Raises:
        ArgumentError: if a tensor of the target partially overlaps itself, another tensor of the target, or an operand.
    """
    # A caller that has already checked some rows against this target lists them in `disjoint_from`.
    if (
        isinstance(out, TensorList)
        and out.disjoint_from
        and all(any(row is seen for seen in out.disjoint_from) for row in read)
    ):
        return
    starts, stops = address_ranges(out, lengths)
    order = np.argsort(starts, kind="stable")
    order = order[stops[order] > starts[order]]  # empty tensors do not occupy memory
    low = starts[order]
    high = stops[order]
    self_overlaps = (
        _self_overlaps(out) if isinstance(out, Tensor) else not out.is_contiguous and any(map(_self_overlaps, out))
    )
    # If any two tensors overlap, two neighbours in the order of addresses overlap.
    if self_overlaps or (high[:-1] > low[1:]).any():
        raise ArgumentError("out: expected tensors with memory of their own, got some that share it")
    others = [row for row in read if row is not out]
    if len(order) == 0 or not others:
        return
    start, stop = np.stack([address_ranges(row, lengths) for row in others], axis=1)
    # For each operand tensor, find the first tensor of `out`, ordered by address, that ends after the operand tensor
    # begins. If this tensor does not overlap the operand tensor, no tensor of `out` does. The search needs sorted
    # stops, which the check for overlaps within `out` has ensured.
    first = np.minimum(np.searchsorted(high, start, side="right"), len(order) - 1)
    overlapping = (low[first] < stop) & (high[first] > start) & (stop > start)
    # Backends read entry p of the operands before they write entry p. An operand may therefore share memory with the
    # tensor of `out` at the same position, but with no other tensor of `out`.
    identical = (order[first] == np.arange(len(starts))) & (starts == start) & (stops == stop)
    if (overlapping & ~identical).any():
        raise ArgumentError(OVERLAP_ERROR)
    for row, pieces in zip(others, overlapping, strict=True):
        # With equal addresses but different dtypes, a write would change entries that are read later.
        if pieces.any() and not _have_same_dtypes(out, row, np.flatnonzero(pieces)):
            raise ArgumentError(OVERLAP_ERROR)


def _self_overlaps(tensor: Tensor) -> bool:
    """Return whether two entries of a tensor may have the same address."""
    if tensor.is_contiguous():
        return False
    # The dimensions are visited in the order of increasing strides. If a stride is not larger than the range of
    # addresses that the previous dimensions cover, entries may coincide. Axes of length 1 are ignored, because they
    # have arbitrary strides.
    extent = 0
    for step, n in sorted((step, n) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if step <= extent:
            return True
        extent += step * (n - 1)
    return False


def address_ranges(row: Operand, lengths: tuple[int, ...]) -> np.ndarray:
    """Return the address range of each piece of a row: (2, n)."""
    if isinstance(row, TensorList):
        return row.address_ranges
    # A piece ends after its last entry, not at the start of the next piece, because entries may be strided.
    borders = edges(lengths)
    item = row.itemsize
    step = row.stride(0) * item
    starts = row.data_ptr() + borders[:-1] * step
    stops = np.where(borders[1:] > borders[:-1], row.data_ptr() + (borders[1:] - 1) * step + item, starts)
    return np.stack([starts, stops])


def _have_same_dtypes(out: Operand, row: Operand, pieces: np.ndarray) -> bool:
    """Return whether two rows have equal dtypes in the pieces with the given indices."""
    kinds, others = ({x.dtype} if isinstance(x, Tensor) else x.dtypes for x in (out, row))
    # The common case of one dtype for all tensors needs no loop.
    if len(kinds) == 1 and kinds == others:
        return True
    pairs = ([x if isinstance(x, Tensor) else x[i] for x in (out, row)] for i in pieces.tolist())
    return all(ours.dtype == theirs.dtype for ours, theirs in pairs)


def segment_bounds(segments: Sequence[int] | None, size: int) -> tuple[tuple[int, int], ...]:
    """Convert the lengths of consecutive segments of a vector to the start index and the stop index of each segment.

    The vector has `size` entries. If `segments` is `None`, the whole vector is a single segment.

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
    """Validate the coefficients of k vectors, and convert them to the shape (s, k) for s segments of the vectors.

    If all segments (such as layers) share k coefficients, these are repeated. Plain numbers are returned as a list of s
    lists of floats. If the coefficients contain tensors, they are returned as one tensor, which preserves derivatives.

    Raises:
        ArgumentError: if the coefficients are not numbers, or if their shape is neither (k,) nor (s, k).
    """
    try:
        if isinstance(coefficients, np.ndarray):
            coefficients = coefficients.tolist()
        if isinstance(coefficients, Tensor):
            factors = _check_real(coefficients)
        else:
            # `isinstance` gets tuples, because torch.compile in torch 2.6 does not support union types.
            if isinstance(coefficients, (str, bytes, Mapping, Set)):
                raise TypeError(f"got {coefficients!r}")
            # Lists of plain numbers are the common case. They need neither a tensor nor a check of each entry.
            listed: list[Any] = list(coefficients)
            if len(listed) == k and NUMBER_TYPES.issuperset(map(type, listed)):
                # All segments share one list, which no caller modifies.
                return [[float(c) for c in listed]] * s
            nested = len(listed) == s and set(map(type, listed)) <= {list, tuple}
            if nested and all(len(line) == k and NUMBER_TYPES.issuperset(map(type, line)) for line in listed):
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
    """Return whether a kernel call with these tensors must use differentiable PyTorch operations.

    This is the case if autograd or a functorch transform tracks one of the tensors, or if `torch.compile` traces the
    call. The fused kernels define no derivatives, so a transform would silently treat their derivatives as zero.
    """
    if torch.compiler.is_compiling():
        return True
    # The three kinds of derivatives are checked separately: reverse mode, forward mode, and functorch transforms.
    if torch.is_grad_enabled():
        for row in tensors:
            if row.requires_grad if isinstance(row, Tensor) else any(map(_requires_grad, row)):
                return True
    # The level is -1 outside of `torch.autograd.forward_ad.dual_level`, where no tensor has a tangent.
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(row).tangent is not None for row in iter_tensors(tensors)
    ):
        return True
    in_transform = torch._C._functorch.peek_interpreter_stack() is not None
    return in_transform and any(torch._C._functorch.is_functorch_wrapped_tensor(row) for row in iter_tensors(tensors))


def is_sharded(*groups: "Subtrahend | Operands") -> bool:
    """Return whether any of the given vectors is distributed over several processes (ranks).

    This is the case if a vector is a `DTensor`, or if the function is called in a context of `across_ranks`.
    """
    if torch.compiler.is_compiling():
        return False
    if SHARD_GROUP.get() is not None or "torch.distributed.tensor" not in sys.modules:
        return SHARD_GROUP.get() is not None
    # Comparing the types of the distinct rows is faster than searching nested sequences for DTensors.
    rows = [x for x in groups if not (isinstance(x, Operands) and PLAIN_ROW_TYPES.issuperset(map(type, x.distinct)))]
    return bool(rows and dtensors_in(rows))


def dtensors_in(groups: Iterable[Any]) -> list[Any]:
    """Return the `DTensor`s among tensors, sequences of tensors, and operands."""
    # Without an earlier import of this module, no DTensor can exist. The import itself takes long, so it is avoided.
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return []
    result = []
    for group in groups:
        if isinstance(group, module.DTensor):
            result.append(group)
        elif isinstance(group, Operands):  # tensor lists contain no DTensor
            result += [row for row in group.distinct if isinstance(row, module.DTensor)]
        elif isinstance(group, (tuple, list)) and not NON_DTENSOR_TYPES.issuperset(map(type, group)):
            result += dtensors_in(group)
    return result


def iter_tensors(groups: Iterable[Any]) -> Iterator[Any]:
    """Iterate over the tensors in nested sequences."""
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


def _stack_numbers(numbers: Any) -> Tensor:
    """Convert nested lists of numbers and tensors to one differentiable float64 tensor."""
    if isinstance(numbers, Tensor):
        return _check_real(numbers).to("cpu", torch.float64)
    # These types can be converted to floats, but they are hardly meant as coefficients.
    if isinstance(numbers, (str, bytes, bool, np.bool_)):
        raise TypeError(f"got {numbers!r}")
    if isinstance(numbers, Sequence):
        return torch.stack([_stack_numbers(c) for c in numbers])
    # An explicit device overrides a default device that the user may have set.
    return torch.tensor(float(numbers), dtype=torch.float64, device="cpu")


def _check_real(numbers: Tensor) -> Tensor:
    """Return a tensor of numbers unchanged, or raise a `TypeError` if it is complex or boolean."""
    if numbers.is_complex() or numbers.dtype is torch.bool:
        raise TypeError(f"got {numbers.dtype}")
    return numbers
