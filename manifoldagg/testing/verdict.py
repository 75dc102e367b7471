"""The results of checking laws: one finding per law, and a verdict over all laws."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Finding", "Verdict"]


@dataclass(frozen=True)
class Finding:
    """The result of checking one law of a manifold or of an aggregation rule.

    Attributes:
        law: the name of the law.
        ratio: the largest error divided by the error that the law allows. The law holds if the ratio is at most 1. For
            an exact law, the ratio is 0 or infinity.
        location: a description of the case with the largest error, and of the exception if one was raised. For an exact
            law, a description of the first violation.
        exact: whether the law requires bitwise equality and has no tolerance.
    """

    law: str
    ratio: float
    location: str
    exact: bool = False

    @property
    def holds(self) -> bool:
        """Whether the law holds in every case."""
        return self.ratio <= 1

    def __str__(self) -> str:
        name = self.law.replace("_", " ")
        mark = "holds " if self.holds else "BROKEN"
        if self.exact:
            return f"{mark} {name}{self.location}"
        return f"{mark} {name:<60} {self.ratio:9.3g} of the tolerance{self.location}"


@dataclass(frozen=True)
class Verdict:
    """The results of checking the laws (the required properties) of a manifold or of an aggregation rule.

    Attributes:
        subject: the name of the manifold or rule, with its options.
        findings: the result for each checked law.
        omitted: a mapping from the name of each unchecked law to the reason why it was not checked.
    """

    subject: str
    findings: tuple[Finding, ...]
    omitted: Mapping[str, str] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether every law holds."""
        return all(finding.holds for finding in self.findings)

    @property
    def broken_laws(self) -> list[str]:
        """The names of the broken laws."""
        return [finding.law for finding in self.findings if not finding.holds]

    def __str__(self) -> str:
        num_holding = sum(finding.holds for finding in self.findings)
        lines = [f"{self.subject}: {num_holding} of {len(self.findings)} laws hold"]
        lines += [f"  {finding}" for finding in self.findings]
        lines += [f"  omitted {name.replace('_', ' ')}: {reason}" for name, reason in self.omitted.items()]
        return "\n".join(lines)


def exact_finding(law: str, location: str) -> Finding:
    """Return the finding of an exact law. The law holds if `location` is empty.

    Example:
        >>> print(exact_finding("step_is_pure", ": seed 0: the model differs"))
        BROKEN step is pure: seed 0: the model differs
    """
    return Finding(law, math.inf if location else 0.0, location, exact=True)
