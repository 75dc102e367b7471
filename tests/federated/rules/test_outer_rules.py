"""Tests of the rules for training across data centres against their papers' formulas, written tensor by tensor."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Payload, Server, Update, UpdateInfo, aggregate
from manifoldagg.federated.rules import ASGD, DelayedNesterov, FedAvg, HeLoCo, Momentum, RadialDirectional
from manifoldagg.federated.staleness import Polynomial
from manifoldagg.manifolds import Flat, Sphere
from tests.federated.mutants import Catalogue
from tests.support import draw, relative, seeds

GOLDEN = {
    "HeLoCo": HeLoCo(0.5, staleness=Polynomial(0.5)),
    "HeLoCo without look ahead": HeLoCo(0.5, weighted=True, look_ahead=False),
    "DelayedNesterov": DelayedNesterov(3, 0.5, activation=0.2),
    "RadialDirectional": RadialDirectional(2, 0.5),
    "DiLoCo": Momentum(FedAvg(2, 0.7), nesterov=True),
}
CATALOGUE = Catalogue({rule.__name__: rule for rule in (HeLoCo, DelayedNesterov, RadialDirectional)})
LAWS, MUTANTS, law, caught_by = CATALOGUE.laws, CATALOGUE.mutants, CATALOGUE.law, CATALOGUE.caught_by
SHAPES = [(4, 3), (5,), (1,)]


def near(ours, theirs):
    """Check that two results are equal up to a few rounding errors per step, for numbers of size 10."""
    assert max(map(relative, ours, theirs)) <= 1e-12


def moves(seed, steps):
    """Return the displacements of each step, tensor by tensor.

    Some of them agree with the previous step, and others do not.
    """
    trend = [draw(seed, *shape) for shape in SHAPES]
    for i in range(steps):
        lean = 1.5 * torch.randn((), generator=torch.Generator().manual_seed(seed + i)).item()
        yield [
            lean * t + draw(seed + 97 * i + j, *shape) for j, (t, shape) in enumerate(zip(trend, SHAPES, strict=True))
        ]


def ours(rule, seed, steps, **known):
    """Return the models after each step."""
    model, state = [draw(seed + 5, *shape) for shape in SHAPES], None
    found = [model]
    for v in moves(seed, steps):
        # Each worker starts from the model of the step before, if there is one.
        base = found[-2] if len(found) > 1 else model
        point = [b + d for b, d in zip(base, v, strict=True)]
        model, state, _ = aggregate(rule, state, model, base, point, info=UpdateInfo(**known))
        found.append(model)
    return found, state


def heloco(rule, seed, steps, share=1.0):
    """Return the start models of the workers by the formulas of the paper, whose pseudo-gradient is minus v."""
    start = theta = [draw(seed + 5, *shape) for shape in SHAPES]
    momentum = [torch.zeros(shape).double() for shape in SHAPES]
    found, cases = [start], set()
    for v in moves(seed, steps):
        new, ahead = [], []
        for i, (x, d, m) in enumerate(zip(theta, v, momentum, strict=True)):
            delta = -d
            size, length = delta.norm(), m.norm()
            corrected = delta
            if size > 0 and length > 0:
                u_hat, v_hat = delta / size, m / length
                c = (u_hat * v_hat).sum()
                confidence = size / (size + rule.confidence_scale * length)
                if c >= rule.cosine_threshold:
                    cases.add("kept")
                elif c < 0:
                    cases.add("shrunk")
                    corrected = (
                        delta
                        - torch.clamp(rule.shrink_strength * -c * confidence, max=rule.max_shrink) * c * size * v_hat
                    )
                else:
                    cases.add("turned")
                    part = torch.clamp(rule.rotation_strength * (1 - c) * confidence, max=1.0)
                    mixed = (1 - part) * u_hat + part * v_hat
                    corrected = size * mixed / mixed.norm()
            g = share * corrected
            momentum[i] = rule.beta * m + (1 - rule.beta) * g
            new.append(x - rule.rate * (g + rule.beta * momentum[i]))
            ahead.append(new[-1] - rule.rate * rule.beta * momentum[i] if rule.look_ahead else new[-1])
        theta = new
        found.append(ahead)
    return found, cases


@law
def heloco_is_the_papers_loop(k):
    seen = set()
    for seed in range(4):
        for rule in (
            k.HeLoCo(0.5),
            k.HeLoCo(0.3, 0.6, look_ahead=False, cosine_threshold=0.7, confidence_scale=0.2, rotation_strength=2.0),
        ):
            theirs, cases = heloco(rule, seed, 8)
            seen |= cases
            for a, b in zip(ours(rule, seed, 8)[0], theirs, strict=True):
                near(a, b)
    assert seen == {"kept", "shrunk", "turned"}


@law
def delayed_nesterov_is_the_papers_loop(k):
    for seed, (size, part) in enumerate([(1, 0.0), (1, 1.0), (3, 0.0), (3, 0.2), (4, 0.25)]):
        rule = k.DelayedNesterov(size, 0.4, beta=0.8, activation=part)
        model = [draw(seed + 5, *shape) for shape in SHAPES]
        momentum, total = [[torch.zeros(shape).double() for shape in SHAPES] for _ in range(2)]
        found = ours(rule, seed, 9)[0]
        for t, v in enumerate(moves(seed, 9)):
            for i, d in enumerate(v):
                total[i] = total[i] + -d
                if (t + 1) % size == 0:
                    momentum[i] = 0.8 * momentum[i] + total[i] / size
                    model[i] = model[i] - 0.4 * ((1 - part * size + part) * 0.8 * momentum[i] + -d / size)
                    total[i] = torch.zeros_like(total[i])
                else:
                    model[i] = model[i] - 0.4 * (part * 0.8 * momentum[i] + -d / size)
            near(found[t + 1], model)


def unit(x):
    return x / x.norm() if x.norm() > 0 else x


@law
def radial_directional_is_the_mean_length_of_the_mean_direction(k):
    for seed, count in enumerate((1, 2, 5)):
        rule = k.RadialDirectional(count, 0.6)
        model, state = [draw(seed + 5, *shape) for shape in SHAPES], None
        theirs = model
        weights = [(2 + i) / (2 + count) for i in range(count)]
        for turn in range(2):
            every = list(moves(seed + turn, count))
            base = model
            for v, weight in zip(every, weights, strict=True):
                point = [b + d for b, d in zip(base, v, strict=True)]
                model, state, numbers = aggregate(rule, state, model, base, point, info=UpdateInfo(weight=weight))
            new = []
            for i, x in enumerate(theirs):
                size = sum(w * v[i].norm() for w, v in zip(weights, every, strict=True)) / sum(weights)
                new.append(x + 0.6 * size * unit(sum(w * unit(v[i]) for w, v in zip(weights, every, strict=True))))
            moved = torch.cat([(a - b).flatten() for a, b in zip(new, theirs, strict=True)])
            assert numbers["norm"] == pytest.approx(moved.norm().item(), rel=1e-12)
            theirs = new
            near(model, theirs)


@caught_by("HeLoCo", "heloco_is_the_papers_loop")
class HeLoCoTrustsWhateverComes(HeLoCo):
    def correction_coefficients(self, update_square, product, momentum_square):
        return (
            replace(self, confidence_scale=0.0).correction_coefficients(update_square, product, momentum_square)
            if self.confidence_scale
            else super().correction_coefficients(update_square, product, momentum_square)
        )


@caught_by("HeLoCo", "heloco_is_the_papers_loop")
class HeLoCoTurnsWhatOpposes(HeLoCo):
    def correction_coefficients(self, update_square, product, momentum_square):
        return super().correction_coefficients(update_square, abs(product), momentum_square)


@caught_by("DelayedNesterov", "delayed_nesterov_is_the_papers_loop")
class DelayedNesterovNeverWaits(DelayedNesterov):
    def plan(self, space, state, update):
        return super().plan(space, state | {"count": self.size - 1}, update)


@caught_by("RadialDirectional", "radial_directional_is_the_mean_length_of_the_mean_direction")
class RadialDirectionalIsTheMean(RadialDirectional):
    plan = FedAvg.plan


@caught_by("RadialDirectional", "radial_directional_is_the_mean_length_of_the_mean_direction")
class RadialDirectionalForgetsWeights(RadialDirectional):
    def update_weight(self, update):
        return 1.0


test_every_law_holds, test_every_mutant_is_caught_by_its_laws = CATALOGUE.tests()


@given(seeds, st.floats(0.1, 0.9))
def test_nesterov_equals_torch(seed, beta):
    model, state = [draw(seed + 5, *shape) for shape in SHAPES], None
    theirs = [x.clone() for x in model]
    outer = torch.optim.SGD(theirs, lr=0.7, momentum=beta, nesterov=True)
    for v in moves(seed, 5):
        point = [x + d for x, d in zip(model, v, strict=True)]
        model, state, numbers = aggregate(Momentum(ASGD(0.7), beta, nesterov=True), state, model, model, point)
        before = torch.cat([x.flatten() for x in theirs])
        for x, d in zip(theirs, v, strict=True):
            x.grad = -d
        outer.step()
        near(model, theirs)
        moved = torch.cat([x.flatten() for x in theirs]) - before
        assert numbers["norm"] == pytest.approx(moved.norm().item(), rel=1e-9)


def test_delayed_nesterov_with_size_one_equals_nesterov():
    one, _ = ours(DelayedNesterov(1, 0.7, beta=0.8), 3, 6)
    other, _ = ours(Momentum(ASGD(1.0), 0.8, nesterov=True), 3, 1)
    near(
        [a - b for a, b in zip(one[1], one[0], strict=True)],
        [0.7 * (a - b) for a, b in zip(other[1], other[0], strict=True)],
    )


def test_heloco_keeps_aligned_and_rotates_weakly_aligned_updates():
    rule = HeLoCo()
    assert rule.correction_coefficients(4.0, 1.9, 9.0) == (1.0, 0.0)
    for along in (0.0, 0.3, 1.1):
        a, b = rule.correction_coefficients(4.0, along, 9.0)
        assert a * a * 4 + 2 * a * b * along + b * b * 9 == pytest.approx(4.0, rel=1e-14)
        assert a * along + b * 9 > along
    a, b = rule.correction_coefficients(4.0, -3.0, 9.0)
    # Opposed still, but less.
    assert (a, -3.0 < a * -3.0 + b * 9 < 0) == (1.0, True)
    assert rule.correction_coefficients(0.0, 0.0, 9.0) == rule.correction_coefficients(4.0, 0.0, 0.0) == (1.0, 0.0)


def test_cancelling_cohort_does_not_move_the_model():
    model, state, rule = [torch.zeros(2), torch.zeros(2)], None, RadialDirectional(2)
    for v in ([[1.0, 0.0], [3.0, 0.0]], [[-2.0, 0.0], [0.0, 4.0]]):
        model, state, _ = aggregate(rule, state, model, [torch.zeros(2)] * 2, list(map(torch.tensor, v)))
    assert model[0].tolist() == [0, 0]
    assert model[1].tolist() == pytest.approx([3.5 * 0.5**0.5] * 2, rel=1e-6)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: HeLoCo(cosine_threshold=2.0), "cosine_threshold: expected"),
        (lambda: HeLoCo(confidence_scale=-1.0), "confidence_scale: expected"),
        (lambda: HeLoCo(beta=1.0), "beta: expected"),
        (lambda: DelayedNesterov(4, activation=0.5), "activation: expected"),
        (lambda: Momentum(ASGD(), nesterov=2), "nesterov: expected one of True, False"),
        (
            lambda: Momentum(GOLDEN["DiLoCo"].rule, nesterov=True).init(Sphere(3), torch.eye(3)[0]),
            "nesterov: expected a flat",
        ),
        (
            lambda: HeLoCo().init(Sphere(3), torch.eye(3)[0]),
            "space: expected flat leaves for the momenta from other points of HeLoCo",
        ),
        (
            lambda: RadialDirectional(2).init(Sphere(3), torch.eye(3)[0]),
            "space: expected flat leaves for the lengths of tensors",
        ),
    ],
)
def test_invalid_options_are_rejected(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_pseudo_gradients_are_negative_displacements():
    space = Flat(9)
    base, current, v = draw(1, 3, 9)
    for rule in (ASGD(0.5), Momentum(FedAvg(1)), HeLoCo(), DelayedNesterov(2), RadialDirectional(1)):
        steps = []
        for descent, row in ((False, base + v), (True, -v)):
            model, state = current, rule.init(space, current)
            for _ in range(3):
                state, outcome = rule.step(space, state, Update(0, base, model, (row,), is_pseudo_gradient=descent))
                model = outcome.model
            steps.append(model)
        assert relative(*steps) <= 1e-14


def test_buffer_above_its_size_is_averaged():
    """This occurs if the state of a rule with a larger size is used with a smaller size."""
    model, state = [torch.zeros(2).double()], None
    rules = [DelayedNesterov(4, 1.0, beta=0.5)] * 3 + [DelayedNesterov(2, 1.0, beta=0.5)] * 3
    momenta = []
    for i, rule in enumerate(rules):
        model, state, _ = aggregate(rule, state, model, model, [model[0] + i])
        momenta.append((state["count"], state["momentum"][0].item() if "momentum" in state else None))
    # (0 + 1 + 2 + 3) / 4, then half of it and (4 + 5) / 2.
    assert momenta == [(1, None), (2, None), (3, None), (0, 1.5), (1, 1.5), (0, 5.25)]


@pytest.mark.parametrize("size", [1e18, 1e25, 1e30, 1e38, 3e38, 3.4e38])
@pytest.mark.parametrize(
    "rule",
    [HeLoCo(), HeLoCo(look_ahead=False), DelayedNesterov(), DelayedNesterov(1), DelayedNesterov(3, activation=0.3)],
    ids=repr,
)
def test_huge_update_does_not_block_later_updates(rule, size):
    """The momentum of an accepted update moves the model repeatedly, and must not make it overflow."""
    server = Server(Flat(4), rule, torch.zeros(4))
    late = [server.dispatch(i) for i in range(40)]
    ticket = server.dispatch("attacker")
    receipt = server.receive(ticket, Payload(torch.tensor([[size, 0.0, 0.0, 0.0]]), 1))
    assert receipt.accepted == (size < 1e20)
    for ticket in late:
        assert server.receive(ticket, Payload(torch.full((1, 4), 1e-3), 1)).reason == ""
