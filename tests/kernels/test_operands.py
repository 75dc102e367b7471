"""Laws of operands: rows that were checked once give the bits of rows that are checked by each call."""

import sys
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # the check for DTensors is part of the budget
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import TensorList, across_ranks, as_operands, available_backends, combine, gram, set_backend
from manifoldagg.kernels import operands as module
from manifoldagg.kernels.fused import LinearCombination
from manifoldagg.kernels.operands import Operands
from tests.support import draw, seeds

SHAPES = [(3, 2), (), (0,), (70,)]
SIZE = 77
KINDS = ["vectors", "lists", "mixed", "strided"]


def rows_of(kind, seed, count, dtype=torch.float32):
    """Rows of `SIZE` entries in memory of their own."""
    found = []
    for i, vector in enumerate(draw(seed, count, SIZE, dtype=dtype)):
        row = vector.clone()
        if kind == "lists" or (kind == "mixed" and i % 2):
            pieces = row.split([torch.Size(shape).numel() for shape in SHAPES])
            row = TensorList([piece.reshape(shape).clone() for piece, shape in zip(pieces, SHAPES, strict=True)])
        elif kind == "strided":
            memory = torch.zeros(SIZE, 2, dtype=dtype)
            memory[:, 0] = row
            pieces = memory.split([6, 1, 0, 70])
            row = TensorList([piece[:, 0] for piece in pieces])
        found.append(row)
    return found


def flat(row):
    return row if isinstance(row, torch.Tensor) else torch.cat([piece.reshape(-1) for piece in row])


@pytest.fixture(params=[name for name in ("reference", "cpu") if name in available_backends()])
def backend(request):
    before = set_backend(request.param)
    yield request.param
    set_backend(before)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind", KINDS)
@given(seeds, st.sampled_from([torch.float32, torch.float64]), st.booleans())
def test_operands_give_the_same_bits_as_rows(kind, seed, dtype, given_out):
    a, b, current, base = rows_of(kind, seed, 4, dtype)
    rows, minus = [a, b, current], [base, None, base]
    operands = Operands.of(rows, minus)
    assert torch.equal(gram(operands), gram(rows, minus=minus))
    few = operands.select([0, 2])
    assert torch.equal(gram(few), gram([a, current], minus=[base, base]))
    assert torch.equal(gram(few, segments=[7, SIZE - 7]), gram([a, current], minus=[base] * 2, segments=[7, SIZE - 7]))
    out = torch.empty(SIZE, dtype=dtype) if given_out else None
    for some, less in ((operands, minus), (operands.with_minus([current, base, None]), [current, base, None])):
        for start in (current, base, None):
            found = combine(start, some, [0.5, -2.0, 3.0], out=out)
            assert torch.equal(flat(found), flat(combine(start, rows, [0.5, -2.0, 3.0], minus=less)))
    assert torch.equal(gram(operands), gram(rows, minus=minus))


@pytest.mark.usefixtures("backend")
def test_a_base_in_pieces_does_not_change_the_operands():
    a, b = rows_of("vectors", 0, 2)
    operands = Operands.of([a, b])
    expected = gram(operands)
    for base in (rows_of("lists", 5, 1)[0], (torch.ones(70), torch.ones(7))):
        found = combine(base, operands, [1.0, 1.0])
        assert torch.equal(flat(found), combine(flat(base), [a, b], [1.0, 1.0]))
    assert operands.lengths is None
    assert torch.equal(gram(operands), expected)


def test_operands_are_not_checked_again(monkeypatch):
    a, b, base = rows_of("lists", 0, 3)
    operands = Operands.of([a, b], [base, base])
    monkeypatch.setattr(Operands, "as_operand", None)
    gram(operands)
    combine(base, operands.select([1]), [0.5])


def test_each_row_is_described_once(monkeypatch):
    described = []
    original = module.describe_vector
    monkeypatch.setattr(module, "describe_vector", lambda *given: described.append(given[0]) or original(*given))
    a, b, base = rows_of("vectors", 0, 3)
    operands = Operands.of([a, b], [base, None])
    gram(operands.select([0]))
    gram(operands)
    combine(a, operands.with_minus([b, base]), [0.5, 1.0])
    assert len(described) == 3 == len({id(row) for row in described})


def test_a_copy_of_a_noncontiguous_row_is_not_retained():
    a, b = rows_of("strided", 0, 2)
    operands = Operands.of([a, b])
    gram(operands)
    assert operands.tables is None
    assert {id(row) for row, _ in operands.described.values()} <= {id(a), id(b), id(None)}


@pytest.mark.usefixtures("backend")
def test_noncontiguous_rows_out_of_range_are_rescaled():
    memory = torch.full((4, 2), 2.0**-520, dtype=torch.float64)
    row = (memory[:, 0], torch.ones(1, dtype=torch.float64) * 2.0**-519)
    assert torch.equal(gram([row]), gram([flat(row)]))


def test_a_combination_omits_rows_with_coefficient_zero():
    a, b, base, out = rows_of("lists", 0, 4)
    operands = Operands.of([a, b], [base, None])
    goal = LinearCombination.of(base, operands, [[0.0, 2.0]], None, out)
    assert goal.rows.plus == (b,)
    assert goal.inputs == (b, base)


def test_operands_include_the_subtrahends():
    operands = Operands.of(rows_of("vectors", 0, 2))
    assert as_operands(operands) is operands
    for call in (gram, lambda rows, minus: combine(None, rows, [1.0, 1.0], minus=minus)):
        with pytest.raises(ArgumentError, match="minus: expected None, because the operands include"):
            call(operands, minus=torch.ones(SIZE))


def test_only_selected_rows_require_autograd():
    a, b = rows_of("vectors", 0, 2)
    operands = Operands.of([a.requires_grad_(), b])
    assert gram(operands).requires_grad
    assert not gram(operands.select([1])).requires_grad


def test_operands_within_ranks_are_the_shard_of_this_rank():
    rows, base = rows_of("lists", 0, 2), rows_of("lists", 5, 1)[0]
    operands = Operands.of(rows, [base, base])
    expected = gram(operands), combine(base, operands, [0.5, 1.0])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with across_ranks():
            assert torch.equal(gram(as_operands(rows, [base, base])), expected[0])
            assert torch.equal(flat(combine(base, operands, [0.5, 1.0])), flat(expected[1]))
    finally:
        dist.destroy_process_group()


def calls(work):
    """The number of Python calls within the kernels, and of calls into another file than the one before."""
    files = []

    def watch(frame, event, _):
        if event == "call" and "/manifoldagg/" in frame.f_code.co_filename and frame.f_code.co_name[0] != "<":
            files.append(frame.f_code.co_filename)

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return len(files), 1 + sum(a != b for a, b in pairwise(files))


@pytest.mark.skipif("cpu" not in available_backends(), reason="no compiler")
@pytest.mark.parametrize("kind", ["vectors", "lists"])
def test_a_step_makes_few_calls(kind):
    before = set_backend("cpu")
    try:
        for _ in range(2):  # the first one fills the caches of the process
            a, b, current, base, out = rows_of(kind, 0, 5)
            operands = Operands.of([a, b, current], [base] * 3)
            measured = calls(lambda operands=operands: gram(operands))
            few = operands.with_minus([current, current, base])
            target = out if kind == "vectors" else None
            moved = calls(lambda few=few, start=current, out=target: combine(start, few, [0.5, 0.5, 0.0], out=out))
    finally:
        set_backend(before)
    assert measured[0] <= 12
    assert moved[0] <= 13
    assert max(measured[1], moved[1]) <= 7
