"""Tests of adapters in `aggregate`, `AsyncAggregator` and servers.

The reference is dense arithmetic on the matrices that the adapters represent.
"""

import warnings

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg import AsyncAggregator, ParameterSpace, Server, UpdateInfo, aggregate, wire
from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.federated import rules
from manifoldagg.manifolds import LowRank
from tests.support import draw, rotation, seeds

EPS = 2.0**-52
A, B, BIAS, HEAD = "q.lora_A.weight", "q.lora_B.weight", "q.lora_B.bias", "head.weight"
E = "e.lora_embedding_A", "e.lora_embedding_B"
RULES = [
    *(rules.FedAsync(0.4), rules.ASGD(0.7), rules.FedAvg(1), rules.FedAvg(3), rules.FedBuff(2), rules.FedOrtho(0.5)),
    *(rules.AsyncBezier(threshold=1.0, rate=0.5), rules.Momentum(rules.ASGD(0.5), 0.5), rules.FedGS(0.5)),
]


def adapter(seed, rank, dtype=torch.float64, m=6, n=7):
    state = {
        A: draw(seed, rank, n),
        B: draw(seed + 1, m, rank),
        BIAS: draw(seed + 2, m),
        HEAD: draw(seed + 3, 2, 3),
        E[0]: draw(seed + 4, rank, 5),
        E[1]: draw(seed + 5, 4, rank),
    }
    return {name: x.to(dtype) for name, x in state.items()}


def dense(state, scaling=1.0):
    """Return the change of the weights that a state dict of adapters represents."""
    found = {"q": scaling * state[B] @ state[A], BIAS: scaling * state[BIAS], HEAD: state[HEAD]}
    return found | {"e": scaling * state[E[1]] @ state[E[0]]}


def best(state, rank):
    """Return the nearest matrices of the given rank."""

    def cut(x):
        u, values, v = scipy.linalg.svd(x.numpy(), full_matrices=False)
        return torch.from_numpy((u[:, :rank] * values[:rank]) @ v[:rank])

    return state | {name: cut(state[name]) for name in ("q", "e")}


def apart(one, other):
    return max(float((one[name] - other[name]).norm() / (1 + other[name].norm())) for name in one)


def turned(state, seed, condition=10.0):
    """Return the same adapter in another gauge."""
    found = dict(state)
    for a, b in ((A, B), E):
        rank = state[a].shape[0]
        values = torch.logspace(0, -1, rank, base=condition, dtype=torch.float64)
        left, right = rotation(seed, rank), rotation(seed + 1, rank)
        found |= {a: right.mT / values @ left.mT @ state[a], b: state[b] @ (left * values @ right)}
    return found


def lora(model, scaling=1.0, manifolds=None, adapters=True):
    """Return the space of a model in which each pair of factors represents one matrix."""
    return ParameterSpace.of_state_dict(model, manifolds, adapters=adapters, scaling=scaling)


@pytest.mark.parametrize("rule", RULES, ids=str)
@settings(max_examples=5)
@given(seeds, st.integers(1, 5), st.floats(0.2, 5), st.floats(0.2, 5))
def test_rules_equal_the_dense_step_if_the_rank_suffices(rule, seed, rank, ours, theirs):
    """The factors of the server represent any matrix. The clients have another rank and scaling."""
    current, plain = adapter(seed, 6), None
    space = ParameterSpace.of_state_dict(current, adapters=True, scaling=ours)
    full = dense(current, ours)
    state = None
    bases = [current, current]
    plains = [full, full]
    for i in range(4):
        update = adapter(seed + 10 * i, rank)
        options = {"staleness": i % 2, "weight": 0.5, "samples": 3 + i}
        info = UpdateInfo(**options, scaling=theirs)
        new, state, numbers = aggregate(rule, state, current, bases[-1 - i % 2], update, info=info, space=space)
        info = UpdateInfo(**options)
        made, plain, told = aggregate(rule, plain, full, plains[-1 - i % 2], dense(update, theirs), info=info)
        assert apart(dense(new, ours), made) <= 1e3 * EPS * max(1, ours, theirs)
        for name in told:
            assert numbers[name] == pytest.approx(told[name], rel=1e-9, abs=1e-9, nan_ok=True)
        current, full = new, made
        bases.append(current)
        plains.append(full)


@given(seeds, st.integers(1, 3), st.integers(1, 4))
def test_step_beyond_the_rank_is_the_nearest_matrix_of_the_rank(seed, rank, other):
    other = min(other, rank)
    current, base, update = (adapter(seed + 10 * i, r) for i, r in enumerate((rank, rank, other)))
    new, _, _ = aggregate(rules.ASGD(0.5), None, current, base, update, space=lora(current, scaling=2.0))
    made, _, _ = aggregate(rules.ASGD(0.5), None, *(dense(x, 2.0) for x in (current, base, update)))
    assert apart(dense(new, 2.0), best(made, rank)) <= 1e7 * EPS
    assert new[A].shape == current[A].shape
    assert (new[B].mT @ new[B] - new[A] @ new[A].mT).abs().max() <= 1e4 * EPS * (1 + made["q"].norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=5)
@given(seed=seeds, scaling=st.floats(0.1, 10))
def test_learning_continues_after_updates_cancel(dtype, seed, scaling):
    """After repeated rounding in any gauge, B is 0 and A is not, because rounding errors are not directions."""
    plus = {name: x for name, x in adapter(seed, 3, dtype).items() if name in (A, B)}
    less, still = plus | {B: -plus[B]}, plus | {B: 0 * plus[B]}
    other = {name: x.to(dtype) for name, x in turned(adapter(seed, 3), seed).items() if name in (A, B)}
    options = {"space": lora(plus, scaling=scaling)}
    one, state, _ = aggregate(rules.FedAvg(2), None, still, still, plus, **options)
    found = [
        aggregate(rules.FedAvg(2), state, one, still, less, **options)[0],
        aggregate(rules.FedAsync(0.5), None, plus, plus, less, **options)[0],
        aggregate(rules.FedAsync(0.5), None, other, other, less, **options)[0],
        aggregate(rules.FedAsync(1.0), None, still, still, {A: 0 * plus[A], B: 0 * plus[B]}, **options)[0],
    ]
    for model in found:
        assert not model[B].any()
        assert torch.linalg.matrix_rank(model[A]) == 3


def test_small_learned_direction_survives_next_to_large_model():
    """In float32, a direction of size 1e-5 next to a model of size 1e3 is accurate.

    The factors represent the two separately.
    """
    space = ParameterSpace.of_state_dict({A: torch.ones(2, 7), B: torch.ones(6, 2)}, adapters=True)
    large = {A: torch.tensor([[1.0, 0, 0, 0, 0, 0, 0]] * 2), B: torch.zeros(6, 2)}
    large[B][0, 0] = 1e3
    client = {A: large[A].clone(), B: large[B].clone()}
    client[A][1], client[B][1, 1] = torch.tensor([0, 1.0, 0, 0, 0, 0, 0]), 1e-5
    server = Server.of(large, rules.ASGD(0.5), adapters=True)
    assert server.receive_model(server.dispatch("a"), client, samples=1).accepted
    leaf = space.layout.views(server.model)["q.lora.weight"].double()
    assert (leaf[:6] @ leaf[6:].mT)[1, 1] == pytest.approx(0.5e-5, rel=1e-3)


def test_state_rank_of_adapters_can_be_set():
    models = [{name: x for name, x in adapter(10 * i, 2).items() if name in (A, B)} for i in range(3)]
    space = {"q.lora.weight": LowRank(6, 7, 2, state_rank=7)}
    new, _, _ = aggregate(rules.FedBuff(1), None, *models, space=lora(models[0], manifolds=space))
    assert new[A].shape == (2, 7)


@pytest.mark.parametrize("rule", [rules.FedAvg(10), rules.FedAsync(1.0)], ids=str)
def test_average_of_one_adapter_in_ten_gauges_is_the_adapter(rule):
    one = adapter(0, 3)
    current, state = adapter(7, 3), None
    for i in range(10):
        current, state, _ = aggregate(rule, state, current, current, turned(one, i), space=lora(current))
    assert apart(dense(current), dense(one)) <= 1e4 * EPS
    # Whoever averages the factors is told.
    with pytest.warns(
        UserWarning,
        match="current: q.lora_A.weight: the factors of adapters would be averaged separately; pass space=Param",
    ):
        aggregate(rules.FedAsync(0.5), None, one, one, turned(one, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apart_ = aggregate(
            rules.FedAsync(0.5), None, one, one, turned(one, 1), space=ParameterSpace.of_state_dict(one)
        )[0]
    assert apart(dense(apart_), dense(one)) > 0.05


def test_result_has_the_type_of_the_input_and_inputs_are_unchanged():
    arrays = [{name: x.float().numpy() for name, x in adapter(10 * i, 3).items()} for i in range(3)]
    before = [{name: x.copy() for name, x in array.items()} for array in arrays]
    new, _, _ = aggregate(rules.FedAsync(0.5), None, *arrays, space=lora(arrays[0]))
    assert [(name, type(x), x.dtype, x.shape) for name, x in new.items()] == [
        (name, np.ndarray, np.float32, x.shape) for name, x in arrays[0].items()
    ]
    assert all(
        np.array_equal(x, old[name]) for array, old in zip(arrays, before, strict=True) for name, x in array.items()
    )


def test_out_is_written_only_if_the_step_succeeds():
    current, base, update = (adapter(10 * i, 3) for i in range(3))
    space = lora(current)
    expected, _, _ = aggregate(rules.FedAsync(0.5), None, current, base, update, space=space)
    out = {name: x.clone() for name, x in current.items()}
    places = {name: x.data_ptr() for name, x in out.items()}
    new, _, _ = aggregate(rules.FedAsync(0.5), None, out, base, update, space=space, out=out)
    assert new is out
    assert all(torch.equal(out[name], expected[name]) and out[name].data_ptr() == places[name] for name in out)
    before = {name: x.clone() for name, x in out.items()}
    for wrong in (update | {A: update[A] / 0}, {name: x for name, x in update.items() if name != B}):
        with pytest.raises(ArgumentError, match="^update: "):
            aggregate(rules.FedAsync(0.5), None, out, base, wrong, space=space, out=out)
    with pytest.raises(ArgumentError, match="^out: "):
        aggregate(rules.FedAsync(0.5), None, current, base, update, space=space, out=adapter(0, 2))
    assert all(torch.equal(out[name], before[name]) for name in out)


def test_buffering_rule_returns_the_current_adapter():
    current, base, update = (adapter(10 * i, 3) for i in range(3))
    new, _, _ = aggregate(rules.FedBuff(2), None, current, base, update, space=lora(current))
    assert all(torch.equal(new[name], x) and new[name] is not x for name, x in current.items())


def test_curve_of_adapters_is_supported():
    current, *points = (adapter(10 * i, 3) for i in range(4))
    new, _, numbers = aggregate(rules.AsyncBezier(rate=0.5), None, current, current, points, space=lora(current))
    assert numbers["norm"] > 0
    assert new[A].shape == current[A].shape


def test_difference_of_adapters_is_rejected():
    current, base = adapter(0, 3), adapter(10, 3)
    space = lora(current)
    near = {name: x + 1e-4 * draw(5, *x.shape) for name, x in base.items()}
    less = {name: near[name] - x for name, x in base.items()}
    with pytest.raises(ArgumentError, match="difference: expected False, as q.lora.weight is a point of LowRank"):
        aggregate(rules.FedAsync(0.5), None, current, base, less, info=UpdateInfo(difference=True), space=space)
    with pytest.warns(UserWarning, match="looks like a difference of models"):
        aggregate(rules.FedAsync(0.5), None, current, base, less, space=space)
    # In a gauge of its own a model is none, however short its factors are.
    far = base | {A: 1e3 * base[A], B: 1e-3 * base[B], E[0]: 1e-3 * base[E[0]], E[1]: 1e3 * base[E[1]]}
    aggregate(rules.FedAsync(0.5), None, current, far, near | {BIAS: near[BIAS]}, space=space)


GOOD = lora(adapter(0, 3))


@pytest.mark.filterwarnings("ignore:.*factors of adapters")
@pytest.mark.parametrize(
    ("place", "change", "options", "words"),
    [
        (0, {A: None}, {}, f"{B}: expected pairs"),
        (0, {"x.hada_w1_a": draw(0, 2)}, {}, "x.hada_w1_a: .* another kind"),
        (0, {A: draw(0, 4, 7)}, {}, rf"{B}: expected shape \(any, 4\)"),
        (0, {A: None}, {"space": GOOD}, f"current: missing: {A}"),
        (0, {"x.hada_w1_a": draw(0, 2)}, {"space": GOOD}, "current: extra: x.hada_w1_a"),
        (0, {A: draw(0, 4, 7)}, {"space": GOOD}, rf"current: {B}: expected shape \(any, 4\)"),
        (0, {A: draw(0, 2, 7), B: draw(0, 6, 2)}, {"space": GOOD}, rf"current: {A}: expected shape \(3, 7\)"),
        (1, {B: None}, {}, f"base: missing: {B}"),
        (1, {A: draw(0, 3, 8)}, {}, "base: .* up to the rank"),
        (2, {HEAD: draw(0, 2, 2)}, {}, f"update: {HEAD}: expected shape"),
        (2, {B: draw(0, 6, 3) / 0}, {}, f"update: {B}: expected finite"),
        (
            2,
            {},
            {"info": UpdateInfo(scaling={"lora_alpha": 4, "r": 2})},
            "update: scaling: expected the config of this adapter, got rank 2 for q",
        ),
        (2, {}, {"scaling": {"lora_alpha": 4, "r": 2}}, "scaling: expected the config of this adapter, got rank 2"),
        (2, {}, {"scaling": 0.0}, "scaling: expected a finite number > 0"),
        (2, {}, {"adapters": False, "scaling": 2.0}, "scaling: expected 1 without adapters=True, got 2.0"),
        (
            2,
            {},
            {"space": None, "info": UpdateInfo(scaling=2.0)},
            r"scaling: expected None, as the space has no adapters, got 2.0; pass space=ParameterSpace\.of_state_dict",
        ),
    ],
)
def test_invalid_adapters_and_options_are_rejected(place, change, options, words):
    models = [adapter(10 * i, 3) for i in range(3)]
    models[place] = {name: x for name, x in (models[place] | change).items() if x is not None}
    known = {name: value for name, value in options.items() if name in ("info", "space")}

    def call():
        if "space" not in known:
            known["space"] = lora(models[0], **{name: x for name, x in options.items() if name not in known})
        aggregate(rules.FedAsync(0.5), None, *models, **known)

    with pytest.raises(ArgumentError, match=f"^{words}"):
        call()


def test_list_of_arrays_is_rejected_for_adapters():
    with pytest.raises(ArgumentError, match="^expected pairs such as"):
        aggregate(rules.FedAsync(0.5), None, *[[torch.ones(2, 2)]] * 3, space=lora([torch.ones(2, 2)]))


def test_aggregator_and_server_equal_aggregate():
    rule = rules.FedOrtho(0.5)
    start = adapter(0, 3)
    server = Server.of(start, rule, adapters=True, scaling=2.0, weights="uniform")
    versions = AsyncAggregator(rule, start, weights="uniform", space=lora(start, scaling=2.0))
    assert apart(dense(versions.model), dense(start)) == 0
    tickets = {}
    for name in "ab":
        tickets[name] = server.dispatch(name)
        versions.checkout(name)
    for i, name in enumerate("aba"):
        update = adapter(20 + 10 * i, 2)
        receipt = server.receive_model(tickets[name], update, samples=5, scaling=0.5)
        assert receipt.accepted, receipt.reason
        numbers = versions.submit(name, update, samples=5, scaling=0.5)
        assert (receipt.staleness, receipt.weight) == (numbers["staleness"], numbers["weight"])
        assert receipt.norm == pytest.approx(numbers["norm"], rel=1e-9)
        assert apart(dense(server.state_dict()), dense(versions.model)) <= 1e5 * EPS
        tickets[name] = server.dispatch(name)
        sent = versions.checkout(name)
        assert apart(dense(tickets[name].state_dict()), dense(sent)) <= 1e5 * EPS
    again = AsyncAggregator(rule, start, weights="uniform", space=lora(start, scaling=2.0))
    again.load(versions.state())
    assert apart(dense(again.model), dense(versions.model)) == 0
    assert again.in_flight == versions.in_flight


def test_server_of_adapters_resumes_and_sends_its_spec(tmp_path):
    rule = rules.FedBuff(2)
    server = Server.of(adapter(0, 3), rule, adapters=True, scaling=2.0)
    tickets = [server.dispatch(i) for i in range(2)]
    assert server.receive_model(tickets[0], adapter(10, 2), samples=4).accepted
    server.save(tmp_path / "server")
    other = Server.resume(tmp_path / "server", ParameterSpace.of_spec(server.spec()), rule)
    for each in (server, other):
        # What came over the wire from a client that knows the spec and nothing else.
        space = ParameterSpace.of_spec(each.spec())
        ticket = wire.unpack(wire.pack(tickets[1], spec=each.spec()), spec=space)
        assert each.receive_model(ticket.id, adapter(20, 1), samples=8).accepted
    assert torch.equal(server.model, other.model)
    with pytest.raises(CheckpointError, match="space: adapters: .* scaling: was 2.0, got 1.0"):
        Server.resume(tmp_path / "server", Server.of(adapter(0, 3), rule, adapters=True).space, rule)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unchanged_model_in_narrow_dtype_is_zero_update(dtype):
    """A client that returns the received model has changed nothing, although the model was rounded when it was sent."""
    server = Server.of(adapter(0, 3, dtype), rules.FedAsync(0.5), adapters=True)
    ticket = server.dispatch("a")
    assert server.receive_model(ticket, adapter(10, 3, dtype), samples=4).accepted
    before = server.model
    ticket = server.dispatch("b")
    sent = ticket.state_dict()
    assert {x.dtype for x in sent.values()} == {dtype}
    rounded = (server.space.point(sent) - before).norm()
    assert server.receive_model(ticket, sent, samples=4).accepted
    (one, two) = (ParameterSpace.of_spec(server.spec()).layout.views(x) for x in (before, server.model))

    def product(x):
        return x["q.lora.weight"][:6].double() @ x["q.lora.weight"][6:].double().mT

    assert (product(one) - product(two)).norm() <= 64 * 2.0**-24 * product(one).norm()
    assert (one[BIAS] - two[BIAS]).norm() <= 4 * 2.0**-24 * one[BIAS].norm()
    assert rounded > 2.0**-14 * before.norm()


@pytest.mark.usefixtures("as_shipped")
def test_module_in_place_of_adapter_state_dict_is_rejected():
    with pytest.raises(ArgumentError, match="adapters: expected False for a module, got True; pass the state dict"):
        Server.of(torch.nn.Linear(2, 2), rules.FedAsync(0.5), adapters=True)
    with pytest.warns(UserWarning, match="model: q.lora_A.weight: the factors of adapters"):
        Server.of(adapter(0, 3), rules.FedAsync(0.5))
    with pytest.warns(UserWarning, match="model: q.lora_A.weight: the factors of adapters"):
        AsyncAggregator(rules.FedAsync(0.5), adapter(0, 3))
