"""Tests of the page of benchmark results: every measured number equals the number in the logs."""

import doctest
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def results():
    path = ROOT / "benchmarks" / "asynchrony" / "results.py"
    spec = importlib.util.spec_from_file_location("asynchrony_results", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_and_tables_equal_those_rendered_from_the_logs(results):
    for path, text in results.render().items():
        assert path.read_text() == text, f"{path.relative_to(ROOT)}: run benchmarks/asynchrony/results.py"


def test_readme_states_the_speedups_of_the_logs(results):
    low, high = results.extreme(min), results.extreme(max)
    assert f"{low:.0f} to {high:.0f} times sooner" in " ".join((ROOT / "README.md").read_text().split())


def test_docstring_examples_of_the_script_run(results):
    assert doctest.testmod(results).failed == 0


def test_cells_of_missing_rows_and_columns_raise_an_error(results):
    with pytest.raises(KeyError, match="no cell 'nobody'"):
        results.cell("papers/curved.md", "nobody", "geometry")


def test_censored_runs_count_with_the_whole_virtual_time(results):
    for task in results.tasks():
        frame = results.runs(task)
        late = frame[~frame["reached"]]
        assert (late["time"] >= frame[frame["reached"]]["time"].max()).all()
