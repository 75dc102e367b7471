"""Checks of the laws that manifolds and aggregation rules must satisfy."""

from manifoldagg.testing.check import check_manifold
from manifoldagg.testing.laws import LAWS, LawCase
from manifoldagg.testing.rule_case import RuleCase
from manifoldagg.testing.rule_check import check_rule
from manifoldagg.testing.rule_laws import RULE_LAWS
from manifoldagg.testing.verdict import Finding, Verdict

__all__ = ["LAWS", "RULE_LAWS", "Finding", "LawCase", "RuleCase", "Verdict", "check_manifold", "check_rule"]
