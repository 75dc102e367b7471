"""Workers in processes: the same bits, and nobody and nothing left behind, whoever dies."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules import FedAsync
from manifoldagg.simulation import Method, RestartingExecutor, processes, run
from tests.simulation.executors import runners
from tests.simulation.executors.runners import METHODS, WORKLOADS, federation

ROOT = Path(__file__).parents[3]
CASES = [("fedasync", "churn"), ("routed", "queues"), ("orthofl", "plain"), ("remembers, drawn", "plain")]


def trained(method, scenario, executor=None):
    seen = []
    one = run(
        federation(), METHODS[method], num_updates=10, executor=executor, on_update=seen.append, **WORKLOADS[scenario]
    )
    return one, torch.cat([event.payload.points for event in seen])


@pytest.fixture(scope="module")
def pool():
    with RestartingExecutor(processes(2)) as workers:
        yield workers


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_processes_give_the_same_bits(pool, case):
    expected, points = trained(*case)
    one, others = trained(*case, pool)
    assert one == expected
    assert torch.equal(points, others)


def test_processes_use_the_dtype_and_backend_of_the_parent(pool):
    """Whatever torch's default dtype is here."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        method = Method("plain", FedAsync(0.5), runners.Fixed())
        assert run(federation(), method, num_updates=2, executor=pool) == run(federation(), method, num_updates=2)
    finally:
        torch.set_default_dtype(before)


def test_exceptions_in_a_process_propagate_to_the_parent(pool):
    of = federation()
    sizes = tuple(len(part) for part in of.train)
    method = Method("fails", FedAsync(0.5), runners.Fails(KeyError("a bug"), sizes))
    with pytest.raises(KeyError, match="a bug") as raised:
        run(of, method, num_updates=2, executor=pool)
    assert "in another process" in raised.value.__notes__[0]


def test_task_of_a_killed_process_is_repeated(tmp_path):
    of = federation()
    size = len(of.train[2])
    expected = run(of, Method("dies", FedAsync(0.5), runners.LOCAL), num_updates=10)
    dies = runners.Dies(size, str(tmp_path / "died"))
    assert run(of, Method("dies", FedAsync(0.5), dies), num_updates=10, executor=processes(1)) == expected
    assert (tmp_path / "died").exists()


def test_task_of_a_process_killed_before_receipt_is_repeated(tmp_path):
    """The result is in the pipe, but its block of shared memory went with the process."""
    of, file = runners.wide(300_000), tmp_path / "died"
    given = {"num_updates": 6, "eval_every": 6}
    expected = run(of, Method("dies", FedAsync(0.5), runners.Carries(3)), **given)
    dies = Method("dies", FedAsync(0.5), runners.DiesOnceSent(str(file)))
    assert run(of, dies, executor=processes(1), **given) == expected
    assert file.exists()


def test_a_trainer_that_writes_in_place_leaves_the_tensors_of_this_process_unchanged(pool):
    of, method = runners.wide(300_000), Method("writes", FedAsync(0.5), runners.Carries(3))
    starts, others = [], []
    run(of, method, num_updates=6, eval_every=6, on_update=lambda event: starts.append(event.message.start))
    run(of, method, num_updates=6, eval_every=6, on_update=lambda e: others.append(e.message.start), executor=pool)
    assert all(map(torch.equal, starts, others))
    assert not any(start.is_shared() for start in others)


@pytest.mark.soak
def test_task_that_kills_every_process_raises_an_error_with_its_client():
    of = federation()
    method = Method("dies", FedAsync(0.5), runners.Dies(len(of.train[2])))
    with pytest.raises(ArgumentError, match=r"a task of client 2 failed: 4 consecutive executors .*__main__"):
        run(of, method, num_updates=10, executor=processes(2))


SCRIPT = """
    import signal
    from manifoldagg.federated.rules import FedAsync
    from manifoldagg.simulation import Method, processes, run
    from tests.simulation.executors.runners import Sleeps, federation

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run(federation(), Method("sleeps", FedAsync(0.5), Sleeps({folder!r})), num_updates=5, executor=processes(2))
"""


@pytest.fixture
def asleep(tmp_path):
    """A script that waits for two processes, and the ids of these."""
    folder = tmp_path / "pids"
    folder.mkdir()
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(folder=str(folder)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(script)], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            wait_for(lambda: len(list(folder.iterdir())) == 2 or process.poll() is not None)
            yield process, [int(file.name) for file in folder.iterdir()]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes as Linux shows them")
def test_an_interrupt_leaves_no_process(asleep):
    process, pids = asleep
    assert len(pids) == 2
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode != 0
    assert told.count("KeyboardInterrupt") == 1
    assert not any(map(is_alive, pids))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes as Linux shows them")
def test_processes_end_with_their_parent(asleep):
    process, pids = asleep
    assert len(pids) == 2
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(is_alive, pids)))
