"""Consoles for results and errors, warnings on one line, and the exception for usage errors."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

from manifoldagg.errors import StabilityWarning

__all__ = ["UsageError", "console", "error_console", "stability_warnings"]

console = Console()
error_console = Console(stderr=True, highlight=False)

UsageError: Any = next(kind for kind in typer.BadParameter.__mro__[::-1] if hasattr(kind, "format_message"))
"""The exception that typer raises for invalid arguments. Depending on the version, it is defined by typer or click."""


@contextmanager
def stability_warnings() -> Iterator[None]:
    """Print each different `StabilityWarning` once, as one line on stderr."""
    printed: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *place: Any, **others: Any) -> None:
        if not issubclass(category, StabilityWarning):
            show_other(message, category, *place, **others)
        elif str(message) not in printed:
            printed.add(str(message))
            error_console.print(f"warning: {message}", highlight=False, markup=False, soft_wrap=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", StabilityWarning)
        show_other, warnings.showwarning = warnings.showwarning, show
        yield
