"""Process groups of `torch.distributed` for tests, with one process per rank.

The ranks of a world connect with a `FileStore` over the loopback interface, and a timeout ends them. A module that
calls `main` imports its dependencies once and forks the ranks of each world. Each rank writes its results to the file
FOLDER/WORLD-RANK.pt. `run_ranks` runs such a module.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # DTensors import it, so it is imported once before the forks.
import torch.distributed as dist

PATIENCE = 50


def _rank(cases, rank, world, folder):
    signal.alarm(PATIENCE)
    store = dist.FileStore(str(folder / f"{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=PATIENCE // 2))
    torch.save(cases(rank, world), folder / f"{world}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(cases):
    """Run worlds of the sizes on the command line and write the results of `cases(rank, world)` to the given folder."""
    folder, *worlds = sys.argv[1:]
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    for world in map(int, worlds):
        ranks = [fork.Process(target=_rank, args=(cases, rank, world, Path(folder))) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(f"a world of {world} failed: {[process.exitcode for process in ranks]}")


def run_ranks(module, folder, *worlds):
    """Run a module, and return the results of its ranks by the size of the world."""
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, str(folder), *map(str, worlds)]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return {
        world: [torch.load(folder / f"{world}-{rank}.pt", weights_only=False) for rank in range(world)]
        for world in worlds
    }
