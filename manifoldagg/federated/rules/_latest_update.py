"""Base class for rules that remember the latest displacement of each client."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from manifoldagg._validation import check_number
from manifoldagg.corrections import Frame, Gram
from manifoldagg.federated.rules._base import ServerRule
from manifoldagg.federated.rules._geometry import safe_sqrt

__all__ = ["LatestUpdateRule", "coefficients_of", "combine_float64"]


@dataclass(frozen=True)
class LatestUpdateRule(ServerRule):
    r"""Base class for rules that store the latest displacement $h_i$ of every client $i$.

    The displacement of an update is the difference between the model that the client returned and the model from which
    it started. The client state stores $h_i$ in the dtype of the model.

    The state of the rule stores the sum $\sum_j h_j$ over all clients. Each update adds a displacement to this sum and
    subtracts an earlier one, so the sum is in float64 to limit the accumulation of rounding errors.
    """

    cohort: ClassVar[int] = 1
    self_checked: ClassVar[tuple[str, ...]] = ("points",)
    not_private_because: ClassVar[str] = "it stores each client's update and adds it again"
    needs_linear_leaves: ClassVar[str] = "cached displacements"

    def latest(self, frame: Frame, gram: Gram, num_summed: int = 1) -> Tensor:
        """Return the displacement of an update as a new vector, which becomes the client's $h_i$.

        Args:
            frame: a frame whose first row is the displacement.
            gram: the inner products of the frame.
            num_summed: the number of squared lengths whose sum must be finite in the dtype of the model.

        Raises:
            ArgumentError: if the displacement is too long.
        """
        longest = safe_sqrt(torch.finfo(frame.dtype).max) / num_summed
        check_number("points: size of the displacement", safe_sqrt(gram.matrix[0, 0]), at_most=longest)
        latest: Tensor = frame.materialize(coefficients_of(frame, v1=1.0))
        return latest


def coefficients_of(frame: Frame, **coefficients: Any) -> list[float]:
    """Return one coefficient for each row of a frame. The coefficient of an unnamed row is 0."""
    return [coefficients.get(name, 0.0) for name in frame.names]


def combine_float64(frame: Frame, **coefficients: float) -> Any:
    """Return a linear combination of named vectors, computed in float64.

    Rules use this function for sums over many updates, in which the rounding errors of a narrower dtype would
    accumulate. The vectors without a keyword argument have the coefficient 0.
    """
    return frame.materialize(coefficients_of(frame, **coefficients), torch.float64)
