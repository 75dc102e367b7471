"""Models in narrow dtypes: a step is rejected if clients could not receive the new model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg import Server, aggregate
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Payload
from manifoldagg.federated.rules import (
    ACE,
    ASGD,
    CA2FL,
    FADAS,
    AsyncBezier,
    AsyncKrylov,
    DelayedNesterov,
    FedAdam,
    FedAsync,
    FedBuff,
    FedOrtho,
    HeLoCo,
    Median,
    Momentum,
    RadialDirectional,
)
from manifoldagg.manifolds import ParameterSpace

pytestmark = pytest.mark.filterwarnings("ignore::manifoldagg.errors.StabilityWarning")
RULES = {
    "FedAsync": FedAsync(0.5),
    "ASGD": ASGD(1.0),
    "FedOrtho": FedOrtho(1.0),
    "AsyncBezier": AsyncBezier(threshold=1.0, rate=1.0),
    "AsyncKrylov": AsyncKrylov(1.0),
    "FedBuff": FedBuff(1),
    "FedBuff of two": FedBuff(2),
    "FedBuff of two, with a high rate": FedBuff(2, 100.0),
    "FedAdam": FedAdam(1, 1e-2),
    "FADAS": FADAS(2, 1e-2),
    "CA2FL": CA2FL(2, 100.0, clients=3),
    "ACE": ACE(100.0, clients=3),
    "Median": Median(1),
    "Momentum": Momentum(ASGD(1.0)),
    "HeLoCo": HeLoCo(),
    "DelayedNesterov": DelayedNesterov(1),
}
DTYPES = [torch.float16, torch.bfloat16, torch.float8_e5m2]


def serve(rule, dtype, width=4):
    state = {"weight": torch.zeros(width, dtype=dtype), "bias": torch.zeros(2)}
    space = ParameterSpace.of_state_dict(state)
    return Server(space, rule, space.point(state))


def beyond(dtype):
    """Return a float32 number that the dtype cannot represent."""
    return 3.4e38 if dtype is torch.bfloat16 else 4 * torch.finfo(dtype).max


def send(server, client, move):
    ticket = server.dispatch(client)
    ticket.state_dict()
    return server.receive(ticket, Payload((ticket.message.start + move)[None], 10))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_update_that_overflows_the_client_dtype_is_rejected(name, dtype):
    server = serve(RULES[name], dtype)
    move = torch.zeros(6)
    move[1] = beyond(dtype)
    receipt = send(server, "attacker", move)
    assert receipt.accepted or receipt.reason.startswith("points: ")
    server.state_dict()
    honest = [send(server, f"ward-{i}", torch.full((6,), 1e-3)) for i in range(4)]
    assert [receipt.reason for receipt in honest] == [""] * 4
    assert all(tensor.isfinite().all() for tensor in map(torch.Tensor.float, server.state_dict().values()))


@pytest.mark.parametrize("size", [2, 3])
def test_buffered_update_does_not_block_later_updates(size):
    """Each buffered update leaves enough range for the updates of other clients."""
    server = serve(FedBuff(size, 100.0), torch.float16)
    move = torch.zeros(6)
    move[1] = 6e4
    assert not send(server, "attacker", move).accepted
    move[1] = 500.0
    send(server, "attacker", move)
    for i in range(2 * size):
        assert send(server, f"ward-{i}", -torch.full((6,), 1e-3)).accepted
        server.state_dict()


def test_sum_of_steps_is_limited_by_the_largest_number_of_the_dtype():
    server = serve(ASGD(1.0), torch.float16)
    receipts = [send(server, "attacker", torch.full((6,), 2e4)) for _ in range(5)]
    assert [receipt.accepted for receipt in receipts] == [True] * 3 + [False] * 2
    assert receipts[3].reason.endswith("weight: expected values in the range of torch.float16, got an overflow")
    assert server.state_dict()["weight"].max() == 6e4
    assert send(server, "ward", torch.full((6,), -1.0)).accepted


def test_leaves_in_master_dtype_use_its_full_range():
    server = serve(ASGD(1.0), torch.float16)
    move = torch.zeros(6)
    move[-1] = 1e6
    assert send(server, "a", move).accepted
    assert server.state_dict()["bias"][1] == 1e6


def test_float32_leaves_of_float64_point_are_checked():
    state = {"weight": torch.zeros(2), "scale": torch.zeros(1, dtype=torch.float64)}
    space = ParameterSpace.of_state_dict(state)
    server = Server(space, ASGD(1.0), space.point(state))
    move = torch.tensor([1e39, 0.0, 0.0], dtype=torch.float64)
    assert not send(server, "a", move).accepted
    assert send(server, "a", move.flip(0)).accepted
    assert server.state_dict()["scale"].item() == 1e39


@pytest.mark.parametrize("rule", [ASGD(1.0), FedAdam(1, 1e6)])
def test_aggregate_rejects_the_same_updates_as_server(rule):
    model, far = ({"weight": torch.full((2,), x, dtype=torch.float16)} for x in (0.0, 6e4))
    out = {"weight": torch.zeros(2, dtype=torch.float16)}
    with pytest.raises(ArgumentError, match="update: the new model (would not be finite in|could not be sent)"):
        aggregate(rule, None, far, model, far, out=out)
    assert not out["weight"].any()


@pytest.mark.parametrize(
    "rule",
    [
        FedBuff(3, 10.0),
        RadialDirectional(2, 3.0),
        Median(3, 10.0),
        Momentum(ASGD(1.0)),
        Momentum(FedBuff(2, 2.0), nesterov=True),
        HeLoCo(),
        HeLoCo(look_ahead=False),
        DelayedNesterov(3, activation=0.1),
        DelayedNesterov(1),
    ],
    ids=repr,
)
@settings(max_examples=25)
@given(st.floats(10, 6.5e4), st.sampled_from([1.0, -1.0]))
def test_stored_update_does_not_block_later_updates(rule, size, sign):
    """Buffered updates and momenta move the model later. They are rejected if the model would then overflow."""
    server = serve(rule, torch.float16)
    move = torch.zeros(6)
    move[1] = sign * size
    send(server, "attacker", move)
    for i in range(12):
        receipt = send(server, i, torch.zeros(6))
        assert receipt.reason == ""
        server.state_dict()


def test_directions_that_partly_cancel_do_not_block_later_updates():
    """The mean of two directions is short, but the step of `RadialDirectional` has the mean norm of both updates."""
    state = {"weight": torch.zeros(64, dtype=torch.float16)}
    space = ParameterSpace.of_state_dict(state)
    server = Server(space, RadialDirectional(3), space.point(state))
    first = torch.eye(64)[0]
    assert send(server, "a", torch.full((64,), 2e4)).accepted
    assert not send(server, "b", 2e4 * (2 * first - 1)).accepted
    for client in range(6):
        assert send(server, client, torch.zeros(64)).reason == ""
    assert space.state_dict(server.model)["weight"].isfinite().all()


def test_radial_directional_accepts_long_updates_with_small_entries():
    """The bound of the next step is computed for each tensor, so that a long tensor does not limit the others."""
    state = {"a": torch.zeros(10_000), "b": torch.zeros(4, dtype=torch.float16), "c": torch.zeros(10_000).half()}
    space = ParameterSpace.of_state_dict(state)
    server = Server(space, RadialDirectional(3), space.point(state))
    move = torch.cat([torch.full((10_000,), 1e3), torch.ones(4), torch.full((10_000,), 1e4)])
    for client in range(6):
        assert send(server, client, move).accepted
    assert space.state_dict(server.model)["c"].max() == 2e4
