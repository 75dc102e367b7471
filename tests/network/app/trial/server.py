"""The server with the strategy `Asynchronous`, and a thread that writes its status to files."""

import json
import os
import threading
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from manifoldagg.federated import CheckpointPolicy, Durability, Server
from manifoldagg.federated.rules import FedAsync
from manifoldagg.federated.server.events import Accepted, Event, Rejected
from manifoldagg.integrations.flower import Asynchronous
from trial.digits import TASK, append_line, test_accuracy

app = ServerApp()


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Evaluate the model at the end of a round."""
    model = TASK.model()
    model.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": test_accuracy(model)})


def write(path: Path, content: object) -> None:
    """Write a JSON file atomically."""
    path.with_suffix(".part").write_text(json.dumps(content))
    path.with_suffix(".part").replace(path)


def status(server: Server) -> dict[str, object]:
    """Return the status of the server as JSON values."""
    in_flight = [str(ticket.client) for ticket in server._state.value.tickets.values()]
    return {"pid": os.getpid(), "version": server.version, "updates": server.updates, "in_flight": in_flight}


def watch(strategy: Asynchronous, folder: Path, done: threading.Event) -> None:
    """Write the status and the received updates to files. Stop the strategy when the file `stop` exists."""

    def log_update(event: Event) -> None:
        if isinstance(event, Accepted | Rejected):
            reason = event.reason if isinstance(event, Rejected) else ""
            append_line(str(folder), "events", json.dumps({"client": str(event.client), "reason": reason}))

    while getattr(strategy, "server", None) is None:
        if done.wait(0.01):
            return
    server = strategy.server
    server.on_event(log_update)
    append_line(str(folder), "starts", json.dumps({"version": server.version}))
    while not done.wait(0.2):
        write(folder / "status.json", status(server))
        if (folder / "stop").exists():
            strategy.stop()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds, or until the file `stop` exists."""
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
        durability=Durability(CheckpointPolicy(folder / "server.checkpoint", every_updates=1)),
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
    write(folder / "status.json", status(strategy.server))
    accuracies = {number: metrics["accuracy"] for number, metrics in result.evaluate_metrics_serverapp.items()}
    client_metrics = {number: dict(metrics) for number, metrics in result.evaluate_metrics_clientapp.items()}
    final = evaluate(0, result.arrays)["accuracy"]
    write(folder / "result.json", {"accuracies": accuracies, "client_metrics": client_metrics, "final": final})
