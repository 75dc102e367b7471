"""Deterministic client tasks, which have a fixed seed and a fixed order of sums."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from manifoldagg._validation import check_count

__all__ = ["deterministic", "seeded_model", "single_threaded", "task_generator"]

TRAINING_STREAM = 3
"""The index of the random number stream of training. A simulation uses other streams of the same seed."""
GENERATOR_LOCK = threading.RLock()
"""The lock for torch's global random number generator. A process has only one."""


@contextmanager
def single_threaded(threads: int | None = 1) -> Iterator[None]:
    """Limit torch to one thread, so that sums are always computed in the same order.

    Args:
        threads: the number of threads. `None` does not change the number.

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
    """Return the random number generator of a client's task, which depends only on the three arguments.

    Tasks are counted from 0 for each client.

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
    """Make a `with` block bitwise reproducible. Torch uses one thread, and all random numbers depend on `generator`.

    Layers such as dropout draw from torch's global generator. Within the block, the global generator is seeded with the
    initial seed of `generator`. Its state is restored after the block. A process has only one global generator, so
    concurrent blocks in several threads run one after the other.

    Args:
        generator: the generator of the task.
        threads: the number of torch threads. `None` does not change the number. With more than one thread, random
            numbers are the same, but sums may be rounded differently.

    Example:
        >>> with deterministic(task_generator(0, client=3, task_index=1)):
        ...     first = torch.rand(1)
        >>> with deterministic(task_generator(0, client=3, task_index=1)):
        ...     torch.equal(torch.rand(1), first)
        True
    """
    # The stream differs from the trainer's stream.
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
    """Build a model whose initial weights depend only on `seed`. Torch's global generator is not changed.

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
