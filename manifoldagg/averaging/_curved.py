"""The descent by which a subspace of a curved space is fitted: L-BFGS, over tangents at one point and places."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from manifoldagg.averaging._descent import SMOOTHING, Descent, descend
from manifoldagg.curves import Embedding, Simplex
from manifoldagg.curves.bernstein import basis
from manifoldagg.errors import DivergenceError, ManifoldAggError
from manifoldagg.manifolds import distance

BLOCK = 10
"""Iterations between two looks at how far the sum fell."""
ROUNDS = 12
"""Of moving targets: each leaves a part of the error that falls with the square of the points' spread."""
ROUNDING = 1e-12
"""Of the points' spread: a mean distance that is rounding."""
BORDER = 1e-4
"""How far inside of its domain a place begins: at a border it would have no slope."""


def descend_curved(
    embedding: Embedding,
    points: Tensor,
    center: Tensor,
    frame: Tensor,
    seen: Tensor,
    power: int,
    tolerance: float,
    max_steps: int,
) -> Descent:
    r"""$\min_{\varphi, x} \sum_j d(y_j, \iota_\varphi(x_j))^p$ on a curved space, from what its tangent space gives.

    L-BFGS over $\varphi_i = \exp_c u_i$ and places without borders, $t = \sin^2 z$ and $x_i = z_i^2 / |z|^2$: first
    on the sum of squares, then, for p = 1, on that of $\sqrt{d^2 + \delta^2}$, $\delta$ 1e-9 of the points' spread.

    Args:
        embedding: a Bézier curve or a simplex, on the space of the points.
        points: (m, *shape) in float64.
        center: $c$ (*shape).
        frame: orthonormal tangents there (k, *shape) that span the logs of the points.
        seen: the logs in that frame (m, k).
        power: p.
        tolerance: on the relative fall of the sum in ten iterations.
        max_steps: of each sum.
    """
    space, unit = embedding.space, math.sqrt(float(seen.square().sum(-1).mean()))
    begin = _bent(embedding, points, center, frame, seen, tolerance, max_steps)
    if float(begin.distances.mean()) <= ROUNDING * unit:
        return begin
    start = space.log(center.expand_as(begin.phi), begin.phi)
    u = (start / unit).detach().clone().requires_grad_()
    z = _opened(embedding, begin.places).detach().clone().requires_grad_()
    found, steps, converged = None, 0, False
    for p in (2, 1)[: 3 - power]:
        walk = torch.optim.LBFGS(
            [u, z], max_iter=BLOCK, tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe"
        )
        least, taken, converged = math.inf, 0, False

        def closure(p: int = p, walk: torch.optim.Optimizer = walk) -> Tensor:
            nonlocal least, found
            walk.zero_grad()
            phi = space.exp(center.expand_as(u), space.project_tangent(center.expand_as(u), unit * u))
            x = _closed(embedding, z)
            image = embedding(phi, x)
            gap = space.log(image, points)
            squares = space.inner(image, gap, gap).clamp(min=0) / unit**2
            value = squares.sum() if p == 2 else (squares + SMOOTHING[-1] ** 2).sqrt().sum()
            if not bool(value.isfinite()):
                raise ManifoldAggError("the sum of distances is not finite")
            value.backward()
            if value.item() < least:
                least, found = value.item(), (phi.detach(), x.detach(), unit * squares.detach().sqrt())
            return value

        while taken < max_steps and not converged:
            before = least
            try:
                with torch.enable_grad():
                    walk.step(closure)
            except ManifoldAggError:
                break
            taken += BLOCK
            converged = math.isfinite(before) and before - least <= tolerance * before
        steps += taken
    if found is None or found[2].pow(power).sum() > begin.distances.pow(power).sum():
        return begin
    return Descent(*found, steps + begin.steps, converged)


@torch.no_grad()
def _bent(
    embedding: Embedding, points: Tensor, center: Tensor, frame: Tensor, seen: Tensor, tolerance: float, max_steps: int
) -> Descent:
    """The least squares of the tangent space, its targets moved by what the space bends the embedding: the best of
    a few rounds. Where the points lie on an embedding this finds it.
    """
    space, targets, best, steps = embedding.space, seen, None, 0
    for _ in range(ROUNDS):
        inside = descend(embedding, targets, None, 2, tolerance, max_steps)
        steps += inside.steps
        tangents = torch.einsum("ik,k...->i...", inside.phi, frame)
        phi = space.exp(center.expand_as(tangents), tangents)
        try:
            image = embedding(phi, inside.places)
        except ManifoldAggError:
            break
        distances = distance(space, image, points)
        if not bool(distances.isfinite().all()):
            break
        if best is None or distances.square().sum() < best.distances.square().sum():
            best = Descent(phi, inside.places, distances, steps, False)
        if float(best.distances.mean()) <= ROUNDING * float(seen.norm(dim=-1).mean()):
            return replace(best, converged=True)
        logs = space.log(center.expand_as(image), image)
        drawn = torch.stack([space.inner(center.expand_as(logs), logs, axis.expand_as(logs)) for axis in frame], -1)
        shares = inside.places if isinstance(embedding, Simplex) else basis(embedding.size - 1, inside.places)
        targets = seen + shares @ inside.phi - drawn
    if best is None:
        raise DivergenceError("points: they lie too far apart for a subspace to be found")
    return replace(best, steps=steps)


def _closed(embedding: Embedding, z: Tensor) -> Tensor:
    """Places from numbers without borders."""
    if isinstance(embedding, Simplex):
        return z.square() / z.square().sum(-1, keepdim=True)
    return z.sin().square()


def _opened(embedding: Embedding, places: Tensor) -> Tensor:
    """The numbers of places a little inside of the domain."""
    if isinstance(embedding, Simplex):
        return places.clamp(min=BORDER).sqrt()
    return places.clamp(BORDER, 1 - BORDER).sqrt().asin()
