"""DeFedAvg-nIID: the mean of the first updates that arrive from uniformly sampled clients."""

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
    r"""Delayed federated averaging (DeFedAvg-nIID): the mean of the first updates of uniformly sampled clients.

    After every k updates, the new model is

    $$\Theta \leftarrow \Theta + \frac{\eta_g}{k} \sum_{i=1}^k \Delta_i, \qquad \Delta_i = \Theta_i - \Theta^{t_i}.$$

    The displacement $\Delta_i$ is measured from the model from which the client started, which may be an older version.
    In each round, the server sends the model to k clients. It draws them uniformly without replacement from all N
    clients, including clients that are still training. The expected step is therefore the mean over all clients, even
    if some clients are slow.

    Use this rule when slow clients have different data and their updates must not be lost. The step equals that of
    [`FedAvg`][manifoldagg.federated.rules.FedAvg] with equal weights. This rule adds the sampling method `draw`.

    Participation:

    - Clients can join or leave between two draws.
    - A client that is drawn during training gets a further ticket. A cohort may contain several updates of one client.
    - An update on an old ticket counts in full.
    - After a failed task, the cohort waits for another update.

    For `transport` and `rungs`, see [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected].

    Args:
        cohort: the number k of updates per step.
        rate: the global rate $\eta_g$: a number or a function of the version $\tau$.
        transport: the transport of tangents on a curved space: `"parallel"`, `"ladder"` or `"projection"`. The default
            `None` uses parallel transport where a closed form exists, and a ladder otherwise. A flat space accepts only
            `None`.
        rungs: the number of rungs of a ladder.
        weighted: whether to weight updates by the client's share of the data $w_i$. Otherwise, all weights are equal,
            as in the paper.
        over_selection: the fraction of additional clients in each round, as in
            [`FedAvg`][manifoldagg.federated.rules.FedAvg].

    Raises:
        ArgumentError: if an option is out of range.

    Source: Wang et al. 2024 (DeFedAvg-nIID), as compared in MasFL, Table 1.

    Cost: a step reads 4 words per parameter, writes 1 and allocates 0. A buffered update reads 4, writes 1 and
    allocates 2.

    Example:
        >>> sorted(DeFedAvg(3).draw(["a", "b", "c"], np.random.default_rng(0)))
        ['a', 'b', 'c']
    """

    weighted: bool = field(default=False, kw_only=True)

    def draw(self, clients: Sequence[Client], generator: np.random.Generator) -> list[Client]:
        """Draw k distinct clients uniformly at random.

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
