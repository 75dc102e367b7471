"""Chunks: cache-sized slices of vectors, for several operations in sequence."""

from collections.abc import Iterator

import torch
from torch import Tensor

from manifoldagg.kernels.operands import is_sharded

__all__ = ["chunks"]

CHUNK_SIZE = 1 << 18
"""The number of entries of a chunk per thread. A dozen such vectors fit into the last-level cache. The overhead of the
calls, about 0.1 ms in total, is small compared with their work. Chunks a quarter of this size were slower than whole
vectors on one thread."""


def chunks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield chunks of vectors (P,) as views. Vectors on a GPU or on several ranks are yielded whole.

    Example:
        >>> model, mean = torch.zeros(10), torch.ones(10)
        >>> for part, other in chunks(model, mean):
        ...     _ = part.add_(other)
        >>> model.sum()
        tensor(10.)
    """
    width = CHUNK_SIZE * torch.get_num_threads()
    if not vectors[0].is_cpu or is_sharded(vectors):
        yield vectors
        return
    yield from zip(*(vector.split(width) for vector in vectors), strict=True)
