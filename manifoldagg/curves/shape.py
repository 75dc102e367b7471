"""The shape of a Bézier curve on a flat space, in coordinates of the span of its control points.

Where it is slow or sharp, how it bends, and which of its points are the feet of others. Everything is in float64.
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

REFINEMENT_WIDTH = 1e-6
"""A step of Newton's method that is longer does not start at a root."""

Control = Float64[Tensor, "control k"]
Times = Float64[Tensor, "*times"]


def coordinates(phi: Float[Tensor, "control ..."]) -> Control:
    """Compute control points in an orthonormal basis of their span, the first at 0: (n + 1, min(n, P)), no derivatives.

    Distances and angles are those of the control points, to rounding also where these nearly lie in a line.

    Cost: one pass over `phi`; no scratch of size P.

    Example:
        >>> import torch
        >>> coordinates(torch.tensor([[1.0, 1.0, 1.0], [1.0, 4.0, 5.0]])).abs()
        tensor([[0.],
                [5.]], dtype=torch.float64)
    """
    points = phi.detach().flatten(1)
    # Of all chunks so far: a Gram matrix would square the condition of control points that nearly lie in a line.
    triangle = points.new_zeros(0, len(points) - 1, dtype=torch.float64)
    for low in range(0, points.shape[1], CHUNK_SIZE):
        piece = points[:, low : low + CHUNK_SIZE].double()
        triangle = torch.linalg.qr(torch.cat([triangle, (piece[1:] - piece[0]).mT]), mode="r").R
    return torch.cat([triangle.new_zeros(1, len(triangle)), triangle.mT])


def span(phi: Float[Tensor, "control ..."]) -> tuple[Float64[Tensor, "k P"], Control]:
    r"""Compute an orthonormal basis of the span of $\varphi_i - \varphi_0$, and differentiable coordinates in it.

    The basis is that of Gram and Schmidt: the first vector along $\varphi_1 - \varphi_0$, and so along $b'(0)$, the
    first two with $\varphi_2$ in their plane, and so on.
    """
    points = phi.double().flatten(1)
    lines, triangle = torch.linalg.qr((points[1:] - points[0]).mT)
    # LAPACK's diagonal has either sign, that of Gram and Schmidt is positive.
    sign = torch.where(triangle.detach().diagonal() < 0, -1.0, 1.0).to(triangle)
    control = (sign[:, None] * triangle).mT
    return (lines * sign).mT, torch.cat([control.new_zeros(1, control.shape[1]), control])


def derivative(control: Control, t: Times, order: int = 1) -> Float64[Tensor, "*times k"]:
    """Compute the derivative of the curve of this order at `t`; order 0 is the curve itself."""
    for _ in range(order):
        control = (len(control) - 1) * control.diff(dim=0)
    return basis(len(control) - 1, t) @ control


def min_speed(control: Control) -> tuple[float, float]:
    r"""Find the minimum of $|b'|$ on [0, 1]: its $t$, a root of $(|b'|^2)'$ or an end, and its value."""
    velocity = (len(control) - 1) * control.diff(dim=0)
    t = _critical_parameters(derivative_coefficients(_gram(velocity, velocity)), control)
    speed = derivative(control, t).norm(dim=-1)
    least = int(speed.argmin())
    return t[least].item(), speed[least].item()


def max_curvature(control: Control) -> tuple[float, float]:
    r"""Find the maximum of the curvature on [0, 1]: its parameter and its value; $b'$ must not vanish.

    $$\kappa^2 = \frac{N}{\sigma^3}, \qquad \sigma = |b'|^2, \qquad N = |b'|^2 |b''|^2 - \langle b', b''\rangle^2,$$

    so that $t$ is a root of the polynomial $N'\sigma - 3N\sigma'$, or an end.
    """
    degree = len(control) - 1
    if degree == 1:
        return 0.0, 0.0
    # Six factors of a velocity would leave float64; where the curvature is greatest does not depend on the unit.
    scaled = control / control.diff(dim=0).norm(dim=-1).max()
    velocity = degree * scaled.diff(dim=0)
    bend = (degree - 1) * velocity.diff(dim=0)
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
    r"""Compute the curvature vector $k = (b'' - \langle b'', T\rangle T) / |b'|^2$, $T = b' / |b'|$."""
    velocity = derivative(control, t)
    bend = derivative(control, t, 2)
    tangent = unit(velocity)
    along = (bend * tangent).sum(-1, keepdim=True)
    return (bend - along * tangent) / velocity.square().sum(-1, keepdim=True)


def foot_parameters(control: Control, points: Float64[Tensor, "N k"]) -> Float64[Tensor, "N feet"]:
    r"""Find every foot t in [0, 1] of a point on the curve, $\langle y - b(t), b'(t)\rangle = 0$, and both ends.

    The roots of a polynomial of degree 2n - 1, and one step of Newton's method on the sum itself, which is exact where
    the polynomial's coefficients cancel. The others of these 2n + 1 parameters are not feet.
    """
    velocity = (len(control) - 1) * control.diff(dim=0)
    pairs = (control @ velocity.mT).unsqueeze(-1) - velocity @ points.mT
    rows = torch.stack(product_coefficients(pairs.detach().cpu()), -1).tolist()
    # Not every point has as many feet: the end stands for what is missing.
    t = points.new_ones(len(points), 2 * len(control) - 1)
    for line, row in zip(t, rows, strict=True):
        found = [0.0, *roots(row)]
        line[: len(found)] = line.new_tensor(found)
    apart = points[:, None] - derivative(control, t, 0)
    along = derivative(control, t)
    # Of ⟨y - b, b'⟩ by its own derivative; at a focal point, where that vanishes, the step is long and refused.
    step = (apart * along).sum(-1) / (along.square() - apart * derivative(control, t, 2)).sum(-1)
    return torch.where(step.abs() < REFINEMENT_WIDTH, t + step, t).clamp(0, 1)


def nearest_normal_disk(
    control: Control,
    points: Float64[Tensor, "N k"],
    radius: Float64[Tensor, ""],
    off: Float64[Tensor, "N 1"],
    *,
    fills: bool,
) -> tuple[Float64[Tensor, " N"], Float64[Tensor, "N k"], Float64[Tensor, " N"]]:
    """Of the disks normal to the curve the nearest one: its parameter, what leads from its centre to the point's foot
    in its plane, and its distance.

    Points are `off` the span of the curve; the disks have these dimensions too if `fills`.
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
    distances, best = torch.hypot(torch.hypot(ahead.squeeze(-1), beyond), off).min(-1, keepdim=True)
    nearest = normal.take_along_dim(best[..., None], 1).squeeze(1)
    return t.gather(-1, best).squeeze(-1), nearest, distances.squeeze(-1)


def unit(v: Float64[Tensor, "*b k"]) -> Float64[Tensor, "*b k"]:
    """Normalise `v`; 0 remains 0."""
    size = v.norm(dim=-1, keepdim=True)
    # Not a quotient that is replaced: its derivative at 0 would be NaN all the same.
    return v / torch.where(size > 0, size, torch.ones_like(size))


def _gram(a: Tensor, b: Tensor) -> list[float]:
    """Coefficients of the inner product of two curves."""
    coefficients: list[float] = product_coefficients((a @ b.mT).tolist())
    return coefficients


def _multiply(p: list[float], q: list[float]) -> list[float]:
    """Coefficients of a product of polynomials."""
    return product_coefficients([[a * b for b in q] for a in p])


def _critical_parameters(polynomial: list[float], control: Control) -> Float64[Tensor, " times"]:
    """Where it changes its sign, both ends, and a grid, in which the value at a double root is not missed."""
    return torch.cat([control.new_tensor(list(roots(polynomial))), torch.linspace(0, 1, 33).to(control)])
