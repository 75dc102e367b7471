"""Laws of the corrections. A law is a function of a kit, the public names, in which a mutant may replace one."""

from types import SimpleNamespace

import numpy as np
import torch

from manifoldagg import corrections
from manifoldagg.manifolds import Flat, Product, Sphere
from tests.support import draw, exported, relative, rotation

KIT = exported(corrections)
SPACE, SIZE = Flat(12), 12
PARTS = Product({"a": Flat(5), "b": Flat(7)})
LAWS = {}
SMALL = 1e-12
"""A tolerance for sums of a dozen float64 products of numbers near 1 and for a well-conditioned projection."""


def law(function):
    LAWS[function.__name__] = function
    return function


def kit(**changes):
    return SimpleNamespace(**{**KIT, **changes})


def setting(seed=0, n=3):
    base, current = draw(seed, 2, SIZE)
    return base, current, current - base, draw(seed + 1, n, SIZE)


def project(v, g):
    return v - (v @ g)[..., None] / (g @ g) * g


def close(a, b, tolerance=SMALL):
    assert relative(a, b) <= tolerance


@law
def tangent_is_the_displacement(kit):
    base, current, _, v = setting()
    assert torch.equal(kit.Tangent()(SPACE, base, current, v), v)


@law
def position_points_to_the_client_model(kit):
    base, current, _, v = setting()
    close(current + kit.Position()(SPACE, base, current, v), base + v)


@law
def projections_are_orthogonal_to_the_drift(kit):
    base, current, g, v = setting()
    out = kit.OrthoDC(1.0)(SPACE, base, current, v)
    assert (out @ g).abs().max() <= SMALL * g.norm() * v.norm()


@law
def the_removed_component_is_parallel_to_the_drift(kit):
    base, current, g, v = setting()
    removed = v - kit.OrthoDC(1.0)(SPACE, base, current, v)
    close(removed, v - project(v, g))


@law
def pythagoras(kit):
    base, current, _, v = setting()
    out = kit.OrthoDC(1.0)(SPACE, base, current, v)
    close(out.square().sum(1) + (v - out).square().sum(1), v.square().sum(1))


@law
def the_threshold_selects_by_the_cosine(kit):
    base, current, g, _ = setting()
    e, f = g / g.norm(), project(draw(5, SIZE), g)
    f = f / f.norm()
    for threshold in (-0.5, 0.0, 0.3):
        for cosine in (-0.9, -0.3, -0.1, 0.1, 0.2, 0.4, 0.8):
            v = 3.0 * (cosine * e + (1 - cosine**2) ** 0.5 * f)[None]
            expected = project(v, g) if cosine <= threshold else v
            close(kit.OrthoDC(threshold)(SPACE, base, current, v), expected)


@law
def the_extreme_thresholds_ignore_the_cosine(kit):
    # By rounding, a quarter of the parallel pairs have a computed cosine above 1, and of antiparallel pairs below -1.
    for seed in range(20):
        base, current, g, _ = setting(seed)
        for factor in (0.1, 3.0, -0.7):
            v = (factor * g)[None]
            assert kit.OrthoDC(1.0)(SPACE, base, current, v).norm() <= 1e-14 * v.norm()
            assert torch.equal(kit.OrthoDC(-1.0)(SPACE, base, current, v), v)


@law
def tangent_and_position_coincide_at_threshold_one(kit):
    base, current, _, v = setting()
    strict = kit.OrthoDC(1.0)
    close((kit.Position() >> strict)(SPACE, base, current, v), strict(SPACE, base, current, v))


@law
def composition_is_sequential(kit):
    base, current, _, v = setting()
    for a, b in ((kit.Position(), kit.OrthoDC(0.0)), (kit.OrthoDC(0.0), kit.Position())):
        once = a(SPACE, base, current, v)
        close((a >> b)(SPACE, base, current, v), b(SPACE, base, current, once))


@law
def zero_vectors_are_unchanged(kit):
    base, current, _, v = setting()
    for make in (lambda: kit.OrthoDC(0.3), kit.OrthoStrict, kit.OrthoPos, lambda: kit.OrthoCorrect(0.7, 0.3)):
        assert torch.equal(make()(SPACE, base, base, v), v)
        assert not make()(SPACE, base, current, 0 * v).any()


@law
def delay_compensation_equals_its_formula(kit):
    base, current, g, v = setting()
    close(kit.DelayCompensated(0.3)(SPACE, base, current, v), v - 0.3 * v * v * g)


@law
def delay_compensation_by_the_outer_product_equals_its_formula(kit):
    base, current, g, v = setting()
    expected = torch.stack([row - 0.3 * torch.outer(row, row) @ g for row in v])
    close(kit.DelayCompensated(0.3, form="outer")(SPACE, base, current, v), expected)


@law
def delay_compensation_by_the_outer_product_is_coordinate_free(kit):
    base, current, _, v = setting()
    q = rotation(4, SIZE)
    correction = kit.DelayCompensated(0.3, form="outer")
    close(correction(SPACE, base @ q, current @ q, v @ q), correction(SPACE, base, current, v) @ q)
    sphere = Sphere(4)
    x, y = (point / point.norm() for point in draw(6, 2, 4).abs())
    u = sphere.project_tangent(x.expand(2, -1), draw(7, 2, 4))
    moved = sphere.transport(x.expand(2, -1), y.expand(2, -1), u)
    drift = -sphere.log(y, x)
    close(correction(sphere, x, y, u), moved - 0.3 * (moved @ drift)[:, None] * moved)


@law
def delay_compensation_follows_the_mean_square(kit):
    base, current, g, v = setting()
    correction, state, mean = kit.DelayCompensated(0.3, adaptive=True), None, torch.zeros(SIZE).double()
    for factor in (1.0, 2.0, -0.5):
        done = correction.apply(corrections.Frame.of(SPACE, base, current, factor * v), state)
        state, u = done.state, factor * v
        mean = 0.95 * mean + 0.05 * u[-1].square()
        close(done.displacements(), u - 0.3 / (mean + 1e-7).sqrt() * u * u * g)


@law
def delay_compensation_vanishes_to_first_order_on_quartics(kit):
    # The loss ¼ Σ x⁴ has the gradient e = x³. A drift along e increases the gradient, which fixes the sign.
    x, g = torch.full((1, 2), 0.5).double(), torch.full((2,), 0.01).double()
    v = -(x**3)
    out = kit.DelayCompensated(1.0)(Flat(2), x[0], x[0] + g, v)
    assert (-((x + g) ** 3) - out).norm() < (-((x + g) ** 3) - v).norm()


@law
def ortho_correct_equals_its_formula(kit):
    base, current, g, v = setting(n=40)
    for alpha, threshold in ((0.0, 0.3), (1.0, 0.0), (0.7, -0.2), (-0.4, 0.1)):
        cosine = v @ g / (v.norm(dim=1) * g.norm())
        expected = torch.where((cosine <= threshold)[:, None], project(v, g), v - alpha * g)
        close(kit.OrthoCorrect(alpha, threshold)(SPACE, base, current, v), expected)


@law
def named_corrections_equal_their_parameters(kit):
    base, current, _, v = setting(n=20)
    for make, alpha, threshold in ((kit.OrthoGrad, 0.0, 0.0), (kit.OrthoPos, 1.0, 0.0), (kit.OrthoStrict, 5.0, 1.0)):
        expected = KIT["OrthoCorrect"](alpha, threshold)(SPACE, base, current, v)
        assert torch.equal(make()(SPACE, base, current, v), expected)


@law
def the_clipped_position_is_surgery_on_the_position(kit):
    base, current, g, _ = setting()
    across = project(draw(9, SIZE), g)
    for share in (-0.5, 0.3, 0.9, 1.7):
        v = (share * g + across)[None]
        out = kit.OrthoPos(clip=True)(SPACE, base, current, v)
        close(out, v - min(share, 1.0) * g)


@law
def surgery_processes_the_rows_in_order(kit):
    base, current, g, v = setting(n=10)
    rows, found = [*v, g], kit.GradientSurgery()(SPACE, base, current, v)
    for i in range(10):
        u = v[i]
        for j, row in enumerate(rows):
            if j != i and u @ row < 0:
                u = project(u[None], row)[0]
        close(found[i], u)


@law
def pairwise_is_orthogonal_to_every_other(kit):
    base, current, _, v = setting()
    others = draw(7, 4, SIZE) * torch.tensor([[1e-3], [1.0], [1e4], [1.0]])
    others[3] = others[1] - 2 * others[0]
    out = kit.Pairwise(others)(SPACE, base, current, v)
    close(out, v - v @ torch.linalg.pinv(others[:3]) @ others[:3], 1e-9)


@law
def tensors_are_corrected_separately(kit):
    base, current, g, v = setting()
    out = kit.OrthoDC(1.0, "tensor")(PARTS, base, current, v)
    expected = torch.cat([project(v[:, :5], g[:5]), project(v[:, 5:], g[5:])], 1)
    close(out, expected)
    assert (out @ g).abs().max() <= SMALL * g.norm() * v.norm()


@law
def corrections_are_rotation_equivariant(kit):
    base, current, _, v = setting()
    q, others = rotation(3, SIZE), draw(4, 2, SIZE)
    for make in (kit.Position, lambda: kit.OrthoDC(0.3), kit.OrthoPos, kit.GradientSurgery):
        close(make()(SPACE, base @ q, current @ q, v @ q), make()(SPACE, base, current, v) @ q)
    close(
        kit.Pairwise(others @ q)(SPACE, base @ q, current @ q, v @ q), kit.Pairwise(others)(SPACE, base, current, v) @ q
    )


@law
def the_dynamic_correction_changes_with_the_straightness(kit):
    """The steps are straight, circular, and straight again. The phases are OrthoGrad, tangent and OrthoPos."""
    plane, correction, state, x = Flat(2), kit.OrthoDyn(), None, torch.zeros(2).double()
    drift, phases = torch.tensor([1.0, 0.0]).double(), []
    mean, length = torch.zeros(2).double(), 0.0
    members = {"gradient": KIT["OrthoGrad"](), "tangent": KIT["Tangent"](), "position": KIT["OrthoPos"]()}
    phase = "gradient"
    for step in range(400):
        angle = torch.tensor(0.0 if step < 50 else 0.3 * step if step < 250 else 0.0).double()
        v = torch.stack([angle.cos(), angle.sin()])[None]
        done = correction.apply(corrections.Frame.of(plane, x, x + drift, v), state)
        state, u = done.state, members[phase](plane, x, x + drift, v)
        close(done.displacements(), u)
        phases.append(phase)
        mean, length = 0.98 * mean + 0.02 * u[0], 0.98 * length + 0.02 * u[0].norm().item()
        r = mean.norm().item() / length
        phase = "tangent" if phase == "gradient" and r < 0.45 else phase
        phase = "position" if phase == "tangent" and r < 0.25 else phase
    assert list(dict.fromkeys(phases)) == ["gradient", "tangent", "position"]


@law
def the_chosen_threshold_is_nearest_to_the_fresh_update(kit):
    """For an isotropic quadratic loss, the slope is exact, and no fixed threshold is nearer to the fresh update."""
    plane, correction, state = Flat(3), kit.AutoThreshold(), None
    minimum, models = draw(2, 3), [draw(3, 3)]
    chosen = set()
    for k in range(40):
        base, current = models[max(0, k - 2)], models[-1]
        v = 0.3 * (minimum - base)[None]
        done = correction.apply(corrections.Frame.of(plane, base, current, v), state)
        state, out = done.state, done.displacements()
        fresh, g = 0.3 * (minimum - current), current - base
        if k > 5:
            assert abs(state["slope"] - 0.3) <= 1e-6
            rivals = [KIT["OrthoDC"](t)(plane, base, current, v) for t in (-1.0, 0.0, 1.0)]
            assert (out - fresh).norm() <= min((rival - fresh).norm() for rival in rivals) + 1e-12
            chosen.add(state["threshold"])
        models.append(current + 0.5 * out[0] + 0.3 * draw(100 + k, 3))
        assert g.isfinite().all()
    assert chosen == {-1, 1}


@law
def a_rotated_control_point_keeps_its_position_relative_to_the_chord(kit):
    base, end, current, goal, phi = draw(11, 5, SIZE)
    out = kit.rotate_control(phi, base, end, current, goal)
    x, y = phi - (base + end) / 2, out - (current + goal) / 2
    a, b = end - base, goal - current
    assert abs(y.norm() - x.norm()) <= SMALL * x.norm()
    assert abs(x @ a / a.norm() - y @ b / b.norm()) <= SMALL * x.norm()
    outside = x - torch.stack([a, b]).T @ torch.linalg.lstsq(torch.stack([a, b]).T, x[:, None]).solution[:, 0]
    turned = y - torch.stack([a, b]).T @ torch.linalg.lstsq(torch.stack([a, b]).T, y[:, None]).solution[:, 0]
    close(outside, turned, 1e-11)


@law
def opposite_chords_negate_only_the_component_along_the_chord(kit):
    base, end, current, phi = draw(12, 4, SIZE)
    a = end - base
    out = kit.rotate_control(phi, base, end, current, current - 2 * a)
    x = phi - (base + end) / 2
    close(out - (current - a), x - 2 * (x @ a) / (a @ a) * a, 1e-11)


@law
def parallel_chords_do_not_rotate(kit):
    base, end, current, phi = draw(12, 4, SIZE)
    close(kit.rotate_control(phi, base, end, current, current + end - base), phi + current - base, 1e-14)


@law
def calibration_adds_the_orthogonal_component_of_the_shift(kit):
    start, shift, own = draw(13, 3, SIZE)
    out = kit.calibrate(start, shift, own, space=PARTS)
    expected = torch.cat([project(shift[None, :5], own[:5])[0], project(shift[None, 5:], own[5:])[0]])
    close(out, start + expected)
    close(kit.calibrate(start, shift, own, "model", space=PARTS), start + project(shift[None], own)[0])


@law
def pairwise_calibration_projects_the_client_shift(kit):
    start, shift, own, *others = draw(14, 5, SIZE)
    basis = torch.stack(others)
    lost = own @ torch.linalg.pinv(basis) @ basis
    close(kit.calibrate(start, shift, own, "model", others), start + shift - lost, 1e-11)


@law
def a_zero_client_shift_adds_the_whole_shift(kit):
    start, shift = draw(15, 2, SIZE)
    own = torch.cat([torch.zeros(5), torch.ones(7)]).double()
    out = kit.calibrate(start, shift, own, space=PARTS)
    assert torch.equal(out[:5], start[:5] + shift[:5])


@law
def position_on_a_sphere_points_to_the_client_model(kit):
    space, generator = Sphere(4), torch.Generator().manual_seed(0)
    base = space.random_point(generator=generator, dtype=torch.float64)
    current = space.exp(base, 0.3 * space.random_tangent(base, generator))
    v = 0.3 * space.random_tangent(base.expand(2, 4), generator)
    out = kit.Position()(space, base, current, v)
    close(space.exp(current.expand(2, 4), out), space.exp(base.expand(2, 4), v))


@law
def rows_on_a_sphere_are_transported(kit):
    space, generator = Sphere(4), torch.Generator().manual_seed(1)
    base = space.random_point(generator=generator, dtype=torch.float64)
    current = space.exp(base, 0.5 * space.random_tangent(base, generator))
    v = space.random_tangent(base.expand(2, 4), generator)
    out = kit.Tangent()(space, base, current, v)
    close(out, space.transport(base.expand(2, 4), current.expand(2, 4), v))
    g = -space.log(current, base)
    orthogonal = kit.OrthoDC(1.0)(space, base, current, v)
    assert (orthogonal @ g).abs().max() <= SMALL
    close(orthogonal, project(out, g))


@law
def quality_compares_the_descents_of_the_corrected_and_the_transported_update(kit):
    base, current, g, v = setting()
    slope = draw(7, SIZE)
    found = kit.correction_quality(SPACE, kit.OrthoDC(1.0), [(base, current, row) for row in v], lambda model: slope)
    close(torch.from_numpy(found.transported), -v @ slope)
    close(torch.from_numpy(found.corrected), -project(v, g) @ slope)


@law
def quality_is_the_smallest_ratio_over_useful_updates(kit):
    found = kit.CorrectionQuality(np.array([3.0, 1.0, -8.0]), np.array([2.0, 4.0, -4.0]))
    assert found.q == 0.25
    assert found.d == 7.0
