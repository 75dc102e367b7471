"""Mutants of AsyncCurve, FLOCO and the proximal terms, each with the laws that must detect it."""

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from manifoldagg.corrections import Correction, Position
from manifoldagg.curves import fit
from manifoldagg.errors import ManifoldAggError
from manifoldagg.federated import Message, Update
from manifoldagg.federated.clients import asynccurve as curve_client
from manifoldagg.federated.clients import base
from manifoldagg.federated.clients import floco as simplex_client
from manifoldagg.federated.clients.lorentzproximal import LorentzProximal
from manifoldagg.federated.rules import Dominance, asynccurve, floco
from manifoldagg.federated.rules.floco import project_to_simplex
from manifoldagg.kernels import combine
from manifoldagg.manifolds import Flat
from tests.support import draw, relative

pytestmark = pytest.mark.usefixtures("as_shipped")

P = 6
SPACE, LAWS, MUTANTS = Flat(P), {}, {}
PAIRS = [(draw(i, 4, P), draw(i + 50, 4)) for i in range(2)]


def law(function):
    LAWS[function.__name__] = function
    return function


def caught_by(target, attribute, *laws):
    """Register the replacement of an attribute as a mutant."""

    def register(thing):
        MUTANTS[thing.__name__] = (target, attribute, thing, laws)
        return thing

    return register


def loss(theta, batch):
    inputs, targets = batch
    return (inputs @ theta - targets).square().mean()


def update(seed, **known):
    return Update(0, *draw(seed, 2, P), draw(seed + 1, 2, P), numbers={"batches": 4.0}, **known)


def project(x, g):
    return x - (x @ g) / (g @ g) * g


def turned(given_, goal):
    """Return the control point from Gram-Schmidt coordinates."""
    a, b = (x / x.norm() for x in (given_.points[1] - given_.base, goal - given_.current))
    x, e = given_.points[0] - (given_.base + given_.points[1]) / 2, project(b, a)
    if e.norm() > 1e-12:
        e, cos = e / e.norm(), a @ b
        p, q, sin = a @ x, e @ x, e @ b
        x = x - p * a - q * e + (cos * p - sin * q) * a + (sin * p + cos * q) * e
    return (given_.current + goal) / 2 + x


@law
def a_step_is_the_papers():
    conflicts = set()
    for seed in (1, 2, 3, 4):
        given_ = update(seed)
        given_ = replace(given_, current=given_.base + (-1) ** seed * (given_.current - given_.base))
        v, g = given_.points[1] - given_.base, given_.current - given_.base
        conflicts.add(bool(v @ g <= 0))
        goal = given_.current + (project(v, g) if v @ g <= 0 else v)
        # The first update of two clients: p = 2 / 3.
        s = 0.4 / (2 * 2 / 3)
        expected = (1 - s) ** 2 * given_.current + 2 * s * (1 - s) * turned(given_, goal) + s**2 * goal
        rule = asynccurve.AsyncCurve(2, 0.4)
        assert relative(rule.step(SPACE, rule.init(SPACE, given_.base), given_)[1].model, expected) <= 1e-12
    assert conflicts == {True, False}


@law
def a_kept_control_point_is_where_the_client_left_it():
    given_ = update(5)
    rule = asynccurve.AsyncCurve(2, 0.4, control="keep", correction=Position())
    s = 0.4 / (2 * 2 / 3)
    expected = (1 - s) ** 2 * given_.current + 2 * s * (1 - s) * given_.points[0] + s**2 * given_.points[1]
    assert relative(rule.step(SPACE, rule.init(SPACE, given_.base), given_)[1].model, expected) <= 1e-12


@law
def a_place_is_never_past_the_end():
    rule, given_ = asynccurve.AsyncCurve(8, 3.0), update(9)
    _, outcome = rule.step(SPACE, {"version": 99}, given_)
    assert outcome.numbers["step"] == 1
    assert (outcome.model - given_.current).norm() <= (given_.points[1] - given_.base).norm() * (1 + 1e-12)


@law
def busy_clients_step_less():
    rule = asynccurve.AsyncCurve(4, 0.5)
    given_ = update(11, client_state={"updates": 5, "batches": 1.0})
    assert rule.step(SPACE, {"version": 9}, given_)[1].numbers["step"] == pytest.approx(0.5 / (4 * 7 / 14))


@law
def the_correction_remembers():
    rule, phases = asynccurve.AsyncCurve(1, 0.3), set()
    state, x = rule.init(SPACE, draw(0, P)), draw(0, P)
    for i in range(250):
        given_ = Update(0, x, x, x + draw(i + 13, 2, P), numbers={"batches": 1.0})
        state, outcome = rule.step(SPACE, state, given_)
        x = outcome.model
        phases.add(state["correction"]["phase"])
    assert phases == {"gradient", "tangent", "position"}


@law
def moments_are_those_of_the_last_step():
    rule, given_ = asynccurve.AsyncCurve(1, 0.5), update(15)
    state, outcome = rule.step(SPACE, rule.init(SPACE, given_.base), given_)
    sent = rule.message(SPACE, state, outcome.model, outcome.client_state).tensors
    m = (given_.current - outcome.model) / 4
    assert relative(sent["m"], m) <= 1e-14
    assert relative(sent["v"], m * m) <= 1e-14
    assert not rule.message(SPACE, state, outcome.model, None).tensors


@law
def every_third_version_is_the_mean_of_the_last():
    writes, leaves = (asynccurve.AsyncCurve(1, 0.5, start=1, periodic=p) for p in (3, None))
    state, other, x, seen = {"version": 0}, {"version": 0}, draw(0, P), []
    for version in range(1, 10):
        given_ = Update(0, x, x, draw(version, 2, P), numbers={"batches": 1.0})
        state, outcome = writes.step(SPACE, state, given_)
        other, plain = leaves.step(SPACE, other, given_)
        seen.append(plain.model)
        expected = sum(seen[-3:]) / 3 if version % 3 == 0 else plain.model
        assert relative(outcome.model, expected) <= 1e-13
        x = outcome.model


@law
def the_first_average_begins_with_the_first_version():
    """With `offset=1`, the first version does not overwrite the model. The first average includes three versions."""
    writes, leaves = (asynccurve.AsyncCurve(1, 0.5, offset=1, periodic=p) for p in (2, None))
    state, other, x, seen = {"version": 0}, {"version": 0}, draw(0, P), []
    for version in range(1, 4):
        given_ = Update(0, x, x, draw(version, 2, P), numbers={"batches": 1.0})
        state, outcome = writes.step(SPACE, state, given_)
        other, plain = leaves.step(SPACE, other, given_)
        seen.append(plain.model)
        x = outcome.model
    assert relative(x, sum(seen) / 3) <= 1e-13


WARM = Message(draw(7, P), {"m": 0.1 * draw(8, P), "v": (0.1 * draw(8, P)).square()})


def trained(message=WARM, **options):
    trainer = curve_client.AsyncCurve(epochs=2, rate=0.02, control_rate=0.01, **options)
    return trainer.train(SPACE, message, loss, PAIRS, None, generator=torch.Generator().manual_seed(1)).points


@law
def the_client_is_the_papers():
    for gamma, mu in ((1.0, 0.0), (0.5, 0.4)):
        base, theta, delta = WARM.start, WARM.start, torch.zeros(P).double()
        m, v, generator = WARM.tensors["m"], WARM.tensors["v"], torch.Generator().manual_seed(1)
        for _ in range(2):
            for batch in PAIRS:
                g = torch.func.grad(loss)(theta, batch) + mu * (theta - base)
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                theta = theta - 0.02 * m / (v.sqrt() + 1e-8)
            a, b, chord = 0, 0, theta - base
            for k, batch in enumerate(PAIRS, 1):
                s = torch.rand((), generator=generator).item()
                bent = delta - gamma * (delta - project(delta, chord))
                point = (1 - s) ** 2 * base + 2 * s * (1 - s) * ((base + theta) / 2 + bent) + s * s * theta
                g = 2 * s * (1 - s) * torch.func.grad(loss)(point, batch)
                g = g - gamma * (g - project(g, chord))
                a, b = 0.9 * a + 0.1 * g, 0.999 * b + 0.001 * g * g
                delta = delta - 0.01 * a / (1 - 0.9**k) / ((b / (1 - 0.999**k)).sqrt() + 1e-8)
        bent = delta - gamma * (delta - project(delta, chord))
        expected = torch.stack([(base + theta) / 2 + bent, theta])
        assert relative(trained(projection=gamma, proximal=mu), expected) <= 1e-12


@law
def a_lorentz_term_pulls_by_its_gradient():
    base, theta, term = draw(1, P), draw(2, P), LorentzProximal(0.5, 2.0, 1.5)
    leaf = theta.clone().requires_grad_()
    delta = leaf - base
    r, q = (1.5 + leaf @ leaf).sqrt(), (1.5 + base @ base).sqrt()
    value = 0.25 * ((delta @ delta - (r - q) ** 2) / 2).exp()
    (slope,) = torch.autograd.grad(value, leaf)
    assert float(term(theta, base)) == pytest.approx(float(value.detach()), rel=1e-12)
    assert relative(term.gradient(theta, base), slope) <= 1e-12
    assert float(term(base, base)) == 0.25
    assert not term.gradient(base, base).any()


def simplex(rule, count=4):
    x = draw(0, P)
    state, memory = rule.init(SPACE, x), {}
    for i in range(count):
        given_ = Update(
            i % 2, draw(i, P), x, draw(i + 5, 3, P), weight=0.2 + 0.3 * (i % 2), client_state=memory.get(i % 2)
        )
        state, outcome = rule.step(SPACE, state, given_)
        memory[i % 2] = outcome.client_state
        x = x if outcome.model is None else outcome.model
        yield given_, state, outcome


@law
def the_model_is_the_centroid_of_weighted_means():
    waiting, shares = 0.0, 0.0
    vertices = draw(0, P).expand(3, P)
    for i, (given_, state, outcome) in enumerate(simplex(floco.FLOCO(2, 3))):
        waiting = waiting + given_.weight * (given_.points + given_.current - given_.base - vertices)
        shares += given_.weight
        if i % 2:
            vertices, waiting, shares = vertices + waiting / shares, 0.0, 0.0
            assert relative(state["vertices"], vertices) <= 1e-13
            assert relative(outcome.model, vertices.mean(0)) <= 1e-13


@law
def centres_are_places_of_the_simplex_and_stay():
    rule = floco.FLOCO(2, 3, personalize_from=0)
    seen = list(simplex(rule, 20))
    for given_, _, outcome in seen[2:]:
        centre = outcome.client_state["centre"]
        assert (centre >= 0).all()
        assert float(centre.sum()) == pytest.approx(1)
        if given_.client_state:
            assert torch.equal(centre, given_.client_state["centre"])
    first, state = seen[2][0], seen[1][1]
    d = first.points.mean(0) - first.base - state["mean"]
    assert (
        relative(seen[2][2].client_state["centre"], project_to_simplex((state["axes"] @ d) / state["scale"])) <= 1e-12
    )
    sent = rule.message(SPACE, seen[-1][1], seen[-1][2].model, seen[-1][2].client_state)
    assert torch.equal(sent.tensors["centre"], seen[-1][2].client_state["centre"])
    assert relative(sent.tensors["vertices"].mean(0), seen[-1][2].model) <= 1e-13


@law
def regions_are_small_simplices():
    x = simplex_client.Region(SPACE, 3, centre=(0.9, 0.1, 0.0), share=0.2).sample(
        500, generator=torch.Generator().manual_seed(0)
    )
    assert (x >= 0).all()
    assert (x.sum(1) - 1).abs().max() < 1e-14
    assert (x - torch.tensor([0.9, 0.1, 0.0])).abs().sum(1).max() <= 0.4 + 1e-6
    # Dirichlet(1) of 3: mean 1 / 3, variance 1 / 18; five deviations of a mean of 500.
    mean = 0.8 * torch.tensor([0.9, 0.1, 0.0]) + 0.2 / 3
    assert (x.mean(0) - mean).abs().max() <= 5 * 0.2 / (18 * 500) ** 0.5


@law
def all_vertices_learn():
    message = Message(draw(1, P), {"vertices": draw(2, 3, P)})
    payload = simplex_client.FLOCO(epochs=1, rate=0.1).train(
        SPACE, message, loss, PAIRS, None, generator=torch.Generator().manual_seed(0)
    )
    assert (payload.points - message.tensors["vertices"]).norm(dim=1).min() > 0


@caught_by(asynccurve, "rotation_coefficients", "a_step_is_the_papers")
def shifts_the_control_point(inner):
    return [1.0, -0.5, 0.5]


@caught_by(asynccurve, "rotation_coefficients", "a_step_is_the_papers")
def turns_before_the_end_is_corrected(inner, turn=asynccurve.rotation_coefficients):
    (square, along, _), (_, chord, _), _ = inner
    control, start, end = turn([[square, along, along], [along, chord, chord], [along, chord, chord]])
    return [control, start + end, 0.0]


@caught_by(asynccurve, "rotation_coefficients", "a_step_is_the_papers")
def steps_with_the_misprinted_weight(inner, turn=asynccurve.rotation_coefficients):
    return [weight / 2 for weight in turn(inner)]


@caught_by(asynccurve, "CONTROL_WEIGHTS", "a_kept_control_point_is_where_the_client_left_it")
class KeepsTheMiddleOfTheChord(dict):
    def get(self, mode):
        return [1.0, -0.5, 0.5] if mode == "keep" else None


@caught_by(Dominance, "scaled_rate", "a_place_is_never_past_the_end")
def does_not_clamp(self, rate, own, total):
    return rate / (self.clients * (own + 1) / (total + self.clients))


@caught_by(Dominance, "scaled_rate", "a_step_is_the_papers", "busy_clients_step_less")
def forgets_who_dominates(self, rate, own, total):
    return min(1.0, rate)


@caught_by(Correction, "apply", "the_correction_remembers")
def forgets_the_statistic(self, frame, state=None, *, apply=Correction.apply, **options):
    return apply(self, frame, None, **options)


@caught_by(asynccurve.AsyncCurve, "message", "moments_are_those_of_the_last_step")
def sends_the_displacement(self, space, state, current, client_state, send=asynccurve.AsyncCurve.message):
    sent = send(self, space, state, current, client_state)
    return replace(sent, tensors={name: -x if name == "m" else x for name, x in sent.tensors.items()})


@caught_by(asynccurve.AsyncCurve, "message", "moments_are_those_of_the_last_step")
def forgets_the_number_of_batches(self, space, state, current, client_state, send=asynccurve.AsyncCurve.message):
    return send(self, space, state, current, client_state and client_state | {"batches": 1.0})


@caught_by(asynccurve.AsyncCurve, "message", "moments_are_those_of_the_last_step")
def warms_late_joiners(self, space, state, current, client_state, send=asynccurve.AsyncCurve.message):
    return send(self, space, state, current, client_state or {"batches": 1.0})


@caught_by(asynccurve.AsyncCurve, "_update_average", "every_third_version_is_the_mean_of_the_last")
def never_overwrites(self, state, version, model):
    return {}


@caught_by(asynccurve.AsyncCurve, "_update_average", "the_first_average_begins_with_the_first_version")
def overwrites_at_place_zero(self, state, version, model, average=asynccurve.AsyncCurve._update_average):
    averages = average(self, state, version, model)
    return {} if version == self.offset else averages


@caught_by(asynccurve.AsyncCurve, "_update_average", "every_third_version_is_the_mean_of_the_last")
def never_begins_anew(self, state, version, model, average=asynccurve.AsyncCurve._update_average):
    mean, count = state.get("average", 0.0), state.get("averaged", 0)
    mean = mean + (model - mean) / (count + 1)
    average(self, state, version, model)
    return {"average": mean, "averaged": count + 1}


@caught_by(curve_client, "BIAS_FREE_STEPS", "the_client_is_the_papers")
class CorrectsBiasAsPrinted(float):
    def __new__(cls, *_):
        return super().__new__(cls, 0.0)


@caught_by(curve_client.AsyncCurve, "_add_proximal_gradient", "the_client_is_the_papers")
def forgets_the_proximal_term(self, end, base):
    return None


@caught_by(base, "fit", "the_client_is_the_papers")
def does_not_take_turns(*args, **options):
    return fit(*args, **(options | {"phases": replace(options["phases"], alternate=False)}))


@caught_by(base, "fit", "the_client_is_the_papers")
def does_not_project(*args, **options):
    return fit(*args, **(options | {"control": replace(options["control"], projection=0.0)}))


@caught_by(base, "fit", "the_client_is_the_papers")
def has_one_rate(*args, **options):
    return fit(*args, **(options | {"control": replace(options["control"], rate=None)}))


@caught_by(LorentzProximal, "gradient", "a_lorentz_term_pulls_by_its_gradient")
def is_euclidean(self, theta, base):
    return 2 * self(theta, base) / self.variance * (theta - base)


@caught_by(LorentzProximal, "gradient", "a_lorentz_term_pulls_by_its_gradient")
def forgets_a_factor(self, theta, base, gradient=LorentzProximal.gradient):
    return gradient(self, theta, base) / 2


@caught_by(LorentzProximal, "_parts", "a_lorentz_term_pulls_by_its_gradient")
def lifts_with_the_other_sign(self, theta, base):
    r, q = (math.sqrt(self.offset + float(x @ x)) for x in (theta, base))
    delta = theta.detach() - base
    return delta @ delta + (r - q) ** 2, torch.tensor(q - r), torch.tensor(r)


@caught_by(floco, "combine", "the_model_is_the_centroid_of_weighted_means")
def forgets_the_drift_of_old_tickets(base, rows, coefficients, *, minus=None, out=None):
    if minus is not None and len(rows) == 2:
        rows, coefficients, minus = rows[:1], coefficients[:1], minus[:1]
    return combine(base, rows, coefficients, minus=minus, out=out)


@caught_by(floco, "combine", "the_model_is_the_centroid_of_weighted_means")
def takes_the_first_vertex(base, rows, coefficients, *, minus=None, out=None):
    if base is None and len(rows) == 3 and minus is None:
        rows, coefficients = rows[:1], [1.0]
    return combine(base, rows, coefficients, minus=minus, out=out)


@caught_by(floco, "check_number", "the_model_is_the_centroid_of_weighted_means")
def forgets_weights(name, value, **bounds):
    return 1.0 if name == "weight" else value


@caught_by(floco, "project_to_simplex", "centres_are_places_of_the_simplex_and_stay")
def clips_centres(x, scale=1.0):
    return (x / scale).clamp(0, 1)


@caught_by(floco.FLOCO, "_project_client", "centres_are_places_of_the_simplex_and_stay")
def places_again_at_every_answer(self, state, update, place=floco.FLOCO._project_client):
    signals, memory = place(self, state, replace(update, client_state=None))
    return signals, memory


@caught_by(floco.FLOCO, "message", "centres_are_places_of_the_simplex_and_stay")
def keeps_centres_to_itself(self, space, state, current, client_state, send=floco.FLOCO.message):
    return send(self, space, state, current, None)


@caught_by(simplex_client.Region, "sample", "regions_are_small_simplices")
def draws_in_the_published_ball(self, *batch, generator=None):
    u = 2 * torch.rand(*batch, self.vertices, generator=generator, dtype=torch.float64) - 1
    u = u / u.abs().sum(-1, keepdim=True)
    return torch.tensor(self.centre) + 2 * self.share * torch.rand(*batch, 1, generator=generator) * u


@caught_by(simplex_client.Region, "sample", "regions_are_small_simplices")
def draws_at_the_centre(self, *batch, generator=None):
    return torch.tensor(self.centre, dtype=torch.float64).expand(*batch, self.vertices)


@caught_by(base, "fit", "all_vertices_learn")
def freezes_the_first_vertex(*args, **options):
    return fit(*args, **(options | {"control": replace(options["control"], free=[1, 2])}))


@pytest.mark.parametrize("name", LAWS)
def test_every_law_holds(name):
    LAWS[name]()


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught_by_its_laws(name, record_property):
    target, attribute, thing, laws = MUTANTS[name]
    with patch.object(target, attribute, thing() if isinstance(thing, type) else thing):
        broken = [law for law in laws if breaks(LAWS[law])]
    assert broken == list(laws)
    record_property("caught", (name, broken))


def breaks(law):
    try:
        law()
    except (AssertionError, ArithmeticError, LookupError, ManifoldAggError):
        return True
    return False


def test_there_are_enough_mutants():
    assert len(MUTANTS) >= 24
    assert {law for *_, laws in MUTANTS.values() for law in laws} == set(LAWS)
