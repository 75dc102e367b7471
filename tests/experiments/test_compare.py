"""Tests of comparisons: the options passed to each run, the recorded settings, and the figures."""

import json
import math
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from torch import nn

from manifoldagg.cli.compare import rejection_lines
from manifoldagg.curves import Bezier, plane
from manifoldagg.errors import ArgumentError, StabilityWarning
from manifoldagg.experiments import draw_trace, workloads
from manifoldagg.experiments.compare import compare
from manifoldagg.experiments.plots import draw_accuracy, draw_clients, draw_planes, draw_traces
from manifoldagg.experiments.registry import method, methods
from manifoldagg.experiments.report import write_report
from manifoldagg.experiments.tuning import Tuning
from manifoldagg.manifolds import Flat
from manifoldagg.simulation import (
    AvailabilityChange,
    Exponential,
    FederatedDataset,
    IndependentClients,
    PriorityScheduler,
    TaskRecord,
    iid_partition,
    run,
)
from manifoldagg.simulation.cost import AXES, last_within_budget
from tests.simulation.test_run import clusters, dirichlet


@pytest.fixture(scope="module")
def comparison():
    return compare(clusters(), methods(["fedasync"]), clients=6, num_updates=10, seeds=2)


@pytest.fixture
def drawn(monkeypatch):
    """A list of the figures that the test would save."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: figures.append(figure))
    return figures


def rows(comparison):
    return [one.evaluations for one in comparison.runs["FedAsync"]]


@pytest.mark.parametrize("count", [1, 6, 7, 22])
def test_accuracy_figure_draws_every_line_differently(count, comparison, drawn):
    seeds = rows(comparison)
    runs = {
        f"Method{i}(a=1)": [[*seed[:-1], replace(seed[-1], accuracy=i / 50)] for seed in seeds] for i in range(count)
    }
    draw_accuracy(Path("accuracy.png"), runs, target=0.9, title="clusters")
    (figure,) = drawn
    (axes,) = figure.axes
    lines = [line for line in axes.lines if line.get_label() in runs]
    assert len({(line.get_color(), line.get_linestyle(), line._unscaled_dash_pattern) for line in lines}) == count
    # Each line is wider than the lines drawn on top of it, so it stays visible where lines coincide.
    assert all(a.get_linewidth() > b.get_linewidth() and a.zorder < b.zorder for a, b in pairwise(lines))
    assert len({line.get_markevery() for line in lines}) == count
    legend = figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == list(runs)


def test_identical_lines_are_drawn_with_interleaved_dashes(comparison, drawn):
    runs = dict.fromkeys("ABC", rows(comparison))
    draw_accuracy(Path("accuracy.png"), runs, target=0.9, title="clusters")
    lines = drawn[0].axes[0].lines[:3]
    assert len({line.get_linewidth() for line in lines}) == 1
    offsets, dashes = zip(*(line._unscaled_dash_pattern for line in lines), strict=True)
    (on, off) = dashes[0]
    assert set(dashes) == {(on, 2 * on)} == {(on, off)}
    assert {offset % (3 * on) for offset in offsets} == {0, on, 2 * on}
    # The legend shows solid lines.
    assert all(handle.get_linestyle() == "-" for handle in drawn[0].legends[0].get_lines())


def test_plane_figure_has_one_legend(drawn):
    flat = plane(
        Bezier(Flat(2), 2), torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 0.0]]), lambda point: float(point @ point)
    )
    draw_planes(Path("plane.png"), {"training data": flat, "held-out data": flat}, title="clusters")
    first, last = drawn[0].axes
    assert first.get_legend() is None
    labels = {text.get_text() for text in last.get_legend().get_texts()}
    assert {"base model", "client's model", "control point", "learned curve", "chord"} <= labels


def test_results_have_a_short_repr(comparison):
    assert re.fullmatch(
        r"Comparison\(data='clusters', clients=6, updates=10, seeds=2, final_accuracy=\{'FedAsync': [\d.]+\}\)",
        repr(comparison),
    )
    (one, _) = comparison.runs["FedAsync"]
    assert re.fullmatch(r"RunResult\(updates=10, accuracy=[\d.]+, evaluations=11, seconds=[\d.e+-]+\)", repr(one))


def test_frame_contains_the_summary(comparison):
    frame = comparison.frame()
    assert frame.loc["FedAsync"].to_dict() == comparison.summary()["FedAsync"]
    assert frame.index.name == "method"


def test_a_run_above_the_stability_limit_warns_once_with_a_lower_rate():
    options = {"clients": 6, "num_updates": 12, "seeds": 1, "partition": "iid"}
    with pytest.warns(StabilityWarning) as caught:
        compare(clusters(), methods("fedortho:rate=5"), **options)
    (warning,) = caught
    assert re.fullmatch(
        r"rate: FedOrtho takes a step of size 0\.8\d+, above the stability limit of 0\.\d+ at an observed concurrency of [456], so "
        r"training may diverge; use a lower rate, such as 0\.857, or a lower concurrency",
        str(warning.message),
    )
    # The stability limit is higher with fewer tasks in flight. FedAsync interpolates, so it never exceeds the limit.
    compare(clusters(), methods("fedortho:rate=5,fedasync:rate=9"), **options, concurrency=2)


@pytest.mark.parametrize("axis", AXES)
def test_accuracy_line_equals_the_mean_of_the_latest_evaluations(axis, comparison, drawn):
    draw_accuracy(Path("accuracy.png"), {"FedAsync": rows(comparison)}, target=0.9, title="clusters", axis=axis)
    (axes,) = drawn[0].axes
    line = axes.lines[0]
    label = axes.get_xlabel()
    unit = 1e3 if "thousands" in label or "kB" in label else 1.0
    assert {"updates": "updates", "time": "virtual time, s", "gradients": "gradients", "bytes": "sent"}[axis] in label
    for x, y in zip(*line.get_data(), strict=True):
        # The division of the coordinates by the unit rounds.
        worth = [last_within_budget(seed, axis, x * unit * (1 + 1e-12)).accuracy for seed in rows(comparison)]
        assert y == pytest.approx(100 * np.mean(worth), rel=1e-12)
    assert line.get_xdata()[-1] * unit == pytest.approx(min(seed[-1].value_on(axis) for seed in rows(comparison)))
    assert "2 seeds" in axes.get_title()


def test_client_figure_sorts_accuracies_in_ascending_order(drawn):
    seeds = [[0.5, 0.0, 1.0], [1.0, 0.2, 0.5]]
    draw_clients(Path("clients.png"), {"FedAsync": seeds, "FedGS": [[1.0, 0.5]]}, title="clusters")
    (axes,) = drawn[0].axes
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([10.0, 50.0, 100.0])
    assert axes.lines[1].get_ydata().tolist() == [50.0, 50.0, 100.0]
    assert axes.lines[0].get_xdata().tolist() == [1, 2, 3]
    assert all(tick == int(tick) for tick in axes.get_xticks())


def test_methods_with_equal_traces_share_a_panel(drawn):
    one, two, three, four = ([TaskRecord(0, 1.0, 0.0, 0.0, float(i), 0)] for i in (1, 2, 3, 4))
    draw_traces(Path("gantt.png"), {"A": one, "B": two, "C": list(one)}, title="clusters")
    assert [axes.get_title() for axes in drawn[0].axes] == ["A, C", "B"]
    draw_traces(Path("gantt.png"), {"A": one, "B": two, "C": three, "D": four}, title="clusters")
    assert [axes.get_title() for axes in drawn[1].axes] == ["A", "B", "C"]
    assert "without 1 further" in drawn[1].get_suptitle()


def test_staleness_colour_scale_starts_at_zero_with_integer_ticks():
    axes = draw_trace([TaskRecord(0, 1.0, 0.0, 0.0, 1.0, 0)])
    (bars,) = (one for one in axes.collections if isinstance(one, PolyCollection))
    assert bars.get_clim() == (0, 1)
    (beside,) = axes.child_axes
    assert (beside.get_position().y0, beside.get_position().y1) == (axes.get_position().y0, axes.get_position().y1)
    assert all(tick == int(tick) for tick in beside.get_yticks())


def test_settings_can_be_serialized_as_json(tmp_path):
    even = compare(clusters(), methods(["fedasync"]), clients=3, num_updates=2, seeds=1, partition=dirichlet(math.inf))
    settings = json.loads(write_report(even, tmp_path / "even")[0].read_text())["settings"]
    assert settings["partition"] == "dirichlet_partition(concentration=inf)"
    assert settings["methods"]["FedAsync"]["rule"].startswith("FedAsync(")
    assert "optimizer=Adam" in settings["methods"]["FedAsync"]["trainer"]


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": clusters().inputs + 1},
        {"inputs": clusters().inputs[:, :, None]},
        {"labels": clusters().labels.flip(0)},
        {"user_ids": clusters().labels},
    ],
    ids=["inputs", "shape", "labels", "user_ids"],
)
def test_checksum_distinguishes_datasets_of_the_same_name(change, comparison):
    def settings(task):
        model = partial(nn.Sequential, nn.Flatten(), nn.Linear(2, 3))
        options = {"clients": 3, "num_updates": 1, "seeds": 1, "partition": "iid"}
        return compare(replace(task, model=model), methods(["fedasync"]), **options).settings["data"]

    same, other = settings(clusters()), settings(replace(clusters(), **change))
    assert same == comparison.settings["data"]
    assert other["name"] == same["name"] == "clusters"
    assert other["checksum"] != same["checksum"]


def test_comparison_passes_its_options_to_every_run():
    options = {
        "scheduler": lambda clients, generator: IndependentClients(Exponential(10.0), generator),
        "availability": iter([AvailabilityChange(5.0, 1, "leave")]),
        "task_cost": "trainer",
        "eval_every": 4,
    }
    chosen = methods(["fedasync", "fedortho"], ["fedortho=0.8"])  # 0.8 is below the stability limit for six clients.
    found = compare(clusters(), chosen, clients=6, num_updates=10, seeds=2, **options)
    split = {"partition": dirichlet(0.5), "seed": 1}
    options["availability"] = [AvailabilityChange(5.0, 1, "leave")]
    assert found.runs["FedOrtho"][1] == run(
        FederatedDataset.split(clusters(), 6, **split), method("fedortho", 0.8), num_updates=10, **options
    )
    assert found.runs["FedAsync"][0].evaluated_at == [0, 4, 8, 10]
    assert (found.settings["eval_every"], found.settings["task_cost"]) == (4, "trainer")
    assert "AvailabilityChange(" in found.settings["availability"]
    assert not re.search("0x[0-9a-f]{6}", json.dumps(found.settings))


def test_option_names_equal_the_objects_that_run_accepts():
    options = {"delays": "exponential:mean=10", "availability": "churn:up=200,down=40,until=300", "concurrency": 3}
    found = compare(clusters(), methods(["fedasync"]), clients=6, num_updates=10, seeds=1, partition="iid", **options)
    assert {key: found.settings[key] for key in options} == options
    churned = workloads.availability(options["availability"])
    federation = FederatedDataset.split(clusters(), 6, partition=iid_partition, seed=0)
    like = {"delays": Exponential(10.0), "availability": churned, "concurrency": 3}
    assert found.runs["FedAsync"][0] == run(federation, method("fedasync"), num_updates=10, **like)
    found = compare(
        clusters(), methods(["fedasync"]), clients=6, num_updates=4, seeds=1, scheduler="priority:workers=1"
    )
    assert found.settings["scheduler"] == "priority:workers=1"


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: compare(clusters(), methods(["fedgs"]), eval_every=0), "eval_every: expected"),
        (
            lambda: compare(clusters(), methods(["fedgs"]), scheduler=PriorityScheduler(3, np.random.default_rng(0))),
            "scheduler: expected a function that returns a scheduler for each run",
        ),
        (lambda: compare(clusters(), methods(["fedgs"]), scheduler="prority"), "did you mean priority"),
        (lambda: compare(clusters(), methods(["fedgs"]), partition="dirichlet:c=1"), "partition: dirichlet: no option"),
        (lambda: compare(clusters(), methods(["fedgs"]), delays="gauss"), "did you mean gaussian"),
        (lambda: compare(clusters(), methods(["fedgs"]), task_cost="none"), "task_cost: expected"),
    ],
)
def test_invalid_arguments_are_rejected(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_an_invalid_later_method_is_rejected_before_training_starts(tmp_path):
    routing = tmp_path / "routing.csv"
    routing.write_text("client,share\n0,0.5\n7,0.5\n")
    told = []
    wrong = methods(["fedasync", f"generalizedasyncsgd:routing=file,routing.path={routing}"])
    with pytest.raises(ArgumentError, match=r"^methods: GeneralizedAsyncSGD\(.*rule: routing: expected a share"):
        compare(clusters(), wrong, clients=6, num_updates=2, seeds=1, progress=lambda *_: told.append(1))
    assert told == []


def test_figures_show_method_names_literally(comparison, drawn):
    name = "FedAsync($x, staleness=polynomial, staleness.a=0.5, note=$)"
    draw_accuracy(Path("accuracy.png"), {name: rows(comparison)}, target=0.9, title="$x$")
    drawn[0].draw_without_rendering()
    (legend,) = drawn[0].legends
    (text,) = legend.get_texts()
    assert text.get_text().replace("\\$", "$").replace("\n", " ") == name
    assert max(map(len, text.get_text().split("\n"))) <= 33


def test_rejected_updates_are_reported_per_method(comparison):
    assert rejection_lines(comparison) == []
    one = comparison.runs["FedAsync"][0]
    runs = [replace(one, evaluations=[replace(row, rejected=count) for row in one.evaluations]) for count in (2, 10)]
    refused = replace(comparison, runs={"FedAvg(trainer=curve)": runs})
    assert rejection_lines(refused) == ["FedAvg(trainer=curve): 12 of 20 updates were rejected"]


def test_first_seed_selects_runs_of_a_longer_comparison():
    options = {"clients": 6, "num_updates": 4}
    chosen = methods(["fedasync", "asyncbezier"])
    every = compare(clusters(), chosen, **options, seeds=3)
    last = compare(clusters(), chosen, **options, seeds=2, first_seed=1)
    assert last.settings["seeds"] == [1, 2]
    for name, runs in every.runs.items():
        assert last.runs[name] == runs[1:]
    assert last.landscape is not None
    with pytest.raises(ArgumentError, match="first_seed: expected an integer >= 0"):
        compare(clusters(), chosen, **options, first_seed=-1)


def test_tuning_runs_end_after_the_duration_of_the_comparison():
    options = {"clients": 6, "num_updates": 8, "seeds": 1, "delays": "exponential:mean=10"}
    tuning = Tuning(seeds=(100,))
    short, long = (
        compare(clusters(), methods(["fedasync"]), **options, tuning=tuning, duration=duration)
        for duration in (5.0, None)
    )
    tried, untried = (one.settings["tuning"]["methods"]["FedAsync"]["tried"] for one in (short, long))
    assert [one["tail_accuracy"] for one in tried] != [one["tail_accuracy"] for one in untried]
