"""An outer optimiser of a module that FSDP2 has cut makes the steps of one process; what one rank refuses, all refuse."""

import pytest
import torch

from tests.ranks import found
from tests.support import relative


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks found; they are started once."""
    return found("tests.optim.ranks", tmp_path_factory.mktemp("ranks"), 2)[2]


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        # Sums of a few dozen numbers, cut at another place.
        return relative(a, b) <= 1e-13
    if isinstance(a, float):
        return a == pytest.approx(b, rel=1e-13)
    return all(map(same, a, b)) if isinstance(a, list) else a == b


def test_ranks_together_make_the_steps_of_one(ranks):
    for rank in ranks:
        for name, runs in rank.items():
            if isinstance(runs[0], dict):
                one, cut = runs
                assert same(one["model"], cut["model"]), name
                assert same(one["state"], cut["state"]), name
                assert cut["placed"], name


def test_a_checkpoint_continues_with_the_same_bits(ranks):
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
