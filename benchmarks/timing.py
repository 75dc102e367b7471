"""Times of several calls, taken in turns, so that a noisy moment of the machine meets all of them."""

import json
import os
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def machine() -> str:
    """What this machine is: what its processor can do, what that is called, and how many cores of it there are."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return ", ".join([platform.machine(), *names[:1], f"{os.cpu_count()} cores"])


def interleaved(
    calls: Mapping[str, Callable[[], Any]], *, repetitions: int = 15, least: float = 2e-3
) -> dict[str, list[float]]:
    """Seconds of the processor for one call, each `repetitions` times in turns.

    Short calls are repeated for `least` seconds.

    Of the processor, on all its threads: what else runs on the machine does not count.
    """
    repeats = {}
    for name, call in calls.items():
        call()
        start = time.process_time()
        call()
        repeats[name] = max(1, int(least / max(time.process_time() - start, 1e-9)))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(repeats[name]):
                call()
            seconds[name].append((time.process_time() - start) / repeats[name])
    return seconds


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile; of a single value that."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return low, middle, high


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile of the ratios of pairs."""
    return quartiles([a / b for a, b in zip(ours, theirs, strict=True)])


def in_turns(
    calls: Mapping[str, Callable[[], Any]],
    repetitions: int,
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
    for turn in range(repetitions):
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


def beside_the_first(
    calls: Mapping[str, Callable[[], Any]], repetitions: int, about: Mapping[str, Any], unit: int
) -> Iterator[dict[str, Any]]:
    """A row for each way: milliseconds, ratios to those of the first, and the most that it held.

    Args:
        calls: the ways by name.
        repetitions: how often each is taken.
        about: what all rows say of them.
        unit: bytes in which memory is counted.
    """
    taken = in_turns(calls, repetitions)
    first, *_ = calls
    for way, seconds in taken.items():
        low, middle, high = ratio(seconds, taken[first])
        told = {"ms": 1e3 * statistics.median(seconds), "ratio": middle, "low": low, "high": high}
        yield {**about, "way": way, **told, "extra": 0.0 if way == first else extra(calls[way]) / unit}


TIMES = f"{'ms':>10}{'x floor':>9}{'quartiles':>17}{'extra models':>13}"
"""The head of what `times` says."""


def times(row: Mapping[str, Any]) -> str:
    """What a row of `beside_the_first` says beside the name of the way, in the columns of `TIMES`."""
    spread = f"{row['low']:.2f} to {row['high']:.2f}"
    return f"{row['ms']:>10.4f}{row['ratio']:>9.2f}{spread:>17}{row['extra']:>13.2f}"


def tabled(
    path: Path,
    head: Sequence[str],
    rows: Iterable[dict[str, Any]],
    shown: Callable[[dict[str, Any]], str],
    repetitions: int,
) -> None:
    """Print a line for each row as soon as there is one; then write the lines as `.txt`, and the rows as `.json`."""
    lines, found = [*head], []
    print(*head, sep="\n", flush=True)
    for row in rows:
        found.append(row)
        lines.append(shown(row))
        print(lines[-1], flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    settings = {"repetitions": repetitions, "torch": torch.__version__, "machine": platform.platform()}
    path.with_suffix(".json").write_text(json.dumps({"settings": settings, "rows": found}, indent=1) + "\n")


def by_parts(
    path: Path,
    head: str,
    settings: Mapping[str, Any],
    parts: Iterable[str],
    made: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], list[str]]]],
    size: Any,
    *,
    write: bool,
) -> None:
    """Print the table of each part, and write all tables and their numbers; parts that are left out stay as they were.

    Args:
        path: of the numbers, `.json`; the tables stand beside them as `.txt`.
        head: the first line.
        settings: what the numbers follow from.
        parts: names in `made`.
        made: what makes the rows of a part of this size, and their lines, in the order of the file.
        size: how long it may take.
        write: whether anything is written.
    """
    rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() and write else {}
    rows["settings"] = dict(settings)
    print(head, flush=True)
    for part in parts:
        make, table = made[part]
        rows[part] = make(size)
        print("", *table(rows[part]), sep="\n", flush=True)
        if write:
            lines = [line for name in made if name in rows for line in ("", *made[name][1](rows[name]))]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".txt").write_text("\n".join([head, *lines]) + "\n")
            path.write_text(json.dumps(rows, indent=1) + "\n")
