"""Combine the late models of an asynchronous run: two averages, a fitted simplex, and an ensemble.

Ten clients train a small network on their own digits. The script runs the training twice. In the first run, the
parameters are a point of a flat space. In the second run, the rows of the first layer are points on spheres. The server
moves along the geodesic to each received model, whatever its staleness. The script uses the versions of the second half
of a run in three ways: it averages them as they appear (SWA), computes their Karcher mean, and fits a simplex.

    python examples/averaging.py --out pictures

The script prints a table of held-out accuracy, negative log-likelihood (NLL) and expected calibration error (ECE). It
also draws the versions with the simplex of each space.
"""

import argparse
import math
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from manifoldagg import ParameterSpace, Server
from manifoldagg.averaging import SWA, Subspace, ensemble, fit_subspace
from manifoldagg.curves import Simplex
from manifoldagg.experiments import load_dataset
from manifoldagg.federated import Message, Outcome, Update, clients
from manifoldagg.manifolds import Manifold, Sphere, distance, geodesic
from manifoldagg.simulation import FederatedDataset, dirichlet_partition
from manifoldagg.simulation.schedulers import PriorityScheduler

CLIENTS = 10
CYCLE = 8
VERTICES = 3
BINS = 15
SPACES: dict[str, dict[str, Any]] = {"flat": {}, "spheres": {"1.weight": Sphere(64)}}


def network() -> nn.Module:
    """Return a network with 64 inputs, 16 hidden units and 10 classes. The rows of its first weight have norm 1."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16, bias=False), nn.Tanh(), nn.Linear(16, 10))
    with torch.no_grad():
        model[1].weight.div_(model[1].weight.norm(dim=1, keepdim=True))
    return model


@dataclass(frozen=True)
class Geodesic:
    r"""A user-defined rule for FedAsync on any space: $\Theta \leftarrow \gamma(\Theta, \Theta_i; \alpha)$.

    Args:
        rate: the fraction $\alpha$ of the geodesic to the client model.
    """

    rate: float
    cohort: int = 1

    def init(self, space: Manifold, start: Tensor) -> Any:
        """Return `None`, because the rule has no state."""

    def message(self, space: Manifold, state: Any, current: Tensor, client_state: Any) -> Message:
        """Return the current model."""
        return Message(current)

    def step(self, space: Manifold, state: Any, update: Update, *, out: Tensor | None = None) -> tuple[Any, Outcome]:
        """Move along the geodesic to the client model."""
        return state, Outcome(geodesic(space, update.current, update.points[-1], self.rate))


@dataclass(frozen=True)
class Late:
    """The results of a run: the space, the last model, the late versions, and two averages of the late versions."""

    space: ParameterSpace
    last: Tensor
    swa: SWA
    exact: SWA
    versions: list[Tensor]


def run(federation: FederatedDataset, manifolds: dict[str, Any], versions: int) -> Late:
    """Train in virtual time, and update both averages with each version."""
    model = federation.model()
    space = ParameterSpace.of(model, manifolds)
    loss = space.loss(model, nn.functional.cross_entropy)
    server = Server(space, Geodesic(rate=0.5), space.point(model))
    trainer = clients.Local(epochs=2, rate=0.05)
    late = {"start": math.ceil(versions / 2), "cycle": CYCLE}
    swa = SWA(space, **late)
    exact = SWA(space, **late, kind="exact")
    kept: list[Tensor] = []
    scheduler: PriorityScheduler[int] = PriorityScheduler(len(federation.trainable_clients), np.random.default_rng(0))
    tickets = {client: server.dispatch(client) for client in federation.trainable_clients}
    for client in federation.trainable_clients:
        scheduler.dispatch(client, len(federation.batches(client, 0)))
    for round_ in range(1, versions + 1):
        client = scheduler.next().client
        ticket = tickets[client]
        batches = federation.batches(client, round_)
        generator = torch.Generator().manual_seed(round_)
        payload = trainer.train(space, ticket.message, loss, batches, None, generator=generator)
        receipt = server.receive(ticket.id, payload)
        if not receipt.accepted:
            raise RuntimeError(receipt.reason)
        model_now = server.model
        for listener in (swa, exact):
            listener.update(server.version, model_now)
        if exact.selects(server.version):
            kept.append(model_now)
        tickets[client] = server.dispatch(client)
        scheduler.dispatch(client, len(batches))
    return Late(space, server.model, swa, exact, kept)


@dataclass(frozen=True)
class Judge:
    """An evaluation of models on the held-out samples."""

    federation: FederatedDataset

    @property
    def held_out(self) -> tuple[Tensor, Tensor]:
        """The inputs and labels of the held-out samples."""
        index = torch.from_numpy(np.concatenate(self.federation.held_out))
        return self.federation.dataset.inputs[index], self.federation.dataset.labels[index]

    @torch.no_grad()
    def grade(self, space: ParameterSpace, *thetas: Tensor) -> tuple[float, float, float]:
        """Return the accuracy, the NLL and the ECE of the mean prediction of several models."""
        inputs, labels = self.held_out
        each = [space.load(self.federation.model(), theta)(inputs).double().softmax(-1) for theta in thetas]
        p = torch.stack(each).mean(0)
        accuracy = (p.argmax(-1) == labels).double().mean().item()
        return accuracy, nn.functional.nll_loss(p.log(), labels).item(), calibration_error(p, labels)


def calibration_error(probabilities: Tensor, targets: Tensor, bins: int = BINS) -> float:
    r"""Compute $\mathrm{ECE} = \sum_b \frac{n_b}{n} |\mathrm{acc}_b - \mathrm{conf}_b|$ of predictions (n, classes).

    Bin $b$ contains the samples whose most probable class has a probability $\hat p \in (\frac{b-1}{B}, \frac{b}{B}]$.
    $\mathrm{acc}_b$ is the accuracy in the bin, and $\mathrm{conf}_b$ is the mean of $\hat p$ in the bin.

    Source: Guo, Pleiss, Sun, Weinberger 2017, (3).
    """
    confidence, guess = probabilities.max(-1)
    bin_of = torch.bucketize(confidence, torch.arange(1, bins, dtype=torch.float64) / bins)
    excess = (guess == targets).double() - confidence
    return excess.new_zeros(bins).index_add(0, bin_of, excess).abs().sum().item() / len(targets)


def picture(found: dict[str, tuple[Late, Subspace]], file: Path) -> None:
    """Draw the late versions of each run and the fitted simplex in the plane of the two longest axes."""
    figure = Figure(figsize=(6.4 * len(found), 5.2), dpi=150, layout="constrained")
    for axes, (name, (late, fitted)) in zip(
        figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True
    ):
        fitted.plot(axes)
        marks = {
            "on the simplex": (fitted.average(), "D", 12),
            "SWA": (late.swa.average, "*", 9),
            "last model": (late.last, "X", 10),
        }
        for label, (theta, mark, size) in marks.items():
            axes.plot(
                *fitted.view(theta[None])[0], mark, markersize=size, markeredgecolor="white", zorder=6, label=label
            )
        axes.set_title(f"{name}: {len(late.versions)} late versions and a simplex")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, fontsize="small", frameon=False)
    figure.savefig(file)


def main() -> None:
    """Run the training on both spaces, print the table and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/averaging"), help="the folder of the figure")
    parser.add_argument("--versions", type=int, default=160, help="the number of versions of the server model")
    parser.add_argument("--quick", action="store_true", help="a short run that tests the script")
    options = parser.parse_args()
    versions, draws, steps = (48, 2, 1) if options.quick else (options.versions, 20, 20)
    torch.set_num_threads(1)  # The network is too small to benefit from more threads.
    began = time.perf_counter()
    partition = partial(dirichlet_partition, concentration=0.5)
    digits = replace(load_dataset("digits"), model=network)
    federation = FederatedDataset.split(digits, CLIENTS, partition=partition, seed=0, batch=32)
    judge = Judge(federation)
    found: dict[str, tuple[Late, Subspace]] = {}
    seen = []
    print(f"{'':<8} {'model':<18} {'accuracy, %':>11} {'NLL':>7} {'ECE':>7}")
    for name, manifolds in SPACES.items():
        late = run(federation, manifolds, versions)
        simplex = Simplex(late.space, VERTICES)
        fitted = fit_subspace(late.versions, simplex, power=2, max_steps=200 if late.space.flat else steps)
        mean = late.exact.mean
        assert mean is not None
        drawn = ensemble(
            federation.model(),
            simplex,
            fitted.phi,
            [judge.held_out],
            single=late.last,
            generator=torch.Generator().manual_seed(0),
            draws=draws,
        )
        rows = {
            "last": judge.grade(late.space, late.last),
            "SWA": judge.grade(late.space, late.swa.average_or(late.last)),
            "Karcher SWA": judge.grade(late.space, mean.point),
            "on the simplex": judge.grade(late.space, fitted.average()),
            f"{draws} of the simplex": judge.grade(late.space, *(simplex(fitted.phi, x) for x in drawn.coordinates)),
        }
        for label, (accuracy, nll, error) in rows.items():
            print(f"{name:<8} {label:<18} {100 * accuracy:>11.1f} {nll:>7.3f} {error:>7.3f}")
        last, averaged = (100 * rows[label][0] for label in ("last", "SWA"))
        seen.append(f"{last:.1f} % and {averaged:.1f} % ({name})")
        best = max(member.accuracy for member in drawn.members)
        print(f"{name:<8} The best of the {draws} alone has {100 * best:.1f} %.")
        apart = distance(late.space, late.swa.average_or(late.last), mean.point).item()
        print(
            f"{name:<8} SWA is {apart:.1e} from the Karcher mean of {late.swa.count} versions (residual "
            f"{mean.residual.item():.1e}); the simplex {fitted.residuals.mean().item():.2f} from them on average"
        )
        found[name] = (late, fitted)
    options.out.mkdir(parents=True, exist_ok=True)
    picture(found, options.out / "averaging.png")
    print(f"{options.out / 'averaging.png'} ({time.perf_counter() - began:.0f} s)")
    print(f"Seen: accuracies of the last model and of the average of late ones: {', '.join(seen)}.")


if __name__ == "__main__":
    main()
