"""The exam of a run: which held-out samples a model gets right, and the marks for it."""

import time
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from manifoldagg.federated import Server
from manifoldagg.simulation.federation import Federation

__all__ = ["Exam", "Marks"]

AT_ONCE = 1_000
"""Samples that go through a model together."""


class Exam:
    """Which held-out samples a model gets right."""

    def __init__(self, federation: Federation) -> None:
        self._held_out = [part for part in federation.held_out if len(part)]
        index = torch.from_numpy(np.concatenate(self._held_out))
        self._inputs = federation.task.inputs[index]
        self._labels = federation.task.labels[index]
        self._model = federation.model().eval()

    def grade(self, model: Mapping[str, Tensor]) -> np.ndarray:
        """(held-out samples,), for a state dict: 1 for a right one, or which part of a sequence is right."""
        self._model.load_state_dict(model)
        right: list[Tensor] = []
        with torch.no_grad():
            for inputs, labels in zip(self._inputs.split(AT_ONCE), self._labels.split(AT_ONCE), strict=True):
                right.append((self._model(inputs).argmax(1) == labels).double())
        graded: np.ndarray = torch.cat(right).view(len(self._labels), -1).mean(1).numpy()
        return graded

    def by_client(self, graded: np.ndarray) -> list[float]:
        """The mean for each client that has held-out samples."""
        edges = np.cumsum([len(part) for part in self._held_out])[:-1]
        return [float(part.mean()) for part in np.split(graded, edges)]


class Marks:
    """The accuracies of a server's models, one for each time they are taken.

    Attributes:
        accuracy: of each time.
        evaluated: what each time was called.
        seconds: that taking them took.
    """

    def __init__(self, federation: Federation) -> None:
        started = time.perf_counter()
        self._exam = Exam(federation)
        self.accuracy: list[float] = []
        self.evaluated: list[int] = []
        self._version = -1
        self._latest = self._best = np.empty(0)
        self.seconds = time.perf_counter() - started

    def take(self, server: Server, name: int) -> None:
        """Mark the current model; one that has not moved is not looked at again."""
        started = time.perf_counter()
        if server.version != self._version:
            self._version = server.version
            self._latest = self._exam.grade(server.state_dict())
            if not self.accuracy or self._latest.mean() > self._best.mean():
                self._best = self._latest
        self.accuracy.append(float(self._latest.mean()))
        self.evaluated.append(name)
        self.seconds += time.perf_counter() - started

    def by_client(self) -> list[float]:
        """Accuracies of the best model, one for each client with held-out samples."""
        return self._exam.by_client(self._best)
