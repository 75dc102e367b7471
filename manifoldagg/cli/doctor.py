"""The command `manifoldagg doctor`."""

from collections.abc import Iterable
from importlib.util import find_spec

from rich import box
from rich.table import Table

from manifoldagg._signals import graceful_shutdown
from manifoldagg.cli._console import console
from manifoldagg.kernels.backends.selection import describe_backends

__all__ = ["doctor_command", "flower_status", "kernel_table"]


def doctor_command() -> None:
    """Report which kernel backends work on this machine, which one is selected, and why.

    If necessary, the command compiles the kernels first. If the backend is selected automatically, the command also
    measures one aggregation step with each CPU backend. If Flower is installed, it reports whether `flwr run` can run
    simulations.
    """
    with graceful_shutdown():
        rows = describe_backends()
    console.print(kernel_table(rows))
    status = flower_status()
    if status is not None:
        console.print(status, highlight=False, markup=False, soft_wrap=True)


def flower_status() -> str | None:
    """Report whether Flower can run simulations, or return `None` if Flower is not installed.

    Flower simulations require the package Ray.
    """
    if find_spec("flwr") is None:
        return None
    # Without Ray, Flower stops before it imports an app, so the app itself cannot report that Ray is missing.
    if find_spec("ray") is None:
        return "flwr: a simulation needs Ray, which is not installed; run pip install 'flwr[simulation]'"
    return "flwr: simulation works, because Ray is installed"


def kernel_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Format the status of each backend as a table."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("backend", no_wrap=True)
    grid.add_column("", overflow="fold")
    for name, words in rows:
        grid.add_row(name, words)
    return grid
