"""Rules of one's own, in a module that is called by its name."""

from dataclasses import dataclass

from manifoldagg.federated import Message, Outcome
from manifoldagg.federated import clients as trainers
from manifoldagg.simulation import Method


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
