"""The command `manifoldagg report`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from manifoldagg._signals import graceful_shutdown
from manifoldagg._validation import check_choice
from manifoldagg.cli._console import console, fold_names, new_table
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.combined_report import FILES, CombinedReport, load_reports, write_combined_report
from manifoldagg.experiments.report import check_destination
from manifoldagg.experiments.sweep import write_sweep
from manifoldagg.simulation.cost import AXES

__all__ = ["report_command", "report_tables"]


def report_command(
    folders: Annotated[list[Path], typer.Argument(show_default=False)],
    axis: str = "updates",
    baseline: str | None = None,
    proposed: str | None = None,
    sweep: str | None = None,
    out: Path = Path("combined"),
) -> None:
    """Combine comparisons into one report, with confidence intervals of the differences.

    The report contains the accuracy at the end of the runs, and the accuracy at equal cost. The equal cost is the
    largest cost that all methods of the problem reached. Costs are virtual time, computed gradients and sent bytes.
    With at least 15 pairs of problem and seed, methods are compared by Wilcoxon's signed-rank test with Holm's
    correction.

    The report also contains the time to 95 % of the lowest final accuracy, relative to --baseline or FedAvg. Runs that
    never reach this target are counted as censored.

    The command prints a table for each problem and writes `report.md`, `report.tex`, `table.csv`, `pairs.csv`,
    `baseline.csv` (with --baseline), `relative_time.csv`, `one_sided.csv` (with --proposed), and plots of accuracy and
    of clients.

    With --sweep, the command writes only `sweep.csv` and `sweep.png`: the final accuracy of each method by the value of
    an option, with 95 % intervals over the seeds.

    Example: `manifoldagg report runs/digits runs/mnist --axis gradients --out combined`

    Args:
        folders: Reports of `manifoldagg compare`.
        axis: The cost axis of the plots and of the comparison at equal cost: `updates`, `time`, `gradients`, `bytes`.
        baseline: The name of a method in the reports with which all other methods are compared, by seed and on all
            axes. Times to a common target are relative to this method, or to FedAvg without this option.
        proposed: The name of a method that was chosen before the runs. One-sided tests compare it with every other
            method.
        sweep: An option in which the comparisons differ, such as `concurrency`, `partition.concentration`, or `epochs`
            of the methods. The command then only draws the final accuracy by the value of this option.
        out: The folder of the combined report. An existing combined report is replaced.
    """
    check_choice("axis", axis, AXES)
    if sweep is not None:
        return _report_sweep(folders, sweep, out, baseline or proposed)
    with graceful_shutdown("interrupted: nothing was written"):
        check_destination(out, FILES, option="out")
        joined = load_reports(folders)
        files = write_combined_report(joined, out, axis=axis, baseline=baseline, proposed=proposed)
    for grid in report_tables(joined):
        console.print(grid)
    for note in joined.notes:
        console.print(f"Settings differ: {note}", highlight=False, markup=False, soft_wrap=True)
    _print_files(out, files)


def _report_sweep(folders: list[Path], option: str, out: Path, compared: str | None) -> None:
    if compared is not None:
        raise ArgumentError("sweep: expected no --baseline and no --proposed with --sweep")
    with graceful_shutdown("interrupted: nothing was written"):
        frame, files = write_sweep(folders, option, out)
    values = sorted(frame["value"].unique())
    grid = new_table("method", *(f"{value:g}" for value in values), title=Text(option), caption="final accuracies in %")
    for method, rows in frame.groupby("method", sort=False):
        found = dict(zip(rows["value"], rows["mean"], strict=True))
        grid.add_row(Text(str(method)), *(f"{100 * found[x]:.1f}" if x in found else "" for x in values))
    console.print(grid)
    _print_files(out, files)


def _print_files(out: Path, files: Iterable[Path]) -> None:
    names = ", ".join(file.name for file in files)
    console.print(f"Written to {out}: {names}", highlight=False, markup=False, soft_wrap=True)


def report_tables(combined: CombinedReport) -> Iterable[Table]:
    """Format a table for each problem, with the final accuracy and the accuracy at equal cost."""
    for problem in combined.runs:
        frame = combined.table(problem)
        shown = [name for name in frame if name == "method" or name.endswith(", %") or name.startswith("updates to")]
        frame = frame[shown]
        heads = [head.replace(", %", "").replace("at ", "at\n").replace(" to ", "\nto ") for head in frame.columns]
        grid = new_table(*heads, title=Text(problem), caption="accuracies in %, means with their 95 % intervals")
        fold_names(grid, frame["method"])
        for method, *cells in frame.itertuples(index=False):
            grid.add_row(Text(method), *cells)
        yield grid
