"""Merge of k checkpoints in bf16, compared with bare input and output and with mergekit.

    python benchmarks/merge.py [--size 1e9] [--models 8] [--repetitions 3] [--folder /tmp] [--mergekit ENV/bin/python]
        [--sparse 0] [--output benchmarks/results/merge]

`bare` reads the inputs as often as the method does, and writes and syncs a file of the size of the result. Its reads of
the second pass follow the first read of each tensor, as in the merge. Before each run, the pages of all files are
removed from the page cache. The runs of the methods alternate. mergekit runs once, from an environment of its own:

    python3 -m venv ENV && ENV/bin/pip install mergekit

The error is the relative distance of one tensor from the Karcher mean in float64. The floor is that of this mean
rounded to bf16. `anonymous` is the largest increase of RssAnon during a merge. `--sparse N` also merges two sparse
files of N bytes. It writes N bytes.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from timing import machine

from manifoldagg.averaging import karcher, merge
from manifoldagg.manifolds import Sphere

HIDDEN, INTERMEDIATE, VOCABULARY = 1024, 2816, 16000
HEADS = 8
PROBE = "model.layers.0.self_attn.q_proj.weight"
"""The tensor whose error is measured."""


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=1e9, help="bytes of a checkpoint")
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mergekit", type=Path, default=None, help="the Python of an environment with mergekit")
    parser.add_argument("--sparse", type=float, default=0, help="bytes of two sparse files")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "merge")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        result = measure(Path(name), options)
    lines = show(result)
    print("\n".join(lines))
    options.output.parent.mkdir(exist_ok=True)
    options.output.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    options.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds, errors and memory of all methods."""
    paths = [write_model(folder / f"model{i}", i, int(options.size)) for i in range(options.models)]
    files = [path / "model.safetensors" for path in paths]
    size = files[0].stat().st_size
    calls: dict[str, Callable[[], Any]] = {
        "bare, 1 pass": lambda: bare(files, folder / "bare", 1),
        "arithmetic": lambda: merge(paths, out=folder / "arithmetic"),
        "bare, 2 passes": lambda: bare(files, folder / "bare", 2),
        "karcher": lambda: merge(paths, out=folder / "karcher", method="karcher"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    anonymous = 0
    for _ in range(options.repetitions):
        for name, call in calls.items():
            forget(files)
            with Watch() as watch:
                seconds[name].append(timed(call))
            if not name.startswith("bare"):
                anonymous = max(anonymous, watch.peak)
    errors = {"karcher": error_of(folder / "karcher" / "model.safetensors", files)}
    if options.mergekit is not None:
        forget(files)
        seconds["mergekit karcher"] = [timed(lambda: run_mergekit(options.mergekit, paths, folder / "mergekit"))]
        found = sorted((folder / "mergekit").glob("*.safetensors"))
        errors["mergekit karcher"] = error_of(next(file for file in found if PROBE in load_names(file)), files)
    errors["floor"] = floor_of(files)
    sparse = measure_sparse(folder, int(options.sparse)) if options.sparse else None
    return {
        "machine": machine(),
        "load": os.getloadavg(),
        "models": options.models,
        "bytes": size,
        "seconds": seconds,
        "errors": errors,
        "anonymous": anonymous,
        "sparse": sparse,
    }


def show(result: dict[str, Any]) -> list[str]:
    """Return the lines of the table."""
    k, size = result["models"], result["bytes"]
    lines = [f"{result['machine']}, load {result['load'][0]:.1f}: {k} checkpoints of {size / 1e6:,.0f} MB in bf16"]
    lines.append(f"{'':<18} {'seconds':>9} {'GB/s':>6} {'/ bare':>7} {'error':>9}")
    bases = {"arithmetic": "bare, 1 pass", "karcher": "bare, 2 passes", "mergekit karcher": "bare, 2 passes"}
    for name, times in result["seconds"].items():
        passes = 1 if name in ("arithmetic", "bare, 1 pass") else 2
        middle = statistics.median(times)
        speed = (passes * k + 1) * size / middle / 1e9
        share = f"{middle / statistics.median(result['seconds'][bases[name]]):.2f}" if name in bases else ""
        error = f"{result['errors'][name]:.2e}" if name in result["errors"] else ""
        lines.append(f"{name:<18} {middle:9.2f} {speed:6.2f} {share:>7} {error:>9}")
    lines.append(f"floor of the error: {result['errors']['floor']:.2e}")
    lines.append(f"anonymous memory: {result['anonymous'] / 2**20:.0f} MiB")
    if result["sparse"]:
        part = result["sparse"]
        lines.append(
            f"two sparse files of {part['bytes'] / 1e9:.1f} GB: {part['seconds']:.1f} s, "
            f"{part['anonymous'] / 2**20:.0f} MiB of anonymous memory"
        )
    return lines


class Watch:
    """A context that records the largest increase of RssAnon, sampled every 5 ms."""

    def __enter__(self) -> "Watch":
        self.peak = 0
        self._start = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, anonymous_bytes() - self._start)


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process in bytes."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def forget(files: list[Path]) -> None:
    """Remove the pages of files from the page cache."""
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bare(files: list[Path], out: Path, passes: int) -> None:
    """Read the files `passes` times in alternating pieces of 64 MB. Write and sync a file of the size of one input."""
    out.unlink(missing_ok=True)
    buffer = bytearray(1 << 22)
    chunk = 1 << 26
    size = files[0].stat().st_size
    opened = [open(path, "rb", buffering=0) for path in files]  # noqa: SIM115
    with open(out, "wb", buffering=0) as target:
        for begin in range(0, size, chunk):
            for _ in range(passes):
                for file in opened:
                    file.seek(begin)
                    left = min(chunk, size - begin)
                    while left > 0:
                        left -= file.readinto(memoryview(buffer)[: min(left, len(buffer))]) or left
            left = min(chunk, size - begin)
            while left > 0:
                left -= target.write(memoryview(buffer)[: min(left, len(buffer))])
        os.fsync(target.fileno())
    for file in opened:
        file.close()


def write_model(folder: Path, i: int, size: int) -> Path:
    """Write a checkpoint in the layout of Llama, with a common model plus 10 % of noise."""
    folder.mkdir()
    layers = max(1, round((size / 2 - 2 * VOCABULARY * HIDDEN) / (4 * HIDDEN**2 + 3 * HIDDEN * INTERMEDIATE)))
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        head = f"model.layers.{layer}"
        shapes |= {f"{head}.self_attn.{x}_proj.weight": (HIDDEN, HIDDEN) for x in "qkvo"}
        shapes |= {f"{head}.mlp.{x}_proj.weight": (INTERMEDIATE, HIDDEN) for x in ("gate", "up")}
        shapes[f"{head}.mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        shapes |= {f"{head}.{x}_layernorm.weight": (HIDDEN,) for x in ("input", "post_attention")}
    shapes["model.norm.weight"] = (HIDDEN,)
    state = {}
    for n, (name, shape) in enumerate(shapes.items()):
        base = torch.randn(shape, generator=torch.Generator().manual_seed(n))
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * (i + 1) + n))
        state[name] = (base + 0.1 * noise).bfloat16()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run_mergekit(python: Path, paths: list[Path], out: Path) -> None:
    """Merge with mergekit's command line on the CPU."""
    models = "\n".join(f"  - model: {path}" for path in paths)
    config = out.with_suffix(".yml")
    config.write_text(f"merge_method: karcher\nmodels:\n{models}\ndtype: bfloat16\n")
    command = [str(python.parent / "mergekit-yaml"), str(config), str(out), "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-2000:])


def load_names(file: Path) -> list[str]:
    """Return the names of the tensors in a file."""
    return [*load_file(file)]


def exact_mean(files: list[Path]) -> torch.Tensor:
    """Return the Karcher mean of the probe in float64."""
    rows = [load_file(file)[PROBE].double().flatten() for file in files]
    norms = [float(row.norm()) for row in rows]
    units = [row / norm for row, norm in zip(rows, norms, strict=True)]
    return karcher(Sphere(len(rows[0])), units).point * statistics.mean(norms)


def error_of(file: Path, files: list[Path]) -> float:
    """Return the relative error of the probe in a merged file."""
    exact = exact_mean(files)
    return float((load_file(file)[PROBE].double().flatten() - exact).norm() / exact.norm())


def floor_of(files: list[Path]) -> float:
    """Return the relative error of the exact mean after rounding to bf16."""
    exact = exact_mean(files)
    return float((exact.bfloat16().double() - exact).norm() / exact.norm())


def measure_sparse(folder: Path, size: int) -> dict[str, Any]:
    """Return the seconds and the memory of the arithmetic mean of two sparse files with one tensor."""
    size -= size % 2
    header = json.dumps({"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    paths = [folder / f"sparse{i}.safetensors" for i in range(2)]
    for path in paths:
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(path, 8 + len(header) + size)
    with Watch() as watch:
        seconds = timed(lambda: merge(paths, out=folder / "sparse.safetensors"))
    for path in (*paths, folder / "sparse.safetensors"):
        path.unlink()
    return {"bytes": size, "seconds": seconds, "anonymous": watch.peak}


if __name__ == "__main__":
    main()
