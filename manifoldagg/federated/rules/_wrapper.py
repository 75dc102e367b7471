"""Base class of rules that wrap another rule and inherit its requirements."""

from manifoldagg._validation import KeywordHints
from manifoldagg.federated.types import Rule, has_plan

__all__ = ["WrapperRule"]


class WrapperRule(KeywordHints):
    """A rule that wraps another rule, `rule`, and accepts the same model formats."""

    rule: Rule

    @property
    def accepts_tensor_lists(self) -> bool:
        """The value of the wrapped rule."""
        return has_plan(self.rule)

    @property
    def uses_drift(self) -> bool:
        """The value of the wrapped rule."""
        return bool(getattr(self.rule, "uses_drift", True))

    @property
    def cohort(self) -> int:
        """The cohort of the wrapped rule."""
        return self.rule.cohort
