"""The task of the app: scikit-learn's digits with a Dirichlet split, and the method in the run's configuration."""

from contextlib import suppress
from functools import lru_cache, partial

from manifoldagg.errors import ArgumentError
from manifoldagg.experiments import load_dataset
from manifoldagg.experiments.registry import method
from manifoldagg.federated import suggest_rate
from manifoldagg.simulation import FederatedDataset, Method, dirichlet_partition


def federation_of(config, nodes: int) -> FederatedDataset:
    """Return the training samples and the held-out samples of each node."""
    return _split(nodes, config["concentration"], config["seed"])


def method_of(config, nodes: int) -> Method:
    """Return the rule and its trainer, with a stable rate for this number of nodes unless the method has one."""
    default = method(config["method"]).bind(range(nodes))
    rate = None
    with suppress(ArgumentError):  # the rates of some rules, such as FedAdam, have another unit and do not scale
        rate = suggest_rate(default.rule, num_clients=nodes, concurrency=nodes)
    return method(config["method"], rate).bind(range(nodes))


@lru_cache(maxsize=1)
def _split(nodes: int, concentration: float, seed: int) -> FederatedDataset:
    partition = partial(dirichlet_partition, concentration=concentration)
    return FederatedDataset.split(load_dataset("digits"), nodes, partition=partition, seed=seed)
