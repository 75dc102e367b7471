"""Subspace fit on a curved space: L-BFGS over tangents at one point and curve parameters."""

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
"""Iterations between two looks at how far the sum fell."""
MAX_TARGET_UPDATES = 12
"""Of moving targets: each leaves a part of the error that falls with the square of the points' spread."""
RELATIVE_ROUNDING = 1e-12
"""Of the points' spread: a mean distance that is rounding."""
BOUNDARY_MARGIN = 1e-4
"""How far inside of its domain a place begins: at a border it would have no slope."""


def fit_curved(
    embedding: Embedding, points: Tensor, view: View, projected: Float64[Tensor, "m k"], options: FitOptions
) -> FitResult:
    r"""Minimise $\sum_j d(y_j, \iota_\varphi(x_j))^p$ on a curved space, starting in its tangent space.

    L-BFGS over $\varphi_i = \exp_c u_i$ and places without borders, $t = \sin^2 z$ and $x_i = z_i^2 / |z|^2$: first
    on the sum of squares, then, for p = 1, on that of $\sqrt{d^2 + \delta^2}$, $\delta$ 1e-9 of the points' spread.

    Args:
        embedding: a Bézier curve or a simplex, on the space of the points.
        points: (m, *shape) in float64.
        view: from their mean, along tangents that span their logs there.
        projected: the points in it (m, k).
        options: p; the fall in ten iterations; the steps of each sum.
    """
    space = embedding.space
    unit = math.sqrt(float(projected.square().sum(-1).mean()))
    begin = _tangent_space_fit(embedding, points, view, projected, options)
    if float(begin.distances.mean()) <= RELATIVE_ROUNDING * unit:
        return begin
    center = view.center.expand_as(begin.phi)
    u = (space._log(center, begin.phi) / unit).detach().clone().requires_grad_()
    z = _from_domain(embedding, begin.coordinates).detach().clone().requires_grad_()
    found = None
    steps = 0
    for p in (2, 1)[: 3 - options.power]:
        walk = torch.optim.LBFGS(
            [u, z], max_iter=ITERATIONS_PER_CHECK, tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe"
        )
        least = math.inf
        taken = 0
        converged = False

        def closure(p: int = p, walk: torch.optim.Optimizer = walk) -> Tensor:
            nonlocal least, found
            walk.zero_grad()
            phi = space._exp(center, space._project_tangent(center, unit * u))
            x = _to_domain(embedding, z)
            image = embedding(phi, x)
            gap = space._log(image, points)
            squares = space._inner(image, gap, gap).clamp(min=0) / unit**2
            value = squares.sum() if p == 2 else (squares + SMOOTHING[-1] ** 2).sqrt().sum()
            if not bool(value.isfinite()):
                raise ManifoldAggError("the sum of distances is not finite")
            value.backward()
            if value.item() < least:
                least = value.item()
                found = (phi.detach(), x.detach(), unit * squares.detach().sqrt())
            return value

        while taken < options.max_steps and not converged:
            before = least
            try:
                with torch.enable_grad():
                    walk.step(closure)
            except ManifoldAggError:
                break
            taken += ITERATIONS_PER_CHECK
            converged = math.isfinite(before) and before - least <= options.tolerance * before
        steps += taken
    if found is None or found[2].pow(options.power).sum() > begin.distances.pow(options.power).sum():
        return begin
    return FitResult(*found, steps + begin.steps, converged)


@torch.no_grad()
def _tangent_space_fit(
    embedding: Embedding, points: Tensor, view: View, projected: Tensor, options: FitOptions
) -> FitResult:
    """The least squares of the tangent space, its targets moved by what the space bends the embedding: the best of
    a few iterations. Where the points lie on an embedding this finds it.
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
        raise DivergenceError("points: they lie too far apart for a subspace to be found")
    return replace(best, steps=steps)


def _to_domain(embedding: Embedding, z: Tensor) -> Tensor:
    """Places from numbers without borders."""
    if isinstance(embedding, Simplex):
        return z.square() / z.square().sum(-1, keepdim=True)
    return z.sin().square()


def _from_domain(embedding: Embedding, coordinates: Tensor) -> Tensor:
    """The numbers of places a little inside of the domain."""
    if isinstance(embedding, Simplex):
        return coordinates.clamp(min=BOUNDARY_MARGIN).sqrt()
    return coordinates.clamp(BOUNDARY_MARGIN, 1 - BOUNDARY_MARGIN).sqrt().asin()
