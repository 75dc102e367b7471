"""Write a small file of each format. `python -m tests.format_files` replaces the files that the tests read."""

import contextlib
from pathlib import Path

import torch

from manifoldagg import wire
from manifoldagg.averaging import SWA
from manifoldagg.curves.bezier import Bezier
from manifoldagg.curves.fit import Fit, fit
from manifoldagg.curves.phases import Phases
from manifoldagg.federated import Durability, Payload, Server, ServerLimits
from manifoldagg.federated.rules import FedAsync
from manifoldagg.manifolds import Flat, ParameterSpace

FOLDER = Path(__file__).parent / "data" / "formats"
NETWORK = torch.nn.BatchNorm1d(2)
RULE = FedAsync(0.5)
POINT = torch.tensor([[3.0, 3.0, 2.0, 2.0]])
MODEL = torch.tensor([2.0, 2.0, 1.0, 1.0])
"""The model after one update from `NETWORK` to `POINT`."""


def updated(**options):
    """Return a server with one accepted update, a dropped ticket, and a ticket in flight."""
    server = Server.of(NETWORK, RULE, limits=ServerLimits(history_size=3), **options)
    ticket = server.dispatch("ward-7")
    server.receive(ticket, Payload(POINT, 10, buffers=ticket.message.buffers)).check()
    server.drop(server.dispatch("ward-8"))
    server.dispatch(9)
    return server


def fitted(steps, resume=None) -> Fit:
    """Fit a line from 0 to the end point (1, 2)."""
    end = torch.tensor([1.0, 2.0])
    return fit(
        Bezier(Flat(2), degree=1),
        lambda theta, batch: (theta - batch).square().sum(),
        [end],
        start=torch.zeros(2),
        phases=Phases(steps=(steps, 0)),
        generator=torch.Generator().manual_seed(0),
        resume=resume,
    )


def averaged(*models):
    """Average models with the versions 0, 1, …"""
    average = SWA(Flat(2))
    for version, model in enumerate(models):
        average.update(version, model)
    return average


def write(folder):
    """Write the files into a folder."""
    updated().save(folder / "checkpoint")
    updated(durability=Durability(journal=folder / "journal")).close()
    (folder / "journal.lock").unlink()
    averaged(torch.zeros(2), torch.ones(2)).save(folder / "average")
    fitted(2).save(folder / "fit")
    payload = Payload(POINT, 10, tensors={"extra": torch.arange(3)}, numbers={"loss": float("inf")})
    spec = ParameterSpace.of(NETWORK).spec()
    (folder / "message").write_bytes(wire.pack(payload, spec=spec, ticket="a ticket"))


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        (FOLDER / "journal.0.journal").unlink()
    write(FOLDER)
