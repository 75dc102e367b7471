"""Trimmed mean: a step along the mean of each entry without its smallest and largest values."""

from dataclasses import dataclass, field
from typing import ClassVar

from manifoldagg._validation import check_count, check_number
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules._update_buffer import CoordinateWiseRule
from manifoldagg.federated.schedules import Rate, Weight
from manifoldagg.federated.staleness import Polynomial

__all__ = ["TrimmedMean"]


@dataclass(frozen=True)
class TrimmedMean(CoordinateWiseRule):
    r"""Trimmed mean: a step along the mean of each entry of a buffer without its smallest and largest values.

    After every K updates, each entry of the model changes by

    $$\Theta \leftarrow \Theta + \frac{\eta_g}{K - 2b} \sum_{i=b+1}^{K-b} x_{(i)},$$

    where $x_{(1)} \le \dots \le x_{(K)}$ are the sorted values of this entry in the displacements
    $s(\tau - t_i)\, \Delta_i$.

    Use this rule when up to b of K updates may be Byzantine. If at most b displacements are arbitrary, each entry of
    the step lies between the smallest and the largest value of the other displacements. With more than b arbitrary
    displacements, the step is unbounded.

    With b = 0, the rule equals [`FedBuff`][manifoldagg.federated.rules.FedBuff]. With $b = \lceil K/2 \rceil - 1$, it
    equals [`Median`][manifoldagg.federated.rules.Median].

    Args:
        size: the number K of updates per step.
        trim: the number b of values to discard at each end, less than K / 2.
        rate: the global rate $\eta_g$: a number or a function of the version $\tau$.
        staleness: the staleness weight $s$: any function of an integer.
        transport: the transport of tangents on a curved space: `"parallel"`, `"ladder"` or `"projection"`. The default
            `None` uses parallel transport where a closed form exists, and a ladder otherwise. A flat space accepts only
            `None`.
        rungs: the number of rungs of a ladder.

    Raises:
        ArgumentError: if an option is out of range, or if the space is curved, because the order of entries depends on
            the coordinates.

    Source: Yin et al. 2018, Algorithm 1 (option II) with $\beta = b / K$, applied to displacements.

    Cost: a step reads 11 words per parameter, writes 1 and allocates 0. A buffered update reads 5, writes 1 and
    allocates 2. The buffer stores K - 1 displacements.

    Example:
        >>> import manifoldagg, torch
        >>> rule, model, state = TrimmedMean(4, trim=1), [torch.zeros(1)], None
        >>> for update in (1.0, -1e6, 2.0, 4.0):
        ...     update = [torch.tensor([update])]
        ...     model, state, _ = manifoldagg.aggregate(rule, state, model, [torch.zeros(1)], update)
        >>> model
        [tensor([1.5000])]
    """

    needs_flat: ClassVar[str] = "entrywise trimmed means"
    size: int = 10
    trim: int = 2
    rate: Rate = 1.0
    staleness: Weight = field(default_factory=Polynomial)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("trim", self.trim, at_least=0)
        most = (self.size - 1) // 2
        # If `trim` has its default, the user probably passed only `size`. The message then names `size`.
        if self.trim > most and self.trim == TrimmedMean.trim:
            raise ArgumentError(f"size: expected at least {2 * self.trim + 1} with trim = {self.trim}, got {self.size}")
        check_number("trim", self.trim, at_most=most)

    @property
    def num_trimmed(self) -> int:
        return self.trim
