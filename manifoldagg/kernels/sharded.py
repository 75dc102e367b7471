r"""Sharded kernels: every rank holds a shard of the rows, and only sums for the Gram matrix are communicated.

Each rank sums its own piece; the sums of the ranks meet and are added:

$$G^{(s)} = \sum_{r} G^{(s, r)}, \qquad G^{(s, r)}_{ij} = \sum_{p \in s \cap r} r_i[p]\, r_j[p]$$

An all-reduce would add float64 numbers in an order that the library, its algorithm and the number of ranks decide, and
round each time. So it is an all-gather: every rank receives the sums of all as unevaluated pairs $h + l$ and adds them
in the order of the ranks, by the compensated sum that also adds blocks. All ranks have the same bits then, and where
the pieces are cut at borders of blocks these are the bits of one rank (but for the exceptional ties of `pairwise_sum`).
Cut elsewhere, the blocks are others: to first order the two results differ by at most
$2 (n + 1)\, u \sum_p |r_i[p]\, r_j[p]|$, with $n$ the length of a block and $u = 2^{-53}$.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manifoldagg.kernels import reduction
from manifoldagg.kernels.backends import reference
from manifoldagg.kernels.collectives import Ranks
from manifoldagg.kernels.operands import Operand, Operands, bump_version, check_target, empty_like_row
from manifoldagg.kernels.shards import LocalShard, SegmentBounds, collective_guard

__all__ = ["combine", "gram"]

GRAM, RESCALED, COMBINE = range(3)


def gram(rows: Operands, segments: SegmentBounds, backend: Any) -> Tensor:
    """Compute the Gram matrices (S, k, k) of sharded rows, with equal bits on every rank.

    Args:
        rows: pieces, or vectors that are `DTensor`s, all `Shard(0)` or replicated alike in each dimension of a mesh.
        segments: start and stop of each: in the piece, but in the whole vector if that is a `DTensor`.
        backend: what has `block_products` and `combine`, for local rows.

    Raises:
        ArgumentError: on every rank, if the rows of one cannot be used or the ranks disagree.
    """
    with collective_guard(rows.distinct) as ranks:
        piece = LocalShard.of(rows, segments)
        lines = piece.local_operands(rows)
    k = len(rows.plus)
    high = _sum_over_ranks(ranks, piece, k, GRAM, lambda: backend.block_products(lines, piece.blocks))
    outside = reduction.out_of_range(rows, high)  # the same on every rank, as dtypes and sums are
    if outside is None:
        return reduction.unpack_symmetric(high, k)
    with ranks.propagate_errors():
        own = reduction.scaling_exponents(lines, piece.blocks, outside).astype(np.float64)
    every = ranks.all_gather_checked(piece.invariants(RESCALED, k), own)
    # 0 is said of a piece that is zero, and of one whose largest entry is next to 1: then another rank's is far.
    powers = np.where(every != 0, every, -np.inf).max(axis=0)
    powers = np.where(np.isfinite(powers), powers, 0).astype(int)
    scaled = _sum_over_ranks(
        ranks, piece, k, GRAM, lambda: reference.block_products(lines.prepare(), piece.blocks, -powers)
    )
    return reduction.unpack_symmetric(reduction.rescaled(high, scaled, powers), k)


def combine(
    base: Operand | None,
    rows: Operands,
    coefficients: Tensor | Sequence[Sequence[float]],
    segments: SegmentBounds,
    out: Operand | None,
    backend: Any,
) -> Operand:
    """Compute the linear combination with the coefficients of rank 0 into the local shard of `out`.

    Args:
        base: held like the rows, or `None`.
        rows: as in `gram`.
        coefficients: (S, k); every rank uses those of rank 0, or of the first of a mesh.
        segments: as in `gram`.
        out: held like the rows; `None` for a new one, of the kind and dtypes of `base`, or else of the first row.
        backend: as in `gram`.

    Returns:
        `out`.

    Raises:
        ArgumentError: on every rank, before anything is written, if the arguments of one cannot be used.
    """
    k = len(rows.plus)
    with collective_guard(rows.distinct) as ranks:
        if out is None:
            out = empty_like_row(rows.plus[0] if base is None else base)
        piece = LocalShard.of(rows, segments, base=base, out=out)
        lines = piece.local_operands(rows)
        target = piece.local(out)
        start = None if base is None else piece.local(base)
        check_target(target, lines, start)
        listed = coefficients.tolist() if isinstance(coefficients, Tensor) else coefficients
        own = np.array(listed, np.float64).reshape(len(segments), k)
    shared = ranks.all_gather_checked(piece.invariants(COMBINE, k), own)[0].tolist()
    if len(piece.blocks.table) > 0:
        with torch.no_grad():
            backend.combine(start, lines, shared, piece.blocks, target)
        bump_version(target)
    return out


def _sum_over_ranks(
    ranks: Ranks, shard: LocalShard, k: int, call: int, compute_products: Callable[[], np.ndarray]
) -> np.ndarray:
    """The sums of all ranks: (S, k(k+1)/2)."""
    with ranks.propagate_errors():
        pairs = np.zeros((2, len(shard.is_counted), k * (k + 1) // 2))
        if len(shard.blocks.table) > 0 and any(shard.is_counted):
            with torch.no_grad():
                pairs = reduction.pairwise_sum(compute_products(), shard.blocks)
            pairs[:, ~np.array(shard.is_counted)] = 0
    every = ranks.all_gather_checked(shard.invariants(call, k), pairs)
    with np.errstate(invalid="ignore", over="ignore"):
        high: np.ndarray = reduce(reduction.two_sum, every)[0]
    return high
