"""Tests of `examples/papers.toml`: every table is a valid comparison with the settings of its paper."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import typer

from manifoldagg.cli._config_file import parse_table, read_tables
from manifoldagg.cli.app import app
from manifoldagg.corrections import Tangent
from manifoldagg.experiments import workloads
from manifoldagg.experiments.datasets import AUGMENTATIONS, DATASETS, MODELS
from manifoldagg.experiments.default_rates import methods_with_scaled_rates
from manifoldagg.experiments.spec_parser import parse_spec, parse_value
from manifoldagg.federated import rules
from manifoldagg.routing import TimeBound, UpdateBound, balanced, optimise_routing
from manifoldagg.simulation import PerTask

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
COMMAND = typer.main.get_command(app).get_command(None, "compare")
TABLES = read_tables(EXAMPLES / "papers.toml", COMMAND)
SMALL = [name for name in TABLES if name.endswith("-small")]


def parsed(name):
    """Return the parsed options of a table."""
    return parse_table(COMMAND, TABLES[name])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a copy of the examples and a file of measured delays."""
    shutil.copytree(EXAMPLES / "papers", tmp_path / "papers")
    (tmp_path / "delays.csv").write_text("client,computation_s,round_s\npi,1.0,2.0\npi,3.0,4.0\nphone,0.5,0.75\n")
    monkeypatch.chdir(tmp_path)


def bound(name):
    """Return the methods of a table, bound to its clients."""
    options = parsed(name)
    made, scaled = methods_with_scaled_rates(
        options["methods"], list(options["rate"] or ()), clients=options["clients"],
        concurrency=options["concurrency"], buffer=options["buffer"],
    )  # fmt: skip
    # Every rate is that of the paper, unless the table tunes its rates.
    assert options["tune"] or not scaled
    return [one.bind(range(options["clients"])) for one in made]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_a_valid_comparison(name):
    options = parsed(name)
    assert bound(name)
    assert parse_spec("data", options["data"], DATASETS).name in DATASETS
    assert options["model"] is None or parse_spec("model", options["model"]).name in MODELS
    if options["augment"] is not None:
        augment = parse_value("augment", options["augment"], AUGMENTATIONS)
        images, _ = augment(torch.ones(2, 3, 32, 32), torch.zeros(2), torch.Generator())
        assert images.shape == (2, 3, 32, 32)
    workload = workloads.parse_workload(*(options[key] for key in ("scheduler", "delays", "availability")))
    clients, generator = list(range(options["clients"])), np.random.default_rng(0)
    if workload["scheduler"] is not None:
        workload["scheduler"](clients, generator).dispatch(0, 1.0)
    if callable(workload["delays"]):
        assert set(workload["delays"](clients, generator)) == set(clients)
    split = workloads.partition(options["partition"])
    labels = np.tile(np.arange(100 if "100" in options["data"] else 10), 60)
    owners = {"user_ids": np.arange(len(labels)) % 40} if options["partition"].startswith("natural") else {}
    parts = split(labels, options["clients"], generator=generator, **owners)
    assert len(parts) == options["clients"]


def fields(name, rule):
    """Return the rules of a class in a table, each with its trainer."""
    return [(one.rule, one.trainer) for one in bound(name) if isinstance(one.rule, rule)]


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("manifold-femnist", [3.0, 3.0, 1.0, 1.0, 1.0, 0.25, 0.5, 0.25]),
        ("manifold-shakespeare", [5.0, 5.0, 2.5, 2.5, 2.0, 1.5, 1.5, 1.0]),
    ],
)
def test_manifold_tables_have_the_rates_of_table_3(name, rates):
    made, options = bound(name), parsed(name)
    assert [type(one.rule).__name__ for one in made] == [
        *("FedAsync", "FedOrtho", "FedGS", "DCASGD", "FedBuff", "AsyncFedED", "AsyncBezier", "AsyncBezier")
    ]
    assert [one.rule.rate for one in made] == rates
    assert [one.rule.decay for one in made[-2:]] == [0.0, 1.0]
    assert {one.rule.threshold for one in made[-2:]} == {1 if name == "manifold-femnist" else 0}
    assert (options["num_updates"], options["seeds"], options["clients"]) == (360, 3, 30)
    for one in made:
        local = getattr(one.trainer, "local", one.trainer)
        assert (local.rate, local.proximal) == (0.001, 0.001)
        epochs = one.rule.epochs if isinstance(one.rule, rules.AsyncFedED) else local.epochs
        assert epochs == ((2, 2) if isinstance(one.rule, rules.AsyncBezier) else 2)
    assert fields(name, rules.DCASGD)[0][0].strength == 2.0
    assert fields(name, rules.FedBuff)[0][0].size == 10


def test_manifold_shakespeare_assigns_whole_plays_to_30_clients():
    options = parsed("manifold-shakespeare")
    split = workloads.partition(options["partition"])
    plays = np.repeat(np.arange(35), 20)
    parts = split(plays, options["clients"], generator=np.random.default_rng(0), user_ids=plays)
    counts = [len(set(plays[part])) for part in parts]
    assert sorted(counts) == [1] * 25 + [2] * 5
    assert sum(map(len, parts)) == len(plays)


def test_the_report_has_eight_clients_with_sizes_in_proportion_to_their_index():
    for name in ("report-femnist", "report-small"):
        options = parsed(name)
        parts = workloads.partition(options["partition"])(np.zeros(3600), 8, generator=np.random.default_rng(0))
        assert [len(part) for part in parts] == [100 * index for index in range(1, 9)]
        ((rule, trainer),) = fields(name, rules.AsyncCurve)
        assert isinstance(rule.correction, Tangent)
        assert (rule.control, trainer.epochs) == ("keep", 5)
        assert trainer.control_rate == pytest.approx(trainer.rate / 10)
    assert parsed("report-femnist")["model"] == "lenet5"


@pytest.mark.usefixtures("folder")
def test_orthofl_tables_have_the_settings_of_appendix_d_3():
    for name in [name for name in TABLES if name.startswith("orthofl-mnist")]:
        options = parsed(name)
        assert (options["clients"], options["model"]) == (10, "lenet5")
        assert options["partition"] == "dirichlet:concentration=0.1"
        ((rule, trainer),) = fields(name, rules.OrthoFL)
        assert (rule.rate, rule.staleness(3), trainer.epochs, trainer.rate) == (0.6, 0.5, 5, 0.01)
        assert all(one.cohort == 10 for one, _ in fields(name, rules.FedAvg))
        delays = workloads.delays(options["delays"])
        drawn = delays(range(10), np.random.default_rng(0)) if callable(delays) else {0: delays}
        assert all(isinstance(delay, PerTask) for delay in drawn.values())
    assert parsed("orthofl-mnist")["eval_starts"] is True


def column(name, key):
    with (EXAMPLES / "papers" / name).open(newline="") as file:
        return np.array([float(row[key]) for row in csv.DictReader(file)])


def test_queue_files_have_the_rates_and_routings_of_the_paper():
    constants = {"smoothness": 1.0, "noise": 209.0, "gap": 15.0}
    for count, scale, rate in ((20, 100, 0.01), (10, 50, 0.005)):
        speeds = np.exp(np.arange(1, count + 1) / scale)
        np.testing.assert_allclose(column(f"queue-{count}-rates.csv", "rate"), speeds, rtol=1e-9)
        np.testing.assert_allclose(column(f"queue-{count}-balanced.csv", "share"), balanced(speeds), rtol=1e-9)
        goal = UpdateBound(speeds, 100, rate=rate, num_updates=3000, **constants)
        best = optimise_routing(goal)
        shares = column(f"queue-{count}-optimal.csv", "share")
        assert goal(shares) == pytest.approx(goal(best.p), rel=1e-6)
        # The slowest client has more than 40 % of the tasks in §5.1.
        assert shares[0] == shares.max() > 0.4
    speeds = np.repeat([0.01, 0.1, 1.0], 10)
    np.testing.assert_allclose(column("queue-30-rates.csv", "rate"), speeds)
    np.testing.assert_allclose(column("queue-30-balanced.csv", "share"), balanced(speeds), rtol=1e-9)
    printed = column("queue-30-printed.csv", "share")
    # The paper prints four digits, whose sum is 1.004.
    np.testing.assert_allclose(1.004 * printed, np.repeat([0.0068, 0.0449, 0.0487], 10), rtol=1e-9)
    goal = TimeBound(speeds, 30, rate=0.01, rounds=1, **constants)
    ours = column("queue-30-optimal.csv", "share")
    assert goal(ours) <= goal(printed)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", [name for name in TABLES if name.startswith("queue") and name not in SMALL])
def test_queue_tables_have_the_settings_of_sections_5_1_5_2_and_g_3(name):
    options = parsed(name)
    assert options["batch"] == 512
    assert {one.rule.rate for one in bound(name)} == {0.005 if name.endswith("disjoint") else 0.01}
    disjoint, in_time, cifar = (word in name for word in ("disjoint", "time", "cifar"))
    assert options["concurrency"] == (30 if in_time else 100)
    assert options["clients"] == (30 if in_time else 10 if disjoint else 20)
    assert options["duration"] == ((30_000 if cifar else 3_000) if in_time else None)
    assert in_time or options["num_updates"] == (30_000 if cifar else 3_000)
    assert options["seeds"] == ((5 if in_time else 3) if cifar else 10)
    assert options["eval_every"] == (50 if cifar else 5)
    assert (options["augment"] is not None) == cifar


def test_small_tables_require_no_user_files():
    assert {name.partition("-")[0] for name in SMALL} == {"manifold", "orthofl", "queue", "masfl", "report"}
    for name in SMALL:
        options = parsed(name)
        assert (options["data"], options["model"], options["seeds"]) == ("digits", None, 1)
        assert options["num_updates"] <= 600 or options["duration"] is not None
