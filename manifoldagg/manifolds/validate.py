"""Checks that points are on their manifold, and that vectors are tangent to it.

A point is accepted if it is close to its projection onto the manifold. A vector is accepted if it is close to its
projection onto the tangent space. The wrapper `Validated` runs these checks for every method of a manifold.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldagg._validation import check_finite
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import formulas
from manifoldagg.manifolds.delegate import Delegate
from manifoldagg.manifolds.manifold import Leaf, Manifold, NamedTensors, Point, Tangent, check_is_manifold
from manifoldagg.manifolds.power import factor_parts

__all__ = ["Validated", "check_injectivity_radius", "check_point", "check_tangent"]

OPEN_SET_ROUNDINGS = 64
"""The tolerance for points of open sets, in units of machine epsilon. `project` moves points slightly inside."""


def check_point(space: Manifold, x: Point, *, name: str = "x", tolerance: float | None = None) -> Point:
    r"""Check that points are on the manifold, and return them.

    A point is accepted if it is close to its projection, which is the nearest point of the manifold. Each leaf, such as
    a factor of a product, is checked separately.

    Args:
        space: a space with project.
        x: points (*batch, *shape).
        name: the name of the argument in the error message.
        tolerance: the tolerance for the largest coordinate of the difference between the point and the nearest point.
            It is relative to the largest coordinate of the point, if this is larger than 1. The default is
            $\sqrt\varepsilon$ with the machine epsilon $\varepsilon$ of the dtype in which a model stores the leaf.
            For an open set, which does not contain its boundary, the default is 64 $\varepsilon$ times the largest
            coordinate, unless the leaf is stored in a narrower dtype.

    Raises:
        ArgumentError: if a point is not on the manifold. The message contains the argument, the leaf and the distance.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Sphere
        >>> check_point(Sphere(2), torch.tensor([1.0, 0.1]))
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: x: expected a point of Sphere(n=2), got one 0.00496 away (allowed: 0.000345)
    """
    space._check({}, vectors={name: x})
    check_finite(name, x)
    for leaf, (part,) in factor_parts(space, x.detach()):
        factor = leaf.space
        if factor.flat or part.numel() == 0 or "project" not in factor.capabilities:
            continue
        away = _max_abs(factor, factor._project(part) - part)
        size = _max_abs(factor, part)
        # Near the boundary of an open set, a larger tolerance would accept points outside of the set.
        if factor.open and tolerance is None and leaf.storage_dtype is None:
            allowed = OPEN_SET_ROUNDINGS * torch.finfo(part.dtype).eps * size
        else:
            # The projection can change a coordinate by the rounding error of another, larger coordinate of the point.
            allowed = _relative_tolerance(leaf.storage_dtype or part.dtype, tolerance) * size.clamp(min=1)
        if not bool((away <= allowed).all()):
            # The message reports the largest excess. NaN counts as infinite, because `argmax` must select it.
            i = (away - allowed).nan_to_num(math.inf).argmax()
            raise ArgumentError(
                f"{_leaf_name(name, leaf)}: expected a point of {factor}, got one {away.flatten()[i].item():.3g} away "
                f"(allowed: {allowed.flatten()[i].item():.3g})"
            )
    return x


def check_tangent(space: Manifold, x: Point, u: Tangent, *, name: str = "u", tolerance: float | None = None) -> Tangent:
    r"""Check that the vector `u` is tangent to the manifold at the point `x`, and return the vector.

    A vector is accepted if it is close to its projection onto the tangent space. Each factor of a product, such as each
    parameter of a model, is checked separately.

    Args:
        space: a space with project_tangent.
        x: points of the space, (*batch, *shape).
        u: tangents (*batch, *shape).
        name: the name of the argument in the error message.
        tolerance: the tolerance relative to the largest coordinate of `u`. The default is $\sqrt\varepsilon$ of the
            dtype.

    Raises:
        ArgumentError: if `u` is not tangent. The message contains the argument, the leaf and the norm of the normal
            part.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Sphere
        >>> check_tangent(Sphere(2), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]))
        tensor([0., 2.])
    """
    space._check({}, vectors={"x": x, name: u})
    check_finite(name, u)
    for leaf, (base, part) in factor_parts(space, *torch.broadcast_tensors(x.detach(), u.detach())):
        factor = leaf.space
        if factor.flat or part.numel() == 0 or "project_tangent" not in factor.capabilities:
            continue
        normal = _max_abs(factor, factor._project_tangent(base, part) - part)
        size = _max_abs(factor, part)
        # On the hyperboloid, the projection amplifies the rounding error of u by the squared coordinates of the point.
        allowed = _relative_tolerance(part.dtype, tolerance) * size * _max_abs(factor, base).clamp(min=1).square()
        if not bool((normal <= allowed).all()):
            i = (normal - allowed).nan_to_num(math.inf).argmax()
            raise ArgumentError(
                f"{_leaf_name(name, leaf)}: expected a tangent of {factor} at x, got one with a normal part of "
                f"{normal.flatten()[i].item():.3g} (allowed: {allowed.flatten()[i].item():.3g})"
            )
    return u


@dataclass(frozen=True)
class Validated(Delegate):
    r"""A wrapper of a manifold that validates the arguments of every method.

    Points must be on the manifold, tangents must be tangent to it, and all values must be finite. Methods with two
    points $x$ and $y$ also reject points that are too far apart: $\|\log_x y\|$ must be finite and at most the
    injectivity radius, separately for each factor of a product (such as each parameter of a model).

    The checks cost about as much as the operations themselves, and do not work under `vmap` or `torch.compile`. Use the
    wrapper for untrusted inputs and for debugging.

    Args:
        space: the space to wrap.
        tolerance: the tolerance of [`check_point`][manifoldagg.manifolds.check_point] and
            [`check_tangent`][manifoldagg.manifolds.check_tangent].

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Sphere
        >>> Validated(Sphere(2)).log(torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0]))
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: y: expected a point of Sphere(n=2) within 3.14 of x, got one without a log
    """

    space: Manifold
    tolerance: float | None = None

    def __post_init__(self) -> None:
        check_is_manifold(self.space)

    @property
    def base_space(self) -> Manifold:
        return self.space

    def _check(
        self, points: NamedTensors, *, tangents: NamedTensors | None = None, vectors: NamedTensors | None = None
    ) -> None:
        super()._check(points, tangents=tangents, vectors=vectors)
        for name, point in points.items():
            check_point(self.space, point, name=name, tolerance=self.tolerance)
        for name, vector in (vectors or {}).items():
            check_finite(name, vector)
        for name, tangent in (tangents or {}).items():
            check_tangent(self.space, points["x"], tangent, name=name, tolerance=self.tolerance)
        if {"x", "y"} <= points.keys() and "log" in self.capabilities:
            # The formula is called, because the public method `log` would run these checks again.
            check_injectivity_radius(self.space, points["x"], self._log(points["x"], points["y"]))


def check_injectivity_radius(space: Manifold, x: Tensor, log: Tensor) -> None:
    """Check that logarithms (tangents at the points `x`) are finite and not longer than the injectivity radius.

    Each factor of a product, such as each parameter of a model, is checked separately.

    Raises:
        ArgumentError: if a log is not finite or too long. The message contains the leaf and the distance.
    """
    for leaf, (base, part) in factor_parts(space, *torch.broadcast_tensors(x.detach(), log.detach())):
        factor = leaf.space
        if part.numel() == 0 or not {"inner", "injectivity_radius"} <= factor.capabilities:
            continue
        radius = factor._injectivity_radius(base)
        # NaN marks a point without a log. The negated comparison below then rejects it.
        far = formulas.norm(factor, base, part) if bool(part.isfinite().all()) else radius.new_tensor(math.nan)
        if not bool((far <= radius).all()):
            given = "without a log" if bool(far.isnan().any()) else f"at {far.max().item():.6g}"
            within = f"within {radius.min().item():.3g} of x"
            raise ArgumentError(f"{_leaf_name('y', leaf)}: expected a point of {factor} {within}, got one {given}")


def _relative_tolerance(dtype: torch.dtype, tolerance: float | None) -> float:
    """Return `tolerance`. The default is the square root of the machine epsilon of `dtype`."""
    return math.sqrt(torch.finfo(dtype).eps) if tolerance is None else tolerance


def _max_abs(space: Manifold, x: Tensor) -> Tensor:
    """Return the largest absolute coordinate of each point or tangent, (*batch,)."""
    return x.double().abs().flatten(x.ndim - len(space.shape)).amax(-1)


def _leaf_name(name: str, leaf: Leaf) -> str:
    return f"{name}: {leaf.name}" if leaf.name else name
