"""APPFL: an aggregator for its asynchronous scheduler."""

from appfl.algorithm.aggregator import BaseAggregator

from manifoldagg import AsyncAggregator
from manifoldagg.federated.rules import FedOrtho


class Corrected(BaseAggregator):
    def __init__(self, model, aggregator_configs, logger):
        self.versions = AsyncAggregator(FedOrtho(rate=0.5), model.state_dict())
        self.versions.checkout("the first model")  # of whoever is not named when it is handed out

    def get_parameters(self, client_id=None, **kwargs):
        return self.versions.model if client_id is None else self.versions.checkout(client_id, restart=True)

    def aggregate(self, client_id, local_model, **kwargs):
        if (client_id, None) not in self.versions.in_flight:
            self.versions.checkout(client_id, version=0)
        self.versions.submit(client_id, local_model, samples=self.client_sample_size[client_id])
        return self.versions.checkout(client_id)
