"""NVFlare: an aggregator for its `FedAvg`. Whoever answers a round began it with the same model."""

from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator

from manifoldagg import AsyncAggregator
from manifoldagg.federated.rules import FedOrtho


class Corrected(ModelAggregator):
    def __init__(self, model):
        super().__init__()
        self.versions = AsyncAggregator(FedOrtho(rate=0.5), model)

    def reset_stats(self):  # a round begins
        self.versions.checkout("round", restart=True)
        self.began = self.versions.version

    def accept_model(self, model):
        self.versions.checkout(client := model.meta["client_name"], version=self.began, restart=True)
        steps = model.meta.get("NUM_STEPS_CURRENT_ROUND", 1)
        # With `enable_tensor_disk_offload=True`, the tensors are in files, which `materialize` maps into memory.
        params = {name: x.materialize() if hasattr(x, "materialize") else x for name, x in model.params.items()}
        self.versions.submit(client, params, samples=steps, difference=model.params_type == "DIFF")

    def aggregate_model(self):
        return FLModel(params=self.versions.model)
