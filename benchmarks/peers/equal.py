"""The workload that all engines share: the digits and their partition, the CNN, and the local training.

The module imports only PyTorch, NumPy and scikit-learn, so that it runs in every environment.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

__all__ = ["Rounds", "Work", "cnn", "digits", "read", "train"]


@dataclass(frozen=True)
class Work:
    """The workload.

    Attributes:
        train: the indices of the samples of each client.
        cohort: the number of clients per round.
        rounds: the number of timed rounds.
        warm: the number of rounds before the timed rounds.
        steps: the number of optimizer steps per update.
        batch: the number of samples per step. The last batch of an epoch can be smaller.
        rate: the learning rate of Adam.
        jobs: the number of training processes.
    """

    train: list[list[int]]
    cohort: int
    rounds: int
    warm: int
    steps: int
    batch: int
    rate: float
    jobs: int


class Rounds:
    """The start times of all rounds, and the end of the last round.

    Args:
        work: the workload.
        started: the time at which the process was requested, as returned by `time.time()`.
    """

    def __init__(self, work: Work, started: float) -> None:
        self._started = started
        self._work = work
        self._times: list[float] = []

    def mark(self) -> None:
        """Record the start of a round or the end of the last round."""
        self._times.append(time.time())

    def report(self, **more: Any) -> None:
        """Print one JSON line: the number of updates, their seconds, and the seconds before the second round."""
        if len(self._times) != self._work.warm + self._work.rounds + 1:
            raise RuntimeError(f"{len(self._times) - 1} rounds were seen")
        made = {
            "updates": self._work.cohort * self._work.rounds,
            "seconds": self._times[-1] - self._times[self._work.warm],
            "cold": self._times[1] - self._started,
        }
        print(json.dumps(made | more), flush=True)


def read() -> tuple[Work, Rounds]:
    """Read the workload and its clock in a script that `benchmarks/simulation.py` started."""
    path, started = sys.argv[1:]
    work = Work(**json.loads(Path(path).read_text()))
    return work, Rounds(work, float(started))


def digits() -> tuple[Tensor, Tensor]:
    """Return inputs and labels, as `manifoldagg.experiments.load_dataset("digits")` does."""
    pixels, labels = load_digits(return_X_y=True)
    inputs = torch.from_numpy(pixels).to(torch.float32).div_(16).view(-1, 1, 8, 8)
    return inputs, torch.from_numpy(labels).to(torch.int64)


def cnn() -> nn.Module:
    """Return the network of `manifoldagg.simulation.dataset.data.models.cnn`."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(model: nn.Module, inputs: Tensor, labels: Tensor, work: Work, generator: np.random.Generator) -> None:
    """Train a client for a number of Adam steps on minibatches that are reshuffled in each epoch."""
    optimizer = torch.optim.Adam(model.parameters(), work.rate)
    done = 0
    while done < work.steps:
        order = torch.from_numpy(generator.permutation(len(labels)))
        for index in order.split(work.batch)[: work.steps - done]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[index]), labels[index]).backward()
            optimizer.step()
            done += 1
