"""Deliberately wrong forms of something, and the laws that must catch them: what the tests of mutants share."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from manifoldagg.errors import ManifoldAggError


class Catalogue:
    """The laws of the things that are `right`, by name, and the mutants that some of them must catch."""

    def __init__(self, right):
        self.right, self.laws, self.mutants = right, {}, {}

    def law(self, function):
        """Register a function of a kit, which raises where the law does not hold."""
        self.laws[function.__name__] = function
        return function

    def caught_by(self, name, *laws):
        """Register a class as a mutant of `name`."""

        def register(thing):
            self.mutants[thing.__name__] = ({name: dataclass(frozen=True)(thing)}, laws)
            return thing

        return register

    def kit(self, **changes):
        """What is right, but for the changes."""
        return SimpleNamespace(**(self.right | changes))

    def catching(self, mutant):
        """The laws named beside a mutant that catch it."""
        changes, laws = self.mutants[mutant]
        return [law for law in laws if breaks(self.laws[law], self.kit(**changes))]

    def tests(self):
        """The two tests of a catalogue that is complete: to be bound to their names in the module."""

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
    """Whether a law does not hold for a kit."""
    try:
        law(wrong)
    except (AssertionError, ArithmeticError, ManifoldAggError):
        return True
    return False
