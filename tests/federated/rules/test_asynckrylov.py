"""Tests of AsyncKrylov: with a complete path, a stale step equals the fresh step; without a path, it is a plain step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.corrections import KrylovDC
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Payload, Server, Update, aggregate
from manifoldagg.federated.rules import ASGD, AsyncKrylov
from manifoldagg.manifolds import Flat, ParameterSpace
from tests.corrections.test_krylov import SIZE, quadratic, trained
from tests.federated.mutants import Catalogue
from tests.support import draw, relative, seeds

GOLDEN = {"AsyncKrylov": AsyncKrylov(0.5), "AsyncKrylov of the whole": AsyncKrylov(0.5, granularity="model")}

pytestmark = pytest.mark.usefixtures("as_shipped")

SPACE = Flat(SIZE)
CATALOGUE = Catalogue({"AsyncKrylov": AsyncKrylov})
MUTANTS, law, caught_by = CATALOGUE.mutants, CATALOGUE.law, CATALOGUE.caught_by


def step(rule, given_, space=SPACE):
    return rule.step(space, rule.init(space, given_.current), given_)[1]


@law
def a_stale_step_is_the_one_that_a_fresh_client_would_have_made(k):
    hessian, minimum = quadratic(0, [0.9, 0.6, 0.3])
    base, current = draw(3, 2, SIZE)
    stale, fresh = (trained(start, hessian, minimum, 4) for start in (base, current))
    given_ = Update(0, base, current, stale, weight=0.5, staleness=3)
    expected = step(ASGD(0.6), Update(0, current, current, fresh[-1:], weight=0.5))
    outcome = step(k.AsyncKrylov(0.6, tolerance=1e-13), given_)
    assert relative(outcome.model, expected.model) <= 1e-8
    assert outcome.numbers["rate"] == pytest.approx(0.3)
    assert outcome.numbers["norm"] == pytest.approx((outcome.model - current).norm().item(), rel=1e-9)


@caught_by("AsyncKrylov", "a_stale_step_is_the_one_that_a_fresh_client_would_have_made")
class AsyncKrylovAlongTheCurve(AsyncKrylov):
    """AsyncKrylov that interprets its points as control points of a Bézier curve."""

    def step_curve(self, state):
        return super(AsyncKrylov, self).step_curve(state)


@caught_by("AsyncKrylov", "a_stale_step_is_the_one_that_a_fresh_client_would_have_made")
class AsyncKrylovCorrectsNothing(AsyncKrylov):
    correction = ASGD(1.0).correction


test_every_law_holds, test_every_mutant_is_caught_by_its_laws = CATALOGUE.tests()


@given(seeds, st.floats(0.05, 2.0))
def test_single_model_is_applied_without_correction(seed, rate):
    base, current, point = draw(seed, 3, SIZE)
    given_ = Update(0, base, current, point[None], weight=0.7)
    assert torch.equal(step(AsyncKrylov(rate), given_).model, step(ASGD(rate), given_).model)


@given(seeds)
def test_fresh_path_gives_the_step_along_its_chord(seed):
    base, *points = draw(seed, 5, SIZE)
    given_ = Update(0, base, base, torch.stack(points))
    assert relative(step(AsyncKrylov(0.5), given_).model, base + 0.5 * (points[-1] - base)) <= 1e-14


def test_aggregate_corrects_each_tensor_separately():
    sizes = {"w": (3, 4), "b": (5,)}
    base, current, *path = [{name: draw(seed, *size) for name, size in sizes.items()} for seed in range(6)]
    out, _, _ = aggregate(AsyncKrylov(0.5), None, current, base, path)
    space = ParameterSpace.of_state_dict(base)
    start, now, *points = map(space.point, (base, current, *path))
    corrected = KrylovDC()(space, start, now, torch.stack(points) - start)[-1]
    assert relative(space.point(out), now + 0.5 * corrected) <= 1e-12


@pytest.mark.parametrize("late", [0, 1, 4])
def test_fixed_point_does_not_depend_on_staleness(late):
    """Two clients with different losses take turns.

    Their paths contain enough information to compensate the staleness of each update.
    """
    losses = [quadratic(seed, [0.9, 0.5, 0.2], 3) for seed in (0, 5)]
    server = Server(Flat(3), AsyncKrylov(0.3, tolerance=1e-12), torch.zeros(3).double(), weights={0: 1, 1: 1})
    tickets = [server.dispatch(turn % 2) for turn in range(late + 1)]
    model = torch.zeros(3).double()
    for turn in range(30):
        client = turn % 2
        hessian, minimum = losses[client]
        ticket = tickets.pop(0)
        server.receive(ticket.id, Payload(trained(ticket.message.start, hessian, minimum, 4), 1))
        tickets.append(server.dispatch((turn + late + 1) % 2))
        model = model + 0.15 * (trained(model, hessian, minimum, 4)[-1] - model)
        assert relative(server.model, model) <= 1e-6


def test_forged_path_moves_the_model_by_at_most_the_drift():
    base, current = draw(0, 2, SIZE)
    g = current - base
    point = base - 0.1 * g / g.norm()
    for rate in (0.5, 1.0):
        moved = step(AsyncKrylov(rate), Update(0, base, current, torch.stack([point, point]))).model - current
        assert moved.norm().item() == pytest.approx(rate * (0.1 + g.norm().item()), rel=1e-12)


def test_invalid_options_are_rejected():
    for wrong, words in (
        ({"granularity": "layer"}, "granularity: expected one of"),
        ({"tolerance": -1.0}, "tolerance:"),
    ):
        with pytest.raises(ArgumentError, match=words):
            AsyncKrylov(**wrong)
    assert AsyncKrylov(granularity="model").correction == KrylovDC("model")
