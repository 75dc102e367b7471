"""Laws of simplicial complexes: common vertices, volumes that add, draws from faces, nearest faces, connected parts."""

import math

import pytest
import torch
from hypothesis import given, settings

from manifoldagg.curves.complexes import Complex
from manifoldagg.curves.simplex import Simplex
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat, Sphere
from tests.support import draw, relative, seeds

FACES = ((0, 1, 2), (2, 1, 3), (3, 4, 5))
CHAIN = Complex(Flat(4), FACES)
few = settings(max_examples=5)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def lifted(x, face, size=6):
    """Coordinates of a face, as coordinates of all vertices."""
    return x.new_zeros(*x.shape[:-1], size).index_copy(-1, torch.tensor(face), x)


def places(seed, *batch, n=3):
    return Simplex(Flat(1), n).sample(*batch, generator=generator(seed))


def on_sphere(seed):
    """Points within 30 degrees of the first axis, where means are unique."""
    noise = torch.nn.functional.normalize(draw(seed, 6, 3), dim=-1)
    return torch.nn.functional.normalize(torch.tensor([2.0, 0.0, 0.0]).double() + noise, dim=-1)


@few
@given(seeds)
def test_each_face_equals_the_simplex_of_its_vertices(seed):
    sphere = Complex(Sphere(3), FACES)
    for whole, phi in ((CHAIN, draw(seed, 6, 4)), (sphere, on_sphere(seed))):
        for face in FACES:
            x = places(seed, 2, 2)
            alone = Simplex(whole.space, 3)(phi[list(face)], x)
            # Means are found to a residual of 1e-12.
            assert torch.allclose(whole(phi, lifted(x, face)), alone, rtol=0, atol=1e-11)
        # A batch of places on several faces.
        x = torch.stack([lifted(places(seed, 1)[0], face) for face in FACES])
        assert torch.allclose(whole(phi, x), torch.stack([whole(phi, p) for p in x]), rtol=0, atol=1e-11)
        assert torch.allclose(torch.func.vmap(lambda p, w=whole, v=phi: w(v, p))(x), whole(phi, x), atol=1e-11)


@few
@given(seeds)
def test_moving_a_vertex_changes_only_its_faces(seed):
    phi = draw(seed, 6, 4)
    moved = phi.clone()
    moved[1] += 1
    x = places(seed, 1)[0]
    for face in FACES:
        place = lifted(x, face)
        change = CHAIN(moved, place) - CHAIN(phi, place)
        assert torch.allclose(change, place[1].expand(4), rtol=0, atol=1e-14)
        assert bool(change.any()) == (1 in face)


@few
@given(seeds)
def test_faces_agree_on_their_intersection(seed):
    t = places(seed, 1, n=2)[0]
    for space, phi in ((Flat(4), draw(seed, 6, 4)), (Sphere(3), on_sphere(seed))):
        whole = Complex(space, FACES)
        edge = Simplex(space, 2)(phi[[1, 2]], t)
        assert torch.allclose(whole(phi, lifted(t, (1, 2))), edge, rtol=0, atol=1e-11)


@few
@given(seeds)
def test_volumes_add(seed):
    phi = draw(seed, 6, 4)
    each = torch.stack([Simplex(Flat(4), 3).volume(phi[list(face)]) for face in FACES])
    # Volumes of random triangles keep some 13 digits.
    assert CHAIN.volume(phi).item() == pytest.approx(each.sum().item(), rel=1e-12)
    assert CHAIN.log_volume(phi).item() == pytest.approx(each.sum().log().item(), abs=1e-12)
    assert CHAIN.log_volume(phi, by="face").item() == pytest.approx(each.log().sum().item(), abs=1e-12)
    assert torch.allclose(CHAIN.log_volumes(phi), each.log(), atol=1e-12)


@pytest.mark.parametrize("by", ["face", "volume"])
@few
@given(seeds)
def test_the_gradient_of_the_log_volume_is_its_derivative(by, seed):
    phi = draw(seed, 6, 4).requires_grad_()
    (slope,) = torch.autograd.grad(CHAIN.log_volume(phi, by=by), phi)
    gradient = CHAIN.log_volume_gradient(phi, by=by)
    assert relative(slope, gradient) <= 1e-11
    # Homogeneous of degree 2, once for each face.
    expected = 2 * (3 if by == "face" else 1)
    assert (phi.detach() * gradient).sum().item() == pytest.approx(expected, abs=1e-10)


def test_a_degenerate_face_does_not_change_the_volume_of_others():
    phi = draw(0, 6, 4)
    phi[3] = (phi[1] + phi[2]) / 2
    phi.requires_grad_()
    assert CHAIN.log_volumes(phi)[1].item() == -math.inf
    assert math.isfinite(CHAIN.log_volume(phi).item())
    (slope,) = torch.autograd.grad(CHAIN.log_volume(phi), phi)
    assert relative(slope, CHAIN.log_volume_gradient(phi)) <= 1e-12
    places_ = CHAIN.sample_in(phi, 200, generator=generator(0))
    assert not ((places_ > 0) == torch.tensor([v in FACES[1] for v in range(6)])).all(-1).any()
    nothing = torch.zeros(6, 4, requires_grad=True)
    assert CHAIN.log_volume(nothing).item() == -math.inf
    assert CHAIN.volume(nothing).item() == 0
    assert not torch.autograd.grad(CHAIN.log_volume(nothing), nothing)[0].any()
    assert not CHAIN.log_volume_gradient(nothing).any()


def faces_of(x):
    """Which face each place is on, inside of it."""
    members = torch.tensor([[v in face for v in range(6)] for face in FACES])
    matches = ((x > 0).unsqueeze(-2) == members).all(-1)
    assert (matches.sum(-1) == 1).all()
    return matches.int().argmax(-1)


@pytest.mark.parametrize("by", ["face", "volume"])
def test_faces_are_sampled_equally_or_by_volume(by):
    phi, draws = draw(3, 6, 4), 20000
    x = CHAIN.sample_in(phi, draws, by=by, generator=generator(0))
    found = faces_of(x).bincount(minlength=3) / draws
    volumes = CHAIN.log_volumes(phi).exp()
    expected = volumes / volumes.sum() if by == "volume" else torch.full((3,), 1 / 3).double()
    # Frequencies lie within 6 standard deviations.
    assert ((found - expected).abs() <= 6 * (expected * (1 - expected) / draws).sqrt()).all()
    # In a face, coordinates are Dirichlet(1, 1, 1): mean 1/3, variance 1/18, on at least 1000 draws.
    for i, face in enumerate(FACES):
        own = x[faces_of(x) == i][:, list(face)]
        assert len(own) >= 1000
        assert (own.mean(0) - 1 / 3).abs().max() <= 6 * math.sqrt(1 / 18 / len(own))
        assert (own.var(0) - 1 / 18).abs().max() <= 6 * math.sqrt(1 / 18 / len(own))


def test_samples_follow_the_generator():
    phi = draw(0, 6, 4)
    for sample in (CHAIN.sample, lambda *batch, **options: CHAIN.sample_in(phi, *batch, **options)):
        first, again, other = (sample(2, 3, generator=generator(seed)) for seed in (0, 0, 1))
        assert first.shape == (2, 3, 6)
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert sample(0, generator=generator(0)).shape == (0, 6)
        assert sample(generator=generator(0)).shape == (6,)


@few
@given(seeds)
def test_nearest_returns_the_point_of_the_nearest_face(seed):
    phi, points = draw(seed, 6, 4), draw(seed + 1, 3, 4, scale=2.0)
    x, distances = CHAIN.nearest(phi, points)
    alone = torch.stack([Simplex(Flat(4), 3).nearest(phi[list(face)], points)[1] for face in FACES])
    assert torch.equal(distances, alone.amin(0))
    assert torch.allclose((CHAIN(phi, x) - points).norm(dim=-1), distances, rtol=1e-13)
    one, distance = CHAIN.nearest(phi, points[0])
    # Alone or among others: products of matrices are not summed in one order by every BLAS.
    assert torch.allclose(one, x[0], rtol=0, atol=1e-13)
    assert torch.allclose(distance, distances[0], rtol=1e-13)
    leaf = phi.clone().requires_grad_()
    (slope,) = torch.autograd.grad(CHAIN.nearest(leaf, points[0])[1], leaf)
    unit = (points[0] - x[0] @ phi) / distance
    assert torch.allclose(slope, -torch.outer(x[0], unit), atol=1e-13)


@few
@given(seeds)
def test_samples_are_contained_in_the_complex(seed):
    phi = draw(seed, 6, 4)
    points = CHAIN(phi, CHAIN.sample(4, generator=generator(seed)))
    assert CHAIN.contains(phi, points).all()
    # Between two faces that do not meet, in four dimensions, there is nothing.
    assert not CHAIN.contains(phi, phi[[0, 4]].mean(0))


@few
@given(seeds)
def test_push_and_pull_are_adjoint(seed):
    for space, phi in ((Flat(4), draw(seed, 6, 4)), (Sphere(3), on_sphere(seed))):
        whole, x = Complex(space, FACES), lifted(places(seed, 2), FACES[1])
        u, w = draw(seed + 1, 2, 6), draw(seed + 2, 2, *space.shape)
        pushed = whole.push(phi, x, u)
        assert torch.allclose((w * pushed).sum(-1), (whole.pull(phi, x, w) * u).sum(-1), atol=1e-10)
        slope = torch.func.vjp(lambda v, m=whole, p=x: m(v, p), phi)[1](w)[0]
        assert torch.allclose(whole.pull_phi(phi, x, w), slope, atol=1e-12)
        # Vertices outside the face have no part in it.
        assert not slope[[0, 4, 5]].any()


def test_an_ensemble_is_the_mean_of_its_predictions():
    phi = draw(0, 6, 4)
    found = CHAIN.ensemble(phi, torch.square, 9, generator=generator(2))
    thetas = CHAIN(phi, CHAIN.sample(9, generator=generator(2)))
    assert torch.allclose(found, thetas.square().mean(0), rtol=1e-13)


@pytest.mark.parametrize(
    ("faces", "components"),
    [
        (FACES, ((0, 1, 2, 3, 4, 5),)),
        (((0, 1), (2, 3)), ((0, 1), (2, 3))),
        (((0, 1), (2, 3), (4,), (1, 2)), ((0, 1, 2, 3), (4,))),
        (((4, 0), (1, 3), (2, 5), (5, 4)), ((0, 2, 4, 5), (1, 3))),
        (((0,),), ((0,),)),
    ],
)
def test_components_are_the_connected_vertices(faces, components):
    assert Complex(Flat(1), faces).components == components


def test_faces_of_several_dimensions_are_allowed_without_sums_of_volumes():
    whole, phi = Complex(Flat(3), ((0, 1, 2), (2, 3))), draw(0, 4, 3)
    x = whole.sample(50, generator=generator(0))
    assert whole(phi, x).shape == (50, 3)
    curved, points = Complex(Sphere(3), ((0, 1, 2), (2, 3))), on_sphere(0)[:4]
    assert torch.allclose(curved(points, torch.eye(4)), points, atol=1e-14)
    assert torch.allclose(curved(points, x).norm(dim=-1), torch.ones(50).double(), atol=1e-12)
    assert math.isfinite(whole.log_volume(phi, by="face").item())
    assert whole.log_volume_gradient(phi, by="face").shape == (4, 3)


def test_instances_are_compared_and_hashed_by_value():
    assert CHAIN == Complex(Flat(4), FACES) != Complex(Flat(4), FACES[:2])
    assert {CHAIN, Complex(Flat(4), FACES)} == {CHAIN}
    assert (CHAIN.size, CHAIN.domain) == (6, (6,))
    assert torch.equal(CHAIN.collapse(torch.ones(4)), torch.ones(6, 4))


PHI, MIXED = torch.zeros(6, 4), Complex(Flat(4), ((0, 1, 2), (2, 3)))
CURVED = Complex(Sphere(4), FACES)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Complex("R2", FACES), "space: expected a Manifold"),
        (lambda: Complex(Flat(2), ()), "faces: expected tuples of vertices, at least one of each"),
        (lambda: Complex(Flat(2), [(0, 1)]), "faces: expected tuples of vertices"),
        (lambda: Complex(Flat(2), ((0, 1), ())), "faces: expected tuples of vertices"),
        (lambda: Complex(Flat(2), ((0, -1),)), "faces: expected an integer >= 0, got -1"),
        (lambda: Complex(Flat(2), ((0, 1.0),)), "faces: expected an integer >= 0, got 1.0"),
        (lambda: Complex(Flat(2), ((0, 1, 1),)), "faces: expected distinct vertices"),
        (lambda: Complex(Flat(2), ((0, 1), (1, 3))), "faces: expected every vertex from 0 to 3, got no face with 2"),
        (lambda: Complex(Flat(2), ((0, 10**15),)), "got no face with 1"),
        (lambda: Complex(Flat(2), ((0, 1), (1, 0))), "faces: expected faces that do not contain each other"),
        (lambda: Complex(Flat(2), ((0, 1, 2), (2,))), r"got \(2,\) inside \(0, 1, 2\)"),
        (lambda: CHAIN(PHI[:5], torch.eye(6)), r"phi: expected shape \(6, 4\), got \(5, 4\)"),
        (lambda: CHAIN(PHI, torch.eye(5)), r"x: expected trailing shape \(6\)"),
        (lambda: CHAIN(PHI, torch.full((6,), 1 / 6)), r"x: expected vertices of one face, got coordinates on \(0, 1,"),
        (lambda: CHAIN(PHI, (torch.eye(6)[0] + torch.eye(6)) / 2), r"got coordinates on \(0, 3\) at \(3,\)"),
        (lambda: CURVED(PHI, torch.full((6,), 1 / 6)), "x: expected vertices of one face"),
        (lambda: CHAIN(PHI, 2 * torch.eye(6)), "coordinates that sum to 1, got a sum of 2"),
        (lambda: CHAIN.pull_phi(PHI, torch.full((6,), 1 / 6), PHI[0]), "x: expected vertices of one face"),
        (
            lambda: MIXED.volume(PHI[:4]),
            r"faces: expected faces of one dimension, whose volumes add up, got dimensions \[1, 2\]",
        ),
        (lambda: MIXED.log_volume(PHI[:4]), "faces: expected faces of one dimension"),
        (lambda: MIXED.log_volume_gradient(PHI[:4]), "faces: expected faces of one dimension"),
        (lambda: MIXED.sample_in(PHI[:4], 3), "faces: expected faces of one dimension"),
        (lambda: CHAIN.sample_in(PHI, 3), "phi: expected a face with a positive volume"),
        (lambda: CHAIN.sample_in(PHI, 3, by="size"), "by: expected one of face, volume; got 'size'"),
        (lambda: CHAIN.log_volume(PHI, by="size"), "by: expected one of face, volume"),
        (lambda: CHAIN.log_volume(PHI[:, :2]), r"phi: expected shape \(6, 4\)"),
        (lambda: CHAIN.nearest(PHI, torch.ones(3)), r"point: expected trailing shape \(4\)"),
        (lambda: CURVED.volume(PHI), "space: expected a flat space"),
        (lambda: CURVED.nearest(PHI, PHI[0]), "space: expected a flat space"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
