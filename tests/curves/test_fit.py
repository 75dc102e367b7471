"""Learning a curve: the exact optimum on quadratics, the phases, and what each option does."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from manifoldagg.curves import Bezier, Control, Phases, Sampling, Training, fit
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


def best_control(minimiser, start, end):
    """SPEC: with the ends frozen and μ = 0 the best control point of a quadratic loss is 2.5 x* − 0.75 (A + C)."""
    return 2.5 * minimiser - 0.75 * (start + end)


@settings(max_examples=3)
@given(seeds)
def test_the_control_point_reaches_its_exact_optimum(seed):
    """The loss has degree 4 in S, so three nodes are exact; H E[b₁²] has eigenvalues in 2/15 · [.5, 1.5]."""
    loss, minimiser = quadratic(seed)
    start, end = draw(seed + 2, 3), draw(seed + 3, 3)
    # Rate 7.5 contracts by at least one half a step: 60 steps end at rounding, which the steps themselves repeat.
    result = fit(
        Bezier(Flat(3)),
        loss,
        [None],
        start=start,
        end=end,
        phases=Phases(steps=(0, 60)),
        training=Training(optimizer=SGD, rate=7.5),
        sampling=Sampling(kind="quadrature", samples=3),
    )
    assert torch.equal(result.phi[0], start)
    assert torch.equal(result.phi[2], end)
    assert relative(result.phi[1], best_control(minimiser, start, end)) <= 1e-13


def test_random_coordinates_lead_to_the_same_optimum():
    loss, minimiser = quadratic(0)
    start = draw(2, 3)
    # Decaying steps average out the sampling of S; the error falls with their number, not to zero.
    decay = functools.partial(_DecayingSGD, steps=800)
    result = fit(
        Bezier(Flat(3)),
        loss,
        [None],
        start=start,
        phases=Phases(steps=(2, 800)),
        training=Training(optimizer=decay, rate=0.5),
        control=Control(rate=2.0),
        generator=torch.Generator().manual_seed(0),
    )
    best = best_control(minimiser, start, result.phi[2])
    assert (result.phi[1] - best).norm() <= 0.1 * (1 + best.norm())


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


def wavy(theta, batch):
    return ((theta - batch) ** 2 * (1 + (theta * batch).sin())).sum()


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_default_fit_equals_the_algorithm_of_the_paper(degree, dtype):
    """Draws, steps and their order are those of the paper's algorithm, bit for bit."""
    data, start = list(draw(0, 5, 6, dtype=dtype)), draw(1, 6, dtype=dtype)
    result = fit(
        Bezier(Flat(6), degree),
        wavy,
        data,
        start=start,
        phases=Phases(epochs=(2, 3)),
        training=Training(rate=0.01, proximal=0.1),
        control=Control(rate=0.02, free=range(1, degree + 1)),
        generator=torch.Generator().manual_seed(3),
    )
    generator = torch.Generator().manual_seed(3)
    phi = start.expand(degree + 1, -1).clone()
    end, controls = nn.Parameter(phi[-1]), nn.Parameter(phi[1:-1])
    adam = torch.optim.Adam([{"params": [end], "lr": 0.01}, {"params": [controls], "lr": 0.02}])

    def gradient(theta, batch):
        theta = theta.detach().requires_grad_()
        return torch.autograd.grad(wavy(theta, batch), theta)[0] + 0.1 * (theta.detach() - start)

    for batch in data * 2:
        end.grad = gradient(end, batch)
        adam.step()
    for i in range(1, degree):
        torch.lerp(phi[0], phi[-1], i / degree, out=phi[i])
    for batch in data * 3:
        s = torch.rand((), generator=generator).item()
        b = phi.new_tensor([math.comb(degree, i) * s**i * (1 - s) ** (degree - i) for i in range(degree + 1)])
        slope = gradient(b @ phi, batch)
        controls.grad, end.grad = torch.outer(b[1:-1], slope), b[-1] * slope
        adam.step()
    assert torch.equal(result.phi, phi)


def test_the_default_fit_has_its_golden_result():
    """Frozen numbers; another machine may round the steps in another way."""
    result = fit(
        Bezier(Flat(2)),
        wavy,
        [torch.tensor([1.0, -2.0]).double(), torch.tensor([0.5, 1.0]).double()],
        start=torch.tensor([0.25, -0.75]).double(),
        training=Training(rate=0.125),
        generator=torch.Generator().manual_seed(0),
    )
    assert result.phi.flatten().tolist() == pytest.approx(FROZEN, rel=1e-12)
    assert result.losses[-1] == pytest.approx(FROZEN_LOSS, rel=1e-12)


FROZEN = [0.25, -0.75, 0.7938733129134913, -1.3945293718273781, 0.6706327722624897, -1.2034750579442528]
FROZEN_LOSS = 0.8245241674927954


def hill(theta, batch):
    """Two wells at (±1, 0) on a ring, and a hill of height 4 inside it."""
    return 4 * (theta @ theta - 1).square() + theta[1].square() / 20


def barrier(curve, phi):
    values = [hill(curve(phi, k / 100), None).item() for k in range(101)]
    return max(values) - max(values[0], values[-1])


@pytest.mark.parametrize("sampling", ["uniform", "stratified", "quadrature", "length"])
def test_two_minima_are_connected_around_a_barrier(sampling):
    """The chord crosses the hill; a learned curve goes round it with less than a twentieth of its barrier."""
    curve, a = Bezier(Flat(2), 3), torch.tensor([1.0, 0.0], dtype=torch.float64)
    chord = torch.stack([a, a / 3, -a / 3, -a])
    # Off the line of symmetry, on which the slope away from it is 0.
    begin = chord + torch.tensor([[0.0], [0.1], [0.1], [0.0]], dtype=torch.float64) * torch.tensor([0.0, 1.0])
    result = fit(
        curve,
        hill,
        [None],
        phi=begin,
        phases=Phases(steps=(0, 100)),
        training=Training(rate=0.05),
        sampling=Sampling(kind=sampling, samples=4),
        generator=torch.Generator().manual_seed(0),
    )
    assert torch.equal(result.phi[[0, -1]], torch.stack([a, -a]))
    assert barrier(curve, chord) > 3.5
    assert barrier(curve, result.phi) < 0.05 * barrier(curve, chord)


@given(seeds, st.integers(1, 4))
def test_the_first_phase_is_ordinary_training(seed, degree):
    loss, _ = quadratic(seed)
    start = draw(seed + 2, 3)
    result = fit(
        Bezier(Flat(3), degree),
        loss,
        [None],
        start=start,
        phases=Phases(steps=(7, 0)),
        training=Training(optimizer=SGD, rate=0.1),
    )
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
def test_the_control_points_have_the_given_start(seed, degree, control_start):
    loss, _ = quadratic(seed)
    phi = fit(
        Bezier(Flat(3), degree),
        loss,
        [None],
        start=draw(seed + 2, 3),
        phases=Phases(steps=(3, 0)),
        training=Training(optimizer=SGD, rate=0.1),
        control=Control(start=control_start),
    ).phi
    parts = torch.arange(1, degree, dtype=torch.float64) / degree * (control_start == "chord")
    assert relative(phi[1:-1], phi[0] + parts[:, None] * (phi[-1] - phi[0])) <= 1e-14


@given(seeds, st.integers(2, 4), st.booleans())
def test_a_step_of_phase_two_is_the_gradient_through_the_curve(seed, degree, freeze_end):
    """One sampled S a batch: the chain rule by hand equals autograd through the curve."""
    loss, _ = quadratic(seed)
    curve, start, mu = Bezier(Flat(3), degree), draw(seed + 2, 3), 0.3
    control = Control(rate=0.2, free=None if freeze_end else range(1, degree + 1))
    options = {"start": start, "training": Training(SGD, 0.1, proximal=mu), "control": control}
    before = fit(curve, loss, [None], phases=Phases(steps=(3, 0)), **options).phi
    after = fit(
        curve, loss, [None], phases=Phases(steps=(3, 1)), generator=torch.Generator().manual_seed(5), **options
    ).phi
    s = torch.rand((), generator=torch.Generator().manual_seed(5)).item()
    phi = before.clone().requires_grad_()
    theta = curve(phi, s)
    (loss(theta, None) + 0.5 * mu * (theta - start).square().sum()).backward()
    rates = torch.tensor([0.0, *[0.2] * (degree - 1), 0.0 if freeze_end else 0.1], dtype=torch.float64)
    assert relative(after, before - rates[:, None] * phi.grad) <= 1e-13


def test_a_strong_proximal_term_keeps_the_model_at_the_base():
    loss, minimiser = quadratic(0)
    start = draw(2, 3)
    far = [
        fit(
            Bezier(Flat(3), 1),
            loss,
            [None],
            start=start,
            phases=Phases(steps=(200, 0)),
            training=Training(optimizer=SGD, rate=0.02, proximal=mu),
        ).phi[-1]
        for mu in (0.0, 50.0)
    ]
    assert (far[1] - start).norm() < 0.1 * (far[0] - start).norm()
    assert (far[0] - minimiser).norm() < 0.2 * (start - minimiser).norm()


def test_a_network_is_fitted_without_being_modified():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    inputs = draw(0, 64, 2, dtype=torch.float32)
    batches = list(zip(inputs.split(16), (inputs[:, 0] * inputs[:, 1] > 0).long().split(16), strict=True))
    space = ParameterSpace.of(model)
    start = space.point(model)
    kept = start.clone()
    result = fit(
        Bezier(space, 2),
        space.loss(model, nn.functional.cross_entropy),
        batches,
        start=start,
        phases=Phases(epochs=(60, 10)),
        training=Training(rate=0.02),
        generator=torch.Generator().manual_seed(0),
    )
    assert len(result.losses) == 70 * 4
    assert sum(result.losses[236:240]) < 0.3 * sum(result.losses[:4])
    assert torch.equal(start, kept)
    assert torch.equal(space.point(model), kept)


def test_the_same_generator_gives_the_same_curve():
    loss, _ = quadratic(0)
    runs = [
        fit(
            Bezier(Flat(3)),
            loss,
            [None],
            start=draw(2, 3),
            phases=Phases(steps=(3, 9)),
            generator=torch.Generator().manual_seed(1),
        )
        for _ in range(2)
    ]
    assert torch.equal(runs[0].phi, runs[1].phi)


def test_steps_cycle_the_batches_and_epochs_count_passes():
    seen = []

    def loss(theta, batch):
        seen.append(batch)
        return theta.square().sum()

    fit(Bezier(Flat(1)), loss, ["a", "b", "c"], start=torch.ones(1), phases=Phases(steps=(4, 2)))
    assert seen == ["a", "b", "c", "a", "a", "b"]
    seen.clear()
    fit(Bezier(Flat(1)), loss, ["a", "b"], start=torch.ones(1), phases=Phases(epochs=(2, 1)))
    assert seen == ["a", "b"] * 3


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (lambda: {"start": torch.ones(2)}, "start: expected shape"),
        (lambda: {"start": torch.tensor([1.0, float("nan"), 0.0])}, "start: expected finite values"),
        (lambda: {"training": Training(rate=0.0)}, "rate: expected a finite number > 0, got 0.0"),
        (lambda: {"control": Control(rate=-1.0)}, "^rate: expected"),
        (lambda: {"training": Training(proximal=-1.0)}, "proximal: expected"),
        (lambda: {"control": Control(start="moon")}, "^start: expected one of chord, base"),
        (lambda: {"phases": Phases(epochs=(1, -1))}, r"epochs\[1\]: expected an integer >= 0"),
        (lambda: {"phases": Phases(steps=(1.5, 1))}, r"steps\[0\]: expected an integer"),
        (lambda: {"batches": iter([None])}, "batches: expected a re-iterable object"),
        (lambda: {"batches": [], "phases": Phases(steps=(1, 1))}, "batches: expected at least one batch"),
        (lambda: {"batches": []}, "batches: expected at least one batch"),
        (lambda: {"start": torch.ones(1, 3)}, "start: expected shape"),
        (lambda: {"start": None}, "start: expected a point, or phi"),
        (lambda: {"phases": Phases(steps=(1,))}, "steps: expected a pair"),
        (lambda: {"phases": Phases(epochs=3)}, "epochs: expected a pair"),
        (lambda: {"curve": Bezier(Flat(3), 1)}, r"epochs\[1\]: expected 0, got 2; Bezier.* has no trainable points"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(options, words):
    given_ = {"curve": Bezier(Flat(3)), "batches": [None], "start": torch.ones(3)}
    with pytest.raises(ArgumentError, match=words):
        fit(loss=lambda theta, batch: theta.sum(), **given_ | options())


def test_a_nonfinite_gradient_stops_the_fit():
    with pytest.raises(DivergenceError, match="phi: expected finite control points"):
        fit(
            Bezier(Flat(3)),
            lambda theta, batch: (theta * 0).square().sum().sqrt(),
            [None],
            start=torch.ones(3),
            phases=Phases(steps=(1, 0)),
        )


def test_the_fit_works_inside_no_grad():
    with torch.no_grad():
        result = fit(Bezier(Flat(3)), lambda theta, batch: theta.square().sum(), [None], start=torch.ones(3))
    assert result.losses[-1] < result.losses[0]


def test_a_nonfinite_loss_stops_the_fit():
    with pytest.raises(DivergenceError, match="loss: expected a finite value at step 0, got nan"):
        fit(Bezier(Flat(3)), lambda theta, batch: theta.sum() * float("nan"), [None], start=torch.ones(3))
