"""Data of a combined report: runs of several comparisons, joined and compared at equal cost."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.statistics import MeanCI, PairedTest, compare_pairs, mean_ci
from manifoldagg.simulation.cost import AXES, Evaluation, first_reaching, last_within_budget
from manifoldagg.simulation.spec_parser import choose

__all__ = ["CombinedReport", "LoggedRun", "PairedDifference", "ReportRow", "load_reports"]

INTEGER_FIELDS = ("updates", "gradients", "bytes_down", "bytes_up", "rejected", "staleness_max")
PROBLEM_SETTINGS = (
    *("model", "clients", "partition", "holdout", "validation", "batch"),
    *("scheduler", "delays", "availability", "files", "task_cost"),
)
"""Settings that define a problem, with the data."""
UNCHECKED_SETTINGS = ("data", "methods", "seeds", "clients_without_samples", *PROBLEM_SETTINGS)
"""Settings in which reports of a problem may differ, or cannot."""
ProblemKey = tuple[str, ...]


@dataclass(frozen=True)
class LoggedRun:
    """A run as read from a report.

    Attributes:
        folder: of the report.
        evaluations: its log.
        client_accuracy: of its best model.
    """

    folder: Path
    evaluations: list[Evaluation]
    client_accuracy: list[float]


@dataclass(frozen=True)
class ReportRow:
    """The results of a method on a data set, over its seeds.

    Attributes:
        problem: the name of the problem.
        method: the method.
        num_seeds: how many.
        final_accuracy: accuracy at the end of each run.
        accuracy_at_budget: accuracy by axis, where each run had spent no more than the `CombinedReport.budget`
            on it.
        updates_to_target: to the target, of the runs that reached it; `None` if none did.
        time_to_target: to the target, likewise, in virtual seconds.
        num_reached: how many did.
        final_cost: what a run had spent at its end, the mean of each axis.
        loss: at the end, of the runs where it is finite; `None` if there are none.
        gini: of the clients' accuracies at the end.
        theil: likewise.
    """

    problem: str
    method: str
    num_seeds: int
    final_accuracy: MeanCI
    accuracy_at_budget: Mapping[str, MeanCI]
    updates_to_target: MeanCI | None
    time_to_target: MeanCI | None
    num_reached: int
    final_cost: Mapping[str, float]
    loss: MeanCI | None
    gini: MeanCI
    theil: MeanCI


@dataclass(frozen=True)
class PairedDifference:
    """The difference of the accuracies of two methods on a data set, paired by seed.

    Attributes:
        problem: the name of the problem.
        method: the method.
        baseline: the other one.
        difference_at_budget: the difference by axis, over the seeds that both have, where each run had spent no more
            than all runs of these two did.
    """

    problem: str
    method: str
    baseline: str
    difference_at_budget: Mapping[str, MeanCI]


@dataclass(frozen=True)
class CombinedReport:
    """The runs of several reports.

    Attributes:
        runs: by problem, method and seed.
        targets: by problem.
        notes: in which settings reports of one problem differ, but for methods and seeds.
    """

    runs: Mapping[str, Mapping[str, Mapping[int, LoggedRun]]]
    targets: Mapping[str, float]
    notes: Sequence[str] = ()

    def budget(self, problem: str, axis: str) -> float:
        """Return the largest cost on an axis that every run of a problem reaches."""
        return min(
            run.evaluations[-1].value_on(axis) for seeds in self.runs[problem].values() for run in seeds.values()
        )

    def rows(self) -> list[ReportRow]:
        """Return a row for each problem and method."""
        return [
            self._row(task, method, list(seeds.values()))
            for task, methods in self.runs.items()
            for method, seeds in methods.items()
        ]

    def paired_tests(self, axis: str) -> list[PairedTest]:
        """Test every pair of methods on the accuracies at equal cost on an axis."""
        budgets = {task: self.budget(task, axis) for task in self.runs}
        scores: dict[str, dict[Any, float]] = {}
        for task, methods in self.runs.items():
            for method, seeds in methods.items():
                for seed, run in seeds.items():
                    found = last_within_budget(run.evaluations, axis, budgets[task])
                    scores.setdefault(method, {})[task, seed] = found.accuracy
        return compare_pairs(scores)

    def paired_differences(self, baseline: str) -> list[PairedDifference]:
        """Compare every method with `baseline` on each problem, with intervals of the paired differences.

        Terms are equal for the two: how little a third one spent does not count.

        Raises:
            ArgumentError: if no problem has it, or no method and seed beside it.
        """
        names = dict.fromkeys(method for methods in self.runs.values() for method in methods)
        choose("baseline", "method", baseline, names)
        found = []
        for task, methods in self.runs.items():
            for method, seeds in methods.items():
                both = [seed for seed in seeds if seed in methods.get(baseline, {})]
                if method != baseline and both:
                    pairs = [(seeds[seed].evaluations, methods[baseline][seed].evaluations) for seed in both]
                    found.append(
                        PairedDifference(task, method, baseline, {axis: _mean_difference(pairs, axis) for axis in AXES})
                    )
        if not found:
            raise ArgumentError(
                f"baseline: expected a method that has a problem and a seed in common with another; got {baseline}"
            )
        return found

    def _row(self, problem: str, method: str, runs: Sequence[LoggedRun]) -> ReportRow:
        logs = [run.evaluations for run in runs]
        last = [rows[-1] for rows in logs]
        hits = [row for rows in logs if (row := first_reaching(rows, self.targets[problem])) is not None]
        losses = [row.loss for row in last if row.loss is not None]
        equal = {
            axis: mean_ci([last_within_budget(rows, axis, self.budget(problem, axis)).accuracy for rows in logs])
            for axis in AXES
        }
        return ReportRow(
            problem,
            method,
            len(runs),
            final_accuracy=mean_ci([row.accuracy for row in last]),
            accuracy_at_budget=equal,
            updates_to_target=mean_ci([row.updates for row in hits]) if hits else None,
            time_to_target=mean_ci([row.time for row in hits]) if hits else None,
            num_reached=len(hits),
            final_cost={axis: mean_ci([row.value_on(axis) for row in last]).value for axis in AXES},
            loss=mean_ci(losses) if losses else None,
            gini=mean_ci([row.gini for row in last]),
            theil=mean_ci([row.theil for row in last]),
        )


def _mean_difference(pairs: Sequence[tuple[list[Evaluation], list[Evaluation]]], axis: str) -> MeanCI:
    """Of the accuracies of pairs of runs, where all had spent equally much."""
    budget = min(rows[-1].value_on(axis) for pair in pairs for rows in pair)
    return mean_ci(
        [last_within_budget(a, axis, budget).accuracy - last_within_budget(b, axis, budget).accuracy for a, b in pairs]
    )


def load_reports(folders: Iterable[Path | str]) -> CombinedReport:
    """Read the reports of `manifoldagg compare` in these folders, and join their runs.

    A problem is a data set, known by its name and a checksum of its samples, with what learns it, who holds which part
    and who comes when. Problems of one data set are named by their differences. Reports of one problem may differ in
    more than methods and seeds, such as in their updates: what it is, the notes say.

    Raises:
        ArgumentError: if a folder is no report, naming the file and what is wrong with it; or if two have a run of the
            same problem, method and seed, naming both.
    """
    reports = [_load_report(Path(folder)) for folder in folders]
    if not reports:
        raise ArgumentError("folders: expected at least one report, got none")
    names = _problem_names(reports)
    runs: dict[str, dict[str, dict[int, LoggedRun]]] = {}
    for report in reports:
        task = names[_problem_key(report)]
        for (method, seed), run in report.runs.items():
            seeds = runs.setdefault(task, {}).setdefault(method, {})
            if seed in seeds:
                raise ArgumentError(
                    f"folders: {seeds[seed].folder} and {run.folder} both have {method} on {task}, seed {seed}"
                )
            seeds[seed] = run
    targets: dict[str, float] = {}
    for report in reports:
        targets.setdefault(names[_problem_key(report)], report.settings["target"])
    return CombinedReport(runs, targets, _setting_differences(reports))


@dataclass(frozen=True)
class _Report:
    folder: Path
    settings: Mapping[str, Any]
    runs: Mapping[tuple[str, int], LoggedRun]


def _problem_key(report: _Report) -> ProblemKey:
    data = report.settings["data"]
    return data["name"], data["checksum"], *(_format_setting(key, report.settings.get(key)) for key in PROBLEM_SETTINGS)


def _problem_names(reports: Sequence[_Report]) -> dict[ProblemKey, str]:
    """Name the problems; those of data sets with one name are followed by their differences."""
    known = list(dict.fromkeys(map(_problem_key, reports)))
    names = {}
    for task in known:
        like = [other for other in known if other[0] == task[0]]
        told = [
            f"{key} {mine}" if key else mine
            for key, mine, *others in zip(
                ("", *PROBLEM_SETTINGS), task[1:], *(other[1:] for other in like), strict=True
            )
            if len(set(others)) > 1
        ]
        names[task] = f"{task[0]} ({', '.join(told)})" if told else task[0]
    return names


def _setting_differences(reports: Sequence[_Report]) -> list[str]:
    """Return a sentence for each setting in which reports of a problem differ."""
    notes = []
    for key in dict.fromkeys(key for report in reports for key in report.settings if key not in UNCHECKED_SETTINGS):
        for other in reports[1:]:
            like = next(one for one in reports if _problem_key(one) == _problem_key(other))
            mine, its = (_format_setting(key, report.settings.get(key)) for report in (like, other))
            if mine != its:
                notes.append(f"{key}: {mine} in {like.folder}, {its} in {other.folder}")
    seen: dict[str, tuple[Path, Any]] = {}
    for report in reports:
        for method, words in report.settings["methods"].items():
            folder, before = seen.setdefault(method, (report.folder, words))
            if words != before:
                parts = [part for part in before if before[part] != words.get(part)]
                told = "; ".join(f"{part} {before[part]} and {words.get(part)}" for part in parts)
                notes.append(f"{method}: not the same in {folder} and {report.folder}: {told}")
    return notes


def _format_setting(key: str, value: object) -> str:
    if key == "tuning":
        # Of a search it counts that there was one: the rates that it found are those of the methods.
        return "none" if value is None else "searched"
    if key == "files" and isinstance(value, Mapping):
        return " and ".join(f"{path} {str(digest)[:8]}" for path, digest in value.items()) or "none"
    return "none" if value is None else str(value)


def _load_report(folder: Path) -> _Report:
    results = _read_json(folder / "results.json")
    settings = results.get("settings") if isinstance(results, dict) else None
    try:
        assert isinstance(settings, dict)
        (settings["data"]["name"], settings["data"]["checksum"], settings["target"] + 0.0, settings["num_updates"] + 0)
        wanted = [(method, seed) for method in settings["methods"] for seed in settings["seeds"]]
        clients = {
            (method, seed): [float(x) for x in run["client_accuracy"]]
            for method, told in results["methods"].items()
            for seed, run in zip(settings["seeds"], told["runs"], strict=True)
        }
    except (AssertionError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArgumentError(
            f"folders: {folder / 'results.json'}: expected what `manifoldagg compare` writes; {error!r}"
        ) from None
    rows = _read_log(folder / "log.jsonl")
    if missing := [key for key in wanted if key not in rows or key not in clients]:
        method, seed = missing[0]
        raise ArgumentError(
            f"folders: {folder / 'log.jsonl'}: expected rows of {method}, seed {seed}; there are no such rows"
        )
    for method, seed in wanted:
        first, last = rows[method, seed][0].updates, rows[method, seed][-1].updates
        if (first, last) != (0, settings["num_updates"]):
            raise ArgumentError(
                f"folders: {folder / 'log.jsonl'}: expected rows of {method}, seed {seed}, from update 0 to "
                f"{settings['num_updates']}, got those from {first} to {last}"
            )
    return _Report(folder, settings, {key: LoggedRun(folder, rows[key], clients[key]) for key in wanted})


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"folders: {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"folders: {path}: expected JSON; {error}") from None


def _read_log(path: Path) -> dict[tuple[str, int], list[Evaluation]]:
    """The log of each method and seed."""
    rows: dict[tuple[str, int], list[Evaluation]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"folders: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, start=1):
        try:
            tree = json.loads(line)
            key = tree.pop("method"), tree.pop("seed")
            row = _parse_evaluation(tree)
            before = rows.setdefault(key, [])
            if before and any(row.value_on(axis) < before[-1].value_on(axis) for axis in AXES):
                raise ValueError("it had spent less than the row before it")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ArgumentError(f"folders: {path}, line {number}: expected an evaluation; {error}") from None
        before.append(row)
    return rows


def _parse_evaluation(tree: Mapping[str, Any]) -> Evaluation:
    names = [field.name for field in fields(Evaluation)]
    if odd := sorted(set(names) ^ set(tree)):
        raise ValueError(f"{', '.join(odd)}: missing, or unknown")
    for name, value in tree.items():
        kind = int if name in INTEGER_FIELDS else int | float
        if name == "loss" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value) or value < 0:
            raise ValueError(f"{name}: {value!r}")
    return Evaluation(**tree)
