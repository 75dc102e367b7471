"""Times of several calls, taken in turns, so that a noisy moment of the machine meets all of them."""

import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

from torch.profiler import ProfilerActivity, profile


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


def in_turns(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    least: float = 2e-3,
    prepare: Callable[[str], Any] = lambda name: None,
) -> dict[str, list[float]]:
    """Seconds of a clock on the wall for one call, in turns that begin with another one each; short ones repeated.

    On the wall, as threads that wait for one another take no time of the processor. `prepare(name)` goes before.
    """
    repeats = {}
    for name, call in calls.items():
        prepare(name)
        call()
        started = time.perf_counter()
        call()
        repeats[name] = max(1, int(least / (time.perf_counter() - started)))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        names = list(calls)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            prepare(name)
            started = time.perf_counter()
            for _ in range(repeats[name]):
                calls[name]()
            taken[name].append((time.perf_counter() - started) / repeats[name])
    return taken


def extra(call: Callable[[], Any]) -> int:
    """The most bytes that one call held at once, of torch's allocator and of Python's."""
    call()
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        kept = call()
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del kept
    held, most = 0, 0
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most + python
