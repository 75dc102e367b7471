"""Tests of the rule AsyncCurve and its trainer against plain transcriptions of the two algorithms."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.averaging import SWA
from manifoldagg.corrections import OrthoDC, OrthoDyn, Position
from manifoldagg.curves import ASAM, sharpness_aware_gradient
from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.federated import Message, Payload, Rule, Server, Trainer, Update
from manifoldagg.federated.clients import asynccurve as client
from manifoldagg.federated.clients.lorentzproximal import LorentzProximal
from manifoldagg.federated.rules import Momentum
from manifoldagg.federated.rules.asynccurve import AsyncCurve
from manifoldagg.federated.schedules import Cyclic
from manifoldagg.manifolds import Flat, Sphere
from manifoldagg.testing import check_rule
from tests.support import draw, relative, seeds

GOLDEN = {"AsyncCurve": AsyncCurve(2)}

P, N = 9, 4
SPACE = Flat(P)
PAIRS = [(draw(i, 5, P), draw(i + 50, 5)) for i in range(3)]


def loss(theta, batch):
    inputs, targets = batch
    return (inputs @ theta - targets).square().mean()


def project(v, g):
    return v - (v @ g) / (g @ g) * g if g.any() else v


class Plain:
    """Plain server of the paper with the library's OrthoDyn, without frames and Gram matrices."""

    def __init__(self, start, rate, *, smoothed=True, periodic=None, first=0, cycle=1, offset=0):
        self.models, self.rate, self.smoothed = [start], rate, smoothed
        self.counts, self.mean, self.length, self.phase = {}, torch.zeros(P).double(), 0.0, "gradient"
        self.periodic, self.first, self.cycle, self.offset, self.kept = periodic, first, cycle, offset, []

    def correct(self, v, g):
        if self.phase == "gradient":
            u = project(v, g) if v @ g <= 0 else v
        elif self.phase == "tangent":
            u = v
        else:
            u = project(v, g) if v @ g <= 0 else v - g
        self.mean = 0.98 * self.mean + 0.02 * u
        self.length = 0.98 * self.length + 0.02 * u.norm()
        r = self.mean.norm() / self.length
        if self.phase == "gradient" and r < 0.45:
            self.phase = "tangent"
        if self.phase == "tangent" and r < 0.25:
            self.phase = "position"
        return u

    def take(self, who, born, control, end):
        base, current = self.models[born], self.models[-1]
        tau = len(self.models) - 1
        self.counts[who] = self.counts.get(who, 0) + 1
        goal = current + self.correct(end - base, current - base)
        a, b = end - base, goal - current
        a, b = a / a.norm(), b / b.norm()
        x = control - (base + end) / 2
        e2 = b - (a @ b) * a
        if e2.norm() > 1e-12:
            e2 = e2 / e2.norm()
            p, q, cos, sin = a @ x, e2 @ x, a @ b, e2 @ b
            x = x - p * a - q * e2 + (cos * p - sin * q) * a + (sin * p + cos * q) * e2
        turned = (current + goal) / 2 + x
        k = tau + 1
        share = (self.counts[who] + 1) / (k + N) if self.smoothed else self.counts[who] / k
        s = min(1.0, self.rate(tau) / (N * share))
        model = (1 - s) ** 2 * current + 2 * s * (1 - s) * turned + s**2 * goal
        place = k - self.offset
        if self.periodic and place >= self.first and place % self.cycle == 0:
            self.kept.append(model)
        if self.periodic and self.kept and place > 0 and place % self.periodic == 0:
            model, self.kept = sum(self.kept) / len(self.kept), []
        self.models.append(model)
        return s


OPTIONS = [
    {},
    {"smoothed": False},
    {"periodic": 5},
    {"periodic": 6, "start": 4, "cycle": 2, "offset": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=2)
@given(seeds)
def test_rule_equals_plain_transcription(options, seed):
    rate, start = Cyclic(0.1, 0.9, 6), draw(seed, P)
    rule = AsyncCurve(N, rate, **options)
    renamed = {{"start": "first"}.get(name, name): value for name, value in options.items()}
    plain, server = Plain(start, rate, **renamed), Server(SPACE, rule, start)
    generator, open_ = torch.Generator().manual_seed(seed), {}
    for i in range(30):
        who = int(torch.randint(N, (), generator=generator))
        if who not in open_:
            open_[who] = server.dispatch(who)
            continue
        ticket = open_.pop(who)
        base = plain.models[ticket.version]
        # Towards a minimum and then around it.
        end = base + (0.5 * (1 - base) if i < 12 else 0.0) + 0.3 * draw(seed + i, P)
        control = (base + end) / 2 + 0.2 * draw(seed + 100 + i, P)
        s = plain.take(who, ticket.version, control, end)
        receipt = server.receive(ticket.id, Payload(torch.stack([control, end]), 3, numbers={"batches": 2}))
        assert receipt.accepted, receipt.reason
        assert receipt.step == pytest.approx(s, rel=1e-12)
        # Some roundings a step, carried along by 15 steps.
        assert relative(server.model, plain.models[-1]) <= 1e-11
        assert receipt.norm == pytest.approx(float((plain.models[-1] - plain.models[-2]).norm()), rel=1e-8)


def plain_step(rule, given_, goal):
    """Transcription of one step of the rule without its correction of the end.

    Source: Report (17), (31), (32), Figure 3.
    """
    base, now, (control, theirs) = given_.base, given_.current, given_.points
    beside = control - (base + theirs) / 2
    if rule.control == "rotate":
        a, b = ((x / x.norm()) for x in (theirs - base, goal - now))
        e = b - (a @ b) * a
        e, cos = e / e.norm(), a @ b
        sin, p, q = e @ b, a @ beside, e @ beside
        beside = beside + (cos * p - sin * q - p) * a + (sin * p + cos * q - q) * e
    moved = control if rule.control == "keep" else (now + goal) / 2 + beside
    s = min(1.0, given_.weight * rule.rate) if rule.weighted else min(1.0, rule.rate / (rule.clients * 2 / (1 + N)))
    return s, (1 - s) ** 2 * now + 2 * s * (1 - s) * moved + s * s * goal


@pytest.mark.parametrize("control", ["rotate", "shift", "keep"])
@pytest.mark.parametrize("weighted", [False, True])
@given(seeds, st.floats(0.05, 5.0))
@settings(max_examples=15)
def test_every_correction_of_the_control_point_equals_its_formula(control, weighted, seed, rate):
    base, current = draw(seed, 2, P)
    given_ = Update(0, base, current, base + draw(seed + 1, 2, P), weight=0.4, numbers={"batches": 1.0})
    v, g = given_.points[1] - base, current - base
    ends = {OrthoDC(-1.0): v, OrthoDC(1.0): project(v, g), Position(): v - g, OrthoDC(1.0, "tensor"): project(v, g)}
    for correction, end in ends.items():
        if control == "rotate" and end is v:
            continue  # parallel chords span no plane
        rule = AsyncCurve(N, rate, correction=correction, control=control, weighted=weighted)
        s, expected = plain_step(rule, given_, current + end)
        outcome = rule.step(SPACE, rule.init(SPACE, base), given_)[1]
        assert outcome.numbers["step"] == pytest.approx(s, rel=1e-14)
        assert relative(outcome.model, expected) <= 1e-11
        assert outcome.numbers["norm"] == pytest.approx(float((expected - current).norm()), rel=1e-8)


@given(seeds)
def test_a_shift_is_a_rotation_if_the_end_has_the_tangent_correction(seed):
    base, current = draw(seed, 2, P)
    given_ = Update(0, base, current, base + draw(seed + 1, 2, P), numbers={"batches": 1.0})
    models = [
        rule.step(SPACE, rule.init(SPACE, base), given_)[1].model
        for rule in (AsyncCurve(N, 0.5, correction=OrthoDC(-1.0), control=control) for control in ("rotate", "shift"))
    ]
    assert relative(*models) <= 1e-13


@pytest.mark.parametrize("control", ["rotate", "shift", "keep"])
def test_control_point_exists_if_the_correction_removes_the_end(control):
    """The displacement is parallel to the drift up to rounding, so the step must be computed from the vectors."""
    base, current = draw(3, 2, P)
    theirs = base + 2 * (current - base) * (1 + 1e-9 * draw(4, P))
    given_ = Update(0, base, current, torch.stack([draw(5, P), theirs]), weight=0.5, numbers={"batches": 1.0})
    rule = AsyncCurve(N, 1.0, correction=OrthoDC(1.0), control=control, weighted=True)
    goal = current + project(theirs - base, current - base)
    outcome = rule.step(SPACE, rule.init(SPACE, base), given_)[1]
    assert relative(outcome.model, plain_step(rule, given_, goal)[1]) <= (1e-6 if control == "rotate" else 1e-12)


@pytest.mark.parametrize("options", [{"control": "shift"}, {"control": "keep"}, {"weighted": True}], ids=str)
def test_the_options_satisfy_the_laws_of_rules(options):
    assert check_rule(AsyncCurve(2, **options), num_points=2, seeds=1, verbose=False).holds


@pytest.mark.usefixtures("as_shipped")
def test_rule_equals_transcription_in_every_phase_of_the_correction():
    start, memories, phases = draw(0, P), {}, set()
    plain, rule = Plain(start, lambda tau: 0.5), AsyncCurve(N, 0.5)
    state, model = rule.init(SPACE, start), start
    for i in range(300):
        who, born = i % N, max(i - 2, 0)
        base = plain.models[born]
        points = torch.stack([base + 0.1, base + draw(i, P)])
        given_ = Update(who, base, model, points, client_state=memories.get(who), numbers={"batches": 1.0})
        plain.take(who, born, *points)
        state, outcome = rule.step(SPACE, state, given_)
        assert state["correction"]["phase"] == plain.phase
        # Roundings of some steps: they are forgotten as the model moves on.
        assert relative(outcome.model, plain.models[-1]) <= 1e-9
        memories[who], model = outcome.client_state, plain.models[-1]
        phases.add(plain.phase)
    assert phases == {"gradient", "tangent", "position"}


@settings(max_examples=5)
@given(seeds, st.integers(1, 6), st.integers(0, 3), st.integers(1, 3), st.integers(0, 1))
def test_periodic_averages_are_bitwise_equal_to_swa(seed, periodic, first, cycle, offset):
    """The test compares a rule that overwrites the model with a rule without averages.

    A loop calls SWA for the second rule.
    """
    swa = SWA(SPACE, start=first, cycle=cycle, offset=offset, periodic=periodic)
    writes, leaves = (AsyncCurve(N, 0.7, start=first, cycle=cycle, offset=offset, periodic=p) for p in (periodic, None))
    ours = theirs = draw(seed, P)
    states = [rule.init(SPACE, ours) for rule in (writes, leaves)]
    for version in range(1, 13):
        points = draw(seed + version, 2, P)
        updates = [Update(0, x, x, points, numbers={"batches": 1.0}) for x in (ours, theirs)]
        states[0], outcome = writes.step(SPACE, states[0], updates[0])
        states[1], other = leaves.step(SPACE, states[1], updates[1])
        ours, theirs = outcome.model, other.model
        swa.update(version, theirs)
        point = swa.reset_point(version)
        theirs = theirs if point is None else point
        assert torch.equal(ours, theirs)


def test_client_receives_the_last_moments_of_the_server():
    server = Server(SPACE, AsyncCurve(N, 0.5), draw(0, P))
    ticket = server.dispatch("a")
    assert not ticket.message.tensors
    points = draw(1, 2, P)
    assert server.receive(ticket.id, Payload(points, 1, numbers={"batches": 5})).accepted
    message = server.dispatch("a").message
    m = (draw(0, P) - server.model) / 5
    assert relative(message.tensors["m"], m) <= 1e-15
    assert torch.equal(message.tensors["v"], message.tensors["m"].square())
    huge = AsyncCurve(2).message(SPACE, {"step": torch.full((P,), 1e25)}, torch.zeros(P), {"batches": 2.0})
    assert huge.tensors["v"].isfinite().all()
    assert not server.dispatch("late").message.tensors


def test_clients_may_join_late_fail_and_return_old_tickets():
    server = Server(SPACE, AsyncCurve(N, 0.8), draw(0, P))
    old, lost = server.dispatch("a"), server.dispatch("b")
    server.drop(lost.id)
    for i in range(3):
        ticket = server.dispatch("c")
        assert server.receive(ticket.id, Payload(draw(i + 1, 2, P), 1, numbers={"batches": 2})).accepted
    receipt = server.receive(old.id, Payload(draw(9, 2, P), 1, numbers={"batches": 2}))
    # The first of four updates: p = (1 + 1) / (4 + 4); that of "c" after four of five is 5 / 9.
    assert (receipt.staleness, receipt.step) == (3, pytest.approx(0.8 / (4 * 2 / 8)))
    ticket = server.dispatch("c")
    receipt = server.receive(ticket.id, Payload(draw(8, 2, P), 1, numbers={"batches": 2}))
    assert receipt.step == pytest.approx(0.8 / (4 * 5 / 9))


@pytest.mark.parametrize("correction", [OrthoDC(0.0, granularity="tensor"), OrthoDyn(schedule=lambda tau: "position")])
def test_end_supports_other_corrections(correction):
    base, current, control, end = draw(0, 4, P)
    rule = AsyncCurve(1, 1.0, correction=correction)
    given_ = Update(0, base, current, torch.stack([control, end]), numbers={"batches": 1.0})
    _, outcome = rule.step(SPACE, rule.init(SPACE, current), given_)
    v, g = end - base, current - base
    u = project(v, g) if v @ g <= 0 else v - (g if isinstance(correction, OrthoDyn) else 0)
    assert relative(outcome.model, current + u) <= 1e-13


@settings(max_examples=10)
@given(seeds)
def test_single_precision_differs_by_a_few_rounding_errors(seed):
    rule = AsyncCurve(1, 0.4)
    points = draw(seed, 4, P, dtype=torch.float32)
    models = []
    for base, current, *rest in (points, points.double()):
        given_ = Update(0, base, current, torch.stack(rest), numbers={"batches": 1.0})
        models.append(rule.step(SPACE, rule.init(SPACE, base), given_)[1].model)
    assert models[0].dtype == torch.float32
    # Θ̂, φ̂ and the model are rounded once each; the first two count for less than their own roundings, but for the
    # turn of the control point with the direction of a short chord.
    assert (models[0] - models[1]).abs().max() <= 16 * 2**-24 * points.double().abs().max()


def test_momentum_wraps_asynccurve():
    servers = [Server(SPACE, rule, draw(0, P)) for rule in (AsyncCurve(2, 0.5), Momentum(AsyncCurve(2, 0.5), 0.0))]
    for i in range(4):
        for server in servers:
            ticket = server.dispatch(i % 2)
            assert server.receive(ticket.id, Payload(draw(i + 1, 2, P), 1, numbers={"batches": 2})).accepted
    # Θ + (Θ' − Θ) is rounded once more.
    assert relative(servers[0].model, servers[1].model) <= 1e-14


def test_step_does_not_modify_its_inputs():
    base, current = draw(0, 2, P)
    rule = AsyncCurve(N, 0.5, periodic=2, cycle=2, start=2, offset=1)
    state = rule.init(SPACE, base)
    for i in range(6):
        given_ = Update(0, base, current, draw(i, 2, P), numbers={"batches": 1.0})
        kept, tensors = copy.deepcopy(state), [t.clone() for t in (base, current, given_.points)]
        after, outcome = rule.step(SPACE, state, given_, out=torch.empty(P, dtype=torch.float64))
        assert str(kept) == str(state)
        assert all(torch.equal(a, b) for a, b in zip(tensors, (base, current, given_.points), strict=True))
        state, current = after, outcome.model.clone()
    assert isinstance(rule, Rule)


@pytest.mark.usefixtures("as_shipped")
def test_invalid_options_and_inputs_are_rejected():
    for options, name in (
        ({"clients": 0}, "clients"),
        ({"clients": 1, "rate": 0}, "rate"),
        ({"clients": 1, "correction": OrthoDyn}, "correction"),
        ({"clients": 1, "start": -1}, "start"),
        ({"clients": 1, "cycle": 0}, "cycle"),
        ({"clients": 1, "offset": -1}, "offset"),
        ({"clients": 1, "periodic": 0}, "periodic"),
    ):
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            AsyncCurve(**options)
    with pytest.raises(
        ArgumentError,
        match="space: expected flat leaves for the rotated control points of AsyncCurve, got curved leaves: Sphere",
    ):
        AsyncCurve(1).init(Sphere(3), torch.eye(3)[0])
    server = Server(SPACE, AsyncCurve(N), draw(0, P))
    ticket = server.dispatch("a")
    before = server.model
    for payload, words in (
        (
            Payload(draw(1, 1, P), 1, numbers={"batches": 1}),
            "points: expected control point and end, (2, P), for AsyncCurve, got 1",
        ),
        (Payload(draw(1, 2, P), 1, numbers={"batches": 0}), "numbers: batches: expected"),
        (Payload(draw(1, 2, P), 1), "numbers: missing: batches"),
        (Payload(1e200 * draw(1, 2, P), 1, numbers={"batches": 1}), "points"),
    ):
        receipt = server.receive(ticket.id, payload)
        assert receipt.reason.startswith(words), receipt.reason
    assert torch.equal(server.model, before)


# The trainer.


def by_hand(message, *, epochs, rate, control_rate, gamma, mu=0.0, lorentz=None, sharpness=None, printed=False, seed=3):
    """Train like the paper's client, with the weight 2 in the curve and the projected control point."""
    b1, b2, eps, base = 0.9, 0.999, 1e-8, message.start
    theta, delta = base.clone(), torch.zeros(P, dtype=torch.float64)
    warm = "m" in message.tensors
    m1, v1 = (message.tensors[x].clone() if warm else torch.zeros(P, dtype=torch.float64) for x in ("m", "v"))
    c1, generator = 0, torch.Generator().manual_seed(seed)

    def slope(theta, batch):
        return sharpness_aware_gradient(SPACE, loss, theta, batch, sharpness)[1]

    def project(x, chord):
        return x - gamma * (x @ chord) / (chord @ chord) * chord

    for _ in range(epochs):
        for batch in PAIRS:
            c1 += 1
            g = slope(theta, batch) + mu * (theta - base)
            if lorentz is not None:
                leaf = theta.clone().requires_grad_()
                g = g + torch.autograd.grad(lorentz(leaf, base), leaf)[0]
            m1, v1 = b1 * m1 + (1 - b1) * g, b2 * v1 + (1 - b2) * g * g
            unbiased = warm and not printed
            m, v = (m1, v1) if unbiased else (m1 / (1 - b1**c1), v1 / (1 - b2**c1))
            theta = theta - rate * m / (v.sqrt() + eps)
        m2, v2, middle, chord = 0, 0, (base + theta) / 2, theta - base
        for c2, batch in enumerate(PAIRS, 1):
            s = torch.rand((), generator=generator).item()
            point = (1 - s) ** 2 * base + 2 * s * (1 - s) * (middle + project(delta, chord)) + s**2 * theta
            g = project(2 * s * (1 - s) * slope(point, batch), chord)
            m2, v2 = b1 * m2 + (1 - b1) * g, b2 * v2 + (1 - b2) * g * g
            delta = delta - control_rate * m2 / (1 - b1**c2) / ((v2 / (1 - b2**c2)).sqrt() + eps)
    return torch.stack([middle + project(delta, chord), theta])


WARM = Message(draw(7, P), {"m": 0.1 * draw(8, P), "v": (0.1 * draw(8, P)).square()})
CLIENTS = {
    "cold": (Message(draw(7, P)), {}, {}),
    "warm": (WARM, {}, {}),
    "warm, as printed": (WARM, {"as_printed": True}, {"printed": True}),
    "proximal": (WARM, {"proximal": 0.4}, {"mu": 0.4}),
    "Lorentz": (WARM, {"proximal": LorentzProximal(0.4, 2.0)}, {"lorentz": LorentzProximal(0.4, 2.0)}),
    "ASAM": (WARM, {"sharpness": ASAM(0.3)}, {"sharpness": ASAM(0.3)}),
}


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("gamma", [0.6, 1.0])
@pytest.mark.parametrize("case", CLIENTS)
def test_trainer_equals_plain_transcription(case, gamma):
    message, options, plain = CLIENTS[case]
    for epochs in (1, 2):
        trainer = client.AsyncCurve(epochs=epochs, rate=0.02, control_rate=0.01, projection=gamma, **options)
        payload = trainer.train(SPACE, message, loss, PAIRS, None, generator=torch.Generator().manual_seed(3))
        expected = by_hand(message, epochs=epochs, rate=0.02, control_rate=0.01, gamma=gamma, **plain)
        # A few roundings in each of at most 12 steps; Adam divides by sqrt(v), of size 1 here.
        assert relative(payload.points, expected) <= 1e-11
        assert payload.numbers == {"batches": 3}
        assert payload.samples == 15
    assert isinstance(trainer, Trainer)


def test_control_point_does_not_move_along_the_chord():
    payload = client.AsyncCurve(rate=0.1).train(
        SPACE, WARM, loss, PAIRS, None, generator=torch.Generator().manual_seed(0)
    )
    control, end = payload.points
    bend = control - (WARM.start + end) / 2
    assert abs(float(bend @ (end - WARM.start))) <= 1e-12 * float(bend.norm() * (end - WARM.start).norm())
    assert bend.norm() > 1e-4


def test_default_control_rate_is_a_tenth_of_the_rate():
    given_, tenth = (
        client.AsyncCurve(rate=0.1, control_rate=rate).train(
            SPACE, WARM, loss, PAIRS, None, generator=torch.Generator().manual_seed(0)
        )
        for rate in (0.01, None)
    )
    assert torch.equal(given_.points, tenth.points)


def test_trainer_does_not_modify_the_message():
    kept = copy.deepcopy(WARM)
    client.AsyncCurve().train(SPACE, WARM, loss, PAIRS, None, generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(kept.tensors[name], WARM.tensors[name]) for name in ("m", "v"))
    assert torch.equal(kept.start, WARM.start)


@pytest.mark.usefixtures("as_shipped")
def test_rule_and_trainer_together_reach_a_shared_minimum():
    """The clients have different batches of one regression without noise, so they have the same minimum."""
    truth, server = draw(20, P), Server(SPACE, AsyncCurve(3, 0.6), torch.zeros(P, dtype=torch.float64))
    inputs = [draw(30 + i, 12, P) for i in range(3)]
    trainer = client.AsyncCurve(epochs=2, rate=0.05)
    tickets, losses = {i: server.dispatch(i) for i in range(3)}, []
    for turn in range(45):
        i = turn % 3
        batches = [(x, x @ truth) for x in inputs[i].split(4)]
        payload = trainer.train(
            SPACE, tickets[i].message, loss, batches, None, generator=torch.Generator().manual_seed(turn)
        )
        assert server.receive(tickets[i].id, payload).accepted
        tickets[i] = server.dispatch(i)
        losses.append(float(sum(loss(server.model, (x, x @ truth)) for x in inputs)))
    assert losses[-1] < 0.05 * losses[0]


@pytest.mark.usefixtures("as_shipped")
def test_trainer_rejects_invalid_options_and_messages():
    bad = {"epochs": 0, "rate": 0, "proximal": -1, "control_rate": -1, "betas": (0.9, 1), "eps": -1, "projection": 2}
    for name, value in bad.items():
        with pytest.raises(ArgumentError, match=rf"^{name}(\[1\])?: expected"):
            client.AsyncCurve(**{name: value})
    generator = torch.Generator()
    for tensors, words in (
        ({"m": draw(0, P)}, "message: expected both moments m and v"),
        ({"m": draw(0, P), "v": draw(0, 2)}, "message: v: expected shape"),
    ):
        with pytest.raises(ArgumentError, match=words):
            client.AsyncCurve().train(SPACE, Message(draw(0, P), tensors), loss, PAIRS, None, generator=generator)
    with pytest.raises(DivergenceError, match="larger variance"):
        client.AsyncCurve(rate=50.0, proximal=LorentzProximal(1.0, 1e-3)).train(
            SPACE, WARM, loss, PAIRS, None, generator=generator
        )
