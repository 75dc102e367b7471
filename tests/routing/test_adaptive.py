"""A routing that follows a server's history."""

import numpy as np
import pytest

from manifoldagg.errors import ArgumentError
from manifoldagg.routing import AdaptiveRouting, TimeBound, UpdateBound, optimise_routing

CONSTANTS = {"rate": 0.01, "smoothness": 1.0, "noise": 20.0, "gap": 2.0}


def serve(adaptive, rates, tasks, seed, completions, every=None):
    """A server's loop: FIFO clients with exponential services, tasks sent by the routing as it is."""
    generator = np.random.default_rng(seed)
    queues, finish, now, moved = np.zeros(len(rates), int), np.full(len(rates), np.inf), 0.0, []

    def send():
        i = int(generator.choice(len(rates), p=adaptive.routing))
        adaptive.on_dispatch(i, now)
        queues[i] += 1
        if queues[i] == 1:
            finish[i] = now + generator.exponential(1 / rates[i])

    for _ in range(tasks):
        send()
    for k in range(1, completions + 1):
        i = int(finish.argmin())
        now = float(finish[i])
        adaptive.on_completion(i, now)
        queues[i] -= 1
        finish[i] = now + generator.exponential(1 / rates[i]) if queues[i] else np.inf
        send()
        if every and k % every == 0:
            before = adaptive.routing
            moved.append(0.5 * np.abs(adaptive.reroute(now) - before).sum())
    return now, moved


def test_rates_are_estimated_despite_queues():
    rates = np.array([0.5, 1.0, 4.0])
    adaptive = AdaptiveRouting(TimeBound(np.ones(3), 8, **CONSTANTS))
    now, _ = serve(adaptive, rates, 8, 0, 2500)
    counts = adaptive._count
    # Each estimate has a relative deviation of 1/√count; the guess weighs one service.
    assert (np.abs(adaptive.rates(now) / rates - 1) <= 4.5 / np.sqrt(counts) + 8 / counts).all()


def test_the_routing_converges_to_that_of_the_true_rates():
    rates = np.array([0.5, 1.0, 4.0])
    truth = optimise_routing(TimeBound(rates, 8, **CONSTANTS))
    adaptive = AdaptiveRouting(TimeBound(np.ones(3), 8, **CONSTANTS), max_change=0.05)
    _, moved = serve(adaptive, rates, 8, 1, 3000, every=150)
    assert max(moved) <= 0.05 * (1 + 1e-12)
    assert adaptive.routing.sum() == pytest.approx(1, rel=1e-14, abs=0)
    assert TimeBound(rates, 8, **CONSTANTS)(adaptive.routing) <= 1.01 * truth.value


def test_the_rate_of_a_silent_client_decreases_gradually():
    adaptive = AdaptiveRouting(TimeBound([1.0, 1.0], 4, **CONSTANTS), prior_weight=5.0)
    adaptive.on_dispatch(0, 0.0)
    assert adaptive.rates(0.0).tolist() == [1.0, 1.0]
    assert adaptive.rates(5.0).tolist() == [0.5, 1.0]
    assert adaptive.rates().tolist() == [1.0, 1.0]
    adaptive.on_dropout(0, 5.0)
    assert adaptive.rates(100.0).tolist() == [1.0, 1.0]


def test_a_service_starts_when_the_previous_task_returns():
    adaptive = AdaptiveRouting(TimeBound([1.0, 1.0], 4, **CONSTANTS))
    for time in (0.0, 1.0, 9.0):
        adaptive.on_dispatch(0, time)
    for time in (3.0, 8.0, 10.0):
        adaptive.on_completion(0, time)
    # 3, 5 and 1 seconds: 0 to 3, 3 to 8, 9 to 10; and the guess of one service in one second.
    assert adaptive.rates()[0] == 4 / 10


def test_a_horizon_decreases_the_weight_of_old_services():
    forgetful = AdaptiveRouting(TimeBound([1.0], 1, **CONSTANTS), horizon=10.0)
    for k in range(200):
        forgetful.on_dispatch(0, float(k))
        forgetful.on_completion(0, float(k) + (1.0 if k < 100 else 0.1))
    # 100 services at e^{-1/10} each leave 5e-5 of the old rate; the guess weighs one service in eleven.
    total = 1 / (1 - np.exp(-0.1))
    assert forgetful.rates()[0] == pytest.approx((1 + total) / (1 + 0.1 * total), rel=1e-3)


def test_constants_are_estimated_from_observations():
    guess = UpdateBound([1.0, 2.0], 4, **CONSTANTS, num_updates=10)
    adaptive = AdaptiveRouting(guess)
    assert adaptive.bound() == guess
    for loss in (3.0, 1.0, 2.0):
        adaptive.observe_loss(loss)
    for noise in (4.0, 8.0):
        adaptive.observe_noise(noise)
    for smoothness in (0.5, 0.2):
        adaptive.observe_smoothness(smoothness)
    bound = adaptive.bound()
    assert (bound.gap, bound.noise, bound.smoothness, bound.num_updates) == (2.0, 6.0, 0.5, 10)


def test_observations_without_noise_or_gap_give_a_valid_bound():
    adaptive = AdaptiveRouting(TimeBound([1.0, 1.0], 4, **(CONSTANTS | {"gap": 0.0})))
    adaptive.observe_noise(0.0)
    assert adaptive.bound().noise == CONSTANTS["noise"]
    adaptive.on_dispatch(0, 0.0)
    assert adaptive.reroute(1e305)[1] == pytest.approx(0.55, rel=1e-12)


def test_rejected_arguments_change_nothing(as_shipped):
    adaptive = AdaptiveRouting(TimeBound([1.0, 1.0], 4, **CONSTANTS))
    adaptive.on_dispatch(0, 1.0)
    for call, match in (
        (lambda: adaptive.on_dispatch(2, 1.0), "client: expected at most 1, got 2"),
        (lambda: adaptive.on_dispatch(-1, 1.0), "client: expected an integer"),
        (lambda: adaptive.on_dispatch(0, 0.5), "time: expected a time >= 1"),
        (lambda: adaptive.on_dispatch(0, float("nan")), "time: expected"),
        (lambda: adaptive.on_completion(1, 2.0), "client: expected a client with a task in flight"),
        (lambda: adaptive.on_completion(0, 0.5), "time: expected a time >= 1"),
        (lambda: adaptive.on_dropout(1, 2.0), "client: expected a client with a task in flight"),
        (lambda: adaptive.on_dropout(0, 0.5), "time: expected a time >= 1"),
        (lambda: adaptive.observe_loss(float("nan")), "value: expected"),
        (lambda: adaptive.observe_noise(-1.0), "value: expected"),
        (lambda: adaptive.observe_smoothness(0.0), "value: expected"),
        (lambda: adaptive.rates(float("inf")), "now: expected"),
    ):
        with pytest.raises(ArgumentError, match=match):
            call()
    adaptive.on_completion(0, 2.0)
    assert adaptive.rates().tolist() == [1.0, 1.0]
    for change, match in (
        ({"max_change": 0}, "max_change"),
        ({"prior_weight": 0}, "prior_weight"),
        ({"horizon": -1}, "horizon"),
    ):
        with pytest.raises(ArgumentError, match=f"{match}: expected"):
            AdaptiveRouting(adaptive.bound(), **change)
    with pytest.raises(ArgumentError, match=r"routing: .* 0.1 too little"):
        AdaptiveRouting(adaptive.bound(), [0.4, 0.5])


def test_the_time_bound_uses_the_mean_decrease_per_update():
    """Queue, Appendix D: the A of H is the mean decrease of a round, not the whole gap."""
    adaptive = AdaptiveRouting(TimeBound([1.0, 1.0], 4, **CONSTANTS))
    adaptive.observe_loss(9.0)
    for k in range(10):
        adaptive.on_dispatch(k % 2, float(k))
        adaptive.on_completion(k % 2, k + 0.5)
    assert adaptive.bound() == TimeBound(adaptive.rates(), 4, **CONSTANTS)
    adaptive.observe_loss(4.0)
    bound = adaptive.bound()
    assert (bound.gap, bound.rounds) == (5.0, 10)
    planned = AdaptiveRouting(TimeBound([1.0, 1.0], 4, **CONSTANTS, rounds=1000))
    planned.observe_loss(9.0)
    planned.observe_loss(4.0)
    assert (planned.bound().gap, planned.bound().rounds) == (5.0, 1000)
