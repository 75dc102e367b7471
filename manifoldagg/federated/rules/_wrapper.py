"""Rules around another one: what such a rule takes, and what it needs to know of an update, is what that one does."""

from manifoldagg.federated.types import Rule

__all__ = ["WrapperRule"]


class WrapperRule:
    """A rule that holds another one, `rule`, and reads models as that does."""

    rule: Rule

    @property
    def accepts_tensor_lists(self) -> bool:
        """As the rule."""
        return bool(getattr(self.rule, "accepts_tensor_lists", False))

    @property
    def uses_drift(self) -> bool:
        """As the rule."""
        return bool(getattr(self.rule, "uses_drift", True))

    @property
    def cohort(self) -> int:
        """That of the rule."""
        return self.rule.cohort
