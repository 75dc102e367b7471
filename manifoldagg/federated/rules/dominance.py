"""A penalty on clients that return updates more often than others."""

from collections.abc import Mapping
from dataclasses import dataclass

from manifoldagg._validation import check_count, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.schedules import check_options
from manifoldagg.federated.types import ClientState

__all__ = ["Dominance"]


@dataclass(frozen=True)
class Dominance:
    r"""Penalty that multiplies the global rate by $1 / (N p_i)$ and limits the product to 1.

    $p_i$ is the fraction of all updates so far, including the current update, that come from the client: $c_i$ of $k$.
    The client state stores $c_i$, so that the state of a rule does not grow with the number of clients.

    Args:
        clients: the number $N$ of clients.
        smoothed: whether $p_i = (c_i + 1) / (k + N)$. Otherwise, $p_i = c_i / k$.

    Raises:
        ArgumentError: if `clients` is not a positive integer.

    Source: Report, dominance penalty (after Leconte et al. 2024).

    Example:
        >>> Dominance(clients=4).scaled_rate(0.5, client_updates=3, total_updates=4)
        0.25
        >>> Dominance(clients=4, smoothed=False).scaled_rate(0.5, client_updates=1, total_updates=8)
        1.0
    """

    clients: int
    smoothed: bool = True

    def __post_init__(self) -> None:
        check_options(self)
        check_count("clients", self.clients)

    def scaled_rate(self, rate: float, client_updates: int, total_updates: int) -> float:
        r"""Return $\min(1, \eta / (N p_i))$ for $c_i$ = `client_updates` of $k$ = `total_updates` updates."""
        part = (
            (client_updates + 1) / (total_updates + self.clients) if self.smoothed else client_updates / total_updates
        )
        return min(1.0, rate / (self.clients * part))

    def count_updates(self, client_state: ClientState) -> int:
        """Return the number of updates of a client with this client state, including the current one.

        Raises:
            ArgumentError: if the client state is not a mapping, or its entry `updates` is not a nonnegative integer.
        """
        if client_state is not None and not isinstance(client_state, Mapping):
            raise ArgumentError(f"client_state: expected a mapping or None, got {short_repr(client_state)}")
        return check_count("client_state['updates']", (client_state or {}).get("updates", 0), at_least=0) + 1

    def next_client_state(self, client_state: ClientState) -> ClientState:
        """Return the client state after the current update."""
        count = self.count_updates(client_state)
        return {**(client_state or {}), "updates": count}
