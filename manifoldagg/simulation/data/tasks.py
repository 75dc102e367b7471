"""Tasks: a data set, the model that learns it, and batches of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manifoldagg.errors import ArgumentError, check_choice
from manifoldagg.federated.repeatable import one_thread
from manifoldagg.simulation.data.recipes import checksum, recalled

__all__ = ["Batches", "Task", "small_cnn", "task"]


@dataclass(frozen=True)
class Task:
    """A classification task.

    Attributes:
        name: of the data set.
        inputs: (samples, ...) in float32.
        labels: (samples,) in int64.
        model: makes an untrained model.
        target: an accuracy worth timing how long it takes to reach.

    One that [`task`][manifoldagg.simulation.task] made goes to other processes by name: they make it for themselves.
    """

    name: str
    inputs: Tensor
    labels: Tensor
    model: Callable[[], nn.Module]
    target: float
    origin: "Callable[[], Task] | None" = field(init=False, default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return recalled(self, self.origin, Task._sum)

    def _sum(self) -> int:
        return checksum(self.inputs, self.labels)


@dataclass(frozen=True, eq=False)
class Batches:
    """Minibatches of a client's samples, reshuffled at every pass.

    Args:
        inputs: (samples, ...).
        labels: (samples,).
        size: samples a batch; the last one can be smaller.
        generator: draws the order.
    """

    inputs: Tensor
    labels: Tensor
    size: int
    generator: np.random.Generator

    @property
    def samples(self) -> int:
        """How many samples one pass has."""
        return len(self.labels)

    def __len__(self) -> int:
        return -(-self.samples // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.from_numpy(self.generator.permutation(self.samples))
        for index in order.split(self.size):
            yield self.inputs[index], self.labels[index]


def task(source: str | Callable[[], Task]) -> Task:
    """The task of that name, `"digits"`, or the one that a function makes.

    Other processes, those of an executor for instance, are sent the name or the function in place of the data. So it
    makes the same each time, and can be pickled: a function of a module, or a `functools.partial` of one.

    Raises:
        ArgumentError: if the name is unknown, the package that carries its data is not installed, or the function makes
            something else.

    Example:
        >>> task("digits").inputs.shape
        torch.Size([1797, 1, 8, 8])
    """
    make = TASKS[check_choice("data", source, tuple(TASKS))] if isinstance(source, str) else source
    with one_thread():  # as in a process of an executor: a mean over many values has the same bits
        made = make()
    if not isinstance(made, Task):
        raise ArgumentError(f"task: expected a function that makes a Task, it made {type(made).__name__}")
    # A change of it, as by `replace`, has none.
    object.__setattr__(made, "origin", partial(task, source))
    return made


def small_cnn(classes: int = 10) -> nn.Module:
    """Two convolutions and two dense layers for 8 x 8 grey images: the shape of Manifold's Figure 5, smaller."""
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
        nn.Linear(64, classes),
    )


def _digits() -> Task:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise ArgumentError("data: digits come with scikit-learn: pip install 'manifoldagg[data]'") from None
    pixels, labels = load_digits(return_X_y=True)
    inputs = torch.from_numpy(pixels).to(torch.float32).div_(16).view(-1, 1, 8, 8)
    return Task("digits", inputs, torch.from_numpy(labels).to(torch.int64), small_cnn, target=0.85)


TASKS: dict[str, Callable[[], Task]] = {"digits": _digits}
