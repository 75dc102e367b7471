"""The command `manifoldagg report`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from manifoldagg._signals import graceful_shutdown
from manifoldagg._validation import check_choice
from manifoldagg.cli._console import screen
from manifoldagg.cli.tables import fold_names, new_table
from manifoldagg.experiments.report_data import Joined, join
from manifoldagg.experiments.report_writer import FILES, cells, headings, write_summary
from manifoldagg.experiments.run_report import check_destination
from manifoldagg.simulation.cost import AXES

__all__ = ["joined_tables", "report_command"]


def report_command(
    folders: Annotated[list[Path], typer.Argument(help="Reports of `manifoldagg compare`.", show_default=False)],
    axis: Annotated[
        str,
        typer.Option(
            help="Along what accuracy is drawn, and on which equal terms methods are compared: `round`, `time`, "
            "`gradients`, `bytes`."
        ),
    ] = "round",
    against: Annotated[
        str | None,
        typer.Option(
            help="A method by its name in the reports: all others are put beside it, seed by seed and on all axes.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder to write; a joined report there is replaced.")] = Path("joined"),
) -> None:
    """Join comparisons into one table, and say how sure the differences are.

    Runs are read at their end and, on equal terms, where each had spent what all methods of the task reached: in
    virtual time, in gradients computed and in bytes sent. With 15 pairs of task and seed or more, methods are compared
    by Wilcoxon's signed-rank test with Holm's correction.

    Prints a table for each task and writes `report.md`, `table.csv`, `pairs.csv`, with --against `against.csv`, and
    pictures of accuracy and of clients.

    Example: `manifoldagg report runs/digits runs/mnist --axis gradients --out joined`
    """
    check_choice("axis", axis, AXES)
    with graceful_shutdown("interrupted: nothing was written"):
        check_destination(out, FILES, option="out")
        joined = join(folders)
        files = write_summary(joined, out, axis=axis, against=against)
    for grid in joined_tables(joined):
        screen.print(grid)
    for note in joined.notes:
        screen.print(f"Settings differ: {note}", highlight=False, markup=False, soft_wrap=True)
    names = ", ".join(file.name for file in files)
    screen.print(f"Written to {out}: {names}", highlight=False, markup=False, soft_wrap=True)


def joined_tables(joined: Joined) -> Iterable[Table]:
    """A table for each task: what methods were worth at their end, and on equal terms."""
    rows = joined.rows()
    for task in joined.runs:
        _, *heads = headings(joined, task)
        few = [head.replace(", %", "").replace("at ", "at\n").replace(" to ", "\nto ") for head in heads[:5]]
        grid = new_table(
            "method", *few, title=Text(task), caption="accuracies in %, means with their intervals of 95 %"
        )
        fold_names(grid, [row.method for row in rows])
        for row in rows:
            if row.task == task:
                grid.add_row(Text(row.method), *cells(row)[1:6])
        yield grid
