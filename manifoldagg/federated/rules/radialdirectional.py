"""Radial-directional averaging: the mean direction of a cohort, scaled by the mean norm."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from manifoldagg._validation import check_number
from manifoldagg.federated.rules._geometry import check_points, frame_from_update, safe_sqrt, unit_coefficients
from manifoldagg.federated.rules.fedavg import FedAvg
from manifoldagg.federated.types import Outcome, State, Update
from manifoldagg.manifolds import Manifold, ParameterSpace

__all__ = ["RadialDirectional"]


@dataclass(frozen=True)
class RadialDirectional(FedAvg):
    r"""Radial-directional averaging: each tensor moves in the mean direction of a cohort by the mean norm.

    The mean of nearly orthogonal displacements is much shorter than each displacement. This rule therefore averages
    norms and directions separately. After the updates of a cohort, each tensor of the model becomes $\Theta \leftarrow
    \Theta + \eta_g\, \bar r\, d$ with

    $$\bar r = \frac{\sum_i w_i \|\Delta_i\|}{\sum_i w_i}, \qquad
      d = \varphi\Bigl(\sum_i w_i\, \varphi(\Delta_i)\Bigr),
      \qquad \varphi(x) = \frac{x}{\|x\|}, \quad \varphi(0) = 0.$$

    If the directions cancel, the tensor does not move.

    Use this rule in the outer step of DiLoCo when the displacements of the workers are nearly orthogonal.

    Args:
        cohort: the number k of updates per step.
        rate: the global rate $\eta_g$: a number or a function of the version $\tau$.
        transport: the transport of tangents on a curved space: `"parallel"`, `"ladder"` or `"projection"`. The default
            `None` uses parallel transport where a closed form exists, and a ladder otherwise. A flat space accepts only
            `None`.
        rungs: the number of rungs of a ladder.
        weighted: whether to weight updates by the worker's share of the data $w_i$, such as its tokens. Otherwise, all
            weights are equal.
        over_selection: the fraction of additional clients in each round, as in
            [`FedAvg`][manifoldagg.federated.rules.FedAvg].

    Raises:
        ArgumentError: if an option is out of range, or if the space has curved leaves other than low-rank leaves.

    Source: Douillard et al. 2026, arXiv 2604.21428 (Decoupled DiLoCo). The outer step of the paper is
    `Momentum(RadialDirectional(k, 0.7), nesterov=True)`.

    Cost: a step reads 8 words per parameter, writes 1 and allocates 0. A buffered update reads 7, writes 1 and
    allocates 2.

    Example:
        >>> import manifoldagg, torch
        >>> model, state = [torch.zeros(2)], None
        >>> for update in ([4.0, 0.0], [0.0, 2.0]):
        ...     model, state, _ = manifoldagg.aggregate(
        ...         RadialDirectional(2), state, model, [torch.zeros(2)], [torch.tensor(update)]
        ...     )
        >>> model
        [tensor([2.1213, 2.1213])]
    """

    needs_linear_leaves: ClassVar[str] = "lengths of tensors"
    not_private_because: ClassVar[str] = "it divides each tensor of an update by its length"

    def carried_displacements(self, space: ParameterSpace, state: State) -> list[list[tuple[float, Tensor]]]:
        """Return the step that the server would take with only the updates in the buffer.

        The server checks that the model remains finite after this step.
        """
        total = state["total"]
        if "buffer" not in state or not total > 0:
            return []
        rate = self.step_size(state)
        steps = []
        for direction, length in zip(state["buffer"].split(space.layout.sizes), state["lengths"], strict=True):
            size = float(direction.double().norm())
            steps.append(direction * (rate * length / total / size if size > 0 else 0.0))
        return [[(1.0, torch.cat(steps))]]

    def plan(self, space: Manifold, state: State, update: Update) -> tuple[State, Outcome]:
        check_points(self, update)
        share = check_number("weight", self.update_weight(update), at_least=0)
        frame = frame_from_update(space, update, tensors=True)
        count = state["count"] + 1
        waits = count < self.buffer_size
        if "buffer" in state:
            frame = frame.with_row("buffer", state["buffer"], norm_only=waits)
        gram = frame.gram("tensor")
        v, _, *buffer = unit_coefficients(len(frame.rows))
        sizes = [safe_sqrt(part[0, 0]) for part in gram.parts]
        line = np.array([sum(buffer) + v * (share / size if size > 0 else 0.0) for size in sizes])
        lengths = [
            share * size + before for size, before in zip(sizes, state.get("lengths", [0.0] * len(sizes)), strict=True)
        ]
        after = {"version": state["version"], "count": count, "total": state["total"] + share}
        numbers = {"cosine": gram.cosine, "weight": share, "buffered": float(count)}
        if waits:
            waiting = after | {"lengths": lengths, "buffer": frame.for_state(line)}
            numbers |= frame.diagnostics
            # The state is finite, because the buffer is a sum of unit vectors and the sum of their weights is finite.
            return waiting, Outcome(None, update.client_state, numbers, state_is_finite=True)
        total = check_number("weight: sum over the buffer", after["total"], above=0)
        rate = self.step_size(state)
        for row, part, length in zip(line, gram.parts, lengths, strict=True):
            size = safe_sqrt(row @ part @ row)
            row *= rate * length / total / size if size > 0 else 0.0
        numbers |= {"buffered": 0.0, "rate": rate, "step": rate, "norm": safe_sqrt(gram.squared_norm(line))}
        after |= {"version": state["version"] + 1, "count": 0, "total": 0.0}
        model = frame.move(gram, line)
        return after, Outcome(model, update.client_state, numbers | frame.diagnostics)
