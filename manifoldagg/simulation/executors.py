"""Executors: restarts after a failure, and pools of processes that end with their parent.

All executors produce the same bits.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import connection, parent_process, resource_tracker
from types import TracebackType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.multiprocessing import get_context

from manifoldagg._validation import check_count, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.task_transport import RunContext, TaskEnvelope, TaskResult, execute, execute_scattered

__all__ = ["ExecutorLike", "RestartingExecutor", "processes", "shared_executor"]

MAX_RESTARTS = 3
"""So many new executors in a row may break before one of them finished a task."""


class RestartingExecutor:
    """An executor that is replaced after a failure; as a context manager it closes those that it created.

    Args:
        source: an executor, or what makes one. A new one is made where that breaks; one that was given is left alone.

    Raises:
        ArgumentError: if it is neither.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> with RestartingExecutor(partial(ThreadPoolExecutor, 2)) as workers:
        ...     workers.num_workers
        2
    """

    def __init__(self, source: Executor | Callable[[], Executor]) -> None:
        if isinstance(source, type) or not (isinstance(source, Executor) or callable(source)):
            raise ArgumentError(
                f"executor: expected an Executor, or a function that makes one, got {short_repr(source)}"
            )
        self._factory = None if isinstance(source, Executor) else source
        self._executor = source if isinstance(source, Executor) else None
        # The contexts on the workers of a Dask cluster.
        self._scattered: WeakKeyDictionary[RunContext, Any] = WeakKeyDictionary()
        self.num_consecutive_failures = 0
        """How many executors have broken since one of them finished a task."""

    @property
    def num_workers(self) -> int | None:
        """The number of workers; `None` if the executor does not report it."""
        count = getattr(self._current(), "_max_workers", None)
        return count if isinstance(count, int) and count > 0 else None

    def submit(self, envelope: TaskEnvelope) -> "Future[TaskResult]":
        """Submit a task to the executor.

        Raises:
            RuntimeError: if it is broken, or takes no more work.
        """
        executor = self._current()
        client = _dask_client(executor)
        if client is None:
            return executor.submit(execute, envelope)
        context = self._scattered.get(envelope.context)
        if context is None:
            context = client.scatter(envelope.context.packed, broadcast=True, hash=False)
            self._scattered[envelope.context] = context
        parts = client.scatter(envelope.parts, hash=False)
        return executor.submit(execute_scattered, envelope.context.key, context, parts)

    def restart(self, error: BaseException, client: int) -> None:
        """Replace the executor, which failed with `error` during a task of `client`.

        Raises:
            ArgumentError: if it was given, or as many have broken in a row as are borne with.
        """
        self.num_consecutive_failures += 1
        told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._scattered.clear()
        recovers = self._factory is None and _dask_client(self._executor) is not None
        if recovers and self.num_consecutive_failures <= MAX_RESTARTS:
            # The cluster replaces its workers, but not the tensors that were scattered to them.
            return
        if self._factory is None:
            raise ArgumentError(
                f"executor: it broke ({told}); pass a factory of executors, and its tasks are repeated"
            ) from error
        if self.num_consecutive_failures > MAX_RESTARTS:
            raise ArgumentError(
                f"executor: a task of client {client} could not be done: "
                f"{self.num_consecutive_failures} executors in a row broke with "
                f'it ({told}). For processes, calls of a script stand below `if __name__ == "__main__":`'
            ) from error
        self.close()

    def close(self) -> None:
        """Shut down the executor if it was created here, and cancel its work."""
        executor = self._executor
        if self._factory is None or executor is None:
            return
        self._executor = None
        at_work = list((getattr(executor, "_processes", None) or {}).values())
        manager = getattr(executor, "_executor_manager_thread", None)
        if at_work:
            executor.shutdown(wait=False, cancel_futures=True)
        else:
            # Dask's knows no other option.
            executor.shutdown(wait=True)
        # A pool stumbles over what was cancelled, aloud, if a process dies before it has put that away.
        while manager is not None and manager.is_alive() and _has_cancelled_work(manager):
            time.sleep(1e-3)
        for process in at_work:
            process.terminate()
        if manager is not None:
            manager.join()

    def __enter__(self) -> "RestartingExecutor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _current(self) -> Executor:
        if self._executor is None:
            assert self._factory is not None
            made = self._factory()
            if not isinstance(made, Executor):
                raise ArgumentError(f"executor: expected a function that makes an Executor, it made {short_repr(made)}")
            self._executor = made
        return self._executor


ExecutorLike: TypeAlias = Executor | Callable[[], Executor] | RestartingExecutor | None
"""Who trains: an executor, or what makes one; a `RestartingExecutor`, which other runs share; `None`: the caller."""


@contextmanager
def shared_executor(executor: ExecutorLike) -> Iterator[ExecutorLike]:
    """Return an executor for several runs; a factory is called once, and again only after a failure."""
    if executor is None or isinstance(executor, RestartingExecutor):
        yield executor
        return
    with RestartingExecutor(executor) as workers:
        yield workers


def _dask_client(executor: object) -> Any:
    """Return the client of a Dask cluster whose executor it is; otherwise `None`."""
    client = getattr(executor, "_client", None)
    return client if hasattr(client, "scatter") else None


def _has_cancelled_work(manager: threading.Thread) -> bool:
    """Whether the thread of a pool of processes still has cancelled work before it."""
    items = list(getattr(manager, "pending_work_items", {}).values())
    return any(item.future.cancelled() for item in items)


def processes(jobs: int) -> Callable[[], Executor]:
    """Return a factory of a pool of this many local processes, for `run(executor=...)`.

    Each has one thread for its arithmetic, leaves Ctrl-C to the process that made it, and ends with it, however that
    ends. They are started with `spawn`: calls of a script stand below `if __name__ == "__main__":`.

    Raises:
        ArgumentError: if `jobs` is not a positive integer.

    Example:
        >>> pool = processes(1)()
        >>> pool.submit(pow, 2, 10).result()
        1024
        >>> pool.shutdown()
    """
    return partial(_make_pool, check_count("jobs", jobs))


def _make_pool(jobs: int) -> Executor:
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_init_worker)
    with _block_sigint():
        for _ in range(jobs):
            pool.submit(int)
    return pool


@contextmanager
def _block_sigint() -> Iterator[None]:
    """Who is started inside hears no Ctrl-C; one that comes meanwhile is heard here afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # It lets signals through again where it starts what it needs.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _init_worker() -> None:
    """What a new process does first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """End with the parent: nobody else would tell a process that it is waiting in vain."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
