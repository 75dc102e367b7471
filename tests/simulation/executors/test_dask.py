"""Runs on a Dask cluster: two processes on this machine, which read its files or get all by value."""

import pytest
import torch

from manifoldagg.federated.rules import FedAsync
from manifoldagg.simulation import Method, run
from tests.simulation.executors.runners import METHODS, DiesWhenCollected, federation

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


def test_a_worker_that_dies_between_result_and_receipt_changes_nothing(client, tmp_path):
    method = Method("dies", FedAsync(0.5), DiesWhenCollected(str(tmp_path / "died")))
    found = run(federation(), method, num_updates=10, executor=client.get_executor())
    assert (tmp_path / "died").exists()
    # The file exists now, so this run kills no process.
    assert found == run(federation(), method, num_updates=10)
