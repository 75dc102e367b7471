"""The built reference: an entry for every public name, examples as code, and nothing that Markdown has eaten."""

import re
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"}


class Page(HTMLParser):
    """The ids of a page, its blocks of code, its words in emphasis, and its text outside code and formulas."""

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
            self.tags.append(tag)
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
        elif not {"code", "math", "script", "style"} & set(self.tags):
            self.text.append(data)
            if "em" in self.tags:
                self.emphasis[-1] += data


@pytest.fixture(scope="module")
def pages(site):
    """Every page of the site by its path."""
    return {str(path.relative_to(site).parent): path.read_text() for path in site.rglob("index.html")}


@pytest.fixture(scope="module")
def reference(pages):
    return {name: Page(text) for name, text in pages.items() if name.startswith("reference/")}


def modules():
    """Every module that a user may import, where no optional dependency is missing."""
    for path in sorted((ROOT / "manifoldagg").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if "._" not in name and ".integrations" not in name:
            yield import_module(name)


def test_every_public_name_has_an_entry(reference):
    ids = set().union(*(page.ids for page in reference.values()))
    for module in modules():
        for name in getattr(module, "__all__", ()):
            # What a package exports from a module stands under the package.
            entry = f"{module.__name__}.{name}" if hasattr(module, "__path__") else f".{name}"
            assert any(other.endswith(entry) for other in ids), f"{module.__name__}.{name}"


def test_examples_are_code_with_their_prompts(reference):
    shown = "\n".join(code for page in reference.values() for code in page.code)
    for module in modules():
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            # An alias of something else has the docstring of that.
            ours = getattr(value, "__module__", "").startswith("manifoldagg")
            for line in re.findall(r"^ *(>>> .*?) *(?:# doctest.*)?$", value.__doc__ if ours else "", flags=re.M):
                assert line in shown, f"{module.__name__}.{name}"
    for name, page in reference.items():
        assert ">>>" not in "".join(page.text), name


@pytest.mark.parametrize("room", ["curves", "federated", "kernels", "manifolds"])
def test_an_example_shows_what_it_prints(reference, room):
    assert any(re.search(r"^>>> .*\n(?!>>>|\.\.\.).", code, flags=re.M) for code in reference[f"reference/{room}"].code)


def test_markdown_leaves_shapes_and_formulas_alone(pages, reference):
    for name, text in pages.items():
        assert "<blockquote" not in text, name
    for name, page in reference.items():
        assert not [words for words in page.emphasis if re.search(r"[(),*=]", words)], name
        text = "".join(page.text)
        assert not re.findall(r".*(?:\$|`|\*\*|\]\[|\\[a-z]).*", text), name
    assert "(*batch, *space.shape)" in "".join(reference["reference/curves"].text)


def test_functions_that_share_the_name_of_their_module_are_there(reference):
    for room, name in (("federated", "aggregate"), ("curves", "fit"), ("curves", "plane"), ("simulation", "run")):
        page = reference[f"reference/{room}"]
        assert f"manifoldagg.{room}.{name}" in page.ids
        assert any(code.startswith(f"{name}(") for code in page.code)
