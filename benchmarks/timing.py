"""Times of several calls, taken in turns, so that a noisy moment of the machine meets all of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def interleaved(
    calls: Mapping[str, Callable[[], Any]], *, rounds: int = 15, least: float = 2e-3
) -> dict[str, list[float]]:
    """Seconds of the processor for one call, each `rounds` times in turns; short ones repeated for `least` seconds.

    Of the processor, on all its threads: what else runs on the machine does not count.
    """
    repeats = {}
    for name, call in calls.items():
        call()
        start = time.process_time()
        call()
        repeats[name] = max(1, int(least / max(time.process_time() - start, 1e-9)))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(repeats[name]):
                call()
            seconds[name].append((time.process_time() - start) / repeats[name])
    return seconds


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile of the ratios of pairs."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return low, middle, high
