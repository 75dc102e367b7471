"""Tests of `Outer` on a module that FSDP2 shards: the steps equal those of one process, and errors reach all ranks."""

import pytest
import torch

from tests.ranks import run_ranks
from tests.support import relative


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of each of two ranks, which start once per module."""
    return run_ranks("tests.optim.ranks", tmp_path_factory.mktemp("ranks"), 2)[2]


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        # Sharding changes the order of sums of a few dozen numbers.
        return relative(a, b) <= 1e-13
    if isinstance(a, float):
        return a == pytest.approx(b, rel=1e-13)
    return all(map(same, a, b)) if isinstance(a, list) else a == b


def test_sharded_steps_equal_those_of_one_process(ranks):
    for rank in ranks:
        for name, runs in rank.items():
            if isinstance(runs[0], dict):
                one, cut = runs
                assert same(one["model"], cut["model"]), name
                assert same(one["state"], cut["state"]), name
                assert cut["placed"], name


def test_a_run_resumed_from_a_checkpoint_is_bitwise_equal(ranks):
    for rank in ranks:
        assert all(map(torch.equal, *rank["checkpoint"]))


def test_all_ranks_reject_the_invalid_input_of_one(ranks):
    (elsewhere, rested), (here, here_rested) = (rank["refused"] for rank in ranks)
    assert (rested, here_rested) == (True, True)
    assert "0.weight: expected a finite gradient" in here
    assert "squared length" in elsewhere


def test_replicated_parameters_need_no_communication(ranks):
    for rank in ranks:
        assert torch.equal(rank["replicated"], torch.full((4,), 0.3))
