"""Minimisation of a bound over the routing or over the concurrency."""

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
"""The relative rounding error of a bound."""
MAX_EXPONENT = math.log(sys.float_info.max)
"""The objective if the bound overflows or underflows: the largest logarithm of a float."""

Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]


@dataclass(frozen=True, eq=False, repr=False)
class Routing(ShortRepr):
    r"""The routing that minimises a bound, with the accuracy of the minimisation.

    Args:
        p: the shares, (n,), positive, with sum 1.
        value: the bound at p.
        gradient_norm: the norm of the dimensionless gradient along the simplex,
            $\| \partial \log bound / \partial \theta \|$ at $p = softmax(\theta)$. The norm is 0 only at stationary
            points, because the bounds are infinite on the boundary of the simplex.
        start: the name of the start that led to p. The name `"given 2"` refers to the third element of
            `starts`.
        converged: whether `gradient_norm` is at most the requested tolerance.
    """

    p: np.ndarray
    value: float
    gradient_norm: float
    start: str
    converged: bool


def uniform(clients: int | np.ndarray | Sequence[float]) -> np.ndarray:
    """Return equal shares.

    Args:
        clients: the number of clients, or their rates.

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
    r"""Return shares that are proportional to the service rates of the clients, $p_i = \mu_i / \sum_j \mu_j$.

    These shares maximise the throughput, the total number of tasks that the clients complete per unit of time.

    Args:
        rates: the service rates $\mu_i$ of the clients, (n,).

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
    """Minimise a convergence bound over the routing, which gives each client a share of the tasks.

    The bounds are not convex. The function therefore starts from several routings, and returns the lowest local minimum
    that it finds. A lower minimum may exist.

    From each start, the function minimises log bound(softmax(θ)) over logits θ in two stages:

    1. SciPy's L-BFGS-B reduces the gradient norm to about 1e-8. Rounding errors in its line search prevent smaller
       norms.
    2. SciPy's Newton-Krylov method reduces the norm further.

    Args:
        bound: an `UpdateBound` or a `TimeBound`.
        starts: routings, or names of routings. `"uniform"` and `"balanced"` are the functions of this module.
            `"slowest"`, `"middle"` and `"fastest"` send half of the tasks to the client with the lowest, median or
            highest rate. The other half is shared equally by all clients.
        tolerance: the tolerance for `gradient_norm`.
        steps: the maximum number of L-BFGS steps from each start. A step costs O(nm).

    Returns:
        The best routing, with its gradient norm and its start. Clients with equal rates may get different shares. The
        reason is that sending most tasks to one client can be better than sending a few tasks to each of several
        clients.

    Raises:
        ArgumentError: if a start is neither a known name nor a routing with positive shares.
        DivergenceError: if the bound overflows or underflows at every start. If this happens only at some starts, these
            starts are skipped.

    Source: Queue §3.1, §4.1. The paper uses Adam, from the uniform routing only.

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
    """Find the number of concurrent tasks that minimises the convergence bound, for given task shares of the clients.

    The function evaluates the bound for 1, 2, 3, ... tasks. It stops when the bounds for all larger numbers are certain
    to be larger than the best bound so far. The result is therefore the minimum over all numbers of tasks, unless
    `max_concurrency` ends the search earlier. For a single client, the best number is 1.

    Args:
        bound: the bound. Its attribute `concurrency` is ignored.
        routing: p, (n,); `None` for the uniform routing.
        max_concurrency: the largest concurrency to evaluate.

    Raises:
        ArgumentError: if `routing` is invalid, or if `max_concurrency` is `None` and the search has not stopped after
            100,000 tasks. This happens if the noise is 0, because more tasks then never increase the bound.

    Source: Queue §4.2, figure 2. Cost: O(n) for each evaluated concurrency.

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
        # No larger number of tasks has a bound below `least`. If the throughput has reached its limit, `least` and
        # `value` are equal up to rounding, so the comparison has a tolerance.
        if least > best * (1 + ROUNDING) or bound.clients == 1:
            return argument
    if max_concurrency is None:
        raise ArgumentError(
            f"max_concurrency: expected an integer, got None; the bound may still decrease after {limit} tasks"
        )
    return argument


def _descend(objective: Objective, theta: np.ndarray, tolerance: float, steps: int) -> np.ndarray:
    """Minimise the objective, starting from the logits `theta`, and return the final logits.

    The minimisation ends when the gradient norm is at most `tolerance` or no longer decreases, or after the given
    number of steps.
    """
    from scipy.optimize import NoConvergence, minimize, newton_krylov

    if steps == 0:
        return theta  # SciPy would execute one step
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
    # Newton's method converges to any stationary point, including a nearby saddle point.
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
        raise ArgumentError("starts: expected at least one start, got an empty sequence")
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
