"""APPFL: an aggregator for its asynchronous scheduler."""

from appfl.algorithm.aggregator import BaseAggregator

from manifoldagg import Versions
from manifoldagg.federated.rules import FedOrtho


class Corrected(BaseAggregator):
    def __init__(self, model, aggregator_configs, logger):
        self.versions = Versions(FedOrtho(rate=0.5), model.state_dict())
        self.versions.send("the first model")  # of whoever is not named when it is handed out

    def get_parameters(self, client_id=None, **kwargs):
        return self.versions.model if client_id is None else self.versions.send(client_id, again=True)

    def aggregate(self, client_id, local_model, **kwargs):
        if (client_id, None) not in self.versions.tasks:
            self.versions.send(client_id, version=0)
        self.versions.take(client_id, local_model, samples=self.client_sample_size[client_id])
        return self.versions.send(client_id)
