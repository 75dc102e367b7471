"""Trainers: thin clients over `fit`."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from manifoldagg.curves import Bezier, fit
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Message, Trainer, trainers
from manifoldagg.federated.trainers.curve import count_samples
from manifoldagg.manifolds import Flat
from manifoldagg.simulation import Batches
from tests.support import draw

SPACE, START = Flat(3), draw(0, 3)
PAIRS = [(draw(i, 5, 3), draw(i, 5)) for i in range(4)]


def loss(theta, batch):
    inputs, targets = batch
    return (inputs @ theta - targets).square().mean()


def seeded():
    return torch.Generator().manual_seed(3)


def test_the_curve_trainer_returns_what_fit_learns():
    trainer = trainers.Curve(degree=3, epochs=(2, 1), rate=0.1, proximal=0.1)
    payload = trainer.train(SPACE, Message(START), loss, PAIRS, None, generator=seeded())
    learned = fit(Bezier(SPACE, 3), loss, PAIRS, start=START, epochs=(2, 1), rate=0.1, proximal=0.1, generator=seeded())
    assert torch.equal(payload.points, learned.phi[1:])
    assert payload.samples == 20


def test_the_local_trainer_is_the_first_phase():
    curve = trainers.Curve(epochs=(2, 1), rate=0.1).train(SPACE, Message(START), loss, PAIRS, None, generator=seeded())
    local = trainers.Local(epochs=2, rate=0.1).train(SPACE, Message(START), loss, PAIRS, None, generator=seeded())
    assert local.points.shape == (1, 3)
    assert torch.equal(local.points[0], curve.points[-1])
    steps = trainers.Local(steps=8, rate=0.1).train(SPACE, Message(START), loss, PAIRS, None, generator=seeded())
    assert torch.equal(steps.points, local.points)
    assert all(isinstance(t, Trainer) for t in (trainers.Local(), trainers.Curve()))


@pytest.mark.usefixtures("as_shipped")
def test_samples_are_counted_wherever_batches_come_from():
    inputs, labels = torch.zeros(7, 3), torch.zeros(7, dtype=torch.int64)
    assert count_samples(PAIRS) == 20
    assert count_samples(DataLoader(TensorDataset(inputs, labels), batch_size=2)) == 7
    batches = Batches(inputs, labels, 2, np.random.default_rng(0))
    assert (count_samples(batches), len(batches), sum(len(y) for _, y in batches)) == (7, 4, 7)
    with pytest.raises(ArgumentError, match="batches: expected pairs"):
        count_samples([1.0])
