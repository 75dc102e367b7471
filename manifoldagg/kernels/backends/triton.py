r"""The Triton backend for CUDA, with one memory-bound launch over the blocks for each operation.

Both kernels have one program per block. `block_products` processes its block tile by tile and writes the sums of that
block. `combine` writes the block's part of `out`. There are no atomic operations, and the block alone determines the
order of every sum. Repeated runs therefore produce the same bits.

Numerics:

- Entries are converted to float64 before any other operation.
- Products and sums are rounded separately, without fused multiply-add. `combine` therefore computes exactly
  $((b + c_1 r_1) + c_2 r_2) + \dots$ in float64. The result is rounded once to the dtype of `out`, and through float32
  for bf16 and fp16.
- Subnormal numbers are preserved. Bit operations convert bf16 in both directions, because they never flush to zero.
- A tensor that several rows share is read once.

The tiles of a block consist of consecutive entries of the row, whichever tensors contain them. The assignment of
entries to lanes, and therefore the bits, do not depend on how a row is divided into tensors. The entries of a block
before its first and after its last multiple of 16 form one masked tile.

Each kernel has three variants:

- *Aligned*: all strides are 1, and all addresses are multiples of 16 bytes. A thread then loads or stores 16 bytes with
  one instruction.
- *Unaligned*: vectors at any address and with any stride.
- *Pieces*: rows that consist of several tensors. Tables on the device contain the address of each piece. A tile loads
  its entries from each overlapping piece under a mask, so hundreds of tensors need one launch. Each tuple must have a
  single dtype. The reference backend processes rows of mixed dtypes.
"""

# ruff: noqa: RUF005 (Triton's language does not support unpacking)
# With annotations as strings, which Triton supports, this module can be imported, and can report its status, without
# Triton.
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, no_type_check

import numpy as np
import torch
from torch import Tensor

from manifoldagg.kernels.backends._triton_launch import (
    LaunchOperands,
    block_table,
    opaque,
    opaque_floats,
    to_device,
    to_host,
)
from manifoldagg.kernels.blocks import Blocks
from manifoldagg.kernels.operands import Operand, Operands

try:
    import triton
    from triton import language as tl
    from triton.language import constexpr
except ImportError:
    triton = None

__all__ = ["block_products", "combine", "unavailable"]

TRITON_DTYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
"""The dtypes that the kernels read, with their Triton names."""

LANES = 256
"""The number of threads of a program."""

MAX_SINGLE_LAUNCH_ROWS = 8
ROWS_PER_GROUP = 4
"""The number of rows in a group, if there are more than `MAX_SINGLE_LAUNCH_ROWS` rows.

Each pair of groups then needs one launch of `block_products`. Fewer rows need a single launch.
"""


def unavailable() -> str | None:
    """Return the reason why the Triton backend is unavailable, or `None` if it is available.

    If `TRITON_INTERPRET=1` is set before Triton is first imported, the backend runs without a GPU. It then supports
    only CPU tensors and is very slow, so this mode is only useful for tests.
    """
    if triton is None:
        return "triton is not installed"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 4):
        return f"triton 3.4 or newer is required, but {triton.__version__} is installed"
    if isinstance(tl.sum, triton.JITFunction) != isinstance(_block_products_kernel, triton.JITFunction):
        return "TRITON_INTERPRET was changed after triton had been imported"
    if _device() == "cuda" and not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return None


def block_products(rows: Operands, blocks: Blocks) -> np.ndarray | None:
    r"""Compute the inner products of all pairs of rows, separately for each block of consecutive entries.

    For each block $b$ and each pair of rows $r_i$ and $r_j$ with $j \le i$, the result contains the sum
    $\sum_{p \in b} r_i[p]\, r_j[p]$ over the entries $p$ of the block.

    Args:
        rows: k rows on a CUDA device.
        blocks: the B blocks.

    Returns:
        (B, k(k+1)/2) float64, on the host. `None` if a row is not on a CUDA device or has an unsupported dtype.

    Cost: up to 8 rows need one launch and one copy to the host, and each distinct tensor is read once. More rows need
    one launch for each pair of groups of 4 rows, and each row is read about k/4 times.
    """
    if not _supports(rows, rows.distinct):
        return None
    k = len(rows.plus)
    count = len(blocks.table)
    if count == 0:
        return np.zeros((0, k * (k + 1) // 2))
    sums = torch.empty((count, k * (k + 1) // 2), dtype=torch.float64, device=rows.device)
    group = k if k <= MAX_SINGLE_LAUNCH_ROWS else ROWS_PER_GROUP
    with torch.cuda.device_of(sums):
        for i in range(0, k, group):
            for j in range(0, i + 1, group):
                # The products of the rows i, i+1, ... with the rows j, j+1, .... On the diagonal, half of them suffice.
                right = range(j, j + group) if j < i else range(0)
                pairs = [(rows.plus[n], rows.minus[n]) for n in (*range(i, min(i + group, k)), *right)]
                operands = LaunchOperands.of([row for pair in pairs for row in pair], rows.lengths, blocks)
                _block_products_kernel[(count,)](
                    block_table(blocks, sums.device),
                    sums,
                    (opaque(i), opaque(j), opaque(sums.shape[1])),
                    operands.addresses,
                    operands.strides,
                    PLUS=operands.indices[0::2],
                    MINUS=operands.indices[1::2],
                    RIGHT=len(right),
                    **_constexprs(operands),
                )
        return to_host(sums).numpy()


def combine(
    base: Operand | None, rows: Operands, coefficients: Sequence[Sequence[float]], blocks: Blocks, out: Operand
) -> Operand | None:
    r"""Compute a base row plus a linear combination of rows, and write the result into the row `out`.

    Each segment $s$ of the rows, such as the parameters of one layer, has its own coefficients $c^{(s)}_j$. With the
    rows $r_j$, the result in this segment is $out = base + \sum_j c^{(s)}_j\, r_j$. Each entry is computed in float64
    and rounded once.

    Args:
        base: (P,), or `None` for zero.
        rows: k rows on a CUDA device.
        coefficients: k coefficients for each segment.
        blocks: the blocks of the segments.
        out: (P,); it may be `base` or a row.

    Returns:
        `out`. The result is `None`, and nothing is written, under the same conditions as in `block_products`. If the
        coefficient of a row is 0 in a segment, the row is not read there, unless another row reads the same tensor.

    Cost: one launch. If segments have different coefficients, the coefficients are first copied to the device.
    """
    if not _supports(rows, (*rows.distinct, out) if base is None else (*rows.distinct, base, out)):
        return None
    if len(blocks.table) == 0:
        return out
    # If segments have different coefficients, the kernel reads them from a table. A coefficient that is 0 in one
    # segment may be nonzero in another, so all rows are passed. If all segments have the same coefficients, rows with
    # coefficient 0 are omitted.
    first = coefficients[0]
    alike = all(line == first for line in coefficients)
    used = [j for j, c in enumerate(first) if c != 0 or not alike]
    # The order of the operands is: base, target, then the minuend and the subtrahend of each row.
    wanted = [base, out, *(row for j in used for row in (rows.plus[j], rows.minus[j]))]
    operands = LaunchOperands.of(wanted, rows.lengths, blocks)
    table = block_table(blocks, rows.device)
    with torch.cuda.device_of(table):
        _combine_kernel[(len(blocks.table),)](
            table,
            opaque_floats([first[j] for j in used])
            if alike
            else to_device(torch.tensor(coefficients, dtype=torch.float64, device="cpu"), rows.device),
            operands.addresses,
            operands.strides,
            BASE=operands.indices[0],
            OUT=operands.indices[1],
            PLUS=operands.indices[2::2],
            MINUS=operands.indices[3::2],
            SHARED=operands.num_shared,
            SEGMENTED=not alike,
            **_constexprs(operands),
        )
    return out


def _device() -> str:
    """Return the device type of the Triton backend: "cuda", or "cpu" in Triton's interpreter."""
    return "cuda" if isinstance(_block_products_kernel, triton.JITFunction) else "cpu"


def _supports(rows: Operands, operands: Sequence[Operand]) -> bool:
    """Return whether the Triton kernels support the device and the dtypes of the operands."""
    if rows.device.type != _device():
        return False
    # A kernel is compiled for one dtype per operand, so all tensors of a tensor list must have the same dtype.
    found = [{line.dtype} if isinstance(line, Tensor) else line.dtypes for line in operands]
    return all(len(dtypes) == 1 and dtypes <= TRITON_DTYPES.keys() for dtypes in found)


def _constexprs(operands: LaunchOperands) -> dict[str, Any]:
    """Return the compile-time constants of a launch."""
    kinds = {
        torch.float64: tl.float64,
        torch.float32: tl.float32,
        torch.float16: tl.float16,
        torch.bfloat16: tl.bfloat16,
    }
    return {
        "DTYPES": tuple(kinds[dtype] for dtype in operands.dtypes),
        "ALIGNED": operands.is_aligned,
        "PIECES": operands.has_pieces,
        "WIDTH": operands.width,
        "LANES": LANES,
        "num_warps": LANES // 32,
        # Products and sums are rounded separately, so that the bits do not depend on the compiler's choice of fusions.
        "enable_fp_fusion": False,
    }


def _jit(function: Callable[..., Any]) -> Any:
    return function if triton is None else triton.jit(function)


@_jit
@no_type_check
def _decode(value):
    """Return the integer that an opaque integer encodes."""
    return (value >> 1) - (1 << 40)


@_jit
@no_type_check
def _pointers(t: constexpr, addresses, strides, offsets, DTYPES: constexpr, ALIGNED: constexpr):
    """Return pointers to the entries of operand t at the given offsets."""
    # The kernel converts bf16 by bit operations, so a pointer to bf16 entries has the type of 16-bit integers.
    kind: constexpr = tl.int16 if DTYPES[t] == tl.bfloat16 else DTYPES[t]
    pointer = _decode(addresses[t]).to(tl.pointer_type(kind))
    # An opaque address hides its divisibility. Without this hint, a thread would load entry by entry.
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + (offsets if len(strides) == 0 else offsets * _decode(strides[t]))


@_jit
@no_type_check
def _piece_pointers(t: constexpr, piece, addresses, strides, offsets, mask, DTYPES: constexpr):
    """Return pointers into one tensor (piece) of row t, their mask, and the end of the piece."""
    kind: constexpr = tl.int16 if DTYPES[t] == tl.bfloat16 else DTYPES[t]
    count = _decode(strides[0])
    table = addresses[0] + t * (count + 1)
    start = tl.load(addresses[1] + piece)
    stop = tl.load(addresses[1] + piece + 1)
    pointers = tl.load(table + piece).to(tl.pointer_type(kind)) + (offsets - start) * tl.load(table + count)
    # The mask excludes the entries of other pieces.
    return pointers, mask & (offsets >= start) & (offsets < stop), stop


@_jit
@no_type_check
def _find_piece(piece, addresses, low):
    """Return the index of the piece (one tensor of a row) that contains the entry `low`."""
    # The search starts at the given piece. It is short, because the kernels visit the entries in ascending order.
    while tl.load(addresses[1] + piece + 1) <= low:
        piece += 1
    return piece


@_jit
@no_type_check
def _read(
    t: constexpr, addresses, strides, span, offsets, mask, DTYPES: constexpr, ALIGNED: constexpr, PIECES: constexpr
):  # fmt: skip
    """Read entries of row t and convert them to float64. Masked entries are 0."""
    if PIECES:
        kind: constexpr = tl.int16 if DTYPES[t] == tl.bfloat16 else DTYPES[t]
        value = tl.zeros(offsets.shape, kind)
        # The span consists of the index of a piece at or before the first entry, and the offset of the end.
        piece, end = span
        begin = tl.load(addresses[1] + piece)
        while begin < end:
            pointers, inside, begin = _piece_pointers(t, piece, addresses, strides, offsets, mask, DTYPES)
            value = tl.load(pointers, mask=inside, other=value)
            piece += 1
    else:
        value = tl.load(_pointers(t, addresses, strides, offsets, DTYPES, ALIGNED), mask=mask, other=0)
    # bf16 is the upper half of a float32. A bit operation cannot flush a subnormal number. The shift discards the upper
    # half, which contains the sign extension of the widening.
    if DTYPES[t] == tl.bfloat16:
        value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float64)


@_jit
@no_type_check
def _write(
    t: constexpr, addresses, strides, span, offsets, mask, value, DTYPES: constexpr, ALIGNED: constexpr,
    PIECES: constexpr,
):  # fmt: skip
    """Round float64 values to the dtype of row t, and store them."""
    # The value is rounded to float32 first, as in torch and the other backends. Direct rounding from float64 can break
    # ties differently.
    if DTYPES[t] == tl.float16:
        value = value.to(tl.float32)
    if DTYPES[t] == tl.bfloat16:
        # Round to nearest, ties to even. NaN is handled separately, because the carry could make it an infinity. The
        # bits 0x7FC0 are a quiet NaN in bf16.
        single = value.to(tl.float32)
        bits = single.to(tl.int32, bitcast=True)
        rounded = tl.where(single == single, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0).to(tl.int16)
    else:
        rounded = value.to(DTYPES[t])
    if PIECES:
        piece, end = span
        begin = tl.load(addresses[1] + piece)
        while begin < end:
            pointers, inside, begin = _piece_pointers(t, piece, addresses, strides, offsets, mask, DTYPES)
            tl.store(pointers, rounded, mask=inside)
            piece += 1
    else:
        tl.store(_pointers(t, addresses, strides, offsets, DTYPES, ALIGNED), rounded, mask=mask)


@_jit
@no_type_check
def _block_range(table, WIDTH: constexpr, LANES: constexpr):
    """Return the start and the stop of a block, those of its aligned part, and the offsets of the entries in a tile.

    A block is a range of consecutive entries, and its aligned part begins and ends at multiples of 16 entries. A kernel
    processes this part in smaller ranges (tiles), and the few other entries separately.
    """
    start = tl.load(table)
    stop = tl.load(table + 1)
    # Multiples of 16 entries are multiples of 16 bytes for every dtype. Unaligned rows use the same range, so that the
    # bits of a sum do not depend on the address of a row.
    first = (start + 15) // 16 * 16
    last = stop // 16 * 16
    tile = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return start, stop, first, last, tile


@_jit
@no_type_check
def _unaligned_entries(start, stop, first, last, tile):
    """Return the positions of the entries of a block outside its aligned middle, and their mask."""
    # Fewer than 16 entries are before the middle, and fewer than 16 after it, so 32 positions are sufficient. A block
    # within 16 entries has first > last. The last condition of the mask keeps it from counting entries twice.
    offsets = tl.where(tile < 16, start // 16 * 16 + tile, last + tile - 16)
    mask = (tile < 32) & (offsets >= start) & (offsets < stop) & ((tile < 16) == (offsets < first))
    return offsets, mask


@_jit
@no_type_check
def _add_products(
    sums, addresses, strides, span, offsets, mask, PLUS: constexpr, MINUS: constexpr, RIGHT: constexpr,
    DTYPES: constexpr, ALIGNED: constexpr, PIECES: constexpr,
):  # fmt: skip
    """Add the products of each pair of rows over a tile (a group of entries) to `sums`."""
    # Each tensor is read once, even if several rows contain it.
    values = ()
    for t in tl.static_range(len(DTYPES)):
        values = values + (_read(t, addresses, strides, span, offsets, mask, DTYPES, ALIGNED, PIECES),)
    rows = ()
    for i in tl.static_range(len(PLUS)):
        row = values[PLUS[i]] if MINUS[i] < 0 else values[PLUS[i]] - values[MINUS[i]]
        rows = rows + (row,)
    total = ()
    for i in tl.static_range(len(PLUS) - RIGHT):
        for j in tl.static_range(RIGHT if RIGHT > 0 else i + 1):
            # Sum over the entries of a thread first. The lanes stay separate until the end of the block.
            product = rows[i] * rows[j + (len(PLUS) - RIGHT if RIGHT > 0 else 0)]
            total = total + (sums[len(total)] + tl.sum(product, axis=1),)
    return total


@_jit
@no_type_check
def _block_products_kernel(
    table, out, place, addresses, strides, PLUS: constexpr, MINUS: constexpr, RIGHT: constexpr, DTYPES: constexpr,
    ALIGNED: constexpr, PIECES: constexpr, WIDTH: constexpr, LANES: constexpr,
):  # fmt: skip
    """Compute the inner products of all pairs of rows over one block of entries."""
    # The offset of the sums, block * k(k+1)/2, can exceed 2^31, so it needs 64-bit arithmetic.
    block = tl.program_id(0).to(tl.int64)
    start, stop, first, last, tile = _block_range(table + 3 * block, WIDTH, LANES)
    piece = tl.load(addresses[2] + block) if PIECES else 0
    origin = piece
    sums = ()
    for i in tl.static_range(len(PLUS) - RIGHT):
        for _ in tl.static_range(RIGHT if RIGHT > 0 else i + 1):
            sums = sums + (tl.zeros((LANES,), tl.float64),)
    for low in range(first, last, LANES * WIDTH):
        offsets = low + tile
        if PIECES:
            piece = _find_piece(piece, addresses, low)
        span = (piece, tl.minimum(low + LANES * WIDTH, last))
        sums = _add_products(
            sums, addresses, strides, span, offsets, offsets < last, PLUS, MINUS, RIGHT, DTYPES, ALIGNED, PIECES
        )  # fmt: skip
    if (first != start) | (last != stop):
        offsets, mask = _unaligned_entries(start, stop, first, last, tile)
        if PIECES:
            # Entries before the middle start at the first piece of the block. Otherwise, continue from the middle.
            piece = tl.where(first != start, origin, piece)
        span = (piece, stop)
        sums = _add_products(
            sums, addresses, strides, span, offsets, mask, PLUS, MINUS, RIGHT, DTYPES, False, PIECES
        )  # fmt: skip
    row = _decode(place[0])
    column = _decode(place[1])
    width = _decode(place[2])
    # Each thread has added the products at its own entries. The sums of the `LANES` threads are added only here.
    # Row i of a lower triangle starts after i(i+1)/2 entries, and the next row starts i + 1 entries later.
    out += block * width + row * (row + 1) // 2 + column
    for i in tl.static_range(len(PLUS) - RIGHT):
        for j in tl.static_range(RIGHT if RIGHT > 0 else i + 1):
            tl.store(out + j, tl.sum(sums[i * RIGHT + j if RIGHT > 0 else i * (i + 1) // 2 + j], axis=0))
        out += row + i + 1


@_jit
@no_type_check
def _add_rows(
    factors, addresses, strides, span, offsets, mask, BASE: constexpr, OUT: constexpr, PLUS: constexpr,
    MINUS: constexpr, SHARED: constexpr, SEGMENTED: constexpr, DTYPES: constexpr, ALIGNED: constexpr,
    PIECES: constexpr,
):  # fmt: skip
    """Compute a linear combination of rows over one tile in float64, round it, and write it."""
    # Rows that are used more than once are numbered first. They stay in registers.
    kept = ()
    for t in tl.static_range(SHARED):
        kept = kept + (_read(t, addresses, strides, span, offsets, mask, DTYPES, ALIGNED, PIECES),)
    total = tl.zeros(mask.shape, tl.float64)
    if BASE >= 0:
        if BASE < SHARED:
            total = kept[BASE]
        else:
            total = _read(BASE, addresses, strides, span, offsets, mask, DTYPES, ALIGNED, PIECES)
    for j in tl.static_range(len(PLUS)):
        # Convert to an integer first, because the interpreter broadcasts a comparison of floats as floats.
        reads = mask & (tl.where(factors[j] != 0, 1, 0) == 1) if SEGMENTED else mask
        if PLUS[j] < SHARED:
            row = kept[PLUS[j]]
        else:
            row = _read(PLUS[j], addresses, strides, span, offsets, reads, DTYPES, ALIGNED, PIECES)
        if MINUS[j] >= 0:
            if MINUS[j] < SHARED:
                row -= kept[MINUS[j]]
            else:
                row -= _read(MINUS[j], addresses, strides, span, offsets, reads, DTYPES, ALIGNED, PIECES)
        term = factors[j] * row
        # A row with coefficient 0 can contain NaN or infinity, and their product with 0 would be NaN.
        total += tl.where(factors[j] != 0, term, 0.0) if SEGMENTED else term
    _write(OUT, addresses, strides, span, offsets, mask, total, DTYPES, ALIGNED, PIECES)


@_jit
@no_type_check
def _combine_kernel(
    table, factors, addresses, strides, BASE: constexpr, OUT: constexpr, PLUS: constexpr, MINUS: constexpr,
    SHARED: constexpr, SEGMENTED: constexpr, DTYPES: constexpr, ALIGNED: constexpr, PIECES: constexpr,
    WIDTH: constexpr, LANES: constexpr,
):  # fmt: skip
    """Compute one block of the linear combination of `combine`, tile by tile."""
    block = tl.program_id(0).to(tl.int64)
    table += 3 * block
    start, stop, first, last, tile = _block_range(table, WIDTH, LANES)
    piece = tl.load(addresses[2] + block) if PIECES else 0
    origin = piece
    numbers = ()
    for j in tl.static_range(len(PLUS)):
        if SEGMENTED:
            numbers = numbers + (tl.load(factors + tl.load(table + 2) * len(PLUS) + j),)
        else:
            # Join two halves of 32 bits, because Triton would round a float argument to float32.
            bits = (_decode(factors[2 * j + 1]) << 32) | _decode(factors[2 * j])
            numbers = numbers + (bits.to(tl.float64, bitcast=True),)
    for low in range(first, last, LANES * WIDTH):
        offsets = low + tile
        if PIECES:
            piece = _find_piece(piece, addresses, low)
        span = (piece, tl.minimum(low + LANES * WIDTH, last))
        _add_rows(
            numbers, addresses, strides, span, offsets, offsets < last, BASE, OUT, PLUS, MINUS, SHARED, SEGMENTED,
            DTYPES, ALIGNED, PIECES,
        )  # fmt: skip
    if (first != start) | (last != stop):
        offsets, mask = _unaligned_entries(start, stop, first, last, tile)
        if PIECES:
            # Entries before the middle start at the first piece of the block. Otherwise, continue from the middle.
            piece = tl.where(first != start, origin, piece)
        span = (piece, stop)
        _add_rows(
            numbers, addresses, strides, span, offsets, mask, BASE, OUT, PLUS, MINUS, SHARED, SEGMENTED, DTYPES,
            False, PIECES,
        )  # fmt: skip
