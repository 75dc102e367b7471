"""Mutants of OrthoFL and its trainer, each with the laws that must detect it."""

from dataclasses import replace

import pytest
import torch

from manifoldagg.federated import Message, Payload, Server, Update
from manifoldagg.federated.clients.orthofl import Calibrated
from manifoldagg.federated.rules.orthofl import OrthoFL
from manifoldagg.federated.schedules import rate_at
from manifoldagg.federated.staleness import Constant
from manifoldagg.manifolds import Flat
from tests.federated.mutants import Catalogue
from tests.support import draw, relative

pytestmark = pytest.mark.usefixtures("as_shipped")

D = 4
SPACE = Flat(D)
RIGHT = {kind.__name__: kind for kind in (OrthoFL, Calibrated)}
CATALOGUE = Catalogue(RIGHT)
LAWS, MUTANTS, law, caught_by = CATALOGUE.laws, CATALOGUE.mutants, CATALOGUE.law, CATALOGUE.caught_by


class Pull:
    """Trainer without a loss.

    It moves halfway to a target of the client, and by a small amount that depends on the turn.
    """

    def __init__(self, client, seen):
        self.client, self.seen = client, seen

    def train(self, space, message, loss, batches, client_state, *, generator):
        self.seen.append(message.start.clone())
        target = draw(self.client, D) + 0.1 * draw(40 + len(self.seen), D)
        return Payload((0.5 * message.start + 0.5 * target)[None], 1)


def starts(rule, wrap, order="abaacbacbbca", failed=(4, 6)):
    """Return the starts of three clients that return updates in the given order. Some updates are lost."""
    server, seen, memories = Server(SPACE, rule, draw(9, D)), {c: [] for c in "abc"}, dict.fromkeys("abc")
    tickets = {c: server.dispatch(c) for c in "abc"}
    for i, c in enumerate(order):
        payload = wrap(Pull(ord(c), seen[c])).train(
            SPACE, tickets[c].message, None, [], memories[c], generator=torch.Generator()
        )
        memories[c] = payload.client_state
        if i in failed:
            server.drop(tickets[c].id)
        else:
            assert server.receive(tickets[c].id, payload).accepted
        tickets[c] = server.dispatch(c)
    return seen


def cut(v, along):
    square = along @ along
    return v if square == 0 else v - (v @ along) / square * along


@law
def starts_are_the_papers(k):
    seen, order = starts(k.OrthoFL(0.5), lambda t: t, failed=()), "abaacbacbbca"
    w = start = draw(9, D)
    own, count, last = dict.fromkeys("abc", (start, start)), dict.fromkeys("abc", 0), dict.fromkeys("abc", 0)
    for t, c in enumerate(order, 1):
        home, begin = own[c]
        assert relative(seen[c][count[c]], begin) <= 1e-12
        count[c] += 1
        model = 0.5 * begin + 0.5 * (draw(ord(c), D) + 0.1 * draw(40 + count[c], D))
        beta = 0.5 * (t - last[c]) ** -0.5
        new = (1 - beta) * w + beta * model
        own[c] = (new, model + cut(w - home, model - begin))
        w, last[c] = new, t


@law
def the_protocols_agree(k):
    server = starts(k.OrthoFL(0.5), lambda t: t)
    client = starts(k.OrthoFL(0.5, protocol="client"), k.Calibrated)
    for c, mine in server.items():
        assert all(torch.equal(x, y) for x, y in zip(mine, client[c], strict=True))


@law
def an_old_ticket_leaves_the_start(k):
    server = Server(SPACE, k.OrthoFL(0.5), draw(9, D))
    old, new = server.dispatch("a"), server.dispatch("a")
    assert server.receive(new.id, Payload(draw(1, 1, D), 1)).accepted
    start = server.dispatch("a").message.start
    assert server.receive(old.id, Payload(draw(2, 1, D), 1)).accepted
    assert torch.equal(server.dispatch("a").message.start, start)


@law
def a_shift_that_sums_to_zero_is_taken_in(k):
    rule, zero = k.OrthoFL(1.0, staleness=Constant()), torch.zeros(2).double()
    shift, model = torch.tensor([1.0, -1.0]).double(), torch.tensor([[2.0, 0.0]]).double()
    given_ = Update("a", zero, shift, model, staleness=1)
    _, outcome = rule.step(Flat(2), rule.init(Flat(2), zero) | {"version": 1}, given_)
    assert outcome.client_state["start"].tolist() == [2.0, -1.0]


@law
def no_rate_is_above_one(k):
    """A larger rate is clamped to 1, so the client's model replaces the global model."""
    base, current = draw(1, 2, D)
    given_ = Update("a", base, current, draw(2, 1, D))
    for rule in (k.OrthoFL(0.9, staleness=lambda late: 4.0), k.OrthoFL(lambda version: 1.5, staleness=Constant())):
        _, outcome = rule.step(SPACE, rule.init(SPACE, base), given_)
        assert relative(outcome.model, given_.points[0]) <= 1e-15
        assert outcome.numbers["rate"] == outcome.numbers["step"] == 1.0


@caught_by("OrthoFL", "no_rate_is_above_one")
class OrthoFLOvershoots(OrthoFL):
    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, state, update, out=out)
        rate = rate_at(self.rate, state["version"]) * self.staleness(update.staleness)
        return after, replace(outcome, model=update.current + rate * (update.points[0] - update.current))


@caught_by("OrthoFL", "starts_are_the_papers")
class OrthoFLProjectsTheClientsShift(OrthoFL):
    """Mutant that removes the projection onto Δ from Δ_m."""

    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, state, update, out=out)
        old = update.client_state or {"start": update.base, "global": update.base}
        shift, own = update.current - old["global"], update.points[0] - old["start"]
        start = old["start"] + shift + cut(own, shift)
        return after, replace(outcome, client_state=outcome.client_state | {"start": start})


@caught_by("OrthoFL", "starts_are_the_papers")
class OrthoFLTakesTheShiftAfterAggregation(OrthoFL):
    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, state, update, out=out)
        moved = replace(update, current=outcome.model.clone())
        return after, replace(outcome, client_state=super().step(space, state, moved)[1].client_state)


@caught_by("OrthoFL", "starts_are_the_papers")
class OrthoFLMeasuresBothShiftsFromTheClientsStart(OrthoFL):
    """Mutant that computes both shifts from the client's start, as the published code does."""

    def step(self, space, state, update, *, out=None):
        known = update.client_state
        if known is not None:
            update = replace(update, client_state=known | {"global": known["start"]})
        return super().step(space, state, update, out=out)


@caught_by("OrthoFL", "a_shift_that_sums_to_zero_is_taken_in")
class OrthoFLTestsASum(OrthoFL):
    """Mutant that drops a shift whose entries sum to 0, as the published code does."""

    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, state, update, out=out)
        home = update.base if update.client_state is None else update.client_state["global"]
        if (update.current - home).sum() == 0:
            return after, replace(outcome, client_state=outcome.client_state | {"start": update.points[0].clone()})
        return after, outcome


@caught_by("OrthoFL", "starts_are_the_papers", "the_protocols_agree")
class OrthoFLForgetsItsClients(OrthoFL):
    def message(self, space, state, current, client_state):
        known = client_state is not None and "start" not in client_state
        return super().message(space, state, current, client_state) if known else Message(current)


@caught_by("OrthoFL", "starts_are_the_papers")
class OrthoFLIgnoresStaleness(OrthoFL):
    def step(self, space, state, update, *, out=None):
        return super().step(space, state, replace(update, staleness=0), out=out)


@caught_by("OrthoFL", "an_old_ticket_leaves_the_start")
class OrthoFLTakesOldTicketsForNewOnes(OrthoFL):
    def step(self, space, state, update, *, out=None):
        known = update.client_state
        memory = None if known is None else known | {"version": 0}
        return super().step(space, state, replace(update, client_state=memory), out=out)


@caught_by("OrthoFL", "the_protocols_agree")
class OrthoFLSendsTheModelAfterAggregation(OrthoFL):
    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, state, update, out=out)
        if "before" in outcome.client_state:
            return after, replace(outcome, client_state=outcome.client_state | {"before": outcome.model.clone()})
        return after, outcome


@caught_by("Calibrated", "the_protocols_agree")
class CalibratedCountsLostAnswers(Calibrated):
    def train(self, space, message, loss, batches, client_state, *, generator):
        if client_state is not None and message.numbers:
            client_state = client_state | {"num_updates": message.numbers["num_updates"] - 1}
        return super().train(space, message, loss, batches, client_state, generator=generator)


@caught_by("Calibrated", "the_protocols_agree")
class CalibratedTakesTheSentModelForItsHome(Calibrated):
    def train(self, space, message, loss, batches, client_state, *, generator):
        payload = super().train(space, message, loss, batches, client_state, generator=generator)
        return replace(payload, client_state=payload.client_state | {"global": message.start})


test_every_law_holds, test_every_mutant_is_caught_by_its_laws = CATALOGUE.tests()


def test_every_law_catches_a_mutant():
    assert {law for _, laws in MUTANTS.values() for law in laws} == set(LAWS)
    assert {name for changes, _ in MUTANTS.values() for name in changes} == set(RIGHT)
