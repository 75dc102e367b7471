r"""Kernels for rows that are distributed over several ranks. Every rank stores a shard of each row.

Each rank computes the sums over its own shard, and only these sums are communicated. The Gram matrix of segment $s$ of
the rows $r_i$ is the sum of the contributions of all ranks $q$:

$$G^{(s)} = \sum_{q} G^{(s, q)}, \qquad G^{(s, q)}_{ij} = \sum_{p \in s \cap q} r_i[p]\, r_j[p]$$

The ranks exchange the sums by an all-gather, because the rounding errors of an all-reduce depend on the library, its
algorithm and the number of ranks. After the all-gather, every rank has the sums of all ranks as unevaluated pairs $h +
l$. It adds these pairs in the order of the ranks, with the compensated sum that also adds blocks.

- All ranks therefore compute the same bits.
- If the shards are split at block boundaries, these are the bits of a single rank, except for the rare ties of
  `pairwise_sum`.
- If the shards are split elsewhere, the blocks differ. To first order, the two results differ by at most $2 (n + 1)\, u
  \sum_p |r_i[p]\, r_j[p]|$, where $n$ is the length of a block and $u = 2^{-53}$.
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
    """Compute the Gram matrices (S, k, k) of sharded rows. All ranks obtain the same bits.

    Args:
        rows: shards, or vectors that are `DTensor`s. All must have the same placements, `Shard(0)` or replicated, in
            each dimension of a mesh.
        segments: the start and stop of each segment, in the shard. For `DTensor`s, they refer to the whole vector.
        backend: an object with `block_products` and `combine` for local rows.

    Raises:
        ArgumentError: on every rank, if the rows of one rank are invalid or if the ranks disagree.
    """
    with collective_guard(rows.distinct) as ranks:
        shard = LocalShard.of(rows, segments)
        operands = shard.local_operands(rows)
    k = len(rows.plus)
    high = _sum_over_ranks(ranks, shard, k, GRAM, lambda: backend.block_products(operands, shard.blocks))
    outside = reduction.out_of_range(rows, high)  # equal on every rank, because dtypes and sums are equal
    if outside is None:
        return reduction.unpack_symmetric(high, k)
    with ranks.propagate_errors():
        local = reduction.scaling_exponents(operands, shard.blocks, outside).astype(np.float64)
    gathered = ranks.all_gather_checked(shard.invariants(RESCALED, k), local)
    # The exponent of a shard is 0 if the shard is zero, or if its largest entry is close to 1. In the second case,
    # the entry of another rank is out of range.
    powers = np.where(gathered != 0, gathered, -np.inf).max(axis=0)
    powers = np.where(np.isfinite(powers), powers, 0).astype(int)
    scaled = _sum_over_ranks(
        ranks, shard, k, GRAM, lambda: reference.block_products(operands.prepare(), shard.blocks, -powers)
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
    """Compute a linear combination of rows that are distributed over several ranks.

    Each rank stores one shard of every row, and writes only its own shard of the result.

    Args:
        base: a row that is sharded like the others, or `None`.
        rows: as in `gram`.
        coefficients: (S, k). Every rank uses the coefficients of rank 0, or of the first rank of a mesh.
        segments: as in `gram`.
        out: the target, sharded like the rows. `None` allocates a new row with the type and dtypes of `base`, or of the
            first row if `base` is `None`.
        backend: as in `gram`.

    Returns:
        `out`.

    Raises:
        ArgumentError: on every rank, before anything is written, if the arguments of one rank are invalid.
    """
    k = len(rows.plus)
    with collective_guard(rows.distinct) as ranks:
        if out is None:
            out = empty_like_row(rows.plus[0] if base is None else base)
        shard = LocalShard.of(rows, segments, base=base, out=out)
        operands = shard.local_operands(rows)
        target = shard.local(out)
        start = None if base is None else shard.local(base)
        # All errors must be raised before the exchange, while the guard can still notify the other ranks.
        check_target(target, operands, start)
        listed = coefficients.tolist() if isinstance(coefficients, Tensor) else coefficients
        local = np.array(listed, np.float64).reshape(len(segments), k)
    # All ranks use the coefficients of rank 0, so replicas stay equal even if the ranks computed different
    # coefficients.
    shared = ranks.all_gather_checked(shard.invariants(COMBINE, k), local)[0].tolist()
    if len(shard.blocks.table) > 0:
        with torch.no_grad():
            backend.combine(start, operands, shared, shard.blocks, target)
        bump_version(target)
    return out


def _sum_over_ranks(
    ranks: Ranks, shard: LocalShard, k: int, call: int, compute_products: Callable[[], np.ndarray]
) -> np.ndarray:
    """Compute the products over the local shard, gather them, and add the products of all ranks.

    Returns:
        (S, k(k+1)/2): the high parts of the sums, with the same bits on every rank.
    """
    with ranks.propagate_errors():
        # A rank without entries still takes part in the exchange, and contributes zeros.
        pairs = np.zeros((2, len(shard.is_counted), k * (k + 1) // 2))
        if len(shard.blocks.table) > 0 and any(shard.is_counted):
            with torch.no_grad():
                pairs = reduction.pairwise_sum(compute_products(), shard.blocks)
            # A replicated segment is added only once.
            pairs[:, ~np.array(shard.is_counted)] = 0
    gathered = ranks.all_gather_checked(shard.invariants(call, k), pairs)
    with np.errstate(invalid="ignore", over="ignore"):
        # `reduce` adds in the order of the ranks, so every rank computes the same bits.
        high: np.ndarray = reduce(reduction.two_sum, gathered)[0]
    return high
