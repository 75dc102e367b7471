"""The exam of a run: which held-out samples a model gets right, how sure it is of them, and the marks for it."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from manifoldagg.federated import Server
from manifoldagg.simulation.cost import Evaluation, Spent
from manifoldagg.simulation.fairness import gini, theil
from manifoldagg.simulation.federated_dataset import Federation

__all__ = ["Exam", "Grades", "Marks"]

AT_ONCE = 1_000
"""Samples that go through a model together."""


class Grades(NamedTuple):
    """What each held-out sample is worth.

    Attributes:
        right: (samples,), 1 for a right one, or which part of a sequence is right.
        loss: (samples,), cross-entropies; their mean over a sequence.
    """

    right: np.ndarray
    loss: np.ndarray


class Exam:
    """Which held-out samples a model gets right."""

    def __init__(self, federation: Federation) -> None:
        self._held_out = [part for part in federation.held_out if len(part)]
        index = torch.from_numpy(np.concatenate(self._held_out))
        self._inputs = federation.task.inputs[index]
        self._labels = federation.task.labels[index]
        self._model = federation.model().eval()

    def grade(self, model: Mapping[str, Tensor]) -> Grades:
        """Of a state dict; one pass."""
        self._model.load_state_dict(model)
        right: list[Tensor] = []
        loss: list[Tensor] = []
        with torch.no_grad():
            for inputs, labels in zip(self._inputs.split(AT_ONCE), self._labels.split(AT_ONCE), strict=True):
                scores = self._model(inputs)
                right.append((scores.argmax(1) == labels).double())
                loss.append(cross_entropy(scores, labels, reduction="none").double())
        return Grades(*(torch.cat(parts).view(len(self._labels), -1).mean(1).numpy() for parts in (right, loss)))

    def by_client(self, right: np.ndarray) -> list[float]:
        """The mean for each client that has held-out samples."""
        edges = np.cumsum([len(part) for part in self._held_out])[:-1]
        return [float(part.mean()) for part in np.split(right, edges)]


class _Worth(NamedTuple):
    """What is said of a model."""

    accuracy: float
    loss: float | None
    gini: float
    theil: float


class Marks:
    """The marks of a server's models, one row for each time that they are taken.

    Attributes:
        rows: of each time.
        by_client: accuracies of the best model, one for each client with held-out samples.
        seconds: that taking them took.
    """

    def __init__(self, federation: Federation) -> None:
        started = time.perf_counter()
        self._exam = Exam(federation)
        self._version = -1
        self._worth: _Worth
        self._best = -1.0
        self.rows: list[Evaluation] = []
        self.by_client: list[float] = []
        self.seconds = time.perf_counter() - started

    def go_on(self, rows: Sequence[Evaluation], by_client: list[float], seconds: float) -> None:
        """Go on from other marks: theirs come before what these will be."""
        self.rows = [*rows]
        self._best = max((row.accuracy for row in rows), default=-1.0)
        self.by_client = by_client
        self.seconds += seconds

    def take(self, server: Server, spent: Spent, late: Sequence[int] = ()) -> Evaluation:
        """Mark the current model; one that has not moved is not looked at again.

        Args:
            server: whose model it is.
            spent: by now.
            late: staleness of the answers since the time before.
        """
        started = time.perf_counter()
        if server.version != self._version:
            self._version = server.version
            grades = self._exam.grade(server.state_dict())
            clients = self._exam.by_client(grades.right)
            loss = float(grades.loss.mean())
            self._worth = _Worth(
                float(grades.right.mean()), loss if math.isfinite(loss) else None, gini(clients), theil(clients)
            )
            if self._worth.accuracy > self._best:
                self._best = self._worth.accuracy
                self.by_client = clients
        row = Evaluation(
            **vars(spent),
            **self._worth._asdict(),
            staleness=sum(late) / max(1, len(late)),
            staleness_max=max(late, default=0),
        )
        self.rows.append(row)
        self.seconds += time.perf_counter() - started
        return row
