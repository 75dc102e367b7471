"""The choice between PyTorch and single-threaded NumPy for a computation on one tensor."""

import torch
from torch import Tensor

__all__ = ["prefers_numpy"]

GRAIN_SIZE = 2**15
"""The smallest number of tensor entries for which PyTorch uses several threads."""
MIN_PARALLEL_SIZE = 2**22
"""The smallest number of tensor entries for which several threads are faster than one thread on a busy machine."""


def prefers_numpy(tensor: Tensor) -> bool:
    """Return whether a computation on a tensor should use single-threaded NumPy instead of PyTorch.

    NumPy is preferred for tensors of medium size, for which the multiple threads of PyTorch bring no speedup. If other
    processes also use the CPU, PyTorch can wait a long time for its threads. An operation of PyTorch can then take 10
    milliseconds instead of 20 microseconds.
    """
    if (
        torch.get_num_threads() == 1
        or not GRAIN_SIZE <= tensor.numel() < MIN_PARALLEL_SIZE
        or type(tensor) is not Tensor
    ):
        return False
    # NumPy is used only for contiguous CPU tensors of these two dtypes.
    return tensor.is_cpu and tensor.dtype in (torch.float32, torch.float64) and tensor.is_contiguous()
