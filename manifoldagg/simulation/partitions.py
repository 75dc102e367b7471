"""Partitions: how a data set is split over clients."""

import math
from collections.abc import Sequence

import numpy as np

from manifoldagg.errors import ArgumentError, check_choice, check_count
from manifoldagg.simulation.clock import check_generator

__all__ = ["check_concentration", "dirichlet_partition"]

REMAINDERS = ("largest", "drop")


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
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.size == 0:
        raise ArgumentError(f"labels: expected a non-empty vector, got shape {labels.shape}")
    if check_count("clients", clients) > labels.size:
        raise ArgumentError(f"clients: expected at most one for each of {labels.size} samples, got {clients}")
    check_choice("remainder", remainder, REMAINDERS)
    check_generator(generator)
    concentration = check_concentration(concentration)
    kinds, kind = np.unique(labels, return_inverse=True)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in range(len(kinds)):
        members = generator.permutation(np.flatnonzero(kind == label))
        exact = _expected_counts(len(members), clients, concentration, generator)
        counts = np.floor(exact).astype(np.int64)
        if remainder == "largest":
            # Ties fall at random: no client is favoured for its number.
            order = np.lexsort((generator.permutation(clients), counts - exact))
            counts[order[: len(members) - counts.sum()]] += 1
        for part, piece in zip(parts, np.split(members, np.cumsum(counts)), strict=False):
            part.append(piece)
    return [np.sort(np.concatenate(part)).astype(np.int64) for part in parts]


def check_concentration(value: float) -> float:
    """`value` as a float >= 0; infinity is one.

    Raises:
        ArgumentError: if `value` is none.
    """
    try:
        number = math.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not number >= 0:
        raise ArgumentError(f"concentration: expected a number >= 0, got {value!r}")
    return number


def _expected_counts(samples: int, clients: int, concentration: float, generator: np.random.Generator) -> np.ndarray:
    """`samples` times a draw of Dir(α, ..., α), with its limits at 0 and infinity."""
    even = np.full(clients, samples / clients)
    if concentration == 0:
        return np.where(np.arange(clients) == generator.integers(clients), float(samples), 0.0)
    # Beyond 1e100 a share differs from 1 / clients by less than its last digit, and the draw can overflow.
    return even if concentration > 1e100 else samples * generator.dirichlet(np.full(clients, concentration))
