"""How docstrings are written here, in the words that griffe reads."""

import re

import griffe

WORDS = (
    # `Examples` it shows as code, prompts and all; `Example` would be a remark in prose.
    (re.compile(r"^Example:$", flags=re.M), "Examples: Example:"),
    # What is returned has its type in the signature: what stands before a colon is part of the sentence.
    (re.compile(r"^(Returns|Yields):\n( +)", flags=re.M), r"\1:\n\2: "),
)


class Docstrings(griffe.Extension):
    """Before griffe parses a docstring."""

    def on_object(self, *, obj, **_):
        if obj.docstring:
            for house, theirs in WORDS:
                obj.docstring.value = house.sub(theirs, obj.docstring.value)
