"""A joined report: one table of all runs as Markdown and CSV, how sure the differences are, and pictures."""

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from manifoldagg._io import atomic_write
from manifoldagg._validation import check_choice
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.plots import draw_accuracy, draw_clients, in_percent, in_units
from manifoldagg.experiments.report_data import Against, Joined, Row
from manifoldagg.experiments.run_report import check_destination
from manifoldagg.experiments.statistics import ENOUGH, Mean, Pair
from manifoldagg.simulation.cost import AXES

__all__ = ["FILES", "cells", "headings", "write_summary"]

FILES = ("report.md", "table.csv", "pairs.csv", "against.csv", "accuracy*.png", "clients*.png")
EQUAL = ("time", "gradients", "bytes")
"""Axes on which the table says what methods were worth where they had spent equally much."""
HOW = """\
Accuracies are those of the server's model on the held-out samples of all clients together, in percent: means over the
seeds with their intervals of 95 % (Student's t). *At* an amount, each run is read at its last evaluation that had spent
no more; it is the most that every run of the task reached, and nothing is interpolated. *To* a target are means over
the runs that reached it. The last two columns are what a run had spent at its end, on average."""
TESTED = """\
Each pair of methods by Wilcoxon's signed-rank test on the pairs of task and seed that both have, two-sided, at {axis};
p-values after Holm's correction over all {count} tests. Differences are medians, in percentage points. Seeds of one
task have its samples in common: what holds over them may not hold on other data."""
BESIDE = """\
Accuracy less that of {other}, in percentage points: means of the differences seed by seed, with their intervals of 95 %
(Student's t), where the runs of the two had spent equally much."""


def write_summary(joined: Joined, folder: Path | str, *, axis: str = "round", against: str | None = None) -> list[Path]:
    """Write `report.md`, `table.csv`, `pairs.csv` and, for each task, pictures of accuracy and of clients.

    With `against` also `against.csv`.

    Args:
        joined: what was read.
        folder: made whole or not at all; a joined report that is there is replaced.
        axis: along which accuracy is drawn, and on which methods are compared.
        against: the method that all others are put beside, on every axis.

    Returns:
        The files.

    Raises:
        ArgumentError: if `folder` holds something else or cannot be written, `axis` is none, or no task has
            the method `against`.
    """
    folder = Path(folder)
    check_choice("axis", axis, AXES)
    beside = [] if against is None else joined.against(against)
    check_destination(folder, FILES, option="out")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder) as draft:
            draft.mkdir()
            rows = joined.rows()
            pairs = joined.pairs(axis)
            (draft / FILES[0]).write_text(_markdown(joined, rows, pairs, beside, axis), encoding="utf-8")
            _write_csv(draft / FILES[1], [_flat(joined, row) for row in rows])
            _write_csv(draft / FILES[2], [vars(pair) for pair in pairs])
            _write_csv(draft / FILES[3], [_beside(one) for one in beside])
            _draw(joined, draft, axis)
            names = sorted(file.name for file in draft.iterdir())
    except OSError as error:
        raise ArgumentError(f"out: {folder} cannot be written: {error}") from error
    first = [name for name in FILES if name in names]
    return [folder / name for name in [*first, *(name for name in names if name not in first)]]


def headings(joined: Joined, task: str) -> list[str]:
    """Of the columns of a task's table, after that of the method."""
    target = in_percent(joined.targets[task])
    at = [f"at {_amount(axis, joined.budget(task, axis))}, %" for axis in EQUAL]
    return [
        "seeds",
        "final, %",
        *at,
        f"rounds to {target}",
        f"s to {target}",
        "loss",
        "Gini",
        "Theil",
        "gradients",
        "sent",
    ]


def cells(row: Row) -> list[str]:
    """A row in words, under `headings`."""
    share = "" if row.reached in (0, row.seeds) else f" ({row.reached} of {row.seeds})"
    rounds, seconds = ("never" if mean is None else _number(mean) + share for mean in (row.rounds, row.time))
    return [
        str(row.seeds),
        _percent(row.final),
        *(_percent(row.equal[axis]) for axis in EQUAL),
        rounds,
        seconds,
        "" if row.loss is None else f"{row.loss.value:.3f}",
        f"{row.gini.value:.3f}",
        f"{row.theil.value:.3f}",
        _amount("gradients", row.last["gradients"]).removesuffix(" gradients"),
        _amount("bytes", row.last["bytes"]),
    ]


def _amount(axis: str, value: float) -> str:
    """So much of what is spent, in a unit that suits it."""
    if axis == "gradients":
        return f"{round(value):,} gradients"
    size, unit, _ = in_units(axis, value)
    return f"{value / size:.4g} {unit or 'rounds'}"


def _terms(axis: str) -> str:
    """On which equal terms methods are compared."""
    return {"round": "equal rounds", "time": "equal virtual time"}.get(axis, f"equal {axis}")


def _percent(mean: Mean) -> str:
    return f"{100 * mean.value:.1f}" + ("" if mean.half is None else f" ± {100 * mean.half:.1f}")


def _points(mean: Mean) -> str:
    return f"{100 * mean.value:+.2f}" + ("" if mean.half is None else f" ± {100 * mean.half:.2f}")


def _number(mean: Mean) -> str:
    return f"{mean.value:.4g}" + ("" if mean.half is None else f" ± {mean.half:.2g}")


def _markdown(joined: Joined, rows: Sequence[Row], pairs: Sequence[Pair], beside: Sequence[Against], axis: str) -> str:
    parts = ["# Comparison", HOW]
    for task in joined.runs:
        table = [["method", *headings(joined, task)]]
        table += [[row.method, *cells(row)] for row in rows if row.task == task]
        parts += [f"## {_escaped(task)}", _table(table)]
        found = sorted((one for one in beside if one.task == task), key=lambda one: -one.equal[axis].value)
        if found:
            heads = ["method", *map(_terms, AXES)]
            lines = [[one.method, *(_points(one.equal[name]) for name in AXES)] for one in found]
            parts += [BESIDE.format(other=_escaped(found[0].other)), _table([heads, *lines])]
    parts += ["## Differences", *_differences(joined, pairs, axis)]
    if joined.notes:
        parts += ["## Settings that differ", "\n".join(f"- {_escaped(note)}" for note in joined.notes)]
    return "\n\n".join(parts) + "\n"


def _differences(joined: Joined, pairs: Sequence[Pair], axis: str) -> list[str]:
    tested = sorted((pair for pair in pairs if pair.p is not None), key=lambda pair: (pair.adjusted or 0, pair.p or 0))
    parts = []
    if tested:
        head = ["first", "second", "pairs", "first better", "second better", "difference", "p", "p, Holm"]
        table = [head]
        for pair in tested:
            counts = [pair.count, pair.better, pair.worse]
            numbers = [f"{100 * pair.difference:+.2f}", f"{pair.p:.2g}", f"{pair.adjusted:.2g}"]
            table.append([pair.first, pair.second, *map(str, counts), *numbers])
        parts = [TESTED.format(axis=_terms(axis), count=len(tested)), _table(table)]
    few = [pair for pair in pairs if pair.p is None]
    if few:
        most = max(pair.count for pair in few)
        who = "No methods have" if not tested else f"{len(few)} further pairs of methods do not have"
        parts.append(f"{who} the {ENOUGH} pairs of task and seed that a test takes: at most {most}.")
    if not pairs:
        parts.append("No two methods have a task and a seed in common.")
    return parts


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ([_escaped(cell) for cell in row] for row in rows)
    rule = ["---", *["---:" for _ in head[1:]]]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))


def _escaped(text: str) -> str:
    return re.sub(r"([|*_`\\])", r"\\\1", text)


def _flat(joined: Joined, row: Row) -> dict[str, object]:
    """A row with a number in each column, intervals as their ends."""
    means: dict[str, Mean | None] = {"final": row.final, **{f"at_{axis}": row.equal[axis] for axis in AXES}}
    means |= {"rounds_to_target": row.rounds, "time_to_target": row.time, "loss": row.loss}
    means |= {"gini": row.gini, "theil": row.theil}
    flat: dict[str, object] = {"task": row.task, "method": row.method, "seeds": row.seeds}
    flat |= {"target": joined.targets[row.task], "reached": row.reached}
    flat |= {f"budget_{axis}": joined.budget(row.task, axis) for axis in AXES}
    flat |= {f"spent_{axis}": row.last[axis] for axis in AXES}
    return flat | _ends(means)


def _beside(one: Against) -> dict[str, object]:
    """A comparison with a number in each column, intervals as their ends."""
    about = {"task": one.task, "method": one.method, "other": one.other, "seeds": one.equal[AXES[0]].count}
    return about | _ends({f"at_{axis}": mean for axis, mean in one.equal.items()})


def _ends(means: Mapping[str, Mean | None]) -> dict[str, object]:
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


def _draw(joined: Joined, folder: Path, axis: str) -> None:
    used: set[str] = set()
    for task, methods in joined.runs.items():
        end = "" if len(joined.runs) == 1 else "-" + re.sub(r"[^A-Za-z0-9.]+", "-", task).strip("-")
        while end in used:
            end += "-"
        used.add(end)
        rows = {name: [run.evaluations for run in seeds.values()] for name, seeds in methods.items()}
        at = None if axis == "round" else joined.budget(task, axis)
        draw_accuracy(
            folder / f"accuracy{end}.png", rows, target=joined.targets[task], title=task, axis=axis, budget=at
        )
        clients = {name: [run.client_accuracy for run in seeds.values()] for name, seeds in methods.items()}
        draw_clients(folder / f"clients{end}.png", clients, title=task)
