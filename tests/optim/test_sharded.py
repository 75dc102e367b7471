"""An outer optimiser of a module that FSDP2 has cut makes the steps of one process; what one rank refuses, all refuse."""

import os
import subprocess
import sys

import pytest
import torch

from tests.support import relative


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks found; they are started once."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.optim.ranks", str(folder)]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


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
    for found in ranks:
        for name, runs in found.items():
            if isinstance(runs[0], dict):
                one, cut = runs
                assert same(one["model"], cut["model"]), name
                assert same(one["state"], cut["state"]), name
                assert cut["placed"], name


def test_a_checkpoint_goes_on_with_the_same_bits(ranks):
    for found in ranks:
        assert all(map(torch.equal, *found["checkpoint"]))


def test_what_one_rank_cannot_use_all_refuse(ranks):
    (elsewhere, rested), (here, here_rested) = (found["refused"] for found in ranks)
    assert (rested, here_rested) == (True, True)
    assert "0.weight: expected a gradient that is finite" in here
    assert "squared length" in elsewhere


def test_whole_copies_need_nobody_else(ranks):
    for found in ranks:
        assert torch.equal(found["replicated"], torch.full((4,), 0.3))
