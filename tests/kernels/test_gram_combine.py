"""`gram_combine` has the bits of `gram` and `combine`, with every backend and number of threads."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.kernels import TensorList, as_operands, available_backends, combine, gram, gram_combine, set_backend
from manifoldagg.kernels.backends import cpu
from manifoldagg.kernels.fused import LinearCombination
from manifoldagg.kernels.operands import empty_like_row
from tests.support import draw, seeds

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = [(3, 5), (), (0,), (70, 67), (1,), (40000,)]
BACKENDS = [name for name in ("reference", "cpu") if name in available_backends()]


def vector_of(seed, dtype):
    return draw(seed, sum(torch.Size(shape).numel() for shape in SHAPES), dtype=torch.float64).to(dtype)


def pieces_of(vector):
    pieces = vector.split([torch.Size(shape).numel() for shape in SHAPES])
    return TensorList([piece.view(shape) for piece, shape in zip(pieces, SHAPES, strict=True)])


def entries_of(row):
    return row if isinstance(row, torch.Tensor) else torch.cat([piece.flatten() for piece in row])


@pytest.mark.parametrize("backend", BACKENDS)
@given(seed=seeds, count=st.integers(1, 9), goals=st.integers(1, 3), alike=st.booleans(), lists=st.booleans())
def test_results_equal_those_of_gram_and_combine(backend, seed, count, goals, alike, lists):
    pick = np.random.default_rng(seed)
    dtypes = [DTYPES[0 if alike else i] for i in pick.integers(4, size=count + 1)]
    vectors = [vector_of(seed + 31 * j, dtype) for j, dtype in enumerate(dtypes)]
    rows = [pieces_of(x) if lists and pick.random() < 0.8 else x for x in vectors]
    minus = [None if pick.random() < 0.5 else rows[-1] for _ in range(count)]
    used = as_operands(rows[:count], minus)
    drawn = []
    for _ in range(goals):
        chosen = pick.permutation(count)[: 1 + pick.integers(count)].tolist()
        line = pick.choice([0.0, 1.0, -0.3, 1e-3], len(chosen)).tolist()
        drawn.append((None if pick.random() < 0.5 else rows[int(pick.integers(count))], chosen, line))
    before = set_backend(backend)
    try:
        expected = [combine(base, used.select(chosen), line) for base, chosen, line in drawn]
        targets = [empty_like_row(row) for row in expected]
        listed = [
            LinearCombination.of(base, used.select(chosen), [line], None, target)
            for (base, chosen, line), target in zip(drawn, targets, strict=True)
        ]
        products = gram_combine(used, listed)
        assert torch.equal(products, gram(used))
    finally:
        set_backend(before)
    for target, row in zip(targets, expected, strict=True):
        assert torch.equal(entries_of(target), entries_of(row))


@pytest.mark.parametrize("backend", BACKENDS)
def test_noncontiguous_rows_are_read(backend):
    rows = [torch.arange(24.0).view(4, 6)[:, ::2], torch.ones(4, 3)]
    used = as_operands([TensorList([x]) for x in rows])
    target = TensorList([torch.empty(4, 3)])
    before = set_backend(backend)
    try:
        products = gram_combine(used, [LinearCombination.of(None, used, [[2.0, 1.0]], None, target)])
    finally:
        set_backend(before)
    assert torch.equal(target[0], 2 * rows[0] + 1)
    assert products[0, 0, 1] == rows[0].sum()


@pytest.mark.skipif("cpu" not in available_backends(), reason="no compiler")
@pytest.mark.parametrize("size", [0, 1, 3 << 14, 2_000_003])
def test_any_number_of_threads_gives_the_same_bits(size, monkeypatch):
    monkeypatch.setattr(cpu, "MAX_SERIAL_ENTRIES", 0)
    base, current, point = (draw(i, size, dtype=torch.float32) for i in range(3))
    rows = as_operands([point, current], base)
    found = []
    threads = torch.get_num_threads()
    for count in (1, 2, 5):
        target = torch.empty(size)
        torch.set_num_threads(count)
        try:
            products = gram_combine(rows, [LinearCombination.of(current, rows, [[0.5, -0.25]], None, target)])
        finally:
            torch.set_num_threads(threads)
        found.append((products, target))
    for products, target in found:
        assert torch.equal(products, found[0][0])
        assert torch.equal(target, found[0][1])
    assert torch.equal(found[0][1], combine(current, rows, [0.5, -0.25]))


@pytest.mark.skipif("cpu" not in available_backends(), reason="no compiler")
def test_a_row_out_of_range_is_rescaled():
    tiny = torch.full((5,), 1e-200, dtype=torch.float64)
    rows = as_operands([tiny, torch.ones(5, dtype=torch.float64)])
    target = torch.empty(5, dtype=torch.float64)
    products = gram_combine(rows, [LinearCombination.of(None, rows, [[1.0, 1.0]], None, target)])
    assert torch.equal(products, gram(rows))
    assert torch.equal(target, torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_and_combinations_may_have_different_pieces(backend):
    vector, pieces = torch.arange(6.0), TensorList([torch.ones(2), torch.ones(4)])
    target = TensorList([torch.empty(2), torch.empty(4)])
    before = set_backend(backend)
    try:
        goal = LinearCombination.of(None, as_operands([pieces, vector]), [[1.0, 2.0]], None, target)
        products = gram_combine(as_operands([vector]), [goal])
    finally:
        set_backend(before)
    assert torch.equal(torch.cat(target), 1 + 2 * vector)
    assert products.item() == 55
