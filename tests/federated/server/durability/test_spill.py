"""Spilled trees: a loaded tree equals the written one, and released files leave nothing."""

import copy
import dis
import errno
import gc
import io
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg import _io, tensor_file
from manifoldagg.errors import ArgumentError, SpillError
from manifoldagg.federated import MemoryPolicy, pytrees
from manifoldagg.federated.server.durability import spill as module
from manifoldagg.federated.server.durability.spill import Spill
from tests.federated.fingerprint import bits
from tests.federated.server.durability.spilled import MAPS, mapped, needs_maps, open_files
from tests.support import draw, raises_under_trace, seeds

TREE = {"m": torch.arange(1000.0), "v": torch.ones(3, 5, dtype=torch.bfloat16), "count": 3}
LENGTH = 4032 + 64
"""The bytes of the file of `TREE`, in which each tensor begins at a multiple of 64 bytes."""


def left(folder):
    """Return every file and folder in `folder`, and every mapped or open file without a name."""
    return sorted(folder.rglob("*")) + mapped(folder) + open_files(folder)


@contextmanager
def child(work):
    """Yield the process id of a fork that runs `work`, and kill the fork afterwards."""
    with warnings.catch_warnings():
        # Other tests may have left threads, of which none has anything to do with this.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        failed = 1
        try:
            failed = 0 if work() else 2
        finally:
            os._exit(failed)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def status(work):
    """Return the exit status of a child that runs `work`.

    It is 0 if the result is true, or the number of the signal that killed the child.
    """
    with child(work) as pid:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return ended.si_status


def succeeds(work):
    """Return whether `work` returns a true value in a child process."""
    return status(work) == 0


# What is written comes back.


@given(seeds)
def test_loaded_tree_equals_the_written_tree(tmp_path_factory, seed):
    big = draw(seed, 4, 3)
    tree = {
        "view": big[1:, ::2],
        "again": [big, big, (big.float(), torch.tensor(3), None)],
        "complex": torch.complex(big, big).conj(),
        "negative": [torch.complex(big, big).conj().imag, torch._neg_view(big)],
        "flags": torch.tensor([True, False]),
        "narrow": [big.bfloat16(), big.to(torch.float8_e4m3fn), big.to(torch.int8)],
        "learned": torch.nn.Parameter(big),
        "words": {"phase": "gradient", "count": 3, "rate": 0.5},
        "empty": torch.zeros(0, 2),
    }
    spill = Spill(tmp_path_factory.mktemp("spill"))
    plain = tree | {"learned": big, "complex": tree["complex"].resolve_conj(), "negative": [-big, -big]}
    before = bits(plain)
    filed = spill.write(tree)
    assert bits(filed.load()) == before
    assert bits(filed.load()) == before
    assert tree["learned"].requires_grad
    assert bits(filed.load(copy=False)) == before


@pytest.mark.parametrize("tree", [None, {"count": 3}, torch.zeros(0, 2), [torch.zeros(0), torch.tensor(1.5)]])
def test_small_tree_is_restored(tmp_path, tree):
    assert bits(Spill(tmp_path).write(tree).load()) == bits(tree)


def test_tree_created_in_inference_mode_is_restored(tmp_path):
    with torch.inference_mode():
        tree = {"m": torch.arange(6.0).view(2, 3).T}
    assert bits(Spill(tmp_path).write(tree).load()) == bits(tree)


class Faulty(io.FileIO):
    """A file whose writes call a function first, which may fail or return how many bytes are written."""

    def __init__(self, file, before):
        super().__init__(os.dup(file.fileno()), "r+")
        file.close()
        self._before = before

    def write(self, data):
        return super().write(data[: self._before()])


def with_writes(monkeypatch, before):
    """Call a function before each write to a spill file."""
    opens = module.open_unlinked
    monkeypatch.setattr(module, "open_unlinked", lambda folder: Faulty(opens(folder), before))


def without_unnamed_files(monkeypatch):
    """Behave as a file system that creates only files with a name."""
    opens = os.open

    def named(path, flags, *args, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return opens(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", named)


def test_short_writes_are_continued(tmp_path, monkeypatch):
    with_writes(monkeypatch, lambda: 7)
    assert bits(Spill(tmp_path).write(TREE).load()) == bits(TREE)


def test_writing_to_a_loaded_tree_changes_neither_the_stored_tree_nor_other_loads(tmp_path):
    filed = Spill(tmp_path).write(TREE)
    found, other = filed.load(), filed.load()
    found["m"] += 1
    found["v"].zero_()
    assert bits(other) == bits(TREE)
    assert bits(filed.load()) == bits(TREE)
    assert found["v"].untyped_storage().nbytes() == 30
    del filed
    assert torch.equal(found["m"], TREE["m"] + 1)


@needs_maps
def test_a_view_is_the_mapped_file_and_outlives_the_tree(tmp_path):
    filed = Spill(tmp_path).write(TREE)
    view = filed.load(copy=False)
    ((begin, end),) = [place for place, _ in mapped(tmp_path)]
    assert all(begin <= view[name].data_ptr() < end for name in ("m", "v"))
    assert not begin <= filed.load()["m"].data_ptr() < end
    del filed
    assert len(mapped(tmp_path)) == 1
    assert bits(view) == bits(TREE)
    del view
    assert left(tmp_path) == []


@needs_maps
def test_a_spilled_tree_does_not_count_as_committed_memory(tmp_path):
    filed = Spill(tmp_path).write(TREE)
    (access,) = [line.split()[1] for line in MAPS.read_text().splitlines() if f"{tmp_path}/" in line]
    # A private mapping that may be written is counted.
    assert access == "rw-s"
    assert bits(filed.load()) == bits(TREE)


@pytest.mark.parametrize("copies", [True, False])
def test_tensors_return_to_their_devices(tmp_path, copies):
    filed = Spill(tmp_path).write(TREE)
    # The meta device is the only other device of every machine. No tensor with values is on it.
    filed._devices = (torch.device("meta"), torch.device("cpu"))
    found = filed.load(copy=copies)
    assert (found["m"].device.type, found["m"].shape, found["m"].dtype) == ("meta", (1000,), torch.float32)
    assert torch.equal(found["v"], TREE["v"])


@needs_maps
def test_relative_folder_does_not_depend_on_later_working_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    spill = Spill(".")
    monkeypatch.chdir("elsewhere")
    filed = spill.write(TREE)
    assert (len(mapped(tmp_path)), len(mapped(tmp_path / "elsewhere"))) == (1, 0)
    assert bits(filed.load()) == bits(TREE)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("folder", ["no such folder", 3, b"bytes"])
def test_missing_folder_is_rejected(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="spill: expected an existing folder"):
        MemoryPolicy(spill=folder)


# A released tree leaves nothing.


@pytest.mark.parametrize("named", [False, True])
def test_a_file_has_no_name_and_is_freed_with_the_last_reference(tmp_path, monkeypatch, named):
    if named:
        without_unnamed_files(monkeypatch)
    spill = Spill(tmp_path)
    assert left(tmp_path) == []
    one = spill.write(TREE)
    two = spill.write(TREE)
    assert list(tmp_path.iterdir()) == open_files(tmp_path) == []
    assert len(mapped(tmp_path)) == 2
    again = one
    del one
    assert len(mapped(tmp_path)) == 2
    del again
    assert len(mapped(tmp_path)) == 1
    assert bits(two.load()) == bits(TREE)
    del two
    assert left(tmp_path) == []


@pytest.mark.parametrize("named", [False, True])
def test_other_users_cannot_read_a_file(tmp_path, monkeypatch, named):
    if named:
        without_unnamed_files(monkeypatch)
    before = os.umask(0)
    try:
        with module.open_unlinked(tmp_path) as file:
            assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600
            assert os.fstat(file.fileno()).st_nlink == 0
            assert not os.get_inheritable(file.fileno())
    finally:
        os.umask(before)


def test_a_tree_outlives_its_spill(tmp_path):
    filed = Spill(tmp_path).write(TREE)
    gc.collect()
    assert bits(filed.load()) == bits(TREE)
    del filed
    assert left(tmp_path) == []


def test_trees_remain_readable_after_their_folder_is_removed(tmp_path):
    folder = tmp_path / "spill"
    folder.mkdir()
    filed = Spill(folder).write(TREE)
    folder.rmdir()
    assert bits(filed.load()) == bits(TREE)


def test_a_file_has_one_owner(tmp_path):
    filed = Spill(tmp_path).write(TREE)
    with pytest.raises(TypeError, match="owns its file"):
        copy.deepcopy(filed)


# The system's limits on descriptors and mappings.


def test_more_trees_than_descriptors_can_be_spilled(tmp_path):
    spill = Spill(tmp_path)
    before = len(os.listdir("/dev/fd"))
    with limited(resource.RLIMIT_NOFILE, before + 10):
        trees = [spill.write({"m": torch.full((3,), float(count))}) for count in range(1500)]
        views = [tree.load(copy=False) for tree in trees]
        assert len(os.listdir("/dev/fd")) == before
        assert all(tree.load()["m"].eq(count).all() for count, tree in enumerate(trees))
    assert all(view["m"].eq(count).all() for count, view in enumerate(views))


def test_trees_above_the_limit_are_rejected_until_one_is_released(tmp_path, monkeypatch):
    gc.collect()
    monkeypatch.setattr(module, "MAX_TREES", len(module._SPILLED) + 3)
    spill = Spill(tmp_path)
    trees = [spill.write(TREE) for _ in range(3)]
    before = left(tmp_path)
    with pytest.raises(SpillError, match="spilled trees") as caught:
        spill.write(TREE)
    assert caught.value.temporary
    assert left(tmp_path) == before
    trees.pop()
    trees.append(spill.write(TREE))
    assert all(bits(tree.load()) == bits(TREE) for tree in trees)


MAPPINGS = """
import mmap, sys, torch
from manifoldagg.errors import SpillError
from manifoldagg.federated.server.durability.spill import Spill
spill = Spill(sys.argv[1])
first = spill.write(torch.ones(3))
# Mappings with different protections are not merged.
others = []
try:
    while True:
        others.append(mmap.mmap(-1, 4096, prot=mmap.PROT_READ if len(others) % 2 else mmap.PROT_READ | mmap.PROT_WRITE))
except OSError:
    pass
try:
    spill.write(torch.ones(3))
    print("written")
except SpillError as error:
    print(error.temporary, "Cannot allocate memory" in str(error))
del others[:100]
assert spill.write(torch.ones(3)).load().sum() == first.load().sum() == 3
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a small limit on mappings")
def test_a_process_without_free_mappings_can_write_later(tmp_path):
    done = subprocess.run([sys.executable, "-c", MAPPINGS, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True\n", "")
    assert left(tmp_path) == []


# An altered file is detected.


def is_altered(filed):
    """Return whether both ways to load a tree report an altered file."""
    for copies in (True, False):
        with pytest.raises(SpillError, match="a spilled tree was altered: its checksum differs") as caught:
            filed.load(copy=copies)
        assert not caught.value.temporary
    return True


@given(st.integers(0, 8 * LENGTH - 1))
def test_one_flipped_bit_is_detected(tmp_path_factory, bit):
    spill = Spill(tmp_path_factory.mktemp("spill"))
    filed, other = spill.write(TREE), spill.write(TREE)
    data = torch.empty(0, dtype=torch.uint8).set_(filed._storage)
    assert len(data) == LENGTH
    data[bit // 8] ^= 1 << bit % 8
    assert is_altered(filed)
    data[bit // 8] ^= 1 << bit % 8
    assert bits(filed.load()) == bits(other.load()) == bits(TREE)


@given(st.integers(0, LENGTH - 1), st.integers(1, LENGTH))
def test_lost_part_of_a_file_is_detected(tmp_path_factory, start, length):
    """A disk may return zeros instead of the written bytes."""
    spill = Spill(tmp_path_factory.mktemp("spill"))
    filed, other = spill.write(TREE), spill.write(TREE)
    data = torch.empty(0, dtype=torch.uint8).set_(filed._storage)
    lost = data[start : start + length]
    if lost.any():
        lost.zero_()
        assert is_altered(filed)
    assert bits(other.load()) == bits(TREE)


ALLOCATES = """
import resource, sys, torch
from manifoldagg.errors import SpillError
from manifoldagg.federated.server.durability.spill import Spill
filed = Spill(sys.argv[1]).write(torch.ones(2**24))
filed.load()
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (used + 2**25, hard))
try:
    filed.load()
except SpillError as error:
    print(error.temporary, sys.argv[1] in str(error), filed.load(copy=False).sum().item() == 2**24)
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
assert filed.load().sum() == 2**24
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says how much memory is mapped")
def test_a_tree_that_does_not_fit_in_memory_can_be_loaded_later(tmp_path):
    done = subprocess.run([sys.executable, "-c", ALLOCATES, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True True\n", "")


# A write that fails leaves nothing, and says whether it is worth another try.


@contextmanager
def limited(what, limit):
    """Limit a resource of this process in a `with` block."""
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


@pytest.mark.parametrize(
    ("what", "limit", "number"), [(resource.RLIMIT_FSIZE, 100, errno.EFBIG), (resource.RLIMIT_NOFILE, 0, errno.EMFILE)]
)
def test_exceeded_system_limit_raises_temporary_spill_error(tmp_path, what, limit, number):
    spill = Spill(tmp_path)
    kept = spill.write({"m": torch.ones(1)})
    before = left(tmp_path)
    with limited(what, limit), pytest.raises(SpillError) as caught:
        spill.write(TREE)
    assert caught.value.temporary
    assert caught.value.__cause__.errno == number
    assert str(tmp_path) in str(caught.value)
    assert left(tmp_path) == before
    assert bits(spill.write(TREE).load()) == bits(TREE)
    assert kept.load()["m"].tolist() == [1.0]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), MemoryError()])
@pytest.mark.parametrize("call", range(4))
def test_a_disk_that_is_full_at_any_write_leaves_nothing(tmp_path, monkeypatch, error, call):
    calls = []

    def fails():
        calls.append(None)
        if len(calls) == call + 1:
            raise error

    spill = Spill(tmp_path)
    with_writes(monkeypatch, fails)
    with pytest.raises(SpillError) as caught:
        spill.write(TREE)
    assert caught.value.temporary
    # The error is still referenced, and with it the frames that wrote.
    assert left(tmp_path) == []
    assert bits(spill.write(TREE).load()) == bits(TREE)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("free", range(4))
def test_any_number_of_free_descriptors_leaves_nothing(tmp_path, monkeypatch, named, free):
    """A write needs one descriptor for the file and another one for the mapping."""
    if named:
        without_unnamed_files(monkeypatch)
    spill = Spill(tmp_path)
    kept = spill.write(TREE)
    before = left(tmp_path)
    # Descriptors get the lowest free number.
    free_numbers = [os.dup(0) for _ in range(free + 1)]
    for number in free_numbers:
        os.close(number)
    with limited(resource.RLIMIT_NOFILE, free_numbers[free]), ExitStack() as failed:
        if free < 2:
            caught = failed.enter_context(pytest.raises(SpillError))
        spill.write(TREE)
    if free < 2:
        assert caught.value.temporary
        assert "Too many open files" in str(caught.value)
    assert left(tmp_path) == before
    assert bits(kept.load()) == bits(TREE)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only some systems have a device that is always full")
def test_a_full_device_is_temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "open_unlinked", lambda folder: io.FileIO("/dev/full", "r+"))
    with pytest.raises(SpillError, match="No space left on device") as caught:
        Spill(tmp_path).write(TREE)
    assert caught.value.temporary


def test_folder_that_cannot_be_created_raises_temporary_error(tmp_path):
    parent = tmp_path / "away"
    parent.mkdir()
    spill = Spill(parent)
    parent.rmdir()
    with pytest.raises(SpillError, match="No such file") as caught:
        spill.write(TREE)
    assert caught.value.temporary
    parent.mkdir()
    assert bits(spill.write(TREE).load()) == bits(TREE)


class Named(torch.Tensor):
    """Tensor subclass."""


ODD = {
    "sparse": lambda: torch.ones(4).to_sparse(),
    "meta": lambda: torch.ones(4, device="meta"),
    "subclass": lambda: torch.ones(4).as_subclass(Named),
}


@pytest.mark.parametrize("kind", ODD)
def test_tensor_that_no_file_can_store_raises_permanent_spill_error(tmp_path, kind):
    with pytest.raises(SpillError, match="spill: a file cannot store a tensor that is") as caught:
        Spill(tmp_path).write([torch.ones(3), {"odd": ODD[kind]()}])
    assert not caught.value.temporary
    assert left(tmp_path) == []


def test_functorch_tensor_raises_permanent_spill_error(tmp_path):
    spill = Spill(tmp_path)
    caught = []

    def writes(x):
        with pytest.raises(SpillError, match="spill: a file cannot store this tree") as error:
            spill.write({"m": x})
        caught.append(error.value.temporary)
        return x

    torch.vmap(writes)(torch.ones(2, 3))
    assert caught == [False]
    assert left(tmp_path) == []


class Interrupted(BaseException):
    """Exception that a signal handler raises."""


TRACED = (module.__file__, _io.__file__, tensor_file.__file__, pytrees.__file__)


@cache
def handling(code):
    """Return the offsets at which Python handles signals in a function.

    These are after each call, and at the start of the function.
    """
    calls = ("CALL", "CALL_FUNCTION_EX", "RESUME")
    return {after.offset for now, after in pairwise(dis.get_instructions(code)) if now.opname in calls}


def interrupted(work, place):
    """Raise an exception at the n-th point where a signal can be handled, n = `place`.

    Return whether `work` reached this point.
    """
    ahead = [place]

    def trace(frame, event, arg):
        # The interpreter discards what a destructor raises.
        if frame.f_code.co_filename not in TRACED or frame.f_code.co_name == "__del__":
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode" and frame.f_lasti in handling(frame.f_code):
            ahead[0] -= 1
            if ahead[0] < 0:
                sys.settrace(None)
                raise Interrupted
        return trace

    return raises_under_trace(work, trace, Interrupted)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("named", [False, True])
# Between the creation of a file object and its `with` statement, the interpreter closes it and issues a warning.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:.*FileIO:pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_anywhere_leaves_nothing(tmp_path, monkeypatch, named):
    if named:
        without_unnamed_files(monkeypatch)

    def work():
        spill = Spill(tmp_path)
        filed = spill.write(TREE)
        filed.load()
        filed.load(copy=False)

    place = 0
    while interrupted(work, place):
        assert left(tmp_path) == [], place
        place += 1
    assert place > 200


# A killed process leaves nothing, and a child does not damage its parent's trees.


@pytest.mark.parametrize("named", [False, True])
def test_a_killed_process_leaves_nothing(tmp_path, monkeypatch, named):
    if named:
        without_unnamed_files(monkeypatch)

    def dies():
        filed = Spill(tmp_path).write(TREE)
        assert bits(filed.load()) == bits(TREE)
        os.kill(os.getpid(), signal.SIGKILL)

    assert status(dies) == signal.SIGKILL
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.usefixtures("as_shipped")
def test_a_kill_at_any_instruction_leaves_nothing(tmp_path):
    def dies_at(place):
        ahead = [place]

        def trace(frame, event, arg):
            if frame.f_code.co_filename not in TRACED:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode" and frame.f_lasti in handling(frame.f_code):
                ahead[0] -= 1
                if ahead[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        def work():
            sys.settrace(trace)
            Spill(tmp_path).write(TREE).load()
            sys.settrace(None)
            return True

        return work

    place = 0
    while (ended := status(dies_at(place))) == signal.SIGKILL:
        assert list(tmp_path.rglob("*")) == [], place
        place += 1
    assert ended == 0
    assert place > 100


def test_a_child_reads_its_parents_trees_and_cannot_change_them(tmp_path):
    spill = Spill(tmp_path)
    kept = spill.write(TREE)
    held = [spill.write(TREE)]
    before = mapped(tmp_path)

    def work():
        assert bits(kept.load()) == bits(held[0].load()) == bits(TREE)
        kept.load()["m"].zero_()
        own = spill.write(TREE)
        own.load()["m"].zero_()
        held.clear()
        return bits(own.load()) == bits(kept.load()) == bits(TREE)

    assert succeeds(work)
    assert mapped(tmp_path) == before
    assert bits(kept.load()) == bits(held[0].load()) == bits(TREE)


FORKS = """
import os, sys
import torch
from manifoldagg.federated.server.durability.spill import Spill
filed = Spill(sys.argv[1]).write(torch.ones(3))
if os.fork():
    assert os.wait()[1] == 0
    assert filed.load().sum() == 3
    assert os.listdir(sys.argv[1]) == []
"""


def test_a_child_that_exits_leaves_the_tree_to_its_parent(tmp_path):
    done = subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert left(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="nothing else says when a grandchild is gone")
def test_a_child_reads_a_tree_after_its_parent_was_killed(tmp_path):
    parent_ended, end = os.pipe()
    told, tell = os.pipe()

    def work():
        filed = Spill(tmp_path).write(TREE)
        if os.fork() == 0:
            os.close(end)
            os.write(tell, f"{os.getpid():20}".encode())
            os.read(parent_ended, 1)
            os.write(tell, b"equal" if bits(filed.load()) == bits(TREE) else b"other")
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert not succeeds(work)
    orphan = os.pidfd_open(int(os.read(told, 20)))
    os.close(end)
    assert os.read(told, 5) == b"equal"
    select.select([orphan], [], [])
    for number in (parent_ended, told, tell, orphan):
        os.close(number)
    assert left(tmp_path) == []


@pytest.mark.soak
def test_concurrent_processes_that_are_killed_lose_no_tree(tmp_path):
    """Eight processes write and read at the same time. Every second process is killed during its work."""

    def work():
        for count in range(20):
            held = [Spill(tmp_path).write({"m": torch.full((10,), float(count))}) for _ in range(3)]
            assert all(filed.load()["m"].eq(count).all() for filed in held)
        return True

    for _ in range(25):
        with ExitStack() as stack:
            running = [stack.enter_context(child(work)) for _ in range(8)]
            for pid in running[::2]:
                assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT).si_status == 0
    assert list(tmp_path.rglob("*")) == []


def test_threads_share_a_spill(tmp_path):
    spill = Spill(tmp_path)
    failed = []

    def work(own):
        for count in range(50):
            filed = spill.write({"m": torch.full((10,), own + count)})
            if not filed.load()["m"].eq(own + count).all():
                failed.append((own, count))

    threads = [threading.Thread(target=work, args=(1000 * own,)) for own in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert left(tmp_path) == []
