"""Tests of means on leaves of low rank: the means of the matrices, truncated to the rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.averaging import SWA, karcher
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Payload, Server
from manifoldagg.federated.rules import FedAsync
from manifoldagg.manifolds import Flat, LowRank, Product, karcher_mean
from tests.manifolds.test_lowrank import best, conditions, dense, gauge, turned
from tests.support import draw, relative, seeds

pytestmark = pytest.mark.usefixtures("as_shipped")

EPS = 2.0**-52
SPACE = LowRank(6, 5, 2)
MIXED = Product({"q": SPACE, "head": Flat(3)})
counts = st.integers(1, 5)


def models(space, seed, *batch):
    return space.random_point(*batch, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(seeds, counts)
def test_the_mean_is_the_nearest_matrix_of_the_rank(seed, k):
    points = models(MIXED, seed, k)
    weights = draw(seed, k).abs() + 0.1
    found = karcher_mean(MIXED, points, weights)
    parts = MIXED.split(points)
    shares = weights / weights.sum()
    near, _ = best(torch.tensordot(shares, SPACE.invariant(parts["q"]), 1), 2)
    assert relative(SPACE.invariant(MIXED.split(found.point)["q"]), near) <= 1e-10
    assert relative(MIXED.split(found.point)["head"], shares @ parts["head"]) <= 1e-14
    assert found.converged
    assert found.residual <= 1e-13
    same = karcher(MIXED, [*points], weights)
    assert relative(MIXED.invariant(same.point), MIXED.invariant(found.point)) <= 1e-10


@given(seeds, conditions)
def test_the_mean_is_independent_of_the_factorisation(seed, condition):
    points = models(SPACE, seed, 3)
    others = torch.stack([turned(SPACE, x, *gauge(seed + i, 2, condition)) for i, x in enumerate(points)])
    one, other = (karcher_mean(SPACE, x).point for x in (points, others))
    size = SPACE.invariant(points).norm(dim=(-2, -1)).max()
    # The truncation amplifies rounding errors by the relative gap of the singular values at the cut.
    values = torch.linalg.svdvals(SPACE.invariant(points).mean(0))
    gap = values[0] / (values[1] - values[2])
    assert (SPACE.invariant(one) - SPACE.invariant(other)).norm() <= 100 * EPS * (1 + condition) * size * (1 + gap)


def test_batched_means_and_a_single_weighted_model_are_exact():
    points = models(MIXED, 0, 4, 3)
    found = karcher_mean(MIXED, points, torch.tensor([1.0, 2.0, 3.0]))
    assert found.point.shape == (4, *MIXED.shape)
    assert found.residual.shape == (4,)
    for i in range(4):
        assert torch.equal(found.point[i], karcher_mean(MIXED, points[i], torch.tensor([1.0, 2.0, 3.0])).point)
    assert torch.equal(karcher_mean(MIXED, points, torch.tensor([0.0, 1.0, 0.0])).point, points[:, 1])
    with pytest.raises(ArgumentError, match="points: expected tensors without gradients"):
        karcher_mean(MIXED, points.requires_grad_())


@given(seeds, st.integers(1, 4))
def test_a_streaming_average_is_exact_up_to_its_rank(seed, k):
    points = models(MIXED, seed, k)
    streaming, exact = SWA(MIXED), SWA(MIXED, kind="exact")
    for version, x in enumerate(points):
        streaming.update(version, x)
        exact.update(version, x)
    one, other = (SPACE.invariant(MIXED.split(swa.average)["q"]) for swa in (streaming, exact))
    # Four models of rank 2 fit in the state of rank 8, so nothing is truncated.
    assert relative(one, other) <= 1e-9
    assert streaming.truncated <= 1e-13
    assert relative(MIXED.split(streaming.average)["head"], MIXED.split(points)["head"].mean(0)) <= 1e-14


def test_a_streaming_average_reports_its_truncation():
    space = LowRank(20, 20, 1, state_rank=3)
    swa = SWA(space)
    points = models(space, 0, 8)
    for version, x in enumerate(points):
        swa.update(version, x)
    kept = swa.state()["mean"]
    assert [tuple(piece.shape) for piece in kept] == [(40, 3)]
    away = space.invariant(points).mean(0) - dense(space, kept[0])
    assert 0 < away.norm() <= swa.truncated


def test_an_average_of_a_server_resumes_from_a_checkpoint(tmp_path):
    rule = FedAsync(0.5)
    server = Server(MIXED, rule, models(MIXED, 0), averaging=SWA(MIXED))

    def drive(server, seeds):
        for seed in seeds:
            ticket = server.dispatch(0)
            assert server.receive(ticket, Payload(models(MIXED, seed, 1), 1)).accepted

    drive(server, range(1, 5))
    server.save(tmp_path / "server")
    other = Server.resume(tmp_path / "server", MIXED, rule, averaging=SWA(MIXED))
    assert torch.equal(server.averaged(), other.averaged())
    for each in (server, other):
        drive(each, range(5, 8))
    assert torch.equal(server.averaged(), other.averaged())


def test_an_average_restarts_after_a_reset():
    swa = SWA(SPACE, periodic=2)
    points = models(SPACE, 0, 4)
    for version, x in enumerate(points):
        swa.update(version, x)
        point = swa.reset_point(version)
        if point is not None:
            assert torch.equal(swa.average, point)
            assert swa.count == 0


@pytest.mark.parametrize(
    ("mean", "words"),
    [
        (lambda mean: mean[:1], r"state\['mean'\]: expected a tensor for each of 2 leaves"),
        (lambda mean: (mean[0][:-1], mean[1]), r"state\['mean'\]\[0\]"),
        (lambda mean: (mean[0] / 0, mean[1]), r"state\['mean'\]\[0\]"),
        (lambda mean: (mean[0], mean[1].float()), r"state\['mean'\]: expected a tensor torch.float64"),
    ],
)
def test_an_invalid_state_is_rejected(mean, words):
    swa = SWA(MIXED)
    for version, x in enumerate(models(MIXED, 0, 3)):
        swa.update(version, x)
    before = swa.average
    state = swa.state()
    with pytest.raises(ArgumentError, match=words):
        swa.load({**state, "mean": mean(state["mean"])})
    assert torch.equal(swa.average, before)
