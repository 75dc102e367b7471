"""CA²FL (cached update calibration): a buffered rule that also uses the latest updates of other clients.

The server caches the latest update of each client. Clients without an update in the buffer therefore contribute to the
step, too.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from manifoldagg._validation import check_choice, check_count
from manifoldagg.corrections import Corrected
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules._geometry import (
    check_points,
    frame_from_update,
    safe_sqrt,
)
from manifoldagg.federated.rules._latest_update import LatestUpdateRule, coefficients_of, combine_float64
from manifoldagg.federated.schedules import Rate, rate_at
from manifoldagg.federated.types import Outcome, State, Update
from manifoldagg.manifolds import Manifold, ParameterSpace

__all__ = ["CA2FL"]

UNKNOWN_MODES = ("zero", "mean")
NO_SLOT = -1
EMPTY_BUFFER = {"count": 0, "joined": 0, "guests": 0, "held": []}


@dataclass(frozen=True)
class CA2FL(LatestUpdateRule):
    r"""Cached update calibration (CA²FL): a buffer mean, corrected by the cached displacement of every client.

    The server caches the last displacement $h_i$ of each client. After every K updates, the new model is $\Theta
    \leftarrow \Theta + \eta_g\, v$ with

    $$v = \bar h + \frac1K \sum_{i=1}^K (\Delta_i - h_i), \qquad \bar h = \frac1N \sum_j h_j,
      \qquad \Delta_i = \Theta_i - \Theta^{t_i}.$$

    The values $h_i$ are those from before the first update of the buffer. After the step, $h_i \leftarrow \Delta_i$. If
    a client has several updates in the buffer, its last displacement is cached.

    Use this rule when clients have heterogeneous data and some of them rarely return updates. If all N clients are in
    every buffer, $v$ is the mean of their displacements.

    The client state stores $h_i$, one vector per client. The buffer stores at most K additional vectors. The sum
    $\sum_j h_j$ and the buffer are in float64, so a very long displacement cancels when the client's next displacement
    replaces it. If K squares of the norm of a displacement overflow in the dtype of the model, the rule rejects the
    displacement.

    Participation:

    - For a client that joins late, the option `unknown` determines $h_i$.
    - The last displacement of a client that leaves remains in $\bar h$.
    - An update on an old ticket counts like any other update.
    - A failed task changes nothing.

    Some published code never fills the cache, which reduces the method to FedBuff without staleness weights. This class
    fills the cache in each step.

    Args:
        size: the number K of updates per step.
        rate: the global rate $\eta_g$: a number or a function of the version $\tau$.
        clients: the number N of clients, which grows if more clients return updates. With `None`, N is the number of
            clients that have returned an update, including those in the current buffer.
        unknown: the value of $h_i$ for a client that has not returned an update. `"zero"` is the choice of the paper.
            `"mean"` is $\bar h$ over the clients that have returned an update, so that a new client does not count
            twice.

    Raises:
        ArgumentError: if an option is out of range, or if the space has curved leaves other than low-rank leaves,
            because the rule adds displacements from different bases.

    Source: Wang et al. 2024 (ICLR), Algorithm 2; OrthoFL D.2.

    Cost: a step reads 25 words per parameter, writes 4 and allocates 3. A buffered update reads 9, writes 3 and
    allocates 4.

    Example:
        Client a returns two updates. The third step also uses the cached displacement of client b:

        >>> import torch
        >>> from manifoldagg.federated import Payload, Server
        >>> from manifoldagg.manifolds import Flat
        >>> server = Server(Flat(1), CA2FL(1, clients=2), torch.zeros(1))
        >>> for client, move in (("a", 4.0), ("b", 2.0), ("a", 4.0)):
        ...     ticket = server.dispatch(client)
        ...     _ = server.receive(ticket.id, Payload(ticket.message.start[None] + move, samples=1))
        ...     print(server.model.item())
        4.0
        8.0
        11.0
    """

    rate_kind: ClassVar[str] = "mean"
    size: int = 10
    rate: Rate = 1.0
    clients: int | None = None
    unknown: str = "zero"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("size", self.size)
        check_choice("unknown", self.unknown, UNKNOWN_MODES)
        if self.clients is not None:
            check_count("clients", self.clients)
            if self.unknown == "mean":
                raise ArgumentError(
                    "clients: expected None with unknown='mean', a mean over the clients that have returned an update"
                )

    def carried_displacements(self, space: ParameterSpace, state: State) -> list[list[tuple[float, Tensor]]]:
        """Return the step that results if each missing update of the buffer equals the last one of the same client.

        The server checks that the model remains finite after this step.
        """
        rate = rate_at(self.rate, state["version"])
        among = max(state["cached"], (self.clients or 0) if self.unknown == "zero" else 0, 1)
        factors = {"buffer": rate / self.size, "sum": rate / among}
        terms = [(factors[name], state[name]) for name in factors if state.get(name) is not None]
        return [terms] if terms else []

    def init(self, space: Manifold, start: Tensor) -> State:
        return super().init(space, start) | {"cached": 0} | EMPTY_BUFFER

    def step(
        self, space: Manifold, state: State, update: Update, *, out: Tensor | None = None
    ) -> tuple[State, Outcome]:
        check_points(self, update)
        memory = dict(update.client_state or {})
        held = [*state["held"]]
        again = memory.get("round") == state["version"]
        slot = memory["slot"] if again else (len(held) if "cache" in memory else NO_SLOT)
        if slot != NO_SLOT and not again:
            held.append(memory["cache"])
        rows = {
            "held": None if slot == NO_SLOT else held[slot],
            "before": memory["cache"] if again else None,
            **{name: state.get(name) for name in ("buffer", "replaced", "sum")},
        }
        bare = frame_from_update(space, update)
        frame = bare
        for name, row in rows.items():
            frame = frame if row is None else frame.with_row(name, row)
        count = state["count"] + 1
        # Only a step needs the inner products with the buffer.
        gram = (bare if count < self.size else frame).gram()
        cache = self.latest(frame, gram, num_summed=self.size)
        # The sums contain the rounded cache, because later steps subtract exactly this cache.
        rounded = frame.with_row("cache", cache)
        mine = {**memory, "cache": cache, "round": state["version"], "slot": slot}
        guests = state["guests"] + (slot == NO_SLOT)
        joined = state["joined"] + (slot == NO_SLOT and not again)
        told = {"cosine": gram.cosine, "weight": 1.0, "buffered": float(count)}
        waits = {**state, "count": count, "guests": guests, "joined": joined, "held": held}
        if count < self.size:
            waits["buffer"] = combine_float64(rounded, cache=1.0, held=-1.0, buffer=1.0)
            if again:
                waits["replaced"] = combine_float64(rounded, before=1.0, held=-1.0, replaced=1.0)
            return waits, Outcome(None, mine, told | frame.diagnostics, state_is_finite=True)
        rate = rate_at(self.rate, state["version"])
        cached = state["cached"] + joined
        mean = 1 - guests / self.size if self.unknown == "mean" else 1.0
        among = state["cached"] if self.unknown == "mean" else max(self.clients or 0, cached)
        a = rate / self.size
        line = coefficients_of(frame, v1=a, held=-a, buffer=a, sum=rate * mean / max(among, 1))
        norm = safe_sqrt(Corrected.single(frame, gram, line).inner_products()[0][0])
        model = frame.combine(update.current.detach(), line, out=out)
        # h_i becomes the client's last displacement, so an earlier displacement of this client is subtracted.
        change = {"cache": 1.0, "held": -float(not again), "before": -1.0, "buffer": 1.0, "replaced": -1.0, "sum": 1.0}
        after = {
            "version": state["version"] + 1,
            "cached": cached,
            **EMPTY_BUFFER,
            "sum": combine_float64(rounded, **change),
        }
        numbers = told | {"buffered": 0.0, "rate": rate, "step": rate, "norm": norm} | frame.diagnostics
        # Each norm is at most the square root of the largest finite number, so sums in float64 are finite.
        return after, Outcome(model, mine, numbers, state_is_finite=True)
