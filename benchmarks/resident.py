"""What a process holds: memory, open files and threads, and whether they grow."""

import math
import os
import statistics
import threading
from collections.abc import Sequence

import numpy as np

__all__ = ["descriptors", "megabytes", "resident", "slope", "threads"]

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def descriptors() -> int:
    """Open files, sockets and what else has a number, but for the look itself."""
    return len(os.listdir("/proc/self/fd")) - 1


def threads() -> int:
    """Threads of Python that run."""
    return threading.active_count()


def megabytes(size: float) -> float:
    """Bytes in units of 10^6."""
    return size / 1e6


def slope(x: Sequence[float], y: Sequence[float], blocks: int = 20) -> tuple[float, float]:
    """By how much y grows with x, and half of the interval in which that lies with 95 %.

    A line through the means of so many blocks, one after another: neighbours depend on each other, such means
    hardly do.
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
