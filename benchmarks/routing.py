"""Cost of the exact quantities of a queueing network with 1,000 clients and 5,000 tasks, and its growth.

    python benchmarks/routing.py [--repetitions 7] [--out benchmarks/results/routing]

The table shows the processor time of one call: the means with the throughput, the bound H with its gradient, all
covariances, and a million completions of a simulation, extrapolated from fewer completions. The rates of the clients
span a factor of 100.
"""

import argparse
import json
import statistics
from functools import partial
from pathlib import Path

import numpy as np
from timing import interleaved

from manifoldagg.routing import ClosedNetwork, TimeBound

SIZES = [(100, 500), (1000, 500), (100, 5000), (1000, 5000)]
COMPLETIONS = 20_000


def problem(clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a routing and the rates."""
    generator = np.random.default_rng(0)
    return generator.dirichlet(np.full(clients, 5.0)), 10.0 ** generator.uniform(-1, 1, clients)


def means(p: np.ndarray, rates: np.ndarray, tasks: int) -> float:
    """Compute the means of a new network, because a network computes each value only once."""
    return ClosedNetwork(p, rates, tasks).throughput


def covariance(p: np.ndarray, rates: np.ndarray, tasks: int) -> np.ndarray:
    """Compute all n² covariances."""
    return ClosedNetwork(p, rates, tasks).covariance


def simulation(p: np.ndarray, rates: np.ndarray, tasks: int) -> float:
    """Simulate from a cold start, without computing the exact values."""
    return ClosedNetwork(p, rates, tasks).simulate(COMPLETIONS, np.random.default_rng(0), "cold").time


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "routing")
    options = parser.parse_args()
    lines = [
        f"{'clients':>8} {'tasks':>6} {'means ms':>10} {'gradient ms':>12} {'covariance ms':>14} {'simulation s':>13}"
    ]
    print(lines[0], flush=True)
    rows = []
    for clients, tasks in SIZES:
        p, rates = problem(clients)
        bound = TimeBound(rates, tasks, rate=0.01, smoothness=1.0, noise=200.0, gap=15.0)
        calls = {
            "means": partial(means, p, rates, tasks),
            "gradient": partial(bound.value_and_gradient, p),
            "covariance": partial(covariance, p, rates, tasks),
            "simulation": partial(simulation, p, rates, tasks),
        }
        seconds = {
            name: statistics.median(t) for name, t in interleaved(calls, repetitions=options.repetitions).items()
        }
        seconds["simulation"] *= 1e6 / COMPLETIONS
        rows.append({"clients": clients, "tasks": tasks} | seconds)
        lines.append(
            f"{clients:>8} {tasks:>6} {1e3 * seconds['means']:>10.1f} {1e3 * seconds['gradient']:>12.1f} "
            f"{1e3 * seconds['covariance']:>14.1f} {seconds['simulation']:>13.2f}"
        )
        print(lines[-1], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    options.out.with_suffix(".json").write_text(json.dumps({"seconds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
