"""AsyncFedED: a step size and a number of local epochs that depend on the drift of the server model.

The drift is the distance that the server model has moved since the client received its model. After a long drift, the
step is shorter and the client trains for fewer epochs.
"""

import math
import sys
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from manifoldagg._validation import check_choice, check_count, check_number
from manifoldagg.federated.rules._base import TangentRule, move_to
from manifoldagg.federated.rules._geometry import check_points, frame_from_update, safe_sqrt
from manifoldagg.federated.schedules import Rate, rate_at
from manifoldagg.federated.types import ClientState, Message, Outcome, State, Update
from manifoldagg.manifolds import Manifold

__all__ = ["AsyncFedED"]

MAX_FLOAT = sys.float_info.max
MAX_EPOCHS = 2**53
"""The largest number of epochs. The numbers of a message are floats, which represent all integers up to 2**53."""


@dataclass(frozen=True)
class AsyncFedED(TangentRule):
    r"""Euclidean-distance staleness (AsyncFedED): a shorter step and fewer local epochs after a long drift.

    The rule measures the staleness $\gamma_i$ of an update as the length of the drift relative to the length of the
    displacement $\Delta_i = \Theta_i - \Theta^t$. After each update, the new model is $\Theta \leftarrow \Theta +
    \eta_i\, \Delta_i$ with

    $$\gamma_i = \frac{\|\Theta^\tau - \Theta^t\|}{\|\Delta_i\|}, \qquad \eta_i = \frac{\lambda}{\gamma_i + \epsilon},
      \qquad K_i \leftarrow \max(1,\; K_i + \lfloor \kappa\, (\bar\gamma - \gamma_i) \rfloor).$$

    Here, $K_i$ is the number of epochs of the client's next task. The message contains $K_i$ as the number `epochs`,
    which the trainer [`Epochs`][manifoldagg.federated.clients.Epochs] uses. During warm-up, $\gamma_i$ is replaced by
    the target $\bar\gamma$.

    Special cases:

    - Without a drift, $\gamma_i = 0$, and the client's step is $\lambda / \epsilon$ times its displacement.
    - If the displacement of an update is zero, the model and $K_i$ are unchanged.
    - A client that joins late starts with $K^0$. A client that returns keeps its $K_i$.
    - An update on an old ticket has a long drift. The step is therefore short, and the client's next task has fewer
      epochs.
    - A failed task changes nothing.

    On a curved space, distances are geodesic distances, and the step is an exponential map. For `transport` and
    `rungs`, see [`AsyncCorrected`][manifoldagg.federated.rules.AsyncCorrected].

    Args:
        rate: the rate $\lambda$: a number or a function of the version $\tau$.
        transport: the transport of tangents on a curved space: `"parallel"`, `"ladder"` or `"projection"`. The default
            `None` uses parallel transport where a closed form exists, and a ladder otherwise. A flat space accepts only
            `None`.
        rungs: the number of rungs of a ladder.
        epsilon: the constant $\epsilon > 0$. With 1, the displacement of a fresh update is multiplied by $\lambda$.
        target: the target staleness $\bar\gamma$.
        gain: the gain $\kappa$ of the epochs. With 0, the number of epochs is constant.
        epochs: the initial number of epochs $K^0$.
        warm_up: the number of initial versions with $\gamma_i = \bar\gamma$.
        weighted: whether to multiply $\eta_i$ by the client's share of the data $w_i$, as in the experiments of
            Manifold. The mean of $w_i$ over the N clients is 1 / N, so the rate $\lambda$ must be larger.

    Raises:
        ArgumentError: if an option is out of range.

    Source: Wang et al. 2022, where $\gamma$ is (6); Manifold B.1 for `weighted`, and (47) for the first versions.

    Cost: a step reads 6 words per parameter, writes 1 and allocates 0.

    Example:
        The server has moved by 2 from the base, and the client has moved by 1:

        >>> import manifoldagg, torch
        >>> current, base, update = ([torch.tensor([x])] for x in (2.0, 0.0, 1.0))
        >>> new, state, numbers = manifoldagg.aggregate(AsyncFedED(warm_up=0), None, current, base, update)
        >>> new, numbers["distance"], numbers["epochs"]
        ([tensor([2.3333])], 2.0, 1.0)
    """

    state_entries: ClassVar[frozenset[str] | None] = frozenset({"version"})
    cohort: ClassVar[int] = 1
    accepts_tensor_lists: ClassVar[bool] = True
    rate: Rate = 1.0
    epsilon: float = field(default=1.0, kw_only=True)
    target: float = field(default=1.0, kw_only=True)
    gain: float = field(default=1.0, kw_only=True)
    epochs: int = field(default=2, kw_only=True)
    warm_up: int = field(default=10, kw_only=True)
    weighted: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("epsilon", self.epsilon, above=0)
        check_number("target", self.target, at_least=0)
        check_number("gain", self.gain, at_least=0)
        check_number("epochs", check_count("epochs", self.epochs), at_most=MAX_EPOCHS)
        check_count("warm_up", self.warm_up, at_least=0)
        check_choice("weighted", self.weighted, (False, True))

    def message(self, space: Manifold, state: State, current: Tensor, client_state: ClientState) -> Message:
        return Message(current, numbers={"epochs": float(self.next_epochs(client_state))})

    def next_epochs(self, client_state: ClientState) -> int:
        """Return the number of epochs $K_i$ of the next task of a client."""
        return int((client_state or {}).get("epochs", self.epochs))

    def plan(self, space: Manifold, state: State, update: Update) -> tuple[State, Outcome]:
        check_points(self, update)
        frame = frame_from_update(space, update, transport=self.transport, rungs=self.rungs)
        gram = frame.gram()
        moved = safe_sqrt(gram.matrix[0, 0])
        drift = safe_sqrt(gram.matrix[1, 1])
        version = state["version"]
        epochs = self.next_epochs(update.client_state)
        gamma = self.target
        if version >= self.warm_up:
            # Without a displacement, the ratio is infinite or 0 / 0. The step is then 0 for any rate.
            gamma = min(drift / moved, MAX_FLOAT) if moved > 0 else math.nan
        if moved > 0:
            change = min(max(self.gain * (self.target - gamma), -float(epochs)), float(MAX_EPOCHS))
            epochs = min(max(1, epochs + math.floor(change)), MAX_EPOCHS)
        rate = rate_at(self.rate, version) / (gamma + self.epsilon) if moved > 0 else 0.0
        if self.weighted:
            rate *= update.weight
        check_number("rate: step size", rate, at_least=0)
        model = move_to(space, update.current, frame, gram, [rate, 0.0])
        numbers = {"cosine": gram.cosine, "rate": rate, "step": rate, "norm": rate * moved}
        numbers |= {"distance": gamma, "epochs": float(epochs)} | frame.diagnostics
        memory = {**(update.client_state or {}), "epochs": epochs}
        return {"version": version + 1}, Outcome(model, memory, numbers)
