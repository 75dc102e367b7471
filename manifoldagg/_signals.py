"""Signal handlers of the command line for SIGINT (Ctrl-C) and SIGTERM.

By default, SIGINT ends the process immediately. Inside a `graceful_shutdown` block, SIGINT and SIGTERM raise an
exception instead, so that cleanup code runs before the process ends.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["exit_on_sigint", "graceful_shutdown"]

SIGINT_EXIT_CODE = 130
"""The exit code after Ctrl-C: 128 plus 2, the number of SIGINT."""
FINALISER_DELAY = 0.01
"""The delay in seconds after which a signal is sent again if it arrived during a finaliser."""


class Interrupt(KeyboardInterrupt):
    """The subclass of `KeyboardInterrupt` that SIGINT raises inside a `graceful_shutdown` block.

    With this subclass, the program can choose its exit code. In contrast, Python can ignore the exit code after a plain
    `KeyboardInterrupt`, and end the process with the signal SIGINT. This happens if the exception has propagated out of
    the built-in function `exec`.
    """


def exit_immediately(*_: object) -> NoReturn:
    """Print a message and end the process immediately."""
    # If SIGINT arrives during an import, the imported code could catch an exception and continue.
    os.write(2, b"interrupted\n")
    os._exit(SIGINT_EXIT_CODE)


def exit_on_sigint() -> None:
    """Make SIGINT end the process immediately.

    If the process ignores SIGINT or has installed its own handler, the function changes nothing.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_immediately)


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise `Interrupt`, but not before a running finaliser (`__del__`) has ended."""
    if not _postpone_in_finaliser(number, frame):
        raise Interrupt


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Raise `SystemExit`, but not before a running finaliser (`__del__`) has ended."""
    if not _postpone_in_finaliser(number, frame):
        sys.exit(128 + number)


def _postpone_in_finaliser(number: int, frame: FrameType | None) -> bool:
    """Return whether a finaliser is running. In this case, schedule the same signal again."""
    # A finaliser suppresses all exceptions, so a signal handler must not raise one there.
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    if frame is not None:
        import threading  # not at the top of the module, because Ctrl-C can interrupt any import

        threading.Timer(FINALISER_DELAY, os.kill, (os.getpid(), number)).start()
    return frame is not None


@contextmanager
def graceful_shutdown(message: str | Callable[[], str] = "interrupted") -> Iterator[None]:
    """Run cleanup code before SIGINT or SIGTERM ends the process.

    Each of these signals raises an exception in the `with` block. The `finally` clauses and context managers of the
    block then run, and can for example remove partially written files. Afterwards, the process ends:

    - After SIGINT, it prints `message` to stderr, and its exit code is 130.
    - After SIGTERM, its exit code is 143.

    Args:
        message: the message for SIGINT, or a function that returns the message.

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
