"""Assignment of manifolds to the parameters of a model.

A user assigns a manifold to a parameter by its name or by a glob pattern. A `geoopt.ManifoldParameter` already has a
manifold, which applies unless the user assigns another one.
"""

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn

from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds.flat import Flat
from manifoldagg.manifolds.layout import Entry, Layout
from manifoldagg.manifolds.manifold import Manifold
from manifoldagg.manifolds.power import Power

__all__ = ["Assignment", "assign_manifolds", "declared_manifolds"]

Assignment = Mapping[str, Any]
"""A mapping from names or glob patterns of leaves to manifolds, which may be geoopt manifolds."""


def declared_manifolds(model: nn.Module) -> dict[str, Any]:
    """Return the manifolds that the parameters of a module declare, by parameter name.

    A parameter declares its manifold in its attribute `manifold`, as `geoopt.ManifoldParameter` does.
    """
    declared = {name: getattr(parameter, "manifold", None) for name, parameter in model.named_parameters()}
    return {name: manifold for name, manifold in declared.items() if manifold is not None}


def assign_manifolds(
    layout: Layout, manifolds: Assignment | None, defaults: Assignment | None = None
) -> tuple[tuple[str, Manifold], ...]:
    """Return the pair (name, space) of each leaf that has a manifold.

    Args:
        layout: the layout of the model.
        manifolds: a mapping to spaces from the names of leaves, from tied names, or from patterns. The first match
            applies.
        defaults: the spaces of leaves that `manifolds` does not contain.

    Raises:
        ArgumentError: if a pattern matches no leaf, or the shape of a space does not fit a leaf.
    """
    if not isinstance(manifolds, Mapping | None):
        raise ArgumentError(f"manifolds: expected a mapping of name or pattern to space, got {short_repr(manifolds)}")
    if not manifolds and not defaults:
        return ()
    given = manifolds or {}
    for name in given:
        if not isinstance(name, str):
            raise ArgumentError(f"manifolds: expected names or patterns, got {short_repr(name)}; write {str(name)!r}")
    pairs = []
    # A pattern that matches no leaf is probably misspelt, so all matched patterns are recorded.
    matched = set()
    for leaf in layout.leaves:
        names = [leaf.name, *(alias for alias, name in layout.aliases if name == leaf.name)]
        # An exact name has precedence over every pattern, and an earlier pattern over a later one.
        # `fnmatchcase` is used because `fnmatch` ignores the case of names on Windows.
        patterns = [name for name in names if name in given]
        patterns += [p for p in given if p not in patterns and any(fnmatch.fnmatchcase(name, p) for name in names)]
        matched |= set(patterns)
        if patterns:
            space = _fit_space(leaf, given[patterns[0]], patterns[0])
        else:
            space = _fit_space(leaf, (defaults or {}).get(leaf.name), leaf.name)
        if not space.flat:
            pairs.append((leaf.name, space))
    if unmatched := [pattern for pattern in given if pattern not in matched]:
        raise ArgumentError(f"manifolds: expected names or patterns of leaves, got {', '.join(map(repr, unmatched))}")
    return tuple(pairs)


def _fit_space(leaf: Entry, space: Any, name: str) -> Manifold:
    """Return the manifold of a whole parameter, given the manifold `space` that the user has chosen for it.

    If the parameter has more axes than a point of `space`, it contains several points. For example, with `Sphere(3)`, a
    parameter of shape (10, 3) contains 10 points of the sphere. Its manifold is then `Power(Sphere(3), (10,))`.
    """
    if space is None:
        return Flat(leaf.size)
    if not isinstance(space, Manifold):
        # geoopt is imported only if a manifold does not belong to this package, because the import is slow.
        from manifoldagg.manifolds.geoopt import from_geoopt, is_geoopt

        if not is_geoopt(space):
            given = f"the class {space.__name__}" if isinstance(space, type) else short_repr(space)
            meant = f"a Manifold such as Sphere({leaf.shape[-1] if leaf.shape else 1}), or one of geoopt"
            raise ArgumentError(f"manifolds: {name}: expected {meant}; got {given}")
        return from_geoopt(space, leaf.shape)
    # The trailing axes of the leaf belong to the space. The remaining leading axes are axes of copies.
    copies = leaf.shape[: max(0, len(leaf.shape) - len(space.shape))]
    if copies + space.shape != leaf.shape:
        raise ArgumentError(
            f"manifolds: {leaf.name}: expected a space whose shape is {leaf.shape} or its last axes, got {space} "
            f"of shape {space.shape}"
        )
    return Power(space, copies) if copies else space
