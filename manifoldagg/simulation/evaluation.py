"""Evaluation of the server's model on the held-out samples: metrics, loss and fairness between clients."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from manifoldagg._validation import check_vector
from manifoldagg.curves import refresh_buffers
from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.federated import Server, Ticket
from manifoldagg.federated.types import Averaging
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.simulation.cost import Cost, Evaluation, StartEvaluation
from manifoldagg.simulation.dataset import FederatedDataset

__all__ = ["EvaluationLog", "Evaluator", "SampleStatistics", "gini", "theil"]

EVAL_BATCH_SIZE = 1_000
"""The number of samples per forward pass."""


class SampleStatistics(NamedTuple):
    """The loss of a model for each held-out sample, and the statistics from which its metrics are computed.

    Attributes:
        loss: an array of shape (samples,) with the loss of each sample. If a sample has several tokens or labels, its
            loss is their mean loss.
        statistics: an array (samples, ...) for each function `Metric.statistics`, with the results of this function.
            `Metric.compute` computes the metric from this array. Metrics with the same function share an array.
    """

    loss: np.ndarray
    statistics: Mapping[Callable[[Tensor, Tensor], Tensor], np.ndarray]


class Evaluator:
    """An evaluator of models on the held-out samples."""

    def __init__(self, federation: FederatedDataset) -> None:
        self._federation = federation
        self._held_out = [part for part in federation.held_out if len(part)]
        self._stops = list(accumulate(map(len, federation.held_out)))
        index = torch.from_numpy(np.concatenate(self._held_out))
        self._inputs = federation.dataset.inputs[index]
        self._labels = federation.dataset.labels[index]
        self._metrics = federation.dataset.metrics
        self._primary = next(iter(self._metrics.values()))
        self._model = federation.model().eval()

    def evaluate(self, model: Mapping[str, Tensor], samples: slice = slice(None)) -> SampleStatistics:
        """Evaluate a state dict on a range of the held-out samples, in a single pass."""
        self._model.load_state_dict(model)
        inputs = self._inputs[samples].split(EVAL_BATCH_SIZE)
        labels = self._labels[samples].split(EVAL_BATCH_SIZE)
        functions = dict.fromkeys(metric.statistics for metric in self._metrics.values())
        losses: list[Tensor] = []
        statistics: dict[Callable[[Tensor, Tensor], Tensor], list[Tensor]] = {function: [] for function in functions}
        with torch.no_grad():
            for batch, targets in zip(inputs, labels, strict=True):
                scores = self._model(batch)
                losses.append(self._federation.dataset.criterion(scores, targets, reduction="none").double())
                for function, parts in statistics.items():
                    parts.append(function(scores, targets))
        return SampleStatistics(
            torch.cat(losses).view(sum(map(len, labels)), -1).mean(1).numpy(),
            {function: torch.cat(parts).numpy() for function, parts in statistics.items()},
        )

    def metrics(self, found: SampleStatistics) -> dict[str, float]:
        """Compute the metrics of the evaluated samples, by name.

        Raises:
            ArgumentError: if a metric is undefined for these samples.
        """
        values = {name: metric.compute(found.statistics[metric.statistics]) for name, metric in self._metrics.items()}
        for name, value in values.items():
            if math.isnan(value):
                raise ArgumentError(f"metrics: expected {name} to be defined on the held-out samples, got NaN")
        return values

    def primary(self, found: SampleStatistics) -> float:
        """Compute the primary metric of the evaluated samples, or return NaN if it is undefined."""
        return self._primary.compute(found.statistics[self._primary.statistics])

    def samples_of(self, client: int) -> slice:
        """Return the range of a client's held-out samples among those of all clients."""
        return slice(self._stops[client] - len(self._federation.held_out[client]), self._stops[client])

    def evaluate_average(self, point: Tensor) -> SampleStatistics:
        """Evaluate the average of several versions of the server's model.

        `point` contains the averaged parameters. The BatchNorm statistics are recomputed for these parameters on the
        training samples of all clients. All other buffers are those of the model that was last passed to `evaluate`.
        """
        space = ParameterSpace.of(self._model)
        buffers = refresh_buffers(space, self._model, point, self._training_batches())
        return self.evaluate(space.state_dict(point, buffers))

    def _training_batches(self) -> Iterator[Tensor]:
        """Return the training inputs of all clients in batches that each mix many clients."""
        index = torch.from_numpy(np.concatenate(self._federation.train))
        count = -(-len(index) // EVAL_BATCH_SIZE)
        return (self._federation.dataset.inputs[index[first::count]] for first in range(count))

    def primary_by_client(self, found: SampleStatistics) -> list[float]:
        """Return the primary metric on the held-out samples of each client.

        Clients are omitted if they have no held-out samples, or if the metric is undefined for their samples.
        """
        edges = np.cumsum([len(part) for part in self._held_out])[:-1]
        parts = np.split(found.statistics[self._primary.statistics], edges)
        values = [self._primary.compute(part) for part in parts]
        return [value for value in values if not math.isnan(value)]


class _Metrics(NamedTuple):
    """The metrics of a model and of its weight average."""

    accuracy: float
    loss: float | None
    gini: float
    theil: float
    average_accuracy: float | None = None
    average_loss: float | None = None
    metrics: dict[str, float] | None = None


class EvaluationLog:
    """The evaluations of the server's models in a run, in order.

    Args:
        federation: the federated data set.
        averaging: the average of the server's models. The average is evaluated together with each model.
        eval_starts: whether `record_start` evaluates the start models of clients.

    Attributes:
        evaluations: the evaluations so far.
        starts: the evaluations of start models so far.
        client_accuracy: the primary metric of the best model, for each client with held-out samples.
        seconds: the wall-clock seconds of all evaluations.
    """

    def __init__(
        self, federation: FederatedDataset, averaging: Averaging | None = None, *, eval_starts: bool = False
    ) -> None:
        started = time.perf_counter()
        self._eval_starts = eval_starts
        self._evaluator = Evaluator(federation)
        self._default = federation.dataset.has_default_metrics
        self._averaging = averaging
        self._version = -1
        self._metrics: _Metrics
        self._best = -1.0
        self.evaluations: list[Evaluation] = []
        self.starts: list[StartEvaluation] = []
        self.client_accuracy: list[float] = []
        self.seconds = time.perf_counter() - started

    def restore(
        self,
        evaluations: Sequence[Evaluation],
        starts: Sequence[StartEvaluation],
        client_accuracy: list[float],
        seconds: float,
    ) -> None:
        """Resume from the evaluations of an interrupted run."""
        self.evaluations = [*evaluations]
        self.starts = [*starts]
        self._best = max((row.accuracy for row in evaluations), default=-1.0)
        self.client_accuracy = client_accuracy
        self.seconds += seconds

    def record(self, server: Server, cost: Cost, staleness: Sequence[int] = ()) -> Evaluation:
        """Evaluate the server's current model and append the result to `evaluations`.

        If the model has not changed since the previous evaluation, its metrics are reused.

        Args:
            server: the server with the model.
            cost: the cost so far.
            staleness: the staleness of the updates since the previous evaluation.
        """
        started = time.perf_counter()
        if server.version != self._version:
            self._version = server.version
            found = self._evaluator.evaluate(server.state_dict())
            clients = self._evaluator.primary_by_client(found)
            metrics = self._evaluator.metrics(found)
            self._metrics = _Metrics(
                next(iter(metrics.values())),
                _mean_loss(found),
                gini(clients),
                theil(clients),
                *self._average_metrics(),
                metrics=None if self._default else metrics,
            )
            if self._metrics.accuracy > self._best:
                self._best = self._metrics.accuracy
                self.client_accuracy = clients
        row = Evaluation(
            **vars(cost),
            **self._metrics._asdict(),
            staleness=sum(staleness) / max(1, len(staleness)),
            staleness_max=max(staleness, default=0),
        )
        self.evaluations.append(row)
        self.seconds += time.perf_counter() - started
        return row

    def record_start(self, ticket: Ticket, client: int, *, updates: int, now: float) -> None:
        """Evaluate the model from which a client starts a task, on the held-out samples of this client.

        The result is appended to the list `starts`, unless the primary metric of the data set is undefined for these
        samples. The method does nothing if `eval_starts` is false or the client has no held-out samples.

        Args:
            ticket: the ticket with the start model.
            client: the client of the task.
            updates: the number of updates so far.
            now: the virtual time in seconds.
        """
        if not self._eval_starts:
            return
        started = time.perf_counter()
        samples = self._evaluator.samples_of(client)
        if samples.start == samples.stop:
            return
        found = self._evaluator.evaluate(ticket.state_dict(), samples)
        if not math.isnan(value := self._evaluator.primary(found)):
            self.starts.append(StartEvaluation(client, updates, now, value, _mean_loss(found)))
        self.seconds += time.perf_counter() - started

    def _average_metrics(self) -> tuple[float | None, float | None]:
        """Return the data set's primary metric and the mean loss for the averaged model.

        Both values are `None` if there is no average yet, or if its BatchNorm statistics are not finite.
        """
        point = None if self._averaging is None else self._averaging.average
        if point is None:
            return None, None
        try:
            found = self._evaluator.evaluate_average(point)
        except DivergenceError:  # The statistics of BatchNorm are not finite.
            return None, None
        return self._evaluator.primary(found), _mean_loss(found)


def _mean_loss(found: SampleStatistics) -> float | None:
    """Return the mean loss, or `None` if it is not finite."""
    loss = float(found.loss.mean())
    return loss if math.isfinite(loss) else None


def gini(values: np.ndarray | Sequence[float]) -> float:
    r"""Compute the Gini index of N numbers $x_i$ with the mean $\bar x$, a measure of inequality.

    The index

    $$\frac{1}{2 N^2 \bar x} \sum_{i,j} |x_i - x_j|$$

    ranges from 0 for equal numbers to $(N - 1) / N$.

    Args:
        values: N non-negative numbers. If all are zero, the result is 0, the limit for equal positive values.

    Raises:
        ArgumentError: if `values` is empty, negative or not finite.

    Source: Manifold (48), without a small-sample correction.

    Cost: one sort.

    Example:
        >>> gini([1.0, 1.0]), gini([0.0, 1.0])
        (0.0, 0.5)
    """
    x = np.sort(_normalize(values))
    total = x.sum()
    if total == 0:
        return 0.0
    n = len(x)
    # In sorted order, x_k is the larger number of k pairs, and the smaller number of n - 1 - k pairs.
    return max(0.0, float((2 * np.arange(n) - n + 1) @ x / (n * total)))


def theil(values: np.ndarray | Sequence[float]) -> float:
    r"""Compute the Theil index, which measures the inequality of N numbers $x_i$ with the mean $\bar x$:

    $$T = \frac{1}{N \bar x} \sum_i x_i \ln(x_i / \bar x).$$

    The index is 0 if all numbers are equal, and $\ln N$ if only one number is positive.

    Args:
        values: N non-negative numbers, with 0 ln 0 = 0. If all are zero, the result is 0.

    Raises:
        ArgumentError: if `values` is empty, negative or not finite.

    Source: Manifold (49), natural logarithm.

    Example:
        >>> theil([1.0, 1.0]), round(theil([0.0, 1.0]), 6)
        (0.0, 0.693147)
    """
    x = _normalize(values)
    total = x.sum()
    if total == 0:
        return 0.0
    positive = x[x > 0] / total
    return max(0.0, float(positive @ np.log(positive * len(x))))


def _normalize(values: np.ndarray | Sequence[float]) -> np.ndarray:
    x = check_vector("values", values, at_least=0)
    # The values are divided by the largest one, so that sums neither overflow nor underflow.
    return x / x.max() if x.max() > 0 else x
