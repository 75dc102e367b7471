"""Reports of several comparisons, read and joined: what each method was worth on each task, on equal terms."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.statistics import Mean, Pair, compared, mean_of
from manifoldagg.simulation.cost import AXES, Evaluation, reached, within
from manifoldagg.simulation.spec_parser import pick

__all__ = ["Against", "Joined", "Logged", "Row", "join"]

COUNTS = ("round", "gradients", "bytes_down", "bytes_up", "refused", "staleness_max")
PROBLEM = (
    *("model", "clients", "partition", "holdout", "validation", "batch"),
    *("scheduler", "delays", "participation", "files", "work"),
)
"""Settings that make a task, with the data."""
APART = ("data", "methods", "seeds", "not scheduled", *PROBLEM)
"""Settings in which reports of a task may differ, or cannot."""
Identity = tuple[str, ...]


@dataclass(frozen=True)
class Logged:
    """A run as a report has it.

    Attributes:
        folder: of the report.
        evaluations: its log.
        client_accuracy: of its best model.
    """

    folder: Path
    evaluations: list[Evaluation]
    client_accuracy: list[float]


@dataclass(frozen=True)
class Row:
    """A method on a task, over its seeds.

    Attributes:
        task: the task.
        method: the method.
        seeds: how many.
        final: accuracy at the end of each run.
        equal: accuracy by axis, where each run had spent no more than the task's `Joined.budget` on it.
        rounds: to the target, of the runs that reached it; `None` if none did.
        time: to the target, likewise, in virtual seconds.
        reached: how many did.
        last: what a run had spent at its end, the mean of each axis.
        loss: at the end, of the runs where it is finite; `None` if there are none.
        gini: of the clients' accuracies at the end.
        theil: likewise.
    """

    task: str
    method: str
    seeds: int
    final: Mean
    equal: Mapping[str, Mean]
    rounds: Mean | None
    time: Mean | None
    reached: int
    last: Mapping[str, float]
    loss: Mean | None
    gini: Mean
    theil: Mean


@dataclass(frozen=True)
class Against:
    """How much more accurate a method was on a task than another one, seed by seed.

    Attributes:
        task: the task.
        method: the method.
        other: the other one.
        equal: the difference by axis, over the seeds that both have, where each run had spent no more than all runs of
            these two did.
    """

    task: str
    method: str
    other: str
    equal: Mapping[str, Mean]


@dataclass(frozen=True)
class Joined:
    """Runs of several reports.

    Attributes:
        runs: by task, method and seed.
        targets: by task.
        notes: in which settings reports of one task differ, but for methods and seeds.
    """

    runs: Mapping[str, Mapping[str, Mapping[int, Logged]]]
    targets: Mapping[str, float]
    notes: Sequence[str] = ()

    def budget(self, task: str, axis: str) -> float:
        """The most on an axis that every run of a task spent: what all methods reach."""
        return min(run.evaluations[-1].along(axis) for seeds in self.runs[task].values() for run in seeds.values())

    def rows(self) -> list[Row]:
        """A row for each task and method."""
        return [
            self._row(task, method, list(seeds.values()))
            for task, methods in self.runs.items()
            for method, seeds in methods.items()
        ]

    def pairs(self, axis: str) -> list[Pair]:
        """Every pair of methods, by accuracy where all methods of a task had spent equally much on an axis."""
        budgets = {task: self.budget(task, axis) for task in self.runs}
        scores: dict[str, dict[Any, float]] = {}
        for task, methods in self.runs.items():
            for method, seeds in methods.items():
                for seed, run in seeds.items():
                    found = within(run.evaluations, axis, budgets[task])
                    scores.setdefault(method, {})[task, seed] = found.accuracy
        return compared(scores)

    def against(self, other: str) -> list[Against]:
        """Every method but `other` beside it, on each task that has both, with intervals of the paired differences.

        Terms are equal for the two: how little a third one spent does not count.

        Raises:
            ArgumentError: if no task has it, or no method and seed beside it.
        """
        names = dict.fromkeys(method for methods in self.runs.values() for method in methods)
        pick("against", "method", other, names)
        found = []
        for task, methods in self.runs.items():
            for method, seeds in methods.items():
                both = [seed for seed in seeds if seed in methods.get(other, {})]
                if method != other and both:
                    pairs = [(seeds[seed].evaluations, methods[other][seed].evaluations) for seed in both]
                    found.append(Against(task, method, other, {axis: _difference(pairs, axis) for axis in AXES}))
        if not found:
            raise ArgumentError(f"against: expected a method that has a task and a seed with another; got {other}")
        return found

    def _row(self, task: str, method: str, runs: Sequence[Logged]) -> Row:
        logs = [run.evaluations for run in runs]
        last = [rows[-1] for rows in logs]
        hits = [row for rows in logs if (row := reached(rows, self.targets[task])) is not None]
        losses = [row.loss for row in last if row.loss is not None]
        equal = {
            axis: mean_of([within(rows, axis, self.budget(task, axis)).accuracy for rows in logs]) for axis in AXES
        }
        return Row(
            task,
            method,
            len(runs),
            final=mean_of([row.accuracy for row in last]),
            equal=equal,
            rounds=mean_of([row.round for row in hits]) if hits else None,
            time=mean_of([row.time for row in hits]) if hits else None,
            reached=len(hits),
            last={axis: mean_of([row.along(axis) for row in last]).value for axis in AXES},
            loss=mean_of(losses) if losses else None,
            gini=mean_of([row.gini for row in last]),
            theil=mean_of([row.theil for row in last]),
        )


def _difference(pairs: Sequence[tuple[list[Evaluation], list[Evaluation]]], axis: str) -> Mean:
    """Of the accuracies of pairs of runs, where all had spent equally much."""
    budget = min(rows[-1].along(axis) for pair in pairs for rows in pair)
    return mean_of([within(a, axis, budget).accuracy - within(b, axis, budget).accuracy for a, b in pairs])


def join(folders: Iterable[Path | str]) -> Joined:
    """Read the reports of `manifoldagg compare` in these folders, and join their runs.

    A task is a data set, known by its name and a checksum of its samples, with what learns it, who holds which part and
    who comes when. Tasks of one data set are called by what differs. Reports of one task may differ in more than
    methods and seeds, such as in their rounds: what it is, the notes say.

    Raises:
        ArgumentError: if a folder is no report, naming the file and what is wrong with it; or if two have a run of the
            same task, method and seed, naming both.
    """
    reports = [_read(Path(folder)) for folder in folders]
    if not reports:
        raise ArgumentError("folders: expected at least one report, got none")
    names = _names(reports)
    runs: dict[str, dict[str, dict[int, Logged]]] = {}
    for report in reports:
        task = names[_identity(report)]
        for (method, seed), run in report.runs.items():
            seeds = runs.setdefault(task, {}).setdefault(method, {})
            if seed in seeds:
                raise ArgumentError(
                    f"folders: {seeds[seed].folder} and {run.folder} both have {method} on {task}, seed {seed}"
                )
            seeds[seed] = run
    targets: dict[str, float] = {}
    for report in reports:
        targets.setdefault(names[_identity(report)], report.settings["target"])
    return Joined(runs, targets, _notes(reports))


@dataclass(frozen=True)
class _Report:
    folder: Path
    settings: Mapping[str, Any]
    runs: Mapping[tuple[str, int], Logged]


def _identity(report: _Report) -> Identity:
    data = report.settings["data"]
    return data["name"], data["checksum"], *(_words(key, report.settings.get(key)) for key in PROBLEM)


def _names(reports: Sequence[_Report]) -> dict[Identity, str]:
    """What tasks are called: those of data of one name have behind it in what they differ."""
    known = list(dict.fromkeys(map(_identity, reports)))
    names = {}
    for task in known:
        like = [other for other in known if other[0] == task[0]]
        told = [
            f"{key} {mine}" if key else mine
            for key, mine, *others in zip(("", *PROBLEM), task[1:], *(other[1:] for other in like), strict=True)
            if len(set(others)) > 1
        ]
        names[task] = f"{task[0]} ({', '.join(told)})" if told else task[0]
    return names


def _notes(reports: Sequence[_Report]) -> list[str]:
    """A sentence for each setting in which reports of a task differ."""
    notes = []
    for key in dict.fromkeys(key for report in reports for key in report.settings if key not in APART):
        for other in reports[1:]:
            like = next(one for one in reports if _identity(one) == _identity(other))
            mine, its = (_words(key, report.settings.get(key)) for report in (like, other))
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


def _words(key: str, value: object) -> str:
    if key == "tuning":
        # Of a search it counts that there was one: the rates that it found are those of the methods.
        return "none" if value is None else "searched"
    if key == "files" and isinstance(value, Mapping):
        return " and ".join(f"{path} {str(digest)[:8]}" for path, digest in value.items()) or "none"
    return "none" if value is None else str(value)


def _read(folder: Path) -> _Report:
    results = _tree(folder / "results.json")
    settings = results.get("settings") if isinstance(results, dict) else None
    try:
        assert isinstance(settings, dict)
        (settings["data"]["name"], settings["data"]["checksum"], settings["target"] + 0.0, settings["rounds"] + 0)
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
    rows = _rows(folder / "log.jsonl")
    if missing := [key for key in wanted if key not in rows or key not in clients]:
        method, seed = missing[0]
        raise ArgumentError(f"folders: {folder / 'log.jsonl'}: expected rows of {method}, seed {seed}; there are none")
    for method, seed in wanted:
        first, last = rows[method, seed][0].round, rows[method, seed][-1].round
        if (first, last) != (0, settings["rounds"]):
            raise ArgumentError(
                f"folders: {folder / 'log.jsonl'}: expected rows of {method}, seed {seed}, from round 0 to "
                f"{settings['rounds']}, got those from {first} to {last}"
            )
    return _Report(folder, settings, {key: Logged(folder, rows[key], clients[key]) for key in wanted})


def _tree(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"folders: {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"folders: {path}: expected JSON; {error}") from None


def _rows(path: Path) -> dict[tuple[str, int], list[Evaluation]]:
    """The log of each method and seed."""
    rows: dict[tuple[str, int], list[Evaluation]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"folders: {path} cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        try:
            tree = json.loads(line)
            key = tree.pop("method"), tree.pop("seed")
            row = _evaluation(tree)
            before = rows.setdefault(key, [])
            if before and any(row.along(axis) < before[-1].along(axis) for axis in AXES):
                raise ValueError("it had spent less than the row before it")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ArgumentError(f"folders: {path}, line {number}: expected an evaluation; {error}") from None
        before.append(row)
    return rows


def _evaluation(tree: Mapping[str, Any]) -> Evaluation:
    names = [field.name for field in fields(Evaluation)]
    if odd := sorted(set(names) ^ set(tree)):
        raise ValueError(f"{', '.join(odd)}: missing, or unknown")
    for name, value in tree.items():
        kind = int if name in COUNTS else int | float
        if name == "loss" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value) or value < 0:
            raise ValueError(f"{name}: {value!r}")
    return Evaluation(**tree)
