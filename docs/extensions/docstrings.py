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
                description, _, arguments = obj.docstring.value.partition("Args:\n")
                obj.docstring.value = description.rstrip() + option_table(obj, arguments)


def option_table(command, arguments):
    """Return a table of the options of a command, whose meanings are the descriptions of its arguments."""
    rows = ["\n\n| option | meaning |", "| --- | --- |"]
    meanings = dict(re.findall(r"^ +(\w+): (.+(?:\n {8}.+)*)", arguments, flags=re.M))
    nodes = ast.parse(textwrap.dedent(command.source)).body[0].args.args
    for node, parameter in zip(nodes, command.parameters, strict=True):
        if node.arg not in meanings:
            continue
        call = next((part for part in ast.walk(node.annotation) if isinstance(part, ast.Call)), None)
        names = [name.value for name in call.args] if call else []
        is_argument = call is not None and call.func.attr == "Argument"
        names = names or [node.arg.upper() if is_argument else "--" + node.arg.replace("_", "-")]
        meaning = _one_line(meanings[node.arg])
        default = re.sub(r"^Path\((.*)\)$", r"\1", str(parameter.default)).strip("'\"")
        if not (call and call.keywords) and default not in ("None", "False"):
            meaning += f" Default: `{default}`."
        cells = [", ".join(f"`{name}`" for name in names), meaning]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)
