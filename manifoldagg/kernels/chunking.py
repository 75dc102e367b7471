"""Iteration over long vectors in chunks that fit into the cache.

An operation that consists of several elementwise steps can process one chunk after another. Only the first step then
reads a chunk from main memory. The later steps find the chunk in the cache.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from manifoldagg.kernels.operands import is_sharded

__all__ = ["chunks"]

CHUNK_SIZE = 1 << 18
"""The number of entries of a chunk per thread.

A dozen chunks of this size fit into the last-level cache. The overhead of the calls, about 0.1 ms in total, is small
compared with their work. On one thread, chunks of a quarter of this size were slower than whole vectors.
"""


def chunks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Iterate over several vectors of equal length in chunks that fit into the cache.

    Each iteration yields one view of each vector. All views contain the same range of entries. Vectors on a GPU and
    sharded vectors are yielded as a whole.

    Example:
        >>> model, mean = torch.zeros(10), torch.ones(10)
        >>> for part, other in chunks(model, mean):
        ...     _ = part.add_(other)
        >>> model.sum()
        tensor(10.)
    """
    # torch splits an operation over its threads, so a chunk contains `CHUNK_SIZE` entries for each of them.
    width = CHUNK_SIZE * torch.get_num_threads()
    if not vectors[0].is_cpu or is_sharded(vectors):
        yield vectors
        return
    yield from zip(*(vector.split(width) for vector in vectors), strict=True)
