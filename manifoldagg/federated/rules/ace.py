"""ACE: each update moves the model by the mean of the latest updates of all clients."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from manifoldagg._validation import check_count
from manifoldagg.corrections import Corrected
from manifoldagg.federated.rules._geometry import check_points, frame_from_update, safe_sqrt
from manifoldagg.federated.rules._latest_update import LatestUpdateRule, coefficients_of, combine_float64
from manifoldagg.federated.schedules import Rate, rate_at
from manifoldagg.federated.types import Outcome, State, Update
from manifoldagg.manifolds import Manifold, ParameterSpace

__all__ = ["ACE"]


@dataclass(frozen=True)
class ACE(LatestUpdateRule):
    r"""All-client engagement (ACE): a step along the mean of the latest displacements of all clients.

    After each update of client i, its latest displacement $h_i$ and the model become

    $$h_i \leftarrow \Delta_i, \qquad \Theta \leftarrow \Theta + \eta\, \frac1N \sum_{j=1}^N h_j.$$

    Here, $\Delta_i = \Theta_i - \Theta^{t_i}$ is the displacement of client i from its own base, $\eta$ is the rate and
    N is the number of clients. Before the first update of client j, $h_j$ is zero.

    Use this rule when some clients return updates much more often than others. A fast client replaces its own $h_i$
    more often, but its share of the mean remains $1 / N$.

    The server stores one vector $h_j$ per client and the sum of these vectors. An update adds $\Delta_i - h_i$ to the
    sum. If a client leaves, its last displacement remains in the mean. A failed task changes nothing.

    Rounding: the sum is stored in float64. For one entry of the vectors, let M be the largest value that $\sum_j |h_j|$
    has had. After T updates, the entry of the stored sum differs from the exact sum by at most $3 T M \cdot 2^{-53}$.
    With one million updates, this bound is $3.4 \cdot 10^{-10} M$. Because one extremely long displacement makes M
    large, limit the norms of updates with the options `max_norm` and `clip` of `UpdateLimits`.

    Stability: $h_j$ is used until the next update of client j, so it is older than the displacement of a rule that uses
    each update once. The rate must therefore be smaller. In the model of
    [`stability_limit`][manifoldagg.federated.stability_limit], with all N clients in flight, the limit of $\eta$ is
    about $2 / N$. If the clients return in a fixed order, the limit is about $1.1 / N$.
    [`suggest_rate`][manifoldagg.federated.suggest_rate] returns $1 / (2 N)$.

    Args:
        rate: the global rate $\eta$: a number or a function of the version $\tau$.
        clients: the number N of clients, which grows if more clients return updates. With `None`, N is the number of
            clients that have returned an update.

    Raises:
        ArgumentError: if an option is out of range, or if the space has curved leaves other than low-rank leaves,
            because the rule adds displacements from different bases.

    Source: arXiv 2511.19066.

    Cost: a step reads 19 words per parameter, writes 4 and allocates 3.

    Example:
        The second update of client a replaces its first update. The update of client b remains in the mean:

        >>> import torch
        >>> from manifoldagg.federated import Payload, Server
        >>> from manifoldagg.manifolds import Flat
        >>> server = Server(Flat(1), ACE(clients=2), torch.zeros(1))
        >>> for client, move in (("a", 4.0), ("b", 2.0), ("a", 6.0)):
        ...     ticket = server.dispatch(client)
        ...     _ = server.receive(ticket.id, Payload(ticket.message.start[None] + move, samples=1))
        ...     print(server.model.item())
        2.0
        5.0
        9.0
    """

    state_entries: ClassVar[frozenset[str] | None] = frozenset({"version", "cached", "sum"})
    rate_kind: ClassVar[str] = "latest"
    rate: Rate = 1.0
    clients: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clients is not None:
            check_count("clients", self.clients)

    def init(self, space: Manifold, start: Tensor) -> State:
        return super().init(space, start) | {"cached": 0}

    def carried_displacements(self, space: ParameterSpace, state: State) -> list[list[tuple[float, Tensor]]]:
        """Return the step that results if the next update equals the last update of the same client.

        The server checks that the model remains finite after this step.
        """
        if "sum" not in state:
            return []
        return [[(rate_at(self.rate, state["version"]) / self._num_clients(state["cached"]), state["sum"])]]

    def step(
        self, space: Manifold, state: State, update: Update, *, out: Tensor | None = None
    ) -> tuple[State, Outcome]:
        check_points(self, update)
        before = (update.client_state or {}).get("latest")
        frame = frame_from_update(space, update)
        for name, row in (("before", before), ("sum", state.get("sum"))):
            frame = frame if row is None else frame.with_row(name, row)
        gram = frame.gram()
        latest = self.latest(frame, gram)
        cached = state["cached"] + (before is None)
        rate = rate_at(self.rate, state["version"])
        share = rate / self._num_clients(cached)
        line = coefficients_of(frame, v1=share, before=-share, sum=share)
        norm = safe_sqrt(Corrected.single(frame, gram, line).inner_products()[0][0])
        model = frame.combine(update.current.detach(), line, out=out)
        # The sum contains the rounded displacement, because the client's next update subtracts exactly this tensor.
        total = combine_float64(frame.with_row("latest", latest), latest=1.0, before=-1.0, sum=1.0)
        after = {"version": state["version"] + 1, "cached": cached, "sum": total}
        numbers = {"cosine": gram.cosine, "weight": 1.0, "rate": rate, "step": rate, "norm": norm} | frame.diagnostics
        # Each norm is at most the square root of the largest number, so sums in float64 are finite.
        return after, Outcome(model, {"latest": latest}, numbers, state_is_finite=True)

    def _num_clients(self, cached: int) -> int:
        return max(self.clients or 0, cached)
