"""TOML files with comparisons: a table for each comparison, and a table with the options that they share."""

import json
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from manifoldagg._validation import short_repr
from manifoldagg.cli._comparison import PlannedComparison
from manifoldagg.cli._console import UsageError, console, error_console
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.datasets import DATASETS
from manifoldagg.experiments.spec_parser import Spec, choose, error_context, parse_literal, parse_spec

DEFAULTS = "defaults"
"""The name of the table with the options that all comparisons share."""
EXCLUDED_OPTIONS = ("config", "only", "name")
"""Options that a file must not contain."""
FILE_OPTIONS = ("data", "scheduler", "delays", "availability")
"""Options whose values may name a file."""


def run_config(
    context: typer.Context, path: Path, only: Sequence[str], run: Callable[[PlannedComparison], None]
) -> None:
    """Run the comparison of each table of a TOML file.

    Options on the command line override the options in a table. All tables are checked before the first one runs.
    Relative paths in the file are relative to the folder of the file. Relative paths on the command line are relative
    to the working directory.

    Raises:
        ArgumentError: if a table is invalid. The message names the table and describes the error.
    """
    typed = {
        name: value
        for name, value in context.params.items()
        if name not in ("config", "only") and _is_typed(context, name)
    }
    if "name" in typed:
        raise ArgumentError("name: expected --config without --name, as reports are named after the tables")
    tables = read_tables(path, context.command, only)
    here = Path.cwd()
    there = path.parent.absolute()
    for name in FILE_OPTIONS if here != there else ():
        if typed.get(name) is not None:
            typed[name] = _rebase_paths(there, name, typed[name])
    if typed.keys() & {"data", "methods"}:
        sys.path.insert(0, str(here))
    # As with `python -m`, a user module may be in the working directory.
    sys.path.insert(0, "")
    with chdir(there):
        for name, table in tables.items():
            with error_context(f"{path}: {name}"):
                options = parse_table(context.command, table) | typed | {"name": name}
                parent = here if "out" in typed or "out" not in table else there
                options["out"] = (Path() if here == there else parent) / options["out"]
                tables[name] = options
                PlannedComparison.of(options).check_names()
        for count, (name, options) in enumerate(tables.items(), start=1):
            with error_context(f"{path}: {name}"):
                comparison = PlannedComparison.of(options)
                finished = comparison.finished_report() if options["resume"] else None
                state = f": is finished, in {comparison.folder}" if finished else ""
                line = f"{name} ({count} of {len(tables)}){state}"
                say = (error_console if options["as_json"] else console).print
                say(line, highlight=False, markup=False, soft_wrap=True)
                if finished is None:
                    run(comparison)
                elif options["as_json"]:
                    print(json.dumps(finished), flush=True)


def read_tables(path: Path, command: Any, only: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Read the options of each table of a TOML file, in the order of the file.

    The tables have this format:

    - A key is the long name of an option of the command without dashes. Its value has the type of this option.
    - The table `[defaults]` contains options that all other tables share.
    - A list of strings is joined by commas.
    - An option that may be repeated, such as `--rate`, accepts one value, a list of values or a table. For example,
      `rate = {fedasync = 0.5}` is equivalent to `--rate fedasync=0.5`.

    Args:
        path: the path of the file.
        command: the command, whose options start with two dashes.
        only: the names of tables, separated by commas. The default is all tables.

    Returns:
        The values of the options by table and by the names of the parameters of the command. The values are texts,
        lists of texts and booleans, which `parse_table` converts to the types of the parameters.

    Raises:
        ArgumentError: if the file cannot be read, a table or a key is unknown (the message suggests the nearest one),
            or a value has another type.
    """
    options = {
        option.opts[0].removeprefix("--"): option for option in command.params if option.name not in EXCLUDED_OPTIONS
    }
    # Versions of typer store the type of an option in different ways, so it is read from the annotations.
    kinds = get_type_hints(command.callback)
    tree = _read(path)
    for name, table in tree.items():
        if name in ("", ".", "..") or set("/\\") & set(name) or not name.isprintable():
            raise ArgumentError(f"config: {path}: expected names of folders, got {short_repr(name)}")
        if not isinstance(table, dict):
            raise ArgumentError(f"config: {path}: {name}: expected a table; shared options belong in [{DEFAULTS}]")
        for key in table:
            choose(f"config: {path}: {name}", "option", key, options)
    shared = tree.pop(DEFAULTS, {})
    if not tree:
        raise ArgumentError(f"config: {path}: expected a table for each comparison, got a file without such tables")
    wanted = [name.strip() for names in only for name in names.split(",")] or [*tree]
    for name in wanted:
        choose(f"only: {path}", "comparison", name, tree)
    found: dict[str, dict[str, Any]] = {}
    for name in filter(wanted.__contains__, tree):
        found[name] = {}
        for key, value in (shared | tree[name]).items():
            where = f"config: {path}: {name if key in tree[name] else DEFAULTS}: {key}"
            option = options[key]
            found[name][option.name] = _convert(where, option, kinds[option.name], value)
    return found


def parse_table(command: Any, table: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a command whose defaults are the values of a table.

    Raises:
        ArgumentError: if a value has another type than its option.
    """
    try:
        context = command.make_context(command.name, [], default_map=table)
    except UsageError as error:
        raise ArgumentError(error.format_message()) from None
    return dict(context.params)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"config: {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ArgumentError(f"config: {path} is not a TOML file: {error}") from None
    except RecursionError:
        raise ArgumentError(f"config: {path}: expected tables of options, got values nested too deep") from None


def _convert(where: str, option: Any, kind: Any, value: Any) -> Any:
    """Convert the value of a key to text, to a list of texts, or to a boolean if the option is a flag."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise ArgumentError(f"{where}: expected true or false, got {short_repr(value)}")
        return value
    if option.multiple and isinstance(value, dict):
        return [f"{name}={_text(f'{where}: {name}', one)}" for name, one in value.items()]
    if option.multiple:
        return [_text(where, one) for one in (value if isinstance(value, list) else [value])]
    if isinstance(value, list) and value and str in (kind, *get_args(kind)):
        return ",".join(_text(where, one) for one in value)
    return _text(where, value)


def _text(where: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ArgumentError(f"{where}: expected a word or a number, got {short_repr(value)}")
    return str(value)


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
