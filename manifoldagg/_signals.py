"""Signal handling of the command line: SIGINT (Ctrl-C) ends the process immediately, or after cleanup.

The cleanup runs only if the signal arrives inside `graceful_shutdown`.
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
    """Exception for a SIGINT inside `graceful_shutdown`.

    A plain `KeyboardInterrupt` cannot replace this class: if one passes through `exec`, Python ends the process by the
    signal.
    """


def exit_immediately(*_: object) -> NoReturn:
    """Print a message and end the process immediately.

    Raising an exception would be less reliable, because an import in progress can suppress it.
    """
    os.write(2, b"interrupted\n")
    os._exit(SIGINT_EXIT_CODE)


def exit_on_sigint() -> None:
    """Make SIGINT end the process immediately, unless the process ignores SIGINT or has its own handler."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_immediately)


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    """Raise `Interrupt`. During a finaliser (`__del__`), which would suppress the exception, raise it later."""
    if not _postpone_in_finaliser(number, frame):
        raise Interrupt


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Raise `SystemExit`. During a finaliser (`__del__`), which would suppress the exception, raise it later."""
    if not _postpone_in_finaliser(number, frame):
        sys.exit(128 + number)


def _postpone_in_finaliser(number: int, frame: FrameType | None) -> bool:
    """Return whether a finaliser is running. If so, send the signal again after `FINALISER_DELAY` seconds."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    if frame is not None:
        import threading  # not at the top of the module, because Ctrl-C can interrupt any import

        threading.Timer(FINALISER_DELAY, os.kill, (os.getpid(), number)).start()
    return frame is not None


@contextmanager
def graceful_shutdown(message: str | Callable[[], str] = "interrupted") -> Iterator[None]:
    """Raise an exception on SIGINT or SIGTERM in the `with` block, so that cleanup code runs before the process ends.

    Without the cleanup, a signal could leave a file partially written. After the cleanup:

    - For SIGINT, the process prints `message` to stderr and ends with exit code 130.
    - For SIGTERM, the process ends with exit code 143.

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
