"""State machine test of a server against plain dicts.

It runs dispatches, updates, retries, drops, interrupts, forks and crashes in any order.
"""

import copy
import tempfile
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from manifoldagg.errors import ArgumentError, BusyError, ManifoldAggError
from manifoldagg.federated import Payload, Server
from manifoldagg.federated.limits import UpdateLimits
from manifoldagg.manifolds import Flat
from tests.federated.fingerprint import Adds, Gathers, fingerprint, versions
from tests.federated.server.hostile import forked, signalled
from tests.server_options import grouped

P, LIMIT, COHORT, TIMEOUT, TICKETS = 3, 4, 2, 30, 12
UNKNOWN = "ticket: unknown, or used already"
EXPIRED = f"ticket: expired: no update arrived within {TIMEOUT} s"


class Remembers(Gathers):
    """Rule that moves the model by the sum of two displacements, and counts the updates of every client."""

    message = Adds.message

    def step(self, space, state, update, *, out=None):
        state, outcome = super().step(space, state, update, out=out)
        answers = 1 + (0 if update.client_state is None else update.client_state["answers"])
        memory = {"answers": answers, "last": update.points[-1]}
        return state, type(outcome)(outcome.model, memory, outcome.numbers)


class Oracle:
    """Model of a server: a list of versions, and dicts for everything else."""

    def __init__(self):
        self.versions = [torch.zeros(P)]
        self.waiting = []
        self.open = {}
        self.receipts = {}
        self.told = {}
        self.answers = {}
        self.clients = []
        self.rows = []
        self.refused = {}
        self.now = 0.0

    def refuse(self, kind):
        self.refused[kind] = self.refused.get(kind, 0) + 1

    def lapse(self):
        """End tickets that are too old."""
        for ticket, (_, _, _, since) in [*self.open.items()]:
            if self.now - since > TIMEOUT:
                del self.open[ticket]
                self.receipts[ticket] = EXPIRED

    def take(self, ticket, move, samples):
        """Apply an accepted update."""
        client, _, _, _ = self.open.pop(ticket)
        self.told[client] = samples
        self.waiting.append(move)
        self.answers[client] = self.answers.get(client, 0) + 1
        if len(self.waiting) == COHORT:
            self.versions.append(self.versions[-1] + sum(self.waiting))
            self.waiting = []


class Machine(RuleBasedStateMachine):
    """A server next to the oracle. Integers are exact in float32, so both are bitwise equal."""

    tickets = Bundle("tickets")
    used = Bundle("used")

    def __init__(self):
        super().__init__()
        self.oracle = Oracle()
        self.saved = None
        self.folder = tempfile.TemporaryDirectory()
        self.options = {
            "max_staleness": LIMIT,
            "memory_limit": 40,
            "update_limits": UpdateLimits(max_norm=50.0),
            "timeout": float(TIMEOUT),
            "clock": self.clock,
            "max_in_flight": TICKETS,
        }
        self.rule = Remembers(COHORT, patient=False)
        self.server = Server(Flat(P), self.rule, torch.zeros(P), **grouped(**self.options))

    def clock(self):
        return self.oracle.now

    def teardown(self):
        self.server.close()
        self.folder.cleanup()

    @rule(target=tickets, client=st.sampled_from("abc"), retain_base=st.booleans())
    def dispatch(self, client, retain_base):
        oracle = self.oracle
        oracle.lapse()
        if len(oracle.open) == TICKETS:
            before = fingerprint(self.server)
            try:
                self.server.dispatch(client, retain_base=retain_base)
            except BusyError:
                assert fingerprint(self.server) == before
            else:
                raise AssertionError("more tickets are out than may be")
            self.server.drop(next(iter(oracle.open)))
            del oracle.open[next(iter(oracle.open))]
        ticket = self.server.dispatch(client, retain_base=retain_base)
        assert ticket.version == len(oracle.versions) - 1
        assert torch.equal(ticket.message.start, oracle.versions[-1])
        assert ticket.message.numbers["memory"] == oracle.answers.get(client, 0)
        oracle.clients = sorted({*oracle.clients, client})
        assert ticket.id not in oracle.open
        oracle.open[ticket.id] = (client, ticket.version, retain_base, oracle.now)
        return ticket, client, retain_base

    @rule(
        target=used,
        sent=consumes(tickets),
        move=st.integers(-5, 5),
        samples=st.integers(1, 9),
        at=st.none() | st.integers(0, 300),
    )
    def answer(self, sent, move, samples, at):
        """Send an update. It may be interrupted and sent again."""
        ticket, client, retain_base = sent
        oracle = self.oracle
        oracle.lapse()
        base = None if retain_base else ticket.message.start
        payload = Payload(ticket.message.start[None] + move, samples, base=base)
        # An unknown ticket leaves nothing by which a second refusal could be told from the first.
        if at is not None and (ticket.id in oracle.open or ticket.id in oracle.receipts):
            signalled(lambda: self.server.receive(ticket.id, payload, client=client), set(), skipped=at)
        receipt = self.server.receive(ticket.id, payload, client=client)
        if ticket.id not in oracle.open:
            self.check_over(ticket.id, receipt)
            return sent
        staleness = len(oracle.versions) - 1 - ticket.version
        if staleness > LIMIT:
            assert receipt.reason == f"staleness: expected at most {LIMIT}, got {staleness}"
            oracle.refuse("staleness")
            del oracle.open[ticket.id]
            oracle.receipts[ticket.id] = repr(receipt)
            return sent
        oracle.take(ticket.id, move, samples)
        oracle.receipts[ticket.id] = repr(receipt)
        mean = sum(oracle.told.values()) / len(oracle.told)
        buffered = bool(oracle.waiting)
        assert receipt.accepted
        assert (receipt.version, receipt.staleness, receipt.buffered) == (len(oracle.versions) - 1, staleness, buffered)
        assert abs(receipt.weight - samples / (len(oracle.clients) * mean)) <= 1e-15 * receipt.weight
        oracle.rows.append((client, samples, len(oracle.versions) - 1, staleness, len(oracle.waiting)))
        return sent

    def check_over(self, ticket_id, receipt):
        """Check the receipt for a ticket that has ended: the original receipt, or the rejection of an unknown ticket."""
        known = self.oracle.receipts.get(ticket_id)
        if known is None:
            assert receipt.reason == UNKNOWN
            self.oracle.refuse("ticket")
        elif known == EXPIRED:
            assert receipt.reason == EXPIRED
        else:
            assert repr(receipt) == known

    @rule(target=used, sent=consumes(tickets))
    def drop(self, sent):
        ticket, _, _ = sent
        if ticket.id in self.oracle.open:
            self.server.drop(ticket.id)
            del self.oracle.open[ticket.id]
        return sent

    @rule(sent=tickets, flaw=st.sampled_from(["points", "samples", "base", "numbers", "norm", "client"]))
    def answer_badly(self, sent, flaw):
        ticket, client, retain_base = sent
        oracle = self.oracle
        oracle.lapse()
        self.server.expire()
        if ticket.id not in oracle.open:
            return
        fields = {"points": torch.zeros(1, P), "samples": 1, "base": None if retain_base else ticket.message.start}
        if flaw == "numbers":
            fields["numbers"] = {"staleness": 0.0}
        elif flaw == "norm":
            fields["points"] = ticket.message.start[None] + 51
        elif flaw == "client":
            client = "another"
        else:
            odd = {
                "points": torch.full((1, P), float("nan")),
                "samples": 0,
                "base": torch.zeros(P) if retain_base else None,
            }
            fields[flaw] = odd[flaw]
        before = fingerprint(self.server)
        receipt = self.server.receive(ticket.id, Payload(**fields), client=client)
        assert not receipt.accepted
        stale = len(oracle.versions) - 1 - ticket.version > LIMIT
        if stale and flaw != "client":
            oracle.refuse("staleness")
            del oracle.open[ticket.id]
            oracle.receipts[ticket.id] = repr(receipt)
            return
        oracle.refuse({"norm": "points"}.get(flaw, flaw))
        assert fingerprint(self.server) == before

    @rule(sent=used)
    def answer_again(self, sent):
        ticket, client, _ = sent
        self.oracle.lapse()
        self.server.expire()
        if ticket.id in self.oracle.open:
            # The crash of a server has opened it again.
            return
        before = fingerprint(self.server)
        self.check_over(ticket.id, self.server.receive(ticket.id, Payload(torch.zeros(1, P), 1), client=client))
        try:
            self.server.drop(ticket.id)
        except ArgumentError:
            assert fingerprint(self.server) == before
        else:
            raise AssertionError("a used ticket was dropped")

    @rule(seconds=st.sampled_from([1, 29, 31]))
    def wait(self, seconds):
        self.oracle.now += seconds

    @rule(at=st.none() | st.integers(0, 60))
    def expire(self, at):
        if at is not None:
            signalled(self.server.expire, set(), skipped=at)
        before = {*self.oracle.open}
        self.oracle.lapse()
        ended = self.server.expire()
        over = before - {*self.oracle.open}
        assert {*ended} == over if at is None else {*ended} <= over

    @rule()
    def fork(self):
        """Check that a child process sees the current state, and that its exit changes nothing."""

        def child():
            try:
                self.server.dispatch("a")
            except ManifoldAggError:
                return self.server.version, self.server.model.tolist(), self.server.rejected
            return None

        before = fingerprint(self.server)
        assert forked(child) == (self.server.version, self.server.model.tolist(), self.server.rejected)
        assert fingerprint(self.server) == before

    @rule(at=st.none() | st.integers(0, 60))
    def save(self, at):
        path = Path(self.folder.name) / "server"
        if at is not None:
            # The older file is there, or the one that is written now; here the two would differ in what is lost.
            signalled(lambda: self.server.save(path.with_name("other")), set(), skipped=at)
        self.server.save(path)
        self.saved = (path, copy.deepcopy(self.oracle))

    @precondition(lambda self: self.saved is not None)
    @rule()
    def crash(self):
        """Discard everything after the last save. The time without a running server does not count."""
        path, oracle = self.saved
        self.server.close()
        self.oracle = copy.deepcopy(oracle)
        self.server = Server.resume(path, Flat(P), self.rule, **grouped(**self.options))

    @invariant()
    def the_server_is_the_oracle(self):
        s = self.server
        oracle = self.oracle
        assert torch.equal(s.model, oracle.versions[-1])
        assert s.version == len(oracle.versions) - 1
        assert s.rejected == oracle.refused
        columns = ("client", "samples", "version", "staleness", "waiting")
        assert [tuple(row[name] for name in columns) for row in s.history] == oracle.rows
        held = {version for _, version, retain_base, _ in oracle.open.values() if retain_base} | {s.version}
        assert set(versions(s)) == held
        store = s._state.value.store
        for version in held:
            assert torch.equal(store.find(("version", version)).load(), oracle.versions[version])
        used = s.memory
        assert used["versions"] + used["clients"] <= 40
        assert used["versions"] + used["clients"] + used["spilled"] == 4 * P * (len(held) - 1 + len(oracle.answers))


Machine.TestCase.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)
TestMachine = Machine.TestCase
