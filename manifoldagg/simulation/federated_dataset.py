"""Federated data sets: the split of a data set over clients, with seeded batches and generators."""

import inspect
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from manifoldagg._validation import check_count, check_instance, check_number, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.clients.determinism import seeded_model, task_generator
from manifoldagg.simulation import registry
from manifoldagg.simulation.dataset import Batches, LabelledDataset, check_dataset, checksum
from manifoldagg.simulation.partitions import Partition

__all__ = ["FederatedDataset", "TaskId", "check_federation"]

SPLIT_STREAM, BATCH_STREAM = 0, 2
"""Independent streams of random numbers under one seed; others are in `event_loop` and
`federated.clients.determinism`."""


class TaskId(NamedTuple):
    """The identifier of a task.

    Attributes:
        client: whose it is.
        task_index: how many tasks that client was given before it.
    """

    client: int
    task_index: int


@dataclass(frozen=True)
class FederatedDataset:
    """The split of a data set over clients, with training and held-out samples.

    Attributes:
        dataset: what is learned.
        train: one array of sample positions a client.
        held_out: likewise, disjoint from `train`; together the test set.
        batch: samples a minibatch.
        seed: everything random in a run follows from it.
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
        partition: Partition | str,
        seed: int,
        holdout: float | None = None,
        validation: float = 0.0,
        batch: int = 16,
    ) -> "FederatedDataset":
        """Split a data set over clients, and hold out a part of every client's samples.

        Samples of a test split that came with the data are split with the others, and are what is held out of a
        client's part.

        Args:
            dataset: what is learned.
            clients: how many clients.
            partition: called with the labels, `clients` and `generator=`, such as `iid_partition` or
                `partial(dirichlet_partition, concentration=0.5)`, and with the data set's `user_ids=` where it takes
                them and has none of its own; or the name of one, such as `"dirichlet:concentration=0.5"`. The label of
                a sequence is its last.
            seed: everything random follows from it.
            holdout: which part is held out; the test split of the data set by default, or a fifth where it has none.
            validation: which part of what is left to train on is held out in place of it: to choose settings by, while
                nobody sees the test samples.
            batch: samples a minibatch.

        Raises:
            ArgumentError: naming the argument that does not fit.

        Example:
            >>> inputs, labels = torch.zeros(20, 2), torch.arange(20) % 2
            >>> points = LabelledDataset("points", inputs, labels, lambda: nn.Linear(2, 2), target=1.0)
            >>> federation = FederatedDataset.split(points, 2, partition="iid", seed=0)
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
        generator = np.random.default_rng([seed, SPLIT_STREAM])
        parts = _check_parts(
            _apply_partition(_resolve_partition(partition), dataset, clients, generator), clients, len(dataset.labels)
        )
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
            of = (
                "of the test split" if given and not validation else f"to hold out a part of {validation or part_out:g}"
            )
            raise ArgumentError(f"clients: {clients} clients have too few samples each {of}")
        if not any(map(len, train)):
            lack = (
                "no samples to train on but those of the test split"
                if given and not validation
                else f"too few samples each to hold out a part of {validation or part_out:g} and train on the rest"
            )
            raise ArgumentError(f"clients: {clients} clients have {lack}")
        return FederatedDataset(
            dataset,
            train=[np.sort(part) for part in train],
            held_out=[np.sort(part) for part in held_out],
            batch=batch,
            seed=seed,
        )

    @property
    def checksum(self) -> int:
        """A checksum of the split."""
        parts = (*self.train, *self.held_out)
        return checksum(np.array([len(part) for part in parts]), *parts)

    @property
    def trainable_clients(self) -> list[int]:
        """The clients that have training samples; the others never take part."""
        return [client for client, part in enumerate(self.train) if len(part)]

    def num_batches(self, client: int) -> int:
        """Return the number of minibatches in one pass over a client's samples."""
        return -(-len(self.train[client]) // self.batch)

    def batches(self, client: int, task_index: int) -> Batches:
        """Return a client's minibatches for task `task_index`, ordered by seed, client and `task_index` alone."""
        part = torch.from_numpy(self.train[client])
        generator = np.random.default_rng([self.seed, BATCH_STREAM, client, task_index])
        return Batches(self.dataset.inputs[part], self.dataset.labels[part], self.batch, generator)

    def generator(self, client: int, task_index: int) -> torch.Generator:
        """Return the generator of a client's trainer, seeded by seed, client and `task_index` alone."""
        return task_generator(self.seed, client, task_index)

    def model(self) -> nn.Module:
        """The initial model, the same for every method."""
        return seeded_model(self.dataset.model, self.seed)


def check_federation(name: str, federation: object) -> FederatedDataset:
    """Return `federation`, which must be a federated data set and not a plain data set.

    Raises:
        ArgumentError: if it is invalid.
    """
    return check_instance(
        name, federation, FederatedDataset, 'FederatedDataset.split(dataset, clients, partition="iid", seed=0)'
    )


def _resolve_partition(partition: Partition | str) -> Partition:
    """A partition, also by its name.

    Raises:
        ArgumentError: if it is neither.
    """
    if isinstance(partition, str):
        return registry.partition(partition)
    if not callable(partition):
        raise ArgumentError(f"partition: expected a function or its name, such as 'iid'; got {short_repr(partition)}")
    return partition


def _apply_partition(
    partition: Partition, dataset: LabelledDataset, clients: int, generator: np.random.Generator
) -> list[np.ndarray]:
    """Apply a partition to a data set."""
    labels = dataset.labels if dataset.labels.ndim == 1 else dataset.labels[:, -1]
    owners = None if dataset.user_ids is None else dataset.user_ids.numpy()
    bound = isinstance(partition, partial) and partition.keywords.get("user_ids") is not None
    parameters = inspect.signature(partition).parameters
    told = {"user_ids": owners} if not bound and "user_ids" in parameters else {}
    try:
        return partition(labels.numpy(), clients, generator=generator, **told)
    except ArgumentError as error:
        option = str(error).partition(":")[0]
        if option not in parameters or option in ("labels", "clients", "generator"):
            raise
        raise ArgumentError(f"partition: {error}") from error


def _split_fraction(parts: list[np.ndarray], fraction: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The first share of each part, and the rest of each."""
    cuts = [round(fraction * len(part)) for part in parts]
    first = [part[:cut] for part, cut in zip(parts, cuts, strict=True)]
    return first, [part[cut:] for part, cut in zip(parts, cuts, strict=True)]


def _check_parts(parts: list[np.ndarray], clients: int, samples: int) -> list[np.ndarray]:
    """What a partition gave: an array of positions for each client, none of them twice.

    Raises:
        ArgumentError: if it is something else.
    """
    if len(parts) != clients:
        raise ArgumentError(f"partition: expected {clients} parts, one a client, got {len(parts)}")
    positions = np.concatenate(parts)
    inside = positions.dtype.kind in "iu" and ((positions >= 0) & (positions < samples)).all()
    if not inside or len(np.unique(positions)) < len(positions):
        raise ArgumentError(f"partition: expected positions from 0 to {samples - 1}, none of them twice")
    return parts
