"""Partitions, which split a data set over clients."""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from manifoldagg._validation import check_choice, check_count, check_vector, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.clock import check_generator

__all__ = [
    "Partition",
    "check_concentration",
    "cyclic_partition",
    "dirichlet_partition",
    "disjoint_partition",
    "grouped_partition",
    "iid_partition",
    "natural_partition",
    "shards_partition",
    "sizes_partition",
]

Partition: TypeAlias = Callable[..., list[np.ndarray]]
"""A function that splits samples over clients. Its arguments are `labels` (samples,), `clients` and `generator=`.

It returns an array of sample indices for each client. If it has an argument `user_ids`, it also receives the user of
each sample, an array (samples,) of integers, or `None` if the users are unknown.
"""

REMAINDERS = ("largest", "drop")
SELECTIONS = ("largest", "random")
BALANCES = ("owners", "samples")
WEIGHTS: dict[str, Callable[[int], float]] = {
    "equal": lambda client: 1.0,
    "linear": float,
    "quadratic": lambda client: float(client**2),
}
"""The named weights, as functions of the index of a client, counted from 1."""


def dirichlet_partition(
    labels: np.ndarray | Sequence[int] | Sequence[str],
    clients: int,
    concentration: float,
    generator: np.random.Generator,
    *,
    remainder: str = "largest",
) -> list[np.ndarray]:
    r"""Split the samples of each label over the clients in random proportions from a Dirichlet distribution.

    For each label $y$ with $|D_y|$ samples, the shares $p_y$ of the clients are drawn from
    $\mathrm{Dir}(\alpha, \dots, \alpha)$. Client $i$ then receives $\lfloor p_{y,i} |D_y| \rfloor$ random samples of
    this label. The total number of samples can differ between clients.

    The return value and the exceptions are those of [`iid_partition`][manifoldagg.simulation.iid_partition].

    Args:
        labels: the labels (samples,), integers or strings.
        clients: the number of clients.
        concentration: the concentration $\alpha$. 0 assigns each label to one client, and `inf` splits it evenly.
        generator: the random generator.
        remainder: the treatment of the samples that remain after rounding down. `"largest"` assigns them to the clients
            with the largest remainders, and `"drop"` drops them, as in the paper.

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
            # Ties are broken at random, so that no client is favoured because of its index.
            order = np.lexsort((generator.permutation(clients), counts - exact))
            counts[order[: len(members) - counts.sum()]] += 1
        for part, piece in zip(parts, np.split(members, np.cumsum(counts)), strict=False):
            part.append(piece)
    return [_concatenate_sorted(part) for part in parts]


def iid_partition(
    labels: np.ndarray | Sequence[int] | Sequence[str], clients: int, generator: np.random.Generator
) -> list[np.ndarray]:
    """Split samples over clients at random, independently of their labels.

    The numbers of samples of any two clients differ by at most one.

    Args:
        labels: the labels (samples,), integers or strings.
        clients: the number of clients, at most the number of samples.
        generator: the random generator.

    Returns:
        A sorted int64 array of sample indices for each client. The arrays are disjoint, and some can be empty.

    Raises:
        ArgumentError: if an argument is invalid. The message names it.

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
    """Sort the samples by label, cut them into equal shards, and assign random shards to each client.

    As a result, each client has samples of few labels. Most clients have one label per shard, plus one label for each
    shard that spans two labels. The return value and the exceptions are those of
    [`iid_partition`][manifoldagg.simulation.iid_partition].

    Args:
        labels: the labels (samples,), integers or strings.
        clients: the number of clients.
        shards_per_client: the number of shards per client; 2 in the paper. The total number of shards is at most the
            number of samples.
        generator: the random generator.

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
    r"""Assign k consecutive labels to each client, in cyclic order over all K labels.

    Labels are numbered from 0 in sorted order. Client $i$ receives the labels $ik, ik + 1, \dots, ik + k - 1$ modulo
    $K$. The samples of a label are split evenly over the clients that receive this label. With fewer than $K / k$
    clients, some labels are not assigned, and their samples are dropped.

    The return value and the exceptions are those of [`iid_partition`][manifoldagg.simulation.iid_partition].

    Args:
        labels: the labels (samples,), integers or strings.
        clients: the number of clients.
        labels_per_client: the number k of labels per client, at most K.
        generator: the random generator.

    Source: Queue G.3.

    Example:
        >>> labels = np.repeat(["a", "b", "c"], 4)
        >>> [labels[part].tolist() for part in cyclic_partition(labels, 3, 2, np.random.default_rng(0))]
        [['a', 'a', 'b', 'b'], ['a', 'a', 'c', 'c'], ['b', 'b', 'c', 'c']]
    """
    kind, kinds = _encode_labels(labels, clients, generator)
    if check_count("labels_per_client", labels_per_client) > kinds:
        raise ArgumentError(
            f"labels_per_client: expected at most the number of labels, {kinds}, got {labels_per_client}"
        )
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in range(kinds):
        # Label y is the j-th label of client i if i k + j = y (mod K).
        holders = [i for i in range(clients) if (label - i * labels_per_client) % kinds < labels_per_client]
        members = generator.permutation(np.flatnonzero(kind == label))
        for i, piece in zip(holders, np.array_split(members, max(len(holders), 1)), strict=False):
            parts[i].append(piece)
    return [_concatenate_sorted(part) for part in parts]


def disjoint_partition(
    labels: np.ndarray | Sequence[int] | Sequence[str], clients: int, generator: np.random.Generator
) -> list[np.ndarray]:
    """Assign all samples of each label to a single client, which is chosen at random.

    The clients' numbers of labels differ by at most one. The return value and the exceptions are those of
    [`iid_partition`][manifoldagg.simulation.iid_partition].

    Args:
        labels: the labels (samples,), integers or strings.
        clients: the number of clients, at most the number of labels.
        generator: the random generator.

    Source: OrthoFL §3, where each of two clients has half of the labels.

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
    """Assign the samples of one owner, such as a speaker, a patient or a writer, to each client.

    If there are more owners than clients, the samples of the remaining owners are dropped. The return value and the
    exceptions are those of [`iid_partition`][manifoldagg.simulation.iid_partition].

    Args:
        labels: the labels (samples,), integers or strings.
        clients: the number of clients, at most the number of owners.
        generator: the random generator.
        user_ids: the owner of each sample, (samples,).
        selection: the owners that become clients: those with the `"largest"` numbers of samples, or `"random"` owners.

    Example:
        >>> owners = ["Romeo", "Juliet", "Juliet", "Nurse", "Romeo"]
        >>> parts = natural_partition([0, 1, 0, 1, 0], 2, np.random.default_rng(0), user_ids=owners)
        >>> [part.tolist() for part in parts]
        [[1, 2], [0, 4]]
    """
    check_choice("selection", selection, SELECTIONS)
    owner, sizes = _encode_owners(labels, clients, generator, user_ids)
    order = np.argsort(-sizes, kind="stable") if selection == "largest" else generator.permutation(len(sizes))
    return [np.flatnonzero(owner == who) for who in np.sort(order[:clients])]


def grouped_partition(
    labels: np.ndarray | Sequence[int] | Sequence[str],
    clients: int,
    generator: np.random.Generator,
    *,
    user_ids: np.ndarray | Sequence[int] | Sequence[str] | None = None,
    balance: str = "owners",
) -> list[np.ndarray]:
    r"""Assign all samples of each owner, such as a patient, to a single client. No sample is dropped.

    By default, the owners are distributed at random and as evenly as possible. With O owners and N clients, each client
    receives $\lfloor O / N \rfloor$ or $\lceil O / N \rceil$ owners, and at least one. Two examples with 30 clients:

    - Each sample belongs to one of 30,805 patients: 25 clients receive 1,027 patients, and five clients receive 1,026.
    - Each sample is a line of text from one of 35 plays: five clients receive two plays, and 25 clients receive one.

    Args:
        labels: the labels (samples,), integers or strings.
        clients: the number of clients, at most the number of owners.
        generator: the random generator.
        user_ids: the owner of each sample, (samples,).
        balance: `"owners"` balances the numbers of owners, as in the paper. `"samples"` balances the numbers of samples
            with Graham's rule: in the order of decreasing numbers of samples, each owner goes to the client with the
            fewest samples. The largest client then has at most $4/3 - 1/(3N)$ times the samples of the best
            assignment. Ties are broken at random.

    Returns:
        A sorted int64 array of sample indices for each client. The arrays are disjoint.

    Raises:
        ArgumentError: if an argument is invalid. The message names it.

    Source: Manifold B.2 ("We allocate each play wholly to a distinct client - since there are 30 clients, 5 will
    receive 2 plays each") and B.3 (30,805 patients, "with each assigned wholly to one of 30 clients"). `"samples"`:
    Graham 1969, Bounds on multiprocessing timing anomalies, Theorem 2.

    Example:
        >>> plays = np.repeat(["Hamlet", "Macbeth", "Othello"], [3, 1, 1])
        >>> parts = grouped_partition(np.zeros(5), 2, np.random.default_rng(0), user_ids=plays, balance="samples")
        >>> sorted(sorted(set(plays[part].tolist())) for part in parts)
        [['Hamlet'], ['Macbeth', 'Othello']]
    """
    check_choice("balance", balance, BALANCES)
    owner, sizes = _encode_owners(labels, clients, generator, user_ids)
    order = generator.permutation(len(sizes))
    client_of = np.empty(len(sizes), np.int64)
    if balance == "owners":
        # The clients with one owner more are random, too.
        client_of[order] = np.resize(generator.permutation(clients), len(sizes))
    else:
        totals = [(0, int(tie), client) for client, tie in enumerate(generator.permutation(clients))]
        for who in order[np.argsort(-sizes[order], kind="stable")]:
            total, tie, client = heapq.heappop(totals)
            client_of[who] = client
            heapq.heappush(totals, (total + int(sizes[who]), tie, client))
    of_sample = client_of[owner]
    by_client = np.argsort(of_sample, kind="stable")
    return np.split(by_client, np.cumsum(np.bincount(of_sample, minlength=clients))[:-1])


def sizes_partition(
    labels: np.ndarray | Sequence[int] | Sequence[str],
    clients: int,
    generator: np.random.Generator,
    *,
    weights: str | float | Sequence[float] | np.ndarray | Callable[[int], float] = "linear",
) -> list[np.ndarray]:
    r"""Split samples over clients at random, independently of their labels, in proportion to given weights.

    Client $i$ with the weight $w_i$ receives $n w_i / \sum_j w_j$ of the n samples. These numbers are rounded down. The
    remaining samples go to the clients with the largest remainders, so no sample is dropped.

    The return value and the exceptions are those of [`iid_partition`][manifoldagg.simulation.iid_partition].

    Args:
        labels: the labels (samples,), integers or strings.
        clients: the number of clients.
        generator: the random generator.
        weights: the weights $w_i \ge 0$ of the clients $i = 1, \dots, N$, of which at least one is positive:

            - `"linear"`: $w_i = i$, so that sizes are proportional to the index of the client, as in the paper.
            - `"quadratic"`: $w_i = i^2$.
            - `"equal"`: $w_i = 1$.
            - a number for each client.
            - a function of the index i.

    Source: Report §3 ("giving each client a number of training examples proportional to its index").

    Example:
        >>> [len(part) for part in sizes_partition(np.zeros(12), 3, np.random.default_rng(0))]
        [2, 4, 6]
        >>> [len(part) for part in sizes_partition(np.zeros(9), 2, np.random.default_rng(0), weights=[2, 1])]
        [6, 3]
    """
    kind, _ = _encode_labels(labels, clients, generator)
    shares = _weights(weights, clients)
    exact = len(kind) * (shares / shares.sum())
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(counts - exact, kind="stable")
    counts[order[: len(kind) - counts.sum()]] += 1
    return [np.sort(part) for part in np.split(generator.permutation(len(kind)), np.cumsum(counts)[:-1])]


def check_concentration(value: float) -> float:
    """Convert a concentration to a float >= 0, which may be infinity."""
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
    """Check the arguments, and return the labels as integers from 0 and their number."""
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.size == 0:
        raise ArgumentError(f"labels: expected a non-empty vector, got shape {labels.shape}")
    if check_count("clients", clients) > labels.size:
        raise ArgumentError(f"clients: expected at most one for each of {labels.size} samples, got {clients}")
    check_generator(generator)
    kinds, kind = np.unique(labels, return_inverse=True)
    return kind, len(kinds)


def _encode_owners(
    labels: np.ndarray | Sequence[int] | Sequence[str],
    clients: int,
    generator: np.random.Generator,
    user_ids: np.ndarray | Sequence[int] | Sequence[str] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Check the arguments, and return the owners as integers from 0 and their sample counts."""
    kind, _ = _encode_labels(labels, clients, generator)
    if user_ids is None:
        raise ArgumentError("user_ids: expected the owner of each sample, got a data set without owners")
    given = np.asarray(user_ids)
    if given.shape != kind.shape:
        raise ArgumentError(f"user_ids: expected one for each of {len(kind)} samples, got shape {given.shape}")
    _, owner, sizes = np.unique(given, return_inverse=True, return_counts=True)
    if clients > len(sizes):
        raise ArgumentError(f"clients: expected at most one for each of {len(sizes)} owners, got {clients}")
    return owner, sizes


def _weights(weights: str | float | Sequence[float] | np.ndarray | Callable[[int], float], clients: int) -> np.ndarray:
    """Return the weights of the clients, divided by the largest weight."""
    if isinstance(weights, str):
        weights = WEIGHTS[check_choice("weights", weights, WEIGHTS)]
    if callable(weights):
        weights = [weights(client) for client in range(1, clients + 1)]
    given = check_vector("weights", np.atleast_1d(weights), at_least=0)
    if len(given) != clients:
        raise ArgumentError(f"weights: expected one for each of {clients} clients, got {len(given)}")
    if not given.any():
        raise ArgumentError("weights: expected at least one positive weight, got zeros")
    # The division by the largest weight prevents an overflow of the sum of the weights.
    scaled: np.ndarray = given / given.max()
    return scaled


def _concatenate_sorted(pieces: list[np.ndarray]) -> np.ndarray:
    """Concatenate and sort arrays of indices, of which there may be zero."""
    return np.sort(np.concatenate([np.empty(0, np.int64), *pieces]))


def _expected_counts(samples: int, clients: int, concentration: float, generator: np.random.Generator) -> np.ndarray:
    """Return `samples` times a draw from Dir(α, ..., α), where α may be 0 or infinity."""
    even = np.full(clients, samples / clients)
    if concentration == 0:
        return np.where(np.arange(clients) == generator.integers(clients), float(samples), 0.0)
    # Above 1e100, a share equals 1 / clients up to rounding, and the draw can overflow.
    return even if concentration > 1e100 else samples * generator.dirichlet(np.full(clients, concentration))
