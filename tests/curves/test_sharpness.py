"""SAM and ASAM: where they look, what a slope there is, and that flat minima win."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.curves import Bezier, Phases, Training, fit
from manifoldagg.curves.sharpness import ASAM, SAM, sharpness_aware_gradient
from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.manifolds import Flat, PoincareBall, Sphere, distance
from tests.support import draw, relative, seeds


def quartic(theta, batch):
    return (theta - batch).square().square().sum() + (theta * batch).sum()


@given(seeds, st.floats(1e-3, 2))
def test_sam_evaluates_the_gradient_at_the_ascent_point(seed, radius):
    theta, batch = draw(seed, 5), draw(seed + 1, 5)
    value, slope = sharpness_aware_gradient(Flat(5), quartic, theta, batch, SAM(radius))
    plain, g = sharpness_aware_gradient(Flat(5), quartic, theta, batch)
    uphill = theta + radius * g / g.norm()
    assert torch.equal(value, plain)
    assert relative(slope, 4 * (uphill - batch) ** 3 + batch) <= 1e-13


@given(seeds, st.floats(1e-3, 2))
def test_asam_scales_the_ascent_step_by_the_parameters(seed, radius):
    """The point maximises the linearised loss over |T⁻¹ε| ≤ ρ: it lies on that ellipsoid, along T² g."""
    theta, g = draw(seed, 5), draw(seed + 1, 5)
    step = ASAM(radius, eta=0.1).perturb(Flat(5), theta, g) - theta
    scale = theta.abs() + 0.1
    assert (step / scale).norm().item() == pytest.approx(radius, rel=1e-12)
    assert (
        relative(step / (scale**2 * g).norm(), radius * scale**2 * g / (scale * g).norm() / (scale**2 * g).norm())
        <= 1e-12
    )


@given(seeds)
def test_asam_is_invariant_to_rescaled_coordinates(seed):
    """With θ = A θ′ the derivative is A⁻¹ g′: perturbing and rescaling commute. SAM does not."""
    theta, g, a = draw(seed, 5), draw(seed + 1, 5), draw(seed + 2, 5).exp()
    for sharpness, commutes in ((ASAM(0.5, eta=0.0), True), (SAM(0.5), False)):
        one = a * sharpness.perturb(Flat(5), theta, g)
        other = sharpness.perturb(Flat(5), a * theta, g / a)
        assert (relative(one, other) <= 1e-13) is commutes


@pytest.mark.parametrize("space", [Sphere(3), PoincareBall(2)], ids=str)
def test_on_a_curved_space_the_ascent_point_has_the_distance_of_the_radius(space):
    generator = torch.Generator().manual_seed(0)
    theta = space.random_point(generator=generator, dtype=torch.float64)
    batch = draw(1, *space.shape)
    uphill = SAM(0.25).perturb(space, theta, batch)
    assert distance(space, theta, uphill).item() == pytest.approx(0.25, rel=1e-12)
    assert torch.equal(SAM(0.25).perturb(space, theta, torch.zeros_like(theta)), theta)


@pytest.mark.parametrize("space", [Sphere(3), PoincareBall(2)], ids=str)
def test_on_a_curved_space_the_gradient_is_transported_back(space):
    """As the radius falls it tends to the plain gradient; its error is of first order."""
    theta = space.random_point(generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = draw(1, *space.shape)
    g = space.gradient(theta, sharpness_aware_gradient(space, quartic, theta, batch)[1])
    near, far = (
        (space.gradient(theta, sharpness_aware_gradient(space, quartic, theta, batch, SAM(h))[1]) - g).norm()
        for h in (1e-4, 1e-3)
    )
    assert 5 <= far / near <= 20
    assert far <= 0.1 * g.norm()


def test_a_zero_gradient_gives_the_same_point():
    theta = draw(0, 3)
    for sharpness in (SAM(), ASAM()):
        assert torch.equal(sharpness.perturb(Flat(3), theta, torch.zeros(3, dtype=torch.float64)), theta)


def test_sam_leaves_a_sharp_minimum():
    """A bowl with a pit of width .05 in its side: plain descent stays in it, SAM with a radius of .2 does not."""

    def loss(theta, batch):
        return theta.square().sum() / 2 - 0.1 * torch.exp(-((theta - 0.5) * 20).square().sum())

    start = torch.tensor([0.52], dtype=torch.float64)
    ends = [
        fit(
            Bezier(Flat(1), 1),
            loss,
            [None],
            start=start,
            phases=Phases(steps=(150, 0)),
            training=Training(optimizer=torch.optim.SGD, rate=0.01, sharpness=sharpness),
        ).phi[-1]
        for sharpness in (None, SAM(0.2))
    ]
    assert abs(ends[0] - 0.5) < 0.05
    assert ends[1] < 0.35


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: SAM(0.0), "radius: expected a finite number > 0"),
        (lambda: ASAM(-1.0), "radius: expected"),
        (lambda: ASAM(eta=-1.0), "eta: expected"),
        (
            lambda: ASAM().perturb(Sphere(2), torch.eye(2)[0], torch.ones(2)),
            "sharpness: expected a flat space for ASAM",
        ),
        (
            lambda: sharpness_aware_gradient(Flat(1), lambda theta, batch: theta.detach().sum(), torch.ones(1), None),
            "loss: expected a scalar tensor that depends on theta",
        ),
        (
            lambda: sharpness_aware_gradient(Flat(2), lambda theta, batch: theta, torch.ones(2), None),
            r"loss: expected a scalar.*got shape \(2,\)",
        ),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_a_nonfinite_loss_at_the_ascent_point_is_reported():
    with pytest.raises(DivergenceError, match="loss: expected a finite value at the ascent point .* got inf"):
        sharpness_aware_gradient(Flat(1), lambda theta, batch: 1 / (2 - theta.sum()), torch.ones(1), None, SAM(1.0))
