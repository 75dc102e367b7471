"""Embeddings: low-dimensional subsets of a manifold, such as curves, tunnels and simplices, and how to fit them.

An embedding is defined by control points, which are models. `fit` trains these control points, so that all models of
the embedding have a low loss.
"""

from manifoldagg.curves.batchnorm import refresh_buffers
from manifoldagg.curves.bezier import Bezier
from manifoldagg.curves.complexes import Complex
from manifoldagg.curves.control import Control
from manifoldagg.curves.diagnostics import Barrier, Curvature, barrier, chord_ratio, curvature
from manifoldagg.curves.distance import parameter_at_distance
from manifoldagg.curves.embedding import Embedding
from manifoldagg.curves.fit import Fit, Training, fit
from manifoldagg.curves.path import CurveEmbedding, Path
from manifoldagg.curves.phases import Phases
from manifoldagg.curves.piecewise import Piecewise
from manifoldagg.curves.plane import Plane, plane
from manifoldagg.curves.proximal import ProximalTerm
from manifoldagg.curves.sampling import Sampling
from manifoldagg.curves.sharpness import ASAM, SAM, Sharpness, sharpness_aware_gradient
from manifoldagg.curves.simplex import Simplex
from manifoldagg.curves.tunnel import Tunnel

__all__ = [
    "ASAM",
    "SAM",
    "Barrier",
    "Bezier",
    "Complex",
    "Control",
    "Curvature",
    "CurveEmbedding",
    "Embedding",
    "Fit",
    "Path",
    "Phases",
    "Piecewise",
    "Plane",
    "ProximalTerm",
    "Sampling",
    "Sharpness",
    "Simplex",
    "Training",
    "Tunnel",
    "barrier",
    "chord_ratio",
    "curvature",
    "fit",
    "parameter_at_distance",
    "plane",
    "refresh_buffers",
    "sharpness_aware_gradient",
]
