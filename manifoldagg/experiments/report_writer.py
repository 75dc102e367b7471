"""Writer of a combined report: a table of all runs as Markdown and CSV, confidence intervals, and plots."""

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from manifoldagg._io import atomic_write
from manifoldagg._validation import check_choice
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.plots import axis_unit, draw_accuracy, draw_clients, format_percent
from manifoldagg.experiments.report_data import CombinedReport, PairedDifference, ReportRow
from manifoldagg.experiments.run_report import check_destination
from manifoldagg.experiments.statistics import MIN_PAIRS, MeanCI, PairedTest
from manifoldagg.simulation.cost import AXES

__all__ = ["FILES", "headings", "row_cells", "write_combined_report"]

FILES = ("report.md", "table.csv", "pairs.csv", "baseline.csv", "accuracy*.png", "clients*.png")
BUDGET_AXES = ("time", "gradients", "bytes")
"""Axes on which the table says what methods were worth where they had spent equally much."""
TABLE_NOTE = """\
Accuracies are those of the server's model on the held-out samples of all clients together, in percent: means over the
seeds with their intervals of 95 % (Student's t). *At* an amount, each run is read at its last evaluation that had spent
no more; it is the most that every run of the problem reached, and nothing is interpolated. *To* a target are means over
the runs that reached it. The last two columns are what a run had spent at its end, on average."""
TEST_NOTE = """\
Each pair of methods by Wilcoxon's two-sided signed-rank test on the common pairs of problem and seed, at {axis};
p-values after Holm's correction over all {count} tests. Differences are medians, in percentage points. Seeds of one
problem share its samples, so results over them may not hold on other data."""
BASELINE_NOTE = """\
Accuracy less that of {other}, in percentage points: means of the differences seed by seed, with their intervals of 95 %
(Student's t), where the runs of the two had spent equally much."""


def write_combined_report(
    combined: CombinedReport, folder: Path | str, *, axis: str = "updates", baseline: str | None = None
) -> list[Path]:
    """Write `report.md`, `table.csv`, `pairs.csv` and, for each problem, plots of accuracy and of clients.

    With `baseline` also `baseline.csv`.

    Args:
        combined: what was read.
        folder: made whole or not at all; a joined report that is there is replaced.
        axis: along which accuracy is drawn, and on which methods are compared.
        baseline: the method that all others are put beside, on every axis.

    Returns:
        The files.

    Raises:
        ArgumentError: if `folder` holds something else or cannot be written, `axis` is invalid, or no problem has
            the method `baseline`.
    """
    folder = Path(folder)
    check_choice("axis", axis, AXES)
    beside = [] if baseline is None else combined.paired_differences(baseline)
    check_destination(folder, FILES, option="out")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder) as draft:
            draft.mkdir()
            rows = combined.rows()
            pairs = combined.paired_tests(axis)
            (draft / FILES[0]).write_text(_markdown(combined, rows, pairs, beside, axis), encoding="utf-8")
            _write_csv(draft / FILES[1], [_csv_row(combined, row) for row in rows])
            _write_csv(draft / FILES[2], [vars(pair) for pair in pairs])
            _write_csv(draft / FILES[3], [_baseline_csv_row(one) for one in beside])
            _draw(combined, draft, axis)
            names = sorted(file.name for file in draft.iterdir())
    except OSError as error:
        raise ArgumentError(f"out: {folder} cannot be written: {error.strerror or error}") from error
    first = [name for name in FILES if name in names]
    return [folder / name for name in [*first, *(name for name in names if name not in first)]]


def headings(combined: CombinedReport, problem: str) -> list[str]:
    """Return the column headings of a problem's table, after the column of the method."""
    target = format_percent(combined.targets[problem])
    at = [f"at {_format_amount(axis, combined.budget(problem, axis))}, %" for axis in BUDGET_AXES]
    return [
        "seeds",
        "final, %",
        *at,
        f"updates to {target}",
        f"s to {target}",
        "loss",
        "Gini",
        "Theil",
        "gradients",
        "sent",
    ]


def row_cells(row: ReportRow) -> list[str]:
    """Format a row as text, under `headings`."""
    share = "" if row.num_reached in (0, row.num_seeds) else f" ({row.num_reached} of {row.num_seeds})"
    rounds, seconds = (
        "never" if mean is None else _format_number(mean) + share
        for mean in (row.updates_to_target, row.time_to_target)
    )
    return [
        str(row.num_seeds),
        _format_percent(row.final_accuracy),
        *(_format_percent(row.accuracy_at_budget[axis]) for axis in BUDGET_AXES),
        rounds,
        seconds,
        "" if row.loss is None else f"{row.loss.value:.3f}",
        f"{row.gini.value:.3f}",
        f"{row.theil.value:.3f}",
        _format_amount("gradients", row.final_cost["gradients"]).removesuffix(" gradients"),
        _format_amount("bytes", row.final_cost["bytes"]),
    ]


def _format_amount(axis: str, value: float) -> str:
    """So much of what is spent, in a unit that suits it."""
    if axis == "gradients":
        return f"{round(value):,} gradients"
    size, unit, _ = axis_unit(axis, value)
    return f"{value / size:.4g} {unit or 'updates'}"


def _budget_name(axis: str) -> str:
    """On which equal terms methods are compared."""
    return {"updates": "equal updates", "time": "equal virtual time"}.get(axis, f"equal {axis}")


def _format_percent(mean: MeanCI) -> str:
    return f"{100 * mean.value:.1f}" + ("" if mean.half_width is None else f" ± {100 * mean.half_width:.1f}")


def _format_points(mean: MeanCI) -> str:
    return f"{100 * mean.value:+.2f}" + ("" if mean.half_width is None else f" ± {100 * mean.half_width:.2f}")


def _format_number(mean: MeanCI) -> str:
    return f"{mean.value:.4g}" + ("" if mean.half_width is None else f" ± {mean.half_width:.2g}")


def _markdown(
    combined: CombinedReport,
    rows: Sequence[ReportRow],
    pairs: Sequence[PairedTest],
    differences: Sequence[PairedDifference],
    axis: str,
) -> str:
    parts = ["# Comparison", TABLE_NOTE]
    for task in combined.runs:
        table = [["method", *headings(combined, task)]]
        table += [[row.method, *row_cells(row)] for row in rows if row.problem == task]
        parts += [f"## {_escape(task)}", _table(table)]
        found = sorted(
            (one for one in differences if one.problem == task), key=lambda one: -one.difference_at_budget[axis].value
        )
        if found:
            heads = ["method", *map(_budget_name, AXES)]
            lines = [[one.method, *(_format_points(one.difference_at_budget[name]) for name in AXES)] for one in found]
            parts += [BASELINE_NOTE.format(other=_escape(found[0].baseline)), _table([heads, *lines])]
    parts += ["## Differences", *_test_section(combined, pairs, axis)]
    if combined.notes:
        parts += ["## Settings that differ", "\n".join(f"- {_escape(note)}" for note in combined.notes)]
    return "\n\n".join(parts) + "\n"


def _test_section(combined: CombinedReport, pairs: Sequence[PairedTest], axis: str) -> list[str]:
    tested = sorted(
        (pair for pair in pairs if pair.p_value is not None),
        key=lambda pair: (pair.adjusted_p_value or 0, pair.p_value or 0),
    )
    parts = []
    if tested:
        head = ["first", "second", "pairs", "first better", "second better", "difference", "p", "p, Holm"]
        table = [head]
        for pair in tested:
            counts = [pair.count, pair.wins, pair.losses]
            numbers = [f"{100 * pair.median_difference:+.2f}", f"{pair.p_value:.2g}", f"{pair.adjusted_p_value:.2g}"]
            table.append([pair.first, pair.second, *map(str, counts), *numbers])
        parts = [TEST_NOTE.format(axis=_budget_name(axis), count=len(tested)), _table(table)]
    few = [pair for pair in pairs if pair.p_value is None]
    if few:
        most = max(pair.count for pair in few)
        who = "No methods have" if not tested else f"{len(few)} further pairs of methods do not have"
        parts.append(f"{who} the {MIN_PAIRS} pairs of problem and seed that a test requires: at most {most}.")
    if not pairs:
        parts.append("No two methods have a problem and a seed in common.")
    return parts


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ([_escape(cell) for cell in row] for row in rows)
    rule = ["---", *["---:" for _ in head[1:]]]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))


def _escape(text: str) -> str:
    return re.sub(r"([|*_`\\])", r"\\\1", text)


def _csv_row(combined: CombinedReport, row: ReportRow) -> dict[str, object]:
    """A row with a number in each column, intervals as their ends."""
    means: dict[str, MeanCI | None] = {
        "final": row.final_accuracy,
        **{f"at_{axis}": row.accuracy_at_budget[axis] for axis in AXES},
    }
    means |= {"updates_to_target": row.updates_to_target, "time_to_target": row.time_to_target, "loss": row.loss}
    means |= {"gini": row.gini, "theil": row.theil}
    flat: dict[str, object] = {"problem": row.problem, "method": row.method, "seeds": row.num_seeds}
    flat |= {"target": combined.targets[row.problem], "num_reached": row.num_reached}
    flat |= {f"budget_{axis}": combined.budget(row.problem, axis) for axis in AXES}
    flat |= {f"spent_{axis}": row.final_cost[axis] for axis in AXES}
    return flat | _interval_columns(means)


def _baseline_csv_row(difference: PairedDifference) -> dict[str, object]:
    """A comparison with a number in each column, intervals as their ends."""
    about = {
        "problem": difference.problem,
        "method": difference.method,
        "baseline": difference.baseline,
        "seeds": difference.difference_at_budget[AXES[0]].count,
    }
    return about | _interval_columns({f"at_{axis}": mean for axis, mean in difference.difference_at_budget.items()})


def _interval_columns(means: Mapping[str, MeanCI | None]) -> dict[str, object]:
    """Three columns for each mean: itself, and the ends of its interval."""
    flat: dict[str, object] = {}
    for name, mean in means.items():
        ends = ("", "", "") if mean is None else (mean.value, mean.low, mean.high)
        flat |= dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))
    return flat


def _write_csv(path: Path, rows: Sequence[dict[str, object]]) -> None:
    if not rows:
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def _draw(combined: CombinedReport, folder: Path, axis: str) -> None:
    used: set[str] = set()
    for task, methods in combined.runs.items():
        end = "" if len(combined.runs) == 1 else "-" + re.sub(r"[^A-Za-z0-9.]+", "-", task).strip("-")
        while end in used:
            end += "-"
        used.add(end)
        rows = {name: [run.evaluations for run in seeds.values()] for name, seeds in methods.items()}
        at = None if axis == "updates" else combined.budget(task, axis)
        draw_accuracy(
            folder / f"accuracy{end}.png", rows, target=combined.targets[task], title=task, axis=axis, budget=at
        )
        clients = {name: [run.client_accuracy for run in seeds.values()] for name, seeds in methods.items()}
        draw_clients(folder / f"clients{end}.png", clients, title=task)
