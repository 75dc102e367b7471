"""Monte Carlo simulation of the closed network, which measures the delay of every task."""

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
    r"""Means over a simulation of a network, which estimate the exact values of `ClosedNetwork`.

    Args:
        num_updates: the number of simulated completions.
        time: the simulated time.
        throughput: the estimate of $\lambda$, `num_updates` / `time`.
        mean_tasks: the estimate of $E[\xi_i]$, (n,): the number of tasks at each client, averaged over time.
        others: the estimate of $E[X_i]$, (n,): the number of tasks at each client at the dispatch of a task, averaged
            over the updates.
        relative_delay: the estimate of $E[D_i]$, (n,): the sum of the delays (in updates) of each client's completed
            tasks, divided by the number of updates. Initial tasks and unfinished tasks are not included.
        completions: the number of tasks that each client completed, (n,).
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
    """Simulate a closed network until its clients have completed `num_updates` tasks.

    The function does not validate its arguments. The method
    [`ClosedNetwork.simulate`][manifoldagg.routing.ClosedNetwork.simulate] validates them and then calls this function.

    Args:
        routing: the shares of the clients, (n,).
        rates: the service rates of the clients, (n,).
        concurrency: m, the number of tasks in the network.
        num_updates: the number of completions.
        generator: the random generator.
        utilisation: the utilisation of the clients in the network with m - 1 tasks, (n,), for a stationary start.
            `None` selects a cold start.

    Source: Queue G.2, with updates, delays and states as in Queue (1)–(3).

    Cost: O(log n) for each update.
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
    # The integrals of each queue length up to its last change, over time and over the updates. The integral over the
    # updates excludes the task that is being dispatched.
    time_integral = [0.0] * n
    last_time = [0.0] * n
    update_integral = [0] * n
    last_update = [0] * n
    delay = [0] * n
    completions = [0] * n
    now = 0.0
    for t in range(num_updates):
        now, i = finish[0]
        queue = queues[i]
        time_integral[i] += len(queue) * (now - last_time[i])
        update_integral[i] += len(queue) * (t - last_update[i])
        last_time[i] = now
        last_update[i] = t
        sent = queue.popleft()
        completions[i] += 1
        delay[i] += t - sent if sent >= 0 else 0
        if queue:
            heapq.heapreplace(finish, (now + next(times) * service[i], i))
        else:
            heapq.heappop(finish)
        j = next(clients)
        queue = queues[j]
        time_integral[j] += len(queue) * (now - last_time[j])
        update_integral[j] += len(queue) * (t + 1 - last_update[j])
        last_time[j] = now
        last_update[j] = t + 1
        queue.append(t + 1)
        if len(queue) == 1:
            heapq.heappush(finish, (now + next(times) * service[j], j))
    final = np.array([len(queue) for queue in queues])
    return Simulation(
        num_updates=num_updates,
        time=now,
        throughput=num_updates / now,
        mean_tasks=(np.array(time_integral) + final * (now - np.array(last_time))) / now,
        others=(np.array(update_integral) + final * (num_updates - np.array(last_update))) / num_updates,
        relative_delay=np.array(delay) / num_updates,
        completions=np.array(completions),
    )


def sample_stationary(utilisation: np.ndarray, concurrency: int, generator: np.random.Generator) -> np.ndarray:
    """Draw the queue lengths of all clients from the exact stationary distribution of a network with k tasks.

    The function uses rejection sampling:

    1. Draw the queue lengths of all clients except the busiest one from geometric distributions. The ratio of each
       distribution is the utilisation of the client.
    2. Let r be k minus the sum of these queue lengths. If r is negative, reject the draw and repeat step 1.
    3. Accept the draw with the probability $U^r$, where $U$ is the utilisation of the busiest client. Otherwise, repeat
       step 1.
    4. Set the queue length of the busiest client to r.

    Args:
        utilisation: the utilisation of each client, (n,).
        concurrency: k, the number of tasks.
        generator: the random generator.

    Returns:
        The queue lengths, (n,) integers.
    """
    state = np.zeros(len(utilisation), dtype=np.int64)
    busiest = int(utilisation.argmax())
    rest = np.delete(np.arange(len(utilisation)), busiest)
    while concurrency > 0:
        state[rest] = generator.geometric(1 - utilisation[rest]) - 1
        remaining = concurrency - int(state[rest].sum())
        if remaining >= 0 and generator.random() < utilisation[busiest] ** remaining:
            state[busiest] = remaining
            break
    return state


def _exponentials(generator: np.random.Generator) -> Iterator[float]:
    while True:
        yield from generator.standard_exponential(BLOCK_SIZE).tolist()


def _choices(routing: np.ndarray, generator: np.random.Generator) -> Iterator[int]:
    """Yield the indices of randomly drawn clients, with the probabilities of the routing."""
    edges = np.cumsum(routing)
    last = int(np.flatnonzero(routing)[-1])
    while True:
        draws = np.searchsorted(edges, edges[-1] * generator.random(BLOCK_SIZE), side="right")
        yield from np.minimum(draws, last).tolist()
