"""Evaluation of a run: the accuracy and the loss of the server's model on the held-out samples."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from manifoldagg.federated import Server
from manifoldagg.simulation.cost import Cost, Evaluation
from manifoldagg.simulation.fairness import gini, theil
from manifoldagg.simulation.federated_dataset import FederatedDataset

__all__ = ["EvaluationLog", "Evaluator", "SampleMetrics"]

EVAL_BATCH_SIZE = 1_000
"""Samples that go through a model together."""


class SampleMetrics(NamedTuple):
    """The metrics of each held-out sample.

    Attributes:
        correct: (samples,), 1 for a right one, or which part of a sequence is right.
        loss: (samples,), cross-entropies; their mean over a sequence.
    """

    correct: np.ndarray
    loss: np.ndarray


class Evaluator:
    """An evaluator of models on the held-out samples."""

    def __init__(self, federation: FederatedDataset) -> None:
        self._held_out = [part for part in federation.held_out if len(part)]
        index = torch.from_numpy(np.concatenate(self._held_out))
        self._inputs = federation.dataset.inputs[index]
        self._labels = federation.dataset.labels[index]
        self._model = federation.model().eval()

    def evaluate(self, model: Mapping[str, Tensor]) -> SampleMetrics:
        """Evaluate a state dict in one pass."""
        self._model.load_state_dict(model)
        right: list[Tensor] = []
        loss: list[Tensor] = []
        with torch.no_grad():
            for inputs, labels in zip(
                self._inputs.split(EVAL_BATCH_SIZE), self._labels.split(EVAL_BATCH_SIZE), strict=True
            ):
                scores = self._model(inputs)
                right.append((scores.argmax(1) == labels).double())
                loss.append(cross_entropy(scores, labels, reduction="none").double())
        return SampleMetrics(*(torch.cat(parts).view(len(self._labels), -1).mean(1).numpy() for parts in (right, loss)))

    def accuracy_by_client(self, correct: np.ndarray) -> list[float]:
        """Return the mean accuracy of each client that has held-out samples."""
        edges = np.cumsum([len(part) for part in self._held_out])[:-1]
        return [float(part.mean()) for part in np.split(correct, edges)]


class _Metrics(NamedTuple):
    """What is said of a model."""

    accuracy: float
    loss: float | None
    gini: float
    theil: float


class EvaluationLog:
    """The evaluations of a server's models, in order.

    Attributes:
        rows: of each time.
        by_client: accuracies of the best model, one for each client with held-out samples.
        seconds: that taking them took.
    """

    def __init__(self, federation: FederatedDataset) -> None:
        started = time.perf_counter()
        self._evaluator = Evaluator(federation)
        self._version = -1
        self._metrics: _Metrics
        self._best = -1.0
        self.evaluations: list[Evaluation] = []
        self.client_accuracy: list[float] = []
        self.seconds = time.perf_counter() - started

    def restore(self, evaluations: Sequence[Evaluation], client_accuracy: list[float], seconds: float) -> None:
        """Resume from the evaluations of an interrupted run."""
        self.evaluations = [*evaluations]
        self._best = max((row.accuracy for row in evaluations), default=-1.0)
        self.client_accuracy = client_accuracy
        self.seconds += seconds

    def record(self, server: Server, cost: Cost, staleness: Sequence[int] = ()) -> Evaluation:
        """Evaluate the current model; an unchanged model is not evaluated again.

        Args:
            server: whose model it is.
            cost: by now.
            staleness: the staleness of the updates since the previous evaluation.
        """
        started = time.perf_counter()
        if server.version != self._version:
            self._version = server.version
            grades = self._evaluator.evaluate(server.state_dict())
            clients = self._evaluator.accuracy_by_client(grades.correct)
            loss = float(grades.loss.mean())
            self._metrics = _Metrics(
                float(grades.correct.mean()), loss if math.isfinite(loss) else None, gini(clients), theil(clients)
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
