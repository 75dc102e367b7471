"""Check the privacy accountant and measure the leakage of a private server: `python examples/privacy.py`.

The script needs `pip install 'manifoldagg[privacy,experiments]'`. It has two parts:

1. It computes the epsilon of three published settings again, by numerical integration, without the accountant's code.
2. It attacks a private server that trains on the digits. The attack decides from a released model whether one client,
   the canary, took part. A statistical lower bound on epsilon follows from its error rates. The lower bound must be
   below the accountant's epsilon.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import beta, norm
from torch import Tensor, nn

from manifoldagg import ParameterSpace
from manifoldagg.experiments import load_dataset
from manifoldagg.federated import Message, Rule, Update, train_client
from manifoldagg.federated.clients import Local
from manifoldagg.federated.rules import FedBuff, Private
from manifoldagg.federated.staleness import Constant
from manifoldagg.integrations.accounting import epsilon


@dataclass(frozen=True)
class Setting:
    """A published setting, with the published upper bound on epsilon.

    Attributes:
        source: the publication.
        noise: the noise multiplier.
        participations: the number of updates of one client.
        delta: the delta of the guarantee.
        bound: the published epsilon.
    """

    source: str
    noise: float
    participations: int
    delta: float
    bound: float


def zcdp(source: str, rho: float, participations: int, delta: float, bound: float) -> Setting:
    """Return the setting of a publication that states rho-zCDP: rho = participations / (2 noise^2)."""
    return Setting(source, math.sqrt(participations / (2 * rho)), participations, delta, bound)


SETTINGS = [
    # Theorem A.1: noise = sqrt(2 ln(1.25 / delta)) / epsilon, here for epsilon = 1.
    Setting("Dwork, Roth 2014, Theorem A.1", math.sqrt(2 * math.log(1.25 / 1e-5)), 1, 1e-5, 1.0),
    # The first Gboard language model with a guarantee (Spanish): rho = 0.81, published as epsilon = 8.9.
    zcdp("Gboard es-ES, 2022", 0.81, 1, 1e-10, 8.9),
    # The largest rho of the Gboard models, with the conversion of Bun, Steinke 2016, Proposition 1.3.
    zcdp("Xu et al. 2023, rho = 2", 2.0, 4, 1e-10, 2.0 + 2 * math.sqrt(2.0 * math.log(1e10))),
]


def log_integrated_delta(eps: float, noise: float, participations: int) -> float:
    r"""Integrate the definition of delta and return its logarithm.

    $$\delta = \int \max(0, p(x) - e^\varepsilon q(x))\,dx, \qquad p = N(\mu, 1), \; q = N(0, 1).$$
    """
    mu = math.sqrt(participations) / noise
    # p exceeds e^eps q to the right of this point, and the ratio there grows as exp(mu t) with the distance t.
    edge = eps / mu + mu / 2 - mu

    def excess(t: float) -> float:
        """Return (p - e^eps q) / p(edge) at the distance t."""
        return math.exp(-t * edge - t * t / 2) * -math.expm1(-mu * t)

    # The integrand decreases as exp(-t edge - t^2 / 2), so the rest is below exp(-50).
    end = -edge + math.sqrt(edge * edge + 100.0)
    return math.log(quad(excess, 0.0, end, epsabs=0.0, epsrel=1e-10)[0]) + float(norm.logpdf(edge))


def integrated_epsilon(noise: float, participations: int, delta: float) -> float:
    """Find the epsilon whose integrated delta is `delta`."""

    def gap(eps: float) -> float:
        return log_integrated_delta(eps, noise, participations) - math.log(delta)

    return float(brentq(gap, 1e-6, 100.0, xtol=1e-10))


def canary_updates(num_clients: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Train clients on parts of the digits, and the canary on wrong labels.

    Returns:
        The start model (P,), the displacements of the other clients (num_clients - 1, P), and the canary's (P,).
    """
    torch.manual_seed(seed)
    digits, model = load_dataset("digits"), nn.Linear(64, 10)
    space = ParameterSpace.of(model)
    message, displacements = Message(space.point(model)), []
    inputs = torch.as_tensor(digits.inputs).reshape(-1, 64)[: 40 * num_clients]
    labels = torch.as_tensor(digits.labels)[: 40 * num_clients]
    for i in range(num_clients):
        part = slice(i, None, num_clients)
        # The last client is the canary. Nobody else has labels like these.
        batches = [(inputs[part], (labels[part] + (5 if i == num_clients - 1 else 0)) % 10)]
        payload = train_client(
            model, message, Local(epochs=20, rate=0.1), batches, generator=torch.Generator().manual_seed(i)
        )
        displacements.append(payload.points[0] - message.start)
    return message.start, torch.stack(displacements[:-1]), displacements[-1]


def attack_scores(
    make_rule: Callable[[int], Rule], updates: tuple[Tensor, Tensor, Tensor], runs: int
) -> tuple[Tensor, Tensor]:
    """Attack `runs` releases with the canary and `runs` releases in which the canary's update is zero.

    The attacker knows all other updates, which is the strongest case of the guarantee. The score of a release is its
    component along the canary's update.

    Args:
        make_rule: returns the private rule of a run. The runs differ in the seed of their noise.
        updates: the result of `canary_updates`.
        runs: the number of releases of each kind.

    Returns:
        The scores with and without the canary, (runs,) each.
    """
    start, others, canary = updates
    space = ParameterSpace.of(nn.Linear(64, 10))
    scores = []
    for with_canary in (True, False):
        last, found = canary if with_canary else torch.zeros_like(canary), []
        for run in range(runs):
            rule = make_rule(2 * run + with_canary)
            state = rule.init(space, start)
            for client, displacement in enumerate([*others, last]):
                update = Update(client, start, start, (start + displacement)[None])
                state, outcome = rule.step(space, state, update)
            found.append(((outcome.model - start) @ canary / canary.norm()).item())
        scores.append(torch.tensor(found))
    return scores[0], scores[1]


def measured_epsilon(with_canary: Tensor, without: Tensor, delta: float, *, confidence: float = 0.99) -> float:
    r"""Return a lower bound on epsilon: $\log((\text{TPR} - \delta) / \text{FPR})$ of the best threshold.

    The first half of the scores chooses the threshold. The second half measures the rates, with the bounds of Clopper
    and Pearson at the given confidence. Every $(\varepsilon, \delta)$-private mechanism satisfies the inequality
    $\text{TPR} \le e^\varepsilon\, \text{FPR} + \delta$.
    """
    half = len(with_canary) // 2
    tail = (1 - confidence) / 2

    def bound(found: Tensor, other: Tensor, threshold: float) -> float:
        hits, alarms, n = int((found > threshold).sum()), int((other > threshold).sum()), len(found)
        true_rate = float(beta.ppf(tail, hits, n - hits + 1)) if hits else 0.0
        false_rate = float(beta.ppf(1 - tail, alarms + 1, n - alarms)) if alarms < n else 1.0
        return math.log(max(true_rate - delta, 1e-300) / false_rate)

    first = with_canary[:half], without[:half]
    threshold = max(torch.cat(first).unique().tolist()[:-1], key=lambda x: bound(*first, x))
    return max(0.0, bound(with_canary[half:], without[half:], threshold))


def private_rule(noise: float, num_clients: int) -> Callable[[int], Rule]:
    """Return a function of the seed that returns a private buffer of all clients."""
    rule = Private(FedBuff(num_clients, staleness=Constant()), clip=0.5, noise=noise, seed=0)
    return lambda seed: replace(rule, seed=seed)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000, help="the number of attacked releases of each kind")
    options = parser.parse_args()
    print(f"{'setting':<32} {'delta':>7} {'accountant':>10} {'integrated':>10} {'published bound':>15}")
    for one in SETTINGS:
        told = epsilon(one.noise, participations=one.participations, delta=one.delta)
        found = integrated_epsilon(one.noise, one.participations, one.delta)
        print(f"{one.source:<32} {one.delta:>7g} {told:>10.4f} {found:>10.4f} {one.bound:>15.4f}")
    updates, delta = canary_updates(8), 1e-5
    print(f"\n{'noise':<8} {'accountant':>10} {'measured, at least':>18}   (delta {delta:g}, {options.runs} releases)")
    for noise in (1.0, 2.0, 4.0):
        measured = measured_epsilon(*attack_scores(private_rule(noise, 8), updates, options.runs), delta)
        print(f"{noise:<8} {epsilon(noise, participations=1, delta=delta):>10.2f} {measured:>18.2f}")


if __name__ == "__main__":
    main()
