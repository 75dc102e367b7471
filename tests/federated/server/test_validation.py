"""Tests of payload validation: each payload of a corpus of invalid payloads is rejected by name and changes nothing."""

import itertools
import math
import re
import warnings
from collections import OrderedDict
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from numbers import Integral
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from manifoldagg._validation import check_finite
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Outcome, Payload, Server, ServerLimits
from manifoldagg.federated.limits import UpdateLimits, update_norm
from manifoldagg.federated.pytrees import tensors as tensors_of
from manifoldagg.federated.rules import AsyncBezier
from manifoldagg.federated.server.validation import PayloadSchema, raise_nonfinite
from manifoldagg.federated.types import accepts_tensor_lists, extra_fields
from manifoldagg.manifolds import Flat, ParameterSpace, Sphere, SymmetricPositiveDefinite, distance
from tests.federated.fingerprint import Adds, fingerprint
from tests.federated.rules.registered import golden
from tests.server_options import grouped, with_buffers
from tests.support import draw, seeds

NAN, INF = float("nan"), float("inf")


class Demanding(Adds):
    """Rule that requires exactly one model, a tensor `control`, two tensors `moments` and a number `epochs`."""

    tensors = MappingProxyType({"control": None, "moments": 2})
    numbers = ("epochs",)

    def step(self, space, state, update, *, out=None):
        if len(update.points) != 1:
            raise ArgumentError(f"points: Demanding expects one model; got {len(update.points)} points")
        state, outcome = super().step(space, state, update, out=out)
        seen = {"control": update.tensors["control"], "epochs": update.numbers["epochs"]}
        return {**state, **seen}, Outcome(outcome.model, outcome.client_state, outcome.numbers)


NET = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
SPACE = ParameterSpace.of(NET)
P = SPACE.layout.size
BUFFERS = SPACE.buffers(NET)
RULES = {"*running_*": "average", "*tracked": "latest"}


def server(**options):
    given = {"weights": "observed", "buffers": BUFFERS, "buffer_policy": RULES, "max_staleness": 2}
    options = {**given, **options}
    start = with_buffers(SPACE.point(NET).detach(), options)
    return Server(SPACE, Demanding(), start, **grouped(**options))


def good(**changed):
    tensors = {"control": torch.ones(P), "moments": torch.ones(2, P)}
    fields = {
        "points": torch.ones(1, P),
        "samples": 3,
        "tensors": tensors,
        "numbers": {"epochs": 2.0},
        "buffers": BUFFERS,
    }
    return Payload(**{**fields, **changed})


def point(value, dtype=torch.float32):
    points = torch.ones(1, P, dtype=dtype)
    points[0, 3] = value
    return points


def freed():
    points = torch.ones(1, P)
    points.untyped_storage().resize_(0)
    return points


def tensors(**changed):
    return good(tensors={"control": torch.ones(P), "moments": torch.ones(2, P), **changed})


def buffers(**changed):
    return good(buffers={**BUFFERS, **{f"1.{name}": value for name, value in changed.items()}})


def without(name):
    return {key: value for key, value in BUFFERS.items() if key != name}


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(P)])


class Liar(dict):
    """Dict that claims to contain every key."""

    def __contains__(self, key):
        return True


def broken(*values):
    raise RuntimeError("broken")


def made(kind, value, **methods):
    """Return an instance of a subclass with other methods."""
    return type(f"Odd{kind.__name__}", (kind,), methods)(value)


class Counts:
    """Object that is registered as an integer and returns a different number at each call."""

    def __init__(self, *answers):
        self.answers = iter(answers)

    def __int__(self):
        return next(self.answers)

    __index__ = __int__


Integral.register(Counts)


def fake(*shape):
    with FakeTensorMode():
        return torch.ones(*shape)


def escaped(transform, x):
    """Return a tensor that escaped from a functorch transform."""
    out = []
    transform(lambda x: out.append(x) or x.sum())(x)
    return out[0]


class Listed(dict):
    """Dict that raises an exception when its entries are read."""

    __iter__ = keys = items = __len__ = broken


class Pretends:
    """Object that reports another class."""

    def __init__(self, kind):
        self.kind = kind

    @property
    def __class__(self):
        return self.kind


class Shy:
    """Object that raises an exception when its class is requested."""

    __class__ = property(broken)


class Halved(Payload):
    """Payload that raises an exception when its points are read."""

    @property
    def points(self):
        raise RuntimeError("gone")


BAD = {
    "nothing": (lambda: None, "payload: expected a Payload, got NoneType"),
    "a state dict": (lambda: NET.state_dict(), "payload: expected a Payload, got OrderedDict"),
    "a pretended payload": (lambda: Pretends(Payload), "payload: expected a Payload, got Pretends"),
    "pretended points": (lambda: good(points=Pretends(torch.Tensor)), "points: expected a floating tensor of shape (any, 10), got Pretends"),
    "a pretended tensor": (lambda: tensors(control=Pretends(torch.Tensor)), "tensors: control: expected a floating tensor"),
    "a pretended buffer": (lambda: buffers(running_mean=Pretends(torch.Tensor)), "buffers: 1.running_mean: expected a tensor of torch.float32, got Pretends"),
    "pretended tensors": (lambda: good(tensors=Pretends(dict)), "tensors: expected a mapping from names, got Pretends"),
    "no class": (lambda: Shy(), "payload: expected a Payload, got Shy"),
    "points without a class": (lambda: good(points=Shy()), "points: expected a floating tensor of shape (any, 10), got Shy"),
    "samples without a class": (lambda: good(samples=Shy()), "samples: expected a readable value"),
    "tensors without a class": (lambda: good(tensors=Shy()), "tensors: expected a mapping from names, got Shy"),
    "a buffer without a class": (lambda: buffers(running_mean=Shy()), "buffers: 1.running_mean: expected a tensor of torch.float32, got Shy"),
    "a base without a class": (lambda: good(base=Shy()), "base: expected no base, as the server has stored it"),
    "a tensor": (lambda: torch.ones(1, P), "payload: expected a Payload, got Tensor"),
    "the class": (lambda: Payload, "payload: expected a Payload, got type"),
    "no points": (lambda: good(points=None), "points: expected a floating tensor"),
    "a list": (lambda: good(points=[[0.0] * P]), "points: expected a floating tensor"),
    "an array": (lambda: good(points=np.ones((1, P), np.float32)), "points: expected a floating tensor"),
    "text": (lambda: good(points="model.pt"), "points: expected a floating tensor"),
    "integers": (lambda: good(points=torch.ones(1, P, dtype=torch.int64)), "points: expected a floating tensor"),
    "booleans": (lambda: good(points=torch.ones(1, P, dtype=torch.bool)), "points: expected a floating tensor"),
    "complex": (lambda: good(points=torch.ones(1, P, dtype=torch.complex64)), "points: expected a floating tensor"),
    "an empty payload": (lambda: good(points=torch.ones(0, P)), "points: expected (n, 10) with n >= 1, got (0, 10)"),
    "an empty tensor": (lambda: good(points=torch.ones(0)), "points: expected shape (any, 10)"),
    "too short": (lambda: good(points=torch.ones(1, P - 1)), "points: expected shape (any, 10), got (1, 9)"),
    "too long": (lambda: good(points=torch.ones(1, P + 1)), "points: expected shape (any, 10), got (1, 11)"),
    "a vector": (lambda: good(points=torch.ones(P)), "points: expected shape (any, 10), got (10,)"),
    "a scalar": (lambda: good(points=torch.tensor(1.0)), "points: expected shape"),
    "three dimensions": (lambda: good(points=torch.ones(1, 1, P)), "points: expected shape"),
    "transposed": (lambda: good(points=torch.ones(P, 1)), "points: expected shape"),
    "a curve for a plain rule": (lambda: good(points=torch.ones(2, P)), "points: Demanding expects one model"),
    "double": (lambda: good(points=torch.ones(1, P).double()), "points: expected torch.float32, got torch.float64"),
    "half": (lambda: good(points=torch.ones(1, P).half()), "points: expected torch.float32, got torch.float16"),
    "bfloat16": (lambda: good(points=torch.ones(1, P).bfloat16()), "points: expected torch.float32, got torch.bfloat16"),
    "eight bits": (lambda: good(points=torch.ones(1, P).to(torch.float8_e4m3fn)), "points: expected torch.float32"),
    "NaN": (lambda: good(points=point(NAN)), "points: expected finite values, got nan at (0, 3)"),
    "infinite": (lambda: good(points=point(INF)), "points: expected finite values, got inf"),
    "minus infinity": (lambda: good(points=point(-INF)), "points: expected finite values, got -inf"),
    "all NaN": (lambda: good(points=torch.full((1, P), NAN)), "points: expected finite"),
    "sparse": (lambda: good(points=torch.ones(1, P).to_sparse()), "points: expected a dense tensor with values"),
    "without values": (lambda: good(points=torch.ones(1, P, device="meta")), "points: expected a dense tensor"),
    "freed": (lambda: good(points=freed()), "points: expected a dense tensor with values, got a tensor whose storage was freed"),
    "nested": (lambda: good(points=nested()), "points: expected a dense tensor with values, got a nested tensor"),
    "zero samples": (lambda: good(samples=0), "samples: expected an integer from 1 to 1000000000, got 0"),
    "negative samples": (lambda: good(samples=-3), "samples: expected an integer from 1"),
    "absurdly many samples": (lambda: good(samples=10**9 + 1), "samples: expected an integer from 1"),
    "samples of 5000 digits": (lambda: good(samples=10**5000), "samples: expected an integer from 1 to 1000000000, got a huge int"),
    "minus as many": (lambda: good(samples=-(10**5000)), "samples: expected"),
    "half a sample": (lambda: good(samples=0.5), "samples: expected an integer"),
    "whole floats": (lambda: good(samples=3.0), "samples: expected an integer"),
    "true samples": (lambda: good(samples=True), "samples: expected an integer"),
    "NumPy's true": (lambda: good(samples=np.True_), "samples: expected an integer"),
    "written samples": (lambda: good(samples="32"), "samples: expected an integer from 1 to 1000000000, got '32'"),
    "no samples": (lambda: good(samples=None), "samples: expected an integer"),
    "NaN samples": (lambda: good(samples=NAN), "samples: expected an integer"),
    "a tensor of samples": (lambda: good(samples=torch.tensor([3])), "samples: expected an integer"),
    "samples that raise": (lambda: good(samples=made(int, 3, __int__=broken)), "samples: expected a readable value; its code raised RuntimeError"),
    "an index that raises": (lambda: good(samples=made(int, 3, __index__=broken)), "samples: expected a readable value"),
    "samples that lie": (lambda: good(samples=made(int, 3, __int__=lambda self: 10**12)), "samples: expected an integer"),
    "an index that lies": (lambda: good(samples=made(int, 3, __index__=lambda self: 10**12)), "samples: expected an integer"),
    "many that say they are few": (lambda: good(samples=made(int, 10**12, __le__=lambda *x: True, __ge__=lambda *x: True)), "samples: expected an integer"),
    "samples that change": (lambda: good(samples=Counts(1, 1, 10**15)), "samples: expected an integer from 1 to 1000000000, got a Counts"),
    "samples that are words": (lambda: good(samples=Counts("three")), "samples: expected a readable value"),
    "samples without a name": (lambda: good(samples=made(float, 3.0, __repr__=broken)), "samples: expected an integer from 1 to 1000000000, got a Oddfloat"),
    "fake points": (lambda: good(points=fake(1, P)), "points: expected a plain tensor with values, got a FakeTensor"),
    "a fake tensor": (lambda: tensors(control=fake(P)), "tensors: control: expected a plain tensor with values, got a FakeTensor"),
    "a fake buffer": (lambda: buffers(running_mean=fake(2)), "buffers: 1.running_mean: expected a plain tensor with values, got a FakeTensor"),
    "points out of a gradient": (lambda: good(points=escaped(torch.func.grad, torch.ones(1, P))), "points: expected a tensor with values, got a tensor of a functorch transform"),
    "points out of a batch": (lambda: good(points=escaped(torch.func.vmap, torch.ones(2, 1, P))), "points: expected a tensor with values, got a tensor of a functorch transform"),
    "a buffer out of a batch": (lambda: buffers(running_mean=escaped(torch.func.vmap, torch.ones(2, 2))), "buffers: 1.running_mean: expected a tensor with values, got a tensor of a functorch transform"),
    "a payload that raises": (lambda: Halved.__new__(Halved), "payload: expected a readable value; its code raised RuntimeError"),
    "a payload of nothing": (lambda: Payload.__new__(Payload), "payload: expected a readable value; its code raised AttributeError"),
    "tensors that raise": (lambda: good(tensors=Listed(good().tensors)), "tensors: expected a readable value"),
    "numbers that raise": (lambda: good(numbers=Listed(epochs=2.0)), "numbers: expected a readable value"),
    "a name that raises": (lambda: good(numbers={"epochs": 2.0, made(int, 3, __eq__=broken, __hash__=lambda self: 7, __repr__=broken): 1.0}), "numbers: unknown: a Oddint"),
    "a number that raises": (lambda: good(numbers={"epochs": made(float, 2.0, __float__=broken)}), "numbers: epochs: expected a readable value"),
    "a number that lies": (lambda: good(numbers={"epochs": made(float, 2.0, __float__=lambda self: NAN)}), "numbers: epochs: expected a finite number"),
    "a fraction that overflows": (lambda: good(numbers={"epochs": Fraction(10**5000, 3)}), "numbers: epochs: expected a finite number, got a huge Fraction"),
    "tensors are none": (lambda: good(tensors=None), "tensors: expected a mapping from names, got NoneType"),
    "tensors are a list": (lambda: good(tensors=[torch.ones(P)]), "tensors: expected a mapping"),
    "a tensor is missing": (lambda: good(tensors={"control": torch.ones(P)}), "tensors: missing: moments"),
    "all tensors are missing": (lambda: good(tensors={}), "tensors: missing: control, moments"),
    "a tensor nobody asked for": (lambda: tensors(gradient=torch.ones(P)), "tensors: unknown: gradient"),
    "a name that is none": (lambda: good(tensors={**good().tensors, 3: torch.ones(P)}), "tensors: unknown: 3"),
    "a mapping that lies": (lambda: good(tensors=Liar()), "tensors: missing: control, moments"),
    "a tensor is a number": (lambda: tensors(control=1.0), "tensors: control: expected a floating tensor"),
    "a tensor too short": (lambda: tensors(control=torch.ones(P - 1)), "tensors: control: expected shape (10), got (9,)"),
    "one moment": (lambda: tensors(moments=torch.ones(1, P)), "tensors: moments: expected shape (2, 10), got (1, 10)"),
    "a moment without rows": (lambda: tensors(moments=torch.ones(P)), "tensors: moments: expected shape (2, 10)"),
    "a double tensor": (lambda: tensors(control=torch.ones(P).double()), "tensors: control: expected torch.float32"),
    "a NaN in a tensor": (lambda: tensors(moments=torch.full((2, P), NAN)), "tensors: moments: expected finite"),
    "a sparse tensor": (lambda: tensors(control=torch.ones(P).to_sparse()), "tensors: control: expected a dense tensor"),
    "numbers are none": (lambda: good(numbers=None), "numbers: expected a mapping from names, got NoneType"),
    "numbers are pairs": (lambda: good(numbers=[("epochs", 2.0)]), "numbers: expected a mapping"),
    "a number is missing": (lambda: good(numbers={}), "numbers: missing: epochs"),
    "a hundred thousand numbers": (lambda: good(numbers={f"x{i}": 1.0 for i in range(10**5)} | {"epochs": 2.0}), "numbers: unknown: x0, x1, x10, x100, x1000 and 99995 more"),
    "too many control points": (lambda: good(points=torch.ones(17, P)), "points: expected at most 16 control points, got 17"),
    "too many to be read": (lambda: good(points=torch.ones(1, P).expand(10**15, P)), "points: expected at most 16 control points"),
    "a name of two lines": (lambda: good(numbers={"x\nWARNING: y": 1.0, "epochs": 2.0}), r"numbers: unknown: x\nWARNING: y"),
    "a name that has no bytes": (lambda: good(numbers={"\ud800": 1.0, "epochs": 2.0}), r"numbers: unknown: \ud800"),
    "a name that a terminal obeys": (lambda: tensors(**{"\x1b[2J" * 30: torch.ones(P)}), r"tensors: unknown: \x1b[2J\x1b"),
    "its own word on staleness": (lambda: good(numbers={"epochs": 2.0, "staleness": 0.0}), "numbers: unknown: staleness"),
    "its own word on weight": (lambda: good(numbers={"epochs": 2.0, "weight": 9.0}), "numbers: unknown: weight"),
    "a NaN number": (lambda: good(numbers={"epochs": NAN}), "numbers: epochs: expected a finite number, got nan"),
    "an infinite number": (lambda: good(numbers={"epochs": -INF}), "numbers: epochs: expected a finite number, got -inf"),
    "a written number": (lambda: good(numbers={"epochs": "2"}), "numbers: epochs: expected a finite number, got '2'"),
    "a true number": (lambda: good(numbers={"epochs": True}), "numbers: epochs: expected a finite number, got True"),
    "a complex number": (lambda: good(numbers={"epochs": 2j}), "numbers: epochs: expected a finite number, got 2j"),
    "a decimal": (lambda: good(numbers={"epochs": Decimal(2)}), "numbers: epochs: expected a finite number"),
    "a list for a number": (lambda: good(numbers={"epochs": [2.0]}), "numbers: epochs: expected a finite number, got [2.0]"),
    "a tensor for a number": (lambda: good(numbers={"epochs": torch.tensor(2.0)}), "numbers: epochs: expected a finite number"),
    "no number": (lambda: good(numbers={"epochs": None}), "numbers: epochs: expected a finite number, got None"),
    "a number of 5000 digits": (lambda: good(numbers={"epochs": 10**5000}), "numbers: epochs: expected a finite number, got a huge int"),
    "buffers are none": (lambda: good(buffers=None), "buffers: expected a mapping from names, got NoneType"),
    "no buffers": (lambda: good(buffers={}), "buffers: missing: 1.num_batches_tracked, 1.running_mean, 1.running_var"),
    "a buffer is missing": (lambda: good(buffers=without("1.running_var")), "buffers: missing: 1.running_var"),
    "a buffer nobody keeps": (lambda: buffers(weight=torch.ones(2)), "buffers: unknown: 1.weight"),
    "a buffer is a number": (lambda: buffers(num_batches_tracked=3), "buffers: 1.num_batches_tracked: expected a tensor of torch.int64, got int"),
    "a float counter": (lambda: buffers(num_batches_tracked=torch.tensor(3.0)), "buffers: 1.num_batches_tracked: expected a tensor of torch.int64"),
    "a buffer too long": (lambda: buffers(running_mean=torch.ones(3)), "buffers: 1.running_mean: expected shape (2,), got (3,)"),
    "a double buffer": (lambda: buffers(running_mean=torch.ones(2).double()), "buffers: 1.running_mean: expected a tensor of torch.float32"),
    "a NaN buffer": (lambda: buffers(running_var=torch.tensor([1.0, NAN])), "buffers: 1.running_var: expected finite values >= 0, or the values"),
    "an infinite buffer": (lambda: buffers(running_mean=torch.tensor([INF, 0.0])), "buffers: 1.running_mean: expected finite values"),
    "a buffer without values": (lambda: buffers(running_mean=torch.ones(2, device="meta")), "buffers: 1.running_mean: expected a dense tensor"),
    "a base nobody asked for": (lambda: good(base=torch.ones(P)), "base: expected no base, as the server has stored it"),
    "a bomb": (lambda: good(points=point(1e30)), "points: expected a norm <= 1e+06, got 1e+30"),
    "too far": (lambda: good(points=point(500.0)), "points: expected a norm <= "),
    "a step that overflows": (lambda: good(points=point(3e38)), "points: expected a norm <= 1e+06"),
}  # fmt: skip


def test_corpus_of_invalid_payloads_is_large():
    assert len(BAD) >= 60


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("name", BAD)
def test_invalid_payload_is_rejected_and_changes_nothing(name):
    make, reason = BAD[name]
    s = server(update_limits=UpdateLimits(max_norm=1e6, norm_factor=10.0, norm_after=2))
    late = s.dispatch("b")
    for first in [s.dispatch(client) for client in "cd"]:
        assert s.receive(first.id, good()).reason == ""
    ticket = s.dispatch("a")
    given, before = make(), fingerprint(s)
    if name == "too far":  # By the median of the others: it counts with the limit, so that the median can follow.
        norms = before["norms"]
        before["norms"] = [*norms, ("a", pytest.approx(10 * norms[0][1]))]
    receipt = s.receive(ticket.id, given)
    assert (receipt.accepted, receipt.version) == (False, 2)
    assert receipt.reason.startswith(reason)
    assert len(receipt.reason) < 300
    assert fingerprint(s) == before
    assert s.rejected == {reason.partition(":")[0]: 1}
    assert all(math.isnan(number) for number in (receipt.weight, receipt.cosine, receipt.step, receipt.norm))
    # It is the payload that was refused, not the ticket; and the other ticket holds its version still.
    assert s.receive(ticket.id, good()).accepted
    assert s.receive(late.id, good()).reason == "staleness: expected at most 2, got 3"


class Loud(torch.Tensor):
    """Tensor subclass that raises an exception in every operation."""

    detach = to = broken

    @classmethod
    def __torch_function__(cls, call, types, args=(), kwargs=None):
        raise RuntimeError(call.__name__)


@pytest.mark.usefixtures("as_shipped")
def test_subclasses_of_valid_types_are_accepted():
    s = server()
    name = StrEnum("Name", {"epochs": "epochs"})
    good_as = good(
        points=torch.ones(1, P).as_subclass(Loud),
        samples=np.int32(3),
        tensors={"control": torch.ones(P).as_subclass(Loud), "moments": nn.Parameter(torch.ones(2, P))},
        numbers=MappingProxyType({name.epochs: Fraction(2)}),
        buffers=OrderedDict({key: nn.Buffer(value) for key, value in BUFFERS.items()}),
    )
    assert s.receive(s.dispatch("a").id, good_as).reason == ""
    other = server()
    other.receive(other.dispatch("a").id, good())
    assert fingerprint(s) == fingerprint(other)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("base", "reason"),
    [
        (None, "base: expected the point that the client started from"),
        (torch.ones(P - 1), "base: expected shape (10), got (9,)"),
        (torch.ones(1, P), "base: expected shape (10), got (1, 10)"),
        (torch.ones(P).double(), "base: expected torch.float32"),
        (torch.full((P,), NAN), "base: expected finite"),
        ([1.0] * P, "base: expected a floating tensor"),
    ],
)
def test_invalid_base_is_rejected_and_changes_nothing(base, reason):
    s = server()
    ticket = s.dispatch("a", retain_base=False)
    before = fingerprint(s)
    assert s.receive(ticket.id, good(base=base)).reason.startswith(reason)
    assert fingerprint(s) == before
    assert s.receive(ticket.id, good(base=ticket.message.start)).accepted


GOOD = {
    "a parameter": lambda: good(points=nn.Parameter(torch.ones(1, P))),
    "a result of a computation": lambda: good(points=torch.ones(1, P, requires_grad=True) * 1.0),
    "strided": lambda: good(points=torch.ones(P, 3)[:, 1:2].mT),
    "repeated": lambda: good(points=torch.tensor(1.0).expand(1, P)),
    "counts of NumPy": lambda: good(samples=np.int64(3), numbers={"epochs": np.float32(2)}),
    "other mappings": lambda: good(tensors=OrderedDict(good().tensors), numbers=MappingProxyType({"epochs": 2})),
    "the memory of a trainer": lambda: good(client_state={"anything": object()}),
}


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("name", GOOD)
def test_unusual_valid_payloads_are_accepted(name):
    given, s = GOOD[name](), server()
    assert s.receive(s.dispatch("a").id, given).reason == ""
    assert torch.equal(given.points.detach(), torch.ones(1, P))
    assert torch.allclose(s.model, torch.ones(P), atol=1e-6)
    kept = s._state.value.store.load(("client", "a"))["last"]
    assert (type(kept), kept.requires_grad) == (torch.Tensor, False)
    assert type(s._state.value.model_state.state["epochs"]) is float


def test_server_neither_modifies_nor_stores_a_payload():
    given = good()
    kept = [tensor.clone() for tensor in (given.points, *given.tensors.values(), *given.buffers.values())]
    s = server()
    s.receive(s.dispatch("a").id, given)
    after = [given.points, *given.tensors.values(), *given.buffers.values()]
    assert all(torch.equal(a, b) for a, b in zip(kept, after, strict=True))
    model, state, carried = s.model, s._state.value.model_state.state["control"].clone(), s.state_dict()
    for tensor in (given.points, *given.tensors.values()):
        tensor.fill_(9.0)
    assert torch.equal(s.model, model)
    assert torch.equal(s._state.value.model_state.state["control"], state)
    assert all(torch.equal(tensor, s.state_dict()[name]) for name, tensor in carried.items())


@pytest.mark.usefixtures("as_shipped")
def test_step_runs_outside_of_functorch_transforms():
    s = server()
    ticket, reasons = s.dispatch("a"), []

    def f(points):
        reasons.append(s.receive(ticket.id, good(points=points)).reason)
        return points.sum()

    torch.func.grad(f)(torch.ones(1, P))
    assert reasons == ["points: expected a tensor with values, got a tensor of a functorch transform"]


def test_update_above_max_norm_is_rejected():
    s = Server(Flat(2), Adds(), torch.zeros(2), limits=UpdateLimits(max_norm=5.0))
    assert s.receive(s.dispatch("a").id, Payload(torch.tensor([[3.0, 4.0]]), 1)).accepted
    ticket = s.dispatch("a")
    assert (
        s.receive(ticket.id, Payload(torch.tensor([[3.0, 9.1]]), 1)).reason == "points: expected a norm <= 5, got 5.1"
    )
    # Every control point is held to it, and it is the base that counts.
    curve = torch.tensor([[3.0, 9.5], [3.0, 4.0]])
    assert s.receive(ticket.id, Payload(curve, 1)).reason == "points: expected a norm <= 5, got 5.5"
    assert s.receive(ticket.id, Payload(torch.tensor([[3.0, 9.0]]), 1)).accepted


def test_update_above_multiple_of_running_median_is_rejected():
    s = Server(
        Flat(1), Adds(), torch.zeros(1), limits=ServerLimits(UpdateLimits(norm_factor=3.0, norm_window=5, norm_after=3))
    )

    clients = itertools.count()

    def send(norm):
        ticket = s.dispatch(next(clients))
        receipt = s.receive(ticket.id, Payload(ticket.message.start[None] + norm, 1))
        if not receipt.accepted:
            s.drop(ticket.id)
        return receipt.accepted

    # 7 is over 3 x the median of {1, 2, 100} and counts as 6; 12 is 3 x that of {1, 2, 6, 100}; 18.5 is over that of
    # {1, 2, 6, 12, 100} and counts as 18, which is 3 x that of {2, 6, 12, 18, 100} without the 1.
    sent = (1, 100, 2, 7, 12, 18.5, 18)
    assert [send(norm) for norm in sent] == [True, True, True, False, True, False, True]
    # {6, 12, 18, 18, 1}, then {12, 18, 18, 1, 1}, then {18, 18, 1, 1, 1}.
    assert [send(norm) for norm in (1, 1, 1, 3.5, 3)] == [True, True, True, False, True]
    assert s.rejected == {"points": 3}


def test_median_of_zero_rejects_no_update():
    s = Server(Flat(1), Adds(), torch.zeros(1), limits=UpdateLimits(norm_factor=2.0, norm_after=1))
    for norm in (0.0, 0.0, 1.0):
        ticket = s.dispatch("a")
        assert s.receive(ticket.id, Payload(ticket.message.start[None] + norm, 1)).accepted


def test_norms_are_computed_in_the_space():
    space, x = Sphere(3), torch.tensor([1.0, 0.0, 0.0])
    points = torch.stack([torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.6, 0.8, 0.0])])
    assert update_norm(space, x, points) == pytest.approx(math.pi / 2, rel=1e-6)
    matrices = SymmetricPositiveDefinite(2)
    base, point = torch.eye(2), torch.diag(torch.tensor([math.e, 1.0]))
    assert update_norm(matrices, base, point[None]) == pytest.approx(distance(matrices, base, point).item())
    flat = draw(0, 3, 4)
    assert update_norm(Flat(4), flat[0], flat[1:]) == pytest.approx(
        (flat[1:] - flat[0]).norm(dim=1).max().item(), rel=1e-14
    )
    # The antipode has no log.
    assert update_norm(Sphere(3), x, -x[None]) == math.inf


def test_points_must_be_on_curved_leaves_up_to_rounding():
    net = nn.Linear(3, 2)
    net.weight.data /= net.weight.data.norm(dim=-1, keepdim=True)
    narrow = net.bfloat16()
    space = ParameterSpace.of(narrow, {"weight": Sphere(3)})
    start = space.point(narrow)
    s = Server(space, Adds(), start)
    assert start.dtype == torch.float32
    # A client that trains in bf16 brings rows of norm 1 to its own rounding.
    assert s.receive(s.dispatch("a").id, Payload(start[None], 1)).accepted
    ticket = s.dispatch("a")
    assert s.receive(ticket.id, Payload(1.2 * start[None], 1)).reason.startswith("points: weight: expected a point of")
    assert s.receive(
        s.dispatch("a", retain_base=False).id, Payload(start[None], 1, base=1.2 * start)
    ).reason.startswith("base: weight: ")


BY_ROWS = {
    name: rule
    for name, rule in golden().items()
    # A private rule counts an update that is not finite as a zero update.
    if accepts_tensor_lists(rule, Flat(P)) and not any(extra_fields(rule)) and not getattr(rule, "is_private", False)
}


@pytest.fixture(params=BY_ROWS)
def plain(request):
    """A rule that uses the points only in a Gram matrix and a linear combination."""
    return BY_ROWS[request.param]


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("checks", [None, UpdateLimits(max_norm=1e6)])
def test_self_checked_inputs_are_rejected_with_the_same_message(plain, checks, dtype):
    s = Server(Flat(P), plain, torch.zeros(P, dtype=dtype), limits=checks or ServerLimits())
    count = 2 if isinstance(plain, AsyncBezier) else 1
    assert s.receive(s.dispatch("light").id, Payload(torch.ones(count, P, dtype=dtype), 1)).accepted
    kept, brings = s.dispatch("heavy"), s.dispatch("heavy", retain_base=False)
    assert s.receive(s.dispatch("light").id, Payload(torch.ones(count, P, dtype=dtype), 1)).accepted
    before = fingerprint(s)
    for value in (NAN, INF, -INF):
        for i in range(count):
            points = torch.ones(count, P, dtype=dtype)
            points[i, 3:] = value
            receipt = s.receive(kept.id, Payload(points, 1))
            assert receipt.reason == f"points: expected finite values, got {value} at ({i}, 3)"
            assert s.receive(brings.id, Payload(points, 1, base=points[0])).reason == receipt.reason
        base = torch.ones(P, dtype=dtype)
        base[5] = value
        receipt = s.receive(brings.id, Payload(torch.ones(count, P, dtype=dtype), 1, base=base))
        assert receipt.reason == f"base: expected finite values, got {value} at (5,)"
    assert fingerprint(s) == before
    assert s.receive(kept.id, Payload(torch.ones(count, P, dtype=dtype), 1)).accepted


class Selfish(Demanding):
    """Rule that checks some of its inputs itself."""

    self_checked = ("control", "points")


@pytest.mark.parametrize(
    ("space", "rule", "fields"),
    [
        (Flat(P), Adds(), set()),
        (Flat(P), Demanding(), set()),
        (Flat(P), Selfish(), {"points", "base", "tensors: control"}),
        (Flat(P), golden()["FedOrtho"], {"points", "base"}),
        (Sphere(P), golden()["FedOrtho"], set()),
        (Sphere(P), Selfish(), set()),
    ],
)
def test_the_schema_names_the_fields_that_the_rule_checks(space, rule, fields):
    schema = PayloadSchema.of(space, rule, torch.zeros(P), (), UpdateLimits())
    assert schema.self_checked == fields
    bad = torch.full((P,), NAN)
    payload = Payload(bad[None], 1, {"control": bad, "moments": bad}, base=bad)
    if fields:
        with pytest.raises(ArgumentError, match="points: expected finite values"):
            raise_nonfinite(schema, payload)
    else:
        raise_nonfinite(schema, payload)
    for field in ("points", "base", "tensors: control", "tensors: moments"):
        if field in fields:
            assert schema.check_values(field, bad, is_point=False) is bad
        else:
            with pytest.raises(ArgumentError, match=f"{field}: expected finite values, got nan at"):
                schema.check_values(field, bad, is_point=False)


@given(seeds, st.sampled_from([(40_000,), (3, 20_000), (70_000, 1), (2, 3, 9_000)]), st.integers(1, 3))
def test_error_names_the_first_invalid_entry_without_large_allocation(seed, shape, count):
    class Made(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in () if func.is_view else tensors_of(result):
                self.largest = max(self.largest, tensor.numel())
            return result

    x = torch.ones(shape)
    places = torch.randint(x.numel(), (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    for place in places:
        x.view(-1)[place] = NAN
    first = tuple(int(i) for i in np.unravel_index(min(places), shape))
    with pytest.raises(ArgumentError, match=re.escape(f"x: expected finite values, got nan at {first}")):
        check_finite("x", x)
    x.fill_(NAN)
    with Made() as made, pytest.raises(ArgumentError, match=re.escape(f"got nan at {(0,) * x.ndim}")):
        check_finite("x", x)
    assert made.largest <= 2**14 * x.ndim


def test_finiteness_check_reuses_the_gram_matrix(plain):
    class Reads(TorchDispatchMode):
        read = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.read += any(x is points for x in args) and not func.is_view
            return func(*args, **(kwargs or {}))

    s = Server(Flat(P), plain, torch.zeros(P))
    points = torch.ones(2 if isinstance(plain, AsyncBezier) else 1, P)
    ticket = s.dispatch("heavy")
    with Reads() as reads:
        assert s.receive(ticket.id, Payload(points, 1)).accepted
    assert reads.read == 0
