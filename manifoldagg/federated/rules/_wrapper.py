"""Base class for rules that wrap another rule."""

from manifoldagg._validation import KeywordHints
from manifoldagg.federated.types import Rule, has_plan

__all__ = ["WrapperRule"]


class WrapperRule(KeywordHints):
    """Base class for rules that wrap another rule.

    A wrapper needs as many updates for a step as the wrapped rule. It uses the drift and accepts lists of tensors if
    the wrapped rule does.
    """

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
