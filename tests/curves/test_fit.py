"""Learning a curve: the exact optimum on quadratics, the phases, and what each option does."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from manifoldagg.curves import Bezier, fit
from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.manifolds import Flat, ParameterSpace
from tests.support import draw, relative, rotation, seeds

SGD = torch.optim.SGD


def quadratic(seed, size=3):
    """A loss ½(θ − x*)ᵀH(θ − x*) with eigenvalues in [0.5, 1.5], and x*."""
    q = rotation(seed, size)
    hessian = q @ torch.diag(torch.linspace(0.5, 1.5, size, dtype=torch.float64)) @ q.mT
    minimiser = draw(seed + 1, size)
    return lambda theta, batch: 0.5 * (theta - minimiser) @ hessian @ (theta - minimiser), minimiser


@settings(max_examples=5)
@given(seeds)
def test_the_control_point_reaches_its_exact_optimum(seed):
    """SPEC: with the ends frozen and μ = 0 the best control point is 2.5 x* − 0.75 (A + C)."""
    loss, minimiser = quadratic(seed)
    start = draw(seed + 2, 3)
    # Decaying steps average out the sampling of S; the error falls with their number, not to zero.
    decay = functools.partial(_DecayingSGD, steps=6000)
    result = fit(
        Bezier(Flat(3)), loss, [None], start=start, steps=(2, 6000), optimizer=decay, rate=0.5, control_rate=2.0,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    end = result.phi[2]
    best = 2.5 * minimiser - 0.75 * (start + end)
    assert (result.phi[1] - best).norm() <= 0.05 * (1 + best.norm())


class _DecayingSGD(SGD):
    """SGD whose rate falls as 1/(1 + t/20)."""

    def __init__(self, params, lr, steps):
        super().__init__(params, lr=lr)
        self._initial, self._taken = [group["lr"] for group in self.param_groups], 0

    def step(self, closure=None):
        for group, rate in zip(self.param_groups, self._initial, strict=True):
            group["lr"] = rate / (1 + self._taken / 20)
        self._taken += 1
        return super().step(closure)


@given(seeds, st.integers(1, 4))
def test_the_first_phase_is_ordinary_training(seed, degree):
    loss, _ = quadratic(seed)
    start = draw(seed + 2, 3)
    result = fit(Bezier(Flat(3), degree), loss, [None], start=start, steps=(7, 0), optimizer=SGD, rate=0.1)
    theta = start.clone().requires_grad_()
    plain = SGD([theta], lr=0.1)
    losses = []
    for _ in range(7):
        plain.zero_grad()
        value = loss(theta, None)
        value.backward()
        plain.step()
        losses.append(value.item())
    assert torch.equal(result.phi[-1], theta.detach())
    assert result.losses == tuple(losses)
    assert torch.equal(result.phi[0], start)


@given(seeds, st.integers(2, 4), st.sampled_from(["chord", "base"]))
def test_the_control_points_start_where_they_are_told(seed, degree, control_start):
    loss, _ = quadratic(seed)
    phi = fit(
        Bezier(Flat(3), degree), loss, [None], start=draw(seed + 2, 3), steps=(3, 0), optimizer=SGD, rate=0.1,
        control_start=control_start,
    ).phi  # fmt: skip
    parts = torch.arange(1, degree, dtype=torch.float64) / degree * (control_start == "chord")
    assert relative(phi[1:-1], phi[0] + parts[:, None] * (phi[-1] - phi[0])) <= 1e-14


@given(seeds, st.integers(2, 4), st.booleans())
def test_a_step_of_phase_two_is_the_gradient_through_the_curve(seed, degree, freeze_end):
    """One sampled S a batch: the chain rule by hand equals autograd through the curve."""
    loss, _ = quadratic(seed)
    curve, start, mu = Bezier(Flat(3), degree), draw(seed + 2, 3), 0.3
    options = {"start": start, "optimizer": SGD, "rate": 0.1, "control_rate": 0.2, "proximal": mu}
    before = fit(curve, loss, [None], steps=(3, 0), **options).phi
    after = fit(
        curve, loss, [None], steps=(3, 1), freeze_end=freeze_end, generator=torch.Generator().manual_seed(5), **options
    ).phi
    s = torch.rand((), generator=torch.Generator().manual_seed(5)).item()
    phi = before.clone().requires_grad_()
    theta = curve(phi, s)
    (loss(theta, None) + 0.5 * mu * (theta - start).square().sum()).backward()
    rates = torch.tensor([0.0, *[0.2] * (degree - 1), 0.0 if freeze_end else 0.1], dtype=torch.float64)
    assert relative(after, before - rates[:, None] * phi.grad) <= 1e-13


def test_a_strong_proximal_term_keeps_the_model_at_home():
    loss, minimiser = quadratic(0)
    start = draw(2, 3)
    far = [
        fit(Bezier(Flat(3), 1), loss, [None], start=start, steps=(500, 0), optimizer=SGD, rate=0.01, proximal=mu).phi[
            -1
        ]
        for mu in (0.0, 50.0)
    ]
    assert (far[1] - start).norm() < 0.1 * (far[0] - start).norm()
    assert (far[0] - minimiser).norm() < 0.2 * (start - minimiser).norm()


def test_it_trains_a_network_and_leaves_it_alone():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    inputs = draw(0, 64, 2, dtype=torch.float32)
    batches = list(zip(inputs.split(16), (inputs[:, 0] * inputs[:, 1] > 0).long().split(16), strict=True))
    space = ParameterSpace.of(model)
    start = space.point(model)
    kept = start.clone()
    result = fit(
        Bezier(space, 2), space.loss(model, nn.functional.cross_entropy), batches, start=start, epochs=(60, 10),
        rate=0.02, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert len(result.losses) == 70 * 4
    assert sum(result.losses[236:240]) < 0.3 * sum(result.losses[:4])
    assert torch.equal(start, kept)
    assert torch.equal(space.point(model), kept)


def test_the_same_generator_gives_the_same_curve():
    loss, _ = quadratic(0)
    runs = [
        fit(Bezier(Flat(3)), loss, [None], start=draw(2, 3), steps=(3, 9), generator=torch.Generator().manual_seed(1))
        for _ in range(2)
    ]
    assert torch.equal(runs[0].phi, runs[1].phi)


def test_steps_cycle_the_batches_and_epochs_count_passes():
    seen = []

    def loss(theta, batch):
        seen.append(batch)
        return theta.square().sum()

    fit(Bezier(Flat(1)), loss, ["a", "b", "c"], start=torch.ones(1), steps=(4, 2))
    assert seen == ["a", "b", "c", "a", "a", "b"]
    seen.clear()
    fit(Bezier(Flat(1)), loss, ["a", "b"], start=torch.ones(1), epochs=(2, 1))
    assert seen == ["a", "b"] * 3


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"start": torch.ones(2)}, "start: expected shape"),
        ({"start": torch.tensor([1.0, float("nan"), 0.0])}, "start: expected finite values"),
        ({"rate": 0.0}, "rate: expected a finite number > 0, got 0.0"),
        ({"control_rate": -1.0}, "control_rate: expected"),
        ({"proximal": -1.0}, "proximal: expected"),
        ({"control_start": "moon"}, "control_start: expected one of chord, base"),
        ({"epochs": (1, -1)}, r"epochs\[1\]: expected an integer >= 0"),
        ({"steps": (1.5, 1)}, r"steps\[0\]: expected an integer"),
        ({"batches": iter([None])}, "batches: expected what can be iterated again"),
        ({"batches": [], "steps": (1, 1)}, "batches: expected at least one batch"),
        ({"batches": []}, "batches: expected at least one batch"),
        ({"start": torch.ones(1, 3)}, "start: expected shape"),
        ({"steps": (1,)}, "steps: expected a pair"),
        ({"epochs": 3}, "epochs: expected a pair"),
        ({"curve": Bezier(Flat(3), 1)}, r"epochs\[1\]: a curve of degree 1"),
    ],
)
def test_bad_input_is_refused_by_name(options, words):
    curve = options.pop("curve", Bezier(Flat(3)))
    batches = options.pop("batches", [None])
    with pytest.raises(ArgumentError, match=words):
        fit(curve, lambda theta, batch: theta.sum(), batches, **({"start": torch.ones(3)} | options))


def test_a_gradient_that_is_not_finite_stops_the_fit():
    with pytest.raises(DivergenceError, match="control points left the finite numbers"):
        fit(
            Bezier(Flat(3)),
            lambda theta, batch: (theta * 0).square().sum().sqrt(),
            [None],
            start=torch.ones(3),
            steps=(1, 0),
        )


def test_it_learns_under_no_grad():
    with torch.no_grad():
        result = fit(Bezier(Flat(3)), lambda theta, batch: theta.square().sum(), [None], start=torch.ones(3))
    assert result.losses[-1] < result.losses[0]


def test_a_loss_that_is_not_finite_stops_the_fit():
    with pytest.raises(DivergenceError, match="the loss is nan at step 0"):
        fit(Bezier(Flat(3)), lambda theta, batch: theta.sum() * float("nan"), [None], start=torch.ones(3))
