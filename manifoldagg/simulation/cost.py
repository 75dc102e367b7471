"""Records of the training cost and the model's metrics during a run, and functions that search these records."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from manifoldagg._validation import check_choice
from manifoldagg.errors import ArgumentError

__all__ = ["AXES", "Cost", "Evaluation", "StartEvaluation", "first_reaching", "last_within_budget"]

AXES = ("updates", "time", "gradients", "bytes")
"""The measures of cost: updates, virtual seconds, minibatch gradients, and bytes sent to and from the clients."""


@dataclass(frozen=True)
class Cost:
    """The cost of a run so far.

    Attributes:
        updates: the number of updates, accepted or not.
        time: the time of the last update, in virtual seconds.
        gradients: the number of minibatch gradients of completed tasks. For every trainer, each call of the loss
            function with a differentiable value counts. A step with `SAM` or `ASAM` has two gradients. A step that
            evaluates k points of a curve has k gradients. A diverged task counts the gradients before the divergence. A
            lost task does not count.
        bytes_down: the bytes of the tensors of all messages, including messages of lost tasks and of tasks in flight.
        bytes_up: the bytes of the tensors of all payloads, without client states that remain on the client.
        rejected: the number of updates that the server rejected or whose training diverged.
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
            ArgumentError: if the axis is unknown.
        """
        value: float = getattr(self, check_choice("axis", axis, AXES))
        return value


@dataclass(frozen=True, kw_only=True)
class Evaluation(Cost):
    """The metrics of the server's model, and the cost up to the evaluation.

    The attributes `updates`, `time`, `gradients`, `bytes_down`, `bytes_up` and `rejected` are described in
    [`Cost`][manifoldagg.simulation.cost.Cost].

    Attributes:
        accuracy: the primary metric of the data set on the held-out samples of all clients. By default, it is the
            accuracy.
        loss: the mean of the criterion on these samples, by default the cross-entropy. It is `None` if the mean is not
            finite.
        gini: the Gini index of the clients' values of the primary metric. The value of a client is measured on its own
            held-out samples. Clients for which the metric is undefined are omitted.
        theil: the Theil index of these values.
        staleness: the mean staleness of the updates since the previous evaluation, in versions; 0 without updates.
        staleness_max: the largest staleness of these updates.
        average_accuracy: the primary metric of the run's weight average on the same samples; `None` without an average.
        average_loss: the mean loss of the average; `None` without an average, or if the mean is not finite.
        metrics: all metrics by name, if the data set sets its metrics; otherwise `None`.

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
    average_accuracy: float | None = None
    average_loss: float | None = None
    metrics: Mapping[str, float] | None = None

    @property
    def metric_name(self) -> str:
        """The name of the primary metric."""
        return next(iter(self.metrics or ("accuracy",)))

    def asdict(self) -> dict[str, Any]:
        """Return the fields as a row of a log, without `metrics` if it is `None`."""
        row = asdict(self)
        return row if row["metrics"] is not None else {name: row[name] for name in row if name != "metrics"}


@dataclass(frozen=True)
class StartEvaluation:
    """The metrics of the start model of one task, on the held-out samples of its client.

    The start model is the model in the message of the server. With OrthoFL, it is the client's own calibrated model,
    and differs from the global model. If the client itself computes its start model (`protocol="client"`), the model in
    the message is the one before this computation.

    Attributes:
        client: the client that received the start model.
        updates: the number of updates that the server had received.
        time: the virtual time of the dispatch in seconds.
        accuracy: the primary metric on the held-out samples of the client, by default the accuracy.
        loss: the mean loss on these samples, or `None` if the mean is not finite.

    Source: OrthoFL §5.5 and Figure 6.
    """

    client: int
    updates: int
    time: float
    accuracy: float
    loss: float | None


def last_within_budget(evaluations: Sequence[Evaluation], axis: str, budget: float) -> Evaluation:
    """Return the last evaluation whose cost is at most `budget`, without interpolation.

    Args:
        evaluations: the evaluations of one run, in order.
        axis: the cost axis, one of `AXES`.
        budget: the budget in the units of the axis.

    Raises:
        ArgumentError: if no row is within the budget.

    Example:
        >>> rows = [Evaluation(updates=i, gradients=9 * i, accuracy=i / 4, loss=1.0, gini=0, theil=0) for i in range(4)]
        >>> last_within_budget(rows, "gradients", 20).accuracy
        0.5
    """
    found = [row for row in evaluations if row.value_on(axis) <= budget]
    if not found:
        raise ArgumentError(f"budget: expected a row with at most {budget:g} {axis}, got rows with a higher cost")
    return found[-1]


def first_reaching(evaluations: Sequence[Evaluation], target: float) -> Evaluation | None:
    """Return the first evaluation whose primary metric is at least `target`, or `None`.

    Example:
        >>> rows = [Evaluation(updates=i, accuracy=i / 4, loss=1.0, gini=0, theil=0) for i in range(4)]
        >>> first_reaching(rows, 0.4).updates, first_reaching(rows, 0.8)
        (2, None)
    """
    return next((row for row in evaluations if row.accuracy >= target), None)
