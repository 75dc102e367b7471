"""Tests that `aggregate` and `Server` are bitwise equal.

The tests cover every rule, any order of updates, buffers, and flat and curved spaces.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import InitialModel, Payload, Server, UpdateInfo, aggregate
from manifoldagg.federated.types import extra_fields
from manifoldagg.manifolds import ParameterSpace, Sphere
from tests.federated.fingerprint import Gathers
from tests.federated.rules.registered import golden, missing, mutated
from tests.support import draw, seeds

CASES = golden()
BEYOND = {name: rule for name, rule in CASES.items() if extra_fields(rule) != ({}, ())}
"""These ask clients for more than models."""
RULES = {name: rule for name, rule in CASES.items() if name not in BEYOND} | {"a rule that waits": Gathers(2)}


def works_on(space, start):
    """Return the rules that support a space."""
    for name, rule in RULES.items():
        try:
            rule.init(space, start)
        except ArgumentError:
            continue
        yield name


CURVED = [name for name in works_on(Sphere(3), torch.eye(3)[0]) if name != "a rule that waits"]
SHARE = {"heavy": 3, "light": 1}
POLICIES = {"*running_mean": "average", "*running_var": "latest", "*tracked": "latest"}


def test_golden_cases_and_mutants_cover_every_rule():
    assert not missing({type(rule).__name__ for rule in CASES.values()}, "GOLDEN = {name: an instance}")
    assert not missing(mutated(), "a mutant (a Catalogue of laws, and MUTANTS of it)")


@pytest.mark.parametrize("name", BEYOND)
def test_rule_that_requires_more_than_models_raises_argument_error(name):
    with pytest.raises(ArgumentError, match=r"requires more than models from clients; use a Server"):
        aggregate(BEYOND[name], None, {}, {}, {})


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def trained(space, seed, start, carried):
    """Return a client's model near its start model, with its buffers."""
    point = start + 0.1 * draw(seed, *start.shape, dtype=start.dtype)
    if not space.flat:
        point = space.project(point)
    # As they may be of batches: no variance is negative.
    noise = {name: draw(seed + i, *t.shape, dtype=torch.float32).abs() if t.is_floating_point() else t + 1 + seed % 7
             for i, (name, t) in enumerate(carried.items())}  # fmt: skip
    return point, noise


def policies(rule):
    """Return the buffer policies. A rule that adds no noise to the buffers leaves them unchanged."""
    return dict.fromkeys(POLICIES, "leave") if getattr(rule, "is_private", False) else POLICIES


def agree(name, seed, script, manifolds=None):
    net = network()
    if manifolds:
        net[0].weight.data /= net[0].weight.data.norm(dim=-1, keepdim=True)
    state_dict = net.state_dict()
    space = ParameterSpace.of_state_dict(state_dict, manifolds, buffer_policy=list(POLICIES))
    chosen = policies(RULES[name])
    server = Server(
        space, RULES[name], InitialModel(space.point(state_dict), space.buffers(state_dict), chosen), weights=SHARE
    )
    state, current, open_, receipts = None, state_dict, [], 0
    for i, (client, place) in enumerate(script):
        if place is None or not open_:
            open_.append((server.dispatch(client), client, current))
            continue
        ticket, client, base = open_.pop(place % len(open_))
        # As many as a rule has vertices; an end and a control point where it is not for plain models alone.
        count = getattr(RULES[name], "vertices", 1 if getattr(RULES[name], "single_point", True) else 2)
        pairs = [trained(space, seed + 31 * i + j, ticket.message.start, server.state_dict()) for j in range(count)]
        carried = {key: pairs[-1][1][key] for key in (entry.name for entry in space.layout.buffers)}
        brought = carried if chosen is POLICIES else {}
        receipt = server.receive(ticket.id, Payload(torch.stack([point for point, _ in pairs]), 5, buffers=brought))
        assert receipt.reason == ""
        models = [space.state_dict(point, carried) for point, _ in pairs]
        current, state, numbers = aggregate(
            RULES[name],
            state,
            current,
            base,
            models if count > 1 else models[0],
            info=UpdateInfo(client, receipt.staleness, receipt.weight, samples=5),
            space=ParameterSpace.of_state_dict(current, manifolds, buffer_policy=chosen),
        )
        receipts += 1
        assert all(torch.equal(tensor, current[key]) for key, tensor in server.state_dict().items())
        told = {key: value for key, value in numbers.items() if key in ("cosine", "step", "norm")}
        assert all(repr(float(value)) == repr(float(getattr(receipt, key))) for key, value in told.items())
    return receipts


steps = st.tuples(st.sampled_from(list(SHARE)), st.none() | st.integers(0, 5))


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=4)
@given(seed=seeds, script=st.lists(steps, min_size=8, max_size=20))
def test_aggregate_equals_server_for_random_updates(name, seed, script):
    agree(name, seed % 10**6, script)


@pytest.mark.parametrize("name", CURVED)
@settings(max_examples=2)
@given(seed=seeds, script=st.lists(steps, min_size=8, max_size=12))
def test_aggregate_equals_server_on_a_curved_space(name, seed, script):
    agree(name, seed % 10**6, script, {"0.weight": Sphere(3)})


def test_random_sequences_contain_accepted_updates():
    assert agree("FedBuff", 3, [("heavy", None), ("light", None), ("heavy", 1), ("light", None), ("light", 0)] * 3) >= 6
