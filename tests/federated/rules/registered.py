"""What the test files of this folder register of rules: a case for the golden suite each, and mutants."""

from manifoldagg.federated import rules
from tests.support import beside, exported

RULES = tuple(name for name, kind in exported(rules).items() if hasattr(kind, "step"))
"""Every rule that a module exports."""


def _registering():
    """All but the suites that play what is registered."""
    return beside("tests.federated.rules.test_golden")


def golden():
    """The rules that test files have in a dict `GOLDEN`, by what they are called there."""
    cases = [item for module in _registering() for item in getattr(module, "GOLDEN", {}).items()]
    assert len(dict(cases)) == len(cases), "two cases of GOLDEN have the same name"
    return dict(cases)


def mutated():
    """The names of what the mutants of all test files are mutants of."""
    changes = [mutant[0] for module in _registering() for mutant in getattr(module, "MUTANTS", {}).values()]
    return {name for change in changes for name in (change if isinstance(change, dict) else [change.__name__])}


def missing(covered, what):
    """What to add where, for each exported rule that is not covered."""
    return [
        f"{name}: add {what} to tests/federated/rules/test_{name.lower()}.py" for name in RULES if name not in covered
    ]
