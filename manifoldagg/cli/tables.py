"""The table layout of all commands."""

from collections.abc import Iterable

from rich import box
from rich.table import Table
from rich.text import Text

__all__ = ["fold_names", "new_table"]


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
