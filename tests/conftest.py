"""Configuration of all tests: shape and type checks of every call, hypothesis profiles, and shared fixtures."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import jaxtyping
import pytest

from tests import checking

collect_ignore = ["network"]
"""Folders that pytest does not collect. `make test-flower` and `make test-diloco` run their files."""
pytest.register_assert_rewrite("tests.federated.mutants")
# These variables disable Flower's telemetry and its check for a newer version.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
checking.install("manifoldagg")

COMMON = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("ci", max_examples=25, derandomize=True, **COMMON)
hypothesis.settings.register_profile("dev", max_examples=25, **COMMON)
hypothesis.settings.register_profile("soak", max_examples=1000, **COMMON)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def as_shipped(monkeypatch):
    """Disable the shape checks, so that a test sees the same errors as a user."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the site, built like `make docs`, with warnings as errors.

    All worker processes of pytest-xdist share one build.
    """
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    built = shared / "site"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(shared / "draft")]
            environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
            root = Path(__file__).parents[1]
            done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            (shared / "draft").rename(built)
    return built


def pytest_collection_modifyitems(config, items):
    """Skip `soak` tests unless the marker expression selects them."""
    if "soak" not in (config.option.markexpr or ""):
        for item in items:
            if "soak" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="make soak runs it"))


def pytest_terminal_summary(terminalreporter):
    """List the laws that detect each mutant, from the tests that recorded them."""
    caught = sorted(
        (report.fspath, name, laws)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for key, (name, laws) in report.user_properties
        if key == "caught"
    )
    if caught:
        terminalreporter.section("mutants, and what catches them")
        for _, name, laws in caught:
            terminalreporter.write_line(f"{name:<42} {', '.join(laws)}")
