"""Tests of fingerprints: they are equal exactly for objects with equal behaviour, and a file can store them."""

import functools
import math
import operator
import threading
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import pytest
import torch

from manifoldagg.corrections import OrthoDC, OrthoStrict
from manifoldagg.errors import CheckpointError
from manifoldagg.federated.rules import ASGD, AsyncBezier, AsyncCorrected, FedAdam, FedAsync, FedBuff
from manifoldagg.federated.schedules import Cosine, Cyclic
from manifoldagg.federated.server.durability.fingerprint import fingerprint, first_difference
from manifoldagg.federated.staleness import Hinge, Polynomial
from manifoldagg.manifolds import Flat, ParameterSpace, PoincareBall, Product, Sphere, Stiefel
from manifoldagg.tensor_file import load, save
from tests.federated.fingerprint import Gathers
from tests.federated.rules.registered import golden


def slowing(version):
    return 1 / (version + 1)


def halving(version):
    return 0.5**version


class Mood(Enum):
    GOOD = 1
    BAD = 2


@dataclass(frozen=True)
class Caches:
    name: str
    cache: object = field(default=None, compare=False)


class Slots:
    __slots__ = ("a",)

    def __init__(self, a):
        self.a = a


class Methods:
    def __init__(self, rate):
        self.rate = rate

    def at(self, version):
        return self.rate


def networks():
    for seed in (0, 1):
        torch.manual_seed(seed)
        yield torch.nn.Linear(2, 2)


NETWORKS = [*networks()]
SHARED = torch.arange(4.0)
DIFFERENT = {
    "None": None,
    "one": 1,
    "nan": math.nan,
    "zero": 0.0,
    "text": "1",
    "function": slowing,
    "another": halving,
    "builtin": math.sqrt,
    "torch": torch.sqrt,
    "partial": functools.partial(operator.mul, 2),
    "another partial": functools.partial(operator.mul, 3),
    "method": Methods(0.5).at,
    "another method": Methods(0.25).at,
    "class": Methods,
    "enum": Mood.GOOD,
    "another enum": Mood.BAD,
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "tensor": SHARED,
    "another tensor": SHARED + 1,
    "transposed": SHARED.reshape(2, 2).T,
    "not transposed": SHARED.reshape(2, 2),
    "array": np.ones(2),
    "module": NETWORKS[0],
    "another module": NETWORKS[1],
    "dataclass": Caches("a"),
    "another dataclass": Caches("b"),
    "slots": Slots(1),
    "another slots": Slots(2),
    "list": [1, 2],
    "tuple": (1, 2),
    "longer": [1, 2, 3],
    "set": {1, 2},
    "frozen": frozenset({1, 2}),
    "dict": {"a": 1},
    "another dict": {1: "a"},
    "schedule": Cosine(1.0, 0.0, 4),
    "another schedule": Cyclic(0.0, 1.0, 4),
    "its option": Cosine(1.0, 0.0, 5),
    "rule": FedAsync(0.5),
    "its rate": FedAsync(0.25),
    "its function": FedAsync(slowing),
    "its staleness": FedAsync(0.5, staleness=Hinge()),
    "correction": AsyncCorrected(OrthoDC()),
    "another correction": AsyncCorrected(OrthoStrict()),
    "bezier": AsyncBezier(1.0, 0.5),
    "buffered": FedBuff(3),
    "waits": Gathers(2),
    "waits longer": Gathers(3),
    "adam": FedAdam(4),
    "asgd": ASGD(),
    "flat": Flat(3),
    "wider": Flat(4),
    "sphere": Sphere(3),
    "ball": PoincareBall(3),
    "curved ball": PoincareBall(3, -4.0),
    "stiefel": Stiefel(4, 2),
    "product": Product({"a": Sphere(3), "b": Flat(2)}),
    "parameters": ParameterSpace.of(NETWORKS[0]),
    "of a module": ParameterSpace.of(NETWORKS[0], {"weight": Sphere(2)}),
}


def test_fingerprints_are_equal_only_for_equal_values(tmp_path):
    told = {name: fingerprint("x", value) for name, value in DIFFERENT.items()}
    save(tmp_path / "x", "told", list(told.values()))
    for (name, mine), kept in zip(told.items(), load(tmp_path / "x", "told"), strict=True):
        assert first_difference("x", mine, kept) is None, name
        assert first_difference("x", mine, fingerprint("x", DIFFERENT[name])) is None, name
        same = [other for other in told if first_difference("x", mine, told[other]) is None]
        assert same == [name]


@pytest.mark.parametrize("name", golden())
def test_every_rule_has_a_fingerprint(name):
    rule = golden()[name]
    assert first_difference("rule", fingerprint("rule", rule), fingerprint("rule", golden()[name])) is None


def test_equal_numbers_of_different_types_have_equal_fingerprints():
    for one in (1, 1.0, True, np.float64(1), np.int64(1)):
        assert first_difference("rate", fingerprint("rate", 1), fingerprint("rate", one)) is None


def test_fingerprint_ignores_caches():
    assert fingerprint("x", Caches("a", cache=threading.Lock())) == fingerprint("x", Caches("a"))
    space = ParameterSpace.of(NETWORKS[0], {"weight": Sphere(2)})
    fresh = fingerprint("space", space)
    _ = space.base_space, space.flat, hash(space), space.axes
    assert fingerprint("space", space) == fresh


@pytest.mark.parametrize(
    ("was", "given", "told"),
    [
        (FedAsync(0.5), FedAsync(0.25), "rule: rate: was 0.5, got 0.25"),
        (FedAsync(Cosine(1.0, 0.0, 4)), FedAsync(Cosine(1.0, 0.0, 5)), "rule: rate: period: was 4, got 5"),
        (FedAsync(slowing), FedAsync(halving), f"rule: rate: was {__name__}.slowing, got {__name__}.halving"),
        (FedAsync(slowing), FedAsync(0.5), f"rule: rate: was {__name__}.slowing, got 0.5"),
        (
            FedAsync(),
            FedBuff(3),
            "rule: was manifoldagg.federated.rules.fedasync.FedAsync, got manifoldagg.federated.rules.fedbuff.FedBuff",
        ),
        (
            FedAsync(staleness=Polynomial()),
            FedAsync(staleness=Hinge()),
            "rule: staleness: was manifoldagg.federated.staleness.Polynomial, got manifoldagg.federated.staleness.Hinge",
        ),
        (Gathers(2), Gathers(3), "rule: cohort: was 2, got 3"),
        ({"a": 1}, {"a": 2}, "rule[0][1]: was 1, got 2"),
        ([1, [2]], [1, [3]], "rule[1][0]: was 2, got 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_first_difference_reports_its_path(was, given, told):
    assert first_difference("rule", fingerprint("rule", was), fingerprint("rule", given)) == told


def local():
    def inner(version):
        return 0.5

    return inner


@functools.wraps(slowing)
def disguised(version):
    return 0.5


LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (FedAsync(lambda version: 0.5), r"^rule: rate: expected a function of a module.*<lambda>"),
        (FedAsync(staleness=local()), r"^rule: staleness: expected a function of a module.*local.<locals>.inner"),
        (FedAsync(disguised), "^rule: rate: expected a function of a module"),
        ({"a": [lambda: 0]}, r"^rule\['a'\]\[0\]: expected"),
        (LOOP, "contain itself"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fingerprint_error_contains_path_of_unnamed_value(value, told):
    with pytest.raises(CheckpointError, match=told):
        fingerprint("rule", value)
