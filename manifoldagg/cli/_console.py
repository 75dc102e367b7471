"""Consoles for results and for errors, and the exception of a usage error."""

from typing import Any

import typer
from rich.console import Console

__all__ = ["UsageError", "console", "error_console"]

console = Console()
error_console = Console(stderr=True, highlight=False)

UsageError: Any = next(kind for kind in typer.BadParameter.__mro__[::-1] if hasattr(kind, "format_message"))
"""The exception that typer raises for invalid arguments. Depending on the version, it is defined by typer or click."""
