"""Docstrings head their examples with `Example:`; a reader of the site sees them as code, prompts and all."""

import re

import griffe

HEADING = re.compile(r"^Example:$", flags=re.M)


class Examples(griffe.Extension):
    """Griffe reads a section `Examples` as prompts with their output, and any other unknown word as a remark."""

    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = HEADING.sub("Examples: Example:", obj.docstring.value)
