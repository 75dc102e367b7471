"""Cases of `test_sharded`, which each of two ranks runs on a module that FSDP2 shards."""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh

from manifoldagg.errors import ArgumentError
from manifoldagg.optim import Outer
from tests.optim.test_outer import RULES, _full
from tests.ranks import main


def model(cut=None):
    torch.manual_seed(0)
    # The weight of the last layer has one row, so one rank has an empty shard of it.
    made = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    if cut is not None:
        fully_shard(made, mesh=cut)
    return made


def step(outer, params, seed, **known):
    """Make one step with pseudo-gradients that are equal on every rank."""
    for i, p in enumerate(params):
        whole = _full(seed + 31 * i, p.shape)
        spread = isinstance(p, DTensor)
        p.grad = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None) if spread else whole
    outer.step(**known)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def states(outer, params):
    return [{name: full(x) if isinstance(x, torch.Tensor) else x for name, x in outer.state[p].items()} for p in params]


def cases(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    found = {}
    for name in ("ASGD", "FedOrtho", "by tensor", "DCASGD", "DiLoCo", "HeLoCo", "DelayedNesterov", "Decoupled DiLoCo"):
        runs = []
        for cut in (None, mesh):
            params = [*model(cut).parameters()]
            outer = Outer(params, RULES[name])
            bases = [[p.detach().clone() for p in params]]
            for i in range(4):
                step(outer, params, 977 * i, staleness=i % 2, base=bases[i - i % 2])
                bases.append([p.detach().clone() for p in params])
            placed = all(
                type(x) is type(p.data) for p in params for x in outer.state[p].values() if isinstance(x, torch.Tensor)
            )
            runs.append({"model": [full(p).detach() for p in params], "state": states(outer, params), "placed": placed})
        found[name] = runs
    return found | {"checkpoint": checkpoint(mesh), "refused": refused(mesh, rank), "replicated": replicated(mesh)}


def checkpoint(mesh):
    """Return the parameters of an uninterrupted run and of a run that resumed from a distributed checkpoint."""
    ends = []
    first = model(mesh)
    outer = Outer(first.parameters(), RULES["HeLoCo"])
    for i in range(2):
        step(outer, [*first.parameters()], i)
    other = model(mesh)
    second = Outer(other.parameters(), RULES["HeLoCo"])
    other.load_state_dict(first.state_dict())
    kept = get_optimizer_state_dict(first, outer)
    kept["state"] = {
        name: {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in state.items()}
        for name, state in kept["state"].items()
    }
    set_optimizer_state_dict(other, second, kept)
    for made, optimiser in ((first, outer), (other, second)):
        step(optimiser, [*made.parameters()], 7)
        ends.append([full(p).detach() for p in made.parameters()])
    return ends


def refused(mesh, rank):
    """Return the error on each rank if one rank has a NaN gradient, and whether all parameters are unchanged."""
    made = model(mesh)
    params = [*made.parameters()]
    outer = Outer(made.named_parameters(), RULES["HeLoCo"])
    step(outer, params, 1)
    before = [full(p).detach() for p in params]
    for p in params:
        p.grad = distribute_tensor(torch.ones(p.shape, dtype=p.dtype), mesh, p.placements, src_data_rank=None)
    if rank == 1:
        params[0].grad.to_local()[0, 0] = torch.nan
    try:
        outer.step()
        told = ""
    except ArgumentError as error:
        told = str(error)
    return told, all(torch.equal(a, full(p).detach()) for a, p in zip(before, params, strict=True))


def replicated(mesh):
    """Make a step on replicated parameters, which requires no communication."""
    p = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()], src_data_rank=None))
    outer = Outer([p], RULES["ASGD"])
    p.grad = distribute_tensor(torch.ones(4), mesh, [Replicate()], src_data_rank=None)
    outer.step()
    return p.to_local().detach()


if __name__ == "__main__":
    main(cases)
