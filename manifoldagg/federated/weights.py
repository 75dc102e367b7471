"""Weights: each client's share of the data, as a server states it."""

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

from manifoldagg.errors import ArgumentError, check_choice, check_count

__all__ = ["Weights", "check_client"]

KINDS = ("observed", "uniform")
MOST = 2**53
"""The largest amount: up to here floats count exactly."""


class Weights:
    r"""Who takes part, how many samples they have told, and the $w_i$ that follow.

    Args:
        given: a mapping client to samples, for $w_i = |D_i| / \sum_j |D_j|$; `"uniform"`, 1 / N; or `"observed"`,
            $|D_i| / (N \cdot$ mean of the $|D|$ seen$)$, with N the clients that were ever dispatched to.

    Raises:
        ArgumentError: naming a client whose samples are no positive integer up to $2^{53}$.

    Example:
        >>> weights = Weights({"ward-7": 30, "ward-8": 10})
        >>> weights.of("ward-7", samples=99)
        0.75
    """

    def __init__(self, given: str | Mapping[Any, int]) -> None:
        self._amounts: dict[Hashable, int] | None = None
        if isinstance(given, Mapping):
            amounts = {client: check_count(f"weights[{client!r}]", amount) for client, amount in given.items()}
            if not amounts:
                raise ArgumentError("weights: expected at least one client, got an empty mapping")
            for client, amount in amounts.items():
                if amount > MOST:
                    raise ArgumentError(f"weights[{client!r}]: expected at most 2^53 samples")
            self._amounts = amounts
            self._all = sum(amounts.values())
        else:
            check_choice("weights", given, KINDS)
        self._observed = given == "observed"
        self._issued: Counter[Hashable] = Counter()
        self._told: dict[Hashable, int] = {}
        self._total = 0

    def check(self, client: Hashable) -> None:
        """A client is hashable and, where weights were given up front, has one.

        Raises:
            ArgumentError: if not.
        """
        check_client(client)
        if self._amounts is not None and client not in self._amounts:
            raise ArgumentError(f"client: {client!r} has no entry in the weights that were given")

    def register(self, client: Hashable) -> None:
        """Count a dispatch to `client`: with its first, it takes part."""
        self._issued[client] += 1

    def forget(self, client: Hashable) -> None:
        """Undo one `register`."""
        self._issued[client] -= 1
        if not self._issued[client]:
            del self._issued[client]

    def of(self, client: Hashable, samples: int) -> float:
        """$w_i$, now that `client` tells `samples`."""
        if self._amounts is not None:
            return self._amounts[client] / self._all
        if not self._observed:
            return 1 / len(self._issued)
        seen = len(self._told) + (client not in self._told)
        total = self._total - self._told.get(client, 0) + samples
        return samples * seen / (len(self._issued) * total)

    def share(self, client: Hashable, samples: int) -> float:
        """What $w_i$ is a multiple of: the samples, as given or as told; 1 where all are alike."""
        if self._amounts is not None:
            return float(self._amounts[client])
        return float(samples) if self._observed else 1.0

    def record(self, client: Hashable, samples: int) -> None:
        """Remember a client's latest word on its samples."""
        self._total += samples - self._told.get(client, 0)
        self._told[client] = samples


def check_client(client: Hashable) -> Hashable:
    """A name of a client.

    Raises:
        ArgumentError: if it cannot be hashed.
    """
    try:
        hash(client)
    except Exception:  # whatever the name's own code raises
        raise ArgumentError(f"client: expected a hashable name, got one of type {type(client).__name__}") from None
    return client
