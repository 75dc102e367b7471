"""Task transport: a value arrives as it was sent, the sender's tensors stay unchanged, and resources are bounded."""

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Message, Payload
from manifoldagg.federated.rules import FedAsync
from manifoldagg.simulation import FederatedDataset, Method, TaskId, iid_partition, run, task_transport
from manifoldagg.simulation.client_task import ALIGNMENT, bitwise_equal
from manifoldagg.simulation.task_transport import Packed, RunContext, TaskEnvelope, TaskResult, execute
from tests.simulation.executors import runners
from tests.simulation.executors.runners import Posted, federation

ROOT = Path(__file__).parents[3]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]


def transmitted(value, copies=False, dumps=pickle.dumps):
    return pickle.loads(dumps(Packed(value, copies=copies))).value


@pytest.mark.parametrize("dumps", [pickle.dumps, ForkingPickler.dumps], ids=["bytes", "shared memory"])
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=5),
    dtype=st.sampled_from(DTYPES),
    copies=st.booleans(),
)
def test_tensors_arrive_with_equal_bits(dumps, shapes, dtype, copies):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_transport, "MIN_SHARED_BYTES", 0)
        tensors = [torch.randn(shape).to(dtype) for shape in shapes]
        value = {"tensors": tensors, "turned": torch.randn(3, 4).T, "part": torch.randn(9)[1::2], "nan": torch.nan}
        received = transmitted(value, copies, dumps)
    assert received["nan"] != received["nan"]
    for one, other in zip([*tensors, value["turned"]], [*received["tensors"], received["turned"]], strict=True):
        assert one.dtype == other.dtype
        assert bitwise_equal(one.contiguous(), other)
        assert other.data_ptr() % ALIGNMENT == 0 or not other.numel()
        assert not copies or other.untyped_storage().nbytes() == other.nbytes


def test_identical_objects_stay_identical():
    tensor = torch.ones(3)
    one, other = transmitted([tensor, tensor])
    assert one is other
    assert isinstance(transmitted(torch.nn.Parameter(tensor)), torch.nn.Parameter)


def test_sender_tensors_do_not_move_to_shared_memory(monkeypatch):
    """A tensor in shared memory could be written by the receiver."""
    monkeypatch.setattr(task_transport, "MIN_SHARED_BYTES", 0)
    tensor = torch.ones(1000)
    received = transmitted(tensor, dumps=ForkingPickler.dumps)
    assert received.is_shared()
    assert not tensor.is_shared()
    received.zero_()
    assert tensor.sum() == 1000


class Echo:
    """Sends back what it got."""

    def train(self, space, message, loss, batches, memory, *, generator):
        return Payload(message.start[None], 1, {"t": message.tensors["t"]}, client_state=memory)


def test_a_context_is_sent_on_request_and_received_once():
    of = federation()
    context = RunContext(of, Echo())
    message = Message(torch.ones(10), {"t": torch.arange(10.0)})

    def attempt(with_context):
        envelope = TaskEnvelope(context, TaskId(0, 0), message, {"m": 1}, with_context=with_context)
        data = pickle.dumps(envelope)
        return execute(pickle.loads(data)), len(data)

    (missing, small), (done, large), (again, _) = attempt(False), attempt(True), attempt(False)
    assert missing.needs_context
    assert small < large / 2
    for result in (done, again):
        assert torch.equal(result.payload.points[0], message.start)
        assert result.payload.client_state == {"m": 1}
    names = [task_transport._CONTEXTS.get(key, None) for key in (context.key, b"unknown")]
    assert [name is None for name in names] == [False, True]


def test_few_contexts_are_retained():
    keys = [bytes([i]) for i in range(2 * task_transport.MAX_CACHED_CONTEXTS)]
    cache = task_transport._ContextCache()
    for key in keys:
        cache.get(key, Packed(key))
        assert cache.get(keys[0], Packed(keys[0])).value == keys[0]
    assert [cache.get(key, None) is not None for key in keys] == [
        key in (keys[0], *keys[-task_transport.MAX_CACHED_CONTEXTS + 1 :]) for key in keys
    ]


class Odd(Exception):
    """An error that cannot be pickled."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")
        self.call = lambda: a


class Unreadable(Exception):
    """An error that can be pickled, but not unpickled."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


@pytest.mark.parametrize("error", [Odd, Unreadable])
def test_an_error_that_cannot_be_sent_is_reported(error):
    back = pickle.loads(pickle.dumps(TaskResult(error=error(1, 2), gradients=3)))
    assert isinstance(back.error, RuntimeError)
    assert "1 and 2" in str(back.error)
    assert back.gradients == 3


def test_a_model_that_cannot_be_sent_is_rejected_with_the_remedy():
    made = runners.clouds()
    local = runners.LabelledDataset("local", made.inputs, made.labels, lambda: runners.model(), 0.9)
    of = FederatedDataset.split(local, 5, partition=iid_partition, seed=0)
    method = Method("plain", FedAsync(0.5), runners.LOCAL)
    executor = Posted(0, 2)
    with pytest.raises(ArgumentError, match="executor: the federation or the trainer cannot be sent .* of a module"):
        run(of, method, num_updates=3, executor=executor)
    executor.shutdown()
    with ThreadPoolExecutor(2) as pool:
        assert run(of, method, num_updates=3, executor=pool) == run(of, method, num_updates=3)


class Elsewhere:
    """A trainer that a worker cannot unpickle."""

    def __init__(self, fails=False):
        if fails:
            raise ModuleNotFoundError("no module of this name on the worker")

    def __reduce__(self):
        return Elsewhere, (True,)

    def train(self, space, message, loss, batches, memory, *, generator):
        return Payload(message.start[None], 1)


def test_a_trainer_that_a_worker_cannot_make_is_reported():
    with pytest.raises(
        ArgumentError, match="executor: a worker cannot unpickle the federation or the trainer: no module"
    ):
        run(federation(), Method("odd", FedAsync(0.5), Elsewhere()), num_updates=3, executor=partial(Posted, 0, 2))


LIMITED = """
    import resource
    from pathlib import Path
    from manifoldagg.federated.rules import FedAsync
    from manifoldagg.simulation import Method, processes, run, task_transport
    from tests.simulation.executors.runners import Carries, wide

    if __name__ == "__main__":
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        of, method = wide({parameters}), Method("carries", FedAsync(0.5), Carries({tensors}))
        before = len(list(Path("/proc/self/fd").iterdir()))
        counts = []
        watch = lambda event: counts.append(len(list(Path("/proc/self/fd").iterdir())))
        found = run(of, method, num_updates={updates}, eval_every={updates}, executor=processes(2), on_update=watch)
        assert found == run(of, method, num_updates={updates}, eval_every={updates})
        print("descriptors", max(counts) - before)
"""


def in_namespace(script, tmp_path, command=()):
    path = tmp_path / "script.py"
    path.write_text("\n".join(line[4:] for line in script.splitlines()))
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts file descriptors as Linux shows them")
def test_1024_file_descriptors_suffice_for_many_tensors(tmp_path):
    """Each client retains 200 tensors of more than 1 MiB in all; a descriptor for each would exceed the limit."""
    done = in_namespace(LIMITED.format(parameters=300_000, tensors=200, updates=25), tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 100


SMALL = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
MOUNT = "mount -t tmpfs -o size=64m tmpfs /dev/shm && "


def test_64_mb_of_shared_memory_suffice(tmp_path):
    """A model of 48 MB: the second task does not fit, and is sent as bytes."""
    try:
        subprocess.run([*SMALL, MOUNT + "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system does not allow to mount a small /dev/shm")
    done = in_namespace(
        LIMITED.format(parameters=12_000_000, tensors=1, updates=6), tmp_path, [*SMALL, MOUNT + 'exec "$@"', "sh"]
    )
    assert done.returncode == 0, done.stderr
