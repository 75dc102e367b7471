"""The quality of a correction: how much of the descent of stale updates it preserves."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_finite, check_instance, check_shape
from manifoldagg.corrections.correction import Correction
from manifoldagg.corrections.frame import Frame
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Manifold

__all__ = ["CorrectionQuality", "correction_quality"]


@dataclass(frozen=True, eq=False)
class CorrectionQuality:
    r"""The result of `correction_quality`: how fast stale updates decrease the loss with and without a correction.

    Let $c_i$ be the rate at which the loss decreases along the corrected update $i$, and $t_i$ this rate along the
    uncorrected update. The attributes `q` and `d` are constants $Q$ and $D$ such that $c_i \ge Q\,t_i - D$ for all
    updates.

    Attributes:
        corrected: an array (updates,) with the rates $c_i = -\langle \nabla L(Y_i), \pi u_i \rangle$, where $\pi u_i$
            is the corrected update at the current model $Y_i$.
        transported: an array (updates,) with the rates $t_i = -\langle \nabla L(Y_i), P u_i \rangle$, where $P u_i$ is
            the uncorrected update, transported from its base $X_i$ to the current model $Y_i$.
    """

    corrected: np.ndarray
    transported: np.ndarray

    def __repr__(self) -> str:
        return format_result(self, updates=len(self.corrected), q=self.q, d=self.d)

    @property
    def q(self) -> float:
        r"""The constant $Q = \min \{c_i / t_i : t_i > 0\}$, which measures how much descent a correction preserves.

        For update $i$, $c_i$ is the rate at which the loss decreases along the corrected update. The rate along the
        uncorrected update is $t_i$. If no $t_i$ is positive, $Q$ is NaN. If $Q$ is negative, the correction turned at
        least one update that decreases the loss into an update that increases it.
        """
        useful = self.transported > 0
        return float((self.corrected[useful] / self.transported[useful]).min()) if useful.any() else math.nan

    @property
    def d(self) -> float:
        r"""The smallest constant $D \ge 0$ such that $c_i \ge Q\,t_i - D$ for all updates $i$.

        For update $i$, $c_i$ is the rate at which the loss decreases along the corrected update, and $t_i$ is the rate
        along the uncorrected update. $Q$ is the smallest ratio $c_i / t_i$ among the updates with $t_i > 0$. These
        updates satisfy $c_i \ge Q\,t_i$ by definition. $D$ therefore depends only on the updates that do not decrease
        the loss before the correction.

        The formula is $D = \max(0, \max_i (Q\,t_i - c_i))$. If $Q$ is NaN, $D$ is NaN too.
        """
        # `np.maximum` propagates NaN, which marks an undefined Q. `np.fmax` would ignore it.
        return float(np.maximum(self.q * self.transported - self.corrected, 0.0).max())


def correction_quality(
    space: Manifold,
    correction: Correction,
    updates: Iterable[tuple[Float[Tensor, "..."], Float[Tensor, "..."], Float[Tensor, "..."]]],
    gradient: Callable[[Tensor], Tensor],
    *,
    transport: str | None = None,
) -> CorrectionQuality:
    r"""Measure how fast stale updates decrease the loss after a correction, compared with uncorrected updates.

    A stale update $u$ is a change from an old model $X$, but the server applies it to the current model $Y$. Parallel
    transport moves the update from $X$ to $Y$ without a correction, which gives $P_{X \to Y} u$. A correction gives a
    different update $\pi u$. The convergence proof of the Manifold paper assumes that there is a constant $Q$ with

    $$\langle -\nabla L(Y), \pi u \rangle \ge Q \langle -\nabla L(Y), P_{X \to Y} u \rangle,$$

    where $L$ is the loss (Assumption 7). Both sides are rates at which the loss decreases. The convergence rate in
    Theorem 1 of the paper is proportional to $1 / Q$. The function measures $Q$ for the given updates.

    Args:
        space: the space of the models.
        correction: the correction. A correction with a state receives the updates in order.
        updates: triples (base, current, displacement). The displacement is a tangent at the base, such as the model of
            the client minus the base on a flat space. All tensors have the shape of the space.
        gradient: a function that returns the Riemannian gradient $\nabla L(Y)$ of the loss at the current model.
        transport: the transport of a curved space, as in [`Frame.of`][manifoldagg.corrections.Frame.of].

    Returns:
        The descent of each update, and the constants `q` and `d`.

    Raises:
        ArgumentError: if there are no updates, or if a tensor has the wrong shape, is not finite or is not on the
            space.

    Source: Manifold, Assumption 7 and (19). The signs are those of (30), where the assumption is used: (19) is printed
    without the minus signs. The paper has no constant D. It measures by how much the inequality fails for updates that
    increase the loss.

    Cost: one correction, one gradient and two inner products for each update.

    Example:
        >>> import torch
        >>> from manifoldagg.corrections import OrthoDC
        >>> from manifoldagg.manifolds import Flat
        >>> base, current, update = torch.zeros(2), torch.tensor([0.0, 1.0]), torch.tensor([-1.0, -1.0])
        >>> correction_quality(Flat(2), OrthoDC(0.0), [(base, current, update)], lambda model: torch.tensor([1.0, 1.0]))
        CorrectionQuality(updates=1, q=0.5, d=0)
    """
    check_instance("correction", correction, Correction)
    state = None
    descents: list[list[float]] = []
    for i, update in enumerate(updates):
        if len(update) != 3:
            raise ArgumentError(
                f"updates: {i}: expected a triple (base, current, displacement), got {len(update)} items"
            )
        base, current, displacement = update
        frame = Frame.of(space, base, current, displacement[None], transport=transport)
        corrected = correction.apply(frame, state)
        state = corrected.state
        # The descent is a difference of large terms if the step is almost orthogonal to the gradient. It is therefore
        # computed in float64.
        slope = check_finite("gradient", check_shape("gradient", gradient(current), *current.shape)).double()
        # These coefficients select the displacement, which the frame has transported, and omit the drift.
        uncorrected = frame.materialize([1.0, 0.0])
        steps = (step.reshape(current.shape).double() for step in (corrected.displacements()[0], uncorrected))
        descents.append([-float(space.inner(current.double(), slope, step)) for step in steps])
    if not descents:
        raise ArgumentError("updates: expected at least one update, got an empty iterable")
    return CorrectionQuality(*np.array(descents).T)
