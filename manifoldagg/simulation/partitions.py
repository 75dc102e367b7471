"""Partitions: how a data set is split over clients."""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from manifoldagg._validation import check_choice, check_count, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.clock import check_generator

__all__ = [
    "Partition",
    "check_concentration",
    "cyclic_partition",
    "dirichlet_partition",
    "disjoint_partition",
    "iid_partition",
    "natural_partition",
    "shards_partition",
]

Partition: TypeAlias = Callable[..., list[np.ndarray]]
"""Called with `labels` (samples,), the number of `clients` and `generator=`: an array of sample positions a client.

One that has an argument `user_ids` gets those of the data set too, (samples,) of numbers, or `None`.
"""

REMAINDERS = ("largest", "drop")
SELECTIONS = ("largest", "random")


def dirichlet_partition(
    labels: np.ndarray | Sequence[int] | Sequence[str],
    clients: int,
    concentration: float,
    generator: np.random.Generator,
    *,
    remainder: str = "largest",
) -> list[np.ndarray]:
    r"""Split samples by label: for each label, the clients' shares are drawn from a Dirichlet distribution.

    For every label $y$ draw $p_y \sim \mathrm{Dir}(\alpha, \dots, \alpha)$ over the clients and give client i
    $\lfloor p_{y,i} |D_y| \rfloor$ of its samples, chosen at random. Client sizes are not balanced.

    Args:
        labels: (samples,) of any integer or string labels.
        clients: how many clients, at most the number of samples.
        concentration: $\alpha$: 0 gives each label wholly to one client, `inf` splits it evenly.
        generator: draws shares and samples.
        remainder: the samples that rounding down leaves go to the clients with the `"largest"` remainders,
            so that none is lost, or are dropped (`"drop"`, as in the paper).

    Returns:
        One sorted int64 array of sample positions a client; they are disjoint. A client can come out empty.

    Raises:
        ArgumentError: naming the argument that does not fit.

    Source: Manifold B.1.1.

    Example:
        >>> labels = np.array([0, 0, 0, 0, 1, 1, 1, 1])
        >>> parts = dirichlet_partition(labels, 2, 0.5, np.random.default_rng(0))
        >>> sorted(int(i) for part in parts for i in part)
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    kind, kinds = _encode_labels(labels, clients, generator)
    check_choice("remainder", remainder, REMAINDERS)
    concentration = check_concentration(concentration)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in range(kinds):
        members = generator.permutation(np.flatnonzero(kind == label))
        exact = _expected_counts(len(members), clients, concentration, generator)
        counts = np.floor(exact).astype(np.int64)
        if remainder == "largest":
            # Ties fall at random: no client is favoured for its number.
            order = np.lexsort((generator.permutation(clients), counts - exact))
            counts[order[: len(members) - counts.sum()]] += 1
        for part, piece in zip(parts, np.split(members, np.cumsum(counts)), strict=False):
            part.append(piece)
    return [_concatenate_sorted(part) for part in parts]


def iid_partition(
    labels: np.ndarray | Sequence[int] | Sequence[str], clients: int, generator: np.random.Generator
) -> list[np.ndarray]:
    """Split samples at random, whatever their label, into parts whose sizes differ by one at most.

    Args:
        labels: (samples,) of any integer or string labels.
        clients: how many clients, at most the number of samples.
        generator: draws who gets which.

    Returns:
        One sorted int64 array of sample positions a client; together they are all.

    Raises:
        ArgumentError: naming the argument that does not fit.

    Example:
        >>> [len(part) for part in iid_partition([0, 0, 1, 1, 1], 2, np.random.default_rng(0))]
        [3, 2]
    """
    kind, _ = _encode_labels(labels, clients, generator)
    return [np.sort(part) for part in np.array_split(generator.permutation(len(kind)), clients)]


def shards_partition(
    labels: np.ndarray | Sequence[int] | Sequence[str],
    clients: int,
    shards_per_client: int,
    generator: np.random.Generator,
) -> list[np.ndarray]:
    """Sort samples by label, cut them into equal shards, and deal each client some of these at random.

    Most clients have as many labels as shards, or one more for each shard that lies across two of them.

    Args:
        labels: (samples,) of any integer or string labels.
        clients: how many clients.
        shards_per_client: of one client; 2 in the paper. All of them together are at most as many as samples.
        generator: draws the order within a label, and who gets which.

    Returns:
        One sorted int64 array of sample positions a client; together they are all.

    Raises:
        ArgumentError: naming the argument that does not fit.

    Source: McMahan et al. 2017, §3.

    Example:
        >>> labels = np.repeat([0, 1, 2, 3], 5)
        >>> [sorted(set(labels[part].tolist())) for part in shards_partition(labels, 2, 2, np.random.default_rng(0))]
        [[2, 3], [0, 1]]
    """
    kind, _ = _encode_labels(labels, clients, generator)
    if clients * check_count("shards_per_client", shards_per_client) > len(kind):
        raise ArgumentError(
            f"shards_per_client: expected at most {len(kind) // clients} a client, got {shards_per_client}"
        )
    order = generator.permutation(len(kind))
    pieces = np.array_split(order[np.argsort(kind[order], kind="stable")], clients * shards_per_client)
    dealt = generator.permutation(len(pieces)).reshape(clients, shards_per_client)
    return [_concatenate_sorted([pieces[i] for i in mine]) for mine in dealt]


def cyclic_partition(
    labels: np.ndarray | Sequence[int] | Sequence[str],
    clients: int,
    labels_per_client: int,
    generator: np.random.Generator,
) -> list[np.ndarray]:
    r"""Assign the k labels $ik, ik + 1, \dots, ik + k - 1$ modulo K to client i.

    The samples of a label are dealt evenly to the clients that have it; those of a label that nobody has, where there
    are fewer than K / k clients, are nobody's.

    Args:
        labels: (samples,) of any integer or string labels, counted in their order.
        clients: how many clients, at most the number of samples.
        labels_per_client: k, labels of one client, at most K.
        generator: draws who gets which sample.

    Returns:
        One sorted int64 array of sample positions a client; they are disjoint. Where a label has fewer samples than
        clients, some get none of it.

    Raises:
        ArgumentError: naming the argument that does not fit.

    Source: Queue G.3.

    Example:
        >>> labels = np.repeat(["a", "b", "c"], 4)
        >>> [labels[part].tolist() for part in cyclic_partition(labels, 3, 2, np.random.default_rng(0))]
        [['a', 'a', 'b', 'b'], ['a', 'a', 'c', 'c'], ['b', 'b', 'c', 'c']]
    """
    kind, kinds = _encode_labels(labels, clients, generator)
    if check_count("labels_per_client", labels_per_client) > kinds:
        raise ArgumentError(
            f"labels_per_client: expected at most {kinds}, as many labels as there are, got {labels_per_client}"
        )
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in range(kinds):
        # Label y is number j of client i where i k + j = y (mod K).
        holders = [i for i in range(clients) if (label - i * labels_per_client) % kinds < labels_per_client]
        members = generator.permutation(np.flatnonzero(kind == label))
        for i, piece in zip(holders, np.array_split(members, max(len(holders), 1)), strict=False):
            parts[i].append(piece)
    return [_concatenate_sorted(part) for part in parts]


def disjoint_partition(
    labels: np.ndarray | Sequence[int] | Sequence[str], clients: int, generator: np.random.Generator
) -> list[np.ndarray]:
    """Assign each label with all its samples to one client, such that the label counts differ by one at most.

    Args:
        labels: (samples,) of any integer or string labels.
        clients: how many clients, at most the number of labels.
        generator: draws who gets which label.

    Returns:
        One sorted int64 array of sample positions a client; together they are all.

    Raises:
        ArgumentError: naming the argument that does not fit.

    Source: OrthoFL §3, where two clients have a half of the labels each.

    Example:
        >>> labels = np.array([0, 1, 2, 0, 1, 2])
        >>> [labels[part].tolist() for part in disjoint_partition(labels, 3, np.random.default_rng(0))]
        [[2, 2], [0, 0], [1, 1]]
    """
    kind, kinds = _encode_labels(labels, clients, generator)
    if clients > kinds:
        raise ArgumentError(f"clients: expected at most one for each of {kinds} labels, got {clients}")
    return [np.flatnonzero(np.isin(kind, mine)) for mine in np.array_split(generator.permutation(kinds), clients)]


def natural_partition(
    labels: np.ndarray | Sequence[int] | Sequence[str],
    clients: int,
    generator: np.random.Generator,
    *,
    user_ids: np.ndarray | Sequence[int] | Sequence[str] | None = None,
    selection: str = "largest",
) -> list[np.ndarray]:
    """Assign to each client the samples of one owner: a speaker, a patient, a writer.

    Args:
        labels: (samples,) of any integer or string labels; they do not matter.
        clients: how many clients, at most the number of owners. What the others own is nobody's.
        generator: draws who is a client, if that is random.
        user_ids: (samples,), whose each sample is.
        selection: which owners are clients: those with the `"largest"` number of samples, or as many at `"random"`.

    Returns:
        One sorted int64 array of sample positions a client, in the order of their owners; they are disjoint.

    Raises:
        ArgumentError: naming the argument that does not fit.

    Example:
        >>> owners = ["Romeo", "Juliet", "Juliet", "Nurse", "Romeo"]
        >>> parts = natural_partition([0, 1, 0, 1, 0], 2, np.random.default_rng(0), user_ids=owners)
        >>> [part.tolist() for part in parts]
        [[1, 2], [0, 4]]
    """
    kind, _ = _encode_labels(labels, clients, generator)
    check_choice("selection", selection, SELECTIONS)
    if user_ids is None:
        raise ArgumentError("user_ids: expected the owner of each sample; this data set does not specify it")
    given = np.asarray(user_ids)
    if given.shape != kind.shape:
        raise ArgumentError(f"user_ids: expected one for each of {len(kind)} samples, got shape {given.shape}")
    _, owner, sizes = np.unique(given, return_inverse=True, return_counts=True)
    if clients > len(sizes):
        raise ArgumentError(f"clients: expected at most one for each of {len(sizes)} owners, got {clients}")
    order = np.argsort(-sizes, kind="stable") if selection == "largest" else generator.permutation(len(sizes))
    return [np.flatnonzero(owner == who) for who in np.sort(order[:clients])]


def check_concentration(value: float) -> float:
    """Return `value` as a float >= 0, possibly infinity.

    Raises:
        ArgumentError: if `value` is invalid.
    """
    try:
        number = math.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not number >= 0:
        raise ArgumentError(f"concentration: expected a number >= 0, got {short_repr(value)}")
    return number


def _encode_labels(
    labels: np.ndarray | Sequence[int] | Sequence[str], clients: int, generator: np.random.Generator
) -> tuple[np.ndarray, int]:
    """The labels as numbers from 0, and how many there are.

    Raises:
        ArgumentError: if there are no labels, more clients than samples, or `generator` is none.
    """
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.size == 0:
        raise ArgumentError(f"labels: expected a non-empty vector, got shape {labels.shape}")
    if check_count("clients", clients) > labels.size:
        raise ArgumentError(f"clients: expected at most one for each of {labels.size} samples, got {clients}")
    check_generator(generator)
    kinds, kind = np.unique(labels, return_inverse=True)
    return kind, len(kinds)


def _concatenate_sorted(pieces: list[np.ndarray]) -> np.ndarray:
    """Pieces of a part, which may be none, in order."""
    return np.sort(np.concatenate([np.empty(0, np.int64), *pieces]))


def _expected_counts(samples: int, clients: int, concentration: float, generator: np.random.Generator) -> np.ndarray:
    """`samples` times a draw of Dir(α, ..., α), with its limits at 0 and infinity."""
    even = np.full(clients, samples / clients)
    if concentration == 0:
        return np.where(np.arange(clients) == generator.integers(clients), float(samples), 0.0)
    # Beyond 1e100 a share differs from 1 / clients by less than its last digit, and the draw can overflow.
    return even if concentration > 1e100 else samples * generator.dirichlet(np.full(clients, concentration))
