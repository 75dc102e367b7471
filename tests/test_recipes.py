"""Tests of the recipes for other frameworks: documented, short, and with valid calls. `make test-hosts` runs them."""

import ast
import inspect
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from manifoldagg import AsyncAggregator

ROOT = Path(__file__).parent.parent
RECIPES = {path.stem: path for path in sorted((ROOT / "examples" / "hosts").glob("*.py"))}


def test_each_recipe_is_benchmarked_and_documented():
    page = (ROOT / "docs" / "guide" / "other_frameworks.md").read_text()
    assert set(RECIPES) == {"flgo", "appfl", "nvflare"}
    for host, path in RECIPES.items():
        assert f'--8<-- "{path.relative_to(ROOT)}"' in page
        assert (ROOT / "benchmarks" / "peers" / f"with_{host}.py").exists()
        assert (ROOT / "benchmarks" / "peers" / f"host-{host}.txt").exists()


@pytest.mark.parametrize("host", RECIPES)
def test_a_recipe_has_at_most_fifteen_lines_below_its_imports(host):
    text = RECIPES[host].read_text()
    last = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)][-1]
    assert len([line for line in text.splitlines()[last.end_lineno :] if line.strip()]) <= 15


@pytest.mark.parametrize("host", RECIPES)
def test_calls_of_the_aggregator_match_its_signatures(host):
    calls = [node for node in ast.walk(ast.parse(RECIPES[host].read_text())) if isinstance(node, ast.Call)]
    ours = [call for call in calls if ast.unparse(call.func).startswith("self.versions.")]
    assert {call.func.attr for call in ours} == {"checkout", "submit"}
    for call in ours:
        signature = inspect.signature(getattr(AsyncAggregator, call.func.attr))
        signature.bind(None, *call.args, **{word.arg: word.value for word in call.keywords})


class StoredTensor:
    """A tensor in a file, like the references that NVFlare 2.9 passes to an aggregator."""

    def __init__(self, path, tensor):
        self.path = path
        save_file({"T0": tensor}, path)

    def materialize(self):
        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor("T0")


@pytest.fixture
def corrected(monkeypatch):
    """The aggregator of the recipe for NVFlare, without NVFlare."""
    for name in ("app_common", "abstract", "fl_model"), ("app_common", "aggregators", "model_aggregator"):
        for i in range(len(name) + 1):
            path = ".".join(("nvflare", *name[:i]))
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
    sys.modules["nvflare.app_common.abstract.fl_model"].FLModel = SimpleNamespace
    sys.modules["nvflare.app_common.aggregators.model_aggregator"].ModelAggregator = object
    return runpy.run_path(str(RECIPES["nvflare"]))["Corrected"]


@pytest.mark.parametrize("kind", ["FULL", "DIFF"])
def test_nvflare_tensors_in_files_and_in_memory_give_bitwise_equal_models(corrected, kind, tmp_path):
    first = {"w": torch.ones(3, 2), "b": torch.zeros(3)}
    aggregators = [corrected(first), corrected(first)]
    for turn in range(2):
        for aggregator in aggregators:
            aggregator.reset_stats()
        for client in ("site-1", "site-2"):
            generator = torch.Generator().manual_seed(turn)
            params = {name: torch.randn(x.shape, generator=generator) for name, x in first.items()}
            files = {name: StoredTensor(tmp_path / f"{client}-{turn}-{name}", x) for name, x in params.items()}
            meta = {"client_name": client, "NUM_STEPS_CURRENT_ROUND": 4}
            for aggregator, given in zip(aggregators, (params, files), strict=True):
                aggregator.accept_model(SimpleNamespace(params=given, params_type=kind, meta=meta))
        models = [aggregator.aggregate_model().params for aggregator in aggregators]
        assert all(torch.equal(models[0][name], models[1][name]) for name in first)
        assert not torch.equal(models[0]["w"], first["w"])


def test_nvflare_tensors_in_files_are_mapped_and_not_copied(corrected, tmp_path):
    aggregator = corrected({"w": torch.zeros(1000)})
    stored, seen = StoredTensor(tmp_path / "w", torch.ones(1000)), []

    def materialize():
        seen.append(type(stored).materialize(stored))
        return seen[0]

    def submit(client, update, **options):
        assert update["w"].data_ptr() == seen[0].data_ptr()
        seen.append(client)

    aggregator.versions.submit = submit
    aggregator.reset_stats()
    params = {"w": SimpleNamespace(materialize=materialize)}
    aggregator.accept_model(SimpleNamespace(params=params, params_type="FULL", meta={"client_name": "site-1"}))
    assert seen[1:] == ["site-1"]
