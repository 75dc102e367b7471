"""The expiry of tickets and the release of versions that no ticket can use."""

import pytest
import torch

from manifoldagg.federated import Payload, Server
from manifoldagg.federated.rules import FedAsync
from manifoldagg.manifolds import Flat
from tests.federated.server.durability.scripted_run import Wall

SPACE = Flat(4)


def payload(value=1.0):
    return Payload(torch.full((1, 4), value), 1)


def server(**options):
    return Server(SPACE, FedAsync(0.5), torch.zeros(4), **options)


@pytest.mark.parametrize("stored", ["running", "checkpoint", "journal"])
def test_a_clock_that_was_ahead_does_not_keep_later_tickets_open(tmp_path, stored):
    wall = Wall(10_000.0)
    files = {"journal": tmp_path / "lines"} if stored == "journal" else {}
    s = server(timeout=10.0, clock=wall, **files)
    ahead = s.dispatch("a").id
    wall.now = 100.0
    early = s.dispatch("b").id
    wall.now = 105.0
    late = s.dispatch("c").id
    if stored != "running":
        if stored == "checkpoint":
            s.save(tmp_path / "server")
        s.close()
        s = Server.resume(tmp_path / "server", SPACE, FedAsync(0.5), clock=wall, **files)
    assert s.expire() == []
    wall.now = 110.5
    assert s.expire() == [ahead, early]
    assert s.tickets == [late]
    wall.now = 115.5
    assert s.expire() == [late]


def test_a_clock_that_was_ahead_at_a_checkpoint_does_not_keep_later_tickets_open(tmp_path):
    wall = Wall(10_000.0)
    s = server(timeout=10.0, clock=wall)
    ahead = s.dispatch("a").id
    wall.now = 100.0
    s.save(tmp_path / "server")
    s = Server.resume(tmp_path / "server", SPACE, FedAsync(0.5), clock=wall)
    wall.now = 99.0
    late = s.dispatch("b").id
    wall.now = 109.5
    assert s.expire() == [ahead, late]
