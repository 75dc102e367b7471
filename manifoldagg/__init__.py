"""Geometry for asynchronous federated optimisation: correct stale updates, step along learned curves, average.

A stale update is *corrected* into the tangent space of the current model, the model *steps* along the curve
that the update describes, and the models of a run are *averaged*.
"""

from manifoldagg.curves import Bezier, Fit, fit
from manifoldagg.errors import ManifoldAggError
from manifoldagg.federated import Server, aggregate
from manifoldagg.manifolds import ParameterSpace

__version__ = "0.1.0"
__all__ = ["Bezier", "Fit", "ManifoldAggError", "ParameterSpace", "Server", "aggregate", "fit"]
