"""Rotation of a control point with the chord of its curve."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg._validation import check_finite, check_shape
from manifoldagg.corrections.frame import require_flat
from manifoldagg.kernels import combine, gram
from manifoldagg.manifolds import Manifold

__all__ = ["rotate_control", "rotation_coefficients"]

NEARLY_OPPOSITE = 1e-3
"""Below this $1 + \\cos$ the inner products alone lose the plane: the second direction is formed and read again."""
SMALL = 1e-280
"""Squares below this have lost digits, or all of them."""


def rotate_control(
    control: Float[Tensor, "..."],
    base: Float[Tensor, "..."],
    end: Float[Tensor, "..."],
    current: Float[Tensor, "..."],
    corrected_end: Float[Tensor, "..."],
    *,
    space: Manifold | None = None,
) -> Float[Tensor, "..."]:
    r"""Return the control point of a curve with a corrected chord, at the same position relative to the chord.

    $$\hat\varphi = \tfrac12 (\Theta^\tau + \hat\Theta) + R\left(\varphi - \tfrac12 (\Theta^t + \Theta_i)\right)$$

    $R$ turns the plane of the two chords so that the unit vector $a$ of $\Theta_i - \Theta^t$ becomes that $b$ of
    $\hat\Theta - \Theta^\tau$, and leaves what is orthogonal to it. With Gram-Schmidt coordinates of that plane,

    $$R\, x = x - \frac{\langle a + b, x\rangle}{1 + \langle a, b\rangle}\,(a + b) + 2 \langle a, x\rangle\, b.$$

    Opposite chords have no plane: then $R$ flips the component along $a$ only. They count as opposite where the sine of
    their angle is below $\varepsilon^{3/4}$ of the dtype, rounding. A chord of length 0 has no direction: $R$ is the
    identity, as it is for the tangent correction, whose chords are parallel.

    Args:
        control: $\varphi$, the interior control point of a curve of degree 2: (P,), or of the shape of `space`.
        base: $\Theta^t$, where the update started.
        end: $\Theta_i$, where it ended.
        current: $\Theta^\tau$, where the server is.
        corrected_end: $\hat\Theta$, the corrected end point: compute it first.
        space: of the points; a curved one is refused: a rotation of points needs flat leaves.

    Returns:
        $\hat\varphi$, of the shape and dtype of `control`, summed in float64 and rounded once.

    Raises:
        ArgumentError: if shapes differ, a value is not finite or too large for its square, or `space` is curved.

    Source: Report (17). Cost: $O(P)$, one pass that reads and one that writes.

    Example:
        >>> import torch
        >>> zero, right, up = torch.zeros(2), torch.tensor([2.0, 0.0]), torch.tensor([0.0, 2.0])
        >>> rotate_control(torch.tensor([1.0, 1.0]), zero, right, zero, up)
        tensor([-1.,  1.])
    """
    if space is None:
        check_shape("control", control, None)
    else:
        require_flat(space)
        check_shape("control", control, *space.axes)
    given = {"control": control, "base": base, "end": end, "current": current, "corrected_end": corrected_end}
    for name, point in given.items():
        check_finite(name, check_shape(name, point, *control.shape))
    phi, start, stop, now, goal = (point.flatten() for point in given.values())
    rows = [phi, stop, goal]
    minus = [start, start, now]
    inner = gram(rows, minus=minus)[0]
    check_finite("points: inner products", inner.detach())
    line = rotation_coefficients(inner)
    if line is None:
        return _rotate_degenerate(phi, start, stop, now, goal).view(control.shape)
    # In the wider dtype where the two differ: it is rounded once, at the end.
    now = now if now.dtype == control.dtype else now.double()
    moved = combine(now, rows, line, minus=minus)
    return moved.to(control.dtype).view(control.shape)


def rotation_coefficients(inner: Any) -> list[Any] | None:
    r"""Return the rotated control point less $\Theta^\tau$ as a combination of three vectors.

    Args:
        inner: (3, 3) numbers, of $\varphi - \Theta^t$, $d = \Theta_i - \Theta^t$ and $e = \hat\Theta - \Theta^\tau$.

    Returns:
        The coefficients on the three; `None` where a chord is so short, or the two are so nearly opposite, that inner
        products do not say how to turn.
    """
    pd = inner[0][1]
    pe = inner[0][2]
    dd = inner[1][1]
    de = inner[1][2]
    ee = inner[2][2]
    # x of the formula above is φ − Θᵗ − d/2, and the midpoint is Θ^τ + e/2.
    if bool(dd < SMALL) or bool(ee < SMALL):
        return None
    a = 1 / dd**0.5
    b = 1 / ee**0.5
    along_a = a * (pd - dd / 2)
    along_b = b * (pe - de / 2)
    cosine = max(-1.0, min(1.0, a * de * b))
    # 1 + cos divides, and where chords are nearly opposite it is a difference of nearly equal numbers.
    if bool(cosine < NEARLY_OPPOSITE - 1):
        return None
    share = (along_a + along_b) / (1 + cosine)
    return [1.0, -0.5 - share * a, 0.5 + (2 * along_a - share) * b]


def _rotate_degenerate(phi: Tensor, start: Tensor, stop: Tensor, now: Tensor, goal: Tensor) -> Tensor:
    """The same for chords that are nearly opposite, or tiny: the plane by Gram-Schmidt on vectors, orthogonal twice."""
    e1 = _unit_vector(stop.double() - start.double())
    unit = _unit_vector(goal.double() - now.double())
    e2 = unit - (e1 @ unit) * e1
    # Twice is enough (Kahan; Parlett 1998, §6.9): the first pass leaves ε of `unit`, which is large beside a small e2.
    e2 = e2 - (e1 @ e2) * e1
    cosine = e1 @ unit
    sine = e2.norm()
    x = phi.double() - (start.double() + stop.double()) / 2
    middle = (now.double() + goal.double()) / 2
    if not (bool(e1.any()) and bool(unit.any())):
        return torch.add(middle, x).to(phi.dtype)
    if bool(sine <= torch.finfo(phi.dtype).eps ** 0.75):
        turned = x - 2 * (e1 @ x) * e1
        return torch.add(middle, turned).to(phi.dtype)
    e2 = e2 / sine
    p = e1 @ x
    q = e2 @ x
    turned = x + ((cosine - 1) * p - sine * q) * e1 + (sine * p + (cosine - 1) * q) * e2
    return torch.add(middle, turned).to(phi.dtype)


def _unit_vector(v: Tensor) -> Tensor:
    """The unit vector, whatever the scale; zero of zero."""
    # Scaled by the largest entry first: squares of tiny entries would underflow, of huge ones overflow.
    largest = v.detach().abs().amax() if v.numel() else v.new_ones(())
    if not bool(largest > 0):
        return torch.zeros_like(v)
    v = v / largest
    unit: Tensor = v / v.norm()
    return unit
