"""Routing of tasks to clients, which determines how often an asynchronous server selects each client.

The package models a server and its clients as a closed queueing network, in which each client has a service rate. It
computes delays and convergence bounds for a given routing, and finds the routing with the smallest bound. The package
does not use any models, so it depends only on NumPy and SciPy.
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
