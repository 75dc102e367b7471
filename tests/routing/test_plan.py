"""Files in, tables and files out."""

import csv
import itertools

import matplotlib.image
import numpy as np
import pytest

from manifoldagg.errors import ArgumentError
from manifoldagg.routing import ClosedNetwork, TimeBound, UpdateBound
from manifoldagg.routing.plan import check_output_path, group_clients, make_plan, read_rates, write_files

CONSTANTS = {"rate": 0.01, "smoothness": 1.0, "noise": 209.0, "gap": 15.0}


def write(path, text):
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def plan():
    rates = np.repeat([0.01, 0.1, 1.0], 4)
    names = tuple(f"client, {i}" for i in range(12))
    return make_plan(group_clients(names, rates), TimeBound(rates, 12, **CONSTANTS))


def test_rates_are_read_with_names_and_groups(tmp_path):
    clients = read_rates(write(tmp_path / "rates.csv", "client, rate, group\na,1.5,x\n\nb, 2,y\nc,3e0,x\n"))
    assert clients.names == ("a", "b", "c")
    assert clients.rates.tolist() == [1.5, 2.0, 3.0]
    assert {group: members.tolist() for group, members in clients.members().items()} == {"x": [0, 2], "y": [1]}


def test_results_are_represented_by_one_short_line(plan):
    network = ClosedNetwork([0.25, 0.75], [1.0, 3.0], concurrency=5)
    found = {
        "network": (
            network,
            "ClosedNetwork(routing=ndarray of shape (2,), rates=ndarray of shape (2,), concurrency=5)",
        ),
        "bound": (
            TimeBound([1.0, 2.0], 12, **CONSTANTS),
            "TimeBound(rates=ndarray of shape (2,), concurrency=12, rate=0.01, smoothness=1, noise=209, gap=15)",
        ),
        "simulation": (network.simulate(10, np.random.default_rng(0)), "Simulation(num_updates=10, time="),
        "routing": (plan.optimum, "Routing(p=ndarray of shape (12,), value="),
        "plan": (plan, "Plan(clients=12, optimised="),
        "clients": (plan.clients, "Clients(names=tuple of 12 entries, rates=ndarray of shape (12,), "),
        "group": (plan.groups("uniform")[0], "Group(name='rate 0.01', clients=4, rate=0.01, share=0.0833, queue="),
    }
    for name, (result, start) in found.items():
        text = repr(result)
        assert text.startswith(start), name
        assert len(text) < 300, name
        assert text.isprintable(), name


def test_a_file_with_only_rates_is_accepted(tmp_path):
    clients = read_rates(write(tmp_path / "rates.csv", "\ufeffrate\n1\n2\n1\n"))
    assert clients.names == ("0", "1", "2")
    assert clients.groups == ("rate 1", "rate 2", "rate 1")


def test_many_rates_make_few_groups_in_the_order_of_rates():
    rates = np.random.default_rng(0).permutation(np.linspace(1, 2, 50))
    clients = group_clients(tuple(map(str, range(50))), rates)
    members = clients.members()
    assert len(members) == 6
    assert sum(map(len, members.values())) == 50
    spans = sorted((rates[i].min(), rates[i].max()) for i in members.values())
    assert all(a[1] < b[0] for a, b in itertools.pairwise(spans))


def test_rates_that_are_close_have_groups_of_their_own():
    close = group_clients(("a", "b", "c"), [1.0, 1 + 1e-9, 1.0])
    assert close.groups == ("rate 1", "rate 1.000000001", "rate 1")
    many = group_clients(tuple(map(str, range(30))), 1 + 1e-9 * np.arange(30))
    assert [len(members) for members in many.members().values()] == [5] * 6


def test_names_in_the_table_are_escaped():
    pytest.importorskip("typer")
    from rich.console import Console

    from manifoldagg.cli.route import routing_tables

    names = ("[/x]", "[red]a", "b\\")
    plan = make_plan(group_clients(("a", "b", "c"), [1.0, 2.0, 3.0], names), TimeBound([1.0, 2.0, 3.0], 4, **CONSTANTS))
    screen = Console(width=120)
    with screen.capture() as shown:
        screen.print(routing_tables(plan)[0])
    assert all(f"{name} " in shown.get() for name in names)


BAD = [
    ("", "expected a column 'rate'"),
    ("speed\n1\n", "expected a column 'rate'"),
    ("rate,rate\n1,2\n", "expected a column 'rate'"),
    ("rate\n", "expected at least one client"),
    ("rate\n1\nfast\n", "line 3: expected a positive number .* got 'fast'"),
    ("rate\n1\n-2\n", "line 3: expected a positive number .* got '-2'"),
    ("rate\nnan\n", "line 2: expected a positive number"),
    ("client,rate\na,1\nb\n", "line 3: expected 2 fields"),
    ("client,rate\na,1\nb,2\na,3\n", "line 4: expected a new name, got 'a', which line 2 contains"),
    ("client,rate\na,1,2\n", "line 2: expected 2 fields"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_an_invalid_line_is_named(tmp_path, text, message):
    with pytest.raises(ArgumentError, match=f"rates: .*rates.csv.*{message}"):
        read_rates(write(tmp_path / "rates.csv", text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"rates: .*none.csv cannot be read"):
        read_rates(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"rate\n\xff\xfe\n")
    with pytest.raises(ArgumentError, match=r"rates: .*binary.csv cannot be read"):
        read_rates(tmp_path / "binary.csv")


def test_the_objectives_are_the_two_bounds():
    pytest.importorskip("typer")
    from manifoldagg.cli.route import objective_bound

    rates = np.ones(2)
    assert objective_bound("time", rates, 3, num_updates=9, **CONSTANTS) == TimeBound(rates, 3, **CONSTANTS)
    assert objective_bound("update", rates, 3, num_updates=9, **CONSTANTS) == UpdateBound(
        rates, 3, **CONSTANTS, num_updates=9
    )
    with pytest.raises(ArgumentError, match="objective: expected one of time, update; got 'speed'"):
        objective_bound("speed", rates, 3, num_updates=9, **CONSTANTS)


def test_group_means_sum_to_the_totals(plan):
    for name, p in plan.routings.items():
        rows = plan.groups(name)
        assert sum(row.clients * row.share for row in rows) == pytest.approx(1)
        assert sum(row.clients * row.queue for row in rows) == pytest.approx(12)
        assert sum(row.clients * row.delay for row in rows) == pytest.approx(11)
        assert plan.values[name] == plan.bound(p)
    assert plan.values["optimised"] <= min(plan.values.values())
    assert [row.name for row in plan.groups()] == ["rate 0.01", "rate 0.1", "rate 1"]


def test_written_files_contain_the_plan(plan, tmp_path):
    out = tmp_path / "routing.csv"
    files = write_files(plan, out)
    assert files == [out, tmp_path / "routing.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["routing.csv", "routing.png"]
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    p = np.array([float(row["share"]) for row in rows])
    np.testing.assert_array_equal(p, plan.optimum.p)
    network = ClosedNetwork(p, [float(row["rate"]) for row in rows], 12)
    np.testing.assert_array_equal([float(row["mean_queue"]) for row in rows], network.mean_tasks)
    np.testing.assert_array_equal([float(row["relative_delay"]) for row in rows], network.relative_delay)
    assert rows[3]["client"] == "client, 3"
    height, width, _ = matplotlib.image.imread(tmp_path / "routing.png").shape
    assert width > height > 400
    before = out.read_bytes()
    write_files(plan, out)
    assert out.read_bytes() == before


def test_an_invalid_output_path_is_rejected_before_the_computation(tmp_path):
    (tmp_path / "folder.csv").mkdir()
    for out, message in (
        (tmp_path / "routing.txt", "expected the path of a .csv file"),
        (tmp_path / "folder.csv", "expected the path of a .csv file"),
        (tmp_path / "none" / "routing.csv", "expected a path in an existing folder"),
    ):
        with pytest.raises(ArgumentError, match=f"out: {message}"):
            check_output_path(out)


def test_a_failed_write_preserves_the_old_file(plan, tmp_path, monkeypatch):
    out = write(tmp_path / "routing.csv", "before")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("manifoldagg.routing.plan.write_csv", fail)
    with pytest.raises(ArgumentError, match="out: .* cannot be written: disk full"):
        write_files(plan, out)
    assert [path.name for path in tmp_path.iterdir()] == ["routing.csv"]
    assert out.read_text() == "before"
