"""Tests of named schedulers, delays, availability and partitions: each equals its constructor with the same options."""

import numpy as np
import pytest

from manifoldagg.errors import ArgumentError
from manifoldagg.experiments import workloads
from manifoldagg.simulation import (
    AvailabilityChange,
    Deterministic,
    Empirical,
    Exponential,
    IndependentClients,
    JacksonNetwork,
    PriorityScheduler,
    ReplayScheduler,
    TaskRecord,
    Uniform,
    assign_profiles,
    churn,
    cyclic_partition,
    dirichlet_partition,
    grouped_partition,
    write_trace,
)
from manifoldagg.simulation import delays as distributions
from manifoldagg.simulation import partitions as partitions_module
from manifoldagg.simulation.availability import read_changes
from manifoldagg.simulation.schedulers import Scheduler

CLIENTS = [0, 1, 3]
LABELS = np.tile(np.arange(6), 9)
MEASURED = "client,computation_s,round_s\npi,1.0,2.0\npi,3.0,4.0\nphone,0.5,0.75\n"


def generator():
    return np.random.default_rng(7)


def completions(scheduler, num_updates=40):
    """Return the client and the time of each completion. Each client receives a new task immediately."""
    for client in CLIENTS:
        scheduler.dispatch(client, 4.0)
    seen = []
    for _ in range(num_updates):
        done = scheduler.next()
        seen.append((done.client, done.time))
        scheduler.dispatch(done.client, 4.0)
    return seen


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "delays.csv").write_text(MEASURED)
    (tmp_path / "rates.csv").write_text("rate\n1.0\n2.0\n4.0\n0.5\n")
    (tmp_path / "named.csv").write_text("client,rate\n3,0.5\n1,2.0\n0,1.0\n")
    (tmp_path / "changes.csv").write_text("time,client,kind\n5.0,3,fail\n9.5,3,return\n1,late,join\n")
    write_trace(tmp_path / "trace.csv", [TaskRecord(c, 1.0, 0.0, 0.0, t, 0) for c, t in ((3, 1.5), (0, 2.0), (1, 4.0))])


def test_named_schedulers_equal_their_constructors(files):
    third = [1 / 4] * 4
    for text, direct in (
        ("priority", PriorityScheduler(3, generator())),
        ("priority:workers=1,k=0.5", PriorityScheduler(3, generator(), workers=1, k=0.5)),
        ("priority:speed=2", PriorityScheduler(3, generator(), speed=2)),
        ("independent", IndependentClients(Deterministic(1.0), generator())),
        ("independent:delays=exponential,delays.mean=3", IndependentClients(Exponential(3.0), generator())),
        ("jackson:rates=2", JacksonNetwork(third, [2.0] * 4, generator(), concurrency=9)),
        (
            "jackson:rates=rates.csv,concurrency=3",
            JacksonNetwork(third, [1.0, 2.0, 4.0, 0.5], generator(), concurrency=3),
        ),
        ("jackson:rates=named.csv", JacksonNetwork(third, [1.0, 2.0, 1.0, 0.5], generator(), concurrency=9)),
    ):
        make = workloads.scheduler(text)
        assert completions(make(CLIENTS, generator())) == completions(direct), text
        # Each call creates a new scheduler.
        assert completions(make(CLIENTS, generator())) == completions(make(CLIENTS, generator()))


def test_named_replay_scheduler_replays_a_trace_file(files):
    replay = workloads.scheduler("replay:trace.csv")(CLIENTS, generator())
    assert isinstance(replay, ReplayScheduler)
    for client in CLIENTS:
        replay.dispatch(client, 1.0)
    assert [replay.next().client for _ in CLIENTS] == [3, 0, 1]


def test_measured_delays_are_assigned_to_clients(files):
    profiles = Empirical.from_csv("delays.csv", work=2.0, size_ratio=0.5)
    assert workloads.delays("csv:delays.csv,work=2,size_ratio=0.5")(CLIENTS, generator()) == assign_profiles(
        profiles, CLIENTS, generator()
    )
    among = workloads.scheduler("independent:delays=csv,delays.path=delays.csv")(CLIENTS, generator())
    assert isinstance(among, IndependentClients)


def test_every_distribution_has_a_name():
    options = {"deterministic": "seconds=2", "gaussian": "location=2,scale=1", "lognormal": "mean=2,deviation=1", "uniform": "low=1,high=3"}  # fmt: skip
    kinds = {name.lower() for name in distributions.__all__} - {
        "delay",
        "delays",
        "delayfactory",
        "set_fields",
        "empirical",
        "assign_profiles",
    }
    assert set(workloads.DELAY_READERS) == kinds
    for name in kinds:
        delay = workloads.delays(f"{name}:{options.get(name, 'mean=2')}")
        assert type(delay).__name__.lower() == name
        assert delay.expected() == pytest.approx(2.0, rel=0.1)
    assert workloads.delays("uniform:low=1,high=3") == Uniform(1.0, 3.0)


def test_named_availability_equals_churn_and_change_files(files):
    for text, up, down in (
        ("churn:up=20,down=4,until=90", Exponential(20.0), Exponential(4.0)),
        ("churn:up=uniform,up.low=1,up.high=3,down=4,until=90", Uniform(1.0, 3.0), Exponential(4.0)),
    ):
        assert workloads.availability(text)(CLIENTS, generator()) == churn(CLIENTS, up, down, 90.0, generator())
    changes = [
        AvailabilityChange(5.0, 3, "fail"),
        AvailabilityChange(9.5, 3, "return"),
        AvailabilityChange(1.0, "late", "join"),
    ]
    assert workloads.availability("file:changes.csv") == changes


def test_named_partitions_equal_their_functions():
    for text, direct in (
        ("dirichlet:concentration=0.5", dirichlet_partition(LABELS, 5, 0.5, generator())),
        ("dirichlet:concentration=inf,remainder=drop", dirichlet_partition(LABELS, 5, np.inf, generator(), remainder="drop")),
        ("cyclic:labels_per_client=2", cyclic_partition(LABELS, 5, 2, generator())),
    ):  # fmt: skip
        parts = workloads.partition(text)(LABELS, 5, generator=generator())
        assert all(np.array_equal(a, b) for a, b in zip(parts, direct, strict=True)), text
    options = {"dirichlet": "concentration=1", "shards": "shards_per_client=2", "cyclic": "labels_per_client=1"}
    names = [name.removesuffix("_partition") for name in partitions_module.__all__ if name.endswith("_partition")]
    assert {"iid", "shards", "cyclic", "disjoint", "dirichlet"} <= set(names)
    for name in names:
        told = {"user_ids": LABELS} if name in ("natural", "grouped") else {}
        split = workloads.partition(f"{name}:{options.get(name, '')}")
        assert len(split(LABELS, 5, generator=generator(), **told)) == 5


def test_a_natural_partition_with_clients_is_the_grouped_partition():
    owners = np.repeat(np.arange(7), [3, 9, 1, 4, 20, 2, 15])
    for text, balance in (("natural:clients=5", "owners"), ("natural:balance=samples,clients=5", "samples")):
        found = workloads.partition(text)(LABELS, 5, generator=generator(), user_ids=owners)
        direct = grouped_partition(LABELS, 5, generator(), user_ids=owners, balance=balance)
        assert all(np.array_equal(a, b) for a, b in zip(found, direct, strict=True))
        assert sorted(np.concatenate(found).tolist()) == list(range(len(LABELS)))
    with pytest.raises(ArgumentError, match=r"^clients: expected 5, as in the partition natural:clients=5, got 4$"):
        workloads.partition("natural:clients=5")(LABELS, 4, generator=generator(), user_ids=owners)


def test_partition_weights_are_names_numbers_or_a_user_function(tmp_path, monkeypatch):
    (tmp_path / "my_weights.py").write_text("def powers(client, base=2):\n    return base**client\n")
    monkeypatch.syspath_prepend(tmp_path)
    for weights, expected in (
        ("linear", [9, 18, 27]),
        ("equal", [18, 18, 18]),
        ("1+0+2", [18, 0, 36]),
        ("0.5+0.25+0.25", [27, 14, 13]),
        ("my_weights:powers,weights.base=5", [2, 9, 43]),
    ):
        parts = workloads.partition(f"sizes:weights={weights}")(LABELS, 3, generator=generator())
        assert [len(part) for part in parts] == expected, weights
    assert [len(part) for part in workloads.partition("sizes")(LABELS, 3, generator=generator())] == [9, 18, 27]


def test_a_partition_may_be_a_users_function(tmp_path, monkeypatch):
    (tmp_path / "my_splits.py").write_text(
        "import functools\n"
        "import numpy as np\n"
        "def by_parity(labels, clients, generator, offset=0):\n"
        "    return [np.flatnonzero((np.arange(len(labels)) + offset) % clients == i) for i in range(clients)]\n"
        "bound = functools.partial(by_parity, offset=1)\n"
        "class Splits: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for text in ("my_splits:by_parity:offset=1", "my_splits:bound"):
        parts = workloads.partition(text)(LABELS, 2, generator=generator())
        assert [part[0] for part in parts] == [1, 0]
    with pytest.raises(ArgumentError, match="partition: my_splits:Splits: expected a function, got"):
        workloads.partition("my_splits:Splits")


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: workloads.scheduler("prioritty"), "scheduler: no scheduler 'prioritty'; did you mean priority\\?"),
        (lambda: workloads.scheduler("priority:worker=1"), "scheduler: priority: no option 'worker'; did you mean workers\\?"),
        (lambda: workloads.scheduler("priority:workers=0"), "scheduler: priority: workers: expected an integer >= 1, got 0"),
        (lambda: workloads.scheduler("priority:clients=3"), "scheduler: priority: no option 'clients'; .*"),
        (lambda: workloads.scheduler("priority,replay"), "scheduler: expected one name .*"),
        (lambda: workloads.scheduler("jackson"), "scheduler: jackson: expected rates=..."),
        (lambda: workloads.scheduler("jackson:rates=-1"), "scheduler: jackson: rates\\[0\\]: .*"),
        (lambda: workloads.scheduler("jackson:rates=no.csv"), "scheduler: jackson: rates: no.csv cannot be read: .*"),
        (lambda: workloads.scheduler("replay:no.csv"), "scheduler: replay: path: no.csv cannot be read: .*"),
        (lambda: workloads.scheduler("independent:delays=exponentail"), "scheduler: independent: no delays 'exponentail'; did you mean exponential\\?"),
        (lambda: workloads.delays("expo:mean=3"), "delays: no delays 'expo'; .*"),
        (lambda: workloads.delays("exponential:mean=-3"), "delays: exponential: mean: expected a finite number > 0, got -3"),
        (lambda: workloads.delays("csv:no.csv"), "delays: csv: path: no.csv cannot be read: .*"),
        (lambda: workloads.availability("churn:up=1"), "availability: churn: expected down=..., until=..."),
        (lambda: workloads.availability("churn:up=1,down=-1,until=9"), "availability: churn: down: expected a finite number > 0, got -1"),
        (lambda: workloads.availability("churn:up=1,down=1,until=soon"), "availability: churn: until: .*"),
        (lambda: workloads.availability("file:no.csv"), "availability: file: path: no.csv cannot be read: .*"),
        (lambda: workloads.partition("dirichlett"), "partition: no partition 'dirichlett'; did you mean dirichlet\\?"),
        (lambda: workloads.partition("dirichlet"), "partition: dirichlet: expected concentration=..."),
        (lambda: workloads.partition("natural:clients=0"), "partition: natural: clients: expected an integer >= 1, got 0"),
        (lambda: workloads.partition("natural:clients=5,selection=random"), "partition: natural: no option 'selection'; .*"),
        (lambda: workloads.partition("sizes:weights=liner"), "partition: sizes: no weights 'liner'; did you mean linear\\?"),
        (lambda: workloads.partition("cyclic:label_per_client=3"), "partition: cyclic: no option 'label_per_client'; did you mean labels_per_client\\?"),
    ],
)  # fmt: skip
def test_invalid_workloads_are_rejected_with_a_message_of_one_line(call, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=f"^{words}$") as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("when,client,kind\n", "expected the columns time, client, kind"),
        ("time,client,kind\n1,2\n", "line 2: "),
        ("time,client,kind\n1,2,fail\nsoon,2,return\n", "line 3: "),
        ("time,client,kind\n1,2,die\n", "line 2: kind: expected one of join, leave, fail, return"),
    ],
)
def test_invalid_availability_files_are_rejected_with_the_line_number(text, words, tmp_path):
    path = tmp_path / "changes.csv"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=words):
        read_changes(path)


@pytest.mark.usefixtures("as_shipped")
def test_a_rate_file_without_a_client_is_rejected(files):
    make = workloads.scheduler("jackson:rates=named.csv")
    assert isinstance(make([0, 1], generator()), Scheduler)
    with pytest.raises(ArgumentError, match="rates: named.csv has no rate for client 2"):
        make([0, 1, 2], generator())
