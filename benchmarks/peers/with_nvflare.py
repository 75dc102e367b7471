"""The recipe with the loop of NVFlare's FedAvg, with clients in this process and without a network."""

import runpy
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_opt.pt.lazy_tensor_dict import LazyTensorDict
from safetensors.torch import save_file

Corrected = runpy.run_path(sys.argv[1])["Corrected"]
CLIENTS = ["site-1", "site-2", "site-3"]


class Here(FedAvg):
    """FedAvg that passes its messages to functions."""

    def sample_clients(self, num_clients=None):
        return CLIENTS

    def send_model(self, task_name, targets, data, callback, **options):
        for i, client in enumerate(targets):
            step = {name: 0.1 * (x * 0 + 1) * (i + 1) for name, x in data.params.items()}
            full = {name: data.params[name] + step[name] for name in step}
            # The third client sends differences, and the second client sends NaNs in the second round.
            params, kind = (step, ParamsType.DIFF) if i == 2 else (full, ParamsType.FULL)
            if i == 1 and self.current_round == 1:
                params = {name: x * np.nan for name, x in params.items()}
            if self.offloads:
                params = offloaded(params)
            meta = {"client_name": client, "NUM_STEPS_CURRENT_ROUND": 10 * (i + 1)}
            try:
                callback(FLModel(params=params, params_type=kind, meta=meta))
            except ValueError as refusal:  # NVFlare's controller also catches every error of a callback.
                self.refused.append(str(refusal))

    def get_num_standing_tasks(self):
        return 0

    def event(self, event_type):
        pass

    def fire_event_with_data(self, *args):
        pass

    def info(self, message):
        pass

    def save_model(self, model):
        self.saved = model


def offloaded(params):
    """Return references to tensors in files, as NVFlare passes them with `enable_tensor_disk_offload=True`."""
    folder = tempfile.mkdtemp()
    files = {}
    for i, (name, x) in enumerate(params.items()):
        files[name] = str(Path(folder) / f"chunk_{i}.safetensors"), f"T{i}"
        save_file({f"T{i}": x}, files[name][0])
    lazy = LazyTensorDict(files, folder)
    return {name: lazy.make_lazy_ref(name) for name in files}


def run(first, *, offloads=False):
    """Run three rounds. Return the controller and the number of applied updates."""
    aggregator = Corrected(first)
    told = []
    submit = aggregator.versions.submit
    aggregator.versions.submit = lambda *args, **named: told.append(submit(*args, **named))
    controller = Here(num_clients=3, num_rounds=3, model=first, aggregator=aggregator)
    controller.offloads = offloads
    controller.fl_ctx = FLContext()
    controller.abort_signal = Signal()
    controller.refused = []
    controller.run()
    assert [numbers["staleness"] for numbers in told] == [0, 1, 2, 0, 1, 0, 1, 2]
    assert len(controller.refused) == 1
    assert "expected finite values" in controller.refused[0]
    assert all(np.array_equal(controller.saved.params[name], aggregator.versions.model[name]) for name in first)
    assert controller.saved.params["w"].min() > 0
    return controller, len(told)


def main():
    _, count = run({"w": np.zeros(3, np.float32), "b": np.zeros(1, np.float32)})
    tensors = {"w": torch.zeros(3), "b": torch.zeros(1)}
    in_memory, in_files = (run(tensors, offloads=offloads)[0].saved.params for offloads in (False, True))
    assert all(torch.equal(in_memory[name], in_files[name]) for name in tensors)
    print(f"NVFlare: {count} answers in 3 rounds, and one refused; tensors in files give the same model")


if __name__ == "__main__":
    main()
