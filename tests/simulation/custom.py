"""Rules, corrections and other objects of a user, in a module that is named on the command line."""

from dataclasses import dataclass

import numpy as np
import torch

from manifoldagg.corrections import Correction
from manifoldagg.federated import Message, Outcome
from manifoldagg.federated import clients as trainers
from manifoldagg.simulation import AvailabilityChange, Exponential, Method, PriorityScheduler


@dataclass(frozen=True)
class Signs:
    """Moves by the sign of each displacement, where it is large."""

    rate: float = 0.1
    threshold: float = 0.0
    cohort = 1

    def __post_init__(self):
        if self.rate > 1:
            raise ValueError("too fast")

    def init(self, space, start):
        return None

    def message(self, space, state, current, memory):
        return Message(current)

    def step(self, space, state, update, *, out=None):
        move = update.points[-1] - update.base
        return state, Outcome(update.current + self.rate * move.sign() * (move.abs() >= self.threshold))


class Plain:
    """As `Signs`, but no dataclass."""

    cohort = 1
    init, message, step = Signs.init, Signs.message, Signs.step

    def __init__(self, rate=0.1, *others):
        self.rate = rate
        self.threshold = 0.0


def slow(factor=0.1, rate=0.5):
    return Signs(factor * rate)


signs = Signs(0.2)
ready = Method("Ready", Signs(0.4), trainers.Local(epochs=3))
bound = Method("Bound", lambda clients: Signs(1 / len(clients)), trainers.Local(epochs=1))
number = 3


def module():
    return torch.nn.Linear(2, 1)


@dataclass(frozen=True)
class Shrink(Correction):
    """Divides each displacement by a number, and adds a part of the drift."""

    strength: float = 1.0
    drift: float = 0.0

    def __post_init__(self):
        if self.strength <= 0:
            raise ValueError(f"strength: expected a number > 0, got {self.strength}")

    def coefficients(self, gram, state=None):
        rows = gram.identity() / self.strength
        rows[:, gram.num_displacements] = self.drift
        return rows, state


def make_shrink(strength=1.0, *, twice=False):
    return Shrink(strength * (1 + twice))


shrink = Shrink(3.0)


def age(staleness, power=0.5):
    return (1 + staleness) ** -power


class SlowSGD(torch.optim.SGD):
    """An optimizer of a user."""


@dataclass(frozen=True)
class Fixed(trainers.Local):
    """A trainer of a user."""

    epochs: int = 2


def device_delays(clients, generator, mean=2.0):
    return {client: Exponential(mean * (1 + client)) for client in clients}


slow_delay = Exponential(5.0)


def one_worker(clients, generator, workers=1):
    return PriorityScheduler(len(clients), generator, workers=workers)


leaves = [AvailabilityChange(5.0, 1, "leave")]


def halves(labels, clients, *, generator, first=0.5):
    count = int(first * len(labels))
    return [np.arange(count), np.arange(count, len(labels))]
