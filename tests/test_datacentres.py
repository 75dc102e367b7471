"""Tests of `benchmarks/datacentres.py`, the comparison of outer optimizers across data centres, at a small size."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
METHODS = ("synchronous DiLoCo", "conflict_free_prefix")


@pytest.fixture(scope="module")
def datacentres():
    sys.path.append(str(ROOT / "benchmarks"))
    try:
        import datacentres
    finally:
        sys.path.pop()
    return datacentres


@pytest.fixture
def play(tmp_path):
    """A folder with a play of twelve speakers, whose speeches have increasing lengths."""
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice(list("abcde"), 4)) for _ in range(30)]
    speeches = [f"P{i}:\n{' '.join(draw.choice(words, 40 + 20 * i))}" for i in range(12)]
    (tmp_path / "input.txt").write_text("\n\n".join(speeches))
    return tmp_path


def test_by_speaker_keeps_speakers_whole_and_balances_workers(datacentres):
    owners = np.repeat(np.arange(30), np.arange(30) % 7 + 1)
    parts = datacentres.by_speaker(owners, 4, np.random.default_rng(0), user_ids=owners)
    assert sorted(np.concatenate(parts)) == list(range(len(owners)))
    assert sum(len(set(owners[part])) for part in parts) == 30
    # The last speaker goes to the worker with the fewest samples, so sizes differ by at most one speaker.
    assert max(map(len, parts)) - min(map(len, parts)) <= 7


def test_every_method_has_the_same_number_of_trials(datacentres):
    counts = {len(set(candidate.trials)) for candidate in datacentres.CANDIDATES.values()}
    assert len(counts) == 1
    for candidate in datacentres.CANDIDATES.values():
        for rate, beta in candidate.trials:
            candidate.make(rate, beta)


def test_runs_use_equal_tokens_and_stored_runs_are_not_repeated(datacentres, play, tmp_path, monkeypatch):
    size = replace(datacentres.QUICK, arrivals=8, eval_every=4)
    few = {name: replace(one, trials=one.trials[:2]) for name, one in datacentres.CANDIDATES.items()}
    monkeypatch.setattr(datacentres, "CANDIDATES", few)
    path = tmp_path / "rows.jsonl"
    datacentres.work(play, size, datacentres.Rows(path, size), METHODS, [0])
    lines = path.read_text().splitlines()
    assert len(lines) == 6
    tests = [row for row in map(json.loads, lines) if row["seed"] == 0]
    ends = {row["method"]: row["log"][-1] for row in tests}
    assert {end["tokens"] for end in ends.values()} == {8 * size.steps * size.batch * size.length}
    # The slowest worker takes eight times as long as the fastest. The synchronous method waits for it twice.
    assert ends["synchronous DiLoCo"]["time"] == 2 * 8 * size.steps
    assert ends["conflict_free_prefix"]["time"] == 4 * size.steps + size.steps
    for row in tests:
        trials = [one for one in map(json.loads, lines) if one["seed"] != 0 and one["method"] == row["method"]]
        best = min(trials, key=lambda one: one["log"][-1]["loss"])
        assert (row["rate"], row["momentum"]) == (best["rate"], best["momentum"])
    monkeypatch.setattr(datacentres, "trained", lambda *args: pytest.fail("done again"))
    with path.open("a") as file:
        file.write(lines[0][:50])
    again = datacentres.Rows(path, size)
    assert path.read_text().splitlines() == lines
    datacentres.work(play, size, again, METHODS, [0])
    told = "\n".join(datacentres.table(again, size))
    for row in tests:
        assert f"{row['log'][-1]['loss']:.4f}" in told
    assert not datacentres.Rows(path, datacentres.FULL).tests("conflict_free_prefix")


def test_differences_are_paired_by_seed(datacentres):
    scores = {
        "HeLoCo": {0: 2.0, 1: 4.0},
        "asynchronous DiLoCo": {0: 3.5, 1: 3.5},
        "OrthoDC": {0: 1.0, 1: 2.0, 2: 0.0},
    }
    assert datacentres.best_baseline(scores) == "HeLoCo"
    apart = datacentres.less(scores, "HeLoCo")
    assert apart["OrthoDC"].value == -1.5
    assert apart["OrthoDC"].half_width == pytest.approx(
        12.7062 * 0.5, rel=1e-4
    )  # The factor is the t quantile for one degree of freedom.
    assert apart["asynchronous DiLoCo"].value == 0.5
