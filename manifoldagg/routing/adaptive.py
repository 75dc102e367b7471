"""Adaptive routing, which gradually adjusts each client's share of the tasks during a run.

The best shares minimise a convergence bound, whose constants are unknown before the run. Adaptive routing therefore
estimates these constants during the run.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from manifoldagg._validation import check_count, check_number
from manifoldagg.errors import ArgumentError
from manifoldagg.routing._arguments import MAX_RATE, MIN_RATE, routing_vector
from manifoldagg.routing.bounds import Bound, TimeBound
from manifoldagg.routing.optimise import STARTS, Routing, optimise_routing, uniform

__all__ = ["AdaptiveRouting"]


class AdaptiveRouting:
    r"""A routing that is re-optimised during a run, with estimates of the rates, the noise, the smoothness and the gap.

    The bounds of this package depend on constants that are unknown before a run. This class starts with guesses,
    replaces them by estimates as the run proceeds, and updates the routing p when `reroute` is called.

    The service rates are estimated from the times of tasks. A client serves one task at a time, in the order of
    dispatch. The service of a task starts at its dispatch or at the return of the previous task, whichever is later.
    Suppose that client i completed $c_i$ services. Let $s_i$ be the total duration of these services and of the service
    in progress. The estimated rate is

    $$\hat \mu_i = \frac{w + c_i}{w / \mu_i + s_i},$$

    where $w$ is the prior weight and $\mu_i$ the guessed rate. This estimate is the posterior mean under a gamma prior
    with the mean $\mu_i$. The service in progress is included only if a method receives the current time `now`. The
    estimated rate of a client then decreases as long as the client does not return its task.

    The other constants of the bound are estimated as follows. Until the estimate of a constant is positive, its guess
    is used.

    - The gap A is the first loss minus the lowest loss.
    - For [`TimeBound`][manifoldagg.routing.TimeBound], the number of rounds is the number of completions since the
      first loss, and at least `bound.rounds`. So `gap / rounds` estimates the mean decrease of the loss per update.
    - The noise B is the mean of the observed samples.
    - The smoothness L is the largest observed lower bound.

    `reroute` moves p towards the best routing found. The total variation distance $\frac12 \| p' - p \|_1$ of one move
    is at most `max_change`.

    Args:
        bound: a bound with guesses of all constants. Its class determines the bound that is minimised.
        routing: the initial routing p, (n,); `None` for the uniform routing.
        max_change: the maximum total variation distance of one `reroute`, in (0, 1].
        prior_weight: the weight of the guessed rates, as a number of services.
        horizon: the number of services of a client after which the weight of an older service has decreased to 1/e.
            `None` gives all services equal weights.

    Raises:
        ArgumentError: if an argument is invalid. A method that raises this error does not change the object.

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
        self._rounds = 0
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
        self._pending[i].append(_check_time(time, latest, "the latest time of this client"))

    def on_completion(self, client: int, time: float) -> None:
        """Record the completion of a client's oldest task."""
        i = self._check_busy(client)
        start = self._service_start(i)
        time = _check_time(time, start, "the start of the service")
        self._pending[i].popleft()
        self._count[i] = self._decay * self._count[i] + 1
        self._seconds[i] = self._decay * self._seconds[i] + time - start
        self._last_return[i] = time
        if self._losses is not None:
            self._rounds += 1

    def on_dropout(self, client: int, time: float) -> None:
        """Record that the oldest task of a client was lost.

        A lost task does not change the estimated service rate of the client.
        """
        i = self._check_busy(client)
        time = _check_time(time, self._pending[i][0], "the time of its dispatch")
        self._pending[i].popleft()
        self._last_return[i] = max(self._last_return[i], time)

    def observe_loss(self, value: float) -> None:
        """Record the loss of the current server model.

        The losses are used to estimate the gap A, which is the initial loss minus the lowest possible loss. The
        estimate is the first recorded loss minus the lowest recorded loss. The first recorded loss must therefore be
        that of the initial model.
        """
        value = check_number("value", value)
        first, lowest = self._losses or (value, value)
        self._losses = first, min(lowest, value)

    def observe_noise(self, value: float) -> None:
        r"""Record a sample of the gradient noise B, a constant of the convergence bound.

        The noise is defined as $B = 2M^2 + \sigma^2$, where $M^2$ is the heterogeneity of the clients, and $\sigma^2$
        is the variance of their gradients. The estimate of B is the mean of all samples. If the variance is small, a
        suitable sample is $2 \|g_i - \bar g\|^2$. Here, $g_i$ is the gradient of client i, and $\bar g$ is the mean
        gradient of all clients.
        """
        value = check_number("value", value, at_least=0)
        count, mean = self._noise
        self._noise = count + 1, mean + (value - mean) / (count + 1)

    def observe_smoothness(self, value: float) -> None:
        """Record a lower bound on the smoothness constant L of the loss.

        Any two models provide such a bound: the distance between their gradients, divided by the distance between the
        models.
        """
        self._smoothness = max(self._smoothness, check_number("value", value, above=0))

    def rates(self, now: float | None = None) -> np.ndarray:
        """Return the estimated rates, (n,).

        Args:
            now: the current time. If it is given, the estimates include the services in progress.
        """
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
        bound = replace(
            self._prior,
            rates=self.rates(now),
            gap=gap or self._prior.gap,
            noise=self._noise[1] or self._prior.noise,
            smoothness=self._smoothness or self._prior.smoothness,
        )
        # The guessed gap belongs to the guessed number of rounds.
        return replace(bound, rounds=max(bound.rounds, self._rounds)) if gap and isinstance(bound, TimeBound) else bound

    def reroute(self, now: float | None = None) -> np.ndarray:
        """Move the task shares of the clients towards those that minimise the convergence bound.

        The bound depends on constants, such as the service rates, and the method uses their current estimates. The
        option `max_change` limits the size of the move. The attribute `last_optimum` contains the minimiser itself.

        Args:
            now: the current time, as in `rates`.

        Returns:
            The new shares p of the clients, (n,).
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
            raise ArgumentError(f"client: expected a client with a task in flight, got {client}, which has none")
        return i

    def _service_start(self, i: int) -> float:
        return max(self._pending[i][0], float(self._last_return[i]))


def _check_time(time: float, minimum: float, description: str) -> float:
    time = check_number("time", time)
    if time < minimum:
        raise ArgumentError(f"time: expected a time >= {minimum:g}, {description}, got {time:g}")
    return time
