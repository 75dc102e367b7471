"""Tests of the reference pages: an entry for every public name, examples as code, and no Markdown errors."""

import re
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"}


class Page(HTMLParser):
    """A parsed HTML page: its ids, code blocks and emphasised words, and its text outside of code and formulas."""

    def __init__(self, text):
        super().__init__()
        self.ids = set()
        self.tags = []
        self.code = []
        self.emphasis = []
        self.text = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.ids.update(value for name, value in attrs if name == "id")
        if tag not in VOID:
            self.tags.append("formula" if "arithmatex" in str(dict(attrs).get("class")) else tag)
        if tag == "pre":
            self.code.append("")
        if tag == "em":
            self.emphasis.append("")

    def handle_endtag(self, tag):
        while self.tags and self.tags.pop() != tag:
            pass

    def handle_data(self, data):
        if "pre" in self.tags:
            self.code[-1] += data
        elif not {"code", "formula", "script", "style"} & set(self.tags):
            self.text.append(data)
            if "em" in self.tags:
                self.emphasis[-1] += data


@pytest.fixture(scope="module")
def pages(site):
    """Return the text of every page of the site, by its path."""
    return {str(path.relative_to(site).with_suffix("")): path.read_text() for path in site.rglob("*.html")}


@pytest.fixture(scope="module")
def reference(pages):
    return {
        name: Page(text) for name, text in pages.items() if name.startswith(("reference/", "rules/", "corrections/"))
    }


def modules():
    """Return every module that has an entry in the reference."""
    entries = set()
    for page in sorted((ROOT / "docs").glob("reference/*.md")):
        entries.update(re.findall(r"^::: (manifoldagg(?:\.[a-z_]+)*)$", page.read_text(), flags=re.M))
    found = []
    for entry in sorted(entries):
        # Skip functions that have the same name as their module. They belong to the package.
        if (ROOT / entry.replace(".", "/")).is_dir() or (ROOT / (entry.replace(".", "/") + ".py")).exists():
            found.append(import_module(entry))
    return found


def public_names():
    """Return the names in `__all__` of packages and errors, and the names that documentation code imports."""
    names = set()
    for path in sorted((ROOT / "manifoldagg").rglob("__init__.py")):
        name = ".".join(path.parent.relative_to(ROOT).parts)
        if not re.search(r"\._|\.(cli|backends|durability|executors|integrations|server)$", name):
            names.update((name, public) for public in getattr(import_module(name), "__all__", ()))
    names.update(("manifoldagg.errors", public) for public in import_module("manifoldagg.errors").__all__)
    for page in sorted((ROOT / "docs").rglob("*.md")):
        code = "".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S))
        for module, imported in re.findall(r"^ *from (manifoldagg[\w.]*) import ([\w, ]+)", code, flags=re.M):
            names.update((module, public.strip().partition(" as ")[0]) for public in imported.split(","))
    return sorted(names)


def test_every_public_name_has_an_entry(pages, reference):
    ids = set().union(*(page.ids for page in reference.values()))
    missing = []
    for module, name in public_names():
        if module == "manifoldagg":
            # In the top-level package, a table links to the entries in the subpackages.
            found = name == "rules" or f"<code>{name}</code></a>" in pages["reference/manifoldagg"]
        else:
            # A name in a module may have its entry under the package of the module.
            is_package = hasattr(import_module(module), "__path__")
            found = any(other.endswith(f"{module}.{name}" if is_package else f".{name}") for other in ids)
        missing += [] if found else [f"{module}.{name}"]
    assert missing == []


def test_docstring_examples_are_code_blocks_with_prompts(reference):
    shown = "\n".join(code for page in reference.values() for code in page.code)
    for module in modules():
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            # An alias of an object from another package has a docstring of that package.
            ours = getattr(value, "__module__", "").startswith("manifoldagg")
            for line in re.findall(r"^ *(>>> .*?) *(?:# doctest.*)?$", value.__doc__ if ours else "", flags=re.M):
                assert line in shown, f"{module.__name__}.{name}"
    for name, page in reference.items():
        assert ">>>" not in "".join(page.text), name


@pytest.mark.parametrize("room", ["curves", "federated", "kernels", "manifolds"])
def test_reference_examples_show_their_output(reference, room):
    assert any(re.search(r"^>>> .*\n(?!>>>|\.\.\.).", code, flags=re.M) for code in reference[f"reference/{room}"].code)


def test_markdown_does_not_alter_shapes_and_formulas(pages, reference):
    for name, text in pages.items():
        assert "<blockquote" not in text, name
    for name, page in reference.items():
        assert not [words for words in page.emphasis if re.search(r"[(),*=]", words)], name
        text = "".join(page.text)
        assert not re.findall(r".*(?:\$|`|\*\*|\]\[|\\[a-z]).*", text), name
    assert "(*batch, *space.shape)" in "".join(reference["reference/curves"].text)


def test_functions_named_like_their_module_have_an_entry(reference):
    for room, name in (("federated", "aggregate"), ("curves", "fit"), ("curves", "plane"), ("simulation", "run")):
        page = reference[f"reference/{room}"]
        assert f"manifoldagg.{room}.{name}" in page.ids
        assert any(code.startswith(f"{name}(") for code in page.code)
