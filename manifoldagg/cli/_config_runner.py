"""Runner of the comparisons in a TOML file: one command line for each table, in order."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from manifoldagg.cli._console import UsageError
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.config_file import command_lines, options_by_name
from manifoldagg.experiments.datasets import DATASETS, load_dataset
from manifoldagg.experiments.default_rates import methods_with_scaled_rates
from manifoldagg.experiments.registry import methods
from manifoldagg.experiments.run_report import read_report
from manifoldagg.experiments.tuning import with_rate
from manifoldagg.simulation import registry
from manifoldagg.simulation.method import Method
from manifoldagg.simulation.run_metadata import referenced_files, versions
from manifoldagg.simulation.spec_parser import Spec, error_context, parse_literal, parse_spec
from manifoldagg.simulation.stable_repr import stable_repr

EXCLUDED_OPTIONS = ("config", "only", "name")
"""Options that have no place in a file."""
SHARED_SETTINGS = (
    *(
        "clients",
        "num_updates",
        "partition",
        "holdout",
        "validation",
        "batch",
        "scheduler",
        "delays",
        "availability",
        "task_cost",
    ),
    *("concurrency", "eval_every"),
)
"""Options that are settings of a comparison by the same name and value."""
FILE_OPTIONS = ("data", "scheduler", "delays", "availability")
"""Options whose words may name a file."""


def run_config(context: typer.Context, path: Path, only: Sequence[str]) -> None:
    """Run the command once for each table of a file; typed options override those of the table.

    Everything is read before the first one runs. Paths in the file are relative to it, those typed to where one is.

    Raises:
        ArgumentError: naming the table that does not fit, and what is wrong in it.
    """
    command = context.command
    typed = {
        option.name: context.params[option.name]
        for option in command.params
        if option.name is not None
        and _is_on_command_line(context, option.name)
        and option.name not in ("config", "only")
    }
    if "name" in typed:
        raise ArgumentError("name: expected no name with --config: reports are named after its tables")
    lines = command_lines(path, options_by_name(command.params, EXCLUDED_OPTIONS), only)
    here, there = Path.cwd(), path.parent.absolute()
    for name in FILE_OPTIONS if here != there else ():
        if typed.get(name) is not None:
            typed[name] = _rebase_paths(there, name, typed[name])
    if typed.keys() & {"data", "methods"}:
        sys.path.insert(0, str(here))
    # Where a module of the user's is looked for, as by `python -m`.
    sys.path.insert(0, "")
    runs = {}
    with chdir(there):
        for name, words in lines.items():
            with error_context(f"{path}: {name}"):
                runs[name] = made = _parse_command(command, words, context)
                moved = there if _is_on_command_line(made, "out") and "out" not in typed else here
                made.params |= {**typed, "name": name}
                if moved != there or here != there:
                    made.params["out"] = moved / made.params["out"]
                _check_names(made.params)
        for count, (name, made) in enumerate(runs.items(), start=1):
            say = Console(stderr=made.params["as_json"])
            with error_context(f"{path}: {name}"):
                over = _load_finished(made.params) if made.params["resume"] else None
                told = f": is finished, in {made.params['out'] / name}" if over else ""
                say.print(f"{name} ({count} of {len(runs)}){told}", highlight=False, markup=False, soft_wrap=True)
                if over is None:
                    command.invoke(made)
                elif made.params["as_json"]:
                    print(json.dumps(over), flush=True)


def _is_on_command_line(context: Any, name: str) -> bool:
    """Whether an option stands on the command line."""
    return bool(context.get_parameter_source(name).name == "COMMANDLINE")


def _rebase_paths(folder: Path, option: str, spec: str) -> str:
    """Words in which files that are meant from here are named from another folder.

    What is not a file here but would be one there is taken for one that is missing.
    """
    chosen = parse_spec(option, spec)
    is_there = Path.exists if chosen.name in DATASETS else Path.is_file
    moved = {
        name: os.path.relpath(text, folder.resolve())
        for name, text in chosen.options.items()
        if text and isinstance(parse_literal(text), str) and not Path(text).is_absolute()
        if is_there(Path(text)) or is_there(folder / text)
    }
    return str(Spec(chosen.name, {**chosen.options, **moved})) if moved else spec


def _parse_command(command: Any, arguments: list[str], context: Any) -> Any:
    """What the command understands of a command line."""
    try:
        return command.make_context(command.name, arguments, parent=context.parent)
    except UsageError as error:
        raise ArgumentError(error.format_message()) from None


def _load_finished(params: dict[str, Any]) -> dict[str, Any] | None:
    """The report of a comparison if it is there, of these settings, files and versions, and none is in progress."""
    report = params["out"] / params["name"]
    if report.with_name(f"{report.name}.unfinished").exists():
        return None
    try:
        found: dict[str, Any] = read_report(report)
        settings, then = found["settings"], dict(found["timing"]["versions"])
        tuning = settings["tuning"]
        if (tuning is not None and len(tuning["seeds"])) != (params["tune"] and params["tune_seeds"]):
            return None
        chosen = _methods(params)
        for place, method in enumerate(chosen if params["tune"] else ()):
            tried = tuning["methods"][method.name]
            if isinstance(tried, dict):
                chosen[place] = with_rate(method, tried["chosen"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    given = load_dataset(params["data"], params["model"])
    expected = {name: params[name] for name in SHARED_SETTINGS} | {
        "data": {"name": given.name, "checksum": f"{given.checksum:08x}"},
        "model": stable_repr(given.model),
        "target": given.target if params["target"] is None else params["target"],
        "seeds": list(range(params["seeds"])),
        "files": referenced_files(params["scheduler"], params["delays"], params["availability"]),
        "methods": {one.name: {"rule": stable_repr(one.rule), "trainer": stable_repr(one.trainer)} for one in chosen},
    }
    same = all(settings.get(name) == value for name, value in expected.items())
    return found if same and versions().items() <= then.items() else None


def _methods(params: dict[str, Any]) -> list[Method]:
    """Build the methods as the command does: with scaled default rates unless it searches for rates."""
    rates = list(params["rate"] or ())
    if params["tune"]:
        return methods(params["methods"], rates)
    return methods_with_scaled_rates(
        params["methods"], rates, clients=params["clients"], concurrency=params["concurrency"]
    )[0]


def _check_names(params: dict[str, Any]) -> None:
    """See that names mean something, before anything is run."""
    _methods(params)
    registry.partition(params["partition"])
    registry.parse_workload(params["scheduler"], params["delays"], params["availability"])
