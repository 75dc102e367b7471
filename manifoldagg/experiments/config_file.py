"""TOML configuration files with comparisons. Each comparison is converted to a command line."""

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.spec_parser import choose

__all__ = ["DEFAULTS", "Option", "command_lines", "options_by_name"]

DEFAULTS = "defaults"
"""The name of the table with the options that all comparisons share."""


@dataclass(frozen=True)
class Option:
    """An option of a command.

    Attributes:
        kind: the type of a value, such as `int`.
        multiple: whether the option may be repeated.
    """

    kind: Any
    multiple: bool


def options_by_name(command: Any, exclude: Collection[str] = ()) -> dict[str, Option]:
    """Return the options of a typer command by name, except for the options in `exclude`.

    The name of an option is its long form without the leading dashes.
    """
    # Versions of typer store the type of an option in different ways, so it is read from the annotations.
    kinds = get_type_hints(command.callback)
    found = {
        option.opts[0].removeprefix("--"): Option(_value_type(kinds[option.name]), option.multiple)
        for option in command.params
        if option.opts[0].startswith("--")
    }
    return {name: option for name, option in found.items() if name not in exclude}


def _value_type(annotation: Any) -> Any:
    """Return the type of one value: `str` for `str`, `str | None` and `list[str] | None`."""
    while parts := [part for part in get_args(annotation) if part is not NoneType]:
        annotation = parts[0]
    return annotation


def command_lines(path: Path, options: Mapping[str, Option], only: Sequence[str] = ()) -> dict[str, list[str]]:
    """Convert each table of a TOML file to the arguments of a command line.

    The result maps the name of each table to its arguments, in the order of the file. The tables have this format:

    - A key is the long name of an option of the command without dashes. Its value has the type of this option.
    - The table `[defaults]` contains options that all other tables share.
    - A list of strings is joined by commas.
    - An option that may be repeated, such as `--rate`, accepts one value, a list of values or a table. For example,
      `rate = {fedasync = 0.5}` becomes `--rate=fedasync=0.5`.

    Args:
        path: the path of the file.
        options: the options by name.
        only: the names of tables, separated by commas. The default is all tables.

    Raises:
        ArgumentError: if the file cannot be read, a table or a key is unknown (the message suggests the nearest one),
            or a value has another type.
    """
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
    return {
        name: [
            argument
            for key, value in (shared | table).items()
            for argument in _to_arguments(
                f"config: {path}: {name if key in table else DEFAULTS}", key, options[key], value
            )
        ]
        for name, table in tree.items()
        if name in wanted
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"config: {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ArgumentError(f"config: {path} is not a TOML file: {error}") from None
    except RecursionError:
        raise ArgumentError(f"config: {path}: expected tables of options, got values nested too deep") from None


def _to_arguments(where: str, key: str, option: Option, value: Any) -> list[str]:
    """Convert a key of a table and its value to arguments of the command line."""
    where = f"{where}: {key}"
    if option.kind is bool:
        if not isinstance(value, bool):
            raise ArgumentError(f"{where}: expected true or false, got {short_repr(value)}")
        return [f"--{key}"] * value
    if option.multiple and isinstance(value, dict):
        return [f"--{key}={name}={_text(f'{where}: {name}', one)}" for name, one in value.items()]
    if isinstance(value, list) and option.multiple:
        return [f"--{key}={_text(where, one)}" for one in value]
    if isinstance(value, list) and value and option.kind is str:
        return [f"--{key}={','.join(_text(where, one) for one in value)}"]
    return [f"--{key}={_text(where, value)}"]


def _text(where: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ArgumentError(f"{where}: expected a word or a number, got {short_repr(value)}")
    return str(value)
