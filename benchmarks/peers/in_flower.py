"""The shared workload in Flower's simulation engine: `in_flower.py WORK STARTED`, in a separate network namespace.

Ray listens on every network interface. In the namespace, this is only the loopback, which the script enables.
"""

import logging
import sys
import tempfile
import warnings

import apart
import equal
import flwr
import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

WORK, CLOCK = equal.read()
client = ClientApp()
server = ServerApp()


class Timed(FedAvg):
    """FedAvg that records the start of each round."""

    def configure_train(self, *args, **options):
        CLOCK.mark()
        return super().configure_train(*args, **options)


class Held:
    """The data that a worker keeps between tasks."""

    data: tuple[torch.Tensor, torch.Tensor] | None = None


@client.train()
def train(message: Message, context: Context) -> Message:
    """Compute one update of one client."""
    if Held.data is None:
        torch.set_num_threads(1)
        Held.data = equal.digits()
    inputs, labels = Held.data
    mine = torch.tensor(WORK.train[int(context.node_config["partition-id"])])
    model = equal.cnn()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    equal.train(model, inputs[mine], labels[mine], WORK, np.random.default_rng())
    metrics = MetricRecord({"num-examples": len(mine)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds."""
    strategy = Timed(
        fraction_train=WORK.cohort / len(WORK.train),
        min_train_nodes=WORK.cohort,
        min_available_nodes=len(WORK.train),
        fraction_evaluate=0.0,
    )
    strategy.start(grid, ArrayRecord(equal.cnn().state_dict()), num_rounds=WORK.warm + WORK.rounds)
    CLOCK.mark()


if __name__ == "__main__":
    if not apart.alone():
        sys.exit("in_flower.py: run it in a network namespace of its own: unshare --net")
    apart.raise_loopback()
    warnings.simplefilter("ignore")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        run_simulation(
            server_app=server,
            client_app=client,
            num_supernodes=len(WORK.train),
            backend_config={
                "init_args": {"num_cpus": WORK.jobs, "_temp_dir": folder, "include_dashboard": False},
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            },
        )
    CLOCK.report(engine="Flower", version=flwr.__version__)
