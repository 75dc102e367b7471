"""Riemannian optimisers: torch's own on flat spaces, and on curved ones steps of the right kind to the right place."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import (
    Flat,
    Grassmann,
    Lorentz,
    PoincareBall,
    Power,
    Product,
    SpecialOrthogonal,
    Sphere,
    Stiefel,
    SymmetricPositiveDefinite,
    check_point,
    distance,
    norm,
)
from manifoldagg.manifolds.optimizers import RiemannianAdam, RiemannianSGD, lower, optimizer_on, transport_momentum
from tests.support import draw, relative, seeds

CURVED = [
    Sphere(3),
    PoincareBall(2),
    Lorentz(2),
    SpecialOrthogonal(3),
    SymmetricPositiveDefinite(2),
    Stiefel(4, 2),
    Grassmann(4, 2),
    Power(Sphere(3), (2,)),
    Product({"a": Sphere(3), "b": Flat(2), "c": PoincareBall(2)}),
]
curved = pytest.mark.parametrize("space", CURVED, ids=str)


def case(space, seed):
    """A point, and another at distance at most 1."""
    generator = torch.Generator().manual_seed(seed)
    x = space.random_point(generator=generator, dtype=torch.float64)
    u = space.random_tangent(x, generator)
    return x, space.exp(x, u / (1 + norm(space, x, u)))


def run(make, parameters, slope, steps):
    xs = [torch.nn.Parameter(p.clone()) for p in parameters]
    descent = make(xs)
    for k in range(steps):
        for x in xs:
            x.grad = slope(x.detach(), k)
        descent.step()
    return torch.stack([x.detach() for x in xs])


def bumpy(x, k):
    """Derivatives that differ from step to step, with zeros among them."""
    return torch.sin(3 * x + k) * (k % 3 != 1)


@settings(max_examples=12)
@given(seeds, st.sampled_from([0.0, 0.9]), st.booleans(), st.sampled_from([torch.float32, torch.float64]))
def test_sgd_on_a_flat_space_equals_torch_sgd(seed, momentum, nesterov, dtype):
    options = {"lr": 0.1, "momentum": momentum, "nesterov": nesterov and momentum > 0}
    start = draw(seed, 2, 3, 5, dtype=dtype)
    ours = run(lambda xs: RiemannianSGD(xs, space=Flat(5), **options), start, bumpy, 12)
    assert torch.equal(ours, run(lambda xs: torch.optim.SGD(xs, **options), start, bumpy, 12))


@given(seeds, st.booleans())
def test_adam_on_a_flat_space_equals_torch_adam(seed, amsgrad):
    start = draw(seed, 2, 3, 5)
    ours = run(lambda xs: RiemannianAdam(xs, lr=0.1, space=Flat(5), amsgrad=amsgrad), start, bumpy, 12)
    torchs = run(lambda xs: torch.optim.Adam(xs, lr=0.1, amsgrad=amsgrad), start, bumpy, 12)
    # The same operations in another order: a few roundings for each of 12 steps of length about .1.
    assert relative(ours, torchs) <= 1e-14


@curved
@pytest.mark.parametrize("retract", [False, True])
def test_a_step_is_the_geodesic_along_the_gradient(space, retract):
    x, _ = case(space, 0)
    e = draw(1, *space.shape)
    (moved,) = run(lambda xs: RiemannianSGD(xs, lr=0.1, space=space, retract=retract), [x], lambda *_: e, 1)
    step = space.retract if retract else space.exp
    # To rounding: the point is projected after the step.
    assert relative(moved, step(x, -0.1 * space.gradient(x, e))) <= 1e-14


@curved
def test_the_momentum_is_transported(space):
    x, _ = case(space, 0)
    e = draw(1, *space.shape)
    (moved,) = run(lambda xs: RiemannianSGD(xs, lr=0.02, space=space, momentum=0.9), [x], lambda _, k: e * (k == 0), 2)
    g = space.gradient(x, e)
    y = space.exp(x, -0.02 * g)
    m = transport_momentum(space, x, y, g)
    expected = space.exp(y, -0.02 * 0.9 * m)
    assert relative(moved, expected) <= 1e-13
    # Momentum alone continues the geodesic; where it is carried by a ladder or as another representative, nearly.
    ahead = space.exp(x, -0.02 * 1.9 * g)
    assert distance(space, moved, ahead) <= 1e-3 * distance(space, x, ahead)


SEARCHES = {
    "sgd": functools.partial(RiemannianSGD, lr=0.4),
    "momentum": functools.partial(RiemannianSGD, lr=0.2, momentum=0.5, nesterov=True),
    "adam": functools.partial(RiemannianAdam, lr=0.03),
    "amsgrad": functools.partial(RiemannianAdam, lr=0.03, amsgrad=True),
}


# On Stiefel a step of the momentum takes logs by Newton's method, which is slow; one is tested above.
@pytest.mark.parametrize(
    ("space", "kind"),
    [(space, kind) for space in CURVED for kind in SEARCHES if kind == "sgd" or not isinstance(space, Stiefel)],
    ids=str,
)
def test_optimisation_converges_and_stays_on_the_manifold(space, kind):
    x, target = case(space, 3)

    def slope(x, k):
        return lower(space, x, -space.log(x, target))

    # SGD contracts by .6 a step; Adam, whose rate does not fall, ends within a few of its steps.
    steps, bound = (30, 1e-4) if kind in ("sgd", "momentum") else (60, 0.06)
    (found,) = run(lambda xs: SEARCHES[kind](xs, space=space), [x], slope, steps)
    check_point(space, found, tolerance=1e-12)
    assert distance(space, found, target) <= bound


@given(seeds)
def test_a_batch_equals_separate_runs(seed):
    space = Sphere(3)
    x = space.random_point(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for make in (RiemannianAdam, functools.partial(RiemannianSGD, momentum=0.9)):
        together = run(lambda xs, make=make: make(xs, lr=0.1, space=space), [x], bumpy, 5)[0]
        apart = run(lambda xs, make=make: make(xs, lr=0.1, space=space), list(x), bumpy, 5)
        assert relative(together, apart) <= 1e-14


@given(seeds)
def test_adam_has_one_second_moment_for_each_point(seed):
    """The first step of every factor has the length of the rate, whatever the gradient's scale in it."""
    space = Product({"a": Sphere(3), "b": Power(Sphere(4), (2,)), "c": Flat(2)})
    x, _ = case(space, seed)
    e = draw(seed, *space.shape) * torch.logspace(-3, 3, 13, dtype=torch.float64)
    (moved,) = run(lambda xs: RiemannianAdam(xs, lr=0.1, space=space), [x], lambda *_: e, 1)
    before, after = space.split(x), space.split(moved)
    assert distance(Sphere(3), before["a"], after["a"]).item() == pytest.approx(0.1, rel=1e-4)
    assert distance(Sphere(4), before["b"], after["b"]).tolist() == pytest.approx([0.1, 0.1], rel=1e-4)
    # A flat factor is a product of lines.
    assert (after["c"] - before["c"]).abs().tolist() == pytest.approx([0.1, 0.1], rel=1e-4)


@curved
def test_lower_is_the_inverse_of_gradient(space):
    x, y = case(space, 5)
    g = space.log(x, y)
    assert relative(space.gradient(x, lower(space, x, g)), g) <= 1e-13
    v = space.random_tangent(x, torch.Generator().manual_seed(0))
    assert (lower(space, x, g) * v).sum().item() == pytest.approx(space.inner(x, g, v).item(), rel=1e-12)


def test_a_pole_ladder_replaces_a_missing_transport():
    """The pole ladder's error is of third order in the step: a tenth of it, a thousandth of the error."""
    space = Stiefel(5, 2)
    generator = torch.Generator().manual_seed(0)
    x = space.random_point(generator=generator, dtype=torch.float64)
    u, v = space.random_tangent(x, generator), space.random_tangent(x, generator)
    lost = []
    for h in (0.2, 0.02):
        y = space.exp(x, h * u / norm(space, x, u))
        moved = transport_momentum(space, x, y, v)
        assert relative(space.project_tangent(y, moved), moved) <= 1e-14
        lost.append(abs(norm(space, y, moved) - norm(space, x, v)).item())
    assert lost[1] <= lost[0] / 50
    assert relative(transport_momentum(space, x, y, 7 * v), 7 * moved) <= 1e-9


def test_the_optimiser_state_can_be_saved_and_loaded():
    space = Product({"a": Sphere(3), "b": Flat(2)})
    x, _ = case(space, 1)
    whole = run(lambda xs: RiemannianAdam(xs, lr=0.1, space=space, amsgrad=True), [x], bumpy, 6)[0]
    parameter, kept = torch.nn.Parameter(x.clone()), None
    for half in range(2):
        descent = RiemannianAdam([parameter], lr=0.1, space=space, amsgrad=True)
        if kept is not None:
            descent.load_state_dict(kept)
        for k in range(3):
            parameter.grad = bumpy(parameter.detach(), 3 * half + k)
            descent.step()
        kept = descent.state_dict()
    assert torch.equal(parameter.detach(), whole)


def test_a_closure_is_evaluated():
    x = torch.nn.Parameter(torch.tensor([1.0, 0.0]))
    descent = RiemannianSGD([x], lr=0.5, space=Sphere(2))

    def closure():
        descent.zero_grad()
        value = -x[1]
        value.backward()
        return value.item()

    assert descent.step(closure) == 0.0
    assert x[1] > 0.4


def test_torch_optimisers_have_riemannian_equivalents():
    bound = functools.partial(torch.optim.Adam, betas=(0.5, 0.9))
    made = optimizer_on(Sphere(3), bound)([torch.nn.Parameter(torch.eye(3)[0])], lr=0.1)
    assert isinstance(made, RiemannianAdam)
    assert made.defaults["betas"] == (0.5, 0.9)
    assert optimizer_on(Flat(3), bound) is bound
    assert optimizer_on(Flat(3), torch.optim.AdamW) is torch.optim.AdamW
    assert optimizer_on(Flat(3), RiemannianSGD)([torch.nn.Parameter(torch.ones(3))], lr=0.1).space == Flat(3)


PARAMETER = torch.nn.Parameter(torch.eye(3)[0])


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: RiemannianSGD([PARAMETER], lr=-1.0, space=Sphere(3)), "lr: expected a finite number >= 0"),
        (lambda: RiemannianSGD([PARAMETER], space=3), "space: expected a Manifold, got 3"),
        (lambda: RiemannianSGD([PARAMETER], space=Sphere(2)), r"params: expected trailing shape \(2\), got \(3,\)"),
        (lambda: RiemannianSGD([PARAMETER], space=Sphere(3), momentum=-1.0), "momentum: expected"),
        (lambda: RiemannianSGD([PARAMETER], space=Sphere(3), nesterov=True), "nesterov: expected a momentum"),
        (lambda: RiemannianAdam([PARAMETER], space=Sphere(3), betas=(0.9, 1.0)), r"betas\[1\]: expected"),
        (lambda: RiemannianAdam([PARAMETER], space=Sphere(3), betas=0.9), "betas: expected a pair"),
        (lambda: RiemannianAdam([PARAMETER], space=Sphere(3), eps=-1.0), "eps: expected"),
        (lambda: optimizer_on(Sphere(3), torch.optim.AdamW), "optimizer: expected SGD or Adam.*got AdamW"),
        (
            lambda: optimizer_on(Sphere(3), functools.partial(torch.optim.SGD, weight_decay=0.1)),
            "optimizer: expected options of RiemannianSGD, got weight_decay of SGD",
        ),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
