"""Files that store the progress of a merge of checkpoints, so that an interrupted merge can be resumed.

A journal records the completed steps. A restarted merge continues after the last recorded step.
"""

import json
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from manifoldagg._io import FileLock, atomic_write, os_errors, write_all
from manifoldagg.averaging.merge_plan import MergePlan
from manifoldagg.errors import ArgumentError, BusyError
from manifoldagg.tensor_file import tensor_bytes

__all__ = ["MergeDraft"]

BATCH_BYTES = 1 << 26
"""The number of written bytes after which the files and then the journal are synced."""


class MergeDraft:
    """The files of an unfinished merge, in a folder next to the path of the result.

    The folder contains the shards of the result, which have their final sizes from the start, and a journal. The
    journal begins with the plan of the merge. Each step writes its bytes to a shard. After the bytes of several steps
    are on the disk, records of these steps are appended to the journal.

    If the process is killed, a restarted merge continues after the last record in the journal. It therefore repeats
    only the steps that have no record yet. A repeated step writes the same bytes again.

    Args:
        plan: the plan.
        resume: whether to continue an interrupted merge. Otherwise the files of the interrupted merge are removed.

    Raises:
        ArgumentError: if the draft belongs to another plan, or the disk has too little free space.
        BusyError: if another process is writing this result.
        CheckpointError: if the system reports an error.
    """

    def __init__(self, plan: MergePlan, *, resume: bool) -> None:
        self.plan = plan
        # The draft is on the file system of the result, which hard links and atomic moves require.
        self.folder = plan.out.with_name(f".{plan.out.name}.merge")
        with os_errors(f"{self.folder}: could not be written"):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            try:
                self._lock = FileLock(self.folder / "lock")
            except BlockingIOError:
                raise BusyError(f"out: {plan.out}: another process is writing this merge") from None
        self.records: dict[int, np.ndarray] = {}
        self._files = ExitStack()
        self._descriptors: list[int] = []
        self._lines: list[bytes] = []
        self._dirty: set[int] = set()
        self._size = 0
        self._commit: Future[None] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="merge-sync")
        try:
            with os_errors(f"{self.folder}: could not be written"):
                self._open(resume)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "MergeDraft":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for running writes and close the files. The draft remains on the disk."""
        self._worker.shutdown()
        self._files.close()
        self._lock.close()

    def write(self, name: str, offset: int, values: Tensor) -> None:
        """Write bytes of a tensor of the result.

        Args:
            name: the name of the tensor.
            offset: the index of the first entry.
            values: the values of this entry and the following entries.
        """
        i, begin = self.plan.location(name)
        data = tensor_bytes(values)
        self._pwrite(i, data, begin + offset * values.itemsize)
        self._dirty.add(i)
        self._size += len(data)

    def record(self, step: int, numbers: Sequence[float]) -> None:
        """Record the result of a step, after all its bytes were written."""
        self.records[step] = np.array(numbers, np.float64)
        self._lines.append(_line(json.dumps([step, *map(float, numbers)], allow_nan=False).encode()))
        if self._size >= BATCH_BYTES:
            self.commit()

    def commit(self, *, wait: bool = False) -> None:
        """Sync all written data to the disk in the background.

        The files of the result are synced before the journal, which records the completed steps of the merge. The data
        of a recorded step are therefore always on the disk.

        Args:
            wait: whether to wait until the data are on the disk.
        """
        if self._commit is not None:
            self._commit.result()
        lines = b"".join(self._lines)
        dirty = [self._descriptors[i] for i in sorted(self._dirty)]
        self._lines = []
        self._dirty = set()
        self._size = 0
        self._commit = self._worker.submit(self._sync, lines, dirty)
        if wait:
            self._commit.result()

    def publish(self, certificate: str, extra: Mapping[str, bytes]) -> None:
        """Move the merged model to its final path, and remove the temporary files of the merge.

        - If the model is a single file, it replaces an older file atomically. The JSON file with its certificates (the
          accuracy of each averaged tensor) is written first, so a new model never lacks its certificates.
        - If the model is a folder, two renames replace an older folder. Between them, no folder exists at the path.

        If the process is killed during the move, a restarted merge moves the same files again.

        Args:
            certificate: the JSON text of the certificates.
            extra: the contents of the index and of the configurations by file name, for a result in a folder.

        Raises:
            CheckpointError: if the system reports an error.
        """
        self.commit(wait=True)
        with os_errors(f"{self.plan.out}: could not be written"):
            self._move(certificate, extra)
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _move(self, certificate: str, extra: Mapping[str, bytes]) -> None:
        # The result consists of hard links, so the draft stays complete until it is removed.
        files = {shard.name: self.folder / shard.name for shard in self.plan.shards}
        if self.plan.is_folder:
            with atomic_write(self.plan.out) as draft:
                draft.mkdir()
                for name, data in {**extra, self.plan.certificate_path.name: certificate.encode()}.items():
                    (draft / name).write_bytes(data)
                for name, path in files.items():
                    _link(path, draft / name)
        else:
            # The certificate is written first, so a new result never lacks its certificate.
            with atomic_write(self.plan.certificate_path) as draft:
                draft.write_text(certificate)
            with atomic_write(self.plan.out) as draft:
                _link(files[self.plan.out.name], draft)

    def _open(self, resume: bool) -> None:
        """Open or create the journal and the shards (the output files), and read the journal."""
        if not resume:
            self._clear()
        self._journal = self._open_file("journal", 0o600)
        found = self._read_journal()
        if found is not None and found != self.plan.fingerprint:
            raise ArgumentError(
                f"out: expected the inputs and options of the unfinished merge in {self.folder}, got others; "
                "repeat its command, or pass resume=False to start again"
            )
        # The unit of `st_blocks` is 512 bytes on every file system.
        present = sum(path.stat().st_blocks * 512 for path in self.folder.iterdir() if hasattr(os, "posix_fallocate"))
        self.plan.check_space(present)
        existing = [self._open_shard(i) for i in range(len(self.plan.shards))]
        if found is None or not all(existing):
            self.records.clear()
            os.ftruncate(self._journal, 0)
            os.lseek(self._journal, 0, os.SEEK_SET)
            self._lines = [_line(self.plan.fingerprint.encode())]

    def _clear(self) -> None:
        """Remove the files of an earlier merge."""
        # The journal is removed first, because a draft without a journal is not resumed. An interrupted removal
        # therefore leaves no draft that looks valid.
        for path in sorted(self.folder.iterdir(), key=lambda path: path.name != "journal"):
            if path.name != "lock":
                path.unlink()

    def _open_file(self, name: str, mode: int) -> int:
        """Open or create a file of the draft, which `close` closes. Return its descriptor."""
        descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT, mode)
        self._files.callback(os.close, descriptor)
        return descriptor

    def _open_shard(self, i: int) -> bool:
        """Open a shard, and return whether it already existed in its final size."""
        shard = self.plan.shards[i]
        path = self.folder / shard.name
        existed = path.exists() and path.stat().st_size == shard.size
        # The mode is 0666 without the bits of the umask, as for other new files.
        self._descriptors.append(self._open_file(shard.name, 0o666))
        if not existed:
            self._allocate(self._descriptors[i], shard.size)
        # A killed process may have written a part of the header. Writing the header again writes the same bytes.
        self._pwrite(i, memoryview(shard.header), 0)
        self._dirty.add(i)
        return existed

    def _allocate(self, file: int, size: int) -> None:
        """Reserve the space of a file, so that a full disk is reported before the first step."""
        if hasattr(os, "posix_fallocate"):
            try:
                # The final size is set last, because a file of this size is treated as complete.
                os.posix_fallocate(file, 0, max(size - 1, 1))
            except OSError as error:
                raise ArgumentError(f"out: expected {size:,} free bytes, got an error: {error.strerror}") from None
        os.ftruncate(file, size)

    def _read_journal(self) -> str | None:
        """Read the journal up to the first damaged record, and remove the rest.

        Returns:
            The fingerprint of the plan, or `None` if the journal is empty.
        """
        end = 0
        fingerprint = None
        # `open` closes its descriptor, so it gets a copy.
        with open(os.dup(self._journal), "rb") as file:
            for line in file:
                digest, _, text = line.rstrip(b"\n").partition(b" ")
                if not line.endswith(b"\n") or digest != b"%08x" % zlib.crc32(text):
                    break
                end += len(line)
                if fingerprint is None:
                    fingerprint = text.decode()
                    continue
                step, *numbers = json.loads(text)
                self.records[step] = np.array(numbers, np.float64)
        os.ftruncate(self._journal, end)
        os.lseek(self._journal, end, os.SEEK_SET)
        return fingerprint

    def _pwrite(self, i: int, data: memoryview, position: int) -> None:
        """Write bytes to a shard at a position.

        Raises:
            CheckpointError: if the system reports an error.
        """
        with os_errors(f"{self.folder}: could not be written"):
            # The system may write fewer bytes than requested.
            while data:
                count = os.pwrite(self._descriptors[i], data, position)
                data, position = data[count:], position + count

    def _sync(self, lines: bytes, dirty: Sequence[int]) -> None:
        """Sync the changed shards to the disk, and then append the lines to the journal."""
        with os_errors(f"{self.folder}: could not be written"):
            # A record must not reach the disk before the bytes that it describes.
            for descriptor in dirty:
                os.fsync(descriptor)
            write_all(partial(os.write, self._journal), memoryview(lines), 0)
            os.fsync(self._journal)


def _line(text: bytes) -> bytes:
    """Return a line of the journal, which consists of a checksum and the text."""
    # The checksum detects a line that a killed process has written only partially.
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _link(source: Path, target: Path) -> None:
    """Create a hard link to a file, or move the file if the file system does not support hard links."""
    try:
        os.link(source, target)
    except OSError:
        with suppress(FileNotFoundError):
            target.unlink()
        os.replace(source, target)
