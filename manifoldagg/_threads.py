"""The choice between torch's threads and NumPy for one tensor."""

import torch
from torch import Tensor

__all__ = ["prefers_numpy"]

GRAIN_SIZE = 2**15
"""The number of entries from which torch shares the work among its threads."""
MIN_PARALLEL_SIZE = 2**22
"""The number of entries from which threads pay off on a busy machine. Below it, one thread is faster."""


def prefers_numpy(tensor: Tensor) -> bool:
    """Return whether torch would use several threads for a tensor although one, with NumPy, is as fast.

    On a machine with other things to do its pool keeps the caller waiting, for ten milliseconds rather than for 20 µs.
    """
    if (
        torch.get_num_threads() == 1
        or not GRAIN_SIZE <= tensor.numel() < MIN_PARALLEL_SIZE
        or type(tensor) is not Tensor
    ):
        return False
    # NumPy takes no other.
    return tensor.is_cpu and tensor.dtype in (torch.float32, torch.float64) and tensor.is_contiguous()
