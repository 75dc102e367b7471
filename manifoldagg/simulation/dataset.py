"""Data sets: samples with labels, the model for them, and minibatches."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_instance
from manifoldagg.errors import ArgumentError
from manifoldagg.tensor_file import tensor_bytes

__all__ = ["Batches", "LabelledDataset", "check_dataset", "checksum"]


@dataclass(frozen=True)
class Signature:
    """The input and output shapes of a model for a data set.

    Attributes:
        shape: the shape of one input: (features,), (channels, height, width), or (length,) for a sequence of tokens.
        classes: the number of classes.
        tokens: the size of the vocabulary; 0 for numeric inputs.
        per_token: whether each token of a sequence has a class, instead of one class for the sequence.
    """

    shape: tuple[int, ...]
    classes: int
    tokens: int = 0
    per_token: bool = False


@dataclass(frozen=True)
class LabelledDataset:
    """Classification data set with one label for each sample, or one label for each token of a sequence.

    Attributes:
        name: the name of the data set.
        inputs: the inputs: (samples, ...) in float32, or tokens (samples, length) in int64.
        labels: the labels: (samples,) in int64, or (samples, length) if the inputs are tokens.
        model: a function that returns an untrained model. Its scores are (samples, classes) or (samples, classes,
            length).
        target: the accuracy for measurements of the time to a target.
        user_ids: the user of each sample, (samples,) in int64, counted from 0; `None` if unknown.
        test_mask: which samples belong to the test split of the data set, (samples,) booleans; `None` if the data set
            has no test split.

    Raises:
        ArgumentError: if a field has an invalid shape or dtype.
    """

    name: str
    inputs: Tensor
    labels: Tensor
    model: Callable[[], nn.Module]
    target: float
    user_ids: Tensor | None = None
    test_mask: Tensor | None = None

    def __repr__(self) -> str:
        return format_result(self, name=self.name, inputs=self.inputs, labels=self.labels, target=self.target)

    def __post_init__(self) -> None:
        samples = len(self.inputs)
        tokens = self.inputs.dtype == torch.int64 and self.inputs.ndim == 2
        shapes = ((samples,), self.inputs.shape) if tokens else ((samples,),)
        if self.labels.dtype != torch.int64 or self.labels.shape not in shapes:
            given = f"{self.labels.dtype} of shape {tuple(self.labels.shape)}"
            each = "samples or tokens" if tokens else "samples"
            raise ArgumentError(f"labels: expected int64, one for each of {samples} {each}, got {given}")
        for name, told, dtype in (("user_ids", self.user_ids, torch.int64), ("test_mask", self.test_mask, torch.bool)):
            if told is not None and (told.dtype != dtype or told.shape != (samples,)):
                given = f"{told.dtype} of shape {tuple(told.shape)}"
                raise ArgumentError(f"{name}: expected {dtype} of shape ({samples},), got {given}")

    @property
    def signature(self) -> Signature:
        """The input and output shapes of a model, inferred from the samples."""
        tokens = 0 if self.inputs.is_floating_point() else int(self.inputs.max()) + 1
        return Signature(tuple(self.inputs.shape[1:]), int(self.labels.max()) + 1, tokens, self.labels.ndim > 1)

    @property
    def checksum(self) -> int:
        """A checksum of the samples, their labels and the other fields."""
        told = [part for part in (self.user_ids, self.test_mask) if part is not None]
        return checksum(torch.tensor(self.inputs.shape), self.inputs, self.labels, *told)


def check_dataset(dataset: object) -> LabelledDataset:
    """Return `dataset`, which must be a data set and not its name.

    Raises:
        ArgumentError: if it is invalid.

    Example:
        >>> check_dataset("mnist")
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: dataset: expected a LabelledDataset, got 'mnist'; write load_dataset('mnist')
    """
    return check_instance(
        "dataset", dataset, LabelledDataset, f"load_dataset({dataset!r})" if isinstance(dataset, str) else ""
    )


@dataclass(frozen=True, eq=False)
class Batches:
    """Minibatches of a client's samples, reshuffled in every epoch.

    Args:
        inputs: the inputs (samples, ...).
        labels: the labels (samples,).
        size: the number of samples per batch. The last batch can be smaller.
        generator: the generator of the order.
    """

    inputs: Tensor
    labels: Tensor
    size: int
    generator: np.random.Generator

    @property
    def samples(self) -> int:
        """The number of samples per epoch."""
        return len(self.labels)

    def __len__(self) -> int:
        return -(-self.samples // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.from_numpy(self.generator.permutation(self.samples))
        for index in order.split(self.size):
            yield self.inputs[index], self.labels[index]


def checksum(*parts: Tensor | np.ndarray) -> int:
    """Return a checksum of all values.

    Example:
        >>> checksum(np.ones(2), np.zeros(1)) == checksum(np.array([1.0, 1.0, 0.0]))
        True
    """
    value = 0
    for part in parts:
        value = zlib.crc32(tensor_bytes(part) if isinstance(part, Tensor) else part.tobytes(), value)
    return value
