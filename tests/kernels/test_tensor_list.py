"""Laws of rows that are tuples of tensors: they are the vectors that one would make of them, bit for bit."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import TensorList, across_ranks, available_backends, combine, gram, set_backend
from manifoldagg.kernels.blocks import BLOCK_SIZE
from tests.support import draw, seeds

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LENGTHS = st.lists(st.sampled_from([0, 1, 2, 6, 31, 64, 4095, BLOCK_SIZE - 1, BLOCK_SIZE + 3]), min_size=1, max_size=8)
HERE = [name for name in ("reference", "cpu") if name in available_backends()]


@pytest.fixture(params=HERE)
def backend(request):
    before = set_backend(request.param)
    yield request.param
    set_backend(before)


def shaped(piece):
    """The same entries in another shape, where there is one."""
    n = len(piece)
    return piece.view(()) if n == 1 else piece.view(2, -1) if n % 2 == 0 and n else piece


def cut(vector, lengths, dtypes=(None,), strided=()):
    """A vector as tensors of some dtypes, in memory of their own; some do not lie in one piece."""
    row = []
    for i, piece in enumerate(vector.split(lengths)):
        piece = shaped(piece.clone()).to(dtypes[i % len(dtypes)])
        if i in strided:
            pool = torch.full((*piece.shape, 3), math.nan, dtype=piece.dtype)
            pool[..., 1] = piece
            piece = pool[..., 1]
        row.append(piece)
    return tuple(row)


def joined(row):
    return torch.cat([tensor.reshape(-1).double() for tensor in row])


@pytest.mark.usefixtures("backend")
@given(seeds, LENGTHS, st.integers(1, 6), st.sampled_from(DTYPES), st.sampled_from(["none", "one", "each", "vector"]))
def test_results_do_not_depend_on_the_pieces(seed, lengths, k, dtype, sharing):
    size = sum(lengths)
    rows = list(draw(seed, k, size, dtype=dtype))
    base = draw(seed + 1, size, dtype=dtype)
    less = list(draw(seed + 2, k, size, dtype=dtype))
    minus = {"none": [None] * k, "one": [less[0]] * k, "each": [*less[:-1], None], "vector": [less[0]] * k}[sharing]
    strided = {i for i in range(len(lengths)) if (seed + i) % 5 == 0}
    tuples = [cut(row, lengths, strided=strided) for row in rows]
    if sharing == "vector":
        pieces = less[0]
    else:
        known = {id(row): cut(row, lengths) for row in minus if row is not None}
        pieces = [None if row is None else known[id(row)] for row in minus]
    assert torch.equal(gram(tuples, minus=pieces), gram(rows, minus=minus))
    c = draw(seed + 3, k).tolist()
    expected = combine(base, rows, c, minus=minus)
    start = cut(base, lengths, strided=strided)
    found = combine(start, tuples, c, minus=pieces)
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in start]
    assert torch.equal(joined(found), expected.double())
    vector = torch.full((size,), math.nan, dtype=dtype)
    assert combine(start, tuples, c, minus=pieces, out=vector) is vector
    assert torch.equal(vector, expected)
    assert torch.equal(joined(start), base.double())
    assert combine(base, rows, c, minus=minus, out=start) is start
    assert torch.equal(joined(start), expected.double())


@pytest.mark.usefixtures("backend")
@given(seeds, LENGTHS, st.booleans())
def test_every_tensor_has_its_own_dtype(seed, lengths, with_segments):
    size = sum(lengths)
    mixed = [torch.bfloat16, torch.float32, torch.float64, torch.float16]
    rows = [cut(row, lengths, mixed) for row in draw(seed, 2, size)]
    base = cut(draw(seed + 1, size), lengths, mixed[1:])
    dense = [joined(row) for row in (*rows, base)]
    segments = lengths if with_segments else None
    assert torch.equal(
        gram(rows, minus=[base, None], segments=segments), gram(dense[:2], minus=[dense[2], None], segments=segments)
    )
    found = combine(base, rows, [0.5, -3.1], minus=[None, base])
    expected = combine(dense[2], dense[:2], [0.5, -3.1], minus=[None, dense[2]])
    for tensor, like, piece in zip(found, base, expected.split(lengths), strict=True):
        rounded = piece.float().to(like.dtype) if like.itemsize == 2 else piece.to(like.dtype)
        assert tensor.dtype == like.dtype
        assert torch.equal(tensor, rounded.view(like.shape))


@pytest.mark.usefixtures("backend")
def test_dtypes_that_only_torch_reads_are_read_and_written():
    row = (torch.ones(3).to(torch.float8_e4m3fn), torch.full((2, 2), 2.0))
    assert gram([row]).item() == 19
    found = combine(row, [row], [1.0])
    assert [tensor.dtype for tensor in found] == [torch.float8_e4m3fn, torch.float32]
    assert joined(found).tolist() == [2.0] * 3 + [4.0] * 4


@pytest.mark.usefixtures("backend")
def test_tensors_without_plain_memory_are_read_by_value():
    negative = torch.complex(torch.ones(4), torch.ones(4)).conj().imag
    row = (negative, torch.ones(1), torch._efficientzerotensor(2))
    assert gram([row, (torch.ones(4), torch.ones(1), torch.ones(2))])[0].tolist() == [[5.0, -3.0], [-3.0, 7.0]]
    assert joined(combine(None, [row], [2.0])).tolist() == [-2.0] * 4 + [2.0, 0.0, 0.0]


@pytest.mark.usefixtures("backend")
def test_a_target_may_have_any_strides_and_may_be_an_operand():
    pool = torch.arange(12.0).view(3, 4)
    out = (pool[:, 1], torch.zeros(2, 2))
    row = (pool[:, 1], torch.ones(2, 2))
    assert combine(row, [row], [1.0], out=out) is out
    assert pool[:, 1].tolist() == [2.0, 10.0, 18.0]
    assert out[1].tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert pool[:, 0].tolist() == [0.0, 4.0, 8.0]


@pytest.mark.usefixtures("backend")
def test_float64_rows_out_of_range_are_rescaled_piece_by_piece():
    row = torch.tensor([2.0**-520, 1.0, 2.0**-519], dtype=torch.float64)
    cuts = (row[:1], row[1:2].view(()), row[2:])
    assert torch.equal(gram([cuts], segments=[1, 1, 1]), gram([row], segments=[1, 1, 1]))
    assert torch.equal(gram([(row[:1], row[2:])]), gram([row[::2]]))


def test_a_row_described_by_the_caller_is_described_once():
    plain = (torch.ones(2, 2), torch.ones(3))
    row = TensorList(plain)
    first = gram([row, plain])
    addresses = row.addresses
    again = combine(row, [row], [1.0])
    assert torch.equal(first, gram([plain, plain]))
    assert type(again) is TensorList
    assert row.addresses is addresses
    assert addresses == tuple(tensor.data_ptr() for tensor in plain)


def test_derivatives_reach_every_tensor():
    row = (draw(0, 2, 3).requires_grad_(), draw(1, 4).requires_grad_())
    base = (draw(2, 2, 3), draw(3, 4))
    new = combine(base, [row], [0.5], minus=[base])
    assert [tensor.shape for tensor in new] == [(2, 3), (4,)]
    gram([new])[0, 0, 0].backward()
    for tensor, start in zip(row, base, strict=True):
        # |b + (x - b)/2|^2, by hand: the slope is b + (x - b)/2.
        assert torch.allclose(tensor.grad, start + 0.5 * (tensor.detach() - start), rtol=1e-14)


def test_operands_are_not_modified():
    array = torch.arange(6.0).numpy()
    array.setflags(write=False)
    leaf = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.warns(UserWarning, match="not writable"):
        row = (torch.from_numpy(array), leaf.detach())
    before = leaf._version
    combine(None, [row, row], [1.0, 2.0])
    gram([row])
    assert array.tolist() == [0, 1, 2, 3, 4, 5]
    assert leaf._version == before


def test_leaves_that_require_grad_are_read_without_autograd():
    row = (torch.nn.Parameter(torch.ones(2, 2)), torch.ones(3))
    with torch.no_grad():
        assert gram([row]).item() == 7
        found = combine(row, [row], [1.0])
    assert not any(tensor.requires_grad for tensor in found)


OUT = "out: expected base, a row, or memory"


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, y: gram([(x, y), (x, y[:7])]), r"rows\[1\]\[1\]: expected 12 entries, got 7"),
        (lambda x, y: gram([(x, y), (x,)]), r"rows\[1\]: expected 2 tensors, got 1"),
        (lambda x, y: gram([(x, y)], minus=[(x, y[:7])]), r"minus\[0\]\[1\]: expected 12 entries, got 7"),
        (lambda x, y: gram([(x, y)], minus=[torch.ones(7)]), r"minus\[0\]: expected shape \(17,\), got \(7,\)"),
        (lambda x, y: gram([torch.ones(17), (x, y[:7])]), r"rows\[1\]: expected 17 entries, got 12"),
        (lambda x, y: gram([()]), r"rows\[0\]: expected at least one tensor, got an empty tuple"),
        (lambda x, y: gram([[x, y]]), r"rows\[0\]: expected a tensor of a floating dtype, got list"),
        (lambda x, y: gram([(x, None)]), r"rows\[0\]\[1\]: expected a tensor of a floating dtype, got NoneType"),
        (lambda x, y: gram([(x, y.long())]), r"rows\[0\]\[1\]: expected a tensor of a floating dtype, got torch.int64"),
        (lambda x, y: gram([(x, y.to("meta"))]), r"rows\[0\]\[1\]: expected a dense tensor with values"),
        (lambda x, y: gram([(x.to("meta"), y)]), r"rows\[0\]\[0\]: expected a dense tensor with values"),
        (lambda x, y: gram([(x, y.to_sparse())]), r"rows\[0\]\[1\]: expected a dense tensor with values"),
        (lambda x, y: gram([(x, y)], segments=[16]), "segments: expected lengths that sum to 17, got a sum of 16"),
        (lambda x, y: combine((x, y[:7]), [(x, y)], [1.0]), r"base\[1\]: expected 12 entries, got 7"),
        (lambda x, y: combine(None, [(x, y)], [1.0], out=(x,)), "out: expected 2 tensors, got 1"),
        (lambda x, y: combine(None, [(x, y)], [1.0], out=[x, y]), "out: expected a tensor of a floating dtype"),
        (lambda x, y: combine(None, [(x, y)], [1.0], out=(y[:5], y.clone())), OUT),
        (lambda x, y: combine(None, [(x[1:], y)], [1.0], out=(x[:-1], y)), OUT),
        (lambda x, y: combine(None, [(x, y)], [1.0], out=(x.view(torch.int32).view(torch.float32), y[:12:1])), None),
        (lambda x, y: combine(None, [(x, y)], [1.0], out=(y[:5], torch.zeros(12))), OUT),
        (lambda x, y: combine(None, [(x, y)], [1.0], out=torch.cat([x, y])[:17]), None),
        (lambda x, y: combine(None, [(x, x)], [1.0], out=(x, x)), "out: expected tensors with memory of their own"),
        (
            lambda x, y: combine(None, [(x, y)], [1.0], out=(torch.zeros(1).expand(5), torch.zeros(12))),
            "out: expected tensors with memory of their own",
        ),
        (
            lambda x, y: combine(
                None, [(x, y)], [1.0], out=(torch.zeros(5), torch.zeros(8).as_strided((3, 4), (2, 1)))
            ),
            "out: expected tensors with memory of their own",
        ),
        (lambda x, y: combine(None, [(x, y)], [1.0], out=(torch.zeros(9)[::2], torch.zeros(3, 8)[:, ::2].T)), None),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    x, y = torch.ones(5), torch.full((12,), 2.0)
    if words is None:
        call(x, y)
        return
    with pytest.raises(ArgumentError, match=words):
        call(x, y)
    assert x.tolist() == [1.0] * 5
    assert y.tolist() == [2.0] * 12


def places(row, lengths):
    """The bytes that each entry takes, in order."""
    if isinstance(row, torch.Tensor):
        row = row.split(lengths)
    return [
        set(range(tensor.data_ptr() + i * tensor.itemsize, tensor.data_ptr() + (i + 1) * tensor.itemsize))
        for tensor in row
        for i in range(tensor.numel())
    ]


@pytest.mark.usefixtures("as_shipped")
@given(seeds)
def test_a_target_that_overlaps_another_entry_is_rejected(seed):
    pick = np.random.default_rng(seed)

    def row(pool, lengths):
        views = [pool.view(DTYPES[pick.integers(3)]) for _ in lengths]
        starts = [pick.integers(0, len(view) - n + 1) for view, n in zip(views, lengths, strict=True)]
        return tuple(view[a : a + n] for view, a, n in zip(views, starts, lengths, strict=True))

    for _ in range(30):
        pool = torch.zeros(64, dtype=torch.uint8)
        lengths = pick.integers(0, 4, size=pick.integers(1, 4)).tolist()
        out, read = row(pool, lengths), row(pool, lengths)
        if pick.integers(2):
            read = tuple(a if pick.integers(2) else b for a, b in zip(out, read, strict=True))
        mine, other = places(out, lengths), places(read, lengths)
        kinds = [[tensor.dtype for tensor in line for _ in range(tensor.numel())] for line in (out, read)]
        shared = any(mine[i] & mine[j] for i in range(len(mine)) for j in range(i))
        meets = any(
            mine[i] & other[j] and not (i == j and mine[i] == other[j] and kinds[0][i] == kinds[1][j])
            for i in range(len(mine))
            for j in range(len(other))
        )
        if shared or meets:
            with pytest.raises(ArgumentError, match="out: expected"):
                combine(None, [read], [1.0], out=out)
        else:
            combine(None, [read], [1.0], out=out)


@pytest.fixture
def alone():
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_within_ranks_a_tuple_is_the_piece_of_this_rank():
    rows = [(draw(i, 3, 4), draw(i + 5, 6)) for i in range(2)]
    base = (draw(8, 3, 4), draw(9, 6))
    here = gram(rows, minus=[base, None]), combine(base, rows, [0.5, 2.0], minus=[base, None])
    with across_ranks():
        assert torch.equal(gram(rows, minus=[base, None]), here[0])
        found = combine(base, rows, [0.5, 2.0], minus=[base, None])
        out = (torch.empty(3, 4), torch.empty(6))
        assert combine(base, rows, [0.5, 2.0], minus=[base, None], out=out) is out
    for new, same, expected in zip(found, here[1], out, strict=True):
        assert torch.equal(new, same)
        assert torch.equal(expected, same.float())
    vector = draw(3, 18)
    with across_ranks():
        again = combine(base, [vector], [1.0])
    assert torch.equal(joined(again), joined(base) + vector)


@pytest.mark.usefixtures("alone", "as_shipped")
def test_a_dtensor_in_a_tensor_list_is_rejected_by_name():
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    placed = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    with pytest.raises(ArgumentError, match=r"rows\[0\]\[1\]: expected a plain tensor, got a DTensor"):
        gram([(torch.ones(2), placed)])
    with pytest.raises(ArgumentError, match=r"rows\[0\]\[0\]: expected a plain tensor, got a DTensor"):
        combine(None, [(placed, torch.ones(2))], [1.0])
