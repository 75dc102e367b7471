"""OrthoFL: separate client models that receive the orthogonal progress of other clients."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from manifoldagg._validation import check_choice, check_number, short_repr
from manifoldagg.corrections import Frame, Gram, calibrate
from manifoldagg.corrections.calibration import calibrate_frame
from manifoldagg.corrections.frame import GRANULARITIES
from manifoldagg.errors import ArgumentError, RuleError
from manifoldagg.federated.rules._base import ServerRule
from manifoldagg.federated.rules._geometry import check_points, safe_sqrt
from manifoldagg.federated.schedules import Rate, Weight, rate_at, weight_at
from manifoldagg.federated.staleness import Polynomial
from manifoldagg.federated.types import ClientState, Message, Outcome, State, Update
from manifoldagg.kernels import Row, combine
from manifoldagg.manifolds import Manifold
from manifoldagg.manifolds.ambient import AmbientSpace

__all__ = ["OrthoFL"]

CALIBRATIONS = ("orthogonal", "pairwise", "none")
PROTOCOLS = ("server", "client")


@dataclass(frozen=True)
class OrthoFL(ServerRule):
    r"""Orthogonal calibration (OrthoFL): client models that receive the orthogonal progress of other clients.

    The global model $W^t$ is a moving average of the client models $W_m$:

    $$W^{t+} = (1 - \beta_t)\,W^t + \beta_t W_m, \qquad \beta_t = \min(1, \beta\, s(\tau - t)).$$

    The next start model of the client is, for each named tensor,

    $$W_m^{+} = W_m + \Delta - \frac{\langle \Delta, \Delta_m\rangle}{\langle \Delta_m, \Delta_m\rangle}\,\Delta_m,
      \qquad \Delta = W^t - W^{\tau+}, \quad \Delta_m = W_m - W_m^{\tau+}.$$

    Here, $W^{\tau+}$ is the global model directly after the client's previous update, and $W_m^{\tau+}$ is the model
    from which the client started. Before the client's first update, both are the first model that the client received.
    A shift counts as zero only if each of its entries is zero.

    Use this rule when clients have heterogeneous data and return often, so that each client can keep its own model.

    The option `protocol` determines where $W_m^{+}$ is computed. All protocols give bit-identical start models.

    - `"server"`: the server sends $W_m^{+}$, and any trainer works. The server stores $W_m^{+}$ and $W^{t+}$ for each
      client.
    - `"client"`: the server sends $W^t$ and $\beta_t$. The trainer
      [`Calibrated`][manifoldagg.federated.clients.Calibrated] computes $W_m^{+}$ and $W^{t+}$. The server stores $W^t$
      until the next dispatch to the client.
    - A function that maps each client to one of these two strings. The result for a client must not change.

    Participation:

    - A client that joins late starts from the global model.
    - After an absence, a failure or a rejection, the client keeps its start model. The next $\Delta$ includes the
      progress of the other clients.
    - If a later ticket of the client was applied first, an update on the earlier ticket only changes the global model.

    Args:
        rate: the rate $\beta$: a number or a function of the version.
        staleness: the staleness weight $s$. The paper counts delays from 1 and uses $s_a(x) = x^{-a}$.
        weighted: whether to multiply $\beta$ by the client's share of the data.
        protocol: `"server"`, `"client"`, or a function from the client to one of these strings.
        calibration: `"orthogonal"`, `"none"` or `"pairwise"`. With `"none"`, the rule is FedAsync. With `"pairwise"`,
            $W_m^{+} = W_m + \Delta - \operatorname{proj} \Delta_m$ with the projection onto the span of the latest
            updates of all other clients. The state stores these updates, including those of clients that left.
        granularity: `"tensor"` for one projection per named tensor, or `"model"` for one projection of the whole model.
        moving_average: whether $W^{t+}$ is the moving average. Otherwise, $W^{t+} = W_m^{+}$.

    Raises:
        ArgumentError: if an option is out of range, if the other options do not support `protocol`, or if the space is
            curved. Low-rank leaves require `protocol="server"`.

    Source: OrthoFL (3)-(7), Algorithms 1 and 2, §5.3. This class follows the paper. The authors' code
    differs in four points:

    - It computes both shifts from the client's start model and the calibrated model of the last client.
    - It drops a shift whose entries sum to 0.
    - It copies tensors with `bn` in their name.
    - It starts with $\beta_t = 1$.

    Cost: a step reads 25 words per parameter, writes 6 and allocates 5.

    Example:
        >>> import torch
        >>> from manifoldagg.federated import Payload, Server
        >>> from manifoldagg.manifolds import Flat
        >>> server = Server(Flat(2), OrthoFL(0.5), torch.zeros(2))
        >>> a, b = server.dispatch("a"), server.dispatch("b")
        >>> _ = server.receive(b.id, Payload(torch.tensor([[2.0, 2.0]]), 1))
        >>> _ = server.receive(a.id, Payload(torch.tensor([[3.0, 0.0]]), 1))
        >>> server.dispatch("a").message.start
        tensor([3., 1.])
    """

    state_entries: ClassVar[frozenset[str] | None] = frozenset({"version", "updates"})
    cohort: ClassVar[int] = 1
    rate_kind: ClassVar[str] = "share"
    not_private_because: ClassVar[str] = "clients start from their own updates"
    needs_linear_leaves: ClassVar[str] = "shifts between models"
    rate: Rate = 0.6
    staleness: Weight = field(default_factory=Polynomial)
    weighted: bool = False
    protocol: str | Callable[[Hashable], str] = field(default="server", kw_only=True)
    calibration: str = field(default="orthogonal", kw_only=True)
    granularity: str = field(default="tensor", kw_only=True)
    moving_average: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("calibration", self.calibration, CALIBRATIONS)
        check_choice("granularity", self.granularity, GRANULARITIES)
        if not callable(self.protocol):
            check_choice("protocol", self.protocol, PROTOCOLS)
        if self.protocol != "server" and (self.calibration != "orthogonal" or not self.moving_average):
            raise ArgumentError(
                "protocol: expected 'server', as clients support only calibration='orthogonal' with moving_average=True"
            )
        if self.calibration == "none" and not self.moving_average:
            raise ArgumentError("moving_average: expected True, as calibration='none' computes no calibrated model")

    def init(self, space: Manifold, start: Tensor) -> State:
        state = super().init(space, start)
        if space.ambient and self.protocol != "server":
            raise ArgumentError(f"protocol: expected 'server' for low-rank leaves, got {short_repr(self.protocol)}")
        return state | ({"updates": {}} if self.calibration == "pairwise" else {})

    def message(self, space: Manifold, state: State, current: Tensor, client_state: ClientState) -> Message:
        if client_state is None:
            return Message(current)
        if "start" in client_state:
            return Message(client_state["start"])
        numbers = {
            "rate": client_state["rate"],
            "num_updates": client_state["num_updates"],
            "by_tensor": float(self.granularity == "tensor"),
        }
        return Message(client_state["before"], numbers=numbers)

    def step(
        self, space: Manifold, state: State, update: Update, *, out: Tensor | None = None
    ) -> tuple[State, Outcome]:
        check_points(self, update)
        current = update.current.detach()
        base = update.base.detach()
        model = update.points[0].detach()
        memory = update.client_state
        after = {**state, "version": state["version"] + 1}
        kept = weight_at(self.staleness, update.staleness)
        rate = rate_at(self.rate, state["version"]) * kept * (update.weight if self.weighted else 1.0)
        rate = min(check_number("rate: step size", rate), 1.0)
        # If the ticket is older than the stored start, the start of the ticket is no longer available.
        late = memory is not None and state["version"] - update.staleness < memory["version"]
        known = memory is not None and not late and "start" in memory
        start = memory["start"] if known else base
        home = memory["global"] if known else base
        ambient = AmbientSpace.of(space, current)
        inner = Gram.of(ambient.gram([model, current, model], minus=[start, home, current]), extra=("step",))
        for name, place in (("points[0]", 0), ("current", 1)):
            check_number(f"{name}: squared distance from the base", inner.matrix[place, place])
        protocol = self.protocol(update.client) if callable(self.protocol) else self.protocol
        if protocol not in PROTOCOLS:
            call = f"protocol({short_repr(update.client)})"
            raise RuleError(f"{call}: expected one of {', '.join(PROTOCOLS)}; got {short_repr(protocol)}")
        calibrated: Tensor | None = None
        others: list[Row] | None = None
        shifts = Frame((current, model), (home, start), ambient.segments, ambient=ambient)
        if self.calibration == "pairwise":
            others = [row for client, row in state["updates"].items() if client != update.client]
            if not late:
                after["updates"] = {**state["updates"], update.client: shifts.materialize([0.0, 1.0])}
        if self.calibration != "none" and protocol == "server" and not (late and self.moving_average):
            if ambient.leaves:
                calibrated = calibrate_frame(shifts, model, self.granularity, others)
            else:
                rounded = shift(current, home), shift(model, start)
                calibrated = calibrate(model, *rounded, self.granularity, others, space=space)
        if self.moving_average or calibrated is None:
            new = ambient.combine(current, [model], [rate], minus=[current], out=out)
            norm = rate * safe_sqrt(inner.matrix[2, 2])
        else:
            new = calibrated.clone() if out is None else out.copy_(calibrated)
            norm = safe_sqrt(ambient.gram([new], minus=[current])[0, 0, 0].item())
        numbers = {"cosine": inner.cosine, "rate": rate, "step": rate, "norm": norm} | ambient.diagnostics
        numbers["calibrated"] = float(self.calibration != "none" and not late)
        if late or self.calibration == "none":
            return after, Outcome(new, memory, numbers)
        told: dict[str, Any] = {"version": after["version"]}
        if calibrated is not None:
            told |= {"start": calibrated, "global": new.clone()}
        else:
            num_updates = 1 + (0 if memory is None else memory.get("num_updates", 0))
            told |= {"before": current.clone(), "rate": rate, "num_updates": num_updates}
        return after, Outcome(new, told, numbers)


def interpolate(current: Tensor, model: Tensor, rate: float, out: Tensor | None = None) -> Tensor:
    r"""Return the moving average $(1 - \beta)\,W + \beta W_m$ of the global model $W$ and a client model $W_m$.

    The weight $\beta$ is `rate`. Each entry is rounded only once, so that the server and the client compute
    bit-identical results.

    Example:
        >>> import torch
        >>> interpolate(torch.zeros(1), torch.ones(1), 0.25)
        tensor([0.2500])
    """
    return combine(current, [model], [rate], minus=current, out=out)


def shift(model: Tensor, reference: Tensor) -> Tensor:
    """Return the difference `model - reference` of two models.

    Each entry is rounded only once, so that the server and the client compute bit-identical results.

    Example:
        >>> import torch
        >>> shift(torch.ones(1), torch.zeros(1))
        tensor([1.])
    """
    return combine(None, [model], [1.0], minus=reference)
