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

    $\Delta_i = \Theta_i - \Theta^{t_i}$ is the displacement from the client's base, which may be an older version.
    Stragglers do not block a round, and their updates are not discarded. In each round, the server sends the model to k
    clients drawn uniformly without replacement from all N clients, including busy clients. So the expectation of
    $\Delta$ is the mean over all clients, whatever their speeds are.

    The step is that of [`FedAvg`][manifoldagg.federated.rules.FedAvg] with equal weights, and that of
    [`FedBuff`][manifoldagg.federated.rules.FedBuff] with a constant staleness weight. This rule adds `draw`.

    Participation:

    - Clients can join or leave between two draws.
    - A client that is drawn while it is training has several tickets. A cohort may contain several of its updates.
    - An update on an old ticket counts in full.
    - After a failed task, the cohort waits for another update.

    `transport` and `rungs` are those of [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected].

    Args:
        cohort: the number k of updates per step.
        rate: the global rate $\eta_g$: a number or a function of the version $\tau$.
        weighted: weight updates by the client's share of the data $w_i$. Otherwise, the weights are equal, as in the
            paper.

    Raises:
        ArgumentError: if an option is out of range. The message names it.

    Source: Wang et al. 2024 (DeFedAvg-nIID), as compared in MasFL, Table 1.

    Cost: an update that moves the model reads 4 words a parameter, writes 1 and makes 0; one that waits reads 4, writes
        1 and makes 2.

    Example:
        >>> sorted(DeFedAvg(3).draw(["a", "b", "c"], np.random.default_rng(0)))
        ['a', 'b', 'c']
    """

    weighted: bool = field(default=False, kw_only=True)

    def draw(self, clients: Sequence[Client], generator: np.random.Generator) -> list[Client]:
        """Sample k distinct clients uniformly. The result depends only on the arguments.

        Args:
            clients: all N clients, without duplicates.
            generator: the random generator.

        Raises:
            ArgumentError: if `clients` is not a sequence, has fewer than k clients, or contains duplicates or
                unhashable clients.
        """
        try:
            once = len({*clients}) == len(clients) and not isinstance(clients, Set | Mapping)
        except TypeError:
            raise ArgumentError(f"clients: expected a sequence of hashable names, got {short_repr(clients)}") from None
        if not once:
            raise ArgumentError("clients: expected a sequence without duplicate clients")
        if len(clients) < self.cohort:
            raise ArgumentError(f"clients: expected at least {self.cohort} to draw from, got {len(clients)}")
        return [clients[i] for i in generator.permutation(len(clients))[: self.cohort]]
