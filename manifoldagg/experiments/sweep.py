"""Sweeps, which combine several comparisons to show the final accuracy of methods over the values of one setting."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.plots import draw_sweep
from manifoldagg.experiments.report import new_report, read_report
from manifoldagg.experiments.spec_parser import parse_literal, parse_spec
from manifoldagg.experiments.statistics import interval_columns

__all__ = ["load_sweep", "write_sweep"]

FILES = ("sweep.csv", "sweep.png")
UNCHECKED_SETTINGS = ("methods", "seeds", "tuning", "clients_without_samples", "target")
"""The settings in which the reports of a sweep may differ."""
Reports = Sequence[tuple[Path | str, Mapping[str, Any]]]
"""Folders and their reports."""
LABEL = re.compile(r"(?P<name>[^(]*)(?:\((?P<options>.*)\))?")


def load_sweep(folders: Iterable[Path | str], option: str) -> pd.DataFrame:
    """Read several reports of `manifoldagg compare`, and return the final accuracies for each value of an option.

    `option` names one of the following:

    - A setting of the comparison, such as `concurrency` or `clients`.
    - A parameter of a setting. For example, `partition.concentration` is 0.5 in a comparison with
      `--partition dirichlet:concentration=0.5`.
    - A parameter of methods. For example, `epochs` is 1 for `--methods fedasync:epochs=1`. Methods that differ only in
      this parameter are treated as the same method. Methods without this parameter are omitted.

    If a value consists of several numbers, as in `epochs=4+2`, only the first number is used.

    Returns:
        A row for each method and value, sorted by value: `method`, `value`, `seeds`, `mean`, `low` and `high`. The last
        two columns are the ends of the 95 % interval over the seeds; they are NaN with one seed.

    Raises:
        ArgumentError: if a folder is not a report, if the reports differ in other settings, if a report has no value
            of the option, if a value is not a number, if there are fewer than two values, or if two reports contain a
            run of the same method, value and seed.
    """
    return _frame(_read_reports(folders), option)


def _read_reports(folders: Iterable[Path | str]) -> Reports:
    reports = []
    for folder in folders:
        try:
            reports.append((folder, read_report(Path(folder))))
        except (OSError, ValueError, KeyError) as error:
            raise ArgumentError(f"folders: {folder}: expected a report of `manifoldagg compare`; {error}") from None
    if not reports:
        raise ArgumentError("folders: expected at least one report, got an empty list")
    return reports


def _frame(reports: Reports, option: str) -> pd.DataFrame:
    """Return the data frame of `load_sweep`."""
    _check_equal_settings(reports, option)
    finals: dict[tuple[str, float], dict[int, float]] = {}
    used = set()
    for folder, report in reports:
        last = {(row["method"], row["seed"]): row["accuracy"] for row in report["log"]}
        for (label, seed), accuracy in last.items():
            method, value = _method_and_value(report["settings"], label, option)
            if value is None:
                continue
            used.add(folder)
            seeds = finals.setdefault((method, _number(option, value)), {})
            if seed in seeds:
                raise ArgumentError(f"folders: {folder}: {method} with {option}={value} and seed {seed} is given twice")
            seeds[seed] = accuracy
    unused = [folder for folder, _ in reports if folder not in used]
    if finals and unused:
        raise ArgumentError(
            f"folders: {unused[0]}: expected a report with a value of {option}, got its default; set the option in "
            "each comparison"
        )
    if len({value for _, value in finals}) < 2:
        given = ", ".join(f"{value:g}" for _, value in finals) or "no value"
        raise ArgumentError(f"sweep: expected reports with two or more values of {option}, got {given}")
    rows = [
        {"method": method, "value": value, "seeds": len(seeds)} | interval_columns("mean", [*seeds.values()])
        for (method, value), seeds in sorted(finals.items(), key=lambda item: item[0][1])
    ]
    return pd.DataFrame(rows).rename(columns={"mean_low": "low", "mean_high": "high"})


def write_sweep(folders: Iterable[Path | str], option: str, out: Path | str) -> tuple[pd.DataFrame, list[Path]]:
    """Write the result of `load_sweep` to `sweep.csv`, and a plot of the result to `sweep.png`.

    The plot has one line for each method.

    Returns:
        The data frame, and the paths of the files.

    Raises:
        ArgumentError: for the same reasons as in `load_sweep`, or if `out` contains other files or cannot be written.
    """
    out = Path(out)
    reports = _read_reports(folders)
    frame = _frame(reports, option)
    settings = reports[0][1]["settings"]
    with new_report(out, FILES, option="out") as draft:
        frame.to_csv(draft / FILES[0], index=False, lineterminator="\n")
        metric = settings.get("metrics", ["accuracy"])[0]
        draw_sweep(draft / FILES[1], frame, option=option, title=settings["data"]["name"], metric=metric)
    return frame, [out / file for file in FILES]


def _method_and_value(settings: Mapping[str, Any], label: str, option: str) -> tuple[str, Any]:
    """Return the name of a method without the option, and the value of the option or `None`."""
    found = LABEL.fullmatch(label)
    assert found is not None
    options = dict(part.split("=", 1) for part in re.split(r", (?=[\w.]+=)", found["options"] or "") if "=" in part)
    if option in options:
        text = options.pop(option)
        rest = ", ".join("=".join(pair) for pair in options.items())
        return found["name"] + (f"({rest})" if rest else ""), parse_literal(text)
    setting, _, inner = option.partition(".")
    value = settings.get(setting)
    if not inner or value is None:
        return label, value
    given = parse_spec(setting, str(value)).options.get(inner)
    return label, None if given is None else parse_literal(given)


def _number(option: str, value: Any) -> float:
    """Convert a value to a number. A value with several parts counts as its first part."""
    value = value[0] if isinstance(value, tuple) else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentError(f"sweep: expected an option whose values are numbers, got {option}={value}")
    return float(value)


def _check_equal_settings(reports: Reports, option: str) -> None:
    """Check that the reports differ only in the option and in `UNCHECKED_SETTINGS`."""
    (first, one), *others = reports
    for folder, report in others:
        for name in dict.fromkeys([*one["settings"], *report["settings"]]):
            if name in UNCHECKED_SETTINGS:
                continue
            before, now = (_without(found["settings"].get(name), name, option) for found in (one, report))
            if before != now:
                raise ArgumentError(
                    f"folders: expected reports that differ only in {option}, got {name}: {before} in {first} and "
                    f"{now} in {folder}"
                )


def _without(value: Any, name: str, option: str) -> Any:
    """Return a setting without the swept option."""
    setting, _, inner = option.partition(".")
    if setting != name:
        return value
    if not inner or not isinstance(value, str):
        return None
    spec = parse_spec(name, value)
    return spec.name, {key: text for key, text in spec.options.items() if key != inner}
