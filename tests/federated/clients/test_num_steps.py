"""Tests that `num_steps` predicts the number of gradients that every trainer computes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Message, Payload, Server, clients, rules
from manifoldagg.manifolds import Flat
from tests.support import draw

SPACE, START = Flat(3), draw(0, 3)
FEW = st.integers(1, 3)
MAYBE = st.none() | FEW
LOCAL = {"epochs": FEW, "steps": MAYBE}
INITIAL = st.sampled_from(["zero", "gradient"])
# For each trainer: its rule, what is drawn for the rule, and what for the trainer.
PAIRS = {
    "AsyncCurve": (lambda: rules.AsyncCurve(4), {}, {"epochs": FEW}),
    "Calibrated": (rules.OrthoFL, {}, {"trainer": st.fixed_dictionaries(LOCAL).map(lambda o: clients.Local(**o))}),
    "ControlVariate": (lambda initial: rules.MasFL(1, 0.1, 0.5, initial=initial), {"initial": INITIAL}, LOCAL),
    "Curve": (
        rules.AsyncBezier,
        {},
        {"epochs": st.tuples(FEW, FEW), "steps": st.none() | st.tuples(FEW, FEW), "alternate": st.booleans()},
    ),
    "Epochs": (rules.AsyncFedED, {"epochs": FEW}, {"max_epochs": MAYBE}),
    "FLOCO": (lambda vertices: rules.FLOCO(cohort=1, vertices=vertices), {"vertices": FEW}, {"epochs": FEW}),
    "Gradient": (lambda: rules.GeneralizedAsyncSGD([1.0]), {}, {}),
    "Local": (rules.FedAsync, {}, LOCAL),
    "Normalised": (
        lambda steps, initial: rules.AdaMasFL(1, steps=steps, server_steps=9, initial=initial),
        {"steps": FEW, "initial": INITIAL},
        {},
    ),
    "Proximal": (lambda: rules.FedAvg(1), {}, LOCAL),
    "Scheduled": (
        rules.FedAsync,
        {},
        {
            "trainer": st.fixed_dictionaries(LOCAL).map(lambda o: clients.Local(**o)),
            "steps": st.floats(0.01, 2.0) | st.just(lambda version: 0.4),
        },
    ),
    "Trajectory": (rules.AsyncBezier, {}, LOCAL),
}


def counted(trainer, message, batches):
    """Return the number of gradients that a task computes."""
    count = 0

    def loss(theta, batch):
        nonlocal count
        count += 1
        inputs, targets = batch
        return (inputs @ theta - targets).square().mean()

    trainer.train(SPACE, message, loss, batches, None, generator=torch.Generator().manual_seed(0))
    return count


def test_cases_cover_every_trainer():
    assert set(PAIRS) == {name for name in clients.__all__ if hasattr(getattr(clients, name), "train")}


@pytest.mark.parametrize("name", PAIRS)
@given(data=st.data(), length=FEW)
def test_num_steps_equals_the_number_of_gradients(name, data, length):
    make, of_rule, of_trainer = PAIRS[name]
    trainer = getattr(clients, name)(**data.draw(st.fixed_dictionaries(of_trainer)))
    server = Server(SPACE, make(**data.draw(st.fixed_dictionaries(of_rule))), START)
    message = server.dispatch(0).message
    batches = [(draw(i, 5, 3), draw(i, 5)) for i in range(length)]
    assert trainer.num_steps(message, length) == counted(trainer, message, batches)


def test_num_steps_rejects_message_of_another_rule():
    for trainer in (clients.Epochs(), clients.Normalised()):
        with pytest.raises(ArgumentError, match="message: "):
            trainer.num_steps(Message(START), 3)


def test_inner_trainer_without_num_steps_counts_as_one_pass():
    class Mine:
        def train(self, space, message, loss, batches, client_state, *, generator):
            return Payload(message.start[None], 1)

    assert clients.Calibrated(Mine()).num_steps(Message(START), 3) == 3
