"""The expiry of tickets and the release of versions that no ticket can use."""

import pytest
import torch

from manifoldagg.federated import Durability, Payload, Server, UpdateLimits
from manifoldagg.federated.rules import FedAsync
from manifoldagg.manifolds import Flat
from tests.federated.server.durability.scripted_run import Wall
from tests.server_options import grouped

SPACE = Flat(4)


def payload(value=1.0):
    return Payload(torch.full((1, 4), value), 1)


def server(**options):
    return Server(SPACE, FedAsync(0.5), torch.zeros(4), **grouped(**options))


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
        s = Server.resume(tmp_path / "server", SPACE, FedAsync(0.5), clock=wall, **grouped(**files))
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


@pytest.mark.parametrize("base_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("most", [0, 2])
def test_a_version_is_released_when_no_ticket_on_it_can_be_accepted(tmp_path, most, base_dtype):
    s = server(max_staleness=most, base_dtype=base_dtype, journal=tmp_path / "lines")
    lost = [s.dispatch("a")]
    for _ in range(10):
        lost.append(s.dispatch("b"))
        s.receive(s.dispatch("c"), payload()).check()
        # The current model, and the bases of the versions that may still be accepted.
        assert len(s._state.value.store.entries) <= 1 + most + (base_dtype is not None)
    assert len(s.tickets) == 11
    s.drop(lost[2])
    assert s.receive(lost[0], payload()).reason == f"staleness: expected at most {most}, got 10"
    tickets = s.tickets
    s.close()
    s = Server.resume(tmp_path / "server", SPACE, FedAsync(0.5), durability=Durability(journal=tmp_path / "lines"))
    assert s.tickets == tickets
    assert len(s._state.value.store.entries) <= 1 + most + (base_dtype is not None)
    assert s.receive(lost[1], payload()).reason == f"staleness: expected at most {most}, got 10"


@pytest.mark.parametrize(("most", "accepted"), [(None, [False, False, True]), (0, [False, False, False])])
def test_a_released_version_stays_released_if_the_limit_changes(tmp_path, most, accepted):
    s = server(max_staleness=1)
    tickets = []
    for _ in range(3):
        tickets.append(s.dispatch("a"))
        s.receive(s.dispatch("b"), payload()).check()
    s.save(tmp_path / "server")
    s = Server.resume(tmp_path / "server", SPACE, FedAsync(0.5), limits=UpdateLimits(max_staleness=most))
    assert len(s._state.value.store.entries) == 1 + sum(accepted)
    receipts = [s.receive(ticket, payload()) for ticket in tickets]
    assert [receipt.accepted for receipt in receipts] == accepted
    assert [receipt.reason.split(":")[0] for receipt in receipts if not receipt.accepted] == (
        ["staleness"] * (3 - sum(accepted))
    )
    assert s.tickets == []


def test_a_ticket_that_was_stale_when_it_was_issued_retains_no_version():
    class Overtaken(FedAsync):
        """Rule that changes the model while the first message is created."""

        def message(self, *given):
            if racing:
                racing.pop()
                s.receive(s.dispatch("b"), payload()).check()
            return super().message(*given)

    racing = []
    s = Server(SPACE, Overtaken(0.5), torch.zeros(4), limits=UpdateLimits(max_staleness=0))
    racing.append(True)
    late = s.dispatch("a")
    assert list(s._state.value.store.entries) == [("version", 1)]
    assert s.receive(late, payload()).reason == "staleness: expected at most 0, got 1"
