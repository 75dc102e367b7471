"""Tests of OrthoFL's calibration of points and of state dicts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.corrections import calibrate
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat, ParameterSpace, Product, Sphere
from tests.support import draw, relative, seeds

SIZE, CUTS = 12, [5, 7]
PARTS = Product({"a": Flat(5), "b": Flat(7)})


def project(v, g):
    return v - (v @ g) / (g @ g) * g


def states(seed, count, dtype=torch.float64):
    return [{"w": draw(seed + i, 2, 3, dtype=dtype), "b": draw(seed - i, 2, dtype=dtype)} for i in range(count)]


@given(seeds)
def test_calibration_equals_equations_6_and_7(seed):
    start, shift, own = draw(seed, 3, SIZE)
    by_layer = torch.cat([project(a, b) for a, b in zip(shift.split(CUTS), own.split(CUTS), strict=True)])
    assert relative(calibrate(start, shift, own, space=PARTS), start + by_layer) <= 1e-13
    assert relative(calibrate(start, shift, own, "model", space=PARTS), start + project(shift, own)) <= 1e-13
    assert relative(calibrate(start, shift, own), start + project(shift, own)) <= 1e-13


@given(seeds, st.sampled_from(["tensor", "model"]))
def test_points_and_state_dicts_give_bitwise_equal_results(seed, granularity):
    model = torch.nn.Linear(3, 2).double()
    space = ParameterSpace.of(model)
    rows = draw(seed, 5, 8)
    dicts = [space.state_dict(row) for row in rows]
    for others, other_dicts in ((None, None), (rows[3:], dicts[3:])):
        point = calibrate(*rows[:3], granularity, others, space=space)
        state = calibrate(*dicts[:3], granularity, other_dicts)
        assert torch.equal(space.point(state), point)
        same = calibrate(*dicts[:3], granularity, other_dicts, space=space)
        assert all(torch.equal(same[name], state[name]) for name in state)
        assert torch.equal(
            calibrate(*rows[:3], granularity, others, space=Product({"a": Flat(6), "b": Flat(2)})), point
        )


@given(seeds)
def test_server_and_client_protocols_give_the_same_start(seed):
    """Both sides know the current and the sent global model, and the client's models before and after training."""
    now, then, model, began = (row.float() for row in draw(seed, 4, SIZE))
    server = calibrate(model, now - then, model - began, space=PARTS)
    client = calibrate(model.clone(), now.clone() - then.clone(), model.clone() - began.clone(), space=PARTS)
    assert torch.equal(server, client)


def test_a_zero_client_shift_adds_the_whole_global_shift():
    start, shift, own = states(3, 3)
    own["w"] = torch.zeros_like(own["w"])
    out = calibrate(start, shift, own)
    assert torch.equal(out["w"], start["w"] + shift["w"])
    assert relative(out["b"], start["b"] + project(shift["b"], own["b"])) <= 1e-14


def test_the_pairwise_form_subtracts_the_projection_of_the_client_shift():
    start, shift, own, *others = draw(3, 6, SIZE)
    basis = torch.stack(others)
    expected = start + shift - own @ torch.linalg.pinv(basis) @ basis
    assert relative(calibrate(start, shift, own, "model", others), expected) <= 1e-12
    dependent = [*others, others[0] + 1e-12 * others[1], 0 * own]
    assert relative(calibrate(start, shift, own, "model", dependent), expected) <= 1e-11
    assert torch.equal(calibrate(start, shift, own, other_updates=[]), start + shift)


def test_entries_that_are_not_parameters_are_copied():
    start, shift, own = states(3, 3)
    counter = torch.tensor(7)
    out = calibrate({"n": counter, **start}, shift, own)
    assert list(out) == ["n", "w", "b"]
    assert out["n"].item() == 7
    assert out["n"] is not counter
    space = ParameterSpace.of_state_dict(start, buffer_policy=["b"])
    assert torch.equal(calibrate(start, shift, own, space=space)["b"], start["b"])


def test_tied_tensors_count_once_and_stay_tied():
    start, shift, own = ({"w": (t := draw(i, 3)), "tied": t, "v": draw(i + 9, 2)} for i in range(3))
    out = calibrate(start, shift, own, "model")
    assert out["tied"] is out["w"]
    whole = [torch.cat([state["w"], state["v"]]) for state in (start, shift, own)]
    assert relative(torch.cat([out["w"], out["v"]]), calibrate(*whole, "model")) <= 1e-15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_dtypes_are_rounded_once(dtype):
    start, shift, own = states(3, 3, dtype)
    out = calibrate(start, shift, own)
    exact = calibrate(*({k: v.double() for k, v in state.items()} for state in (start, shift, own)))
    for name, tensor in out.items():
        assert (tensor.dtype, tensor.shape) == (dtype, start[name].shape)
        assert ((tensor.double() - exact[name]).abs() <= 0.51 * torch.finfo(dtype).eps * exact[name].abs()).all()


def test_inputs_are_not_modified():
    rows = draw(3, 3, SIZE)
    copy = rows.clone()
    calibrate(*rows, space=PARTS).zero_()
    assert torch.equal(rows, copy)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: calibrate(*draw(1, 3, 4), "layer"), "granularity: expected one of model, tensor"),
        (lambda: calibrate(*draw(1, 2, 4), torch.zeros(3).double()), r"client_shift: expected shape \(4\)"),
        (lambda: calibrate(*draw(1, 2, 4), torch.full((4,), torch.inf).double()), "client_shift: expected finite"),
        (lambda: calibrate(*draw(1, 3, 4), space=Flat(3)), r"start: expected shape \(3\)"),
        (lambda: calibrate(*draw(1, 3, 4), space=Product({"a": Sphere(3), "b": Flat(1)})), "space: expected a flat manifold"),
        (lambda: calibrate(*draw(1, 3, 4), other_updates=draw(1, 2, 3)), r"other_updates\[0\]: expected shape \(4\)"),
        (lambda: calibrate(*states(1, 2), {"w": torch.zeros(2, 3)}), "client_shift: expected a tensor 'b'"),
        (lambda: calibrate(*states(1, 2), draw(1, 3)), "client_shift: expected named tensors"),
        (lambda: calibrate(*states(1, 3), space=Flat(8)), "space: expected a ParameterSpace"),
        (lambda: calibrate([1.0], [1.0], [1.0]), "start: expected a floating tensor"),
    ],
)  # fmt: skip
def test_invalid_input_is_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_derivatives_equal_those_of_the_formula():
    start, shift, own = draw(0, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda *points: calibrate(*points), (start, shift, own))


def test_names_missing_in_start_are_rejected():
    one = {"w": torch.ones(2)}
    with pytest.raises(ArgumentError, match="global_shift: expected the names of start, got also typo"):
        calibrate(one, {**one, "typo": torch.ones(1)}, one)
