"""Compare merges with the methods of mergekit on float64 tensors.

    python benchmarks/peers/mergekit_equality.py ENV/bin/python

ENV is an environment with mergekit. mergekit runs in a process of its own and reads the same files. The table shows the
largest relative difference over all tensors. It was made with mergekit 0.1.5.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from manifoldagg.averaging import merge

K = 4
PEER = """
import sys
from types import SimpleNamespace
from safetensors.torch import load_file, save_file
from mergekit.merge_methods.karcher import karcher_merge_tensors
from mergekit.merge_methods.linear import linear_merge
from mergekit.merge_methods.nuslerp import nuslerp
from mergekit.merge_methods.slerp import slerp
import torch
folder = sys.argv[1]
states = [load_file(f"{folder}/{i}.safetensors") for i in range(int(sys.argv[2]))]
k = len(states)
linear = linear_merge.implementation
calls = {
    "linear": lambda xs: linear(SimpleNamespace(tensors=[x[None] for x in xs]), torch.ones(1, k))[0],
    "karcher": lambda xs: karcher_merge_tensors(xs, [1 / k] * k, max_iter=200, tol=1e-13),
    "slerp": lambda xs: slerp(torch.tensor([0.3], dtype=torch.float64), xs[0][None], xs[1][None])[0],
    "nuslerp": lambda xs: nuslerp(0.3, xs[0], xs[1], flatten=True),
}
for name, call in calls.items():
    save_file({n: call([s[n] for s in states]).contiguous() for n in states[0]}, f"{folder}/peer-{name}.safetensors")
"""
OURS: dict[str, tuple[int, dict[str, Any]]] = {
    "linear": (K, {}),
    "karcher": (K, {"method": "karcher"}),
    "slerp": (2, {"method": "slerp", "t": 0.3}),
    "nuslerp": (2, {"method": "slerp", "t": 0.3}),
}


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = write_models(folder)
        environment = {"HF_HUB_OFFLINE": "1", "PATH": ""}
        subprocess.run([sys.argv[1], "-c", PEER, name, str(K)], check=True, env=environment)
        print(f"{'mergekit':<9} {'difference':>10}")
        for method, (k, options) in OURS.items():
            merge(paths[:k], out=folder / "ours.safetensors", **options)
            ours, theirs = load_file(folder / "ours.safetensors"), load_file(folder / f"peer-{method}.safetensors")
            difference = max(float((ours[n] - theirs[n]).norm() / ours[n].norm()) for n in ours)
            print(f"{method:<9} {difference:10.1e}")


def write_models(folder: Path) -> list[Path]:
    """Write k versions of a model of three tensors."""
    paths = []
    for i in range(K):
        state = {}
        for n, shape in enumerate([(300, 40), (77,), (5, 6, 7)]):
            base = torch.randn(shape, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(100 * (i + 1) + n), dtype=torch.float64)
            state[f"t{n}"] = (1 + 0.1 * i) * (base + 0.3 * noise)
        paths.append(folder / f"{i}.safetensors")
        save_file(state, paths[-1])
    return paths


if __name__ == "__main__":
    main()
