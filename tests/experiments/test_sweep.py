"""Tests of sweeps, which show the final accuracy against the value of one option from stored reports."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.compare import compare
from manifoldagg.experiments.registry import methods
from manifoldagg.experiments.report import read_report, write_report
from manifoldagg.experiments.statistics import mean_ci
from manifoldagg.experiments.sweep import _frame, load_sweep, write_sweep
from tests.cli.test_cli import call
from tests.simulation.test_run import clusters

pytestmark = pytest.mark.filterwarnings("ignore::manifoldagg.errors.StabilityWarning")
OPTIONS = {"clients": 4, "num_updates": 4, "seeds": 2, "partition": "dirichlet:concentration=0.5"}


def report(folder, names="fedasync", **options):
    write_report(compare(clusters(), methods(names), **OPTIONS | options), folder)
    return folder


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Reports with concurrency 4, 1 and 2."""
    folder = tmp_path_factory.mktemp("reports")
    return [report(folder / str(k), "fedasync,fedbuff:size=2", concurrency=k) for k in (4, 1, 2)]


def final(folder, method):
    """Return the final accuracy of a method for each seed."""
    rows = [row for row in read_report(folder)["log"] if row["method"] == method]
    return [[row["accuracy"] for row in rows if row["seed"] == seed][-1] for seed in (0, 1)]


def test_sweep_over_a_setting_of_the_comparison(reports):
    frame = load_sweep(reports, "concurrency")
    assert sorted(set(frame["method"])) == ["FedAsync", "FedBuff(size=2)"]
    assert frame["value"].to_list() == [1, 1, 2, 2, 4, 4]
    for folder, value in zip(reports, (4, 1, 2), strict=True):
        for method in ("FedAsync", "FedBuff(size=2)"):
            (row,) = frame[(frame["method"] == method) & (frame["value"] == value)].itertuples()
            expected = mean_ci(final(folder, method))
            assert (row.seeds, row.mean) == (2, expected.value)
            assert (row.low, row.high) == pytest.approx((expected.low, expected.high))


def test_sweep_over_an_option_of_a_method_in_one_report(tmp_path):
    """Methods that differ only in the swept option form one line. Methods without the option are omitted."""
    names = "fedasync:epochs=1,rate=0.5,fedasync:epochs=2,rate=0.5,fedgs"
    frame = load_sweep([report(tmp_path / "one", names)], "epochs")
    assert frame["method"].to_list() == ["FedAsync(rate=0.5)"] * 2
    assert frame["value"].to_list() == [1, 2]
    assert frame["mean"][1] == np.mean(final(tmp_path / "one", "FedAsync(epochs=2, rate=0.5)"))


def test_sweep_over_an_option_of_a_setting(tmp_path):
    folders = [
        report(tmp_path / str(i), partition=f"dirichlet:concentration={value}", seeds=1)
        for i, value in enumerate((0.01, 100.0))
    ]
    frame, files = write_sweep(folders, "partition.concentration", tmp_path / "out")
    assert frame["value"].to_list() == [0.01, 100.0]
    assert frame["low"].isna().all()
    assert [file.name for file in files] == ["sweep.csv", "sweep.png"]
    assert all(file.stat().st_size for file in files)
    pd.testing.assert_frame_equal(pd.read_csv(files[0]), frame, check_dtype=False)


def test_sweep_plot_has_a_line_per_method_and_a_log_axis_for_wide_ranges(reports, tmp_path, monkeypatch):
    drawn = []
    real = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **b: (drawn.append(self), real(self, *a, **b))[1])
    frame, _ = write_sweep(reports, "concurrency", tmp_path / "out")
    (axes,) = drawn[0].axes
    assert axes.get_xlabel() == "concurrency"
    assert axes.get_ylabel() == "final accuracy, %"
    assert axes.get_xscale() == "linear"
    lines = [container.lines[0] for container in axes.containers]
    for line, (_, rows) in zip(lines, frame.groupby("method", sort=False), strict=True):
        np.testing.assert_array_equal(line.get_xdata(orig=False), rows["value"])
        np.testing.assert_allclose(line.get_ydata(orig=False), 100 * rows["mean"])
    for folder, k in zip(reports, (40, 1, 2), strict=True):
        results = json.loads((folder / "results.json").read_text())
        results["settings"]["concurrency"] = k
        other = tmp_path / folder.name
        other.mkdir()
        (other / "results.json").write_text(json.dumps(results))
        for name in ("log.jsonl", "timing.json"):
            (other / name).write_text((folder / name).read_text())
    write_sweep([tmp_path / folder.name for folder in reports], "concurrency", tmp_path / "out")
    assert drawn[1].axes[0].get_xscale() == "log"


def test_report_command_prints_and_writes_a_sweep(reports, tmp_path):
    done = call("report", *map(str, reports), "--sweep", "concurrency", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in (tmp_path / "combined").iterdir()) == ["sweep.csv", "sweep.png"]
    row = next(line for line in done.stdout.splitlines() if "FedAsync" in line)
    assert row.split()[1:] == [f"{100 * np.mean(final(reports[i], 'FedAsync')):.1f}" for i in (1, 2, 0)]
    assert "Written to combined: sweep.csv, sweep.png" in done.stdout
    done = call("report", *map(str, reports), "--sweep", "concurrency", "--baseline", "FedAsync", folder=tmp_path)
    assert done.returncode != 0
    assert "sweep: expected no --baseline" in done.stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("batch", "folders: expected reports that differ only in batch, got concurrency: 4 in .*4 and 1 in .*1"),
        ("clients.count", "folders: expected reports that differ only in"),
    ],
)
def test_reports_that_differ_in_another_setting_are_rejected(reports, option, message):
    with pytest.raises(ArgumentError, match=message):
        load_sweep(reports, option)


def with_concurrency(folder, value):
    report = read_report(folder)
    return {**report, "settings": {**report["settings"], "concurrency": value}}


def test_invalid_sweeps_are_rejected(reports, tmp_path):
    with pytest.raises(ArgumentError, match="sweep: expected reports with two or more values of batch, got 16"):
        load_sweep(reports[:1], "batch")
    with pytest.raises(
        ArgumentError, match="sweep: expected reports with two or more values of momentum, got no value"
    ):
        load_sweep(reports[:1], "momentum")
    with pytest.raises(
        ArgumentError, match="sweep: expected an option whose values are numbers, got partition=dirichlet"
    ):
        load_sweep(reports[:1], "partition")
    with pytest.raises(ArgumentError, match="folders: 1: expected a report with a value of concurrency, got its def"):
        _frame([(str(i), with_concurrency(reports[0], value)) for i, value in enumerate((4, None, 2))], "concurrency")
    with pytest.raises(ArgumentError, match="FedAsync with concurrency=4 and seed 0 is given twice"):
        load_sweep([reports[0], *reports], "concurrency")
    with pytest.raises(ArgumentError, match="folders: .*nowhere: expected a report of `manifoldagg compare`"):
        load_sweep([tmp_path / "nowhere"], "concurrency")
    with pytest.raises(ArgumentError, match="folders: expected at least one report"):
        load_sweep([], "concurrency")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(ArgumentError, match="out: "):
        write_sweep(reports, "concurrency", tmp_path / "out")
    assert math.isfinite(load_sweep(reports, "concurrency")["mean"].sum())
