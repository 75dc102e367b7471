"""Combined reports, which compare the runs of several comparisons at equal cost."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd

from manifoldagg._validation import check_choice
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.plots import axis_unit, draw_accuracy, draw_clients, format_percent, metric_name
from manifoldagg.experiments.relative_time import relative_times
from manifoldagg.experiments.report import Runs, new_report, read_reports
from manifoldagg.experiments.spec_parser import choose
from manifoldagg.experiments.statistics import MIN_PAIRS, compare_pairs, compare_with, interval_columns
from manifoldagg.simulation.cost import AXES, Evaluation, first_reaching, last_within_budget

__all__ = ["FILES", "CombinedReport", "load_reports", "markdown_table", "write_combined_report"]

FILES = (
    *("report.md", "report.tex", "table.csv", "pairs.csv", "baseline.csv", "relative_time.csv", "one_sided.csv"),
    *("accuracy*.png", "clients*.png"),
)
BUDGET_AXES = ("time", "gradients", "bytes")
"""The axes of the columns with the accuracy at equal cost."""
MEANS = ("final", *(f"at_{axis}" for axis in AXES), "updates_to_target", "time_to_target", "loss", "gini", "theil")
MEANS += ("average", "average_loss")
"""The columns of a run for which `CombinedReport.frame` contains means with intervals."""
BUDGET_NAMES = {axis: f"equal {axis}" for axis in AXES} | {"time": "equal virtual time"}
TEMPLATE = Path(__file__).with_name("report.md.j2")
"""The template of the report in Markdown."""


@dataclass(frozen=True)
class CombinedReport:
    """The runs of several reports of `manifoldagg compare`, for a comparison at equal cost.

    The runs are grouped by problem. A problem is a data set together with the settings that define the learning task,
    such as the partition over clients.

    Attributes:
        runs: the runs, by problem, method and seed.
        targets: the target accuracy of each problem.
        notes: sentences about differences between reports of the same problem, such as different numbers of updates.
            Different methods and seeds are expected, so there is no sentence about them.
    """

    runs: Runs
    targets: dict[str, float]
    notes: Sequence[str] = ()

    def budget(self, problem: str, axis: str) -> float:
        """Return the largest cost on an axis that every run of a problem reaches."""
        return min(
            run.evaluations[-1].value_on(axis) for seeds in self.runs[problem].values() for run in seeds.values()
        )

    def run_frame(self) -> pd.DataFrame:
        """Return a data frame with a row for each run.

        There are four measures of cost: `updates`, `time` (virtual seconds), `gradients` (of minibatches) and `bytes`.
        The columns include:

        - `final`: the accuracy at the end of the run.
        - `at_updates`, `at_time`, `at_gradients` and `at_bytes`: the accuracy at the largest cost that every run of the
          problem reaches. The method `budget` returns this cost.
        - `updates_to_target` and `time_to_target`: the cost at which the run reaches the target accuracy, or NaN if the
          run does not reach it.
        - `spent_updates`, `spent_time`, `spent_gradients` and `spent_bytes`: the total cost of the run.
        """
        rows = []
        for problem, methods in self.runs.items():
            budgets = {axis: self.budget(problem, axis) for axis in AXES}
            for method, seeds in methods.items():
                for seed, run in seeds.items():
                    row = {"problem": problem, "method": method, "seed": seed}
                    rows.append(row | _run_row(run.evaluations, budgets, self.targets[problem]))
        return pd.DataFrame(rows)

    def frame(self) -> pd.DataFrame:
        """Return a data frame with the mean results of the runs, one row for each problem and method.

        A problem is a data set with its settings. Columns such as `final_low` and `final_high` are the ends of the 95 %
        interval of the mean `final`. `num_reached` is the number of runs that reach the target accuracy of the problem.
        Only these runs contribute to the means `updates_to_target` and `time_to_target`.
        """
        rows = []
        for (problem, method), runs in self.run_frame().groupby(["problem", "method"], sort=False):
            row = {"problem": problem, "method": method, "seeds": len(runs), "target": self.targets[problem]}
            row["num_reached"] = runs["updates_to_target"].count()
            row |= {f"budget_{axis}": self.budget(problem, axis) for axis in AXES}
            row |= {f"spent_{axis}": runs[f"spent_{axis}"].mean() for axis in AXES}
            for name in MEANS:
                row |= interval_columns(name, runs[name].dropna().to_list())
            rows.append(row)
        return pd.DataFrame(rows)

    def tests(self, axis: str) -> pd.DataFrame:
        """Test for each pair of methods whether their accuracies differ, with `statistics.compare_pairs`.

        The accuracies are compared at equal training cost. For each problem (a data set with its settings), this cost
        is the largest one that every run reaches.

        Args:
            axis: the measure of cost: `"updates"`, `"time"` (virtual seconds), `"gradients"` or `"bytes"`.

        Raises:
            ArgumentError: if the axis is unknown.
        """
        return compare_pairs(self._scores(axis))

    def one_sided_tests(self, method: str, axis: str) -> pd.DataFrame:
        """Test with `statistics.compare_with` whether `method` is more accurate than each other method.

        The accuracies are compared at equal training cost. For each problem (a data set with its settings), this cost
        is the largest one that every run reaches.

        Args:
            method: the name of the method.
            axis: the measure of cost: `"updates"`, `"time"` (virtual seconds), `"gradients"` or `"bytes"`.

        Raises:
            ArgumentError: if the report does not contain the method, or the axis is unknown.
        """
        choose("proposed", "method", method, self._method_names())
        return compare_with(self._scores(axis), method)

    def relative_times(self, baseline: str = "FedAvg") -> pd.DataFrame:
        """Return the time that each method needs to reach a common target accuracy, relative to a baseline.

        On each problem, the target is 95 % of the lowest final accuracy of all methods, where the accuracy of a method
        is a mean over seeds. `relative_time.relative_times` documents the columns of the returned data frame.

        Raises:
            ArgumentError: if no problem contains the baseline.
        """
        return relative_times(self.runs, baseline)

    def _method_names(self) -> list[str]:
        return list(dict.fromkeys(name for methods in self.runs.values() for name in methods))

    def _scores(self, axis: str) -> pd.DataFrame:
        column = f"at_{check_choice('axis', axis, AXES)}"
        scores = self.run_frame().pivot(index=["problem", "seed"], columns="method", values=column)
        return scores[self._method_names()]

    def differences(self, baseline: str) -> pd.DataFrame:
        """Return the mean difference in accuracy between each method and the baseline on each problem.

        Each run of a method is paired with the run of the baseline that has the same seed. The accuracies are compared
        at equal cost: the largest cost that all paired runs reach. The result has three columns for each measure of
        cost (`updates`, `time`, `gradients` and `bytes`). For example, `at_updates` is the mean difference after the
        same number of updates, and `at_updates_low` and `at_updates_high` are the ends of its 95 % interval.

        Raises:
            ArgumentError: if no problem contains the method, or no other method has a problem and a seed in common.
        """
        choose("baseline", "method", baseline, self._method_names())
        rows = []
        for problem, methods in self.runs.items():
            for method, seeds in methods.items():
                others = methods.get(baseline, {})
                pairs = [(seeds[seed].evaluations, others[seed].evaluations) for seed in seeds if seed in others]
                if method == baseline or not pairs:
                    continue
                row = {"problem": problem, "method": method, "baseline": baseline, "seeds": len(pairs)}
                for axis in AXES:
                    budget = min(log[-1].value_on(axis) for pair in pairs for log in pair)
                    at = [[last_within_budget(log, axis, budget).accuracy for log in pair] for pair in pairs]
                    row |= interval_columns(f"at_{axis}", [mine - other for mine, other in at])
                rows.append(row)
        if not rows:
            raise ArgumentError(
                f"baseline: expected a method with a problem and a seed in common with another method, got {baseline}"
            )
        return pd.DataFrame(rows)

    def table(self, problem: str) -> pd.DataFrame:
        """Return the results on a problem as a table of text for reports."""
        frame = self.frame()
        frame = frame[frame["problem"] == problem]
        at = {f"at {_format_amount(axis, self.budget(problem, axis))}, %": f"at_{axis}" for axis in BUDGET_AXES}
        has_average = bool(frame["average"].notna().any())
        percents = {"final, %": "final"} | ({"average, %": "average"} if has_average else {}) | at
        numbers = ["loss", *(["average loss"] if has_average else []), "Gini", "Theil"]
        target = format_percent(self.targets[problem])
        shares = [
            f" ({row.num_reached} of {row.seeds})" if row.num_reached < row.seeds else "" for row in frame.itertuples()
        ]
        cells = {"method": frame["method"].to_list(), "seeds": frame["seeds"].astype(str).to_list()}
        cells |= {heading: _format(frame, name, ".1f", scale=100) for heading, name in percents.items()}
        for unit, name in (("updates", "updates_to_target"), ("s", "time_to_target")):
            means = zip(_format(frame, name, ".4g", ".2g"), shares, strict=True)
            cells[f"{unit} to {target}"] = [mean + share if mean else "never" for mean, share in means]
        for heading in numbers:
            values = frame[heading.lower().replace(" ", "_")]
            cells[heading] = ["" if np.isnan(value) else f"{value:.3f}" for value in values]
        cells["gradients"] = [f"{round(value):,}" for value in frame["spent_gradients"]]
        cells["sent"] = [_format_amount("bytes", value) for value in frame["spent_bytes"]]
        return pd.DataFrame(cells)


def _run_row(log: Sequence[Evaluation], budgets: Mapping[str, float], target: float) -> dict[str, float]:
    last = log[-1]
    hit = first_reaching(log, target)
    row = {
        "final": last.accuracy,
        **{f"at_{axis}": last_within_budget(log, axis, budget).accuracy for axis, budget in budgets.items()},
        "updates_to_target": None if hit is None else hit.updates,
        "time_to_target": None if hit is None else hit.time,
        "loss": last.loss,
        "gini": last.gini,
        "theil": last.theil,
        "average": last.average_accuracy,
        "average_loss": last.average_loss,
        **{f"spent_{axis}": last.value_on(axis) for axis in AXES},
    }
    return {name: np.nan if value is None else value for name, value in row.items()}


def load_reports(folders: Iterable[Path | str]) -> CombinedReport:
    """Read several reports of `manifoldagg compare` and combine their runs.

    Runs are compared if they have the same data set and the same learning task, such as the same partition over
    clients. Their reports may contain different methods and seeds. The field `notes` of the result describes all other
    differences, such as different numbers of updates.

    Raises:
        ArgumentError: if a folder is not a report (the message describes the fault), or if two reports contain a run of
            the same problem, method and seed.
    """
    if isinstance(folders, str | Path):
        raise ArgumentError(f"folders: expected a list of folders, got {str(folders)!r}; write [{str(folders)!r}]")
    return CombinedReport(*read_reports(folders))


def write_combined_report(
    combined: CombinedReport,
    folder: Path | str,
    *,
    axis: str = "updates",
    baseline: str | None = None,
    proposed: str | None = None,
) -> list[Path]:
    """Write the tables and the plots of a combined report to a folder.

    - `report.md`: all tables in Markdown. `report.tex`: the table of each problem in LaTeX.
    - `table.csv`: the mean results of each method on each problem (`CombinedReport.frame`).
    - `pairs.csv`: the tests of each pair of methods (`CombinedReport.tests`).
    - `baseline.csv`: the differences in accuracy to `baseline`, if it is given (`CombinedReport.differences`).
    - `relative_time.csv`: the times to a common target accuracy (`CombinedReport.relative_times`).
    - `one_sided.csv`: the one-sided tests of `proposed`, if it is given (`CombinedReport.one_sided_tests`).
    - `accuracy*.png`: a plot of the accuracy of each method, for each problem.
    - `clients*.png`: a plot of the accuracies of the clients, for each problem.

    Args:
        combined: the combined report.
        folder: the folder. An existing combined report is replaced as a whole.
        axis: the x axis of the plots, and the cost axis of the tests.
        baseline: the name of a method. All other methods are compared with it on every axis, and their times to a
            common target are relative to its time. Without a name, these times are relative to FedAvg if a report
            contains it.
        proposed: the name of a method. One-sided tests compare it with all other methods.

    Returns:
        The paths of the files.

    Raises:
        ArgumentError: if `folder` contains other files or cannot be written, `axis` is invalid, or no problem contains
            the method `baseline` or `proposed`.
    """
    folder = Path(folder)
    check_choice("axis", axis, AXES)
    reference = baseline or ("FedAvg" if "FedAvg" in combined._method_names() else None)
    frames = {
        "table": combined.frame(),
        "pairs": combined.tests(axis),
        "baseline": None if baseline is None else combined.differences(baseline),
        "relative_time": None if reference is None else combined.relative_times(reference),
        "one_sided": None if proposed is None else combined.one_sided_tests(proposed, axis),
    }
    with new_report(folder, FILES, option="out") as draft:
        (draft / "report.md").write_text(_markdown(combined, frames, axis), encoding="utf-8")
        tables = [combined.table(problem).to_latex(index=False, escape=True) for problem in combined.runs]
        (draft / "report.tex").write_text("\n".join(tables), encoding="utf-8")
        for name, frame in frames.items():
            if frame is not None and len(frame):
                frame.to_csv(draft / f"{name}.csv", index=False, lineterminator="\n")
        _draw(combined, draft, axis)
        names = sorted(file.name for file in draft.iterdir())
    first = [name for name in FILES if name in names]
    return [folder / name for name in [*first, *(name for name in names if name not in first)]]


def markdown_table(frame: pd.DataFrame) -> str:
    """Format a data frame of texts as a Markdown table. Only the first column is left-aligned.

    Example:
        >>> print(markdown_table(pd.DataFrame({"method": ["A|B"], "final": ["57.0"]})))
        | method   |   final |
        |:---------|--------:|
        | A\\|B     |    57.0 |
    """
    escaped = frame.rename(columns=_escape).map(_escape)
    align = ["left", *["right"] * (len(frame.columns) - 1)]
    return str(escaped.to_markdown(index=False, disable_numparse=True, colalign=align))


def _format(frame: pd.DataFrame, name: str, value: str, width: str = "", *, scale: float = 1.0) -> list[str]:
    """Format means with half the width of their intervals. A missing mean is empty."""
    cells = []
    for mean, high in zip(frame[name] * scale, frame[f"{name}_high"].astype(float) * scale, strict=True):
        interval = "" if np.isnan(high) else f" ± {high - mean:{width or value.removeprefix('+')}}"
        cells.append("" if np.isnan(mean) else f"{mean:{value}}{interval}")
    return cells


def _format_amount(axis: str, value: float) -> str:
    """Format a cost in a suitable unit."""
    if axis == "gradients":
        return f"{round(value):,} gradients"
    size, unit, _ = axis_unit(axis, value)
    return f"{value / size:.4g} {unit or 'updates'}"


def _markdown(combined: CombinedReport, frames: Mapping[str, pd.DataFrame | None], axis: str) -> str:
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"escape": _escape, "table": markdown_table, "times_table": _times_table}
    environment.filters["differences_table"] = partial(_differences_table, axis=axis)
    one_sided = frames["one_sided"]
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        combined=combined,
        times=_by_problem(combined, frames["relative_time"]),
        differences=_by_problem(combined, frames["baseline"]),
        pairs=_tests_table(frames["pairs"]),
        one_sided=None if one_sided is None else _tests_table(one_sided),
        min_pairs=MIN_PAIRS,
        budget=BUDGET_NAMES[axis],
    )


def _by_problem(combined: CombinedReport, frame: pd.DataFrame | None) -> dict[str, list[pd.DataFrame]]:
    """Return the rows of each problem, as a list that is empty if the problem has no rows."""
    found = {} if frame is None else dict(iter(frame.groupby("problem")))
    return {problem: [found[problem]] if problem in found else [] for problem in combined.runs}


def _times_table(times: pd.DataFrame) -> pd.DataFrame:
    """Format the relative times of one problem."""
    is_bound = times["num_pairs"] + times["num_unpaired"] < times["seeds"]
    return pd.DataFrame(
        {
            "method": times["method"],
            "relative time": [mean or "unknown" for mean in _format(times, "relative_time", ".3g", ".2g")],
            "pairs": [f"{one.num_pairs} of {one.seeds}" for one in times.itertuples()],
            "censored runs": times["num_censored"].astype(str),
            "lower bound": times["relative_time_bound"].map("> {:.3g}".format).where(is_bound, ""),
        }
    )


def _differences_table(differences: pd.DataFrame, axis: str) -> pd.DataFrame:
    """Format the differences of one problem, with the largest difference on the axis first."""
    found = differences.sort_values(f"at_{axis}", ascending=False, kind="stable")
    cells = {BUDGET_NAMES[name]: _format(found, f"at_{name}", "+.2f", scale=100) for name in AXES}
    return pd.DataFrame({"method": found["method"].to_list(), **cells})


def _tests_table(tests: pd.DataFrame) -> dict[str, Any]:
    """Return the formatted tests as `table`, the first method as `first`, and pairs without a test as `few`."""
    tested = tests[tests["p_value"].notna()].sort_values(["adjusted_p_value", "p_value"], kind="stable")
    text = tested.assign(
        median_difference=(100 * tested["median_difference"]).map("{:+.2f}".format),
        **{name: tested[name].map("{:.2g}".format) for name in ("p_value", "adjusted_p_value")},
    ).astype(str)
    heads = ["first", "second", "pairs", "first better", "second better", "difference", "p", "p, Holm"]
    table = text.set_axis(heads, axis=1) if len(tested) else None
    return {"table": table, "first": next(iter(tests["first"]), ""), "few": tests[tests["p_value"].isna()]}


def _escape(text: object) -> str:
    return re.sub(r"([|*_`\\])", r"\\\1", str(text))


def _draw(combined: CombinedReport, folder: Path, axis: str) -> None:
    used: set[str] = set()
    for problem, methods in combined.runs.items():
        end = "" if len(combined.runs) == 1 else "-" + re.sub(r"[^A-Za-z0-9.]+", "-", problem).strip("-")
        while end in used:
            end += "-"
        used.add(end)
        rows = {name: [run.evaluations for run in seeds.values()] for name, seeds in methods.items()}
        budget = None if axis == "updates" else combined.budget(problem, axis)
        path = folder / f"accuracy{end}.png"
        draw_accuracy(path, rows, target=combined.targets[problem], title=problem, axis=axis, budget=budget)
        clients = {name: [run.client_accuracy for run in seeds.values()] for name, seeds in methods.items()}
        draw_clients(folder / f"clients{end}.png", clients, title=problem, metric=metric_name(rows))
