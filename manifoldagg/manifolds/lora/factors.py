r"""Linear algebra with low-rank matrices in factored form: inner products, linear combinations and truncation.

A matrix $X = B A$ is represented by its factors $B$ (m, r) and $A$ (r, n). Both are stored in one tensor
(*batch, m + n, r), called a *stack*. Its first m rows are $B$, and its last n rows are $A^\top$.

Operations on several matrices first compute an orthonormal basis of all columns, and another one of all rows. Each
matrix then becomes a small matrix of coordinates in these bases, called its *core*. All further computations use only
the cores, in float64.

The rounding errors of this method are proportional to the condition number of the factors. The rounding errors of the
direct formula for an inner product, $\operatorname{tr}(B_1^\top B_2 A_2 A_1^\top)$, are proportional to its square.
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
"""The tolerance for equal singular values, in units of machine epsilon times the largest singular value."""
FACTOR_ROUNDINGS = 4
"""The largest singular value that counts as a rounding error, as a multiple of the rounding errors of the factors.

The rounding errors are assumed to be independent.
"""
ARITHMETIC_ROUNDINGS = 16
"""The rounding errors that the arithmetic in float64 adds to a singular value of a sum, in units of machine epsilon."""


@dataclass(frozen=True)
class FactorQR:
    """The thin QR decomposition $B = Q R$ of one factor $B$ (*batch, m, r) of a low-rank matrix.

    Attributes:
        full_basis: $Q$ (*batch, m, r), with orthonormal columns.
        basis: $Q$ if $B$ has full rank, and $Q R R^+$ otherwise. The projector onto the column space of $B$ is
            `basis @ basis.mT`.
        factor: $R$ (*batch, r, r).
        inverse: the pseudoinverse $R^+$, in which singular values of $R$ at the level of rounding errors count as 0.
    """

    full_basis: Tensor
    basis: Tensor
    factor: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, factor: Tensor, dtype: torch.dtype) -> "FactorQR":
        """Decompose a float64 factor whose entries are rounded to `dtype`."""
        whole, small = torch.linalg.qr(factor)
        # Rounding to `dtype` perturbs singular values by this tolerance, so smaller values carry no information.
        tolerance = max(factor.shape[-2:]) * torch.finfo(dtype).eps
        inverse = torch.linalg.pinv(small, rtol=tolerance)
        with torch.no_grad():
            values = torch.linalg.svdvals(small)
            full = (values[..., -1:] > tolerance * values[..., :1]).unsqueeze(-1)
        return cls(whole, torch.where(full, whole, whole @ (small @ inverse)), small, inverse)


@dataclass(frozen=True)
class TruncatedSVD:
    """The best approximation of a matrix by a matrix of lower rank, and the error of this approximation.

    Each matrix of singular vectors is the product of a large basis and small coordinates. The bases are stored as
    functions, because multiplying by a basis is cheaper than computing its entries.

    Attributes:
        values: all singular values of the original matrix (*batch, any), in descending order.
        rank: the number of singular values that the approximation retains.
        left: a function that multiplies coordinates by the basis of the left singular vectors, and returns (*batch, m,
            any).
        right: a function that multiplies coordinates by the basis of the right singular vectors, and returns (*batch,
            n, any).
        coordinates: the coordinates of the left and of the right singular vectors in these bases.
    """

    values: Tensor
    rank: int
    left: BasisMap
    right: BasisMap
    coordinates: tuple[Tensor, Tensor]

    @property
    def point(self) -> Tensor:
        r"""The balanced factors (*batch, m + n, rank) with $B^\top B = A A^\top$, padded with zeros."""
        stack = self._stack(slice(0, self.rank))
        return torch.nn.functional.pad(stack, (0, self.rank - stack.shape[-1]))

    @property
    def remainder(self) -> Tensor:
        """The balanced factors (*batch, m + n, any) of the truncated part."""
        return self._stack(slice(self.rank, None))

    @property
    def error(self) -> Tensor:
        """The Frobenius norm of the truncated part, (*batch,)."""
        return self.values[..., self.rank :].square().sum(-1).sqrt()

    @property
    def is_tied(self) -> Tensor:
        """Whether the best low-rank approximation of a matrix is not unique.

        The result has the shape (*batch,), with one entry for each original matrix. An entry is true if the smallest
        retained singular value is not 0, and equals the largest truncated singular value up to rounding.
        """
        if self.values.shape[-1] <= self.rank:
            return torch.zeros(self.values.shape[:-1], dtype=torch.bool, device=self.values.device)
        # Singular values have an absolute error of ε times the largest singular value.
        rounding = TIE_ROUNDINGS * torch.finfo(torch.float64).eps * self.values[..., 0]
        last, first = self.values[..., self.rank - 1], self.values[..., self.rank]
        return (first > rounding) & (last - first <= rounding)

    def without_rounding(self, rounding: Tensor) -> "TruncatedSVD":
        """Set all singular values up to `rounding` (*batch, any) to 0."""
        # The bounds differ between singular values, so a value that is set to 0 can precede a retained value.
        values, order = torch.where(self.values > rounding, self.values, 0.0).sort(dim=-1, descending=True, stable=True)
        left, right = (vectors.gather(-1, order.unsqueeze(-2).expand_as(vectors)) for vectors in self.coordinates)
        return replace(self, values=values, coordinates=(left, right))

    def _stack(self, part: slice) -> Tensor:
        # Each factor gets the square root of every singular value, so both factors have equal Gram matrices.
        roots = self.values[..., part].sqrt().unsqueeze(-2)
        left, right = (vectors[..., part] * roots for vectors in self.coordinates)
        return torch.cat([self.left(left), self.right(right)], -2)


def truncate(x: Tensor, m: int, rank: int) -> TruncatedSVD:
    r"""Compute the best approximation of a low-rank matrix $B A$ by a matrix of a given rank.

    The thin QR decompositions $B = Q R$ and $A^\top = P S$ reduce the problem to the truncated SVD of the small matrix
    $R S^\top$.

    Args:
        x: the factors of the matrix, as a stack (*batch, m + n, any) with $B$ on top of $A^\top$.
        m: the number of rows of the matrix.
        rank: the number of retained singular values.

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
    r"""Factorise a low-rank matrix $X = B A$ such that the factors are balanced: $B^\top B = A A^\top$.

    With the singular value decomposition $X = U \Sigma V^\top$, the factors are $B = U\sqrt\Sigma$ and
    $A = \sqrt\Sigma\, V^\top$.

    Args:
        x: the factors of the matrix, as a stack (*batch, m + n, r) with $B$ on top of $A^\top$.
        m: the number of rows of the matrix.

    Example:
        >>> balance(torch.tensor([[8.0], [2.0]]), 1).abs().flatten()
        tensor([4., 4.])
    """
    return truncate(x, m, x.shape[-1]).point.to(x.dtype)


def combine_stacks(coefficients: Sequence[float], points: Sequence[Tensor], m: int) -> Tensor:
    r"""Compute the factors of a linear combination $\sum_i c_i X_i$ of low-rank matrices, in float64.

    The factors of all matrices $X_i$ are concatenated, so their ranks add up.

    Args:
        coefficients: the coefficients $c_i$.
        points: the factors of each matrix $X_i$, as a stack (*batch, m + n, any).
        m: the number of rows of the matrices.

    Returns:
        A stack (*batch, m + n, sum of ranks).

    Example:
        >>> combine_stacks([2.0, -1.0], [torch.ones(2, 1), torch.ones(2, 1)], 1)
        tensor([[ 2., -1.],
                [ 1.,  1.]], dtype=torch.float64)
    """
    columns = []
    for c, x in zip(coefficients, points, strict=True):
        # The copy protects the stack of the caller from the multiplication in place.
        stack = x.to(torch.float64, copy=True)
        # The coefficient multiplies only one factor of each product.
        stack[..., :m, :] *= c
        columns.append(stack)
    return torch.cat(columns, -1)


@dataclass(frozen=True)
class JointBasis:
    r"""Several low-rank matrices $X_i = B_i A_i$ (m, n), expressed in common orthonormal bases.

    The matrix $Q$ (m, p) contains an orthonormal basis for the columns of all $B_i$. The matrix $P$ (n, q) contains an
    orthonormal basis for the rows of all $A_i$. Each $X_i$ is the product $Q\, C_i P^\top$, where the small matrix
    $C_i$ (p, q) is called its core. Sums and inner products of the matrices are computed from the cores alone, because
    the bases are orthonormal.

    Attributes:
        left: a function that returns the product $Q Z$ (*batch, m, j) for any matrix $Z$ (*batch, p, j).
        right: a function that returns the product $P Z$ (*batch, n, j) for any matrix $Z$ (*batch, q, j).
        cores: the cores $C_i$ (k, *batch, p, q) of k matrices.
        columns: the matrices $Q^\top [B_1, \dots, B_k]$ and $P^\top [A_1^\top, \dots, A_k^\top]$, which contain the
            coordinates of all factors.
        ranks: the number of columns of each $B_i$.
        dtypes: the original dtype of the factors of each $X_i$.
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
            ArgumentError: if `points` is empty.
        """
        if not points:
            raise ArgumentError("points: expected at least one stack of factors, got an empty sequence")
        stack = torch.cat([x.double() for x in points], -1)
        left, r = _thin_qr(stack[..., :m, :])
        right, s = _thin_qr(stack[..., m:, :])
        ranks = tuple([x.shape[-1] for x in points])
        cores = [b @ a.mT for b, a in zip(r.split(ranks, -1), s.split(ranks, -1), strict=True)]
        return cls(left, right, torch.stack(cores), (r, s), ranks, tuple([x.dtype for x in points]))

    def gram(self, rows: Tensor) -> Tensor:
        r"""Compute the inner products of several linear combinations $\sum_i c_{ji} X_i$ of the matrices $X_i$.

        The result is accurate even for a small difference of two large matrices.

        Args:
            rows: the coefficients $c_{ji}$ (j, k) of j combinations of k matrices.

        Returns:
            The inner products (*batch, j, j) in float64.

        Example:
            >>> near = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [2.5]])  # 2 and 2.5
            >>> JointBasis.of(near, 1).gram(torch.tensor([[-1.0, 1.0]])).round(decimals=12)
            tensor([[0.2500]], dtype=torch.float64)
        """
        # The matrices are combined before they are multiplied. A sum of their inner products would cancel if a
        # combination is a small difference of large matrices.
        combinations = self._combinations(rows)
        # Q and P are orthonormal, so inner products of matrices equal inner products of their cores.
        flat = combinations.flatten(-2).movedim(0, -2)
        return flat @ flat.mT

    def combine(self, coefficients: Tensor, rank: int) -> TruncatedSVD:
        r"""Approximate a linear combination $\sum_i c_i X_i$ of matrices by the nearest matrix of the given rank.

        Args:
            coefficients: the coefficients $c_i$ (k,).
            rank: the rank of the result.
        """
        return _truncate_core(self.left, self._combinations(coefficients[None])[0], self.right, rank)

    def rounding(self, coefficients: Tensor, truncated_svd: TruncatedSVD) -> Tensor:
        r"""Estimate the rounding error of each singular value of a linear combination $\sum_i c_i X_i$ of matrices.

        Each matrix is the product $X_i = B_i A_i$ of two factors, which were rounded to a dtype with the machine
        epsilon $\varepsilon$. Let $b$ be a column of $B_i$, and let $a$ be the corresponding row of $A_i$. For a
        singular value with the left singular vector $u$ and the right singular vector $v$:

        - The rounding error of $b$ changes the singular value by about $\varepsilon\, |c_i|\, |b|\, |a \cdot v|$.
        - The rounding error of $a$ changes the singular value by about $\varepsilon\, |c_i|\, |a|\, |b \cdot u|$.

        The estimate treats these changes as independent. It adds the rounding error of the arithmetic in float64.

        Args:
            coefficients: the coefficients $c_i$ (k,).
            truncated_svd: the result of `combine` for these coefficients.

        Returns:
            An estimate for each singular value, (*batch, any).
        """
        # All following vectors have one entry for each column of the concatenated factors. The estimate is large only
        # in the directions of large columns, which remain, for example, if large terms of the sum cancel.
        counts = torch.tensor(self.ranks)
        sizes = coefficients.abs().double().repeat_interleave(counts)
        eps = torch.tensor([torch.finfo(dtype).eps for dtype in self.dtypes], dtype=torch.float64)
        sizes, roundings = sizes.to(self.cores), (sizes * eps.repeat_interleave(counts)).to(self.cores)
        r, s = self.columns
        r_norms, s_norms = r.square().sum(-2, keepdim=True).sqrt(), s.square().sum(-2, keepdim=True).sqrt()
        u, v = (vectors.mT @ side for vectors, side in zip(truncated_svd.coordinates, self.columns, strict=True))
        of_factors = ((roundings * s_norms * u).square() + (roundings * r_norms * v).square()).sum(-1).sqrt()
        # The errors are treated as independent, so their squares are added.
        of_arithmetic = torch.finfo(torch.float64).eps * (sizes * r_norms * s_norms).square().sum(-1).sqrt()
        # If a square overflows, the bound is unknown. The value 0 then retains all singular values.
        return (FACTOR_ROUNDINGS * of_factors + ARITHMETIC_ROUNDINGS * of_arithmetic).nan_to_num(0.0, posinf=0.0)

    def _combinations(self, rows: Tensor) -> Tensor:
        """Return the cores (j, *batch, p, q) of j linear combinations with coefficients (j, k)."""
        combinations: Tensor = torch.tensordot(rows.to(self.cores), self.cores, dims=1)
        return combinations


def _truncate_core(left: BasisMap, core: Tensor, right: BasisMap, rank: int) -> TruncatedSVD:
    """Truncate a matrix that is given by a small core and two orthonormal bases."""
    u, values, v = torch.linalg.svd(core, full_matrices=False)
    return TruncatedSVD(values, rank, left, right, (u, v.mT))


def _thin_qr(x: Tensor) -> tuple[BasisMap, Tensor]:
    """Compute the thin QR decomposition x = Q R.

    Returns:
        A function that multiplies a matrix by Q from the left, and the matrix R.
    """
    if needs_autograd_path([x]):
        q, r = torch.linalg.qr(x)
        return partial(torch.matmul, q), r
    # Only a few products with Q are needed, and applying the reflections is cheaper than forming Q.
    packed, tau = torch.geqrf(x)
    # As in LAPACK, `packed` contains R on and above the diagonal, and the vectors of the reflections below it.
    packed_columns = packed[..., : tau.shape[-1]]
    return partial(_apply_reflections, packed_columns, tau), packed[..., : tau.shape[-1], :].triu()


def _apply_reflections(packed: Tensor, tau: Tensor, coordinates: Tensor) -> Tensor:
    """Multiply `coordinates` by Q, given the packed QR decomposition of LAPACK."""
    # `ormqr` multiplies by the square orthogonal matrix. Zeros select its first columns, which form Q.
    rows = packed.shape[-2] - coordinates.shape[-2]
    # `pad` of torch 2.6 does not accept tensors without columns.
    zeros = coordinates.new_zeros(*coordinates.shape[:-2], rows, coordinates.shape[-1])
    return torch.ormqr(packed, tau, torch.cat([coordinates, zeros], -2))
