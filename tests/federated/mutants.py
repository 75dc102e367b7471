"""A catalogue of laws and of mutants, which are deliberately wrong versions that the laws must detect."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from manifoldagg.errors import ManifoldAggError


class Catalogue:
    """Laws by name, the correct objects `right` to which they apply, and the mutants that some of the laws must detect."""

    def __init__(self, right):
        self.right, self.laws, self.mutants = right, {}, {}

    def law(self, function):
        """Register a function of a kit as a law. The function raises an exception if the law is violated."""
        self.laws[function.__name__] = function
        return function

    def caught_by(self, name, *laws):
        """Register a class as a mutant of `name`."""

        def register(thing):
            self.mutants[thing.__name__] = ({name: dataclass(frozen=True)(thing)}, laws)
            return thing

        return register

    def kit(self, **changes):
        """Return the correct objects with some of them replaced."""
        return SimpleNamespace(**(self.right | changes))

    def catching(self, mutant):
        """Return the laws, among those named for a mutant, that detect it."""
        changes, laws = self.mutants[mutant]
        return [law for law in laws if breaks(self.laws[law], self.kit(**changes))]

    def tests(self):
        """Return the two tests of a complete catalogue. Bind them to their names in the test module."""

        @pytest.mark.parametrize("name", self.laws)
        def test_every_law_holds(name):
            self.laws[name](self.kit())

        @pytest.mark.parametrize("name", self.mutants)
        def test_every_mutant_is_caught_by_its_laws(name, record_property):
            broken = self.catching(name)
            assert broken == list(self.mutants[name][1])
            record_property("caught", (name, broken))

        return test_every_law_holds, test_every_mutant_is_caught_by_its_laws


def breaks(law, wrong):
    """Return whether a kit violates a law."""
    try:
        law(wrong)
    except (AssertionError, ArithmeticError, ManifoldAggError):
        return True
    return False
