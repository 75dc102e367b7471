"""Consoles for results and errors, tables, warnings on one line, and the exception for usage errors."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from manifoldagg.errors import StabilityWarning

__all__ = ["UsageError", "console", "error_console", "fold_names", "new_table", "stability_warnings"]

# Names such as `module:key:option=1` must not become emoji.
console = Console(emoji=False)
error_console = Console(stderr=True, highlight=False, emoji=False)

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


def new_table(first: str, *numbers: str, title: str | Text | None = None, caption: str | None = None) -> Table:
    """Make a table whose first column is left-aligned and whose other columns are right-aligned."""
    grid = Table(first, title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in numbers:
        grid.add_column(heading, justify="right")
    return grid


def fold_names(grid: Table, methods: Iterable[str]) -> None:
    """Wrap long method names in a narrow terminal."""
    for column in grid.columns:
        column.no_wrap = True
    names = grid.columns[0]
    names.no_wrap = False
    names.overflow = "fold"
    names.min_width = min(11, max(map(len, methods)))
