"""The loss on the plane of a learned curve, for one client's data and for held-out data."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manifoldagg.curves import Bezier, Plane, plane
from manifoldagg.experiments.progress_dir import LearnedCurve
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.simulation.dataset import FederatedDataset

__all__ = ["Landscape", "compute_landscape"]

MAX_LANDSCAPE_SAMPLES = 400
"""The maximum number of samples on which the loss of a plane is computed."""
MAX_LANDSCAPE_LABELS = 8_000
"""The maximum number of labels on which the loss of a plane is computed."""


@dataclass(frozen=True)
class Landscape:
    """The loss on the plane through a Bézier curve in parameter space, which a client trained.

    Attributes:
        method: the name of the method.
        update_index: the index of the update with which the client returned the curve.
        client: the client that trained the curve.
        local: the loss on the training data of this client.
        held_out: the loss on the held-out data of all clients.
    """

    method: str
    update_index: int
    client: int
    local: Plane
    held_out: Plane


def compute_landscape(federation: FederatedDataset, curve: LearnedCurve) -> Landscape:
    """Compute the loss over the plane of a client's curve."""
    model = federation.model()
    dataset = federation.dataset
    space = ParameterSpace.of(model)
    loss = space.loss(model, dataset.criterion)

    def over(samples: np.ndarray) -> Plane:
        most = min(MAX_LANDSCAPE_SAMPLES, MAX_LANDSCAPE_LABELS * len(dataset.labels) // dataset.labels.numel())
        if len(samples) > most:
            samples = samples[np.linspace(0, len(samples) - 1, most).astype(np.int64)]
        batch = dataset.inputs[samples], dataset.labels[samples]

        def value(theta: Tensor) -> float:
            with torch.no_grad():
                return loss(theta, batch).item()

        return plane(Bezier(space, len(curve.phi) - 1), curve.phi, value)

    local, held_out = over(federation.train[curve.client]), over(np.concatenate(federation.held_out))
    return Landscape(curve.method, curve.update_index, curve.client, local, held_out)
