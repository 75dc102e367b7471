"""Accuracy under attack: rules and limits on the digits, with 10 to 30 % of the clients as attackers.

Twenty clients hold Dirichlet(0.5) shares of the labels and train a small network with a few steps of gradient descent.
Training times are exponential, in virtual time. The seed selects the attackers. They train like the other clients, and
then send

- `sign flip`: the negative update;
- `scale 10`: ten times the update;
- `scale -10`: ten times the negative update;
- `noise`: a normal vector, ten times as long as the update.

`clip` is `UpdateLimits(clip_factor=1.5)`, and `cosine` is `UpdateLimits(min_cosine=-0.2)`. The rate of each rule is the
best of three without attackers, on seeds that are used for nothing else. It is the same with all limits.

Finished runs are stored in `build/byzantine.jsonl` and are not repeated.
"""

import argparse
import heapq
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manifoldagg.experiments import load_dataset
from manifoldagg.federated import Payload, Server, ServerLimits, UpdateLimits, rules
from manifoldagg.federated.staleness import Polynomial
from manifoldagg.manifolds import Flat
from manifoldagg.simulation import FederatedDataset, dirichlet_partition

HERE = Path(__file__).parent
CLIENTS, STEPS, BATCH, LEARNING = 20, 6, 32, 0.3
HIDDEN = 24
SIZES = (64 * HIDDEN, HIDDEN, HIDDEN * 10, 10)
SIZE = 10
RULES: dict[str, tuple[Callable[[float], Any], tuple[float, ...]]] = {
    "FedAsync": (lambda rate: rules.FedAsync(rate, staleness=Polynomial(0.5)), (0.25, 0.5, 1.0)),
    "FedOrtho": (rules.FedOrtho, (2.0, 4.0, 8.0)),
    "AsyncBezier": (lambda rate: rules.AsyncBezier(threshold=1.0, rate=rate), (2.0, 4.0, 8.0)),
    "FedBuff": (partial(rules.FedBuff, SIZE), (1.0, 2.0, 4.0)),
    "Median": (partial(rules.Median, SIZE), (1.0, 2.0, 4.0)),
    "TrimmedMean": (partial(rules.TrimmedMean, SIZE, 3), (1.0, 2.0, 4.0)),
    "Krum": (partial(rules.Krum, SIZE, 3, 1), (1.0, 2.0, 4.0)),
    "Krum, 5 of 10": (partial(rules.Krum, SIZE, 3, 5), (1.0, 2.0, 4.0)),
}
CHECKED = ("FedAsync", "FedOrtho", "AsyncBezier", "FedBuff")
DEFENCES = {
    "": None,
    "clip": UpdateLimits(clip_factor=1.5),
    "cosine": UpdateLimits(min_cosine=-0.2),
    "clip, cosine": UpdateLimits(clip_factor=1.5, min_cosine=-0.2),
}
ATTACKS = ("sign flip", "scale 10", "scale -10", "noise")
FACTORS = {"sign flip": -1.0, "scale 10": 10.0, "scale -10": -10.0}
SHARES = (0.1, 0.2, 0.3)


class Clients:
    """The digits, partitioned over clients by a seed, and the training of the clients."""

    def __init__(self, seed: int) -> None:
        digits = load_dataset("digits")
        split = FederatedDataset.split(
            digits, CLIENTS, partition=partial(dirichlet_partition, concentration=0.5), seed=seed, holdout=0.25
        )
        self.parts = [(digits.inputs[part].flatten(1), digits.labels[part]) for part in split.train]
        out = np.concatenate(split.held_out)
        self.test = digits.inputs[out].flatten(1), digits.labels[out]
        drawn = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(seed))
        self.start = 0.1 * drawn

    def train(self, theta: Tensor, client: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Train from `theta`, and return the models after half of the steps and after all steps."""
        inputs, labels = self.parts[client]
        theta = theta.clone()
        half = theta
        for step in range(STEPS):
            chosen = torch.randint(len(labels), (BATCH,), generator=generator)
            theta.sub_(gradient(theta, inputs[chosen], labels[chosen]), alpha=LEARNING)
            if step + 1 == STEPS // 2:
                half = theta.clone()
        return half, theta

    def accuracy(self, theta: Tensor) -> float:
        """Return the accuracy on the held-out images of all clients."""
        inputs, labels = self.test
        return (outputs(theta, inputs)[1].argmax(1) == labels).double().mean().item()


def pieces(theta: Tensor) -> tuple[Tensor, ...]:
    """Return the weights and biases of the two layers."""
    first, one, second, two = theta.split(SIZES)
    return first.view(64, HIDDEN), one, second.view(HIDDEN, 10), two


def outputs(theta: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hidden activations and the logits."""
    first, one, second, two = pieces(theta)
    hidden = torch.addmm(one, inputs, first).relu_()
    return hidden, torch.addmm(two, hidden, second)


def gradient(theta: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of the mean cross-entropy. For this small network, autograd takes longer."""
    hidden, logits = outputs(theta, inputs)
    error = logits.softmax(1)
    error[torch.arange(len(labels)), labels] -= 1
    error /= len(labels)
    back = error @ pieces(theta)[2].T * (hidden > 0)
    return torch.cat([(inputs.T @ back).flatten(), back.sum(0), (hidden.T @ error).flatten(), error.sum(0)])


def attacked(kind: str, base: Tensor, points: Tensor, generator: torch.Generator) -> Tensor:
    """Return the points that an attacker sends."""
    if kind in FACTORS:
        return base + FACTORS[kind] * (points - base)
    noise = torch.randn(points.shape, generator=generator)
    return base + noise * (10 * (points[-1] - base).norm() / noise[-1].norm())


def run(
    clients: Clients, rule: Any, limits: UpdateLimits | None, kind: str, attackers: int, seed: int, updates: int
) -> dict:
    """Return the final accuracy, and the percentage of rejected updates of honest clients and of attackers."""
    draws = np.random.default_rng([seed, 7])
    means = draws.lognormal(0.0, 0.5, CLIENTS)
    attacking = set(draws.permutation(CLIENTS)[:attackers].tolist())
    generator = torch.Generator().manual_seed(seed)
    server = Server(
        Flat(sum(SIZES)),
        rule,
        clients.start,
        weights="uniform",
        limits=ServerLimits(limits or UpdateLimits(), history_size=0, receipt_cache_size=0),
    )
    out = [(draws.exponential(means[client]), client, server.dispatch(client)) for client in range(CLIENTS)]
    heapq.heapify(out)
    sent, rejected = [0, 0], [0, 0]
    curve = isinstance(rule, rules.AsyncBezier)
    for _ in range(updates):
        now, client, ticket = heapq.heappop(out)
        base = ticket.message.start
        half, end = clients.train(base, client, generator)
        # The quadratic Bézier curve that passes through the half-way model.
        points = torch.stack([2 * half - (base + end) / 2, end]) if curve else end[None]
        attacks = client in attacking
        points = attacked(kind, base, points, generator) if attacks else points
        accepted = server.receive(ticket, Payload(points, 1)).accepted
        sent[attacks] += 1
        rejected[attacks] += not accepted
        if not accepted:
            server.drop(ticket)
        heapq.heappush(out, (now + draws.exponential(means[client]), client, server.dispatch(client)))
    shares = [100 * r / s if s else 0.0 for r, s in zip(rejected, sent, strict=True)]
    return {"accuracy": 100 * clients.accuracy(server.model), "honest": shares[0], "attackers": shares[1]}


class ResultCache:
    """Results of finished runs by their arguments, in a JSON lines file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.known = dict(map(json.loads, lines))

    def __call__(self, key: str, make: Callable[[], dict]) -> dict:
        if key not in self.known:
            self.known[key] = make()
            with self.path.open("a") as file:
                file.write(json.dumps([key, self.known[key]]) + "\n")
        return self.known[key]


def main() -> None:
    """Print one table per attack, and the lowest accuracy over all attacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rate-seeds", type=int, nargs="+", default=[100, 101])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "byzantine.txt")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    cache = ResultCache(HERE.parent / "build" / "byzantine.jsonl")
    federations: dict[int, Clients] = {}
    lines: list[str] = []
    begun = time.process_time()

    def emit(line: str = "") -> None:
        print(line, flush=True)
        lines.append(line)

    def result(name: str, rate: float, defence: str, kind: str, attackers: int, seed: int) -> dict:
        def make() -> dict:
            if seed not in federations:
                federations[seed] = Clients(seed)
            rule = RULES[name][0](rate)
            return run(federations[seed], rule, DEFENCES[defence], kind, attackers, seed, options.updates)

        return cache(repr((options.updates, name, rate, defence, kind, attackers, seed)), make)

    rates = {}
    for name, (_, candidates) in RULES.items():
        scores = {
            rate: statistics.fmean(result(name, rate, "", "", 0, seed)["accuracy"] for seed in options.rate_seeds)
            for rate in candidates
        }
        rates[name] = max(scores, key=scores.__getitem__)
    emit(f"{CLIENTS} clients, {options.updates} updates, buffers of {SIZE}; accuracy in %, mean ± standard deviation")
    emit(f"over the seeds {options.seeds}. Rates: " + ", ".join(f"{name} {rate:g}" for name, rate in rates.items()))
    rows = [(name, defence) for name in RULES for defence in (DEFENCES if name in CHECKED else [""])]
    for seed in options.seeds:
        for kind, share in [("", 0.0), *product(ATTACKS, SHARES)]:
            for name, defence in rows:
                result(name, rates[name], defence, kind, round(share * CLIENTS), seed)
    means: dict[tuple[str, str, str, float], float] = {}
    for kind in ATTACKS:
        emit()
        heads = "".join(f"{f'{100 * share:.0f} %':>14}" for share in (0.0, *SHARES))
        emit(f"{kind:<28}{heads}     rejected at 20 %: honest, attackers")
        for name, defence in rows:
            cells = []
            for share in (0.0, *SHARES):
                attackers = round(share * CLIENTS)
                found = [
                    result(name, rates[name], defence, kind if attackers else "", attackers, seed)
                    for seed in options.seeds
                ]
                scores = [one["accuracy"] for one in found]
                means[name, defence, kind, share] = statistics.fmean(scores)
                spread = statistics.stdev(scores) if len(scores) > 1 else math.nan
                cells.append(f"{statistics.fmean(scores):>8.1f} ±{spread:>4.1f}")
                if share == 0.2:
                    shares_rejected = [statistics.fmean(one[who] for one in found) for who in ("honest", "attackers")]
            suffix = f"     {shares_rejected[0]:.0f} %, {shares_rejected[1]:.0f} %" if "cosine" in defence else ""
            emit(f"{name + (f' + {defence}' if defence else ''):<28}" + "".join(cells) + suffix)
    emit()
    emit(f"{'lowest over attacks':<28}" + "".join(f"{f'{100 * share:.0f} %':>14}" for share in (0.0, *SHARES)))
    for name, defence in rows:
        lowest = [min(means[name, defence, kind, share] for kind in ATTACKS) for share in (0.0, *SHARES)]
        emit(f"{name + (f' + {defence}' if defence else ''):<28}" + "".join(f"{score:>14.1f}" for score in lowest))
    print(f"{time.process_time() - begun:.0f} s of processor time in this call")
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
