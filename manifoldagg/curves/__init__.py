"""Embeddings: small spaces drawn into a manifold, and how they are learned."""

from manifoldagg.curves.bezier import Bezier
from manifoldagg.curves.buffers import refresh_buffers
from manifoldagg.curves.complexes import Complex
from manifoldagg.curves.diagnostics import Barrier, Curvature, barrier, chord_ratio, curvature
from manifoldagg.curves.distance import parameter_at_distance
from manifoldagg.curves.embedding import Embedding
from manifoldagg.curves.fit import Fit, fit
from manifoldagg.curves.path import Curve, Path
from manifoldagg.curves.piecewise import Piecewise
from manifoldagg.curves.plane import Plane, plane
from manifoldagg.curves.sharpness import ASAM, SAM, Sharpness, sharp_gradient
from manifoldagg.curves.simplex import Simplex
from manifoldagg.curves.tunnel import Tunnel

__all__ = [
    "ASAM",
    "SAM",
    "Barrier",
    "Bezier",
    "Complex",
    "Curvature",
    "Curve",
    "Embedding",
    "Fit",
    "Path",
    "Piecewise",
    "Plane",
    "Sharpness",
    "Simplex",
    "Tunnel",
    "barrier",
    "chord_ratio",
    "curvature",
    "fit",
    "parameter_at_distance",
    "plane",
    "refresh_buffers",
    "sharp_gradient",
]
