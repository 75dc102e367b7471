"""The evaluation log of a run: a row for each evaluation, with the cost up to it, and budgets and targets on it."""

from collections.abc import Sequence
from dataclasses import dataclass

from manifoldagg._validation import check_choice
from manifoldagg.errors import ArgumentError

__all__ = ["AXES", "Cost", "Evaluation", "first_reaching", "last_within_budget"]

AXES = ("updates", "time", "gradients", "bytes")
"""The cost axes of a run: updates, virtual seconds, minibatch gradients, bytes sent down and up."""


@dataclass(frozen=True)
class Cost:
    """The cost of a run so far.

    Attributes:
        updates: the number of updates, accepted or not.
        time: of the last of them, in virtual seconds.
        gradients: of minibatches, which the completed tasks computed: calls of the criterion whose value can be
            differentiated, whatever the trainer. A step with `SAM` or `ASAM` has two; one that looks at k places of a
            curve has k. Of a task that diverged those count that it came to, of one that was lost none.
        bytes_down: of the tensors of all messages, including those of tasks that were lost or are in flight.
        bytes_up: of the tensors of all payloads. What a client keeps for itself does not travel.
        rejected: updates that the server rejected, or whose training diverged.
    """

    updates: int = 0
    time: float = 0.0
    gradients: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    rejected: int = 0

    @property
    def bytes(self) -> int:
        """The bytes sent to and received from clients."""
        return self.bytes_down + self.bytes_up

    def value_on(self, axis: str) -> float:
        """Return the cost on an axis: `"updates"`, `"time"`, `"gradients"` or `"bytes"`.

        Raises:
            ArgumentError: if it is another.
        """
        value: float = getattr(self, check_choice("axis", axis, AXES))
        return value


@dataclass(frozen=True, kw_only=True)
class Evaluation(Cost):
    """The metrics of the server's model, and the cost up to the evaluation.

    Attributes:
        accuracy: on the held-out samples of all clients together.
        loss: the mean cross-entropy on them; `None` where it is not finite.
        gini: of the clients' accuracies, each on its own held-out samples.
        theil: likewise.
        staleness: the mean staleness of the updates since the previous evaluation, in versions; 0 where there are none.
        staleness_max: of them the largest.

    Example:
        >>> row = Evaluation(updates=4, bytes_down=900, bytes_up=800, accuracy=0.5, loss=1.2, gini=0.1, theil=0.05)
        >>> row.value_on("bytes"), row.rejected
        (1700, 0)
    """

    accuracy: float
    loss: float | None
    gini: float
    theil: float
    staleness: float = 0.0
    staleness_max: int = 0


def last_within_budget(evaluations: Sequence[Evaluation], axis: str, budget: float) -> Evaluation:
    """Return the last row whose cost is at most `budget`, without interpolation.

    Args:
        evaluations: of one run, in order.
        axis: of what: one of `AXES`.
        budget: in its units.

    Raises:
        ArgumentError: if there is none.

    Example:
        >>> rows = [Evaluation(updates=i, gradients=9 * i, accuracy=i / 4, loss=1.0, gini=0, theil=0) for i in range(4)]
        >>> last_within_budget(rows, "gradients", 20).accuracy
        0.5
    """
    found = [row for row in evaluations if row.value_on(axis) <= budget]
    if not found:
        raise ArgumentError(f"budget: expected a row that had spent {budget:g} of {axis} at most, there is no such row")
    return found[-1]


def first_reaching(evaluations: Sequence[Evaluation], target: float) -> Evaluation | None:
    """Return the first row with an accuracy of at least `target`, or `None`.

    Example:
        >>> rows = [Evaluation(updates=i, accuracy=i / 4, loss=1.0, gini=0, theil=0) for i in range(4)]
        >>> first_reaching(rows, 0.4).updates, first_reaching(rows, 0.8)
        (2, None)
    """
    return next((row for row in evaluations if row.accuracy >= target), None)
