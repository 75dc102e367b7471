"""The shared workload in FLGo: `in_flgo.py WORK STARTED`."""

import json
import os
import sys
import tempfile
import types

import equal
import flgo
import torch
from flgo.algorithm import fedavg
from flgo.benchmark.toolkits.cv.classification import FromDatasetPipe, GeneralCalculator
from flgo.utils.fmodule import FModule

WORK, CLOCK = equal.read()
DATA = torch.utils.data.TensorDataset(*equal.digits())


class TaskPipe(FromDatasetPipe):
    """The digits as an FLGo benchmark. PyTorch 2.13 rejects FLGo's own `TaskDataset`."""

    class TaskDataset(torch.utils.data.Subset):
        """The samples of a client."""

        def __init__(self, dataset, indices, perturbation=None) -> None:
            super().__init__(dataset, indices)

    def __init__(self, task_path: str) -> None:
        super().__init__(task_path, train_data=DATA, test_data=torch.utils.data.Subset(DATA, [0, 1]))


TaskCalculator = GeneralCalculator


class Net(FModule):
    """The CNN with FLGo's arithmetic of models."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = equal.cnn()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.layers(inputs)


class model:
    """The initial models of FLGo's server and clients."""

    @staticmethod
    def init_local_module(party) -> None:
        """Do nothing, because clients start from the received model."""

    @staticmethod
    def init_global_module(party) -> None:
        """Set the initial model of the server to the CNN."""
        if isinstance(party, Server):
            party.model = Net().to(party.device)


class Server(fedavg.Server):
    """FedAvg that records the start of each round."""

    def iterate(self):
        CLOCK.mark()
        return super().iterate()


class algorithm:
    """FedAvg."""

    Server = Server
    Client = fedavg.Client


def main() -> None:
    """Run all rounds."""
    package = types.ModuleType("digits")
    sys.modules |= {"digits": package, "digits.core": sys.modules["__main__"]}
    names = [f"Client{i}" for i in range(len(WORK.train))]
    with tempfile.TemporaryDirectory() as folder:
        for sub in ("log", "record"):
            os.mkdir(os.path.join(folder, sub))
        with open(os.path.join(folder, "info"), "w") as file:
            json.dump({"benchmark": "digits", "scene": "horizontal", "num_clients": len(names)}, file)
        with open(os.path.join(folder, "data.json"), "w") as file:
            held = {name: {"data": part} for name, part in zip(names, WORK.train, strict=True)}
            json.dump({"client_names": names, **held}, file)
        options = {
            "num_rounds": WORK.warm + WORK.rounds,
            "proportion": (WORK.cohort + 0.5) / len(names),
            "num_steps": WORK.steps,
            "batch_size": WORK.batch,
            "optimizer": "Adam",
            "learning_rate": WORK.rate,
            "train_holdout": 0.0,
            "eval_interval": -1,
            "no_log_console": True,
            "no_tqdm": True,
            "torch_num_threads": 1,
            "num_parallels": WORK.jobs,
            "parallel_type": "p",
        }
        flgo.init(folder, algorithm, options, model=model).run()
        CLOCK.mark()
    CLOCK.report(engine="FLGo", version=flgo.__version__)


if __name__ == "__main__":
    main()
