"""Tests of `benchmarks/papers/adapters.py`, which combines adapters of speakers in several ways, at a small size."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent
WAYS = ("factors", "residuals", "matrices")


@pytest.fixture(scope="module")
def adapters():
    spec = importlib.util.spec_from_file_location("papers_adapters", ROOT / "benchmarks" / "papers" / "adapters.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def world(adapters, tmp_path_factory):
    """A world of the speakers from which clients are drawn, and one speaker with little text."""
    folder = tmp_path_factory.mktemp("play")
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice(list("abcde"), 4)).title() + "." for _ in range(30)]
    speeches = [f"P{i}:\n{' '.join(draw.choice(words, 100 + i))}" for i in range(adapters.POOL)]
    speeches += [f"Q:\n{' '.join(words)}{' '.join(words).upper()}{' '.join(words).lower()}"]
    (folder / "input.txt").write_text("\n\n".join(speeches))
    return adapters.World(folder, adapters.QUICK, folder)


def some(world, rank, seed):
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(x.shape, generator=draw) for name, x in world.start(rank, seed).items()}


def max_difference(one, other):
    return max((one[stem] - other[stem]).abs().max().item() for stem in one)


def test_another_factorisation_does_not_change_products(adapters, world):
    one = some(world, 4, 0)
    other = adapters.turned(one, torch.Generator().manual_seed(1))
    assert min((one[name] - other[name]).abs().max() for name in one) > 0.1
    assert max_difference(adapters.products(one), adapters.products(other)) < 1e-5


@pytest.mark.parametrize("cut", ["nearest", "first"])
def test_the_sent_part_and_the_rest_sum_to_the_adapter(adapters, world, cut):
    one = some(world, 8, 0)
    small, rest = getattr(adapters, cut)(one, 2)
    assert {len(small[a]) for a, _ in adapters.pairs(small)} == {2}
    whole = adapters.products(adapters.beside(small, rest))
    assert max_difference(whole, adapters.products(one)) < 2e-5
    assert max_difference(adapters.products(small), adapters.products(one)) > 0.1


@pytest.mark.parametrize("gauges", [False, True])
def test_residuals_make_the_mean_of_products_exact(adapters, world, gauges):
    setting = adapters.Setting((2, 8), gauges)
    hub = adapters.Residuals(adapters.WAYS["residuals"], setting, some(world, 8, 0), 0.25, [30, 10])
    given = [hub.send(0), hub.send(1)]
    # The reply of the second client is late.
    for client, rho in ((0, 0.25 * 2 * 3 / 4), (1, 0.25 * 2 / 4)):
        answer = some(world, setting.ranks[client], 1 + client)
        if gauges:
            answer = adapters.turned(answer, torch.Generator().manual_seed(client))
        before = adapters.products(hub.adapter())
        kept = dict(hub.frozen())
        theirs = adapters.products(adapters.beside(answer, given[client].rest))
        hub.take(client, given[client], answer)
        after = adapters.products(hub.adapter())
        for stem, x in theirs.items():
            exact = kept[stem] + (1 - rho) * before[stem] + rho * x
            assert (hub.frozen()[stem] + after[stem] - exact).abs().max() < 1e-5
    m, n = next(iter(before.values())).shape
    assert hub.send(0).bytes > given[0].bytes + min(8 * (m + n), m * n)


def test_results_depend_on_the_factorisation_only_for_averages_of_factors(adapters, world):
    def end(setting, way):
        found = adapters.trained(world, setting, way, 1e-2, 0.6, 0, tuning=False)
        return found["log"][-1]["loss"]

    for way in ("matrices", "matrices, OrthoDC"):
        assert end("gauges", way) == pytest.approx(end("ranks", way), abs=1e-5)
    assert abs(end("gauges", "factors") - end("ranks", "factors")) > 1e-4


def test_runs_use_equal_bytes_and_stored_runs_are_not_repeated(adapters, world, tmp_path, monkeypatch):
    size = replace(adapters.QUICK, shares=(0.2, 0.6))
    monkeypatch.setattr(world, "size", size)
    path = tmp_path / "rows.jsonl"
    later = float("inf")
    adapters.work(world, adapters.Rows(path, size), ["gauges"], WAYS, [0], later)
    lines = path.read_text().splitlines()
    assert len(lines) == len(WAYS) * (2 * len(adapters.TUNED_ON) + 1)
    rows = adapters.Rows(path, size)
    tests = rows.tests("gauges")
    sent = {way: adapters.spent(done[0]) for way, done in tests.items()}
    assert sent["factors"] == sent["matrices"] < sent["residuals"]
    assert tests["residuals"][0]["log"][-1]["time"] == tests["factors"][0]["log"][-1]["time"]
    for way, done in tests.items():
        trials = rows.trials("gauges", way)
        assert trials[done[0]["rate"], done[0]["share"]] == min(trials.values())
        early = adapters.loss_of(done[0], sent["factors"])
        assert (early == adapters.loss_of(done[0])) == (way != "residuals")
    monkeypatch.setattr(adapters, "trained", lambda *args, **options: pytest.fail("done again"))
    with path.open("a") as file:
        file.write(lines[0][:50])
    again = adapters.Rows(path, size)
    assert path.read_text().splitlines() == lines
    adapters.work(world, again, ["gauges"], WAYS, [0], later)
    told = "\n".join(adapters.tables(again, size, "command"))
    for done in tests.values():
        assert f"{adapters.loss_of(done[0]):.4f}" in told
    assert not adapters.Rows(path, adapters.FULL).tests("gauges")


def test_differences_are_paired_by_seed(adapters):
    found = adapters.less({0: 2.0, 1: 4.0, 2: 9.0}, {0: 3.5, 1: 3.5})
    assert (found.value, found.count) == (-0.5, 2)
    assert found.half_width == pytest.approx(
        12.7062, rel=1e-4
    )  # The factor is the t quantile for one degree of freedom; the standard deviation is sqrt(2).
    assert adapters.less({0: 1.0}, {1: 1.0}) is None
