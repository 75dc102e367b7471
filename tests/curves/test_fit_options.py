"""What each option of `fit` does: a property it must have, on losses whose answer is known."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.curves.bezier import Bezier
from manifoldagg.curves.complexes import Complex
from manifoldagg.curves.control import Control
from manifoldagg.curves.embedding import Embedding
from manifoldagg.curves.fit import Training, fit
from manifoldagg.curves.phases import Phases
from manifoldagg.curves.sampling import Sampling
from manifoldagg.curves.sharpness import ASAM, SAM
from manifoldagg.curves.simplex import Simplex
from manifoldagg.curves.tunnel import Tunnel
from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.manifolds import Flat, Lorentz, Product, Sphere, check_point, distance, geodesic
from manifoldagg.manifolds.optimizers import RiemannianAdam
from tests.support import draw, relative, seeds

SGD = torch.optim.SGD
CURVE = Bezier(Flat(3))


def square(theta, batch):
    return (theta - batch).square().sum() / 2


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


DATA = list(draw(9, 4, 3))
QUICK = {"training": Training(optimizer=SGD, rate=0.1), "start": draw(8, 3)}


@given(seeds, st.integers(1, 6))
def test_each_stratum_contains_one_coordinate(seed, samples):
    drawn = list(Sampling("stratified", samples).coordinates(CURVE, draw(0, 3, 3), seeded(seed)))
    assert [int(x * samples) for _, x in drawn] == list(range(samples))
    assert sum(weight for weight, _ in drawn) == pytest.approx(1)


@given(st.integers(1, 6))
def test_a_quadrature_is_exact_for_polynomials(samples):
    nodes = list(Sampling("quadrature", samples).coordinates(CURVE, draw(0, 3, 3)))
    for power in range(2 * samples):
        assert sum(w * x**power for w, x in nodes) == pytest.approx(1 / (power + 1), rel=1e-13)


def test_points_by_length_are_uniform_on_the_image():
    """Report (19). The share of the length before a sampled point is uniform: mean 1/2, variance 1/12."""
    phi = draw(0, 3, 3) * torch.tensor([[0.0], [0.1], [1.0]])
    drawn = list(Sampling("length", 4000).coordinates(CURVE, phi, seeded()))
    assert [weight for weight, _ in drawn] == [1 / 4000] * 4000
    shares = torch.stack([CURVE.length(phi, 0.0, t) / CURVE.length(phi) for _, t in drawn[:400]])
    # The fractions are the draws of the generator.
    expected = torch.rand(4000, generator=seeded(), dtype=torch.float64)[:400]
    torch.testing.assert_close(shares, expected, rtol=1e-9, atol=1e-9)
    # The mean of f = |position| against quadrature of f |velocity| / L, within 5 standard deviations.
    t, weights = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(60))
    t = (1 + t) / 2
    speed = CURVE.velocity(phi, t).norm(dim=-1)
    density = weights * speed / (weights * speed).sum()
    values = CURVE(phi, t).norm(dim=-1)
    mean = (density * values).sum()
    variance = (density * (values - mean) ** 2).sum()
    sampled = CURVE(phi, torch.tensor([t for _, t in drawn], dtype=torch.float64)).norm(dim=-1).mean()
    assert abs(sampled - mean) <= 5 * (variance / 4000) ** 0.5
    # Sampling by the parameter has another mean on this curve.
    assert abs((weights / 2 * values).sum() - mean) > 10 * (variance / 4000) ** 0.5


def test_a_collapsed_curve_is_sampled_by_its_parameter():
    drawn = [t for _, t in Sampling("length", 5).coordinates(CURVE, torch.zeros(3, 3), seeded())]
    assert drawn == torch.rand(5, generator=seeded(), dtype=torch.float64).tolist()


def test_stratified_sampling_has_a_lower_variance():
    """The mean of x² over four places: by strata its variance falls with the cube of their number."""
    spread = {}
    for sampling in ("uniform", "stratified"):
        generator = seeded()
        means = torch.tensor(
            [
                sum(w * x * x for w, x in Sampling(sampling, 4).coordinates(CURVE, DATA[0], generator))
                for _ in range(400)
            ]
        )
        # The error of a mean of 400 is below 5 standard deviations; the variance of x² is 4/45.
        assert abs(means.mean() - 1 / 3) <= 5 * (4 / 45 / 4 / 400) ** 0.5
        spread[sampling] = means.var()
    assert spread["stratified"] < spread["uniform"] / 8


@given(seeds, st.booleans(), st.booleans())
def test_only_free_points_change(seed, freeze_start, freeze_end):
    before = draw(seed, 4, 3)
    free = [i for i in range(4) if 0 < i < 3 or not (freeze_start, freeze_end)[i // 3]]
    after = fit(
        Bezier(Flat(3), 3), square, DATA, phi=before, phases=Phases(steps=(0, 2)), control=Control(free=free),
        training=Training(rate=0.1), generator=seeded(seed),
    ).phi  # fmt: skip
    moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert moved == [not freeze_start, True, True, not freeze_end]


@given(seeds, st.sets(st.integers(-5, -1), min_size=1))
def test_free_selects_the_trainable_points(seed, free):
    before = draw(seed, 5, 3)
    kept = before.clone()
    after = fit(
        Bezier(Flat(3), 4),
        square,
        DATA,
        phi=before,
        control=Control(free=sorted(free)),
        phases=Phases(steps=(0, 1)),
        training=Training(optimizer=SGD),
    ).phi
    assert {i - 5 for i in range(5) if not torch.equal(before[i], after[i])} == free
    assert torch.equal(before, kept)


@given(seeds, st.sampled_from([0.0, 0.3, 1.0]), st.booleans())
def test_a_step_with_projection_is_the_gradient_by_the_displacement(seed, gamma, freeze_end):
    """φ₁ = M + δ − γ proj δ: one step by autograd through that formula."""
    start, end = draw(seed, 3), draw(seed + 1, 3)
    after = fit(
        CURVE, square, DATA, start=start, end=end, phases=Phases(steps=(0, 1), alternate=True), generator=seeded(5),
        training=Training(SGD, 0.1), control=Control(projection=gamma, free=[1] if freeze_end else [1, 2]),
    ).phi  # fmt: skip

    def bent(end, shift):
        chord = end - start
        return (start + end) / 2 + shift - gamma * (shift @ chord) / (chord @ chord) * chord

    moving, shift = end.clone().requires_grad_(), torch.zeros(3, dtype=torch.float64, requires_grad=True)
    s = torch.rand((), generator=seeded(5)).item()
    square(CURVE(torch.stack([start, bent(moving, shift), moving]), s), DATA[0]).backward()
    with torch.no_grad():
        moving -= 0 if freeze_end else 0.1 * moving.grad
        shift -= 0.1 * shift.grad
    assert relative(after, torch.stack([start, bent(moving, shift), moving]).detach()) <= 1e-14


def test_a_full_projection_leaves_no_displacement_along_the_chord():
    options = {"generator": seeded(), **QUICK}
    for gamma, expected in ((1.0, True), (0.0, False)):
        for alternate in (True, False):
            phases = Phases(steps=(9, 30), alternate=alternate)
            phi = fit(CURVE, square, DATA, control=Control(rate=1.0, projection=gamma), phases=phases, **options).phi
            chord = phi[2] - phi[0]
            along = (phi[1] - (phi[0] + phi[2]) / 2) @ chord / chord.norm()
            assert bool(abs(along) <= 1e-14) is expected


def test_alternating_phases_change_after_each_epoch():
    seen = []

    def loss(theta, batch):
        seen.append((batch, bool(torch.equal(theta, ends[-1]))))
        return theta.square().sum()

    ends = [torch.ones(3)]
    result = fit(
        CURVE, loss, "ab", start=torch.ones(3), training=Training(rate=0.1), generator=seeded(),
        phases=Phases(epochs=(3, 2), alternate=True, callback=lambda step, value, phi: ends.append(phi[-1])),
    )  # fmt: skip
    assert seen == [(batch, at_end) for at_end in (True, False, True, False, True) for batch in "ab"]
    assert len(result.losses) == 10


def test_a_control_point_follows_the_end_point_between_phases():
    """An epoch of the end carries the control point along: its displacement from the chord is kept."""
    seen = []
    fit(
        CURVE, square, DATA, generator=seeded(), **QUICK,
        phases=Phases(epochs=(2, 1), alternate=True, callback=lambda step, value, phi: seen.append(phi)),
    )  # fmt: skip
    before, after = seen[7], seen[11]
    assert not torch.equal(before[2], after[2])
    bends = [phi[1] - (phi[0] + phi[2]) / 2 for phi in (before, after)]
    assert bends[0].norm() > 0.01
    assert relative(*bends) <= 1e-13


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam])
def test_any_torch_optimiser_can_be_used(optimizer):
    result = fit(
        CURVE,
        square,
        DATA[:1],
        start=DATA[1],
        phases=Phases(steps=(60, 60)),
        training=Training(rate=0.05, optimizer=optimizer),
    )
    assert result.losses[59] < 0.1 * result.losses[0]
    assert torch.isfinite(result.phi).all()


@pytest.mark.parametrize("sharpness", [SAM(0.1), ASAM(0.1)])
def test_sharpness_uses_the_gradient_at_the_ascent_point(sharpness):
    start = QUICK["start"]
    training = Training(SGD, 0.1, sharpness=sharpness)
    end = fit(CURVE, square, DATA, phases=Phases(steps=(1, 0)), training=training, start=start).phi[-1]
    uphill = sharpness.perturb(Flat(3), start, start - DATA[0])
    assert relative(end, start - 0.1 * (uphill - DATA[0])) <= 1e-14


class Disc(Embedding):
    """A centre and two axes: φ₀ + x₁ φ₁ + x₂ φ₂ for x in [0, 1]²."""

    def __init__(self, space):
        self.space = space

    @property
    def size(self):
        return 3

    @property
    def domain(self):
        return (2,)

    def __call__(self, phi, x):
        return phi[0] + x.to(phi.dtype) @ phi[1:]

    def sample(self, *batch, generator=None):
        return torch.rand(*batch, 2, generator=generator, dtype=torch.float64)


def test_any_embedding_is_fitted_by_the_pulled_back_gradient():
    disc, before = Disc(Flat(3)), draw(0, 3, 3)
    after = fit(
        disc,
        square,
        DATA,
        phi=before,
        control=Control(free=[0, 2], rate=0.2),
        phases=Phases(steps=(0, 1)),
        training=Training(optimizer=SGD, rate=0.1),
        generator=seeded(4),
        sampling=Sampling(samples=2),
    ).phi
    phi, generator = before.clone().requires_grad_(), seeded(4)
    x, y = disc.sample(generator=generator), disc.sample(generator=generator)
    ((square(disc(phi, x), DATA[0]) + square(disc(phi, y), DATA[0])) / 2).backward()
    rates = torch.tensor([[0.1], [0.0], [0.1]], dtype=torch.float64)
    assert relative(after, before - rates * phi.grad) <= 1e-14


def test_a_tunnel_learns_the_control_points_of_its_curve():
    """One step is the gradient through the tunnel at the place that was drawn."""
    tunnel, before = Tunnel(Bezier(Flat(3)), 0.05), draw(0, 3, 3)
    after = fit(
        tunnel,
        square,
        DATA,
        phi=before,
        phases=Phases(steps=(0, 1)),
        training=Training(optimizer=SGD, rate=0.1),
        generator=seeded(4),
    ).phi
    phi = before.clone().requires_grad_()
    square(tunnel(phi, tunnel.sample_in(before, 1, generator=seeded(4))[0]), DATA[0]).backward()
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert relative(after[1], before[1] - 0.1 * phi.grad[1]) <= 1e-13


def test_the_volume_regulariser_enlarges_a_simplex():
    """With a loss that is 0 in a plane the new vertex runs along it; the given ones rest."""
    simplex, vertices = Simplex(Flat(3), 3), torch.eye(3, dtype=torch.float64)

    def loss(theta, batch):
        return 10 * theta[2].square()

    results = [
        fit(
            simplex,
            loss,
            [None],
            phi=vertices,
            control=Control(free=[-1], volume=weight),
            phases=Phases(steps=(0, 60)),
            training=Training(rate=0.05),
            sampling=Sampling(samples=4),
            generator=seeded(),
        ).phi
        for weight in (0.0, 0.1)
    ]
    for phi in results:
        assert torch.equal(phi[:2], vertices[:2])
        assert abs(phi[2, 2]) < 0.3
    assert simplex.volume(results[1]) > 1.5 * simplex.volume(results[0])


def test_a_degenerate_simplex_is_rejected_with_a_volume_regulariser():
    flat = torch.zeros(3, 3, dtype=torch.float64)
    with pytest.raises(
        ArgumentError, match=r"volume: expected a finite log-volume, got -inf; start from points in general position"
    ):
        fit(
            Simplex(Flat(3), 3),
            square,
            DATA,
            phi=flat,
            control=Control(free=[-1], volume=0.1),
            phases=Phases(steps=(0, 1)),
        )


@pytest.mark.parametrize("space", [Sphere(3), Lorentz(2), Product({"a": Sphere(3), "b": Flat(2)})], ids=str)
@pytest.mark.parametrize("optimizer", [SGD, torch.optim.Adam, functools.partial(RiemannianAdam, betas=(0.8, 0.9))])
def test_on_a_curved_space_the_end_converges_and_points_remain_on_the_manifold(space, optimizer):
    generator = seeded(1)
    start = space.random_point(generator=generator, dtype=torch.float64)
    u = space.random_tangent(start, generator)
    target = space.exp(start, 0.5 * u / space.inner(start, u, u).sqrt())
    result = fit(
        Bezier(space), lambda theta, batch: distance(space, target, theta).square() / 2, [None], start=start,
        training=Training(optimizer=optimizer, rate=0.05), phases=Phases(steps=(60, 5)), generator=seeded(),
    )  # fmt: skip
    assert distance(space, result.phi[2], target) < 0.1
    check_point(space, result.phi, tolerance=1e-12)
    assert relative(result.phi[0], start) == 0


def test_on_a_curved_space_control_points_start_on_the_geodesic():
    space = Sphere(3)
    start, end = space.random_point(2, generator=seeded(), dtype=torch.float64)
    phi = fit(Bezier(space, 3), square, DATA, start=start, end=end, phases=Phases(steps=(0, 0))).phi
    for i in (1, 2):
        assert relative(phi[i], geodesic(space, start, end, i / 3)) <= 1e-15


def test_the_proximal_term_is_in_the_metric_of_the_space():
    """Without a loss it is ½ μ d², whose gradient −μ log is followed for a share of the way home."""
    space = Sphere(3)
    start, end = space.random_point(2, generator=seeded(), dtype=torch.float64)
    result = fit(
        Bezier(space),
        lambda theta, batch: 0 * theta.sum(),
        [None],
        start=start,
        end=end,
        phases=Phases(steps=(1, 0)),
        training=Training(optimizer=SGD, rate=0.1, proximal=2.0),
    )
    assert relative(result.phi[-1], geodesic(space, end, start, 0.2)) <= 1e-14


def test_a_callback_is_called_after_every_step_and_can_stop_the_fit():
    seen = []

    def callback(step, value, phi):
        seen.append((step, value, phi))
        phi.zero_()  # a copy
        return step == 4

    result = fit(CURVE, square, DATA, phases=Phases(steps=(3, 9), callback=callback), generator=seeded(), **QUICK)
    assert [(step, value) for step, value, _ in seen] == list(enumerate(result.losses))
    assert len(seen) == 5
    assert not result.converged
    plain = fit(CURVE, square, DATA, phases=Phases(steps=(3, 2)), generator=seeded(), **QUICK)
    assert torch.equal(result.phi, plain.phi)


EYE = torch.eye(3)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (lambda: {"curve": 3}, "curve: expected Embedding"),
        (lambda: {"sampling": Sampling(kind="sobol")}, "^kind: expected one of uniform, stratified, quadrature"),
        (
            lambda: {"curve": Simplex(Flat(3), 3), "sampling": Sampling("length")},
            "sampling: expected uniform, or a curve",
        ),
        (lambda: {"sampling": Sampling(samples=0)}, "samples: expected an integer >= 1"),
        (
            lambda: {"curve": Simplex(Flat(3), 3), "sampling": Sampling(kind="quadrature")},
            "sampling: expected uniform, or a curve with quadrature",
        ),
        (lambda: {"end": torch.ones(2)}, "end: expected shape"),
        (lambda: {"end": torch.ones(3).double()}, "end: expected torch.float32"),
        (lambda: {"phi": torch.ones(2, 3)}, r"phi: expected shape \(3, 3\)"),
        (
            lambda: {"start": torch.nn.Linear(8, 8)},
            r"^start: expected a point, got Linear with 72 parameters; write space.point\(model\)$",
        ),
        (
            lambda: {"end": torch.nn.Linear(8, 8).state_dict()},
            r"^end: expected a point, got OrderedDict of 2 tensors; write space.point\(model\)$",
        ),
        (lambda: {"phi": EYE, "end": EYE[0]}, "end: expected None together with phi"),
        (lambda: {"phi": EYE * torch.inf}, "phi: expected finite"),
        (lambda: {"control": Control(free=[3])}, "free: expected different indices of 3 points"),
        (lambda: {"control": Control(free=[0, -3])}, "free: expected different indices"),
        (lambda: {"control": Control(free=[])}, "free: expected different indices"),
        (lambda: {"control": Control(free=1)}, "free: expected different indices"),
        (lambda: {"control": Control(projection=1.5)}, "^projection: expected"),
        (
            lambda: {"control": Control(projection=0.5), "curve": Bezier(Sphere(3)), "start": EYE[0]},
            "control_projection: expected a curve",
        ),
        (
            lambda: {"phases": Phases(alternate=True), "curve": Bezier(Flat(3), 1), "control": Control(free=[1])},
            "alternate: expected a curve with inner",
        ),
        (
            lambda: {"phases": Phases(alternate=True), "control": Control(start="base")},
            "control_start: expected chord because of alternate",
        ),
        (
            lambda: {"phases": Phases(alternate=True), "curve": Bezier(Flat(3), 3), "control": Control(free=[1])},
            "free: expected all inner points because of alternate",
        ),
        (lambda: {"control": Control(volume=0.1)}, "volume: expected an embedding with log_volume, got Bezier"),
        (lambda: {"control": Control(volume=-0.1)}, "volume: expected"),
        (lambda: {"training": Training(sharpness=0.1)}, "sharpness: expected SAM, ASAM or None"),
        (lambda: {"training": Training(sharpness=SAM)}, "sharpness: expected SAM, ASAM or None"),
        (
            lambda: {"training": Training(sharpness=ASAM()), "curve": Bezier(Sphere(3)), "start": EYE[0]},
            "sharpness: expected a flat space for ASAM",
        ),
        (lambda: {"phases": Phases(patience=0)}, "patience: expected"),
        (lambda: {"phases": Phases(plateau=-1.0)}, "plateau: expected"),
        (lambda: {"resume": {"phi": 3}}, "resume: expected the state of a Fit"),
        (lambda: {"training": Training(optimizer="adam")}, r"optimizer: expected a class such as .*Adam, got 'adam'"),
        (
            lambda: {"training": Training(optimizer=torch.optim.AdamW), "curve": Bezier(Sphere(3)), "start": EYE[0]},
            "optimizer: expected SGD",
        ),
        (lambda: {"curve": Bezier(Sphere(3))}, "start: expected a point of"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(options, words):
    given_ = {"curve": CURVE, "batches": [torch.ones(3)], "start": torch.ones(3)}
    with pytest.raises(ArgumentError, match=words):
        fit(loss=square, **given_ | options())


def test_a_nonfinite_gradient_stops_a_fit_on_a_curved_space():
    with pytest.raises(DivergenceError, match="loss: expected a finite gradient at step 0"):
        fit(Bezier(Sphere(3)), lambda theta, batch: (theta * 0).square().sum().sqrt(), [None], start=EYE[0])


@pytest.mark.parametrize("form", ["ambient", "subspace"])
def test_a_tunnel_may_fold_during_a_fit(form):
    """The loss pulls the control point so far that the tunnel folds on the way."""
    phi = torch.tensor([[0.0, 0.0], [0.5, 0.1], [1.0, 0.0]])
    found = fit(
        Tunnel(Bezier(Flat(2)), 0.3, form),
        lambda theta, batch: (theta - batch).square().sum(),
        [torch.tensor([0.5, 5.0])],
        phi=phi,
        phases=Phases(steps=(0, 100)),
        training=Training(rate=0.05),
        generator=torch.Generator().manual_seed(0),
    )
    assert found.phi.isfinite().all()
    with pytest.raises(ArgumentError, match="folds"):
        Tunnel(Bezier(Flat(2)), 0.3).check(found.phi)


def test_a_complex_of_curved_triangles_can_be_fitted():
    vertices = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.2, 0.0], [1.0, 0.0, 0.2], [1.0, 0.2, 0.2]])
    phi = torch.nn.functional.normalize(vertices, dim=-1)
    found = fit(
        Complex(Sphere(3), ((0, 1, 2), (1, 2, 3))),
        lambda theta, batch: (theta - batch).square().sum(),
        [torch.tensor([0.0, 0.0, 1.0])],
        phi=phi,
        control=Control(free=[1, 2]),
        phases=Phases(steps=(0, 20)),
        training=Training(rate=0.05),
        generator=torch.Generator().manual_seed(0),
    )
    assert torch.equal(found.phi[[0, 3]], phi[[0, 3]])
    assert found.losses[-1] < found.losses[0]


def test_a_state_of_another_optimizer_is_rejected():
    arguments = {"start": torch.zeros(2), "phases": Phases(steps=(3, 6))}
    loss = lambda theta, batch: (theta - batch).square().sum()  # noqa: E731
    state = fit(Bezier(Flat(2)), loss, [torch.ones(2)], training=Training(optimizer=torch.optim.SGD), **arguments).state
    with pytest.raises(ArgumentError, match="resume: .* other options"):
        fit(Bezier(Flat(2)), loss, [torch.ones(2)], resume=state, **arguments)
    with pytest.raises(ArgumentError, match="optimizer: "):
        fit(Bezier(Flat(2)), loss, [torch.ones(2)], training=Training(optimizer=torch.optim.LBFGS), **arguments)
