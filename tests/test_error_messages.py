"""Tests of messages for the most common mistakes: the page of common errors quotes each message exactly."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from manifoldagg import AsyncAggregator, Server, UpdateInfo, aggregate
from manifoldagg._io import new_figure
from manifoldagg.errors import ManifoldAggError
from manifoldagg.federated import Payload
from manifoldagg.federated.rules import FedAsync
from manifoldagg.manifolds import ParameterSpace

PAGE = Path(__file__).parent.parent / "docs/guide/errors.md"
RULE = FedAsync(0.5)


def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(8, 8)


def batch_norm_net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))


def trained(wrapped=""):
    """Return a client's state dict; a wrapper of the module prefixes its names."""
    return {wrapped + name: tensor + 0.01 for name, tensor in net().state_dict().items()}


def batch_norm_difference():
    """Return the difference of a model with batch normalisation. The running variance has decreased."""
    base = batch_norm_net().state_dict()
    return {name: -1e-3 * torch.ones_like(x) if x.is_floating_point() else x for name, x in base.items()}


def step(update, rule=RULE):
    model = net().state_dict()
    return aggregate(rule, None, model, model, update)


def receive_state_dict(model):
    """Raise the reason why a server rejects a state dict."""
    server = Server.of(net(), RULE)
    return server.receive_model(server.dispatch("ward-7"), model, samples=10).check()


def receive_points(points):
    """Raise the reason why a server rejects the points of a payload."""
    server = Server.of(net(), RULE)
    return server.receive(server.dispatch("ward-7"), Payload(points, samples=10)).check()


def receive_dropped_ticket():
    server = Server.of(net(), RULE)
    ticket = server.dispatch("ward-7")
    server.drop(ticket)
    server.receive_model(ticket, trained(), samples=10).check()


def flower_strategy(name, base=object):
    """Return an instance of a class that looks like a strategy of Flower, which may not be installed."""
    strategy = type("Strategy", (base,), {"__module__": "flwr.serverapp.strategy.strategy"})
    return type(name, (strategy,), {"__module__": "flwr.serverapp.strategy.fedavg"})()


INTEGERS = {"w": torch.ones(3, dtype=torch.int64)}
BATCH_NORM = batch_norm_net().state_dict()
MISTAKES = {
    "Difference instead of a model": lambda: step({name: torch.full_like(x, 1e-3) for name, x in trained().items()}),
    "Difference with a negative variance": lambda: aggregate(
        RULE, None, BATCH_NORM, BATCH_NORM, batch_norm_difference()
    ),
    "Sample count instead of a weight": lambda: aggregate(
        RULE, None, *[net().state_dict()] * 2, trained(), info=UpdateInfo(weight=100)
    ),
    "Exchanged arguments": lambda: AsyncAggregator(net(), RULE),
    "Name instead of a rule": lambda: step(trained(), "fedasync"),
    "Class instead of a rule": lambda: step(trained(), FedAsync),
    "Flower strategy instead of a rule": lambda: step(trained(), flower_strategy("FedAvg")),
    "Misspelled option": lambda: FedAsync(0.5, stalenes=3),
    "Rate above 1": lambda: FedAsync(rate=3.0),
    "Client of another type": lambda: Server.of(net(), RULE, weights={"1": 10}).dispatch(1),
    "DataParallel": lambda: step(trained("module.")),
    "torch.compile": lambda: step(trained("_orig_mod.")),
    "Module instead of a state dict": lambda: receive_state_dict(net()),
    "Module instead of a space": lambda: Server(net(), RULE, torch.zeros(72)),
    "State dict instead of a point": lambda: Server(ParameterSpace.of(net()), RULE, net().state_dict()),
    "Empty model": lambda: Server.of(nn.ReLU(), RULE),
    "Integer parameters": lambda: aggregate(RULE, None, INTEGERS, INTEGERS, INTEGERS),
    "Single vector instead of points": lambda: receive_points(torch.zeros(72)),
    "float64 from NumPy": lambda: receive_points(torch.zeros(1, 72).double()),
    "Diverged client": lambda: receive_state_dict({**trained(), "bias": torch.full((8,), torch.nan)}),
    "Old ticket": receive_dropped_ticket,
    "Plots without matplotlib": new_figure,
}


def message_of(mistake):
    """Return the error or the warning of a mistake, as Python prints it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            MISTAKES[mistake]()
        except (ManifoldAggError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
    (warning,) = caught
    return f"{warning.category.__name__}: {warning.message}"


def page():
    """Return the message below each heading of the page."""
    return dict(re.findall(r"^## (.*)\n\n```text\n(.*)\n```\n", PAGE.read_text(), flags=re.M))


def test_errors_page_lists_all_mistakes():
    assert list(page()) == list(MISTAKES)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_page_quotes_each_message_exactly(mistake, monkeypatch):
    if "matplotlib" in mistake:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert message_of(mistake) == page()[mistake]


WARNS = """
import warnings
import torch
from torch import nn
from manifoldagg import AsyncAggregator, Server, UpdateInfo, aggregate
from manifoldagg.federated.rules import FedAsync

torch.manual_seed(0)
model = nn.Linear(8, 8)
base = model.state_dict()
short = {name: torch.full_like(x, 1e-3) for name, x in base.items()}
aggregator = AsyncAggregator(FedAsync(0.5), base)
aggregator.checkout("a")
server = Server.of(model, FedAsync(0.5))
ticket = server.dispatch("a")
warnings.simplefilter("always")
aggregate(FedAsync(0.5), None, base, base, short)  # warns
aggregate(FedAsync(0.5), None, base, base, base, info=UpdateInfo(weight=100))  # warns
aggregator.submit("a", short, samples=1)  # warns
server.receive_model(ticket, short, samples=1)  # warns
Server.of({"q.lora_A.weight": torch.ones(1, 3), "q.lora_B.weight": torch.ones(2, 1)}, FedAsync(0.5))  # warns
"""


def test_warnings_point_to_the_line_of_the_caller(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WARNS)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=120)
    lines = [int(line) for line in re.findall(rf"^{re.escape(str(script))}:(\d+): UserWarning: ", done.stderr, re.M)]
    assert lines == [i for i, line in enumerate(WARNS.splitlines(), 1) if line.endswith("# warns")]


@pytest.mark.usefixtures("as_shipped")
def test_error_for_a_rule_name_suggests_the_closest_class():
    for name, hint in (("FedBuf", "; did you mean rules.FedBuff(...)?"), ("gravity", "")):
        with pytest.raises(ManifoldAggError, match=re.escape(f"got {name!r}{hint}") + "$"):
            step(trained(), name)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("FedAvg", "manifoldagg.federated.rules.FedAvg"),
        ("FedAdam", "manifoldagg.federated.rules.FedAdam"),
        ("Krum", "manifoldagg.federated.rules.Krum"),
        ("FedMedian", "manifoldagg.federated.rules.Median"),
        ("FedAvgM", "manifoldagg.federated.rules.Momentum"),
        ("FedXgbBagging", "a rule from the table in docs/guide/rules.md"),
    ],
)
def test_error_for_a_flower_strategy_suggests_a_rule(name, instead):
    with pytest.raises(ManifoldAggError) as caught:
        Server.of(net(), flower_strategy(name))
    assert str(caught.value) == (
        f"rule: expected a rule of manifoldagg.federated.rules, got Flower's strategy {name}; use {instead}"
    )


@pytest.mark.usefixtures("as_shipped")
def test_strategies_of_the_installed_flower_are_recognised():
    strategies = pytest.importorskip("flwr.serverapp.strategy")
    with pytest.raises(ManifoldAggError, match=r"Flower's strategy FedAvg; use manifoldagg\.federated\.rules\.FedAvg$"):
        Server.of(net(), strategies.FedAvg())
