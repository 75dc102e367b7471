"""Averages of low-rank adapters, compared with dense SVD, averages of factors, and PEFT's own combinations.

    python benchmarks/adapters.py [--size 4096] [--layers 32] [--repetitions 5] [--output benchmarks/results/adapters]

The benchmark measures time and error for ten adapters of rank 16 in float32, on one thread. It has three cases:

- `gauges`: ten copies of one adapter, with the factors of each copy in a different basis. Their average has rank 16.
- `drifted`: the same adapters after each has moved by a tenth. Their average has a higher rank and is truncated.
- `model`: all adapters of a model with 7 billion parameters: 32 layers with 7 pairs of factors.

The error is the distance to the exact average, relative to the norm of this average. The exact average is computed in
float64. The column `best` is the error of the best adapter of the rank without rounding. The column `floor` is the
error that results only from rounding the factors to float32. PEFT runs in a separate environment.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from timing import extra, in_turns
from torch import Tensor

from manifoldagg import average_adapters
from manifoldagg.manifolds.lora.factors import JointBasis

sys.path.insert(0, str(Path(__file__).parent / "peers"))
import apart

RANK = 16
CLIENTS = 10
CONDITION = 10.0
"""The condition number of the bases of the factors."""
DRIFT = 0.1
WIDE = 2.6875
"""The ratio of the inner size to the hidden size: 11008 / 4096."""
A, B = "q.lora_A.weight", "q.lora_B.weight"
State = dict[str, Tensor]


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "adapters")
    options = parser.parse_args()
    torch.set_num_threads(1)
    heading = (
        f"torch {torch.__version__}, one thread, {CLIENTS} adapters of rank {RANK}, {options.size} x {options.size}"
    )
    lines = [heading, f"{'case':<9} {'way':<28} {'seconds':>9} {'error':>9} {'best':>9} {'floor':>9}"]
    print("\n".join(lines), flush=True)
    rows = []
    for case in ("gauges", "drifted"):
        for row in compared(case, options.size, options.repetitions):
            rows.append(row)
            lines.append("{case:<9} {way:<28} {seconds:9.4f} {error:9.2g} {best:9.2g} {floor:9.2g}".format(**row))
            print(lines[-1], flush=True)
    row = memory(options.size)
    rows.append(row)
    lines.append(
        f"memory    {row['bytes'] / 1e6:.1f} MB peak memory without the input; "
        f"a dense weight has {row['dense'] / 1e6:.1f} MB"
    )
    print(lines[-1], flush=True)
    row = whole(options.size, options.layers)
    rows.append(row)
    lines.append(f"model     {row['pairs']} pairs, {row['numbers']:,} numbers per adapter: {row['seconds']:.2f} s")
    print(lines[-1], flush=True)
    options.output.parent.mkdir(exist_ok=True)
    options.output.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    options.output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


def compared(case: str, size: int, repetitions: int) -> list[dict[str, Any]]:
    """Measure all methods for one case."""
    states = drawn(case, size)
    stacks = [stacked(state) for state in states]
    joint = JointBasis.of(stacks, size)
    best = joint.combine(torch.full((CLIENTS,), 1 / CLIENTS), RANK)
    norm = best.values.norm().item()
    floor = apart_by([stacked(best.point.float()), best.point], [1, -1], size) / norm
    calls = {
        "average_adapters": lambda: average_adapters(states, None, RANK),
        "average of factors": lambda: {name: torch.stack([x[name] for x in states]).mean(0) for name in (A, B)},
    }
    found = {name: (call(), in_turns({name: call}, repetitions)[name]) for name, call in calls.items()}
    started = time.perf_counter()
    dense = by_dense_svd(states)
    found["dense SVD"] = (dense, [time.perf_counter() - started])
    for kind in ("svd", "linear"):
        found[f"PEFT {kind}"] = by_peft(states, kind)
    rows = []
    for way, (state, seconds) in found.items():
        shares = [1.0, *(-1 / CLIENTS for _ in states)]
        error = apart_by([stacked(state), *stacks], shares, size) / norm
        told = {"case": case, "way": way, "seconds": sorted(seconds)[len(seconds) // 2], "error": error}
        rows.append(told | {"best": best.error.item() / norm, "floor": floor})
    return rows


def drawn(case: str, size: int) -> list[State]:
    """Sample the adapters of a case."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a, b = normal(RANK, size), normal(size, RANK)
    states = []
    for _ in range(CLIENTS):
        left, right = (torch.linalg.qr(normal(RANK, RANK)).Q for _ in range(2))
        values = torch.logspace(0, -1, RANK, base=CONDITION, dtype=torch.float64)
        moved = DRIFT if case == "drifted" else 0.0
        own = {A: a + moved * normal(RANK, size), B: b + moved * normal(size, RANK)}
        states.append(
            {A: (right.mT / values @ left.mT @ own[A]).float(), B: (own[B] @ (left * values @ right)).float()}
        )
    return states


def stacked(state: State | Tensor) -> Tensor:
    """Stack the factors into one float64 tensor."""
    return (torch.cat([state[B], state[A].mT]) if isinstance(state, dict) else state).double()


def apart_by(stacks: list[Tensor], coefficients: list[float], m: int) -> float:
    """Return the norm of a linear combination."""
    return JointBasis.of(stacks, m).gram(torch.tensor([coefficients], dtype=torch.float64)).clamp(min=0).sqrt().item()


def by_dense_svd(states: list[State]) -> State:
    """Form the product in float32 and compute its thin SVD."""
    mean = sum((x[B] @ x[A] for x in states[1:]), states[0][B] @ states[0][A]) / len(states)
    u, values, v = torch.linalg.svd(mean, full_matrices=False)
    roots = values[:RANK].sqrt()
    return {A: roots[:, None] * v[:RANK], B: u[:, :RANK] * roots}


def by_peft(states: list[State], kind: str) -> tuple[State, list[float]]:
    """Run PEFT's `add_weighted_adapter` in a separate process."""
    python = apart.environment("peft")
    with tempfile.TemporaryDirectory() as folder:
        torch.save([{"a": x[A], "b": x[B]} for x in states], Path(folder) / "given.pt")
        script = Path(apart.__file__).parent / "in_peft.py"
        subprocess.run([python, script, folder, kind], check=True, env=apart.variables())
        found = torch.load(Path(folder) / f"{kind}.pt", weights_only=True)
    return {A: found["a"], B: found["b"]}, [found["seconds"]]


def memory(size: int) -> dict[str, Any]:
    """Return the peak memory of one call, and the memory of one dense weight."""
    states = drawn("gauges", size)
    # The first use of the profiler allocates memory of its own, which does not belong to the call.
    extra(lambda: None)
    return {"bytes": extra(lambda: average_adapters(states, None, RANK)), "dense": 4 * size**2}


def whole(size: int, layers: int) -> dict[str, Any]:
    """Average all adapters of a model. Each layer has four square pairs, and three pairs to and from the inner size."""
    inner = round(WIDE * size)
    shapes = {"q": (size, size), "k": (size, size), "v": (size, size), "o": (size, size)}
    shapes |= {"gate": (inner, size), "up": (inner, size), "down": (size, inner)}
    generator = torch.Generator().manual_seed(0)
    states: list[State] = []
    for _ in range(CLIENTS):
        state = {}
        for layer in range(layers):
            for name, (m, n) in shapes.items():
                state[f"layers.{layer}.{name}.lora_A.weight"] = torch.randn(RANK, n, generator=generator)
                state[f"layers.{layer}.{name}.lora_B.weight"] = torch.randn(m, RANK, generator=generator)
        states.append(state)
    started = time.perf_counter()
    _, info = average_adapters(states, None, RANK, return_info=True)
    seconds = time.perf_counter() - started
    numbers = sum(x.numel() for x in states[0].values())
    return {"pairs": len(shapes) * layers, "numbers": numbers, "seconds": seconds, "error": info.error}


if __name__ == "__main__":
    main()
