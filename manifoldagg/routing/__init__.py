"""Task routing: exact closed queueing networks, bounds on learning, and routings that minimise the bounds.

NumPy and SciPy only: it knows clients by their rates, and no model.
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
