"""Tests of `Outer`, which wraps a rule as a torch optimizer: equal to `aggregate`, with torch's conventions."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from manifoldagg.corrections import OrthoDC, OrthoDyn
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import UpdateInfo, aggregate
from manifoldagg.federated.rules import (
    ASGD,
    DCASGD,
    AsyncBezier,
    AsyncCorrected,
    AsyncFedED,
    DelayedNesterov,
    Dominance,
    FedAdam,
    FedAsync,
    FedAvg,
    FedBuff,
    FedOrtho,
    HeLoCo,
    Krum,
    Momentum,
    RadialDirectional,
)
from manifoldagg.kernels.backends import cpu
from manifoldagg.optim import Outer
from tests.support import draw, relative, seeds

SHAPES = [(7, 5), (3,), (), (0,), (2, 2, 2)]
RULES = {
    "ASGD": ASGD(0.7),
    "a dominant worker": ASGD(0.7, dominance=Dominance(2)),
    "penalised": ASGD(0.7, decay=0.5),
    "FedAsync": FedAsync(0.5),
    "FedOrtho": FedOrtho(0.7),
    "FedBuff": FedBuff(2),
    "Krum": Krum(3, 0),
    "DCASGD": DCASGD(0.5),
    "AsyncBezier": AsyncBezier(0.5, threshold="auto"),
    "AsyncFedED": AsyncFedED(0.5),
    "OrthoDyn": AsyncCorrected(0.5, correction=OrthoDyn()),
    "by tensor": AsyncCorrected(0.5, correction=OrthoDC(0.0, "tensor")),
    "one after another": AsyncCorrected(0.5, correction=OrthoDC(0.5) >> OrthoDyn(granularity="tensor")),
    "Momentum": Momentum(FedOrtho(0.7), 0.5),
    "DiLoCo": Momentum(FedAvg(2, 0.7), nesterov=True),
    "robust DiLoCo": Momentum(Krum(3, 0), nesterov=True),
    "HeLoCo": HeLoCo(0.5),
    "DelayedNesterov": DelayedNesterov(2, activation=0.3),
    "RadialDirectional": RadialDirectional(2),
    "Decoupled DiLoCo": Momentum(RadialDirectional(2), nesterov=True),
}


def parameters(seed=0, shapes=SHAPES, dtype=torch.float64):
    return [nn.Parameter(_full(seed + i, shape, dtype)) for i, shape in enumerate(shapes)]


def _full(seed, shape, dtype=torch.float64):
    """Draw a normal tensor of any shape, including the empty shape."""
    return draw(seed, max(1, torch.Size(shape).numel()), dtype=dtype)[: torch.Size(shape).numel()].view(shape)


def pseudo(seed, params):
    """Set a pseudo-gradient on each parameter."""
    for i, p in enumerate(params):
        p.grad = _full(seed + 31 * i, p.shape, p.dtype)


def run(outer, params, seed, steps, **known):
    for i in range(steps):
        pseudo(seed + 977 * i, params)
        outer.step(**known)
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=2)
@given(seeds)
def test_steps_equal_those_of_aggregate(name, seed):
    """Two workers alternate, with staleness 0 to 2 and the same base models."""
    rule = RULES[name]
    params = parameters(seed)
    outer = Outer(params, rule)
    model, state = {str(i): p.detach().clone() for i, p in enumerate(params)}, None
    versions, mine = [model], [[p.detach().clone() for p in params]]
    for i in range(6):
        place = max(0, i - i % 3)
        base = versions[place]
        pseudo(seed + i, params)
        update = {key: b - p.grad for (key, b), p in zip(base.items(), params, strict=True)}
        known = {"staleness": i % 3, "weight": 0.5 + (i % 2) / 2}
        model, state, _ = aggregate(rule, state, model, base, update, info=UpdateInfo(f"w{i % 2}", **known))
        outer.step(worker=f"w{i % 2}", base=mine[place], **known)
        versions.append(model)
        mine.append([p.detach().clone() for p in params])
        # base - (base - gradient) equals the gradient up to one rounding per step.
        ours, theirs = (torch.cat([x.detach().flatten() for x in xs]) for xs in (params, model.values()))
        assert relative(ours, theirs) <= 1e-13


@given(seeds, st.sampled_from([{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}]))
def test_steps_equal_those_of_torch_sgd(seed, options):
    theirs = parameters(seed, dtype=torch.float32)
    rule = ASGD(0.75)
    if options:
        rule = Momentum(rule, 0.9, nesterov="nesterov" in options)
    mine = copy.deepcopy(theirs)
    outer = Outer(mine, rule)
    peer = torch.optim.SGD(theirs, lr=0.75, **options)
    for i in range(4):
        pseudo(seed + i, mine)
        pseudo(seed + i, theirs)
        outer.step()
        peer.step()
        for a, b in zip(mine, theirs, strict=True):
            # torch rounds three times per step and `Outer` once. The values are at most 8.
            assert (a - b).abs().max().item() <= (i + 1) * 32 * 2**-24 if a.numel() else True


def test_a_linear_step_is_exact():
    """All numbers are exact in float32, so the step equals SGD with rate 0.75 times the `lr` of the group bitwise."""
    p = nn.Parameter(torch.arange(8.0))
    outer = Outer([{"params": [p], "lr": 0.5}], ASGD(0.75))
    p.grad = torch.arange(8.0).flip(0)
    outer.step()
    assert torch.equal(p.detach(), torch.arange(8.0) - 0.375 * torch.arange(8.0).flip(0))


@pytest.mark.parametrize("name", RULES)
def test_a_resumed_run_is_bitwise_equal(name, monkeypatch):
    params = parameters()
    outer = Outer(params, RULES[name])
    whole = run(outer, params, 3, 6)
    monkeypatch.setattr(cpu, "combine_many", lambda *_: None)
    others = parameters()
    first = Outer(others, RULES[name])
    run(first, others, 3, 3)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = Outer(others, RULES[name])
    second.load_state_dict(torch.load(file, weights_only=True))
    for i in range(3, 6):
        pseudo(3 + 977 * i, others)
        second.step()
    assert all(map(torch.equal, whole, others))


@pytest.mark.parametrize("name", RULES)
def test_a_state_with_reordered_entries_can_be_loaded(name):
    params = parameters()
    outer = Outer(params, RULES[name])
    late = {"staleness": 1, "base": parameters(9)}
    run(outer, params, 3, 3, **late)
    saved = copy.deepcopy(outer.state_dict())
    saved["state"] = {key: dict(reversed(kept.items())) for key, kept in saved["state"].items()}
    others = [p.detach().clone().requires_grad_() for p in params]
    second = Outer(others, RULES[name])
    second.load_state_dict(saved)
    run(outer, params, 5, 3, **late)
    run(second, others, 5, 3, **late)
    assert all(map(torch.equal, params, others))
    for p, other in zip(params, others, strict=True):
        assert same(outer.state[p], second.state[other])


def test_a_float32_state_of_bfloat16_parameters_stays_float32_in_a_state_dict():
    params = parameters(dtype=torch.bfloat16)
    outer = Outer(params, HeLoCo())
    run(outer, params, 1, 2)
    assert {p.dtype for p in params} == {torch.bfloat16}
    other = Outer(params, HeLoCo())
    other.load_state_dict(outer.state_dict())
    for p in params:
        assert other.state[p]["momentum"].dtype == torch.float32
        assert torch.equal(other.state[p]["momentum"], outer.state[p]["momentum"])
        assert other.state[p]["momentum"].data_ptr() != outer.state[p]["momentum"].data_ptr() or p.numel() == 0


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", ["Momentum", "RadialDirectional", "OrthoDyn", "DCASGD"])
def test_the_state_is_restored_from_a_distributed_checkpoint(name, flat):
    def fresh():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        return model, Outer(model.parameters(), RULES[name])

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, outer = fresh()
    run(outer, [*model.parameters()], 1, 3)
    other, second = fresh()
    other.load_state_dict(model.state_dict())
    # For a new optimizer, torch makes a step with zero gradients first, to create the state that it loads into.
    saved = copy.deepcopy(get_optimizer_state_dict(model, outer, options=options))
    set_optimizer_state_dict(other, second, saved, options=options)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert outer.state[a].keys() == second.state[b].keys()
    run(outer, [*model.parameters()], 2, 2)
    run(second, [*other.parameters()], 2, 2)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_copies_and_pickles_continue_with_equal_steps():
    params = parameters()
    outer = Outer(params, Momentum(ASGD(0.5)))
    run(outer, params, 1, 2)
    copied, moved = copy.deepcopy((params, outer))[1], pickle.loads(pickle.dumps(outer))
    expected = run(outer, params, 2, 2)
    for other in (copied, moved):
        theirs = other.param_groups[0]["params"]
        assert all(map(torch.equal, expected, run(other, theirs, 2, 2)))
        assert other.rule == outer.rule


def test_groups_have_their_own_rates_and_cosines_and_support_schedulers():
    params = parameters()
    outer = Outer([{"params": params[:2], "lr": 0.5}], FedOrtho(1.0))
    outer.add_param_group({"params": params[2:]})
    scheduler = torch.optim.lr_scheduler.StepLR(outer, 1, gamma=0.5)
    starts = [p.detach().clone() for p in params]
    base = [p.detach() - 1 for p in params]
    for rate in (1.0, 0.5):
        pseudo(5, params)
        before = [p.detach().clone() for p in params]
        outer.step(staleness=2, base=base)
        for group, factor in ((slice(0, 2), 0.5), (slice(2, None), 1.0)):
            kinds = [before[group], base[group], [p.grad for p in params[group]]]
            now, then, grads = ({str(i): x for i, x in enumerate(xs)} for xs in kinds)
            points = {key: then[key] - grads[key] for key in then}
            new, _, _ = aggregate(FedOrtho(1.0), None, now, then, points)
            for p, old, x in zip(params[group], before[group], new.values(), strict=True):
                assert relative(p.detach() - old + 1, factor * rate * (x - old) + 1) <= 1e-13
        scheduler.step()
    assert not torch.equal(starts[0], params[0])


def test_hooks_closures_and_zero_grad_follow_torch_conventions():
    params = parameters()
    outer = Outer(params, ASGD(0.5))
    seen = []
    outer.register_step_pre_hook(lambda *_: seen.append("before"))
    outer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure():
        outer.zero_grad()
        loss = sum(p.square().sum() for p in params)
        loss.backward()
        return loss

    before = [p.detach().clone() for p in params]
    assert outer.step(closure) == sum(p.square().sum() for p in before)
    assert seen == ["before", "after"]
    for p, old in zip(params, before, strict=True):
        assert torch.equal(p.detach(), torch.zeros_like(old))
    outer.zero_grad()
    assert [p.grad for p in params] == [None] * len(params)
    assert (outer.step(), len(outer.state)) == (None, len(params))


def test_parameters_without_a_gradient_are_skipped():
    """The fragments of streaming DiLoCo alternate in this way. Each parameter has its own step count."""
    params = parameters(shapes=[(4,), (4,)])
    others = copy.deepcopy(params)
    together = Outer(params, DelayedNesterov(2))
    apart = [Outer([p], DelayedNesterov(2)) for p in others]
    for i in range(6):
        for xs in (params, others):
            pseudo(i, xs)
        params[1 - i % 2].grad = None
        together.step()
        apart[i % 2].step()
    assert all(map(torch.equal, params, others))


def test_a_step_keeps_the_gradients_and_bumps_the_versions_of_parameters():
    params = parameters()
    pseudo(1, params)
    grads = [p.grad.clone() for p in params]
    product = (params[0] * params[0]).sum()
    Outer(params, Momentum(ASGD(0.5))).step()
    assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_strides_and_dtypes_may_differ_between_parameters():
    even = [nn.Parameter(_full(i, (2, 3, 4, 5))) for i in range(2)]
    odd = [nn.Parameter(even[0].detach().to(memory_format=torch.channels_last)), nn.Parameter(even[1].detach().clone())]
    for xs in (even, odd):
        pseudo(7, xs)
    odd[1].grad = odd[1].grad.transpose(0, 1).contiguous().transpose(0, 1)
    for xs in (even, odd):
        outer = Outer(xs, HeLoCo())
        outer.step()
        outer.step()
    assert all(map(torch.equal, even, odd))
    mixed = [nn.Parameter(_full(1, (5,), torch.float32)), nn.Parameter(_full(2, (5,), torch.bfloat16))]
    run(Outer(mixed, HeLoCo()), mixed, 1, 3)
    assert [p.dtype for p in mixed] == [torch.float32, torch.bfloat16]


def snapshot(outer, params):
    return copy.deepcopy(([p.detach() for p in params], outer.state_dict()["state"]))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return all(map(same, a, b)) if isinstance(a, list | tuple) else a == b


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("name", ["ASGD", "HeLoCo", "FedBuff", "DiLoCo"])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda p: p.grad.view(-1)[1].fill_(float("nan")), "params: parameter 4: expected a finite gradient"),
        (lambda p: p.grad.fill_(float("inf")), "params: parameter 4: expected a finite gradient"),
        (lambda p: setattr(p, "grad", p.grad.to_sparse()), "params: parameter 4: expected a dense floating gradient"),
    ],
    ids=["nan", "inf", "sparse"],
)
def test_invalid_input_changes_nothing(name, spoil, words):
    params = parameters(dtype=torch.float32)
    # The invalid gradient is that of the last parameter, so all others are checked before it.
    outer = Outer([{"params": params[:1]}, {"params": params}][1:], RULES[name])
    run(outer, params, 1, 3)
    before = snapshot(outer, params)
    pseudo(9, params)
    spoil(params[-1])
    with pytest.raises(ArgumentError, match=words):
        outer.step()
    assert same(before, snapshot(outer, params))


@pytest.mark.usefixtures("as_shipped")
def test_no_parameter_changes_if_one_group_is_rejected():
    params = parameters()
    outer = Outer([{"params": params[:2]}, {"params": params[2:]}], Momentum(ASGD(0.5)))
    run(outer, params, 1, 2)
    before = snapshot(outer, params)
    pseudo(2, params)
    params[-1].grad[0, 0, 0] = float("nan")
    with pytest.raises(ArgumentError, match="params: parameter 2: expected a finite gradient"):
        outer.step()
    assert same(before, snapshot(outer, params))


def test_a_step_that_overflows_is_rejected():
    p = nn.Parameter(torch.full((3,), 3e38))
    outer = Outer([p], ASGD(1.0), lr=4.0)
    p.grad = torch.full((3,), -1e38)
    with pytest.raises(ArgumentError, match="the new model would not be finite"):
        outer.step()
    assert p.tolist() == [p.new_tensor(3e38).item()] * 3


def named():
    return [("head", nn.Parameter(torch.ones(2))), ("odd", nn.Parameter(torch.ones(2, dtype=torch.complex64)))]


def like(value=0, dtype=torch.float64):
    return [torch.full(shape, value, dtype=dtype) for shape in SHAPES]


def late(rule, **known):
    params = parameters()
    pseudo(1, params)
    Outer(params, rule).step(**known)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Outer(parameters(), ASGD), "rule: expected an instance"),
        (lambda: Outer(parameters(), FedAdam(2)), "rule: expected one that accepts tensor lists"),
        (lambda: Outer(parameters(), AsyncBezier(normalise=True)), "rule: expected one that accepts tensor lists"),
        (lambda: Outer(parameters(), ASGD(), lr=-1.0), "lr: expected"),
        (lambda: Outer(named(), ASGD()), "params: odd: expected a dense floating tensor, got torch.complex64"),
        (lambda: Outer([], ASGD()), "empty parameter list"),
        (lambda: late(ASGD(), staleness=-1), "staleness: expected"),
        (lambda: late(ASGD(), weight=0.0), "weight: expected"),
        (lambda: late(ASGD(), worker="a.b"), "worker: expected an int, or a string"),
        (
            lambda: late(FedOrtho(), staleness=1),
            "base: expected the start model of the worker, which FedOrtho requires",
        ),
        (lambda: late(Momentum(FedOrtho()), staleness=1), "base: expected the start model of the worker"),
        (lambda: late(ASGD(decay=1.0), staleness=1), "base: expected the start model of the worker"),
        (lambda: late(ASGD(), base=[torch.ones(2)]), "base: expected 5 tensors"),
        (lambda: late(ASGD(), base=3), "base: expected a sequence of tensors, got int"),
        (lambda: late(ASGD(), base=["x"] * 5), r"base\[0\]: expected a dense floating tensor, got 'x'"),
        (lambda: late(ASGD(), base=[None] * 5), r"base\[0\]: expected a dense floating tensor, got None"),
        (lambda: late(ASGD(), base=like(dtype=torch.int64)), r"base\[0\]: expected a dense .* of torch.int64"),
        (lambda: late(FedOrtho(), staleness=1, base=like(torch.nan)), r"base\[0\]: expected finite values"),
        (lambda: late(ASGD(), base=[torch.ones(2)] * 5), r"base\[0\]: expected a tensor like the parameter"),
    ],
)
def test_invalid_arguments_are_rejected(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    "rule", [ASGD(), Momentum(ASGD()), FedBuff(2), HeLoCo(), RadialDirectional(2)], ids=lambda r: str(r)[:9]
)
def test_rules_without_a_drift_need_no_base(rule):
    late(rule, staleness=3)


def test_each_worker_has_its_own_state():
    params = parameters(shapes=[(3,)])
    outer = Outer(params, AsyncFedED(0.5, warm_up=0, gain=0.5))
    for worker in (0, "far-away", 0):
        pseudo(1, params)
        outer.step(worker=worker)
    kept = {name: x for name, x in outer.state[params[0]].items() if name.startswith("worker")}
    assert set(kept) == {"worker 0.epochs", "worker far-away.epochs"}


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("dtypes", "size", "words"),
    [
        ([torch.float32], 1.5e19, "points: size of the momentum: expected a finite number <="),
        ([torch.float32, torch.float64], 3e38, "points: the rule's state would not be finite"),
    ],
    ids=["alike", "mixed"],
)
def test_a_sum_that_overflows_is_rejected_and_the_state_continues(dtypes, size, words):
    params = [nn.Parameter(torch.zeros(1, dtype=dtype)) for dtype in dtypes]
    outer = Outer(params, DelayedNesterov(4, 0.5))
    for gradient, fits in ((size, True), (size, False), (-size / 6, True), (1.0, True)):
        before = snapshot(outer, params)
        for p in params:
            p.grad = torch.full_like(p, gradient)
        if fits:
            outer.step()
        else:
            with pytest.raises(ArgumentError, match=words):
                outer.step()
            assert same(before, snapshot(outer, params))
    assert all(torch.isfinite(outer.state[p]["buffer"]).all() for p in params)


@pytest.mark.usefixtures("as_shipped")
def test_a_momentum_that_would_overflow_later_is_rejected():
    """No entry overflows float32, but later steps multiply the norm of the momentum by a number of the same size."""
    p = nn.Parameter(torch.zeros(9))
    outer = Outer([p], DelayedNesterov(4, 0.1))
    p.grad = torch.full((9,), 1e18)
    outer.step()
    before = outer.state[p]["buffer"].clone()
    p.grad = torch.full((9,), 1.5e38)
    with pytest.raises(ArgumentError, match="points: size of the momentum: expected a finite number <="):
        outer.step()
    assert torch.equal(outer.state[p]["buffer"], before)
    p.grad = torch.full((9,), 1e18)
    outer.step()
    assert torch.equal(outer.state[p]["buffer"], 2 * before)


def views():
    whole = torch.ones(4)
    return nn.Parameter(whole[:3]), nn.Parameter(whole[1:])


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("second", "words"),
    [
        (views, "params: b1: expected its own memory"),
        (lambda: [nn.Parameter(torch.ones(1).expand(3))], "params: b0: expected entries with their own memory"),
    ],
    ids=["views", "expanded"],
)
def test_parameters_of_a_later_group_that_share_memory_are_rejected(second, words):
    params = [nn.Parameter(torch.ones(3)), *second()]
    groups = [[("a", params[0])], [(f"b{i}", p) for i, p in enumerate(params[1:])]]
    outer = Outer([{"params": group} for group in groups], Momentum(ASGD(0.5)))
    before = snapshot(outer, params)
    pseudo(1, params)
    with pytest.raises(ArgumentError, match=words):
        outer.step()
    assert same(before, snapshot(outer, params))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("share", "words"),
    [
        (lambda params, outer: params[1].data, "params: parameter 0: expected gradients and bases"),
        (lambda params, outer: outer.state[params[1]]["velocity"], "params: parameter 0: expected gradients and bases"),
    ],
    ids=["model", "state"],
)
def test_a_gradient_that_aliases_another_parameter_is_rejected(share, words):
    params = parameters(shapes=[(3,), (3,)], dtype=torch.float32)
    outer = Outer([{"params": [p]} for p in reversed(params)], Momentum(ASGD(0.5)))
    run(outer, params, 1, 2)
    params[0].grad = share(params, outer)
    before = snapshot(outer, params)
    with pytest.raises(ArgumentError, match=words):
        outer.step()
    assert same(before, snapshot(outer, params))


@pytest.mark.usefixtures("as_shipped")
def test_state_shared_by_two_parameters_is_rejected():
    params = parameters(shapes=[(3,), (3,)])
    outer = Outer(params, Momentum(ASGD(0.5)))
    run(outer, params, 1, 2)
    outer.state[params[1]]["velocity"] = outer.state[params[0]]["velocity"]
    before = snapshot(outer, params)
    with pytest.raises(ArgumentError, match="params: parameter 1: expected its own memory"):
        outer.step()
    assert same(before, snapshot(outer, params))


@pytest.mark.parametrize("shape", [(5,), (3, 3)])
@pytest.mark.parametrize("name", RULES)
def test_a_gradient_may_alias_its_own_parameter(name, shape):
    """The gradient of ‖p‖²/2 is p itself. The case (3, 3) uses the transpose, whose entries are not contiguous."""
    params, others = (parameters(shapes=[shape, (2,)], dtype=torch.float32) for _ in range(2))
    shared, apart = Outer(params, RULES[name]), Outer(others, RULES[name])
    for _ in range(3):
        for p, q in zip(params, others, strict=True):
            p.grad, q.grad = p.data.mT if p.ndim > 1 else p.data, (q.data.mT if q.ndim > 1 else q.data).clone()
        shared.step()
        apart.step()
    assert all(map(torch.equal, params, others))
    assert same(snapshot(shared, params), snapshot(apart, others))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda saved: Outer(parameters(), RULES["RadialDirectional"]),
            "expected the state of .*RadialDirectional, got",
        ),
        (lambda saved: Outer(parameters(), RULES["DiLoCo"]), r"Momentum\(.*FedAvg\), got .*DelayedNesterov"),
        (lambda saved: [kept.pop("of@") for kept in saved["state"].values()], "got a state of another optimizer"),
        (lambda saved: saved["state"][2].pop("count"), "state: 2: expected the entry count of DelayedNesterov"),
        (lambda saved: saved["state"][0].update(buffer=torch.ones(2)), r"state: 0: buffer: expected shape \(7, 5\)"),
    ],
    ids=["rule", "rule of a rule", "optimiser", "part", "shape"],
)
def test_a_state_of_another_rule_is_rejected(spoil, words):
    first, params = parameters(), parameters()
    outer = Outer(first, RULES["DelayedNesterov"])
    run(outer, first, 1, 3)
    saved = outer.state_dict()
    saved["state"] = {key: dict(kept) for key, kept in saved["state"].items()}
    other = spoil(saved)
    if not isinstance(other, Outer):
        other = Outer(params, RULES["DelayedNesterov"])
    params = other.param_groups[0]["params"]
    run(other, params, 2, 1)
    before = snapshot(other, params)
    with pytest.raises(ArgumentError, match=words):
        other.load_state_dict(saved)
    assert same(before, snapshot(other, params))


def test_a_state_before_the_first_step_can_be_loaded_for_every_rule():
    params = parameters()
    for name, rule in RULES.items():
        other = Outer(params, rule)
        other.load_state_dict(Outer(params, ASGD()).state_dict())
        assert len(other.state) == 0, name
