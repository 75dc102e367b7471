"""Curves, tunnels and simplices of models, and how to fit them.

These objects are called embeddings: low-dimensional subsets of the space of models. An embedding is defined by a few
control points, which are models themselves. The function `fit` trains the control points, so that every model of the
embedding has a low loss.
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
