"""Tests of `average_adapters` against dense matrices and SciPy's SVD, for equivalent factorisations of adapters."""

import inspect

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg import ParameterSpace, aggregate, average_adapters
from manifoldagg.errors import ArgumentError, StateDictError
from manifoldagg.federated.rules import FedAsync
from manifoldagg.manifolds.lora.peft import FactorPair, classify_tensors
from tests.support import LargestTensor, draw, rotation, seeds

EPS = 2.0**-52
A, B = "model.q_proj.lora_A.weight", "model.q_proj.lora_B.weight"
ranks = st.lists(st.integers(1, 4), min_size=1, max_size=5)


def adapter(seed, rank, *, m=8, n=10, dtype=torch.float64):
    return {A: draw(seed, rank, n, dtype=dtype), B: draw(seed + 1, m, rank, dtype=dtype)}


def turned(state, seed, condition):
    """Return another factorisation of the same adapter."""
    rank = state[A].shape[0]
    values = torch.logspace(0, -1, rank, base=condition, dtype=torch.float64)
    left, right = rotation(seed, rank), rotation(seed + 1, rank)
    return state | {A: right.mT / values @ left.mT @ state[A], B: state[B] @ (left * values @ right)}


def product(state):
    return state[B].double() @ state[A].double()


def exact(states, weights, scalings):
    total = sum(weights)
    return sum(w / total * s * product(x) for x, w, s in zip(states, weights, scalings, strict=True))


def average_with_error(states, weights, rank, **options):
    found, info = average_adapters(states, weights, rank, return_info=True, **options)
    return found, info.error


def best(z, rank):
    u, values, v = scipy.linalg.svd(z.numpy(), full_matrices=False)
    near = torch.from_numpy((u[:, :rank] * values[:rank]) @ v[:rank])
    return near, float(np.linalg.norm(values[rank:]) / np.linalg.norm(values))


@given(seeds, ranks, st.integers(1, 6))
def test_the_result_is_the_best_approximation_of_the_rank(seed, sizes, rank):
    states = [adapter(seed + 2 * i, size) for i, size in enumerate(sizes)]
    weights, scalings = draw(seed, 2, len(states)).abs().add(0.1).tolist()
    mean = exact(states, weights, scalings)
    near, expected = best(mean, rank)
    found, info = average_adapters(states, weights, rank, scaling=scalings, return_info=True)
    error, rest = info.error, info.residual
    assert [*found] == [*states[0]]
    assert found[A].shape == (rank, 10)
    assert found[B].shape == (8, rank)
    assert (product(found) - near).norm() <= 1e4 * EPS * mean.norm()
    assert abs(error - expected) <= 100 * EPS
    # The factors are balanced up to the rank of the mean. With the residual, the product is exact.
    kept = min(rank, sum(sizes), 8)
    assert (found[B].mT @ found[B] - found[A] @ found[A].mT)[:kept, :kept].abs().max() <= 100 * EPS * mean.norm()
    whole = product(found) + (product(rest) if rest else 0)
    assert (whole - mean).norm() <= 100 * EPS * mean.norm()
    if rank >= min(sum(sizes), 8):
        assert error <= 20 * EPS
        assert rest == {}
    else:
        assert rest.keys() == {A, B}
        assert len(rest[A]) == min(sum(sizes), 8) - rank


@given(seeds, st.floats(0, 6).map(lambda e: 10.0**e))
def test_the_result_is_independent_of_the_factorisation(seed, condition):
    # The factors are orthonormal, so all rounding errors come from the condition of the factorisation.
    states = [adapter(seed + 2 * i, 2) for i in range(3)]
    states = [{A: torch.linalg.qr(x[A].mT).Q.mT, B: torch.linalg.qr(x[B]).Q} for x in states]
    gauged = [turned(x, seed + i, condition) for i, x in enumerate(states)]
    plain, first = average_with_error(states, [1, 2, 3], 6)
    other, second = average_with_error(gauged, [1, 2, 3], 6)
    assert (product(plain) - product(other)).norm() <= 100 * EPS * condition
    assert max(first, second) <= 100 * EPS * condition
    assert (
        abs(average_with_error(gauged, [1, 2, 3], 3)[1] - average_with_error(states, [1, 2, 3], 3)[1])
        <= 100 * EPS * condition
    )


def test_ten_factorisations_of_one_adapter_average_to_it():
    one = adapter(0, 4)
    states = [turned(one, i, 10.0) for i in range(10)]
    found, error = average_with_error(states, None, 4)
    size = product(one).norm()
    assert (product(found) - product(one)).norm() <= 100 * EPS * size
    assert error <= 100 * EPS
    factors = {name: torch.stack([x[name] for x in states]).mean(0) for name in (A, B)}
    assert (product(factors) - product(one)).norm() > 0.5 * size


def test_single_precision_results_are_exact_up_to_rounding_of_the_factors():
    states = [adapter(2 * i, 4, m=60, n=80, dtype=torch.float32) for i in range(3)]
    found, error = average_with_error(states, [1, 1, 2], 12)
    mean = exact(states, [1, 1, 2], [1, 1, 1])
    assert found[A].dtype == torch.float32
    assert error <= 100 * EPS
    assert (product(found) - mean).norm() <= 2.0**-23 * mean.norm()


def test_narrow_dtypes_are_preserved_and_inputs_are_not_modified():
    states = [adapter(2 * i, 2, dtype=torch.bfloat16) for i in range(2)]
    before = [{name: x.clone() for name, x in state.items()} for state in states]
    found = average_adapters(states, None, 4)
    assert {x.dtype for x in found.values()} == {torch.bfloat16}
    mean = exact(states, [1, 1], [1, 1])
    assert (product(found) - mean).norm() <= 2.0**-7 * mean.norm()
    assert all(torch.equal(state[name], old[name]) for state, old in zip(states, before, strict=True) for name in old)


def test_every_kind_of_tensor_is_classified():
    def state(seed, rank):
        return {
            "base_model.model.q.lora_A.default.weight": draw(seed, rank, 5),
            "base_model.model.q.lora_B.default.weight": draw(seed + 1, 4, rank),
            "base_model.model.q.lora_B.default.bias": draw(seed + 2, 4),
            "base_model.model.q.lora_magnitude_vector": draw(seed + 3, 4),
            "emb.lora_embedding_A": draw(seed + 4, rank, 11),
            "emb.lora_embedding_B": draw(seed + 5, 3, rank),
            "conv.lora_A.weight": draw(seed + 6, rank, 2, 3, 3),
            "conv.lora_B.weight": draw(seed + 7, 6, rank, 1, 1),
            "classifier.weight": draw(seed + 8, 2, 4),
            "steps": torch.tensor(7),
        }

    one, two = state(0, 1), state(10, 2)
    found, error = average_with_error([one, two], [1, 3], 3, scaling=[2.0, 0.5])
    assert [*found] == [*one]
    assert error <= 100 * EPS

    def mean(name):
        return 0.25 * one[name] + 0.75 * two[name]

    q, emb = "base_model.model.q.lora_{}.default.weight", "emb.lora_embedding_{}"
    for pattern in (q, emb):
        whole = sum(c * x[pattern.format("B")] @ x[pattern.format("A")] for c, x in ((0.5, one), (0.375, two)))
        assert torch.allclose(found[pattern.format("B")] @ found[pattern.format("A")], whole, rtol=0, atol=1e-13)
    pixels = draw(1, 1, 2, 5, 5)

    def convolved(x):
        inside = torch.nn.functional.conv2d(pixels, x["conv.lora_A.weight"])
        return torch.nn.functional.conv2d(inside, x["conv.lora_B.weight"])

    assert torch.allclose(convolved(found), 0.5 * convolved(one) + 0.375 * convolved(two), rtol=0, atol=1e-12)
    bias = "base_model.model.q.lora_B.default.bias"
    assert torch.allclose(found[bias], 0.5 * one[bias] + 0.375 * two[bias], rtol=0, atol=1e-15)
    for name in ("base_model.model.q.lora_magnitude_vector", "classifier.weight"):
        assert torch.allclose(found[name], mean(name), rtol=0, atol=1e-15)
    assert found["steps"] == 7


def test_factor_pairs_are_named_by_their_modules():
    parts = classify_tensors(["a.lora_A.weight", "a.lora_B.weight", "lora_A.x.weight", "lora_B.x.weight", "e.lora_embedding_A.x", "e.lora_embedding_B.x", "h.bias"])  # fmt: skip
    assert [pair.module_name for pair in parts.pairs] == ["a", "", "e"]
    assert parts.pairs[2] == FactorPair("e.lora_embedding_A.x", "e.lora_embedding_B.x")
    assert parts.unpaired == ("h.bias",)


def test_padding_to_a_larger_rank_is_trainable():
    state = adapter(0, 2)
    found = average_adapters([state], None, 12)
    assert found[A].shape == (12, 10)
    assert (product(found) - product(state)).norm() <= 100 * EPS * product(state).norm()
    # As in PEFT's initialisation, B is 0 and A is not, so the derivative by B is not 0. The padding is deterministic.
    assert not found[B][:, 2:].any()
    assert found[A][2:].abs().amax() <= 10**-0.5
    assert torch.linalg.matrix_rank(found[A]) == 10
    assert torch.equal(average_adapters([state], None, 12)[A], found[A])
    zero = {name: torch.zeros_like(x) for name, x in state.items()}
    found, info = average_adapters([zero, zero], None, 1, return_info=True)
    assert (info.error, info.residual) == (0.0, {})
    assert not product(found).any()
    assert found[A].all()


def test_an_initial_adapter_is_accepted():
    state = adapter(0, 2)
    start = state | {B: torch.zeros(8, 2).double()}
    found, error = average_with_error([start, state], [3, 1], 2)
    assert (product(found) - product(state) / 4).norm() <= 100 * EPS
    assert error <= 100 * EPS


def test_average_adapters_has_the_common_signature_of_averages():
    """The arguments that follow the common ones are keyword-only."""
    parameters = inspect.signature(average_adapters).parameters.values()
    bare = inspect.Signature([one.replace(annotation=inspect.Parameter.empty) for one in parameters])
    assert str(bare) == "(adapters, weights=None, rank=None, *, return_info=False, scaling=1.0)"


def test_the_default_rank_of_a_pair_is_its_largest_input_rank():
    q, k = "q.lora_{}.weight", "k.lora_{}.weight"

    def state(seed, *ranks):
        pairs = zip((q, k), ranks, strict=True)
        return {
            name.format(x): y for name, rank in pairs for x, y in zip("AB", adapter(seed, rank).values(), strict=True)
        }

    states = [state(0, 4, 2), state(2, 3, 3)]
    for ordered in (states, states[::-1]):
        found = average_adapters(ordered)
        assert [len(found[name.format("A")]) for name in (q, k)] == [4, 3]
    one = average_adapters(states[:1])
    assert {name: x.shape for name, x in one.items()} == {name: x.shape for name, x in states[0].items()}
    expected = average_adapters(states, None, 4)
    found, info = average_adapters(states, return_info=True)
    assert torch.equal(found[q.format("B")], expected[q.format("B")])
    assert info.error > 0


def test_the_info_has_a_short_repr():
    states = [adapter(2 * i, 2) for i in range(2)]
    _, info = average_adapters(states, None, 2, return_info=True)
    assert repr(info) == f"AdapterAverageInfo(error={info.error:.3g}, residual=dict of 2 tensors)"


def test_num_batches_tracked_is_the_largest_of_the_inputs():
    states = [adapter(0, 1) | {"norm.num_batches_tracked": torch.tensor(count)} for count in (3, 8, 1)]
    assert average_adapters(states)["norm.num_batches_tracked"] == 8


def test_a_tie_at_the_truncation_warns():
    ties = {A: torch.eye(3), B: torch.eye(3)}
    with pytest.warns(UserWarning, match=r"two singular values are equal at model.q_proj.*of rank 2 is not unique"):
        average_adapters([ties], None, 2)


def test_weights_are_normalised():
    one, two = adapter(0, 2), adapter(2, 2)
    found = average_adapters([one, two], [0, 5], 2)
    assert (product(found) - product(two)).norm() <= 100 * EPS * product(two).norm()


@given(seeds, st.floats(0.1, 10))
def test_the_scaled_residual_makes_the_weights_exact(seed, receiver):
    states = [adapter(seed, 1), adapter(seed + 2, 2), adapter(seed + 4, 3)]
    own = [8.0, 4.0, 8 / 3]  # lora_alpha / r
    weight = draw(seed + 6, 8, 10)
    found, info = average_adapters(states, None, 2, scaling=[s / receiver for s in own], return_info=True)
    changed = weight + receiver * product(info.residual) + receiver * product(found)
    mean = exact(states, [1, 1, 1], own)
    assert (changed - (weight + mean)).norm() <= 100 * EPS * (mean.norm() + weight.norm())


@pytest.mark.parametrize(
    ("a", "b"), [(torch.float64, torch.bfloat16), (torch.bfloat16, torch.float64), (torch.float16, torch.bfloat16)]
)
def test_factors_of_different_dtypes_are_not_rounded_to_each_other(a, b):
    mixed = adapter(2, 2)
    mixed = {A: mixed[A].to(a), B: mixed[B].to(b)}
    states = [adapter(0, 2), mixed]
    found = average_adapters(states, None, 4)
    mean = exact(states, [1, 1], [1, 1])
    assert (product(found) - mean).norm() <= 100 * EPS * mean.norm()


def test_a_factor_outside_the_range_of_the_other_dtype_is_averaged():
    wide = {A: torch.full((1, 10), 1e5), B: torch.ones(8, 1, dtype=torch.float16)}
    found = average_adapters([adapter(0, 1), wide], None, 2)
    mean = exact([adapter(0, 1), wide], [1, 1], [1, 1])
    assert (product(found) - mean).norm() <= 100 * EPS * mean.norm()


@pytest.mark.parametrize("size", [1e-100, 1e100])
def test_the_error_is_correct_for_any_scale(size):
    states = [adapter(2 * i, 2) for i in range(2)]
    grown = [{name: size * x for name, x in state.items()} for state in states]
    assert abs(average_with_error(grown, None, 2)[1] - average_with_error(states, None, 2)[1]) <= 100 * EPS


BIAS = "model.q_proj.lora_B.bias"


@pytest.mark.parametrize(
    ("states", "scaling", "words"),
    [
        ([adapter(0, 2, dtype=torch.float16)] * 2, 1e12, f"{A}: expected an average within .*torch.float16, .* `scaling`"),
        ([adapter(0, 2, dtype=torch.float16) | {BIAS: torch.full((8,), 6e4).half()}], 2.0, f"{BIAS}: .*torch.float16"),
        ([adapter(0, 2, dtype=torch.float32)] * 3, [1e308] * 3, f"{A}.*: expected an average within .* `scaling`"),
        ([{name: 1e200 * x for name, x in adapter(0, 2).items()}], 1.0, f"{A}, {B}: .*torch.float64"),
        ([adapter(0, 2) | {BIAS: torch.full((8,), 1e308, dtype=torch.float64)}], 2.0, f"{BIAS}: .*torch.float64"),
        ([adapter(0, 2, dtype=torch.float16), {A: torch.full((1, 10), 1e9), B: torch.full((8, 1), 1e9)}], 1.0, f"{A}: "),
    ],
)  # fmt: skip
def test_an_average_beyond_its_dtype_is_rejected_by_name(states, scaling, words):
    with pytest.raises(StateDictError, match=words):
        average_adapters(states, None, 2, scaling=scaling)


@pytest.mark.parametrize(
    "name",
    [
        "k.ia3_l", "k.ia3_l.default", "k.hada_w1_a", "k.lokr_w1", "k.oft_r", "k.oft_R.weight", "k.boft_R", "k.vera_lambda_b",
        "k.vblora_logits_A", "k.randlora_lambda", "k.fourierft_spectrum", "k.hra_u", "k.lora_ranknum", "k.poly_lora_A",
    ],
)  # fmt: skip
def test_other_kinds_of_adapters_are_rejected_by_name(name):
    with pytest.raises(StateDictError, match=rf"adapters\[0\]: {name}: .* another kind"):
        average_adapters([adapter(0, 1) | {name: torch.ones(2)}], None, 1)


@pytest.mark.parametrize("name", [A, B, BIAS, "head"])
def test_freed_memory_is_reported_by_name(name):
    whole = adapter(0, 2) | {BIAS: draw(0, 8), "head": draw(0, 3)}
    freed = whole | {name: whole[name].clone()}
    freed[name].untyped_storage().resize_(0)
    words = f"{name}: expected a tensor with memory, got one whose memory was freed"
    with pytest.raises(StateDictError, match=rf"adapters\[1\]: {words}"):
        average_adapters([whole, freed], None, 1)
    space = ParameterSpace.of_state_dict(whole, adapters=True)
    with pytest.raises(StateDictError, match=f"current: {words}"):
        aggregate(FedAsync(0.5), None, freed, whole, whole, space=space)
    with pytest.raises(StateDictError, match=f"update: {words}"):
        aggregate(FedAsync(0.5), None, whole, whole, freed, space=space)


def test_no_matrix_of_the_size_of_a_weight_is_allocated():
    states = [adapter(2 * i, 2, m=3000, n=2000, dtype=torch.float32) for i in range(3)]
    with LargestTensor() as seen:
        average_adapters(states, None, 2, return_info=True)
    assert seen.numel == (3000 + 2000) * 6


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([], None, 1), ArgumentError, "adapters: expected a sequence of at least one state dict, got none"),
        ((adapter(0, 1), None, 1), ArgumentError, "adapters: expected a sequence of at least one state dict, got dict"),
        (([adapter(0, 1)], None, 0), ArgumentError, "rank: expected an integer >= 1, got 0"),
        (([adapter(0, 1)], [1, 2], 1), ArgumentError, "weights: expected one for each of 1 models"),
        (([adapter(0, 1)], [-1], 1), ArgumentError, "weights: expected finite numbers >= 0"),
        (([adapter(0, 1), {A: draw(0, 1, 10)}], None, 1), StateDictError, rf"adapters\[1\]: expected the names of adapters\[0\], .*{B}"),
        (([{"w": draw(0, 2, 2)}], None, 1), StateDictError, "expected pairs such as"),
        (([{A: draw(0, 2, 2)}], None, 1), StateDictError, rf"{A}: expected {B} as the other factor"),
        (([{B: draw(0, 2, 2)}], None, 1), StateDictError, f"{B}: expected pairs"),
        (([adapter(0, 1) | {"x.hada_w1_a": draw(0, 2, 2)}], None, 1), StateDictError, "x.hada_w1_a: .* another kind"),
        (([adapter(0, 1) | {"q.lora_E.default": draw(0, 2, 2)}], None, 1), StateDictError, "q.lora_E.default: "),
        (([adapter(0, 1) | {A: draw(0, 2, 10)}], None, 1), StateDictError, rf"{B}: expected shape \(any, 2\)"),
        (([adapter(0, 1) | {A: draw(0, 10)}], None, 1), StateDictError, f"{A}: expected a floating tensor with two or more axes"),
        (([adapter(0, 1) | {A: torch.ones(1, 10).long()}], None, 1), StateDictError, f"{A}: expected a floating tensor"),
        (([adapter(0, 1), adapter(0, 1, n=9)], None, 1), StateDictError, r"adapters\[1\]: .* except for the rank"),
        (([adapter(0, 1) | {A: draw(0, 1, 10) / 0}], None, 1), ArgumentError, rf"adapters\[0\]: {A}: expected finite"),
        (([{1: draw(0, 2)} | adapter(0, 1)], None, 1), StateDictError, r"adapters\[0\]: expected names that are strings, got 1"),
        (([adapter(0, 1), adapter(0, 1) | {None: draw(0, 2)}], None, 1), StateDictError, r"\[1\]: expected names .* got None"),
        (([adapter(0, 1) | {"h": draw(0, 2)}, adapter(0, 1) | {"h": draw(0, 3)}], None, 1), StateDictError, r"\[1\]: h: "),
        (([adapter(0, 1) | {"h": torch.tensor(i)} for i in (1, 2)], None, 1), StateDictError, "h: expected integers equal"),
    ],
)  # fmt: skip
def test_invalid_input_is_rejected_by_name(arguments, error, words):
    with pytest.raises(error, match=words):
        average_adapters(*arguments)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scaling": "2"}, "scaling: expected a finite number, got '2'"),
        ({"scaling": [1.0, 2.0]}, "scaling: expected one number, or one for each of 1 adapters, got 2"),
        ({"scaling": [float("nan")]}, r"scaling\[0\]: expected a finite number"),
        ({"return_info": "factors"}, "return_info: expected one of False, True; got 'factors'"),
    ],
)
def test_invalid_options_are_rejected_by_name(options, words):
    with pytest.raises(ArgumentError, match=words):
        average_adapters([adapter(0, 1)], None, 1, **options)
