"""Shapes and types of every call are checked in the tests; hypothesis is derandomised in CI."""

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
"""`make test-flower` runs it."""
pytest.register_assert_rewrite("tests.federated.mutants")
# Flower reports home otherwise, and asks whether there is a newer one.
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
    """Without the shape checks: what a user sees who hands in what does not fit."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the site, built as `make docs` builds it: a warning is an error.

    It is built once, whichever processes share the tests.
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
    """`soak` tests run when they are asked for."""
    if "soak" not in (config.option.markexpr or ""):
        for item in items:
            if "soak" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="make soak runs it"))


def pytest_terminal_summary(terminalreporter):
    """Which law catches which mutant, from the tests that recorded it."""
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
