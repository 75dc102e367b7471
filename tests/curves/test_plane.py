"""The plane of a curve: coordinates are those of Gram-Schmidt, values those of the function."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from manifoldagg.curves import Bezier, barrier, plane
from manifoldagg.curves.piecewise import Piecewise
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat, Power, Sphere
from tests.support import draw, seeds


def squared_norm(theta):
    return theta.square().sum().item()


@given(seeds, st.integers(2, 5))
def test_coordinates_preserve_distances_and_values_belong_to_their_points(seed, degree):
    curve, phi = Bezier(Flat(7), degree), draw(seed, degree + 1, 7)
    seen = []
    picture = plane(curve, phi, lambda theta: seen.append(theta) or squared_norm(theta), resolution=4)
    chord = (phi[-1] - phi[0]).norm().item()
    assert picture.control[0].tolist() == [0.0, 0.0]
    assert picture.control[-1].tolist() == pytest.approx([chord, 0.0], abs=1e-12)
    lengths = (phi - phi[0]).norm(dim=1)
    assert (picture.control.norm(dim=1) <= lengths + 1e-12).all()
    if degree == 2:
        assert picture.control.norm(dim=1).tolist() == pytest.approx(lengths.tolist(), abs=1e-12)
    # Points of a regular grid in an isometric plane have the grid's distances.
    grid = torch.stack(torch.meshgrid(picture.x, picture.y, indexing="xy"), -1).reshape(-1, 2)
    points = torch.stack(seen)
    assert torch.allclose(torch.cdist(points, points), torch.cdist(grid, grid), atol=1e-9)
    assert picture.values.flatten().tolist() == [squared_norm(theta) for theta in seen]


@given(seeds)
def test_the_path_contains_points_of_the_curve(seed):
    curve, phi = Bezier(Flat(4)), draw(seed, 3, 4)
    picture = plane(curve, phi, squared_norm, resolution=2)
    away = curve(phi, torch.linspace(0, 1, 101, dtype=torch.float64)) - phi[0]
    assert picture.path.norm(dim=1).tolist() == pytest.approx(away.norm(dim=1).tolist(), abs=1e-12)


def test_plot_draws_and_returns_the_axes():
    picture = plane(Bezier(Flat(4)), draw(0, 3, 4), squared_norm, resolution=5)
    axes = Figure().subplots()
    assert picture.plot(axes) is axes
    assert {"chord", "learned curve", "base model", "client's model", "control point"} <= {
        line.get_label() for line in axes.lines
    }


@pytest.mark.parametrize("kind", ["plane", "barrier", "path", "path with a function"])
def test_the_legend_is_below_the_plot_and_covers_no_data(kind):
    curve, phi = Bezier(Flat(4)), draw(0, 3, 4)
    axes = {
        "plane": lambda: plane(curve, phi, squared_norm, resolution=3).plot(),
        "barrier": lambda: barrier(curve, phi, squared_norm, points=5).plot(),
        "path": lambda: curve.at(phi).plot(),
        "path with a function": lambda: curve.at(phi).plot(function=squared_norm, resolution=3),
    }[kind]()
    figure = axes.figure
    figure.draw_without_rendering()
    legend = axes.get_legend().get_window_extent()
    label = axes.xaxis.label.get_window_extent()
    assert axes.get_xlabel()
    assert axes.get_ylabel()
    assert legend.y1 <= label.y0
    assert legend.y0 >= 0
    named = {line.get_label() for line in axes.lines if not line.get_label().startswith("_")}
    assert {text.get_text() for text in axes.get_legend().get_texts()} == named


def test_a_plot_can_omit_its_legend():
    curve, phi = Bezier(Flat(4)), draw(0, 3, 4)
    assert plane(curve, phi, squared_norm, resolution=3).plot(legend=False).get_legend() is None
    assert barrier(curve, phi, squared_norm, points=5).plot(legend=False).get_legend() is None


@given(seeds, st.integers(1, 3), st.integers(1, 2))
def test_another_curve_is_projected(seed, degree, pieces):
    """Coordinates of its points are their inner products with the unit vectors of the plane."""
    phi = draw(seed, 3, 7)
    curve, other, points = Bezier(Flat(7)), Piecewise(Flat(7), degree, pieces), draw(seed + 1, pieces * degree + 1, 7)
    picture = plane(curve, phi, squared_norm, resolution=2, others={"other": (other, points)})
    first = (phi[2] - phi[0]) / (phi[2] - phi[0]).norm()
    across = (phi[1] - phi[0]) - ((phi[1] - phi[0]) @ first) * first
    second = across / across.norm()
    away = other(points, torch.linspace(0, 1, 101, dtype=torch.float64)) - phi[0]
    expected = torch.stack([away @ first, away @ second], -1)
    # Heights of the control point come from a difference of squares; 7 dimensions keep it from vanishing.
    assert torch.allclose(picture.others["other"], expected, atol=1e-8)


def test_the_plane_of_a_polygon_contains_the_polygon():
    phi = torch.tensor([[0.0, 0.0, 1.0], [1.0, 1.0, 1.0], [2.0, 0.0, 1.0]])
    picture = plane(Piecewise(Flat(3), 1, 2), phi, squared_norm, resolution=2, others={"it": (Bezier(Flat(3)), phi)})
    assert torch.allclose(picture.path[[0, 25, 50, 100]], torch.tensor([[0, 0], [0.5, 0.5], [1, 1], [2, 0]]).double())
    assert torch.allclose(picture.others["it"][50], torch.tensor([1, 0.5]).double())


def test_points_have_the_shape_of_the_space():
    shapes = set()
    space = Power(Flat(2), (3,))
    plane(Bezier(space), draw(0, 3, 3, 2), lambda theta: shapes.add(tuple(theta.shape)) or 0.0, resolution=2)
    assert shapes == {(3, 2)}


def test_the_names_of_the_ends_are_configurable():
    axes = Figure().subplots()
    curve, phi = Bezier(Flat(4)), draw(0, 3, 4)
    other = {"cubic": (Bezier(Flat(4), 3), draw(1, 4, 4))}
    plane(curve, phi, squared_norm, resolution=3, others=other).plot(axes, ends=("A", "B"))
    assert {"A", "B", "cubic"} <= {line.get_label() for line in axes.lines}


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plane(Bezier(Flat(2), 1), torch.zeros(2, 2), squared_norm), "curve: expected degree 2 or more"),
        (lambda: plane(Bezier(Flat(2)), torch.zeros(3, 2), squared_norm), "phi: expected points that span a plane"),
        (
            lambda: plane(Bezier(Flat(2)), torch.arange(6.0).view(3, 2), squared_norm),
            "phi: expected points that span a plane",
        ),
        (lambda: plane(Bezier(Flat(2)), torch.zeros(2, 2), squared_norm), "phi: expected shape"),
        (lambda: plane(Bezier(Flat(2)), draw(0, 3, 2), squared_norm, resolution=1), "resolution: expected"),
        (lambda: plane(Bezier(Sphere(2)), draw(0, 3, 2), squared_norm), "curve: expected a curve on one flat space"),
        (lambda: plane(Flat(2), draw(0, 3, 2), squared_norm), "curve: expected a curve on one flat space"),
        (
            lambda: plane(
                Bezier(Flat(2)), draw(0, 3, 2), squared_norm, others={"it": (Bezier(Flat(3)), draw(0, 3, 3))}
            ),
            "it: expected a curve on one flat space",
        ),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
