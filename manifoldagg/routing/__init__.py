"""Routing of tasks to clients in asynchronous federated learning.

A routing determines how often the server selects each client. The package describes the server and its clients as a
closed queueing network, in which each client has a service rate. It computes the delays and the convergence bounds of a
given routing, and finds the routing with the smallest bound.

The computations use NumPy and SciPy. They need only a few constants of the training problem, and not the trained model.
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
