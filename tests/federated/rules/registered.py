"""Lists of the rules that the test files of this folder register for the golden suite and for mutation tests."""

from manifoldagg.federated import rules
from tests.support import exported, import_sibling_tests

RULES = tuple(name for name, kind in exported(rules).items() if hasattr(kind, "step"))
"""Every rule that a module exports."""


def _registering():
    """Return the test modules of this folder, except those that run the registered cases."""
    return import_sibling_tests("tests.federated.rules.test_golden")


def golden():
    """Return the rules in the dicts `GOLDEN` of the test files, by name."""
    cases = [item for module in _registering() for item in getattr(module, "GOLDEN", {}).items()]
    assert len(dict(cases)) == len(cases), "two cases of GOLDEN have the same name"
    return dict(cases)


def mutated():
    """Return the names of the rules for which the test files define mutants."""
    changes = [mutant[0] for module in _registering() for mutant in getattr(module, "MUTANTS", {}).values()]
    return {name for change in changes for name in (change if isinstance(change, dict) else [change.__name__])}


def missing(covered, what):
    """Return, for each exported rule without a case, what to add and where."""
    return [
        f"{name}: add {what} to tests/federated/rules/test_{name.lower()}.py" for name in RULES if name not in covered
    ]
