"""The command `manifoldagg doctor`."""

from collections.abc import Iterable

from rich import box
from rich.table import Table

from manifoldagg._signals import graceful_shutdown
from manifoldagg.cli._console import console
from manifoldagg.kernels.backends.selection import describe_backends

__all__ = ["doctor_command", "kernel_table"]


def doctor_command() -> None:
    """Report which kernels work on this machine, which one is selected, and why.

    Builds the compiled kernels if they are not built yet, and times what there is.
    """
    with graceful_shutdown():
        rows = describe_backends()
    console.print(kernel_table(rows))


def kernel_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Format the status of each backend as a table."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("backend", no_wrap=True)
    grid.add_column("", overflow="fold")
    for name, words in rows:
        grid.add_row(name, words)
    return grid
