"""AdaMasFL: the rule MasFL with local steps of fixed length and with default rates that need no tuning.

The default rates follow from the number of clients per step, the number of local steps and the number of server steps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manifoldagg._validation import check_count, check_number
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules._geometry import safe_sqrt
from manifoldagg.federated.rules.masfl import ControlVariateRule
from manifoldagg.federated.types import State, Update
from manifoldagg.kernels import combine, gram

__all__ = ["AdaMasFL"]


@dataclass(frozen=True)
class AdaMasFL(ControlVariateRule):
    r"""MasFL with normalised local steps (AdaMasFL), whose rates do not depend on the scale of the losses.

    A client performs K local steps of length $\eta$ from $\Theta_i^0$ to $\Theta_i^K$. After the updates of S clients,
    the new model is

    $$\Theta \leftarrow \Theta - \frac{\gamma}{S} \sum_{i \in S} \Delta_i, \qquad
      \Delta_i = \frac{\Theta_i^0 - \Theta_i^K}{\eta K}.$$

    The momentum $g$ and the control variates $c$ and $c_i$ are those of [`MasFL`][manifoldagg.federated.rules.MasFL].
    The default rates follow from S, K and the planned number T of server steps:

    $$\eta = \frac{1}{K \sqrt T}, \qquad \beta = \sqrt{\frac{SK}{T}}, \qquad \gamma = \frac{(SK)^{1/4}}{T^{3/4}}.$$

    Use this rule when clients have heterogeneous data and you cannot tune the rates.

    Clients need the trainer [`Normalised`][manifoldagg.federated.clients.Normalised], which reads $\eta$ and K from the
    message and normalises each step. This has three consequences:

    - $\|\Delta_i\| \le 1$, so T server steps move the model by at most $T \gamma = (SKT)^{1/4}$.
    - Multiplying all losses by a constant does not change the result.
    - The rule rejects an update that is longer than K steps, up to rounding.

    If you pass $\eta$, $\beta$ or $\gamma$ explicitly, the message and the length check use your value.

    If a client returns two updates before a step, the client counts once towards S, and both displacements are part of
    the mean. Clients join and leave as in MasFL. After T steps, the rates remain constant.

    Args:
        size: the number S of distinct clients per step.
        steps: the number K of local steps.
        server_steps: the planned number T of server steps. It must be at least SK if $\beta$ is derived.
        clients: the number N of clients, as in MasFL.
        initial: the initial control variates, as in MasFL.
        eta: the local rate $\eta$. `None` derives the rate.
        beta: the momentum $\beta \in (0, 1]$. `None` derives the momentum.
        gamma: the server rate $\gamma$. `None` derives the rate.

    Raises:
        ArgumentError: if an option is out of range, or if the space is curved.

    Source: MasFL, Algorithms 3 and 4, Theorem 2.

    Cost: a step reads 19 words per parameter, writes 5 and allocates 4. A buffered update reads 12, writes 4 and
    allocates 5.

    Example:
        >>> rule = AdaMasFL(4, steps=4, server_steps=256)
        >>> rule.local_rate, rule.momentum, rule.rate
        (0.015625, 0.25, 0.03125)
        >>> rule = AdaMasFL(4, steps=4, server_steps=256, gamma=0.1)
        >>> rule.local_rate, rule.momentum, rule.rate
        (0.015625, 0.25, 0.1)
    """

    steps: int = field(default=10, kw_only=True)
    server_steps: int = field(default=1000, kw_only=True)
    eta: float | None = field(default=None, kw_only=True)
    beta: float | None = field(default=None, kw_only=True)
    gamma: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("steps", self.steps)
        for name, given, most in (("eta", self.eta, math.inf), ("beta", self.beta, 1), ("gamma", self.gamma, math.inf)):
            if given is not None:
                check_number(name, given, above=0, at_most=most)
        if check_count("server_steps", self.server_steps) < self.size * self.steps and self.beta is None:
            raise ArgumentError(
                f"server_steps: expected at least size * steps = {self.size * self.steps}, got {self.server_steps}"
            )

    @property
    def local_rate(self) -> float:
        r"""The local rate $\eta$."""
        return 1 / (self.steps * math.sqrt(self.server_steps)) if self.eta is None else self.eta

    @property
    def momentum(self) -> float:
        r"""The momentum coefficient $\beta$."""
        return math.sqrt(self.size * self.steps / self.server_steps) if self.beta is None else self.beta

    @property
    def rate(self) -> float:
        r"""The server rate $\gamma$."""
        return float((self.size * self.steps) ** 0.25 / self.server_steps**0.75) if self.gamma is None else self.gamma

    def message_numbers(self) -> dict[str, float]:
        return {"rate": self.local_rate, "steps": float(self.steps)}

    def accumulate(self, pending: dict[str, Any], update: Update) -> dict[str, Any]:
        rows, minus, length = self._displacement_rows(pending, update)
        moved = combine(None, rows, [1.0] * len(rows), minus=minus)
        far = pending.get("far", 0.0) + length
        return {"moved": moved, "answers": pending.get("answers", 0) + 1, "far": far}

    def entry_change_bound(self, state: State, pending: Mapping[str, Any], g_norm: float) -> float:
        return self.rate / (self.local_rate * self.steps) * float(pending.get("far", 0.0))

    def apply_step(
        self, state: State, update: Update, g: Tensor, out: Tensor | None
    ) -> tuple[Tensor, dict[str, float]]:
        waiting = state["pending"]
        current = update.current.detach()
        rows, minus, _ = self._displacement_rows(waiting, update)
        part = self.rate / (self.local_rate * self.steps)
        model = combine(current, rows, [part / (waiting.get("answers", 0) + 1)] * len(rows), minus=minus, out=out)
        norm = safe_sqrt(gram([model], minus=current)[0, 0, 0].item())
        return model, {"rate": self.rate, "step": part, "norm": norm}

    def _displacement_rows(
        self, pending: dict[str, Any], update: Update
    ) -> tuple[list[Tensor], list[Tensor | None], float]:
        """Return the sum of the displacements in the buffer as a linear combination of vectors.

        Returns:
            Two lists of vectors, and the norm of the last displacement. The sum of the displacements is the sum of the
            first list minus the sum of the second list. In the second list, `None` stands for a zero vector.

        Raises:
            ArgumentError: if the last displacement is longer than K steps.
        """
        point = update.points[0].detach()
        base = update.base.detach()
        inner = gram([point, base], minus=[base, None])[0]
        length, far = (safe_sqrt(inner[i, i].item()) for i in (0, 1))
        # Each step rounds a point whose norm is at most that of the base plus the length of the steps.
        far += self.steps * self.local_rate
        limit = self.steps * (self.local_rate * (1 + 1e-6) + 2 * torch.finfo(base.dtype).eps * far)
        if not length <= limit:
            raise ArgumentError(
                f"points: expected a distance of at most {limit:g} ({self.steps} steps) from the base, got {length:g}"
            )
        return ([point, pending["moved"]], [base, None], length) if pending else ([point], [base], length)
