"""Shared helpers: cached partial results, confidence intervals over seeds, and result files with metadata."""

import hashlib
import json
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from manifoldagg._io import atomic_write
from manifoldagg.experiments.statistics import MeanCI, mean_ci
from manifoldagg.simulation.metadata import versions

__all__ = ["RESULTS", "ROOT", "Parts", "cell", "command", "markdown", "table", "write"]

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = HERE.parent / "results" / "papers"


class Parts:
    """Cache of partial results. Each partial result is stored in its own JSON file.

    Args:
        folder: the directory of the cache files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, settings: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """Return the cached result of these settings, or call `make` and store what it returns.

        The cache key consists of `settings` and the package versions. `make` must return a JSON-serialisable value.
        """
        known = {"settings": dict(settings), "versions": versions()}
        name = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]
        path = self._folder / f"{name}.json"
        if path.is_file():
            return json.loads(path.read_text())["result"]
        result = make()
        self._folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as draft:
            draft.write_text(json.dumps({**known, "result": result}))
        print(" ".join(f"{key}={value}" for key, value in settings.items()), flush=True)
        return result


def command() -> str:
    """Return the command line that started this process."""
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", name, *sys.argv[1:]])


def cell(values: Sequence[float], digits: int, scale: float = 1.0) -> str:
    """Format the mean over seeds with its 95 % Student interval. An asterisk marks an interval that excludes 0."""
    found: MeanCI = mean_ci([scale * value for value in values])
    if found.half_width is None:
        return f"{found.value:.{digits}f}"
    sure = "*" if abs(found.value) > found.half_width > 0 else ""
    return f"{found.value:.{digits}f} ± {found.half_width:.{digits}f}{sure}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table with a left-aligned first column."""
    lines = [headings, ["---", *("---:" for _ in headings[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown(title: str, parts: Sequence[str], settings: Mapping[str, Any]) -> str:
    """Format a Markdown page with a title, its parts, the command line, the settings and the versions."""
    told = ", ".join(f"{name} {value}" for name, value in {**settings, **versions()}.items())
    return "\n\n".join([f"# {title}", *parts, f"`{command()}`: {told}."]) + "\n"


def write(out: Path, result: Mapping[str, Any], settings: Mapping[str, Any], page: str) -> None:
    """Write the result files `out.json` and `out.md`.

    `out.json` also contains the command, the settings and the versions. Its numbers have six significant digits.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    about = {"command": command(), "settings": dict(settings)}
    about |= {"versions": {"python": platform.python_version(), **versions()}, "threads": torch.get_num_threads()}
    with atomic_write(out.with_suffix(".json")) as draft:
        draft.write_text(json.dumps(_short({**about, **result})) + "\n")
    with atomic_write(out.with_suffix(".md")) as draft:
        draft.write_text(page)


def _short(tree: Any) -> Any:
    """Round all floating-point numbers of a JSON tree to six significant digits."""
    if isinstance(tree, Mapping):
        return {name: _short(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_short(value) for value in tree]
    return float(f"{tree:.6g}") if isinstance(tree, float) else tree
