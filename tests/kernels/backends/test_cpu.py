"""Laws of native.cpp at its own door: the bits do not depend on how vectors are cut into pieces, nor on how they lie."""

import platform
import shutil
from array import array
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.kernels.backends import cpu
from manifoldagg.kernels.blocks import BLOCK_SIZE, Blocks
from manifoldagg.kernels.reduction import pairwise_sum
from manifoldagg.kernels.tensor_list import NATIVE_DTYPES
from tests.support import draw, seeds

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason="no C++ compiler")
DTYPES = list(NATIVE_DTYPES)
LENGTHS = [0, 1, 2, 3, 7, 8, 9, 31, 64, 100, 513, 4097, BLOCK_SIZE - 3, BLOCK_SIZE, BLOCK_SIZE + 5]
CUTS = st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=7)
ROWS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 31, 32, 33, 40, 65, 70])


def described(rows):
    """A description of rows, each a list of pieces or `None` for nothing, of `count` pieces."""
    numbers = []
    for row in rows:
        for piece in row:
            numbers += (0, 1, 0) if piece is None else (piece.data_ptr(), piece.stride(0), NATIVE_DTYPES[piece.dtype])
    return array("q", numbers)


def place(numbers):
    return numbers.buffer_info()[0]


def grams(rows, minus, lengths, threads=1, cuts=None):
    """The sums of each block of rows cut into pieces."""
    edges = array("q", accumulate(lengths, initial=0))
    blocks = Blocks.of(cuts or ((0, edges[-1]),))
    k = len(rows)
    sums = np.full((len(blocks.table), k * (k + 1) // 2), np.nan)
    plus, less = described(rows), described(minus)
    done = cpu._require_library().manifoldagg_gram(
        *(k, len(lengths), place(edges), place(plus), place(less)),
        *(len(blocks.table), blocks.table_address, sums.ctypes.data, threads),
    )
    assert done
    return sums


def combined(base, rows, minus, coefficients, lengths, dtypes, threads=1, stream=False, offset=0):
    """The combination of rows cut into pieces, as one vector."""
    edges = array("q", accumulate(lengths, initial=0))
    blocks = Blocks.of(((0, edges[-1]),))
    out = [
        torch.full((length + offset,), torch.nan, dtype=dtype)[offset:]
        for length, dtype in zip(lengths, dtypes, strict=True)
    ]
    plus, less, start, to = described(rows), described(minus), described([base]), described([out])
    numbers = array("d", coefficients)
    done = cpu._require_library().manifoldagg_combine(
        *(len(rows), len(lengths), place(edges), place(plus), place(less), place(start), place(to)),
        *(place(numbers), len(blocks.table), blocks.table_address, stream, threads),
    )
    assert done
    return out


def cut(vector, lengths, strides=None):
    """Pieces of a vector in memory of their own, the entries of each so far apart."""
    if vector is None:
        return [None] * len(lengths)
    pieces = []
    for i, piece in enumerate(vector.split(lengths)):
        stride = strides[i % len(strides)] if strides else 1
        pool = torch.full((len(piece) * stride + 1,), torch.nan, dtype=vector.dtype)
        pieces.append(pool[1:][::stride][: len(piece)].copy_(piece))
    return pieces


def subtrahends(seed, pattern, k, size, dtype):
    """What is subtracted: nothing, one vector, or something else for each row."""
    if pattern == "none":
        return [None] * k
    if pattern == "one":
        return [draw(seed, size, dtype=dtype)] * k
    others = [None, *draw(seed, 2, size, dtype=dtype)]
    return [others[i % 3] for i in range(k)]


@given(seeds, ROWS, CUTS, st.sampled_from(DTYPES), st.sampled_from(["none", "one", "mixed"]), st.booleans())
def test_a_gram_matrix_does_not_depend_on_the_pieces(seed, k, lengths, dtype, pattern, strided):
    size = sum(lengths)
    rows = list(draw(seed, k, size, dtype=dtype))
    minus = subtrahends(seed + 1, pattern, k, size, dtype)
    strides = [2, 1, 3] if strided else None
    whole = grams([[row] for row in rows], [[row] for row in minus], [size])
    found = grams(
        [cut(row, lengths, strides) for row in rows], [cut(row, lengths) for row in minus], lengths, threads=2
    )
    assert np.array_equal(whole.view(np.int64), found.view(np.int64))


@given(seeds, ROWS, CUTS, st.sampled_from(["none", "one", "mixed"]))
def test_a_gram_matrix_of_representable_numbers_does_not_depend_on_the_dtype(seed, k, lengths, pattern):
    size = sum(lengths)
    # Of few digits, so that bf16, which has the fewest, holds them.
    rows = list(draw(seed, k, size, dtype=torch.bfloat16).clamp(-100, 100))
    minus = subtrahends(seed + 1, pattern, k, size, torch.bfloat16)
    pick = np.random.default_rng(seed)

    def mixed(vector):
        wider = [torch.bfloat16, torch.float32, torch.float64]
        return [piece if piece is None else piece.to(wider[pick.integers(3)]) for piece in cut(vector, lengths)]

    whole = grams([[row] for row in rows], [[row] for row in minus], [size])
    found = grams([mixed(row) for row in rows], [mixed(row) for row in minus], lengths)
    assert np.array_equal(whole.view(np.int64), found.view(np.int64))


@given(
    seeds,
    st.integers(1, 70),
    st.sampled_from([1, 5, 8, 1000, BLOCK_SIZE + 9]),
    st.sampled_from(["none", "one", "mixed"]),
)
def test_an_entry_does_not_depend_on_the_other_rows(seed, k, size, pattern):
    rows = [[row] for row in draw(seed, k, size, dtype=torch.float32)]
    minus = [[row] for row in subtrahends(seed + 1, pattern, k, size, torch.float32)]
    found = grams(rows, minus, [size])
    pick = np.random.default_rng(seed)
    for i, j in pick.integers(k, size=(5, 2)):
        i, j = max(i, j), min(i, j)
        pair = grams([rows[j], rows[i]], [minus[j], minus[i]], [size])
        assert np.array_equal(found[:, i * (i + 1) // 2 + j], pair[:, 1])


@given(
    seeds,
    ROWS,
    CUTS,
    st.sampled_from(DTYPES),
    st.sampled_from(["none", "one", "mixed"]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
)
def test_a_combination_does_not_depend_on_the_pieces(seed, k, lengths, dtype, pattern, strided, based, offset):
    size = sum(lengths)
    rows = list(draw(seed, k, size, dtype=dtype))
    minus = subtrahends(seed + 1, pattern, k, size, dtype)
    base = draw(seed + 2, size, dtype=dtype) if based else None
    c = draw(seed + 3, k)
    c[k // 2] = 0
    strides = [2, 1, 3] if strided else None
    (whole,) = combined([base], [[row] for row in rows], [[row] for row in minus], c.tolist(), [size], [dtype])
    found = combined(
        cut(base, lengths),
        [cut(row, lengths, strides) for row in rows],
        [cut(row, lengths) for row in minus],
        c.tolist(),
        lengths,
        [dtype] * len(lengths),
        threads=2,
        stream=True,
        offset=offset,
    )
    assert torch.equal(whole, torch.cat(found))


@given(seeds, ROWS, CUTS, st.booleans())
def test_a_combination_of_several_dtypes_rounds_each_tensor_to_its_dtype(seed, k, lengths, based):
    size = sum(lengths)
    pick = np.random.default_rng(seed)
    rows = list(draw(seed, k, size, dtype=torch.bfloat16))
    base = draw(seed + 2, size, dtype=torch.bfloat16) if based else None
    c = draw(seed + 3, k).tolist()
    dtypes = [DTYPES[i] for i in pick.integers(4, size=len(lengths))]

    def kept(vector):
        wider = [torch.bfloat16, torch.float32, torch.float64]
        return [piece if piece is None else piece.to(wider[pick.integers(3)]) for piece in cut(vector, lengths)]

    none = [[None]] * k
    nothing = [[None] * len(lengths)] * k
    found = combined(kept(base), [kept(row) for row in rows], nothing, c, lengths, dtypes)
    for dtype in DTYPES:
        (whole,) = combined([base], [[row] for row in rows], none, c, [size], [dtype])
        for piece, expected in zip(found, whole.split(lengths), strict=True):
            assert piece.dtype is not dtype or torch.equal(piece, expected)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a flag of x86")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_processor_without_wide_registers_gives_the_same_bits(tmp_path, monkeypatch):
    plain = tmp_path / "native.so"
    monkeypatch.setattr(cpu, "COMPILER_FLAGS", [flag.replace("native", "x86-64") for flag in cpu.COMPILER_FLAGS])
    cpu._build("g++", plain)
    libraries = [cpu._require_library(), cpu._load(plain)]
    found = []
    for library in libraries:
        monkeypatch.setattr(cpu, "_require_library", lambda library=library: library)
        for k in (1, 3, 8, 33):
            for dtype in DTYPES:
                rows = [[row] for row in draw(k, k, 5003, dtype=dtype)]
                minus = [[draw(1, 5003, dtype=dtype)]] * k
                found.append(torch.from_numpy(grams(rows, minus, [5003])))
                found += combined([rows[0][0]], rows, minus, [0.3] * k, [5003], [dtype])
    half = len(found) // 2
    for first, second in zip(found[:half], found[half:], strict=True):
        assert torch.equal(first, second)


@given(
    seed=seeds,
    cuts=st.lists(st.sampled_from([0, 1, BLOCK_SIZE - 1, 3 * BLOCK_SIZE, 5 * BLOCK_SIZE + 1]), min_size=1, max_size=4),
    special=st.sampled_from([0.0, np.inf, -np.inf, np.nan, 1e308]),
)
def test_the_native_pairwise_sum_equals_the_reference(seed, cuts, special):
    edges = list(accumulate(cuts, initial=0))
    blocks = Blocks.of(tuple(pairwise(edges)))
    sums = draw(seed, len(blocks.table), 3).mul(10.0 ** draw(seed + 1, len(blocks.table), 3)).numpy()
    if len(sums) > 1:
        sums[1, 1] = sums[-1, 1] = special
    expected = pairwise_sum(sums, blocks)[0]
    np.testing.assert_array_equal(cpu.pairwise_sum(sums.copy(), blocks), expected)


@pytest.mark.parametrize(
    ("system", "machine", "untested"),
    [("Linux", "x86_64", False), ("Linux", "aarch64", True), ("Darwin", "arm64", True)],
)
def test_the_origin_reports_whether_the_platform_is_tested(monkeypatch, tmp_path, system, machine, untested):
    class Library:
        _name = str(tmp_path / "native.so")

    monkeypatch.setattr(cpu, "_require_library", Library)
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert cpu.origin() == "built on this machine" + f", untested on {system} {machine}" * untested
