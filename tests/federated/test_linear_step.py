"""Linear steps: one pass gives the results of two, and a rejected update changes nothing."""

from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg import UpdateInfo, aggregate
from manifoldagg.errors import ArgumentError, RuleError
from manifoldagg.federated import Outcome, Payload, Server
from manifoldagg.federated.rules import ASGD, DeFedAvg, FedAsync, FedAvg, FedBuff, GeneralizedAsyncSGD, Momentum
from manifoldagg.federated.rules._gram_rule import GramRule
from manifoldagg.kernels.backends import selection
from manifoldagg.manifolds import Flat
from tests.support import draw, seeds

LINEAR = [
    ASGD(0.5),
    FedAsync(0.6),
    FedAvg(2),
    FedBuff(2),
    DeFedAvg(2),
    GeneralizedAsyncSGD([0.5, 0.5], rate=0.3),
    Momentum(ASGD(0.5), beta=0.5),
    Momentum(FedAvg(2, 0.7), nesterov=True),
    Momentum(Momentum(FedAsync(0.5))),
]
SHAPES = [(3, 4), (1,), (20000,), (0,), (7,)]


def model_of(seed, dtype, scale=1.0):
    return {f"{i}": draw(seed + i, *shape, dtype=dtype, scale=scale) for i, shape in enumerate(SHAPES)}


def run(rule, seed, dtype, steps=5, **options):
    """Return the models, states and metrics of several stale steps."""
    models, state, found = [model_of(seed, dtype)], None, []
    for i in range(steps):
        base = models[max(0, len(models) - 3)]
        update = {name: x + y for (name, x), y in zip(base.items(), model_of(9 * i, dtype, 0.1).values(), strict=True)}
        info = UpdateInfo(client=i % 2, weight=0.25 * (1 + i % 3), staleness=min(2, len(models) - 1))
        given = {"out": {name: torch.empty_like(x) for name, x in base.items()}} if options.get("out") else {}
        new, state, metrics = aggregate(rule, state, models[-1], base, update, info=info, **given)
        models.append(new)
        found.append((new, state, metrics))
    return found


def leaves(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [leaf for branch in tree.values() for leaf in leaves(branch)]
    if hasattr(tree, "__dataclass_fields__"):
        return [leaf for name in tree.__dataclass_fields__ for leaf in leaves(getattr(tree, name))]
    return []


def assert_same(one, two):
    for (a, state, numbers), (b, other, told) in zip(one, two, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
        assert all(map(torch.equal, leaves(state), leaves(other)))
        assert numbers.keys() == told.keys()
        torch.testing.assert_close([*numbers.values()], [*told.values()], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rule", LINEAR, ids=repr)
@given(seed=seeds, dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_one_pass_is_bitwise_equal_to_two_passes(rule, seed, dtype):
    assert_same(run(rule, seed, dtype), run(rule, seed, dtype, out=True))


@pytest.mark.parametrize("rule", LINEAR, ids=repr)
def test_linear_rule_makes_one_pass_into_new_memory(rule):
    passes = []
    plain = {name: getattr(selection, name) for name in ("block_products", "combine", "gram_combine")}

    def watched(name):
        return lambda *args: (passes.append(name), plain[name](*args))[1]

    with patch.multiple(selection, **{name: watched(name) for name in plain}):
        run(rule, 0, torch.float32, steps=4)
    assert passes == ["gram_combine"] * 4 or selection.backend_for(torch.device("cpu")).__name__.endswith("reference")


@pytest.mark.parametrize("rule", LINEAR, ids=repr)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_rejected_update_changes_nothing(rule, value, in_place):
    base, update = model_of(0, torch.float32), model_of(9, torch.float32)
    current = {name: x.clone() for name, x in base.items()}
    update["4"][3] = value
    info = UpdateInfo(client=0, weight=0.5)
    with pytest.raises(ArgumentError, match="update"):
        aggregate(rule, None, current, base, update, info=info, **({"out": current} if in_place else {}))
    assert all(torch.equal(current[name], base[name]) for name in base)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_would_overflow_is_rejected(in_place):
    base, update = [torch.zeros(3)], [torch.tensor([0.0, 3e38, 0.0])]
    current = [torch.tensor([0.0, 3e38, 1.0])]
    before = current[0].clone()
    with pytest.raises(ArgumentError, match=r"the new model would not be finite in torch\.float32"):
        aggregate(ASGD(1.0), None, current, base, update, **({"out": current} if in_place else {}))
    assert torch.equal(current[0], before)


@dataclass(frozen=True)
class Renamed(ASGD):
    """Wrapper rule that does not forward the linear step."""

    def plan(self, space, state, update):
        after, outcome = super().plan(space, state, update)
        return after, Outcome(outcome.model, outcome.client_state, {"mine": 1.0})


def test_model_without_linear_step_is_measured():
    current, base, update = [torch.ones(3)], [torch.zeros(3)], [torch.full((3,), 2.0)]
    new, _, metrics = aggregate(Renamed(0.5), None, current, base, update)
    assert new[0].tolist() == [2.0] * 3
    assert metrics == {"mine": 1.0}
    with pytest.raises(ArgumentError, match="update"):
        aggregate(Renamed(0.5), None, current, base, [torch.full((3,), float("nan"))])


def test_rejected_update_does_not_affect_later_updates():
    found = []
    for hostile in (False, True):
        server = Server(Flat(1000), Momentum(ASGD(0.5)), torch.zeros(1000), weights={"honest": 1, "hostile": 1})
        for i in range(4):
            if hostile:
                ticket = server.dispatch("hostile")
                assert not server.receive(ticket.id, Payload(torch.full((1, 1000), float("nan")), 1)).accepted
            ticket = server.dispatch("honest")
            points = ticket.message.start + draw(i, 1, 1000, dtype=torch.float32)
            assert server.receive(ticket.id, Payload(points, 1)).accepted
        found.append(server.model)
    assert torch.equal(*found)


def test_a_rate_that_depends_on_the_drift_is_not_linear():
    class Decaying(GramRule):
        fixed_coefficients = (1.0, 0.0)

        def coefficients(self, gram, state):
            return [1.0, 0.0], state

        def step_size(self, state, update, penalty):
            return penalty(0.5)

    model = [torch.ones(3)]
    with pytest.raises(RuleError, match="fixed_coefficients: expected None"):
        aggregate(Decaying(), None, model, model, [torch.zeros(3)])
    assert ASGD(1.0, decay=0.5).fixed_coefficients is None


def test_rule_with_nonlinear_correction_is_not_linear():
    class Halved(ASGD):
        def correct(self, frame, state):
            done = super().correct(frame, state)
            return replace(done, coefficients=done.coefficients * 0.5)

    base, update = [torch.zeros(2)], [torch.ones(2)]
    assert aggregate(Halved(1.0), None, base, base, update)[0][0].tolist() == [0.5, 0.5]
