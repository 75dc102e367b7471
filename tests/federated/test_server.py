"""The server: versions, weights, refusals that change nothing, and threads that lose nothing."""

import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Message, Outcome, Payload, Server
from manifoldagg.federated.rules import AsyncBezier, FedAsync, FedOrtho
from manifoldagg.manifolds import Flat
from tests.support import draw, relative, seeds

SPACE = Flat(4)


def server(rule=None, **options):
    return Server(SPACE, rule or FedAsync(0.5), torch.zeros(4), **options)


def payload(value=1.0, samples=1, n=1):
    return Payload(torch.full((n, 4), value), samples)


def snapshot(s):
    """Everything that a refusal must not change."""
    return (s.model.tolist(), s.version, repr(s._state), len(s._versions), sorted(s._open), dict(s._samples), repr(s._memory), s.history)  # fmt: skip


def test_staleness_is_the_servers_own_count():
    s = server()
    early, late = s.dispatch("a"), s.dispatch("b")
    assert (early.version, late.version) == (0, 0)
    assert s.receive(early.id, payload()).staleness == 0
    assert s.receive(late.id, payload()).staleness == 1
    assert s.dispatch("a").version == 2


def test_a_base_is_kept_once_and_freed_with_its_last_ticket():
    s = server()
    tickets = [s.dispatch(i) for i in range(50)]
    assert len(s._versions) == 1
    for i, ticket in enumerate(tickets[:49]):
        s.receive(ticket.id, payload(float(i)))
    assert len(s._versions) == 2
    s.drop(tickets[49].id)
    assert len(s._versions) == 1


@given(seeds, st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_it_is_the_rule_folded_over_the_updates(seed, script):
    """Against an oracle that keeps every version."""
    s, history, open_ = server(FedOrtho(0.7), weights="uniform"), [torch.zeros(4)], {}
    rule = FedOrtho(0.7)
    state, registered = rule.init(SPACE, history[0]), set()
    for i, (client, answers) in enumerate(script):
        if client not in open_:
            open_[client] = s.dispatch(client)
            registered.add(client)
            continue
        ticket = open_.pop(client)
        if not answers:
            s.drop(ticket.id)
            continue
        points = draw(seed + i, 1, 4, dtype=torch.float32)
        receipt = s.receive(ticket.id, Payload(points, 1))
        assert receipt.accepted
        assert receipt.staleness == len(history) - 1 - ticket.version
        v, g = (points[0] - history[ticket.version]).double(), (history[-1] - history[ticket.version]).double()
        along = (v @ g) / (g @ g) if g.any() else 0.0
        history.append((history[-1].double() + 0.7 / len(registered) * (v - along * g)).float())
        assert relative(s.model, history[-1]) <= 1e-5
    assert s.version == len(history) - 1
    assert len(s.history) == s.version
    assert state == {"version": 0}


def test_weights():
    given_ = server(weights={"a": 30, "b": 10})
    assert given_.receive(given_.dispatch("a").id, payload()).weight == 0.75
    uniform = server(weights="uniform")
    uniform.dispatch("b")
    assert uniform.receive(uniform.dispatch("a").id, payload()).weight == 0.5
    observed = server()
    tickets = [observed.dispatch(name) for name in "abcd"]
    assert observed.receive(tickets[0].id, payload(samples=10)).weight == pytest.approx(1 / 4)
    assert observed.receive(tickets[1].id, payload(samples=30)).weight == pytest.approx(30 / (4 * 20))
    again = observed.dispatch("a")
    assert observed.receive(again.id, payload(samples=50)).weight == pytest.approx(50 / (4 * 40))
    assert observed.receive(tickets[2].id, payload(samples=10)).weight == pytest.approx(10 / (4 * 30))


def test_a_receipt_says_what_happened():
    s = server(FedAsync(0.5))
    first, second = s.dispatch("a"), s.dispatch("b")
    receipt = s.receive(first.id, payload(2.0))
    assert (receipt.accepted, receipt.reason, receipt.version, receipt.step, receipt.norm) == (True, "", 1, 0.5, 2.0)
    assert math.isnan(receipt.cosine)
    assert s.receive(second.id, payload(-2.0)).cosine == pytest.approx(-1)
    assert [row["client"] for row in s.history] == ["a", "b"]


BAD = {
    "not a payload": (lambda: None, "payload"),
    "integers": (lambda: Payload(torch.ones(1, 4, dtype=torch.int64), 1), "points"),
    "a list": (lambda: Payload([[0.0] * 4], 1), "points"),
    "no points": (lambda: Payload(torch.ones(0, 4), 1), "points"),
    "too short": (lambda: Payload(torch.ones(1, 3), 1), "points"),
    "a vector": (lambda: Payload(torch.ones(4), 1), "points"),
    "three dimensions": (lambda: Payload(torch.ones(1, 1, 4), 1), "points"),
    "double": (lambda: Payload(torch.ones(1, 4).double(), 1), "points"),
    "half": (lambda: Payload(torch.ones(1, 4).half(), 1), "points"),
    "NaN": (lambda: Payload(torch.tensor([[0.0, 1.0, float("nan"), 0.0]]), 1), "points"),
    "infinite": (lambda: Payload(torch.tensor([[0.0, 1.0, -float("inf"), 0.0]]), 1), "points"),
    "a curve for a plain rule": (lambda: Payload(torch.ones(2, 4), 1), "points"),
    "sparse": (lambda: Payload(torch.ones(1, 4).to_sparse(), 1), "points"),
    "without values": (lambda: Payload(torch.ones(1, 4, device="meta"), 1), "points"),
    "zero samples": (lambda: Payload(torch.ones(1, 4), 0), "samples"),
    "negative samples": (lambda: Payload(torch.ones(1, 4), -3), "samples"),
    "half a sample": (lambda: Payload(torch.ones(1, 4), 0.5), "samples"),
    "true samples": (lambda: Payload(torch.ones(1, 4), True), "samples"),
}


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("name", BAD)
def test_a_bad_payload_is_refused_and_changes_nothing(name):
    make, field = BAD[name]
    s = server()
    s.receive(s.dispatch("a").id, payload())
    ticket = s.dispatch("a")
    before = snapshot(s)
    receipt = s.receive(ticket.id, make())
    assert not receipt.accepted
    assert receipt.reason.startswith(field)
    assert snapshot(s) == before
    assert s.refused == {field: 1}
    assert s.receive(ticket.id, payload()).accepted


def test_a_model_that_would_overflow_is_refused():
    s = Server(SPACE, FedOrtho(1.0, overshoot="extend", decay=0.0), torch.full((4,), 3e38), weights="uniform")
    first = s.dispatch("a")
    assert not s.receive(first.id, Payload(torch.full((1, 4), -3e38), 1)).reason
    blown = Server(SPACE, FedOrtho(9.0, overshoot="extend"), torch.full((4,), -3e38), weights="uniform")
    receipt = blown.receive(blown.dispatch("a").id, Payload(torch.full((1, 4), 3e38), 1))
    assert receipt.reason == "points: the new model would not be finite"
    assert blown.model.tolist() == torch.full((4,), -3e38).tolist()


@pytest.mark.usefixtures("as_shipped")
def test_tickets_are_used_once_and_only_here():
    s, other = server(), server()
    ticket, foreign = s.dispatch("a"), other.dispatch("a")
    assert s.receive(ticket.id, payload()).accepted
    before = snapshot(s)
    for id_ in (ticket.id, foreign.id, "nonsense", None, 0):
        assert s.receive(id_, payload()).reason == "ticket: unknown, or used already"
        with pytest.raises(ArgumentError, match="ticket: unknown"):
            s.drop(id_)
    assert snapshot(s) == before


def test_what_is_too_stale_is_refused():
    s = server(max_staleness=0)
    late, quick = s.dispatch("a"), s.dispatch("b")
    assert s.receive(quick.id, payload()).accepted
    assert s.receive(late.id, payload()).reason == "staleness: expected at most 0, got 1"
    s.drop(late.id)
    assert s.receive(s.dispatch("a").id, payload()).accepted


def test_nobody_else_holds_the_servers_memory():
    start = torch.zeros(4)
    s = Server(SPACE, FedAsync(1.0), start)
    start.fill_(9)
    ticket = s.dispatch("a")
    ticket.message.start.fill_(9)
    s.model.fill_(9)
    points = torch.ones(1, 4)
    s.receive(ticket.id, Payload(points, 1))
    points.fill_(9)
    assert s.model.tolist() == [1.0] * 4


class Careless:
    """A rule that gives back what it was given."""

    cohort = 1

    def init(self, space, start):
        return None

    def message(self, state, current, memory):
        return Message(current, tensors={"current": current}, numbers={"memory": memory or 0})

    def step(self, space, state, update, *, out=None):
        return state, Outcome(update.points[0], memory=update.samples)


def test_a_careless_rule_cannot_tie_the_server_to_a_client():
    s = Server(SPACE, Careless(), torch.zeros(4))
    ticket = s.dispatch("a")
    ticket.message.tensors["current"].fill_(9)
    points = torch.ones(1, 4)
    s.receive(ticket.id, Payload(points, 7))
    points.fill_(9)
    assert s.model.tolist() == [1.0] * 4
    assert s.dispatch("a").message.numbers == {"memory": 7}


def test_a_rule_that_fails_changes_nothing():
    class Broken(Careless):
        def step(self, space, state, update, *, out=None):
            out.fill_(float("nan"))
            raise RuntimeError("broken")

    s = Server(SPACE, Broken(), torch.zeros(4))
    ticket = s.dispatch("a")
    before = snapshot(s)
    with pytest.raises(RuntimeError, match="broken"):
        s.receive(ticket.id, payload())
    assert snapshot(s) == before


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("model", [torch.zeros(1), torch.zeros(4).double(), torch.zeros(1, 4), None.__class__])
def test_a_rule_that_answers_with_no_point_is_refused(model):
    class Odd(Careless):
        def step(self, space, state, update, *, out=None):
            return state, Outcome(model)

    s = Server(SPACE, Odd(), torch.zeros(4))
    ticket = s.dispatch("a")
    before = snapshot(s)
    assert s.receive(ticket.id, payload()).reason.startswith("rule: new model")
    assert snapshot(s) == before


def test_a_client_counts_once_its_message_is_out():
    class Mute(Careless):
        def message(self, state, current, memory):
            raise RuntimeError("mute")

    s = Server(SPACE, Mute(), torch.zeros(4))
    with pytest.raises(RuntimeError, match="mute"):
        s.dispatch("a")
    assert s._samples == {}


def test_threads_lose_and_double_nothing():
    s = Server(Flat(64), AsyncBezier(0.5), torch.zeros(64))
    accepted = []

    def work(name):
        generator = torch.Generator().manual_seed(name)
        for _ in range(50):
            ticket = s.dispatch(name)
            points = ticket.message.start + torch.randn(2, 64, generator=generator)
            accepted.append(s.receive(ticket.id, Payload(points, 1)).version)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(accepted) == list(range(1, 401))
    assert s.version == 400
    assert len(s._versions) == 1


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Server(SPACE, "FedAsync", torch.zeros(4)), "rule: expected cohort"),
        (lambda: Server(SPACE, FedAsync, torch.zeros(4)), r"rule: expected an instance, got the class FedAsync; write FedAsync\(\)"),
        (lambda: Server(None, FedAsync(), torch.zeros(4)), "space: expected a manifold, got NoneType"),
        (lambda: Server(SPACE, FedAsync(), torch.zeros(4).half()), "start: dtype: expected one of torch.float32, torch.float64"),
        (lambda: Server(SPACE, FedAsync(), torch.zeros(4, device="meta")), "start: expected a dense tensor"),
        (lambda: Server(SPACE, FedAsync(), torch.zeros(5)), "start: expected shape"),
        (lambda: Server(SPACE, FedAsync(), torch.full((4,), float("nan"))), "start: expected finite"),
        (lambda: Server(SPACE, FedAsync(), torch.zeros(1, 4)), "start: expected shape"),
        (lambda: Server(SPACE, FedAsync(), torch.zeros(4), weights="heavy"), "weights: expected one of observed, uniform"),
        (lambda: Server(SPACE, FedAsync(), torch.zeros(4), weights={"a": 0}), r"weights\['a'\]: expected"),
        (lambda: Server(SPACE, FedAsync(), torch.zeros(4), max_staleness=-1), "max_staleness: expected"),
        (lambda: server(weights={"a": 1}).dispatch("b"), "client: 'b' has no entry in the weights"),
        (lambda: server().dispatch(["a"]), "client: expected a hashable name"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
