"""Task runners: the bits of a run do not depend on who trains, how many, or who is done first."""

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.experiments import load_dataset
from manifoldagg.federated import Message, Payload
from manifoldagg.federated.rules import FedAsync
from manifoldagg.simulation import Exponential, FederatedDataset, IndependentClients, Method, TaskId, iid_partition, run
from manifoldagg.simulation.executors import shared_tensors
from manifoldagg.simulation.executors.task_runner import TaskRunner
from manifoldagg.simulation.executors.task_transport import RunContext, TaskEnvelope, TaskResult
from tests.federated.server.durability.spilled import open_files
from tests.simulation.executors import runners
from tests.simulation.executors.runners import METHODS, WORKLOADS, Breaks, Listed, Posted, Shuffled, federation

ROUNDS = 14


def trained(method, scenario="plain", executor=None, rounds=ROUNDS):
    """A run, and the payloads of its answers."""
    seen = []
    one = run(
        federation(),
        METHODS[method],
        num_updates=rounds,
        executor=executor,
        on_update=seen.append,
        **WORKLOADS[scenario],
    )
    return one, [event.payload for event in seen]


def same(a, b):
    one, payloads = a
    other, others = b
    assert one == other
    assert len(payloads) == len(others)
    for p, q in zip(payloads, others, strict=True):
        assert torch.equal(p.points, q.points)
        assert p.buffers.keys() == q.buffers.keys()
        assert all(torch.equal(tensor, q.buffers[name]) for name, tensor in p.buffers.items())
        assert (p.client_state is None) == (q.client_state is None)
    return True


QUEUED = ("routed", "defedavg", "remembers, drawn")
CASES = [(method, scenario) for method in METHODS for scenario in WORKLOADS if scenario != "queues" or method in QUEUED]


@pytest.fixture(scope="module")
def alone():
    """Runs that train here."""
    return {case: trained(*case) for case in CASES}


@given(
    case=st.sampled_from(CASES),
    seed=st.integers(0, 2**32),
    workers=st.sampled_from([1, 2, 5, None]),
    kind=st.sampled_from([Shuffled, Posted]),
)
def test_any_order_of_completion_gives_the_same_bits(alone, case, seed, workers, kind):
    executor = kind(seed, workers)
    assert same(trained(*case, executor), alone[case])
    executor.shutdown()


@pytest.mark.parametrize("method", ["fedasync", "routed", "remembers"])
def test_threads_give_the_same_bits(alone, method):
    with ThreadPoolExecutor(1) as pool:
        assert same(trained(method, "plain", pool), alone[method, "plain"])
    assert same(trained(method, "plain", partial(ThreadPoolExecutor, 3)), alone[method, "plain"])


@pytest.mark.parametrize(
    "trainer", [runners.WritesIt(), runners.DrawsLater()], ids=lambda trainer: type(trainer).__name__
)
@pytest.mark.parametrize("executor", [None, partial(ThreadPoolExecutor, 3), partial(Posted, 0, 2)])
def test_what_a_task_gets_is_its_own(trainer, executor):
    method = Method("odd", FedAsync(0.5), trainer)
    seen, others = [], []
    one = run(federation(), method, num_updates=25, on_update=seen.append)
    assert run(federation(), method, num_updates=25, on_update=others.append, executor=executor) == one
    assert one.rejected < 20
    assert all(torch.equal(a.payload.points, b.payload.points) for a, b in zip(seen, others, strict=True))


def test_a_scheduler_that_cannot_be_copied_gives_the_same_run():
    def locked(clients, generator):
        made = IndependentClients(Exponential(1.0), generator)
        made.lock = threading.Lock()
        return made

    method = METHODS["fedasync"]
    runs = [run(federation(), method, num_updates=8, scheduler=locked, executor=e) for e in (None, Shuffled(0, 2))]
    assert runs[0] == runs[1]


def test_some_tasks_of_these_runs_diverge_and_start_from_what_the_one_before_left(alone):
    one, payloads = alone["remembers", "plain"]
    assert one.rejected > 0
    assert max(payload.client_state["count"] for payload in payloads) == 3


def test_what_will_be_needed_first_is_sent_first_and_no_more_than_keeps_the_workers_busy():
    of = federation(clients=12)
    keys = [TaskId(client, 0) for client in of.trainable_clients]
    sent = []
    out = []

    class Counts(Shuffled):
        def submit(self, fn, envelope):
            sent.append(envelope.open_task().task_id)
            future = super().submit(fn, envelope)
            out.append(future)
            assert sum(not future.done() for future in out) <= 4
            return future

    executor = Counts(0, workers=2)
    order = [key for start in range(5) for key in keys[start::5]]
    listed = Listed(order)
    with TaskRunner(of, METHODS["fedasync"].trainer, executor, listed) as runner:
        for key in keys:
            runner.submit(key, runners.message(of))
        assert sent == []
        while listed.keys:
            runner.result(listed.keys.pop(0))
    assert sent == order
    executor.shutdown()


def test_a_client_that_is_lost_goes_on_from_its_last_answer():
    of = federation()
    trainer = runners.Remembers()

    def told(executor):
        with TaskRunner(of, trainer, executor) as runner:
            for nth in range(3):
                runner.submit(TaskId(0, nth), runners.message(of))
            runner.submit(TaskId(1, 0), runners.message(of))
            counts = [runner.result(key).client_state["count"] for key in (TaskId(0, 0), TaskId(1, 0))]
            runner.cancel([TaskId(0, 1), TaskId(0, 2), TaskId(4, 0)])
            runner.submit(TaskId(0, 3), runners.message(of))
            counts.append(runner.result(TaskId(0, 3)).client_state["count"])
            runner.submit(TaskId(0, 4), runners.message(of))
            runner.submit(TaskId(0, 5), runners.message(of))
            runner.cancel([TaskId(0, 4)])
            return [*counts, runner.result(TaskId(0, 5)).client_state["count"]]

    with ThreadPoolExecutor(2) as pool:
        assert told(pool) == told(None) == [1, 1, 2, 3]


def test_an_answer_out_of_turn_is_refused():
    of = federation()
    with TaskRunner(of, runners.LOCAL) as runner:
        runner.submit(TaskId(0, 0), runners.message(of))
        runner.submit(TaskId(0, 1), runners.message(of))
        with pytest.raises(ArgumentError, match="task_id: .* was given already"):
            runner.submit(TaskId(0, 1), runners.message(of))
        for key in (TaskId(0, 1), TaskId(2, 0)):
            with pytest.raises(ArgumentError, match="task_id: .* is not the next task of its client"):
                runner.result(key)
        assert runner.result(TaskId(0, 0)).samples > 0


class Echo:
    """Sends back what it got."""

    def train(self, space, message, loss, batches, memory, *, generator):
        return Payload(message.start[None], 1, {"t": message.tensors["t"]}, client_state=memory)


def envelope(parameters, client_state=None):
    tensors = {"t": torch.arange(parameters, dtype=torch.float32)}
    return TaskEnvelope(
        RunContext(federation(), Echo()), TaskId(0, 0), Message(torch.ones(parameters), tensors), client_state
    )


def test_an_errand_is_small_whatever_the_model():
    sizes = [len(pickle.dumps(envelope(count, {"m": torch.ones(count)}))) for count in (1000, 1_000_000)]
    assert sizes[1] < 4096
    assert abs(sizes[0] - sizes[1]) < 64


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="other systems send all tensors by value")
def test_a_model_is_in_one_unlinked_file_until_the_last_task_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_tensors, "SHARED_MEMORY_DIR", str(tmp_path))
    one = envelope(1000)
    pickle.dumps(one)
    before = open_files(tmp_path)
    other = TaskEnvelope(one._context, TaskId(1, 0), one._parts[1], None)
    pickle.dumps(other)
    assert open_files(tmp_path) == before
    # The context, the model and the tensor `t`.
    assert len(before) == 3
    assert list(tmp_path.iterdir()) == []
    del one, other
    assert open_files(tmp_path) == []


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="other systems send all tensors by value")
def test_a_reference_finds_its_own_file_only():
    """On another machine, or after the file was closed, the path may belong to any file."""
    store = shared_tensors.SharedTensorStore()
    stored = store.put(torch.arange(1000.0))
    ref = store.reference(stored)
    assert ref.data is None
    assert torch.equal(ref.load(), stored.tensor)
    path, _, token = ref.name.partition("#")
    reading, writing = os.pipe()
    with open(__file__, "rb") as other:
        for wrong in (f"/proc/self/fd/{other.fileno()}", f"/proc/self/fd/{reading}", "/proc/self/fd/99999"):
            with pytest.raises(shared_tensors.TensorNotFound):
                ref._replace(name=f"{wrong}#{token}").load()
    os.close(reading)
    os.close(writing)
    with pytest.raises(shared_tensors.TensorNotFound):
        ref._replace(name=f"{path}#{'0' * len(token)}").load()
    del stored
    with pytest.raises(shared_tensors.TensorNotFound):
        ref.load()


def test_a_store_opens_a_limited_number_of_files(monkeypatch):
    monkeypatch.setattr(shared_tensors, "MAX_FILES", 3)
    store = shared_tensors.SharedTensorStore()
    stored = [store.put(torch.full((1000,), float(i))) for i in range(5)]
    refs = [store.reference(each) for each in stored]
    assert [ref.data is None for ref in refs][3:] == [False, False]
    assert all(torch.equal(ref.load(), each.tensor) for ref, each in zip(refs, stored, strict=True))
    if Path("/proc/self/fd").exists():
        assert [ref.data is None for ref in refs] == [True] * 3 + [False] * 2


@pytest.mark.parametrize("method", ["fedasync", "orthofl"])
def test_a_worker_that_does_not_find_a_model_gets_it_by_value(alone, monkeypatch, method):
    monkeypatch.setattr(shared_tensors, "MIN_SHARED_BYTES", 16)
    asked = []

    def absent(name, target):
        asked.append(name)
        raise FileNotFoundError(name)

    monkeypatch.setattr(shared_tensors, "_read_into", absent)
    executor = Posted(0, 2)
    assert same(trained(method, "plain", executor), alone[method, "plain"])
    executor.shutdown()
    # Only what was sent before anybody knew.
    assert 1 <= len(asked) <= 4


def test_where_no_file_can_be_written_all_goes_by_value(alone, monkeypatch):
    monkeypatch.setattr(shared_tensors, "MIN_SHARED_BYTES", 16)
    monkeypatch.setattr(shared_tensors.SharedTensorStore, "_write", lambda self, tensor: None)
    executor = Posted(0, 2)
    assert same(trained("orthofl", "plain", executor), alone["orthofl", "plain"])
    executor.shutdown()


def test_what_came_by_value_is_forgotten_in_the_end(monkeypatch):
    monkeypatch.setattr(shared_tensors, "MAX_CACHED_BYTES", 100)
    received = shared_tensors._ReceivedValues()
    for name in "abc":
        received.get_or_store(name, bytes(40))
    assert [received.get_or_store(name, None) is not None for name in "abc"] == [False, True, True]
    received.get_or_store("d", bytes(400))
    assert received.get_or_store("d", None) == bytes(400)
    assert received.get_or_store("c", None) is None


@pytest.mark.parametrize("kind", [Shuffled, Posted])
def test_what_training_raises_comes_out_as_it_was(kind):
    of = federation()
    size = len(of.train[1])
    error = DivergenceError("the loss is nan")
    executor = kind(0, 2)
    with TaskRunner(of, runners.Fails(error, (size,)), executor) as runner:
        for client in of.trainable_clients:
            runner.submit(TaskId(client, 0), runners.message(of))
        for client in of.trainable_clients:
            if len(of.train[client]) == size:
                with pytest.raises(DivergenceError, match="the loss is nan") as raised:
                    runner.result(TaskId(client, 0))
            else:
                runner.result(TaskId(client, 0))
    if kind is Posted:
        assert "in train" in raised.value.__notes__[0]
    executor.shutdown()


class Odd(Exception):
    """An error that cannot be pickled."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")
        self.call = lambda: a


def test_an_error_that_cannot_travel_is_told():
    back = pickle.loads(pickle.dumps(TaskResult(error=Odd(1, 2))))
    assert isinstance(back.error, RuntimeError)
    assert "1 and 2" in str(back.error)
    assert back.from_training


def local_task():
    made = runners.clouds()
    return FederatedDataset.split(
        runners.LabelledDataset("local", made.inputs, made.labels, lambda: runners.model(), 0.9),
        5,
        partition=iid_partition,
        seed=0,
    )


def test_a_federation_that_cannot_be_sent_is_refused_with_what_to_do():
    method = Method("plain", FedAsync(0.5), runners.LOCAL)
    executor = Posted(0, 2)
    words = "executor: the federation or the trainer cannot be sent to another process: split a `dataset` of a function"
    with pytest.raises(ArgumentError, match=words):
        run(local_task(), method, num_updates=3, executor=executor)
    executor.shutdown()
    with ThreadPoolExecutor(2) as pool:
        assert run(local_task(), method, num_updates=3, executor=pool) == run(local_task(), method, num_updates=3)


def drawn_anew():
    made = runners.clouds()
    return replace(made, inputs=torch.randn(made.inputs.shape))


def test_a_task_that_is_other_data_each_time_is_refused():
    of = FederatedDataset.split(load_dataset(drawn_anew), 5, partition=iid_partition, seed=0)
    executor = Posted(0, 2)
    with pytest.raises(ArgumentError, match="executor: a worker cannot make .*other data"):
        run(of, Method("plain", FedAsync(0.5), runners.LOCAL), num_updates=3, executor=executor)
    executor.shutdown()


def test_a_task_that_is_normalised_is_the_same_data_with_any_number_of_threads():
    before = torch.get_num_threads()
    made = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            made.append(load_dataset(runners.normalised))
            made.append(pickle.loads(pickle.dumps(made[0])))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one.inputs, made[0].inputs) for one in made)


def test_a_federation_travels_as_what_made_it():
    of = federation()
    data = pickle.dumps(of)
    assert len(data) < 1024
    back = pickle.loads(data)
    assert torch.equal(back.dataset.inputs, of.dataset.inputs)
    assert all((a == b).all() for a, b in zip(back.train + back.held_out, of.train + of.held_out, strict=True))
    changed = replace(of, seed=7)
    assert pickle.loads(pickle.dumps(changed)).seed == 7
    relabelled = replace(of.dataset, labels=torch.zeros(120, dtype=torch.int64))
    assert not pickle.loads(pickle.dumps(relabelled)).labels.any()


def test_an_executor_that_breaks_is_made_again_and_the_bits_are_the_same(alone):
    made = []

    def make():
        # The first two break; so does the fourth, with whatever it is given.
        number = len(made)
        made.append(Breaks(number, lambda key: (key.client == 2 and number < 2) or number == 3))
        return made[-1]

    assert same(trained("fedasync", "plain", make), alone["fedasync", "plain"])
    assert len(made) == 3
    assert not any(executor._thread.is_alive() for executor in made)


def test_a_task_that_breaks_every_executor_is_told_by_its_client():
    made = []

    def make():
        made.append(Breaks(len(made), lambda key: key.client == 2))
        return made[-1]

    with pytest.raises(ArgumentError, match=r"executor: a task of client 2 could not be done: 4 executors in a row"):
        trained("fedasync", "plain", make)
    assert not any(executor._thread.is_alive() for executor in made)


def test_a_given_executor_that_breaks_is_an_error_at_once():
    executor = Breaks(0, lambda key: key.client == 2)
    with pytest.raises(
        ArgumentError, match=r"executor: it broke \(BrokenProcessPool: .*\); pass a factory of executors"
    ):
        trained("fedasync", "plain", executor)
    executor.shutdown()
    with pytest.raises(ArgumentError, match="executor: it broke"):
        trained("fedasync", "plain", executor)


def test_an_executor_that_was_shut_down_is_an_error():
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    with pytest.raises(ArgumentError, match=r"executor: it broke \(RuntimeError: cannot schedule new futures"):
        trained("fedasync", "plain", pool)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("executor", [3, "2", ThreadPoolExecutor, lambda: 3])
def test_what_is_no_executor_is_refused(executor):
    with pytest.raises(ArgumentError, match="executor: expected"):
        trained("fedasync", "plain", executor)


def test_an_executor_that_is_given_is_relieved_of_what_nobody_needs(tmp_path):
    of = federation()
    gate = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(gate.wait)
        runner = TaskRunner(of, runners.LOCAL, pool)
        for client in of.trainable_clients:
            runner.submit(TaskId(client, 0), runners.message(of))
        runner._fill(runner._executor)
        futures = [task.future for task in runner._submitted]
        assert len(futures) == 2
        runner.close()
        assert all(future.cancelled() for future in futures)
        gate.set()
        assert pool.submit(int).result() == 0
