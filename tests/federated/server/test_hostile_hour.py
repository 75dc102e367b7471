"""Tests with signals at every call, without the shape checks of the test suite, whose own calls would dominate."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run_the_hour(marks):
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider", "-m", marks]
    hour = subprocess.run(
        [*command, "tests/federated/server/hostile_hour.py"], cwd=ROOT, capture_output=True, text=True, timeout=3600
    )
    assert hour.returncode == 0, hour.stdout


def test_server_survives_signals():
    run_the_hour("not soak")


@pytest.mark.soak
def test_server_survives_many_signals():
    run_the_hour("soak")
