"""Short runs of the load benchmarks: many invalid messages, and clients that fail, return and send malicious updates."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def measured(script, folder, *options):
    """Run a benchmark and return its results. The benchmark fails if memory grows, or if an invalid update is accepted."""
    command = [sys.executable, f"benchmarks/{script}.py", *options, "--out", folder]
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=6 * 3600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (folder / f"{script}.png").stat().st_size > 0
    return json.loads((folder / f"{script}.json").read_text())


def flooded(folder, messages):
    made = measured("load", folder, "--messages", str(messages))
    assert made["faults"] == []
    rows = {row["kind"]: row for row in made["rows"]}
    assert sum(row["came"] for row in rows.values()) == made["settings"]["messages"] == messages
    for kind in ("valid", "valid, as bytes", "valid, compressed", "valid, odd tensors", "sent again"):
        assert rows[kind]["taken"] > 0.8 * rows[kind]["came"] > 0
    for kind in ("bytes: cut", "bytes: bombs", "bytes: huge sizes", "numbers", "shapes", "fields", "ticket of another"):
        assert rows[kind]["came"] > rows[kind]["taken"] == 0


def lasted(folder, seconds, restart):
    made = measured("endurance", folder, "--seconds", str(seconds), "--restart", str(restart))
    assert len(made["restarts"]) >= 2
    assert made["counts"]["valid: accepted"] > 0
    assert "invalid: accepted" not in made["counts"]


def test_invalid_messages_do_not_change_the_result_of_valid_ones(tmp_path):
    flooded(tmp_path, 4000)


@pytest.mark.usefixtures("as_shipped")
def test_threaded_source_forwards_all_messages_and_reports_errors(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    load = importlib.import_module("load")
    look = load.Look()
    intake = load.flooded("four threads", 10, look, threads=4)
    assert intake.faults == []
    assert sum(map(len, intake.seconds.values())) == look.count == 10

    def fails(source):
        raise LookupError("no message")

    monkeypatch.setattr(load.Source, "next", fails)
    with pytest.raises(LookupError, match="no message"):
        load.flooded("four threads", 10, look, threads=4)


def test_the_byzantine_benchmark_runs_with_one_seed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    byzantine = importlib.import_module("byzantine")
    monkeypatch.setattr(byzantine, "HERE", tmp_path / "benchmarks")
    out = tmp_path / "byzantine.txt"
    options = ["--updates", "1", "--seeds", "0", "--rate-seeds", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["byzantine.py", *options])
    byzantine.main()
    assert " nan" in out.read_text()


@pytest.mark.soak
def test_a_million_messages_give_the_result_of_the_valid_ones(tmp_path):
    flooded(tmp_path, 10**6)


def test_benchmark_with_failing_and_malicious_clients_passes(tmp_path):
    lasted(tmp_path, 8, 2)


@pytest.mark.soak
def test_long_benchmark_with_failing_and_malicious_clients_passes(tmp_path):
    lasted(tmp_path, 3600, 180)
