"""Tests of `aggregate`.

The result has the type of the input, inputs are unchanged, and the values equal those of the server.
"""

import copy
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from manifoldagg import AsyncAggregator, UpdateInfo, aggregate
from manifoldagg.errors import ArgumentError, RuleError
from manifoldagg.federated import Message, Outcome, Payload, Server, Update
from manifoldagg.federated.rules import (
    ACE,
    ASGD,
    CA2FL,
    DCASGD,
    FADAS,
    AsyncBezier,
    AsyncFedED,
    Dominance,
    FedAdam,
    FedAsync,
    FedAvg,
    FedBuff,
    FedGS,
    FedOrtho,
    HeLoCo,
    Momentum,
    OrthoFL,
)
from manifoldagg.manifolds import Flat, ParameterSpace, Sphere, geodesic
from tests.support import draw, seeds

RULES = [FedAsync(0.5), FedOrtho(0.5), FedGS(0.5), AsyncBezier(0.5, threshold=0.0)]


def model(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).bfloat16())
        net[1](torch.randn(8, 4))
    return net.state_dict()


def states(seed, count=3):
    return [model(seed % 1000 + i) for i in range(count)]


def arrays(state):
    return [tensor.float().numpy() for name, tensor in state.items() if "num_batches" not in name]


@given(seeds, st.sampled_from(RULES))
def test_aggregate_equals_the_step_of_the_rule_on_points(seed, rule):
    base, current, mine = states(seed)
    space = ParameterSpace.of_state_dict(base)
    new, state, numbers = aggregate(rule, None, current, base, mine, info=UpdateInfo(staleness=1, weight=0.5))
    here = space.point(current)
    update = Update("late", space.point(base), here, space.point(mine)[None], staleness=1, weight=0.5)
    after, outcome = rule.step(space, rule.init(space, here), update)
    assert all(torch.equal(new[name], tensor) for name, tensor in space.state_dict(outcome.model).items())
    assert (state, numbers) == (after, dict(outcome.numbers))


@pytest.mark.parametrize("rule", RULES)
def test_results_are_bitwise_equal_to_the_server(rule):
    base, other, mine = (
        {name: t.float() if t.is_floating_point() else t for name, t in state.items()} for state in states(5)
    )
    space = ParameterSpace.of_state_dict(base)
    server = Server(space, rule, space.point(base), weights="uniform")
    late, quick = server.dispatch("late"), server.dispatch("quick")
    state, current = None, base
    for staleness, (ticket, update) in enumerate(((quick, other), (late, mine))):
        receipt = server.receive(ticket.id, Payload(space.point(update)[None], 1))
        current, state, numbers = aggregate(rule, state, current, base, update, info=UpdateInfo(None, staleness, 0.5))
        assert numbers["norm"] == receipt.norm
        assert torch.equal(space.point(current), server.model)


@given(seeds, st.sampled_from(RULES))
def test_aggregate_does_not_modify_inputs_and_returns_new_tensors(seed, rule):
    inputs = states(seed)
    kept = copy.deepcopy(inputs)
    new, _, _ = aggregate(rule, None, *inputs)
    for tensor in new.values():
        tensor.zero_()
    for before, after in zip(kept, inputs, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_result_has_the_type_of_the_input():
    current, base, update = states(0)
    new, _, _ = aggregate(FedAsync(0.5), None, current, base, update)
    assert isinstance(new, OrderedDict)
    assert list(new) == list(current)
    assert {name: (t.dtype, t.shape) for name, t in new.items()} == {n: (t.dtype, t.shape) for n, t in current.items()}
    assert type(aggregate(FedAsync(0.5), None, dict(current), base, update)[0]) is dict
    lists = [arrays(state) for state in (current, base, update)]
    as_list, _, _ = aggregate(FedAsync(0.5), None, *lists)
    assert isinstance(as_list, list)
    assert all(
        isinstance(a, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape
        for a, b in zip(as_list, lists[0], strict=True)
    )
    assert isinstance(aggregate(FedAsync(0.5), None, tuple(lists[0]), lists[1], lists[2])[0], tuple)
    tensors = [[torch.from_numpy(a.copy()) for a in entry] for entry in lists]
    as_tensors, _, _ = aggregate(FedAsync(0.5), None, *tensors)
    assert all(
        isinstance(t, torch.Tensor) and np.array_equal(t.numpy(), a) for t, a in zip(as_tensors, as_list, strict=True)
    )


def test_arrays_may_be_read_only_strided_or_zero_dimensional():
    current = [np.ones((3, 4), np.float32).T, np.float32(1.0), np.array(3, np.int64)]
    current[0].flags.writeable = False
    update = [np.full((4, 3), 3, np.float32), np.array(5.0, np.float32), np.array(7, np.int64)]
    new, _, _ = aggregate(FedAsync(0.5), None, current, current, update)
    assert new[0].tolist() == np.full((4, 3), 2.0).tolist()
    assert (new[1].item(), new[2].item(), new[2].dtype) == (3.0, 3, np.int64)


def test_batch_norm_statistics_are_detected_as_buffers():
    """A step of a parameter with the same values would give the negative variance -0.15."""
    base, current, update = [model(0) for _ in range(3)]
    base["1.running_var"].fill_(1.0)
    current["1.running_var"].fill_(0.05)
    update["1.running_var"].fill_(0.6)
    update["1.num_batches_tracked"] += 3
    space = ParameterSpace.of_state_dict(current, buffer_policy=["*running_*", "*tracked"])
    for rule in RULES:
        new, _, numbers = aggregate(rule, None, current, base, update)
        assert torch.allclose(new["1.running_var"], torch.tensor(0.05 + numbers["step"] * 0.55))
        assert new["1.num_batches_tracked"] == 4
        named, _, _ = aggregate(rule, None, current, base, update, space=space)
        assert all(torch.equal(named[name], tensor) for name, tensor in new.items())
    # By their name alone, also where somebody has made counters floating.
    state = {name: tensor.float() for name, tensor in nn.BatchNorm1d(2).state_dict().items()}
    assert [leaf.name for leaf in ParameterSpace.of_state_dict(state).layout.leaves] == ["weight", "bias"]
    assert ParameterSpace.of_state_dict({"my_running_mean": torch.ones(2)}).shape == (2,)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({}, "current: expected floating parameters, got none$"),
        ({"w": torch.ones(0)}, "current: expected floating parameters, got none$"),
        ([np.arange(3)], "current: expected floating parameters, got none; 0 is torch.int64"),
        ({"q": torch.ones(3, dtype=torch.int8)}, "current: expected floating parameters, got none; q is torch.int8"),
        ({"bn.running_mean": torch.ones(3)}, "got none; bn.running_mean is torch.float32"),
    ],
)
def test_a_model_without_parameters_is_refused(model, words):
    with pytest.raises(ArgumentError, match=words):
        aggregate(FedAsync(0.5), None, model, model, model)


@pytest.mark.usefixtures("as_shipped")
def test_changed_integers_are_reported_by_name():
    """A quantised weight is not averaged. It keeps the value of the server."""
    current, update = ({"w": torch.ones(2), "q": torch.full((3,), i), "n": torch.tensor(i)} for i in range(2))
    with pytest.warns(
        UserWarning, match=r"update: q: the server ignores changes of torch.int64 values; .*, buffer_policy=\.\.\.\)$"
    ):
        new, _, _ = aggregate(FedAsync(0.5), None, current, current, update)
    assert new["q"].tolist() == [0, 0, 0]
    for told in (["q"], {"q": "leave"}, {"q": "latest"}):
        space = ParameterSpace.of_state_dict(current, buffer_policy=told)
        aggregate(FedAsync(0.5), None, current, current, update, space=space)
    aggregate(FedAsync(0.5), None, current, current, update | {"q": current["q"].clone()})


@pytest.mark.usefixtures("as_shipped")
def test_update_that_looks_like_a_difference_is_rejected():
    base = {name: t.float() for name, t in model(1).items() if "num" not in name}
    difference = {name: 0.05 * tensor.roll(1, 0) for name, tensor in base.items()}
    out = copy.deepcopy(base)
    words = (
        r"^update: expected the model itself, got what looks like a difference of models: \S+ has 0.05\d* x the norm of "
        r"its base; pass info=UpdateInfo\(difference=True\) for a difference$"
    )
    with pytest.warns(UserWarning, match=words):
        aggregate(FedAsync(0.5), None, base, base, difference)
    with pytest.raises(UserWarning, match=words):
        aggregate(FedAsync(0.5), None, base, base, difference, out=out)
    assert all(torch.equal(out[name], base[name]) for name in base)
    with pytest.warns(UserWarning, match=r"update\[1\]: expected the model itself"):
        aggregate(AsyncBezier(0.5), None, base, base, [difference, difference])
    # One tensor that has kept its size is enough, wherever in the tensors its numbers are.
    aggregate(FedAsync(0.5), None, base, base, difference | {"2.bias": base["2.bias"]})
    far = torch.cat([torch.ones(5000), torch.full((5000,), 100.0)])
    aggregate(FedAsync(0.5), None, [far], [far], [torch.cat([torch.zeros(5000), far[5000:]])])


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("name", ["aggregate", "submit"])
def test_a_difference_with_a_negative_variance_is_rejected_as_a_difference(name):
    base = model(1)
    difference = {key: 0.05 * x if x.is_floating_point() else torch.zeros_like(x) for key, x in base.items()}
    difference["1.running_var"] = -difference["1.running_var"]
    aggregator = AsyncAggregator(FedAsync(0.5), base)
    aggregator.checkout("a")
    calls = {
        "aggregate": lambda update, difference=False: aggregate(
            FedAsync(0.5), None, base, base, update, info=UpdateInfo(difference=difference)
        ),
        "submit": lambda update, **options: aggregator.submit("a", update, samples=1, **options),
    }
    option = {"aggregate": r"info=UpdateInfo\(difference=True\)", "submit": "difference=True"}[name]
    words = rf"^update: expected the model itself, got what looks like .* base; pass {option} for a difference$"
    with pytest.raises(ArgumentError, match=words):
        calls[name](difference)
    calls[name](difference, difference=True)


@pytest.mark.usefixtures("as_shipped")
def test_a_weight_above_one_warns_and_the_weights_of_the_library_do_not():
    base, update = {"w": torch.ones(3)}, {"w": torch.zeros(3)}
    message = (
        "weight: expected the client's share of the data, at most 1, got 100; pass samples / total samples, and the "
        "sample count as samples="
    )
    out = copy.deepcopy(base)
    with pytest.raises(UserWarning) as caught:  # tests turn warnings into errors
        aggregate(FedAsync(0.5), None, base, base, update, info=UpdateInfo(weight=100), out=out)
    assert str(caught.value) == message
    assert torch.equal(out["w"], base["w"])
    with pytest.warns(UserWarning, match="^weight: expected the client's share"):
        aggregate(FedAsync(0.5), None, base, base, update, info=UpdateInfo(weight=1.5))
    aggregate(FedAsync(0.5), None, base, base, update, info=UpdateInfo(weight=1.0))
    with pytest.raises(ArgumentError, match="^weight: expected a finite number > 0, got inf"):
        aggregate(FedAsync(0.5), None, base, base, update, info=UpdateInfo(weight=float("inf")))
    for weights in ("observed", "uniform", {"a": 10, "b": 1}):
        aggregator = AsyncAggregator(FedBuff(2), base, weights=weights)
        for client, samples in (("a", 1), ("b", 10**6), ("a", 10**9), ("b", 1)):
            aggregator.checkout(client)
            aggregator.submit(client, update, samples=samples)


def test_trained_model_is_not_mistaken_for_a_difference():
    """Test the strongest usual weight decay, from an initialisation that is partly zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
        nn.init.zeros_(net[3].bias)
        base = copy.deepcopy(net.state_dict())
        descent = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.5)
        for _ in range(200):
            inputs = torch.randn(32, 8)
            loss = nn.functional.cross_entropy(net(inputs), (inputs[:, 0] > 0).long())
            descent.zero_grad()
            loss.backward()
            descent.step()
    aggregate(FedAsync(0.5), None, base, base, net.state_dict())


def test_buffers_follow_the_step_and_counters_follow_the_client():
    current, base, update = states(0)
    new, _, numbers = aggregate(FedAsync(0.25), None, current, base, update)
    assert numbers["step"] == 0.25
    assert torch.allclose(new["1.running_mean"], torch.lerp(current["1.running_mean"], update["1.running_mean"], 0.25))
    assert new["1.num_batches_tracked"] == update["1.num_batches_tracked"]


def test_infinite_mask_is_kept_and_invalid_statistic_is_rejected():
    mask = torch.tensor([0.0, -float("inf")])
    state = {"w": torch.ones(2), "mask": mask}
    space = ParameterSpace.of_state_dict(state, buffer_policy=["mask"])
    new, _, _ = aggregate(FedAsync(0.5), None, state, state, state | {"w": torch.zeros(2)}, space=space)
    assert torch.equal(new["mask"], mask)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match="update: mask: expected finite values, or the values of the current"):
            aggregate(FedAsync(0.5), None, state, state, state | {"mask": torch.tensor([0.0, bad])}, space=space)


def test_result_keeps_entries_of_state_dict_that_are_not_tensors():
    current = nn.Linear(2, 1).state_dict()
    current["_extra_state"] = {"version": 3}
    new, _, _ = aggregate(FedAsync(0.5), None, current, current, current)
    assert new["_extra_state"] == {"version": 3}
    assert new._metadata == current._metadata
    numbered = {0: torch.ones(2), 1: np.ones(2, ">f4")}
    new, _, _ = aggregate(FedAsync(0.5), None, numbered, numbered, {0: torch.zeros(2), 1: np.zeros(2, ">f4")})
    assert (new[0].tolist(), new[1].tolist(), new[1].dtype.str) == ([0.5, 0.5], [0.5, 0.5], ">f4")


@pytest.mark.usefixtures("as_shipped")
def test_update_that_would_overflow_the_model_is_rejected():
    low, high = {"w": torch.tensor([-3e38])}, {"w": torch.tensor([3e38])}
    with pytest.raises(ArgumentError, match="update: the new model would not be finite"):
        aggregate(FedOrtho(9.0, overshoot="extend"), None, low, low, high)
    half = [{"w": torch.tensor([x], dtype=torch.float16)} for x in (6e4, 0.0, 6e4)]
    with pytest.raises(ArgumentError, match="update: the new model would not be finite in torch.float16"):
        aggregate(FedGS(1.0), None, *half)


def test_aggregate_accepts_a_sequence_of_models_as_a_curve():
    current, base, control, end = states(0, 4)
    space = ParameterSpace.of_state_dict(base)
    new, _, _ = aggregate(AsyncBezier(0.5), None, current, base, [control, end])
    points = torch.stack([space.point(control), space.point(end)])
    update = Update(None, space.point(base), space.point(current), points)
    _, outcome = AsyncBezier(0.5).step(space, {"version": 0}, update)
    assert all(torch.equal(new[name], t) for name, t in space.state_dict(outcome.model).items())
    lists = [arrays(state) for state in (current, base, control, end)]
    from_lists, _, _ = aggregate(AsyncBezier(0.5), None, lists[0], lists[1], lists[2:])
    assert isinstance(from_lists[0], np.ndarray)


def test_a_rule_that_buffers_returns_a_copy_of_the_current_model():
    class Waits:
        cohort = 1

        def init(self, space, start):
            return 0

        def message(self, space, state, current, client_state):
            return Message(current)

        def step(self, space, state, update, *, out=None):
            return state + 1, Outcome(None)

    current = {"w": torch.ones(2)}
    new, state, numbers = aggregate(Waits(), None, current, current, {"w": torch.zeros(2)})
    assert (new["w"].tolist(), state, numbers) == ([1.0, 1.0], 1, {})
    assert new["w"] is not current["w"]


@pytest.mark.parametrize("rule", [FedAsync(0.5), FedBuff(2, rate=0.5)], ids=["moves", "waits"])
def test_buffers_of_a_new_model_have_their_own_memory(rule):
    def model(at):
        named = {"w": (2,), "running_mean": (4,), "running_var": (4,), "mask": (2, 3), "scale": ()}
        found = {name: torch.full(shape, at) for name, shape in named.items()}
        return found | {"num_batches_tracked": torch.tensor(int(at))}

    current, client = model(1.0), model(3.0)
    space = ParameterSpace.of_state_dict(current, buffer_policy={"mask": "leave", "scale": "latest"})
    new, _, _ = aggregate(rule, None, current, current, client, space=space)
    storages = {name: tensor.untyped_storage() for name, tensor in new.items()}
    assert {name: storage.nbytes() for name, storage in storages.items()} == {
        name: tensor.nbytes for name, tensor in current.items()
    }
    held = {tensor.data_ptr() for tensor in (*current.values(), *client.values(), *new.values())}
    assert len(held) == 3 * len(current)


def test_aggregate_passes_client_state_to_next_step():
    """There are N = 4 clients, one of which returns updates: $p = (k + 1) / (k + 4)$, and the rate is $0.5 / (4 p)$."""
    rule, state, model = ASGD(0.5, dominance=Dominance(4)), None, [torch.zeros(2)]
    server = Server(Flat(2), rule, torch.zeros(2), weights="uniform")
    for k in range(1, 6):
        server.receive(server.dispatch("a").id, Payload(server.model[None] + 1, 1))
        model, state, numbers = aggregate(rule, state, model, model, [model[0] + 1], info=UpdateInfo("a"))
        assert numbers["rate"] == server.history[-1]["rate"] == pytest.approx(0.5 * (k + 4) / (4 * (k + 1)))
        assert torch.equal(model[0], server.model)
    # Another client has a count of its own: 2 (k + 4) / (c + 1) / 16 with k = 6, c = 1.
    assert aggregate(rule, state, model, model, model, info=UpdateInfo("b"))[2]["rate"] == pytest.approx(
        0.5 * 10 / (4 * 2)
    )


@pytest.mark.parametrize("waits", [True, False])
def test_state_and_result_share_no_memory(waits):
    class Keeps:
        cohort = 1

        def init(self, space, start):
            return {}

        def message(self, space, state, current, client_state):
            return Message(current)

        def step(self, space, state, update, *, out=None):
            model = update.points[-1] + 1
            return {"points": update.points, "model": model}, Outcome(None if waits else model, {"m": model})

    current, mine = {"w": torch.zeros(2), "b": torch.ones(2)}, {"w": torch.ones(2), "b": torch.full((2,), 3.0)}
    new, state, _ = aggregate(
        Keeps(), None, current, current, mine, space=ParameterSpace.of_state_dict(current, buffer_policy=["b"])
    )
    for tensor in (*new.values(), *mine.values()):
        tensor.fill_(9.0)
    assert (state.state["model"].tolist(), state.client_states[None]["m"].tolist()) == ([2.0, 2.0], [2.0, 2.0])
    assert not waits or state.pending_buffers.latest["b"].tolist() == [3.0, 3.0]


def test_entries_may_be_points_of_manifolds():
    rows = [torch.nn.functional.normalize(draw(seed, 2, 3, dtype=torch.float32), dim=-1) for seed in range(3)]
    models = [{"w": row, "b": torch.full((2,), float(i))} for i, row in enumerate(rows)]
    new, _, _ = aggregate(FedAsync(0.5), None, *models, space=ParameterSpace.of_state_dict(models[0], {"w": Sphere(3)}))
    assert torch.allclose(new["w"], geodesic(Sphere(3), rows[0], rows[2], 0.5), atol=1e-6)
    assert new["b"].tolist() == [1.0, 1.0]


W = {"w": torch.ones(2)}


class Wants(FedAsync):
    tensors: ClassVar = {"control": None}


class Blows(FedAsync):
    def step(self, space, state, update, *, out=None):
        _, outcome = super().step(space, state, update, out=out)
        return {"m": [torch.full((2,), float("inf"))]}, outcome


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: aggregate(FedAsync(), None, W, W, {"v": torch.ones(2)}), "update: missing: w"),
        (lambda: aggregate(FedAsync(), None, W, {"w": torch.ones(3)}, W), r"base: w: expected shape \(2,\)"),
        (lambda: aggregate(FedAsync(), None, W, W, {"w": torch.tensor([1.0, float("nan")])}), "update: w: expected finite"),
        (lambda: aggregate(FedAsync(), None, {"w": torch.tensor([1.0, float("inf")])}, W, W), "current: w: expected finite"),
        (lambda: aggregate(FedAsync(), None, W, W, {"w": torch.ones(2).double()}), "update: w: expected torch.float32"),
        (lambda: aggregate(FedAsync(), None, W, W, []), "update: expected a model or a sequence of models"),
        (lambda: aggregate(FedAsync(), None, W, W, [W, W]), r"^update: expected one model, \(1, P\), for FedAsync, got 2$"),
        (lambda: aggregate(AsyncBezier(), None, W, W, [W, {"v": torch.ones(2)}]), r"update\[1\]: missing: w"),
        (lambda: aggregate(FedAsync(), None, "w", W, W), "current: expected a state dict or a list of arrays, got str"),
        (lambda: aggregate(FedAsync(), None, [np.array("a")], W, W), "current: 0: expected a numeric array"),
        (lambda: aggregate(FedAsync(), None, [1.0], W, W), "current: 0: expected a tensor or an array, got float"),
        (lambda: aggregate(FedAsync(), None, W, W, W, info=UpdateInfo(staleness=-1)), "staleness: expected"),
        (lambda: aggregate(FedAsync(), None, W, W, W, staleness=-(10**5000)), "staleness: expected .* got a huge negative int"),
        (lambda: aggregate(FedAsync(), None, W, W, W, info=UpdateInfo(weight=0.0)), "weight: expected"),
        (lambda: aggregate(FedAsync(), None, W, W, W, info=UpdateInfo(weight=10**5000)), "weight: expected .* got a huge int"),
        (lambda: aggregate(FedAsync(), None, W, W, W, info=UpdateInfo(samples="32")), "samples: expected an integer >= 1, got '32'"),
        (lambda: aggregate(FedAsync(), None, W, W, W, info=UpdateInfo(difference="no")), "difference: expected one of True, False; got 'no'"),
        (lambda: aggregate(FedAsync(), None, W, W, W, info=UpdateInfo(samples=0)), "samples: expected"),
        (lambda: aggregate(FedAsync(), None, W, W, W, info=UpdateInfo(client=[1])), "client: expected a hashable name"),
        (lambda: aggregate(Blows(), None, W, W, W), "update: the rule's state would not be finite"),
        (lambda: aggregate("FedAsync", None, W, W, W), "rule: expected"),
        (lambda: aggregate(Wants(), None, W, W, W), "rule: Wants requires more than models from clients; use a Server"),
        (lambda: aggregate(FedAsync(), None, W, W, W, space=ParameterSpace.of_state_dict(W, buffer_policy={"v": "latest"})), "buffer_policy: 'v' matches no entry"),
        (lambda: aggregate(FedAsync(), None, W, W, W, space=ParameterSpace.of_state_dict(W, buffer_policy={"w": "keep"})), "buffer_policy: w: expected one of average, latest, leave"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def layered(seed, count=3):
    """Return typical models with a transposed weight, a bf16 layer, a scalar, an empty tensor and counters."""
    models = []
    for i in range(count):
        x = draw(seed + i, 40, dtype=torch.float32)
        models.append(
            {
                "conv": x[:24].view(2, 3, 2, 2).to(memory_format=torch.channels_last),
                "norm": x[24:27].bfloat16(),
                "head": x[27:39].view(3, 4).T,
                "scale": x[39].clone(),
                "none": x[:0].clone(),
                "1.running_mean": x[:2] + i,
                "1.num_batches_tracked": torch.tensor(i),
            }
        )
    return models


STEPS = [FedAsync(0.5), ASGD(0.5), FedOrtho(0.5), AsyncBezier(0.5), FedBuff(1), AsyncFedED()]


@given(seeds, st.sampled_from(STEPS), st.sampled_from(["a new one", "current", "base", "update"]))
def test_out_receives_the_returned_model(seed, rule, where):
    current, base, update = layered(seed % 1000)
    expected, state, numbers = aggregate(rule, None, current, base, update)
    blank = {name: torch.full_like(tensor, 7) for name, tensor in current.items()}
    out = {"a new one": blank, "current": current, "base": base, "update": update}[where]
    held = {name: tensor.data_ptr() for name, tensor in out.items()}
    new, after, told = aggregate(rule, None, current, base, update, out=out)
    assert new is out
    assert (after, told) == (state, numbers)
    assert all(torch.equal(new[name], expected[name]) for name in expected)
    assert {name: tensor.data_ptr() for name, tensor in new.items()} == held


def test_lists_of_arrays_are_updated_in_place_without_a_warning():
    lists = [arrays(state) for state in states(3)]
    expected, _, _ = aggregate(FedOrtho(0.5), None, *lists)
    for array in (*lists[1], *lists[2]):
        array.flags.writeable = False
    kept = copy.deepcopy(lists)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new, _, _ = aggregate(FedOrtho(0.5), None, *lists, out=lists[0])
    assert new is lists[0]
    assert all(np.array_equal(a, b) for a, b in zip(new, expected, strict=True))
    assert all(np.array_equal(a, b) for i in (1, 2) for a, b in zip(kept[i], lists[i], strict=True))


@pytest.mark.parametrize("manifolds", [None, {"w": Sphere(3)}])
def test_out_supports_curved_and_flat_leaves(manifolds):
    rows = [torch.nn.functional.normalize(draw(seed, 2, 3, dtype=torch.float32), dim=-1) for seed in range(3)]
    models = [{"w": row, "b": torch.full((2,), float(i))} for i, row in enumerate(rows)]
    models[0]["tied"] = models[0]["w"]
    for model in models[1:]:
        model["tied"] = model["w"].clone()
    space = ParameterSpace.of_state_dict(models[0], manifolds)
    expected, _, _ = aggregate(FedAsync(0.5), None, *models, space=space)
    out = {name: torch.zeros_like(tensor) for name, tensor in models[0].items()}
    aggregate(FedAsync(0.5), None, *models, space=space, out=out)
    assert all(torch.equal(out[name], expected[name]) for name in expected)
    assert expected["tied"] is expected["w"]


class Spoils(FedOrtho):
    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, state, update, out=out)
        return after | {"m": torch.full((1,), float("nan"))}, outcome


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("rule", "change", "words"),
    [
        (FedOrtho(0.5), {"w": torch.tensor([1.0, float("nan")])}, "update: w: expected finite values"),
        (FedOrtho(0.5), {"1.running_mean": torch.tensor([float("nan")])}, "update: 1.running_mean: expected finite"),
        (FedOrtho(9.0, overshoot="extend"), {"w": torch.tensor([1.0, 3e38])}, "the new model would not be finite"),
        (Spoils(0.5), {}, "the rule's state would not be finite"),
        (FedOrtho(0.5), {"w": torch.ones(3)}, "update: w: expected shape"),
    ],
)
def test_rejected_update_leaves_out_unchanged(rule, change, words):
    models = [
        {"w": torch.tensor([x, 1.0 - x]), "h": torch.ones(2).half(), "1.running_mean": torch.zeros(1)}
        for x in (0.0, 1.0, 2.0)
    ]
    out = {name: torch.full_like(tensor, 7) for name, tensor in models[0].items()}
    with pytest.raises(ArgumentError, match=words):
        aggregate(rule, None, models[0], models[1], models[2] | change, out=out)
    assert all((tensor == 7).all() for tensor in out.values())


def test_half_precision_that_might_overflow_is_looked_at_and_kept():
    """A step of 60 is longer than a quarter of 32, the distance between the largest numbers of float16."""
    base, near, far = ({"w": torch.tensor([x, 0.0], dtype=torch.float16), "v": torch.ones(3)} for x in (0.0, 60.0, 6e4))
    out = copy.deepcopy(base)
    aggregate(FedGS(1.0), None, base, base, near, out=out)
    assert out["w"].tolist() == [60.0, 0.0]
    with pytest.raises(ArgumentError, match="update: the new model would not be finite in torch.float16"):
        aggregate(FedGS(1.0), None, far, base, far, out=out)
    assert out["w"].tolist() == [60.0, 0.0]


def test_buffered_update_writes_the_current_model_to_out():
    current, base, update = {"w": torch.ones(2)}, {"w": torch.zeros(2)}, {"w": torch.full((2,), 2.0)}
    out = {"w": torch.zeros(2)}
    _, state, _ = aggregate(FedBuff(2), None, current, base, update, out=out)
    assert out["w"].tolist() == [1.0, 1.0]
    aggregate(FedBuff(2), state, current, base, update, out=out)
    assert out["w"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("rule", [FedBuff(2), FedAvg(2), AsyncBezier(0.5, threshold="auto"), AsyncFedED()])
def test_state_does_not_depend_on_the_tensor_types(rule):
    base, *others = [{n: t.float() for n, t in state.items() if "1." not in n} for state in states(5, 5)]
    space = ParameterSpace.of_state_dict(base)
    server = Server(space, rule, space.point(base), weights="uniform")
    tickets = [server.dispatch("a") for _ in others]
    current, state = base, None
    for ticket, mine in zip(tickets, others, strict=True):
        late = server.version
        server.receive(ticket.id, Payload(space.point(mine)[None], 1))
        current, state, _ = aggregate(rule, state, current, base, mine, info=UpdateInfo("a", late))
        assert torch.equal(space.point(current), server.model)
    now = server._state.value.model_state.state
    held = state.state if hasattr(state, "state") else state
    assert now.keys() == held.keys()
    assert all(
        torch.equal(x, held[k]) if isinstance(x, torch.Tensor) else x == held[k]
        for k, x in now.items()
        if k != "correction"
    )


@pytest.mark.parametrize(
    ("rule", "other"),
    [
        (FedAsync(0.5), FedBuff(2)),
        (FedOrtho(0.5), HeLoCo(0.5)),
        (ACE(0.5), CA2FL(2)),
        (OrthoFL(rate=0.5), CA2FL(2)),
        (OrthoFL(rate=0.5), ACE(0.5)),
        (AsyncBezier(0.5), FedBuff(2)),
        (HeLoCo(0.5), FedBuff(2)),
        (DCASGD(0.5), AsyncBezier(0.5, threshold="auto")),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_state_of_another_rule_is_rejected(rule, other):
    models = [{"w": x} for x in draw(0, 3, 5)]
    info = UpdateInfo("a")
    _, state, _ = aggregate(other, None, *models, info=info)
    with pytest.raises(ArgumentError, match=f"^state: expected a state that {type(rule).__name__} returned"):
        aggregate(rule, state, *models, info=info)


def test_subclass_of_a_rule_may_add_state_entries():
    @dataclass(frozen=True)
    class Counts(FedOrtho):
        def next_state(self, state, update, corrected):
            return {"sum": state.get("sum", 0.0) + corrected.gram.matrix[0, 0]}

    models = [{"w": x} for x in draw(0, 3, 5)]
    _, state, _ = aggregate(Counts(0.5), None, *models)
    _, state, _ = aggregate(Counts(0.5), state, *models)
    assert state.keys() == {"sum", "version"}


def test_aggregate_allocates_only_the_result():
    cuts = [7, 5000, 1, 3000]
    models = [dict(enumerate(draw(seed, sum(cuts), dtype=torch.float32).split(cuts))) for seed in range(3)]
    out = {key: torch.empty_like(tensor) for key, tensor in models[0].items()}
    for rule in (FedAsync(0.5), ASGD(0.5), FedOrtho(0.5), FedGS(0.5)):
        with Allocations() as fresh:
            aggregate(rule, None, *models)
        assert fresh.entries == sum(cuts)
        with Allocations() as none:
            aggregate(rule, None, *models, out=out)
        assert none.entries == 0


class Allocations(TorchDispatchMode):
    """Counter of the entries of new floating-point tensors, without scalars."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        taken = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.is_floating_point() and made.dim():
            self.entries += 0 if made.untyped_storage().data_ptr() in taken else made.numel()
        return made


class Bare(FedOrtho):
    def plan(self, space, state, update):
        return state, Outcome(update.current)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: aggregate(FedAsync(), None, W, W, W, out={"v": torch.ones(2)}), "out: missing: w"),
        (lambda: aggregate(FedAsync(), None, W, W, W, out={"w": torch.ones(3)}), r"out: w: expected shape \(2,\)"),
        (lambda: aggregate(FedAsync(), None, W, W, W, out={"w": torch.ones(2).half()}), "out: w: expected torch.float32"),
        (lambda: aggregate(FedAsync(), None, W, W, W, out=3), "out: expected a state dict or a list of arrays, got int"),
        (lambda: aggregate(FedAsync(), None, *[[np.ones(2)]] * 3, out=[np.broadcast_to(1.0, 2)]), "out: 0: expected a writable array"),
        (lambda: aggregate(FedAsync(), None, *[[np.ones(2)]] * 3, out=[np.ones(2, ">f8")]), "out: 0: expected a writable array in native byte order"),
        (lambda: aggregate(FedAsync(), None, *[{"a": LINE[:2], "b": LINE[2:4]}] * 3, out={"a": LINE[:2], "b": LINE[1:3]}), "out: expected"),
        (lambda: aggregate(FedAsync(), None, *[{"a": LINE[:2], "b": LINE[2:4]}] * 3, out={"a": LINE[2:4], "b": LINE[:2]}), "out: expected"),
        (lambda: aggregate(ASGD(), None, B, B, B, space=ParameterSpace.of_state_dict(B, buffer_policy=["rm"]), out=B | {"rm": torch.zeros(1).expand(2)}), "out: expected tensors with memory"),
        (lambda: aggregate(ASGD(), None, B, B, B, space=ParameterSpace.of_state_dict(B, buffer_policy=["rm"]), out={"w": LINE[:2], "rm": LINE[:2]}), "out: expected tensors with memory"),
        (lambda: aggregate(ASGD(), None, B, B, B, space=ParameterSpace.of_state_dict(B, buffer_policy=["rm"]), out={"w": LINE[:2], "rm": LINE[1:3]}), "out: expected tensors with memory"),
        (lambda: aggregate(ASGD(), None, W, W, W, out={"w": torch.ones(2).to_sparse()}), "out: w: expected a dense tensor"),
        (lambda: aggregate(ASGD(), None, W, W, {"w": torch.ones(2, device="meta")}), "update: w: expected a dense tensor"),
        (lambda: aggregate(ASGD(), None, W, W, W, out={"w": INFERENCE}), "out: w: expected a normal tensor, got one that was created in inference mode"),
        (lambda: aggregate(FedBuff(2), None, *[{"a": LINE[:2], "b": LINE[2:4]}] * 3, out={"a": LINE[2:4], "b": LINE[:2]}), "out: expected"),
        (lambda: aggregate(ASGD(), None, W, W, W, space=ParameterSpace.of_state_dict(W, buffer_policy="*w*")), "buffer_policy: expected a sequence of glob patterns"),
        (lambda: aggregate(ASGD(), None, W, W, W, space=ParameterSpace.of_state_dict(W, buffer_policy=None)), "buffer_policy: expected a sequence of glob patterns"),
    ],
)  # fmt: skip
def test_invalid_out_is_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_rule_that_declares_tensor_lists_but_uses_a_tensor_raises():
    with pytest.raises(RuleError, match="rule: new model: expected the result of Frame.move"):
        aggregate(Bare(), None, W, W, W)


@pytest.mark.parametrize(
    ("rule", "state"),
    [
        (FedOrtho(), {"momentum": torch.zeros(2)}),
        (FedOrtho(), torch.zeros(2)),
        (FADAS(), {"version": 0}),
        (FedAdam(1), FedAdam(1).init(Flat(3), torch.zeros(3))),
        (Momentum(FedOrtho()), {"rule": {"version": 1}, "velocity": torch.zeros(3)}),
        (FedBuff(3), aggregate(FedBuff(3), None, *[{"w": torch.ones(3)}] * 3)[1]),
    ],
)
def test_state_of_another_rule_or_model_is_rejected(rule, state):
    current = {"w": torch.ones(2)}
    with pytest.raises(
        ArgumentError, match=f"state: expected a state that {type(rule).__name__} returned for such models"
    ):
        aggregate(rule, state, current, W, {"w": torch.ones(2)}, out=current)
    assert current["w"].tolist() == [1.0, 1.0]


LINE = torch.arange(5.0)
B = {"w": torch.ones(2), "rm": torch.ones(2)}
with torch.inference_mode():
    INFERENCE = torch.ones(2)


def test_tied_entries_stay_tied_while_updates_are_buffered():
    models = [{"enc": x, "dec": x} for x in (torch.full((2,), float(i)) for i in range(3))]
    model, state = models[0], None
    for update in models[1:]:
        model, state, _ = aggregate(FedBuff(2, staleness=lambda late: 1.0), state, model, models[0], update)
        assert model["enc"] is model["dec"]
    assert model["enc"].tolist() == [1.5, 1.5]


def test_8_bit_entries_are_checked_for_overflow_after_long_steps():
    base, near, far = ({"w": torch.tensor([x, 2.0]).to(torch.float8_e4m3fn)} for x in (1.0, 200.0, float("nan")))
    new, _, _ = aggregate(ASGD(1.0), None, base, base, near)
    assert new["w"].float().tolist() == near["w"].float().tolist()
    with pytest.raises(ArgumentError, match="update: w: expected finite values"):
        aggregate(ASGD(1.0), None, base, base, far)


def test_equal_spaces_keep_their_own_buffer_policies():
    """The configuration of a step is cached by the rule and the space; equality ignores the policies."""
    rule, current = FedAsync(0.5), {"w": torch.ones(2), "mask": torch.zeros(2)}
    update = {"w": torch.zeros(2), "mask": torch.full((2,), 4.0)}
    spaces = [
        ParameterSpace.of_state_dict(current, buffer_policy={"mask": policy})
        for policy in ("average", "latest", "leave")
    ]
    assert spaces[0] == spaces[1] == spaces[2]
    assert len({hash(space) for space in spaces}) == 1
    assert all(space.spec() == spaces[0].spec() for space in spaces)
    for _ in range(2):
        found = [aggregate(rule, None, current, current, update, space=space)[0]["mask"][0].item() for space in spaces]
        assert found == [2.0, 4.0, 0.0]


def test_the_space_of_a_module_leaves_frozen_parameters_unless_a_pattern_matches():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].requires_grad_(False)
    current = {name: x.clone() for name, x in net.state_dict().items()}
    update = {name: x + 1 for name, x in current.items()}
    new, _, _ = aggregate(FedAsync(0.5), None, current, current, update, space=ParameterSpace.of(net))
    assert torch.equal(new["0.weight"], current["0.weight"])
    assert torch.allclose(new["1.weight"], current["1.weight"] + 0.5)
    space = ParameterSpace.of(net, buffer_policy={"0.weight": "latest"})
    new, _, _ = aggregate(FedAsync(0.5), None, current, current, update, space=space)
    assert torch.equal(new["0.weight"], update["0.weight"])
    assert torch.equal(new["0.bias"], current["0.bias"])


def test_an_equal_rule_computes_the_step_itself():
    class Counting(FedAsync):
        def step(self, space, state, update, *, out=None):
            seen.append(self)
            return super().step(space, state, update, out=out)

    seen, rules = [], [Counting(0.5), Counting(0.5)]
    for rule in rules:
        aggregate(rule, None, W, W, W)
    assert [a is b for a, b in zip(seen, rules, strict=True)] == [True, True]


@pytest.mark.usefixtures("as_shipped")
def test_staleness_is_a_shortcut_that_agrees_with_the_information():
    rule = ASGD(0.5, decay=1.0)
    current, base, update = ({"w": torch.tensor([x, 1.0])} for x in (0.0, 1.0, 2.0))
    late = aggregate(rule, None, current, base, update, staleness=3)
    assert late[2] == aggregate(rule, None, current, base, update, info=UpdateInfo(staleness=3))[2]
    assert late[2] == aggregate(rule, None, current, base, update, info=UpdateInfo("a", 3), staleness=3)[2]
    with pytest.raises(ArgumentError, match="^staleness: expected 1, as in `info`, or no value, got 3$"):
        aggregate(rule, None, current, base, update, info=UpdateInfo(staleness=1), staleness=3)
    with pytest.raises(ArgumentError, match="^info: expected an UpdateInfo, got 'a'$"):
        aggregate(rule, None, current, base, update, info="a")
    with pytest.raises(ArgumentError, match="^space: expected a ParameterSpace, got Sphere$"):
        aggregate(rule, None, current, base, update, space=Sphere(2))
    with pytest.raises(ArgumentError, match=r"^current: w: expected shape \(3,\), got \(2,\)$"):
        aggregate(rule, None, current, base, update, space=ParameterSpace.of_state_dict({"w": torch.ones(3)}))


def test_lists_of_arrays_have_spaces_too():
    models = [[np.array([1.0, 0.0]), np.full(2, x)] for x in (0.0, 1.0, 2.0)]
    space = ParameterSpace.of_state_dict(models[0], {"0": Sphere(2)}, buffer_policy={"1": "leave"})
    new, _, _ = aggregate(FedAsync(0.5), None, *models, space=space)
    assert [x.tolist() for x in new] == [[1.0, 0.0], [0.0, 0.0]]
