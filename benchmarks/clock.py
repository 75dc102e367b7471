"""Events per second of every scheduler, without training. One event is a completion and the next dispatch.

All clients have a task in flight from the start. The table shows processor time. The schedulers run in turns, so that a
disturbance of the machine affects all of them.
"""

import argparse
import heapq
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from timing import quartiles

from manifoldagg.simulation.availability import AvailabilityChange, AvailabilityTrace, churn
from manifoldagg.simulation.delays import (
    Delay,
    Deterministic,
    Empirical,
    Exponential,
    Gaussian,
    HalfNormal,
    LogNormal,
    Uniform,
)
from manifoldagg.simulation.jackson import JacksonNetwork
from manifoldagg.simulation.schedulers import Completion, IndependentClients, PriorityScheduler
from manifoldagg.simulation.trace import ReplayScheduler, TaskRecord

DELAYS: dict[str, Delay] = {
    "constant": Deterministic(10.0),
    "Gaussian": Gaussian(10.0, 5.0),
    "log-normal": LogNormal(10.0, 5.0),
    "half-normal": HalfNormal(10.0),
    "uniform": Uniform(5.0, 15.0),
    "exponential": Exponential(10.0),
    "empirical": Empirical(tuple(np.linspace(1.0, 20.0, 12)), tuple(np.linspace(0.0, 5.0, 12))),
}
Events = Iterator[None]


def heap(clients: int) -> Events:
    """The lower bound: one random number, one pop and one push per event."""
    draw = generator().random
    events = [(draw(), client) for client in range(clients)]
    heapq.heapify(events)
    while True:
        time, client = heapq.heappop(events)
        heapq.heappush(events, (time + draw(), client))
        yield


def again_and_again(scheduler: IndependentClients[int] | PriorityScheduler[int], clients: int) -> Events:
    """Clients that receive the same task again after each completion. A task takes 1 to 20 units of time."""
    for client in range(clients):
        scheduler.dispatch(client, 1.0 + client % 20)
    while True:
        done = scheduler.next()
        scheduler.dispatch(done.client, done.work)
        yield


def independent(delay: Delay, clients: int) -> Events:
    """Clients with independent delays from the same distribution."""
    return again_and_again(IndependentClients(dict.fromkeys(range(clients), delay), generator()), clients)


def priority(clients: int) -> Events:
    """Two workers, and a queue of all other clients."""
    return again_and_again(PriorityScheduler(clients, generator()), clients)


def network(clients: int) -> Events:
    """A Jackson network with as many tasks as clients, uniform routing, and rates that span one decade."""
    rates = np.logspace(-1, 0, clients)
    scheduler = JacksonNetwork(np.full(clients, 1 / clients), rates, generator(), concurrency=clients)
    for _ in range(clients):
        scheduler.dispatch(scheduler.route())
    while True:
        scheduler.next()
        scheduler.dispatch(scheduler.route())
        yield


def participation(clients: int) -> Events:
    """Exponential delays, and clients that fail once in 1,000 tasks. A change of availability is an event as well."""
    changes = churn(range(clients), Exponential(10_000.0), Exponential(1000.0), 300.0, generator())
    scheduler = AvailabilityTrace(IndependentClients(Exponential(10.0), generator()), changes, available=range(clients))
    for client in range(clients):
        scheduler.dispatch(client, 1.0)
    while True:
        match scheduler.next():
            case Completion(client=client) | AvailabilityChange(kind="return", client=client):
                scheduler.dispatch(client, 1.0)
        yield


def replay(clients: int) -> Events:
    """The recorded trace of `independent`, which repeats after its end."""
    scheduler: IndependentClients[int] = IndependentClients(Exponential(10.0), generator())
    for client in range(clients):
        scheduler.dispatch(client, 1.0)
    records = []
    for _ in range(20 * clients):
        records.append(TaskRecord.from_completion(scheduler.next()))
        scheduler.dispatch(records[-1].client, 1.0)
    while True:
        again = ReplayScheduler(records)
        for client in range(clients):
            again.dispatch(client, 1.0)
        for _ in records:
            again.dispatch(again.next().client, 1.0)
            yield


def generator() -> np.random.Generator:
    """Return a random generator with a fixed seed."""
    return np.random.default_rng(0)


def measure(events: Events, count: int) -> float:
    """Return the number of events per second, measured over `count` events."""
    started = time.process_time()
    for _ in range(count):
        next(events)
    return count / (time.process_time() - started)


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--events", type=int, default=20_000, help="consecutive events in each repetition")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    makers: dict[str, Callable[[], Events]] = {
        f"independent, {name}": lambda delay=delay: independent(delay, options.clients)
        for name, delay in DELAYS.items()
    }
    makers |= {
        "bare heap": lambda: heap(options.clients),
        "priority, two workers": lambda: priority(options.clients),
        "Jackson network": lambda: network(options.clients),
        "availability": lambda: participation(options.clients),
        "replay": lambda: replay(options.clients),
    }
    running = {name: maker() for name, maker in makers.items()}
    rates: dict[str, list[float]] = {name: [] for name in running}
    for events in running.values():
        measure(events, options.events)
    for _ in range(options.repetitions):
        for name, events in running.items():
            rates[name].append(measure(events, options.events))
    lines = [
        f"{options.clients} clients, {options.repetitions} repetitions of {options.events} events each, "
        f"NumPy {np.__version__}",
        f"{'scheduler':<28} {'events/s':>10} {'quartiles':>22}",
    ]
    numbers = {}
    for name, seen in rates.items():
        low, middle, high = quartiles(seen)
        numbers[name] = {"low": low, "median": middle, "high": high}
        lines.append(f"{name:<28} {middle:>10,.0f} {f'{low:,.0f} to {high:,.0f}':>22}")
    print(*lines, sep="\n")
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {
        "clients": options.clients,
        "events": options.events,
        "repetitions": options.repetitions,
        "numpy": np.__version__,
        "machine": platform.platform(),
    }
    (options.out / "clock.txt").write_text("\n".join(lines) + "\n")
    (options.out / "clock.json").write_text(json.dumps({"settings": settings, "events": numbers}, indent=1) + "\n")


if __name__ == "__main__":
    main()
