"""Tests of the command `manifoldagg merge`."""

import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from manifoldagg import average
from manifoldagg.cli.merge import parse_manifold, parse_size
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import Sphere


def call(folder, *arguments):
    """Run the command in a folder."""
    command = [sys.executable, "-m", "manifoldagg", "merge", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.fixture
def states(tmp_path):
    base = torch.randn(40, 5, generator=torch.Generator().manual_seed(9))
    states = []
    for i in range(2):
        noise = torch.randn(40, 5, generator=torch.Generator().manual_seed(i))
        states.append({"w": (base + 0.1 * noise).bfloat16(), "v": torch.nn.functional.normalize(noise[0] + 3, dim=0)})
        save_file(states[-1], tmp_path / f"{i}.safetensors")
    return states


def test_merge_writes_the_weighted_mean_and_prints_distances(tmp_path, states):
    done = call(tmp_path, "0.safetensors", "1.safetensors", "--weights", "3,1", "--out", "mean.safetensors")
    assert done.returncode == 0, done.stderr
    expected = average(states, [3, 1])
    found = load_file(tmp_path / "mean.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert re.search(r"^ *model +\d+", done.stdout, re.MULTILINE)
    assert "mean.certificate.json" in done.stdout


def test_options_are_passed_to_the_merge(tmp_path, states):
    arguments = ["--method", "karcher", "--scope", "model", "--manifold", "v=Sphere(5)", "--shard-size", "1kB"]
    done = call(tmp_path, "0.safetensors", "1.safetensors", "--out", "mean", *arguments)
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "mean/model.safetensors")
    assert abs(found["v"].norm() - 1) < 1e-6
    assert (tmp_path / "mean/certificate.json").exists()


def test_a_dry_run_writes_nothing(tmp_path, states):
    before = sorted(tmp_path.iterdir())
    done = call(tmp_path, "0.safetensors", "1.safetensors", "--method", "karcher", "--out", "mean", "--dry-run")
    assert done.returncode == 0, done.stderr
    for line in (r"bytes to read +1,680", r"estimated time +[\d.,]+ s", r"checkpoints +2"):
        assert re.search(line, done.stdout), done.stdout
    assert sorted(tmp_path.iterdir()) == before


def test_an_error_prints_one_message_and_exits_with_code_2(tmp_path, states):
    save_file({"w": torch.zeros(3)}, tmp_path / "2.safetensors")
    done = call(tmp_path, "0.safetensors", "2.safetensors", "--out", "mean.safetensors")
    assert done.returncode == 2
    assert done.stderr.startswith("error: models: expected the names, shapes and dtypes of 0.safetensors, got 3 diff")
    assert "\n  2.safetensors: w: expected shape (40, 5), got (3,)\n" in done.stderr


@pytest.mark.parametrize("text", ["five", "5XB", "-1", ""])
def test_an_invalid_size_is_reported(text):
    with pytest.raises(ArgumentError, match=r"^shard_size: expected a size such as 5GB, got"):
        parse_size(text)


@pytest.mark.parametrize("text", ["Sphere(3)", "w=Nothing(3)", "w=check_point(3)", "w=Sphere", "w=Sphere(1,2,3)"])
def test_an_invalid_manifold_is_reported(text):
    with pytest.raises(ArgumentError, match=r"^manifold: expected"):
        parse_manifold(text)


def test_a_pattern_may_contain_an_equals_sign():
    assert parse_manifold("a=b.*=Sphere(3)") == ("a=b.*", Sphere(3))


def test_a_warning_about_distant_models_is_printed_once(tmp_path):
    for i in range(2):
        noise = torch.randn(40, 5, generator=torch.Generator().manual_seed(i))
        save_file({"w": noise}, tmp_path / f"{i}.safetensors")
    done = call(tmp_path, "0.safetensors", "1.safetensors", "--out", "mean.safetensors")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("expected angles of at most") == 1
    assert "UserWarning" not in done.stderr
