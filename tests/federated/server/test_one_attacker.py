"""Tests of how far one attacker moves the model, for each kind of rule: the bounds of the guide hold and are attained."""

import math

import pytest
import torch

from manifoldagg.federated import Payload, Server, ServerLimits, Update, UpdateLimits
from manifoldagg.federated.rules import (
    ACE,
    ASGD,
    CA2FL,
    DCASGD,
    AsyncBezier,
    AsyncFedED,
    AsyncKrylov,
    FedAdam,
    FedAsync,
    FedAvg,
    FedBuff,
    FedGS,
    FedOrtho,
    Krum,
    Median,
    Momentum,
    Private,
    TrimmedMean,
)
from manifoldagg.manifolds import Flat

SPACE = Flat(4)
DRIFT = torch.tensor([0.0, 3.0, 0.0, 4.0], dtype=torch.float64)
ACROSS = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
ALONG = DRIFT / 5
WEIGHT = 0.1
BASE = torch.ones(4, dtype=torch.float64)


def moved(rule, direction, length, update_limits=None, others=0):
    """Return the movement of the model by the update of the attacker.

    The attacker is the first client. The other clients send zero updates.
    """
    current = BASE + DRIFT
    state = rule.init(SPACE, current)
    for i in range(others + 1):
        points = (BASE + (length * direction if i == 0 else 0.0))[None]
        update = Update(i, BASE, current, points, weight=WEIGHT, staleness=1)
        if update_limits is not None:
            update, _, _ = update_limits.apply(SPACE, update, ())
        state, outcome = rule.step(SPACE, state, update)
    return (outcome.model - current).norm().item()


def dcasgd(r):
    """Return the bound for two entries, each of which moves by r + r^2 |g|.

    The two terms have the same sign where v opposes the drift.
    """
    entry = r / math.sqrt(2)
    return 2 * WEIGHT * math.hypot(*(entry + 0.1 * entry**2 * size for size in (3.0, 4.0)))


BOUNDS = {
    "FedAsync": (FedAsync(0.5), -ALONG, 0, lambda r: 0.5 * (r + 5)),
    "ASGD": (ASGD(2.0), -ALONG, 0, lambda r: 2 * WEIGHT * r),
    "FedOrtho": (FedOrtho(2.0), ACROSS, 0, lambda r: 2 * WEIGHT * r),
    "FedOrtho, along the drift": (FedOrtho(2.0), -ALONG, 0, lambda r: 0.0),
    "AsyncBezier": (AsyncBezier(threshold=1.0, rate=2.0), ACROSS, 0, lambda r: 2 * WEIGHT * r),
    "AsyncKrylov": (AsyncKrylov(2.0), -ALONG, 0, lambda r: 2 * WEIGHT * r),
    "FedGS": (FedGS(2.0), ALONG, 0, lambda r: 2 * WEIGHT * r),
    "DCASGD": (DCASGD(2.0, variant="constant", strength=0.1), -ALONG.sign() / math.sqrt(2), 0, dcasgd),
    "AsyncFedED": (AsyncFedED(warm_up=0), ACROSS, 0, lambda r: r**2 / (5 + r)),
    "FedBuff": (FedBuff(4, 0.5, staleness=lambda late: 0.5), -ALONG, 3, lambda r: 0.5 * 0.5 * r / 4),
    "FedAvg": (FedAvg(4, 0.5), -ALONG, 3, lambda r: 0.5 * r / 4),
    "CA2FL": (CA2FL(4, 0.5, clients=10), -ALONG, 3, lambda r: 0.5 * r / 4),
    "ACE": (ACE(0.5, clients=10), -ALONG, 0, lambda r: 0.5 * r / 10),
    "Median": (Median(5), -ALONG, 4, lambda r: 0.0),
    "TrimmedMean": (TrimmedMean(5, trim=1), -ALONG, 4, lambda r: 0.0),
    "Krum": (Krum(5, num_byzantine=1), -ALONG, 4, lambda r: 0.0),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_one_attacker_moves_the_model_by_the_documented_bound(name):
    rule, direction, others, bound = BOUNDS[name]
    for length in (1e-2, 1.0, 4.0):
        assert moved(rule, direction, length, None, others) == pytest.approx(bound(length), rel=1e-9, abs=1e-12)
        clipped = moved(rule, direction, length, UpdateLimits(clip=0.5), others)
        assert clipped == pytest.approx(bound(min(length, 0.5)), rel=1e-9, abs=1e-12)
    # A clip holds whatever was sent.
    assert moved(rule, direction, 1e9, UpdateLimits(clip=0.5), others) == pytest.approx(bound(0.5), rel=1e-6, abs=1e-12)


def serve(rule, honest=9, **options):
    """Return a server that has received updates of length 1 with 100 samples from honest clients."""
    server = Server(SPACE, rule, torch.zeros(4), **options)
    for i in range(honest):
        assert send(server, f"ward-{i}", 1.0, 100).accepted
    return server


def send(server, client, length, samples=100):
    ticket = server.dispatch(client)
    return server.receive(ticket, Payload(ticket.message.start + length * ACROSS.float()[None], samples))


LIMITS = {
    "clip": (UpdateLimits(clip=0.5), 0.5, True),
    "max_norm": (UpdateLimits(max_norm=2.0), 2.0, False),
    "clip_factor": (UpdateLimits(clip_factor=1.5), 1.5, True),
    "norm_factor": (UpdateLimits(norm_factor=3.0), 3.0, False),
}


@pytest.mark.parametrize("colluders", [1, 4])
@pytest.mark.parametrize("name", LIMITS)
def test_limits_bound_each_update_of_a_minority(name, colluders):
    """Table of the guide: n colluding clients move the model by at most n times the movement of one client."""
    limits, bound, clips = LIMITS[name]
    server = serve(ASGD(1.0), weights="uniform", limits=limits)
    before = server.model
    for i in range(colluders):
        assert send(server, f"liar-{i}", 1e9).accepted == clips
        send(server, f"liar-{i}", 0.999 * bound)
    steps = [1 / (9 + i + 1) for i in range(colluders)]  # the weight of each
    moved = (server.model - before).norm().item()
    assert 0.9 * bound * sum(steps) <= moved <= bound * sum(steps) * (1 + clips)


@pytest.mark.parametrize("colluders", [1, 4])
def test_sample_cap_bounds_the_weight_of_a_minority(colluders):
    server = serve(ASGD(1.0))
    for _ in range(2):
        receipts = [send(server, f"liar-{i}", 1.0, 10**9) for i in range(colluders)]
    total = 100 * colluders + 9
    assert sum(receipt.weight for receipt in receipts) == pytest.approx(100 * colluders / total)


@pytest.mark.parametrize("colluders", [1, 3])
def test_buffer_divides_the_influence_of_attacker_by_its_size(colluders):
    server = Server(
        SPACE, FedBuff(4, 0.5), torch.zeros(4), weights="uniform", limits=ServerLimits(UpdateLimits(clip=2.0))
    )
    for i in range(colluders):
        send(server, f"liar-{i}", 1e9)
    for i in range(4 - colluders):
        send(server, f"ward-{i}", 0.0)
    assert server.model.norm().item() == pytest.approx(0.5 * 2.0 * colluders / 4, rel=1e-5)


@pytest.mark.parametrize("colluders", [1, 2])
def test_private_bounds_the_influence_of_each_client(colluders):
    server = Server(SPACE, Private(FedBuff(4, 0.5), 2.0, 0.0), torch.zeros(4))
    for i in range(colluders):
        send(server, f"liar-{i}", 1e9)
    for i in range(4 - colluders):
        send(server, f"ward-{i}", 0.0)
    assert server.model.norm().item() == pytest.approx(0.5 * 2.0 * colluders / 4, rel=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_repeats_the_update_of_an_attacker(nesterov):
    server = Server(SPACE, Momentum(ASGD(1.0), 0.5, nesterov=nesterov), torch.zeros(4), weights={"a": 1})
    send(server, "a", 1.0)
    for _ in range(40):
        send(server, "a", 0.0)
    assert server.model.norm().item() == pytest.approx(2.0)


def test_fedadam_bounds_each_entry_and_keeps_the_squared_update():
    rule = FedAdam(1, 0.01)
    limit = 0.01 * (1 - rule.beta1) / math.sqrt(1 - rule.beta2)
    assert moved(rule, ACROSS, 1e6) == pytest.approx(limit, rel=1e-6)
    # Nobody else moves this entry for long.
    state = rule.init(SPACE, BASE)
    state, _ = rule.step(SPACE, state, Update(0, BASE, BASE, (BASE + 1e6 * ACROSS)[None]))
    state = {**state, "m": torch.zeros(4, dtype=torch.float64)}
    _, outcome = rule.step(SPACE, state, Update(1, BASE, BASE, (BASE + ACROSS)[None]))
    assert (outcome.model - BASE).norm() < 1e-7


def test_ca2fl_reuses_the_update_of_an_attacker_until_its_next_update():
    rule = CA2FL(1, 0.5, clients=10)
    state = rule.init(SPACE, BASE)
    state, _ = rule.step(SPACE, state, Update("liar", BASE, BASE, (BASE + 1e3 * ACROSS)[None]))
    for i in range(3):
        state, outcome = rule.step(SPACE, state, Update(i, BASE, BASE, BASE[None]))
        assert (outcome.model - BASE).norm().item() == pytest.approx(0.5 * 1e3 / 10)


def test_base_sent_by_the_client_defeats_clipping():
    """The clipped length is relative to the base. With a forged base, FedAsync moves to any model of the attacker."""
    current = BASE + DRIFT
    far = BASE + 1e6 * ACROSS
    update, kept, _ = UpdateLimits(clip=0.5).apply(SPACE, Update("liar", far, current, far[None]), ())
    assert kept == 1.0
    rule = FedAsync(0.5)
    _, outcome = rule.step(SPACE, rule.init(SPACE, current), update)
    assert (outcome.model - current).norm() > 4e5


def test_small_malicious_updates_accumulate_below_the_clip():
    rule, model = FedAsync(0.5), BASE
    for _ in range(100):
        update, kept, _ = UpdateLimits(clip=0.5).apply(
            SPACE, Update("liar", model, model, (model + 0.5 * ACROSS)[None]), ()
        )
        assert kept == 1.0
        _, outcome = rule.step(SPACE, rule.init(SPACE, model), update)
        model = outcome.model
    assert (model - BASE).norm().item() == pytest.approx(100 * 0.25)
