"""Labelled data sets, their partition over clients, and seeded minibatches."""

import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_count, check_instance, check_number, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.clients.determinism import seeded_model, task_generator
from manifoldagg.simulation.metrics import Criterion, Metric, accuracy
from manifoldagg.simulation.partitions import Partition
from manifoldagg.tensor_file import tensor_bytes

__all__ = [
    *("Augmentation", "Batches", "FederatedDataset", "LabelledDataset", "TaskId"),
    *("check_dataset", "check_federation", "checksum"),
]

Augmentation: TypeAlias = Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]
"""A function `augment(inputs, labels, generator)` that returns the augmented inputs and labels of a minibatch."""


@dataclass(frozen=True)
class Signature:
    """The input and output shapes that a model must have to fit a data set.

    Attributes:
        shape: the shape of one input: (features,) for a vector, (channels, height, width) for an image, or (length,)
            for a sequence of tokens.
        classes: the number of classes. If a sample can have several labels, it is the number of different labels.
        tokens: the size of the vocabulary, or 0 if the inputs are not tokens.
        per_token: whether each token of a sequence has its own class. Otherwise, a sequence has one class.
    """

    shape: tuple[int, ...]
    classes: int
    tokens: int = 0
    per_token: bool = False


DEFAULT_METRICS = {"accuracy": accuracy}


@dataclass(frozen=True)
class LabelledDataset:
    """Data set for classification, with the criterion and the metrics of its task.

    A sample has one label, several labels, or one label for each of its tokens:

    | task | labels | criterion | metric |
    | --- | --- | --- | --- |
    | one class | (samples,), int64 | `cross_entropy` | `accuracy` |
    | one class for each token | (samples, length), int64 | `cross_entropy` | `accuracy` |
    | several labels | zeros and ones (samples, labels), float32 | `binary_cross_entropy_with_logits` | `macro_auroc` |

    Attributes:
        name: the name of the data set.
        inputs: the inputs: (samples, ...) in float32, or tokens (samples, length) in int64.
        labels: the labels, as in the table.
        model: a function that returns an untrained model. The model computes scores of the shape (samples, classes),
            (samples, classes, length) for tokens, or (samples, labels) for several labels.
        target: the target of the first metric. Comparisons report the cost until a run reaches this value.
        user_ids: the user of each sample, (samples,) in int64, counted from 0; `None` if unknown.
        test_mask: whether each sample belongs to the test split, (samples,) booleans; `None` if the data set has no
            test split.
        augment: an augmentation of the minibatches of local training, or `None`. It must not modify its arguments. All
            its random numbers should come from its generator, whose seed depends only on the seed of the run, the
            client and the number of earlier tasks of the client. Evaluations use the original samples.
        criterion: the loss function of local training and of evaluations. With `reduction="none"`, it must return the
            losses (samples, ...).
        metrics: the metrics of evaluations, by name. The first one is the primary metric: the target, the tuning of
            rates, and the Gini and Theil indices of the clients are based on it. It must be at least 0, and larger
            values must be better.

    Raises:
        ArgumentError: if a field has an invalid type, shape or dtype, if a label is negative, or if there are no
            samples or no metrics.

    Example:
        >>> from torch.nn.functional import binary_cross_entropy_with_logits
        >>> from manifoldagg.simulation import macro_auprc, macro_auroc
        >>> inputs, labels = torch.rand(6, 3), torch.tensor([[0.0, 1.0], [1.0, 1.0], [1.0, 0.0]]).repeat(2, 1)
        >>> films = LabelledDataset(
        ...     "films", inputs, labels, lambda: nn.Linear(3, 2), target=0.7,
        ...     criterion=binary_cross_entropy_with_logits,
        ...     metrics={"AUROC": macro_auroc, "AUPRC": macro_auprc},
        ... )
        >>> films.signature.classes
        2
    """

    name: str
    inputs: Tensor
    labels: Tensor
    model: Callable[[], nn.Module]
    target: float
    user_ids: Tensor | None = None
    test_mask: Tensor | None = None
    augment: Augmentation | None = None
    criterion: Criterion = cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=lambda: dict(DEFAULT_METRICS))

    def __repr__(self) -> str:
        return format_result(self, name=self.name, inputs=self.inputs, labels=self.labels, target=self.target)

    def __post_init__(self) -> None:
        for name in ("inputs", "labels"):
            x = check_instance(name, getattr(self, name), Tensor, f"torch.as_tensor({name})")
            if x.ndim == 0 or x.numel() == 0:
                raise ArgumentError(f"{name}: expected at least one sample, got shape {tuple(x.shape)}")
        if isinstance(self.model, nn.Module):
            raise ArgumentError("model: expected a function that creates a module, got a module")
        samples = len(self.inputs)
        if self.has_label_sets:
            if self.labels.shape[0] != samples or not ((self.labels == 0) | (self.labels == 1)).all():
                given = f"shape {tuple(self.labels.shape)} with values from {self.labels.min()} to {self.labels.max()}"
                raise ArgumentError(f"labels: expected zeros and ones of shape ({samples}, labels), got {given}")
        else:
            tokens = self.inputs.dtype == torch.int64 and self.inputs.ndim == 2
            shapes = ((samples,), self.inputs.shape) if tokens else ((samples,),)
            if self.labels.dtype != torch.int64 or self.labels.shape not in shapes:
                given = f"{self.labels.dtype} of shape {tuple(self.labels.shape)}"
                each = "samples or tokens" if tokens else "samples"
                raise ArgumentError(f"labels: expected int64, one for each of {samples} {each}, got {given}")
            if (least := int(self.labels.min())) < 0:
                raise ArgumentError(f"labels: expected classes >= 0, got {least}")
        # The loss of each sample requires the option `reduction`, which modules such as `nn.CrossEntropyLoss` lack.
        if isinstance(self.criterion, nn.Module) or not callable(self.criterion):
            raise ArgumentError(
                f"criterion: expected a function such as torch.nn.functional.cross_entropy, got "
                f"{short_repr(self.criterion)}"
            )
        check_instance("metrics", self.metrics, Mapping)
        if not self.metrics:
            raise ArgumentError("metrics: expected at least one metric by name, got an empty mapping")
        for name, metric in self.metrics.items():
            check_instance(f"metrics: {name}", metric, Metric)
        for name, told, dtype in (("user_ids", self.user_ids, torch.int64), ("test_mask", self.test_mask, torch.bool)):
            if told is None:
                continue
            check_instance(name, told, Tensor, f"torch.as_tensor({name})")
            if told.dtype != dtype or told.shape != (samples,):
                given = f"{told.dtype} of shape {tuple(told.shape)}"
                raise ArgumentError(f"{name}: expected {dtype} of shape ({samples},), got {given}")
        if self.augment is not None and not callable(self.augment):
            raise ArgumentError(f"augment: expected a function, got {short_repr(self.augment)}")

    @property
    def has_default_metrics(self) -> bool:
        """Whether the accuracy is the only metric."""
        return self.metrics == DEFAULT_METRICS

    @property
    def has_label_sets(self) -> bool:
        """Whether a sample can have several labels.

        If so, the attribute `labels` is a float32 matrix of zeros and ones with the shape (samples, labels).
        """
        return self.labels.dtype == torch.float32 and self.labels.ndim == 2

    @property
    def signature(self) -> Signature:
        """The input and output shapes of a model, inferred from the samples."""
        shape = tuple(self.inputs.shape[1:])
        tokens = 0 if self.inputs.is_floating_point() else int(self.inputs.max()) + 1
        if self.has_label_sets:
            return Signature(shape, self.labels.shape[1], tokens)
        return Signature(shape, int(self.labels.max()) + 1, tokens, self.labels.ndim > 1)

    @property
    def classes(self) -> Tensor:
        """The class of each sample, as an int64 tensor of shape (samples,).

        Partitions such as `dirichlet_partition` distribute the samples over clients by their classes.

        - If each sample has one label, its class is this label.
        - If each token of a sequence has a label, the class of the sequence is the label of its last token.
        - If a sample can have several of L labels, its class is the first label that it has. Samples without labels
          form one more class, with the number L.
        """
        if self.has_label_sets:
            none = self.labels.new_ones(len(self.labels), 1)
            return torch.cat([self.labels, none], 1).argmax(1)
        return self.labels if self.labels.ndim == 1 else self.labels[:, -1]

    @property
    def checksum(self) -> int:
        """A checksum of the inputs, the labels, `user_ids` and `test_mask`."""
        told = [part for part in (self.user_ids, self.test_mask) if part is not None]
        return checksum(torch.tensor(self.inputs.shape), self.inputs, self.labels, *told)


def check_dataset(dataset: object) -> LabelledDataset:
    """Return `dataset`, or raise an `ArgumentError` if it is not a data set.

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
    """The minibatches of a client's training samples. Each iteration is one epoch in a new random order.

    The last minibatch can be smaller than `size`. If `augment` is set, it transforms each minibatch with random numbers
    from `augment_generator`.

    Attributes:
        inputs: the inputs of the samples, (samples, ...).
        labels: the labels of the samples, (samples, ...).
        size: the number of samples in a minibatch.
        generator: the random generator of the order.
        augment: the augmentation, a function of (inputs, labels, generator). `None` means no augmentation.
        augment_generator: the random generator of the augmentation.
    """

    inputs: Tensor
    labels: Tensor
    size: int
    generator: np.random.Generator
    augment: Augmentation | None = None
    augment_generator: torch.Generator | None = None

    @property
    def samples(self) -> int:
        """The number of samples per epoch."""
        return len(self.labels)

    def __len__(self) -> int:
        return -(-self.samples // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.from_numpy(self.generator.permutation(self.samples))
        for index in order.split(self.size):
            inputs = self.inputs[index]
            labels = self.labels[index]
            if self.augment is not None and self.augment_generator is not None:
                inputs, labels = _check_augmented(self.augment(inputs, labels, self.augment_generator), len(index))
            yield inputs, labels


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


# Each stream is an independent sequence of random numbers under the seed of a run. The modules `simulation.event_loop`
# and `federated.clients.determinism` define the other streams.
SPLIT_STREAM = 0
BATCH_STREAM = 2
AUGMENT_STREAM = 7


class TaskId(NamedTuple):
    """The identifier of a client's training task.

    Attributes:
        client: the client that runs the task.
        task_index: the index of the task among the tasks of this client, counted from 0.
    """

    client: int
    task_index: int


@dataclass(frozen=True)
class FederatedDataset:
    """A data set that is partitioned over clients, each of which has training samples and held-out samples.

    Attributes:
        dataset: the labelled data set.
        train: for each client, the indices of its training samples.
        held_out: for each client, the indices of its held-out samples, which are disjoint from its training samples.
            The held-out samples of all clients form the test set.
        batch: the number of samples in a minibatch.
        seed: the seed of all random numbers of a run.
    """

    dataset: LabelledDataset
    train: list[np.ndarray]
    held_out: list[np.ndarray]
    batch: int
    seed: int

    @staticmethod
    def split(
        dataset: LabelledDataset,
        clients: int,
        *,
        partition: Partition,
        seed: int,
        holdout: float | None = None,
        validation: float = 0.0,
        batch: int = 16,
    ) -> "FederatedDataset":
        """Partition a data set over clients, and hold out a fraction of each client's samples for evaluation.

        If the data set has a test split, the partition distributes both training and test samples. The test samples of
        each client are then held out, instead of a fraction of its samples.

        Args:
            dataset: the data set.
            clients: the number of clients.
            partition: a function of the classes of the samples, `clients` and `generator=`, such as `iid_partition` or
                `partial(dirichlet_partition, concentration=0.5)`. The classes are `dataset.classes`. If the function
                has an argument `user_ids` that is not bound, it receives the `user_ids` of the data set.
            seed: the seed of all random numbers.
            holdout: the held-out fraction. The default is the test split of the data set, or 0.2 without a test split.
            validation: the fraction of the training samples that replaces the held-out samples. With this option,
                settings are chosen without access to the test samples.
            batch: the number of samples per minibatch.

        Raises:
            ArgumentError: if an argument is invalid. The message names it.

        Example:
            >>> from manifoldagg.simulation import iid_partition
            >>> inputs, labels = torch.zeros(20, 2), torch.arange(20) % 2
            >>> points = LabelledDataset("points", inputs, labels, lambda: nn.Linear(2, 2), target=1.0)
            >>> federation = FederatedDataset.split(points, 2, partition=iid_partition, seed=0)
            >>> [len(part) for part in (*federation.train, *federation.held_out)]
            [8, 8, 2, 2]
        """
        given = check_dataset(dataset).test_mask is not None
        if given and holdout is not None:
            raise ArgumentError(
                f"holdout: expected None, as {dataset.name} has a test split; got {short_repr(holdout)}"
            )
        part_out = 0.2 if holdout is None else check_number("holdout", holdout, above=0, at_most=0.9)
        check_number("validation", validation, at_least=0, at_most=0.9)
        check_count("batch", batch)
        check_count("seed", seed, at_least=0)
        if not callable(partition):
            raise ArgumentError(f"partition: expected a function such as iid_partition, got {short_repr(partition)}")
        generator = np.random.default_rng([seed, SPLIT_STREAM])
        parts = _check_parts(_apply_partition(partition, dataset, clients, generator), clients, len(dataset.labels))
        shuffled = [generator.permutation(part) for part in parts]
        if dataset.test_mask is None:
            held_out, train = _split_fraction(shuffled, part_out)
        else:
            tested = dataset.test_mask.numpy()
            held_out = [part[tested[part]] for part in shuffled]
            train = [part[~tested[part]] for part in shuffled]
        if validation:
            held_out, train = _split_fraction(train, validation)
        if not any(map(len, held_out)):
            need = (
                "with samples of the test split"
                if given and not validation
                else f"with enough samples to hold out a fraction of {validation or part_out:g}"
            )
            raise ArgumentError(f"clients: expected clients {need}, got {clients} clients with too few samples each")
        if not any(map(len, train)):
            need = (
                "with samples outside of the test split"
                if given and not validation
                else f"with enough samples to hold out a fraction of {validation or part_out:g} and train on the rest"
            )
            raise ArgumentError(f"clients: expected clients {need}, got {clients} clients with too few samples each")
        return FederatedDataset(
            dataset,
            train=[np.sort(part) for part in train],
            held_out=[np.sort(part) for part in held_out],
            batch=batch,
            seed=seed,
        )

    @property
    def checksum(self) -> int:
        """A checksum of the partition and of the held-out samples."""
        parts = (*self.train, *self.held_out)
        return checksum(np.array([len(part) for part in parts]), *parts)

    @property
    def trainable_clients(self) -> list[int]:
        """The clients with training samples. Other clients never participate."""
        return [client for client, part in enumerate(self.train) if len(part)]

    def num_batches(self, client: int) -> int:
        """Return the number of minibatches per epoch of a client."""
        return -(-len(self.train[client]) // self.batch)

    def batches(self, client: int, task_index: int) -> Batches:
        """Return the minibatches of one task of a client.

        Their random order and augmentation depend only on `seed`, `client` and `task_index`.
        """
        part = torch.from_numpy(self.train[client])
        generator = np.random.default_rng([self.seed, BATCH_STREAM, client, task_index])
        augment = self.dataset.augment
        source = None
        if augment is not None:
            words = np.random.SeedSequence([self.seed, AUGMENT_STREAM, client, task_index])
            source = torch.Generator().manual_seed(int(words.generate_state(1, np.uint64)[0] >> np.uint64(1)))
        return Batches(self.dataset.inputs[part], self.dataset.labels[part], self.batch, generator, augment, source)

    def generator(self, client: int, task_index: int) -> torch.Generator:
        """Return the random generator for the trainer of one task.

        Its seed depends only on `seed`, `client` and `task_index`.
        """
        return task_generator(self.seed, client, task_index)

    def model(self) -> nn.Module:
        """Return the initial model, which is the same for every method."""
        return seeded_model(self.dataset.model, self.seed)


def check_federation(name: str, federation: object) -> FederatedDataset:
    """Return `federation`, or raise an `ArgumentError` if it is not a federated data set."""
    return check_instance(
        name, federation, FederatedDataset, "FederatedDataset.split(dataset, clients, partition=iid_partition, seed=0)"
    )


def _check_augmented(batch: object, samples: int) -> tuple[Tensor, Tensor]:
    """Check that an augmentation returned a pair of tensors with the given number of samples."""
    match batch:
        case (Tensor() as inputs, Tensor() as labels) if len(inputs) == len(labels) == samples:
            return inputs, labels
    raise ArgumentError(f"augment: expected a pair (inputs, labels) of {samples} samples, got {short_repr(batch)}")


def _apply_partition(
    partition: Partition, dataset: LabelledDataset, clients: int, generator: np.random.Generator
) -> list[np.ndarray]:
    """Apply a partition to a data set."""
    owners = None if dataset.user_ids is None else dataset.user_ids.numpy()
    bound = isinstance(partition, partial) and partition.keywords.get("user_ids") is not None
    parameters = inspect.signature(partition).parameters
    told = {"user_ids": owners} if not bound and "user_ids" in parameters else {}
    try:
        return partition(dataset.classes.numpy(), clients, generator=generator, **told)
    except ArgumentError as error:
        option = str(error).partition(":")[0]
        if option not in parameters or option in ("labels", "clients", "generator"):
            raise
        raise ArgumentError(f"partition: {error}") from error


def _split_fraction(parts: list[np.ndarray], fraction: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Split each array into a first part with the given fraction of its entries, and the rest."""
    cuts = [round(fraction * len(part)) for part in parts]
    first = [part[:cut] for part, cut in zip(parts, cuts, strict=True)]
    return first, [part[cut:] for part, cut in zip(parts, cuts, strict=True)]


def _check_parts(parts: list[np.ndarray], clients: int, samples: int) -> list[np.ndarray]:
    """Check that a partition returned an array of indices for each client, without duplicates."""
    if len(parts) != clients:
        raise ArgumentError(f"partition: expected {clients} parts, one for each client, got {len(parts)}")
    positions = np.concatenate(parts)
    inside = positions.dtype.kind in "iu" and ((positions >= 0) & (positions < samples)).all()
    if not inside or len(np.unique(positions)) < len(positions):
        raise ArgumentError(f"partition: expected indices from 0 to {samples - 1} without duplicates")
    return parts
