"""Embeddings: small spaces drawn into a manifold, and how they are learned."""

from manifoldagg.curves.bezier import Bezier
from manifoldagg.curves.distance import parameter_at_distance
from manifoldagg.curves.fit import Fit, fit
from manifoldagg.curves.plane import Plane, plane

__all__ = ["Bezier", "Fit", "Plane", "fit", "parameter_at_distance", "plane"]
