"""Runs and comparisons: equal terms, equal bits, whole reports."""

import json
import math
import os
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.experiments import load_dataset, workloads
from manifoldagg.experiments.compare import compare
from manifoldagg.experiments.registry import method, methods
from manifoldagg.experiments.report import check_destination, write_report
from manifoldagg.federated import Payload
from manifoldagg.federated.clients.determinism import seeded_model
from manifoldagg.federated.rules import FedGS
from manifoldagg.simulation import (
    Batches,
    FederatedDataset,
    LabelledDataset,
    Method,
    Partition,
    dirichlet_partition,
    iid_partition,
    run,
)
from tests.support import draw

# The default rates of the methods are tuned for 30 clients, and these tests have fewer.
pytestmark = pytest.mark.filterwarnings("ignore::manifoldagg.errors.StabilityWarning")


def tiny_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))


def clusters() -> LabelledDataset:
    """Three clouds of points in the plane: a task that a tiny model learns in a moment."""
    centres = torch.tensor([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]])
    labels = torch.arange(3).repeat(40)
    inputs = centres[labels] + 0.4 * draw(0, 120, 2, dtype=torch.float32)
    return LabelledDataset("clusters", inputs, labels, tiny_model, 0.9)


def dirichlet(concentration: float) -> Partition:
    return partial(dirichlet_partition, concentration=concentration)


def one_label() -> LabelledDataset:
    return replace(clusters(), labels=torch.zeros(120, dtype=torch.int64))


NAMES = ["fedasync", "fedortho", "fedgs", "asyncbezier"]


@pytest.fixture(scope="module")
def comparison():
    return compare(clusters(), methods(NAMES), clients=6, num_updates=30, seeds=2)


def test_every_method_sees_the_same_order_of_events(comparison):
    first, *others = comparison.runs.values()
    for runs in others:
        for a, b in zip(first, runs, strict=True):
            assert (a.clients, a.staleness, a.accuracy[0]) == (b.clients, b.staleness, b.accuracy[0])
    assert first[0].clients != first[1].clients


def test_every_method_learns(comparison):
    for name, row in comparison.summary().items():
        assert row["best_mean"] > 0.8, name
        assert row["rejected"] == 0


def test_equal_seeds_give_equal_bits(comparison):
    again = compare(clusters(), methods(NAMES), clients=6, num_updates=30, seeds=2)
    assert json.dumps(again.results()) == json.dumps(comparison.results())
    assert json.dumps(again.log()) == json.dumps(comparison.log())


def test_staleness_follows_from_the_virtual_time(comparison):
    """A client that was dispatched after round a and answers in round b missed b - a - 1 versions."""
    for runs in comparison.runs.values():
        for one in runs:
            last = dict.fromkeys(range(6), 0)
            for round_, (client, late) in enumerate(zip(one.clients, one.staleness, strict=True), start=1):
                assert late == round_ - 1 - last[client]
                last[client] = round_


def test_summary_is_computed_from_the_runs(comparison):
    runs, row = comparison.runs["FedOrtho"], comparison.summary()["FedOrtho"]
    assert row["final_mean"] == pytest.approx(np.mean([r.accuracy[-1] for r in runs]))
    assert row["final_sd"] == pytest.approx(np.std([r.accuracy[-1] for r in runs], ddof=1))
    assert row["staleness_max"] == max(max(r.staleness) for r in runs)
    reached = [r.updates_to(0.9) for r in runs]
    assert row["reached_target"] == sum(r is not None for r in reached)
    for one in runs:
        hit = one.updates_to(0.9)
        assert hit is None or (one.accuracy[hit] >= 0.9 and max(one.accuracy[:hit], default=0) < 0.9)


def test_report_contains_all_files(comparison, tmp_path):
    folder = tmp_path / "runs" / "name"
    files = write_report(comparison, folder)
    names = ["results.json", "log.jsonl", "timing.json", "accuracy.png", "clients.png", "gantt.png", "plane.png"]
    assert [file.name for file in files] == names
    assert sorted(folder.iterdir()) == sorted(files)
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in files[3:])
    results = json.loads(files[0].read_text())
    assert results == json.loads(json.dumps(comparison.results()))
    assert "seconds" not in files[0].read_text()
    assert list(map(json.loads, files[1].read_text().splitlines())) == comparison.log()
    timing = json.loads(files[2].read_text())
    for part in ("seconds", "evaluation_seconds"):
        assert list(timing[part]) == list(comparison.runs)
    before = [file.read_bytes() for file in files[:2]]
    write_report(comparison, folder)
    assert [file.read_bytes() for file in files[:2]] == before
    assert [entry.name for entry in (tmp_path / "runs").iterdir()] == ["name"]


def test_report_does_not_replace_other_folders(comparison, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ArgumentError, match="is not a report"):
        write_report(comparison, tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "mine"


@pytest.mark.usefixtures("as_shipped")
def test_failed_report_keeps_the_previous_report(comparison, tmp_path, monkeypatch):
    folder = tmp_path / "name"
    (file, *_) = write_report(comparison, folder)
    before = file.read_bytes()
    real = os.replace

    def fails(source, target):
        if Path(source).name == "name" and Path(source).parent != tmp_path:
            raise OSError("no space")
        real(source, target)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(ArgumentError, match="out: .* cannot be written: no space"):
        write_report(comparison, folder)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.usefixtures("as_shipped")
def test_invalid_destination_is_rejected_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "odd" / "results.json").mkdir(parents=True)
    for folder in (
        tmp_path / "file",
        tmp_path / "file" / "x",
        tmp_path / "link",
        tmp_path / "odd",
        tmp_path / ("x" * 300),
    ):
        with pytest.raises(ArgumentError, match="^(name|out): "):
            check_destination(folder)
    assert len(list(tmp_path.iterdir())) == 3


def test_failed_report_leaves_no_files(comparison, tmp_path, monkeypatch):
    monkeypatch.setattr("manifoldagg.experiments.plots.draw_planes", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(comparison, tmp_path / "name")
    assert list(tmp_path.iterdir()) == []


def test_diverging_client_is_dropped_and_receives_another_task():
    class Diverges:
        calls = 0

        def train(self, space, message, loss, batches, memory, *, generator):
            self.calls += 1
            if self.calls % 3 == 0:
                raise DivergenceError("the loss is nan at step 0")
            if self.calls % 3 == 1:
                return Payload(torch.full((1, *space.shape), float("nan")), 1)
            return Payload(message.start[None] + 0.01, 1)

    federation = FederatedDataset.split(clusters(), 4, partition=dirichlet(1.0), seed=0)
    one = run(federation, Method("odd", method("fedasync").rule, Diverges()), num_updates=12)
    assert one.rejected == 8
    assert len(one.accuracy) == 13


def test_held_out_samples_are_not_training_samples():
    federation = FederatedDataset.split(load_dataset("digits"), 30, partition=dirichlet(0.5), seed=0)
    everything = [*federation.train, *federation.held_out]
    assert sorted(np.concatenate(everything).tolist()) == list(range(1797))
    assert federation.trainable_clients == [i for i, part in enumerate(federation.train) if len(part)]


def test_a_partition_has_a_name():
    named, given = (
        FederatedDataset.split(load_dataset("digits"), 4, partition=partition, seed=3)
        for partition in (workloads.partition("dirichlet:concentration=0.7"), dirichlet(0.7))
    )
    assert pickle.loads(pickle.dumps(named)).checksum == named.checksum == given.checksum


def test_clients_without_samples_never_take_part():
    federation = FederatedDataset.split(clusters(), 30, partition=dirichlet(0.01), seed=0)
    assert len(federation.trainable_clients) < 30
    one = run(federation, method("fedasync"), num_updates=20)
    assert set(one.clients) <= set(federation.trainable_clients)


def test_batches_are_reshuffled_and_repeatable():
    federation = FederatedDataset.split(clusters(), 3, partition=dirichlet(1.0), seed=0)
    first, again, other = (list(federation.batches(0, i)) for i in (1, 1, 2))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a[0], b[0]) for a, b in zip(first, other, strict=True))
    inputs = torch.arange(9.0)
    batches = Batches(inputs, inputs, 4, np.random.default_rng(0))
    passes = [torch.cat([x for x, _ in batches]) for _ in range(2)]
    assert not torch.equal(*passes)
    assert all(torch.equal(p.sort().values, inputs) for p in passes)


def test_initial_models_depend_only_on_the_seed():
    state = torch.random.get_rng_state()
    a, b = (seeded_model(lambda: nn.Linear(3, 3), 5) for _ in range(2))
    assert torch.equal(a.weight, b.weight)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: load_dataset("imagenet"), "data: no data set 'imagenet'; there are digits"),
        (lambda: compare(clusters(), []), "methods: expected at least one"),
        (lambda: compare(clusters(), "fedgs"), r"methods: expected a list of Methods, got 'fedgs'; write methods\('fedgs'\)"),
        (lambda: compare(clusters(), method("fedgs")), r"methods: expected a list of .* got the Method 'FedGS'; write \[method\]"),
        (lambda: compare(clusters(), iter(methods("fedgs"))), "methods: expected a list of Methods, got list_iterator"),
        (lambda: compare(clusters(), ["fedgs"]), r"methods\[0\]: expected a Method, got 'fedgs'; write method\('fedgs'\)"),
        (lambda: compare(clusters(), [FedGS()]), r"methods\[0\]: expected a Method, got FedGS; write Method\(name, rule, trainer\)"),
        (lambda: compare("digits", methods("fedgs")), r"dataset: expected a LabelledDataset, got 'digits'; write load_dataset\('digits'\)"),
        (lambda: compare(clusters(), methods("fedgs"), partition=None), "partition: expected a function such as iid_partition, got None"),
        (lambda: compare(clusters(), methods("fedgs"), tuning=True), r"tuning: expected a Tuning, got True; write Tuning\(\), or None"),
        (lambda: run(clusters(), method("fedgs"), num_updates=2), r"federation: expected a FederatedDataset, got LabelledDataset; write FederatedDataset.split\("),
        (lambda: run(FederatedDataset.split(clusters(), 3, partition=iid_partition, seed=0), "fedgs", num_updates=2), r"method: expected a Method, got 'fedgs'; write method\('fedgs'\)"),
        (lambda: FederatedDataset.split("digits", 3, partition=iid_partition, seed=0), r"dataset: expected a LabelledDataset, got 'digits'; write load_dataset"),
        (lambda: FederatedDataset.split(clusters(), 3, partition=3, seed=0), "partition: expected a function such as iid_partition, got 3"),
        (lambda: FederatedDataset.split(clusters(), 3, partition="idd", seed=0), "partition: expected a function such as iid_partition, got 'idd'"),
        (lambda: compare(clusters(), methods(["fedgs"]), clients=121), "clients: expected at most one for each of 120"),
        (
            lambda: compare(one_label(), methods(["fedgs"]), clients=120, partition=dirichlet(math.inf)),
            "clients: expected clients with enough samples .*, got 120 clients",
        ),
        (lambda: compare(clusters(), methods(["fedgs"]), seeds=0), "seeds: expected"),
        (lambda: compare(clusters(), methods(["fedgs"]), num_updates=0), "num_updates: expected"),
        (lambda: compare(clusters(), methods(["fedgs"]), target=1.5), "target: expected"),
        (lambda: FederatedDataset.split(clusters(), 3, partition=dirichlet(1.0), seed=-1), "seed: expected"),
        (
            lambda: FederatedDataset.split(clusters(), 3, partition=lambda y, n, generator: [np.arange(9)], seed=0),
            "partition: expected 3 parts, one for each client, got 1",
        ),
        (
            lambda: FederatedDataset.split(clusters(), 2, partition=lambda y, n, generator: [np.arange(9)] * 2, seed=0),
            "partition: expected indices from 0 to 119 without duplicates",
        ),
        (
            lambda: FederatedDataset.split(clusters(), 1, partition=lambda y, n, generator: [np.arange(121)], seed=0),
            "partition: expected indices from 0 to 119 without duplicates",
        ),
        (lambda: FederatedDataset.split(clusters(), 3, partition=dirichlet(1.0), seed=0, batch=0), "batch: expected"),
    ],
)  # fmt: skip
def test_invalid_input_is_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
