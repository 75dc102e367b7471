"""Piecewise Bézier curves with shared joints."""

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
    r"""A curve of m Bézier pieces of one degree n, each over an m-th of [0, 1], with shared joints.

    $\varphi$ has $mn + 1$ points, of which every n-th is a joint: the curve is continuous whatever they are. Its
    velocity is continuous where the neighbours of a joint mirror each other, which `smooth` makes them do; at a joint,
    derivatives are those of the piece that begins there.

    Args:
        space: flat, or with exp and log.
        degree: n, of each piece.
        pieces: m.

    Raises:
        ArgumentError: if `degree` or `pieces` is not a positive integer, or `space` is curved and has no exp or log.

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
        r"""Return control points of a curve with continuous velocity: a joint's successor mirrors its predecessor.

        From the start on, the control point after each joint $J$ becomes $\exp_J(-\log_J \varphi_{-})$, the
        reflection of the one before it. The first piece, the joints and all other control points stay. Of degree 2 each
        piece then follows from the one before it, so that a reflection is handed on to the end.

        Args:
            phi: control points (size, *space.shape).

        Returns:
            A tensor of the same shape; `smooth` does nothing more to it.

        Raises:
            ArgumentError: if the degree is 1 and there is a joint: a polygon has corners.

        Example:
            >>> from manifoldagg.manifolds import Flat
            >>> Piecewise(Flat(1)).smooth(torch.tensor([[0.0], [1.0], [4.0], [0.0], [9.0]])).flatten().tolist()
            [0.0, 1.0, 4.0, 7.0, 9.0]
        """
        self._check_phi(phi)
        if self.degree == 1 and self.pieces > 1:
            raise ArgumentError("degree: expected 2 or more for smooth joints, got 1")
        points = list(phi)
        for joint in range(self.degree, self.size - 1, self.degree):
            points[joint + 1] = geodesic(self.space, points[joint], points[joint - 1], -1.0)
        return torch.stack(points)

    def piece(self, phi: Phi, k: int) -> Path[Bezier]:
        """Return the k-th piece, from 0 on, as a Bézier curve over [0, 1].

        Raises:
            ArgumentError: if there is no such piece.
        """
        self._check_phi(phi)
        if check_count("k", k, at_least=0) >= self.pieces:
            raise ArgumentError(f"k: expected one of {self.pieces} pieces, from 0 on; got {k}")
        return Bezier(self.space, self.degree).at(phi[k * self.degree : (k + 1) * self.degree + 1])

    def nearest(self, phi: Phi, point: Points) -> tuple[Tensor, Tensor]:
        """Return the parameter of the nearest point over all pieces, and the distance, as `Bezier.nearest`."""
        found = [self.piece(phi, k).nearest(point) for k in range(self.pieces)]
        places = torch.stack([(k + s) / self.pieces for k, (s, _) in enumerate(found)])
        distances, best = torch.stack([d for _, d in found]).min(0)
        return places.gather(0, best.unsqueeze(0)).squeeze(0), distances
