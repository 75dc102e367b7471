"""Comparisons: what is passed on to runs, settings in words, and pictures in which lines can be told apart."""

import json
import math
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from matplotlib.figure import Figure
from torch import nn

from manifoldagg._tables import refusals
from manifoldagg.errors import ArgumentError
from manifoldagg.simulation import (
    Change,
    Exponential,
    Federation,
    IndependentClients,
    PriorityScheduler,
    by_name,
    iid_partition,
    run,
)
from manifoldagg.simulation.compare import compare
from manifoldagg.simulation.methods import method, methods
from manifoldagg.simulation.report import _draw_accuracy, write_report
from tests.simulation.test_run import clusters, dirichlet


@pytest.fixture(scope="module")
def comparison():
    return compare(clusters(), methods(["fedasync"]), clients=6, rounds=10, seeds=2)


@pytest.mark.parametrize("count", [1, 6, 7, 22])
def test_every_line_of_the_picture_can_be_told_from_the_others(count, comparison, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    runs = dict.fromkeys((f"Method{i}(a=1)" for i in range(count)), comparison.runs["FedAsync"])
    _draw_accuracy(replace(comparison, runs=runs), tmp_path / "accuracy.png")
    (axes,) = drawn[0].axes
    lines = [line for line in axes.lines if line.get_label() in runs]
    assert len({(line.get_color(), line.get_linestyle(), line._unscaled_dash_pattern) for line in lines}) == count
    legend = axes.get_legend() or drawn[0].legends[0]
    assert [text.get_text() for text in legend.get_texts()] == list(runs)


def test_settings_are_words_that_json_can_hold(tmp_path):
    even = compare(clusters(), methods(["fedasync"]), clients=3, rounds=2, seeds=1, partition=dirichlet(math.inf))
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
        {"owners": clusters().labels},
    ],
    ids=["inputs", "shape", "labels", "owners"],
)
def test_settings_tell_data_of_one_name_apart(change, comparison):
    def settings(task):
        model = partial(nn.Sequential, nn.Flatten(), nn.Linear(2, 3))
        options = {"clients": 3, "rounds": 1, "seeds": 1, "partition": "iid"}
        return compare(replace(task, model=model), methods(["fedasync"]), **options).settings["data"]

    same, other = settings(clusters()), settings(replace(clusters(), **change))
    assert same == comparison.settings["data"]
    assert other["name"] == same["name"] == "clusters"
    assert other["checksum"] != same["checksum"]


def test_a_comparison_passes_on_what_its_runs_are_like():
    options = {
        "scheduler": lambda clients, generator: IndependentClients(Exponential(10.0), generator),
        "participation": iter([Change(5.0, 1, "leave")]),
        "work": "dispatched",
        "every": 4,
    }
    found = compare(clusters(), methods(["fedasync", "fedortho"]), clients=6, rounds=10, seeds=2, **options)
    split = {"partition": dirichlet(0.5), "seed": 1}
    options["participation"] = [Change(5.0, 1, "leave")]
    assert found.runs["FedOrtho"][1] == run(
        Federation.split(clusters(), 6, **split), method("fedortho"), rounds=10, **options
    )
    assert found.runs["FedAsync"][0].evaluated == [0, 4, 8, 10]
    assert (found.settings["every"], found.settings["work"]) == (4, "dispatched")
    assert "Change(" in found.settings["participation"]
    assert not re.search("0x[0-9a-f]{6}", json.dumps(found.settings))


def test_names_mean_what_run_takes():
    options = {"delays": "exponential:mean=10", "participation": "churn:up=200,down=40,until=300", "tasks": 3}
    found = compare(clusters(), methods(["fedasync"]), clients=6, rounds=10, seeds=1, partition="iid", **options)
    assert {key: found.settings[key] for key in options} == options
    churned = by_name.participation(options["participation"])
    federation = Federation.split(clusters(), 6, partition=iid_partition, seed=0)
    like = {"delays": Exponential(10.0), "participation": churned, "tasks": 3}
    assert found.runs["FedAsync"][0] == run(federation, method("fedasync"), rounds=10, **like)
    found = compare(clusters(), methods(["fedasync"]), clients=6, rounds=4, seeds=1, scheduler="priority:workers=1")
    assert found.settings["scheduler"] == "priority:workers=1"


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: compare(clusters(), methods(["fedgs"]), every=0), "every: expected"),
        (
            lambda: compare(clusters(), methods(["fedgs"]), scheduler=PriorityScheduler(3, np.random.default_rng(0))),
            "scheduler: expected a function that makes one for each run",
        ),
        (lambda: compare(clusters(), methods(["fedgs"]), scheduler="prority"), "did you mean priority"),
        (lambda: compare(clusters(), methods(["fedgs"]), partition="dirichlet:c=1"), "partition: dirichlet: no option"),
        (lambda: compare(clusters(), methods(["fedgs"]), delays="gauss"), "did you mean gaussian"),
        (lambda: compare(clusters(), methods(["fedgs"]), work="none"), "work: expected"),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_what_is_wrong_with_a_later_method_is_told_before_one_trains(tmp_path):
    routing = tmp_path / "routing.csv"
    routing.write_text("client,share\n0,0.5\n7,0.5\n")
    told = []
    wrong = methods(["fedasync", f"generalizedasyncsgd:routing=file,routing.path={routing}"])
    with pytest.raises(ArgumentError, match=r"^methods: GeneralizedAsyncSGD\(.*rule: routing: expected a share"):
        compare(clusters(), wrong, clients=6, rounds=2, seeds=1, progress=lambda *_: told.append(1))
    assert told == []


def test_names_stand_in_pictures_as_they_are(comparison, tmp_path, monkeypatch):
    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: (drawn.append(figure), save(figure, path)))
    name = "FedAsync($x, staleness=polynomial, staleness.a=0.5, note=$)"
    _draw_accuracy(replace(comparison, runs={name: comparison.runs["FedAsync"]}), tmp_path / "accuracy.png")
    (legend,) = drawn[0].legends
    (text,) = legend.get_texts()
    assert text.get_text().replace("\\$", "$").replace("\n", " ") == name
    assert max(map(len, text.get_text().split("\n"))) <= 33


def test_a_method_that_nobody_heard_is_told_apart_from_a_bad_one(comparison):
    assert refusals(comparison) == []
    one = comparison.runs["FedAsync"][0]
    runs = [replace(one, evaluations=[replace(row, refused=count) for row in one.evaluations]) for count in (2, 10)]
    refused = replace(comparison, runs={"FedAvg(trainer=curve)": runs})
    assert refusals(refused) == ["FedAvg(trainer=curve): 12 of 20 updates were refused"]
