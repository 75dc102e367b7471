"""What a correction is: a small matrix, computed from a Gram matrix, that takes a stale update to the present."""

import abc
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg.corrections.frame import Frame, Matrix, congruence, product
from manifoldagg.errors import ArgumentError, check_finite, check_shape
from manifoldagg.kernels import is_transformed
from manifoldagg.manifolds import Manifold


class Correction(abc.ABC):
    r"""A map $\pi(\Theta^t, \Theta^\tau, v)$ from displacements at the base to tangents at the current model.

    It acts on each control point by itself, so that a curve keeps its start at $\Theta^\tau$.
    """

    @abc.abstractmethod
    def coefficients(self, gram: Matrix, state: Any = None) -> tuple[list[list[Any]], Any]:
        r"""$C$ such that corrected row i is $\sum_j C_{ij} r_j$, and the next state.

        Args:
            gram: the (n + 1, n + 1) inner products of $v_1, \dots, v_n, g$: floats, torch numbers or sympy
                expressions, indexed `gram[i][j]`.
            state: of a correction that keeps one; `None` otherwise.

        Returns:
            (n, n + 1) numbers of the same kind, and the state.
        """

    def __call__(
        self,
        space: Manifold,
        base: Float[Tensor, " P"],
        current: Float[Tensor, " P"],
        displacements: Float[Tensor, "k P"],
    ) -> Float[Tensor, "k P"]:
        r"""The corrected displacements, tangent at `current`.

        Args:
            space: a flat space of shape (P,).
            base: $\Theta^t$, where the update started.
            current: $\Theta^\tau$, where the server is.
            displacements: $v$ from `base`: (k, P), a row for each control point.

        Returns:
            (k, P), a new tensor.

        Raises:
            ArgumentError: if `space` is curved, or a tensor has another shape or is not finite.

        Cost: one pass that reads everything, one that writes the result.
        """
        require_flat(space)
        check_shape("displacements", displacements, None, *space.shape)
        for name, tensor in (("base", base), ("current", current)):
            check_finite(name, check_shape(name, tensor, *space.shape))
        check_finite("displacements", displacements)
        frame = Frame.of_displacements(displacements, base, current)
        inner = frame.gram()
        check_finite("displacements and drift: inner products", inner.detach())
        traced = is_transformed([base, current, displacements])
        lines, _ = self.coefficients(inner if traced else inner.tolist())
        if traced:
            zero = inner.new_zeros(())
            return torch.stack([frame.combine(None, torch.stack([zero + c for c in line])) for line in lines])
        corrected = torch.empty_like(displacements)
        for line, out in zip(lines, corrected, strict=True):
            frame.combine(None, line, out=out)
        return corrected

    def __rshift__(self, after: "Correction") -> "Correction":
        """`a >> b`: first `a`, then `b` on what `a` made of the rows."""
        return Composition(self, after)


@dataclass(frozen=True)
class Composition(Correction):
    r"""One correction after another: $C = C_b(\bar C_a G \bar C_a^\top)\, \bar C_a$; $\bar C_a$ keeps the drift."""

    before: Correction
    after: Correction

    def coefficients(self, gram: Matrix, state: Any = None) -> tuple[list[list[Any]], Any]:
        first, second = state or (None, None)
        lines, first = self.before.coefficients(gram, first)
        zero = 0 * gram[0][0]
        lines = [*lines, [*(zero for _ in gram[:-1]), zero + 1]]
        outer, second = self.after.coefficients(congruence(lines, gram), second)
        state = None if first is None and second is None else (first, second)
        return product(outer, lines), state


def require_flat(space: Manifold) -> None:
    """A space on which displacements are differences of points.

    Raises:
        ArgumentError: if `space` is curved or no manifold.
    """
    if not (isinstance(space, Manifold) and space.flat):
        raise ArgumentError(f"space: expected a flat manifold, got {space}")


def identity(size: int, drift: Any = 0.0) -> list[list[Any]]:
    """(size, size + 1): each row itself, plus `drift` times g."""
    return [[*(float(i == j) for j in range(size)), drift] for i in range(size)]
