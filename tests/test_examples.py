"""Tests that the examples run completely on small data."""

import runpy
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
import torch

from manifoldagg.curves.trajectory import PathFit
from manifoldagg.manifolds import Flat

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def calibration_error():
    return runpy.run_path(str(ROOT / "examples/averaging.py"))["calibration_error"]


def test_calibration_error_of_known_confidences(calibration_error):
    """Two of ten bins have samples. In (0.5, 0.6], one of three guesses is right. In (0.8, 0.9], the guess is right."""
    p = torch.tensor([[0.6, 0.4], [0.55, 0.45], [0.45, 0.55], [0.1, 0.9]], dtype=torch.float64)
    first = abs(1 / 3 - (0.6 + 0.55 + 0.55) / 3)
    found = calibration_error(p, torch.tensor([0, 1, 0, 1]), bins=10)
    assert found == pytest.approx(3 / 4 * first + 1 / 4 * 0.1, abs=1e-15)


@pytest.mark.parametrize("bins", [6, 10, 14])
def test_a_confidence_at_a_bin_edge_belongs_to_the_lower_bin(calibration_error, bins):
    for k in range(3, bins):
        # A guess at the upper edge of a bin is wrong, and one in its middle is right. Their errors partly cancel.
        confidence = torch.tensor([k / bins, (k - 0.5) / bins], dtype=torch.float64)
        others = ((1 - confidence) / (2 * bins))[:, None].expand(2, 2 * bins)
        p = torch.cat([confidence[:, None], others], 1)
        found = calibration_error(p, torch.tensor([1, 0]), bins=bins)
        assert found == pytest.approx(abs(1 - (2 * k - 0.5) / bins) / 2, abs=1e-14)


def test_calibration_error_of_one_bin_compares_the_means(calibration_error):
    p = torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    classes = torch.arange(50) % 4
    confidence, guess = p.max(-1)
    excess = (guess == classes).double().mean() - confidence.mean()
    assert calibration_error(p, classes, bins=1) == pytest.approx(abs(excess).item(), abs=1e-14)


def test_certain_and_correct_predictions_have_calibration_error_zero(calibration_error):
    assert calibration_error(torch.eye(3).double(), torch.arange(3)) == 0
    assert calibration_error(torch.eye(3).double(), torch.tensor([1, 1, 2])) == pytest.approx(1 / 3)


def test_mode_connectivity_example_runs(tmp_path):
    command = [sys.executable, "-W", "error::UserWarning", ROOT / "examples/mode_connectivity.py", "--quick"]
    done = subprocess.run([*command, "--out", tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("Seen: between the networks the loss rises by ")
    assert "digits" in lines[0]
    rows = {line.split()[0]: line.split()[1:] for line in lines[3:8]}
    assert list(rows) == ["chord", "quadratic", "cubic", "tunnel", "simplices"]
    # Up to the printed digit, no path is shorter than the chord. All paths have its end points.
    for row in rows.values():
        assert float(row[0]) >= float(rows["chord"][0]) - 0.05
        assert (row[2], row[5]) == (rows["chord"][2], rows["chord"][5])
        assert float(row[1]) >= 0
    assert float(rows["chord"][-1]) == 1
    height, width, _ = matplotlib.image.imread(tmp_path / "mode_connectivity.png").shape
    assert width > height > 500


def test_averaging_example_runs(tmp_path):
    command = [sys.executable, "-W", "error::UserWarning", ROOT / "examples/averaging.py", "--quick"]
    done = subprocess.run([*command, "--out", tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("Seen: accuracies of the last model and of the average of late ones: ")
    for name in ("last", "SWA", "Karcher SWA", "simplex"):
        assert sum(name in line for line in lines) >= 2, (name, lines)  # One row is flat and one is curved.
    height, width, _ = matplotlib.image.imread(tmp_path / "averaging.png").shape
    assert width > height > 500


def test_drift_example_runs(tmp_path):
    command = [sys.executable, "-W", "error::UserWarning", ROOT / "examples/drift.py", "--quick"]
    done = subprocess.run([*command, "--out", tmp_path / "drift.png"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("Seen: a server that goes along chords rests ")
    assert sum(line.startswith("fewer steps, full weight") for line in lines) == 2
    found = {line[:30].strip(): float(line[30:].split()[0]) for line in lines[1:7]}
    assert found["path"] < found["fit of degree 2"] < found["chord"]
    height, width, _ = matplotlib.image.imread(tmp_path / "drift.png").shape
    assert width > height > 500


def test_drift_example_fits_the_same_curve_as_trajectory():
    example = runpy.run_path(str(ROOT / "examples/drift.py"))
    path = torch.randn(21, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).cumsum(0)
    for degree in (2, 3):
        fit = PathFit(Flat(3), path[0], degree)
        for point in path[1:]:
            fit.observe(point)
        control = example["control_points"](degree, 20).double() @ path
        # The example computes the matrix in float32.
        assert (control - fit.points(path[-1])).norm() <= 1e-6 * path.norm()
