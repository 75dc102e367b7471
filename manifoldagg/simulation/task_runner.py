"""The task runner, which trains tasks in this process or on an executor."""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Protocol, runtime_checkable

from immutables import Map

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Message, Payload, Trainer
from manifoldagg.federated.types import ClientState
from manifoldagg.simulation.client_task import ClientTask
from manifoldagg.simulation.dataset import FederatedDataset, TaskId
from manifoldagg.simulation.executors import ExecutorLike, RestartingExecutor
from manifoldagg.simulation.task_transport import RunContext, TaskEnvelope, TaskResult, execute_local

__all__ = ["TaskOrder", "TaskRunner"]

TASKS_PER_WORKER = 2
"""The number of submitted tasks per worker, so that no worker waits for this process."""
LOOKAHEAD_PER_WORKER = 16
"""The largest lookahead in tasks per worker, which limits the memory of early results."""


@runtime_checkable
class TaskOrder(Protocol):
    """The interface of an object that predicts the order in which task results are needed."""

    def next_tasks(self, limit: int) -> Sequence[TaskId]:
        """Return the `limit` submitted tasks whose results are needed first, in order."""


class _PendingTask:
    """A submitted task whose result has not been returned yet."""

    def __init__(self, task_id: TaskId, message: Message) -> None:
        self.task_id = task_id
        self.message = message
        self.with_context = False
        self.reset()

    def reset(self) -> None:
        """Reset the task to its state before it was sent."""
        # After the task was sent, this is the state of the client at the start of the task.
        self.client_state: ClientState = None
        self.future: Future[TaskResult] | None = None
        self.result: TaskResult | None = None

    def client_state_after(self) -> ClientState:
        """Return the client state with which the client's next task starts."""
        assert self.result is not None
        return self.client_state if self.result.payload is None else self.result.payload.client_state


class TaskRunner:
    """A runner for the training tasks of clients.

    With an executor, the runner starts submitted tasks before their results are requested. Without an executor, the
    method `result` runs the task when it is called. The results are bit-identical in both cases.

    The tasks of one client run one after another, because each task starts with the client state that the previous task
    returned. At the end of a `with` block, the runner cancels the tasks that are still pending on the executor.

    Args:
        federation: the federated data set, with minibatches and seeds.
        trainer: the trainer of the clients.
        executor: an executor, a function that returns an executor, or a `RestartingExecutor` that several runs share.
            `close` shuts down an executor that the function returned. With `None`, `result` trains in the calling
            thread.
        order: a predictor of the order in which tasks are needed. The default is the order of submission.
        client_states: the client states of an interrupted run, by client.

    Attributes:
        client_states: the client state after the last update of each client. The map is replaced and never modified.
        num_gradients: the number of gradients of the task of the latest `result`, including a task that raised.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from manifoldagg.federated import clients
        >>> from manifoldagg.manifolds import ParameterSpace
        >>> from manifoldagg.experiments import load_dataset
        >>> from manifoldagg.simulation import iid_partition
        >>> federation = FederatedDataset.split(load_dataset("digits"), 30, partition=iid_partition, seed=0)
        >>> model = federation.model()
        >>> message = Message(ParameterSpace.of(model).point(model))
        >>> with ThreadPoolExecutor(2) as pool, TaskRunner(federation, clients.Local(epochs=1), pool) as runner:
        ...     for client in (3, 4, 5):
        ...         runner.submit(TaskId(client, 0), message)
        ...     [runner.result(TaskId(client, 0)).samples == len(federation.train[client]) for client in (5, 3, 4)]
        [True, True, True]
    """

    def __init__(
        self,
        federation: FederatedDataset,
        trainer: Trainer,
        executor: ExecutorLike = None,
        order: TaskOrder | None = None,
        client_states: Map[int, ClientState] = Map(),
    ) -> None:
        self._context = RunContext(federation, trainer)
        self._owned_executor = (
            None if executor is None or isinstance(executor, RestartingExecutor) else RestartingExecutor(executor)
        )
        self._executor = executor if isinstance(executor, RestartingExecutor) else self._owned_executor
        self._order = order
        self.num_gradients = 0
        self._tasks: dict[TaskId, _PendingTask] = {}
        # The tasks of each client in the order of submission.
        self._client_queues: dict[int, list[_PendingTask]] = {}
        self.client_states = client_states
        self._waiting: set[_PendingTask] = set()
        self._submitted: set[_PendingTask] = set()
        self._finished: SimpleQueue[tuple[_PendingTask, Future[TaskResult]]] = SimpleQueue()

    def submit(self, task_id: TaskId, message: Message) -> None:
        """Submit a task with a new identifier. `message` must not be modified afterwards."""
        if task_id in self._tasks:
            raise ArgumentError(f"task_id: expected a new identifier, got {task_id} again")
        task = _PendingTask(task_id, message)
        self._tasks[task_id] = task
        self._client_queues.setdefault(task_id.client, []).append(task)
        self._waiting.add(task)

    def result(self, task_id: TaskId) -> Payload:
        """Return the payload of a task. The task must be the next task of its client.

        Raises:
            ArgumentError: if the task is not the next task of its client, or the executor fails repeatedly.
            Exception: any exception of the training, such as a `DivergenceError`.
        """
        task = self._tasks.get(task_id)
        if task is None or self._client_queues[task_id.client][0] is not task:
            raise ArgumentError(f"task_id: expected the next task of a client, got {task_id}")
        outcome = self._run_local(task) if self._executor is None else self._run_remote(task, self._executor)
        self.num_gradients = outcome.gradients
        left = task.client_state_after()
        self._remove(task)
        if left is not None:
            self.client_states = self.client_states.set(task_id.client, left)
        elif task_id.client in self.client_states:
            self.client_states = self.client_states.delete(task_id.client)
        if outcome.payload is None:
            assert outcome.error is not None
            outcome.error.add_note(f"in task {task_id.task_index} of client {task_id.client}")
            raise outcome.error
        return outcome.payload

    def cancel(self, task_ids: Iterable[TaskId]) -> None:
        """Cancel the given tasks. They do not affect the states that clients keep between their tasks."""
        for task in [self._tasks[key] for key in task_ids if key in self._tasks]:
            line = self._client_queues[task.task_id.client]
            for later in line[line.index(task) :]:
                # Later tasks started from the client state after the cancelled task, so they must run again.
                self._requeue(later)
            self._remove(task)

    def close(self) -> None:
        """Cancel pending work of the executor, and shut down the executor if this runner created it."""
        for task in list(self._submitted):
            self._requeue(task)
        if self._owned_executor is not None:
            self._owned_executor.close()

    def __enter__(self) -> "TaskRunner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run_local(self, task: _PendingTask) -> TaskResult:
        task.client_state = self._client_state_before(task)
        task.result = execute_local(
            ClientTask(self._context.federation, self._context.trainer, task.task_id, task.message, task.client_state)
        )
        return task.result

    def _run_remote(self, task: _PendingTask, executor: RestartingExecutor) -> TaskResult:
        self._collect(executor, wait=False)
        while task.result is None:
            if task in self._waiting:
                self._send(task, executor)
            self._fill(executor)
            self._collect(executor, wait=bool(self._submitted))
        self._fill(executor)
        return task.result

    def _fill(self, executor: RestartingExecutor) -> None:
        """Send tasks to the executor, in the order in which their results are needed."""
        count = executor.num_workers
        # After a failure, only one task at a time is sent, to identify the task that breaks executors.
        most = 1 if executor.num_consecutive_failures else math.inf if count is None else TASKS_PER_WORKER * count
        if not self._waiting or len(self._submitted) >= most:
            return
        limit = len(self._tasks) if count is None else min(len(self._tasks), LOOKAHEAD_PER_WORKER * count)
        keys = list(self._tasks)[:limit] if self._order is None else self._order.next_tasks(limit)
        for key in keys:
            task = self._tasks.get(key)
            if task in self._waiting and self._is_ready(task):
                if len(self._submitted) >= most:
                    return
                self._send(task, executor)

    def _send(self, task: _PendingTask, executor: RestartingExecutor) -> None:
        task.client_state = self._client_state_before(task)
        try:
            task.future = executor.submit(
                TaskEnvelope(
                    self._context, task.task_id, task.message, task.client_state, with_context=task.with_context
                )
            )
        except Exception as error:
            self._handle_broken_executor(error, task, executor)
            return
        self._waiting.discard(task)
        self._submitted.add(task)
        task.future.add_done_callback(lambda future: self._finished.put((task, future)))

    def _collect(self, executor: RestartingExecutor, *, wait: bool) -> None:
        """Collect finished tasks. With `wait`, wait for at least one finished task."""
        while True:
            try:
                task, future = self._finished.get(block=wait)
            except Empty:
                return
            wait = False
            if task.future is not future:
                continue
            error = CancelledError() if future.cancelled() else future.exception()
            if error is not None:
                self._handle_broken_executor(error, task, executor)
                continue
            outcome = future.result()
            executor.num_consecutive_failures = 0
            if outcome.needs_context:
                task.with_context = True
                self._requeue(task)
            else:
                self._submitted.discard(task)
                task.future = None
                task.result = outcome

    def _handle_broken_executor(self, error: BaseException, task: _PendingTask, executor: RestartingExecutor) -> None:
        """Restart a failed executor, and queue its tasks again."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ArgumentError):
                raise cause
            cause = cause.__cause__ or cause.__context__
        executor.restart(error, task.task_id.client)
        for other in list(self._submitted):
            self._requeue(other)

    def _is_ready(self, task: _PendingTask) -> bool:
        line = self._client_queues[task.task_id.client]
        place = line.index(task)
        return place == 0 or line[place - 1].result is not None

    def _client_state_before(self, task: _PendingTask) -> ClientState:
        line = self._client_queues[task.task_id.client]
        place = line.index(task)
        return line[place - 1].client_state_after() if place else self.client_states.get(task.task_id.client)

    def _requeue(self, task: _PendingTask) -> None:
        future = task.future
        task.reset()
        self._submitted.discard(task)
        self._waiting.add(task)
        if future is not None:
            future.cancel()

    def _remove(self, task: _PendingTask) -> None:
        del self._tasks[task.task_id]
        self._waiting.discard(task)
        self._submitted.discard(task)
        line = self._client_queues[task.task_id.client]
        line.remove(task)
        if not line:
            del self._client_queues[task.task_id.client]
