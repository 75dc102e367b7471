"""Rotation of the middle control point of a quadratic curve when the ends of the curve move.

The chord is the line between the two ends. If a correction moves the ends, the control point rotates together with the
chord, so that its position relative to the chord stays the same.
"""

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
r"""The bound on $1 + \cos$ of two chords, below which the chords count as nearly opposite.

The inner products of such chords do not determine their plane accurately. The rotation is then computed from the
vectors themselves.
"""
SMALL = 1e-280
"""The bound on the squared length of a chord, below which underflow has removed some or all of its digits."""


def rotate_control(
    control: Float[Tensor, "..."],
    base: Float[Tensor, "..."],
    end: Float[Tensor, "..."],
    current: Float[Tensor, "..."],
    corrected_end: Float[Tensor, "..."],
    *,
    space: Manifold | None = None,
) -> Float[Tensor, "..."]:
    r"""Rotate the middle control point of a curve so that its position relative to the corrected chord stays the same.

    A correction moves both ends of a curve of degree 2, so its middle control point $\varphi$ must follow. The chord of
    the curve is $\Theta_i - \Theta^t$, and the corrected chord is $\hat\Theta - \Theta^\tau$. The new control point is

    $$\hat\varphi = \tfrac12 (\Theta^\tau + \hat\Theta) + R\left(\varphi - \tfrac12 (\Theta^t + \Theta_i)\right)$$

    $R$ rotates the plane of the two chords. It maps the unit vector $a$ of the chord to the unit vector $b$ of the
    corrected chord, and leaves vectors orthogonal to the plane unchanged:

    $$R\, x = x - \frac{\langle a + b, x\rangle}{1 + \langle a, b\rangle}\,(a + b) + 2 \langle a, x\rangle\, b.$$

    There are two special cases:

    - Opposite chords do not span a plane. $R$ then negates the component along $a$ and leaves the rest unchanged.
      Chords count as opposite if the sine of their angle is below $\varepsilon^{3/4}$, where $\varepsilon$ is the
      machine epsilon of the dtype. A smaller sine could result from rounding errors.
    - A chord of length 0 has no direction. $R$ is then the identity, as for parallel chords.

    Args:
        control: $\varphi$, the interior control point of a curve of degree 2: (P,), or of the shape of `space`.
        base: $\Theta^t$, the point where the update started.
        end: $\Theta_i$, the point where the update ended.
        current: $\Theta^\tau$, the current model of the server.
        corrected_end: $\hat\Theta$, the corrected end point.
        space: the space of the points. It must be flat, because points of a curved space cannot be rotated.

    Returns:
        $\hat\varphi$, of the shape and dtype of `control`, summed in float64 and rounded once.

    Raises:
        ArgumentError: if shapes differ, if a value is not finite or its square overflows, or if `space` is curved.

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
    # The differences are φ - Θᵗ, d and e, in the order that `rotation_coefficients` expects.
    rows = [phi, stop, goal]
    minus = [start, start, now]
    inner = gram(rows, minus=minus)[0]
    check_finite("points: inner products", inner.detach())
    line = rotation_coefficients(inner)
    if line is None:
        return _rotate_degenerate(phi, start, stop, now, goal).view(control.shape)
    # The base of the sum is converted to float64 if the dtypes differ, so that the result is rounded only once.
    now = now if now.dtype == control.dtype else now.double()
    moved = combine(now, rows, line, minus=minus)
    return moved.to(control.dtype).view(control.shape)


def rotation_coefficients(inner: Any) -> list[Any] | None:
    r"""Compute the new control point of `rotate_control` as a linear combination, from inner products alone.

    A quadratic curve leads from $\Theta^t$ to $\Theta_i$ and has the control point $\varphi$. If its ends move to
    $\Theta^\tau$ and $\hat\Theta$, `rotate_control` moves the control point to $\hat\varphi$. The vector
    $\hat\varphi - \Theta^\tau$ is a linear combination of three vectors:

    - $\varphi - \Theta^t$, the control point relative to the start;
    - $d = \Theta_i - \Theta^t$, the chord (the line between the ends of the curve);
    - $e = \hat\Theta - \Theta^\tau$, the new chord.

    Args:
        inner: (3, 3), the inner products of these vectors.

    Returns:
        The three coefficients. If a chord is very short, or if the chords are nearly opposite, the inner products do
        not determine the rotation accurately. The result is then `None`.
    """
    pd = inner[0][1]
    pe = inner[0][2]
    dd = inner[1][1]
    de = inner[1][2]
    ee = inner[2][2]
    # In the formula of `rotate_control`, x is φ − Θᵗ − d/2, and the midpoint of the new chord is Θ^τ + e/2.
    if bool(dd < SMALL) or bool(ee < SMALL):
        return None
    # a and b are the reciprocal lengths of the chords. `along_a` and `along_b` are the components of x.
    a = 1 / dd**0.5
    b = 1 / ee**0.5
    along_a = a * (pd - dd / 2)
    along_b = b * (pe - de / 2)
    # Rounding can make |cos| slightly larger than 1.
    cosine = max(-1.0, min(1.0, a * de * b))
    # 1 + cos is a divisor. For nearly opposite chords it is a difference of nearly equal numbers, so its digits cancel.
    if bool(cosine < NEARLY_OPPOSITE - 1):
        return None
    share = (along_a + along_b) / (1 + cosine)
    return [1.0, -0.5 - share * a, 0.5 + (2 * along_a - share) * b]


def _rotate_degenerate(phi: Tensor, start: Tensor, stop: Tensor, now: Tensor, goal: Tensor) -> Tensor:
    """Compute `rotate_control` for chords that are very short or nearly opposite."""
    # The inner products of such chords do not determine the rotation accurately. The Gram-Schmidt method therefore
    # computes an orthonormal basis of the plane of rotation from the vectors, with one re-orthogonalisation.
    e1 = _unit_vector(stop.double() - start.double())
    unit = _unit_vector(goal.double() - now.double())
    e2 = unit - (e1 @ unit) * e1
    # Twice is enough (Kahan; Parlett 1998, §6.9). The first pass leaves an error of ε times `unit`, which is large
    # relative to a small e2.
    e2 = e2 - (e1 @ e2) * e1
    cosine = e1 @ unit
    sine = e2.norm()
    x = phi.double() - (start.double() + stop.double()) / 2
    middle = (now.double() + goal.double()) / 2
    if not (bool(e1.any()) and bool(unit.any())):
        return torch.add(middle, x).to(phi.dtype)
    # For a smaller sine, rounding errors would determine the second direction of the plane.
    if bool(sine <= torch.finfo(phi.dtype).eps ** 0.75):
        turned = x if bool(cosine > 0) else x - 2 * (e1 @ x) * e1
        return torch.add(middle, turned).to(phi.dtype)
    e2 = e2 / sine
    p = e1 @ x
    q = e2 @ x
    # The rotation minus the identity acts only in the plane of e1 and e2.
    turned = x + ((cosine - 1) * p - sine * q) * e1 + (sine * p + (cosine - 1) * q) * e2
    return torch.add(middle, turned).to(phi.dtype)


def _unit_vector(v: Tensor) -> Tensor:
    """Return the unit vector of `v` without overflow or underflow, or zero if `v` is zero."""
    # Divide by the largest entry first. Squares of tiny entries would underflow, and squares of huge entries would
    # overflow.
    largest = v.detach().abs().amax() if v.numel() else v.new_ones(())
    if not bool(largest > 0):
        return torch.zeros_like(v)
    v = v / largest
    unit: Tensor = v / v.norm()
    return unit
