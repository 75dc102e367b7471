"""Ctrl-C at a command: it leaves at once where nothing is under way, and unwinds where there is something to undo."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

__all__ = ["leave_at_once", "unwinding"]

INTERRUPTED = 130
"""The exit code of what Ctrl-C ended: 128 and the number of the signal."""


class Interrupt(KeyboardInterrupt):
    """Ctrl-C in a block that unwinds. (A plain one that passes through an `exec` makes Python end by the signal.)"""


def leave(*_: object) -> NoReturn:
    """Say so and end the process, wherever it is: in the middle of an import too, where an exception would get lost."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def leave_at_once() -> None:
    """From now on Ctrl-C leaves; a process that was started to ignore it, in the background, goes on doing so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def interrupt(*_: object) -> NoReturn:
    """Raise where the process is."""
    raise Interrupt


@contextmanager
def unwinding(said: str | Callable[[], str] = "interrupted") -> Iterator[None]:
    """In this block Ctrl-C is a `KeyboardInterrupt`, and a polite kill unwinds too: neither leaves half a file.

    Once all is undone, `said`, or what it says then, goes to stderr, and the process ends as one does that was
    interrupted.

    Example:
        >>> with unwinding():
        ...     signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)
        Traceback (most recent call last):
            ...
        SystemExit: 143
    """
    outside = signal.getsignal(signal.SIGINT)
    terminate = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if outside is leave:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        print(said if isinstance(said, str) else said(), file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)
    finally:
        signal.signal(signal.SIGINT, outside)
        signal.signal(signal.SIGTERM, terminate)
