"""The report of a comparison: a folder of results and plots, which is written atomically."""

import json
import os
import platform
import re
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from manifoldagg._io import atomic_write, check_matplotlib
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments import plots
from manifoldagg.experiments.compare import Comparison
from manifoldagg.simulation.run_metadata import versions

__all__ = ["check_destination", "environment_info", "read_report", "write_report"]

FILES = ("results.json", "log.jsonl", "timing.json", "accuracy.png", "clients.png", "gantt.png", "plane.png")


def write_report(comparison: Comparison, folder: Path | str) -> list[Path]:
    """Write `results.json`, `log.jsonl`, `timing.json`, the plots, and `plane.png` if a curve was learned.

    Returns:
        The files, in that order.

    Raises:
        ArgumentError: if `folder` contains other files than a report, or cannot be written.
    """
    folder = Path(folder)
    check_destination(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder) as draft:
            draft.mkdir()
            _write_json(draft / FILES[0], comparison.results())
            lines = [json.dumps(row, allow_nan=False) + "\n" for row in comparison.log()]
            (draft / FILES[1]).write_text("".join(lines), encoding="utf-8")
            _write_json(draft / FILES[2], comparison.timing() | environment_info())
            _draw(comparison, draft)
    except OSError as error:
        raise ArgumentError(f"out: {folder} cannot be written: {error.strerror or error}") from error
    return [folder / file for file in FILES if (folder / file).exists()]


def read_report(folder: Path) -> dict[str, object]:
    """Read the files of a report in the format of `--json`, including `log`, `timing` and `files`.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a file is not JSON.
    """
    results, log, timing = ((folder / file).read_text(encoding="utf-8") for file in FILES[:3])
    rows = [json.loads(line) for line in log.splitlines()]
    files = [str(folder / file) for file in FILES if (folder / file).exists()]
    return {**json.loads(results), "log": rows, "timing": json.loads(timing), "files": files}


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
    try:
        if folder.is_symlink() or (folder.exists() and not _is_report(folder, files)):
            raise ArgumentError(f"{option}: {folder} exists and is not a report; choose another folder")
        parent = next(parent for parent in folder.absolute().parents if parent.exists())
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=parent):
            pass
    except OSError as error:
        raise ArgumentError(f"out: {folder} cannot be written: {error.strerror or error}") from None


def _is_report(folder: Path, files: Sequence[str]) -> bool:
    return folder.is_dir() and all(
        entry.is_file() and any(fnmatchcase(entry.name, file) for file in files) for entry in folder.iterdir()
    )


def _write_json(path: Path, tree: object) -> None:
    """Write a tree as JSON with one line for each entry and each list of plain values."""
    lines = json.dumps(tree, indent=1, allow_nan=False)
    lists = re.compile(r"\[\n *([^\[\]{}]*?)\n *\]")
    path.write_text(lists.sub(lambda found: "[" + re.sub(r"\n *", " ", found[1]) + "]", lines) + "\n")


def environment_info() -> dict[str, object]:
    """Return the versions and the machine of the timings."""
    return {
        "versions": {"python": platform.python_version(), **versions()},
        "machine": {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()},
    }


def _draw(comparison: Comparison, folder: Path) -> None:
    """Draw the plots. Traces and planes show the first seed, and the other plots show all seeds."""
    settings = comparison.settings
    title = f"{settings['data']['name']}, {settings['clients']} clients"
    rows = {name: [run.evaluations for run in runs] for name, runs in comparison.runs.items()}
    plots.draw_accuracy(folder / "accuracy.png", rows, target=settings["target"], title=title)
    clients = {name: [run.client_accuracy for run in runs] for name, runs in comparison.runs.items()}
    plots.draw_clients(folder / "clients.png", clients, title=title)
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
