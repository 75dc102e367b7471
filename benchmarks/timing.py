"""Times of several calls that run in turns, so that a disturbance of the machine affects all of them."""

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
    """Describe the machine: architecture, processor and number of cores."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return ", ".join([platform.machine(), *names[:1], f"{os.cpu_count()} cores"])


def interleaved(
    calls: Mapping[str, Callable[[], Any]], *, repetitions: int = 15, least: float = 2e-3
) -> dict[str, list[float]]:
    """Return the processor seconds of each call, measured `repetitions` times in turns.

    Short calls are repeated for `least` seconds. Processor time includes all threads of this process but no other
    processes.
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
    """Return the first quartile, the median and the third quartile. A single value is returned three times."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return low, middle, high


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile of the ratios of pairs."""
    return quartiles([a / b for a, b in zip(ours, theirs, strict=True)])


def in_turns(
    calls: Mapping[str, Callable[[], Any]],
    repetitions: int,
    *,
    least: float = 2e-3,
    prepare: Callable[[str], Any] = lambda name: None,
) -> dict[str, list[float]]:
    """Return the wall-clock seconds of each call. The calls run in turns, and each turn starts with another call.

    Wall-clock time is used because threads that wait for each other consume no processor time. Short calls are repeated
    for `least` seconds. `prepare(name)` runs before each measurement.
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
    """Return the peak memory of one call in bytes, of PyTorch's and Python's allocators."""
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
    """Yield a row for each method: milliseconds, the ratio to the first method, and the peak memory.

    Args:
        calls: the methods by name.
        repetitions: the number of measurements of each method.
        about: entries that are added to each row.
        unit: the unit of memory, in bytes.
    """
    taken = in_turns(calls, repetitions)
    first, *_ = calls
    for way, seconds in taken.items():
        low, middle, high = ratio(seconds, taken[first])
        told = {"ms": 1e3 * statistics.median(seconds), "ratio": middle, "low": low, "high": high}
        yield {**about, "way": way, **told, "extra": 0.0 if way == first else extra(calls[way]) / unit}


TIMES = f"{'ms':>10}{'x floor':>9}{'quartiles':>17}{'extra models':>13}"
"""The header of the columns that `times` returns."""


def times(row: Mapping[str, Any]) -> str:
    """Format the numbers of a row of `beside_the_first` in the columns of `TIMES`."""
    spread = f"{row['low']:.2f} to {row['high']:.2f}"
    return f"{row['ms']:>10.4f}{row['ratio']:>9.2f}{spread:>17}{row['extra']:>13.2f}"


def tabled(
    path: Path,
    head: Sequence[str],
    rows: Iterable[dict[str, Any]],
    shown: Callable[[dict[str, Any]], str],
    repetitions: int,
) -> None:
    """Print each row as soon as it is measured. Then write the lines as `.txt` and the rows as `.json`."""
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
    """Measure parts of a benchmark and print their tables. Results of other parts remain in the files.

    Args:
        path: the path of the `.json` file with the numbers. The tables are written to a `.txt` file next to it.
        head: the first line.
        settings: the settings to store.
        parts: the names of the parts to measure.
        made: for each part, a function that measures its rows and a function that formats them, in the order of the
            file.
        size: the settings that determine the duration.
        write: whether to write the files.
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
