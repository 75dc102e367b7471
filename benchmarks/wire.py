"""Time of `pack` and `unpack`, compared with a memory copy, safetensors and pickle.

    python benchmarks/wire.py [--size 10000000] [--repetitions 9] [--output benchmarks/results/wire]

The model has a given number of float32 parameters in 100 tensors. `memcpy` reads and writes every byte once, into
existing memory. `new bytes` copies into new memory, which every implementation of `pack` must allocate. Times are
wall-clock times on one thread, measured in turns. The ratio is relative to `new bytes`, as median and quartiles. Sizes
are those of normal numbers with standard deviation 0.02, which is the worst case for the compression of weights.
"""

import argparse
import json
import pickle
import statistics
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from timing import in_turns, ratio

from manifoldagg import ParameterSpace
from manifoldagg.federated import Message, Payload
from manifoldagg.manifolds.layout import Entry, Layout
from manifoldagg.wire import pack, unpack

TENSORS = 100
HEADER = f"{'':<34} {'ms':>8} {'GB/s':>7} {'/ new bytes':>20} {'bytes / raw':>12}"


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=10_000_000)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "wire")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measured(options.size, options.repetitions)
    lines = [f"torch {torch.__version__}, one thread, {options.size} float32 in {TENSORS} tensors", HEADER]
    lines += [shown(name, row) for name, row in rows.items()]
    print("\n".join(lines), flush=True)
    options.output.parent.mkdir(exist_ok=True)
    options.output.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    options.output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


def measured(size: int, repetitions: int) -> dict[str, dict[str, object]]:
    """Return seconds, ratios and sizes by name."""
    width = size // TENSORS
    space = ParameterSpace(Layout(tuple(Entry(f"layers.{i}.weight", (width,), torch.float32) for i in range(TENSORS))))
    start = 0.02 * torch.randn(space.shape[0], generator=torch.Generator().manual_seed(0))
    message = Message(start)
    payload = Payload(start[None], 1)
    named = {leaf.name: piece.clone() for leaf, piece in zip(space.layout.leaves, start.split(width), strict=True)}
    source = start.numpy()
    place = np.empty_like(source)
    data = {
        "pack": pack(message),
        "with names": pack(message, spec=space),
        "compress=True": pack(payload, spec=space, compress=True),
        "error=1e-4": pack(payload, spec=space, error=1e-4),
        "safetensors.save": safetensors.torch.save(named),
        "pickle.dumps": pickle.dumps(named, protocol=5),
    }
    calls = {
        "memcpy": lambda: np.copyto(place, source),
        "new bytes": source.tobytes,
        "pack": lambda: pack(message),
        "with names": lambda: pack(message, spec=space),
        "compress=True": lambda: pack(payload, spec=space, compress=True),
        "error=1e-4": lambda: pack(payload, spec=space, error=1e-4),
        "safetensors.save": lambda: safetensors.torch.save(named),
        "pickle.dumps": lambda: pickle.dumps(named, protocol=5),
        "unpack": lambda: unpack(data["pack"]),
        "unpack with names": lambda: unpack(data["with names"], spec=space),
        "unpack compress=True": lambda: unpack(data["compress=True"], spec=space),
        "safetensors.load": lambda: safetensors.torch.load(data["safetensors.save"]),
    }
    seconds = in_turns(calls, repetitions)
    return {
        name: {
            "seconds": taken,
            "ratio": ratio(taken, seconds["new bytes"]),
            "bytes": len(data[name]) if name in data else None,
            "raw": source.nbytes,
        }
        for name, taken in seconds.items()
    }


def shown(name: str, row: dict) -> str:
    """Format a row of the table."""
    median = statistics.median(row["seconds"])
    low, middle, high = row["ratio"]
    share = f"{row['bytes'] / row['raw']:.3f}" if row["bytes"] else ""
    ratios = f"{middle:.2f} ({low:.2f}-{high:.2f})"
    return f"{name:<34} {1e3 * median:8.2f} {row['raw'] / median / 1e9:7.2f} {ratios:>20} {share:>12}"


if __name__ == "__main__":
    main()
