"""Test torchft with `Outer` as its outer optimizer and two replicas, each in its own process.

`make test-diloco` creates an environment with torchft and runs this file. Both replicas must end with the same model.
For `Momentum`, this model must equal that of SGD with Nesterov momentum. The loss must decrease for every rule.
"""

import argparse
import multiprocessing
import queue
import sys
import time
from datetime import timedelta

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft._torchft import LighthouseServer
from torchft.local_sgd import DiLoCo

from manifoldagg.federated.rules import ASGD, HeLoCo, Momentum
from manifoldagg.optim import Outer

CALL_TIMEOUT = timedelta(seconds=60)
"""The timeout of one call of torchft."""
START_TIMEOUT, RUN_TIMEOUT = 300, 600
"""The timeouts in seconds for the start of both replicas and for a whole run."""
ROUNDS = 6
OUTER = {
    "torch.optim.SGD": lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True),
    "Momentum": lambda params: Outer(params, Momentum(ASGD(0.7), 0.9, nesterov=True)),
    "HeLoCo": lambda params: Outer(params, HeLoCo(0.7)),
}


def replica(number, lighthouse, name, fragments, together, results):
    # On a busy machine, the replicas may start at different times, and the lighthouse rejects a single replica.
    together.wait(START_TIMEOUT)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [nn.Linear(4, 3), nn.Linear(3, 1)]
    model = nn.Sequential(*layers)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=CALL_TIMEOUT),
        min_replica_size=2,
        use_async_quorum=False,
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        replica_id=f"replica_{number}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        timeout=CALL_TIMEOUT,
        quorum_timeout=CALL_TIMEOUT,
        connect_timeout=CALL_TIMEOUT,
    )
    parts = layers if fragments == 2 else [model]
    outers = [OUTER[name](part.parameters()) for part in parts]
    generator = torch.Generator().manual_seed(number)
    losses = []
    with DiLoCo(manager, parts, inner, outers, sync_every=4):
        while manager.current_step() < ROUNDS:
            x = torch.randn(16, 4, generator=generator)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            inner.zero_grad()
            loss.backward()
            inner.step()
            losses.append(loss.item())
    results.put((number, [p.detach().tolist() for p in model.parameters()], losses))
    manager.shutdown(wait=False)


def trained(name, fragments):
    """Run two replicas. Return their models and their losses."""
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=5000)
    address = lighthouse.address().replace(lighthouse.address().split("//")[1].split(":")[0], "127.0.0.1")
    context = multiprocessing.get_context("spawn")
    results, together = context.Queue(), context.Barrier(2)
    processes = [
        context.Process(target=replica, args=(i, address, name, fragments, together, results)) for i in range(2)
    ]
    try:
        for process in processes:
            process.start()
        found = sorted(collected(results, processes))
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            process.kill()
        lighthouse.shutdown()
    return [model for _, model, _ in found], [losses for *_, losses in found]


def collected(results, processes):
    """Return the results of all replicas. Exit if a replica fails or the time is over."""
    found = []
    until = time.monotonic() + RUN_TIMEOUT
    while len(found) < len(processes):
        try:
            found.append(results.get(timeout=1))
        except queue.Empty:
            if any(process.exitcode for process in processes):
                sys.exit("a replica failed")
            if time.monotonic() > until:
                sys.exit(f"not done after {RUN_TIMEOUT} s")
    return found


def max_difference(one, other):
    return max((torch.tensor(a) - torch.tensor(b)).abs().max().item() for a, b in zip(one, other, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fragments", type=int, nargs="*", default=[1, 2])
    for fragments in parser.parse_args().fragments:
        theirs = trained("torch.optim.SGD", fragments)[0][0]
        for name in ("Momentum", "HeLoCo"):
            models, losses = trained(name, fragments)
            between, beside = max_difference(*models), max_difference(models[0], theirs)
            last, first = losses[0][-1], losses[0][0]
            print(
                f"{fragments} fragments, {name}: replicas differ by {between}, from SGD by {beside:.1e}; loss {first:.2f} to {last:.2f}"
            )
            # With two fragments, one fragment of each replica contains local steps since its last synchronisation.
            if (fragments == 1 and between != 0) or not last < first or (name == "Momentum" and beside > 1e-5):
                sys.exit("not as it should be")


if __name__ == "__main__":
    main()
