"""Local shards of vectors that are distributed over several processes (ranks).

A shard is the part of a vector that one rank stores. The vectors are either `DTensor`s, which know their placement, or
plain tensors in a context of [`across_ranks`][manifoldagg.kernels.shards.across_ranks].
"""

import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from manifoldagg._validation import check_count
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels.blocks import Blocks
from manifoldagg.kernels.collectives import Ranks
from manifoldagg.kernels.operands import (
    SHARD_GROUP,
    Operand,
    Operands,
    Subtrahend,
    dtensors_in,
    iter_tensors,
    needs_autograd_path,
)
from manifoldagg.kernels.tensor_list import Row

__all__ = ["LocalShard", "SegmentBounds", "across_ranks", "collective_guard"]

SegmentBounds = Sequence[tuple[int, int]]


@contextmanager
def across_ranks(group: "dist.ProcessGroup | None" = None, *, replicated: Collection[int] = ()) -> Iterator[None]:
    """Treat plain tensors in this context as the shards of this rank, so that `gram` and `combine` cover all ranks.

    - `segments` are the lengths of the local pieces. Every rank passes the same number of segments. If a rank stores no
      entry of a tensor, the length is 0.
    - `gram` returns the same bits on every rank.
    - `combine` uses the coefficients of rank 0 and writes only the local shard.

    A model sharded by FSDP2 is such a set of shards, with one segment for each parameter:
    `torch.cat([p.to_local().flatten() for p in model.parameters()])`, with the lengths `p.to_local().numel()`.
    `DTensor`s know their ranks, so they do not need this context and ignore it.

    Every rank of the group must make the same calls in the same order, even if it stores no entries. If one rank
    rejects its arguments, or if the calls differ between ranks, all ranks raise an exception. Replicated segments are
    not compared between ranks.

    Args:
        group: the ranks; `None` selects the default group.
        replicated: the indices of the segments that every rank stores completely. Only rank 0 counts them.

    Raises:
        ArgumentError: if there is no process group, or if this rank is not in it.

    Cost: one all-gather of 8 KiB per rank for each call. More than 500 sums (four rows in fifty segments) need a second
    all-gather of 16 bytes per sum. Rows whose squares exceed the range of float64 need two more all-gathers.

    Example:
        >>> from manifoldagg.kernels import gram
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with across_ranks():
        ...     gram([torch.ones(3)])
        tensor([[[3.]]], dtype=torch.float64)
        >>> dist.destroy_process_group()
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ArgumentError(
            "group: expected an initialised process group, got none; call torch.distributed.init_process_group"
        )
    if dist.get_rank(group) < 0:
        raise ArgumentError(f"group: expected a process group that contains rank {dist.get_rank()}, got one without it")
    # Sorted indices give equal checksums on all ranks, and the last index is the largest one.
    replicated_segments = tuple(sorted({check_count("replicated", s, at_least=0) for s in replicated}))
    token = SHARD_GROUP.set((group, replicated_segments))
    try:
        yield
    finally:
        SHARD_GROUP.reset(token)


@contextmanager
def collective_guard(*groups: Subtrahend | Row) -> Iterator[Ranks]:
    """Return a context manager that reports an exception on this rank to all other ranks.

    The other ranks then raise an [`ArgumentError`][manifoldagg.errors.ArgumentError] that names this rank, instead of
    waiting for it forever. Within the context, check the arguments of `sharded.gram` or `sharded.combine`. Call these
    two functions after the end of the context, because each of them opens its own context.

    Raises:
        ArgumentError: if the tensors are not shards, or if their mesh does not contain this rank.
    """
    dtensors = dtensors_in(groups)
    active = SHARD_GROUP.get()
    device = next((tensor.device for tensor in iter_tensors(groups) if isinstance(tensor, Tensor)), torch.device("cpu"))
    if dtensors:
        ranks = Ranks.of_mesh(dtensors[0].device_mesh, device)
    elif active:
        ranks = Ranks.of_group(active[0], device)
    else:
        raise ArgumentError("rows: expected DTensors, or a call within across_ranks, got plain tensors outside of it")
    with ranks.propagate_errors():
        yield ranks


@dataclass(frozen=True, eq=False)
class LocalShard:
    """The entries of several distributed vectors that the current rank stores.

    Attributes:
        blocks: the partition of the local entries into blocks.
        is_counted: one boolean for each segment, such as a layer. If several ranks store copies of the same entries, it
            is `True` on only one of them, so that a sum over the ranks includes these entries once.
        segments_checksum: for `DTensor`s, a checksum of the segment bounds in the whole vectors. Within `across_ranks`,
            a checksum of the indices of the replicated segments.
        dtypes_checksum: a checksum of the names and dtypes of the vectors. The ranks compare both checksums to detect
            calls with different arguments.
        local_tensors: a mapping from the `id` of each vector to its local part.
    """

    blocks: Blocks
    is_counted: tuple[bool, ...]
    segments_checksum: int
    dtypes_checksum: int
    local_tensors: dict[int, Operand]

    @staticmethod
    def of(rows: Operands, segments: SegmentBounds, **others: Operand | None) -> "LocalShard":
        """Return the local shard of the given vectors. Vectors that are `None` are ignored.

        Raises:
            ArgumentError: if the placements of the vectors differ or are not supported.
        """
        groups = (("rows", rows.plus), ("minus", rows.minus))
        listed = {f"{name}[{i}]": row for name, group in groups for i, row in enumerate(group)} | others
        named = {name: vector for name, vector in listed.items() if vector is not None}
        if needs_autograd_path(list(named.values())):
            raise ArgumentError(
                "rows: expected shards without autograd, got tracked ones; use torch.no_grad(), or detach them"
            )
        return _shard_of_mesh(named, segments) if dtensors_in([*named.values()]) else _shard_of_group(named, segments)

    def local(self, vector: Operand) -> Operand:
        """Return the local part of a vector that was passed to `of`."""
        return self.local_tensors[id(vector)]

    def local_operands(self, rows: Operands) -> Operands:
        """Return the local parts of rows as operands."""
        minus = tuple(row if row is None else self.local(row) for row in rows.minus)
        local = Operands.of(tuple(self.local(row) for row in rows.plus), minus)
        local.lengths = rows.lengths  # also if only the base or the target is a tuple
        return local

    def invariants(self, call: int, k: int) -> dict[str, int]:
        """Return the values that must be equal on every rank."""
        counts = {"number of rows": k, "number of segments": len(self.is_counted)}
        return {"call": call, **counts, "segments": self.segments_checksum, "dtypes": self.dtypes_checksum}


def _shard_of_group(vectors: dict[str, Operand], segments: SegmentBounds) -> LocalShard:
    """Return the part of distributed vectors that this rank stores as plain tensors."""
    group, replicated_segments = SHARD_GROUP.get() or (None, ())
    if replicated_segments and replicated_segments[-1] >= len(segments):
        raise ArgumentError(f"replicated: expected segments below {len(segments)}, got {replicated_segments[-1]}")
    # Rank 0 counts the replicated segments.
    first = dist.get_rank(group) == 0
    counted = tuple(first or s not in replicated_segments for s in range(len(segments)))
    tensors = {id(vector): vector for vector in vectors.values()}
    # Within `across_ranks`, the segments already describe the local entries, so they are not cut.
    return LocalShard(
        Blocks.of(tuple(segments)), counted, _checksum(replicated_segments), _dtypes_checksum(vectors), tensors
    )


def _shard_of_mesh(vectors: dict[str, Any], segments: SegmentBounds) -> LocalShard:
    """Return the part of distributed vectors (`DTensor`s) that this rank stores."""
    first = vectors["rows[0]"]
    for name, vector in vectors.items():
        _check_placement(name, vector, first)
    mesh = first.device_mesh
    start = 0
    stop = first.shape[0]
    original = True
    # Several mesh dimensions may shard the vector. Each of them splits the range that the previous dimensions left.
    for place, ways, index in zip(first.placements, mesh.shape, mesh.get_coordinate(), strict=True):
        # Like torch.chunk, a mesh dimension assigns ceil(n / ways) entries to each rank. The last ranks may therefore
        # have fewer entries, or none.
        if place.is_shard():
            width = -(-(stop - start) // ways)
            begin = start
            start = min(stop, begin + index * width)
            stop = min(stop, begin + (index + 1) * width)
        else:
            # A replicated vector is counted by the first rank of the mesh dimension.
            original = original and index == 0
    tensors: dict[int, Operand] = {}
    for name, vector in vectors.items():
        tensors[id(vector)] = local = _to_local(vector)
        if local.shape[0] != stop - start:
            expected = f"{stop - start} entries on rank {dist.get_rank()}"
            # The segments of the whole vector can be cut only if the shard contains the expected range.
            raise ArgumentError(f"{name}: expected {expected}, as split by torch.chunk, got {local.shape[0]}")
    # The segments of the whole vector, cut to the range of this shard.
    cuts = tuple((min(max(a, start), stop) - start, min(max(b, start), stop) - start) for a, b in segments)
    return LocalShard(Blocks.of(cuts), (original,) * len(cuts), _checksum(segments), _dtypes_checksum(vectors), tensors)


def _check_placement(name: str, vector: Any, expected_like: Any) -> None:
    """Check that `vector` is a `DTensor` with the mesh and the placements of `expected_like`.

    Raises:
        ArgumentError: if a placement is neither `Shard(0)` nor replicated, or if the mesh or the placements differ.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not isinstance(vector, DTensor):
        raise ArgumentError(f"{name}: expected a DTensor like the other rows, got a plain tensor")
    for place in vector.placements:
        if not (type(place) is Replicate or (type(place) is Shard and place.dim == 0)):
            raise ArgumentError(f"{name}: expected placements Shard(0) or Replicate(), got {place}")
    if vector.device_mesh != expected_like.device_mesh or vector.placements != expected_like.placements:
        expected, given = (f"{v.placements} on {v.device_mesh}" for v in (expected_like, vector))
        raise ArgumentError(f"{name}: expected the placements of rows[0], {expected}, got {given}")


def _to_local(vector: Any) -> Tensor:
    """Return the local tensor of a `DTensor`, after all pending communication has completed."""
    with torch.no_grad():
        local = vector.to_local()
    # A DTensor may return an asynchronous tensor, which must be complete before its memory is read.
    ready: Tensor = local.wait() if hasattr(local, "wait") else local
    return ready


def _checksum(integers: Iterable[int] | SegmentBounds) -> int:
    # Ranks exchange float64 numbers, which represent a 32-bit checksum exactly.
    return zlib.crc32(np.array([*integers], np.int64).tobytes())


def _dtypes_checksum(vectors: dict[str, Operand]) -> int:
    # The hash of a Python string differs between processes, so a checksum of its bytes is used.
    dtypes = [(name, *(tensor.dtype for tensor in iter_tensors((vector,)))) for name, vector in vectors.items()]
    return zlib.crc32(str(dtypes).encode())
