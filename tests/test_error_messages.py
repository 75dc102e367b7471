"""The fifteen likeliest mistakes, and word for word what is said of each: in the tests, and on the page of errors."""

import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from manifoldagg import Server, aggregate
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


def trained(wrapped=""):
    """What a client returns: a state dict, perhaps of a wrapped module."""
    return {wrapped + name: tensor + 0.01 for name, tensor in net().state_dict().items()}


def step(update, rule=RULE):
    model = net().state_dict()
    return aggregate(rule, None, model, model, update)


def answered(model):
    """The refusal of a state dict."""
    server = Server.of(net(), RULE)
    return server.receive_model(server.dispatch("ward-7"), model, samples=10).check()


def paid(points):
    """The refusal of a payload's points."""
    server = Server.of(net(), RULE)
    return server.receive(server.dispatch("ward-7"), Payload(points, samples=10)).check()


def twice():
    server = Server.of(net(), RULE)
    ticket = server.dispatch("ward-7")
    server.drop(ticket)
    server.receive_model(ticket, trained(), samples=10).check()


INTEGERS = {"w": torch.ones(3, dtype=torch.int64)}
MISTAKES = {
    "a difference for a model": lambda: step({name: torch.full_like(x, 1e-3) for name, x in trained().items()}),
    "a rule by its name": lambda: step(trained(), "fedasync"),
    "a class for a rule": lambda: step(trained(), FedAsync),
    "DataParallel": lambda: step(trained("module.")),
    "torch.compile": lambda: step(trained("_orig_mod.")),
    "a module for a state dict": lambda: answered(net()),
    "a module for a space": lambda: Server(net(), RULE, torch.zeros(72)),
    "a state dict for a point": lambda: Server(ParameterSpace.of(net()), RULE, net().state_dict()),
    "an empty model": lambda: Server.of(nn.ReLU(), RULE),
    "integer parameters": lambda: aggregate(RULE, None, INTEGERS, INTEGERS, INTEGERS),
    "one vector for points": lambda: paid(torch.zeros(72)),
    "float64 from NumPy": lambda: paid(torch.zeros(1, 72).double()),
    "a client that diverged": lambda: answered({**trained(), "bias": torch.full((8,), torch.nan)}),
    "an old ticket": twice,
    "plots without matplotlib": new_figure,
}


def said(mistake):
    """The error or the warning, as it is printed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            MISTAKES[mistake]()
        except ManifoldAggError as error:
            return f"{type(error).__name__}: {error}"
    (warning,) = caught
    return f"{warning.category.__name__}: {warning.message}"


def page():
    """Below each heading of the page, the message."""
    return dict(re.findall(r"^## (.*?)\n\n```text\n(.*?)\n```\n", PAGE.read_text(), flags=re.M | re.S))


def test_the_page_has_them_all():
    assert list(page()) == list(MISTAKES)
    assert len(MISTAKES) == 15


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_word_for_word(mistake, monkeypatch):
    if "matplotlib" in mistake:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert said(mistake) == page()[mistake]


@pytest.mark.usefixtures("as_shipped")
def test_what_a_name_is_like_is_named_if_it_is_like_any():
    for name, hint in (("FedBuf", ": did you mean rules.FedBuff(...)?"), ("gravity", "")):
        with pytest.raises(ManifoldAggError, match=re.escape(f"got {name!r}{hint}") + "$"):
            step(trained(), name)
