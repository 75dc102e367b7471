"""Tests of the server: tickets, receipts, history, buffering rules and faulty rules."""

import copy
import csv
import io
import json
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.averaging import SWA
from manifoldagg.errors import ArgumentError, RuleError
from manifoldagg.federated import MemoryPolicy, Message, Outcome, Payload, Server
from manifoldagg.federated.limits import UpdateLimits
from manifoldagg.federated.rules import FedAsync, FedOrtho
from manifoldagg.federated.server import state as state_module
from manifoldagg.federated.server import update_processor
from manifoldagg.federated.server.state import ServerState
from manifoldagg.federated.server.validation import validate_payload
from manifoldagg.manifolds import Flat, ParameterSpace, Sphere
from tests.federated.fingerprint import Adds, Gathers, Listens, fingerprint, versions
from tests.server_options import grouped, with_buffers
from tests.support import draw, relative, seeds


class Elsewhere(FedAsync):
    def step(self, space, state, update):
        raise AssertionError("never asked")


SPACE = Flat(4)


def server(rule=None, **options):
    start = with_buffers(torch.zeros(4), options)
    return Server(SPACE, rule or FedAsync(0.5), start, **grouped(**options))


def payload(value=1.0, samples=1, n=1):
    return Payload(torch.full((n, 4), value), samples)


def test_server_computes_the_staleness():
    s = server()
    early, late = s.dispatch("a"), s.dispatch("b")
    assert (early.version, late.version) == (0, 0)
    assert s.receive(early.id, payload()).staleness == 0
    assert s.receive(late.id, payload()).staleness == 1
    assert s.dispatch("a").version == 2


@given(seeds, st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_server_equals_repeated_steps_of_the_rule(seed, script):
    """The test compares the server with an oracle that stores every version."""
    s, history, open_ = server(FedOrtho(0.7), weights="uniform"), [torch.zeros(4)], {}
    contributed = set()
    for i, (client, answers) in enumerate(script):
        if client not in open_:
            open_[client] = s.dispatch(client)
            continue
        registered = contributed | open_.keys()
        ticket = open_.pop(client)
        if not answers:
            s.drop(ticket.id)
            continue
        contributed.add(client)
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


def test_receipt_reports_the_update():
    s = server(FedAsync(0.5))
    first, second = s.dispatch("a"), s.dispatch("b")
    receipt = s.receive(first.id, payload(2.0))
    assert (receipt.accepted, receipt.reason, receipt.version, receipt.step, receipt.norm) == (True, "", 1, 0.5, 2.0)
    assert math.isnan(receipt.cosine)
    assert not receipt.buffered
    assert s.receive(second.id, payload(-2.0)).cosine == pytest.approx(-1)
    assert [row["client"] for row in s.history] == ["a", "b"]


@pytest.mark.parametrize("patient", [True, False])
def test_receipt_reports_that_the_update_is_buffered(patient):
    s = server(Gathers(3, patient))
    receipts = [s.receive(s.dispatch(name).id, payload()) for name in "abcd"]
    assert all(receipt.accepted and not receipt.reason for receipt in receipts)
    assert [receipt.buffered for receipt in receipts] == [True, True, False, True]
    assert [receipt.version for receipt in receipts] == [0, 0, 1, 1]
    assert s.model.tolist() == [3.0] * 4
    assert [row["waiting"] for row in s.history] == [1, 2, 0, 1]
    assert [row["buffered"] for row in s.history] == [True, True, False, True]


def test_history_is_a_table_of_plain_values():
    s = server(FedOrtho(0.5))
    for name in "ab":
        s.receive(s.dispatch(name).id, payload(samples=3))
    rows = s.history
    plain = {str, int, float, bool}
    assert all({type(value) for value in row.values()} <= plain for row in rows)
    columns = ["client", "samples", "accepted", "reason", "version", "staleness", "weight", "cosine", "step", "norm"]
    assert all(list(row)[:13] == [*columns, "buffered", "clipped", "waiting"] for row in rows)
    assert rows[1]["rate"] == pytest.approx(0.25)
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    assert [row["client"] for row in csv.DictReader(io.StringIO(text.getvalue()))] == ["a", "b"]
    assert json.loads(json.dumps(rows))[1]["version"] == 2
    rows[0]["client"] = "changed"
    assert s.history[0]["client"] == "a"


def after(updates, **options):
    """Return a server that has received the given number of updates."""
    s = server(Adds(), **options)
    for i in range(updates):
        assert s.receive(s.dispatch(i).id, payload(samples=i + 1)).accepted
    return s


@pytest.mark.parametrize(("history", "kept"), [(3, [4, 5, 6]), (0, []), (None, [1, 2, 3, 4, 5, 6])])
def test_history_contains_the_latest_rows(history, kept):
    s = after(6, history_size=history)
    assert [row["version"] for row in s.history] == kept
    assert s.version == 6


@pytest.mark.usefixtures("as_shipped")
def test_history_is_bounded_by_default():
    assert [row["version"] for row in after(10_003).history] == list(range(4, 10_004))


@pytest.mark.usefixtures("as_shipped")
def test_ticket_is_valid_once_and_only_for_its_server():
    s, other = server(), server()
    ticket, foreign = s.dispatch("a"), other.dispatch("a")
    receipt = s.receive(ticket.id, payload())
    assert receipt.accepted
    before = fingerprint(s)
    for used in (ticket, ticket.id):
        assert s.receive(used, payload(2.0), client="a") is receipt
        assert s.receive(used, payload(), client="b").reason.startswith(
            "client: expected the client that the ticket was issued to, got"
        )
        with pytest.raises(ArgumentError, match="ticket: unknown"):
            s.drop(used)
    for id_ in (foreign.id, "nonsense", None, 0, foreign, ["a"]):
        assert s.receive(id_, payload()).reason == "ticket: unknown, or used already"
        with pytest.raises(ArgumentError, match="ticket: unknown"):
            s.drop(id_)
    assert fingerprint(s) == before
    assert s.rejected == {"client": 2, "ticket": 6}


def test_ticket_stays_open_after_a_rejection():
    s = server()
    ticket = s.dispatch("a")
    assert not s.receive(ticket.id, payload(float("inf"))).accepted
    assert s.receive(ticket.id, payload()).accepted


def test_server_rejects_update_above_max_staleness():
    s = server(max_staleness=1)
    late = s.dispatch("a")
    for _ in range(2):
        assert s.receive(s.dispatch("b").id, payload()).accepted
    # No update can be taken on it any more: it pins no version.
    assert versions(s) == [2]
    model = s.model
    receipt = s.receive(late.id, payload())
    assert receipt.reason == "staleness: expected at most 1, got 2"
    assert versions(s) == [2]
    assert torch.equal(s.model, model)
    assert s.receive(late.id, payload()) is receipt
    with pytest.raises(ArgumentError, match="ticket: unknown"):
        s.drop(late.id)
    assert s.receive(s.dispatch("a").id, payload()).accepted


def test_update_that_becomes_too_stale_during_validation_is_rejected(monkeypatch):
    """The staleness is below the limit on arrival, and above it when the step starts."""
    s = server(max_staleness=0)
    late, quick = s.dispatch("a"), s.dispatch("b")
    taken = []

    def slow(schema, made, *, requires_base):
        if not taken:
            taken.append(None)
            taken[0] = s.receive(quick.id, payload()).accepted
        return validate_payload(schema, made, requires_base=requires_base)

    monkeypatch.setattr("manifoldagg.federated.server.update_processor.validate_payload", slow)
    assert s.receive(late.id, payload()).reason == "staleness: expected at most 0, got 1"
    assert taken == [True]


def test_tensors_of_callers_share_no_memory_with_the_server():
    start = torch.zeros(4)
    s = Server(SPACE, FedAsync(1.0), start)
    start.fill_(9)
    ticket = s.dispatch("a")
    ticket.message.start.fill_(9)
    s.model.fill_(9)
    assert s.model.tolist() == [0.0] * 4
    points = torch.ones(1, 4)
    s.receive(ticket.id, Payload(points, 1))
    points.fill_(9)
    s.averaged().fill_(9)
    assert s.model.tolist() == [1.0] * 4


class Careless:
    """Rule that returns and stores its inputs."""

    cohort = 1

    def init(self, space, start):
        return {"start": start}

    def message(self, space, state, current, client_state):
        return Message(
            current, tensors={"current": current, "memory": current if client_state is None else client_state["points"]}
        )

    def step(self, space, state, update, *, out=None):
        kept = {"points": update.points, "part": [update.points[0, :2]], "current": update.current, "base": update.base}
        return {**kept, "out": out, "n": 1}, Outcome(
            update.points[0], client_state={"points": update.points[0], "out": out}
        )


def test_rule_that_returns_its_inputs_does_not_alias_client_memory():
    s = Server(SPACE, Careless(), torch.zeros(4))
    ticket = s.dispatch("a")
    ticket.message.tensors["current"].fill_(9)
    points = torch.ones(1, 4)
    s.receive(ticket.id, Payload(points, 7))
    points.fill_(9)
    assert s.model.tolist() == [1.0] * 4
    state = s._state.value.model_state.state
    assert state["points"].tolist() == [[1.0] * 4]
    assert state["part"][0].tolist() == [1.0] * 2
    again = s.dispatch("a")
    assert again.message.tensors["memory"].tolist() == [1.0] * 4
    again.message.tensors["memory"].fill_(9)
    assert s.dispatch("a").message.tensors["memory"].tolist() == [1.0] * 4


def test_server_does_not_reuse_memory_that_a_rule_stores():
    """The server reuses the memory of freed models for later models."""
    s = Server(SPACE, Careless(), torch.zeros(4))
    for value in (1.0, 2.0, 3.0):
        s.receive(s.dispatch("a").id, payload(value))
        kept = s._state.value.model_state.state
        before = [kept[name].tolist() for name in ("current", "base")]
        s.receive(s.dispatch("a").id, payload(value + 0.5))
        assert [kept[name].tolist() for name in ("current", "base")] == before


def test_payload_in_memory_of_the_server_is_copied():
    """The server never exposes this memory, so the test accesses private attributes."""
    s = Server(SPACE, Adds(), torch.zeros(4), weights="uniform")
    late = s.dispatch("a")
    for _ in range(2):
        assert s.receive(s.dispatch("b").id, payload()).accepted
    s.drop(s.dispatch("b").id)
    spare = torch.full((4,), 5.0)
    s._updates.free_list.append(spare)
    assert s.receive(late.id, Payload(spare[None], 1)).accepted
    # Where the model was made the points were read to the end, and what was kept of them is not the model.
    assert s.model.tolist() == [6.0] * 4
    assert s._state.value.store.load(("client", "a"))["last"].tolist() == [5.0] * 4
    current = s._state.value.model_state.current
    assert s.receive(s.dispatch("a").id, Payload(current[None], 1)).accepted
    assert s.model.tolist() == [6.0] * 4


@pytest.mark.parametrize("error", [RuntimeError("broken"), ArgumentError("rate: broken"), KeyboardInterrupt()])
def test_a_rule_that_fails_changes_nothing(error):
    class Broken(Careless):
        def step(self, space, state, update, *, out=None):
            out.fill_(float("nan"))
            raise error

    s = Server(SPACE, Broken(), torch.zeros(4))
    ticket = s.dispatch("a")
    before = fingerprint(s)
    if isinstance(error, ArgumentError):
        assert s.receive(ticket.id, payload()).reason == "rate: broken"
        assert s.rejected == {"rate": 1}
    else:
        with pytest.raises(type(error)):
            s.receive(ticket.id, payload())
    assert fingerprint(s) == before
    s.rule.__class__.step = Careless.step
    assert s.receive(ticket.id, payload()).accepted


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("model", [torch.zeros(1), torch.zeros(4).double(), torch.zeros(1, 4), type(None)])
def test_rule_that_returns_no_valid_model_raises_rule_error(model):
    class Odd(Careless):
        def step(self, space, state, update, *, out=None):
            return state, Outcome(model)

    s = Server(SPACE, Odd(), torch.zeros(4))
    ticket = s.dispatch("a")
    before = fingerprint(s)
    with pytest.raises(RuleError, match="^rule: new model"):
        s.receive(ticket.id, payload())
    assert fingerprint(s) == before
    assert s.rejected == {}


def test_new_model_that_is_not_finite_is_rejected():
    class Blows(Careless):
        def step(self, space, state, update, *, out=None):
            return state, Outcome(torch.full((4,), float("nan")))

    s = Server(SPACE, Blows(), torch.zeros(4))
    ticket = s.dispatch("a")
    before = fingerprint(s)
    assert s.receive(ticket.id, payload()).reason == "points: the new model would not be finite"
    assert fingerprint(s) == before


def test_update_that_would_overflow_the_state_is_rejected():
    r"""An infinite buffered sum of $2 \cdot 3 \times 10^{38}$ could never be removed."""

    class Sums(Gathers):
        def message(self, space, state, current, client_state):
            return Message(current)

        def step(self, space, state, update, *, out=None):
            total = state.get("sum", 0) + update.points[0]
            return {"sum": total}, Outcome(None, {"last": [total, total]}, {"buffered": 1})

    class Remembers(Sums):
        def step(self, space, state, update, *, out=None):
            memory = {"sum": update.points[0] + (update.client_state or {"sum": 0})["sum"]}
            return state, Outcome(None, memory, {"buffered": 1})

    for rule in (Sums(3), Remembers(3)):
        s = server(rule)
        assert s.receive(s.dispatch("a").id, payload(3e38)).accepted
        ticket = s.dispatch("a")
        before = fingerprint(s)
        assert s.receive(ticket.id, payload(3e38)).reason == "points: the rule's state would not be finite"
        assert fingerprint(s) == before
        assert s.receive(ticket.id, payload()).accepted


def test_update_is_applied_completely_or_not_at_all(monkeypatch):
    class Fills(Adds):
        def step(self, space, state, update, *, out=None):
            state, outcome = super().step(space, state, update, out=out)
            return state, Outcome(outcome.model, None, {"buffered": float("nan")})

    s = server(Fills())
    tickets = [s.dispatch("a") for _ in range(2)]

    def interrupted(*values, **named):
        raise KeyboardInterrupt

    before = fingerprint(s)
    for module, place in (
        (state_module, "_history_row"),
        (update_processor, "AppliedUpdate"),
        (update_processor, "step"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                s.receive(tickets[0].id, payload())
        assert fingerprint(s) == before
    with monkeypatch.context() as patch:
        patch.setattr(ServerState, "with_update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            s.receive(tickets[0].id, payload())
    assert fingerprint(s) == before
    for ticket in tickets:
        assert s.receive(ticket.id, payload()).accepted
    assert s.history[-1]["waiting"] == 0


def test_failed_allocation_of_next_model_changes_nothing(monkeypatch):
    s = server()
    ticket = s.dispatch("a")
    before = fingerprint(s)

    def empty(*values, **options):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", empty)
        with pytest.raises(torch.OutOfMemoryError):
            s.receive(ticket.id, payload())
    assert fingerprint(s) == before
    assert s.receive(ticket.id, payload()).accepted


def test_copying_or_pickling_a_server_raises_an_error():
    for copies in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a Server has locks and tickets"):
            copies(server())


def test_update_that_would_overflow_the_model_is_rejected():
    s = Server(SPACE, FedOrtho(1.0, overshoot="extend", decay=0.0), torch.full((4,), 3e38), weights="uniform")
    first = s.dispatch("a")
    assert not s.receive(first.id, Payload(torch.full((1, 4), -3e38), 1)).reason
    blown = Server(SPACE, FedOrtho(9.0, overshoot="extend"), torch.full((4,), -3e38), weights="uniform")
    receipt = blown.receive(blown.dispatch("a").id, Payload(torch.full((1, 4), 3e38), 1))
    assert receipt.reason == "points: the new model would not be finite in torch.float32"
    assert blown.model.tolist() == torch.full((4,), -3e38).tolist()


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    "message",
    [
        RuntimeError,
        None,
        Message(torch.zeros(3)),
        Message(torch.zeros(4).double()),
        Message(torch.tensor([0.0, 0.0, float("nan"), 0.0])),
    ],
)
def test_client_is_counted_after_its_dispatch(message):
    class Mute(Careless):
        def message(self, space, state, current, client_state):
            if message is RuntimeError:
                raise RuntimeError("mute")
            return message

    s = Server(SPACE, Mute(), torch.zeros(4))
    before = fingerprint(s)
    with pytest.raises(RuntimeError if message is RuntimeError else ArgumentError, match="mute|rule: message"):
        s.dispatch("a")
    assert fingerprint(s) == before


def test_results_do_not_depend_on_the_grad_mode():
    s, points = server(FedOrtho(0.5), weights="uniform"), torch.ones(1, 4, requires_grad=True)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode, torch.enable_grad):
        ticket = s.dispatch("a")
        with mode():
            assert s.receive(ticket.id, Payload(points + 1, 1)).reason == ""
            s.dispatch("b")
        assert not s.model.requires_grad
        assert not s._state.value.model_state.current.is_inference()
    assert s.version == 5
    with torch.inference_mode():
        s = server(Gathers(1))
        early = s.dispatch("a")
    for ticket in (early, s.dispatch("a"), s.dispatch("a")):
        assert s.receive(ticket.id, payload()).reason == ""
    assert not early.message.start.is_inference()


class Listener(Listens):
    """Average that records all versions and returns their mean."""

    def __init__(self):
        self.seen = []

    @property
    def average(self):
        return torch.stack([model for _, model in self.seen]).mean(0) if len(self.seen) > 1 else None

    def update(self, version, model):
        self.seen.append((version, model))


def test_averaging_sees_every_new_version_in_order():
    listener = Listener()
    s = server(Gathers(2), averaging=listener)
    for name in "abcdef":
        assert torch.equal(s.averaged(), s.model) or s.version > 1
        ticket = s.dispatch(name)
        s.receive(ticket.id, Payload(ticket.message.start[None] + 1, 1))
    # What it has kept is not recycled.
    assert [(version, model.tolist()) for version, model in listener.seen] == [(i, [2.0 * i] * 4) for i in (1, 2, 3)]
    assert s.averaged().tolist() == [4.0] * 4
    assert server().averaged().tolist() == [0.0] * 4


def test_averaging_that_fails_does_not_undo_the_update():
    class Deaf(Listener):
        def update(self, version, model):
            raise ArgumentError("model: too loud")

    s = server(averaging=Deaf())
    ticket = s.dispatch("a")
    with pytest.raises(ArgumentError, match="too loud"):
        s.receive(ticket.id, payload())
    assert (s.version, s.rejected, len(s.history)) == (1, {}, 1)
    assert s.receive(ticket.id, payload()).version == 1


def test_client_may_return_its_own_base():
    s, kept = server(Adds()), server(Adds())
    mine, theirs = s.dispatch("a", retain_base=False), kept.dispatch("a")
    for each in (s, kept):
        assert each.receive(each.dispatch("b").id, payload(5.0)).accepted
    assert s.memory["versions"] == 0
    assert kept.memory["versions"] == 16
    assert s.receive(mine.id, payload()).reason.startswith("base: expected the point that the client started from")
    based = Payload(torch.full((1, 4), 2.0), 1, base=mine.message.start)
    receipt = s.receive(mine.id, based)
    assert (receipt.accepted, receipt.staleness) == (True, 1)
    assert kept.receive(theirs.id, based).reason == "base: expected no base, as the server has stored it"
    assert kept.receive(theirs.id, payload(2.0)).accepted
    assert torch.equal(s.model, kept.model)
    gone = s.dispatch("a", retain_base=False)
    s.drop(gone.id)
    assert len(versions(s)) == 1


def test_client_state_is_stored_and_forgotten():
    s = server(Adds())
    for answers in range(3):
        ticket = s.dispatch("a")
        assert ticket.message.numbers == {"steps": answers, "memory": answers}
        assert s.receive(ticket.id, payload()).accepted
    assert s.dispatch("b").message.numbers["memory"] == 0
    assert s.memory["clients"] == 16

    class Forgets(Adds):
        def step(self, space, state, update, *, out=None):
            state, outcome = super().step(space, state, update, out=out)
            return state, Outcome(outcome.model, None)

    s.rule.__class__ = Forgets
    assert s.receive(s.dispatch("a").id, payload()).accepted
    assert s.memory["clients"] == 0


def test_server_supports_models_on_manifolds():
    net = torch.nn.Linear(3, 2)
    net.weight.data /= net.weight.data.norm(dim=-1, keepdim=True)
    space = ParameterSpace.of(net, {"weight": Sphere(3)})
    s = Server(space, Careless(), space.point(net))
    off = space.point(net) * 1.5
    ticket = s.dispatch("a")
    assert s.receive(ticket.id, Payload(off[None], 1)).reason.startswith("points: weight: expected a point of Sphere")
    moved = off.clone()
    moved[:6] = off[:6] / 1.5
    assert s.receive(ticket.id, Payload(moved[None], 1)).accepted
    assert torch.equal(s.state_dict()["bias"], moved[6:])


def test_closed_server_only_provides_the_model():
    s = server(Adds())
    ticket, dropped = s.dispatch("a"), s.dispatch("a")
    s.receive(s.dispatch("a").id, payload())
    s.close()
    assert s.receive(ticket.id, payload()).reason == "server: was closed"
    with pytest.raises(ArgumentError, match="server: was closed"):
        s.drop(dropped.id)
    with pytest.raises(ArgumentError, match="server: was closed"):
        s.dispatch("a")
    assert s.model.tolist() == [1.0] * 4
    assert len(s.history) == 1
    assert s.memory["versions"] == s.memory["clients"] == 0


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Server(SPACE, Elsewhere(), torch.zeros(4)), r"rule: step: expected \(space, state, update, \*, out=None\), got a Elsewhere without out"),
        (lambda: Server(SPACE, "FedAsync", torch.zeros(4)), r"rule: expected a rule of manifoldagg\.federated\.rules, got 'FedAsync'; did you mean rules\.FedAsync\(\.\.\.\)\?"),
        (lambda: Server(SPACE, FedAsync, torch.zeros(4)), r"rule: expected an instance, got the class FedAsync; write FedAsync\(\)"),
        (lambda: server(Gathers(0)), "rule: cohort: expected an integer >= 1, got 0"),
        (lambda: server(type("Wants", (Adds,), {"tensors": ["control"]})()), "rule: tensors: expected a mapping"),
        (lambda: server(type("Wants", (Adds,), {"tensors": {"control": 0}})()), "rule: tensors: control: expected an integer >= 1"),
        (lambda: server(type("Wants", (Adds,), {"numbers": "epochs"})()), "rule: numbers: expected names"),
        (lambda: Server(None, FedAsync(), torch.zeros(4)), "space: expected a Manifold, got None"),
        (lambda: Server(torch.nn.Linear(1, 1), FedAsync(), torch.zeros(2)), r"space: .* Linear: write Server.of\(model, rule\)"),
        (lambda: Server(Flat(2), FedAsync(), torch.nn.Linear(1, 1)), r"start: .* Linear with 2 parameters; write .*space.point\(model\)"),
        (lambda: Server(SPACE, FedAsync(), torch.zeros(4).half()), "start: dtype: expected one of torch.float32, torch.float64"),
        (lambda: Server(SPACE, FedAsync(), torch.zeros(4, device="meta")), "start: expected a dense tensor"),
        (lambda: Server(SPACE, FedAsync(), torch.zeros(5)), "start: expected shape"),
        (lambda: Server(SPACE, FedAsync(), torch.full((4,), float("nan"))), "start: expected finite"),
        (lambda: Server(SPACE, FedAsync(), torch.zeros(1, 4)), "start: expected shape"),
        (lambda: Server(Sphere(4), Adds(), torch.zeros(4)), "start: expected a point of Sphere"),
        (lambda: server(weights="heavy"), "weights: expected one of observed, uniform"),
        (lambda: server(max_staleness=-1), "max_staleness: expected"),
        (lambda: server(update_limits={"max_norm": 1.0}), "update: expected UpdateLimits"),
        (lambda: server(averaging=torch.zeros(4)), "averaging: expected an object with average, update, state and load, got Tensor of shape"),
        (lambda: server(averaging=SWA), r"averaging: expected an instance, got the class SWA; write SWA\(space\)"),
        (lambda: server(averaging=SWA(SPACE, periodic=3)), "averaging: expected periodic=None"),
        (lambda: server(averaging=SWA(Flat(5))), r"averaging: expected an average over models in Flat.*, got one over models in Flat\(.*5\)"),
        (lambda: server(averaging=SWA(Sphere(4))), "averaging: expected an average over models in Flat.*, got one over models in Sphere"),
        (lambda: server(buffers={}), "buffers: expected a ParameterSpace"),
        (lambda: server(buffer_policy={"*": "latest"}), "buffers: expected the initial buffers"),
        (lambda: server(base_dtype=torch.float32), "base_dtype: expected one of torch.bfloat16, torch.float16; got"),
        (lambda: Server(Sphere(4), Adds(), torch.eye(4)[0], memory=MemoryPolicy(base_dtype=torch.float16)), "base_dtype: expected a flat space or low rank"),
        (lambda: server(memory_limit=-1), "limit: expected an integer >= 0"),
        (lambda: server(history_size=-1), "history_size: expected an integer >= 0, got -1"),
        (lambda: server().on_event("print"), "callback: expected a function of an event, got 'print'"),
        (lambda: server(spill="/no/such/folder"), "spill: expected an existing folder"),
        (lambda: server(update_limits=UpdateLimits(max_norm=0)), "max_norm: expected a finite number > 0"),
        (lambda: server(update_limits=UpdateLimits(norm_factor=-1)), "norm_factor: expected"),
        (lambda: server(update_limits=UpdateLimits(norm_after=9, norm_window=5)), "norm_after: expected at most norm_window = 5"),
        (lambda: server(update_limits=UpdateLimits(max_samples=2**53 + 1)), r"max_samples: expected at most 2\^53"),
        (lambda: server(update_limits=UpdateLimits(max_samples=0)), "max_samples: expected"),
        (lambda: server(update_limits=UpdateLimits(samples_factor=0.5)), "samples_factor: expected a finite number >= 1"),
        (lambda: server(update_limits=UpdateLimits(max_points=0)), "max_points: expected"),
        (lambda: server(update_limits=UpdateLimits(norm_window=10**30)), "norm_window: expected at most 1000000"),
        (lambda: server(weights={"a": 1}).dispatch("b"), "client: expected a client of weights, got 'b'"),
        (lambda: server().dispatch("a", retain_base="no"), "retain_base: expected one of True, False; got 'no'"),
        (lambda: Server.of({"w": torch.full((2,), float("nan"))}, FedAsync()), "^model: w: expected finite"),
        (lambda: server().dispatch(["a"]), "client: expected a hashable name"),
        (lambda: server().dispatch(type("Odd", (), {"__hash__": lambda self: 1 // 0})()), "client: expected a hashable name, got one of type Odd"),
        (lambda: server().state_dict(), "space: expected a ParameterSpace, got Flat"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
