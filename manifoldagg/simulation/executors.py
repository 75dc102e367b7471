"""Executors that run the training tasks of clients in parallel. A failed executor is replaced by a new one.

The results of a run do not depend on the executor. They are bit-identical, even after a failure.
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
"""The largest number of consecutive restarts without a finished task."""


class RestartingExecutor:
    """A wrapper around an executor. After a failure, the method `restart` replaces the executor with a new one.

    Args:
        source: a function that returns an executor, or an executor. After a failure, the function is called again. Its
            executor is shut down at the end of a `with` block. If `source` is an executor, it is neither replaced nor
            shut down.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> with RestartingExecutor(partial(ThreadPoolExecutor, 2)) as workers:
        ...     workers.num_workers
        2
    """

    def __init__(self, source: Executor | Callable[[], Executor]) -> None:
        if isinstance(source, type) or not (isinstance(source, Executor) or callable(source)):
            raise ArgumentError(
                f"executor: expected an Executor, or a function that returns one, got {short_repr(source)}"
            )
        self._factory = None if isinstance(source, Executor) else source
        self._executor = source if isinstance(source, Executor) else None
        # The contexts on the workers of a Dask cluster.
        self._scattered: WeakKeyDictionary[RunContext, Any] = WeakKeyDictionary()
        self.num_consecutive_failures = 0
        """The number of failed executors since the last finished task."""

    @property
    def num_workers(self) -> int | None:
        """The number of workers; `None` if the executor does not report it."""
        count = getattr(self._current(), "_max_workers", None)
        return count if isinstance(count, int) and count > 0 else None

    def submit(self, envelope: TaskEnvelope) -> "Future[TaskResult]":
        """Submit a task. Raises a `RuntimeError` if the executor is broken or was shut down."""
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
            ArgumentError: after `MAX_RESTARTS` consecutive restarts, or if `source` is an executor instead of a
                function. The executor of a Dask cluster is an exception, because the cluster replaces its workers.
        """
        self.num_consecutive_failures += 1
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._scattered.clear()
        recovers = self._factory is None and _dask_client(self._executor) is not None
        if recovers and self.num_consecutive_failures <= MAX_RESTARTS:
            # The cluster replaces its workers, but not the tensors that were scattered to them.
            return
        if self._factory is None:
            raise ArgumentError(
                f"executor: the executor failed ({reason}); pass a function that returns executors, to repeat its tasks"
            ) from error
        if self.num_consecutive_failures > MAX_RESTARTS:
            raise ArgumentError(
                f"executor: a task of client {client} failed: "
                f"{self.num_consecutive_failures} consecutive executors failed with "
                f'it ({reason}); for processes, protect the calls of a script with `if __name__ == "__main__":`'
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
            # The executor of Dask does not support `cancel_futures`.
            executor.shutdown(wait=True)
        # If a process ends while cancelled work is pending, the manager thread of the pool prints an exception.
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
                raise ArgumentError(
                    f"executor: expected a function that returns an Executor, got a function that returns "
                    f"{short_repr(made)}"
                )
            self._executor = made
        return self._executor


ExecutorLike: TypeAlias = Executor | Callable[[], Executor] | RestartingExecutor | None
"""An executor, a function that returns one, a shared `RestartingExecutor`, or `None` for the calling thread."""


@contextmanager
def shared_executor(executor: ExecutorLike) -> Iterator[ExecutorLike]:
    """Yield one executor for several runs.

    If `executor` is a function, it is called once to create the executor for all runs. If this executor fails, the
    function is called again to replace it. The created executor is shut down at the end. `None` is yielded unchanged.
    """
    if executor is None or isinstance(executor, RestartingExecutor):
        yield executor
        return
    with RestartingExecutor(executor) as workers:
        yield workers


def _dask_client(executor: object) -> Any:
    """Return the client of the Dask cluster of an executor, or `None` for other executors."""
    client = getattr(executor, "_client", None)
    return client if hasattr(client, "scatter") else None


def _has_cancelled_work(manager: threading.Thread) -> bool:
    """Return whether the manager thread of a pool still has cancelled work."""
    items = list(getattr(manager, "pending_work_items", {}).values())
    return any(item.future.cancelled() for item in items)


def processes(jobs: int) -> Callable[[], Executor]:
    """Return a function that creates a pool of worker processes. Pass this function to `run` as `executor`.

    Each worker process uses one thread for arithmetic, ignores Ctrl-C, and ends when its parent process ends. The
    processes are started with the method `spawn`, which imports the calling script again. A script must therefore
    protect its calls with `if __name__ == "__main__":`.

    Args:
        jobs: the number of processes.

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
    """Block SIGINT in the processes that start inside the `with` block.

    If a SIGINT arrives during the block, the current process receives it at the end.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # The resource tracker unblocks signals when it starts, so it must be running before they are blocked.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _init_worker() -> None:
    """Initialize a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit when the parent ends, because an orphaned worker would wait for tasks forever."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
