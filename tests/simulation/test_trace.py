"""Traces: written and read without loss, replayed exactly, drawn in full."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError, ManifoldAggError
from manifoldagg.experiments.plots import draw_trace
from manifoldagg.simulation import PriorityScheduler
from manifoldagg.simulation.delays import Deterministic, Uniform
from manifoldagg.simulation.schedulers import IndependentClients
from manifoldagg.simulation.trace import ReplayScheduler, TaskRecord, read_trace, write_trace
from tests.support import seeds

times = st.floats(0, 1e300)
names = st.one_of(
    st.integers(-(10**20), 10**20),
    st.text(st.characters(codec="utf-8"), min_size=1),
    st.text("\r\n\",'1", min_size=1),
)


@st.composite
def traces(draw):
    records = []
    for _ in range(draw(st.integers(0, 6))):
        dispatched, started, finished = sorted(draw(st.tuples(times, times, times)))
        records.append(TaskRecord(draw(names), draw(times), dispatched, started, finished, draw(st.integers(0, 10**6))))
    return sorted(records, key=lambda record: record.finished)


def number_like(name):
    try:
        return isinstance(name, str) and str(int(name)) == name
    except ValueError:
        return False


@given(traces())
def test_trace_roundtrips_through_a_file(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    if any(number_like(record.client) for record in records):
        with pytest.raises(ArgumentError, match="records: expected names that are not integers"):
            write_trace(path, records)
        assert list(path.parent.iterdir()) == []
    else:
        write_trace(path, records)
        assert read_trace(path) == records
        assert list(path.parent.iterdir()) == [path]


def recorded(scheduler, clients, rounds):
    for client in range(clients):
        scheduler.dispatch(client, 1.0 + client)
    done = []
    for _ in range(rounds):
        done.append(scheduler.next())
        scheduler.dispatch(done[-1].client, done[-1].work)
    return done


@pytest.mark.parametrize("ties", [False, True])
@given(seeds)
def test_a_replay_gives_the_same_completions_in_the_same_order(ties, seed):
    """Also where many tasks finish at the same time, which no sum of delays would tell apart."""
    if ties:
        scheduler = PriorityScheduler(6, np.random.default_rng(seed), workers=3, speed=1.0)
    else:
        scheduler = IndependentClients(Uniform(0.1, 5.0), np.random.default_rng(seed))
    seen = recorded(scheduler, 6, 60)
    replay = ReplayScheduler([TaskRecord.from_completion(done) for done in seen])
    # The work is another one: the times are those of the trace.
    for client in range(6):
        replay.dispatch(client, 7.0)
    again = []
    for _ in seen:
        again.append(replay.next())
        replay.dispatch(again[-1].client, 7.0)
    assert [done._replace(work=0.0) for done in again] == [done._replace(work=0.0) for done in seen]
    with pytest.raises(ManifoldAggError, match="expected a task in flight"):
        replay.next()
    assert replay.in_flight == 6


def test_replay_completes_only_the_tasks_of_the_trace():
    record = TaskRecord.from_completion(
        recorded(IndependentClients(Deterministic(1.0), np.random.default_rng(0)), 1, 1)[0], staleness=4
    )
    assert record == TaskRecord(0, 1.0, 0.0, 0.0, 1.0, 4)
    replay = ReplayScheduler([record])
    replay.dispatch("unknown", 1.0)
    replay.dispatch(0, 1.0)
    assert replay.next().client == 0
    assert replay.cancel("unknown") == 1
    assert replay.in_flight == 0


def test_replay_rejects_tasks_in_the_past_and_unsorted_records():
    replay = ReplayScheduler([TaskRecord("a", 1.0, 0.0, 0.0, 1.0, 0), TaskRecord("b", 1.0, 0.0, 0.0, 2.0, 0)])
    replay.dispatch("b", 1.0)
    replay.next()
    with pytest.raises(ArgumentError, match="the next task of 'a' finished at 1 s, and now is 2 s"):
        replay.dispatch("a", 1.0)
    with pytest.raises(ArgumentError, match=r"records\[1\]: expected them in order"):
        ReplayScheduler([TaskRecord("b", 1.0, 0.0, 0.0, 2.0, 0), TaskRecord("a", 1.0, 0.0, 0.0, 1.0, 0)])


def test_gantt_chart_has_a_bar_for_each_task_coloured_by_staleness(tmp_path):
    from matplotlib import pyplot
    from matplotlib.collections import LineCollection, PolyCollection

    done = recorded(PriorityScheduler(4, np.random.default_rng(0)), 4, 30)
    records = [TaskRecord.from_completion(one) for one in done]
    path = tmp_path / "gantt.png"
    axes = draw_trace(records, title="four clients")
    assert draw_trace(records, axes) is axes
    axes = draw_trace(records)
    axes.figure.savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert pyplot.get_fignums() == []
    (bars,) = (c for c in axes.collections if isinstance(c, PolyCollection))
    (waits,) = (c for c in axes.collections if isinstance(c, LineCollection))
    assert bars.get_array().tolist() == [record.staleness for record in records]
    boxes = [bar.get_extents() for bar in bars.get_paths()]
    assert [(box.x0, box.x1) for box in boxes] == [(record.started, record.finished) for record in records]
    assert [round((box.y0 + box.y1) / 2) for box in boxes] == [record.client for record in records]
    assert len(waits.get_segments()) == sum(record.started > record.dispatched for record in records) > 0


def test_rows_are_sorted_by_the_numbers_in_client_names():
    names = ["pi-10", 12, "pi-2", "a", 3, "2b", "$a_{$"]
    ticks = draw_trace([TaskRecord(name, 1.0, 0.0, 0.0, 1.0, 0) for name in names]).get_yticklabels()
    labels = [label.get_text() for label in ticks]
    assert labels == ["3", "12", "2b", "$a_{$", "a", "pi-2", "pi-10"]
    # A name is no formula.
    assert not any(label.get_parse_math() for label in ticks)


ROW = {"client": "a", "work": 1.0, "dispatched": 0.0, "started": 0.0, "finished": 1.0, "staleness": 0}
HEADER = ",".join(ROW) + "\n"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.csv", "", "line 1: expected the columns client, work"),
        ("t.csv", HEADER + "a,1,0,0,1\n", "line 2"),
        ("t.csv", HEADER + "a,1,0,0,1,0\na,1,0,0,one,0\n", "line 3: could not convert"),
        ("t.csv", HEADER + "a,1,0,0,1,0\n\n", "line 3: not enough values"),
        ("t.csv", HEADER + "a,1,0,0,1,-1\n", "line 2: staleness: expected"),
        ("t.csv", HEADER + 'a,1,0,0,1,0\n"a"b,1,0,0,1,0\n', "line 3: ',' expected after"),
        ("t.csv", HEADER + "a,1,0,0,nan,0\n", "line 2: finished: expected"),
        ("t.csv", HEADER + "a,1,2,1,3,0\n", "line 2: started: expected a finite number >= 2"),
    ],
)
@pytest.mark.usefixtures("as_shipped")
def test_invalid_file_is_rejected_with_its_line(tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ArgumentError, match=rf"path: .*{name}, {words}"):
        read_trace(path)


@pytest.mark.usefixtures("as_shipped")
def test_missing_and_unwritable_files_are_rejected(tmp_path):
    with pytest.raises(ArgumentError, match=r"path: .* cannot be read"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(ArgumentError, match=r"path: .* cannot be written"):
        write_trace(tmp_path / "none" / "t.csv", [])
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=r"path: .* cannot be written"):
        write_trace(tmp_path / "file" / "t.csv", [])
    with pytest.raises(ArgumentError, match=r"path: .* cannot be written: 'utf-8' codec"):
        write_trace(tmp_path / "t.csv", [TaskRecord("\ud800", 1.0, 0.0, 0.0, 1.0, 0)])
    for takes in (lambda x: write_trace(tmp_path / "t.csv", x), ReplayScheduler, draw_trace):
        with pytest.raises(ArgumentError, match=r"records\[0\]: expected a TaskRecord, got 1"):
            takes([1])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ArgumentError, match="records: expected at least one"):
        draw_trace([])


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"client": 1.5}, "client: expected"),
        ({"work": -1.0}, "work: expected"),
        ({"dispatched": math.nan}, "dispatched: expected"),
        ({"finished": -1.0}, "finished: expected"),
        ({"staleness": 0.5}, "staleness: expected"),
    ],
)
def test_invalid_record_is_rejected_with_its_field(change, words):
    with pytest.raises(ArgumentError, match=words):
        TaskRecord(**(ROW | change))
