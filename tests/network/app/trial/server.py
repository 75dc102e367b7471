"""The server of the app: `Asynchronous`, and a thread that writes the status of its server to files."""

import json
import os
import threading
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from manifoldagg.federated import CheckpointPolicy, Server
from manifoldagg.federated.rules import FedAsync
from manifoldagg.federated.server.events import Accepted, Event, Rejected
from manifoldagg.integrations.flower import Asynchronous
from trial.digits import TASK, note, right

app = ServerApp()


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Evaluate the model of a round."""
    model = TASK.model()
    model.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": right(model)})


def write(path: Path, content: object) -> None:
    """Write a JSON file atomically."""
    path.with_suffix(".part").write_text(json.dumps(content))
    path.with_suffix(".part").replace(path)


def known(server: Server) -> dict[str, object]:
    """Return the status of the server for JSON."""
    out = [str(ticket.client) for ticket in server._state.value.tickets.values()]
    return {"pid": os.getpid(), "version": server.version, "updates": server.updates, "out": out}


def watch(strategy: Asynchronous, folder: Path, done: threading.Event) -> None:
    """Write the status of the server and the results of updates to files. Stop the server if the file `stop` exists."""

    def tell(event: Event) -> None:
        if isinstance(event, Accepted | Rejected):
            reason = event.reason if isinstance(event, Rejected) else ""
            note(str(folder), "events", json.dumps({"client": str(event.client), "reason": reason}))

    while getattr(strategy, "server", None) is None:
        if done.wait(0.01):
            return
    server = strategy.server
    server.on_event(tell)
    note(str(folder), "begun", json.dumps({"version": server.version}))
    while not done.wait(0.2):
        write(folder / "status.json", known(server))
        if (folder / "stop").exists():
            strategy.stop()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds, or until the file `stop` exists in the folder."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = context.run_config
    folder = Path(str(config["folder"]))
    strategy = Asynchronous(
        FedAsync(0.5),
        model=TASK.model,
        updates=config["updates"],
        task_timeout=config["task_timeout"],
        min_available_nodes=config["least"],
        fraction_evaluate=config["evaluate"],
        checkpoint=CheckpointPolicy(folder / "server.checkpoint", every_updates=1),
        resume=config["resume"],
    )
    done = threading.Event()
    watcher = threading.Thread(target=watch, args=(strategy, folder, done))
    watcher.start()
    try:
        result = strategy.start(
            grid, ArrayRecord(TASK.model().state_dict()), num_rounds=config["rounds"], evaluate_fn=evaluate
        )
    finally:
        done.set()
        watcher.join()
    write(folder / "status.json", known(strategy.server))
    rights = {number: metrics["accuracy"] for number, metrics in result.evaluate_metrics_serverapp.items()}
    asked = {number: dict(metrics) for number, metrics in result.evaluate_metrics_clientapp.items()}
    said = {"rights": rights, "asked": asked, "right": evaluate(0, result.arrays)["accuracy"]}
    write(folder / "result.json", said)
