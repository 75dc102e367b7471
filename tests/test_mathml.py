"""The formulas of the site: what the hook makes of LaTeX."""

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import pytest

HOOK = Path(__file__).parents[1] / "docs" / "hooks" / "mathml.py"
NAMESPACE = "{http://www.w3.org/1998/Math/MathML}"


@pytest.fixture(scope="module")
def hook():
    spec = importlib.util.spec_from_file_location("mathml", HOOK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(element):
    """A formula in one line: scripts as `base_(script)`, what form an operator has before it."""
    tag = element.tag.removeprefix(NAMESPACE)
    parts = [shown(child) for child in element]
    if tag in {"msub", "msup", "msubsup"}:
        marks = {"msub": "_", "msup": "^", "msubsup": "_^"}[tag]
        return parts[0] + "".join(f"{mark}({part})" for mark, part in zip(marks, parts[1:], strict=True))
    if tag == "mspace":
        return "~"
    if parts:
        return f"{{{' '.join(parts)}}}" if tag == "mrow" else " ".join(parts)
    return {"prefix": "<", "postfix": ">"}.get(element.get("form"), "") + (element.text or "")


@pytest.mark.parametrize(
    ("latex", "expected"),
    [
        (r"(1 - s)^{n - i}", "{{<( 1 − s >)}^({n − i})}"),
        (r"\big(b(s)^\top C\big)_j", "{{<( b {<( s >)}^(⊤) C >)}_(j)}"),
        (r"((a + b)^2)_+", "{{<( {<( a + b >)}^(2) >)}_(+)}"),
        (r"\|a - b\|^2 - \|b\|^2", "{{<‖ a − b >‖}^(2) − {<‖ b >‖}^(2)}"),
        (r"\langle v, g\rangle_x", "{{<⟨ v , g >⟩}_(x)}"),
        (r"[0, 1)", "{<[ 0 , 1 >)}"),
        (r"d\exp_x\vert_0", "{d ~ exp_(x) |_(0)}"),
        (r"x^{(k)}", "{x^({<( k >)})}"),
        (r"a + \dots + b", "{a + … + b}"),
        (r"(\dots 1 \dots, -1)", "{<( … 1 … , <− 1 >)}"),
        (r"x = -y - z", "{x = <− y − z}"),
        (r"(-1)^n - 1", "{{<( <− 1 >)}^(n) − 1}"),
        (r"\operatorname{arg\,min}_x f(x)", "{arg\u00a0min_(x) ~ f <( x >)}"),
        (r"\operatorname{tr}(X)", "{tr <( X >)}"),
        (r"v = -\mathrm{grad}", "{v = <− grad}"),
        (r"2\cos\theta", "{2 ~ cos ~ θ}"),
        (r"\log p_j", "{log ~ p_(j)}"),
        (r"x^{10}", "{x^({10})}"),
    ],
)
def test_formulas(hook, latex, expected):
    assert shown(ElementTree.fromstring(hook.mathml(latex))) == f"{expected}"


def test_numbers_stay_numbers_and_words_are_one_word(hook):
    tree = ElementTree.fromstring(hook.mathml(r"x^{10} + \mathrm{id}"))
    assert [element.text for element in tree.iter(f"{NAMESPACE}mn")] == ["10"]
    assert [element.text for element in tree.iter(f"{NAMESPACE}mi")] == ["x", "id"]


@pytest.mark.parametrize("latex", [r"\sum_j x_j", r"\min_x f(x)", r"\operatorname{argmin}_x f(x)"])
def test_limits_stand_below_on_a_line_of_their_own(hook, latex):
    tags = [
        {
            element.tag.removeprefix(NAMESPACE)
            for element in ElementTree.fromstring(hook.mathml(latex, block=block)).iter()
        }
        for block in (False, True)
    ]
    assert "munder" not in tags[0]
    assert "munder" in tags[1]


def test_a_page_keeps_what_is_no_formula(hook):
    page = 'a &lt; b <span class="arithmatex">\\(x &lt; 1\\)</span> <div class="arithmatex">\\[y\\]</div>'
    made = hook.on_page_content(page)
    assert made.startswith("a &lt; b <span><math")
    assert "<mo>&lt;</mo>" in made
    assert made.count('display="inline"') == made.count('display="block"') == 1
    assert "arithmatex" not in made
