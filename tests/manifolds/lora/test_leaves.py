"""Adapters of state dicts as leaves: what they do to a model is a point, and comes back in the format it had."""

import json
import math
from types import SimpleNamespace

import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg import wire
from manifoldagg.errors import ArgumentError, StateDictError, WireError
from manifoldagg.federated import Payload
from manifoldagg.manifolds import LowRank, ParameterSpace, Sphere
from manifoldagg.manifolds.lora.scaling import ScaledModule, resolve_scalings
from manifoldagg.manifolds.spec import layout_digest
from tests.support import draw, rotation, seeds

EPS = 2.0**-52
Q = "base_model.model.q.lora_{}.weight"
V = "base_model.model.0.v_proj.lora_{}.default.weight"
BIAS = "base_model.model.q.lora_B.bias"
HEAD = "base_model.model.head.weight"
MAGNITUDE = "base_model.model.q.lora_magnitude_vector"


def adapter(seed, rank, dtype=torch.float64):
    state = {
        Q.format("A"): draw(seed, rank, 10),
        Q.format("B"): draw(seed + 1, 8, rank),
        BIAS: draw(seed + 2, 8),
        MAGNITUDE: draw(seed + 3, 8),
        V.format("A"): draw(seed + 4, rank, 2, 3, 1),
        V.format("B"): draw(seed + 5, 5, rank, 1, 1),
        HEAD: draw(seed + 6, 3, 4),
    }
    return {name: x.to(dtype) for name, x in state.items()}


def product(state, names=Q):
    a, b = (state[names.format(side)].double().flatten(1) for side in "AB")
    return b @ a


def turned(state, seed, condition=10.0):
    """The same adapter in another gauge."""
    rank = state[Q.format("A")].shape[0]
    values = torch.logspace(0, -1, rank, base=condition, dtype=torch.float64)
    left, right = rotation(seed, rank), rotation(seed + 1, rank)
    a, b = Q.format("A"), Q.format("B")
    return state | {a: right.mT / values @ left.mT @ state[a], b: state[b] @ (left * values @ right)}


def best(x, rank):
    u, values, v = scipy.linalg.svd(x.numpy(), full_matrices=False)
    return torch.from_numpy((u[:, :rank] * values[:rank]) @ v[:rank])


def off(state, names=Q):
    """How far from balanced."""
    a, b = (state[names.format(side)].double().flatten(1) for side in "AB")
    return (b.mT @ b - a @ a.mT).abs().max()


@given(seeds, st.integers(1, 6), st.integers(1, 12), st.floats(0.1, 10), st.floats(0.1, 10))
def test_a_state_dict_of_any_rank_can_be_converted_and_restored(seed, rank, other, scaling, theirs):
    space = ParameterSpace.of_state_dict(adapter(seed, rank), adapters=True, scaling=scaling)
    state = adapter(seed + 7, other)
    own = None if other == rank and seed % 2 else theirs
    back = space.state_dict(space.point(state, scaling=own))
    assert [*back] == [*state]
    ratio = 1.0 if own is None else theirs / scaling
    for names, size in ((Q, 8), (V, 5)):
        expected = ratio * best(product(state, names), min(rank, size))
        assert (product(back, names) - expected).norm() <= 1e4 * EPS * ratio * product(state, names).norm()
        assert back[names.format("A")].shape[0] == back[names.format("B")].shape[1] == rank
        if other >= rank and rank <= size:
            assert off(back, names) <= 1e3 * EPS * ratio * product(state, names).norm()
    assert torch.allclose(back[BIAS], ratio * state[BIAS], rtol=4 * EPS, atol=0)
    assert torch.equal(back[HEAD], state[HEAD])
    assert torch.equal(back[MAGNITUDE], state[MAGNITUDE])
    assert back[V.format("A")].shape[1:] == (2, 3, 1)


@given(seeds, st.floats(0, 4).map(lambda e: 10.0**e))
def test_results_do_not_depend_on_the_gauge(seed, condition):
    state = adapter(seed, 3)
    space = ParameterSpace.of_state_dict(state, adapters=True)
    plain, other = (space.state_dict(space.point(x)) for x in (state, turned(state, seed, condition)))
    assert (product(plain) - product(other)).norm() <= 100 * EPS * condition * product(state).norm()
    assert off(other) <= 100 * EPS * condition * product(state).norm()


def test_dtypes_shapes_and_order_are_those_of_the_space():
    state = adapter(0, 2, torch.bfloat16) | {Q.format("B"): draw(1, 8, 2).float(), "steps": torch.tensor(3)}
    space = ParameterSpace.of_state_dict(state, adapters=True, scaling=0.5)
    assert space.dtype == torch.float32
    assert dict(space.manifolds) == {
        "base_model.model.q.lora.weight": LowRank(8, 10, 2),
        "base_model.model.0.v_proj.lora.default.weight": LowRank(5, 6, 2),
    }
    back = space.state_dict(space.point(state), space.buffers(state))
    assert {name: (x.dtype, x.shape) for name, x in back.items()} == {
        name: (x.dtype, x.shape) for name, x in state.items()
    }
    assert (product(back) - product(state)).norm() <= 2.0**-8 * product(state).norm()
    # A bias times a scaling is not rounded to bfloat16 inside.
    (leaf,) = (leaf for leaf in space.layout.leaves if leaf.name == BIAS)
    assert leaf.dtype == torch.float32
    assert torch.equal(back[BIAS], state[BIAS])


def test_initial_factors_are_returned_unchanged():
    begun = {name: torch.zeros_like(x) if "lora_B.w" in name else x for name, x in adapter(0, 4).items()}
    space = ParameterSpace.of_state_dict(begun, adapters=True, scaling=3.0)
    back = space.state_dict(space.point(begun))
    for name in (Q.format("A"), Q.format("B")):
        assert torch.equal(back[name], begun[name])


def test_factors_of_a_zero_matrix_can_be_trained():
    space = ParameterSpace.of_state_dict(adapter(0, 4), adapters=True)
    back = space.state_dict(torch.zeros_like(space.point(adapter(0, 4))))
    assert not back[Q.format("B")].any()
    assert torch.linalg.matrix_rank(back[Q.format("A")]) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_of_a_lower_rank_can_be_trained_in_all_directions(dtype):
    space = ParameterSpace.of_state_dict(adapter(0, 6, dtype), adapters=True)
    back = space.state_dict(space.point(adapter(10, 2, dtype)))
    a, b = back[Q.format("A")], back[Q.format("B")]
    assert not b[:, 2:].any()
    assert torch.linalg.matrix_rank(a) == 6
    # The way that B goes in the first step of a training has full rank.
    assert torch.linalg.matrix_rank(draw(0, 8, 10, dtype=dtype) @ a.mT) == 6
    assert (product(back) - product(adapter(10, 2, dtype))).norm() <= 8 * torch.finfo(dtype).eps * product(back).norm()


def test_factors_may_have_a_higher_rank_than_their_matrix():
    state = {"head.lora_A.weight": draw(0, 8, 20), "head.lora_B.weight": draw(1, 2, 8)}
    space = ParameterSpace.of_state_dict(state, adapters=True)
    assert space.manifolds == (("head.lora.weight", LowRank(2, 20, 2)),)
    back = space.state_dict(space.point(state))
    assert back["head.lora_A.weight"].shape == (8, 20)
    names = "head.lora_{}.weight"
    assert (product(back, names) - product(state, names)).norm() <= 100 * EPS * product(state, names).norm()
    assert not back["head.lora_B.weight"][:, 2:].any()
    assert back["head.lora_A.weight"].abs().amax(1).all()


def config(**fields):
    return {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    } | fields


PAIRS = [ScaledModule("base_model.model.layers.0.q_proj", 4), ScaledModule("base_model.model.layers.1.v_proj", 4)]


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (2, [2, 2]),
        (config(), [2, 2]),
        (SimpleNamespace(**config(peft_type=SimpleNamespace(value="LORA"))), [2, 2]),
        (config(use_rslora=True), [4, 4]),
        (config(alpha_pattern={"v_proj": 2}), [2, 0.5]),
        (config(alpha_pattern={r"layers\.\d\.v_proj": 2, "v_proj": 4}), [2, 0.5]),
        (config(alpha_pattern={"^layers.0.q_proj": 2, "proj": 1}), [0.5, 2]),
        ({"q_proj": 3.0, r".*v_proj": 0.5}, [3, 0.5]),
    ],
)
def test_scalings_agree_with_peft(scaling, expected):
    assert resolve_scalings(scaling, PAIRS) == expected


def test_ranks_of_a_config_must_match_the_tensors():
    pairs = [PAIRS[0], PAIRS[1]._replace(rank=16)]
    assert resolve_scalings(config(rank_pattern={"v_proj": 16}), pairs) == [2, 0.5]
    assert resolve_scalings(config(rank_pattern={"v_proj": 16}, use_rslora=True), pairs) == [4, 2]


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        (0.0, "scaling: expected a finite number > 0, got 0.0"),
        (math.nan, "scaling: expected a finite number"),
        ("2", "scaling: expected a finite number"),
        ({"q_proj": 1.0}, "scaling: expected a pattern for base_model.model.layers.1.v_proj"),
        ({"_proj": 1.0, ".*": 1.0, "k": 2.0}, "scaling: expected patterns of adapters, got '_proj', 'k'"),
        ({".*": -1.0}, r"scaling: \.\*: expected a finite number > 0, got -1.0"),
        ({"(": 1.0}, r"scaling: expected regular expressions, got '\('"),
        (config(r=8), "expected the config of this adapter, got rank 8 for base_model.model.layers.0.q_proj, whose rank is 4"),
        (config(rank_pattern={"v_proj": 2}), "got rank 2 for base_model.model.layers.1.v_proj, whose rank is 4"),
        (config(peft_type="ADALORA"), "expected the config of a LoRA adapter, got one of ADALORA"),
        (config(lora_alpha=0), "scaling: lora_alpha: expected a finite number > 0, got 0"),
        (config(lora_alpha=None), "scaling: lora_alpha: expected a finite number"),
        (config(rank_pattern=[4]), "scaling: rank_pattern: expected a mapping, got list"),
        (config(target_parameters=["experts"]), "got one with target_parameters"),
    ],
)  # fmt: skip
def test_invalid_scalings_are_rejected_by_name(scaling, words):
    with pytest.raises(ArgumentError, match=words):
        resolve_scalings(scaling, PAIRS)


def spaced(**options):
    return ParameterSpace.of_state_dict(adapter(0, 2), adapters=True, **options)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("state", "options", "words"),
    [
        ({"w": draw(0, 2, 2)}, {}, "expected pairs such as q.lora_A.weight and q.lora_B.weight, got names without a pair"),
        ({"x.lora_A.weight": draw(0, 2, 2)}, {}, "x.lora_A.weight: expected x.lora_B.weight as the other factor"),
        ({"x.lora_B.weight": draw(0, 2, 2)}, {}, "x.lora_B.weight: expected pairs"),
        (adapter(0, 2) | {"x.hada_w1_a": draw(0, 2)}, {}, "x.hada_w1_a: .* another kind of adapter"),
        (adapter(0, 2) | {Q.format("A"): draw(0, 3, 10)}, {}, r"q.lora_B.weight: expected shape \(any, 3\)"),
        (adapter(0, 2) | {Q.format("A"): draw(0, 2, 10).long()}, {}, "q.lora_A.weight: expected a floating tensor"),
        (adapter(0, 2) | {Q.format("A"): draw(0, 2, 10).to_sparse()}, {}, "q.lora_A.weight: expected a dense tensor"),
        (adapter(0, 2) | {"z.lora_B.bias": draw(0, 8)}, {}, "z.lora_B.bias: expected the bias of a factor"),
        (adapter(0, 2) | {"base_model.model.q.lora.weight": draw(0, 8)}, {}, "q.lora.weight: expected another name"),
        (adapter(0, 2), {"scaling": config()}, "got rank 4 for base_model.model.q, whose rank is 2"),
        (adapter(0, 2), {"adapters": 1}, "adapters: expected True or False, got 1"),
        (adapter(0, 2), {"adapters": False, "scaling": 2.0}, "scaling: expected 1 without adapters=True, got 2.0"),
        (adapter(0, 2), {"buffer_policy": ["*lora*"]}, "adapters: .*lora.weight: expected a leaf of shape"),
        (adapter(0, 2), {"buffer_policy": ["*bias"]}, "adapters: .*lora_B.bias: expected a leaf of shape"),
        (adapter(0, 2), {"manifolds": {"*q.lora.weight": Sphere(2)}}, "adapters: .*q.lora.weight: expected a leaf of shape"),
    ],
)  # fmt: skip
def test_invalid_adapters_are_rejected_by_name(state, options, words):
    with pytest.raises(ArgumentError, match=words):
        ParameterSpace.of_state_dict(state, **{"adapters": True} | options)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("change", "scaling", "words"),
    [
        ({Q.format("A"): None}, None, "missing: base_model.model.q.lora_A.weight"),
        ({HEAD: None}, None, f"missing: {HEAD}"),
        ({"more": draw(0, 2)}, None, "extra: more"),
        ({"base_model.model.q.lora.weight": draw(0, 18, 2)}, None, "extra: base_model.model.q.lora.weight"),
        ({Q.format("A"): draw(0, 2, 11)}, None, "expected shapes .* up to the rank"),
        ({Q.format("A"): draw(0, 2, 10).float()}, None, None),
        ({Q.format("A"): draw(0, 3, 10)}, None, r"expected shape \(any, 3\)"),
        ({Q.format("A"): draw(0, 2, 10) / 0}, None, "q.lora_A.weight: expected finite values, got NaN or infinity"),
        ({Q.format("B"): draw(0, 8, 2) * 1e300}, 1e300, "q.lora_B.weight: expected finite values in .* after scaling by 1e[+]300"),
        ({BIAS: draw(0, 9)}, None, f"{BIAS}: expected torch.float64 of shape"),
        ({}, config(), "expected the config of this adapter, got rank 4 for base_model.model.q, whose rank is 2"),
    ],
)  # fmt: skip
def test_mismatched_state_dicts_are_rejected_by_name(change, scaling, words):
    state = {name: x for name, x in (adapter(3, 2) | change).items() if x is not None}
    space = spaced()
    if words is None:
        assert space.point(state).dtype == torch.float64
        return
    with pytest.raises(ArgumentError, match=words):
        space.point(state, scaling=scaling)


def test_an_overflow_of_a_dtype_is_rejected_by_name():
    for kept, words in (
        ({Q.format("A"), Q.format("B")}, "lora_A.weight"),
        (adapter(0, 2).keys(), "lora_magnitude_vector"),
    ):
        state = {name: x.half() for name, x in adapter(0, 2).items() if name in kept}
        space = ParameterSpace.of_state_dict(state, adapters=True)
        with pytest.raises(
            StateDictError, match=f"{words}: expected values in the range of torch.float16, got an overflow"
        ):
            space.state_dict(1e10 * space.point(state))
    state = {name: x for name, x in adapter(0, 2).items() if name in (Q.format("A"), Q.format("B"), BIAS)}
    space = ParameterSpace.of_state_dict(state | {BIAS: state[BIAS].half()}, adapters=True)
    with pytest.raises(StateDictError, match=f"{BIAS}: expected values in the range of torch.float16, got an overflow"):
        space.state_dict(1e10 * space.point(state | {BIAS: state[BIAS].half()}))


def test_an_overflow_by_scaling_is_rejected_with_the_name_of_a_factor():
    """Where the leaf's dtype does not hold what float64 does, whether something is cut or not."""
    space = ParameterSpace.of_state_dict(adapter(0, 2, torch.float32), adapters=True)
    for rank in (2, 4):
        with pytest.raises(
            StateDictError,
            match="^source: base_model.model.q.lora_B.weight: .* after scaling by 1e[+]200, got an overflow",
        ):
            space.point(adapter(3, rank, torch.float32), scaling=1e200)


def test_stored_sums_can_have_another_rank():
    name = "base_model.model.q.lora.weight"
    own = LowRank(8, 10, 2, state_rank=7)
    space = ParameterSpace.of_state_dict(adapter(0, 2), {name: own}, adapters=True)
    assert dict(space.manifolds)[name] == own
    same = ParameterSpace.of_spec(json.loads(json.dumps(space.spec())))
    assert same == space
    assert dict(same.manifolds)[name].state_rank == 7
    with pytest.raises(ArgumentError, match=f"{name}: expected a leaf of shape"):
        ParameterSpace.of_state_dict(adapter(0, 2), {name: LowRank(9, 9, 2)}, adapters=True)


def test_a_spec_describes_adapters_and_the_digest_depends_on_the_scaling():
    space = spaced(scaling=2.0)
    told = json.loads(json.dumps(space.spec()))
    same = ParameterSpace.of_spec(told)
    assert same == space
    assert hash(same) == hash(space)
    state = adapter(5, 3)
    assert torch.equal(same.point(state, scaling=1.5), space.point(state, scaling=1.5))
    other = spaced(scaling=1.0)
    assert layout_digest(other.layout, other.adapters) != layout_digest(space.layout, space.adapters)
    assert layout_digest(other.layout) == layout_digest(space.layout)
    data = wire.pack(Payload(space.point(state)[None], 10), spec=told)
    assert torch.equal(wire.unpack(data, spec=space.spec()).points[0], space.point(state))
    with pytest.raises(WireError, match="layout: expected names"):
        wire.unpack(data, spec=other.spec())


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    "change",
    [
        lambda told: told["factors"][0].__setitem__(2, -1.0),
        lambda told: told["factors"][0].__setitem__(2, "2"),
        lambda told: told["factors"][0][0].__setitem__(0, "nobody"),
        lambda told: told["factors"][0][0].__setitem__(1, [3, 10]),
        lambda told: told["factors"][0][1].__setitem__(1, [8, 2, 2]),
        lambda told: told["factors"].append(told["factors"][0]),
        lambda told: told["factors"].pop(0),
        lambda told: told["biases"][0].__setitem__(1, "nobody"),
        lambda told: told.pop("biases"),
        lambda told: told.__setitem__("factors", None),
    ],
)
def test_an_invalid_spec_is_rejected(change):
    told = json.loads(json.dumps(spaced().spec()))
    change(told["adapters"])
    with pytest.raises(ArgumentError, match="^spec: "):
        ParameterSpace.of_spec(told)


def test_other_leaves_have_their_assigned_spaces_and_a_module_loads_the_result():
    head = torch.nn.functional.normalize(draw(6, 3, 4), dim=-1)
    state = adapter(0, 2) | {HEAD: head}
    space = ParameterSpace.of_state_dict(state, {HEAD: Sphere(4)}, adapters=True, scaling=2.0)
    assert dict(space.manifolds)[HEAD].space == Sphere(4)
    module = torch.nn.Module()
    for name, x in state.items():
        owner = module
        for part in name.split(".")[:-1]:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(name.rpartition(".")[2], torch.nn.Parameter(torch.zeros_like(x)))
    point = space.point(state)
    space.load(module, point)
    assert (product(module.state_dict()) - product(state)).norm() <= 100 * EPS * product(state).norm()
    with pytest.raises(ArgumentError, match="space: expected a space of a module"):
        space.loss(module, torch.nn.functional.mse_loss)
