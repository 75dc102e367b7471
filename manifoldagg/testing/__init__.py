"""Laws that hold a manifold to its names, for our spaces and for yours."""

from manifoldagg.testing.check import Finding, Verdict, check_manifold
from manifoldagg.testing.laws import LAWS, LawCase

__all__ = ["LAWS", "Finding", "LawCase", "Verdict", "check_manifold"]
