"""Monte Carlo simulation of the closed network, with a measured delay for every task."""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from manifoldagg.routing._arguments import ShortRepr

__all__ = ["Simulation", "sample_stationary", "simulate"]

BLOCK_SIZE = 4096


@dataclass(frozen=True, repr=False)
class Simulation(ShortRepr):
    r"""Means over a simulation of the network, which estimate the exact values of `ClosedNetwork`.

    Args:
        num_updates: completions that were simulated.
        time: how long they took.
        throughput: updates / time, of $\lambda$.
        mean_tasks: mean over the time of the tasks at each client, of $E[\xi_i]$, (n,).
        others: mean over the updates of the tasks at each client when one was sent, of $E[X_i]$, (n,).
        relative_delay: sum of the delays in updates of each client's completed tasks, divided by the updates, of
            $E[D_i]$, (n,); tasks of the start and those that did not come back are left out.
        completions: tasks that each client completed, (n,).
    """

    num_updates: int
    time: float
    throughput: float
    mean_tasks: np.ndarray
    others: np.ndarray
    relative_delay: np.ndarray
    completions: np.ndarray


def simulate(
    routing: np.ndarray,
    rates: np.ndarray,
    concurrency: int,
    num_updates: int,
    generator: np.random.Generator,
    utilisation: np.ndarray | None = None,
) -> Simulation:
    r"""Simulate `num_updates` completions from checked arguments.

    Args:
        utilisation: (n,), of the clients with m - 1 tasks, for a stationary start; `None` is the cold one.

    Source: Queue G.2; updates, delays and states as in Queue (1)–(3). Cost: O(log n) for each update.
    """
    n = len(routing)
    times = _exponentials(generator)
    clients = _choices(routing, generator)
    if utilisation is None:
        state = np.bincount([next(clients) for _ in range(concurrency)], minlength=n)
    else:
        state = sample_stationary(utilisation, concurrency - 1, generator)
        state[next(clients)] += 1
    service = (1 / rates).tolist()
    queues = [deque([-1] * count) for count in state.tolist()]
    finish = [(next(times) * service[i], i) for i in range(n) if queues[i]]
    heapq.heapify(finish)
    # Tasks times duration of each queue up to its last change: in time, and in updates without the task that is sent.
    area = [0.0] * n
    since = [0.0] * n
    seen = [0] * n
    shown = [0] * n
    delay = [0] * n
    completions = [0] * n
    now = 0.0
    for t in range(num_updates):
        now, i = finish[0]
        queue = queues[i]
        area[i] += len(queue) * (now - since[i])
        seen[i] += len(queue) * (t - shown[i])
        since[i] = now
        shown[i] = t
        sent = queue.popleft()
        completions[i] += 1
        delay[i] += t - sent if sent >= 0 else 0
        if queue:
            heapq.heapreplace(finish, (now + next(times) * service[i], i))
        else:
            heapq.heappop(finish)
        j = next(clients)
        queue = queues[j]
        area[j] += len(queue) * (now - since[j])
        seen[j] += len(queue) * (t + 1 - shown[j])
        since[j] = now
        shown[j] = t + 1
        queue.append(t + 1)
        if len(queue) == 1:
            heapq.heappush(finish, (now + next(times) * service[j], j))
    final = np.array([len(queue) for queue in queues])
    return Simulation(
        num_updates=num_updates,
        time=now,
        throughput=num_updates / now,
        mean_tasks=(np.array(area) + final * (now - np.array(since))) / now,
        others=(np.array(seen) + final * (num_updates - np.array(shown))) / num_updates,
        relative_delay=np.array(delay) / num_updates,
        completions=np.array(completions),
    )


def sample_stationary(utilisation: np.ndarray, concurrency: int, generator: np.random.Generator) -> np.ndarray:
    r"""Draw one state from $\pi_{n,k}$ exactly, (n,) integers, k = `concurrency`.

    Queues of an open network, geometric with ratios $U_i = \lambda_k \rho_i$, for all clients but the busiest; what is
    left of the k tasks is the busiest one's, accepted with probability $U_{\max}^{left}$, or never if negative.
    """
    state = np.zeros(len(utilisation), dtype=np.int64)
    busiest = int(utilisation.argmax())
    rest = np.delete(np.arange(len(utilisation)), busiest)
    while concurrency > 0:
        state[rest] = generator.geometric(1 - utilisation[rest]) - 1
        left = concurrency - int(state[rest].sum())
        if left >= 0 and generator.random() < utilisation[busiest] ** left:
            state[busiest] = left
            break
    return state


def _exponentials(generator: np.random.Generator) -> Iterator[float]:
    while True:
        yield from generator.standard_exponential(BLOCK_SIZE).tolist()


def _choices(routing: np.ndarray, generator: np.random.Generator) -> Iterator[int]:
    """Clients drawn by the routing; one whose share is 0 is never drawn."""
    edges = np.cumsum(routing)
    last = int(np.flatnonzero(routing)[-1])
    while True:
        draws = np.searchsorted(edges, edges[-1] * generator.random(BLOCK_SIZE), side="right")
        yield from np.minimum(draws, last).tolist()
