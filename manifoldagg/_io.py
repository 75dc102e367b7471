"""Atomic writes, file locks, and matplotlib figures that do not use pyplot's global state."""

import errno
import glob
import os
import shutil
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError, CheckpointError, ManifoldAggError

if sys.platform != "win32":
    import fcntl

__all__ = [
    "FileLock",
    "atomic_write",
    "check_matplotlib",
    "check_path",
    "close_with",
    "new_figure",
    "older_files",
    "os_errors",
    "sync",
    "write_all",
]

CHUNK_BYTES = 2**20
"""The number of bytes that `write_all` processes at a time, so that a chunk is still in the CPU cache when written."""
DRAFT_SUFFIX = ".tmp"
REPLACED_SUFFIX = ".replaced"
NO_LINK_ERRNOS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Error numbers of file systems without hard links."""
FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_CLOSERS: "dict[int, weakref.finalize[..., Any]]" = {}
"""The closing function of each file descriptor, as last returned by `close_with`."""


@contextmanager
def atomic_write(path: Path, *, keep: int = 1, is_synced: bool = False) -> Iterator[Path]:
    """Replace a file or folder with new content that the `with` block writes to a temporary path, the draft.

    When the block ends, the function syncs the draft to the disk and moves it to `path`. If the block raises an
    exception, the function removes the draft, and `path` does not change.

    - The replacement of a file is atomic. Even after a crash, a reader finds either the old file or the new file.
    - The replacement of a folder takes two renames. If the process is killed between them, the folder is missing until
      the next call for the same path restores it.
    - If the process is killed inside the block, the next call for the same path removes the draft.

    Args:
        path: the path of the file or folder to replace.
        keep: the number of files to keep. The latest file is `path`, and older files are `path.1`, `path.2`, …
        is_synced: whether the block syncs the draft itself, through the file descriptor that it wrote with. The
            operating system may report write errors only to this descriptor.

    Raises:
        OSError: if the draft cannot be created, synced or renamed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "numbers.txt"
        ...     with atomic_write(path) as draft:
        ...         _ = draft.write_text("1 2 3")
        ...     path.read_text(), len(os.listdir(folder))
        ('1 2 3', 1)
    """
    _remove_stale(path)
    with _draft_folder(path) as folder:
        draft = folder / path.name
        yield draft
        if not is_synced:
            for part in [*draft.rglob("*"), draft]:
                sync(part)
        _rotate(path, keep, folder)
        replaced = folder / f"{path.name}{REPLACED_SUFFIX}"
        try:
            if path.is_dir():  # A rename cannot replace a folder that is not empty.
                os.replace(path, replaced)
            os.replace(draft, path)
        finally:
            _restore(replaced, path)
        sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file or a folder to the disk, if the system supports it.

    Raises:
        OSError: if the file or folder cannot be synced.
    """
    is_folder = path.is_dir()
    if is_folder and not hasattr(os, "O_DIRECTORY"):
        return
    file = os.open(path, FOLDER_FLAGS if is_folder else os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def older_files(path: Path) -> list[Path]:
    """Return the older versions of a file, from newest to oldest.

    The function `atomic_write` keeps older versions next to the file, as `path.1`, `path.2` and so on.
    """
    found = [name for name in path.parent.glob(f"{glob.escape(path.name)}.*") if name.suffix[1:].isdecimal()]
    return sorted(found, key=lambda name: int(name.suffix[1:]))


def check_path(path: str | Path) -> Path:
    """Check that `path` is the path of a file in an existing folder. The file itself need not exist.

    Returns:
        The absolute path, with symbolic links resolved.

    Raises:
        ArgumentError: if the parent folder does not exist, or if the path is a folder.
    """
    if not isinstance(path, str | Path):
        raise ArgumentError(f"path: expected a path, got {short_repr(path)}")
    place = Path(os.path.realpath(path))
    if not place.parent.is_dir() or place.is_dir():
        raise ArgumentError(f"path: expected the path of a file in an existing folder, got {short_repr(str(path))}")
    return place


@contextmanager
def os_errors(message: str, kind: type[ManifoldAggError] = CheckpointError) -> Iterator[None]:
    """Replace an `OSError` in the `with` block by an error of the given kind whose text begins with `message`."""
    try:
        yield
    except OSError as error:
        raise kind(f"{message}: {error.strerror or error}") from error


def write_all(write: Callable[[memoryview], int], data: memoryview, checksum: int) -> int:
    """Write all of `data`, even if each system call writes only a part of it.

    Args:
        write: a function that writes bytes to a file, and returns the number of bytes that it has written.
        data: the bytes to write.
        checksum: the CRC-32 of the bytes that precede `data`, or 0 if there are none.

    Returns:
        The CRC-32 of the preceding bytes and `data`.

    Example:
        >>> import io
        >>> write_all(io.BytesIO().write, memoryview(b"abc"), 0) == zlib.crc32(b"abc")
        True
    """
    for start in range(0, len(data), CHUNK_BYTES):
        piece = data[start : start + CHUNK_BYTES]
        checksum = zlib.crc32(piece, checksum)
        while piece:
            piece = piece[write(piece) :]
    return checksum


class FileLock:
    """An exclusive lock on a file, which is held until the object is closed or deleted.

    - The constructor creates the lock file with mode 0600. The file remains after the lock is released.
    - If the process is killed, the operating system releases the lock.
    - A child process of `os.fork` does not inherit the lock.
    - If the file system does not support locks, the constructor succeeds without locking the file.

    Raises:
        BlockingIOError: if another process or another lock of this process has locked the file.
        OSError: if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        # If the code below raises an exception, Python deletes this object, and the deletion closes the file.
        self._close = close_with(self, file)
        with suppress(OSError):
            os.chmod(path, 0o600)  # With another mode, other users could lock the file.
        _flock(file)

    def close(self) -> None:
        self._close()


def close_with(owner: object, file: int) -> "weakref.finalize[..., Any]":
    """Close a file descriptor automatically when the object `owner` is deleted.

    In a child process of `os.fork`, the descriptor refers to the null device instead of the file. The child therefore
    neither keeps a lock on the file nor writes to it.

    Returns:
        A function that closes the descriptor earlier.
    """
    close = weakref.finalize(owner, _close, file)
    # At the end of the process, threads and `atexit` functions may still write to the descriptor. If it were closed, a
    # file that is opened later could get the same number and receive these writes.
    close.atexit = False
    _CLOSERS[file] = close
    return close


def check_matplotlib() -> None:
    """Check that matplotlib is installed.

    Raises:
        ArgumentError: if matplotlib is missing. The message contains the command to install it.
    """
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ArgumentError(
            "plots: expected matplotlib to be installed: pip install 'manifoldagg[experiments]'"
        ) from None


def new_figure(width: float = 6.4, height: float = 4.8) -> Any:
    """Create a matplotlib figure that needs no display and does not use pyplot's global state.

    Args:
        width: the width in inches.
        height: the height in inches.

    Raises:
        ArgumentError: if matplotlib is missing.

    Example:
        >>> from matplotlib import pyplot
        >>> axes = new_figure().subplots()
        >>> pyplot.get_fignums()
        []
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


@contextmanager
def _draft_folder(path: Path) -> Iterator[Path]:
    """Create a locked folder next to `path`, and remove the folder afterwards."""
    folder = path.with_name(f".{path.name}.{os.urandom(8).hex()}{DRAFT_SUFFIX}")
    lock = -1
    try:
        while lock < 0:
            os.mkdir(folder, 0o700)
            lock = _lock_folder(folder)
        yield folder
    finally:
        _remove(folder)
        if lock >= 0:
            os.close(lock)


def _lock_folder(folder: Path) -> int:
    """Lock a new folder, and return its file descriptor.

    The result is -1 if another process removed the folder before this process locked it.
    """
    if sys.platform == "win32":  # Windows does not open folders.
        return os.open(os.devnull, os.O_RDONLY)
    try:
        file = os.open(folder, FOLDER_FLAGS)
    except FileNotFoundError:
        return -1
    _flock(file, blocking=True)
    if os.path.isdir(folder):
        return file
    os.close(file)
    return -1


def _remove_stale(path: Path) -> None:
    """Clean up after earlier processes that were killed while they replaced `path`."""
    for folder in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 16}{DRAFT_SUFFIX}"):
        # Another process may have removed the draft or may be using it, or the access may not be permitted.
        with suppress(OSError):
            file = os.open(folder, FOLDER_FLAGS)
            try:
                if _flock(file):
                    # If the process was killed between its two renames, the draft folder contains the old folder.
                    _restore(folder / f"{path.name}{REPLACED_SUFFIX}", path)
                    _remove(folder)
            finally:
                os.close(file)


def _restore(replaced: Path, path: Path) -> None:
    """Move a folder back to its original path, unless this path exists again."""
    if replaced.exists() and not path.exists():
        os.replace(replaced, path)


def _remove(folder: Path) -> None:
    try:
        os.rmdir(folder)
    except OSError:  # The folder is not empty after an error.
        shutil.rmtree(folder, ignore_errors=True)


def _flock(file: int, *, blocking: bool = False) -> bool:
    """Lock an open file exclusively until its descriptor is closed.

    Returns:
        Whether the file is locked. The result is `False` if the system does not support locks.

    Raises:
        BlockingIOError: if `blocking` is not set and the file is already locked.
    """
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _rotate(path: Path, keep: int, folder: Path) -> None:
    """Rename `path.1` to `path.2` and so on, then create `path.1` as a hard link to `path`."""
    latest = _backup_path(path, 1)
    if keep == 1 or not path.exists() or (latest.exists() and path.samefile(latest)):
        return
    for i in range(keep - 1, 1, -1):
        if _backup_path(path, i - 1).exists():
            os.replace(_backup_path(path, i - 1), _backup_path(path, i))
    link = folder / latest.name
    # With a hard link, the file also remains at `path`. If the file system has no hard links, `path.1` is a copy.
    try:
        os.link(path, link)
    except OSError as error:
        if error.errno not in NO_LINK_ERRNOS:
            raise
        os.close(os.open(link, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        shutil.copyfile(path, link)
    os.replace(link, latest)


def _backup_path(path: Path, i: int) -> Path:
    return path.with_name(f"{path.name}.{i}")


def _close(file: int) -> None:
    with suppress(OSError):
        os.close(file)


def _release_in_child() -> None:
    # The number of each descriptor stays in use, so that the child cannot write to another file by mistake.
    null = os.open(os.devnull, os.O_RDWR)
    for file, close in _CLOSERS.items():
        if close.alive:
            os.dup2(null, file, inheritable=False)
    os.close(null)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
