"""Signal handling of the commands: exit immediately by default, and unwind the stack inside `graceful_shutdown`."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["exit_on_sigint", "graceful_shutdown"]

SIGINT_EXIT_CODE = 130
"""The exit code after Ctrl-C: 128 plus the number of the signal."""
FINALISER_DELAY = 0.01
"""The delay in seconds after which a signal is sent again if it arrived during a finaliser."""


class Interrupt(KeyboardInterrupt):
    """A SIGINT inside `graceful_shutdown`.

    If a plain `KeyboardInterrupt` passes through `exec`, Python ends the process by the signal.
    """


def exit_immediately(*_: object) -> NoReturn:
    """Print a message and end the process immediately, even during an import that would suppress an exception."""
    os.write(2, b"interrupted\n")
    os._exit(SIGINT_EXIT_CODE)


def exit_on_sigint() -> None:
    """Make SIGINT end the process immediately. A process that ignores SIGINT continues to ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_immediately)


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise `Interrupt`. Postpone it during a finaliser, which would suppress the exception."""
    if not _postpone_in_finaliser(number, frame):
        raise Interrupt


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Raise `SystemExit`. Postpone it during a finaliser, which would suppress the exception."""
    if not _postpone_in_finaliser(number, frame):
        sys.exit(128 + number)


def _postpone_in_finaliser(number: int, frame: FrameType | None) -> bool:
    """Return whether a finaliser is running. If it is, send the signal again after `FINALISER_DELAY`."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    if frame is not None:
        import threading  # not at the start, because Ctrl-C can interrupt every import

        threading.Timer(FINALISER_DELAY, os.kill, (os.getpid(), number)).start()
    return frame is not None


@contextmanager
def graceful_shutdown(message: str | Callable[[], str] = "interrupted") -> Iterator[None]:
    """Raise exceptions on SIGINT and SIGTERM in this block, so that cleanup code runs and no file is partially written.

    After the cleanup for a SIGINT, the process prints a message to stderr and ends with exit code 130. After a SIGTERM
    it ends with exit code 143.

    Args:
        message: the message, or a function that returns it.

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
