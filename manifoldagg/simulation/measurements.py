"""A reader of CSV files with the measured times of devices."""

import csv
from pathlib import Path

from manifoldagg._validation import check_number
from manifoldagg.errors import ArgumentError

__all__ = ["read_measurements"]

COLUMNS = ("client", "computation_s", "round_s")


def read_measurements(path: Path | str) -> dict[str, list[tuple[float, float]]]:
    """Read the computation and communication times of measured tasks, in seconds, from a CSV file.

    [`Empirical.from_csv`][manifoldagg.simulation.Empirical.from_csv] describes the columns of the file.

    Returns:
        The tasks of each device, in the order of the file.

    Raises:
        ArgumentError: if the file is invalid. The message names the file and the line.
    """
    tasks: dict[str, list[tuple[float, float]]] = {}
    line = 1
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file, strict=True)
            names = [*(rows.fieldnames or ())]
            if any(names.count(name) != 1 for name in COLUMNS):
                raise ArgumentError(f"expected one column for each of {', '.join(COLUMNS)}, got {names}")
            for row in rows:
                line = rows.line_num
                if None in row or not row["client"]:
                    raise ArgumentError(f"expected {len(names)} fields with a name of the client")
                device, seconds, total = (row[name] for name in COLUMNS)
                computation = check_number("computation_s", float(seconds), at_least=0)
                whole = check_number("round_s", float(total), at_least=computation)
                tasks.setdefault(device, []).append((computation, whole - computation))
    except OSError as error:
        raise ArgumentError(f"path: {path} cannot be read: {error.strerror or error}") from None
    except (TypeError, ValueError, csv.Error) as error:
        raise ArgumentError(f"path: {path}, line {line}: {error}") from None
    if not tasks:
        raise ArgumentError(f"path: expected measured tasks, got {path} without rows")
    return tasks
