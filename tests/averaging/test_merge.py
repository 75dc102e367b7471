"""Tests of merging checkpoint files: equality to the average in memory for any sharding, and constant memory."""

import json
import math
import os
import re
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import manifoldagg
from manifoldagg.averaging import MergeInfo, average_adapters, checkpoints, karcher, merge, merge_plan, plan_merge
from manifoldagg.curves import Bezier, Simplex
from manifoldagg.errors import ArgumentError, CheckpointError, StateDictError
from manifoldagg.federated import rules
from manifoldagg.manifolds import Flat, SpecialOrthogonal, Sphere, distance, geodesic
from tests.support import draw, rotation, seeds

pytestmark = pytest.mark.filterwarnings("ignore:models. expected:UserWarning")


@pytest.fixture(autouse=True, scope="module")
def _without_syncs():
    """Disable syncs to the disk, which take most of the time of a small merge and do not change the files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda file: None)
        yield


counts = st.integers(2, 5)
shares = st.lists(st.floats(0.01, 100), min_size=5, max_size=5)
METHODS = ("arithmetic", "karcher", "slerp", "bezier", "radial")


def version(seed, i, dtype=torch.float64, spread=0.2):
    """Return one of several versions of a model with several tensors."""
    x = draw(seed, 90, dtype=torch.float64) + spread * draw(seed + 1 + i, 90, dtype=torch.float64)
    return {
        "0.weight": x[:40].view(5, 8).to(dtype),
        "0.bias": x[40:45].to(dtype),
        "1.weight": x[45:89].view(11, 4).to(dtype),
        "scale": x[89].to(dtype),
        "1.running_var": x[40:44].square().to(dtype),
        "1.num_batches_tracked": torch.tensor(10 * i),
        "mask": torch.tensor([[True, False]]),
    }


def versions(seed, k, **options):
    return [version(seed, i, **options) for i in range(k)]


def write(folder, states):
    """Save state dicts as files, and return their paths."""
    paths = [folder / f"in{i}.safetensors" for i in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        save_file({name: x.contiguous() for name, x in state.items()}, path)
    return paths


def write_shards(folder, state, parts):
    """Save a state dict as transformers does: shards with an index."""
    folder.mkdir()
    names = [*state]
    weight_map = {}
    for i in range(parts):
        file = f"model-{i + 1:05d}-of-{parts:05d}.safetensors"
        save_file({name: state[name].contiguous() for name in names[i::parts]}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names[i::parts], file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "test"}')
    return folder


def merged(folder, models, *args, **options):
    """Merge models into a file and return its state dict."""
    out = folder / "out.safetensors"
    merge(models, *args, out=out, **options)
    return load_file(out)


def same_bits(a, b):
    """Return whether two state dicts are bitwise equal."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and torch.equal(a[n].contiguous(), b[n].contiguous())
        for n in a
    )


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("merge")


def fresh(tmp_path_factory):
    return tmp_path_factory.mktemp("merge")


@given(seed=seeds, k=counts, weights=shares, dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
@settings(max_examples=20)
def test_the_arithmetic_mean_is_bitwise_equal_to_the_average_in_memory(tmp_path_factory, seed, k, weights, dtype):
    place = fresh(tmp_path_factory)
    states = versions(seed % 1000, k, dtype=dtype)
    assert same_bits(merged(place, write(place, states), weights[:k]), manifoldagg.average(states, weights[:k]))


def reference(method, states, weights, t, name):
    """Compute the mean of one tensor with the methods of the library for models in memory."""
    rows = [state[name].flatten().double() for state in states]
    w = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    if method == "bezier":
        return Bezier(Flat(len(rows[0])), degree=len(rows) - 1)(torch.stack(rows), torch.tensor(t, dtype=torch.float64))
    norms = torch.stack([row.norm() for row in rows])
    units = [row / row.norm() for row in rows]
    sphere = Sphere(len(rows[0]))
    if method == "slerp":
        path = geodesic(sphere, units[0], units[1], t)
        # The coefficients of the two unit vectors are applied to the original vectors.
        c = torch.linalg.lstsq(torch.stack(units, 1), path[:, None]).solution.flatten()
        return c[0] * rows[0] + c[1] * rows[1]
    if method == "karcher":
        return karcher(sphere, units, w, tolerance=1e-14).point * (w @ norms)
    model, state = [torch.zeros_like(rows[0])], None
    for row, share in zip(rows, weights, strict=True):
        info = manifoldagg.UpdateInfo(share=float(share))
        rule = rules.RadialDirectional(len(rows), rate=1.0, weighted=True)
        model, state, _ = manifoldagg.aggregate(rule, state, model, [torch.zeros_like(row)], [row], info=info)
    return model[0]


@given(seed=seeds, k=counts, weights=st.lists(st.integers(1, 100), min_size=5, max_size=5), t=st.floats(0.05, 0.95))
@settings(max_examples=10)
@pytest.mark.parametrize("method", ["karcher", "slerp", "bezier", "radial"])
def test_each_method_equals_the_method_in_memory(tmp_path_factory, method, seed, k, weights, t):
    k = 2 if method == "slerp" else k
    place = fresh(tmp_path_factory)
    states = versions(seed % 1000, k)
    options = {"t": t} if method in ("slerp", "bezier") else {"weights": weights[:k]}
    found = merged(place, write(place, states), method=method, **options)
    for name in ("0.weight", "0.bias", "1.weight"):
        expected = reference(method, states, weights[:k], t, name)
        assert torch.allclose(found[name].flatten(), expected, rtol=1e-11, atol=1e-11)


@given(seed=seeds, k=counts, weights=shares)
@settings(max_examples=10)
def test_the_weighted_mean_equals_the_point_of_a_simplex(tmp_path_factory, seed, k, weights):
    place = fresh(tmp_path_factory)
    states = versions(seed % 1000, k)
    found = merged(place, write(place, states), weights[:k])
    x = torch.tensor(weights[:k], dtype=torch.float64)
    simplex = Simplex(Flat(40), k)
    phi = torch.stack([state["0.weight"].flatten() for state in states])
    assert torch.allclose(found["0.weight"].flatten(), simplex(phi, x / x.sum()), rtol=1e-14)


@given(seed=seeds, k=st.integers(2, 4), weights=shares, order=st.permutations(range(4)))
@settings(max_examples=10)
@pytest.mark.parametrize("scope", ["tensor", "model"])
@pytest.mark.parametrize("method", ["arithmetic", "karcher", "radial"])
def test_the_order_of_the_models_does_not_matter(tmp_path_factory, method, scope, seed, k, weights, order):
    place = fresh(tmp_path_factory)
    paths = write(place, versions(seed % 1000, k))
    order = [i for i in order if i < k]
    one = merged(place, paths, weights[:k], method=method, scope=scope)
    two = merged(place, [paths[i] for i in order], [weights[i] for i in order], method=method, scope=scope)
    for name, x in one.items():
        assert torch.allclose(x.double(), two[name].double(), rtol=1e-11, atol=1e-11)


def large(seed, i, dtype=torch.bfloat16):
    """Return a model with a tensor that spans several cells."""
    state = version(seed, i, dtype=dtype)
    generator = torch.Generator().manual_seed(100 * seed + i)
    base = torch.randn(3, 900_001, generator=torch.Generator().manual_seed(seed))
    return state | {"big": (base + 0.1 * torch.randn(3, 900_001, generator=generator)).to(dtype)}


@pytest.mark.parametrize(("method", "scope"), [("arithmetic", "tensor"), ("karcher", "tensor"), ("karcher", "model")])
def test_sharding_does_not_change_the_bits_of_the_result(folder, method, scope):
    states = [large(3, i) for i in range(3)]
    whole = write(folder, states)
    parts = [write_shards(folder / f"model{i}", state, i + 2) for i, state in enumerate(states)]
    info = {}
    for label, models in (("whole", whole), ("shards", parts), ("mixed", [parts[0], states[1], whole[2]])):
        info[label] = merge(models, [1, 2, 3], out=folder / f"{label}.safetensors", method=method, scope=scope)
    expected = load_file(folder / "whole.safetensors")
    assert same_bits(load_file(folder / "shards.safetensors"), expected)
    assert same_bits(load_file(folder / "mixed.safetensors"), expected)
    assert info["whole"].model == info["shards"].model == info["mixed"].model
    by_name = [{part.name: part for part in found.tensors} for found in info.values()]
    assert by_name[0] == by_name[1] == by_name[2]


def test_prefetch_and_batch_sizes_do_not_change_the_bits_of_the_result(folder, monkeypatch):
    paths = write(folder, [large(4, i) for i in range(3)])
    found = []
    for size in (1, 1 << 20, 1 << 40):
        monkeypatch.setattr("manifoldagg.averaging.merge_journal.BATCH_BYTES", size)
        monkeypatch.setitem(merge.__globals__, "PREFETCH_BYTES", size)
        merge(paths, out=folder / "out.safetensors", method="karcher")
        found.append([(folder / f"out{end}").read_bytes() for end in (".safetensors", ".certificate.json")])
    assert found[0] == found[1] == found[2]


def test_the_result_has_the_shards_and_configuration_of_the_first_model(folder):
    parts = [write_shards(folder / f"model{i}", version(1, i, torch.float16), i + 2) for i in range(2)]
    merge(parts, out=folder / "out")
    assert sorted(path.name for path in (folder / "out").iterdir()) == [
        "certificate.json",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads((folder / "out/model.safetensors.index.json").read_text())
    tensors = {}
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(folder / "out" / file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            assert all(index["weight_map"][name] == file for name in opened.keys())  # noqa: SIM118
        tensors |= load_file(folder / "out" / file)
    assert index["metadata"]["total_size"] == sum(x.numel() * x.itemsize for x in tensors.values())
    states = [version(1, i, torch.float16) for i in range(2)]
    assert same_bits(tensors, manifoldagg.average(states))
    merge(parts, out=folder / "out", method="karcher")  # A merge may replace the result of an earlier merge.


def test_shard_size_limits_the_size_of_shards(folder):
    states = versions(1, 2)
    paths = write(folder, states)
    merge(paths, out=folder / "out", shard_size=200)
    files = sorted((folder / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    tensors = [load_file(file) for file in files]
    assert same_bits({name: x for part in tensors for name, x in part.items()}, manifoldagg.average(states))
    assert all(len(part) == 1 or sum(x.numel() * x.itemsize for x in part.values()) <= 200 for part in tensors)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_a_model_with_the_whole_weight_is_returned_unchanged(folder, method, k):
    k = 2 if method == "slerp" else k
    states = versions(5, k)
    options = {"t": 1.0} if method in ("bezier", "slerp") else {"weights": [0] * (k - 1) + [2]}
    found = merged(folder, write(folder, states), method=method, **options)
    for name in ("0.weight", "0.bias", "scale"):
        assert torch.equal(found[name], states[-1][name])


def test_zero_tensors_count_only_in_the_mean_of_norms(folder):
    base = draw(3, 6, dtype=torch.float64)
    states = [
        {"w": base, "z": torch.zeros(3)},
        {"w": torch.zeros_like(base), "z": torch.zeros(3)},
        {"w": 3 * base, "z": torch.zeros(3)},
    ]
    found = merged(folder, write(folder, states), [1, 1, 2], method="karcher")
    assert torch.allclose(found["w"], base / base.norm() * (base.norm() * (1 + 0 + 2 * 3) / 4), rtol=1e-12)
    assert torch.equal(found["z"], torch.zeros(3))


def test_opposite_directions_are_rejected(folder):
    x = draw(1, 6, dtype=torch.float64)
    paths = write(folder, [{"w": x}, {"w": -x}])
    with pytest.raises(ArgumentError, match=r"^w: models: expected directions closer to one another"):
        merge(paths, out=folder / "out.safetensors", method="karcher")
    with pytest.raises(ArgumentError, match=r"^w: models: expected directions whose mean is not 0"):
        merge(paths, out=folder / "out.safetensors", method="radial")
    with pytest.raises(ArgumentError, match=r"^w: models: expected directions that are not opposite"):
        merge(paths, out=folder / "out.safetensors", method="slerp", t=0.3)


@given(degrees=st.sampled_from([1e-6, 1e-3, 1.0, 90.0, 170.0, 179.5, 179.95]), t=st.floats(0.01, 0.99), seed=seeds)
@settings(max_examples=20)
def test_slerp_has_constant_speed_up_to_almost_opposite_directions(tmp_path_factory, degrees, t, seed):
    place = fresh(tmp_path_factory)
    u = draw(seed, 8, dtype=torch.float64)
    u /= u.norm()
    v = draw(seed + 1, 8, dtype=torch.float64)
    v = (v - (v @ u) * u) / (v - (v @ u) * u).norm()
    angle = math.radians(degrees)
    paths = write(place, [{"w": u}, {"w": math.cos(angle) * u + math.sin(angle) * v}])
    found = merged(place, paths, method="slerp", t=t)["w"]
    expected = math.cos(t * angle) * u + math.sin(t * angle) * v
    assert (found - expected).norm() < 1e-15 / (math.pi - angle) ** 2 + 1e-14


def test_one_set_of_coefficients_applies_to_the_whole_model(folder):
    states = versions(7, 3)
    info = merge(write(folder, states), [1, 2, 3], out=folder / "out.safetensors", method="karcher", scope="model")
    names = ["0.weight", "0.bias", "1.weight", "scale"]
    units = [torch.cat([state[n].flatten() for n in names]) for state in states]
    norms = torch.stack([x.norm() for x in units])
    w = torch.tensor([1, 2, 3], dtype=torch.float64) / 6
    mean = karcher(Sphere(90), [x / n for x, n in zip(units, norms, strict=True)], w, tolerance=1e-14)
    found = load_file(folder / "out.safetensors")
    whole = torch.cat([found[n].flatten() for n in names])
    assert torch.allclose(whole, mean.point * (w @ norms), rtol=1e-11, atol=1e-11)
    assert len({part.coefficients for part in info.tensors if part.kind == "flat"}) == 1
    assert info.model.coefficients == info.tensors[0].coefficients
    assert info.model.residual < 1e-11


def test_certificates_equal_the_distances_of_the_written_tensors(folder):
    states = [large(8, i) for i in range(3)]
    info = merge(write(folder, states), [3, 2, 1], out=folder / "out.safetensors", method="karcher")
    found = load_file(folder / "out.safetensors")
    w = torch.tensor([3, 2, 1], dtype=torch.float64) / 6
    for part in info.tensors:
        rows = torch.stack([state[part.name].double().flatten() for state in states])
        exact = torch.tensor(part.coefficients, dtype=torch.float64) @ rows
        assert part.size == rows.shape[1]
        assert part.norm == pytest.approx(exact.norm().item(), rel=1e-9)
        assert part.distances == pytest.approx((rows - exact).norm(dim=1).tolist(), rel=1e-9, abs=1e-12)
        assert part.arithmetic_distance == pytest.approx((exact - w @ rows).norm().item(), rel=1e-6, abs=1e-12)
        written = found[part.name].double().flatten()
        assert part.rounding_error == pytest.approx((written - exact).norm().item(), rel=1e-9, abs=1e-12)
        cosines = torch.nn.functional.normalize(rows, dim=1) @ torch.nn.functional.normalize(rows, dim=1).T
        assert part.largest_angle == pytest.approx(math.acos(cosines.min().clamp(-1, 1)), abs=1e-6)
        assert part.residual < 1e-11
    assert info.model.norm == pytest.approx(math.hypot(*[part.norm for part in info.tensors]))
    assert info.model.size == sum(part.size for part in info.tensors)
    text = (folder / "out.certificate.json").read_text()
    assert MergeInfo.from_json(text).to_json() == text == info.to_json()


def test_the_rounding_error_of_bfloat16_is_at_the_floor(folder):
    """The distance from a float64 mean to the nearest bfloat16 model is the smallest possible error."""
    states = [large(9, i) for i in range(4)]
    info = merge(write(folder, states), out=folder / "out.safetensors", method="karcher")
    big = next(part for part in info.tensors if part.name == "big")
    rows = [state["big"].double().flatten() for state in states]
    norms = [x.norm() for x in rows]
    exact = karcher(Sphere(len(rows[0])), [x / n for x, n in zip(rows, norms, strict=True)]).point * (sum(norms) / 4)
    floor = (exact.to(torch.bfloat16).double() - exact).norm().item()
    assert big.rounding_error == pytest.approx(floor, rel=1e-6)


@pytest.mark.filterwarnings("default")
def test_models_that_are_far_apart_give_warnings(folder):
    independent = [{"w": torch.randn(2000, generator=torch.Generator().manual_seed(i))} for i in range(3)]
    with pytest.warns(UserWarning, match="^models: expected") as caught:
        info = merge(write(folder, independent), out=folder / "out.safetensors")
    assert [str(one.message) for one in caught] == [*info.warnings]
    assert len(info.warnings) == 2
    assert "expected angles of at most 45 degrees" in info.warnings[0]
    assert "a loss barrier between the models is likely" in info.warnings[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        near = write(folder, [{"w": independent[0]["w"] + 0.1 * x["w"]} for x in independent])
        assert merge(near, out=folder / "out.safetensors").warnings == ()


def test_all_mismatches_are_listed_before_a_tensor_is_read(folder, monkeypatch):
    states = versions(1, 4)
    states[1]["0.bias"] = states[1]["0.bias"][:3]
    states[1]["extra"] = torch.zeros(2)
    del states[2]["scale"]
    states[3]["1.weight"] = states[3]["1.weight"].float()
    paths = write(folder, states)
    monkeypatch.setattr(checkpoints.MappedFile, "__init__", lambda *_: pytest.fail("a file was mapped"))
    with pytest.raises(StateDictError) as caught:
        merge(paths, out=folder / "out.safetensors")
    assert str(caught.value).splitlines() == [
        f"models: expected the names, shapes and dtypes of {paths[0]}, got 4 differences:",
        f"  {paths[1]}: 0.bias: expected shape (5,), got (3,)",
        f"  {paths[1]}: extra: expected only the names of the first model",
        f"  {paths[2]}: scale: expected this tensor, got a checkpoint without it",
        f"  {paths[3]}: 1.weight: expected torch.float64, got torch.float32",
    ]
    assert not (folder / "out.safetensors").exists()


def test_integers_are_merged_like_those_of_average(folder):
    states = versions(2, 3)
    for i, state in enumerate(states):
        state["step"] = torch.tensor(100 + i)
        state["ids"] = torch.arange(2_000_000)
        state["wide"] = torch.tensor([7], dtype=torch.uint32)
    paths = write(folder, states)
    found = merged(folder, paths, [1, 3, 2], method="karcher")
    assert found["1.num_batches_tracked"] == 20
    assert found["step"] == 101
    assert torch.equal(found["ids"], torch.arange(2_000_000))
    assert found["wide"].dtype is torch.uint32
    states[2]["ids"] = torch.arange(2_000_000).clone()
    states[2]["ids"][-1] = 0
    with pytest.raises(StateDictError, match=r"in2\.safetensors: ids: expected torch\.int64 equal"):
        merge(write(folder, states), out=folder / "out.safetensors")


def test_tensors_on_a_manifold_get_their_karcher_mean(folder):
    base = torch.stack([rotation(seed, 3) for seed in range(5)])
    space = SpecialOrthogonal(3)
    states = []
    for i in range(3):
        tangent = space.random_tangent(base, torch.Generator().manual_seed(i))
        states.append({"a.rot": space.exp(base, 0.1 * tangent), "w": draw(i, 4, dtype=torch.float64)})
    info = merge(write(folder, states), [1, 2, 3], out=folder / "out.safetensors", manifolds={"*.rot": space})
    expected = manifoldagg.average(states, [1, 2, 3], manifolds={"*.rot": space})
    assert same_bits(load_file(folder / "out.safetensors"), expected)
    part = next(part for part in info.tensors if part.kind == "manifold")
    distances = [distance(space, expected["a.rot"], state["a.rot"]).norm().item() for state in states]
    assert part.distances == pytest.approx(distances)
    assert part.residual < 1e-10
    assert part.rounding_error < 1e-14


def test_large_powers_of_a_manifold_are_computed_in_chunks(folder, monkeypatch):
    space = SpecialOrthogonal(3)
    base = torch.stack([rotation(seed, 3) for seed in range(7)])
    states = [
        {"rot": space.exp(base, 0.1 * space.random_tangent(base, torch.Generator().manual_seed(i)))} for i in range(2)
    ]
    monkeypatch.setattr(merge_plan, "CURVED_SIZE", 20)
    found = merged(folder, write(folder, states), manifolds={"rot": space})
    assert torch.allclose(found["rot"], manifoldagg.average(states, manifolds={"rot": space})["rot"], atol=1e-12)


def adapter(seed, rank=2, dtype=torch.float32):
    x = draw(seed, 100)
    return {
        "base_model.model.q.lora_A.weight": x[: 5 * rank].view(rank, 5).to(dtype),
        "base_model.model.q.lora_B.weight": x[50 : 50 + 4 * rank].view(4, rank).to(dtype),
        "base_model.model.head.weight": x[90:98].view(2, 4).to(dtype),
    }


@pytest.mark.parametrize("ranks", [(2, 2, 2), (1, 3, 2)])
def test_adapters_are_averaged_as_products(folder, ranks):
    states = [adapter(i, rank) for i, rank in enumerate(ranks)]
    out = folder / "out.safetensors"
    info = merge(write(folder, states), [1, 2, 3], out=out)
    assert info.warnings == ()
    expected = average_adapters(states, [1, 2, 3])
    found = load_file(out)
    assert {name: tuple(x.shape) for name, x in found.items()} == {n: tuple(x.shape) for n, x in expected.items()}
    assert same_bits(found, expected)
    part = next(part for part in info.tensors if part.kind == "factors")
    w = torch.tensor([1, 2, 3], dtype=torch.float64) / 6
    products = torch.stack([product(state) for state in states])
    mean = (w[:, None, None] * products).sum(0)
    assert part.rounding_error == pytest.approx((product(found) - mean).norm().item(), rel=1e-6)
    assert part.distances == pytest.approx((products - mean).flatten(1).norm(dim=1).tolist(), rel=1e-6)


def product(state):
    return state["base_model.model.q.lora_B.weight"].double() @ state["base_model.model.q.lora_A.weight"].double()


def test_the_karcher_mean_of_adapters_equals_that_of_their_products(folder):
    """The rank of the sum does not exceed the rank of the factors, so nothing is truncated."""
    states = [adapter(i, 4, torch.float64) for i in range(2)]
    found = merged(folder, write(folder, states), [1, 2], method="karcher")
    xs = [product(state).flatten() for state in states]
    norms = torch.stack([x.norm() for x in xs])
    w = torch.tensor([1, 2], dtype=torch.float64) / 3
    point = karcher(Sphere(20), [x / n for x, n in zip(xs, norms, strict=True)], w, tolerance=1e-14).point
    assert torch.allclose(product(found).flatten(), point * (w @ norms), rtol=1e-9, atol=1e-9)


def test_adapters_with_different_scalings_are_rejected(folder):
    for i, alpha in enumerate((16, 32)):
        (folder / f"{i}").mkdir()
        save_file(adapter(i), folder / f"{i}/adapter_model.safetensors")
        (folder / f"{i}/adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": alpha}))
    with pytest.raises(StateDictError, match=r"adapter_config.json: expected the scaling \[8.0, .* got \[16.0"):
        merge([folder / "0", folder / "1"], out=folder / "out")
    merge([folder / "0", folder / "0"], out=folder / "out")
    names = sorted(path.name for path in (folder / "out").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors", "certificate.json"]


def test_values_that_are_not_finite_are_rejected_by_name(folder):
    states = versions(1, 3)
    states[1]["0.bias"][2] = math.nan
    paths = write(folder, states)
    for method in ("arithmetic", "karcher"):
        with pytest.raises(StateDictError, match=r"in1\.safetensors: 0\.bias: expected finite values, got NaN"):
            merge(paths, out=folder / "out.safetensors", method=method)
    assert not (folder / "out.safetensors").exists()
    merge(paths, [1, 0, 1], out=folder / "out.safetensors")  # A model with weight 0 is not read.


def test_an_overflow_of_the_dtype_is_rejected(folder):
    states = [{"w": torch.tensor([65000.0, x], dtype=torch.float16)} for x in (0.0, 65000.0)]
    with pytest.raises(StateDictError, match=r"models: w: expected a finite mean, got an overflow"):
        merge(write(folder, states), out=folder / "out.safetensors", method="radial")


def raw_file(path, header, data=b""):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_unaligned_tensors_of_other_programs_are_read(folder):
    x = torch.tensor([1.0, 2.0, 3.0])
    header = {
        "a": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]},
        "w": {"dtype": "F32", "shape": [3], "data_offsets": [1, 13]},
    }
    paths = [raw_file(folder / f"{i}.safetensors", header, b"\x01" + x.numpy().tobytes()) for i in range(2)]
    assert torch.equal(merged(folder, paths)["w"], x)


def test_float8_tensors_are_merged(folder):
    states = [{"w": torch.tensor([1.0, x, -4.0]).to(torch.float8_e4m3fn)} for x in (1.0, 2.0)]
    assert merged(folder, write(folder, states))["w"].float().tolist() == [1.0, 1.5, -4.0]


def test_scalars_and_empty_tensors_are_merged(folder):
    states = [{"s": torch.tensor(float(i)), "e": torch.zeros(0, 3), "w": torch.ones(2)} for i in (1, 3)]
    found = merged(folder, write(folder, states))
    assert found["s"] == 2
    assert found["e"].shape == (0, 3)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "is not a safetensors file"),
        ({"__metadata__": {"step": 1}}, b"", "is not a safetensors file: expected metadata that are strings"),
        ({"__metadata__": None}, b"", "is not a safetensors file: expected metadata that are strings"),
        ({"\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"1234", "is not a safetensors file"),
        ({"w": {"dtype": "F32", "shape": [2**61, 0, 2**61], "data_offsets": [0, 0]}}, b"", "is not a safetensors file"),
        ({"w": {"dtype": "F32", "shape": [2**40, 2**40, 0], "data_offsets": [0, 0]}}, b"", "is not a safetensors file"),
        ({"w": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, b"1234", "is not a safetensors file"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234", "is not a safetensors file"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"123", "is not complete"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678", "is not a safetensors file"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12345", "is not complete"),
    ],
)
def test_an_invalid_file_is_rejected_by_name(folder, header, data, message):
    path = raw_file(folder / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))}: {message}"):
        merge([path, path], out=folder / "out.safetensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "median"}, r"^method: expected"),
        ({"scope": "layer"}, r"^scope: expected"),
        ({"t": 0.5}, r"^t: expected None for method='arithmetic'"),
        ({"method": "bezier"}, r"^t: expected a number in \[0, 1\]"),
        ({"method": "bezier", "t": 1.5}, r"^t: expected"),
        ({"method": "slerp"}, r"^models: expected two models for method='slerp', got 3"),
        ({"weights": [1, 2]}, r"^weights: expected one for each of 3 models"),
        ({"manifolds": {"none*": Sphere(3)}}, r"^manifolds: expected names or patterns of leaves"),
        ({"out": "missing/out.safetensors"}, r"^out: expected a path in an existing folder"),
        ({"out": "."}, r"^out: expected a new folder or the result of a merge"),
        ({"out": "x" * 5000}, r"^out: expected a valid path, got .*: File name too long"),
        ({"out": "nul\0"}, r"^out: expected a valid path, got .*: embedded null byte"),
        ({"resume": "no"}, r"^resume: expected"),
        ({"out": "in0.safetensors"}, r"^out: expected a path that contains no input"),
        ({"shard_size": 10}, r"^shard_size: expected None, because out is a single file"),
    ],
)
@pytest.mark.usefixtures("as_shipped")
def test_an_invalid_argument_is_rejected_by_name(folder, monkeypatch, options, message):
    monkeypatch.chdir(folder)
    paths = write(folder, versions(1, 3))
    before = sorted(folder.iterdir())
    with pytest.raises(ArgumentError, match=message):
        merge(paths, **{"out": "out.safetensors"} | options)
    assert sorted(folder.iterdir()) == before


def test_invalid_models_are_rejected_by_name(folder):
    (path,) = write(folder, versions(1, 1))
    for models, message in (
        ([path], r"^models: expected a sequence of 2 to 32 models, got 1"),
        ([path, "x" * 5000], r"^models\[1\]: expected a valid path, got .*: File name too long"),
        ([path, folder / "none"], r"^models\[1\]: expected an existing file or folder"),
        ([path, 3], r"^models\[1\]: expected a path or a state dict"),
        ([path, folder / "x.bin"], r"^models\[1\]: expected a \.safetensors file"),
    ):
        (folder / "x.bin").write_bytes(b"")
        with pytest.raises(ArgumentError, match=message):
            merge(models, out=folder / "out.safetensors")


def test_average_dispatches_on_paths(folder):
    states = versions(6, 2)
    paths = write(folder, states)
    out = folder / "mean.safetensors"
    assert manifoldagg.average([*map(str, paths)], out=str(out)) == out
    assert same_bits(load_file(out), manifoldagg.average(states))
    place, info = manifoldagg.average(paths, [1, 2], out=out, method="karcher", return_info=True)
    assert place == Path(out)
    assert isinstance(info, MergeInfo)
    assert info.method == "karcher"
    with pytest.raises(
        ArgumentError, match=r"^out: expected the path of a file or folder, because models are in files"
    ):
        manifoldagg.average(paths)
    with pytest.raises(ArgumentError, match=r"^method: expected models in files or a path as out"):
        manifoldagg.average(states, method="karcher")


class ProgressLog(list):
    """A progress function that records its calls."""

    def __call__(self, done, total):
        self.append((done, total))


def test_a_plan_states_what_is_read_and_written(folder):
    paths = write(folder, [large(1, i) for i in range(2)])
    for method, times in (("arithmetic", 1), ("karcher", 2)):
        plan = plan_merge(paths, out=folder / "out.safetensors", method=method)
        flat = sum(part.num_bytes(0, part.size) for part in plan.parts if part.size > 1 and part.has_products)
        rest = sum(part.num_bytes(0, part.size) for part in plan.parts if part.size == 1 or not part.has_products)
        assert plan.bytes_read == times * flat + rest
        assert plan.estimate_seconds() > 0
        seen = ProgressLog()
        merge(paths, out=folder / "out.safetensors", method=method, progress=seen)
        assert (folder / "out.safetensors").stat().st_size == plan.bytes_written
        assert seen == sorted(seen)
        assert seen[-1] == (seen[-1][1],) * 2


def test_anonymous_memory_stays_small_for_one_huge_tensor(folder):
    """Each model is a sparse file of 256 MiB, which would occupy 1 GiB in float64. A thread samples the memory."""
    size = 1 << 27
    header = {"w": {"dtype": "BF16", "shape": [size], "data_offsets": [0, 2 * size]}}
    paths = []
    for i in range(2):
        path = raw_file(folder / f"{i}.safetensors", header)
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size + 2 * size)
        paths.append(path)
    peak = [0]
    done = threading.Event()

    def anonymous():
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) * 1024

    start = anonymous()

    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], anonymous() - start)
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        merge(paths, out=folder / "out.safetensors")
    finally:
        done.set()
        thread.join()
        for path in folder.iterdir():
            path.unlink()
    assert peak[0] < 256 << 20


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("arithmetic", {"weights": [1, 0]}),
        ("karcher", {"weights": [1, 0]}),
        ("bezier", {"t": 0.0}),
        ("slerp", {"t": 0.0}),
    ],
)
def test_an_adapter_with_all_the_weight_is_the_result_at_any_rank(folder, method, options):
    states = [adapter(i, rank) for i, rank in enumerate((2, 4))]
    paths = []
    for i, state in enumerate(states):
        (folder / f"a{i}").mkdir()
        save_file(state, folder / f"a{i}" / "adapter_model.safetensors")
        rank = state["base_model.model.q.lora_A.weight"].shape[0]
        config = {"r": rank, "lora_alpha": 2 * rank}
        (folder / f"a{i}" / "adapter_config.json").write_text(json.dumps(config))
        paths.append(folder / f"a{i}")
    merge(paths, out=folder / "mean", method=method, **options)
    result = load_file(folder / "mean" / "adapter_model.safetensors")
    error = (product(result) - product(states[0])).norm() / product(states[0]).norm()
    assert error < 1e-6
    assert result["base_model.model.q.lora_A.weight"].shape[0] == 4
    assert json.loads((folder / "mean" / "adapter_config.json").read_text()) == {"r": 4, "lora_alpha": 8}


def test_the_rank_of_an_adapter_in_memory_counts_for_the_configuration(folder):
    save_file(adapter(0, 2), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4}))
    merge([folder, adapter(1, 4)], out=(folder.parent / f"{folder.name}-mean"))
    config = json.loads((folder.parent / f"{folder.name}-mean" / "adapter_config.json").read_text())
    assert config == {"r": 4, "lora_alpha": 8}


def test_a_folder_is_replaced_only_if_it_contains_nothing_but_the_result_of_a_merge(folder):
    source = write_shards(folder / "source", version(1, 0), 2)
    out = folder / "mean"
    merge([source, source], out=out)
    assert set(MergeInfo.from_json((out / "certificate.json").read_text()).files) == {
        path.name for path in out.iterdir() if path.name != "certificate.json"
    }
    merge([source, source], [2, 1], out=out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ArgumentError, match=r"^out: expected a new folder .*, which also contains 'notes.txt'"):
        merge([source, source], out=out)
    assert (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    (out / "certificate.json").write_text("{}")
    with pytest.raises(ArgumentError, match=r"^out: expected a new folder or the result of a merge"):
        merge([source, source], out=out)


def test_special_files_and_folders_are_not_replaced(folder):
    paths = write(folder, versions(1, 2))
    os.mkfifo(folder / "pipe.safetensors")
    with pytest.raises(ArgumentError, match=r"^out: expected a new path or a file"):
        merge(paths, out=folder / "pipe.safetensors")
    (folder / "mean.certificate.json").mkdir()
    with pytest.raises(ArgumentError, match=r"^out: expected the path of a file, got the folder"):
        merge(paths, out=folder / "mean.safetensors")
    (folder / ".other.safetensors.merge").write_text("a file")
    with pytest.raises(CheckpointError, match=r"could not be written: File exists"):
        merge(paths, out=folder / "other.safetensors")
