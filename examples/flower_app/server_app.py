"""The server: Flower's own, with a strategy that gives each node new work as soon as it has answered."""

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp
from task import federation_of, method_of

from manifoldagg.integrations.flower import Asynchronous

app = ServerApp()


@app.main()
def main(grid, context):
    """Train for as many rounds as the run's config says; all nodes are connected."""
    config = context.run_config
    nodes = len(list(grid.get_node_ids()))
    federation = federation_of(config, nodes)
    held_out = np.concatenate(federation.held_out)
    model = federation.model()

    def evaluate(server_round, arrays):
        model.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            guess = model(federation.dataset.inputs[held_out]).argmax(1)
        return MetricRecord({"accuracy": (guess == federation.dataset.labels[held_out]).float().mean().item()})

    strategy = Asynchronous(method_of(config, nodes).rule, model=federation.model, seed=config["seed"])
    result = strategy.start(
        grid, ArrayRecord(model.state_dict()), num_rounds=config["rounds"], timeout=600, evaluate_fn=evaluate
    )
    accuracy = [f"{metrics['accuracy']:.3f}" for metrics in result.evaluate_metrics_serverapp.values()]
    staleness = [row["staleness"] for row in strategy.server.history]
    print(f"accuracy by round: {' '.join(accuracy)}")
    print(f"{len(staleness)} updates of {nodes} nodes, staleness at most {max(staleness, default=0)}")
