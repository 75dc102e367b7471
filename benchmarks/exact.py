"""Reference values of exp, log and transport with 40 digits, on mpmath vectors and matrices."""

from collections.abc import Callable
from typing import Any

import mpmath

mp = mpmath.mp
mp.dps = 40


def dot(a: Any, b: Any) -> Any:
    return mp.fsum(p * q for p, q in zip(a, b, strict=True))


def unit(x: Any) -> Any:
    """Normalise a rounded point of the sphere."""
    return x / mp.sqrt(dot(x, x))


def sphere_exp(x: Any, u: Any) -> Any:
    t = mp.norm(u)
    return mp.cos(t) * x + mp.sin(t) / t * u


def sphere_log(x: Any, y: Any) -> Any:
    x, y = unit(x), unit(y)
    across = y - dot(x, y) * x
    return mp.atan2(mp.norm(across), dot(x, y)) / mp.norm(across) * across


def sphere_transport(x: Any, y: Any, u: Any) -> Any:
    x, y = unit(x), unit(y)
    return u - dot(y, u) / (1 + dot(x, y)) * (x + y)


def moebius(x: Any, y: Any) -> Any:
    xy, xx, yy = dot(x, y), dot(x, x), dot(y, y)
    return ((1 + 2 * xy + yy) * x + (1 - xx) * y) / (1 + 2 * xy + xx * yy)


def ball_exp(x: Any, u: Any) -> Any:
    t = mp.norm(u)
    return moebius(x, mp.tanh(t / (1 - dot(x, x))) / t * u)


def ball_log(x: Any, y: Any) -> Any:
    z = moebius(-x, y)
    return (1 - dot(x, x)) * mp.atanh(mp.norm(z)) / mp.norm(z) * z


def ball_transport(x: Any, y: Any, u: Any) -> Any:
    gyration = moebius(-moebius(y, -x), moebius(y, moebius(-x, u)))
    return gyration * (1 - dot(y, y)) / (1 - dot(x, x))


def minkowski(a: Any, b: Any) -> Any:
    return dot(a, b) - 2 * a[0] * b[0]


def sheet(x: Any) -> Any:
    """Return the point of the hyperboloid with these space coordinates."""
    y = x.copy()
    y[0] = mp.sqrt(1 + mp.fsum(c**2 for c in list(x)[1:]))
    return y


def tangent_to(x: Any, u: Any) -> Any:
    """Return the tangent with these space coordinates."""
    v = u.copy()
    v[0] = mp.fsum(a * b for a, b in zip(list(x)[1:], list(u)[1:], strict=True)) / x[0]
    return v


def lorentz_exp(x: Any, u: Any) -> Any:
    x = sheet(x)
    u = tangent_to(x, u)
    t = mp.sqrt(minkowski(u, u))
    return mp.cosh(t) * x + mp.sinh(t) / t * u


def lorentz_log(x: Any, y: Any) -> Any:
    x, y = sheet(x), sheet(y)
    c = -minkowski(x, y)
    return mp.acosh(c) / mp.sqrt(c**2 - 1) * (y - c * x)


def lorentz_transport(x: Any, y: Any, u: Any) -> Any:
    x, y = sheet(x), sheet(y)
    u = tangent_to(x, u)
    return u + minkowski(y, u) / (1 - minkowski(x, y)) * (x + y)


def function_of(a: Any, f: Callable[[Any], Any]) -> Any:
    """Apply a function to a symmetric matrix."""
    values, basis = mp.eigsy((a + a.T) / 2)
    return basis * mp.diag([f(value) for value in values]) * basis.T


def spd(x: Any, w: Callable[[Any], Any]) -> Any:
    """Return x^½ w(x^-½) x^½."""
    root = function_of(x, mp.sqrt)
    return root * w(root**-1) * root


def spd_exp(x: Any, u: Any) -> Any:
    return spd(x, lambda back: function_of(back * u * back, mp.exp))


def spd_log(x: Any, y: Any) -> Any:
    return spd(x, lambda back: function_of(back * y * back, mp.log))


def spd_transport(x: Any, y: Any, u: Any) -> Any:
    def moved(back: Any) -> Any:
        half = function_of(back * y * back, mp.sqrt)
        return half * back * u * back * half

    return spd(x, moved)


def stiefel_exp(x: Any, u: Any) -> Any:
    a, s, p = x.T * u, u.T * u, x.cols
    a, block = (a - a.T) / 2, mp.zeros(2 * p)
    block[:p, :p], block[:p, p:], block[p:, :p], block[p:, p:] = a, -s, mp.eye(p), a
    both = mp.expm(block)
    return (x * both[:p, :p] + u * both[p:, :p]) * mp.expm(-a)


def orthonormal(x: Any) -> Any:
    """Orthonormalise a rounded frame."""
    return x * function_of(x.T * x, lambda value: 1 / mp.sqrt(value))


def grassmann_exp(x: Any, u: Any) -> Any:
    left, values, right = mp.svd_r(u)
    turn = right.T * mp.diag([mp.cos(s) for s in values]) * right
    return x * turn + left * mp.diag([mp.sin(s) for s in values]) * right


def grassmann_log(x: Any, y: Any) -> Any:
    x, y = orthonormal(x), orthonormal(y)
    inverse = (x.T * y) ** -1
    left, values, right = mp.svd_r((y - x * (x.T * y)) * inverse)
    return left * mp.diag([mp.atan(s) for s in values]) * right
