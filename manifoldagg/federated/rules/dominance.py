"""A penalty on clients that answer more often than others."""

from collections.abc import Mapping
from dataclasses import dataclass

from manifoldagg._validation import check_count
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.schedules import check_options
from manifoldagg.federated.types import ClientState

__all__ = ["Dominance"]


@dataclass(frozen=True)
class Dominance:
    r"""Multiply the global rate by $1 / (N p_i)$ and clamp the product to 1.

    $p_i$ is the part of all updates so far, this one among them, that come from the client: $c_i$ of $k$. How many
    those are is kept in the client's memory, so that the state of a rule does not grow with its clients.

    Args:
        clients: $N$.
        smoothed: $p_i = (c_i + 1) / (k + N)$; else $c_i / k$.

    Raises:
        ArgumentError: if `clients` is no positive integer.

    Source: Report, dominance penalty (after Leconte et al. 2024).

    Example:
        >>> Dominance(clients=4).temper(0.5, own=3, total=4)
        0.25
        >>> Dominance(clients=4, smoothed=False).temper(0.5, own=1, total=8)
        1.0
    """

    clients: int
    smoothed: bool = True

    def __post_init__(self) -> None:
        check_options(self)
        check_count("clients", self.clients)

    def temper(self, rate: float, own: int, total: int) -> float:
        r"""$\min(1, \eta / (N p_i))$ for $c_i$ = `own` of $k$ = `total` updates."""
        part = (own + 1) / (total + self.clients) if self.smoothed else own / total
        return min(1.0, rate / (self.clients * part))

    def count(self, memory: ClientState) -> int:
        """How many updates have come from a client of this memory, with the one at hand.

        Raises:
            ArgumentError: if it is no mapping, or its `updates` no count.
        """
        if memory is not None and not isinstance(memory, Mapping):
            raise ArgumentError(f"client_state: ..., got {memory!r}")
        return check_count("memory['updates']", (memory or {}).get("updates", 0), at_least=0) + 1

    def memory(self, memory: ClientState) -> ClientState:
        """The memory after the update at hand."""
        count = self.count(memory)
        return {**(memory or {}), "updates": count}
