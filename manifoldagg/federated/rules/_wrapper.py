"""Base class for rules that wrap another rule."""

from manifoldagg._validation import KeywordHints
from manifoldagg.federated.types import Rule, has_plan

__all__ = ["WrapperRule"]


class WrapperRule(KeywordHints):
    """Base class for rules that wrap another rule and have the same requirements as the wrapped rule."""

    rule: Rule

    @property
    def accepts_tensor_lists(self) -> bool:
        """Whether the wrapped rule accepts tensor lists."""
        return has_plan(self.rule)

    @property
    def uses_drift(self) -> bool:
        """Whether the wrapped rule uses the drift."""
        return bool(getattr(self.rule, "uses_drift", True))

    @property
    def cohort(self) -> int:
        """The cohort of the wrapped rule."""
        return self.rule.cohort
