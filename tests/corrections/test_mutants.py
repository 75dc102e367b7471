"""Tests that the corrections satisfy their laws and that the laws detect the mutants."""

import pytest

from manifoldagg import corrections
from manifoldagg.errors import ManifoldAggError
from tests.corrections.laws import LAWS, kit
from tests.corrections.mutants import MUTANTS
from tests.support import exported, import_sibling_tests

pytestmark = pytest.mark.usefixtures("as_shipped")

# Import all test files of this folder, because they may register laws and mutants.
list(import_sibling_tests(__name__))


@pytest.mark.parametrize("law", LAWS)
def test_every_law_holds(law):
    LAWS[law](kit())


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught_by_its_laws(name, record_property):
    changes, laws = MUTANTS[name]
    broken = [law for law in laws if breaks(law, kit(**changes))]
    assert broken == list(laws)
    record_property("caught", (name, broken))


def breaks(law, wrong):
    try:
        LAWS[law](wrong)
    except (AssertionError, ArithmeticError, ManifoldAggError):
        return True
    return False


def test_there_are_enough_mutants():
    assert len(MUTANTS) >= 40
    assert {law for _, laws in MUTANTS.values() for law in laws} <= set(LAWS)


def test_every_export_has_a_law_that_catches_a_mutant():
    values = {"Composition", "Corrected", "Correction", "Frame", "Gram", "Transport"}
    caught = {name for changes, _ in MUTANTS.values() for name in changes}
    offered = {name for name, value in exported(corrections).items() if issubclass_of(value, corrections.Correction)}
    for name in sorted((offered | set(corrections.__all__)) - values):
        assert name in caught, f"{name} needs a `law`, and a mutant `caught_by` it, in tests/corrections/test_*.py"


def issubclass_of(value, kind):
    return isinstance(value, type) and issubclass(value, kind)
