"""Subspace fit on a flat space: nearest places of the points, and Levenberg-Marquardt descent."""

import itertools
import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from manifoldagg.curves import Bezier, Embedding, Simplex, Tunnel
from manifoldagg.curves.bernstein import basis
from manifoldagg.curves.shape import derivative, max_curvature, min_speed, nearest_normal_disk, span, unit
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat

__all__ = ["FitOptions", "FitResult", "Residuals", "fit_flat", "initial_guesses", "nearest_on_faces"]

Points = Float64[Tensor, "m k"]
Phi = Float64[Tensor, "size k"]
MAX_ENUMERATED_VERTICES = 6
"""Vertices of a simplex whose 2^n - 1 faces are all looked at: faster than walking from face to face."""
NormalEquations = tuple[Float64[Tensor, "n n"], Float64[Tensor, " n"]]
SMOOTHING = (1e-2, 1e-4, 1e-6, 1e-9)
"""Of the size of the points: what a distance is smoothed by while sums of distances are made small."""
MAX_DAMPING = 1e12
"""A damping at which no step is left: rounding alone moves the sum."""
MIN_EXTENT = 1e-6
"""Of a domain: a part that is too small to be all that is kept of it."""
RELATIVE_ROUNDING = 1e-13
"""Of the size of the points: a mean distance that is rounding."""


@dataclass(frozen=True)
class FitOptions:
    """The options of a descent: the power p of the distances, the relative tolerance, and the number of steps."""

    power: int
    tolerance: float
    max_steps: int


@dataclass(frozen=True, eq=False)
class FitResult:
    """The result of a descent: the embedding's points, nearest places, distances, steps, and convergence."""

    phi: Tensor
    coordinates: Tensor
    distances: Float64[Tensor, " m"]
    steps: int
    converged: bool


class Residuals:
    r"""The residuals of points $y_j$ to an embedding $\iota_\varphi$: their nearest places $x_j$, and distances.

    The nearest place moves with $\varphi$. To first order only what is normal to the image changes the distance, so
    that the residual vectors are $e_j = N_j (y_j - \iota_\varphi(x_j))$ with the derivatives $-N_j\, \partial_\varphi
    \iota_\varphi(x_j)$, $N_j$ the projection off the tangents along which $x_j$ is free to move.

    Args:
        embedding: a Bézier curve, a simplex or a tunnel.
        phi: what draws it, in the coordinates of the points.
        points: (m, k).

    Attributes:
        coordinates: (m,) parameters of a curve or of the curve of a tunnel, (m, size) of a simplex.
        distances: (m,).
        is_valid: whether a tunnel neither folds nor stands still.
    """

    coordinates: Tensor
    distances: Float64[Tensor, " m"]
    is_valid: bool = True

    def __init__(self, embedding: Embedding, phi: Phi, points: Points) -> None:
        self.embedding = embedding
        self.phi = phi
        self.points = points
        if isinstance(embedding, Simplex):
            few = embedding.size <= MAX_ENUMERATED_VERTICES
            nearest = nearest_on_faces if few else replace(embedding, space=Flat(phi.shape[1])).nearest
            self.coordinates, self.distances = nearest(phi, points)
            return
        self.radius = embedding.radius if isinstance(embedding, Tunnel) else 0.0
        self.in_span = isinstance(embedding, Tunnel) and embedding.form == "subspace"
        reach = self.radius * (phi[-1] - phi[0]).norm()
        control = phi
        seen = points
        off = points.new_zeros(len(points), 1)
        if self.in_span:
            lines, control = span(phi)
            seen = (points - phi[0]) @ lines.mT
            off = (points - phi[0] - seen @ lines).norm(dim=-1, keepdim=True)
        self.coordinates, _, self.distances = nearest_normal_disk(control, seen, reach, off, fills=not self.in_span)
        if reach > 0:
            self.is_valid = min_speed(control)[1] > 1e-12 * reach and float(reach) * max_curvature(control)[1] < 1

    def normal_equations(self, weights: Float64[Tensor, " m"]) -> NormalEquations:
        r"""Compute the equations $A\, \delta = g$ of $\min_\delta \sum_j w_j |e_j + \partial e_j\, \delta|^2$."""
        if isinstance(self.embedding, Tunnel):
            ends = ((self.coordinates == 0) | (self.coordinates == 1))[:, None]
            slope = torch.func.vmap(torch.func.jacrev(self._tunnel_residual), in_dims=(None, 0, 0, 0))
            rows = slope(self.phi, self.coordinates, self.points, ends).flatten(2)
            gap = torch.func.vmap(self._tunnel_residual, in_dims=(None, 0, 0, 0))(
                self.phi, self.coordinates, self.points, ends
            )
            weighted = weights[:, None, None] * rows
            return torch.einsum("mri,mrj->ij", weighted, rows), -torch.einsum("mri,mr->i", weighted, gap)
        shares, tangents = self._linearize()
        gap = self.points - shares @ self.phi
        gap = gap - torch.einsum("mqk,mq->mk", tangents, torch.einsum("mqk,mk->mq", tangents, gap))
        normal = torch.eye(gap.shape[1]).to(gap) - tangents.mT @ tangents
        pairs = weights[:, None, None] * shares[:, :, None] * shares[:, None, :]
        left = torch.einsum("mij,mab->iajb", pairs, normal).reshape(self.phi.numel(), self.phi.numel())
        return left, torch.einsum("mi,mk->ik", weights[:, None] * shares, gap).flatten()

    def _linearize(self) -> tuple[Tensor, Tensor]:
        """The weights (m, size) of the points of φ at each place, and an orthonormal basis (m, q, k) of the tangents
        along which that place is free to move: rows of zeros where there are fewer.
        """
        if isinstance(self.embedding, Simplex):
            used = self.coordinates > 0
            edges = torch.where(used[..., None], self.phi - (self.coordinates @ self.phi)[:, None], 0.0)
            _, sizes, lines = torch.linalg.svd(edges, full_matrices=False)
            solid = sizes > 1e-10 * sizes[:, :1].clamp(min=torch.finfo(sizes.dtype).tiny)
            return self.coordinates, torch.where(solid[..., None], lines, 0.0)
        moves = (self.coordinates > 0) & (self.coordinates < 1)
        tangents = unit(derivative(self.phi, self.coordinates))
        return basis(len(self.phi) - 1, self.coordinates), torch.where(moves[:, None], tangents, 0.0)[:, None]

    def _tunnel_residual(self, phi: Tensor, t: Tensor, point: Tensor, end: Tensor) -> Tensor:
        """What leads from a tunnel to a point (k,), and at its flat ends how far that is ahead of them (1,)."""
        away = point - derivative(phi, t, 0)
        tangent = unit(derivative(phi, t))
        ahead = (away * tangent).sum(-1, keepdim=True)
        away = away - ahead * tangent
        normal = away
        if self.in_span:
            lines = span(phi)[0]
            normal = lines.mT @ (lines @ away)
        square = normal.square().sum(-1, keepdim=True)
        reach = self.radius * (phi[-1] - phi[0]).norm()
        beyond = square > reach.square()
        share = torch.where(beyond, 1 - reach / torch.where(beyond, square, 1.0).sqrt(), 0.0)
        return torch.cat([away - normal + share * normal, torch.where(end, ahead, 0.0)], -1)


@torch.no_grad()
def fit_flat(embedding: Embedding, points: Points, start: Phi | None, options: FitOptions) -> FitResult:
    r"""Minimise $\min_\varphi \sum_j d(y_j, \iota_\varphi(M))^p$ for points (m, k) of a flat space.

    By steps of Levenberg and Marquardt on residuals whose places are eliminated (Kaufman 1975). Where p = 1 the squares
    are followed by $\sqrt{d^2 + \delta^2}$ with $\delta$ down to 1e-9 of the points' size, each reweighted by its value
    (Weiszfeld): with $\delta = 0$ at once, a subspace that goes through a point would not leave it.
    """
    size = float((points - points.mean(0)).norm(dim=-1).max())
    if start is None and isinstance(embedding, Tunnel):
        curve = fit_flat(embedding.curve, points, None, options)
        starts = [curve.phi, *initial_guesses(embedding, points)]
    else:
        starts = initial_guesses(embedding, points) if start is None else [start]
    seen = [sight for sight in (Residuals(embedding, phi, points) for phi in starts) if sight.is_valid]
    if not seen:
        raise ArgumentError("embedding: the tunnel folds where the points lie; expected a smaller radius")
    here = min(seen, key=lambda sight: float(sight.distances.square().sum()))
    steps = 0
    for delta in (None, *(part * size for part in SMOOTHING))[: 1 if options.power == 2 else None]:
        here, taken, converged = _levenberg_marquardt(embedding, here, delta, size, options)
        steps += taken
    return FitResult(*_restrict_to_data(embedding, here), here.distances, steps, converged)


def _levenberg_marquardt(
    embedding: Embedding, initial: Residuals, smoothing: float | None, size: float, options: FitOptions
) -> tuple[Residuals, int, bool]:
    r"""Down $\sum_j d_j^2$, or $\sum_j \sqrt{d_j^2 + \delta^2}$: where to, in how many steps, whether to the end."""

    def measure(sight: Residuals) -> float:
        if not sight.is_valid:
            return math.inf
        d = sight.distances
        return float((d.square() if smoothing is None else torch.hypot(d, d.new_tensor(smoothing)) - smoothing).sum())

    value = measure(initial)
    damping = 1e-3
    for steps in range(options.max_steps):
        if float(initial.distances.mean()) <= RELATIVE_ROUNDING * size:
            return initial, steps, True
        d = initial.distances
        matrix, slope = initial.normal_equations(
            torch.ones_like(d) if smoothing is None else 1 / torch.hypot(d, d.new_tensor(smoothing))
        )
        diagonal = matrix.diagonal().clamp(min=RELATIVE_ROUNDING * float(matrix.diagonal().max()))
        reached = math.inf
        while not reached < value:
            if damping > MAX_DAMPING:
                return initial, steps, True
            step, info = torch.linalg.solve_ex(matrix + damping * diagonal.diag(), slope)
            if int(info) == 0 and bool(step.isfinite().all()):
                there = Residuals(embedding, initial.phi + step.reshape(initial.phi.shape), initial.points)
                reached = measure(there)
            damping *= 4
        fell = value - reached
        free = damping <= 4  # a short step that was damped falls little without being near the end
        damping = max(damping / 20, 1e-12)
        initial = there
        value = reached
        if free and fell <= options.tolerance * value:
            return initial, steps + 1, True
    return initial, options.max_steps, False


def _restrict_to_data(embedding: Embedding, residuals: Residuals) -> tuple[Phi, Tensor]:
    r"""The part that the points see: a curve between the first and the last place, a simplex whose facets all have one.

    $\iota_\varphi(x)$ stays where it is, with $x_i = a_i + (1 - \sum a) x_i'$, $a_i$ the least coordinates.
    """
    phi = residuals.phi
    x = residuals.coordinates
    if isinstance(embedding, Simplex):
        least = x.amin(0)
        rest = 1 - least.sum()
        return (phi, x) if rest < MIN_EXTENT else (least @ phi + rest * phi, (x - least) / rest)
    low, high = x.aminmax()
    if isinstance(embedding, Tunnel) or high - low < MIN_EXTENT:
        return phi, x
    curve = Bezier(Flat(phi.shape[1]), embedding.size - 1)
    phi = curve.split(curve.split(phi, float(high))[0], float(low / high))[1]
    return phi, (x - low) / (high - low)


def nearest_on_faces(vertices: Phi, points: Points) -> tuple[Float64[Tensor, "m size"], Float64[Tensor, " m"]]:
    """Return the nearest places of a simplex and their distances: the nearest foot over all faces.

    Example:
        >>> nearest_on_faces(torch.eye(2, dtype=torch.float64), torch.tensor([[1.0, 1.0], [3.0, 0.0]]).double())[0]
        tensor([[0.5000, 0.5000],
                [1.0000, 0.0000]], dtype=torch.float64)
    """
    size = len(vertices)
    places = points.new_zeros(len(points), size)
    distances = points.new_full((len(points),), torch.inf)
    for count in range(1, size + 1):
        for face in itertools.combinations(range(size), count):
            first, *others = face
            inner = (points - vertices[first]) @ torch.linalg.pinv(vertices[others] - vertices[first])
            x = torch.zeros_like(places)
            x[:, others] = inner
            x[:, first] = 1 - inner.sum(-1)
            away = torch.where((x >= 0).all(-1), (points - x @ vertices).norm(dim=-1), torch.inf)
            nearer = away < distances
            places = torch.where(nearer[:, None], x, places)
            distances = torch.where(nearer, away, distances)
    return places, distances


def initial_guesses(embedding: Embedding, points: Points) -> list[Phi]:
    """Where to begin: of a simplex, vertices that are points, each the farthest from the span of those before it; of a
    curve, the least squares of points at parameters by their number, by how far they are apart, and by their place on
    the longest axis; of a tunnel, a straight line too, which does not fold.
    """
    m = len(points)
    if isinstance(embedding, Simplex):
        rest = points - points.mean(0)
        chosen = [int(rest.norm(dim=-1).argmax())]
        rest = points - points[chosen[0]]
        for _ in range(embedding.size - 1):
            chosen.append(int(rest.norm(dim=-1).argmax()))
            axis = unit(rest[chosen[-1]])
            rest = rest - torch.outer(rest @ axis, axis)
        return [points[chosen]]
    degree = embedding.size - 1
    apart = torch.cat([points.new_zeros(1), points.diff(dim=0).norm(dim=-1)]).cumsum(0)
    axis = torch.linalg.svd(points - points.mean(0), full_matrices=False).Vh[0]
    along = points @ axis
    guesses = [torch.linspace(0, 1, m).to(points), *(_normalize_range(t) for t in (apart, along))]
    starts = [torch.linalg.pinv(basis(degree, t)) @ points for t in guesses]
    if isinstance(embedding, Tunnel):
        ends = torch.linalg.pinv(basis(1, guesses[-1])) @ points
        starts.append(basis(1, torch.linspace(0, 1, degree + 1).to(points)) @ ends)
    return starts


def _normalize_range(t: Tensor) -> Tensor:
    low, high = t.aminmax()
    return (t - low) / (high - low).clamp(min=torch.finfo(t.dtype).tiny)
