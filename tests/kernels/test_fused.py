"""Goals that are formed together are what they are one by one, of what was there before."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import TensorList, available_backends, combine, set_backend
from manifoldagg.kernels.backends import cpu, selection
from manifoldagg.kernels.fused import LinearCombination
from tests.support import draw, seeds

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = [(3, 5), (), (0,), (70, 67), (1,), (9000,)]


def rows_of(seed, count, dtypes):
    return [TensorList([_tensor(seed + 31 * j + i, s, dtypes[j]) for i, s in enumerate(SHAPES)]) for j in range(count)]


def _tensor(seed, shape, dtype):
    n = torch.Size(shape).numel()
    return draw(seed, max(n, 1), dtype=torch.float64)[:n].view(shape).to(dtype)


def copies(rows):
    return [TensorList([x.clone() for x in row]) for row in rows]


@pytest.mark.parametrize("together", [False, True])
@given(seed=seeds, count=st.integers(2, 10), goals=st.integers(1, 3), alike=st.booleans())
def test_fused_combinations_use_the_values_before_any_write(together, seed, count, goals, alike):
    if together and "cpu" not in available_backends():
        pytest.skip("no compiler")
    pick = np.random.default_rng(seed)
    dtypes = [DTYPES[0 if alike else i] for i in pick.integers(4, size=count)]
    rows = rows_of(seed, count, dtypes)
    before = copies(rows)
    vector = torch.cat([x.flatten() for x in before[0]])
    targets = pick.permutation(count)[:goals].tolist()
    listed, expected = [], []
    for target in targets:
        used = pick.permutation(count)[: 1 + pick.integers(count)].tolist()
        minus = [None if pick.random() < 0.7 else int(pick.integers(count)) for _ in used]
        lines = pick.choice([0.0, 1.0, -0.3, 1e-3], (int(pick.choice([1, len(SHAPES)])), len(used) + 1)).tolist()
        base = None if pick.random() < 0.5 else target
        given = [([*(here[j] for j in used), vector], [*(None if j is None else here[j] for j in minus), None])
                 for here in (rows, before)]  # fmt: skip
        listed.append(
            LinearCombination.of(None if base is None else rows[base], given[0][0], lines, given[0][1], rows[target])
        )
        apart = {"segments": None if len(lines) == 1 else list(rows[0].lengths)}
        expected.append(
            combine(
                None if base is None else before[base],
                given[1][0],
                lines[0] if len(lines) == 1 else lines,
                minus=given[1][1],
                out=rows[target].new_empty(),
                **apart,
            )
        )
    with pytest.MonkeyPatch.context() as patch:
        if not together:
            patch.setattr(cpu, "combine_many", lambda *_: None)
        selection.combine_many(listed)
    for target, row in zip(targets, expected, strict=True):
        assert all(map(torch.equal, rows[target], row))
    for i in set(range(count)).difference(targets):
        assert all(map(torch.equal, rows[i], before[i]))


@pytest.fixture(params=[name for name in ("reference", "cpu") if name in available_backends()])
def backend(request):
    before = set_backend(request.param)
    yield
    set_backend(before)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("piece", [torch.zeros(6), torch.zeros(6, 2)[:, 0]])
def test_vectors_are_written_into_pieces(piece):
    memory = torch.zeros(20)
    out = TensorList([memory[:4], piece])
    selection.combine_many([LinearCombination.of(None, [torch.arange(10.0)], [[1.0]], [None], out)])
    assert torch.cat([*out]).tolist() == list(range(10))
    assert not memory[4:].any()


@pytest.mark.usefixtures("backend")
def test_a_later_combination_reads_the_old_values_of_a_vector():
    vector = torch.zeros(10)
    first, second = TensorList([torch.zeros(5), vector[5:]]), TensorList([torch.zeros(5), torch.zeros(5)])
    ones = TensorList([torch.ones(5), torch.ones(5)])
    goals = [
        LinearCombination.of(None, [ones], [[1.0]], [None], first),
        LinearCombination.of(None, [vector], [[1.0]], [None], second),
    ]
    selection.combine_many(goals)
    assert vector.tolist() == [0.0] * 5 + [1.0] * 5
    assert not torch.cat([*second]).any()


def test_a_target_must_have_the_lengths_of_the_operands():
    with pytest.raises(ArgumentError, match="out: expected 10 entries, got 9"):
        LinearCombination.of(None, [torch.zeros(10)], [[1.0]], [None], TensorList([torch.zeros(9)]))


def test_overwriting_a_saved_tensor_raises_an_error_in_backward():
    x = torch.ones(3, requires_grad=True)
    square = x * x
    with torch.no_grad():
        selection.combine_many(
            [LinearCombination.of(None, [TensorList([torch.ones(3)])], [[2.0]], [None], TensorList([x]))]
        )
    assert x.tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


@pytest.mark.skipif("cpu" not in available_backends(), reason="no compiler")
def test_results_do_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(cpu, "MAX_SERIAL_ENTRIES", 0)
    found = []
    threads = torch.get_num_threads()
    for count in (1, 2, 5):
        rows = rows_of(3, 3, [torch.float32] * 3)
        goals = [LinearCombination.of(rows[i], rows, [[0.5, -0.25, 1.0]], [None] * 3, rows[i]) for i in range(3)]
        torch.set_num_threads(count)
        try:
            selection.combine_many(goals)
        finally:
            torch.set_num_threads(threads)
        found.append(rows)
    for rows in found[1:]:
        assert all(torch.equal(a, b) for x, y in zip(found[0], rows, strict=True) for a, b in zip(x, y, strict=True))
