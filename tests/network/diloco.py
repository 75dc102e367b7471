"""Train with DiLoCo of torchft in two processes, with `optim.Outer` as the outer optimiser: `make test-diloco`.

Both replicas must end with the same model. With the rule `Momentum`, this model must equal the model of `torch.optim.SGD`
with Nesterov momentum. With `HeLoCo`, the loss must decrease. The processes communicate over the loopback interface.
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
START_TIMEOUT = 300
"""The seconds until both replicas have started."""
RUN_TIMEOUT = 600
"""The seconds of a complete run."""
ROUNDS = 6
OUTER = {
    "torch.optim.SGD": lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True),
    "Momentum": lambda params: Outer(params, Momentum(ASGD(0.7), 0.9, nesterov=True)),
    "HeLoCo": lambda params: Outer(params, HeLoCo(0.7)),
}


def replica(number, lighthouse, name, fragments, barrier, results):
    # On a busy machine, one replica can start much later. Without the barrier, the lighthouse would reject the first one,
    # because there is no quorum yet.
    barrier.wait(START_TIMEOUT)
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


def train(name, fragments):
    """Train two replicas, and return their models and losses."""
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=5000)
    address = lighthouse.address().replace(lighthouse.address().split("//")[1].split(":")[0], "127.0.0.1")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    barrier = context.Barrier(2)
    processes = [
        context.Process(target=replica, args=(i, address, name, fragments, barrier, results)) for i in range(2)
    ]
    try:
        for process in processes:
            process.start()
        found = sorted(collect(results, processes))
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            process.kill()
        lighthouse.shutdown()
    return [model for _, model, _ in found], [losses for *_, losses in found]


def collect(results, processes):
    """Return the results of all replicas. Exit if a replica fails, or after `RUN_TIMEOUT` seconds."""
    found = []
    deadline = time.monotonic() + RUN_TIMEOUT
    while len(found) < len(processes):
        try:
            found.append(results.get(timeout=1))
        except queue.Empty:
            if any(process.exitcode for process in processes):
                sys.exit("a replica failed")
            if time.monotonic() > deadline:
                sys.exit(f"the replicas did not finish within {RUN_TIMEOUT} s")
    return found


def largest_difference(one, other):
    return max((torch.tensor(a) - torch.tensor(b)).abs().max().item() for a, b in zip(one, other, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fragments", type=int, nargs="*", default=[1, 2])
    for fragments in parser.parse_args().fragments:
        expected = train("torch.optim.SGD", fragments)[0][0]
        for name in ("Momentum", "HeLoCo"):
            models, losses = train(name, fragments)
            between = largest_difference(*models)
            from_sgd = largest_difference(models[0], expected)
            first = losses[0][0]
            last = losses[0][-1]
            print(
                f"{fragments} fragments, {name}: replicas differ by {between}, from SGD by {from_sgd:.1e}; loss {first:.2f} to {last:.2f}"
            )
            # With two fragments, the replicas have trained one of them locally since its last synchronisation.
            if (fragments == 1 and between != 0) or not last < first or (name == "Momentum" and from_sgd > 1e-5):
                sys.exit(f"{name}: unexpected difference or loss")


if __name__ == "__main__":
    main()
