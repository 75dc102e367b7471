"""Tests of update limits: clipping, and rejection by norm or direction."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.corrections.transport import Transporter
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import MemoryPolicy, Payload, Server, ServerLimits, Update, UpdateLimits
from manifoldagg.federated.limits import clip_update, update_norm
from manifoldagg.federated.rules import AsyncBezier, FedAsync, FedBuff, FedOrtho
from manifoldagg.manifolds import Flat, Lorentz, LowRank, Product, Sphere, SymmetricPositiveDefinite
from tests.support import draw, relative, seeds

RULES = {"FedAsync": FedAsync(0.7), "FedOrtho": FedOrtho(0.7), "AsyncBezier": AsyncBezier(0.5), "FedBuff": FedBuff(2)}
P = 7


def life(rule, updates, update_limits=None, count=1):
    """Return the receipts of updates with staleness 2, and the server."""
    server = Server(Flat(P), rule, torch.zeros(P), weights="uniform", limits=update_limits or ServerLimits())
    tickets = [server.dispatch(i) for i in range(3)]
    receipts = []
    for i, make in enumerate(updates):
        ticket = tickets.pop(0)
        receipts.append(server.receive(ticket.id, Payload(make(ticket.message.start), 1)))
        tickets.append(server.dispatch(i + 3))
    return receipts, server


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=3)
@given(seeds, st.floats(-2, 2))
def test_rule_receives_only_the_clipped_update(name, seed, exponent):
    count, limit = (2 if name == "AsyncBezier" else 1), 10.0**exponent
    moves = [draw(seed + i, count, P, dtype=torch.float32, scale=3.0**i / 9) for i in range(6)]

    def formula(move):
        """Return the base plus lambda times the displacement, computed in float64 and rounded once."""

        def points(base):
            reached = (base + move).double()
            wide = base.double()
            longest = (reached - wide).norm(dim=1).max().item()
            return (wide + min(1.0, limit / longest) * (reached - wide)).float()

        return points

    clipped, ours = life(RULES[name], [lambda base, move=move: base + move for move in moves], UpdateLimits(clip=limit))
    _, theirs = life(RULES[name], [formula(move) for move in moves])
    # The kernel multiplies what the formula multiplies; its last digit of lambda is that of another sum of squares.
    assert relative(ours.model, theirs.model) <= 1e-6
    factors = [row["clip"] for row in ours.history]
    lengths = [move.double().norm(dim=1).max().item() for move in moves]
    assert [receipt.clipped for receipt in clipped] == [factor < 1 for factor in factors]
    assert factors == pytest.approx([min(1.0, limit / length) for length in lengths], rel=1e-5)


@settings(max_examples=5)
@given(seeds)
def test_update_below_the_limits_is_applied_unchanged(seed):
    updates = [lambda base, i=i: base + draw(seed + i, 1, P, dtype=torch.float32) for i in range(5)]
    receipts, ours = life(FedOrtho(0.7), updates, UpdateLimits(clip=1e3, clip_factor=1e3, min_cosine=-1.0))
    _, theirs = life(FedOrtho(0.7), updates)
    assert torch.equal(ours.model, theirs.model)
    assert not any(receipt.clipped for receipt in receipts)


SPACES = {
    "flat": Flat(6),
    "sphere": Sphere(6),
    "matrices": SymmetricPositiveDefinite(3),
    "hyperbolic": Lorentz(5),
    "product": Product({"a": Sphere(3), "b": Flat(4)}),
}


def points_on(space, seed, count, reach=0.3):
    """Return a base, and points at a distance of at most `reach`."""
    generator = torch.Generator().manual_seed(seed)
    base = space.random_point(generator=generator, dtype=torch.float64)
    starts = base.expand(count, *base.shape)
    tangents = space.random_tangent(starts, generator=generator)
    length = space._inner(starts, tangents, tangents).sqrt()
    return base, space._exp(starts, tangents * (reach / length).reshape(-1, *(1 for _ in base.shape)))


@pytest.mark.parametrize("name", SPACES)
@settings(max_examples=8)
@given(seeds, st.floats(0.01, 0.99))
def test_clipped_update_is_on_its_geodesic_at_the_limit(name, seed, kept):
    space = SPACES[name]
    base, points = points_on(space, seed, 2)
    scaled = clip_update(space, base, points, kept)
    starts = base.expand_as(points)
    assert relative(space._log(starts, scaled), kept * space._log(starts, points)) <= 1e-9
    assert update_norm(space, base, scaled) == pytest.approx(kept * update_norm(space, base, points), rel=1e-9)


@given(seeds, st.floats(0.01, 0.99))
def test_clipped_update_of_low_rank_leaves_is_within_the_limit(seed, kept):
    space = LowRank(5, 4, 2)
    base, *points = (space.random_point(generator=torch.Generator().manual_seed(seed + i)) for i in range(3))
    scaled = clip_update(space, base, torch.stack(points), kept)
    assert update_norm(space, base, scaled) <= kept * update_norm(space, base, torch.stack(points)) * (1 + 1e-5)


def test_running_median_uses_clipped_norms():
    update_limits = UpdateLimits(clip_factor=2.0, norm_after=3, norm_window=5)
    server = Server(Flat(1), FedAsync(1.0), torch.zeros(1), limits=update_limits)

    clients = itertools.count()

    def move(length):
        before = server.model
        receipt = send(server, next(clients), length)
        return (server.model - before).item(), receipt.clipped

    assert [move(length) for length in (1.0, 2.0, 4.0)] == [(1.0, False), (2.0, False), (4.0, False)]
    # Twice the median of {1, 2, 4}; then of {1, 2, 4, 4}, and of {1, 2, 4, 4, 6}, and of {2, 4, 4, 6, 8}.
    assert [move(100.0) for _ in range(4)] == [(4.0, True), (6.0, True), (8.0, True), (8.0, True)]
    assert len(server._state.value.model_state.norms) == 5


def captured(update_limits, move, honest=9, updates=51):
    """Return a server that received updates from nine clients and one attacker, who sent the last 51."""
    server = Server(Flat(1), FedAsync(1.0), torch.zeros(1), limits=ServerLimits(update_limits))
    for i in range(honest):
        assert send(server, f"ward-{i}", 1.0).accepted
    for _ in range(updates):
        send(server, "attacker", move)
    return server


def send(server, client, move):
    ticket = server.dispatch(client)
    receipt = server.receive(ticket, Payload(ticket.message.start[None] + move, 1))
    if not receipt.accepted:
        server.drop(ticket)
    return receipt


@pytest.mark.parametrize("move", [0.0, 1e-6, 1e6])
def test_one_client_moves_the_median_by_one_value(move):
    server = captured(UpdateLimits(norm_factor=10.0), move)
    assert all(send(server, f"ward-{i}", 1.0).accepted for i in range(9))
    assert not send(server, "attacker", 11.0).accepted
    assert not send(server, "ward-3", 11.0).accepted
    server = captured(UpdateLimits(clip_factor=2.0), move)
    assert not any(send(server, f"ward-{i}", 1.0).clipped for i in range(9))
    for client in ("attacker", "ward-3"):
        before = server.model
        assert send(server, client, 1e6).clipped
        assert (server.model - before).item() == pytest.approx(2.0, rel=0.1)


def test_a_client_does_not_set_its_own_limit():
    limits = UpdateLimits(norm_factor=2.0, norm_after=1)
    server = Server(Flat(1), FedAsync(1.0), torch.zeros(1), limits=ServerLimits(limits))
    assert send(server, "ward", 1.0).accepted
    moves = [1.5 * 1.5**i for i in range(9)]
    assert [send(server, "attacker", move).accepted for move in moves] == [True] + [False] * 8


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_the_window_recovers_from_a_majority_of_attackers(size):
    """Clients that have left had determined the limit.

    Each rejected update counts as the limit, so the limit grows again.
    """
    limits = UpdateLimits(norm_factor=10.0, clip_factor=1e9)
    server = Server(Flat(1), FedAsync(1.0), torch.zeros(1), limits=ServerLimits(limits))
    for i in range(11):
        assert send(server, f"attacker-{i}", size).accepted
    accepted = [[send(server, f"ward-{i}", 1.0).accepted for i in range(25)] for _ in range(7)]
    assert all(accepted[-1])
    assert any(accepted[-2])
    assert not send(server, "ward-3", 1e3).accepted


def test_rejected_updates_raise_the_limit_by_at_most_the_factor():
    limits = UpdateLimits(norm_factor=3.0)
    server = captured(limits, 1.0)
    for i in range(200):
        assert not send(server, f"liar-{i % 3}", 1e9).accepted
    assert not send(server, "ward-1", 3.1).accepted
    assert send(server, "ward-2", 2.9).accepted


def test_zero_updates_do_not_count():
    limits = UpdateLimits(norm_factor=2.0, norm_after=2)
    server = Server(Flat(1), FedAsync(1.0), torch.zeros(1), limits=ServerLimits(limits))
    for i in range(9):
        assert send(server, f"idle-{i}", 0.0).accepted
    assert server._state.value.model_state.norms == ()
    assert send(server, "a", 1.0).accepted
    assert send(server, "b", 1e3).accepted
    assert send(server, "a", 0.0).accepted
    assert dict(server._state.value.model_state.norms) == {"a": 1.0, "b": 1e3}


def test_the_window_forgets_the_oldest_client():
    limits = UpdateLimits(norm_factor=2.0, norm_window=3, norm_after=1)
    server = Server(Flat(1), FedAsync(1.0), torch.zeros(1), limits=ServerLimits(limits))
    for client, norm in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("a", 4.0), ("d", 5.0)):
        assert send(server, client, norm).accepted
    assert server._state.value.model_state.norms == (("c", 3.0), ("a", 4.0), ("d", 5.0))


def test_smaller_of_limit_and_factor_applies():
    assert UpdateLimits(clip=3.0, clip_factor=2.0, norm_after=1).clip_threshold([1.0]) == 2.0
    assert UpdateLimits(clip=3.0, clip_factor=2.0, norm_after=1).clip_threshold([2.0]) == 3.0
    # A median of 0 says nothing.
    assert UpdateLimits(clip_factor=2.0, norm_after=1).clip_threshold([0.0]) == math.inf


def test_update_above_max_norm_is_rejected_instead_of_clipped():
    server = Server(Flat(1), FedAsync(1.0), torch.zeros(1), limits=UpdateLimits(max_norm=10.0, clip=1.0))
    assert server.receive(server.dispatch("a").id, Payload(torch.full((1, 1), 9.0), 1)).clipped
    receipt = server.receive(server.dispatch("a").id, Payload(torch.full((1, 1), 12.0), 1))
    assert receipt.reason == "points: expected a norm <= 10, got 11"
    huge = server.receive(server.dispatch("a").id, Payload(torch.full((1, 1), math.inf), 1))
    assert huge.reason.startswith("points: expected finite")


@settings(max_examples=8)
@given(seeds, st.floats(-1, 1))
def test_cosine_gate_uses_the_cosine_of_the_receipt(seed, least):
    updates = [lambda base, i=i: base + draw(seed + i, 2, P, dtype=torch.float32) for i in range(8)]
    receipts, server = life(AsyncBezier(0.5), updates, UpdateLimits(min_cosine=least))
    late = [r for r in receipts if r.accepted and not math.isnan(r.cosine)]
    # A Gram matrix of three rows sums as one of two does.
    assert all(receipt.cosine >= least - 1e-12 for receipt in late)
    assert receipts[0].accepted
    for receipt in receipts:
        assert receipt.accepted or receipt.reason.startswith("points: expected a cosine with the drift >= ")
    assert server.rejected.get("points", 0) == sum(not receipt.accepted for receipt in receipts)


@pytest.mark.parametrize("name", ["sphere", "hyperbolic", "product"])
@settings(max_examples=8)
@given(seeds)
def test_cosine_at_the_base_equals_cosine_after_parallel_transport(name, seed):
    space = SPACES[name]
    base, (point, current) = points_on(space, seed, 2)
    passage = Transporter(space, base, current, "parallel")
    rows = torch.stack([passage.to_current(space._log(base, point)[None])[0], passage.drift])
    inner = passage.gram(rows.flatten(1)).sum(0)
    cosine = (inner[0, 1] / (inner[0, 0] * inner[1, 1]).sqrt()).item()
    update = Update("a", base, current, point[None], staleness=1)
    UpdateLimits(min_cosine=max(-1.0, cosine - 1e-6)).apply(space, update, ())
    with pytest.raises(ArgumentError, match="points: expected a cosine with the drift"):
        UpdateLimits(min_cosine=min(1.0, cosine + 1e-6)).apply(space, update, ())


def test_fresh_updates_always_pass_the_cosine_gate():
    for narrow in (None, torch.bfloat16):
        server = Server(
            Flat(2),
            FedAsync(0.5),
            torch.full((2,), 0.1),
            limits=ServerLimits(UpdateLimits(min_cosine=1.0)),
            memory=MemoryPolicy(base_dtype=narrow),
        )
        for away in (1.0, -1.0, 3.0):
            ticket = server.dispatch("a")
            assert server.receive(ticket.id, Payload(ticket.message.start[None] + away, 1)).accepted


def test_zero_update_passes_the_cosine_gate():
    server = Server(Flat(2), FedAsync(0.5), torch.zeros(2), limits=UpdateLimits(min_cosine=0.5))
    late, first = server.dispatch("late"), server.dispatch("first")
    assert server.receive(first.id, Payload(torch.ones(1, 2), 1)).accepted
    assert server.receive(late.id, Payload(torch.zeros(1, 2), 1)).accepted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": 0.0}, "clip: expected a finite number > 0"),
        ({"clip_factor": -1.0}, "clip_factor: expected a finite number > 0"),
        ({"min_cosine": 1.5}, "min_cosine: expected a finite number"),
    ],
)
def test_limits_out_of_range_are_rejected(options, message):
    with pytest.raises(ArgumentError, match=message):
        UpdateLimits(**options)
