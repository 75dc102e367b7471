"""Formulas become MathML when the site is built: pages need no script and no network to show them.

What latex2mathml makes of a formula is put right where browsers would draw it otherwise than TeX: what stands in
parentheses, and not the closing one, carries their exponent, a sign after a comma has no space around it, and the
name of a function is one word.
"""

import html
import re
from itertools import pairwise
from xml.etree import ElementTree

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', flags=re.S)
NAMESPACE = "http://www.w3.org/1998/Math/MathML"
# latex2mathml knows few of these, and spaces those as operators.
NAME = re.compile(r"\\operatorname\*?\{([^}]*)\}|\\(arg|max|min|det|sup|inf|Pr)(?![a-zA-Z])")
SCRIPTS = {"msub", "msup", "msubsup", "munder", "mover", "munderover"}
ROWS = {"math", "mrow", "mstyle", "msqrt", "mtd"}
OPEN, CLOSE, BARS = set("([{⟨⌊⌈"), set(")]}⟩⌋⌉"), set("|‖\u2223∥")
SIGNS = set("\u2212+±∓-")  # the first is what `-` becomes
# Where a formula has a line of its own, what stands at their foot stands below them.
LIMITS = {"argmax", "argmin", "arg\u00a0max", "arg\u00a0min", "det", "inf", "max", "min", "sup"}
THIN = "0.167em"


def on_page_content(content, **_):
    return FORMULA.sub(_formula, content)


def mathml(latex, *, block=False):
    """A formula as a `<math>` element."""
    display = "block" if block else "inline"
    text = convert(NAME.sub(lambda name: rf"\mathrm{{{name[1] or name[2]}}}", latex), display=display)
    tree = ElementTree.fromstring(text.replace(f' xmlns="{NAMESPACE}"', ""))
    for element in list(tree.iter()):
        _leaf(element)
    for element in list(tree.iter()):
        if element.tag in ROWS:
            _pair(element)
    for element in list(tree.iter()):
        if element.tag in ROWS:
            _sign(element)
            _space(element)
    if block:
        for element in tree.iter("msub"):
            if element[0].text in LIMITS:
                element.tag = "munder"
    tree.attrib = {"xmlns": NAMESPACE, "display": display}
    return ElementTree.tostring(tree, encoding="unicode")


def _formula(match):
    block = match[1] == "div"
    latex = html.unescape(match[2]).strip()[2:-2].strip()
    return f"<{match[1]}>{mathml(latex, block=block)}</{match[1]}>"


def _leaf(element):
    text = element.text or ""
    if _is_word(element):
        word = "".join(child.text or "\u00a0" for child in element)
        element[:] = []
        element.tag, element.text = "mi", word
        if len(word) == 1:
            element.set("mathvariant", "normal")
    elif element.tag == "mi" and text in OPEN | CLOSE | BARS:
        element.tag = "mo"
        element.attrib = {"stretchy": "false", "lspace": "0", "rspace": "0"}
    elif element.tag == "mo" and text == "…":
        element.tag = "mi"
    elif element.tag == "mo" and text == "/":
        element.attrib.update(lspace="0", rspace="0")
    elif element.tag == "mover" and element[1].tag == "mo":
        element.set("accent", "true")


def _is_word(element):
    letters = [child.get("mathvariant") == "normal" for child in element if child.tag not in {"mn", "mspace"}]
    return element.tag == "mrow" and bool(letters) and all(letters)


def _core(element):
    """The operator that an element is, or that carries its scripts."""
    while element.tag in SCRIPTS:
        element = element[0]
    return element if element.tag == "mo" else None


def _pair(row):
    """Every closing parenthesis finds its opening one; scripts of the one are made those of both with all between."""
    opened = []
    for child in list(row):
        core = _core(child)
        text = core.text if core is not None else None
        wanted = OPEN if text in CLOSE else {text} if text in BARS else set()
        if any(other.text in wanted for other in opened):
            while opened[-1].text not in wanted:
                opened.pop()
            first = opened.pop()
            first.set("form", "prefix")
            core.set("form", "postfix")
            for fence in (first, core):
                fence.attrib.update(lspace="0", rspace="0")
            if core is not child:
                _group(row, first, child)
        elif core is child and text in OPEN | BARS:
            opened.append(child)


def _group(row, first, last):
    """What stands from the parenthesis `first` to the one below `last` is the base of the scripts of `last`."""
    start, end = list(row).index(first), list(row).index(last)
    script = last
    while script[0].tag in SCRIPTS:
        script = script[0]
    group = ElementTree.Element("mrow")
    group.extend([*row[start:end], script[0]])
    script[0] = group
    row[start:end] = []


def _sign(row):
    """A sign after an operator, a relation, a comma or an opening parenthesis is no operation."""
    before = None
    for child in row:
        is_after_operator = before is not None and before.tag == "mo" and before.get("form") != "postfix"
        if child.tag == "mo" and child.text in SIGNS and (before is None or is_after_operator):
            child.attrib.update(form="prefix", lspace="0", rspace="0")
        if child.tag != "mspace":
            before = child


def _space(row):
    """A thin space between the name of a function and its neighbours, but for operators and parentheses."""
    for left, right in pairwise(list(row)):
        if (_is_name(left) or _is_name(right)) and _is_operand(left) and _is_operand(right):
            row.insert(list(row).index(right), ElementTree.Element("mspace", width=THIN))


def _is_name(element):
    while element.tag in SCRIPTS:
        element = element[0]
    return element.tag == "mi" and len(element.text or "") > 1


def _is_operand(element):
    if element.tag == "mrow" and len(element):
        return _core(element[0]) is None
    return element.tag not in {"mspace", "mtext"} and _core(element) is None
