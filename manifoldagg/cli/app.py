"""The command-line application, which imports its commands lazily."""

import inspect
import re
import sys
from importlib import import_module
from typing import Annotated, Any

try:
    import typer
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing.name} is not installed: pip install 'manifoldagg[cli]'")

from typer.core import TyperGroup

from manifoldagg import __version__
from manifoldagg.cli._console import UsageError, console, error_console
from manifoldagg.errors import ArgumentError, ManifoldAggError

__all__ = ["app", "main"]

ARGUMENT = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", flags=re.M)
"""The description of an argument in a docstring, which is also the help text of the option."""
COMMANDS = ("compare", "report", "merge", "route", "inspect", "doctor")


class LazyCommands(TyperGroup):
    """A command group that imports the module of a command on first use."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        try:
            module = import_module(f"manifoldagg.cli.{cmd_name}")
        except ModuleNotFoundError as missing:
            if (missing.name or "manifoldagg").startswith("manifoldagg"):
                raise
            raise ArgumentError(
                f"{missing.name} is not installed: pip install 'manifoldagg[cli,experiments]'"
            ) from None
        function = getattr(module, f"{cmd_name}_command")
        description, _, arguments = (inspect.getdoc(function) or "").partition("Args:\n")
        group = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        group.command(cmd_name, help=description)(function)
        command: Any = typer.main.get_command(group)
        help_texts = {name: text.replace("\n        ", " ") for name, text in ARGUMENT.findall(arguments)}
        for parameter in command.params:
            parameter.help = help_texts.get(parameter.name)
        return command


app = typer.Typer(
    cls=LazyCommands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Parse the arguments and run the command. A usage error exits with code 2."""
    try:
        code = app(standalone_mode=False)
    except (ManifoldAggError, UsageError) as error:
        message = error.format_message() if isinstance(error, UsageError) else str(error)
        if message:
            error_console.print(f"error: {message}", markup=False, soft_wrap=True)
        code = 2
    sys.exit(code or 0)


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"manifoldagg {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Geometry for asynchronous federated optimisation.

    The subcommands of `manifoldagg` compare methods in simulations, report results, optimise the routing of tasks to
    clients, merge checkpoints and inspect the files of a server.
    """
