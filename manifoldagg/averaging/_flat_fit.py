"""Fit of a curve, a simplex or a tunnel (a tube around a curve) to models in a flat space.

The fit minimises the distances from the models to the curve, simplex or tunnel. The objective is either the sum of the
distances or the sum of the squared distances. The fit uses the Levenberg-Marquardt method. It runs in the subspace that
the models span, which has fewer dimensions than the whole space.
"""

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
"""The maximum number n of vertices for which the nearest point search enumerates all 2^n - 1 faces of a simplex.

For few vertices, the enumeration is faster than a search from face to face.
"""
NormalEquations = tuple[Float64[Tensor, "n n"], Float64[Tensor, " n"]]
SMOOTHING = (1e-2, 1e-4, 1e-6, 1e-9)
"""The decreasing smoothing lengths δ in the minimisation of a sum of distances, relative to the size of the points."""
MAX_DAMPING = 1e12
"""The damping beyond which steps are smaller than rounding errors."""
MIN_EXTENT = 1e-6
"""The minimum fraction of its domain to which a subspace is restricted."""
RELATIVE_ROUNDING = 1e-13
"""A mean distance below this fraction of the size of the points counts as a rounding error."""


@dataclass(frozen=True)
class FitOptions:
    r"""The options for fitting a curve, a simplex or a tunnel (a tube around a curve) to data points.

    The fit minimises $\sum_j d_j^p$, where $d_j$ is the distance from data point j to the curve, simplex or tunnel.

    Attributes:
        power: the power p, which is 1 or 2.
        tolerance: the fit has converged if a step decreases the sum by at most this fraction.
        max_steps: the maximum number of steps of one minimisation. For p = 1, the sum is not smooth. The fit then
            minimises several smooth functions one after another, which approximate the sum more and more closely.
    """

    power: int
    tolerance: float
    max_steps: int


@dataclass(frozen=True, eq=False)
class FitResult:
    """The result of fitting an embedding, such as a curve, to m data points.

    Attributes:
        phi: the control points of the embedding.
        coordinates: for each data point, the coordinates of the nearest point of the embedding.
        distances: the distances (m,) from the data points to the embedding.
        steps: the number of steps of the fit.
        converged: whether the fit converged.
    """

    phi: Tensor
    coordinates: Tensor
    distances: Float64[Tensor, " m"]
    steps: int
    converged: bool


class Residuals:
    r"""The residual vectors $e_j$ of the fit of an embedding, such as a curve, to data points $y_j$.

    An embedding with the control points $\varphi$ maps coordinates $x$ to points $\iota_\varphi(x)$. Let $x_j$ be the
    coordinates of the point that is nearest to $y_j$. The residual vector and its derivative are

    $$e_j = N_j (y_j - \iota_\varphi(x_j)), \qquad \partial_\varphi e_j = -N_j\, \partial_\varphi \iota_\varphi(x_j).$$

    The orthogonal projection $N_j$ removes the components that are tangent to the embedding at the nearest point. At
    the boundary of the embedding, it only removes those along the boundary. If $\varphi$ changes, the nearest point
    also moves along the embedding. This motion does not change the distance to first order, so the formulas contain no
    derivative of $x_j$.

    Args:
        embedding: a Bézier curve, a simplex or a tunnel.
        phi: the control points of the embedding, in the same coordinate system as the points.
        points: $y_j$, (m, k).

    Attributes:
        coordinates: $x_j$, (m,) for a curve or a tunnel, (m, size) for a simplex.
        distances: the lengths (m,) of the residual vectors.
        is_valid: whether a tunnel does not fold, and its curve has no point of zero speed.
    """

    coordinates: Tensor
    distances: Float64[Tensor, " m"]
    is_valid: bool = True

    def __init__(self, embedding: Embedding, phi: Phi, points: Points) -> None:
        self.embedding = embedding
        self.phi = phi
        self.points = points
        if isinstance(embedding, Simplex):
            is_small = embedding.size <= MAX_ENUMERATED_VERTICES
            nearest = nearest_on_faces if is_small else replace(embedding, space=Flat(phi.shape[1])).nearest
            self.coordinates, self.distances = nearest(phi, points)
            return
        self.radius = embedding.radius if isinstance(embedding, Tunnel) else 0.0
        self.in_span = isinstance(embedding, Tunnel) and embedding.form == "subspace"
        reach = self.radius * (phi[-1] - phi[0]).norm()
        control = phi
        inside = points
        off = points.new_zeros(len(points), 1)
        # In the subspace form, the disks are within the span of the control points. `off` is the distance from this
        # span.
        if self.in_span:
            axes, control = span(phi)
            inside = (points - phi[0]) @ axes.mT
            off = (points - phi[0] - inside @ axes).norm(dim=-1, keepdim=True)
        self.coordinates, _, self.distances = nearest_normal_disk(control, inside, reach, off, fills=not self.in_span)
        # A tunnel folds if its radius exceeds a radius of curvature. At a point of zero speed, it has no normal plane.
        if reach > 0:
            self.is_valid = min_speed(control)[1] > 1e-12 * reach and float(reach) * max_curvature(control)[1] < 1

    def normal_equations(self, weights: Float64[Tensor, " m"]) -> NormalEquations:
        r"""Return the normal equations of a Gauss-Newton step for the control points of the embedding.

        The step $\delta$ minimises the weighted sum of squares $\sum_j w_j |e_j + \partial e_j \delta|^2$. Here, $e_j$
        is the residual vector of the point j, $\partial e_j$ is its derivative with respect to the control points, and
        $w_j$ is its weight.

        Returns:
            The matrix $A$ and the right-hand side $g$ of $A\, \delta = g$.
        """
        if isinstance(self.embedding, Tunnel):
            # Beyond a flat end of the tunnel, the residual also has a tangential component.
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
        # `normal` is the projection N_j. The derivative of a residual with respect to control point i is -b_i N_j,
        # where b_i is the weight of the control point. The matrix is therefore a sum of Kronecker products.
        normal = torch.eye(gap.shape[1]).to(gap) - tangents.mT @ tangents
        pairs = weights[:, None, None] * shares[:, :, None] * shares[:, None, :]
        left = torch.einsum("mij,mab->iajb", pairs, normal).reshape(self.phi.numel(), self.phi.numel())
        return left, torch.einsum("mi,mk->ik", weights[:, None] * shares, gap).flatten()

    def _linearize(self) -> tuple[Tensor, Tensor]:
        """Linearise the embedding at the nearest points.

        Returns:
            The weights (m, size) of the control points, and an orthonormal basis (m, q, k) of the tangents along which
            the nearest points can move. If a point has fewer than q such tangents, the remaining rows are 0.
        """
        if isinstance(self.embedding, Simplex):
            # A coordinate that is 0 stays 0 under small changes, so only the vertices of the nearest face contribute
            # tangents.
            used = self.coordinates > 0
            edges = torch.where(used[..., None], self.phi - (self.coordinates @ self.phi)[:, None], 0.0)
            _, sizes, directions = torch.linalg.svd(edges, full_matrices=False)
            # The edges of a face are linearly dependent. The singular values that belong to no tangent are rounding
            # errors.
            significant = sizes > 1e-10 * sizes[:, :1].clamp(min=torch.finfo(sizes.dtype).tiny)
            return self.coordinates, torch.where(significant[..., None], directions, 0.0)
        moves = (self.coordinates > 0) & (self.coordinates < 1)
        tangents = unit(derivative(self.phi, self.coordinates))
        return basis(len(self.phi) - 1, self.coordinates), torch.where(moves[:, None], tangents, 0.0)[:, None]

    def _tunnel_residual(self, phi: Tensor, t: Tensor, point: Tensor, end: Tensor) -> Tensor:
        """Compute the residual of one point of a tunnel.

        Returns:
            The vector from the tunnel to the point, and, at a flat end of the tunnel (`end`), the distance of the point
            beyond this end.
        """
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
        # Inside the tunnel, the residual is 0. The inner `where` keeps the derivative of the root finite there.
        share = torch.where(beyond, 1 - reach / torch.where(beyond, square, 1.0).sqrt(), 0.0)
        return torch.cat([away - normal + share * normal, torch.where(end, ahead, 0.0)], -1)


@torch.no_grad()
def fit_flat(embedding: Embedding, points: Points, start: Phi | None, options: FitOptions) -> FitResult:
    r"""Fit an embedding, such as a curve, to points $y_j$ (m, k) of a flat space.

    The function minimises $\sum_j d_j^p$ over the control points of the embedding, where $d_j$ is the distance from
    $y_j$ to the embedding. It uses the Levenberg-Marquardt method with variable projection, which eliminates the
    coordinates of the nearest points (Kaufman 1975).

    For p = 1, the function first minimises $\sum_j d_j^2$. It then minimises $\sum_j \sqrt{d_j^2 + \delta^2}$ by
    iterative reweighting (Weiszfeld) for decreasing $\delta$. The last $\delta$ is 1e-9 of the size of the set of
    points. The iteration does not start with $\delta = 0$, because a fitted curve that contains one of the points could
    then not leave this point.

    Args:
        embedding: a Bézier curve, a simplex or a tunnel.
        points: the points $y_j$ (m, k).
        start: the initial control points (size, k). `None` uses the best of several initial guesses.
        options: the power p, the relative tolerance, and the largest number of steps.

    Raises:
        ArgumentError: if a tunnel folds at every initial guess.
    """
    size = float((points - points.mean(0)).norm(dim=-1).max())
    # The curve of a good tunnel passes through the middle of the points, so the fit of a curve is a good start.
    if start is None and isinstance(embedding, Tunnel):
        curve = fit_flat(embedding.curve, points, None, options)
        starts = [curve.phi, *initial_guesses(embedding, points)]
    else:
        starts = initial_guesses(embedding, points) if start is None else [start]
    valid = [residuals for residuals in (Residuals(embedding, phi, points) for phi in starts) if residuals.is_valid]
    if not valid:
        raise ArgumentError(
            "embedding: expected a tunnel that does not fold at the points, got a folded tunnel; reduce its radius"
        )
    current = min(valid, key=lambda residuals: float(residuals.distances.square().sum()))
    steps = 0
    # The first pass minimises the sum of squares. It is the only pass for the power 2.
    for delta in (None, *(part * size for part in SMOOTHING))[: 1 if options.power == 2 else None]:
        current, taken, converged = _levenberg_marquardt(embedding, current, delta, size, options)
        steps += taken
    return FitResult(*_restrict_to_data(embedding, current), current.distances, steps, converged)


def _levenberg_marquardt(
    embedding: Embedding, initial: Residuals, smoothing: float | None, size: float, options: FitOptions
) -> tuple[Residuals, int, bool]:
    r"""Fit an embedding, such as a curve, to data points by the Levenberg-Marquardt method.

    Let $d_j$ be the distance from data point j to the embedding. If `smoothing` is `None`, the function minimises
    $\sum_j d_j^2$. Otherwise, it minimises $\sum_j \sqrt{d_j^2 + \delta^2}$ with $\delta$ = `smoothing`, which
    approximates the sum of the distances.

    Returns:
        The residuals, the number of steps, and whether the method converged.
    """

    def measure(residuals: Residuals) -> float:
        if not residuals.is_valid:
            return math.inf
        d = residuals.distances
        # The subtraction of δ makes the sum 0 for zero distances, so the relative tolerance refers to the distances.
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
        # The lower bound also damps directions on which the residuals do not depend, where the diagonal is 0.
        diagonal = matrix.diagonal().clamp(min=RELATIVE_ROUNDING * float(matrix.diagonal().max()))
        new_value = math.inf
        while not new_value < value:
            if damping > MAX_DAMPING:
                return initial, steps, True
            step, info = torch.linalg.solve_ex(matrix + damping * diagonal.diag(), slope)
            if int(info) == 0 and bool(step.isfinite().all()):
                candidate = Residuals(embedding, initial.phi + step.reshape(initial.phi.shape), initial.points)
                new_value = measure(candidate)
            # The damping grows after every trial. After an accepted step, the division by 20 below reduces it to a
            # fifth.
            damping *= 4
        decrease = value - new_value
        undamped = damping <= 4  # a damped step is short, so a small decrease does not imply convergence
        damping = max(damping / 20, 1e-12)
        initial = candidate
        value = new_value
        if undamped and decrease <= options.tolerance * value:
            return initial, steps + 1, True
    return initial, options.max_steps, False


def _restrict_to_data(embedding: Embedding, residuals: Residuals) -> tuple[Phi, Tensor]:
    """Shrink a fitted curve or simplex to the smallest part that fits the data points equally well.

    This part contains the nearest point to each data point. The step makes the result of the fit unique. A tunnel (a
    tube around a curve) is returned unchanged.

    Returns:
        The control points of the part, and the coordinates of the nearest points on it.
    """
    phi = residuals.phi
    x = residuals.coordinates
    if isinstance(embedding, Simplex):
        # Let a_i be the smallest coordinate x_i of all nearest points. The points with x_i >= a_i form a smaller
        # simplex with a nearest point on each facet. Its coordinates x' satisfy x_i = a_i + (1 - Σ_j a_j) x'_i.
        least = x.amin(0)
        rest = 1 - least.sum()
        return (phi, x) if rest < MIN_EXTENT else (least @ phi + rest * phi, (x - least) / rest)
    # The part of a curve begins at the first nearest point and ends at the last one.
    low, high = x.aminmax()
    if isinstance(embedding, Tunnel) or high - low < MIN_EXTENT:
        return phi, x
    curve = Bezier(Flat(phi.shape[1]), embedding.size - 1)
    # On the part before `high`, the point at `low` has the parameter low / high.
    phi = curve.split(curve.split(phi, float(high))[0], float(low / high))[1]
    return phi, (x - low) / (high - low)


def nearest_on_faces(vertices: Phi, points: Points) -> tuple[Float64[Tensor, "m size"], Float64[Tensor, " m"]]:
    """Compute the nearest points of a simplex by projecting onto each of its faces.

    Returns:
        The barycentric coordinates (m, size) and the distances (m,).

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
            # The pseudoinverse also handles a degenerate face, whose edges are linearly dependent.
            inner = (points - vertices[first]) @ torch.linalg.pinv(vertices[others] - vertices[first])
            x = torch.zeros_like(places)
            x[:, others] = inner
            x[:, first] = 1 - inner.sum(-1)
            # A projection outside of its face is not a point of the simplex.
            distance = torch.where((x >= 0).all(-1), (points - x @ vertices).norm(dim=-1), torch.inf)
            nearer = distance < distances
            places = torch.where(nearer[:, None], x, places)
            distances = torch.where(nearer, distance, distances)
    return places, distances


def initial_guesses(embedding: Embedding, points: Points) -> list[Phi]:
    """Return initial control points for the fit of an embedding to data points.

    - For a simplex, the function returns one initial guess, whose vertices are data points. Each vertex is the data
      point that is farthest from the affine span of the previous vertices.
    - For a curve, the function returns three initial guesses. Each guess assigns fixed parameters to the data points,
      and computes the control points by linear least squares. The parameters are proportional to the index of a point,
      to the length of the path through the previous points, or to the coordinate on the longest axis of the data.
    - For a tunnel, the function also returns a straight line, because a straight tunnel does not fold.
    """
    m = len(points)
    if isinstance(embedding, Simplex):
        rest = points - points.mean(0)
        chosen = [int(rest.norm(dim=-1).argmax())]
        rest = points - points[chosen[0]]
        for _ in range(embedding.size - 1):
            chosen.append(int(rest.norm(dim=-1).argmax()))
            axis = unit(rest[chosen[-1]])
            # The rest of each point is its component orthogonal to the span of the chosen vertices.
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
    """Map numbers linearly to [0, 1]. Equal numbers are mapped to 0."""
    low, high = t.aminmax()
    return (t - low) / (high - low).clamp(min=torch.finfo(t.dtype).tiny)
