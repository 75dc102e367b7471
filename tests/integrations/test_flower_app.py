"""The example app, and the guide's: the same ServerApp and ClientApp, with nodes that are threads."""

import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict

from manifoldagg.experiments.registry import RULES, method
from manifoldagg.federated import Server
from manifoldagg.federated.types import extra_fields
from tests.integrations.engine import running

ROOT = Path(__file__).parents[2]
APP = ROOT / "examples/flower_app"
NODES = 4


def told(app, config):
    """The app, told what `flwr run` tells the nodes of a simulation."""

    def call(message, context):
        known = {**context.node_config, "num-partitions": NODES}
        return app(message, Context(context.run_id, context.node_id, known, context.state, config))

    return call


def serve(server, client, config):
    with running(told(client, config), NODES) as engine:
        server(engine.grid, Context(1, 1, {}, RecordDict(), config))


@pytest.fixture
def app(monkeypatch):
    """What `pyproject.toml` names, imported as Flower does, and its config."""
    monkeypatch.syspath_prepend(str(APP))
    told = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    for name in ("task", "server_app", "client_app"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = {}
    for name, path in told["components"].items():
        module, _, attribute = path.partition(":")
        found[name] = getattr(import_module(module), attribute)
    yield found["serverapp"], found["clientapp"], told["config"]
    for name in ("task", "server_app", "client_app"):
        sys.modules.pop(name, None)


def test_the_app_runs_with_the_method_of_its_config(app, capsys):
    server, client, config = app
    assert config["method"] == "asynckrylov"
    serve(server, client, config | {"rounds": 2})
    accuracy, updates = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"accuracy by round: 0\.\d{3} 0\.\d{3} 0\.\d{3}", accuracy)
    assert updates.startswith(f"{2 * NODES} updates of {NODES} nodes, maximum staleness ")


def test_the_app_chooses_a_stable_rate_for_its_nodes(app, monkeypatch):
    task = import_module("task")
    config = app[2]
    for text, nodes, rate in (
        ("asynckrylov", 10, 10 / 11),
        ("asynccorrected:correction=autothreshold", 10, 10 / 11),
        ("fedasync", 9, 0.9),
        ("fedortho:rate=0.25", 10, 0.25),
        ("fedadam", 10, method("fedadam").bind(range(10)).rule.rate),
    ):
        assert task.method_of(config | {"method": text}, nodes).rule.rate == pytest.approx(rate, rel=1e-15)


def test_apps_of_the_guide_run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/guide/flower.md").read_text(), flags=re.M | re.S)
    named = {"__name__": "__main__"}
    exec(compile("\n".join(blocks), "guide", "exec"), named)
    for server, client in (("server", "client"), ("server", "paths"), ("path_server", "paths")):
        serve(named[server], named[client], {})
    unmodified, *others = capsys.readouterr().out.splitlines()
    assert unmodified.startswith("{1: {'loss': ")
    for line in (unmodified, *others):
        assert line.count(f"'accepted': {NODES}, 'rejected': 0, 'failed': 0}}") == 3
    assert len(others) == 2


def test_guide_lists_the_rules_that_work_with_a_plain_client_app():
    """Those that neither ask for more than a model, nor send more."""
    guide = (ROOT / "docs/guide/flower.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| (yes|no|with)\b", guide, flags=re.M)
    found = {name: answer == "yes" for names, answer in rows for name in re.findall(r"`(?:rules\.)?([^`]*)`", names)}
    expected = {}
    for name in RULES:
        rule = method(name).bind(range(NODES)).rule
        message = Server.of(torch.nn.Linear(2, 2), rule).dispatch(0).message
        expected[type(rule).__name__] = not (any(extra_fields(rule)) or message.tensors or message.numbers)
    assert found == expected | {'OrthoFL(protocol="client")': False}
