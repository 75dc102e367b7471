"""DeFedAvg-nIID: uniformly sampled clients, whose updates are averaged as they arrive."""

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules.fedavg import FedAvg

__all__ = ["DeFedAvg"]

Client = TypeVar("Client", bound=Hashable)


@dataclass(frozen=True)
class DeFedAvg(FedAvg):
    r"""Rule that averages the first k updates of uniformly sampled clients.

    $\Theta \leftarrow \Theta + \eta_g\, \dfrac1k \sum_{i=1}^k \Delta_i$ over the first k updates that arrive.

    $\Delta_i = \Theta_i - \Theta^{t_i}$ against the base of each, which may be an older version. Stragglers do not
    block a round, and their updates are not discarded. In each round the model goes to k clients drawn uniformly
    without
    replacement from all N, busy or not, so that the mean of $\Delta$ over draws is that of all clients, however
    differently fast they are. It is [`FedAvg`][manifoldagg.federated.rules.FedAvg] with equal weights, and
    [`FedBuff`][manifoldagg.federated.rules.FedBuff] with a constant staleness weight; what is its own is `draw`.

    Who joins or leaves is in the next draw or not; a client that is drawn while it works holds several tickets, and a
    cohort may have several of its updates; an old ticket counts in full; for a failed task the cohort waits until
    another one comes.

    `transport` and `rungs` are those of [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected].

    Args:
        cohort: k.
        rate: $\eta_g$: a number, or a function of the version $\tau$.
        weighted: by each client's share of the data $w_i$; equally, as in the paper, otherwise.

    Raises:
        ArgumentError: naming the option that is out of range.

    Source: Wang et al. 2024 (DeFedAvg-nIID), as MasFL Table 1 compares it.

    Cost: an update that moves the model reads 4 words a parameter, writes 1 and makes 0; one that waits reads 4, writes
        1 and makes 2.

    Example:
        >>> sorted(DeFedAvg(3).draw(["a", "b", "c"], np.random.default_rng(0)))
        ['a', 'b', 'c']
    """

    weighted: bool = field(default=False, kw_only=True)

    def draw(self, clients: Sequence[Client], generator: np.random.Generator) -> list[Client]:
        """Sample k distinct clients uniformly; the result depends on the arguments only.

        Args:
            clients: all N, once each.
            generator: draws them.

        Raises:
            ArgumentError: if they are fewer than k, one comes twice or is unhashable, or they have no order.
        """
        try:
            once = len({*clients}) == len(clients) and not isinstance(clients, Set | Mapping)
        except TypeError:
            raise ArgumentError(f"clients: expected a sequence of hashable names, got {short_repr(clients)}") from None
        if not once:
            raise ArgumentError("clients: expected a sequence with every client once")
        if len(clients) < self.cohort:
            raise ArgumentError(f"clients: expected at least {self.cohort} to draw from, got {len(clients)}")
        return [clients[i] for i in generator.permutation(len(clients))[: self.cohort]]
