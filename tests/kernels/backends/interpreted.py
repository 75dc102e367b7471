"""Laws of the Triton kernels, for a process of their own: `TRITON_INTERPRET` must be set before Triton is imported.

`test_triton.py` starts that process, and one without it where there is a GPU. Short blocks and few lanes make small
tensors cross every border.
"""

import math
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.kernels import blocks as cutting
from manifoldagg.kernels.backends import triton as backend
from manifoldagg.kernels.blocks import Blocks
from manifoldagg.kernels.operands import Operands
from tests.support import draw, seeds

EPS = 2.0**-52
DEVICE = backend._device()
BLOCK_SIZE = 128
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# One, primes, and what lies around the ends of vectors (16), tiles (32, 64, 128, 256 entries) and blocks.
SIZES = st.sampled_from([1, 2, 15, 16, 17, 31, 64, 67, 127, 128, 129, 257])
FEW = settings(max_examples=12)
# NumPy, under the interpreter, warns of infinities and NaNs that the tests put there.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(backend, "LANES", 32)


def cut(lengths, block=BLOCK_SIZE):
    """Blocks of segments with these lengths; not the cached ones, which are as long as shipped."""
    edges = np.cumsum([0, *lengths]).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "BLOCK_SIZE", block)
        return Blocks.of.__wrapped__(tuple(pairwise(edges)))


def vector(seed, size, dtype, offset=0, stride=1):
    """A view that begins `offset` entries into its storage; around it and between its entries lie NaNs."""
    storage = torch.full((offset + size * max(stride, 1) + 3,), math.nan, dtype=dtype, device=DEVICE)
    length = size if stride else 1
    storage[offset:][: length * max(stride, 1) : max(stride, 1)] = draw(seed, length, dtype=dtype).to(DEVICE)
    return storage.as_strided((size,), (stride,), offset)


@st.composite
def layouts(draw):
    """How to make rows, subtrahends and a base; half the time all aligned, so that both variants of a kernel run."""
    plain, count = draw(st.booleans()), draw(st.integers(1, 3))
    dtypes = draw(st.sampled_from([[dtype] * 7 for dtype in DTYPES] + [DTYPES + DTYPES]))[: 2 * count + 1]
    offsets = [0 if plain else draw(st.sampled_from([0, 1, 8])) for _ in dtypes]
    strides = [1 if plain else draw(st.sampled_from([1, 2, 0])) for _ in dtypes[1:]]
    layouts = zip(dtypes, offsets, [*strides, 1 if plain else 2], strict=True)
    make = [partial(vector, dtype=dtype, offset=offset, stride=stride) for dtype, offset, stride in layouts]
    return make[:count], make[count : 2 * count], make[-1]


def rows_of(seed, size, plus, minus, sharing):
    """Rows with no, one or many subtrahends."""
    plus = [make(seed + i, size) for i, make in enumerate(plus)]
    less = [make(seed + 10 + i, size) for i, make in enumerate(minus)]
    return Operands.of(plus, {"none": None, "one": less[0], "each": [*less[1:], None]}[sharing])


def exact(rows, blocks):
    """The sums, rounded once, of float64 products of float64 differences; and a bound for any order of adding."""
    dense = rows.materialise().cpu().numpy()
    sums, bounds = [], []
    for start, stop, _ in blocks.table.tolist():
        products = [
            (dense[i, start:stop] * dense[j, start:stop]).tolist()
            for i, j in zip(*np.tril_indices(len(dense)), strict=True)
        ]
        sums.append([math.fsum(line) for line in products])
        # n - 1 additions, each within EPS/2 of a partial sum; and one more rounding for fsum.
        bounds.append([(stop - start) * EPS * math.fsum(map(abs, line)) for line in products])
    shape = (len(blocks.table), len(dense) * (len(dense) + 1) // 2)
    return np.array(sums).reshape(shape), np.array(bounds).reshape(shape)


def combined(base, rows, coefficients, blocks, dtype):
    """The combination in float64, operation by operation, rounded once (by way of float32 to 16 bits)."""
    dense = rows.materialise().cpu()
    total = torch.zeros_like(dense[0]) if base is None else base.to("cpu", torch.float64, copy=True)
    for (start, stop), line in zip(blocks.segment_bounds, coefficients, strict=True):
        for c, row in zip(line, dense, strict=True):
            if c != 0:
                total[start:stop] = total[start:stop] + c * row[start:stop]
    return total.float().to(dtype) if dtype.itemsize == 2 else total.to(dtype)


@FEW
@given(seeds, SIZES, layouts(), st.sampled_from(["none", "one", "each"]))
def test_block_products_are_the_sums_of_each_block(seed, size, layout, sharing):
    rows, blocks = rows_of(seed, size, *layout[:2], sharing), cut([size])
    expected, bound = exact(rows, blocks)
    found = backend.block_products(rows, blocks)
    assert found.dtype == np.float64
    assert (abs(found - expected) <= bound).all()


@FEW
@given(seeds, st.lists(st.sampled_from([0, 1, 5, 16, 40, 150]), min_size=1, max_size=4), st.sampled_from([0, 1]))
def test_segments_may_start_anywhere(seed, lengths, offset):
    rows, blocks = Operands.of([vector(seed + i, sum(lengths), torch.float32, offset) for i in range(2)]), cut(lengths)
    expected, bound = exact(rows, blocks)
    assert (abs(backend.block_products(rows, blocks) - expected) <= bound).all()
    coefficients = draw(seed, len(lengths), 2).tolist()
    out = torch.full((sum(lengths),), math.nan, device=DEVICE)
    assert backend.combine(None, rows, coefficients, blocks, out) is out
    assert torch.equal(out.cpu(), combined(None, rows, coefficients, blocks, torch.float32))


@FEW
@given(seeds, SIZES, layouts(), st.sampled_from(["none", "one", "each"]), st.sampled_from(["new", "base", "row"]))
def test_combine_rounds_once_and_may_overwrite_an_operand(seed, size, layout, sharing, target):
    rows, blocks = rows_of(seed, size, *layout[:2], sharing), cut([size])
    base = layout[2](seed + 20, size)
    if target == "row":
        rows, base = Operands.of([base, *rows.plus[1:]], rows.minus), None
    out = layout[2](seed + 30, size).fill_(math.nan) if target == "new" else rows.plus[0] if base is None else base
    coefficients = [draw(seed + 40, len(rows.plus)).tolist()]
    expected = combined(base, rows, coefficients, blocks, out.dtype)
    around = torch.ones(out.untyped_storage().nbytes() // out.itemsize, dtype=torch.bool)
    around.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(False)
    backend.combine(base, rows, coefficients, blocks, out)
    assert torch.equal(out.cpu(), expected)
    storage = out.new_empty(0).set_(out.untyped_storage()).cpu()
    assert storage[around].isnan().all()


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_a_row_with_coefficient_zero_has_no_effect(segments, shared):
    bad = torch.full((40,), math.inf, device=DEVICE)
    rows = Operands.of([bad, vector(0, 40, torch.float32)], [bad if shared else None, None])
    lines = [[0.0, 2.0 + s] for s in range(segments)]
    blocks = cut([40 // segments] * segments)
    out = backend.combine(vector(1, 40, torch.float32), rows, lines, blocks, torch.empty(40, device=DEVICE))
    finite = Operands.of([rows.plus[1]])
    expected = combined(vector(1, 40, torch.float32), finite, [line[1:] for line in lines], blocks, torch.float32)
    assert torch.equal(out.cpu(), expected)


def test_a_row_is_read_only_in_segments_that_use_it():
    row = torch.cat([torch.ones(20), torch.full((20,), math.inf)]).to(DEVICE)
    other = torch.ones(40, device=DEVICE)
    lines = [[2.0, 1.0], [0.0, 3.0]]
    out = backend.combine(None, Operands.of([row, other]), lines, cut([20, 20]), torch.empty(40, device=DEVICE))
    assert out.tolist() == [3.0] * 40
    # Without a row that is used at all, too; and a subtrahend that is shared with a used row, and is infinite.
    lines = [[0.0, 0.0], [0.0, 1.0]]
    less = torch.cat([torch.full((20,), math.inf), torch.ones(20)]).to(DEVICE)
    out = backend.combine(other, Operands.of([row, other], less), lines, cut([20, 20]), torch.empty(40, device=DEVICE))
    assert out.tolist() == [1.0] * 40


@pytest.mark.parametrize("k", [8, 9, 13])
def test_many_rows_are_processed_in_groups(k):
    rows = Operands.of([vector(i, 37, torch.float32) for i in range(k)], vector(k, 37, torch.float32))
    blocks = cut([30, 7])
    expected, bound = exact(rows, blocks)
    assert (abs(backend.block_products(rows, blocks) - expected) <= bound).all()
    coefficients = [draw(0, k).tolist()] * 2
    out = backend.combine(None, rows, coefficients, blocks, torch.empty(37, device=DEVICE))
    assert torch.equal(out.cpu(), combined(None, rows, coefficients, blocks, torch.float32))


def test_the_default_block_size_and_lanes(monkeypatch):
    monkeypatch.undo()
    assert backend.LANES == 256
    size = cutting.BLOCK_SIZE + 2049
    rows = Operands.of([vector(i, size, torch.float32) for i in range(2)], vector(2, size, torch.float32))
    blocks = Blocks.of(((0, size),))
    expected, bound = exact(rows, blocks)
    assert (abs(backend.block_products(rows, blocks) - expected) <= bound).all()
    out = backend.combine(None, rows, [[0.1, -3.0]], blocks, torch.empty(size, device=DEVICE))
    assert torch.equal(out.cpu(), combined(None, rows, [[0.1, -3.0]], blocks, torch.float32))


def test_the_sums_of_a_block_do_not_depend_on_its_neighbours():
    rows, blocks = Operands.of([vector(i, 300, torch.float32) for i in range(2)]), cut([300])
    together = backend.block_products(rows, blocks)
    for n, line in enumerate(blocks.table):
        alone = Blocks(((int(line[0]), int(line[1])),), line[None])
        assert np.array_equal(backend.block_products(rows, alone)[0], together[n])


def special(dtype):
    """Ties, the largest and smallest numbers and what lies beyond them, in float64."""
    info = torch.finfo(dtype)
    one = [1.0, 1 + info.eps / 2, 1 + 1.5 * info.eps, 1 + info.eps / 2 + 2.0**-40, 1 + info.eps / 2 - 2.0**-40]
    tiny = info.smallest_normal * info.eps
    small = [tiny, 3 * tiny, tiny / 2, 1.5 * tiny, tiny / 4, info.smallest_normal - tiny, info.smallest_normal]
    large = [info.max, info.max * (1 + info.eps / 4), info.max * (1 + info.eps), 1e308]
    values = torch.tensor([0.0, *one, *small, *large, math.inf], dtype=torch.float64)
    return torch.cat([values, -values, torch.tensor([math.nan], dtype=torch.float64)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_agrees_with_torch_and_preserves_subnormals(dtype):
    values = special(dtype)
    expected = values.float().to(dtype) if dtype.itemsize == 2 else values.to(dtype)
    for offset in (0, 1):
        given, out = vector(0, len(values), torch.float64, offset), vector(0, len(values), dtype, offset)
        given.copy_(values)
        backend.combine(given, Operands.of([given]), [[0.0]], cut([len(values)]), out)
        assert torch.equal(out.cpu().nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
        assert torch.equal(out.cpu().signbit()[:-1], expected.signbit()[:-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_is_widened_exactly(dtype):
    values = special(dtype).to(dtype)
    if dtype.itemsize == 2:
        values = torch.arange(-(2**15), 2**15, 37, dtype=torch.int16).view(dtype)
    given = values.to(DEVICE)
    wide = torch.empty(len(values), dtype=torch.float64, device=DEVICE)
    backend.combine(given, Operands.of([given]), [[0.0]], cut([len(values)], block=4096), wide)
    assert torch.equal(wide.cpu().nan_to_num(nan=7.0), values.double().nan_to_num(nan=7.0))


@pytest.mark.parametrize("c", [5e-324, -0.1, 1.7e308, 2.0**-1060, 1.0])
def test_coefficients_preserve_every_bit(c):
    one = torch.ones(3, dtype=torch.float64, device=DEVICE)
    assert backend.combine(None, Operands.of([one]), [[c]], cut([3]), one).tolist() == [c] * 3


def test_empty_rows_have_no_blocks():
    empty = torch.ones(0, device=DEVICE)
    assert backend.block_products(Operands.of([empty, empty]), cut([0, 0])).shape == (0, 3)
    assert backend.combine(None, Operands.of([empty]), [[1.0]], cut([0]), empty) is empty
    assert backend.combine(None, Operands.of([empty]), [], cut([]), empty) is empty


def test_a_combination_without_rows_is_the_base_or_zero():
    base, out = vector(0, 20, torch.float32), torch.full((20,), math.nan, device=DEVICE)
    bad = Operands.of([torch.full((20,), math.nan, device=DEVICE)])
    assert torch.equal(backend.combine(base, bad, [[0.0]], cut([20]), out), base)
    assert not backend.combine(None, bad, [[0.0]], cut([20]), out).any()


LENGTHS = st.lists(st.sampled_from([0, 1, 2, 5, 16, 32, 40, 64, 129]), min_size=1, max_size=6)


def pieces(row, lengths, dtype=None):
    """A vector as tensors in memory of their own, between NaNs."""
    found = []
    for i, piece in enumerate(row.split(lengths)):
        pool = torch.full((len(piece) + 5,), math.nan, dtype=dtype or row.dtype, device=DEVICE)
        found.append(pool[i % 3 :][: len(piece)].copy_(piece))
    return tuple(found)


@FEW
@given(seeds, LENGTHS, st.integers(1, 3), st.sampled_from(DTYPES), st.sampled_from(["none", "one", "each", "vector"]))
def test_results_do_not_depend_on_the_pieces(seed, lengths, k, dtype, sharing):
    size = sum(lengths)
    plus, less = [[vector(seed + n, size, dtype) for n in range(first, first + k)] for first in (0, k)]
    whole = {"none": None, "one": less[0], "each": [*less[1:], None], "vector": less[0]}[sharing]
    cuts = [pieces(row, lengths) for row in plus]
    minus = {
        "none": None,
        "one": [pieces(less[0], lengths)] * k,
        "each": [*(pieces(row, lengths) for row in less[1:]), None],
        "vector": [vector(seed + k, size, dtype, 1, 2)] * k,
    }[sharing]
    for blocks in (cut([size]), cut(lengths)):
        rows, tuples = Operands.of(plus, whole), Operands.of(cuts, minus)
        assert np.array_equal(backend.block_products(tuples, blocks), backend.block_products(rows, blocks))
        base, out = vector(seed + 9, size, dtype), torch.full((size,), math.nan, dtype=dtype, device=DEVICE)
        c = draw(seed, len(blocks.segment_bounds), k).tolist()
        expected = backend.combine(base, rows, c, blocks, torch.empty_like(base))
        target = tuples.as_operand("out", pieces(torch.full_like(out, 7.0), lengths))
        assert backend.combine(tuples.as_operand("base", pieces(base, lengths)), tuples, c, blocks, target) is target
        assert torch.equal(torch.cat(target), expected)
        assert backend.combine(base, tuples, c, blocks, out) is out
        assert torch.equal(out, expected)


def test_only_the_pieces_of_a_target_are_written():
    lengths = [3, 0, 50, 1, 90]
    pools = [torch.full((n + 8,), math.nan, device=DEVICE) for n in lengths]
    rows = Operands.of([tuple(torch.ones(n, device=DEVICE) for n in lengths)])
    out = rows.as_operand("out", tuple(pool[4:-4] for pool in pools))
    backend.combine(None, rows, [[2.0]], cut([144]), out)
    assert all((tensor == 2).all() for tensor in out)
    assert all(pool[:4].isnan().all() and pool[-4:].isnan().all() for pool in pools)


def test_rows_of_several_dtypes_are_not_supported():
    row = (torch.ones(2, device=DEVICE), torch.ones(3, device=DEVICE).double())
    rows = Operands.of([row])
    assert backend.block_products(rows, cut([5])) is None
    other = Operands.of([torch.ones(5, device=DEVICE)])
    assert (
        backend.combine(other.as_operand("base", row), other, [[1.0]], cut([5]), torch.empty(5, device=DEVICE)) is None
    )


def is_taken(*vectors):
    rows, blocks = Operands.of(vectors), cut([2])
    out = torch.zeros_like(vectors[0])
    taken = backend.block_products(rows, blocks) is not None
    assert (backend.combine(None, rows, [[1.0] * len(vectors)], blocks, out) is out) == taken
    return taken


def test_only_floating_tensors_on_the_device_are_supported():
    assert all(is_taken(torch.ones(2, dtype=dtype, device=DEVICE)) for dtype in DTYPES)
    assert not is_taken(torch.ones(2, device=DEVICE), torch.ones(2, device=DEVICE).to(torch.float8_e5m2))
    if DEVICE == "cuda":
        assert not is_taken(torch.ones(2))
