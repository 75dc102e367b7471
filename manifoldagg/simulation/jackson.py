r"""A scheduler for a closed Jackson network, in which each client is a queue with exponential service times."""

import bisect
from collections import deque

import numpy as np

from manifoldagg._validation import check_count, check_vector, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.delays import Exponential
from manifoldagg.simulation.schedulers import MAX_WORK, Job, Scheduler

__all__ = ["JacksonNetwork"]

SUM_TOLERANCE = 1e-6
MIN_RATE = 64 / MAX_WORK
"""The smallest rate. A service takes at most 37 times its mean, so one unit of work takes at most `MAX_WORK` s."""


class JacksonNetwork(Scheduler[int]):
    r"""A closed Jackson network of n clients, each of which processes its tasks in FIFO order.

    At client $i$, a task with one unit of work takes an exponentially distributed time with rate $\mu_i$. A task with
    $w$ units takes $w$ times as long.

    If the caller calls `dispatch(route())` after each `next()`, the number $m$ of tasks in flight is constant. The
    route is client $i$ with the probability $p_i$. If each task has one unit of work, the vector $x$ of the numbers of
    tasks at the clients is a Markov chain. Its stationary distribution is

    $$\pi_{n,m}(x) \propto \prod_i (p_i / \mu_i)^{x_i}.$$

    Between the end of a task and the next dispatch, $m - 1$ tasks are in flight. Their numbers at the clients have the
    distribution $\pi_{n,m-1}$ (arrival theorem).

    Args:
        routing: the shares p of the tasks, (n,), with sum 1 up to 1e-6.
        rates: the positive service rates $\mu$ in tasks per second, (n,).
        generator: the random generator of routes and times.
        concurrency: the largest number m of tasks in flight.

    Raises:
        ArgumentError: if an argument is invalid. The message names it.

    Source: Queue §2.

    Example:
        >>> network = JacksonNetwork([0.5, 0.5], [1.0, 2.0], np.random.default_rng(0), concurrency=3)
        >>> for _ in range(3): network.dispatch(network.route())
        >>> for _ in range(100):
        ...     done = network.next()
        ...     network.dispatch(network.route())
        >>> sum(network.queue_lengths), network.in_flight
        (3, 3)
    """

    allows_queueing = True

    def __init__(
        self,
        routing: np.ndarray | list[float],
        rates: np.ndarray | list[float],
        generator: np.random.Generator,
        *,
        concurrency: int,
    ) -> None:
        super().__init__(generator)
        self._rates: list[float] = check_vector("rates", rates, at_least=MIN_RATE).tolist()
        self._routing: list[float] = check_vector("routing", routing, at_least=0).tolist()
        if len(self._routing) != len(self._rates):
            raise ArgumentError(
                f"routing: expected {len(self._rates)} shares, one for each of the rates, got {len(self._routing)}"
            )
        excess = sum(self._routing) - 1
        if abs(excess) > SUM_TOLERANCE:
            raise ArgumentError(f"routing: expected shares that sum to 1, got {1 + excess:.9g}: off by {excess:+.3g}")
        self._concurrency = check_count("concurrency", concurrency)
        self._services = {client: Exponential(1 / rate) for client, rate in enumerate(self._rates)}
        edges = np.cumsum(self._routing)
        # Dividing by the total makes the last edge exactly 1, so that every draw is below it.
        self._edges: list[float] = (edges / edges[-1]).tolist()
        # The waiting tasks of each busy client.
        self._queues: dict[int, deque[Job[int]]] = {}

    @property
    def queue_lengths(self) -> tuple[int, ...]:
        """The number of tasks at each client, (n,), including the task in service."""
        return tuple(self._client_counts.get(client, 0) for client in range(len(self._rates)))

    def route(self) -> int:
        """Draw a client with the probabilities p."""
        return bisect.bisect_right(self._edges, self._generator.random())

    def dispatch(self, client: int, work: float = 1.0) -> None:
        """Append a task of `work` units to a client's queue.

        Raises:
            ArgumentError: if the client does not exist, `concurrency` tasks are in flight, or `work` is not a number
                from 0 to $2^{480}$.
        """
        job = self._make_job(client, work)
        client = job[0]
        service = self._services.get(client)
        if service is None:
            raise ArgumentError(f"client: expected one of 0 to {len(self._rates) - 1}, got {short_repr(client)}")
        if self._in_flight >= self._concurrency:
            raise ArgumentError(
                f"client: expected fewer than concurrency = {self._concurrency} tasks in flight, got {self._in_flight}"
            )
        if self._count_in(client) == 1:
            self._start(job, service.draw(self._generator, job[1]))
        else:
            self._queues.setdefault(client, deque()).append(job)

    def _on_finished(self, client: int) -> None:
        queue = self._queues.get(client)
        if queue:
            job = queue.popleft()
            if not queue:
                del self._queues[client]
            self._start(job, self._services[client].draw(self._generator, job[1]))

    def _drop_client(self, client: int) -> None:
        super()._drop_client(client)
        self._queues.pop(client, None)
