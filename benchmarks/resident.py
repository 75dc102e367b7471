"""Memory, open files and threads of a process, and their growth."""

import math
import os
import statistics
import threading
from collections.abc import Sequence

import numpy as np

__all__ = ["descriptors", "megabytes", "resident", "slope", "threads"]

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def descriptors() -> int:
    """Return the number of open file descriptors, without the descriptor that this call opens."""
    return len(os.listdir("/proc/self/fd")) - 1


def threads() -> int:
    """Return the number of running Python threads."""
    return threading.active_count()


def megabytes(size: float) -> float:
    """Convert bytes to megabytes (10^6 bytes)."""
    return size / 1e6


def slope(x: Sequence[float], y: Sequence[float], blocks: int = 20) -> tuple[float, float]:
    """Return the slope of y over x, and half the width of its 95 % confidence interval.

    The function fits a line to the means of consecutive blocks. Consecutive measurements are correlated, but the means
    of blocks are nearly independent.
    """
    blocks = min(blocks, len(x))
    if blocks < 3:
        return math.nan, math.inf
    u = np.array([statistics.fmean(part) for part in np.array_split(np.asarray(x, float), blocks)])
    v = np.array([statistics.fmean(part) for part in np.array_split(np.asarray(y, float), blocks)])
    if np.ptp(v) == 0:
        return 0.0, 0.0
    from scipy.stats import linregress, t

    line = linregress(u, v)
    return float(line.slope), float(line.stderr * t.ppf(0.975, blocks - 2))
