"""What the guide tells of Flower is so."""

import re
from pathlib import Path

import torch

from manifoldagg.federated import Server
from manifoldagg.federated.contract import extras
from manifoldagg.simulation.methods import RULES, method

ROOT = Path(__file__).parents[2]
NODES = 4


def test_the_guide_tells_which_rules_take_an_app_of_ones_own():
    """Those that neither ask for more than a model, nor send more."""
    guide = (ROOT / "docs/guide/flower.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| (yes|no|with)\b", guide, flags=re.M)
    found = {name: answer == "yes" for names, answer in rows for name in re.findall(r"`(?:rules\.)?([^`]*)`", names)}
    expected = {}
    for name in RULES:
        rule = method(name).bound(range(NODES)).rule
        message = Server.of(torch.nn.Linear(2, 2), rule).dispatch(0).message
        expected[type(rule).__name__] = not (any(extras(rule)) or message.tensors or message.numbers)
    assert found == expected | {'OrthoFL(protocol="client")': False}
