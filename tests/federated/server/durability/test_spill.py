"""Files for trees: what comes back is what was written, and nothing is left of what is gone."""

import copy
import dis
import errno
import gc
import io
import os
import platform
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

from manifoldagg import _io
from manifoldagg.errors import ArgumentError, SpillError
from manifoldagg.federated.server.durability import spill as module
from manifoldagg.federated.server.durability.spill import Spill
from tests.federated.fingerprint import bits
from tests.support import draw, seeds, stopped

TREE = {"m": torch.arange(1000.0), "v": torch.ones(3, 5, dtype=torch.bfloat16), "count": 3}
LENGTH = 4032 + 64
"""Of the file of `TREE`, whose tensors begin at multiples of 64 bytes."""


def left(folder):
    """Every file and folder in `folder`."""
    return sorted(folder.rglob("*"))


@contextmanager
def child(work):
    """A fork of this process, which does `work`; its identity. It is killed at the end."""
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


def succeeds(work):
    """Whether `work` is true in a child."""
    with child(work) as pid:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return ended.si_status == 0


def dead(folder, *, host=None):
    """A folder of a process that was killed, with a file."""
    path = folder / f"manifoldagg-1-{os.urandom(8).hex()}@{host or platform.node()}"
    path.mkdir()
    (path / "0.tensors").write_bytes(b"left")
    return path


# What is written comes back.


@given(seeds)
def test_any_tree_comes_back_from_its_file(tmp_path_factory, seed):
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
    spill.close()


@pytest.mark.parametrize("tree", [None, {"count": 3}, torch.zeros(0, 2), [torch.zeros(0), torch.tensor(1.5)]])
def test_a_tree_with_few_bytes_comes_back(tmp_path, tree):
    assert bits(Spill(tmp_path).write(tree).load()) == bits(tree)


def test_a_tree_made_in_inference_mode_comes_back(tmp_path):
    with torch.inference_mode():
        tree = {"m": torch.arange(6.0).view(2, 3).T}
    assert bits(Spill(tmp_path).write(tree).load()) == bits(tree)


def test_short_writes_are_gone_on_with(tmp_path, monkeypatch):
    class Short(io.FileIO):
        def write(self, data):
            return super().write(data[:7])

    monkeypatch.setattr(module, "FileIO", Short)
    assert bits(Spill(tmp_path).write(TREE).load()) == bits(TREE)


def test_tensors_are_maps_which_outlive_their_file(tmp_path):
    filed = Spill(tmp_path).write(TREE)
    path = filed.path
    found = filed.load()
    if (maps := Path("/proc/self/maps")).exists():
        assert str(path) in maps.read_text()
    found["m"] += 1
    assert bits(filed.load()) == bits(TREE)
    assert found["v"].untyped_storage().nbytes() == 30
    del filed
    assert not path.exists()
    assert torch.equal(found["m"], TREE["m"] + 1)


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    spill = Spill(".")
    monkeypatch.chdir("elsewhere")
    filed = spill.write(TREE)
    assert filed.path.parent.parent == tmp_path
    assert bits(filed.load()) == bits(TREE)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("folder", ["no such folder", 3, b"bytes"])
def test_a_folder_that_does_not_exist_is_refused(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="spill: expected a folder that exists"):
        Spill(folder)


# What is gone leaves nothing.


def test_a_file_goes_with_its_last_reference(tmp_path):
    spill = Spill(tmp_path)
    assert left(tmp_path) == []
    one = spill.write(TREE)
    two = spill.write(TREE)
    assert len(left(tmp_path)) == 3
    assert one.path.parent.stat().st_mode & 0o77 == 0
    again = one
    del one
    assert again.path.exists()
    del again
    assert left(tmp_path) == [two.path.parent, two.path]


def test_closing_leaves_a_file_to_those_who_need_it(tmp_path):
    spill = Spill(tmp_path)
    filed = spill.write(TREE)
    spill.close()
    spill.close()
    assert bits(filed.load()) == bits(TREE)
    del filed
    assert left(tmp_path) == []


def test_the_folder_goes_with_the_last_that_needs_it(tmp_path):
    filed = Spill(tmp_path).write(TREE)
    gc.collect()
    assert bits(filed.load()) == bits(TREE)
    del filed
    gc.collect()
    assert left(tmp_path) == []


def test_a_folder_that_somebody_removed_is_made_again(tmp_path):
    spill = Spill(tmp_path)
    gone = spill.write(TREE)
    gone.path.unlink()
    gone.path.parent.rmdir()
    assert bits(spill.write(TREE).load()) == bits(TREE)


def test_a_file_has_one_owner(tmp_path):
    filed = Spill(tmp_path).write(TREE)
    with pytest.raises(TypeError, match="owns its file"):
        copy.deepcopy(filed)


# What is wrong with a file is said of the file.


def wrong(filed):
    with pytest.raises(SpillError) as caught:
        filed.load()
    assert str(filed.path) in str(caught.value)
    return str(caught.value).partition("tensors: ")[2], caught.value.temporary


@given(st.integers(0, 8 * LENGTH - 1))
def test_one_bit_that_changed_is_found(tmp_path_factory, bit):
    filed = Spill(tmp_path_factory.mktemp("spill")).write(TREE)
    data = bytearray(filed.path.read_bytes())
    assert len(data) == LENGTH
    data[bit // 8] ^= 1 << bit % 8
    filed.path.write_bytes(data)
    assert wrong(filed) == ("was altered: its checksum is another", False)


@given(st.integers(0, LENGTH - 1))
def test_a_file_that_was_cut_is_found(tmp_path_factory, length):
    filed = Spill(tmp_path_factory.mktemp("spill")).write(TREE)
    os.truncate(filed.path, length)
    assert wrong(filed) == (f"was truncated, from {LENGTH} bytes to {length}", False)


def test_what_is_wrong_with_one_file_concerns_no_other(tmp_path):
    spill = Spill(tmp_path)
    longer, deleted, good = (spill.write(TREE) for _ in range(3))
    os.truncate(longer.path, LENGTH + 1)
    deleted.path.unlink()
    assert wrong(longer) == (f"was altered: it has {LENGTH + 1} bytes instead of {LENGTH}", False)
    assert wrong(deleted) == ("was deleted", False)
    assert bits(good.load()) == bits(TREE)


def test_what_cannot_be_read_now_is_temporary(tmp_path):
    filed = Spill(tmp_path).write(TREE)
    with limited(resource.RLIMIT_NOFILE, 0):
        text, temporary = wrong(filed)
    assert text.startswith("cannot be read: ")
    assert temporary
    assert bits(filed.load()) == bits(TREE)


# A write that fails leaves nothing, and says whether it is worth another try.


@contextmanager
def limited(what, limit):
    """The process with a limit on what it may use."""
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


@pytest.mark.parametrize(
    ("what", "limit", "number"), [(resource.RLIMIT_FSIZE, 100, errno.EFBIG), (resource.RLIMIT_NOFILE, 0, errno.EMFILE)]
)
def test_what_the_system_refuses_is_temporary(tmp_path, what, limit, number):
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
    class Full(io.FileIO):
        calls = 0

        def write(self, data):
            if Full.calls == call:
                raise error
            Full.calls += 1
            return super().write(data)

    spill = Spill(tmp_path)
    monkeypatch.setattr(module, "FileIO", Full)
    with pytest.raises(SpillError) as caught:
        spill.write(TREE)
    assert caught.value.temporary
    assert [path for path in left(tmp_path) if path.is_file()] == []


def test_a_folder_that_cannot_be_made_is_temporary(tmp_path):
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
    """A tensor of a kind of its own."""


ODD = {
    "sparse": lambda: torch.ones(4).to_sparse(),
    "meta": lambda: torch.ones(4, device="meta"),
    "subclass": lambda: torch.ones(4).as_subclass(Named),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_no_file_can_have_is_refused_for_good(tmp_path, kind):
    with pytest.raises(SpillError, match="spill: a file cannot store a tensor that is") as caught:
        Spill(tmp_path).write([torch.ones(3), {"odd": ODD[kind]()}])
    assert not caught.value.temporary
    assert left(tmp_path) == []


def test_a_tensor_of_a_transformation_is_refused_for_good(tmp_path):
    spill = Spill(tmp_path)
    caught = []

    def writes(x):
        with pytest.raises(SpillError, match="spill: a file cannot store this tree") as error:
            spill.write({"m": x})
        caught.append(error.value.temporary)
        return x

    torch.vmap(writes)(torch.ones(2, 3))
    assert caught == [False]
    assert [path for path in left(tmp_path) if path.is_file()] == []


class Interrupted(BaseException):
    """What a signal handler raises."""


@cache
def handling(code):
    """Where in a function signals are handled: after a call, and where the function begins."""
    calls = ("CALL", "CALL_FUNCTION_EX", "RESUME")
    return {after.offset for now, after in pairwise(dis.get_instructions(code)) if now.opname in calls}


def destroys(frame):
    """Whether a frame is of a destructor: what is raised there is lost by the interpreter, whatever it does."""
    while frame is not None and frame.f_code.co_name not in ("__del__", "_unless_forked"):
        frame = frame.f_back
    return frame is not None


def interrupted(work, place):
    """Whether `work` has so many places in the module where a signal is handled, having raised there."""
    ahead = [place]

    def trace(frame, event, arg):
        if frame.f_code.co_filename not in (module.__file__, _io.__file__) or destroys(frame):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode" and frame.f_lasti in handling(frame.f_code):
            ahead[0] -= 1
            if ahead[0] < 0:
                sys.settrace(None)
                raise Interrupted
        return trace

    return stopped(work, trace, Interrupted)


@pytest.mark.usefixtures("as_shipped")
# Between the making of a file object and its `with` the interpreter closes it, and says so.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:.*FileIO:pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_anywhere_leaves_nothing(tmp_path):
    def work():
        spill = Spill(tmp_path)
        filed = spill.write(TREE)
        filed.load()

    place = 0
    while interrupted(work, place):
        assert left(tmp_path) == [], place
        place += 1
    assert place > 50


# A folder belongs to one process.


def test_the_folders_of_dead_processes_go(tmp_path):
    dead(tmp_path)
    (tmp_path / dead(tmp_path).name.replace("-1-", "-2-")).mkdir()
    Spill(tmp_path)
    assert left(tmp_path) == []


def test_what_somebody_may_need_stays(tmp_path):
    """Of a live spill in this process, another host, another owner, other software; and what only looks like one."""
    outside = tmp_path / "outside"
    folder = tmp_path / "folder"
    for path in (outside, folder):
        path.mkdir()
    filed = Spill(folder).write(TREE)
    dead(folder, host="another-" + platform.node())
    dead(folder, host=platform.node() + "-another")
    link = folder / f"manifoldagg-1-link@{platform.node()}"
    link.symlink_to(dead(outside))
    (folder / f"manifoldagg-1-file@{platform.node()}").write_text("not a folder")
    (folder / "manifoldagg-of-mine").mkdir()
    (folder / f"mine@{platform.node()}").mkdir()
    if os.geteuid() == 0:
        os.chown(dead(folder), 12345, 12345)
    before = left(tmp_path)
    Spill(folder)
    assert left(tmp_path) == before
    assert bits(filed.load()) == bits(TREE)


def test_the_next_start_removes_what_a_killed_process_left(tmp_path):
    def dies():
        filed = Spill(tmp_path).write(TREE)
        assert filed.path.exists()
        os.kill(os.getpid(), signal.SIGKILL)

    assert not succeeds(dies)
    assert len(left(tmp_path)) == 2
    Spill(tmp_path)
    assert left(tmp_path) == []


def test_a_child_reads_and_neither_writes_nor_removes(tmp_path):
    spill = Spill(tmp_path)
    kept = spill.write(TREE)
    held = [spill.write(TREE)]
    before = left(tmp_path)

    def work():
        assert bits(kept.load()) == bits(TREE)
        with pytest.raises(SpillError, match=f"spill: belongs to process {os.getppid()}"):
            spill.write(TREE)
        held.clear()
        spill.close()
        held.append(Spill(tmp_path).write(TREE))
        return held[0].path.exists()

    assert succeeds(work)
    assert set(before) < set(left(tmp_path))
    # What the child made, and left by `os._exit`; nothing of its parent.
    Spill(tmp_path)
    assert left(tmp_path) == before
    assert bits(held[0].load()) == bits(TREE)


FORKS = """
import os, sys
from pathlib import Path
import torch
from manifoldagg.federated.server.durability.spill import Spill
filed = Spill(sys.argv[1]).write(torch.ones(3))
if os.fork():
    assert os.wait()[1] == 0
    assert filed.load().sum() == 3
    Path(sys.argv[1], "after").write_text(str(len(os.listdir(sys.argv[1]))))
"""


def test_a_child_that_exits_removes_nothing_and_its_parent_all(tmp_path):
    done = subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert left(tmp_path) == [tmp_path / "after"]
    assert (tmp_path / "after").read_text() == "1"


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="nothing else says when a grandchild is gone")
def test_a_folder_stays_for_a_child_that_outlives_its_maker(tmp_path):
    stay, end = os.pipe()
    told, tell = os.pipe()

    def work():
        filed = Spill(tmp_path).write(TREE)
        if os.fork() == 0:
            os.close(end)
            assert filed.path.exists()
            os.write(tell, str(os.getpid()).encode())
            os.read(stay, 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert not succeeds(work)
    orphan = os.pidfd_open(int(os.read(told, 20)))
    Spill(tmp_path)
    assert len(left(tmp_path)) == 2
    os.close(end)
    select.select([orphan], [], [])
    for number in (stay, told, tell, orphan):
        os.close(number)
    Spill(tmp_path)
    assert left(tmp_path) == []


# Nobody takes a folder that is just being made for a dead one.


def cleans_at(monkeypatch, owner, name, folder):
    """Somebody cleans in `folder` just before the next call of `owner.name`; how often that was."""
    call = getattr(owner, name)
    times = []

    def cleaned(*given):
        if not times:
            times.append(None)
            Spill(folder)
        return call(*given)

    monkeypatch.setattr(owner, name, cleaned)
    return times


@pytest.mark.parametrize("name", ["open", "flock"])
def test_a_folder_that_was_cleaned_before_it_was_locked_is_made_again(tmp_path, monkeypatch, name):
    spill = Spill(tmp_path)
    times = cleans_at(monkeypatch, {"open": os, "flock": module.fcntl}[name], name, tmp_path)
    filed = spill.write(TREE)
    assert times == [None]
    monkeypatch.undo()
    Spill(tmp_path)
    assert left(tmp_path) == [filed.path.parent, filed.path]
    assert bits(filed.load()) == bits(TREE)


def test_a_folder_that_is_being_cleaned_is_left_to_its_cleaner(tmp_path, monkeypatch):
    locks = []
    flock = module.fcntl.flock

    def held(number, how):
        if not locks:
            locks.append(os.open(next(tmp_path.iterdir()), os.O_RDONLY))
            flock(locks[0], how)
        flock(number, how)

    spill = Spill(tmp_path)
    monkeypatch.setattr(module.fcntl, "flock", held)
    filed = spill.write(TREE)
    assert bits(filed.load()) == bits(TREE)
    os.close(locks[0])


def test_a_folder_where_nothing_can_be_locked_is_never_taken_for_dead(tmp_path, monkeypatch):
    def refuses(number, how):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(module.fcntl, "flock", refuses)
    filed = Spill(tmp_path).write(TREE)
    Spill(tmp_path)
    assert bits(filed.load()) == bits(TREE)


def test_a_lock_that_could_be_had_later_is_not_done_without(tmp_path, monkeypatch):
    def refuses(number, how):
        raise OSError(errno.ENOLCK, "No locks available")

    spill = Spill(tmp_path)
    monkeypatch.setattr(module.fcntl, "flock", refuses)
    with pytest.raises(SpillError, match="No locks available") as caught:
        spill.write(TREE)
    assert caught.value.temporary
    del caught
    gc.collect()
    assert left(tmp_path) == []


@pytest.mark.soak
def test_processes_that_start_and_die_at_once_lose_nothing(tmp_path):
    """Eight at a time, each cleaning, writing and reading while others do; every other is killed in the middle."""

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
    Spill(tmp_path)
    assert left(tmp_path) == []


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
    spill.close()
    gc.collect()
    assert left(tmp_path) == []
