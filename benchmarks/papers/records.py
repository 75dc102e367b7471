"""What the scripts here share: parts that are kept as they are done, intervals over seeds, results that say whence."""

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
    """Parts of a result, each kept in a file of its own once it is done, and not done again.

    Args:
        folder: where they lie.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, settings: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """What `make` returns, for JSON; the same as was kept, where a part of these settings and versions was."""
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
    """The line that this process was begun with."""
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", name, *sys.argv[1:]])


def cell(values: Sequence[float], digits: int, scale: float = 1.0) -> str:
    """The mean over seeds with Student's interval of 95 %; an asterisk where it leaves out 0."""
    found: MeanCI = mean_ci([scale * value for value in values])
    if found.half_width is None:
        return f"{found.value:.{digits}f}"
    sure = "*" if abs(found.value) > found.half_width > 0 else ""
    return f"{found.value:.{digits}f} ± {found.half_width:.{digits}f}{sure}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown, the first column to the left."""
    lines = [headings, ["---", *("---:" for _ in headings[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown(title: str, parts: Sequence[str], settings: Mapping[str, Any]) -> str:
    """A page with a title, its parts, and how it came about."""
    told = ", ".join(f"{name} {value}" for name, value in {**settings, **versions()}.items())
    return "\n\n".join([f"# {title}", *parts, f"`{command()}`: {told}."]) + "\n"


def write(out: Path, result: Mapping[str, Any], settings: Mapping[str, Any], page: str) -> None:
    """Write `out.json`, with command, settings and versions, numbers to six digits, and `out.md`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    about = {"command": command(), "settings": dict(settings)}
    about |= {"versions": {"python": platform.python_version(), **versions()}, "threads": torch.get_num_threads()}
    with atomic_write(out.with_suffix(".json")) as draft:
        draft.write_text(json.dumps(_short({**about, **result})) + "\n")
    with atomic_write(out.with_suffix(".md")) as draft:
        draft.write_text(page)


def _short(tree: Any) -> Any:
    """The same with its numbers rounded to six digits."""
    if isinstance(tree, Mapping):
        return {name: _short(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_short(value) for value in tree]
    return float(f"{tree:.6g}") if isinstance(tree, float) else tree
