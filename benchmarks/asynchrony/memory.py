"""Measure the memory of a server with 10^7 parameters and eight clients in flight, for the rules of scenario B.

    python benchmarks/asynchrony/memory.py

Each rule runs in a process of its own. The server receives 40 updates, and dispatches to the client again after each
update. The table shows the resident memory of the server, in multiples of the model (40 MB), without the memory of the
process before the server exists, and without the update that the client sends.
"""

import json
import multiprocessing
import sys
from pathlib import Path

import pandas as pd
import torch

from manifoldagg.experiments.combined_report import markdown_table
from manifoldagg.experiments.registry import method
from manifoldagg.federated import Payload, Server
from manifoldagg.manifolds import Flat

sys.path.insert(0, str(Path(__file__).parent.parent))
from resident import resident

PARAMETERS = 10**7
CLIENTS = 8
UPDATES = 40
METHODS = ("fedavg:cohort=8", "fedbuff:size=4", "fedortho", "asynccorrected:correction=autothreshold")
METHODS += ("asynckrylov:pieces=2", "ca2fl:size=4", "asyncbezier")
RESULTS = Path(__file__).parent.parent / "results" / "asynchrony"


def measure(name: str) -> dict[str, float]:
    """Return the final and the largest resident memory of a server, in multiples of the model."""
    torch.set_num_threads(1)
    made = method(name, rate=0.1).bind(range(CLIENTS))
    points = getattr(made.trainer, "pieces", 2 if name.startswith("asyncbezier") else 1)
    model = torch.zeros(PARAMETERS)
    update = torch.empty(points, PARAMETERS)
    update.normal_(generator=torch.Generator().manual_seed(0))
    update *= 1e-3
    before = resident()
    server = Server(Flat(PARAMETERS), made.rule, model, weights=dict.fromkeys(range(CLIENTS), 1))
    tickets = [server.dispatch(client) for client in range(CLIENTS)]
    largest = 0
    for i in range(UPDATES):
        server.receive(tickets.pop(0), Payload(update, samples=1))
        tickets.append(server.dispatch(i % CLIENTS))
        largest = max(largest, resident())
    size = 4 * PARAMETERS
    return {"at the end": (resident() - before) / size, "largest": (largest - before) / size}


def main() -> None:
    """Print and store the table."""
    rows = {}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in METHODS:
            rows[name] = pool.apply(measure, (name,))
            print(name, rows[name], flush=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "memory.json").write_text(json.dumps(rows, indent=1) + "\n")
    table = pd.DataFrame(
        [(name, *(f"{row[column]:.1f}" for column in ("at the end", "largest"))) for name, row in rows.items()],
        columns=["method", "memory at the end, models", "largest, models"],
    )
    (RESULTS / "memory.md").write_text(markdown_table(table) + "\n")


if __name__ == "__main__":
    main()
