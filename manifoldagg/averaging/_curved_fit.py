"""Fit of a curve or a simplex to models on a curved manifold.

The fit uses L-BFGS to minimise the sum of the distances from the models to the curve or simplex, or the sum of the
squared distances.
"""

import math
from dataclasses import replace

import torch
from jaxtyping import Float64
from torch import Tensor

from manifoldagg.averaging._flat_fit import SMOOTHING, FitOptions, FitResult, fit_flat
from manifoldagg.curves import Embedding, Simplex
from manifoldagg.curves.bernstein import basis
from manifoldagg.curves.plane import View
from manifoldagg.errors import DivergenceError, ManifoldAggError
from manifoldagg.manifolds import formulas

__all__ = ["fit_curved"]

ITERATIONS_PER_CHECK = 10
"""The number of iterations between two convergence checks."""
MAX_TARGET_UPDATES = 12
"""The maximum number of fits in the tangent space.

Each fit multiplies the error by a factor that is proportional to the squared spread of the points, so few are enough.
"""
RELATIVE_ROUNDING = 1e-12
"""A mean distance below this fraction of the spread of the points counts as a rounding error."""
BOUNDARY_MARGIN = 1e-4
"""The distance of starting coordinates from the boundary of the domain, where the gradient would be zero."""


def fit_curved(
    embedding: Embedding, points: Tensor, view: View, projected: Float64[Tensor, "m k"], options: FitOptions
) -> FitResult:
    r"""Fit a curve or a simplex to points $y_j$ of a curved space.

    The function minimises $\sum_j d(y_j, \iota_\varphi(x_j))^p$ over the control points $\varphi$ and the coordinates
    $x_j$ with L-BFGS, starting from a fit in the tangent space. L-BFGS needs variables without constraints. The control
    points are therefore written as $\varphi_i = \exp_c u_i$, with tangents $u_i$ at the mean $c$ of the points. The
    coordinates are functions of unconstrained numbers $z$: $t = \sin^2 z$ for a curve, and $x_i = z_i^2 / |z|^2$ for a
    simplex.

    L-BFGS first minimises the sum of squares. For p = 1, it then minimises the sum of $\sqrt{d^2 + \delta^2}$, which is
    smooth. Here $\delta$ is 1e-9 of the spread of the points.

    Args:
        embedding: a Bézier curve or a simplex, on the space of the points.
        points: (m, *shape) in float64.
        view: the tangent space at the mean of the points, with axes that span the logarithms of the points.
        projected: the coordinates of the points in this tangent space (m, k).
        options: the power p, the relative tolerance over ten iterations, and the largest number of steps for each sum.
    """
    space = embedding.space
    # In units of the root mean square distance from the mean, `u` and `z` have similar sizes.
    unit = math.sqrt(float(projected.square().sum(-1).mean()))
    initial = _tangent_space_fit(embedding, points, view, projected, options)
    if float(initial.distances.mean()) <= RELATIVE_ROUNDING * unit:
        return initial
    center = view.center.expand_as(initial.phi)
    u = (space._log(center, initial.phi) / unit).detach().clone().requires_grad_()
    z = _from_domain(embedding, initial.coordinates).detach().clone().requires_grad_()
    best = None
    steps = 0
    # For the power 2, only the sum of squares is minimised. For the power 1, it gives the start for the sum of
    # distances.
    for p in (2, 1)[: 3 - options.power]:
        # The tolerances of L-BFGS are absolute. They are 0, because the relative tolerance is checked outside.
        optimizer = torch.optim.LBFGS(
            [u, z], max_iter=ITERATIONS_PER_CHECK, tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe"
        )
        lowest = math.inf
        iterations = 0
        converged = False

        # The default arguments bind the values of this pass of the loop.
        def closure(p: int = p, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            nonlocal lowest, best
            optimizer.zero_grad()
            # A step of L-BFGS in coordinates can leave the tangent space, so the vectors are projected back.
            phi = space._exp(center, space._project_tangent(center, unit * u))
            x = _to_domain(embedding, z)
            image = embedding(phi, x)
            gap = space._log(image, points)
            # Rounding can make a squared length negative in coordinates with an indefinite inner product.
            squares = space._inner(image, gap, gap).clamp(min=0) / unit**2
            value = squares.sum() if p == 2 else (squares + SMOOTHING[-1] ** 2).sqrt().sum()
            if not bool(value.isfinite()):
                # Only an exception can leave the line search. `best` retains the best result so far.
                raise ManifoldAggError("the sum of distances is not finite")
            value.backward()
            # The line search can end at a point that is worse than one of its trial points.
            if value.item() < lowest:
                lowest = value.item()
                best = (phi.detach(), x.detach(), unit * squares.detach().sqrt())
            return value

        while iterations < options.max_steps and not converged:
            before = lowest
            try:
                with torch.enable_grad():
                    optimizer.step(closure)
            except ManifoldAggError:
                break
            iterations += ITERATIONS_PER_CHECK
            converged = math.isfinite(before) and before - lowest <= options.tolerance * before
        steps += iterations
    if best is None or best[2].pow(options.power).sum() > initial.distances.pow(options.power).sum():
        return initial
    return FitResult(*best, steps + initial.steps, converged)


@torch.no_grad()
def _tangent_space_fit(
    embedding: Embedding, points: Tensor, view: View, projected: Tensor, options: FitOptions
) -> FitResult:
    """Fit a curve or a simplex approximately, by least squares in the tangent space at the mean of the points.

    The caller uses the result as the initial guess of a fit on the curved manifold. The fit in the tangent space is
    inexact, because the exponential map bends the curve or simplex. The function therefore iterates: it shifts the
    target points to compensate for the bending, and fits again. It returns the best fit of all iterations. If the
    points are exactly on a curve or simplex, the iteration converges to this curve or simplex.
    """
    space = embedding.space
    targets = projected
    best = None
    steps = 0
    for _ in range(MAX_TARGET_UPDATES):
        inside = fit_flat(embedding, targets, None, replace(options, power=2))
        steps += inside.steps
        tangents = torch.einsum("ik,k...->i...", inside.phi, view.axes)
        phi = space._exp(view.center.expand_as(tangents), tangents)
        try:
            image = embedding(phi, inside.coordinates)
        except ManifoldAggError:
            break
        distances = formulas.distance(space, image, points)
        if not bool(distances.isfinite().all()):
            break
        if best is None or distances.square().sum() < best.distances.square().sum():
            best = FitResult(phi, inside.coordinates, distances, steps, False)
        if float(best.distances.mean()) <= RELATIVE_ROUNDING * float(projected.norm(dim=-1).mean()):
            return replace(best, converged=True)
        shares = inside.coordinates if isinstance(embedding, Simplex) else basis(embedding.size - 1, inside.coordinates)
        targets = projected + shares @ inside.phi - view(image).to(projected.device)
    if best is None:
        raise DivergenceError("points: expected points closer to one another, got no subspace for their spread")
    return replace(best, steps=steps)


def _to_domain(embedding: Embedding, z: Tensor) -> Tensor:
    """Map unconstrained numbers to coordinates in the domain of the embedding."""
    if isinstance(embedding, Simplex):
        return z.square() / z.square().sum(-1, keepdim=True)
    return z.sin().square()


def _from_domain(embedding: Embedding, coordinates: Tensor) -> Tensor:
    """Map coordinates on a curve or a simplex to unconstrained numbers (the inverse of `_to_domain`)."""
    # On the boundary of the domain, the derivative of `_to_domain` is zero, so a fit could not change the coordinates.
    # They are therefore moved into the interior.
    if isinstance(embedding, Simplex):
        return coordinates.clamp(min=BOUNDARY_MARGIN).sqrt()
    return coordinates.clamp(BOUNDARY_MARGIN, 1 - BOUNDARY_MARGIN).sqrt().asin()
