"""Base class for rules that wrap another rule."""

from manifoldagg._validation import KeywordHints
from manifoldagg.federated.types import Rule, has_plan

__all__ = ["WrapperRule"]


class WrapperRule(KeywordHints):
    """Base class for rules that wrap another rule.

    A wrapper inherits three properties from the wrapped rule:

    - The cohort, which is the number of updates that a synchronous rule needs for one step.
    - Whether the rule uses the drift of the server model since the client started.
    - Whether the rule accepts models as lists of tensors.
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
