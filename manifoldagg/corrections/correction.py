"""Corrections of stale updates: their base class, the class of their results, and their composition.

A correction adapts a stale update to the current model of the server. An update is stale if the server changed its
model while the client trained.
"""

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_finite, short_repr
from manifoldagg.corrections.frame import Frame
from manifoldagg.corrections.gram import Gram, Matrix, lost_to_cancellation
from manifoldagg.corrections.transport import DEFAULT_RUNGS
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import Row
from manifoldagg.kernels.operands import needs_autograd_path
from manifoldagg.manifolds import Manifold

__all__ = ["Composition", "Corrected", "Correction", "by_granularity"]

AuxiliaryRow = tuple[str, Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class Corrected:
    r"""The result of a correction, which expresses each corrected displacement as a linear combination.

    The corrected displacement $i$ is $\sum_j C_{ij}\, r_j$. The rows $r_j$ of a frame are the displacements of the
    client's update, the drift of the server's model, and any rows that the correction added.

    Attributes:
        frame: the frame that contains the rows.
        gram: the Gram matrix of the rows.
        coefficients: the matrix $C$: (n, k), or (S, n, k) with one matrix for each segment.
        state: the next state of a stateful correction.
        original_gram: the Gram matrix of the original displacements. It differs from `gram` only if a composition
            computed intermediate displacements.
        auxiliary: the inner products (S, k + 1) of the auxiliary vector of `Correction.apply` with the rows and with
            itself. It is `None` without such a vector.
    """

    frame: Frame
    gram: Gram
    coefficients: Matrix
    state: Any
    original_gram: Gram
    auxiliary: Matrix | None = None

    def __repr__(self) -> str:
        return format_result(self, coefficients=self.coefficients, gram=self.gram)

    @cached_property
    def corrected_gram(self) -> Gram:
        r"""$\bar C G \bar C^\top$: the Gram matrix of the corrected displacements and the drift."""
        return self.gram.corrected(self.coefficients)

    def row_coefficients(self, weights: Any) -> Matrix:
        r"""Compute the coefficients of a weighted sum $\sum_i w_i u_i$ of the corrected displacements $u_i$.

        A displacement is the change of a client's model during training. A correction computes
        $u_i = \sum_j C_{ij}\, r_j$ from k vectors $r_j$, such as the original displacements. The weighted sum therefore
        has the coefficient $\sum_i w_i C_{ij}$ for the vector $r_j$.

        Args:
            weights: $w_i$, one number for each corrected displacement.

        Returns:
            (k,), or (S, k) if each of S segments of the model has its own coefficients.
        """
        # An object array can contain torch numbers with derivatives and symbolic numbers.
        line: Matrix = np.asarray(weights, dtype=object) @ self.coefficients
        return line

    def combine(self, base: Row | None, weights: Any, out: Any = None) -> Any:
        r"""Compute $\mathrm{base} + \sum_i w_i \sum_j C_{ij} r_j$, rounded once."""
        return self.frame.combine(base, self.row_coefficients(weights), out=out)

    @staticmethod
    def single(frame: Frame, gram: Gram, coefficients: Sequence[float]) -> "Corrected":
        """Return a single linear combination of the rows of a frame as a `Corrected`."""
        return Corrected(frame, gram, np.array([coefficients], dtype=object), None, gram)

    def inner_products(self) -> list[list[float]]:
        r"""Compute the matrix (n, n) of the inner products of the n corrected displacements.

        A displacement is the change of a client's model during training. The corrected displacements are linear
        combinations of known vectors. With the matrix $C$ of their coefficients and the Gram matrix $G$ of the known
        vectors, the result is $C G C^\top$. This formula is inaccurate if the correction makes a displacement very
        short. In that case, the method computes the inner products from the entries of the corrected displacements.

        Raises:
            ArgumentError: if the squared norm of a row overflows.
        """
        parts = self.gram.transform(self.coefficients)
        inner: list[list[float]] = (parts[0] if len(parts) == 1 else parts.sum(0)).tolist()
        # Let |u| be the norm after the correction, and |v| the norm before it. The relative error of C G Cᵀ is about
        # ε |v|² / |u|². From the corrected vectors themselves, it is only about ε |v| / |u|.
        if lost_to_cancellation(inner, self.gram.matrix):
            inner = self.frame.inner_products([self.coefficients[..., i, :] for i in range(len(inner))]).tolist()
        for i, row in enumerate(inner):
            if not math.isfinite(row[i]):
                raise ArgumentError(f"points[{i}]: squared length of the corrected displacement overflows")
        return inner

    def lost_to_cancellation(self) -> bool:
        """Return whether the inner products of the corrected displacements are inaccurate.

        This is the case if the correction shortens a displacement by a factor of more than 1000 in any segment of the
        model. The subtraction then cancels so many leading digits that rounding errors may dominate the inner products.
        """
        n = self.gram.num_displacements
        left = self.corrected_gram.parts[:, :n, :n]
        return any(lost_to_cancellation(*pair) for pair in zip(left, self.gram.parts, strict=True))

    def move(self, weights: Any) -> Any:
        r"""Return the server's model after a step along a weighted sum of the corrected displacements.

        The new model is $\Theta^\tau + \sum_i w_i\, u_i$, where $\Theta^\tau$ is the current model. The weight $w_i$
        belongs to the corrected displacement $u_i$. For the result and the errors, see
        [`Frame.move`][manifoldagg.corrections.Frame.move].
        """
        return self.frame.move(self.gram, np.asarray(weights, dtype=object) @ self.coefficients)

    def rows(self) -> list[Row]:
        """Compute the corrected displacements, and check that they are finite.

        A displacement is the change of a client's model during training. A corrected displacement is a step that the
        server can apply to its current model.

        Returns:
            One row for each displacement, with each entry rounded once to the dtype of the frame. If the model has
            low-rank parameters, each row is a tuple of float64 tensors, and the rank of its matrices is not truncated.

        Raises:
            ArgumentError: if an entry is not finite.
        """
        # `materialize` would truncate the rank of a low-rank leaf, and a projection then need not remain orthogonal.
        form = self.frame.materialize_exact if self.frame.ambient.leaves else self.frame.materialize
        rows = [form(self.coefficients[..., i, :]) for i in range(self.coefficients.shape[-2])]
        for row in rows:
            for piece in row if isinstance(row, tuple) else (row,):
                if not needs_autograd_path([piece]):
                    check_finite("corrected displacements", piece)
        return rows

    def displacements(self) -> Float[Tensor, "n P"]:
        r"""Compute the corrected displacements as one tensor (n, P).

        A displacement is the change of a client's model during training. Each row of the result is one of the n
        corrected displacements, as a tangent vector at the server's current model $\Theta^\tau$ with P parameters. Each
        entry is rounded once, to the dtype of the model.

        Raises:
            ArgumentError: if the space has low-rank leaves, because displacements of a low-rank leaf are not vectors.
        """
        if self.frame.ambient.leaves:
            raise ArgumentError(
                "space: expected a space without low-rank leaves, got low-rank leaves; use `rows` or `combine`"
            )
        rows: list[Any] = self.rows()
        # Without displacements, the result (0, P) still has the dtype and the device of the frame.
        return torch.stack(rows) if rows else self.frame.empty_vector()[None][:0]


class Correction(abc.ABC):
    r"""Base class for corrections, which adapt a stale update to the current model of the server.

    A client started from the base model $\Theta^t$, but the server has moved to the current model $\Theta^\tau$. The
    update consists of displacements $v_1, \dots, v_n$ from the base, one for each control point. A correction is a map
    $\pi$ from these displacements to tangents at the current model. The new displacements are linear combinations of
    the $v_i$, of the drift $g$ (the change from $\Theta^t$ to $\Theta^\tau$), and of rows that the correction adds.

    A subclass implements up to three methods, which return new values and never modify their inputs:

    - `coefficients` computes the coefficients of these combinations from the inner products of the rows. Every
      subclass must implement it.
    - `extend` adds rows to the frame. A subclass overrides it to use vectors other than $v$ and $g$.
    - `update_state` computes the tensors of the next state. A stateful subclass overrides it.

    Attributes:
        granularity: `"tensor"` if the correction reads the Gram matrices of segments, such as `gram["head.weight"]`.
        keeps_state: whether the correction is stateful.

    Example:
        Halve the displacement if it conflicts with the drift in the last layer.

        >>> import torch
        >>> from manifoldagg.manifolds import Flat, Product
        >>> class HalveConflicts(Correction):
        ...     granularity = "tensor"
        ...     def coefficients(self, gram, state=None):
        ...         matrix, n, head = gram.identity(), gram.num_displacements, gram["head"].matrix
        ...         for i in range(n):
        ...             matrix[i, i] = 0.5 if head[i, n] < 0 else 1.0
        ...         return matrix, state
        >>> space = Product({"body": Flat(1), "head": Flat(1)})
        >>> base, current = torch.zeros(2), torch.ones(2)
        >>> HalveConflicts()(space, base, current, torch.tensor([[4.0, -2.0], [-4.0, 2.0]]))
        tensor([[ 2., -1.],
                [-4.,  2.]])
    """

    granularity: str = "model"
    keeps_state: ClassVar[bool] = False

    @abc.abstractmethod
    def coefficients(self, gram: Gram, state: Any = None) -> tuple[Matrix, Any]:
        r"""Compute the coefficients of the corrected displacements, and the correction's state for the next update.

        The coefficients form a matrix $C$. Corrected displacement $i$ is the linear combination $\sum_j C_{ij}\, r_j$
        of the vectors $r_1, \dots, r_k$. These vectors are:

        - the displacements $v_1, \dots, v_n$, which are changes of the client's model during training;
        - the drift $g$, which is the change of the server's model in that time;
        - any vectors that the method `extend` of this correction adds.

        Args:
            gram: the inner products of $v_1, \dots, v_n, g$ and of the rows that `extend` added.
            state: the state of a stateful correction; `None` at the first update.

        Returns:
            The matrix (n, k) with numbers of the same type as in `gram`, or (S, n, k) with one matrix for each segment,
            and the next state.
        """

    def extend(self, frame: Frame, state: Any = None) -> Frame:
        """Return `frame` with the additional rows that the correction needs."""
        return frame

    def update_state(self, frame: Frame, coefficients: Matrix, state: Any) -> Any:
        """Return the state with updated tensors, given the coefficients of the current update."""
        return state

    def adds_rows(self, frame: Frame) -> bool:
        """Return whether the correction needs more vectors than the displacements and the drift.

        The method `extend` adds these vectors to the frame, which is the input of the correction. By default, the
        result is `True` if the subclass overrides `extend`.
        """
        return type(self).extend is not Correction.extend

    def apply(
        self, frame: Frame, state: Any = None, *, granularity: str | None = None, auxiliary: AuxiliaryRow | None = None
    ) -> Corrected:
        """Correct the displacements of a frame.

        Args:
            frame: the frame of displacements and the drift.
            state: the state that the last call returned, for a stateful correction. It is not modified.
            granularity: the granularity of the Gram matrix. It overrides the attribute of the correction if a later
                step needs segments.
            auxiliary: the name, the minuend and the subtrahend of an additional vector of a flat space. The same pass
                computes the inner products of this vector with the rows. The vector itself is not corrected.

        Raises:
            ArgumentError: if inner products overflow float64, if the correction does not support such a frame, or if
                `coefficients` returns an object that is not an array with this shape.

        Cost: one pass that reads the rows. Forming the rows that the correction adds, and calling `displacements` on
        the result, cost additional passes.
        """
        if frame.extra:
            raise ArgumentError(f"frame: expected displacements and the drift alone, got also {', '.join(frame.extra)}")
        frame = self.extend(frame, state)
        # The auxiliary vector is measured in the same pass, but is not a row that the coefficients can use.
        seen = frame if auxiliary is None else frame.with_row(*auxiliary)
        gram = seen.gram(granularity or self.granularity)
        products = None
        if auxiliary is not None:
            # The auxiliary vector is the last row, so its products are the last row of each matrix.
            products = gram.parts[:, -1]
            gram = Gram(gram.parts[:, :-1, :-1], frame.extra, gram.segments)
        matrix, state = self.coefficients(gram, state)
        if not isinstance(matrix, np.ndarray) or matrix.shape[-2:] != (frame.num_displacements, len(frame.rows)):
            raise ArgumentError(
                f"correction: {type(self).__name__}.coefficients: expected an array of shape "
                f"({frame.num_displacements}, {len(frame.rows)}), such as gram.identity(), got {short_repr(matrix)}"
            )
        if self.keeps_state:
            state = self.update_state(frame, matrix, state)
        return Corrected(frame, gram, matrix, state, gram, products)

    def __call__(
        self,
        space: Manifold,
        base: Float[Tensor, "..."],
        current: Float[Tensor, "..."],
        displacements: Float[Tensor, "..."],
        *,
        transport: str | None = None,
        rungs: int = DEFAULT_RUNGS,
    ) -> Float[Tensor, "..."]:
        r"""Return the corrected displacements, which are tangent at `current`.

        Args:
            space: the space of the points.
            base: $\Theta^t$, the model from which the update started, of the space's shape.
            current: $\Theta^\tau$, the current model of the server.
            displacements: $v$, tangents at `base`: (n, *shape), with one row for each control point.
            transport: the transport method on a curved space, as in [`Frame.of`][manifoldagg.corrections.Frame.of].
            rungs: the number of rungs of a ladder.

        Returns:
            (n, *shape), a new tensor.

        Raises:
            ArgumentError: if an argument has the wrong shape, is not finite or is not on the space, or if the space
                lacks a required operation. Also if the correction is stateful; use `apply` for such a correction.

        Cost: on a flat space, one pass that reads everything and one that writes the result.
        """
        if self.keeps_state:
            raise ArgumentError(f"correction: expected a stateless correction, got {self}; use apply(frame, state)")
        frame = Frame.of(space, base, current, displacements, transport=transport, rungs=rungs)
        return self.apply(frame).displacements().reshape(displacements.shape)

    def __rshift__(self, other: "Correction") -> "Correction":
        """Compose two corrections. `a >> b` applies `a` first and then `b` to the result."""
        if not isinstance(other, Correction):
            return NotImplemented
        return Composition((*_parts(self), *_parts(other)))


@dataclass(frozen=True)
class Composition(Correction):
    r"""A sequence of corrections, each applied to the result of the previous correction.

    The operator `a >> b` builds a composition. Let $C_a$ be the coefficients of the correction $a$, and let
    $\bar C_a$ be $C_a$ with an additional row for the unchanged drift. If $G$ is the Gram matrix of the original rows,
    then $\bar C_a G \bar C_a^\top$ is the Gram matrix after $a$. The coefficients of the composition are therefore
    $C = C_b(\bar C_a G \bar C_a^\top)\, \bar C_a$.

    For this reason, a composition usually reads the rows only once. It computes the displacements after $a$, which
    costs another pass, in three cases:

    - The correction $b$ adds rows to the frame.
    - The correction $b$ is stateful.
    - The displacements after $a$ are so small that rounding errors dominate $\bar C_a G \bar C_a^\top$.

    Attributes:
        parts: the corrections, from the first to the last.
    """

    parts: tuple[Correction, ...]

    @property
    def granularity(self) -> str:  # type: ignore[override]  # a property that depends on the parts
        return "tensor" if any(part.granularity == "tensor" for part in self.parts) else "model"

    @property
    def keeps_state(self) -> bool:  # type: ignore[override]  # as above
        return any(part.keeps_state for part in self.parts)

    def adds_rows(self, frame: Frame) -> bool:
        return any(part.adds_rows(frame) for part in self.parts)

    def coefficients(self, gram: Gram, state: Any = None) -> tuple[Matrix, Any]:
        # At the first update, every part has the state `None`.
        states = [*(state or (None for _ in self.parts))]
        matrix, states[0] = self.parts[0].coefficients(gram, states[0])
        for i, part in enumerate(self.parts[1:], 1):
            after, states[i] = part.coefficients(gram.corrected(matrix), states[i])
            # `after` refers to the displacements after the previous parts, so the coefficient matrices are multiplied.
            matrix = after @ gram.with_drift(matrix)
        return matrix, tuple(states) if self.keeps_state else None

    def apply(
        self, frame: Frame, state: Any = None, *, granularity: str | None = None, auxiliary: AuxiliaryRow | None = None
    ) -> Corrected:
        # All parts use the finest granularity. The Gram matrix of the model is the sum of the matrices of its segments.
        finest = granularity or self.granularity
        states = [*(state or (None for _ in self.parts))]
        done = self.parts[0].apply(frame, states[0], granularity=finest, auxiliary=auxiliary)
        states[0] = done.state
        for i, part in enumerate(self.parts[1:], 1):
            # Added rows and states need the intermediate displacements themselves, and cancellation makes their Gram
            # matrix inaccurate. In all other cases, the Gram matrix follows from that of the original rows.
            if part.keeps_state or part.adds_rows(done.frame) or done.lost_to_cancellation():
                moved = done.frame.with_displacements(done.rows())
                formed = part.apply(moved, states[i], granularity=finest, auxiliary=auxiliary)
                done = replace(formed, original_gram=done.original_gram)
                states[i] = done.state
            else:
                matrix, _ = part.coefficients(done.corrected_gram)
                done = replace(done, coefficients=matrix @ done.gram.with_drift(done.coefficients))
        return replace(done, state=tuple(states) if self.keeps_state else None)


def _parts(correction: Correction) -> tuple[Correction, ...]:
    """Return the parts of a composition. Any other correction is its own single part."""
    return correction.parts if isinstance(correction, Composition) else (correction,)


Rule = TypeVar("Rule", bound=Callable[..., tuple[Matrix, Any]])


def by_granularity(coefficients: Rule) -> Rule:
    """Decorate the method `coefficients` of a `Correction` to implement the option `granularity`.

    A correction replaces a stale update by a linear combination of known vectors. With `granularity="tensor"`, the
    decorated method computes separate coefficients for each named tensor of the model.
    """

    @wraps(coefficients)
    def each(self: Any, gram: Gram, state: Any = None) -> tuple[Matrix, Any]:
        if self.granularity == "model":
            return coefficients(self, gram, state)
        # The decorated corrections are stateless, so only their matrices are stacked.
        return np.stack([coefficients(self, part, state)[0] for part in gram]), state

    return each  # type: ignore[return-value]  # of the same signature
