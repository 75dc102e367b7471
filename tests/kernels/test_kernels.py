"""Laws of gram and combine: exact sums, rounding once, derivatives that are not silently zero."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import combine, gram
from manifoldagg.kernels.backends import cpu
from tests.support import draw, relative, scales, seeds, sizes

EPS = 2.0**-52
INPUTS = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


@given(seeds, sizes, st.integers(1, 4), INPUTS)
def test_gram_is_the_float64_product_of_the_differences(seed, size, k, dtype):
    rows, minus = draw(seed, k, size, dtype=dtype), draw(seed + 1, size, dtype=dtype)
    dense = rows.double() - minus.double()
    found = gram(rows, minus=minus)[0]
    # Every partial sum of n products is within n·ε of Σ|a_i·b_i|, in whatever order.
    bound = 2 * size * EPS * (dense.abs() @ dense.abs().mT)
    assert ((found - dense @ dense.mT).abs() <= bound).all()
    assert torch.equal(found, found.mT)


@given(seeds, scales)
def test_gram_of_a_small_drift_is_accurate(seed, scale):
    base = draw(seed, 1000, dtype=torch.float32, scale=scale)
    near = base + draw(seed + 1, 1000, dtype=torch.float32, scale=1e-4 * scale)
    found = gram([near], minus=base)[0, 0, 0].item()
    with mpmath.workdps(40):
        exact = mpmath.fsum(
            (mpmath.mpf(a) - mpmath.mpf(b)) ** 2 for a, b in zip(near.tolist(), base.tolist(), strict=True)
        )
    assert abs(found - float(exact)) <= 2 * 1000 * EPS * float(exact)


@given(seeds, st.lists(st.integers(0, 20000), min_size=1, max_size=4))
def test_each_segment_has_the_gram_matrix_of_its_entries(seed, lengths):
    rows = draw(seed, 3, sum(lengths))
    found = gram(rows, segments=lengths)
    for piece, matrix in zip(rows.split(lengths, dim=1), found, strict=True):
        assert torch.equal(matrix, gram(piece)[0])


@given(seeds, sizes, st.integers(0, 3), INPUTS)
def test_combine_rounds_once(seed, size, k, dtype):
    base, rows = draw(seed, size, dtype=dtype), draw(seed + 1, k + 1, size, dtype=dtype)
    minus, coefficients = draw(seed + 2, size, dtype=dtype), draw(seed + 3, k + 1)
    exact = base.double()
    for c, row in zip(coefficients, rows, strict=True):
        exact = exact + c * (row.double() - minus.double())
    found = combine(base, rows, coefficients, minus=minus)
    assert found.dtype == dtype
    if dtype is torch.float64:
        assert relative(found, exact) <= 8 * EPS
    else:
        assert torch.equal(found, exact.to(dtype))


@given(seeds, sizes)
def test_combine_writes_into_out_and_may_overwrite_its_base(seed, size):
    base, rows = draw(seed, size), draw(seed + 1, 2, size)
    expected = combine(base, rows, [0.5, -2.0])
    poisoned = torch.full_like(base, float("nan"))
    assert combine(base, rows, [0.5, -2.0], out=poisoned) is poisoned
    assert torch.equal(poisoned, expected)
    assert torch.equal(combine(base, rows, [0.5, -2.0], out=base), expected)


def test_combine_does_not_read_a_row_whose_coefficient_is_zero():
    bad = torch.full((5,), float("inf"))
    assert torch.equal(combine(torch.ones(5), [bad, torch.ones(5)], [0.0, 2.0]), torch.full((5,), 3.0))


@given(seeds, st.lists(st.integers(0, 50), min_size=1, max_size=4))
def test_combine_accepts_coefficients_for_each_segment(seed, lengths):
    base, rows, c = draw(seed, sum(lengths)), draw(seed + 1, 2, sum(lengths)), draw(seed + 2, len(lengths), 2)
    pieces = zip(base.split(lengths), rows.split(lengths, dim=1), c, strict=True)
    expected = torch.cat([combine(piece, lines, line) for piece, lines, line in pieces])
    assert torch.equal(combine(base, rows, c, segments=lengths), expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nonfinite_float64_row_is_not_rescaled(value, monkeypatch):
    rows = draw(0, 3, 50)
    expected = gram(rows[1:])
    rows[0, 7] = value
    monkeypatch.setattr("manifoldagg.kernels.reduction.rescaled", None)
    inner = gram(rows)
    assert not inner[0, 0, 0].isfinite()
    assert torch.equal(inner[:, 1:, 1:], expected)


def test_the_result_does_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(cpu, "MAX_SERIAL_ENTRIES", 0)
    rows = draw(0, 3, 1_000_003, dtype=torch.float32)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append((gram(rows), combine(rows[0], rows, [0.1, 0.2, 0.3])))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def _energy(base, rows, coefficients):
    return gram([combine(base, rows, coefficients, minus=base)])[0, 0, 0]


def test_gram_and_combine_pass_gradcheck():
    base, rows, coefficients = draw(0, 6), draw(1, 2, 6), draw(2, 2)
    inputs = [t.clone().requires_grad_() for t in (base, rows, coefficients)]
    assert torch.autograd.gradcheck(_energy, inputs)


def test_a_jvp_through_combine_equals_a_finite_difference():
    base, rows, coefficients, direction = draw(0, 6), draw(1, 2, 6), draw(2, 2), draw(3, 2)
    _, slope = torch.func.jvp(lambda c: _energy(base, rows, c), (coefficients,), (direction,))
    h = 1e-5
    ahead, behind = (_energy(base, rows, coefficients + s * h * direction) for s in (1, -1))
    assert slope.item() == pytest.approx(((ahead - behind) / (2 * h)).item(), rel=1e-8)


def test_coefficients_in_a_list_are_differentiable():
    row = draw(0, 5)
    _, slope = torch.func.jvp(lambda c: combine(None, [row], [c]), (torch.tensor(2.0),), (torch.tensor(1.0),))
    assert torch.equal(slope, row)


def test_a_gram_matrix_with_autograd_is_symmetric():
    found = gram(draw(0, 7, 1001, dtype=torch.float32).requires_grad_())[0]
    assert torch.equal(found, found.mT)


def test_an_out_tracked_by_autograd_is_rejected():
    out = draw(0, 3).requires_grad_() * 2
    with pytest.raises(ArgumentError, match="out: expected None while autograd tracks an argument"):
        combine(None, [draw(1, 3)], [1.0], out=out)


def test_a_gram_matrix_supports_forward_mode():
    rows, direction = draw(1, 2, 6), draw(2, 2, 6)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(rows, direction)
        slope = torch.autograd.forward_ad.unpack_dual(gram(dual)).tangent[0]
    assert torch.allclose(slope, direction @ rows.mT + rows @ direction.mT, rtol=1e-14)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gram([]), "rows: expected at least one"),
        (lambda: gram([torch.ones(2), torch.ones(3)]), r"rows\[1\]: expected shape \(2,\), got \(3,\)"),
        (
            lambda: gram([torch.ones(2, dtype=torch.int64)]),
            r"rows\[0\]: expected a tensor of a floating dtype, got torch.int64",
        ),
        (lambda: gram([[1.0, 2.0]]), r"rows\[0\]: expected a tensor of a floating dtype, got list"),
        (lambda: gram([torch.ones(2), None]), r"rows\[1\]: expected a tensor of a floating dtype, got NoneType"),
        (lambda: gram([None, torch.ones(2)]), r"rows\[0\]: expected a tensor of a floating dtype, got NoneType"),
        (lambda: gram((torch.ones(2), None), minus=torch.ones(2)), r"rows\[1\]: expected a tensor"),
        (lambda: combine(None, [torch.ones(2), None], [1.0, 0.0]), r"rows\[1\]: expected a tensor"),
        (lambda: gram(torch.ones(2)), r"rows: expected shape \(k, P\), got \(2,\)"),
        (lambda: gram([torch.ones(2, 2)]), r"rows\[0\]: expected shape one dimension"),
        (lambda: gram([torch.ones(2)], minus=[None, None]), "minus: expected one entry for each of 1 rows, got 2"),
        (lambda: gram([torch.ones(2)], minus=torch.ones(3)), r"minus\[0\]"),
        (lambda: gram([torch.ones(5)], segments=[2, 2]), "segments: expected lengths that sum to 5, got a sum of 4"),
        (lambda: gram([torch.ones(5)], segments=[6, -1]), r"segments\[1\]"),
        (lambda: combine(torch.ones(3), [torch.ones(2)], [1.0]), "base: expected shape"),
        (lambda: combine(None, [torch.ones(2)], [1.0, 2.0]), "coefficients: expected shape"),
        (lambda: combine(None, [torch.ones(2)], ["a"]), "coefficients: expected numbers"),
        (lambda: combine(None, [torch.ones(2)], [1.0], out=torch.ones(3)), "out: expected shape"),
        *(
            (lambda c=c: combine(None, [torch.ones(2)] * 2, c), "coefficients: expected numbers of shape")
            for c in ("12", b"12", ["1", "2"], [[b"1", 2.0]], {1.0, 2.0}, {1.0: 0, 2.0: 0}, [True, False], 3.0)
        ),
        *(
            (lambda c=c: combine(None, [torch.ones(2)] * 2, c), "coefficients: expected numbers of shape")
            for c in (torch.ones(2).bool(), torch.ones(2) * 1j, np.ones(2, bool), [[torch.tensor(True), 1.0]])
        ),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("kind", [tuple, list, np.array, torch.tensor], ids=["tuple", "list", "numpy", "torch"])
def test_coefficients_are_numbers_of_any_kind(kind):
    rows = draw(0, 2, 5)
    lines = [[0.5, -2.0], [1.0, 3.0]]
    expected = torch.cat([combine(None, rows[:, :3], lines[0]), combine(None, rows[:, 3:], lines[1])])
    assert torch.equal(combine(None, rows, kind(lines), segments=[3, 2]), expected)
    assert torch.equal(combine(None, rows, kind(lines[0])), combine(None, rows, lines[0]))
    assert combine(None, rows[:, :0], kind([]) if kind in (tuple, list) else kind(lines)[:0], segments=[]).shape == (0,)


def test_coefficients_are_not_rounded_with_autograd():
    row = torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert combine(None, [row], [0.1])[0].item() == 0.1
    assert combine(None, [row], [[0.1], [0.3]], segments=[1, 2]).tolist() == [0.1, 0.3, 0.3]


def test_a_row_with_coefficient_zero_is_omitted_with_autograd():
    row, bad = torch.ones(2, requires_grad=True), torch.full((2,), float("inf"))
    assert combine(None, [row, bad], [1.0, 0.0]).tolist() == [1.0, 1.0]


def test_nested_coefficients_are_differentiable():
    row = draw(0, 5)
    point, one = torch.tensor(2.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    _, slope = torch.func.jvp(lambda c: combine(None, [row], [[c], [0.5]], segments=[3, 2]), (point,), (one,))
    assert torch.equal(slope, torch.cat([row[:3], torch.zeros(2, dtype=torch.float64)]))


def test_a_gram_matrix_without_segments_is_empty():
    assert gram([torch.ones(0, requires_grad=True)], segments=[]).shape == (0, 1, 1)
