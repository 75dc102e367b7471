"""Tests of receipts: JSON can represent them, and `check` raises the reason of a rejection."""

import json
import math

import numpy as np
import pytest
import torch

from manifoldagg.errors import ArgumentError, BusyError
from manifoldagg.federated import Payload, Receipt, Server
from manifoldagg.federated.rules import FedAsync, FedBuff
from manifoldagg.federated.server.lock import PendingUpdate
from manifoldagg.federated.weights import check_client
from manifoldagg.manifolds import Flat
from tests.federated.fingerprint import Adds
from tests.server_options import grouped

NAN, INF = math.nan, math.inf


def server(rule=None, **options):
    return Server(Flat(2), Adds() if rule is None else rule, torch.zeros(2), **grouped(**options))


def payload(value=1.0):
    return Payload(torch.full((1, 2), value), 1)


def receipts():
    """Return one receipt of each kind: accepted, buffered, accepted with a drift, and rejected."""
    s = server(FedAsync())
    stale = s.dispatch("a")
    yield s.receive(s.dispatch("a"), payload())
    yield s.receive(stale, payload(NAN))
    yield s.receive(stale, payload())
    yield s.receive(stale, payload())
    yield s.receive("of my own making", payload())
    s = server(FedBuff(2))
    yield s.receive(s.dispatch("a"), payload())


def test_every_receipt_is_json_serialisable():
    for receipt in receipts():
        table = receipt.asdict()
        assert json.loads(json.dumps(table, allow_nan=False)) == table
        assert list(table) == list(vars(receipt))
        assert Receipt(**{name: NAN if x is None else x for name, x in table.items()}).asdict() == table


@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_asdict_replaces_numbers_that_are_not_finite_by_none(number):
    table = Receipt(True, "", 1, weight=number, cosine=number, step=0.5, norm=number).asdict()
    assert {name for name, x in table.items() if x is None} == {"weight", "cosine", "norm"}
    assert table["step"] == 0.5


@pytest.mark.usefixtures("as_shipped")
def test_check_of_receipt_raises_the_reason_of_the_rejection():
    for receipt in receipts():
        if receipt.accepted:
            assert receipt.check() is receipt
            continue
        with pytest.raises(ArgumentError) as error:
            receipt.check()
        assert str(error.value) == receipt.reason


def test_receipt_reports_a_busy_server():
    s = server(max_queued_updates=0)
    ticket = s.dispatch("a")
    another = PendingUpdate("of another thread")
    another.thread = -1
    with another.alive_lock:
        s._updates.lock.register(another)
        s._updates.lock.enqueue(another)
        receipt = s.receive(ticket, payload())
    assert not receipt.accepted
    with pytest.raises(BusyError, match="server: busy: 1 queued updates, max_queued_updates=0"):
        receipt.check()
    # It was interrupted before it could go.
    assert s.receive(ticket, payload()).check().accepted
    s = server(max_in_flight=1)
    s.dispatch("a")
    with pytest.raises(BusyError, match="server: busy: "):
        s.dispatch("b")


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("client", [torch.tensor(1), float("nan"), np.ones(2), ["a"]])
def test_receive_rejects_client_with_invalid_name(client):
    s = server()
    ticket = s.dispatch("a")
    receipt = s.receive(ticket, payload(), client=client)
    with pytest.raises(ArgumentError) as error:
        check_client(client)
    assert receipt.reason == str(error.value)
    assert s.receive(ticket, payload(), client="a").accepted
