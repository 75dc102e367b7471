"""What each rank of a small world does: the cases of `test_sharded`, in one process a rank."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import sharded
from manifoldagg.kernels.backends import reference
from manifoldagg.kernels.blocks import BLOCK_SIZE, Blocks
from manifoldagg.kernels.operands import Operands, is_sharded, segment_bounds
from manifoldagg.kernels.reduction import pairwise_sum, unpack_symmetric
from manifoldagg.kernels.shards import across_ranks, collective_guard
from tests.ranks import main
from tests.support import draw


class Broken:
    """A backend that fails."""

    def block_products(self, rows, blocks):
        raise RuntimeError("out of memory")


backend = reference
broken = Broken()


def vectors(size, k=3):
    """k rows, one vector that is subtracted from all but the first, and a base."""
    minus = draw(1, size, dtype=torch.float32)
    rows = Operands.of(tuple(draw(0, k, size, dtype=torch.float32)), (None, *(minus,) * (k - 1)))
    return rows, draw(2, size, dtype=torch.float32)


def compared(lengths, piece, segments, *, first, whole=None):
    """Both operations on pieces, and what one rank finds that holds everything."""
    rows, base = vectors(sum(lengths)) if whole is None else whole
    c, k = draw(3, len(lengths), len(rows.plus)), len(rows.plus)
    held = {id(vector): piece(vector) for vector in (*rows.distinct, base)}
    minus = tuple(row if row is None else held[id(row)] for row in rows.minus)
    pieces, out = Operands.of(tuple(held[id(row)] for row in rows.plus), minus), piece(torch.full_like(base, torch.nan))
    own = (c + (0 if first else 1)).tolist()
    with torch.no_grad():
        found = sharded.gram(pieces, segments, backend)
        assert sharded.combine(held[id(base)], pieces, own, segments, out, backend) is out
        fresh = sharded.combine(held[id(base)], pieces, own, segments, None, backend)
        assert isinstance(fresh, type(out))
        assert (fresh == out).all()
    blocks = Blocks.of(tuple(segment_bounds(lengths, rows.size)))
    dense = rows.materialise().abs()
    absolute = [part @ part.mT for part in dense.split(lengths, dim=1)] if lengths else []
    combined = piece(reference.combine(base, rows, c.tolist(), blocks, torch.empty_like(base)))
    return {
        "gram": found,
        "one": unpack_symmetric(pairwise_sum(reference.block_products(rows, blocks), blocks)[0], k),
        "bound": (BLOCK_SIZE + 1) * 2.0**-52 * torch.stack([torch.zeros(k, k).double(), *absolute])[1:],
        "combined": out.to_local() if isinstance(out, DTensor) else out,
        "one combined": combined.to_local() if isinstance(combined, DTensor) else combined,
    }


def held(rank, lengths, cuts, *, replicated=(), k=3):
    """Plain pieces: of segment s this rank holds from cuts[s][rank] to cuts[s][rank + 1], or all if replicated."""
    starts = [a for a, _ in segment_bounds(lengths, sum(lengths))]
    windows = [
        (start, start + length) if s in replicated else (start + cut[rank], start + cut[rank + 1])
        for s, (start, length, cut) in enumerate(zip(starts, lengths, cuts, strict=True))
    ]
    mine = [b - a for a, b in windows]
    with across_ranks(replicated=replicated):
        return compared(
            lengths,
            lambda vector: torch.cat([vector[:0], *(vector[a:b] for a, b in windows)]),
            segment_bounds(mine, sum(mine)) if mine else [],
            first=rank == 0,
            whole=vectors(sum(lengths), k),
        )


def even(lengths, world, unit=1):
    """Cuts of each segment into about equal numbers of units."""
    return [[min(n, unit * (-(-n // unit) * r // world)) for r in range(world + 1)] for n in lengths]


def plain_pieces(rank, world):
    lengths = [3 * BLOCK_SIZE + 100, 0, 2 * BLOCK_SIZE, 77]
    many = [5] * 60
    return {
        "aligned": held(rank, lengths, even(lengths, world, BLOCK_SIZE)),
        "crooked": held(rank, lengths, even(lengths, world)),
        "aligned, all on the last rank": held(rank, lengths, [[0] * world + [n] for n in lengths]),
        "aligned, some replicated": held(rank, lengths, even(lengths, world, BLOCK_SIZE), replicated=(0, 3)),
        "aligned, more than a message": held(rank, many, even(many, world, BLOCK_SIZE), k=20),
        "aligned, no segment": held(rank, [], []),
    }


def placed(lengths, mesh, *placements):
    return compared(
        lengths,
        lambda vector: distribute_tensor(vector, mesh, placements, src_data_rank=None),
        segment_bounds(lengths, sum(lengths)),
        first=not any(mesh.get_coordinate()),
    )


def meshed(rank, world):
    line, whole = init_device_mesh("cpu", (world,)), 2 * BLOCK_SIZE * world
    aligned, crooked = [BLOCK_SIZE, 0, whole - BLOCK_SIZE], [BLOCK_SIZE + 5, 0, 1, 2 * BLOCK_SIZE + 12]
    found = {
        "DTensor, aligned": placed([BLOCK_SIZE, 0, whole - BLOCK_SIZE - (world - 1)], line, Shard(0)),
        "DTensor, crooked": placed(crooked, line, Shard(0)),
        "DTensor, one entry": placed([0, 1], line, Shard(0)),
        "DTensor, no entry": placed([0], line, Shard(0)),
        "DTensor, aligned, replicated": placed(crooked, line, Replicate()),
    }
    grids = {
        f"{shape}": init_device_mesh("cpu", shape) for shape in ([(2, 2)] if world == 4 else [(1, world), (world, 1)])
    }
    if world == 4:
        grids["in another order"] = DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]]))
    for name, grid in grids.items():
        found[f"DTensor {name}, replicas of shards"] = placed(crooked, grid, Replicate(), Shard(0))
        found[f"DTensor {name}, shards of replicas"] = placed(crooked, grid, Shard(0), Replicate())
        found[f"DTensor {name}, aligned, shards of shards"] = placed(aligned, grid, Shard(0), Shard(0))
    return found


def module(rank, world):
    """The parameters of a module that FSDP2 has cut, before and after a step of an optimiser."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    shapes = [p.shape for p in model.parameters()]
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    model(torch.ones(2, 7)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    end = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
    local = torch.cat([p.to_local().detach().flatten() for p in model.parameters()])
    lengths, mine = [shape.numel() for shape in shapes], [p.to_local().numel() for p in model.parameters()]

    def piece(vector):
        parts = zip(vector.split(lengths), shapes, strict=True)
        chunks = [[*part.view(shape).chunk(world), *[vector[:0]] * world][rank] for part, shape in parts]
        return torch.cat([chunk.flatten() for chunk in chunks])

    with across_ranks():
        return {
            "FSDP2": compared(
                lengths,
                lambda vector: local if vector is end else piece(vector),
                segment_bounds(mine, sum(mine)),
                first=rank == 0,
                whole=(Operands.of((end, start), (start, None)), start),
            )
        }


def extreme(rank, world):
    """Float64 rows whose squares no float64 holds, though it holds some of their products or the sum of them."""
    huge = (2.0**600 if rank == 0 else 0.0) * torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    tiny = torch.full((1, 2 * BLOCK_SIZE), 2.0**-540, dtype=torch.float64)
    with across_ranks():
        apart = sharded.gram(Operands.of(huge), [(0, 2)], backend)
        small = sharded.gram(Operands.of(tiny), [(0, 2 * BLOCK_SIZE)], backend)
    return {"orthogonal": apart[0].tolist(), "tiny": small.item() / 2.0**-1065}


def some(rank, world):
    """What is not finite on one rank; ranks that meet without the last one."""
    row, rows = torch.tensor([1.0, torch.inf if rank == world - 1 else 2.0]), Operands.of((torch.ones(2),), (None,))
    with across_ranks():
        infinite = sharded.gram(Operands.of((row, torch.ones(2)), (None, None)), [(0, 2)], backend)
    members = list(range(max(1, world - 1)))
    group, mesh = dist.new_group(members), DeviceMesh("cpu", members)

    def in_group():
        with across_ranks(group):
            return sharded.gram(rows, [(0, 2)], backend).item()

    def in_mesh():
        row = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        return sharded.gram(Operands.of((row,), (None,)), [(0, 2 * len(members))], backend).sum().item()

    told = {"group": attempt(in_group), "mesh": attempt(in_mesh)}
    return {"infinite": infinite, "some ranks": told, "taken outside": is_sharded([row])}


def attempt(call):
    try:
        return call()
    except (ArgumentError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def refusals(rank, world):
    """What each rank is told when the last one hands in what cannot be used."""
    last, mesh, (rows, base) = rank == world - 1, init_device_mesh("cpu", (world,)), vectors(8)

    def odd(well, ill):
        return ill if last else well

    def gram(rows=rows, cuts=((0, 8),), backend=backend, replicated=(), context=True):
        with across_ranks(replicated=replicated) if context else nullcontext():
            return sharded.gram(rows, cuts, backend)

    def combine(rows=rows, grad=False):
        out = torch.zeros(8, requires_grad=grad)
        with across_ranks():
            try:
                return sharded.combine(base, rows, [[1.0] * len(rows.plus)], [(0, 8)], out, backend)
            finally:
                assert not out.any()

    def checked():
        with across_ranks():
            with collective_guard(rows.distinct):
                segment_bounds(odd([8], [9]), 8)
            return sharded.gram(rows, [(0, 8)], backend)

    def on_mesh(*plus, minus=None, size=8):
        return gram(Operands.of(plus, (minus,) * len(plus)), cuts=[(0, size)], context=False)

    def spread(placement, length=8):
        return DTensor.from_local(torch.ones(length), mesh, [placement], run_check=False)

    few = Operands.of(rows.plus[:2], rows.minus[:2])
    followed = Operands.of((rows.plus[0].clone().requires_grad_(),), (None,))
    uneven = {"shape": torch.Size([world + 6]), "stride": (1,), "run_check": False}
    attempts = {
        "a row that a derivative follows": lambda: gram(odd(few, followed)),
        "an out that a derivative follows": lambda: combine(grad=last),
        "a backend that fails": lambda: gram(backend=odd(backend, broken)),
        "a check that fails": checked,
        "an uneven DTensor": lambda: on_mesh(
            DTensor.from_local(torch.ones(odd(1, 7)), mesh, [Shard(0)], **uneven), size=world + 6
        ),
        "a segment beyond": lambda: gram(replicated=odd((), (1,))),
        "other rows": lambda: gram(odd(rows, few)),
        "other segments": lambda: gram(cuts=odd([(0, 8)], [(0, 3), (3, 8)])),
        "other replicas": lambda: gram(replicated=odd((), (0,))),
        "other calls": odd(gram, combine),
        "other dtypes": lambda: gram(odd(rows, Operands.of(tuple(row.half() for row in rows.plus), rows.minus))),
        "other coefficients": lambda: combine(odd(rows, few)),
        "plain among DTensors": lambda: on_mesh(spread(Shard(0)), minus=torch.ones(8 * world)),
        "mixed placements": lambda: on_mesh(spread(Replicate(), 8 * world), spread(Shard(0))),
        "a partial sum": lambda: on_mesh(spread(Partial())),
        "no context": lambda: gram(context=False),
    }
    told = {name: attempt(call) for name, call in attempts.items()}
    return {"refusals": told, "aligned, after refusals": held(rank, [8], even([8], world, BLOCK_SIZE))}


def cases(rank, world):
    chosen = {1: [plain_pieces, meshed, module, extreme, some], 4: [meshed]}.get(
        world, [plain_pieces, meshed, module, extreme, some, refusals]
    )
    found = {}
    for case in chosen:
        found |= case(rank, world)
    return found


if __name__ == "__main__":
    main(cases)
