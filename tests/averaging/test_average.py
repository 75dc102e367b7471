"""Tests of `average`: the float64 mean rounded once, in the type of the first model, with minimal memory traffic."""

import copy
import inspect
import warnings
from collections import OrderedDict
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from manifoldagg import ParameterSpace, average
from manifoldagg.averaging import karcher
from manifoldagg.errors import ArgumentError, StateDictError
from manifoldagg.manifolds import Grassmann, LowRank, SpecialOrthogonal, Sphere
from tests.federated.rules.memory_traffic import SIZE, counted
from tests.support import draw, rotation, seeds

counts = st.integers(1, 7) | st.just(33)
shares = st.lists(st.floats(0.01, 100), min_size=33, max_size=33)


def layered(seed, i=0, dtype=torch.float32):
    """Return a model with non-contiguous, half-precision, complex and empty tensors, statistics and counters."""
    x = draw(seed + i, 64, dtype=dtype)
    return OrderedDict(
        {
            "conv": x[:24].view(2, 3, 2, 2).to(memory_format=torch.channels_last),
            "norm": x[24:27].bfloat16(),
            "half": x[27:30].half(),
            "head": x[30:42].view(3, 4).T,
            "scale": x[42].clone(),
            "none": x[:0].clone(),
            "modes": torch.complex(x[43:47], x[47:51]).view(2, 2),
            "1.running_mean": x[51:53].clone(),
            "1.running_var": x[53:55].square(),
            "1.num_batches_tracked": torch.tensor(i),
            "mask": torch.tensor([True, False]),
        }
    )


def models_of(seed, k):
    return [layered(seed % 1000, 100 * i) for i in range(k)]


def mean_of(tensors, weights):
    """Return the weighted mean in exact arithmetic, rounded to float64."""
    total = sum(map(Fraction, weights))
    columns = zip(*(tensor.double().flatten().tolist() for tensor in tensors), strict=True)
    means = [float(sum(Fraction(w) * Fraction(x) for w, x in zip(weights, xs, strict=True)) / total) for xs in columns]
    return torch.tensor(means, dtype=torch.float64).view(tensors[0].shape)


@given(seeds, counts, shares)
def test_the_result_is_the_float64_mean_rounded_once(seed, k, weights):
    models = models_of(seed, k)
    kept = copy.deepcopy(models)
    found = average(models, weights[:k])
    assert type(found) is OrderedDict
    assert [*found] == [*models[0]]
    for name, x in found.items():
        assert (x.shape, x.dtype) == (models[0][name].shape, models[0][name].dtype)
        if not x.is_floating_point():
            continue
        exact = mean_of([model[name] for model in models], weights[:k])
        size = max((model[name].abs().max().item() for model in models), default=0.0) if x.numel() else 0.0
        # The sums round in float64. The result then rounds to the nearest number of the dtype.
        slack = 40 * torch.finfo(torch.float64).eps * size
        assert ((x.double() - exact).abs() <= torch.finfo(x.dtype).eps / 2 * exact.abs() + slack + 3.1e-8).all(), name
    parts = [torch.view_as_real(model["modes"]) for model in models]
    torch.testing.assert_close(torch.view_as_real(found["modes"]).double(), mean_of(parts, weights[:k]))
    assert all(torch.equal(a[n], b[n]) for a, b in zip(models, kept, strict=True) for n in a)
    assert not {x.data_ptr() for x in found.values() if x.numel()} & {
        x.data_ptr() for model in models for x in model.values() if x.numel()
    }


@given(seeds, st.integers(1, 5))
def test_the_mean_of_one_model_is_bitwise_equal_to_it(seed, k):
    one = layered(seed % 1000)
    found = average([one] * k)
    assert all(torch.equal(found[name], one[name]) for name in one)


@given(seeds)
def test_the_order_of_the_models_changes_only_rounding(seed):
    models = models_of(seed, 4)
    models = [{name: x.double() for name, x in model.items() if x.is_floating_point()} for model in models]
    there, back = average(models, [1, 2, 3, 4]), average(models[::-1], [4, 3, 2, 1])
    for name in there:
        torch.testing.assert_close(there[name], back[name], rtol=1e-14, atol=1e-14)


def test_num_batches_tracked_is_the_largest_of_the_inputs():
    models = models_of(3, 3)
    for weights in (None, [1, 2, 2], [5, 1, 1]):
        found = average(models, weights)["1.num_batches_tracked"]
        assert (found.dtype, found.item()) == (torch.int64, 200)
    average(models, out=models[0])
    assert models[0]["1.num_batches_tracked"] == 200
    cast = [{"w": torch.ones(2), "num_batches_tracked": torch.tensor(count)} for count in (3.0, 8.0, 1.0)]
    assert average(cast)["num_batches_tracked"] == 8
    layers = [{"w": np.ones(2), "num_batches_tracked": np.array(count)} for count in (3, 8)]
    assert average(layers, [3, 1])["num_batches_tracked"] == 8


def test_other_single_integers_are_those_of_the_heaviest_model():
    models = [{"w": torch.ones(2), "step": torch.tensor(step)} for step in (1, 9, 4)]
    assert average(models)["step"] == 1
    assert average(models, [1, 2, 3])["step"] == 4


def test_the_parameters_of_a_model_without_weight_are_not_read():
    models = models_of(3, 2)
    broken = copy.deepcopy(models[1])
    broken["conv"][0] = float("nan")
    found = average([models[0], broken], [1, 0])
    assert torch.equal(found["conv"], models[0]["conv"])


def test_average_has_the_common_signature_of_averages():
    expected = "(models, weights=None, *, manifolds=None, out=None, return_info=False, **options)"
    signature = inspect.signature(average)
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == expected


def test_info_contains_the_weights_and_the_certificates_of_the_means():
    models = [{"w": torch.tensor([i]), "v": nn.functional.normalize(torch.tensor([1.0, i]), dim=0)} for i in (0.0, 1.0)]
    mean, info = average(models, [1, 3], manifolds={"v": Sphere(2)}, return_info=True)
    assert mean["w"].item() == 0.75
    assert info.weights == (0.25, 0.75)
    assert info.residuals.keys() == info.steps.keys() == {"v"}
    assert info.residuals["v"] < 1e-12
    assert info.steps["v"] >= 0
    assert repr(info).startswith("AverageInfo(weights=(0.25, 0.75), residuals={'v': ")
    flat, info = average([{"w": torch.ones(2)}] * 3, return_info=True)
    assert flat["w"].tolist() == [1.0, 1.0]
    assert (dict(info.residuals), dict(info.steps)) == ({}, {})
    assert repr(info) == "AverageInfo(weights=(0.333, 0.333, 0.333), residuals={}, steps={})"
    out = {"w": torch.zeros(2)}
    assert average([{"w": torch.ones(2)}], out=out, return_info=True)[0] is out


@pytest.mark.usefixtures("as_shipped")
def test_return_info_must_be_a_bool():
    with pytest.raises(ArgumentError, match="return_info: expected one of False, True; got 1"):
        average([{"w": torch.ones(2)}], return_info=1)


def test_the_result_has_the_type_of_the_first_model():
    a, b = np.array([[1.0, 2.0]], np.float32), np.array([[3.0, 6.0]], np.float32)
    a.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = average([[a], [b]])
    assert type(found) is np.ndarray
    assert found.dtype == np.float32
    assert found.tolist() == [[2.0, 4.0]]
    assert isinstance(average([(torch.ones(2),), (torch.ones(2),)]), tuple)
    swapped = average([{"w": np.array([1.0, 2.0], ">f8")}, {"w": np.array([3.0, 4.0], ">f8")}])["w"]
    assert (swapped.dtype, swapped.tolist()) == (np.dtype(">f8"), [2.0, 3.0])
    extra = {"w": torch.ones(2), "_extra_state": {"kept": [1]}}
    kept = average([extra, {"w": torch.zeros(2)}])["_extra_state"]
    assert kept == {"kept": [1]}
    assert kept["kept"] is not extra["_extra_state"]["kept"]


def test_tied_parameters_count_once_and_stay_tied():
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    net[1].weight = net[0].weight
    one = net.state_dict()
    two = {name: x + 1 for name, x in one.items()}
    two["1.weight"] = two["0.weight"]
    found = average([one, two])
    assert found["1.weight"] is found["0.weight"]
    torch.testing.assert_close(found["0.weight"], one["0.weight"] + 0.5)
    eights = {name: x.to(torch.float8_e4m3fn)[:] for name, x in one.items()}
    assert average([eights, {name: x.clone() for name, x in eights.items()}])["0.weight"].dtype is torch.float8_e4m3fn
    two["1.weight"] = two["0.weight"] + 1
    with pytest.raises(
        StateDictError,
        match=r"models\[1\]: 1.weight: expected the values of 0.weight, to which it is tied, got different values",
    ):
        average([one, two])


@given(seeds, st.sampled_from(["a new one", 0, 1, 2]))
def test_out_receives_the_result(seed, where):
    models = models_of(seed, 3)
    expected = average(models, [1, 2, 1])
    out = {name: torch.ones_like(x) for name, x in models[0].items()} if where == "a new one" else models[where]
    held = {name: x.data_ptr() for name, x in out.items()}
    assert average(models, [1, 2, 1], out=out) is out
    assert all(torch.equal(out[name], expected[name]) for name in expected)
    assert {name: x.data_ptr() for name, x in out.items()} == held


def curved(seed, i, dtype=torch.float32):
    """Return a model with leaves on manifolds. Models of the same seed are near each other."""
    x = nn.functional.normalize(draw(seed, 6, 40) + 0.1 * draw(seed + 1 + i, 6, 40), dim=-1)
    turn = rotation(seed, 4) * torch.tensor([1.0, 1.0, 1.0, torch.linalg.det(rotation(seed, 4))])
    small = 0.1 * draw(seed + 50 + i, 4, 4)
    return {
        "before": draw(seed + 2 * i, 5).to(dtype),
        "ball.weight": x.to(dtype),
        "turn.weight": (turn @ torch.linalg.matrix_exp(small - small.T)).to(dtype),
        "after": draw(seed + 3 * i, 2, 2).to(dtype),
    }


ON_SPHERES = {"ball.weight": Sphere(40)}
TURNED = ON_SPHERES | {"turn.weight": SpecialOrthogonal(4)}


@given(seeds, st.sampled_from([ON_SPHERES, TURNED]), st.sampled_from([torch.float32, torch.float64]), st.booleans())
def test_entries_on_manifolds_have_their_karcher_mean(seed, manifolds, dtype, given_out):
    models = [curved(seed % 1000, i, dtype) for i in range(4)]
    weights = [3.0, 1.0, 2.0, 0.5]
    space = ParameterSpace.of_state_dict(models[0], manifolds)
    expected = karcher(space, [space.point(model) for model in models], weights)
    out = models[2] if given_out else None
    found = average(models, weights, manifolds=manifolds, out=out)
    assert expected.converged
    torch.testing.assert_close(
        space.point(found), expected.point, rtol=0, atol=4 * torch.finfo(dtype).eps * expected.point.abs().max().item()
    )


def test_low_rank_and_grassmann_entries_have_their_karcher_mean():
    one, two = ({"w": draw(i, 4, 1) @ draw(i + 2, 1, 3)} for i in range(2))
    stacks = [{"w": torch.cat([draw(i, 4, 1), draw(i + 2, 3, 1)])} for i in range(2)]
    low = average(stacks, manifolds={"w": LowRank(4, 3, 1)})["w"]
    u, s, v = torch.linalg.svd((one["w"] + two["w"]) / 2)
    torch.testing.assert_close(low[:4] @ low[4:].T, s[0] * u[:, :1] @ v[:1])
    frames = [{"w": torch.linalg.qr(torch.eye(5, 2).double() + 0.1 * draw(i, 5, 2)).Q} for i in range(3)]
    found = average(frames, manifolds={"w": Grassmann(5, 2)})["w"]
    expected = karcher(Grassmann(5, 2), torch.stack([frame["w"] for frame in frames])).point
    torch.testing.assert_close(found @ found.T, expected @ expected.T)


def test_antipodal_models_raise_and_leave_the_target_unchanged():
    models = [{"v": torch.tensor([x, 0.0, 0.0]), "b": torch.ones(2)} for x in (1.0, -1.0)]
    out = {"v": torch.zeros(3), "b": torch.zeros(2)}
    with pytest.raises(ArgumentError, match="models: v: expected points closer to one another on Sphere"):
        average(models, manifolds={"v": Sphere(3)}, out=out)
    assert not any(x.any() for x in out.values())


def test_the_mean_of_a_leaf_is_independent_of_other_leaves():
    """Huge entries, leaves on other manifolds, and NaNs in a model of weight 0 do not change the mean of a leaf."""
    turn = torch.linalg.matrix_exp(torch.tensor([[0.0, -1.0], [1.0, 0.0]]).double())
    one = {"far": torch.tensor([1.0, 1.0]).double(), "turn": torch.eye(2).double(), "low": torch.ones(4, 1).double()}
    two = {"far": torch.tensor([1.0, 3.0]).double(), "turn": turn, "low": torch.ones(4, 1).double()}
    one["far"][0] = two["far"][0] = 1e200
    manifolds = {"turn": SpecialOrthogonal(2), "low": LowRank(2, 2, 1)}
    found = average([one, two], manifolds=manifolds)
    assert found["far"][1] == 2.0
    torch.testing.assert_close(found["turn"] @ found["turn"], turn)
    two["far"][1] = float("nan")
    torch.testing.assert_close(average([one, two], [1, 0], manifolds=manifolds)["far"], one["far"])


@pytest.mark.parametrize("k", [2, 10])
def test_each_model_is_read_once_and_only_the_result_is_allocated(k):
    models = [{"a": draw(i, SIZE, dtype=torch.float32), "b": draw(i, 7, dtype=torch.float32)} for i in range(k)]
    with counted() as words:
        average(models)
    assert (words.grams, words.combines) == (1, 1)
    assert words.counts == (k + 1, 1, 1)  # The additional read checks that the result is finite.
    with counted() as words:
        average(models, out=models[0])
    assert words.counts == (k + 2, 2, 1)  # The result is also copied.


def test_models_on_spheres_are_read_twice_and_only_the_result_is_allocated():
    models = [{"a": nn.functional.normalize(1 + 0.1 * draw(i, SIZE, dtype=torch.float32), dim=0)} for i in range(4)]
    with counted() as words:
        average(models, manifolds={"a": Sphere(SIZE)})
    assert (words.grams, words.combines) == (2, 1)
    assert words.counts == (9, 1, 1)


def test_average_of_adapter_factors_warns():
    state = {"q.lora_A.weight": torch.ones(1, 3), "q.lora_B.weight": torch.ones(2, 1)}
    with pytest.warns(UserWarning, match=r"models\[0\]: q.lora_A.weight: .* average_adapters averages their products"):
        average([state, state])


W = {"w": torch.ones(2)}
LINE = torch.arange(8.0)
CUT = {"a": LINE[:2], "b": LINE[2:4]}
FREED = torch.ones(2)
FREED.untyped_storage().resize_(0)
Z = W | {"z": torch.zeros(2, dtype=torch.complex64).conj()}


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: average([]), "models: expected a sequence of at least one model, got none"),
        (lambda: average(W), "models: expected a sequence of at least one model, got dict"),
        (lambda: average(iter([W])), "models: expected a sequence of at least one model, got list_iterator"),
        (lambda: average([torch.ones(2)]), r"models\[0\]: expected a state dict or a list of arrays, got Tensor"),
        (lambda: average([W, nn.Linear(1, 1)]), r"models\[1\]: expected .*got Linear: pass its state_dict"),
        (lambda: average([W, {"v": torch.ones(2)}]), r"models\[1\]: missing: w"),
        (lambda: average([W, {"w": torch.ones(3)}]), r"models\[1\]: w: expected shape \(2,\), got \(3,\)"),
        (lambda: average([W, {"w": torch.ones(2).half()}]), r"models\[1\]: w: expected torch.float32"),
        (lambda: average([W, {"w": torch.tensor([1.0, float("inf")])}]), r"models\[1\]: w: expected finite values"),
        (lambda: average([W | {"z": torch.ones(1) * 1j}, W | {"z": torch.ones(1) * complex("nan")}]), r"models\[1\]: z: expected finite"),
        (lambda: average([{"w": torch.ones(2).to_sparse()}]), r"models\[0\]: w: expected a dense tensor"),
        (lambda: average([{"w": np.array(["a"])}]), r"models\[0\]: w: expected a numeric array"),
        (lambda: average([{"n": torch.tensor(1)}]), r"models\[0\]: expected floating parameters, got none"),
        (lambda: average([W | {"m": torch.tensor([1, 2])}, W | {"m": torch.tensor([1, 3])}]), r"models\[1\]: m: expected torch.int64 equal to that of models\[0\]"),
        (lambda: average([W, W], [1.0]), "weights: expected one for each of 2 models"),
        (lambda: average([W, W], [1.0, -1.0]), "weights: expected finite numbers >= 0"),
        (lambda: average([W, W], manifolds={"v": Sphere(2)}), "manifolds: expected names or patterns of leaves, got 'v'"),
        (lambda: average([{0: torch.ones(1), "0": torch.ones(1)}]), r"models\[0\]: expected names that differ as strings, got '0' twice"),
        (lambda: average([{"r": torch.eye(2)}, {"r": -torch.eye(2)}], manifolds={"r": SpecialOrthogonal(2)}), "models: r: expected points closer"),
        (lambda: average([W, W], out={"w": FREED}), "out: w: expected a tensor with memory"),
        (lambda: average([Z, Z], out=Z), "out: z: expected a writable tensor, got a conjugated or negated view"),
        (lambda: average([{"w": torch.ones(2, 2)}], out={"w": LINE.as_strided((2, 2), (1, 1))}), "out: expected tensors with memory of their own"),
        (lambda: average([{"w": torch.ones(40)}] * 2, manifolds={"w": Sphere(40)}), r"models\[0\]: w"),
        (lambda: average([W, W], out={"v": torch.ones(2)}), "out: missing: w"),
        (lambda: average([W, W], out=3), "out: expected a state dict or a list of arrays, got int"),
        (lambda: average([[np.ones(2)]] * 2, out=[np.broadcast_to(1.0, 2)]), "out: 0: expected a writable array"),
        (lambda: average([CUT, CUT], out={"a": LINE[2:4], "b": LINE[:2]}), "out: expected"),
        (lambda: average([CUT, CUT], out={"a": LINE[:2], "b": LINE[1:3]}), "out: expected"),
        (lambda: average([{"w": torch.full((1,), torch.finfo(torch.float64).max, dtype=torch.float64)}] * 11), "models: expected a finite mean"),
    ],
)  # fmt: skip
def test_invalid_input_is_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


@pytest.mark.parametrize(
    "change",
    [
        {"w": torch.tensor([1.0, float("nan")])},
        {"1.running_mean": torch.tensor([float("inf")])},
        {"mask": torch.tensor([1, 2])},
        {"w": torch.ones(3)},
    ],
)
def test_a_rejected_call_leaves_the_target_unchanged(change):
    model = {"w": torch.ones(2), "1.running_mean": torch.ones(1), "mask": torch.tensor([1, 1])}
    out = {name: torch.full_like(x, 7) for name, x in model.items()}
    with pytest.raises(ArgumentError):
        average([model, model | change], out=out)
    assert all((x == 7).all() for x in out.values())
