"""Tests of restarts of a merge: after a kill at any write, the same call produces the same files."""

import errno
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from manifoldagg.averaging import merge, merge_journal, plan_merge
from manifoldagg.averaging.merge_journal import MergeDraft
from manifoldagg.errors import ArgumentError, BusyError, CheckpointError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
CALLS = ("pwrite", "write", "fsync", "link", "replace", "mkdir", "unlink", "rmdir", "ftruncate", "posix_fallocate")
"""The system calls that change files."""


def save_models(folder, k=3):
    paths = []
    for i in range(k):
        generator = torch.Generator().manual_seed(i)
        base = torch.randn(700, 5, generator=torch.Generator().manual_seed(99))
        state = {name: base + 0.1 * torch.randn(700, 5, generator=generator) for name in ("a", "b", "c")}
        state |= {"ids": torch.arange(9), "n.num_batches_tracked": torch.tensor(i)}
        paths.append(folder / f"in{i}.safetensors")
        save_file({name: x.bfloat16() if x.is_floating_point() else x for name, x in state.items()}, paths[-1])
    return paths


@pytest.fixture
def small_cells(monkeypatch):
    """Reduce the sizes of cells and batches, so that small tensors need many steps and syncs."""
    monkeypatch.setattr("manifoldagg.averaging.merge_plan.CELL_SIZE", 1 << 10)
    monkeypatch.setattr(merge_journal, "BATCH_BYTES", 3000)


def contents(path):
    """Return the bytes of each file of a folder, or of a file and its certificate."""
    if path.is_dir():
        return {file.name: file.read_bytes() for file in sorted(path.iterdir())}
    certificate = path.with_suffix(".certificate.json")
    return {name: file.read_bytes() for name, file in (("model", path), ("certificate", certificate))}


def killed_at(budget, call):
    """Run a call in a child process that exits at its n-th change of a file. Return whether it exited early.

    The last write writes only half of its bytes.
    """
    child = os.fork()
    if child == 0:
        left = [budget]
        try:
            for name in CALLS:
                patch(name, left)
            call()
        except BaseException:
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9), f"the merge raised an error after {budget} changes"
    return code == 9


def patch(name, left):
    real = getattr(os, name)

    def counted(*args, **options):
        left[0] -= 1
        if left[0] < 0:
            if name in ("pwrite", "write"):
                half = memoryview(args[1])[: len(args[1]) // 2]
                real(args[0], half, *args[2:])
            os._exit(9)
        return 0 if name == "fsync" else real(*args, **options)

    setattr(os, name, counted)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("out.safetensors", {"method": "karcher", "scope": "model"}),
        ("out.safetensors", {"method": "arithmetic"}),
        ("out", {"method": "karcher", "shard_size": 8000}),
    ],
)
def test_a_merge_that_is_killed_at_any_change_of_a_file_continues(tmp_path, small_cells, name, options):
    paths = save_models(tmp_path)
    expected_place = tmp_path / "expected"
    expected_place.mkdir()
    merge(paths, out=expected_place / name, **options)
    expected = contents(expected_place / name)
    place = tmp_path / "killed"
    budget, kills = 0, 0
    while True:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        if not killed_at(budget, lambda: merge(paths, out=place / name, **options)):
            break
        kills += 1
        if (place / name).exists():  # A visible result must be complete.
            assert contents(place / name) == expected
        # The second run is killed as well, at another call.
        killed_at(budget // 2 + 3, lambda: merge(paths, out=place / name, **options))
        merge(paths, out=place / name, **options)
        assert contents(place / name) == expected
        assert not [file for file in place.iterdir() if file.name.startswith(".")]
        budget += 1 if budget < 12 else 4
    assert kills > 12
    assert contents(place / name) == expected


def interrupt(paths, out, **options):
    """Stop a merge after some steps, and return the number of completed steps."""
    steps = []

    def stop(done, total):
        steps.append(done)
        if len(steps) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(paths, out=out, progress=stop, **options)
    return len(steps)


def test_a_restart_repeats_only_the_steps_of_the_last_batch(tmp_path, small_cells, monkeypatch):
    paths = save_models(tmp_path)
    monkeypatch.setattr(merge_journal, "BATCH_BYTES", 1)
    interrupt(paths, tmp_path / "out.safetensors")
    plan = plan_merge(paths, out=tmp_path / "out.safetensors")
    with MergeDraft(plan, resume=True) as draft:
        assert len(draft.records) >= 7
    written = []
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: written.append(len(data)) or real(file, data, at))
    merge(paths, out=tmp_path / "out.safetensors")
    assert sum(written) < plan.bytes_written / 2


def test_another_command_does_not_continue_an_unfinished_merge(tmp_path, small_cells):
    paths = save_models(tmp_path)
    out = tmp_path / "out.safetensors"
    interrupt(paths, out)
    with pytest.raises(ArgumentError, match=r"^out: expected the inputs and options of the unfinished merge"):
        merge(paths, [1, 2, 3], out=out)
    merge(paths, [1, 2, 3], out=out, resume=False)
    merge(paths, [1, 2, 3], out=tmp_path / "other.safetensors")
    assert out.read_bytes() == (tmp_path / "other.safetensors").read_bytes()


def test_changed_inputs_are_rejected_after_a_restart_and_during_a_merge(tmp_path, small_cells):
    paths = save_models(tmp_path)
    out = tmp_path / "out.safetensors"
    interrupt(paths, out)
    os.utime(paths[1], ns=(1, 1))
    with pytest.raises(ArgumentError, match=r"^out: expected the inputs and options of the unfinished merge"):
        merge(paths, out=out)

    def touch(done, total):
        os.utime(paths[2], ns=(2, 2))

    with pytest.raises(CheckpointError, match=r"in2\.safetensors: expected an unchanged file during the call"):
        merge(paths, out=out, resume=False, progress=touch)
    assert not out.exists()


def test_a_corrupted_journal_is_truncated_at_the_first_invalid_record(tmp_path, small_cells):
    paths = save_models(tmp_path)
    merge(paths, out=tmp_path / "expected.safetensors", method="karcher")
    expected = (tmp_path / "expected.safetensors").read_bytes()
    out = tmp_path / "out.safetensors"
    for position in (0, 3, 200, -40, -1):
        interrupt(paths, out, method="karcher")
        journal = tmp_path / ".out.safetensors.merge" / "journal"
        data = bytearray(journal.read_bytes())
        data[position] ^= 0x11
        journal.write_bytes(data)
        merge(paths, out=out, method="karcher")
        assert out.read_bytes() == expected


def test_a_second_process_cannot_write_the_same_merge(tmp_path, small_cells):
    paths = save_models(tmp_path)
    plan = plan_merge(paths, out=tmp_path / "out.safetensors")
    with MergeDraft(plan, resume=True), pytest.raises(BusyError, match=r"^out: .* another process is writing"):
        merge(paths, out=tmp_path / "out.safetensors")
    plan.pool.close()


def test_too_little_disk_space_is_detected_before_writing(tmp_path, monkeypatch):
    paths = save_models(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 100, 100))
    monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("a byte was written"))
    with pytest.raises(ArgumentError, match=r"^out: expected [\d,]+ free bytes in .*, got 100$"):
        merge(paths, out=tmp_path / "out.safetensors")


def test_a_full_disk_leaves_an_unfinished_merge_that_continues(tmp_path, small_cells, monkeypatch):
    paths = save_models(tmp_path)
    out = tmp_path / "out.safetensors"
    real, calls = os.pwrite, []

    def full(*args):
        calls.append(args)
        if len(calls) > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="could not be written: No space left on device"):
        merge(paths, out=out)
    assert not out.exists()
    monkeypatch.setattr(os, "pwrite", real)
    merge(paths, out=out)
    assert load_file(out)["a"].shape == (700, 5)


def test_files_are_moved_if_hard_links_are_not_supported(tmp_path, monkeypatch):
    paths = save_models(tmp_path)
    merge(paths, out=tmp_path / "expected.safetensors")

    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    merge(paths, out=tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()
