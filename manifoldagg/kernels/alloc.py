"""Allocation of large tensors in huge pages, to reduce the number of page faults.

Linux maps a page of new memory when a program first writes to it. With the usual page size of 4 KiB, the resulting page
faults take several times as long as the write itself. The functions of this module therefore request pages of 2 MiB for
large tensors. Linux grants the request if `/sys/kernel/mm/transparent_hugepage/enabled` is `madvise` (the default of
most distributions) or `always`.
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
"""The size of a huge page. Smaller tensors cannot use one."""


def empty_like(tensor: Tensor, **options: Any) -> Tensor:
    """Allocate an uninitialised tensor as `torch.empty_like` does, and use huge pages if it is large.

    Example:
        >>> empty_like(torch.ones(2, 3), dtype=torch.float64).shape
        torch.Size([2, 3])
    """
    return in_huge_pages(torch.empty_like(tensor, **options))


def clone(tensor: Tensor) -> Tensor:
    """Copy a tensor as `torch.clone` does, and use huge pages if it is large.

    Example:
        >>> clone(torch.ones(2))
        tensor([1., 1.])
    """
    return tensor.clone() if tensor.numel() * tensor.itemsize < HUGE_PAGE_BYTES else empty_like(tensor).copy_(tensor)


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors as `torch.stack` does, and use huge pages if the result is large.

    If the sequence contains a single tensor, the result is a view of this tensor.

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
    """Ask the operating system to store a newly allocated tensor in huge pages, and return the tensor.

    Call the function before the first write to the tensor. The function ignores tensors that are smaller than a huge
    page.

    Example:
        >>> x = torch.empty(2)
        >>> in_huge_pages(x) is x
        True
    """
    # A tensor smaller than a huge page cannot profit. Traced code has no memory yet.
    if tensor.numel() * tensor.itemsize >= HUGE_PAGE_BYTES and not torch.compiler.is_compiling():
        _advise_huge_pages(tensor)
    return tensor


def _advise_huge_pages(tensor: Tensor) -> None:
    """Request huge pages for the memory of a tensor, and ignore a failure."""
    advise = _madvise()
    # Subclasses and functorch wrappers have no address of their own.
    plain = type(tensor) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    if advise is None or not plain or not tensor.is_cpu or tensor.layout is not torch.strided:
        return
    # The request covers only whole pages, because other objects may share the first and the last page. `madvise` also
    # rejects a start that is not a multiple of the page size.
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (tensor.data_ptr() + tensor.numel() * tensor.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
    advise(start, stop - start, mmap.MADV_HUGEPAGE)


@cache
def _madvise() -> Any:
    """Return the C function `madvise`, or `None` if the system has no huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    madvise = ctypes.CDLL(None).madvise
    # Without these types, ctypes would pass Python integers as 32-bit C ints and truncate the address.
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
