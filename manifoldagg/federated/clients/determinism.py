"""Deterministic client tasks: the source of random numbers and the order of sums."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from manifoldagg._validation import check_count

__all__ = ["deterministic", "seeded_model", "single_threaded", "task_generator"]

TRAINING_STREAM = 3
"""A stream of random numbers under one seed; a simulation has others, with other numbers."""
GENERATOR_LOCK = threading.RLock()
"""Who holds it draws from torch's own generator, of which a process has one."""


@contextmanager
def single_threaded(threads: int | None = 1) -> Iterator[None]:
    """Limit torch to one thread, so that sums are always computed in the same order.

    Args:
        threads: how many in place of one; `None` for as many as there are.

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
    """Return the random generator of a client's n-th task, counted from 0; it depends on these three arguments only.

    Raises:
        ArgumentError: naming what is no integer, or negative.

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
    """Make a block bitwise reproducible: it has one torch thread, and random numbers that follow from `generator`.

    What a model draws for itself, as dropout does, comes from torch's own generator, which is seeded by the initial
    seed of `generator`, and put back in the end. A process has one such generator: its threads take turns.

    Args:
        generator: of the task.
        threads: of torch. With another number than one the same draws are made, and sums may have other bits; `None`
            leaves as many as there are.

    Example:
        >>> with deterministic(task_generator(0, client=3, task_index=1)):
        ...     first = torch.rand(1)
        >>> with deterministic(task_generator(0, client=3, task_index=1)):
        ...     torch.equal(torch.rand(1), first)
        True
    """
    # Another stream than the one that the trainer draws from.
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
    """Build a model whose initial weights depend on `seed` alone; torch's global generator is left unchanged.

    Raises:
        ArgumentError: if `seed` is not an integer from 0 on.

    Example:
        >>> a, b = (seeded_model(lambda: nn.Linear(3, 3), 5) for _ in range(2))
        >>> torch.equal(a.weight, b.weight)
        True
    """
    check_count("seed", seed, at_least=0)
    with GENERATOR_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
