"""Tests of KrylovDC, which estimates curvature from a training path, against training and dense linear algebra."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg import corrections
from manifoldagg.corrections import Frame, Gram, KrylovDC
from manifoldagg.corrections.krylov import ritz_pairs
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat, Product, Sphere
from tests.corrections.laws import KIT, close, law
from tests.corrections.mutants import caught_by
from tests.support import draw, relative, rotation, scales, seeds

SIZE = 7
SPACE = Flat(SIZE)
FINE = 1e-13


def trained(start, hessian, minimum, count, steps=1):
    """Return `count` points of gradient descent at rate 1, with `steps` steps between them."""
    points, x = [], start
    for _ in range(count):
        for _ in range(steps):
            x = x - hessian @ (x - minimum)
        points.append(x)
    return torch.stack(points)


def quadratic(seed, eigenvalues, size=SIZE):
    """Return a Hessian with these eigenvalues, padded with zeros, and a minimum."""
    turn = rotation(seed, size)
    values = torch.zeros(size, dtype=torch.float64)
    values[: len(eigenvalues)] = torch.tensor(eigenvalues, dtype=torch.float64)
    return turn @ values.diag() @ turn.T, draw(seed + 1, size)


def dense(v, g, tolerance=1e-3):
    """Compute the formula with dense bases and matrix powers."""
    legs = torch.diff(v, dim=0, prepend=torch.zeros_like(v[:1]))
    u, s, w = torch.linalg.svd(legs[:-1].T, full_matrices=False)
    seen = s.square() > tolerance * s[0].square()
    q = u[:, seen]
    image = q.T @ legs[1:].T @ w[seen].T / s[seen]
    values, turn = torch.linalg.eigh((image + image.T) / 2)
    b = turn @ values.clip(0, 1).diag() @ turn.T
    eye = torch.eye(len(b), dtype=torch.float64)
    return torch.stack([v[j] - q @ ((eye - torch.linalg.matrix_power(b, j + 1)) @ (q.T @ g)) for j in range(len(v))])


@law
def a_complete_path_becomes_the_path_of_training_from_the_current_model(kit):
    """Five points span the Krylov space of four eigenvalues, so the correction is exact."""
    for seed, steps in ((1, 1), (2, 1), (3, 2)):
        hessian, minimum = quadratic(seed, [0.9, 0.6, 0.3, 0.05])
        base = draw(seed + 2, SIZE)
        v = trained(base, hessian, minimum, 5, steps) - base
        # A part of the drift lies in the null space of the Hessian. The correction keeps this part.
        current = draw(seed + 3, SIZE)
        expected = trained(current, hessian, minimum, 5, steps) - current
        out = kit.KrylovDC("model", tolerance=FINE)(SPACE, base, current, v)
        close(out, expected, 1e-7)


@law
def noisy_paths_follow_the_rayleigh_ritz_formula(kit):
    for seed in range(5):
        base, current, *v = draw(seed, 6, SIZE)
        v = torch.stack(v)
        out = kit.KrylovDC("model")(SPACE, base, current, v)
        close(out, dense(v, current - base), 1e-10)


@law
def drift_orthogonal_to_the_path_is_unchanged(kit):
    v = torch.zeros(4, SIZE, dtype=torch.float64)
    v[:, :3] = draw(3, 4, 3)
    base, current = torch.zeros(2, SIZE, dtype=torch.float64)
    current = current + torch.tensor([0.0] * 3 + [1.0] * 4).double()
    assert torch.equal(kit.KrylovDC("model")(SPACE, base, current, v), v)


@law
def each_tensor_has_its_own_path(kit):
    parts = Product({"a": Flat(3), "b": Flat(4)})
    base, current, *v = draw(8, 5, SIZE)
    v, g = torch.stack(v), current - base
    out = kit.KrylovDC()(parts, base, current, v)
    close(out, torch.cat([dense(v[:, :3], g[:3]), dense(v[:, 3:], g[3:])], 1), 1e-10)


@caught_by(
    "KrylovDC", "a_complete_path_becomes_the_path_of_training_from_the_current_model", "each_tensor_has_its_own_path"
)
class KrylovDCAddsTheDrift(KrylovDC):
    def coefficients(self, gram, state=None):
        lines, state = super().coefficients(gram, state)
        return 2 * gram.identity() - lines, state


@caught_by(
    "KrylovDC",
    "a_complete_path_becomes_the_path_of_training_from_the_current_model",
    "noisy_paths_follow_the_rayleigh_ritz_formula",
)
class KrylovDCCorrectsTheLastPointOnly(KrylovDC):
    def coefficients(self, gram, state=None):
        lines, state = super().coefficients(gram, state)
        fixed = gram.identity()
        fixed[..., -1, :] = lines[..., -1, :]
        return fixed, state


@caught_by("KrylovDC", "drift_orthogonal_to_the_path_is_unchanged", "noisy_paths_follow_the_rayleigh_ritz_formula")
class KrylovDCIsThePosition(KrylovDC):
    def coefficients(self, gram, state=None):
        lines, state = super().coefficients(gram, state)
        lines[..., gram.num_displacements] = -1
        return lines, state


@caught_by("KrylovDC", "each_tensor_has_its_own_path")
class KrylovDCOfTheWholeModel(KrylovDC):
    def coefficients(self, gram, state=None):
        return KIT["KrylovDC"]("model").coefficients(gram.total, state)


@given(seeds, st.integers(1, 6))
def test_the_correction_is_at_most_as_long_as_the_drift(seed, n):
    base, current, *v = draw(seed, n + 2, SIZE)
    v = torch.stack(v)
    out = KrylovDC("model")(SPACE, base, current, v)
    assert (out - v).norm(dim=1).max() <= (1 + 1e-12) * (current - base).norm()


@given(seeds, scales)
def test_the_correction_is_equivariant_under_scaling_and_rotation(seed, scale):
    base, current, *v = draw(seed, 6, SIZE)
    v, turn = torch.stack(v), rotation(seed, SIZE)
    out = KrylovDC("model")(SPACE, base, current, v)
    turned = KrylovDC("model")(SPACE, scale * base @ turn, scale * current @ turn, scale * v @ turn)
    assert relative(turned, scale * out @ turn) <= 1e-9


def test_one_point_zero_drift_or_zero_path_leave_displacements_unchanged():
    base, current, v = draw(0, SIZE), draw(1, SIZE), draw(2, 3, SIZE)
    correction = KrylovDC("model")
    assert torch.equal(correction(SPACE, base, current, v[:1]), v[:1])
    assert torch.equal(correction(SPACE, base, base, v), v)
    still = torch.zeros_like(v)
    assert torch.equal(correction(SPACE, base, current, still), still)
    assert correction.apply(Frame.of(SPACE, base, current, v[:0])).displacements().shape == (0, SIZE)


def test_two_points_correct_along_one_direction():
    """β = ⟨w₁, w₂⟩ / ⟨w₁, w₁⟩ = 1/2, so the second point keeps β² = 1/4 of the drift along w₁."""
    base, current = torch.zeros(2).double(), torch.tensor([1.0, 1.0]).double()
    v = torch.tensor([[2.0, 0.0], [3.0, 1.0]]).double()
    out = KrylovDC("model")(Flat(2), base, current, v)
    assert relative(out, torch.tensor([[1.5, 0.0], [2.25, 1.0]]).double()) <= 1e-15


def test_a_path_that_stops_after_one_step_gives_position():
    base, current = torch.zeros(2).double(), torch.tensor([5.0, 1.0]).double()
    v = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0]]).double()
    out = KrylovDC("model")(Flat(2), base, current, v)
    assert relative(out, torch.tensor([[-3.0, 0.0]] * 3).double()) <= 1e-15


def test_ritz_values_equal_the_eigenvalues_of_the_map():
    """Five legs determine a symmetric map with four eigenvalues. For growing legs, the eigenvalue is clipped to 1."""
    values = np.array([0.9, 0.5, 0.2, 0.0])
    legs = np.array([values**j for j in range(5)])
    found, vectors = ritz_pairs(legs @ legs.T, FINE)
    assert found == pytest.approx(values[::-1], abs=1e-6)
    q = vectors.T @ legs[:-1]
    assert q @ q.T == pytest.approx(np.eye(4), abs=1e-6)
    values, vectors = ritz_pairs(np.outer([1, 2, 4], [1, 2, 4]).astype(float), 1e-3)
    assert values == pytest.approx([0.0, 1.0])
    assert vectors[:, 0] == pytest.approx([0.0, 0.0])


def test_directions_below_the_tolerance_are_discarded():
    """The path follows one axis, with noise of 1e-3 along the other axis. The drift along the other axis is kept."""
    v = torch.tensor([[1.0, 0.0], [2.0, 1e-3], [3.0, 0.0]]).double()
    base, current = torch.zeros(2).double(), torch.tensor([0.0, 1.0]).double()
    assert relative(KrylovDC("model")(Flat(2), base, current, v), v) <= 1e-3
    assert relative(KrylovDC("model", tolerance=1e-9)(Flat(2), base, current, v), v) >= 1e-2


@pytest.mark.parametrize("tolerance", [1e-9, 0.1, 0.9, 1.0])
def test_tensors_of_different_ranks_are_independent(tolerance):
    """The correction of a tensor does not depend on the rank of the path in other tensors."""
    parts = Product({"a": Flat(1), "b": Flat(5), "c": Flat(1)})
    base, current, *v = draw(3, 6, SIZE)
    v = torch.stack(v)
    v[:, 6] = 0
    out = KrylovDC(tolerance=tolerance)(parts, base, current, v)
    alone = [
        KrylovDC("model", tolerance=tolerance)(Flat(b - a), base[a:b], current[a:b], v[:, a:b])
        for a, b in ((0, 1), (1, 6), (6, 7))
    ]
    close(out, torch.cat(alone, 1), 1e-12)


@pytest.mark.parametrize("space", [Sphere(4), Product({"a": Sphere(3), "b": Flat(3)})], ids=["sphere", "product"])
def test_curved_spaces_use_the_coefficients_of_the_gram_matrix(space):
    generator = torch.Generator().manual_seed(0)
    base, current = space.random_point(2, generator=generator, dtype=torch.float64)
    v = 0.1 * space.random_tangent(base.expand(4, -1), generator)
    frame = Frame.of(space, base, current, v)
    plain = corrections.Tangent().apply(frame).displacements()
    lines, _ = KrylovDC("model").coefficients(frame.gram())
    out = KrylovDC("model").apply(frame).displacements()
    assert relative(out, torch.from_numpy(lines[:, :4].astype(float)) @ plain) <= 1e-12


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: KrylovDC("layer"), "granularity: expected one of"),
        (lambda: KrylovDC(tolerance=0.0), "tolerance: expected a finite number > 0"),
        (lambda: KrylovDC(tolerance=2.0), "tolerance: expected"),
        (
            lambda: KrylovDC("model").coefficients(Gram.of(torch.eye(3, requires_grad=True).double())),
            "expected tensors without autograd",
        ),
    ],
)
def test_invalid_arguments_are_rejected(wrong, words):
    with pytest.raises(ArgumentError, match=words):
        wrong()
