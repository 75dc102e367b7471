"""The same work for every engine: digits, who holds which, the CNN, and a client's local steps.

It imports nothing but torch, NumPy and scikit-learn, so that it runs in every environment.
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
    """What is done.

    Attributes:
        train: the positions of samples, for each client.
        cohort: clients a round.
        rounds: how many are timed.
        warm: rounds before these.
        steps: of the optimiser, for each update.
        batch: samples a step; the last of a pass can be smaller.
        rate: of Adam.
        jobs: processes that train.
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
    """When each round began, and when the last one ended.

    Args:
        work: how many they are.
        started: the clock on the wall, `time.time()`, when the process was asked for.
    """

    def __init__(self, work: Work, started: float) -> None:
        self._started = started
        self._work = work
        self._times: list[float] = []

    def mark(self) -> None:
        """A round begins, or the last one has ended."""
        self._times.append(time.time())

    def report(self, **more: Any) -> None:
        """Print a line of JSON: updates, their seconds, and those before the second round began."""
        if len(self._times) != self._work.warm + self._work.rounds + 1:
            raise RuntimeError(f"{len(self._times) - 1} rounds were seen")
        made = {
            "updates": self._work.cohort * self._work.rounds,
            "seconds": self._times[-1] - self._times[self._work.warm],
            "cold": self._times[1] - self._started,
        }
        print(json.dumps(made | more), flush=True)


def read() -> tuple[Work, Rounds]:
    """The work and its clock, of a script that was called with the file that `benchmarks/simulation.py` wrote."""
    path, started = sys.argv[1:]
    work = Work(**json.loads(Path(path).read_text()))
    return work, Rounds(work, float(started))


def digits() -> tuple[Tensor, Tensor]:
    """Inputs and labels, as `manifoldagg.experiments.load_dataset("digits")` has them."""
    pixels, labels = load_digits(return_X_y=True)
    inputs = torch.from_numpy(pixels).to(torch.float32).div_(16).view(-1, 1, 8, 8)
    return inputs, torch.from_numpy(labels).to(torch.int64)


def cnn() -> nn.Module:
    """`manifoldagg.simulation.dataset.data.models.cnn`."""
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
    """A client's update: so many steps of Adam on minibatches that are reshuffled at every pass."""
    optimizer = torch.optim.Adam(model.parameters(), work.rate)
    done = 0
    while done < work.steps:
        order = torch.from_numpy(generator.permutation(len(labels)))
        for index in order.split(work.batch)[: work.steps - done]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[index]), labels[index]).backward()
            optimizer.step()
            done += 1
