"""The plane of a curve: coordinates are those of Gram-Schmidt, values those of the function."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from manifoldagg.curves import Bezier, plane
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Flat
from tests.support import draw, seeds


def squared_norm(theta):
    return theta.square().sum().item()


@given(seeds, st.integers(2, 5))
def test_coordinates_keep_distances_and_values_are_taken_at_their_points(seed, degree):
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
def test_the_path_is_the_curve(seed):
    curve, phi = Bezier(Flat(4)), draw(seed, 3, 4)
    picture = plane(curve, phi, squared_norm, resolution=2)
    away = curve(phi, torch.linspace(0, 1, 101, dtype=torch.float64)) - phi[0]
    assert picture.path.norm(dim=1).tolist() == pytest.approx(away.norm(dim=1).tolist(), abs=1e-12)


def test_it_draws():
    picture = plane(Bezier(Flat(4)), draw(0, 3, 4), squared_norm, resolution=5)
    axes = Figure().subplots()
    picture.plot(axes)
    assert {"chord", "learned curve", "base model", "client's model", "control point"} <= {
        line.get_label() for line in axes.lines
    }


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plane(Bezier(Flat(2), 1), torch.zeros(2, 2), squared_norm), "curve: expected degree 2 or more"),
        (lambda: plane(Bezier(Flat(2)), torch.zeros(3, 2), squared_norm), "phi: its ends coincide, or"),
        (lambda: plane(Bezier(Flat(2)), torch.arange(6.0).view(3, 2), squared_norm), "phi: its ends coincide, or"),
        (lambda: plane(Bezier(Flat(2)), torch.zeros(2, 2), squared_norm), "phi: expected shape"),
        (lambda: plane(Bezier(Flat(2)), draw(0, 3, 2), squared_norm, resolution=1), "resolution: expected"),
    ],
)
def test_bad_input_is_refused_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
