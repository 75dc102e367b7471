"""Tests of `Outer` as torchft's `DiLoCo(outer_optimizer=…)` calls it.

They cover two synchronised replicas, fragments, rejected commits and recovery. The calls and their order are those of
torchft's `local_sgd.py`, without its manager. An average over the replicas replaces `allreduce`, and a pickled state
replaces the state that torchft sends to a recovering replica. `tests/network/diloco.py` runs torchft itself.
"""

import io

import pytest
import torch
from torch import nn

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import aggregate
from manifoldagg.federated.rules import ASGD, DelayedNesterov, FedBuff, FedOrtho, HeLoCo, Momentum
from manifoldagg.optim import Outer
from tests.support import draw

SYNC_EVERY = 4
ROUNDS = 8
RULES = {
    "DiLoCo": Momentum(ASGD(0.7), 0.9, nesterov=True),
    "HeLoCo": HeLoCo(0.7),
    "DelayedNesterov": DelayedNesterov(2, 0.7),
    "FedOrtho": Momentum(FedOrtho(0.7), 0.5),
    "FedBuff": FedBuff(2),
}


def nesterov(params):
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def ours(name):
    return lambda params: Outer(params, RULES[name])


class Fragment:
    """A fragment of a replica's model, with its own outer optimizer and the last synchronised parameters."""

    def __init__(self, part, outer):
        self.part = part
        self.outer = outer(part.parameters())
        self.original = {name: torch.empty_like(p) for name, p in part.named_parameters()}
        self.save()

    @torch.no_grad()
    def save(self):
        for name, p in self.part.named_parameters():
            self.original[name].copy_(p)

    @torch.no_grad()
    def pseudo_gradients(self):
        """Return the pseudo-gradients of the fragment."""
        return {name: self.original[name] - p for name, p in self.part.named_parameters()}

    @torch.no_grad()
    def perform(self, averaged, commit, alpha):
        local = {name: p.detach().clone() for name, p in self.part.named_parameters()}
        for name, p in self.part.named_parameters():
            p.data.copy_(self.original[name])
        if commit:
            for name, p in self.part.named_parameters():
                p.grad = averaged[name]
            self.outer.step()
            self.save()
            for name, p in self.part.named_parameters():
                p.data.lerp_(local[name], alpha)
        self.outer.zero_grad()


class Replica:
    def __init__(self, number, outer, fragments):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 3), nn.Linear(3, 1)]
        self.model = nn.Sequential(*layers).double()
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=5e-2)
        self.fragments = [Fragment(part, outer) for part in (layers if fragments == 2 else [self.model])]
        self.number = number
        self.losses = []

    def train(self, steps):
        for _ in range(steps):
            x = draw(1000 * self.number + len(self.losses), 64).view(16, 4)
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            self.inner.zero_grad()
            loss.backward()
            self.inner.step()
            self.losses.append(loss.item())

    def state(self):
        """Return the state that the manager sends to a recovering replica."""
        parts = [{"outer": one.outer.state_dict(), "original": one.original} for one in self.fragments]
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "fragments": parts}, file)
        return file.getvalue()

    def recover(self, sent):
        state = torch.load(io.BytesIO(sent), weights_only=True)
        self.model.load_state_dict(state["model"])
        for fragment, kept in zip(self.fragments, state["fragments"], strict=True):
            for name, tensor in kept["original"].items():
                fragment.original[name].copy_(tensor)
            fragment.outer.load_state_dict(kept["outer"])


def trained(outer, fragments=1, *, delay=0, alpha=0.0, refused=(), lost=None, watch=None):
    """Train two replicas. Each round synchronises the next fragment, or repeats the fragment after a rejected commit.

    Args:
        delay: inner steps between the start and the end of the averaging of pseudo-gradients.
        alpha: the weight of the replica's own parameters in the new parameters.
        refused: rounds whose commit fails.
        lost: the round in which the second replica restarts and recovers from the first.
        watch: a function of the index of the fragment, its parameters before the step, and the pseudo-gradients.
    """
    replicas = [Replica(number, outer, fragments) for number in range(2)]
    every = SYNC_EVERY // fragments
    committed = 0
    for turn in range(ROUNDS):
        for replica in replicas:
            replica.train(every - delay)
        if turn == lost:
            replicas[1] = Replica(1, outer, fragments)
            replicas[1].recover(replicas[0].state())
        mine = [replica.fragments[committed % fragments] for replica in replicas]
        sent = [fragment.pseudo_gradients() for fragment in mine]
        averaged = {name: torch.stack([grads[name] for grads in sent]).mean(0) for name in sent[0]}
        for replica in replicas:
            replica.train(delay)
        if watch is not None and turn not in refused:
            before = {name: tensor.clone() for name, tensor in mine[0].original.items()}
            watch(committed % fragments, before, averaged)
        for fragment in mine:
            fragment.perform({name: x.clone() for name, x in averaged.items()}, turn not in refused, alpha)
        committed += turn not in refused
    return replicas


def originals(replica):
    return [tensor for fragment in replica.fragments for tensor in fragment.original.values()]


def max_difference(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


SETTINGS = [
    {"fragments": 1},
    {"fragments": 2},
    {"fragments": 2, "delay": 1},
    {"fragments": 1, "delay": 2, "alpha": 0.5},
    {"fragments": 2, "alpha": 0.25, "refused": (0, 3)},
    {"fragments": 1, "lost": 4},
    {"fragments": 2, "lost": 5, "refused": (2,)},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_diloco_equals_sgd_with_nesterov_momentum(setting):
    mine, theirs = trained(ours("DiLoCo"), **setting), trained(nesterov, **setting)
    for one, other in zip(mine, theirs, strict=True):
        # The parameters have size 1. Between the eight outer steps, Adam divides by values of 1e-3 and more.
        assert max_difference(one.model.parameters(), other.model.parameters()) <= 8 * 1e3 * 2**-52
        assert max_difference(originals(one), originals(other)) <= 8 * 1e3 * 2**-52


@pytest.mark.parametrize("setting", [SETTINGS[i] for i in (0, 3, 4, 6)], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_replicas_are_bitwise_equal_and_learn(name, setting):
    """Synchronised parameters are equal. Current parameters can differ, by later training and by the `alpha` part."""
    first, second = trained(ours(name), **setting)
    assert max_difference(originals(first), originals(second)) == 0
    assert sum(first.losses[-SYNC_EVERY:]) < sum(first.losses[:SYNC_EVERY])
    if setting["fragments"] == 1 and not setting.get("alpha"):
        assert max_difference(first.model.parameters(), second.model.parameters()) == 0


@pytest.mark.parametrize("name", ["HeLoCo", "DelayedNesterov"])
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_fragment_step_equals_aggregate(name, fragments):
    """Each fragment has its own momentum and receives the averaged pseudo-gradients of both replicas."""
    models = {}
    states = {}

    def watch(place, before, averaged):
        base = models.get(place, before)
        assert max_difference(base.values(), before.values()) <= 1e-13
        update = {key: base[key] - grad for key, grad in averaged.items()}
        models[place], states[place], _ = aggregate(RULES[name], states.get(place), base, base, update)

    first, _ = trained(ours(name), fragments, watch=watch)
    assert len(models) == fragments
    for place, fragment in enumerate(first.fragments):
        assert max_difference(fragment.original.values(), models[place].values()) <= 1e-13


@pytest.mark.parametrize("name", RULES)
def test_a_rejected_commit_changes_no_state(name):
    """The synchronised parameters and the state of the outer optimizer are those before the round."""
    (first, _), (other, _) = trained(ours(name), 2), trained(ours(name), 2, refused=(ROUNDS - 1,))
    assert max_difference(originals(first), originals(other)) > 0
    last = other.fragments[(ROUNDS - 1) % 2]
    assert max_difference(last.part.parameters(), last.original.values()) == 0
    assert all(p.grad is None for p in last.part.parameters())


def test_recovery_with_another_rule_is_rejected():
    donor, other = Replica(0, ours("HeLoCo"), 2), Replica(1, ours("DiLoCo"), 2)
    donor.train(2)
    for fragment in donor.fragments:
        fragment.perform(fragment.pseudo_gradients(), True, 0.0)
    with pytest.raises(ArgumentError, match="expected the state of"):
        other.recover(donor.state())
