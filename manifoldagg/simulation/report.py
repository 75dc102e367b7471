"""The folder that a comparison leaves behind: numbers and pictures, whole or not at all."""

import json
import os
import platform
import tempfile
import textwrap
from pathlib import Path

import numpy as np
import torch

from manifoldagg._output import check_plots, new_figure, whole
from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.compare import Comparison, Landscape

__all__ = ["check_destination", "machine", "write_report"]

FILES = ("results.json", "log.jsonl", "timing.json", "accuracy.png", "plane.png")
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
DASHES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)))
"""Lines of one colour differ by them."""
LONG = 32
"""Names are broken into lines of so many characters."""


def write_report(comparison: Comparison, folder: Path) -> list[Path]:
    """Write `results.json`, `log.jsonl`, `timing.json`, `accuracy.png` and, where a curve was learned, `plane.png`.

    The files are made beside `folder` and put in its place at the end: it never holds half a report.

    Returns:
        The files, in that order.

    Raises:
        ArgumentError: if `folder` is there but holds something other than a report, or cannot be written.
    """
    folder = Path(folder)
    check_destination(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with whole(folder) as draft:
            draft.mkdir()
            _write_json(draft / FILES[0], comparison.results())
            lines = [json.dumps(row, allow_nan=False) + "\n" for row in comparison.log()]
            (draft / FILES[1]).write_text("".join(lines), encoding="utf-8")
            _write_json(draft / FILES[2], comparison.timing() | machine())
            _draw_accuracy(comparison, draft / FILES[3])
            if comparison.landscape is not None:
                _draw_landscape(comparison.landscape, draft / FILES[4])
    except OSError as error:
        raise ArgumentError(f"out: {folder} cannot be written: {error}") from error
    return [folder / file for file in FILES if (folder / file).exists()]


def check_destination(folder: Path) -> None:
    """A folder that a report can be written to: nothing is made, and what is there already is a report.

    Raises:
        ArgumentError: if it holds something else, or cannot be made.
    """
    check_plots()
    try:
        if folder.is_symlink() or (folder.exists() and not _is_report(folder)):
            raise ArgumentError(f"name: {folder} exists and is not a report; choose another name")
        there = next(parent for parent in folder.absolute().parents if parent.exists())
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=there):
            pass
    except OSError as error:
        raise ArgumentError(f"out: {folder} cannot be written: {error}") from None


def _is_report(folder: Path) -> bool:
    return folder.is_dir() and all(entry.name in FILES and entry.is_file() for entry in folder.iterdir())


def _write_json(path: Path, tree: object) -> None:
    path.write_text(json.dumps(tree, indent=1, allow_nan=False) + "\n")


def machine() -> dict[str, object]:
    """The versions and the machine that times are of."""
    from manifoldagg import __version__

    return {
        "versions": {
            "manifoldagg": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "machine": {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()},
    }


def _draw_accuracy(comparison: Comparison, path: Path) -> None:
    """Mean over the seeds, and a band of one standard deviation where there are no more methods than colours."""
    settings = comparison.settings
    seeds = len(settings["seeds"])
    many = len(comparison.runs) > len(COLOURS)
    banded = seeds > 1 and not many
    labels = list(map(_label, comparison.runs))
    wide = max(map(len, comparison.runs)) > LONG
    height = 0.26 * sum(1 + label.count("\n") for label in labels)
    figure = new_figure(10 if many or wide else 8, max(4.5, height))
    axes = figure.subplots()
    for i, (label, runs) in enumerate(zip(labels, comparison.runs.values(), strict=True)):
        rounds = runs[0].evaluated
        curves = 100 * np.array([run.accuracy for run in runs])
        mean = curves.mean(0)
        turn, colour = divmod(i, len(COLOURS))
        axes.plot(rounds, mean, color=COLOURS[colour], linestyle=DASHES[turn % len(DASHES)], label=label)
        if banded:
            spread = curves.std(0, ddof=1)
            axes.fill_between(rounds, mean - spread, mean + spread, color=COLOURS[colour], alpha=0.18, linewidth=0)
    target = settings["target"]
    axes.axhline(100 * target, color="grey", linestyle=":", linewidth=1)
    axes.text(0, 100 * target + 0.8, f" target {target:.0%}", color="grey", fontsize="small")
    axes.set_xlabel("round (one client's update each)")
    axes.set_ylabel("accuracy on held-out samples, %")
    shown = " (mean, band ± 1 sd)" if banded else " (mean)" if seeds > 1 else ""
    axes.set_title(
        f"{_plain(settings['data']['name'])}, {settings['clients']} clients, {seeds} seed{'s' * (seeds > 1)}{shown}"
    )
    axes.set_xlim(0, settings["rounds"])
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.25)
    if many or wide:
        figure.legend(loc="outside right upper", fontsize="small")
    else:
        axes.legend(loc="lower right", fontsize="small")
    figure.savefig(path)


def _label(name: str, width: int = LONG) -> str:
    """A name for a picture, in lines that are not long."""
    return _plain(textwrap.fill(name, width))


def _plain(text: str) -> str:
    """As it is: nothing between two `$` is a formula."""
    return text.replace("$", r"\$")


def _draw_landscape(landscape: Landscape, path: Path) -> None:
    figure = new_figure(13, 5.2)
    left, right = figure.subplots(1, 2)
    landscape.local.plot(left, label="cross-entropy")
    left.set_title(f"(a) training data of client {landscape.client}")
    landscape.held_out.plot(right, label="cross-entropy")
    right.set_title("(b) held-out data of all clients")
    left.legend(loc="best", fontsize="small", framealpha=0.9)
    figure.suptitle(f"{_label(landscape.method, 100)}: the curve learned in round {landscape.round}")
    figure.savefig(path)
