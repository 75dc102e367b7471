"""Runs on a Dask cluster: two processes on this machine, which read its files or get all by value."""

import pytest
import torch

from manifoldagg.simulation import run
from manifoldagg.simulation.executors.shared_tensors import SharedTensorStore
from tests.simulation.executors.runners import METHODS, federation

distributed = pytest.importorskip("distributed")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def client():
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.mark.parametrize("method", ["fedasync", "routed", "remembers, drawn"])
def test_a_cluster_gives_the_same_bits(client, method):
    seen, others = [], []
    expected = run(federation(), METHODS[method], num_updates=10, on_update=seen.append)
    assert (
        run(federation(), METHODS[method], num_updates=10, executor=client.get_executor(), on_update=others.append)
        == expected
    )
    assert all(torch.equal(a.payload.points, b.payload.points) for a, b in zip(seen, others, strict=True))
    assert run(federation(), METHODS[method], num_updates=10, executor=client.get_executor) == expected


def test_on_one_machine_models_are_read_where_they_lie(client, monkeypatch):
    made = []

    class Seen(SharedTensorStore):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr("manifoldagg.simulation.executors.task_transport.SharedTensorStore", Seen)
    run(federation(), METHODS["fedasync"], num_updates=10, executor=client.get_executor())
    assert [store.remote for store in made] == [False]
