"""Chunks: cache-sized slices of vectors, for several operations in sequence."""

from collections.abc import Iterator

import torch
from torch import Tensor

from manifoldagg.kernels.operands import is_sharded

__all__ = ["chunks"]

CHUNK_SIZE = 1 << 18
"""Entries for each thread: a dozen vectors fit a last cache, and what calls cost, a tenth of a millisecond in all, is
small beside their work. Of a quarter of that, on one thread, they took longer than of whole vectors."""


def chunks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield chunks of vectors (P,) as views; on a device or over ranks the vectors themselves.

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
