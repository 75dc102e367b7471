r"""Algebra of factored matrices: inner products, sums, and the best approximation of a lower rank.

A *stack* is a tensor (*batch, m + n, r), $B$ (m, r) over $A^\top$ (n, r), for the matrix $X = B A$. What is asked
of several is answered from small cores in orthonormal bases of all their columns, in float64. Errors grow with the
condition of a gauge; those of $\operatorname{tr}(B_1^\top B_2 A_2 A_1^\top)$ with its square.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from manifoldagg.errors import ArgumentError
from manifoldagg.kernels.operands import needs_autograd_path

__all__ = ["FactorQR", "JointBasis", "TruncatedSVD", "balance", "combine_stacks", "truncate"]

BasisMap = Callable[[Tensor], Tensor]

TIE_ROUNDINGS = 64
"""Roundings of the largest singular value within which two are equal."""
FACTOR_ROUNDINGS = 4
"""Roundings of factors, added up as if by chance: a singular value of a sum that is no larger is rounding."""
ARITHMETIC_ROUNDINGS = 16
"""Roundings of float64, of what a sum is made of, that the arithmetic itself may add to a singular value."""


@dataclass(frozen=True)
class FactorQR:
    r"""One factor $B = Q R$ (*batch, m, r), by a thin QR.

    Attributes:
        full_basis: $Q$ (*batch, m, r), orthonormal columns.
        basis: the same, or $Q R R^+$ where B lacks rank, whose $Q Q^\top$ is the projector to the span of B.
        factor: $R$ (*batch, r, r).
        inverse: $R^+$, directions left out that the dtype of the factor cannot tell from rounding.
    """

    full_basis: Tensor
    basis: Tensor
    factor: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, factor: Tensor, dtype: torch.dtype) -> "FactorQR":
        """Factorise a float64 factor whose entries were of `dtype`."""
        whole, small = torch.linalg.qr(factor)
        tolerance = max(factor.shape[-2:]) * torch.finfo(dtype).eps
        inverse = torch.linalg.pinv(small, rtol=tolerance)
        with torch.no_grad():
            values = torch.linalg.svdvals(small)
            full = (values[..., -1:] > tolerance * values[..., :1]).unsqueeze(-1)
        return cls(whole, torch.where(full, whole, whole @ (small @ inverse)), small, inverse)


@dataclass(frozen=True)
class TruncatedSVD:
    r"""The best approximation of a lower rank in the Frobenius norm, and its error.

    Attributes:
        values: all singular values (*batch, any), in descending order.
        rank: how many are kept.
        left: makes columns (*batch, m, any) of their coordinates in the basis of the left factor.
        right: the same of the right one.
        coordinates: the coordinates of the singular vectors on either side.
    """

    values: Tensor
    rank: int
    left: BasisMap
    right: BasisMap
    coordinates: tuple[Tensor, Tensor]

    @property
    def point(self) -> Tensor:
        r"""The balanced factors (*batch, m + n, rank), $B^\top B = A A^\top$, padded with zeros."""
        found = self._stack(slice(0, self.rank))
        return torch.nn.functional.pad(found, (0, self.rank - found.shape[-1]))

    @property
    def remainder(self) -> Tensor:
        """The balanced factors (*batch, m + n, any) of the truncated part."""
        return self._stack(slice(self.rank, None))

    @property
    def error(self) -> Tensor:
        """The Frobenius norm of the truncated part: (*batch,)."""
        return self.values[..., self.rank :].square().sum(-1).sqrt()

    @property
    def is_tied(self) -> Tensor:
        """Whether the smallest retained and the largest truncated singular value are equal: (*batch,)."""
        if self.values.shape[-1] <= self.rank:
            return torch.zeros(self.values.shape[:-1], dtype=torch.bool, device=self.values.device)
        rounding = TIE_ROUNDINGS * torch.finfo(torch.float64).eps * self.values[..., 0]
        last, first = self.values[..., self.rank - 1], self.values[..., self.rank]
        return (first > rounding) & (last - first <= rounding)

    def without_rounding(self, rounding: Tensor) -> "TruncatedSVD":
        """Set the singular values that do not exceed `rounding` (*batch, any) to 0."""
        values, order = torch.where(self.values > rounding, self.values, 0.0).sort(dim=-1, descending=True, stable=True)
        left, right = (turn.gather(-1, order.unsqueeze(-2).expand_as(turn)) for turn in self.coordinates)
        return replace(self, values=values, coordinates=(left, right))

    def _stack(self, part: slice) -> Tensor:
        roots = self.values[..., part].sqrt().unsqueeze(-2)
        down, across = (turn[..., part] * roots for turn in self.coordinates)
        return torch.cat([self.left(down), self.right(across)], -2)


def truncate(x: Tensor, m: int, rank: int) -> TruncatedSVD:
    r"""Return the matrix of a rank nearest to that of a stack.

    By thin QRs $B = Q R$, $A^\top = P S$ and the SVD of the small core $R S^\top$.

    Args:
        x: (*batch, m + n, any).
        m: rows of the matrix.
        rank: how many singular values to keep.

    Example:
        >>> x = torch.tensor([[3.0, 0.0], [0.0, 2.0], [1.0, 0.0], [0.0, 1.0]])  # diag(3, 2)
        >>> found = truncate(x, 2, 1)
        >>> found.values.tolist(), found.error.item()
        ([3.0, 2.0], 2.0)
    """
    left, r = _thin_qr(x[..., :m, :].double())
    right, s = _thin_qr(x[..., m:, :].double())
    return _truncate_core(left, r @ s.mT, right, rank)


def balance(x: Tensor, m: int) -> Tensor:
    r"""Return balanced factors (*batch, m + n, r) of the same matrix, $U\sqrt\Sigma$ and $V\sqrt\Sigma$.

    Example:
        >>> balance(torch.tensor([[8.0], [2.0]]), 1).abs().flatten()
        tensor([4., 4.])
    """
    return truncate(x, m, x.shape[-1]).point.to(x.dtype)


def combine_stacks(coefficients: Sequence[float], points: Sequence[Tensor], m: int) -> Tensor:
    r"""Return a float64 stack of $\sum_i c_i X_i$ (*batch, m + n, the sum of ranks): concatenated factors.

    Example:
        >>> combine_stacks([2.0, -1.0], [torch.ones(2, 1), torch.ones(2, 1)], 1)
        tensor([[ 2., -1.],
                [ 1.,  1.]], dtype=torch.float64)
    """
    columns = []
    for c, x in zip(coefficients, points, strict=True):
        stack = x.to(torch.float64, copy=True)
        stack[..., :m, :] *= c
        columns.append(stack)
    return torch.cat(columns, -1)


@dataclass(frozen=True)
class JointBasis:
    r"""Several matrices in a common pair of bases, $X_i = Q\, C_i P^\top$.

    Attributes:
        left: $Q$, which makes (*batch, m, any) of (*batch, p, any).
        right: $P$, which makes (*batch, n, any) of (*batch, q, any).
        cores: $C_i$ (k, *batch, p, q).
        columns: the factors in these bases, (*batch, p, any) and (*batch, q, any), those of all $X_i$ side by side.
        ranks: how many columns are those of each $X_i$.
        dtypes: in which each came.
    """

    left: BasisMap
    right: BasisMap
    cores: Tensor
    columns: tuple[Tensor, Tensor]
    ranks: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, points: Sequence[Tensor], m: int) -> "JointBasis":
        """Compute the joint basis of stacks (*batch, m + n, any) of any ranks.

        Raises:
            ArgumentError: if there are none.
        """
        if not points:
            raise ArgumentError("points: expected at least one stack of factors")
        stack = torch.cat([x.double() for x in points], -1)
        left, r = _thin_qr(stack[..., :m, :])
        right, s = _thin_qr(stack[..., m:, :])
        ranks = tuple([x.shape[-1] for x in points])
        cores = [b @ a.mT for b, a in zip(r.split(ranks, -1), s.split(ranks, -1), strict=True)]
        return cls(left, right, torch.stack(cores), (r, s), ranks, tuple([x.dtype for x in points]))

    def gram(self, rows: Tensor) -> Tensor:
        r"""Compute inner products (*batch, j, j) of $\sum_i c_{ji} X_i$, one combination for each row of `rows` (j, k).

        A displacement is the row with 1 at the one end and -1 at the other: its core is formed before it is multiplied,
        so that the digits of a small one are those of its ends, not of the difference of their squares.

        Example:
            >>> near = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [2.5]])  # 2 and 2.5
            >>> JointBasis.of(near, 1).gram(torch.tensor([[-1.0, 1.0]])).round(decimals=12)
            tensor([[0.2500]], dtype=torch.float64)
        """
        combinations = self._combinations(rows)
        flat = combinations.flatten(-2).movedim(0, -2)
        return flat @ flat.mT

    def combine(self, coefficients: Tensor, rank: int) -> TruncatedSVD:
        r"""Compute $\sum_i c_i X_i$, `coefficients` (k,), and its nearest matrix of a rank."""
        return _truncate_core(self.left, self._combinations(coefficients[None])[0], self.right, rank)

    def rounding(self, coefficients: Tensor, truncated_svd: TruncatedSVD) -> Tensor:
        r"""Bound the rounding error of each singular value of $\sum_i c_i X_i$ (*batch, any).

        Of a column $b$ of B and its row $a$ of A, rounded in the dtype that they came in, a singular value with vectors
        $u$, $v$ sees $\varepsilon |b| (a \cdot v)$ and $\varepsilon (u \cdot b) |a|$. So what cancels leaves rounding
        where it was, and a small direction that none of the large columns has is not lost beside them.

        Args:
            coefficients: (k,).
            truncated_svd: what `combine` made of them.
        """
        counts = torch.tensor(self.ranks)
        sizes = coefficients.abs().double().repeat_interleave(counts)
        eps = torch.tensor([torch.finfo(dtype).eps for dtype in self.dtypes], dtype=torch.float64)
        sizes, roundings = sizes.to(self.cores), (sizes * eps.repeat_interleave(counts)).to(self.cores)
        r, s = self.columns
        down, across = r.square().sum(-2, keepdim=True).sqrt(), s.square().sum(-2, keepdim=True).sqrt()
        u, v = (turn.mT @ side for turn, side in zip(truncated_svd.coordinates, self.columns, strict=True))
        seen = ((roundings * across * u).square() + (roundings * down * v).square()).sum(-1).sqrt()
        lost = torch.finfo(torch.float64).eps * (sizes * down * across).square().sum(-1).sqrt()
        # Where squares overflow nothing is known of rounding.
        return (FACTOR_ROUNDINGS * seen + ARITHMETIC_ROUNDINGS * lost).nan_to_num(0.0, posinf=0.0)

    def _combinations(self, rows: Tensor) -> Tensor:
        combinations: Tensor = torch.tensordot(rows.to(self.cores), self.cores, dims=1)
        return combinations


def _truncate_core(left: BasisMap, core: Tensor, right: BasisMap, rank: int) -> TruncatedSVD:
    u, values, v = torch.linalg.svd(core, full_matrices=False)
    return TruncatedSVD(values, rank, left, right, (u, v.mT))


def _thin_qr(x: Tensor) -> tuple[BasisMap, Tensor]:
    """The thin QR of `x`: Q as what it does to columns, and R."""
    if needs_autograd_path([x]):
        q, r = torch.linalg.qr(x)
        return partial(torch.matmul, q), r
    # Few columns of Q are asked for: the reflections that make them are cheaper than all of it.
    packed, tau = torch.geqrf(x)
    packed_columns = packed[..., : tau.shape[-1]]
    return partial(_apply_reflections, packed_columns, tau), packed[..., : tau.shape[-1], :].triu()


def _apply_reflections(packed: Tensor, tau: Tensor, coordinates: Tensor) -> Tensor:
    rows = packed.shape[-2] - coordinates.shape[-2]
    # No `pad`: that of torch 2.6 refuses what has no columns.
    below = coordinates.new_zeros(*coordinates.shape[:-2], rows, coordinates.shape[-1])
    return torch.ormqr(packed, tau, torch.cat([coordinates, below], -2))
