"""Tests of `aggregate` with differences: results are bitwise equal to those of the models."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg import UpdateInfo, aggregate
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules import AsyncBezier, FedAdam, FedAsync, FedBuff, FedOrtho
from manifoldagg.manifolds import ParameterSpace, Sphere
from tests.federated.server.test_aggregate import arrays, states
from tests.support import seeds
from tests.test_tensor_file import alike

RULES = [FedAsync(0.5), FedOrtho(0.5), AsyncBezier(0.5, threshold=0.0), FedAdam(cohort=1), FedBuff(1)]


def minus(new, old):
    return {name: new[name] - old[name] for name in new}


def plus(old, difference):
    """Return the sum with one rounding. Torch computes sums of 16-bit numbers in 32 bits."""
    return {name: old[name] + difference[name] for name in old}


@given(seeds, st.sampled_from(RULES))
def test_step_of_difference_equals_step_of_base_plus_difference(seed, rule):
    base, current, mine = states(seed)
    difference = minus(mine, base)
    before = copy.deepcopy([base, current, difference])
    found = aggregate(rule, None, current, base, difference, info=UpdateInfo(staleness=1, difference=True))
    assert alike([base, current, difference], before)
    expected = aggregate(rule, None, current, base, plus(base, difference), staleness=1)
    assert alike(dict(found[0]), dict(expected[0]))
    assert found[2] == expected[2]


@given(seeds, st.sampled_from(RULES))
def test_step_of_exact_difference_equals_step_of_model(seed, rule):
    """On a grid with one zero, the subtraction is exact."""
    base, current, mine = (
        {n: (8 * x).round() / 8 + 0.0 if x.is_floating_point() else x for n, x in m.items()} for m in states(seed)
    )
    found = aggregate(rule, None, current, base, minus(mine, base), info=UpdateInfo(difference=True))
    expected = aggregate(rule, None, current, base, mine)
    assert alike(dict(found[0]), dict(expected[0]))


def test_curves_and_lists_of_arrays_may_be_differences():
    base, current, first, last = states(7, 4)
    rule = AsyncBezier(0.5, threshold=0.0)
    curve = [minus(first, base), minus(last, base)]
    found = aggregate(rule, None, current, base, curve, info=UpdateInfo(difference=True))[0]
    expected = aggregate(rule, None, current, base, [plus(base, part) for part in curve])[0]
    assert alike(dict(found), dict(expected))
    then, now, theirs = map(arrays, (base, current, first))
    steps = [new - old for new, old in zip(theirs, then, strict=True)]
    sums = [old + step for old, step in zip(then, steps, strict=True)]
    found = aggregate(FedAsync(0.5), None, now, then, steps, info=UpdateInfo(difference=True))[0]
    assert all(map(np.array_equal, found, aggregate(FedAsync(0.5), None, now, then, sums)[0]))


def test_difference_replaces_booleans_and_adds_counters():
    base = {"w": torch.ones(3), "mask": torch.tensor([True, False]), "num_batches_tracked": torch.tensor(5)}
    brought = {"w": torch.ones(3), "mask": torch.tensor([False, True]), "num_batches_tracked": torch.tensor(2)}
    new, _, _ = aggregate(
        FedAsync(0.5),
        None,
        base,
        base,
        brought,
        info=UpdateInfo(difference=True),
        space=ParameterSpace.of_state_dict(base, buffer_policy={"mask": "latest"}),
    )
    assert torch.equal(new["w"], torch.full((3,), 1.5))
    assert torch.equal(new["mask"], brought["mask"])
    assert new["num_batches_tracked"] == 7


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
@pytest.mark.parametrize("policy", ["latest", "leave"])
def test_differences_of_wide_unsigned_integers_are_added(dtype, policy):
    most = 2 ** (8 * dtype.itemsize) - 1
    base = {"w": torch.ones(2), "n": torch.tensor([most, most - 2, 0], dtype=dtype)}
    step = {"w": torch.ones(2), "n": torch.tensor([2, 1, most], dtype=dtype)}
    new, _, _ = aggregate(
        FedAsync(0.5),
        None,
        base,
        base,
        step,
        info=UpdateInfo(difference=True),
        space=ParameterSpace.of_state_dict(base, buffer_policy={"n": policy}),
    )
    assert new["n"].tolist() == ([1, most - 1, most] if policy == "latest" else base["n"].tolist())


def test_differences_of_8_bit_numbers_and_out_are_supported():
    base = {"w": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)}
    step = {"w": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)}
    new, _, _ = aggregate(FedAsync(1.0), None, base, base, step, info=UpdateInfo(difference=True), out=step)
    assert new is step
    assert new["w"].float().tolist() == [2.0, 4.0]


def test_difference_on_curved_leaf_is_rejected():
    sphere = {"w": torch.tensor([1.0, 0.0, 0.0]), "b": torch.ones(2)}
    with pytest.raises(ArgumentError, match=r"^difference: expected False, as w is a point of Sphere\(n=3\)"):
        aggregate(
            FedAsync(0.5),
            None,
            sphere,
            sphere,
            sphere,
            info=UpdateInfo(difference=True),
            space=ParameterSpace.of_state_dict(sphere, {"w": Sphere(3)}),
        )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"extra": torch.ones(1)}, "^update: extra: extra"),
        ({"0.bias": torch.ones(3)}, "^update: 0.bias: expected shape"),
        ({"0.bias": torch.ones(4).double()}, "^update: 0.bias: expected torch.float32"),
        ({"0.bias": torch.full((4,), float("nan"))}, "^update: 0.bias: expected finite values"),
    ],
    ids=["extra", "shape", "dtype", "nan"],
)
def test_invalid_difference_is_named_and_leaves_out_unchanged(change, told):
    base, current, mine = states(3)
    out = copy.deepcopy(current)
    with pytest.raises(ArgumentError, match=told):
        aggregate(
            FedAsync(0.5), None, current, base, minus(mine, base) | change, info=UpdateInfo(difference=True), out=out
        )
    assert alike(dict(out), dict(current))
