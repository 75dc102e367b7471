"""Laws of sharded rows: all ranks have the same bits, those of one rank; what one refuses, all refuse."""

import pytest
import torch

from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import sharded, shards
from manifoldagg.kernels.operands import Operands, is_sharded
from tests.ranks import run_ranks

WORLDS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """What each rank found, by the size of its world."""
    return run_ranks("tests.kernels.ranks", tmp_path_factory.mktemp("ranks"), *WORLDS)


@pytest.fixture(params=WORLDS)
def cases(request, worlds):
    """By the name of a case: what each rank of this world found."""
    ranks = worlds[request.param]
    gram = [name for name, case in ranks[0].items() if isinstance(case, dict) and "gram" in case]
    return {name: [rank[name] for rank in ranks] for name in gram}


def same_bits(a, b):
    kind = {torch.float64: torch.int64, torch.float32: torch.int32}[a.dtype]
    return a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))


def test_all_ranks_have_the_same_bits(cases):
    for name, ranks in cases.items():
        assert all(same_bits(rank["gram"], ranks[0]["gram"]) for rank in ranks), name


def test_shards_split_at_block_boundaries_give_the_bits_of_one_rank(cases):
    aligned = {name: ranks for name, ranks in cases.items() if "aligned" in name}
    assert len(aligned) >= 4
    for name, ranks in aligned.items():
        assert same_bits(ranks[0]["gram"], ranks[0]["one"]), name


def test_shards_split_elsewhere_satisfy_the_error_bound(cases):
    for name, (first, *_) in cases.items():
        assert ((first["gram"] - first["one"]).abs() <= first["bound"]).all(), name


def test_combine_writes_the_local_shard_with_the_coefficients_of_rank_zero(cases):
    for name, ranks in cases.items():
        assert all(same_bits(rank["combined"], rank["one combined"]) for rank in ranks), name


@pytest.mark.parametrize("world", [1, 2, 3])
def test_nonfinite_values_on_one_rank_reach_all_ranks(worlds, world):
    expected = torch.tensor([[[torch.inf, torch.inf], [torch.inf, 2.0 * world]]], dtype=torch.float64)
    assert all(torch.equal(rank["infinite"], expected) for rank in worlds[world])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows_out_of_range_are_rescaled_equally_on_all_ranks(worlds, world):
    for rank in worlds[world]:
        assert rank["orthogonal"] == [[torch.inf, 0.0], [0.0, torch.inf]]
        assert rank["tiny"] == world


@pytest.mark.parametrize("world", [2, 3])
def test_a_subgroup_of_ranks_works_without_the_others(worlds, world):
    *members, outside = worlds[world]
    assert all(rank["some ranks"] == {"group": 2.0 * (world - 1), "mesh": 2.0 * (world - 1)} for rank in members)
    errors = outside["some ranks"]
    assert (
        errors["group"]
        == f"ArgumentError: group: expected a process group that contains rank {world - 1}, got one without it"
    )
    assert errors["mesh"].startswith(f"ArgumentError: rows: expected a mesh with rank {world - 1} in it")


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("a row that a derivative follows", "ArgumentError: rows: expected shards without autograd, got tracked ones"),
        ("an out that a derivative follows", "ArgumentError: rows: expected shards without autograd, got tracked ones"),
        ("a backend that fails", "RuntimeError: out of memory"),
        ("a check that fails", "ArgumentError: segments: expected lengths that sum to 8, got a sum of 9"),
        ("a segment beyond", "ArgumentError: replicated: expected segments below 1, got 1"),
    ],
)
def test_all_ranks_raise_if_one_rank_rejects(worlds, world, case, reason):
    *others, last = [rank["refusals"][case] for rank in worlds[world]]
    assert last.startswith(reason)
    words = f"ArgumentError: ranks: expected valid arguments on every rank, got errors on [{world - 1}]"
    assert all(told.startswith(words) for told in others)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other rows", "ranks: expected the same number of rows on every rank, got {0: 3"),
        ("other segments", "ranks: expected the same number of segments on every rank, got {0: 1"),
        ("other replicas", "ranks: expected the same segments on every rank, got {0: "),
        ("other calls", "ranks: expected the same call on every rank, got {0: "),
        ("other dtypes", "ranks: expected the same dtypes on every rank, got {0: "),
        ("other coefficients", "ranks: expected the same number of rows on every rank, got {0: 3"),
        ("plain among DTensors", "minus[0]: expected a DTensor like the other rows, got a plain tensor"),
        ("mixed placements", "rows[1]: expected the placements of rows[0], (Replicate(),) on "),
        ("a partial sum", "rows[0]: expected placements Shard(0) or Replicate(), got P"),
        ("no context", "rows: expected DTensors, or a call within across_ranks"),
    ],
)
def test_ranks_that_disagree_raise(worlds, world, case, words):
    for rank in worlds[world]:
        assert rank["refusals"][case].startswith(f"ArgumentError: {words}")


@pytest.mark.parametrize("world", [2, 3])
def test_a_shard_unlike_torch_chunk_is_rejected_on_every_rank(worlds, world):
    told = [rank["refusals"]["an uneven DTensor"] for rank in worlds[world]]
    assert all(words.startswith("ArgumentError: r") for words in told)
    assert any(words.startswith("ArgumentError: rows[0]: expected ") for words in told)


def test_the_context_ends_with_its_block(worlds):
    assert not any(rank["taken outside"] for world in (1, 2, 3) for rank in worlds[world])


@pytest.mark.usefixtures("as_shipped")
def test_without_a_process_group_nothing_is_sharded():
    assert not is_sharded([torch.ones(2)])
    with pytest.raises(ArgumentError, match="group: expected an initialised process group"), shards.across_ranks():
        pass
    with pytest.raises(ArgumentError, match="rows: expected DTensors, or a call within across_ranks"):
        sharded.gram(Operands.of((torch.ones(2),), (None,)), [(0, 2)], None)
