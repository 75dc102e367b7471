"""Task runners: the bits of a run do not depend on who trains, how many, or who is done first."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.experiments import load_dataset
from manifoldagg.federated.rules import FedAsync
from manifoldagg.simulation import Exponential, IndependentClients, Method, TaskId, run
from manifoldagg.simulation.task_runner import TaskRunner
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
def test_trainers_that_modify_their_inputs_give_the_same_bits_on_every_executor(trainer, executor):
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


def test_runs_contain_diverging_tasks_and_tasks_with_client_state(alone):
    one, payloads = alone["remembers", "plain"]
    assert one.rejected > 0
    assert max(payload.client_state["count"] for payload in payloads) == 3


def test_tasks_are_sent_in_the_order_of_need_with_a_limit_per_worker():
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


def test_lost_client_continues_from_its_last_completed_task():
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


def test_result_in_the_wrong_order_is_rejected():
    of = federation()
    with TaskRunner(of, runners.LOCAL) as runner:
        runner.submit(TaskId(0, 0), runners.message(of))
        runner.submit(TaskId(0, 1), runners.message(of))
        with pytest.raises(ArgumentError, match="task_id: expected a new identifier, got .* again"):
            runner.submit(TaskId(0, 1), runners.message(of))
        for key in (TaskId(0, 1), TaskId(2, 0)):
            with pytest.raises(ArgumentError, match="task_id: expected the next task of a client, got"):
                runner.result(key)
        assert runner.result(TaskId(0, 0)).samples > 0


@pytest.mark.parametrize("kind", [Shuffled, Posted])
def test_exceptions_of_training_propagate_unchanged(kind):
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
                assert raised.value.__notes__[-1] == f"in task 0 of client {client}"
            else:
                runner.result(TaskId(client, 0))
    if kind is Posted:
        assert "in train" in raised.value.__notes__[0]
    executor.shutdown()


def test_normalised_data_set_is_independent_of_the_number_of_threads():
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


def test_broken_executor_is_replaced_with_equal_bits(alone):
    made = []

    def make():
        # The first two break; so does the fourth, with whatever it is given.
        number = len(made)
        made.append(Breaks(number, lambda key: (key.client == 2 and number < 2) or number == 3))
        return made[-1]

    assert same(trained("fedasync", "plain", make), alone["fedasync", "plain"])
    assert len(made) == 3
    assert not any(executor._thread.is_alive() for executor in made)


def test_task_that_breaks_every_executor_raises_an_error_with_its_client():
    made = []

    def make():
        made.append(Breaks(len(made), lambda key: key.client == 2))
        return made[-1]

    with pytest.raises(ArgumentError, match=r"executor: a task of client 2 failed: 4 consecutive executors"):
        trained("fedasync", "plain", make)
    assert not any(executor._thread.is_alive() for executor in made)


def test_broken_executor_that_cannot_be_replaced_raises_an_error():
    executor = Breaks(0, lambda key: key.client == 2)
    with pytest.raises(
        ArgumentError,
        match=r"executor: the executor failed \(BrokenProcessPool: .*\); pass a function that returns executors",
    ):
        trained("fedasync", "plain", executor)
    executor.shutdown()
    with pytest.raises(ArgumentError, match="executor: the executor failed"):
        trained("fedasync", "plain", executor)


def test_an_executor_that_was_shut_down_is_an_error():
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    with pytest.raises(
        ArgumentError, match=r"executor: the executor failed \(RuntimeError: cannot schedule new futures"
    ):
        trained("fedasync", "plain", pool)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("executor", [3, "2", ThreadPoolExecutor, lambda: 3])
def test_invalid_executors_are_rejected(executor):
    with pytest.raises(ArgumentError, match="executor: expected"):
        trained("fedasync", "plain", executor)


def test_pending_tasks_of_a_given_executor_are_cancelled(tmp_path):
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
