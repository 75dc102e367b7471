"""Geometric properties of a Bézier curve on a flat space, such as its minimum speed and its maximum curvature.

These properties depend only on the distances and angles between the control points. The functions therefore represent
the n + 1 control points by their coordinates in a basis of their span. A control point then has at most n coordinates
instead of the P parameters of a model, so the computations are much cheaper.
"""

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from manifoldagg.curves.bernstein import basis, derivative_coefficients, product_coefficients, roots

__all__ = [
    "coordinates",
    "curvature_vector",
    "derivative",
    "foot_parameters",
    "max_curvature",
    "min_speed",
    "nearest_normal_disk",
    "span",
    "unit",
]

CHUNK_SIZE = 1 << 16
"""The number of entries of each control point that one QR decomposition of `coordinates` reads."""

REFINEMENT_WIDTH = 1e-6
"""The maximum length of a Newton refinement step. A longer step shows that the start is not close to a root."""

Control = Float64[Tensor, "control k"]
Times = Float64[Tensor, "*times"]


def coordinates(phi: Float[Tensor, "control ..."]) -> Control:
    """Compute the coordinates of the control points `phi` in an orthonormal basis of their span.

    For n + 1 control points in P dimensions, the result has the shape (n + 1, min(n, P)). The first control point is
    the origin. Distances and angles are preserved up to rounding, even if the points are almost collinear. The result
    is detached from the autograd graph.

    Cost: one pass over `phi`, without temporary memory of size P.

    Example:
        >>> import torch
        >>> coordinates(torch.tensor([[1.0, 1.0, 1.0], [1.0, 4.0, 5.0]])).abs()
        tensor([[0.],
                [5.]], dtype=torch.float64)
    """
    points = phi.detach().flatten(1)
    # `triangle` is the R factor of all chunks so far. A Gram matrix would square the condition number of almost
    # collinear points.
    triangle = points.new_zeros(0, len(points) - 1, dtype=torch.float64)
    for low in range(0, points.shape[1], CHUNK_SIZE):
        piece = points[:, low : low + CHUNK_SIZE].double()
        triangle = torch.linalg.qr(torch.cat([triangle, (piece[1:] - piece[0]).mT]), mode="r").R
    return torch.cat([triangle.new_zeros(1, len(triangle)), triangle.mT])


def span(phi: Float[Tensor, "control ..."]) -> tuple[Float64[Tensor, "k P"], Control]:
    r"""Compute an orthonormal basis of the span of the differences $\varphi_i - \varphi_0$ of control points.

    The function returns the basis and the coordinates of the control points in it. The basis is the result of the
    Gram-Schmidt process. Its first vector is parallel to $\varphi_1 - \varphi_0$, and therefore to the velocity at the
    start of the curve. The coordinates are differentiable with respect to the control points.
    """
    points = phi.double().flatten(1)
    columns, triangle = torch.linalg.qr((points[1:] - points[0]).mT)
    # The diagonal of LAPACK's R factor can have either sign. In the Gram-Schmidt process, it is positive.
    sign = torch.where(triangle.detach().diagonal() < 0, -1.0, 1.0).to(triangle)
    control = (sign[:, None] * triangle).mT
    return (columns * sign).mT, torch.cat([control.new_zeros(1, control.shape[1]), control])


def derivative(control: Control, t: Times, order: int = 1) -> Float64[Tensor, "*times k"]:
    """Compute a derivative of the curve at `t`. Order 0 is the curve itself."""
    # The derivative of a Bézier curve of degree n has the control points n Δφ (the hodograph).
    for _ in range(order):
        control = (len(control) - 1) * control.diff(dim=0)
    return basis(len(control) - 1, t) @ control


def min_speed(control: Control) -> tuple[float, float]:
    """Find the minimum of the speed $|b'|$ of a curve $b$ on [0, 1].

    The function returns the parameter of the minimum and the speed there. The parameter is a root of the polynomial
    $(|b'|^2)'$, or an end of the interval.
    """
    # |b'|² is a polynomial, whose Bernstein coefficients follow from the Gram matrix of the hodograph.
    velocity = (len(control) - 1) * control.diff(dim=0)
    t = _critical_parameters(derivative_coefficients(_gram(velocity, velocity)), control)
    speed = derivative(control, t).norm(dim=-1)
    least = int(speed.argmin())
    return t[least].item(), speed[least].item()


def max_curvature(control: Control) -> tuple[float, float]:
    r"""Find the maximum of the curvature $\kappa$ of a curve $b$ on [0, 1].

    The function returns the parameter of the maximum and the curvature there. The curvature is defined by

    $$\kappa^2 = \frac{N}{\sigma^3}, \qquad \sigma = |b'|^2, \qquad N = |b'|^2 |b''|^2 - \langle b', b''\rangle^2 .$$

    The parameter is therefore a root of the polynomial $N'\sigma - 3N\sigma'$, or an end of the interval. The velocity
    $b'$ must not be 0 anywhere on the curve.
    """
    degree = len(control) - 1
    if degree == 1:
        return 0.0, 0.0
    # The sixth power of a velocity could overflow. The parameter of the maximum does not depend on the unit of length.
    scaled = control / control.diff(dim=0).norm(dim=-1).max()
    velocity = degree * scaled.diff(dim=0)
    bend = (degree - 1) * velocity.diff(dim=0)
    # `across` are the coefficients of N. The polynomial below is N'σ - 3Nσ', whose sign is that of the derivative of
    # κ².
    square = _gram(velocity, velocity)
    mixed = _gram(velocity, bend)
    across = [a - b for a, b in zip(_multiply(square, _gram(bend, bend)), _multiply(mixed, mixed), strict=True)]
    pairs = zip(
        _multiply(derivative_coefficients(across), square),
        _multiply(across, derivative_coefficients(square)),
        strict=True,
    )
    t = _critical_parameters([a - 3 * b for a, b in pairs], control)
    size = curvature_vector(control, t).norm(dim=-1)
    most = int(size.argmax())
    return t[most].item(), size[most].item()


def curvature_vector(control: Control, t: Times) -> Float64[Tensor, "*times k"]:
    r"""Compute the curvature vector $k = (b'' - \langle b'', T\rangle T) / |b'|^2$ of a curve $b$ at `t`.

    Here, $T = b' / |b'|$ is the unit tangent. The curvature vector is orthogonal to the curve, and its length is the
    curvature.
    """
    velocity = derivative(control, t)
    bend = derivative(control, t, 2)
    tangent = unit(velocity)
    along = (bend * tangent).sum(-1, keepdim=True)
    return (bend - along * tangent) / velocity.square().sum(-1, keepdim=True)


def foot_parameters(control: Control, points: Float64[Tensor, "N k"]) -> Float64[Tensor, "N feet"]:
    r"""Find the feet of the perpendiculars from given points to a curve, as parameters in [0, 1].

    A foot of the point $y$ is a point $b(t)$ of the curve $b$ such that the vector from $b(t)$ to $y$ is orthogonal to
    the velocity: $\langle y - b(t), b'(t)\rangle = 0$.

    Args:
        control: control points (n + 1, k) of a curve of degree n.
        points: the given points (N, k).

    Returns:
        Parameters (N, 2n + 1), with one row for each point. A row contains the start 0, the parameters of the feet, and
        the end 1. The end is repeated until the row is full.
    """
    velocity = (len(control) - 1) * control.diff(dim=0)
    # The Bernstein polynomials have the sum 1. The coefficients of b - y are therefore φ_i - y.
    pairs = (control @ velocity.mT).unsqueeze(-1) - velocity @ points.mT
    rows = torch.stack(product_coefficients(pairs.detach().cpu()), -1).tolist()
    # Rows with fewer feet are padded with the end, 1.
    t = points.new_ones(len(points), 2 * len(control) - 1)
    for parameters, row in zip(t, rows, strict=True):
        found = [0.0, *roots(row)]
        parameters[: len(found)] = parameters.new_tensor(found)
    offset = points[:, None] - derivative(control, t, 0)
    velocity_at_foot = derivative(control, t)
    # The coefficients of the polynomial lose digits to cancellation, so its roots are inaccurate. A Newton step on
    # ⟨y - b, b'⟩, which is computed from vectors, makes them accurate. At a focal point, the derivative is 0, and the
    # resulting long step is rejected.
    curvature_term = offset * derivative(control, t, 2)
    step = (offset * velocity_at_foot).sum(-1) / (velocity_at_foot.square() - curvature_term).sum(-1)
    return torch.where(step.abs() < REFINEMENT_WIDTH, t + step, t).clamp(0, 1)


def nearest_normal_disk(
    control: Control,
    points: Float64[Tensor, "N k"],
    radius: Float64[Tensor, ""],
    off: Float64[Tensor, "N 1"],
    *,
    fills: bool,
) -> tuple[Float64[Tensor, " N"], Float64[Tensor, "N k"], Float64[Tensor, " N"]]:
    """Find the disk nearest to each point, among the disks that are normal to the curve.

    Args:
        control: control points (n + 1, k).
        points: the orthogonal projections of points onto the span of the curve.
        radius: the radius of the disks.
        off: the distances of the points from the span.
        fills: whether the disks also extend in the directions orthogonal to the span.

    Returns:
        Three results for each point: the parameter of the disk, the vector from the centre of the disk to the
        projection of the point onto the plane of the disk, and the distance of the point from the disk.
    """
    t = foot_parameters(control, points)
    tangent = unit(derivative(control, t))
    normal = points[:, None] - derivative(control, t, 0)
    ahead = (normal * tangent).sum(-1, keepdim=True)
    normal = normal - ahead * tangent
    across = normal.norm(dim=-1)
    if fills:
        across = torch.hypot(across, off)
        off = torch.zeros_like(off)
    beyond = (across - radius).clamp(min=0)
    # The three components are orthogonal to each other. `hypot` does not underflow at small distances, unlike squares.
    distances, best = torch.hypot(torch.hypot(ahead.squeeze(-1), beyond), off).min(-1, keepdim=True)
    nearest = normal.take_along_dim(best[..., None], 1).squeeze(1)
    return t.gather(-1, best).squeeze(-1), nearest, distances.squeeze(-1)


def unit(v: Float64[Tensor, "*b k"]) -> Float64[Tensor, "*b k"]:
    """Normalise `v`. The result for 0 is 0."""
    size = v.norm(dim=-1, keepdim=True)
    # The denominator is replaced before the division. Otherwise the derivative at 0 would be NaN.
    return v / torch.where(size > 0, size, torch.ones_like(size))


def _gram(a: Tensor, b: Tensor) -> list[float]:
    """Compute the Bernstein coefficients of the inner product of two Bézier curves.

    The arguments `a` and `b` are the control points of the two curves.
    """
    coefficients: list[float] = product_coefficients((a @ b.mT).tolist())
    return coefficients


def _multiply(p: list[float], q: list[float]) -> list[float]:
    """Compute the Bernstein coefficients of the product of two polynomials in Bernstein form."""
    return product_coefficients([[a * b for b in q] for a in p])


def _critical_parameters(polynomial: list[float], control: Control) -> Float64[Tensor, " times"]:
    """Return parameters at which a function on [0, 1] can have its minimum or maximum.

    The argument `polynomial` has the same roots as the derivative of the function.
    """
    # An extremum is at a root of the polynomial or at an end of the interval. The grid contains both ends. It is also a
    # safeguard for double roots, at which the polynomial does not change its sign.
    return torch.cat([control.new_tensor(list(roots(polynomial))), torch.linspace(0, 1, 33).to(control)])
