"""Routing of tasks to clients: closed queueing networks, convergence bounds, and routings that minimise the bounds.

The package represents clients by their service rates and does not use models. It depends only on NumPy and SciPy.
"""

from manifoldagg.routing.adaptive import AdaptiveRouting
from manifoldagg.routing.bounds import Bound, TimeBound, UpdateBound
from manifoldagg.routing.network import ClosedNetwork
from manifoldagg.routing.optimise import Routing, balanced, optimise_concurrency, optimise_routing, uniform
from manifoldagg.routing.simulate import Simulation

__all__ = [
    "AdaptiveRouting",
    "Bound",
    "ClosedNetwork",
    "Routing",
    "Simulation",
    "TimeBound",
    "UpdateBound",
    "balanced",
    "optimise_concurrency",
    "optimise_routing",
    "uniform",
]
