"""Any order of dispatches, answers and drops, against a model that keeps everything."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Payload, Server
from manifoldagg.federated.intake import Checks
from manifoldagg.manifolds import Flat
from tests.federated.fingerprint import Adds, Gathers, fingerprint, versions

P, LIMIT, COHORT = 3, 4, 2


class Remembers(Gathers):
    """Moves by the sum of two displacements, and counts every client's answers."""

    message = Adds.message

    def step(self, space, state, update, *, out=None):
        state, outcome = super().step(space, state, update, out=out)
        answers = 1 + (0 if update.memory is None else update.memory["answers"])
        memory = {"answers": answers, "last": update.points[-1]}
        return state, type(outcome)(outcome.model, memory, outcome.numbers)


class Machine(RuleBasedStateMachine):
    """The server beside an oracle: a list of versions, and a dictionary for everything else.

    Integers are exact in float32, so that the two agree to the last bit.
    """

    tickets = Bundle("tickets")
    used = Bundle("used")

    def __init__(self):
        super().__init__()
        self.server = Server(
            Flat(P),
            Remembers(COHORT, patient=False),
            torch.zeros(P),
            max_staleness=LIMIT,
            memory_limit=40,
            checks=Checks(max_norm=50.0),
        )
        self.versions, self.waiting, self.open = [torch.zeros(P)], [], {}
        self.told, self.answers, self.clients, self.rows, self.refused = {}, {}, set(), [], {}

    @rule(target=tickets, client=st.sampled_from("abc"), keep=st.booleans())
    def dispatch(self, client, keep):
        ticket = self.server.dispatch(client, keep=keep)
        assert ticket.version == len(self.versions) - 1
        assert torch.equal(ticket.message.start, self.versions[-1])
        assert ticket.message.numbers["memory"] == self.answers.get(client, 0)
        self.clients.add(client)
        assert ticket.id not in self.open
        self.open[ticket.id] = (client, ticket.version, keep)
        return ticket

    @rule(target=used, ticket=consumes(tickets), move=st.integers(-5, 5), samples=st.integers(1, 9))
    def answer(self, ticket, move, samples):
        client, version, keep = self.open[ticket.id]
        base = None if keep else ticket.message.start
        receipt = self.server.receive(ticket.id, Payload(self.versions[version][None] + move, samples, base=base))
        staleness = len(self.versions) - 1 - version
        if staleness > LIMIT:
            assert receipt.reason == f"staleness: expected at most {LIMIT}, got {staleness}"
            self.count("staleness")
            self.server.drop(ticket.id)
            del self.open[ticket.id]
            return ticket
        del self.open[ticket.id]
        self.told[client] = samples
        self.waiting.append(move)
        self.answers[client] = self.answers.get(client, 0) + 1
        moved = len(self.waiting) == COHORT
        if moved:
            self.versions.append(self.versions[-1] + sum(self.waiting))
            self.waiting = []
        mean = sum(self.told.values()) / len(self.told)
        assert receipt.accepted
        assert (receipt.version, receipt.staleness, receipt.buffered) == (len(self.versions) - 1, staleness, not moved)
        assert abs(receipt.weight - samples / (len(self.clients) * mean)) <= 1e-15 * receipt.weight
        self.rows.append((client, samples, len(self.versions) - 1, staleness, len(self.waiting)))
        return ticket

    @rule(target=used, ticket=consumes(tickets))
    def drop(self, ticket):
        self.server.drop(ticket.id)
        del self.open[ticket.id]
        return ticket

    @rule(ticket=tickets, flaw=st.sampled_from(["points", "samples", "base", "numbers", "norm"]))
    def answer_badly(self, ticket, flaw):
        _, version, keep = self.open[ticket.id]
        fields = {"points": torch.zeros(1, P), "samples": 1, "base": None if keep else ticket.message.start}
        if flaw == "numbers":
            fields["numbers"] = {"staleness": 0.0}
        elif flaw == "norm":
            fields["points"] = self.versions[version][None] + 51
        else:
            odd = {"points": torch.full((1, P), float("nan")), "samples": 0, "base": torch.zeros(P) if keep else None}
            fields[flaw] = odd[flaw]
        before = fingerprint(self.server)
        receipt = self.server.receive(ticket.id, Payload(**fields))
        stale = len(self.versions) - 1 - version > LIMIT
        self.count("staleness" if stale else {"norm": "points"}.get(flaw, flaw))
        assert not receipt.accepted
        assert fingerprint(self.server) == before

    @rule(ticket=used)
    def answer_again(self, ticket):
        before = fingerprint(self.server)
        receipt = self.server.receive(ticket.id, Payload(torch.zeros(1, P), 1))
        assert receipt.reason == "ticket: unknown, or used already"
        self.count("ticket")
        try:
            self.server.drop(ticket.id)
        except ArgumentError:
            assert fingerprint(self.server) == before
        else:
            raise AssertionError("a used ticket was dropped")

    def count(self, kind):
        self.refused[kind] = self.refused.get(kind, 0) + 1

    @invariant()
    def the_server_is_the_oracle(self):
        s = self.server
        assert torch.equal(s.model, self.versions[-1])
        assert s.version == len(self.versions) - 1
        assert s.refused == self.refused
        columns = ("client", "samples", "version", "staleness", "waiting")
        assert [tuple(row[name] for name in columns) for row in s.history] == self.rows
        held = {version for _, version, keep in self.open.values() if keep} | {s.version}
        assert set(versions(s)) == held
        for version in held:
            assert torch.equal(s._ledger.store[("version", version)], self.versions[version])
        used = s.memory
        assert used["versions"] + used["clients"] <= 40
        assert used["versions"] + used["clients"] + used["spilled"] == 4 * P * (len(held) - 1 + len(self.answers))


Machine.TestCase.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
