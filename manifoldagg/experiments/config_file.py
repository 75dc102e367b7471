"""Configuration files: comparisons in a TOML file, each of which is translated into a command line."""

import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.spec_parser import choose

__all__ = ["DEFAULTS", "Option", "command_lines", "options_by_name"]

DEFAULTS = "defaults"
"""The table of what all comparisons share."""
VALUE_TYPES: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "integer": ("an integer", (int,)),
    "float": ("a number", (int, float)),
    "boolean": ("true or false", (bool,)),
}
"""By the type of an option: what is expected of a value, and which have it. All others are words."""
DASHES = "--"


@runtime_checkable
class Option(Protocol):
    """An option of a command as declared on the command line."""

    opts: Sequence[str]
    multiple: bool
    type: Any


def options_by_name(options: Collection[Any], exclude: Collection[str] = ()) -> dict[str, Option]:
    """Return options by their long names without leading dashes.

    Args:
        options: of a command.
        exclude: names that are left out.
    """
    found = {option.opts[0].removeprefix(DASHES): option for option in options if option.opts[0].startswith(DASHES)}
    return {name: option for name, option in found.items() if name not in exclude}


def command_lines(path: Path, options: Mapping[str, Option], only: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the command line of each table of a file, by the table's name and in the file's order.

    A table has options of the command by their long names; those in `[defaults]` hold where it does not say otherwise.
    Values have the option's type. Words may be a list, which is joined by commas; an option that may be repeated has
    one value or a list of them, and `{fedasync = 0.5}` is `fedasync=0.5`.

    Args:
        path: of the file.
        options: by name.
        only: names of tables, or several in one separated by commas; all by default.

    Raises:
        ArgumentError: if the file cannot be read; naming a table or a key that is none, with the nearest that is, or
            a value of another type.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"config: {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ArgumentError(f"config: {path} is not a TOML file: {error}") from None
    except RecursionError:
        raise ArgumentError(f"config: {path}: expected tables of options, got values nested too deep") from None
    for name, table in tree.items():
        if name in ("", ".", "..") or set("/\\") & set(name) or not name.isprintable():
            raise ArgumentError(f"config: {path}: expected names of folders, got {short_repr(name)}")
        if not isinstance(table, dict):
            raise ArgumentError(f"config: {path}: {name}: expected a table; shared options belong in [{DEFAULTS}]")
        for key in table:
            choose(f"config: {path}: {name}", "option", key, options)
    shared = tree.pop(DEFAULTS, {})
    if not tree:
        raise ArgumentError(f"config: {path}: expected a table for each comparison, got none")
    wanted = [name.strip() for names in only for name in names.split(",")]
    for name in wanted:
        choose(f"only: {path}", "comparison", name, tree)
    return {
        name: [
            word
            for key, value in (shared | table).items()
            for word in _to_arguments(
                f"config: {path}: {name if key in table else DEFAULTS}: {key}", key, options[key], value
            )
        ]
        for name, table in tree.items()
        if name in wanted or not only
    }


def _to_arguments(where: str, key: str, option: Option, value: Any) -> list[str]:
    """A key and its value as they stand on a command line."""
    if option.type.name == "boolean":
        return [f"{DASHES}{key}"] if _format_value(where, option, value) == "True" else []
    if option.multiple:
        listed = value if isinstance(value, list) else [value]
        if isinstance(value, dict):
            listed = [f"{name}={_format_value(f'{where}: {name}', option, number)}" for name, number in value.items()]
        return [f"{DASHES}{key}={_format_value(where, option, one)}" for one in listed]
    return [f"{DASHES}{key}={_format_value(where, option, value)}"]


def _format_value(where: str, option: Option, value: Any) -> str:
    """A value in words."""
    words = option.type.name not in VALUE_TYPES
    expected, kinds = VALUE_TYPES.get(option.type.name, ("words", (str,)))
    if words and option.multiple:
        expected, kinds = "words or a number", (str, int, float)
    elif option.type.name == "text":
        expected = "words, or a list of them"
        if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            return ",".join(value)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ArgumentError(f"{where}: expected {expected}, got {short_repr(value)}")
    return str(value)
