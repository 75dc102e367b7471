"""A path says what its curve says; its picture shows it."""

import pytest
import torch
from matplotlib.figure import Figure

from manifoldagg.curves import Bezier, barrier, plane
from manifoldagg.curves.path import Path
from manifoldagg.curves.piecewise import Piecewise
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat, Sphere, SymmetricPositiveDefinite, distance
from tests.curves.test_mutants import control_points
from tests.support import draw, rotation

CASES = [(Bezier(Flat(4), 3), draw(0, 4, 4)), (Bezier(Sphere(3)), control_points(Bezier(Sphere(3)), 0))]
cases = pytest.mark.parametrize(("curve", "phi"), CASES, ids=["flat", "sphere"])


@cases
def test_a_path_equals_its_curve_with_control_points(curve, phi):
    path, t, point = curve.at(phi), torch.tensor([0.1, 0.6]), curve(phi, 0.3)
    assert isinstance(path, Path)
    for name in ("__call__", "velocity", "acceleration"):
        assert torch.equal(getattr(path, name)(t), getattr(curve, name)(phi, t))
    assert path.length(0.2, 0.7) == curve.length(phi, 0.2, 0.7)
    assert torch.equal(path.parameter_at_length(t), curve.parameter_at_length(phi, t))
    assert [x.item() for x in path.nearest(point)] == pytest.approx([0.3, 0.0], abs=1e-13)
    assert path.contains(point)
    assert all(torch.equal(a.phi, b) for a, b in zip(path.split(0.4), curve.split(phi, 0.4), strict=True))
    assert torch.equal(path.reverse().phi, phi.flip(0))


@cases
def test_both_parts_of_a_path_are_paths(curve, phi):
    left, right = curve.at(phi).split(0.4)
    assert torch.allclose(left(1.0), right(0.0))
    assert torch.allclose(left(1.0), curve(phi, 0.4))


def lines(axes):
    return {line.get_label(): torch.tensor(line.get_xydata()) for line in axes.lines}


def test_a_plot_preserves_the_distances_of_a_plane_curve():
    curve, turn = Bezier(Flat(5)), rotation(0, 5)
    phi = draw(1, 3, 5) @ turn
    axes = curve.at(phi).plot(Figure().subplots())
    drawn, t = lines(axes), torch.linspace(0, 1, 101, dtype=torch.float64)
    assert torch.allclose(torch.cdist(drawn["control points"], drawn["control points"]), torch.cdist(phi, phi))
    path = curve(phi, t)
    assert torch.allclose(drawn["path"].norm(dim=1), (path - phi[0]).norm(dim=1))
    assert drawn["control points"][0].tolist() == pytest.approx([0, 0])
    assert drawn["control points"][2, 1].item() == pytest.approx(0, abs=1e-12)


def test_a_plot_of_a_curved_space_shows_distances_from_the_start():
    space = SymmetricPositiveDefinite(2)
    curve = Bezier(space)
    phi = control_points(curve, 0)
    drawn = lines(curve.at(phi).plot(Figure().subplots()))
    away = distance(space, phi[0].expand_as(phi), phi)
    assert torch.allclose(drawn["control points"].norm(dim=1), away)
    assert (drawn["path"][-1] - drawn["control points"][-1]).norm() <= 1e-12


@pytest.mark.parametrize("end", [2.0, 0.0], ids=["line", "loop"])
def test_lines_loops_and_points_can_be_plotted(end):
    drawn = lines(Bezier(Flat(2)).at(torch.tensor([[0.0, 0.0], [1.0, 1.0], [end, end]])).plot(Figure().subplots()))
    assert drawn["control points"].norm(dim=1).tolist() == pytest.approx([0, 2**0.5, end * 2**0.5])
    assert not lines(Bezier(Flat(2)).at(torch.ones(3, 2)).plot(Figure().subplots()))["path"].any()


@pytest.mark.parametrize(("curve", "phi"), [*CASES, (Piecewise(Flat(3)), draw(0, 5, 3))])
def test_contours_of_a_function_are_plotted(curve, phi):
    seen = []

    def height(point):
        seen.append(point)
        return point.square().sum().item() + point.flatten()[0].item()

    axes = curve.at(phi).plot(Figure().subplots(), height, resolution=5)
    assert len(seen) == 25
    assert torch.allclose(curve.space.project(torch.stack(seen)), torch.stack(seen))
    assert "learned curve" in lines(axes)


def test_axes_are_created_by_default():
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    axes = Bezier(Flat(4), 3).at(draw(0, 4, 4)).plot()
    assert len(axes.lines) == 2
    curve, phi = Bezier(Flat(4), 3), draw(0, 4, 4)
    assert plane(curve, phi, lambda theta: theta.square().sum().item(), resolution=3).plot().lines
    assert barrier(curve, phi, lambda theta: theta.square().sum().item(), points=3).plot().lines
    # What pyplot does not know, it neither keeps nor shows.
    assert pyplot.get_fignums() == before


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Bezier(Flat(2)).at(torch.zeros(2, 2)), ArgumentError, "phi: expected shape"),
        (
            lambda: Bezier(Flat(2)).at(torch.zeros(3, 2)).plot(Figure().subplots(), float),
            ArgumentError,
            "phi: expected control points that span a plane",
        ),
        (lambda: Piecewise(Flat(2)).at(torch.zeros(5, 2)).split(0.5), NotImplementedError, "Piecewise has no split"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_curve_contains_its_points_in_any_dtype(dtype):
    curve, phi = Bezier(Flat(1000)), 3 * draw(0, 3, 1000, dtype=dtype)
    assert curve.contains(phi, curve(phi, torch.linspace(0, 1, 11))).all()


def test_expanded_parameters_are_supported():
    t = torch.tensor(0.5, dtype=torch.float64).expand(4)
    phi = draw(0, 3, 2)
    assert torch.allclose(Bezier(Flat(2)).push(phi, t, torch.ones_like(t)), Bezier(Flat(2)).velocity(phi, t))
    assert Bezier(Sphere(3)).velocity(torch.eye(3, dtype=torch.float64), t).shape == (4, 3)
