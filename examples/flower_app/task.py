"""What is learned, scikit-learn's digits split over the nodes by Dirichlet, and how, as the run's config says."""

from functools import lru_cache, partial

from manifoldagg.experiments import load_dataset
from manifoldagg.experiments.registry import method
from manifoldagg.simulation import FederatedDataset, Method, dirichlet_partition


def federation_of(config, nodes: int) -> FederatedDataset:
    """Who of so many nodes holds which digits, for training and held out."""
    return _split(nodes, config["concentration"], config["seed"])


def method_of(config, nodes: int) -> Method:
    """A rule, and the trainer that feeds it."""
    return method(config["method"]).bind(range(nodes))


@lru_cache(maxsize=1)
def _split(nodes: int, concentration: float, seed: int) -> FederatedDataset:
    partition = partial(dirichlet_partition, concentration=concentration)
    return FederatedDataset.split(load_dataset("digits"), nodes, partition=partition, seed=seed)
