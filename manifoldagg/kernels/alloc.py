"""Allocation of results: large tensors use huge pages.

The system hands out new memory page by page, as it is first written. In pages of 4 KiB that takes several times as long
as the writing. Linux hands out 2 MiB at a time to who asks for it, where its administrator lets it:
`/sys/kernel/mm/transparent_hugepage/enabled` says `madvise`, as on most distributions, or `always`.
"""

import ctypes
import mmap
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["HUGE_PAGE_BYTES", "clone", "empty_like", "in_huge_pages", "stack"]

HUGE_PAGE_BYTES = 1 << 21
"""The bytes of a huge page: what is smaller holds none."""


def empty_like(tensor: Tensor, **options: Any) -> Tensor:
    """Allocate as `torch.empty_like`, with huge pages for large tensors.

    Example:
        >>> empty_like(torch.ones(2, 3), dtype=torch.float64).shape
        torch.Size([2, 3])
    """
    return in_huge_pages(torch.empty_like(tensor, **options))


def clone(tensor: Tensor) -> Tensor:
    """Copy as `torch.clone`, with huge pages for large tensors.

    Example:
        >>> clone(torch.ones(2))
        tensor([1., 1.])
    """
    return tensor.clone() if tensor.numel() * tensor.itemsize < HUGE_PAGE_BYTES else empty_like(tensor).copy_(tensor)


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Stack equally shaped tensors as `torch.stack`, with huge pages for large results; a single tensor is viewed.

    Example:
        >>> x = torch.ones(2)
        >>> stack([x]).data_ptr() == x.data_ptr(), stack([x, x]).shape
        (True, torch.Size([2, 2]))
    """
    first, *others = tensors
    if not others:
        return first[None]
    return torch.stack([*tensors], out=in_huge_pages(first.new_empty(len(tensors), *first.shape)))


def in_huge_pages(tensor: Tensor) -> Tensor:
    """Request huge pages for a large unwritten tensor, and return the tensor.

    Example:
        >>> x = torch.empty(2)
        >>> in_huge_pages(x) is x
        True
    """
    if tensor.numel() * tensor.itemsize >= HUGE_PAGE_BYTES and not torch.compiler.is_compiling():
        _advise_huge_pages(tensor)
    return tensor


def _advise_huge_pages(tensor: Tensor) -> None:
    """An advice: where it cannot be followed nothing is lost."""
    advise = _madvise()
    plain = type(tensor) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    if advise is None or not plain or not tensor.is_cpu or tensor.layout is not torch.strided:
        return
    # The pages that are the tensor's alone.
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (tensor.data_ptr() + tensor.numel() * tensor.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
    advise(start, stop - start, mmap.MADV_HUGEPAGE)


@cache
def _madvise() -> Any:
    """The system's, where it has huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found
