"""The ServerApp: a strategy that dispatches a new task to each node as soon as it has replied."""

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp
from task import federation_of, method_of

from manifoldagg.integrations.flower import Asynchronous

app = ServerApp()


@app.main()
def main(grid, context):
    """Train for the number of rounds in the run's configuration. All nodes of a simulation are connected."""
    config = context.run_config
    nodes = len(list(grid.get_node_ids()))
    federation = federation_of(config, nodes)
    held_out = np.concatenate(federation.held_out)
    model = federation.model()

    def evaluate(server_round, arrays):
        model.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            predicted = model(federation.dataset.inputs[held_out]).argmax(1)
        return MetricRecord({"accuracy": (predicted == federation.dataset.labels[held_out]).float().mean().item()})

    strategy = Asynchronous(method_of(config, nodes).rule, model=federation.model, seed=config["seed"])
    result = strategy.start(
        grid, ArrayRecord(model.state_dict()), num_rounds=config["rounds"], timeout=600, evaluate_fn=evaluate
    )
    accuracy = [f"{metrics['accuracy']:.3f}" for metrics in result.evaluate_metrics_serverapp.values()]
    staleness = [row["staleness"] for row in strategy.server.history]
    print(f"accuracy by round: {' '.join(accuracy)}")
    print(f"{len(staleness)} updates of {nodes} nodes, maximum staleness {max(staleness, default=0)}")
