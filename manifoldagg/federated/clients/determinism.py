"""Tools for deterministic client tasks: seeded random numbers, and sums in a fixed order."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from manifoldagg._validation import check_count

__all__ = ["deterministic", "seeded_model", "single_threaded", "task_generator"]

TRAINING_STREAM = 3
"""The index of the random number stream for training. Simulations derive their other streams from the same seed."""
GENERATOR_LOCK = threading.RLock()
"""The lock for torch's global random number generator, which all threads of a process share."""


@contextmanager
def single_threaded(threads: int | None = 1) -> Iterator[None]:
    """Limit the number of torch threads in a `with` block.

    With one thread, torch always adds numbers in the same order, so the results are bitwise reproducible. At the end of
    the block, the function restores the previous number of threads.

    Args:
        threads: the number of threads. If it is `None`, the number does not change.

    Example:
        >>> with single_threaded():
        ...     torch.get_num_threads()
        1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def task_generator(seed: int, client: int, task_index: int) -> torch.Generator:
    """Return a random number generator for one task of a client.

    Its random numbers depend only on the seed, the client and the index of the task. A repeated task therefore uses the
    same random numbers.

    Args:
        seed: the seed of the run.
        client: the number of the client.
        task_index: the number of the task among the tasks of this client, from 0.

    Raises:
        ArgumentError: if an argument is not an integer >= 0.

    Example:
        >>> draws = [torch.rand(1, generator=task_generator(0, client=3, task_index=1)) for _ in range(2)]
        >>> torch.equal(*draws)
        True
    """
    words = [check_count("seed", seed, at_least=0), TRAINING_STREAM]
    words += [check_count("client", client, at_least=0), check_count("task_index", task_index, at_least=0)]
    drawn = np.random.SeedSequence(words).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(drawn >> np.uint64(1)))


@contextmanager
def deterministic(generator: torch.Generator, *, threads: int | None = 1) -> Iterator[None]:
    """Make the computations in a `with` block bitwise reproducible.

    The block controls two sources of differences between runs:

    - Order of sums: torch uses one thread, so that it adds numbers in a fixed order.
    - Random numbers: layers such as dropout use torch's global random number generator. The block seeds it with a seed
      that is derived from the initial seed of `generator`, and restores its state at the end.

    All threads of a process share the global generator. If several threads enter such a block, the blocks therefore run
    one after the other.

    Args:
        generator: the generator of the task, such as the result of `task_generator`.
        threads: the number of torch threads. If it is `None`, the number does not change. With more than one thread,
            the random numbers are the same, but sums may be rounded differently.

    Example:
        >>> with deterministic(task_generator(0, client=3, task_index=1)):
        ...     first = torch.rand(1)
        >>> with deterministic(task_generator(0, client=3, task_index=1)):
        ...     torch.equal(torch.rand(1), first)
        True
    """
    # The 1 gives the global generator another stream than the generator of the trainer.
    seed = np.random.SeedSequence([generator.initial_seed(), 1]).generate_state(1)[0]
    own = torch.default_generator
    with single_threaded(threads), GENERATOR_LOCK:
        before = own.get_state()
        own.manual_seed(int(seed))
        try:
            yield
        finally:
            own.set_state(before)


def seeded_model(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a model whose initial weights depend only on a seed.

    The function restores the state of torch's global random number generator afterwards.

    Args:
        make: a function that builds the model.
        seed: the seed of the initial weights.

    Raises:
        ArgumentError: if `seed` is not an integer >= 0.

    Example:
        >>> a, b = (seeded_model(lambda: nn.Linear(3, 3), 5) for _ in range(2))
        >>> torch.equal(a.weight, b.weight)
        True
    """
    check_count("seed", seed, at_least=0)
    with GENERATOR_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
