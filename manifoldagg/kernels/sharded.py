r"""Sharded: rows of which every rank holds a piece; only numbers of the Gram matrix travel.

Each rank sums its own piece; the sums of the ranks meet and are added:

$$G^{(s)} = \sum_{r} G^{(s, r)}, \qquad G^{(s, r)}_{ij} = \sum_{p \in s \cap r} r_i[p]\, r_j[p]$$

An all-reduce would add float64 numbers in an order that the library, its algorithm and the number of ranks decide, and
round each time. So it is an all-gather: every rank receives the sums of all as unevaluated pairs $h + l$ and adds them
in the order of the ranks, by the compensated sum that also adds blocks. All ranks have the same bits then, and where
the pieces are cut at borders of blocks these are the bits of one rank (but for the exceptional ties of `sums.fold`).
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
from manifoldagg.kernels.operands import Line, Rows, check_target, fresh, written
from manifoldagg.kernels.shards import Cuts, Piece, guard

__all__ = ["combine", "gram"]

GRAM, RESCALED, COMBINE = range(3)


def gram(rows: Rows, segments: Cuts, backend: Any) -> Tensor:
    """The Gram matrices (S, k, k) of rows of which this rank holds a piece; the same bits on every rank.

    Args:
        rows: pieces, or vectors that are `DTensor`s, all `Shard(0)` or replicated alike in each dimension of a mesh.
        segments: start and stop of each: in the piece, but in the whole vector if that is a `DTensor`.
        backend: what has `partials` and `combine`, for local rows.

    Raises:
        ArgumentError: on every rank, if the rows of one cannot be used or the ranks disagree.
    """
    with guard(rows.distinct) as ranks:
        piece = Piece.of(rows, segments)
        lines = piece.rows(rows)
    k = len(rows.plus)
    high = _total(ranks, piece, k, GRAM, lambda: backend.partials(lines, piece.blocks))
    outside = reduction.far(rows, high)  # the same on every rank, as dtypes and sums are
    if outside is None:
        return reduction.symmetric(high, k)
    with ranks.guard():
        own = reduction.exponents(lines, piece.blocks, outside).astype(np.float64)
    every = ranks.exchange(piece.terms(RESCALED, k), own)
    # 0 is said of a piece that is zero, and of one whose largest entry is next to 1: then another rank's is far.
    powers = np.where(every != 0, every, -np.inf).max(axis=0)
    powers = np.where(np.isfinite(powers), powers, 0).astype(int)
    scaled = _total(ranks, piece, k, GRAM, lambda: reference.partials(lines, piece.blocks, -powers))
    return reduction.symmetric(reduction.restored(high, scaled, powers), k)


def combine(
    base: Line | None,
    rows: Rows,
    coefficients: Tensor | Sequence[Sequence[float]],
    segments: Cuts,
    out: Line | None,
    backend: Any,
) -> Line:
    """The linear combination with the coefficients of rank 0, written into the piece of `out` that is here.

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
    with guard(rows.distinct) as ranks:
        if out is None:
            out = fresh(rows.plus[0] if base is None else base)
        piece = Piece.of(rows, segments, base=base, out=out)
        lines = piece.rows(rows)
        target = piece.here(out)
        start = None if base is None else piece.here(base)
        check_target(target, lines, start)
        listed = coefficients.tolist() if isinstance(coefficients, Tensor) else coefficients
        own = np.array(listed, np.float64).reshape(len(segments), k)
    shared = ranks.exchange(piece.terms(COMBINE, k), own)[0].tolist()
    if len(piece.blocks.table) > 0:
        with torch.no_grad():
            backend.combine(start, lines, shared, piece.blocks, target)
        written(target)
    return out


def _total(ranks: Ranks, piece: Piece, k: int, call: int, partials: Callable[[], np.ndarray]) -> np.ndarray:
    """The sums of all ranks: (S, k(k+1)/2)."""
    with ranks.guard():
        pairs = np.zeros((2, len(piece.counted), k * (k + 1) // 2))
        if len(piece.blocks.table) > 0 and any(piece.counted):
            with torch.no_grad():
                pairs = reduction.fold(partials(), piece.blocks)
            pairs[:, ~np.array(piece.counted)] = 0
    every = ranks.exchange(piece.terms(call, k), pairs)
    with np.errstate(invalid="ignore", over="ignore"):
        high: np.ndarray = reduce(reduction.two_sum, every)[0]
    return high
