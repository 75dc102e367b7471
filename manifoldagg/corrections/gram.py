"""Gram matrices, from which most corrections of stale updates compute their coefficients.

A Gram matrix contains the inner products of all pairs of vectors. The vectors are the changes of a client's model
during training (displacements), the change of the server's model in that time (drift), and any vectors that a
correction adds. A correction finds the vectors that it added by name.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from manifoldagg._result_repr import format_result
from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels.operands import needs_autograd_path

__all__ = ["Gram", "Matrix", "as_object_array", "detach_scalar", "lost_to_cancellation"]

Matrix = np.ndarray[Any, np.dtype[np.object_]]
"""An array of Python floats, torch numbers or sympy expressions. The same code computes with all three types."""

CANCELLATION_TOLERANCE = 1e-6
"""The threshold for cancellation, relative to the squared norm before the correction.

If a squared norm after the correction is above this fraction, at least ten of its digits are correct. If it is below,
rounding errors may dominate it.
"""


@dataclass(frozen=True, eq=False)
class Gram:
    r"""The inner products of all pairs of the vectors from which a correction computes its result.

    These vectors are the displacements $v_1, \dots, v_n$ of a client's update, the drift $g$ of the server's model, and
    any vectors that a correction adds. They are called rows, and are numbered from 0 in this order.

    Attributes:
        parts: (S, k, k) for k rows: one matrix for each of S segments of the model, such as its named tensors. For a
            single matrix of the whole model, S is 1.
        extra: the names of the rows that a correction added.
        segments: the names of the segments; empty for a matrix of the whole model.
        matrix: (k, k), the matrix of the whole model, which is the sum over the segments.
        num_displacements: the number n of displacements, which is also the index of the drift.

    Example:
        >>> gram = Gram.of([[5.0, 1.0], [1.0, 2.0]])
        >>> gram.num_displacements, gram.matrix[0, gram.num_displacements]
        (1, 1.0)
        >>> gram.corrected(Gram.of([[5.0, 1.0], [1.0, 2.0]]).identity()).matrix.tolist()
        [[5.0, 1.0], [1.0, 2.0]]
    """

    parts: Matrix
    extra: tuple[str, ...] = ()
    segments: tuple[str, ...] = ()
    matrix: Matrix = field(init=False, repr=False)
    num_displacements: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # The class is frozen, so the derived attributes are set with `object.__setattr__`.
        object.__setattr__(self, "matrix", self.parts[0] if len(self.parts) == 1 else self.parts.sum(0))
        object.__setattr__(self, "num_displacements", self.parts.shape[-1] - 1 - len(self.extra))

    def __repr__(self) -> str:
        return format_result(self, displacements=self.num_displacements, extra=self.extra, segments=len(self.parts))

    @staticmethod
    def of(matrix: Any, *, extra: Sequence[str] = (), segments: Sequence[str] = ()) -> "Gram":
        """Build a Gram matrix from numbers: (k, k) for the whole model, or (S, k, k) for segments.

        Args:
            matrix: nested lists, an array or a tensor of floats, torch numbers or sympy expressions.
            extra: the names of the rows after the drift.
            segments: the names of the segments.

        Raises:
            ArgumentError: if a matrix is not square, or has fewer than `1 + len(extra)` rows.
        """
        parts = as_object_array(matrix)
        parts = parts if parts.ndim == 3 else parts[None]
        if parts.ndim != 3 or parts.shape[1] != parts.shape[2] or parts.shape[1] < 1 + len(extra):
            raise ArgumentError(
                f"gram: expected square matrices of at least {1 + len(extra)} rows, got shape {parts.shape}"
            )
        return Gram(parts, tuple(extra), tuple(segments))

    @property
    def drift_products(self) -> list[Any]:
        r"""The inner products of $v_1, \dots, v_n$ with $g$."""
        products: list[Any] = self.matrix[: self.num_displacements, self.num_displacements].tolist()
        return products

    @property
    def cosine(self) -> float:
        r"""The cosine of $v_n$ and $g$ in [-1, 1]; NaN if one of the two is zero.

        Example:
            >>> Gram.of([[4.0, 1.0], [1.0, 1.0]]).cosine
            0.5
        """
        n = self.num_displacements
        # Rounding can leave a square slightly below zero. The roots are separate, because the product of two squares
        # can overflow or underflow.
        scale = math.sqrt(max(self.matrix[n - 1, n - 1], 0.0)) * math.sqrt(max(self.matrix[n, n], 0.0))
        return max(-1.0, min(1.0, self.matrix[n - 1, n] / scale)) if scale > 0 else math.nan

    def row_index(self, name: str) -> int:
        """Return the index of an additional row.

        Raises:
            ArgumentError: if the matrix has no additional row of this name.
        """
        if name not in self.extra:
            known = ", ".join(["the displacements", "the drift", *self.extra])
            raise ArgumentError(
                f"gram: expected the name of a row that `extend` added, got {short_repr(name)}; the rows are {known}"
            )
        return self.num_displacements + 1 + self.extra.index(name)

    def __getitem__(self, segment: str) -> "Gram":
        """Return the Gram matrix of one segment by its name.

        Raises:
            ArgumentError: if the segment is unknown, or if the matrix was computed for the whole model.
        """
        if segment not in self.segments:
            known = ", ".join(map(repr, self.segments))
            hint = f"the segments are {known}" if known else "granularity='tensor' computes segments"
            raise ArgumentError(f"gram: expected the name of a segment, got {short_repr(segment)}; {hint}")
        index = self.segments.index(segment)
        return Gram(self.parts[index : index + 1], self.extra, (segment,))

    def __iter__(self) -> Iterator["Gram"]:
        """Iterate over the segments."""
        for part in self.parts:
            yield Gram(part[None], self.extra)

    @property
    def total(self) -> "Gram":
        """The Gram matrix of the whole model."""
        return self if len(self.parts) == 1 else Gram(self.matrix[None], self.extra)

    def first_rows(self, k: int) -> "Gram":
        """Return the Gram matrix without the vectors from index k on.

        The vectors are, in this order, n changes of a client's model, the change of the server's model, and any vectors
        that a correction added. Only added vectors may be omitted, so k must be at least n + 1.
        """
        dropped = self.parts.shape[-1] - k
        return self if not dropped else Gram(self.parts[:, :k, :k], self.extra[:-dropped], self.segments)

    def identity(self) -> Matrix:
        """Return the coefficients (n, k) that leave the displacements unchanged."""
        return _identity(self.num_displacements, self.parts.shape[-1]).copy()

    def with_drift(self, coefficients: Matrix) -> Matrix:
        r"""Append a row for the drift to the coefficient matrix of a correction.

        The drift is the change of the server's model since the client started. Each row of the coefficient matrix $C$
        expresses one corrected vector as a linear combination of k original vectors, and one of these is the drift. A
        correction leaves the drift itself unchanged. The appended row is therefore 1 for the drift and 0 for other
        vectors.

        Args:
            coefficients: $C$, (n, k) for n displacements, or (S, n, k) with one matrix for each of S segments of the
                model.

        Returns:
            $\bar C$, (n + 1, k), or (S, n + 1, k).
        """
        # A 1 in the column of the drift. The same row serves all segments.
        drift = np.eye(1, coefficients.shape[-1], self.num_displacements, dtype=object)
        return np.concatenate([coefficients, np.broadcast_to(drift, (*coefficients.shape[:-2], *drift.shape))], axis=-2)

    def transform(self, coefficients: Matrix) -> Matrix:
        r"""Compute $C G C^\top$, (S, m, m): the inner products of m linear combinations of the rows."""
        inner: Matrix = coefficients @ self.parts @ coefficients.swapaxes(-1, -2)
        return inner

    def corrected(self, coefficients: Matrix) -> "Gram":
        r"""Compute the Gram matrix of the corrected displacements and the drift.

        A displacement is the change of a client's model during training. The drift is the change of the server's model
        in that time, and a correction leaves it unchanged. All vectors of the result are linear combinations of the
        original vectors, whose Gram matrix is $G$. With the matrix $\bar C$ of their coefficients, the result is
        $\bar C G \bar C^\top$.

        Args:
            coefficients: the coefficients of the corrected displacements only, as in `with_drift`.
        """
        return Gram(self.transform(self.with_drift(coefficients)), (), self.segments)

    def squared_norm(self, coefficients: Matrix) -> Any:
        r"""Compute $\sum_s c_s^\top G_s\, c_s$, the squared norm of a linear combination of the rows.

        Args:
            coefficients: $c$, (k,), or (S, k) with one row for each segment.

        Example:
            >>> Gram.of([[9.0, 1.0], [1.0, 4.0]]).squared_norm(np.array([1.0, -0.5], dtype=object))
            9.0
        """
        parts = self.matrix[None] if coefficients.ndim == 1 else self.parts
        # Elementwise products of object arrays also work for tensors that autograd tracks and for symbolic numbers.
        terms = coefficients[..., :, None] * coefficients[..., None, :] * parts
        return terms.reshape(len(parts), -1).sum(1).sum()

    def norm_bound(self, coefficients: Matrix) -> float:
        r"""Compute an upper bound on the norm of a linear combination of the rows.

        For the coefficients $c_j$ and the Gram matrix $G$, the bound is $\sum_j |c_j| \sqrt{G_{jj}}$. If each segment
        has its own coefficients, the result is the sum of the bounds of all segments.

        Args:
            coefficients: $c$, (k,), or (S, k) with one row for each segment.

        Example:
            >>> Gram.of([[9.0, 1.0], [1.0, 4.0]]).norm_bound(np.array([1.0, -0.5], dtype=object))
            4.0
        """
        parts = [(coefficients, self.matrix)] if coefficients.ndim == 1 else zip(coefficients, self.parts, strict=True)
        # An unmeasured row has the square NaN, so a row with the coefficient 0 must be skipped.
        terms = [abs(c) * math.sqrt(inner[j, j]) for row, inner in parts for j, c in enumerate(row) if c != 0]
        return float(sum(terms))


def lost_to_cancellation(remaining: Any, original: Any) -> bool:
    """Return whether cancellation made the inner products of the corrected displacements inaccurate.

    This is the case if a correction has reduced the squared norm of a displacement by a factor of more than 10^6.

    Args:
        remaining: (n, n) inner products of the corrected displacements.
        original: (k, k) inner products of the rows before the correction.
    """
    # C G Cᵀ adds terms as large as |v|² and rounds each of them. The absolute error is therefore about ε |v|², however
    # small the result. The negated comparison is also true for NaN.
    return any(not row[i] >= CANCELLATION_TOLERANCE * original[i][i] for i, row in enumerate(remaining))


@lru_cache(maxsize=64)
def _identity(n: int, k: int) -> Matrix:
    """Return a cached identity matrix. Callers copy it, because arrays are mutable."""
    return np.eye(n, k, dtype=object)


def as_object_array(numbers: Any) -> Matrix:
    """Return an object array of plain floats, or of tensors if autograd tracks the numbers."""
    if isinstance(numbers, Tensor):
        if not needs_autograd_path([numbers]):
            return numbers.detach().numpy().astype(object)
        # NumPy would convert a tensor to a sequence or to an array, so the loop assigns the entries one by one.
        array = np.empty(numbers.numel(), dtype=object)
        for i, number in enumerate(numbers.flatten()):
            array[i] = number
        return array.reshape(tuple(numbers.shape))
    return np.array(numbers, dtype=object)


def detach_scalar(value: Any) -> Any:
    """Detach a number from the autograd graph."""
    return value.detach() if isinstance(value, Tensor) else value
