"""Runs that go on: stopped anywhere, by anything, they find what they would have found, bit for bit."""

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from manifoldagg import tensor_file
from manifoldagg.errors import ArgumentError, CheckpointError, DivergenceError
from manifoldagg.experiments.compare import compare
from manifoldagg.experiments.progress_dir import ComparisonProgress, remove
from manifoldagg.experiments.registry import RULES, method, methods
from manifoldagg.federated import CheckpointPolicy, Payload, Server, rules
from manifoldagg.federated import clients as trainers
from manifoldagg.federated.server import update_processor
from manifoldagg.federated.server.durability import checkpoint_writer
from manifoldagg.manifolds import Flat
from manifoldagg.simulation import (
    AvailabilityChange,
    Deterministic,
    Exponential,
    FederatedDataset,
    IndependentClients,
    Method,
    PriorityScheduler,
    ReplayScheduler,
    TaskRecord,
    iid_partition,
    run,
)
from manifoldagg.simulation.checkpointing import INTERVAL_FACTOR, RunCheckpointer
from manifoldagg.simulation.evaluation import EvaluationLog
from manifoldagg.simulation.event_loop import EventLoop
from manifoldagg.simulation.task_runner import TaskRunner
from tests.simulation.executors import runners
from tests.simulation.test_run import clusters

# The default rates of the methods are tuned for 30 clients, and these tests have fewer.
pytestmark = pytest.mark.filterwarnings("ignore::manifoldagg.errors.StabilityWarning")
ROUNDS = 9
FEDERATION = runners.federation()


@dataclass(frozen=True)
class Remembers:
    """What it returns depends on all that its client did before; now and then it diverges, or sends what is refused."""

    diverges: float = 0.2

    def train(self, space, message, loss, batches, memory, *, generator):
        count, trace = (0, torch.zeros(space.shape)) if memory is None else (memory["count"], memory["trace"])
        if float(torch.rand((), generator=generator)) < self.diverges:
            raise DivergenceError(f"the loss is nan in task {count}")
        trace = 0.5 * trace + torch.randn(space.shape, generator=generator)
        points = message.start + 0.01 * trace
        memory = {"count": count + 1, "trace": trace}
        buffers = {name: message.buffers[name] + 1 for name in message.requested_buffers}
        return Payload(points[None] * (torch.nan if count % 5 == 2 else 1), 10, buffers=buffers, client_state=memory)


REMEMBERS = Method("remembers", rules.FedAsync(0.5), Remembers())
STEADY = Method("steady", rules.FedAsync(0.5), Remembers(diverges=0.0))


class Stop(BaseException):
    """As an interrupt, it is no `Exception`."""


def stopping(count):
    """Raises when it is called so many times."""
    calls = iter(range(1, count))

    def call(*_):
        if next(calls, None) is None:
            raise Stop

    return call


def once(path, what=REMEMBERS, often=2, num_updates=ROUNDS, federation=FEDERATION, **options):
    return run(
        federation,
        what,
        num_updates=num_updates,
        checkpoint=CheckpointPolicy(path, every_updates=often, keep=1),
        resume=True,
        **options,
    )


def in_parts(path, stops, what=REMEMBERS, **options):
    """A run that is stopped after so many answers, each time; then it goes on to the end."""
    for stop in stops:
        with pytest.raises(Stop):
            once(path, what, progress=stopping(stop), **options)
    return once(path, what, **options)


@pytest.fixture
def killed(monkeypatch):
    """Of what is stopped nothing more is written: what was written beside the work is all there is."""

    def kill(writer, moment):
        writer._queue.clear()
        writer.finish()

    monkeypatch.setattr(checkpoint_writer.CheckpointWriter, "write", kill)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_resumes_with_equal_bits(name, tmp_path):
    what = method(name)
    # No noise is added to buffers: a private rule refuses those of batch normalisation.
    federation = (
        FederatedDataset.split(clusters(), 5, partition=iid_partition, seed=0) if name == "private" else FEDERATION
    )
    assert in_parts(tmp_path / "run", [4], what, num_updates=6, federation=federation) == run(
        federation, what, num_updates=6
    )


FAILING = [
    AvailabilityChange(9.0, 0, "fail"),
    AvailabilityChange(14.0, 0, "return"),
    AvailabilityChange(20.0, 1, "fail"),
    AvailabilityChange(21.0, 2, "leave"),
]
ENDS = np.cumsum(np.random.default_rng(0).exponential(size=50)).tolist()
TRACE = [TaskRecord(i % 5, 1.0, 0.0, 0.0, end, 0) for i, end in enumerate(ENDS)]
WORKLOADS = {
    **runners.WORKLOADS,
    "failing": {"delays": Exponential(3.0), "availability": FAILING},
    "alone": {"scheduler": lambda c, g: IndependentClients({k: Deterministic(1.0 + k % 2) for k in c}, g)},
    "replay": {"scheduler": lambda c, g: ReplayScheduler(TRACE)},
    "a few": {"concurrency": 2, "eval_every": 4},
}
WAYS = {
    "remembers": REMEMBERS,
    "drawn": Method("drawn", rules.DeFedAvg(cohort=2), Remembers()),
    "cohorts": Method("cohorts", rules.FedAvg(cohort=3), Remembers()),
    "routed": Method("routed", runners.uniform, Remembers()),
    "buffers": Method("buffers", rules.FedBuff(2), Remembers()),
}


PAIRS = [
    "remembers: plain",
    "remembers: failing",
    "remembers: alone",
    "remembers: replay",
    "drawn: churn",
    "drawn: queues",
    "cohorts: failing",
    "cohorts: alone",
    "routed: queues",
    "routed: failing",
    "buffers: a few",
    "buffers: replay",
]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.usefixtures("killed")
def test_every_scenario_resumes_from_background_checkpoints(pair, tmp_path):
    name, _, scenario = pair.partition(": ")
    what, given = WAYS[name], WORKLOADS[scenario]
    whole = run(FEDERATION, what, num_updates=20, **given)
    assert in_parts(tmp_path / "run", (6, 15), what, num_updates=20, **given) == whole


def test_scenarios_contain_lost_rejected_and_failing_tasks(monkeypatch):
    lost = []
    real = TaskRunner.cancel
    monkeypatch.setattr(TaskRunner, "cancel", lambda runner, task_ids: (lost.extend(task_ids), real(runner, task_ids)))
    run(FEDERATION, REMEMBERS, num_updates=20, **WORKLOADS["failing"])
    assert lost
    found = run(FEDERATION, REMEMBERS, num_updates=40)
    assert 0 < found.rejected < 20


PLACES = {
    "a step": (update_processor, "step"),
    "a receipt": (Server, "receive"),
    "a dispatch": (Server, "dispatch"),
    "what is dropped": (Server, "drop"),
    "an event": (EventLoop, "next"),
    "a task that is given": (EventLoop, "submit"),
    "an answer that is settled": (EventLoop, "acknowledge"),
    "training": (TaskRunner, "result"),
    "an exam": (EvaluationLog, "record"),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", PLACES)
def test_run_resumes_after_an_interrupt_at_any_point(place, after, tmp_path, monkeypatch):
    owner, name = PLACES[place]
    given = {"num_updates": 14} | WORKLOADS["failing"]
    whole = run(FEDERATION, REMEMBERS, **given)
    real = getattr(owner, name)
    stops = 0
    for count in (1, 2, 6):
        stop = stopping(count)

        def stopped(*given, **named):
            if not after:
                stop()  # noqa: B023
            done = real(*given, **named)
            if after:
                stop()  # noqa: B023
            return done

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stopped)
            try:
                once(tmp_path / "run", often=3, **given)
            except Stop:
                stops += 1
    assert stops
    assert once(tmp_path / "run", **given) == whole


def test_run_resumes_after_an_exception(tmp_path):
    """Who mends what was wrong loses nothing."""

    def fails():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        once(tmp_path / "run", progress=fails)
    assert once(tmp_path / "run") == run(FEDERATION, REMEMBERS, num_updates=ROUNDS)


def test_tasks_trained_ahead_are_repeated_after_a_resume(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        assert in_parts(tmp_path / "run", (3, 7), executor=pool) == run(FEDERATION, REMEMBERS, num_updates=ROUNDS)


def test_requested_epochs_are_stored_for_the_resume(tmp_path):
    rule = rules.AsyncFedED(0.1, gain=1.0, target=3.0, epochs=2, warm_up=0)
    what = Method("AsyncFedED", rule, trainers.Epochs(runners.LOCAL))
    like = {"delays": Deterministic(1.0), "task_cost": "trainer"}
    whole = run(FEDERATION, what, num_updates=ROUNDS, **like)
    assert len({task.work for task in whole.trace}) > 1
    assert in_parts(tmp_path / "run", (2, 6), what, **like) == whole


def test_callbacks_receive_each_update_once(tmp_path):
    heard, rounds = [], []

    def watch(event):
        heard.append(event.update_index)
        if event.update_index in (3, 7) and heard.count(event.update_index) == 1:
            raise Stop

    for _ in range(2):
        with pytest.raises(Stop):
            once(tmp_path / "run", STEADY, on_update=watch)
    found = once(tmp_path / "run", STEADY, on_update=watch, progress=lambda: rounds.append(1))
    assert heard == [1, 2, 3, 3, 4, 5, 6, 7, 7, 8, 9]
    assert len(rounds) == ROUNDS
    assert found.seconds > 0


def test_finished_run_resumes_to_the_same_result(tmp_path):
    whole = once(tmp_path / "run", STEADY, often=1)
    heard = []
    assert once(tmp_path / "run", STEADY, on_update=lambda event: heard.append(event.update_index)) == whole
    assert heard == [ROUNDS]


def test_checkpoint_does_not_repeat_messages_that_the_server_stores(tmp_path):
    in_parts(tmp_path / "run", [4])
    tree = tensor_file.load(tmp_path / "run", "run")
    starts = [message[0] for *_, message in tree["tickets"]]
    assert len(starts) >= 4
    assert set(starts) == {None}
    buffers = {place for *_, message in tree["tickets"] for place in message[3].values()}
    assert len(tree["tensors"]) == len(buffers)


NAMES = ["fedgs", "asyncbezier"]
LIKE = {"clients": 4, "num_updates": 8, "seeds": 2, "eval_every": 3}


def compared(*given, **options):
    return compare(clusters(), methods(NAMES), **(LIKE | options))


@pytest.fixture(scope="module")
def comparison():
    return compared()


def log_of(comparison):
    return [json.dumps(row) for row in comparison.log()]


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_comparison_resumes_with_equal_bits(kill, comparison, tmp_path, request, monkeypatch):
    """Stopped in the first run, before the curve that is drawn and after it, in the last; no line of the log is twice."""
    if kill:
        request.getfixturevalue("killed")
        monkeypatch.setattr("manifoldagg.experiments.progress_dir.CHECKPOINT_SECONDS", 1e-9)
        monkeypatch.setattr("manifoldagg.simulation.checkpointing.INTERVAL_FACTOR", 0)
    folder = tmp_path / "some.unfinished"
    for name, seed, round_ in (("FedGS", 0, 3), ("AsyncBezier", 0, 3), ("AsyncBezier", 0, 7), ("AsyncBezier", 1, 5)):
        stop = stopping(round_)
        with pytest.raises(Stop):
            compared(
                folder=folder, resume=True,
                progress=lambda *told: stop() if told == (name, seed) else None,  # noqa: B023
            )  # fmt: skip
        lines = (folder / "log.jsonl").read_text().splitlines()
        assert lines == log_of(comparison)[: len(lines)]
    found = compared(folder=folder, resume=True)
    assert found == comparison
    assert json.dumps(found.results()) == json.dumps(comparison.results())
    assert (folder / "log.jsonl").read_text().splitlines() == log_of(comparison)
    assert torch.equal(found.landscape.held_out.values, comparison.landscape.held_out.values)
    assert (found.landscape.update_index, found.landscape.client) == (
        comparison.landscape.update_index,
        comparison.landscape.client,
    )
    assert not list(folder.glob("*.checkpoint"))
    remove(folder)
    assert list(tmp_path.iterdir()) == []


def test_finished_runs_are_not_repeated(comparison, tmp_path):
    told = []
    assert compared(folder=tmp_path / "x") == comparison
    found = compared(folder=tmp_path / "x", resume=True, progress=lambda *_: told.append(1))
    assert (found, told) == (comparison, [])
    assert found.timing() == compared(folder=tmp_path / "x", resume=True).timing()
    compared(folder=tmp_path / "x", progress=lambda *_: told.append(1))
    assert len(told) == 32


def test_comparison_resumes_with_another_order_of_methods(tmp_path):
    """Results and the plane are those of that order, wherever it was stopped."""
    names = ["asyncbezier:degree=2", "fedgs", "asyncbezier:degree=3"]
    like = {"clients": 4, "num_updates": 4, "seeds": 2, "eval_every": 4}
    other = compare(clusters(), methods(names[::-1]), **like)
    for answers in (6, 19):
        with pytest.raises(Stop):
            compare(clusters(), methods(names), folder=tmp_path / "x", progress=stopping(answers), **like)
        found = compare(clusters(), methods(names[::-1]), folder=tmp_path / "x", resume=True, **like)
        assert json.dumps(found.results()) == json.dumps(other.results())
        assert log_of(found) == log_of(other)
        assert found.landscape.method == other.landscape.method
        assert torch.equal(found.landscape.held_out.values, other.landscape.held_out.values)


@pytest.mark.usefixtures("as_shipped")
def test_progress_of_another_comparison_is_rejected(tmp_path):
    folder = tmp_path / "x"
    with pytest.raises(Stop):
        compared(folder=folder, progress=stopping(12))
    with pytest.raises(CheckpointError, match=r"x: settings: num_updates: was 8, got 9$"):
        compared(folder=folder, resume=True, num_updates=9)
    with pytest.raises(CheckpointError, match=r"x: settings: methods: FedGS: rule: was FedGS\("):
        compare(clusters(), methods(NAMES, ["fedgs=0.5"]), **LIKE, folder=folder, resume=True)
    (over,) = folder.glob("*.run")
    (folder / over.name.replace("-0.run", "-1.run")).write_bytes(over.read_bytes())
    with pytest.raises(CheckpointError, match=r"-1.run: settings: seed: was 0, got 1$"):
        compared(folder=folder, resume=True)
    over.write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"-0.run: is truncated"):
        compared(folder=folder, resume=True)
    with (
        ComparisonProgress(folder, {}, resume=False),
        pytest.raises(ArgumentError, match="folder: another process uses"),
    ):
        compared(folder=folder)
    (folder / "thesis.tex").write_text("mine")
    for call in (
        lambda: compared(folder=folder),
        lambda: compared(folder=folder, resume=True),
        lambda: remove(folder),
    ):
        with pytest.raises(ArgumentError, match="expected the folder of a comparison, got .* with 'thesis.tex'"):
            call()
    assert (folder / "thesis.tex").read_text() == "mine"
    with pytest.raises(ArgumentError, match="resume: expected a `folder` to resume from"):
        compared(resume=True)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("option", "words", "before", "after"),
    [
        ("delays", "csv:{}", "client,computation_s,round_s\na,1.0,1.5\n", "client,computation_s,round_s\na,2.0,2.5\n"),
        ("availability", "file:{}", "time,client,kind\n50,3,leave\n", "time,client,kind\n60,3,leave\n"),
        ("scheduler", "jackson:rates={}", "rate\n1\n1\n1\n1\n", "rate\n2\n1\n1\n1\n"),
    ],
    ids=["delays", "availability", "scheduler"],
)
def test_changed_input_file_is_rejected_by_name(option, words, before, after, tmp_path):
    path = tmp_path / "named.csv"
    given = {"folder": tmp_path / "x", option: words.format(path), "num_updates": 4, "eval_every": 4}
    path.write_text(before)
    with pytest.raises(Stop):
        compared(progress=stopping(5), **given)
    path.write_text(after)
    told = rf"x: settings: files: {re.escape(str(path))}: was [0-9a-f]+…, got [0-9a-f]+…$"
    with pytest.raises(CheckpointError, match=told):
        compared(resume=True, **given)
    path.write_text(before)
    found = compared(resume=True, **given)
    assert found.settings["files"] == {str(path): hashlib.sha256(before.encode()).hexdigest()}


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_updates": 10}, "settings: num_updates: was 9, got 10"),
        ({"eval_every": 3}, "settings: eval_every: was 1, got 3"),
        ({"concurrency": 3}, "settings: concurrency: was None, got 3"),
        ({"task_cost": "trainer"}, "settings: task_cost: was fixed, got trainer"),
        ({"delays": Deterministic(1.0)}, "settings: delays: was None, got Deterministic"),
        ({"what": replace(REMEMBERS, rule=rules.FedAsync(0.25))}, "settings: rule: was FedAsync("),
        (
            {"what": replace(REMEMBERS, trainer=runners.LOCAL)},
            "settings: trainer: was Remembers(diverges=0.2), got Local(",
        ),
        ({"federation": runners.federation(seed=1)}, "settings: split: was "),
        ({"federation": replace(FEDERATION, batch=16)}, "settings: batch: was 32, got 16"),
        ({"versions": {"torch": "1.0"}}, "settings: versions: torch: was "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_changed_settings_are_rejected_by_name(change, words, tmp_path, monkeypatch):
    path = tmp_path / "run"
    with pytest.raises(Stop):
        once(path, progress=stopping(4))
    before = path.read_bytes()
    federation, what = change.pop("federation", FEDERATION), change.pop("what", REMEMBERS)
    if "versions" in change:
        was = tensor_file.load(path, "run")["metadata"]["versions"]
        was |= change.pop("versions")
        monkeypatch.setattr("manifoldagg.simulation.metadata.versions", lambda: was)
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'{path}: {words}')}"):
        run(
            federation,
            what,
            **({"num_updates": ROUNDS} | change),
            checkpoint=CheckpointPolicy(path, every_updates=1),
            resume=True,
        )
    assert path.read_bytes() == before


def test_different_order_of_events_is_rejected(tmp_path):
    """Two functions of one name."""

    def made(seed):
        return lambda clients, generator: PriorityScheduler(len(clients), np.random.default_rng(seed))

    with pytest.raises(Stop):
        once(tmp_path / "run", progress=stopping(7), scheduler=made(0))
    with pytest.raises(
        CheckpointError, match=r"differs from the saved run: update \d: expected client \d at .*, got client"
    ):
        once(tmp_path / "run", scheduler=made(1))
    assert once(tmp_path / "run", scheduler=made(0)) == run(
        FEDERATION, REMEMBERS, num_updates=ROUNDS, scheduler=made(0)
    )


def test_truncated_and_foreign_files_are_rejected(tmp_path):
    path = tmp_path / "run"
    with pytest.raises(Stop):
        once(path, progress=stopping(4))
    data = path.read_bytes()
    altered = bytearray(data)
    altered[len(data) // 2] ^= 1
    for content, words in (
        (data[:-9], "is truncated"),
        (bytes(altered), "is altered"),
        (b"", "is truncated"),
        (b"# Notes of a thesis, and no run", "was not written by this package"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"run: {words}"):
            once(path)
        assert path.read_bytes() == content
    Server(Flat(2), rules.FedAsync(), torch.zeros(2)).save(path)
    with pytest.raises(CheckpointError, match="run: contains a server, expected a run"):
        once(path)


def test_run_without_resume_starts_from_the_beginning(tmp_path):
    in_parts(tmp_path / "run", [6], STEADY)
    rounds = []
    checkpoint = CheckpointPolicy(tmp_path / "run", every_updates=2)
    run(
        FEDERATION,
        STEADY,
        num_updates=ROUNDS,
        checkpoint=checkpoint,
        on_update=lambda event: rounds.append(event.update_index),
    )
    assert rounds == list(range(1, ROUNDS + 1))


@pytest.mark.usefixtures("as_shipped")
def test_values_that_cannot_be_stored_are_rejected_before_the_run(tmp_path):
    told = []
    like = {"num_updates": 3, "progress": lambda: told.append(1)}
    odd = replace(REMEMBERS, rule=rules.FedAsync(lambda version: 0.5))
    with pytest.raises(CheckpointError, match="rule: rate: expected a function of a module"):
        run(FEDERATION, odd, checkpoint=CheckpointPolicy(tmp_path / "run", every_updates=1), **like)
    with pytest.raises(ArgumentError, match="resume: expected a `checkpoint` to resume from"):
        run(FEDERATION, REMEMBERS, resume=True, **like)
    with pytest.raises(ArgumentError, match="checkpoint: expected CheckpointPolicy, got 'run'"):
        run(FEDERATION, REMEMBERS, checkpoint="run", **like)
    assert (told, list(tmp_path.iterdir())) == ([], [])


def test_full_disk_loses_the_checkpoint_and_not_the_run(tmp_path, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_file.os, "fsync", full)
    assert once(tmp_path / "run") == run(FEDERATION, REMEMBERS, num_updates=ROUNDS)
    assert "No space left on device" in caplog.text
    with pytest.raises(Stop) as stopped:
        once(tmp_path / "run", progress=stopping(4))
    assert re.search("checkpoint: .*run: could not be written: No space left", stopped.value.__notes__[0])
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_interval_grows_with_a_slow_disk(tmp_path, monkeypatch):
    now = [0.0]
    written = []

    class Told:
        updates = property(lambda self: int(now[0]))

        def write(self, path, keep, note):
            written.append(now[0])
            now[0] += 3
            note(seconds=3.0)

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with RunCheckpointer(CheckpointPolicy(tmp_path / "run", every_seconds=10.0), 0) as keeper:
        for second in range(150):
            now[0] = max(now[0], float(second))
            keeper.maybe_write(Told)
            keeper._writer.finish()
    assert written == [10.0, 13.0 + 3 * INTERVAL_FACTOR, 16.0 + 6 * INTERVAL_FACTOR]


def test_checkpoint_contains_the_log_as_json_values(tmp_path):
    in_parts(tmp_path / "run", [4])
    rows = tensor_file.load(tmp_path / "run", "run")["evaluations"]
    whole = run(FEDERATION, REMEMBERS, num_updates=ROUNDS)
    assert json.loads(json.dumps(rows)) == [vars(row) for row in whole.evaluations[: len(rows)]]
