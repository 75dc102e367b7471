"""The recipes for other hosts: short, complete, and with calls that there are. `make test-hosts` runs them."""

import ast
import inspect
from pathlib import Path

import pytest

from manifoldagg import AsyncAggregator

ROOT = Path(__file__).parent.parent
RECIPES = {path.stem: path for path in sorted((ROOT / "examples" / "hosts").glob("*.py"))}


def test_each_is_run_and_shown():
    page = (ROOT / "docs" / "guide" / "other_frameworks.md").read_text()
    assert set(RECIPES) == {"flgo", "appfl", "nvflare"}
    for host, path in RECIPES.items():
        assert f'--8<-- "{path.relative_to(ROOT)}"' in page
        assert (ROOT / "benchmarks" / "peers" / f"with_{host}.py").exists()
        assert (ROOT / "benchmarks" / "peers" / f"host-{host}.txt").exists()


@pytest.mark.parametrize("host", RECIPES)
def test_it_has_at_most_fifteen_lines_below_its_imports(host):
    text = RECIPES[host].read_text()
    last = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)][-1]
    assert len([line for line in text.splitlines()[last.end_lineno :] if line.strip()]) <= 15


@pytest.mark.parametrize("host", RECIPES)
def test_its_calls_of_ours_are_such(host):
    calls = [node for node in ast.walk(ast.parse(RECIPES[host].read_text())) if isinstance(node, ast.Call)]
    ours = [call for call in calls if ast.unparse(call.func).startswith("self.versions.")]
    assert {call.func.attr for call in ours} == {"checkout", "submit"}
    for call in ours:
        signature = inspect.signature(getattr(AsyncAggregator, call.func.attr))
        signature.bind(None, *call.args, **{word.arg: word.value for word in call.keywords})
