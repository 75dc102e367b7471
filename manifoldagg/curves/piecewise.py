"""Curves that consist of several Bézier pieces, joined end to end.

A curve with many pieces can follow a long path more closely than a single Bézier curve of the same degree.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldagg._validation import check_count
from manifoldagg.curves.bezier import Bezier, BezierSpline, check_space
from manifoldagg.curves.path import Path, Phi, Points
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Manifold
from manifoldagg.manifolds.formulas import geodesic

__all__ = ["Piecewise"]


@dataclass(frozen=True)
class Piecewise(BezierSpline):
    """A curve of m Bézier pieces of degree n, joined end to end.

    The curve has $mn + 1$ control points. Each piece covers a parameter interval of length 1/m. Neighbouring pieces
    share a control point, which is called a joint, so the curve is continuous. The derivatives at a joint are those of
    the piece that starts there.

    The velocity is also continuous if, at each joint, the control points before and after the joint are reflections of
    each other in the joint. The method `smooth` returns such control points.

    Args:
        space: a flat space, or a space with exp and log.
        degree: n, the degree of each piece.
        pieces: m, the number of pieces.

    Raises:
        ArgumentError: if `degree` or `pieces` is not a positive integer, or `space` is curved and lacks exp or log.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> curve = Piecewise(Flat(1), degree=1, pieces=2)
        >>> curve(torch.tensor([[0.0], [4.0], [5.0]]), torch.tensor([0.25, 0.5, 1.0])).flatten()
        tensor([2., 4., 5.])
    """

    space: Manifold
    degree: int = 2
    pieces: int = 2

    def __post_init__(self) -> None:
        check_count("degree", self.degree)
        check_count("pieces", self.pieces)
        check_space(self.space)

    def smooth(self, phi: Phi) -> Points:
        r"""Return control points for which the velocity of the curve is continuous.

        A joint is a control point that two pieces of the curve share. At each joint $J$, the method replaces the
        control point after the joint by the reflection $\exp_J(-\log_J \varphi_{-})$ of the control point $\varphi_{-}$
        before it. All other control points remain unchanged.

        The method processes the joints from the start to the end of the curve. With degree 2, the control point after
        one joint is the control point before the next joint. Each reflection then depends on the previous one.

        Args:
            phi: control points (size, *space.shape).

        Returns:
            A tensor of the same shape. Applying the method twice gives the same result.

        Raises:
            ArgumentError: if the degree is 1 and there is a joint, because a polygon has corners.

        Example:
            >>> from manifoldagg.manifolds import Flat
            >>> Piecewise(Flat(1)).smooth(torch.tensor([[0.0], [1.0], [4.0], [0.0], [9.0]])).flatten().tolist()
            [0.0, 1.0, 4.0, 7.0, 9.0]
        """
        self._check_phi(phi)
        if self.degree == 1 and self.pieces > 1:
            raise ArgumentError("degree: expected 2 or more for smooth joints, got 1")
        points = list(phi)
        # The geodesic from the joint to the point before it, extended to -1, gives the reflection in the joint.
        for joint in range(self.degree, self.size - 1, self.degree):
            points[joint + 1] = geodesic(self.space, points[joint], points[joint - 1], -1.0)
        return torch.stack(points)

    def piece(self, phi: Phi, k: int) -> Path[Bezier]:
        """Return piece k, counted from 0, as a Bézier curve over [0, 1].

        Raises:
            ArgumentError: if the index is invalid.
        """
        self._check_phi(phi)
        if check_count("k", k, at_least=0) >= self.pieces:
            raise ArgumentError(f"k: expected an index from 0 to {self.pieces - 1}, got {k}")
        return Bezier(self.space, self.degree).at(phi[k * self.degree : (k + 1) * self.degree + 1])

    def nearest(self, phi: Phi, point: Points) -> tuple[Tensor, Tensor]:
        """Find the nearest point of the curve for each given point.

        The method returns the parameters of the nearest points, and their distances from the given points. The
        arguments, shapes and errors are the same as in [`Bezier.nearest`][manifoldagg.curves.Bezier.nearest].
        """
        nearest = [self.piece(phi, k).nearest(point) for k in range(self.pieces)]
        # Piece k covers the parameters from k/m to (k+1)/m of the whole curve.
        parameters = torch.stack([(k + s) / self.pieces for k, (s, _) in enumerate(nearest)])
        distances, best = torch.stack([d for _, d in nearest]).min(0)
        return parameters.gather(0, best.unsqueeze(0)).squeeze(0), distances
