"""Laws that hold a manifold to its names, for our spaces and for yours."""

from manifoldagg.testing.check import check_manifold
from manifoldagg.testing.laws import LAWS, LawCase
from manifoldagg.testing.verdict import Finding, Verdict

__all__ = ["LAWS", "Finding", "LawCase", "Verdict", "check_manifold"]
