"""Dominance penalty: a smaller rate for clients that return updates more often than others."""

from collections.abc import Mapping
from dataclasses import dataclass

from manifoldagg._validation import check_count, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.schedules import check_options
from manifoldagg.federated.types import ClientState

__all__ = ["Dominance"]


@dataclass(frozen=True)
class Dominance:
    r"""Penalty for clients that return updates more often than others.

    The learning rate of an update from client i becomes $\min(1, \eta / (N p_i))$ in place of $\eta$. Here, N is the
    number of clients, and $p_i$ is the fraction of all updates that come from client i. If all clients return equally
    many updates, $N p_i = 1$. More frequent clients get a lower learning rate, and less frequent clients a higher one.

    The client state stores the number of updates of the client.

    Args:
        clients: the number N of clients.
        smoothed: whether $p_i = (c_i + 1) / (k + N)$. Otherwise, $p_i = c_i / k$. Here, $c_i$ is the number of updates
            of client i, and $k$ is that of all clients. Both include the current update.

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
        r"""Return the learning rate for an update of a client, $\min(1, \eta / (N p_i))$.

        Here, $\eta$ is `rate`, N is the number of clients, and $p_i$ is the fraction of all updates that come from this
        client. The method computes $p_i$ from `client_updates` and `total_updates`.
        """
        part = (
            (client_updates + 1) / (total_updates + self.clients) if self.smoothed else client_updates / total_updates
        )
        return min(1.0, rate / (self.clients * part))

    def count_updates(self, client_state: ClientState) -> int:
        """Return the number of updates of a client, including the current update.

        Raises:
            ArgumentError: if the client state is not a mapping, or if its entry `updates` is not a nonnegative integer.
        """
        if client_state is not None and not isinstance(client_state, Mapping):
            raise ArgumentError(f"client_state: expected a mapping or None, got {short_repr(client_state)}")
        return check_count("client_state['updates']", (client_state or {}).get("updates", 0), at_least=0) + 1

    def next_client_state(self, client_state: ClientState) -> ClientState:
        """Return the client state after the current update."""
        count = self.count_updates(client_state)
        return {**(client_state or {}), "updates": count}
