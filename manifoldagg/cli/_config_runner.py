"""Runner of the comparisons in a TOML file, which runs one command line for each table."""

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
from manifoldagg.experiments import workloads
from manifoldagg.experiments.compare import comparison_settings, method_settings
from manifoldagg.experiments.config_file import command_lines, options_by_name
from manifoldagg.experiments.datasets import DATASETS, load_dataset
from manifoldagg.experiments.default_rates import methods_with_scaled_rates
from manifoldagg.experiments.registry import methods
from manifoldagg.experiments.report import read_report
from manifoldagg.experiments.spec_parser import Spec, error_context, parse_literal, parse_spec
from manifoldagg.experiments.tuning import with_rate
from manifoldagg.experiments.weight_averaging import WeightAveraging
from manifoldagg.simulation.metadata import versions
from manifoldagg.simulation.method import Method

EXCLUDED_OPTIONS = ("config", "only", "name")
"""Options that a file must not contain."""
FILE_OPTIONS = ("data", "scheduler", "delays", "availability")
"""Options whose values may name a file."""


def run_config(context: typer.Context, path: Path, only: Sequence[str]) -> None:
    """Run a command once for each table of a TOML file.

    Options on the command line override the options in a table. All tables are checked before the first one runs.
    Relative paths in the file are relative to the folder of the file. Relative paths on the command line are relative
    to the working directory.

    Raises:
        ArgumentError: if a table is invalid. The message names the table and describes the error.
    """
    command = context.command
    typed = {
        option.name: context.params[option.name]
        for option in command.params
        if option.name not in (None, "config", "only") and _is_typed(context, option.name)
    }
    if "name" in typed:
        raise ArgumentError("name: expected --config without --name, as reports are named after the tables")
    lines = command_lines(path, options_by_name(command, EXCLUDED_OPTIONS), only)
    here = Path.cwd()
    there = path.parent.absolute()
    for name in FILE_OPTIONS if here != there else ():
        if typed.get(name) is not None:
            typed[name] = _rebase_paths(there, name, typed[name])
    if typed.keys() & {"data", "methods"}:
        sys.path.insert(0, str(here))
    # As with `python -m`, a user module may be in the working directory.
    sys.path.insert(0, "")
    runs = {}
    with chdir(there):
        for name, arguments in lines.items():
            with error_context(f"{path}: {name}"):
                runs[name] = made = _parse_command(command, arguments, context)
                parent = there if _is_typed(made, "out") and "out" not in typed else here
                made.params |= {**typed, "name": name}
                made.params["out"] = (Path() if here == there else parent) / made.params["out"]
                _methods(made.params)
                workloads.partition(made.params["partition"])
                _averaging(made.params)
                workloads.parse_workload(*(made.params[name] for name in ("scheduler", "delays", "availability")))
        for count, (name, made) in enumerate(runs.items(), start=1):
            console = Console(stderr=made.params["as_json"])
            with error_context(f"{path}: {name}"):
                finished = _load_finished(made.params) if made.params["resume"] else None
                state = f": is finished, in {made.params['out'] / name}" if finished else ""
                line = f"{name} ({count} of {len(runs)}){state}"
                console.print(line, highlight=False, markup=False, soft_wrap=True)
                if finished is None:
                    command.invoke(made)
                elif made.params["as_json"]:
                    print(json.dumps(finished), flush=True)


def _is_typed(context: Any, name: str) -> bool:
    """Return whether an option was given on the command line."""
    return bool(context.get_parameter_source(name).name == "COMMANDLINE")


def _rebase_paths(folder: Path, option: str, text: str) -> str:
    """Make the paths in an option relative to `folder` instead of the working directory."""
    spec = parse_spec(option, text)
    exists = Path.exists if spec.name in DATASETS else Path.is_file
    # A path that exists only in `folder` is also converted. The command runs in `folder`, where it then reports a
    # missing file instead of reading a file that the user did not mean.
    moved = {
        name: os.path.relpath(value, folder.resolve())
        for name, value in spec.options.items()
        if value and isinstance(parse_literal(value), str) and not Path(value).is_absolute()
        if exists(Path(value)) or exists(folder / value)
    }
    return str(Spec(spec.name, {**spec.options, **moved})) if moved else text


def _parse_command(command: Any, arguments: list[str], context: Any) -> Any:
    try:
        return command.make_context(command.name, arguments, parent=context.parent)
    except UsageError as error:
        raise ArgumentError(error.format_message()) from None


def _load_finished(params: dict[str, Any]) -> dict[str, Any] | None:
    """Return the finished report of a comparison with the settings `params`, or `None`."""
    report = params["out"] / params["name"]
    if report.with_name(f"{report.name}.unfinished").exists():
        return None
    try:
        found: dict[str, Any] = read_report(report)
        settings = found["settings"]
        stored_versions = dict(found["timing"]["versions"])
        tuning = settings["tuning"]
        if (tuning is not None and len(tuning["seeds"])) != (params["tune"] and params["tune_seeds"]):
            return None
        if tuning is not None and tuning.get("length", 1.0) != params["tune_length"]:
            return None
        chosen = _methods(params)
        averaging = _averaging(params)
        if averaging is not None:
            chosen = averaging.apply(chosen, params["num_updates"], range(params["clients"]))
        for place, method in enumerate(chosen if params["tune"] else ()):
            tried = tuning["methods"][method.name]
            if isinstance(tried, dict):
                chosen[place] = with_rate(method, tried["chosen"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    given = {
        **params,
        "seeds": range(params["first_seed"], params["first_seed"] + params["seeds"]),
        "averaging": averaging,
    }
    expected = comparison_settings(load_dataset(params["data"], params["model"], params["augment"]), given)
    expected |= {"tuning": tuning, "methods": method_settings(chosen)}
    # The settings contain hashes of the files. Other package versions can change the results.
    same = settings == expected | {"clients_without_samples": settings.get("clients_without_samples")}
    return found if same and versions().items() <= stored_versions.items() else None


def _methods(params: dict[str, Any]) -> list[Method]:
    """Build the methods as the command does, with scaled default rates unless it tunes them."""
    names = params["methods"]
    rates = list(params["rate"] or ())
    if params["tune"]:
        return methods(names, rates)
    return methods_with_scaled_rates(
        names, rates, clients=params["clients"], concurrency=params["concurrency"], buffer=params["buffer"]
    )[0]


def _averaging(params: dict[str, Any]) -> WeightAveraging | None:
    """Return the settings of the weight average, or `None` if the command computes no average."""
    return None if params["swa"] is None else WeightAveraging.parse(params["swa"])
