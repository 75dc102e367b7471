r"""The laws of a manifold: the mathematical properties that its primitives must satisfy.

Each law is a function of a [`LawCase`][manifoldagg.testing.LawCase] that returns the largest error and the allowed
error. For tangents that are computed from two points, the allowed relative error is
$\kappa\,\varepsilon\,(1 + 1/t) / \min(1, r - t)$. Here, $\kappa$ is the condition number of the space, $\varepsilon$ is
the machine precision of the dtype, $t$ is the distance of the points, and $r$ is the injectivity radius.

The docstrings of the laws use this notation: $x$ and $y$ are points with the distance $t$, $u$ and $v$ are tangents at
$x$, and $y = \exp_x u$. $\gamma$ is the geodesic from $x$ to $y$, $d$ is the distance, and $h$ is a small number.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from manifoldagg.manifolds import Manifold, distance, geodesic, karcher_mean, norm, pole_ladder

__all__ = ["LAWS", "LawCase", "law", "min_injectivity_radius"]

Violation = tuple[float, float]
"""The largest error, and the error that the law allows."""


@dataclass(frozen=True)
class LawCase:
    """Random points and tangent vectors (tangents) of a manifold, to check a law such as log_x(exp_x u) = u.

    Attributes:
        space: the manifold under test.
        seed: the seed of all random draws.
        dtype: the dtype of the points and tangents.
        distance: the length of the tangents `u` and `v`. It is also the distance between `x` and `y` = exp_x(u).
        condition: the factor by which the formulas of the manifold may amplify rounding errors.
        batch: the number of points.
        x: random points of the manifold.
        u: random tangents at `x`.
        v: other random tangents at `x`.
    """

    space: Manifold
    seed: int
    dtype: torch.dtype
    distance: float
    condition: float = 50.0
    batch: int = 4
    x: Tensor = field(init=False, repr=False)
    u: Tensor = field(init=False, repr=False)
    v: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        x = self.space.random_point(self.batch, generator=generator, dtype=self.dtype)
        object.__setattr__(self, "x", x)
        for name in ("u", "v"):
            tangent = self.space.random_tangent(x, generator)
            factor = self.distance / norm(self.space, x, tangent)
            object.__setattr__(self, name, factor.reshape(-1, *(1 for _ in self.space.shape)) * tangent)

    @cached_property
    def y(self) -> Tensor:
        """The points exp_x(u)."""
        return self.space.exp(self.x, self.u)

    @cached_property
    def cut_locus_margin(self) -> float:
        """The margin min(1, r - t), where r is the injectivity radius at `x`, and t is the distance from `x` to `y`.

        If the margin is small, `y` is near the cut locus of `x`, where log and transport amplify rounding errors. Tests
        therefore divide their error tolerances by the margin.
        """
        return min(1.0, min_injectivity_radius(self.space, self.x) - self.distance)

    @property
    def rounding_error(self) -> float:
        """The allowed relative error of an operation that does not invert the exponential map."""
        return self.condition * torch.finfo(self.dtype).eps

    @property
    def tolerance(self) -> float:
        """The allowed relative error of a tangent that is computed from two points."""
        return self.rounding_error * (1 + 1 / self.distance) / self.cut_locus_margin

    @property
    def absolute_tolerance(self) -> float:
        """The allowed absolute error of a coordinate of a point."""
        return self.rounding_error * max(1.0, self.distance, self.x.double().abs().max().item()) / self.cut_locus_margin

    def max_norm(self, x: Tensor, u: Tensor) -> float:
        """Return the largest norm of the tangents `u` at `x`."""
        return norm(self.space, x, u).max().item()

    def max_difference(self, a: Tensor, b: Tensor) -> float:
        """Return the largest absolute difference between the entries of two tensors."""
        return (a - b).double().abs().max().item()

    def max_point_difference(self, a: Tensor, b: Tensor) -> float:
        """Return the largest difference between two batches of points.

        On some manifolds, several tensors represent the same point. The method therefore compares `space.invariant` of
        the points, which is the same for all these tensors.
        """
        return self.max_difference(*(self.space.invariant(point.double()) for point in (a, b)))


Law = Callable[[LawCase], Violation]
LAWS: dict[str, tuple[frozenset[str], Law]] = {}
"""All laws by name. Each value contains the primitives that the law needs, and the function."""

GEODESIC = {"inner", "exp", "log"}
PARALLEL = GEODESIC | {"transport"}


def min_injectivity_radius(space: Manifold, x: Tensor) -> float:
    """Return the smallest injectivity radius of a manifold at a batch of points `x`.

    If the manifold does not implement `injectivity_radius`, the result is infinity.
    """
    return space.injectivity_radius(x).min().item() if "injectivity_radius" in space.capabilities else math.inf


def law(*primitives: str) -> Callable[[Law], Law]:
    """Return a decorator that registers a law.

    Args:
        primitives: the names of the primitives that the law needs. `check_manifold` skips the law for a space that does
            not declare all of them.
    """

    def register(function: Law) -> Law:
        LAWS[function.__name__] = (frozenset(primitives), function)
        return function

    return register


@law("inner", "random_tangent")
def inner_is_an_inner_product(s: LawCase) -> Violation:
    """The inner product is symmetric, bilinear and positive."""
    inner = partial(s.space.inner, s.x)
    skew = (inner(s.u, s.v) - inner(s.v, s.u)).abs().max().item()
    sum_ = inner(s.u, 2 * s.u - 3 * s.v) - 2 * inner(s.u, s.u) + 3 * inner(s.u, s.v)
    negative = (-inner(s.u, s.u)).clamp(min=0).max().item()
    return max(skew, sum_.abs().max().item(), negative) / s.distance**2, 10 * s.rounding_error


@law(*GEODESIC)
def log_inverts_exp(s: LawCase) -> Violation:
    """log_x(exp_x u) = u."""
    return s.max_norm(s.x, s.space.log(s.x, s.y) - s.u) / s.distance, s.tolerance


@law(*GEODESIC)
def exp_distance_equals_tangent_norm(s: LawCase) -> Violation:
    """d(x, exp_x u) = d(exp_x u, x) = ‖u‖."""
    distances = torch.stack([distance(s.space, s.x, s.y), distance(s.space, s.y, s.x)])
    return (distances - s.distance).abs().max().item() / s.distance, s.tolerance


@law(*GEODESIC)
def derivative_of_exp_at_zero_is_identity(s: LawCase) -> Violation:
    """exp_x(hu) - exp_x(-hu) = 2hu + O(h³), in coordinates."""
    if s.dtype is not torch.float64:
        return 0.0, 0.0
    unit = s.u / s.distance
    h = 1e-4
    slope = (s.space.exp(s.x, h * unit) - s.space.exp(s.x, -h * unit)) / (2 * h)
    # The truncation error is proportional to h² times the curvature. The rounding error is ε/h.
    return s.max_difference(slope, unit) / unit.abs().max().item(), 10 * h**2 + s.rounding_error / h


@law(*GEODESIC)
def geodesics_have_constant_speed(s: LawCase) -> Violation:
    """d(γ(a), γ(b)) = |b - a| d(x, y)."""
    a = geodesic(s.space, s.x, s.y, 0.2)
    b = geodesic(s.space, s.x, s.y, 0.7)
    return (distance(s.space, a, b) / s.distance - 0.5).abs().max().item(), 4 * s.tolerance


@law(*GEODESIC)
def geodesics_are_reversible(s: LawCase) -> Violation:
    """The geodesic from y to x at time 1 - t equals the geodesic from x to y at time t."""
    forward = geodesic(s.space, s.x, s.y, 0.3)
    backward = geodesic(s.space, s.y, s.x, 0.7)
    return s.max_point_difference(forward, backward), 2 * s.absolute_tolerance


@law(*GEODESIC)
def distance_is_a_metric(s: LawCase) -> Violation:
    """d(x, y) = d(y, x), d(x, x) = 0 and d(x, z) <= d(x, y) + d(y, z)."""
    # The length `far` is so small that all three points are within the injectivity radius of each other.
    far = min(0.5 * s.distance, (min_injectivity_radius(s.space, s.x) - s.distance) / 2)
    z = s.space.exp(s.x, far / s.distance * s.v)
    d = distance
    skew = (d(s.space, s.x, s.y) - d(s.space, s.y, s.x)).abs().max().item()
    short = (d(s.space, s.y, z) - d(s.space, s.y, s.x) - d(s.space, s.x, z)).clamp(min=0).max().item()
    self_ = d(s.space, s.x, s.x).max().item()
    return max(skew / s.distance, short / s.distance, self_), 2 * s.tolerance


@law(*GEODESIC)
def gradient_of_squared_distance_is_minus_two_log(s: LawCase) -> Violation:
    """The gradient of d(·, y)² at x is -2 log_x y, so the metric, exp and log are consistent."""
    if s.dtype is not torch.float64 or s.distance < 1e-2:
        return 0.0, 0.0
    w = s.v / s.distance
    h = 1e-4
    ahead, behind = (distance(s.space, s.space.exp(s.x, e * h * w), s.y).square() for e in (1, -1))
    slope = (ahead - behind) / (2 * h)
    expected = -2 * s.space.inner(s.x, w, s.space.log(s.x, s.y))
    return (slope - expected).abs().max().item() / s.distance, (
        10 * h**2 / s.distance**2 + s.rounding_error / h / s.distance
    ) / s.cut_locus_margin**2


@law("exp", "project")
def exp_lands_on_the_manifold(s: LawCase) -> Violation:
    """The point exp_x(u) is equal to its projection."""
    return s.max_point_difference(s.space.project(s.y), s.y), s.rounding_error * s.y.abs().max().item()


@law(*GEODESIC, "retract")
def retractions_agree_with_exp_to_second_order(s: LawCase) -> Violation:
    """log_x(retract_x(hu)) - hu = O(h³)."""
    if s.dtype is not torch.float64:
        return 0.0, 0.0
    unit = s.u / s.distance
    far = 2e-2
    near = 1e-2
    gaps = [s.max_norm(s.x, s.space.log(s.x, s.space.retract(s.x, h * unit)) - h * unit) for h in (far, near)]
    if gaps[0] <= s.rounding_error:
        return 0.0, 0.0
    slope = math.log2(gaps[0] / max(gaps[1], s.rounding_error / 100))
    return max(0.0, 3 - slope), 0.2


@law("inner", "retract")
def derivative_of_retract_at_zero_is_identity(s: LawCase) -> Violation:
    """retract_x(hu) - retract_x(-hu) = 2hu + O(h³), in coordinates."""
    if s.dtype is not torch.float64:
        return 0.0, 0.0
    unit = s.u / s.distance
    h = 1e-4
    slope = (s.space.retract(s.x, h * unit) - s.space.retract(s.x, -h * unit)) / (2 * h)
    return s.max_difference(slope, unit) / unit.abs().max().item(), 10 * h**2 + s.rounding_error / h


@law("inner", "retract", "inverse_retract")
def inverse_retract_inverts_retract(s: LawCase) -> Violation:
    """inverse_retract_x(retract_x(u)) = u, and retract_x(inverse_retract_x(y)) = y."""
    y = s.space.retract(s.x, s.u)
    tangent = s.space.inverse_retract(s.x, y)
    tangent_error = s.max_norm(s.x, tangent - s.u) / s.distance
    point_error = s.max_point_difference(s.space.retract(s.x, tangent), y)
    bound = 1 + s.distance
    return max(tangent_error / (s.tolerance * bound), point_error / (s.absolute_tolerance * bound)), 1.0


@law("inner", "retract")
def retractions_are_independent_across_batch(s: LawCase) -> Violation:
    """`retract` and `inverse_retract` of a batch equal the results for its single points."""
    calls: list[Callable[[int | slice], Tensor]] = [lambda i: s.space.retract(s.x[i], s.u[i])]
    if "inverse_retract" in s.space.capabilities:
        moved = s.space.retract(s.x, s.u)
        calls.append(lambda i: s.space.inverse_retract(s.x[i], moved[i]))
    found = 0.0
    for call in calls:
        together = call(slice(None))
        found = max(found, s.max_difference(together, torch.stack([call(i) for i in range(s.batch)])))
    return found, s.absolute_tolerance


@law("project", "project_tangent", "random_tangent")
def projections_are_idempotent(s: LawCase) -> Violation:
    """Projections of points and tangents are idempotent, and random tangents equal their projections."""
    noise = s.x + 0.1 * torch.randn(s.x.shape, generator=torch.Generator().manual_seed(s.seed), dtype=s.dtype)
    point = s.space.project(noise)
    tangent = s.space.project_tangent(s.x, noise)
    found = max(
        s.max_point_difference(s.space.project(point), point),
        s.max_difference(s.space.project_tangent(s.x, tangent), tangent),
        s.max_difference(s.space.project_tangent(s.x, s.u), s.u) / s.distance,
    )
    return found, s.rounding_error * max(1.0, noise.abs().max().item())


@law("inner", "project_tangent")
def project_tangent_is_orthogonal(s: LawCase) -> Violation:
    """<w - Pw, v> = 0 for each vector w and each tangent v, where P is the projection onto the tangent space."""
    w = torch.randn(s.x.shape, generator=torch.Generator().manual_seed(s.seed + 1), dtype=s.dtype)
    removed = w - s.space.project_tangent(s.x, w)
    found = s.space.inner(s.x, removed, s.v).abs().max().item() / s.distance
    return found, s.rounding_error * max(1.0, w.abs().max().item())


@law("inner", "project_tangent")
def the_gradient_represents_the_derivative(s: LawCase) -> Violation:
    """<gradient(e), v> = e · v for every tangent v, where e is a vector of partial derivatives."""
    e = torch.randn(s.x.shape, generator=torch.Generator().manual_seed(s.seed + 2), dtype=s.dtype)
    axes = tuple(range(1, s.x.ndim))
    expected = (e.double() * s.v.double()).sum(axes)
    found = s.space.inner(s.x, s.space.gradient(s.x, e), s.v).double() - expected
    # The error is relative to the Euclidean lengths of e and v, because the rounding error depends on the terms of the
    # sum, and the metric can give v another length.
    size = e.double().square().sum(axes).sqrt() * s.v.double().square().sum(axes).sqrt()
    return (found / size).abs().max().item(), s.rounding_error


@law("log", "transport", "project_tangent")
def logs_and_transports_are_tangent(s: LawCase) -> Violation:
    """log_x(y) and transported tangents are equal to their projections."""
    log = s.space.log(s.x, s.y)
    moved = s.space.transport(s.x, s.y, s.v)
    at_x = s.max_difference(s.space.project_tangent(s.x, log), log)
    at_y = s.max_difference(s.space.project_tangent(s.y, moved), moved)
    return max(at_x, at_y), s.tolerance * s.distance


@law(*PARALLEL)
def transport_is_an_isometry(s: LawCase) -> Violation:
    """<Pu, Pv> = <u, v>, where P is the parallel transport from x to y."""
    moved = [s.space.transport(s.x, s.y, w) for w in (s.u, s.v)]
    found = [
        s.space.inner(s.y, moved[i], moved[j]) - s.space.inner(s.x, (s.u, s.v)[i], (s.u, s.v)[j])
        for i, j in ((0, 0), (0, 1), (1, 1))
    ]
    return torch.stack(found).abs().max().item() / s.distance**2, 4 * s.tolerance


@law(*PARALLEL)
def transport_is_invertible(s: LawCase) -> Violation:
    """Parallel transport from x to y and back to x is the identity, and so is parallel transport from x to x."""
    returned = s.space.transport(s.y, s.x, s.space.transport(s.x, s.y, s.v))
    identity = s.space.transport(s.x, s.x, s.v)
    return max(s.max_norm(s.x, returned - s.v), s.max_norm(s.x, identity - s.v)) / s.distance, 4 * s.tolerance


@law(*PARALLEL)
def transport_is_linear(s: LawCase) -> Violation:
    """P(2u - 3v) = 2Pu - 3Pv, where P is the parallel transport from x to y."""
    p = s.space
    of_sum = p.transport(s.x, s.y, 2 * s.u - 3 * s.v)
    sum_of_transported = 2 * p.transport(s.x, s.y, s.u) - 3 * p.transport(s.x, s.y, s.v)
    return s.max_norm(s.y, of_sum - sum_of_transported) / s.distance, 10 * s.tolerance


@law(*PARALLEL)
def transport_preserves_geodesic_velocity(s: LawCase) -> Violation:
    """Parallel transport along a geodesic maps the initial velocity of the geodesic to its velocity at a later point.

    The geodesic from x to y has the initial velocity u = log_x y. It is checked at two points:

    - At the end point y, the transported velocity must equal -log_y x.
    - At the midpoint m, the transported velocity v must satisfy exp_m(v / 2) = y.
    """
    velocity = s.space.transport(s.x, s.y, s.u)
    midpoint = geodesic(s.space, s.x, s.y, 0.5)
    end = s.space.exp(midpoint, 0.5 * s.space.transport(s.x, midpoint, s.u))
    velocity_error = s.max_norm(s.y, velocity + s.space.log(s.y, s.x)) / s.distance
    return max(velocity_error / s.tolerance, s.max_point_difference(end, s.y) / s.absolute_tolerance), 4.0


@law(*PARALLEL)
def pole_ladder_equals_transport(s: LawCase) -> Violation:
    """On a symmetric space, `transport` returns the same tangents as the pole ladder.

    The pole ladder constructs parallel transport from the exponential map and the logarithm. The law therefore detects
    a `transport` that only projects tangents onto the tangent space at the end point.
    """
    if not s.space.symmetric or 2 * s.distance >= 0.9 * min_injectivity_radius(s.space, s.x):
        return 0.0, 0.0
    ladder = pole_ladder(s.space, s.x, s.y, s.v)
    return s.max_norm(s.y, ladder - s.space.transport(s.x, s.y, s.v)) / s.distance, 10 * s.tolerance


@law(*GEODESIC)
def gradients_are_finite_at_zero_length(s: LawCase) -> Violation:
    """exp_x(u), log_x(y), d(x, y) and ‖u‖ have finite derivatives with respect to x, y and u at u = 0 and y = x."""
    x = s.x.clone().requires_grad_()
    y = s.x.clone().requires_grad_()
    zero = torch.zeros_like(s.u).requires_grad_()
    values = (s.space.exp(x, zero), s.space.log(x, y), distance(s.space, x, y), norm(s.space, x, zero))
    slopes = torch.autograd.grad([value.sum() for value in values], [x, y, zero])
    return float(sum((~slope.isfinite()).sum().item() for slope in slopes)), 0.0


@law(*GEODESIC)
def operations_are_independent_across_batch(s: LawCase) -> Violation:
    """The results for a batch equal the results for its single points."""
    calls: list[Callable[[int | slice], Tensor]] = [
        lambda i: s.space.exp(s.x[i], s.u[i]),
        lambda i: s.space.log(s.x[i], s.y[i]),
        lambda i: s.space.inner(s.x[i], s.u[i], s.v[i]),
    ]
    if "transport" in s.space.capabilities:
        calls.append(lambda i: s.space.transport(s.x[i], s.y[i], s.v[i]))
    found = 0.0
    for call in calls:
        together = call(slice(None))
        alone = torch.stack([call(i) for i in range(s.batch)])
        if together.shape != alone.shape:
            return math.inf, 0.0
        found = max(found, s.max_difference(together, alone))
    return found, s.absolute_tolerance


@law(*GEODESIC, "project")
def mean_of_two_points_is_midpoint(s: LawCase) -> Violation:
    """The Karcher mean of two points with the weights 1 - t and t is the point γ(t) of the geodesic γ between them.

    The Karcher mean of several copies of a point is the point itself.
    """
    if 2 * s.distance >= min_injectivity_radius(s.space, s.x):
        return 0.0, 0.0
    pair = torch.stack([s.x, s.y], 1)
    weights = torch.tensor([0.75, 0.25], dtype=s.dtype)
    mean = karcher_mean(s.space, pair, weights, tolerance=s.tolerance * s.distance / 10)
    same = karcher_mean(s.space, torch.stack([s.x, s.x, s.x], 1))
    if not mean.converged:
        return math.inf, 0.0
    middle = geodesic(s.space, s.x, s.y, 0.25)
    found = max(s.max_point_difference(mean.point, middle), s.max_point_difference(same.point, s.x))
    return found, 10 * s.absolute_tolerance


@law("random_point", "random_tangent")
def random_draws_are_reproducible(s: LawCase) -> Violation:
    """Random points and tangents are equal for equal seeds, and different for different seeds."""

    def draw(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        point = s.space.random_point(3, generator=generator, dtype=s.dtype)
        return torch.stack([point, s.space.random_tangent(point, generator)])

    different = not torch.equal(draw(1), draw(2)) or math.prod(s.space.shape) == 0
    return 0.0 if torch.equal(draw(1), draw(1)) and different else 1.0, 0.0
