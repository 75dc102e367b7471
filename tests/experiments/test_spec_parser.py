"""Tests of the parser of names with options: round trips, and error messages that suggest the closest valid word."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg._validation import check_choice
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.spec_parser import (
    Spec,
    build,
    choose,
    parse_kwargs,
    parse_literal,
    parse_spec,
    parse_specs,
    reader,
)
from manifoldagg.federated.staleness import Constant, Hinge, Polynomial

words = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=8)
texts = st.text("abcdefghijklmnopqrstuvwxyz0123456789_./:=+-", min_size=1, max_size=8)
names = st.builds(Spec, words, st.dictionaries(words, texts, max_size=3))


@dataclass(frozen=True)
class Tool:
    """A dataclass with options of every supported type."""

    size: int
    rate: float = 0.5
    mode: str = "plain"
    path: Path | str = "here"
    span: tuple[int, int] = (1, 2)
    weight: Polynomial | Hinge = field(default_factory=Polynomial)

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("plain", "none", "3"))


KINDS = {"weight": {"hinge": reader(Hinge), "constant": reader(Constant), "gentle": reader(Polynomial, a=0.1)}}


@given(st.lists(names, min_size=1, max_size=4))
def test_parse_specs_is_the_inverse_of_joining(given_):
    assert parse_specs("words", ",".join(map(str, given_))) == given_
    assert parse_specs("words", " , ".join(map(str, given_))) == given_


def test_an_unknown_name_before_a_colon_is_a_module():
    def parsed(text):
        return parse_specs("methods", text, known=("fedgs", "csv"))

    assert parsed("my_module:Signs:rate=0.1, threshold=2,csv:measured.csv,fedgs:rate=1") == [
        Spec("my_module:Signs", {"rate": "0.1", "threshold": "2"}),
        Spec("csv", {"": "measured.csv"}),
        Spec("fedgs", {"rate": "1"}),
    ]
    assert parsed("my_module:Signs:5") == [Spec("my_module:Signs", {"": "5"})]
    # A misspelled known name is not a module, unless a module of that name exists.
    assert parsed("fedgss:5") == [Spec("fedgss", {"": "5"})]
    assert parse_specs("delays", "math:tau", known=("maths",)) == [Spec("math:tau")]


@given(st.text(max_size=12))
def test_parse_literal_accepts_every_text(text):
    assert type(parse_literal(text)) in (int, float, tuple, str, bool, type(None))


@given(st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.none()))
def test_parse_literal_restores_numbers_booleans_and_none(given_):
    read = parse_literal(str(given_))
    assert read == given_
    assert type(read) is type(given_)


@given(st.lists(st.one_of(st.integers(0), st.floats(0, 1e9)), min_size=2, max_size=4))
def test_parse_literal_restores_tuples_of_numbers(given_):
    assert parse_literal("+".join(map(str, given_))) == tuple(given_)


@given(texts)
def test_options_annotated_as_str_are_not_parsed(text):
    assert parse_kwargs("tool", Tool, {"size": "1", "path": text})["path"] == text
    assert type(parse_literal(text)) in (int, float, tuple, str, bool, type(None))


def test_build_converts_options_to_their_annotated_types():
    options = {"size": "3", "rate": "1e-3", "mode": "none", "path": "3", "span": "4+2"}
    assert build("tool", Tool, options) == Tool(3, 1e-3, "none", "3", (4, 2))
    assert build("tool", Tool, {"": "3"}) == Tool(3)
    assert build("tool", Tool, {"rate": "inf"}, defaults={"size": 7}) == Tool(7, math.inf)
    assert parse_kwargs("tool", Tool, {"rate": "2"}, excluded=("size",)) == {"rate": 2}


def test_object_options_accept_nested_options():
    for options, weight in (
        ({"weight.a": "2"}, Polynomial(2)),
        ({"weight": "hinge"}, Hinge()),
        ({"weight.b": "7", "weight": "hinge"}, Hinge(b=7)),
        ({"weight": "constant"}, Constant()),
        ({"weight": "gentle"}, Polynomial(0.1)),
        ({"weight": "gentle", "weight.a": "3"}, Polynomial(3)),
    ):
        assert build("tool", Tool, {"size": "1", **options}, option_readers=KINDS).weight == weight


def test_options_of_third_party_callables_are_parsed():
    found = parse_kwargs("sgd", torch.optim.SGD, {"momentum": "0.9"}, excluded=("params", "lr"))
    assert found == {"momentum": 0.9}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: parse_specs("methods", " , "), "methods: expected a name, got ' , '"),
        (lambda: parse_specs("methods", "rate=3"), "methods: expected a name before its options, got 'rate=3'"),
        (lambda: parse_specs("methods", ":rate=3"), "methods: expected a name before the colon, got ':rate=3'"),
        (lambda: parse_specs("methods", "a:b=1,b=2"), "methods: a: b is given twice"),
        (lambda: parse_spec("delays", "uniform,low=1,exponential"), "delays: expected one name .* a second one: exponential"),
        (lambda: choose("methods", "method", "FedAsink", ("fedasync", "fedgs")), "methods: no method 'FedAsink'; did you mean fedasync\\?"),
        (lambda: choose("methods", "method", "xyz", ("fedasync", "fedgs")), "methods: no method 'xyz'; there are fedasync, fedgs"),
        (lambda: build("tool", Tool, {"sise": "1"}), "tool: no option 'sise'; did you mean size\\?"),
        (lambda: build("tool", Tool, {}), "tool: expected size=\\.\\.\\."),
        (lambda: build("tool", Tool, {"": "1", "size": "2"}), "tool: size is given twice"),
        (lambda: build("tool", Tool, {"size": "1", "mode": "plane"}), "tool: mode: expected one of plain, none, 3; got 'plane': did you mean plain\\?"),
        (lambda: build("tool", Tool, {"size": "1", "size.a": "1"}), "tool: size: 1 has no options of its own"),
        (lambda: build("tool", Tool, {"size": "1", "rate.a": "1"}), "tool: rate: expected its name"),
        (lambda: build("tool", Tool, {"size": "1", "weight": "hing"}, option_readers=KINDS), "tool: no weight 'hing'; did you mean hinge\\?"),
        (lambda: build("tool", Tool, {"size": "1", "weight": "hinge", "weight.c": "1"}, option_readers=KINDS), "tool: weight: no option 'c'; there are a, b"),
        (lambda: build("tool", Tool, {"size": "1", "weight.a": "-1"}), "tool: weight: a: expected a finite number >= 0, got -1"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("as_shipped")
def test_invalid_specs_are_rejected_with_a_message_of_one_line(call, words):
    with pytest.raises(ArgumentError, match=f"^{words}$") as caught:
        call()
    assert "\n" not in str(caught.value)
