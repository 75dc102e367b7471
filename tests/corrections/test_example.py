"""Tests of `examples/corrections.py`: two clients in the plane, and the regret of the automatic threshold."""

import importlib.util
import pathlib
import sys

import pytest
import torch

pytestmark = pytest.mark.usefixtures("as_shipped")

PATH = pathlib.Path(__file__).parents[2] / "examples" / "corrections.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example_corrections", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_gradients_sum_to_zero_at_the_joint_optimum(example):
    task = example.problem(0)
    x = task.optimum.clone().requires_grad_()
    (task.loss(x, 0) + task.loss(x, 1)).backward()
    assert x.grad.norm() <= 1e-14


@pytest.mark.parametrize("delay", [1, 3, 10])
def test_the_median_regret_of_the_automatic_threshold_stays_under_five_percent(example, delay):
    """The test uses 5 of the 20 problems of the example. Over all 20 problems, the median is at most 0.0 %."""
    found = [example.distances(seed, delay, names=("AutoThreshold", *example.FIXED)) for seed in range(5)]
    assert sorted(map(example.regret, found))[2] < 0.05


@pytest.mark.soak
@pytest.mark.parametrize("delay", [1, 3, 10])
def test_the_median_regret_over_twenty_seeds_stays_under_five_percent(example, delay):
    found = [example.distances(seed, delay, names=("AutoThreshold", *example.FIXED)) for seed in range(20)]
    middle = sorted(map(example.regret, found))
    assert (middle[9] + middle[10]) / 2 < 0.05


def test_a_delay_of_ten_makes_only_asgd_diverge(example):
    task = example.problem(0)
    found = example.distances(0, 10)
    found["OrthoFL"] = example.distance(task, example.run_orthofl(task, 10))
    start = (task.start - task.optimum).norm()
    assert found["ASGD = OrthoDC(-1)"] > start
    assert all(found[name] < start for name in ("FedAsync", "DC-ASGD", "OrthoDC(1)", "AutoThreshold", "OrthoFL"))


def test_without_delay_all_methods_are_equal(example):
    task = example.problem(1)
    runs = [example.run(task, example.METHODS[name], 0) for name in example.METHODS]
    assert all(torch.equal(runs[0], other) for other in runs)


def test_the_example_prints_and_plots(example, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    monkeypatch.setattr(sys, "argv", ["corrections.py", "--seeds", "1", "--out", str(path)])
    monkeypatch.setattr(example, "DELAYS", (1, 3))
    example.main()
    printed = capsys.readouterr().out
    assert all(name in printed for name in [*example.METHODS, "OrthoFL", "delay 3", "median regret"])
    assert printed.splitlines()[-1].startswith("Seen: 3 versions late, plain updates end ")
    assert path.read_bytes().startswith(b"\x89PNG")
