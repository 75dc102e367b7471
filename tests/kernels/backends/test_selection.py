"""Laws of every backend on this machine: right to the stated bound, whatever the size, dtype, stride and threads."""

import math
import os
import shutil
import subprocess
import sys

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import available_backends, combine, gram, set_backend
from manifoldagg.kernels.backends import cpu, reference, selection
from manifoldagg.kernels.backends.selection import ENV_VARIABLE, describe_backends
from manifoldagg.kernels.blocks import BLOCK_SIZE, Blocks
from manifoldagg.kernels.operands import Operands
from manifoldagg.kernels.reduction import pairwise_sum
from tests.support import draw, seeds

U = 2.0**-53
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = [
    0,
    1,
    2,
    3,
    5,
    7,
    31,
    255,
    256,
    257,
    1021,
    4095,
    4096,
    4097,
    BLOCK_SIZE - 1,
    BLOCK_SIZE,
    BLOCK_SIZE + 1,
    2 * BLOCK_SIZE + 3,
    65537,
]
HERE = [name for name in ("reference", "cpu") if name in available_backends()]


@pytest.fixture(params=HERE)
def backend(request):
    before = set_backend(request.param)
    yield request.param
    set_backend(before)


def products(rows, minus):
    """The Gram matrix and the sums of magnitudes that bound its error, in extended precision."""
    wide = [row.double().numpy().astype(np.longdouble) for row in rows]
    less = [0 if row is None else row.double().numpy().astype(np.longdouble) for row in minus]
    lines = [a - b for a, b in zip(wide, less, strict=True)]
    exact = np.array([[np.sum(a * b) for b in lines] for a in lines], dtype=np.longdouble)
    sums = np.array([[np.sum(np.abs(a * b)) for b in lines] for a in lines], dtype=np.longdouble)
    return exact, sums


def is_within_the_bound(found, rows, minus, n=BLOCK_SIZE):
    exact, sums = products(rows, minus)
    # blocks.py: (n + 3) u for a block of n entries and 2u for the fold.
    return bool((np.abs(found.numpy() - exact) <= (min(n, BLOCK_SIZE) + 5) * U * sums).all())


@pytest.mark.usefixtures("backend")
@given(
    seeds, st.sampled_from(SIZES), st.integers(1, 6), st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.booleans()
)
def test_gram_satisfies_the_error_bound_of_blocks(seed, size, k, dtype, other, subtracts):
    rows = list(draw(seed, k, size, dtype=dtype))
    minus = [draw(seed + 1, size, dtype=other)] * k if subtracts else [None] * k
    assert is_within_the_bound(gram(rows, minus=minus)[0], rows, minus, size)


@pytest.mark.parametrize("name", HERE)
@given(seeds, st.sampled_from([1, 2, 17, 300]), st.sampled_from(DTYPES))
def test_gram_agrees_with_multiprecision_arithmetic(name, seed, size, dtype):
    rows, minus = draw(seed, 2, size, dtype=dtype), draw(seed + 1, size, dtype=dtype)
    before = set_backend(name)
    found = gram(rows, minus=minus)[0, 1, 0].item()
    set_backend(before)
    with mpmath.workdps(40):
        lines = [
            [mpmath.mpf(a) - mpmath.mpf(b) for a, b in zip(row.tolist(), minus.tolist(), strict=True)] for row in rows
        ]
        terms = [a * b for a, b in zip(*lines, strict=True)]
        assert abs(mpmath.fsum(terms) - found) <= (size + 5) * U * mpmath.fsum(terms, absolute=True)


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backends_agree_to_twice_the_bound(k, dtype):
    rows, minus = list(draw(0, k, 50_021, dtype=dtype)), draw(9, 50_021, dtype=dtype)
    blocks = Blocks.of(((0, 50_021),))
    lines = [gram(rows, minus=minus)[0] for _ in by_turns()]
    _, sums = products(rows, [minus] * k)
    assert len(blocks.table) == 4
    for line in lines[1:]:
        assert (np.abs((line - lines[0]).numpy()) <= 2 * (BLOCK_SIZE + 5) * U * sums).all()


def by_turns():
    for name in HERE:
        before = set_backend(name)
        yield name
        set_backend(before)


@pytest.mark.usefixtures("backend")
def test_ten_million_entries_satisfy_the_error_bound():
    rows, minus = list(draw(0, 3, 10_000_019, dtype=torch.float32)), draw(1, 10_000_019, dtype=torch.float32)
    found = gram(rows[:2], minus=minus)[0]
    lines = [(row.double() - minus.double()).numpy() for row in rows[:2]]
    for i, j in ((0, 0), (1, 0), (1, 1)):
        exact = math.fsum(np.add.reduceat(lines[i] * lines[j], range(0, 10_000_019, 64)))
        # The sums over 64 entries that stand for the exact ones have an error of their own.
        assert abs(found[i, j].item() - exact) <= (BLOCK_SIZE + 5 + 64) * U * math.sqrt(found[i, i] * found[j, j])
    found = combine(minus, rows, [0.5, -1.0, 2.0], minus=minus)
    where = torch.arange(0, 10_000_019, 9973)
    less = minus[where].double()
    # Multiples of powers of two by differences of float32 numbers: each rounds once at most, then the sums.
    exact = less + 0.5 * (rows[0][where] - less) - (rows[1][where] - less) + 2.0 * (rows[2][where] - less)
    assert (found[where].double() - exact).abs().max() <= 2.0**-23 * exact.abs().max()


@pytest.mark.usefixtures("backend")
@given(
    seeds,
    st.sampled_from(SIZES),
    st.integers(0, 5),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
)
def test_combine_rounds_a_float64_sum_once(seed, size, k, rows_in, base_in, out_in):
    rows, minus = list(draw(seed, k + 1, size, dtype=rows_in)), draw(seed + 1, size, dtype=rows_in)
    base, c = draw(seed + 2, size, dtype=base_in), draw(seed + 3, k + 1).tolist()
    out = torch.full((size,), float("nan"), dtype=out_in)
    wide = [row.double() - minus.double() for row in rows]
    exact = base.double() + sum(x * row for x, row in zip(c, wide, strict=True))
    room = sum(abs(x) * row.abs() for x, row in zip(c, wide, strict=True)) + base.double().abs()
    assert combine(base, rows, c, minus=minus, out=out) is out
    # k + 2 roundings in float64 may move the sum across a border of the target's grid.
    slack = (2 * k + 6) * U * room
    low, high = (exact - slack).to(out_in), (exact + slack).to(out_in)
    assert ((out >= low) & (out <= high)).all()


@pytest.mark.usefixtures("backend")
@given(
    seeds,
    st.sampled_from([1, 5, 33, 1000, BLOCK_SIZE + 7]),
    st.integers(0, 9),
    st.integers(1, 3),
    st.sampled_from(DTYPES),
)
def test_results_do_not_depend_on_offsets_and_strides(seed, size, offset, stride, dtype):
    plain = draw(seed, 3, size, dtype=dtype)
    pool = torch.full((3, offset + size * stride), float("nan"), dtype=dtype)
    views = [line[offset::stride][:size] for line in pool]
    for view, row in zip(views, plain, strict=True):
        view.copy_(row)
    first, second = (gram(rows[:2], minus=rows[2]) for rows in (views, plain))
    assert torch.equal(first, second)
    out = torch.full((offset + size * stride,), 7.0, dtype=dtype)
    target = out[offset::stride][:size]
    combine(views[0], views[1:], [0.3, -1.7], out=target)
    assert torch.equal(target, combine(plain[0], plain[1:], [0.3, -1.7]))
    assert int((out == 7.0).sum()) >= out.numel() - size


@pytest.mark.usefixtures("backend")
def test_an_expanded_row_is_read_by_value():
    row, other = torch.full((1,), 3.0).expand(1000), draw(0, 1000, dtype=torch.float32)
    assert gram([row])[0, 0, 0].item() == 9000
    assert torch.equal(combine(other, [row], [2.0]), (other.double() + 6).float())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_target_may_be_any_input_and_is_never_read_before_it_is_written(dtype):
    size = (1 << 21) + 5  # large enough to be written past the cache
    rows, base = list(draw(0, 2, size, dtype=dtype)), draw(1, size, dtype=dtype)
    expected = combine(base, rows, [0.25, -0.5], minus=base)
    for target in (base.clone(), *(row.clone() for row in rows)):
        inputs = [base, *rows]
        place = next(i for i, row in enumerate(inputs) if torch.equal(row, target))
        inputs[place] = target
        combine(inputs[0], inputs[1:], [0.25, -0.5], minus=inputs[0], out=target)
        assert torch.equal(target, expected)
    for offset in range(3):  # no store may need more alignment than there is
        target = torch.full((size + 3,), float("nan"), dtype=dtype)[offset : offset + size]
        assert torch.equal(combine(base, rows, [0.25, -0.5], minus=base, out=target), expected)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("c", [1.0, 0.50390625, -3.0009765625, 1e-3])  # two of them make ties
def test_every_number_of_16_bits_is_read_and_rounded_as_torch_does(dtype, c):
    row = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    found = combine(None, [row], [c])
    expected = (c * row.double()).float().to(dtype)
    assert ((found == expected) | (found.isnan() & expected.isnan())).all()
    assert gram([row[row.isfinite()]])[0, 0, 0].item() == pytest.approx(row[row.isfinite()].double().square().sum())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("k", "lengths"), [(5, [7, 600_000, 399_996]), (16, [5 * BLOCK_SIZE + 900]), (33, [1000])])
def test_results_do_not_depend_on_the_number_of_threads(monkeypatch, k, lengths):
    monkeypatch.setattr(cpu, "MAX_SERIAL_ENTRIES", 0)
    rows = list(draw(0, k, sum(lengths), dtype=torch.float32))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append((gram(rows, minus=rows[0], segments=lengths), combine(None, rows, [0.1] * k)))
    finally:
        torch.set_num_threads(before)
    for grams, sums in found[1:]:
        assert torch.equal(grams, found[0][0])
        assert torch.equal(sums, found[0][1])


@pytest.mark.usefixtures("backend")
@given(seeds, st.lists(st.sampled_from([0, 1, 3, 100, BLOCK_SIZE, BLOCK_SIZE + 1]), min_size=1, max_size=5))
def test_a_segment_equals_the_gram_matrix_of_its_entries(seed, lengths):
    rows, c = draw(seed, 3, sum(lengths), dtype=torch.float32), draw(seed + 1, len(lengths), 3)
    together, sums = gram(rows, segments=lengths), combine(None, rows, c, segments=lengths)
    for s, piece in enumerate(rows.split(lengths, dim=1)):
        assert torch.equal(together[s], gram(piece.clone())[0])
        assert torch.equal(sums.split(lengths)[s], combine(None, piece.clone(), c[s]))


@pytest.mark.usefixtures("backend")
def test_a_row_with_coefficient_zero_is_not_read_in_its_segment():
    bad = torch.full((6,), float("inf"))
    found = combine(torch.ones(6), [bad, torch.ones(6)], [[0.0, 2.0], [0.0, 0.0]], minus=[bad, None], segments=[4, 2])
    assert found.tolist() == [3.0] * 4 + [1.0] * 2


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("k", [3, 6])
def test_a_nonfinite_diagonal_entry_identifies_the_row(bad, k):
    rows = draw(0, k, 40_000, dtype=torch.float32)
    rows[1, 33_333] = bad
    finite = gram(rows)[0].diagonal().isfinite()
    assert finite.tolist() == [i != 1 for i in range(k)]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-30, 1e30, 1e38])
def test_float32_drifts_of_any_size_are_accurate(scale):
    rows = (draw(0, 2, 1000) * 10).round().mul(scale).clamp(-3e38, 3e38).float()
    assert rows.abs().max() > 0
    assert is_within_the_bound(gram(rows)[0], list(rows), [None, None], 1000)
    assert torch.equal(combine(None, [rows[0]], [1.0]), rows[0])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("powers", [(-540, -480), (-1060, 300), (505, 400), (-1074, 1000), (-500, 511)])
def test_float64_rows_outside_the_range_of_squares_are_rescaled(powers):
    whole = draw(0, 2, 1000).mul(8).round()  # small integers: every product is exact
    rows = torch.stack(
        [
            torch.ldexp(torch.ldexp(row, torch.tensor(e // 2)), torch.tensor(e - e // 2))
            for row, e in zip(whole, powers, strict=True)
        ]
    )
    found = gram(rows)[0]
    for i in range(2):
        for j in range(2):
            with mpmath.workdps(60):
                inner = int((whole[i].long() * whole[j].long()).sum())
                exact = mpmath.mpf(inner) * mpmath.mpf(2) ** (powers[i] + powers[j])
                expected = float(exact)  # rounds to nearest, also among denormal numbers
            assert found[i, j].item() == expected, (i, j)


def test_pairwise_sum_is_rounded_once():
    blocks = Blocks.of(((0, 5 * BLOCK_SIZE), (5 * BLOCK_SIZE, 5 * BLOCK_SIZE), (5 * BLOCK_SIZE, 8 * BLOCK_SIZE + 1)))
    partials = draw(0, len(blocks.table), 6).mul(10.0 ** draw(1, len(blocks.table), 6)).numpy()
    high, low = pairwise_sum(partials, blocks)
    for s, part in ((0, partials[:5]), (2, partials[5:])):
        with mpmath.workdps(60):
            for n in range(6):
                exact = mpmath.fsum(part[:, n].tolist())
                assert high[s, n] == float(exact)
                assert abs(mpmath.mpf(high[s, n]) + mpmath.mpf(low[s, n]) - exact) <= 64 * U**2 * mpmath.fsum(
                    part[:, n].tolist(), absolute=True
                )
    assert (high[1] == 0).all()


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: combine(None, [x[:-1]], [1.0], out=x[1:]), "out: expected base, a row, or memory disjoint"),
        (lambda x: combine(x[:4], [x[4:8]], [1.0], out=x[2:6]), "out: expected base, a row, or memory"),
        (lambda x: combine(None, [x[:4]], [1.0], out=x[0:8:2]), "out: expected base, a row, or memory"),
        (lambda x: combine(None, [x], [1.0], out=torch.zeros(1).expand(9)), "out: expected entries with memory"),
        (lambda x: set_backend("numpy"), "backend: expected one of auto, reference, cpu, triton"),
        (lambda x: combine(None, [x], [float("nan"), 1.0]), "coefficients: expected shape"),
    ],
)
def test_invalid_arguments_are_rejected(call, words):
    x = torch.arange(9.0)
    with pytest.raises(ArgumentError, match=words):
        call(x)
    assert torch.equal(x, torch.arange(9.0))


def entries(view):
    """The bytes that each entry of a vector takes, in order."""
    return [range(place, place + view.itemsize) for place in (view[p : p + 1].data_ptr() for p in range(len(view)))]


@pytest.mark.usefixtures("as_shipped")
@given(seeds)
def test_a_target_that_overlaps_another_entry_is_rejected(seed):
    pick = np.random.default_rng(seed)
    for _ in range(40):
        pool, size = torch.zeros(64, dtype=torch.uint8), int(pick.integers(2, 5))
        views = []
        for dtype in pick.choice(len(DTYPES), 2):
            item = DTYPES[dtype].itemsize
            entry, step = int(pick.integers(0, 32 // item)), int(pick.integers(1, max(2, 8 // item + 1)))
            views.append(pool.view(DTYPES[dtype])[entry::step][:size])
        out, row = views
        if len(out) != len(row):
            continue
        taken = [(i, j) for i, a in enumerate(entries(out)) for j, b in enumerate(entries(row)) if set(a) & set(b)]
        same = out.dtype is row.dtype and taken == [(i, i) for i in range(len(out))]
        if taken and not same:
            with pytest.raises(ArgumentError, match="out: expected base, a row, or memory"):
                combine(None, [row], [1.0], out=out)


def test_tensors_a_backend_cannot_read_use_the_reference():
    rows = draw(0, 2, 100).to(torch.float8_e4m3fn)
    assert cpu.block_products(Operands.of(rows), Blocks.of(((0, 100),))) is None
    dense = rows.double()
    assert torch.equal(gram(list(rows))[0], gram(dense)[0])


@pytest.mark.skipif("cpu" not in HERE, reason="no C++ compiler")
def test_the_prebuilt_library_is_selected_by_processor_features(tmp_path):
    whole, less = cpu.CPU_LEVELS
    features = sorted(cpu.CPU_LEVELS[whole])
    assert cpu._find_prebuilt(tmp_path, features) is None
    shutil.copy(cpu._require_library()._name, tmp_path / f"native-{less}.so")
    (tmp_path / f"native-{whole}.so").write_bytes(b"cut short")
    assert cpu._find_prebuilt(tmp_path, features)._name == str(tmp_path / f"native-{less}.so")
    assert cpu._find_prebuilt(tmp_path, cpu.CPU_LEVELS[less])._name == str(tmp_path / f"native-{less}.so")
    assert cpu._find_prebuilt(tmp_path, cpu.CPU_LEVELS[less] - {"fma"}) is None
    assert cpu._find_prebuilt(tmp_path, []) is None


@pytest.mark.skipif("cpu" not in HERE, reason="no C++ compiler")
@pytest.mark.parametrize(("size", "threads"), [(1 << 20, 1), (1 << 22, 4)])
def test_small_work_stays_on_the_thread_of_the_caller(monkeypatch, size, threads):
    asked = []
    native = cpu._require_library()

    class Watched:
        def manifoldagg_gram(self, *arguments):
            asked.append(arguments[-1])
            return native.manifoldagg_gram(*arguments)

        def manifoldagg_combine(self, *arguments):
            asked.append(arguments[-1])
            return native.manifoldagg_combine(*arguments)

        manifoldagg_pairwise_sum = native.manifoldagg_pairwise_sum

    monkeypatch.setattr(cpu, "_require_library", Watched)
    row = torch.zeros(size, dtype=torch.float16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        gram([row, row])
        combine(row, [row, row], [0.5, 0.5])
    finally:
        torch.set_num_threads(before)
    assert asked == [threads] * 2


def run(code, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)


CALL = "import torch, manifoldagg.kernels as k; k.gram(torch.ones(2, 3)); k.gram(torch.ones(2, 3)); print(k.available_backends())"


BUILT = pytest.mark.skipif(
    "cpu" in HERE and cpu.origin().startswith("as shipped"), reason="a library came with the package"
)


@BUILT
def test_without_a_compiler_the_reference_runs_after_one_warning(tmp_path):
    done = run(CALL, PATH=str(tmp_path), CXX="", MANIFOLDAGG_CACHE=str(tmp_path), MANIFOLDAGG_BACKEND="auto")
    assert done.returncode == 0, done.stderr
    assert "reference" in done.stdout
    assert "cpu" not in done.stdout
    assert done.stderr.count("RuntimeWarning") == 1
    assert "found no C++ compiler" in done.stderr


@BUILT
def test_the_message_of_a_failing_compiler_is_reported(tmp_path):
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'fatal: no memory left' >&2\nexit 1\n")
    broken.chmod(0o755)
    done = run(CALL, CXX=str(broken), MANIFOLDAGG_CACHE=str(tmp_path / "cache"), MANIFOLDAGG_BACKEND="auto")
    assert done.returncode == 0
    assert "fatal: no memory left" in done.stderr
    assert list((tmp_path / "cache").iterdir()) == []


@BUILT
@pytest.mark.soak
@pytest.mark.skipif("cpu" not in HERE, reason="no C++ compiler")
def test_a_library_is_built_once_and_found_by_other_processes(tmp_path):
    code = "from manifoldagg.kernels.backends import cpu; print(cpu.unavailable())"
    assert run(code, MANIFOLDAGG_CACHE=str(tmp_path)).stdout == "None\n"
    (library,) = tmp_path.iterdir()
    before = library.stat().st_mtime_ns
    # A compiler that cannot be run any more is not missed.
    assert run(code, MANIFOLDAGG_CACHE=str(tmp_path), TMPDIR="/nowhere").stdout == "None\n"
    assert (library.stat().st_mtime_ns, len(list(tmp_path.iterdir()))) == (before, 1)


def test_torch_compile_traces_gram_and_combine_in_one_graph():
    code = """
import torch
from manifoldagg.kernels import combine, gram
base, row = torch.arange(6.0), torch.ones(6)
step = lambda b, r: combine(b, [r], [0.5], minus=b) + gram([r], minus=b)[0, 0, 0]
print(torch.allclose(torch.compile(step, fullgraph=True, backend="eager")(base, row), step(base, row).float()))
"""
    done = run(code)
    assert done.stdout == "True\n", done.stderr


def test_the_environment_selects_a_backend_and_rejects_unknown_names():
    code = "import manifoldagg.kernels.backends.selection as c; print(c.describe_backends()[-1][1])"
    assert run(code, **{ENV_VARIABLE: "reference"}).stdout == "reference, by MANIFOLDAGG_BACKEND\n"
    refused = run(CALL, **{ENV_VARIABLE: "cuda"})
    assert refused.returncode != 0
    assert "MANIFOLDAGG_BACKEND: expected one of" in refused.stderr


def test_the_compiled_backend_is_the_default_and_is_timed_on_request():
    before = set_backend("auto")
    chosen = selection.backend_for(torch.device("cpu")).__name__.rpartition(".")[2]
    told = dict(describe_backends())
    set_backend(before)
    assert chosen == ("cpu" if "cpu" in HERE else "reference")
    assert told["chosen"].removeprefix("triton on CUDA; ").startswith(f"{chosen} on the CPU: ")
    assert set(told) == {"reference", "cpu", "triton", "chosen"}
    assert "float32 entries took" in told["chosen"]
    assert reference.unavailable() is None


@pytest.mark.usefixtures("backend")
def test_rescaling_does_not_change_other_segments():
    row = torch.tensor([1e200, 3.3, 1e-3, 2.0**-600, 0.0], dtype=torch.float64)
    found = gram([row, row], minus=[None, 0 * row], segments=[1, 1, 1, 1, 1])[:, 0, 1].tolist()
    assert found == [math.inf, 3.3 * 3.3, 1e-3 * 1e-3, 0.0, 0.0]
    tiny = 2.0**-520
    pair = gram([torch.tensor([tiny, 1.0], dtype=torch.float64)], segments=[1, 1]).flatten().tolist()
    assert pair == [2.0**-1040, 1.0]


@pytest.mark.usefixtures("backend")
def test_tensors_without_plain_memory_are_read_by_value():
    negative = torch.complex(torch.ones(4), torch.ones(4)).conj().imag
    assert negative.is_neg()
    assert gram([negative, torch.ones(4)])[0].tolist() == [[4.0, -4.0], [-4.0, 4.0]]
    assert combine(None, [negative], [1.0]).tolist() == [-1.0] * 4
    assert gram([torch._efficientzerotensor(4), torch.ones(4)])[0].tolist() == [[0.0, 0.0], [0.0, 4.0]]


@pytest.mark.usefixtures("backend")
def test_overwriting_a_saved_tensor_raises_an_error_in_backward():
    out, weights = torch.zeros(4), torch.ones(4, requires_grad=True)
    loss = (out * weights).sum()
    combine(None, [torch.full((4,), 7.0)], [1.0], out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("backend")
def test_results_do_not_depend_on_the_default_device():
    row = torch.ones(4)
    with torch.device("meta"):
        assert gram([row])[0, 0, 0].item() == 4
        assert combine(None, [row], [[0.5]]).tolist() == [0.5] * 4


@pytest.mark.usefixtures("backend")
def test_a_target_interleaved_with_an_operand_is_disjoint():
    pool = torch.arange(12.0)
    assert combine(pool[1::2], [pool[1::2]], [1.0], out=pool[::2]).tolist() == [2.0, 6.0, 10.0, 14.0, 18.0, 22.0]
    assert pool.tolist() == [2, 1, 6, 3, 10, 5, 14, 7, 18, 9, 22, 11]


@BUILT
@pytest.mark.soak
def test_an_invalid_library_file_is_rebuilt(tmp_path):
    code = "from manifoldagg.kernels.backends import cpu; print(cpu.unavailable())"
    assert run(code, MANIFOLDAGG_CACHE=str(tmp_path)).stdout == "None\n"
    (library,) = tmp_path.iterdir()
    library.write_bytes(b"")
    assert run(code, MANIFOLDAGG_CACHE=str(tmp_path)).stdout == "None\n"
    assert library.stat().st_size > 1000


@BUILT
@pytest.mark.soak
def test_without_a_home_directory_the_library_is_temporary(tmp_path):
    code = "from pathlib import Path; import sys; from manifoldagg.kernels.backends import cpu\n"
    code += "def homeless(path): raise RuntimeError('no home')\n"
    code += "Path.expanduser = homeless; print(cpu.unavailable())"
    assert run(code, MANIFOLDAGG_CACHE="", XDG_CACHE_HOME="", TMPDIR=str(tmp_path)).stdout == "None\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: combine(None, [x], None), "coefficients: expected numbers"),
        (lambda x: combine(None, [x], 0.5), "coefficients: expected numbers"),
        (lambda x: combine(None, [x], [10**400]), "coefficients: expected numbers"),
        (
            lambda x: combine(None, [x], torch.tensor([1j])),
            "coefficients: expected numbers of shape .*: got torch.complex",
        ),
        (lambda x: gram(None), "rows: expected a sequence of tensors, got NoneType"),
        (lambda x: gram([x], minus=5), "minus: expected a sequence of tensors, got int"),
        (lambda x: gram([x], segments=3), "segments: expected a sequence of lengths, got 3"),
        (lambda x: gram([x.to_sparse()]), r"rows\[0\]: expected a dense tensor with values"),
        (lambda x: gram([x.to("meta")]), r"rows\[0\]: expected a dense tensor with values"),
    ],
)
def test_invalid_rows_numbers_and_lengths_are_rejected(call, words):
    with pytest.raises(ArgumentError, match=words):
        call(torch.ones(3))
