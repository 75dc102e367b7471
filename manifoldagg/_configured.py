"""The comparisons of a TOML file, one after the other: each is what the command would do with its command line."""

from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from manifoldagg.errors import ArgumentError
from manifoldagg.simulation import by_name
from manifoldagg.simulation.configuration import command_lines, options_by_name
from manifoldagg.simulation.methods import methods
from manifoldagg.simulation.naming import blamed

Misuse: Any = next(kind for kind in typer.BadParameter.__mro__[::-1] if hasattr(kind, "format_message"))
"""What typer raises for arguments that it does not take: of its own, or of click where it was built on that."""
APART = ("config", "only", "name")
"""Options that have no place in a file."""


def run_each(context: typer.Context, path: Path, only: Sequence[str]) -> None:
    """Run the command once for each table of a file, with the options that were typed in place of the table's.

    Everything is read before the first one runs. Paths in the file are relative to it.

    Raises:
        ArgumentError: naming the table that does not fit, and what is wrong in it.
    """
    command = context.command
    typed = {
        option.name: context.params[option.name]
        for option in command.params
        if option.name is not None and _is_typed(context, option.name) and option.name not in ("config", "only")
    }
    if "name" in typed:
        raise ArgumentError("name: expected none with --config: reports are named after its tables")
    lines = command_lines(path, options_by_name(command.params, APART), only)
    here, there = Path.cwd(), path.parent.absolute()
    runs = {}
    with chdir(there):
        for name, words in lines.items():
            with blamed(f"{path}: {name}"):
                runs[name] = made = _parsed(command, words, context)
                moved = there if _is_typed(made, "out") and "out" not in typed else here
                made.params |= {**typed, "name": name}
                if moved != there or here != there:
                    made.params["out"] = moved / made.params["out"]
                _look(made.params)
        for count, (name, made) in enumerate(runs.items(), start=1):
            say = Console(stderr=made.params["as_json"])
            say.print(f"{name} ({count} of {len(runs)})", highlight=False, markup=False, style="bold")
            with blamed(f"{path}: {name}"):
                command.invoke(made)


def _is_typed(context: Any, name: str) -> bool:
    """Whether an option stands on the command line."""
    return bool(context.get_parameter_source(name).name == "COMMANDLINE")


def _parsed(command: Any, words: list[str], context: Any) -> Any:
    """What the command understands of a command line."""
    try:
        return command.make_context(command.name, words, parent=context.parent)
    except Misuse as error:
        raise ArgumentError(error.format_message()) from None


def _look(params: dict[str, Any]) -> None:
    """See that names mean something, before anything is run."""
    methods(params["methods"], list(params["rate"] or ()))
    by_name.partition(params["partition"])
    by_name.scenario(params["scheduler"], params["delays"], params["participation"])
