"""Time of `gram` and `combine` without a C++ compiler: by PyTorch, and by the libraries of a Linux wheel.

The reference is the library that is compiled on the machine for its own processor. All libraries run in turns in one
process, on one thread. A ratio is a processor time divided by the time of the reference. The option
`--wheel dist/*manylinux*.whl` selects the wheel, which `make release` builds.
"""

import argparse
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from ctypes import CDLL
from pathlib import Path
from typing import Any

import torch
from timing import interleaved, machine, ratio, tabled

from manifoldagg.kernels import combine, gram, set_backend
from manifoldagg.kernels.backends import cpu

HERE = Path(__file__).parent
DTYPES = (torch.float32, torch.bfloat16)
ROWS = (3, 8)
OWN = "built here"
TORCH = "torch"
HEAD = f"{'dtype':<10}{'P':>6}{'k':>4}  {'kernel':<9}{'by':<11}{'ratio':>7} {'quartiles':>15}"


def libraries(wheel: Path | None, folder: Path) -> dict[str, CDLL]:
    """Return the reference and the libraries of the wheel that this processor supports, by name."""
    path = folder / "own.so"
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise SystemExit("compiler: expected a C++ compiler, which builds the reference library")
    cpu._build(compiler, path)
    found = {OWN: cpu._load(path)}
    if wheel is not None:
        features = cpu._cpu_features().split()
        with zipfile.ZipFile(wheel) as archive:
            for level, needed in cpu.CPU_LEVELS.items():
                if needed.issubset(features):
                    member = archive.extract(f"manifoldagg/kernels/native-{level}.so", folder)
                    found[level] = cpu._load(Path(member))
    return found


def by(library: CDLL | None, call: Callable[[], Any]) -> Callable[[], Any]:
    """Return the call with a library, or with PyTorch alone."""

    def made() -> Any:
        set_backend("reference" if library is None else "cpu")
        cpu._require_library = lambda: library
        return call()

    return made


def measure(found: dict[str, CDLL], size: int, repetitions: int) -> Iterator[dict[str, Any]]:
    """Return a row for each kernel and each library except the reference."""
    ways: dict[str, CDLL | None] = {**found, TORCH: None}
    for dtype in DTYPES:
        for k in ROWS:
            noise = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
            rows, minus, out = [noise.roll(i) for i in range(k)], noise.roll(k), torch.empty_like(noise)
            coefficients = [1.0 / (j + 2) for j in range(k)]
            calls: dict[str, Callable[[], Any]] = {
                "gram": lambda rows=rows, minus=minus: gram(rows, minus=minus),
                "combine": lambda rows=rows, minus=minus, out=out, c=coefficients: combine(
                    minus, rows, c, minus=minus, out=out
                ),
            }
            for kernel, call in calls.items():
                seconds = interleaved(
                    {name: by(library, call) for name, library in ways.items()}, repetitions=repetitions
                )
                for name in [*ways][1:]:
                    low, middle, high = ratio(seconds[name], seconds[OWN])
                    about = {
                        "dtype": str(dtype).removeprefix("torch."),
                        "P": size,
                        "k": k,
                        "kernel": kernel,
                        "by": name,
                    }
                    yield {**about, "ratio": middle, "low": low, "high": high}


def shown(row: dict[str, Any]) -> str:
    """Format a row of the table."""
    spread = f"{row['low']:.2f} to {row['high']:.2f}"
    where = f"{row['dtype']:<10}{row['P']:>6.0e}{row['k']:>4}  {row['kernel']:<9}{row['by']:<11}"
    return f"{where}{row['ratio']:>7.2f} {spread:>15}"


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--size", type=float, default=2e6)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--out", "--output", type=Path, default=HERE / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    head = [f"Libraries beside the one built here; torch {torch.__version__}, {machine()}", HEAD]
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(libraries(options.wheel, Path(folder)), int(options.size), options.repetitions)
        tabled(options.out / "libraries", head, rows, shown, options.repetitions)


if __name__ == "__main__":
    main()
