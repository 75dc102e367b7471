"""Reports of comparisons. A report is a folder that contains results and plots. It is written atomically."""

import json
import os
import platform
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pandas as pd

from manifoldagg._io import atomic_write, check_matplotlib, os_errors
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments import plots
from manifoldagg.experiments.compare import Comparison
from manifoldagg.simulation.cost import Evaluation
from manifoldagg.simulation.metadata import versions

__all__ = ["LoggedRun", "check_destination", "environment_info", "read_report", "read_reports", "write_report"]

FILES = (
    *("results.json", "log.jsonl", "timing.json"),
    *("accuracy.png", "clients.png", "starts.png", "gantt.png", "plane.png"),
)
PROBLEM_SETTINGS = (
    *("model", "clients", "partition", "holdout", "validation", "batch"),
    *("scheduler", "delays", "availability", "files", "task_cost", "augment", "metrics"),
)
"""The settings that define a problem, together with the data."""
UNCHECKED_SETTINGS = ("data", "methods", "seeds", "clients_without_samples", *PROBLEM_SETTINGS)
"""The settings that define a problem, or that usually differ between the reports of a problem."""
Runs = dict[str, dict[str, dict[int, "LoggedRun"]]]
"""Runs by problem, method and seed."""


@dataclass(frozen=True)
class LoggedRun:
    """A simulated run that was read from a report of `manifoldagg compare`.

    Attributes:
        folder: the folder of the report.
        evaluations: the evaluations of the server's model, in order.
        client_accuracy: the accuracy for each client. All values belong to the evaluated model with the highest overall
            accuracy. Clients are omitted if they have no held-out samples, or if the metric is undefined for them.
    """

    folder: Path
    evaluations: list[Evaluation]
    client_accuracy: list[float]


@dataclass(frozen=True)
class _Report:
    folder: Path
    settings: Mapping[str, Any]
    runs: Mapping[tuple[str, int], LoggedRun]

    @property
    def problem(self) -> tuple[str, ...]:
        """The identity of the problem: the data set and the settings that define the problem."""
        data = self.settings["data"]
        return data["name"], data["checksum"], *(self.setting(key) for key in PROBLEM_SETTINGS)

    def setting(self, key: str) -> str:
        """Return a setting as text."""
        value = self.settings.get(key)
        if key == "tuning" and value is not None:
            # The rates of the methods already include the results of a search.
            return "searched"
        if key == "files" and isinstance(value, Mapping):
            return " and ".join(f"{path} {str(digest)[:8]}" for path, digest in value.items()) or "none"
        return "none" if value is None else str(value)


def write_report(comparison: Comparison, folder: Path | str) -> list[Path]:
    """Write the results and the plots of a comparison to a folder.

    The folder contains `results.json`, `log.jsonl`, `timing.json` and the plots. Two of the plots are optional:

    - `starts.png` shows the accuracy of the models that clients received, if the comparison evaluated them.
    - `plane.png` shows the loss near a curve in parameter space, if a client learned such a curve.

    Returns:
        The paths of the files, in this order.

    Raises:
        ArgumentError: if `folder` contains other files than a report, or cannot be written.
    """
    folder = Path(folder)
    with new_report(folder) as draft:
        _write_json(draft / FILES[0], comparison.results())
        lines = [json.dumps(row, allow_nan=False) + "\n" for row in comparison.log()]
        (draft / FILES[1]).write_text("".join(lines), encoding="utf-8")
        _write_json(draft / FILES[2], comparison.timing() | environment_info())
        _draw(comparison, draft)
    return [folder / file for file in FILES if (folder / file).exists()]


@contextmanager
def new_report(folder: Path, files: Sequence[str] = FILES, *, option: str = "name") -> Iterator[Path]:
    """Create a folder for the files that the `with` block writes. It replaces an existing report as a whole.

    The arguments and the errors are those of `check_destination`.
    """
    check_destination(folder, files, option=option)
    with os_errors(f"out: {folder} cannot be written", ArgumentError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder) as draft:
            draft.mkdir()
            yield draft


def read_report(folder: Path) -> dict[str, Any]:
    """Read a report that `manifoldagg compare` wrote to a folder.

    The result equals the JSON object that this command prints with the option `--json`. It contains the entries of
    `results.json`, the content of the files `log.jsonl` and `timing.json` as `log` and `timing`, and the paths of all
    files as `files`.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a file is not JSON.
    """
    results, log, timing = ((folder / file).read_text(encoding="utf-8") for file in FILES[:3])
    rows = [json.loads(line) for line in log.splitlines()]
    files = [str(folder / file) for file in FILES if (folder / file).exists()]
    return {**json.loads(results), "log": rows, "timing": json.loads(timing), "files": files}


def read_reports(folders: Iterable[Path | str]) -> tuple[Runs, dict[str, float], list[str]]:
    """Read several reports of `manifoldagg compare`, and group their runs by problem.

    Two runs belong to the same problem if all of these are equal:

    - the data set, identified by its name and a checksum of its samples;
    - the model, the batch size, the augmentation and the metrics;
    - the partition over clients and the held-out samples;
    - the settings that determine the order of events.

    The name of a problem is the name of its data set. If several problems have the same data set, the name of each
    problem also contains the settings that differ.

    Returns:
        Three values: the runs by problem, method and seed; the target of each problem; and sentences about other
        settings in which reports of a problem differ.

    Raises:
        ArgumentError: if a folder is not a report (the message describes the fault), or if two reports contain a run of
            the same problem, method and seed.
    """
    reports = [_read_report(Path(folder)) for folder in folders]
    if not reports:
        raise ArgumentError("folders: expected at least one report, got an empty list")
    names = _problem_names(list(dict.fromkeys(report.problem for report in reports)))
    runs: Runs = {}
    targets: dict[str, float] = {}
    for report in reports:
        problem = names[report.problem]
        targets.setdefault(problem, report.settings["target"])
        for (method, seed), run in report.runs.items():
            seeds = runs.setdefault(problem, {}).setdefault(method, {})
            if seed in seeds:
                raise ArgumentError(
                    f"folders: {seeds[seed].folder} and {run.folder} both have {method} on {problem}, seed {seed}"
                )
            seeds[seed] = run
    return runs, targets, _setting_differences(reports)


def check_destination(folder: Path, files: Sequence[str] = FILES, *, option: str = "name") -> None:
    """Check that a report can be written to a folder, and that an existing folder is a report.

    Args:
        folder: the folder.
        files: patterns of the files of a report.
        option: the option that names the folder, for the error.

    Raises:
        ArgumentError: if the folder contains other files, or cannot be created.
    """
    check_matplotlib()
    with os_errors(f"out: {folder} cannot be written", ArgumentError):
        if folder.is_symlink() or (folder.exists() and not _is_report(folder, files)):
            raise ArgumentError(f"{option}: {folder} exists and is not a report; choose another folder")
        parent = next(parent for parent in folder.absolute().parents if parent.exists())
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=parent):
            pass


def environment_info() -> dict[str, object]:
    """Return the package versions and the machine, which determine the timings."""
    return {
        "versions": {"python": platform.python_version(), **versions()},
        "machine": {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()},
    }


def _is_report(folder: Path, files: Sequence[str]) -> bool:
    return folder.is_dir() and all(
        entry.is_file() and any(fnmatchcase(entry.name, file) for file in files) for entry in folder.iterdir()
    )


def _write_json(path: Path, tree: object) -> None:
    """Write nested values as JSON. Each entry and each list of plain values is one line."""
    lines = json.dumps(tree, indent=1, allow_nan=False)
    lists = re.compile(r"\[\n *([^\[\]{}]*?)\n *\]")
    path.write_text(lists.sub(lambda found: "[" + re.sub(r"\n *", " ", found[1]) + "]", lines) + "\n")


def _draw(comparison: Comparison, folder: Path) -> None:
    """Draw the plots. Start models, traces and planes are those of the first seed."""
    settings = comparison.settings
    title = f"{settings['data']['name']}, {settings['clients']} clients"
    rows = {name: [run.evaluations for run in runs] for name, runs in comparison.runs.items()}
    plots.draw_accuracy(folder / "accuracy.png", rows, target=settings["target"], title=title)
    clients = {name: [run.client_accuracy for run in runs] for name, runs in comparison.runs.items()}
    metric = plots.metric_name(rows)
    plots.draw_clients(folder / "clients.png", clients, title=title, metric=metric)
    if starts := {name: runs[0].starts for name, runs in comparison.runs.items() if runs[0].starts}:
        plots.draw_starts(folder / "starts.png", starts, title=f"{title}, seed {settings['seeds'][0]}", metric=metric)
    traces = {name: runs[0].trace for name, runs in comparison.runs.items()}
    plots.draw_traces(folder / "gantt.png", traces, title=f"{title}, seed {settings['seeds'][0]}")
    if comparison.landscape is not None:
        found = comparison.landscape
        planes = {
            f"training data of client {found.client}": found.local,
            "held-out data of all clients": found.held_out,
        }
        title = f"{found.method}: the curve learned in update {found.update_index}"
        plots.draw_planes(folder / "plane.png", planes, title=title)


def _problem_names(known: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """Name each problem after its data set and the settings that distinguish it."""
    frame = pd.DataFrame(known, columns=["name", "", *PROBLEM_SETTINGS])
    names = {}
    for name, like in frame.groupby("name"):
        differing = [key for key in like.columns[1:] if like[key].nunique() > 1]
        for problem, row in zip((known[i] for i in like.index), like[differing].itertuples(index=False), strict=True):
            text = ", ".join(f"{key} {value}".strip() for key, value in zip(differing, row, strict=True))
            names[problem] = f"{name} ({text})" if text else str(name)
    return names


def _setting_differences(reports: Sequence[_Report]) -> list[str]:
    """Return a sentence for each setting in which reports of a problem differ."""
    notes = []
    for key in dict.fromkeys(key for report in reports for key in report.settings if key not in UNCHECKED_SETTINGS):
        for other in reports[1:]:
            like = next(one for one in reports if one.problem == other.problem)
            if like.setting(key) != other.setting(key):
                notes.append(f"{key}: {like.setting(key)} in {like.folder}, {other.setting(key)} in {other.folder}")
    seen: dict[str, tuple[Path, Any]] = {}
    for report in reports:
        for method, made in report.settings["methods"].items():
            folder, before = seen.setdefault(method, (report.folder, made))
            parts = [f"{part} {before[part]} and {made.get(part)}" for part in before if before[part] != made.get(part)]
            if parts:
                notes.append(f"{method}: differs between {folder} and {report.folder}: {'; '.join(parts)}")
    return notes


def _read_report(folder: Path) -> _Report:
    try:
        results = json.loads((folder / FILES[0]).read_text(encoding="utf-8"))
        settings = results["settings"]
        rows: dict[tuple[str, int], list[Evaluation]] = {}
        for line in (folder / FILES[1]).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rows.setdefault((row.pop("method"), row.pop("seed")), []).append(Evaluation(**row))
        runs = {
            (method, seed): LoggedRun(folder, rows[method, seed], run["client_accuracy"])
            for method in settings["methods"]
            for seed, run in zip(settings["seeds"], results["methods"][method]["runs"], strict=True)
        }
        report = _Report(folder, settings, runs)
        for (method, seed), logged in runs.items():
            first = logged.evaluations[0].updates
            last = logged.evaluations[-1].updates
            if first or not (last == settings["num_updates"] or "duration" in settings):
                raise ValueError(
                    f"the log of {method}, seed {seed} has updates {first} to {last} of {settings['num_updates']}"
                )
        _ = report.problem, settings["target"] + 0.0
    except OSError as error:
        raise ArgumentError(f"folders: {error.filename} cannot be read: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ArgumentError(f"folders: {folder}: expected a report of `manifoldagg compare`; {error!r}") from None
    return report
