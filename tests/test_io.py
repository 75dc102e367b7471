"""Tests of atomic writes and file locks: a path has the old or the new content, and a lock ends with its process."""

import errno
import os
import subprocess
import sys

import pytest

from manifoldagg import _io
from manifoldagg._io import FileLock, atomic_write, older_files
from tests.federated.faults import Killed, each

HOLD = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def written(path, text):
    """Replace a file atomically, or a folder with two files if `path` has the suffix `.folder`."""
    with atomic_write(path) as draft:
        if path.suffix == ".folder":
            draft.mkdir()
            (draft / "a").write_text(text)
            (draft / "b").write_text(text)
        else:
            draft.write_text(text)


def half_written(path, error):
    with atomic_write(path) as draft:
        draft.mkdir()
        (draft / "a").write_text("half")
        raise error


def content(path):
    return {part.name: part.read_text() for part in path.iterdir()} if path.is_dir() else path.read_text()


def state(path):
    """Return the contents of a folder without the drafts of killed processes."""
    return {part.name: content(part) for part in path.iterdir() if not part.name.startswith(".")}


@pytest.mark.parametrize("name", ["x", "x.folder"])
def test_a_fault_at_any_call_leaves_the_old_or_the_new_content(tmp_path, monkeypatch, name):
    path = tmp_path / name
    written(path, "old")
    old = content(path)
    written(path, "new")
    new = content(path)
    seen = set()

    def run(disk):
        written(path, "old")
        with monkeypatch.context() as patch:
            patch.setattr(_io, "os", disk)
            written(path, "new")

    for disk, call, error in each(run, faults=(errno.ENOSPC, "killed")):
        seen.add((call, disk.fault))
        assert error is None or isinstance(error, OSError)
        # Replacing a folder needs two renames. If the process is killed between them, the path does not exist.
        between = name == "x.folder" and disk.dead and call == "replace" and not path.exists()
        assert between or content(path) in (old, new)
        if error is not None or not disk.dead:
            assert os.listdir(tmp_path) == [name], (disk.at, call)
        # The next call restores the old content before it writes, and removes the draft of the killed call.
        with pytest.raises(ZeroDivisionError), atomic_write(path):
            raise ZeroDivisionError
        assert content(path) in (old, new)
        assert os.listdir(tmp_path) == [name], (disk.at, call)
    assert {
        (call, fault) for call in ("mkdir", "open", "fsync", "replace", "rmdir") for fault in (errno.ENOSPC, "killed")
    } <= seen


@pytest.mark.parametrize("name", ["x", "x.folder"])
def test_an_error_in_the_block_leaves_the_old_content_and_no_draft(tmp_path, name):
    path = tmp_path / name
    for old in (None, "old"):
        if old:
            written(path, old)
        before = state(tmp_path)
        for error in (OSError, KeyboardInterrupt, Killed):
            with pytest.raises(error):
                half_written(path, error)
            assert state(tmp_path) == before
            assert len(os.listdir(tmp_path)) == bool(old)


@pytest.mark.parametrize("name", ["x", "x.folder"])
def test_files_are_synced_before_they_are_renamed(tmp_path, monkeypatch, name):
    log = []

    def sync(path):
        log.append(("sync", path.name))
        real(path)

    def replace(source, target):
        log.append(("replace", target.name))
        os.rename(source, target)

    real = _io.sync
    monkeypatch.setattr(_io, "sync", sync)
    monkeypatch.setattr(_io.os, "replace", replace)
    written(tmp_path / name, "new")
    parts = [("sync", "a"), ("sync", "b")] if name == "x.folder" else []
    assert sorted(log[: len(parts)]) == parts
    assert log[len(parts) :] == [("sync", name), ("replace", name), ("sync", tmp_path.name)]


def test_drafts_of_killed_processes_are_removed_and_others_are_kept(tmp_path):
    path = tmp_path / "x"
    draft = tmp_path / f".x.{'0' * 16}.tmp"
    draft.mkdir()
    (draft / "x").write_text("half")
    with subprocess.Popen([sys.executable, "-c", HOLD, draft], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as held:
        try:
            assert held.stdout.readline() == b"held\n"
            written(path, "new")
            assert sorted(tmp_path.iterdir()) == [draft, path]
        finally:
            held.kill()
            held.communicate()
    others = [tmp_path / f".y.{'0' * 16}.tmp", tmp_path / ".x.mine.tmp"]
    for other in others:
        other.mkdir()
    with atomic_write(path) as mine:
        mine.write_text("newer")
        written(path, "newest")
        assert {*tmp_path.iterdir()} == {path, mine.parent, *others}
    assert {*tmp_path.iterdir()} == {path, *others}
    assert path.read_text() == "newer"


def test_a_draft_that_is_removed_before_it_is_locked_is_created_again(tmp_path, monkeypatch):
    path = tmp_path / "x"
    claim = _io._flock
    made = []

    def late(file, *, blocking=False):
        if blocking and len(made) < 3:
            made.append(file)
            _io._remove_stale(path)
        return claim(file, blocking=blocking)

    monkeypatch.setattr(_io, "_flock", late)
    written(path, "new")
    assert len(made) == 3
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_text() == "new"


def test_a_draft_is_private_and_has_the_suffix_of_its_path(tmp_path):
    with atomic_write(tmp_path / "x.png") as draft:
        assert draft.name == "x.png"
        assert draft.parent.stat().st_mode & 0o777 == 0o700
        draft.touch()


def test_older_files_are_sorted_by_their_numbers(tmp_path):
    for i in range(12):
        with atomic_write(tmp_path / "x", keep=12) as draft:
            draft.write_text(str(i))
    (tmp_path / "x.txt").touch()
    assert [path.read_text() for path in older_files(tmp_path / "x")] == [str(i) for i in reversed(range(11))]


# Locks.


def test_a_lock_is_held_once_and_until_it_is_closed_or_deleted(tmp_path):
    path = tmp_path / "lock"
    lock = FileLock(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(BlockingIOError):
        FileLock(path)
    lock.close()
    lock.close()
    again = FileLock(path)
    with pytest.raises(BlockingIOError):
        FileLock(path)
    del again
    path.chmod(0o666)
    lock = FileLock(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="No such file"):
        FileLock(tmp_path / "none" / "lock")


def test_a_failed_lock_leaves_no_descriptor(tmp_path):
    lock = FileLock(tmp_path / "lock")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(BlockingIOError):
            FileLock(tmp_path / "lock")
    assert len(os.listdir("/proc/self/fd")) == before
    lock.close()


def test_a_file_system_without_lock_support_grants_all_locks(tmp_path, monkeypatch):
    def unsupported(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(_io.fcntl, "flock", unsupported)
    one, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert one is not other
    draft = tmp_path / f".x.{'0' * 16}.tmp"
    draft.mkdir()
    written(tmp_path / "x", "new")
    # The draft may be in use, because its lock cannot be tested.
    assert sorted(tmp_path.iterdir()) == [draft, tmp_path / "lock", tmp_path / "x"]


FORK = """
import os, sys, time
from pathlib import Path
from manifoldagg._io import FileLock
lock = FileLock(Path(sys.argv[1]))
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
time.sleep(60)
"""


def test_a_forked_child_does_not_hold_the_lock_of_its_killed_parent(tmp_path):
    path = tmp_path / "lock"
    command = [sys.executable, "-c", FORK, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        try:
            with pytest.raises(BlockingIOError):
                FileLock(path)
            parent.kill()
            parent.wait()
            os.kill(child, 0)
            FileLock(path).close()
        finally:
            os.kill(child, 9)
