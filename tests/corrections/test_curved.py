"""Tests of corrections on curved spaces: transported rows, the metric of the space, and rejected input."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.corrections import (
    AutoThreshold,
    DelayCompensated,
    Frame,
    GradientSurgery,
    OrthoDC,
    OrthoDyn,
    OrthoPos,
    OrthoStrict,
    Pairwise,
    Position,
    Tangent,
    Transport,
)
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import (
    Flat,
    Grassmann,
    ParameterSpace,
    PoincareBall,
    Power,
    Product,
    Sphere,
    Stiefel,
    SymmetricPositiveDefinite,
    Validated,
    norm,
)
from tests.support import draw, numbers, relative, rotation, seeds

SPACES = [Sphere(4), PoincareBall(3), SymmetricPositiveDefinite(3)]
CORRECTIONS = [
    Tangent(),
    Position(),
    OrthoDC(0.2),
    OrthoStrict(),
    OrthoPos(),
    GradientSurgery(),
    Position() >> OrthoDC(0.0),
    DelayCompensated(0.3, form="outer"),
]


def setting(space, seed, n=2, size=0.3):
    """Return a base, a current point and displacements, all with distance `size`."""
    generator = torch.Generator().manual_seed(seed)
    base = space.random_point(generator=generator, dtype=torch.float64)
    at = base.expand(n + 1, *base.shape)
    u = space.random_tangent(at, generator)
    u = size * u / norm(space, at, u).reshape(-1, *(1 for _ in space.shape))
    return base, space.exp(base, u[0]), u[1:]


def isometry(space, seed):
    """Return an isometry as a function of points, and its derivative as a function of tangents."""
    if isinstance(space, SymmetricPositiveDefinite):
        a = rotation(seed, 3) @ torch.diag(torch.tensor([0.5, 1.0, 2.0]).double())
        return (lambda x: a @ x @ a.T,) * 2
    q = rotation(seed, space.shape[0])
    return (lambda x: x @ q,) * 2


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@settings(max_examples=8)
@given(seeds)
def test_corrections_are_equivariant_under_isometries(space, correction, seed):
    base, current, v = setting(space, seed)
    point, tangent = isometry(space, seed + 1)
    moved = correction(space, point(base), point(current), tangent(v))
    assert relative(moved, tangent(correction(space, base, current, v))) <= 1e-9


@settings(max_examples=3)
@given(seeds, st.sampled_from([-0.7, 0.4]))
def test_corrections_are_equivariant_under_translations_of_the_ball(seed, shift):
    """Möbius translations are the isometries that move the origin."""
    space = PoincareBall(3)
    base, current, v = setting(space, seed)
    c = torch.tensor([shift, 0.0, 0.2]).double()

    def translate(x):
        dot, cc, xx = (x @ c)[..., None], c @ c, x.square().sum(-1, keepdim=True)
        return ((1 + 2 * dot + xx) * c + (1 - cc) * x) / (1 + 2 * dot + cc * xx)

    moved = [
        translate(base),
        translate(current),
        torch.func.vmap(lambda u: torch.func.jvp(translate, (base,), (u,))[1])(v),
    ]
    for correction in (Position(), OrthoStrict(), OrthoPos()):
        out = correction(space, base, current, v)
        expected = torch.func.vmap(lambda u: torch.func.jvp(translate, (current,), (u,))[1])(out)
        assert relative(correction(space, *moved), expected) <= 1e-9


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_position_and_tangent_agree_to_third_order_at_threshold_one(space):
    sizes = [0.02, 0.01, 0.005, 0.0025]
    gaps = []
    for size in sizes:
        base, current, v = setting(space, 5, size=size)
        strict = OrthoStrict()
        gap = (Position() >> strict)(space, base, current, v) - strict(space, base, current, v)
        gaps.append(norm(space, current.expand_as(gap), gap).max().item())
    slopes = [math.log(a / b) / math.log(2) for a, b in itertools.pairwise(gaps)]
    assert all(2.8 <= slope <= 3.2 for slope in slopes), slopes


@pytest.mark.parametrize("space", SPACES, ids=str)
@given(seeds)
def test_projection_is_orthogonal_in_the_metric_of_the_space(space, seed):
    base, current, v = setting(space, seed)
    at, g = current.expand_as(v), -space.log(current, base)
    out = OrthoStrict()(space, base, current, v)
    assert space.inner(at, out, g.expand_as(v)).abs().max() <= 1e-12
    carried = Tangent()(space, base, current, v)
    squares = [space.inner(at, u, u) for u in (out, carried - out, carried)]
    assert relative(squares[0] + squares[1], squares[2]) <= 1e-9
    assert relative(carried, space.transport(base.expand_as(v), at, v)) <= 1e-13


@pytest.mark.parametrize(
    "correction",
    [*CORRECTIONS, DelayCompensated(0.3), OrthoDC(0.1, "tensor"), Tangent() >> Position(), Pairwise(draw(9, 2, 12))],
    ids=str,
)
@given(seeds)
def test_flat_and_curved_paths_agree_where_the_space_is_flat(correction, seed):
    space = Product({"a": Flat(5), "b": Flat(7)})
    base, current = draw(seed, 2, 12)
    v = draw(seed + 1, 2, 12)
    flat, curved = (correction.apply(Frame.of(space, base, current, v, flat=path)) for path in (True, False))
    assert relative(flat.displacements(), curved.displacements()) <= 1e-13
    assert curved.frame.transports == (Transport("a", "none"), Transport("b", "none"))


@pytest.mark.parametrize("correction", [AutoThreshold(), OrthoDyn(), DelayCompensated(0.3, adaptive=True)], ids=str)
def test_flat_and_curved_states_agree(correction):
    states = [None, None]
    for seed in range(6):
        base, current, *v = draw(seed, 4, 12)
        done = [
            correction.apply(Frame.of(Flat(12), base, current, torch.stack(v), flat=path), state)
            for path, state in zip((True, False), states, strict=True)
        ]
        states = [one.state for one in done]
        assert relative(done[0].displacements(), done[1].displacements()) <= 1e-13


def test_the_gram_matrices_of_a_product_are_those_of_its_leaves():
    model = torch.nn.Linear(3, 2).double()
    torch.nn.init.orthogonal_(model.weight)
    space = ParameterSpace.of(model, {"weight": Sphere(3)})
    base, current, v = setting(space, 3)
    frame = Frame.of(space, base, current, v)
    assert frame.segments == {"weight": 6, "bias": 2}
    assert frame.transports == (Transport("weight", "parallel"), Transport("bias", "none"))
    sphere = Power(Sphere(3), (2,))
    parts = [Frame.of(sphere, *(x.unflatten(-1, (2, 3)) for x in (base[:6], current[:6], v[:, :6]))).gram()]
    parts.append(Frame.of(Flat(2), base[6:], current[6:], v[:, 6:]).gram())
    parts = [numbers(part) for part in parts]
    assert relative(numbers(frame.gram("tensor")), torch.stack(parts)) <= 1e-13
    assert relative(numbers(frame.gram()), parts[0] + parts[1]) <= 1e-13
    by_leaf = OrthoDC(1.0, "tensor")(space, base, current, v)
    flat = OrthoDC(1.0)(Flat(2), base[6:], current[6:], v[:, 6:])
    assert relative(by_leaf[:, 6:], flat) <= 1e-13


def test_a_space_without_transport_uses_a_ladder_and_reports_it():
    space = Stiefel(5, 2)
    base, current, v = setting(space, 3)
    frame = Frame.of(space, base, current, v)
    assert frame.transports == (Transport("", "ladder", 4),)
    coarse, fine, finest = (Frame.of(space, base, current, v, rungs=rungs).rows[0] for rungs in (1, 2, 8))
    # The error of a ladder decreases with the square of the number of rungs.
    assert relative(fine, finest) <= 0.4 * relative(coarse, finest)
    assert OrthoStrict()(space, base, current, v, rungs=2).shape == v.shape
    projected = Frame.of(space, base, current, v, transport="projection")
    assert relative(projected.rows[0].view(5, 2), space.project_tangent(current, v[0])) <= 1e-14


def test_a_ladder_on_a_symmetric_space_equals_parallel_transport():
    for space in SPACES:
        base, current, v = setting(space, 4)
        ladder = Tangent()(space, base, current, v, transport="ladder", rungs=1)
        assert relative(ladder, Tangent()(space, base, current, v)) <= 1e-9


@pytest.mark.parametrize("space", [Sphere(4), SymmetricPositiveDefinite(3), Grassmann(4, 2)], ids=str)
@settings(max_examples=8)
@given(seeds)
def test_position_after_another_correction_transports_back_to_the_base(space, seed):
    base, current, v = setting(space, seed)
    assert relative((Tangent() >> Position())(space, base, current, v), Position()(space, base, current, v)) <= 1e-10


def test_corrections_on_curved_spaces_are_differentiable():
    base, current, v = setting(Sphere(3), 3)
    v = v.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda t: OrthoStrict()(Sphere(3), base, current, Sphere(3).project_tangent(base, t)), v
    )


def test_pairwise_accepts_tangents_at_the_current_point():
    space = Sphere(4)
    base, current, v = setting(space, 3)
    others = space.random_tangent(current.expand(2, 4), torch.Generator().manual_seed(1))
    out = Pairwise(others)(space, base, current, v)
    assert (out @ others.T).abs().max() <= 1e-14
    with pytest.raises(ArgumentError, match=r"others\[0\]: expected a tangent of Sphere"):
        Pairwise(others + current)(space, base, current, v)


def mixed():
    space = Product({"w": Sphere(3), "b": Flat(2)})
    return space, *setting(space, 2)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("correction", [DelayCompensated(0.3), AutoThreshold(), OrthoDyn()], ids=str)
def test_an_operation_that_needs_flat_leaves_names_the_curved_leaf(correction):
    with pytest.raises(ArgumentError, match=r"needs flat leaves; these are curved: w: Sphere\(n=3\)"):
        correction.apply(Frame.of(*mixed()))


def test_a_schedule_works_on_curved_leaves():
    done = OrthoDyn(lambda version: "position").apply(Frame.of(*mixed()))
    assert torch.equal(done.displacements(), OrthoPos()(*mixed()))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Tangent()(*mixed(), transport="teleport"), "transport: expected one of parallel, ladder, projection"),
        (lambda: Tangent()(*mixed(), transport="ladder", rungs=0), "rungs: expected an integer >= 1"),
        (lambda: Tangent()(Stiefel(4, 2), *setting(Stiefel(4, 2), 1), transport="parallel"), "parallel needs transport, which Stiefel"),
        (lambda: Frame.of(*mixed()).combine(torch.zeros(5).double(), [1.0, 0.0, 0.0]), "base: expected None on a curved space"),
        (lambda: Frame.of(Sphere(3), torch.eye(3)[0], -torch.eye(3)[0], torch.eye(3)[1:]), "base: out of reach"),
        (lambda: Frame.of(Sphere(3), torch.ones(3), torch.eye(3)[0], torch.eye(3)[1:]), "base: expected a point of Sphere"),
        (lambda: Frame.of(Sphere(3), torch.eye(3)[0], torch.eye(3)[1], torch.eye(3)), "displacements: expected a tangent of Sphere"),
        (lambda: Frame.of(Sphere(3), torch.eye(3)[0], torch.eye(3)[1], torch.eye(3), flat=True), "space: expected a flat manifold"),
    ],
)  # fmt: skip
def test_invalid_input_is_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_a_validated_space_gives_the_same_result():
    space, base, current, v = mixed()
    assert relative(OrthoStrict()(Validated(space), base, current, v), OrthoStrict()(space, base, current, v)) == 0
