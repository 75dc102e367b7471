"""Assignment of manifolds to the leaves of a model."""

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
"""Name or glob pattern to a `Manifold`, or to a geoopt manifold."""


def declared_manifolds(model: nn.Module) -> dict[str, Any]:
    """Return the manifolds that a module's parameters declare, by name."""
    brought = {name: getattr(parameter, "manifold", None) for name, parameter in model.named_parameters()}
    return {name: manifold for name, manifold in brought.items() if manifold is not None}


def assign_manifolds(
    layout: Layout, manifolds: Assignment | None, defaults: Assignment | None = None
) -> tuple[tuple[str, Manifold], ...]:
    """Return (leaf, space) for each curved leaf.

    Args:
        layout: of the model.
        manifolds: by a leaf's own name, by one that is tied to it, or by the first pattern that matches.
        defaults: for leaves that `manifolds` does not speak of.

    Raises:
        ArgumentError: if a pattern matches no leaf, or a space does not fit a leaf.
    """
    if not isinstance(manifolds, Mapping | None):
        raise ArgumentError(f"manifolds: expected a mapping of name or pattern to space, got {short_repr(manifolds)}")
    if not manifolds and not defaults:
        return ()
    said = manifolds or {}
    for name in said:
        if not isinstance(name, str):
            raise ArgumentError(f"manifolds: expected names or patterns, got {short_repr(name)}; write {str(name)!r}")
    pairs = []
    matched = set()
    for leaf in layout.leaves:
        names = [leaf.name, *(alias for alias, name in layout.aliases if name == leaf.name)]
        patterns = [name for name in names if name in said]
        patterns += [p for p in said if p not in patterns and any(fnmatch.fnmatchcase(name, p) for name in names)]
        matched |= set(patterns)
        if patterns:
            space = _fit_space(leaf, said[patterns[0]], patterns[0])
        else:
            space = _fit_space(leaf, (defaults or {}).get(leaf.name), leaf.name)
        if not space.flat:
            pairs.append((leaf.name, space))
    if odd := [pattern for pattern in said if pattern not in matched]:
        raise ArgumentError(f"manifolds: no leaf is called {', '.join(map(repr, odd))}")
    return tuple(pairs)


def _fit_space(leaf: Entry, space: Any, name: str) -> Manifold:
    """The space of a whole leaf, said under `name`: itself, or as many copies as the leaf has further axes for."""
    if space is None:
        return Flat(leaf.size)
    if not isinstance(space, Manifold):
        # Only where one is given: loading geoopt takes longer than loading this package.
        from manifoldagg.manifolds.geoopt import from_geoopt, is_geoopt

        if not is_geoopt(space):
            given = f"the class {space.__name__}" if isinstance(space, type) else short_repr(space)
            meant = f"a Manifold such as Sphere({leaf.shape[-1] if leaf.shape else 1}), or one of geoopt"
            raise ArgumentError(f"manifolds: {name}: expected {meant}; got {given}")
        return from_geoopt(space, leaf.shape)
    copies = leaf.shape[: max(0, len(leaf.shape) - len(space.shape))]
    if copies + space.shape != leaf.shape:
        raise ArgumentError(f"manifolds: {space} has points of shape {space.shape}, {leaf.name} has {leaf.shape}")
    return Power(space, copies) if copies else space
