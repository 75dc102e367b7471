"""Tests of the step: it modifies only its output memory, and is the same in a server and in `aggregate`."""

import pytest
import torch
from hypothesis import given
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from manifoldagg import aggregate, kernels
from manifoldagg.errors import ArgumentError, RuleError
from manifoldagg.federated import Message, Outcome, Payload, Server, Update
from manifoldagg.federated.buffers import PackedBuffers
from manifoldagg.federated.pytrees import tensors, unalias
from manifoldagg.federated.rules import AsyncBezier, FedAsync, FedOrtho
from manifoldagg.federated.step import ModelState, StepPlan, step
from manifoldagg.manifolds import Flat, ParameterSpace
from tests.federated.fingerprint import Gathers, bits
from tests.support import draw, seeds

NAN = float("nan")
MODEL = {"w": torch.zeros(4), "mean": torch.zeros(2)}
SPACE = ParameterSpace.of_state_dict(MODEL, buffer_policy=["mean"])


def scene(seed, rule, count):
    """Return the inputs of a step.

    They are its configuration, the state, an update of `count` points, buffers, and memory for the model.
    """
    base, current, *points = draw(seed, 2 + count, 4, dtype=torch.float32)
    kept, brought = draw(seed + 1, 2, 2, dtype=torch.float32)
    before = ModelState(current, rule.init(SPACE, current), PackedBuffers.of({"mean": "average"}, {"mean": kept}))
    update = Update("a", base, current, torch.stack(points), client_state={"last": base + 1})
    return StepPlan(SPACE, rule, {"mean": "average"}), before, update, {"mean": brought}, torch.empty(4)


@given(seeds)
def test_step_writes_only_to_its_own_memory(seed):
    terms, before, update, buffers, out = scene(seed, AsyncBezier(0.5), 2)
    kept = bits([before, update, buffers])
    after, outcome = step(terms, before, update, buffers, out)
    assert bits([before, update, buffers]) == kept
    assert after.current is outcome.model is out
    assert (before.version, after.version) == (0, 1)
    # The same in, the same out.
    again, _ = step(terms, before, update, buffers, torch.full((4,), NAN))
    assert bits(again) == bits(after)


def test_buffered_update_changes_only_the_state():
    terms, before, update, buffers, out = scene(0, Gathers(2), 1)
    after, outcome = step(terms, before, update, buffers, out)
    assert outcome.model is None
    assert (after.current is before.current, after.buffers is before.buffers, after.version) == (True, True, 0)
    assert after.pending_buffers.latest["mean"].tolist() == buffers["mean"].tolist()
    # What is kept for the client is what it was.
    assert outcome.client_state is update.client_state
    last, _ = step(terms, after, update, buffers, out)
    assert (last.version, last.pending_buffers) == (1, None)


@given(seeds)
def test_stored_state_has_its_own_memory(seed):
    class Keeps(Gathers):
        def step(self, space, state, update, *, out=None):
            torch.add(update.points[0], 1, out=out)
            kept = [update.points, update.base[1:], update.current, out]
            return {"kept": kept}, Outcome(out, kept)

    terms, before, update, buffers, out = scene(seed, Keeps(1), 1)
    after, outcome = step(terms, before, update, buffers, out)
    lent = [update.points, update.base, update.current, out]
    kept = (after.state, outcome.client_state)
    assert unalias(kept, lent) is kept
    # Points that lie where the model goes are read before it is written.
    tied = Update("a", update.base, update.current, out[None])
    expected = out + 1
    assert torch.equal(step(terms, before, tied, buffers, out)[0].current, expected)


class Faulty:
    """Rule that returns a given state, model and memory."""

    cohort = 1

    def __init__(self, state=None, model=None, memory=None):
        self.answer = state or {}, Outcome(torch.zeros(4) if model is None else model, memory)

    def init(self, space, start):
        return {}

    def message(self, space, state, current, client_state):
        return Message(current)

    def step(self, space, state, update, *, out=None):
        return self.answer


class Answers(Faulty):
    """Rule whose step returns the result of a given function."""

    def __init__(self, answer):
        self.make = answer

    def step(self, space, state, update, *, out=None):
        return self.make()


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Faulty(model=torch.full((4,), NAN)), "{}: the new model would not be finite"),
        (Faulty(state={"m": [torch.tensor(NAN)]}), "{}: the rule's state would not be finite"),
        (Faulty(memory=(torch.tensor(NAN),)), "{}: the rule's state would not be finite"),
    ],
)
def test_server_and_aggregate_reject_invalid_result_of_a_rule(rule, words):
    server = Server(SPACE, rule, SPACE.point(MODEL))
    ticket = server.dispatch("a")
    assert server.receive(ticket.id, Payload(torch.ones(1, 4), 1)).reason.startswith(words.format("points"))
    with pytest.raises(ArgumentError) as error:
        aggregate(rule, None, MODEL, MODEL, MODEL, space=SPACE)
    assert str(error.value).startswith(words.format("update"))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Faulty(model=torch.zeros(3)), r"rule: new model: expected shape \(4\), got \(3,\)"),
        (Faulty(model=torch.zeros(4).double()), "rule: new model: dtype: expected one of torch.float32"),
        (Answers(lambda: torch.zeros(4)), "rule: step: expected a state and an Outcome, got Tensor"),
        (Answers(lambda: ({}, torch.zeros(4))), "rule: step: expected a state and an Outcome, got tuple"),
        (Answers(lambda: None), "rule: step: expected a state and an Outcome, got NoneType"),
        (
            Answers(lambda: ({}, Outcome(None, numbers={"step": "x"}))),
            "rule: numbers: expected a mapping from names to numbers",
        ),
        (Answers(lambda: ({}, Outcome(None, numbers=3))), "rule: numbers: expected a mapping from names to numbers"),
    ],
)
def test_rule_without_model_raises_rule_error_in_server_and_aggregate(rule, words):
    server = Server(SPACE, rule, SPACE.point(MODEL))
    with pytest.raises(RuleError, match=words):
        server.receive(server.dispatch("a"), Payload(torch.ones(1, 4), 1))
    with pytest.raises(RuleError, match=words):
        aggregate(rule, None, MODEL, MODEL, MODEL, space=SPACE)


class Large(TorchDispatchMode):
    """Recorder of the torch operators that read or write as many entries as a model has."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [tensor.numel() for tensor in tensors([list(args), kwargs, result])]
        if not func.is_view and func.overloadpacket not in EMPTY and max(sizes, default=0) >= self.size:
            self.seen.append(str(func))
        return result


EMPTY = (torch.ops.aten.empty_like, torch.ops.aten.empty, torch.ops.aten.new_empty)


@pytest.mark.parametrize("rule", [FedAsync(0.5), FedOrtho(0.5), AsyncBezier(0.5)], ids=lambda rule: type(rule).__name__)
def test_server_reads_the_model_only_with_kernels(rule, monkeypatch):
    """Another test counts the memory traffic of the kernels.

    This test checks that there is no further pass, such as a finiteness check.
    """
    size = 1000
    monkeypatch.setattr("manifoldagg.corrections.rows.gram", hidden(kernels.gram))
    monkeypatch.setattr("manifoldagg.corrections.rows.combine", hidden(kernels.combine))
    s = Server(Flat(size), rule, torch.zeros(size))
    with Large(size) as sending:
        ticket = s.dispatch("a")
    payload = Payload(torch.ones(2 if isinstance(rule, AsyncBezier) else 1, size), 1)
    with Large(size) as taking:
        assert s.receive(ticket.id, payload).accepted
    assert sending.seen == ["aten.clone.default"]
    assert taking.seen == []


def hidden(kernel):
    """Return a kernel whose inner torch operators are hidden from the recorder."""

    def call(*args, **named):
        with _disable_current_modes():
            return kernel(*args, **named)

    return call
