"""The recipe in FLGo, on the digits with slow clients and dropouts."""

import json
import os
import random
import runpy
import sys
import tempfile
import types

import flgo
import flgo.simulator
import torch
from flgo.benchmark.toolkits.cv.classification import FromDatasetPipe, GeneralCalculator
from flgo.utils.fmodule import FModule
from sklearn.datasets import load_digits

recipe = runpy.run_path(sys.argv[1])
pixels, labels = load_digits(return_X_y=True)
DATA = torch.utils.data.TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
CLIENTS = 6


class TaskPipe(FromDatasetPipe):
    class TaskDataset(torch.utils.data.Subset):
        def __init__(self, dataset, indices, perturbation=None):
            super().__init__(dataset, indices)

    def __init__(self, task_path):
        super().__init__(task_path, train_data=DATA, test_data=DATA)


TaskCalculator = GeneralCalculator


class Net(FModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))

    def forward(self, inputs):
        return self.layers(inputs)


class Server(recipe["Server"]):
    def initialize(self):
        super().initialize()
        self.tolerance_for_latency = 20  # A client drops out after this time.


class model:
    @staticmethod
    def init_local_module(party):
        pass

    @staticmethod
    def init_global_module(party):
        if isinstance(party, Server):
            party.model = Net()


class Simulator(flgo.simulator.DefaultSimulator):
    """Clients with delays of 1 to 9 units of time, which occasionally drop out."""

    def update_client_connectivity(self, client_ids):
        self.set_variable(client_ids, "prob_drop", [0.1 for _ in client_ids])

    def update_client_responsiveness(self, client_ids, *args, **kwargs):
        self.set_variable(client_ids, "latency", [random.randint(1, 9) for _ in client_ids])


def main():
    sys.modules |= {"digits": types.ModuleType("digits"), "digits.core": sys.modules["__main__"]}
    names = [f"Client{i}" for i in range(CLIENTS)]
    with tempfile.TemporaryDirectory() as folder:
        for sub in ("log", "record"):
            os.mkdir(os.path.join(folder, sub))
        with open(os.path.join(folder, "info"), "w") as file:
            json.dump({"benchmark": "digits", "scene": "horizontal", "num_clients": CLIENTS}, file)
        held = {name: {"data": list(range(i, len(DATA), CLIENTS))} for i, name in enumerate(names)}
        with open(os.path.join(folder, "data.json"), "w") as file:
            json.dump({"client_names": names, **held}, file)
        options = {"num_rounds": 40, "proportion": 0.7, "num_steps": 20, "batch_size": 32, "learning_rate": 0.5}
        options |= {"train_holdout": 0.0, "eval_interval": -1, "no_log_console": True, "no_tqdm": True, "seed": 1}
        algorithm = types.SimpleNamespace(__name__="recipe", Server=Server, Client=recipe["Client"])
        runner = flgo.init(folder, algorithm, options, model=model, Simulator=Simulator)
        late = []
        submit = runner.versions.submit
        runner.versions.submit = lambda *args, **named: late.append(submit(*args, **named)["staleness"])
        runner.run()
    with torch.no_grad():
        right = (runner.model(DATA.tensors[0]).argmax(1) == DATA.tensors[1]).double().mean().item()
    print(f"FLGo: {len(late)} answers, up to {max(late)} versions late, accuracy {right:.2f}")
    assert len(late) >= 40
    assert max(late) >= 2
    assert right > 0.8
    assert runner.versions.version == len(late)


if __name__ == "__main__":
    main()
