"""Optimisation of the routing and of the concurrency: minimisers of the bounds, with a certificate."""

import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from manifoldagg._validation import check_choice, check_count, check_number
from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.routing._arguments import ShortRepr, rate_vector, routing_vector
from manifoldagg.routing.bounds import Bound, softmax

__all__ = ["Routing", "balanced", "optimise_concurrency", "optimise_routing", "uniform"]

STARTS = ("uniform", "balanced", "slowest", "middle", "fastest")
MAX_CONCURRENCY = 100_000
ROUNDING = 1e-12
"""Of a bound, relatively."""
MAX_EXPONENT = math.log(sys.float_info.max)
"""Where the bound is no positive float: as high as the logarithm of any."""

Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]


@dataclass(frozen=True, eq=False, repr=False)
class Routing(ShortRepr):
    r"""The result of a minimisation of a bound over routings.

    Args:
        p: the shares, (n,), positive, 1 in sum.
        value: the bound at p.
        gradient_norm: the certificate, $\| \partial \log bound / \partial \theta \|$ at $p = softmax(\theta)$: the
            gradient along the simplex, without units. It is 0 at stationary points only, as bounds are infinite on the
            boundary.
        start: the name of the start it was reached from; "given 2" is the third of the vectors handed in.
        converged: whether the certificate is at most the tolerance asked for.
    """

    p: np.ndarray
    value: float
    gradient_norm: float
    start: str
    converged: bool


def uniform(clients: int | np.ndarray | Sequence[float]) -> np.ndarray:
    """Return equal shares.

    Args:
        clients: how many, or anything with one entry for each.

    Example:
        >>> uniform(4).tolist(), uniform([1.0, 3.0]).tolist()
        ([0.25, 0.25, 0.25, 0.25], [0.5, 0.5])
    """
    try:
        n = operator.index(clients)  # type: ignore[arg-type]
    except TypeError:
        n = len(rate_vector(clients))  # type: ignore[arg-type]
    return np.full(check_count("clients", n), 1 / n)


def balanced(rates: np.ndarray | Sequence[float]) -> np.ndarray:
    r"""Return shares proportional to the rates, $p_i = \mu_i / \sum_j \mu_j$, which maximise the throughput.

    Example:
        >>> balanced([1.0, 3.0]).tolist()
        [0.25, 0.75]
    """
    mu = rate_vector(rates)
    mu = mu / mu.max()
    shares: np.ndarray = mu / mu.sum()
    return shares


def optimise_routing(
    bound: Bound,
    *,
    starts: Sequence[str | np.ndarray | Sequence[float]] = STARTS,
    tolerance: float = 1e-8,
    steps: int = 500,
) -> Routing:
    r"""Minimise $\min_{p \in \Delta} bound(p)$ from several starts, and return the lowest local minimum found.

    The bounds are not convex: other minima may be lower. Identical clients may end with different shares, as a single
    client with most of the tasks can be better than several with some.

    SciPy's L-BFGS-B minimises log bound(softmax(θ)). Its line search compares values, whose digits tell points apart
    down to gradients of about 1e-8 only: what is left of the gradient then goes by SciPy's Newton-Krylov method.

    Args:
        bound: an `UpdateBound` or a `TimeBound`.
        starts: routings, or names: "uniform", "balanced"; "slowest", "middle" (of the median rate) and "fastest":
            that client half of the tasks, the others equal shares of the rest.
        tolerance: of the certificate `gradient_norm`.
        steps: of L-BFGS, at most, from each start; each costs O(nm).

    Returns:
        The best one, with its certificate and where it came from.

    Raises:
        ArgumentError: if a start is not a name and no routing with positive shares.
        DivergenceError: if the bound over- or underflows at every start; one where it does is left out.

    Source: Queue §3.1, §4.1, which descends by Adam from the uniform routing only.

    Example:
        >>> from manifoldagg.routing import UpdateBound
        >>> constants = {"rate": 0.1, "smoothness": 1.0, "noise": 1.0, "gap": 1.0}
        >>> bound = UpdateBound([1.0, 1.2], concurrency=20, **constants, num_updates=100)
        >>> best = optimise_routing(bound)
        >>> best.converged, bool(best.p[0] > 0.5), best.value < bound(uniform(2))
        (True, True, True)
    """
    check_number("tolerance", tolerance, above=0)
    check_count("steps", steps, at_least=0)
    named = _named_starts(bound, starts)

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        p = softmax(theta)
        try:
            value, gradient = bound.value_and_gradient(p) if p.all() else (0.0, p)
        except DivergenceError:
            value = 0.0
        if not value > 0:
            return MAX_EXPONENT, np.zeros_like(p)
        return math.log(value), p * (gradient - float(p @ gradient)) / value

    thetas = {name: np.log(p) for name, p in named.items() if p.all()}
    ends = {
        name: _descend(objective, theta, tolerance, steps)
        for name, theta in thetas.items()
        if objective(theta)[0] < MAX_EXPONENT
    }
    if not ends:
        raise DivergenceError(f"the bound is not a positive finite number at any of the starts {', '.join(named)}")
    start = min(ends, key=lambda name: objective(ends[name])[0])
    p = softmax(ends[start])
    p.flags.writeable = False
    norm = float(np.linalg.norm(objective(ends[start])[1]))
    return Routing(p=p, value=bound(p), gradient_norm=norm, start=start, converged=norm <= tolerance)


def optimise_concurrency(
    bound: Bound, routing: np.ndarray | Sequence[float] | None = None, *, max_concurrency: int | None = None
) -> int:
    """Compute m*, the concurrency with the lowest bound at a routing, over *all* numbers of tasks.

    The bound is computed for 1, 2, 3, ... tasks, until a lower bound for all further ones shows that none is better,
    by more than rounding. A single client is best with 1.

    Args:
        bound: its own number of tasks does not matter.
        routing: p, (n,); `None` is the uniform one.
        max_concurrency: look no further than this many tasks.

    Raises:
        ArgumentError: if `routing` does not fit, or if without `max_concurrency` 100,000 tasks do not settle it (with
            noise 0, nothing speaks against more of them).

    Source: Queue §4.2, figure 2. Cost: O(n) for each number of tasks looked at.

    Example:
        >>> from manifoldagg.routing import TimeBound
        >>> bound = TimeBound([1.0, 2.0], concurrency=1, rate=0.1, smoothness=1.0, noise=1.0, gap=1.0)
        >>> optimise_concurrency(bound)
        5
    """
    p = uniform(bound.clients) if routing is None else routing
    limit = MAX_CONCURRENCY if max_concurrency is None else check_count("max_concurrency", max_concurrency)
    best = np.inf
    argument = 0
    for tasks, (value, least) in enumerate(islice(bound.over_concurrency(p), limit), start=1):
        if value < best:
            best = value
            argument = tasks
        # Rounding alone makes them equal where the throughput has come to its limit.
        if least > best * (1 + ROUNDING) or bound.clients == 1:
            return argument
    if max_concurrency is None:
        raise ArgumentError(
            f"max_concurrency: expected a number, as the bound still falls at {limit} tasks or might after it"
        )
    return argument


def _descend(objective: Objective, theta: np.ndarray, tolerance: float, steps: int) -> np.ndarray:
    """Where a descent from `theta` ends: at a gradient of norm `tolerance`, after `steps`, or where rounding begins."""
    from scipy.optimize import NoConvergence, minimize, newton_krylov

    if steps == 0:
        return theta  # SciPy would take one
    options = {"maxiter": steps, "maxcor": 20, "maxls": 40, "ftol": 0.0, "gtol": tolerance / math.sqrt(len(theta))}
    end = minimize(objective, theta, jac=True, method="L-BFGS-B", options=options)
    if end.nit >= steps or np.linalg.norm(end.jac) <= tolerance:
        return np.asarray(end.x)
    try:
        x = newton_krylov(
            lambda theta: objective(theta)[1],
            end.x,
            f_tol=tolerance,
            tol_norm=np.linalg.norm,
            line_search=None,
            maxiter=10,
        )
    except (NoConvergence, ValueError):
        return np.asarray(end.x)
    # It finds stationary points, of which a saddle near by is one.
    return np.asarray(x if objective(x)[0] <= end.fun + ROUNDING else end.x)


def _named_starts(bound: Bound, starts: Sequence[str | np.ndarray | Sequence[float]]) -> dict[str, np.ndarray]:
    rates = np.asarray(bound.rates)
    named = {}
    for i, start in enumerate(starts):
        if isinstance(start, str):
            check_choice("starts", start, STARTS)
            named[start] = _starting_point(start, rates)
        else:
            named[f"given {i}"] = routing_vector(start, len(rates), positive=True)
    if not named:
        raise ArgumentError("starts: expected at least one")
    return named


def _starting_point(name: str, rates: np.ndarray) -> np.ndarray:
    if name == "balanced":
        return balanced(rates)
    p = uniform(len(rates))
    if name != "uniform":
        slowest_first = np.argsort(rates, kind="stable")
        p /= 2
        p[slowest_first[{"slowest": 0, "middle": len(rates) // 2, "fastest": -1}[name]]] += 0.5
    return p
