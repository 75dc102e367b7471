"""Signal handling of the commands: immediate exit while idle, and unwinding while there is work to undo."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["exit_on_sigint", "graceful_shutdown"]

SIGINT_EXIT_CODE = 130
"""The exit code of what Ctrl-C ended: 128 and the number of the signal."""
FINALISER_DELAY = 0.01
"""Seconds in which a finaliser is over."""


class Interrupt(KeyboardInterrupt):
    """SIGINT in an unwinding block. (A plain KeyboardInterrupt through an `exec` makes Python end by the signal.)"""


def exit_immediately(*_: object) -> NoReturn:
    """Print a message and end the process at once, also during an import that would swallow an exception."""
    os.write(2, b"interrupted\n")
    os._exit(SIGINT_EXIT_CODE)


def exit_on_sigint() -> None:
    """Make SIGINT end the process; a process that was started to ignore SIGINT continues to ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_immediately)


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise `Interrupt`; within a finaliser, which would swallow it, raise it soon after."""
    if not _postpone_in_finaliser(number, frame):
        raise Interrupt


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    """End the process at once; within a finaliser, end it soon after."""
    if not _postpone_in_finaliser(number, frame):
        sys.exit(128 + number)


def _postpone_in_finaliser(number: int, frame: FrameType | None) -> bool:
    """Whether the process is in a finaliser; the signal comes again then."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    if frame is not None:
        import threading  # whose import at the start would be one more that Ctrl-C may meet

        threading.Timer(FINALISER_DELAY, os.kill, (os.getpid(), number)).start()
    return frame is not None


@contextmanager
def graceful_shutdown(message: str | Callable[[], str] = "interrupted") -> Iterator[None]:
    """Raise `KeyboardInterrupt` on SIGINT and unwind on SIGTERM in this block, without partially written files.

    Once all is undone, `message`, or what it says then, goes to stderr, and the process ends as one does that was
    interrupted.

    Example:
        >>> with graceful_shutdown():
        ...     signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)
        Traceback (most recent call last):
            ...
        SystemExit: 143
    """
    outside = signal.getsignal(signal.SIGINT)
    before = signal.signal(signal.SIGTERM, exit_on_signal)
    if outside is exit_immediately:
        signal.signal(signal.SIGINT, raise_interrupt)
    try:
        yield
    except KeyboardInterrupt:
        print(message if isinstance(message, str) else message(), file=sys.stderr, flush=True)
        sys.exit(SIGINT_EXIT_CODE)
    finally:
        signal.signal(signal.SIGINT, outside)
        signal.signal(signal.SIGTERM, before)
