"""Import time of the public names of `manifoldagg`, compared with `import torch`.

New processes run in turns, and ratios are computed for pairs of processes.
"""

import argparse
import statistics
import subprocess
import sys
import time

from timing import ratio


def seconds(statement: str) -> float:
    """Return the wall-clock time of a Python process that runs `statement`."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - started


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=11)
    pairs = parser.parse_args().pairs
    everything = "from manifoldagg import *"  # names are loaded on first access
    seconds(everything)
    torch, ours = [], []
    for _ in range(pairs):
        torch.append(seconds("import torch"))
        ours.append(seconds(everything))
    low, middle, high = ratio(ours, torch)
    print(f"import torch               {statistics.median(torch):6.3f} s (median of {pairs})")
    print(f"from manifoldagg import *  {statistics.median(ours):6.3f} s")
    print(f"ratio                      {middle:6.3f}   (quartiles {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
