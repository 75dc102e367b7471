"""A file of finished runs, from which an interrupted benchmark resumes."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

__all__ = ["Row", "Runs"]

Row = dict[str, Any]


class Runs:
    """Finished runs, stored as one JSON line per run with the settings of the run.

    Args:
        path: the path of the file.
        size: a dataclass with the settings. Runs with other settings are ignored.
    """

    free: ClassVar[tuple[str, ...]] = ()
    """The settings that may differ."""

    def __init__(self, path: Path, size: Any) -> None:
        self._path, self._size = path, json.loads(json.dumps(asdict(size)))
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the process was interrupted while it wrote a line
            path.write_text(whole)
        self._rows = [row for row in map(json.loads, whole.splitlines()) if self._fits(row["size"])]

    def _fits(self, size: Row) -> bool:
        anything = dict.fromkeys(self.free)
        return {**size, **anything} == {**self._size, **anything}

    def found(self, **key: Any) -> Row | None:
        """Return the run with these values, or `None` if the run is not finished."""
        return next((row for row in self._rows if key.items() <= row.items()), None)

    def add(self, row: Row) -> None:
        """Append a finished run."""
        row = {**row, "size": self._size}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._rows.append(row)
