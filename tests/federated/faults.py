"""Simulated faults of a disk: calls that fail, calls that write only a part, and processes that are killed."""

import errno
import os
from contextlib import suppress

CALLS = ("open", "fstat", "write", "lseek", "fsync", "link", "replace", "unlink", "mkdir", "rmdir", "close")
"""What is counted, in the order in which it comes. Everything else goes to the system as it is."""


class Killed(BaseException):
    """Exception that ends a simulated process. After it, the process does nothing."""


class Disk:
    """Replacement of the module `os` in which one call fails.

    Args:
        at: the index of the call that fails. If it is `None`, no call fails.
        fault: the kind of failure. With an errno, the call raises this error and has no effect. With `"short"`, the call
            writes half of its data, and later calls succeed. With `"killed"`, the process ends before the call. With
            `"torn"`, the process ends after the call has written half of its data.
    """

    def __init__(self, at=None, fault=None):
        self.at = at
        self.fault = fault
        self.log = []
        self.dead = False
        self._open = set()

    def __getattr__(self, name):
        call = getattr(os, name)
        return (lambda *given: self._call(name, call, given)) if name in CALLS else call

    def bury(self):
        """Release the files and locks of a simulated killed process, as the operating system does."""
        for file in self._open:
            with suppress(OSError):
                os.close(file)

    def _call(self, name, call, given):
        if self.dead:
            raise Killed
        number = len(self.log)
        self.log.append((name, *given))
        if number == self.at:
            if isinstance(self.fault, int):
                raise OSError(self.fault, os.strerror(self.fault))
            if name == "write" and self.fault in ("short", "torn"):
                done = call(given[0], given[1][: len(given[1]) // 2 or 1])
            if self.fault in ("killed", "torn"):
                self.dead = True
                raise Killed
            if name == "write":
                return done
        result = call(*given)
        if name == "open":
            self._open.add(result)
        elif name == "close":
            self._open.discard(given[0])
        return result


def each(run, faults=(errno.ENOSPC, errno.EACCES, "short", "killed", "torn")):
    """Yield a disk for every fault at every call that `run(disk)` makes, if the run does not finish.

    The files and locks of a killed process have already been released by `bury`.
    """
    sound = Disk()
    run(sound)
    for fault in faults:
        for at, (name, *_) in enumerate(sound.log):
            if fault in ("short", "torn") and name != "write":
                continue
            disk = Disk(at, fault)
            try:
                run(disk)
            except Killed:
                disk.bury()
            except Exception as error:
                yield disk, name, error
                continue
            yield disk, name, None
