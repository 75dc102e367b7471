"""Adaptive routing: estimates of the bound's constants from a running server, and gradual updates of the shares."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from manifoldagg._validation import check_count, check_number
from manifoldagg.errors import ArgumentError
from manifoldagg.routing._arguments import MAX_RATE, MIN_RATE, routing_vector
from manifoldagg.routing.bounds import Bound
from manifoldagg.routing.optimise import STARTS, Routing, optimise_routing, uniform

__all__ = ["AdaptiveRouting"]


class AdaptiveRouting:
    r"""A routing that is re-optimised from estimates of the rates, the noise, the smoothness and the gap.

    A client serves one task at a time, in the order they were sent: a service starts when the task is sent or when the
    one before came back, whichever is later. With c services of total duration s, which includes the one in progress,

    $$\hat \mu_i = \frac{weight + c_i}{weight / \mu_i + s_i},$$

    the posterior mean under a gamma prior at the guessed rate; a client that falls silent gets slower by it. A is the
    first loss less the lowest, B the mean of what was observed, L the largest; the guesses hold until one is positive.
    Re-routing moves p towards the best routing found, by at most `max_change` in total variation
    $\frac12 \| p' - p \|_1$.

    Args:
        bound: guesses of all constants, and the kind of bound.
        routing: p at the beginning, (n,); `None` is the uniform one.
        max_change: of `reroute`, the most that a call may move, in (0, 1].
        prior_weight: of the guessed rates, in services.
        horizon: services of a client after which one counts 1/e; `None` forgets nothing.

    Raises:
        ArgumentError: naming what does not fit; by a method, before it changes anything.

    Example:
        >>> from manifoldagg.routing import TimeBound
        >>> guess = TimeBound([1.0, 1.0], concurrency=4, rate=0.01, smoothness=1.0, noise=10.0, gap=1.0)
        >>> adaptive = AdaptiveRouting(guess, max_change=0.1)
        >>> for k in range(20):
        ...     for client, seconds in ((0, 1.0), (1, 0.1)):
        ...         adaptive.on_dispatch(client, seconds * k); adaptive.on_completion(client, seconds * (k + 1))
        >>> adaptive.rates().round(2).tolist(), adaptive.reroute().round(2).tolist()
        ([1.0, 7.0], [0.4, 0.6])
    """

    def __init__(
        self,
        bound: Bound,
        routing: np.ndarray | Sequence[float] | None = None,
        *,
        max_change: float = 0.05,
        prior_weight: float = 1.0,
        horizon: float | None = None,
    ) -> None:
        self._prior = bound
        n = bound.clients
        self._p = uniform(n) if routing is None else routing_vector(routing, n, positive=True)
        self._p.flags.writeable = False
        self._max_change = check_number("max_change", max_change, above=0, at_most=1)
        self._prior_weight = check_number("prior_weight", prior_weight, above=0)
        self._decay = 1.0 if horizon is None else float(np.exp(-1 / check_number("horizon", horizon, above=0)))
        self._count = np.zeros(n)
        self._seconds = np.zeros(n)
        self._pending: list[deque[float]] = [deque() for _ in range(n)]
        self._last_return = np.full(n, -np.inf)
        self._losses: tuple[float, float] | None = None
        self._noise = (0, 0.0)
        self._smoothness = 0.0
        self.last_optimum: Routing | None = None

    @property
    def routing(self) -> np.ndarray:
        """The current routing p, (n,)."""
        return self._p

    def on_dispatch(self, client: int, time: float) -> None:
        """Record the dispatch of a task to a client."""
        i = self._check_client(client)
        latest = self._pending[i][-1] if self._pending[i] else self._last_return[i]
        self._pending[i].append(_check_time(time, latest, "the client's latest"))

    def on_completion(self, client: int, time: float) -> None:
        """Record the completion of a client's oldest task."""
        i = self._check_busy(client)
        start = self._service_start(i)
        time = _check_time(time, start, "when the service began")
        self._pending[i].popleft()
        self._count[i] = self._decay * self._count[i] + 1
        self._seconds[i] = self._decay * self._seconds[i] + time - start
        self._last_return[i] = time

    def on_dropout(self, client: int, time: float) -> None:
        """Record the loss of a client's oldest task, which does not change the estimated rate."""
        i = self._check_busy(client)
        time = _check_time(time, self._pending[i][0], "when it was sent")
        self._pending[i].popleft()
        self._last_return[i] = max(self._last_return[i], time)

    def observe_loss(self, value: float) -> None:
        """Record the loss of the server's model; the first one is that of the initial model."""
        value = check_number("value", value)
        first, lowest = self._losses or (value, value)
        self._losses = first, min(lowest, value)

    def observe_noise(self, value: float) -> None:
        """Record a sample of B, such as twice a squared distance of a client's gradient from the mean gradient."""
        value = check_number("value", value, at_least=0)
        count, mean = self._noise
        self._noise = count + 1, mean + (value - mean) / (count + 1)

    def observe_smoothness(self, value: float) -> None:
        """Record a lower bound on L: a change of the gradient divided by the distance of two models."""
        self._smoothness = max(self._smoothness, check_number("value", value, above=0))

    def rates(self, now: float | None = None) -> np.ndarray:
        """Return the estimated rates, (n,); services in progress count with their duration until `now`."""
        seconds = self._seconds.copy()
        if now is not None:
            now = check_number("now", now)
            for i, pending in enumerate(self._pending):
                if pending:
                    seconds[i] += max(0.0, now - self._service_start(i))
        guess = np.asarray(self._prior.rates)
        estimates: np.ndarray = (self._prior_weight + self._count) / (self._prior_weight / guess + seconds)
        return estimates.clip(MIN_RATE, MAX_RATE)

    def bound(self, now: float | None = None) -> Bound:
        """Return the bound with the estimated constants."""
        gap = 0.0 if self._losses is None else self._losses[0] - self._losses[1]
        return replace(
            self._prior,
            rates=self.rates(now),
            gap=gap or self._prior.gap,
            noise=self._noise[1] or self._prior.noise,
            smoothness=self._smoothness or self._prior.smoothness,
        )

    def reroute(self, now: float | None = None) -> np.ndarray:
        """Move the shares towards the best routing for the estimated bound, and return p, (n,).

        `last_optimum` is what the optimiser found, before the move was limited.
        """
        self.last_optimum = optimise_routing(self.bound(now), starts=[self._p, *STARTS], tolerance=1e-6)
        distance = 0.5 * float(np.abs(self.last_optimum.p - self._p).sum())
        step = min(1.0, self._max_change / distance) if distance > 0 else 1.0
        p = (1 - step) * self._p + step * self.last_optimum.p
        self._p = p / p.sum()
        self._p.flags.writeable = False
        return self._p

    def _check_client(self, client: int) -> int:
        i = check_count("client", client, at_least=0)
        if i >= len(self._count):
            raise ArgumentError(f"client: expected at most {len(self._count) - 1}, got {client}")
        return i

    def _check_busy(self, client: int) -> int:
        i = self._check_client(client)
        if not self._pending[i]:
            raise ArgumentError(f"client: expected one with a task, got {client}, whose tasks are all back")
        return i

    def _service_start(self, i: int) -> float:
        return max(self._pending[i][0], float(self._last_return[i]))


def _check_time(time: float, minimum: float, description: str) -> float:
    time = check_number("time", time)
    if time < minimum:
        raise ArgumentError(f"time: expected a time >= {minimum:g}, {description}, got {time:g}")
    return time
