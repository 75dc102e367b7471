"""The law suite: it holds for the spaces, and catches what is wrong."""

import inspect

import pytest
import torch

from manifoldagg import manifolds
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import (
    PRIMITIVES,
    Flat,
    Grassmann,
    Lorentz,
    Manifold,
    ParameterSpace,
    PoincareBall,
    Power,
    Product,
    SpecialOrthogonal,
    Sphere,
    Stiefel,
    SymmetricPositiveDefinite,
    Validated,
)
from manifoldagg.manifolds.geoopt import GeooptManifold
from manifoldagg.testing import LAWS, check_manifold
from tests.manifolds.mutants import MUTANTS
from tests.support import exported, import_sibling_tests

CASES = {
    Flat: [Flat(n) for n in (1, 3, 40)],
    Sphere: [Sphere(n) for n in (2, 3, 30)],
    Grassmann: [Grassmann(3, 2)],
    Lorentz: [Lorentz(2)],
    PoincareBall: [PoincareBall(2)],
    SpecialOrthogonal: [SpecialOrthogonal(3)],
    Stiefel: [Stiefel(3, 1)],
    SymmetricPositiveDefinite: [SymmetricPositiveDefinite(2)],
    Power: [Power(Sphere(3), (2,))],
    Product: [Product({"a": Sphere(2), "b": Flat(1)})],
    ParameterSpace: [ParameterSpace.of(torch.nn.Linear(3, 2).double())],
    Validated: [Validated(Sphere(2))],
}
CASES |= {
    cls: spaces for module in import_sibling_tests(__name__) for cls, spaces in getattr(module, "CASES", {}).items()
}
"""Spaces of every exported class; those outside `WHOLE` have more law tests in files of their own."""

OPTIONS = {
    Lorentz: {"condition": 2e3, "max_distance": 0.7},
    PoincareBall: {"max_distance": 2.0},
    Stiefel: {"max_distance": 0.1},
    SymmetricPositiveDefinite: {"condition": 500.0, "max_distance": 2.0},
}
"""How far the coordinates of a space determine its points; its own file goes farther on Stiefel, where logs cost most."""

WHOLE = {Flat, Sphere, ParameterSpace}
"""Whose laws are tried nowhere else, with all draws."""

EXPORTED = [
    cls
    for cls in exported(manifolds).values()
    # What `from_geoopt` makes is tried on geoopt's spaces, in test_geoopt.py.
    if inspect.isclass(cls) and issubclass(cls, Manifold) and not inspect.isabstract(cls) and cls is not GeooptManifold
]


def test_every_exported_space_has_a_law_case():
    missing = [cls.__name__ for cls in EXPORTED if cls not in CASES]
    assert not missing, f"add CASES = {{{missing[0]}: [spaces]}} to its test file: every law is held against them"


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("space", [space for spaces in CASES.values() for space in spaces], ids=lambda s: str(s)[:30])
def test_every_law_holds(space):
    verdict = check_manifold(
        space, seeds=3 if type(space) in WHOLE else 1, verbose=False, **OPTIONS.get(type(space), {})
    )
    assert verdict.holds, f"\n{verdict}"
    # Each law that is about what the space declares: none is skipped.
    assert len(verdict.findings) == sum(primitives <= space.capabilities for primitives, _ in LAWS.values())


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught_by_its_laws(name, record_property):
    mutant, laws = MUTANTS[name]
    verdict = check_manifold(mutant(3), laws=laws, seeds=2, validate=False, verbose=False)
    assert sorted(verdict.broken_laws) == sorted(laws), f"\n{verdict}"
    record_property("caught", (name, verdict.broken_laws))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.soak
@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_breaks_its_laws_in_a_complete_check(name, record_property):
    mutant, laws = MUTANTS[name]
    broken = check_manifold(mutant(3), validate=False, verbose=False).broken_laws
    assert set(laws) <= set(broken)
    record_property("caught", (f"{name} (all laws)", broken))


def test_there_are_enough_mutants():
    assert len(MUTANTS) >= 25
    assert {law for _, laws in MUTANTS.values() for law in laws} <= set(LAWS)


def test_every_primitive_has_a_mutant():
    wrong = {name for mutant, _ in MUTANTS.values() for name in vars(mutant)}
    spared = sorted(name for name in {*PRIMITIVES, "gradient"} if f"_{name}" not in wrong)
    assert not spared, f"no mutant has a wrong {', '.join(spared)}: add one, and the law that catches it, to mutants.py"


@pytest.mark.usefixtures("as_shipped")
def test_laws_are_selected_by_the_capabilities_of_a_space():
    class Shy(Sphere):
        capabilities = PRIMITIVES - {"transport"}

    verdict = check_manifold(Shy(3), verbose=False)
    assert verdict.holds
    assert {finding.law for finding in verdict.findings} == {
        name for name, (primitives, _) in LAWS.items() if "transport" not in primitives
    }


@pytest.mark.usefixtures("as_shipped")
def test_a_declared_but_missing_primitive_breaks_its_laws():
    class Boastful(Flat):
        def _transport(self, x, y, u):
            raise self._not_implemented("transport")

    verdict = check_manifold(Boastful(2), verbose=False)
    assert "transport_is_an_isometry" in verdict.broken_laws
    assert "has no transport" in str(verdict)


@pytest.mark.usefixtures("as_shipped")
def test_the_result_is_printed_for_each_law(capsys):
    check_manifold(Sphere(3), laws=["log_inverts_exp"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Sphere(n=3): 1 of 1 laws hold"
    assert lines[1].startswith("  holds  log inverts exp")


def test_a_space_without_tangents_is_rejected():
    for options in ({"dtypes": ()}, {"laws": ()}):
        with pytest.raises(ArgumentError, match="expected at least one"):
            check_manifold(Sphere(3), verbose=False, **options)
    with pytest.raises(ArgumentError, match="laws: expected one of"):
        check_manifold(Sphere(3), laws=["log_inverts"], verbose=False)
    for point in (Sphere(1), SpecialOrthogonal(1), Grassmann(3, 3), Stiefel(1, 1)):
        with pytest.raises(ArgumentError, match="expected a space with tangents other than 0"):
            check_manifold(point, verbose=False)


def test_dtypes_may_be_an_iterator():
    verdict = check_manifold(Sphere(3), dtypes=iter([torch.float64]), laws=list(LAWS)[:3], verbose=False)
    assert all(finding.location for finding in verdict.findings)


def test_a_space_without_a_radius_satisfies_the_other_laws():
    class Open(Flat):
        capabilities = PRIMITIVES - {"injectivity_radius"}

        def _injectivity_radius(self, x):
            raise self._not_implemented("injectivity_radius")

    assert check_manifold(Open(3), verbose=False).holds
