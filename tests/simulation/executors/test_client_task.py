"""Client tasks: the payload follows from the task alone."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

from manifoldagg.errors import DivergenceError
from manifoldagg.federated import Message, Payload, Server, clients, train_client
from manifoldagg.federated.rules import FedAsync
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.simulation import ClientTask, FederatedDataset, TaskId, run_task
from manifoldagg.simulation.client_task import align_tensors
from tests.simulation.test_run import clusters, dirichlet
from tests.support import draw


def dropping() -> nn.Module:
    """A model with statistics of batches that draws for itself."""
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def federation(model=None):
    made = clusters() if model is None else replace(clusters(), model=model)
    return FederatedDataset.split(made, 3, partition=dirichlet(5.0), seed=0)


def task(of, trainer=None, task_id=(0, 0), client_state=None):
    server = Server.of(of.model(), FedAsync())
    return ClientTask(
        of, trainer or clients.Local(epochs=2), TaskId(*task_id), server.dispatch(0).message, client_state
    )


def same(a, b):
    """Whether two payloads agree bit for bit."""
    named = ("tensors", "buffers")
    assert all(getattr(a, name).keys() == getattr(b, name).keys() for name in named)
    pairs = [(a.points, b.points), *((getattr(a, n)[k], getattr(b, n)[k]) for n in named for k in getattr(a, n))]
    return a.samples == b.samples and all(torch.equal(x, y) for x, y in pairs)


def test_train_client_equals_the_trainer_and_keeps_the_module():
    model = dropping()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    message = Server.of(model, FedAsync()).dispatch(0).message
    batches = list(federation().batches(0, 0))
    space = ParameterSpace.of(model)
    loss = space.loss(model, nn.functional.cross_entropy)
    trainer = clients.Local(epochs=2)
    torch.manual_seed(3)
    expected = trainer.train(space, message, loss, batches, None, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(3)
    payload = train_client(model, message, trainer, batches, generator=torch.Generator().manual_seed(1))
    assert same(payload, expected)
    assert payload.buffers["1.num_batches_tracked"] == 2 * len(batches)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("model", [None, dropping])
def test_payload_is_independent_of_threads_and_earlier_random_numbers(model):
    given = [task(federation(model), task_id=TaskId(client, nth)) for client in range(3) for nth in range(2)]
    torch.manual_seed(5)
    expected = [run_task(one) for one in given]
    assert not same(expected[0], expected[1])
    torch.manual_seed(6)
    with ThreadPoolExecutor(3) as pool:
        assert all(map(same, pool.map(run_task, given), expected))
    assert all(same(run_task(one), payload) for one, payload in reversed(list(zip(given, expected, strict=True))))


@pytest.mark.parametrize("model", [None, dropping])
def test_global_state_of_torch_is_unchanged(model):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    state = torch.random.get_rng_state()
    seen = []

    class Looks:
        def train(self, space, message, loss, batches, memory, *, generator):
            seen.append(torch.get_num_threads())
            raise DivergenceError("no")

    try:
        one = task(federation(model))
        run_task(one)
        with pytest.raises(DivergenceError):
            run_task(replace(one, trainer=Looks()))
        assert (seen, torch.get_num_threads()) == ([1], 2)
        assert torch.equal(torch.random.get_rng_state(), state)
    finally:
        torch.set_num_threads(before)


def test_each_task_seeds_the_global_generator():
    class Draws:
        def train(self, space, message, loss, batches, memory, *, generator):
            return Payload(torch.rand(1, *space.shape), 1)

    one = task(federation())
    run_task(one)
    drawn = [run_task(replace(one, trainer=Draws())).points for _ in range(2)]
    assert torch.equal(*drawn)


def test_payload_tensors_are_aligned_like_new_tensors():
    apart = torch.zeros(41)[1:]
    tree = {"odd": apart, "whole": torch.ones(8), "turned": draw(0, 3, 4).T, "count": 3}
    settled = align_tensors(tree)
    assert settled["whole"] is tree["whole"]
    for name in ("odd", "turned"):
        tensor = settled[name]
        assert torch.equal(tensor, tree[name])
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    seen = []

    class Looks:
        def train(self, space, message, loss, batches, memory, *, generator):
            seen.extend([message.start, message.tensors["t"], memory["m"]])
            return Payload(torch.zeros(2, *space.shape)[1:], 1, {"t": apart}, client_state={"m": apart})

    of = federation()
    size = ParameterSpace.of(of.model()).layout.size
    message = Message(torch.zeros(size + 1)[1:], {"t": apart})
    payload = run_task(ClientTask(of, Looks(), TaskId(0, 0), message, {"m": apart}))
    for tensor in (*seen, payload.points, payload.tensors["t"], payload.client_state["m"]):
        assert tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
