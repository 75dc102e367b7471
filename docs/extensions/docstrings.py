"""Griffe extension that adapts our docstrings for the reference pages."""

import ast
import re
import textwrap

import griffe


def _one_line(text):
    return " ".join(text.split())


REPLACEMENTS = (
    # A paragraph of one line or with a hanging indent. Griffe would render the second form as an admonition.
    (
        re.compile(r"^(Cost|Source): (.+(?:\n +\S.*)*)", flags=re.M),
        lambda found: f"**{found[1]}**: {_one_line(found[2])}",
    ),
    # Griffe renders `Examples` as code, but `Example` as an admonition.
    (re.compile(r"^Example:$", flags=re.M), "Examples: Example:"),
    # The type of the result is in the signature. Without the leading colon, griffe would parse the words before the
    # first colon of the description as the type.
    (re.compile(r"^(Returns|Yields):\n( +)", flags=re.M), r"\1:\n\2: "),
)


class Docstrings(griffe.Extension):
    """Rewrite each docstring before griffe parses it."""

    def on_object(self, *, obj, **_):
        if obj.docstring:
            for pattern, replacement in REPLACEMENTS:
                obj.docstring.value = pattern.sub(replacement, obj.docstring.value)
            if obj.path.startswith("manifoldagg.cli.") and obj.name.endswith("_command"):
                obj.docstring.value += option_table(obj)


def option_table(command):
    """Return a table of the options of a command, with the help of `typer.Option` or `typer.Argument`."""
    rows = ["\n\n| option | meaning |", "| --- | --- |"]
    arguments = ast.parse(textwrap.dedent(command.source)).body[0].args.args
    for argument, parameter in zip(arguments, command.parameters, strict=True):
        for call in ast.walk(argument.annotation):
            if isinstance(call, ast.Call) and call.func.attr in ("Option", "Argument"):
                options = {keyword.arg: keyword.value for keyword in call.keywords}
                names = [name.value for name in call.args] or ["--" + argument.arg.replace("_", "-")]
                if call.func.attr == "Argument":
                    names = [argument.arg.upper()]
                meaning = _one_line(ast.literal_eval(options["help"]))
                default = re.sub(r"^Path\((.*)\)$", r"\1", str(parameter.default)).strip("'\"")
                if "show_default" not in options and default not in ("None", "False"):
                    meaning += f" Default: `{default}`."
                cells = [", ".join(f"`{name}`" for name in names), meaning]
                rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)
