"""The crew: who trains what clients were asked for, on an executor or here, in the order in which it will be needed."""

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
from manifoldagg.simulation.executors.executor import Executors, Workers
from manifoldagg.simulation.executors.task_transport import Letter, Outcome, Terms, done
from manifoldagg.simulation.federated_dataset import Federation, Key

__all__ = ["Coming", "Crew"]

QUEUED = 2
"""Tasks that an executor has for each of its workers: none of them waits for this process."""
AHEAD = 16
"""Tasks for each worker beyond which nobody looks ahead: what was trained too early lies in memory."""


@runtime_checkable
class Coming(Protocol):
    """Who knows which tasks will be needed, and in which order."""

    def coming(self, limit: int) -> Sequence[Key]:
        """The first `limit` of the tasks that were given and will be needed."""


class _Task:
    """A task that was given and has not been answered.

    Attributes:
        message: from the server.
        whole: whether its letter must bring all by value.
        memory: what it started from, once it was sent.
        future: what the executor returned for its letter.
        outcome: what came of it.
    """

    def __init__(self, key: Key, message: Message) -> None:
        self.key = key
        self.message = message
        self.whole = False
        self.forget()

    def forget(self) -> None:
        """As if it had never been sent."""
        self.memory: ClientState = None
        # What lies on the shelf for it goes with it.
        self.letter: Letter | None = None
        self.future: Future[Outcome] | None = None
        self.outcome: Outcome | None = None

    def leaves(self) -> ClientState:
        """What the client's next task starts from."""
        assert self.outcome is not None
        return self.memory if self.outcome.payload is None else self.outcome.payload.client_state


class Crew:
    """Trains what clients were asked for: here, when they answer, or before that on an executor. The bits are the same.

    A client's tasks are done one after the other, each from the memory that the one before it left. As a context it
    takes back what an executor has not done.

    Args:
        federation: which data, minibatches and seeds.
        trainer: what clients do.
        executor: an executor; what makes one, which is ended with this; or workers, who go on to others after this.
            `None`: this thread, when it asks.
        foresight: tells which tasks will be needed first. Without it: those that were given first.
        memories: by client, what another crew's were, to go on from.

    Attributes:
        memories: by client, what its last answer left with it; replaced and never written.

    Attributes:
        gradients: that the task of the latest `result` computed, also where it raised.

    Raises:
        ArgumentError: if `executor` is none of these.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from manifoldagg.federated import clients
        >>> from manifoldagg.manifolds import ParameterSpace
        >>> from manifoldagg.experiments import task
        >>> from manifoldagg.simulation import iid_partition
        >>> federation = Federation.split(task("digits"), 30, partition=iid_partition, seed=0)
        >>> model = federation.model()
        >>> message = Message(ParameterSpace.of(model).point(model))
        >>> with ThreadPoolExecutor(2) as pool, Crew(federation, clients.Local(epochs=1), pool) as crew:
        ...     for client in (3, 4, 5):
        ...         crew.give(StoreKey(client, 0), message)
        ...     [crew.result(StoreKey(client, 0)).samples == len(federation.train[client]) for client in (5, 3, 4)]
        [True, True, True]
    """

    def __init__(
        self,
        federation: Federation,
        trainer: Trainer,
        executor: Executors = None,
        foresight: Coming | None = None,
        memories: Map[int, ClientState] = Map(),
    ) -> None:
        self._terms = Terms(federation, trainer)
        self._ours = None if executor is None or isinstance(executor, Workers) else Workers(executor)
        self._workers = executor if isinstance(executor, Workers) else self._ours
        self._foresight = foresight
        self.gradients = 0
        self._tasks: dict[Key, _Task] = {}
        # The tasks of a client in the order in which they were given.
        self._lines: dict[int, list[_Task]] = {}
        self.memories = memories
        self._waiting: set[_Task] = set()
        self._out: set[_Task] = set()
        self._done: SimpleQueue[tuple[_Task, Future[Outcome]]] = SimpleQueue()

    def give(self, key: Key, message: Message) -> None:
        """Ask for a task. Nothing of `message` may be written from now on.

        Raises:
            ArgumentError: if a task of that key was given already, and not answered.
        """
        if key in self._tasks:
            raise ArgumentError(f"key: {key} was given already")
        task = _Task(key, message)
        self._tasks[key] = task
        self._lines.setdefault(key.client, []).append(task)
        self._waiting.add(task)

    def result(self, key: Key) -> Payload:
        """The payload of a task, which is answered with that; tasks of its client that were given before it are.

        Raises:
            ArgumentError: if it is not the next task of its client, or the executor cannot do it.
            Exception: whatever the training raised, such as a `DivergenceError`.
        """
        task = self._tasks.get(key)
        if task is None or self._lines[key.client][0] is not task:
            raise ArgumentError(f"key: {key} is not the next task of its client")
        outcome = self._here(task) if self._workers is None else self._elsewhere(task, self._workers)
        self.gradients = outcome.gradients
        left = task.leaves()
        self._drop(task)
        if left is not None:
            self.memories = self.memories.set(key.client, left)
        elif key.client in self.memories:
            self.memories = self.memories.delete(key.client)
        if outcome.payload is None:
            assert outcome.error is not None
            raise outcome.error
        return outcome.payload

    def lose(self, keys: Iterable[Key]) -> None:
        """Forget tasks that nobody waits for. What their clients do next starts from the memory of the last answer."""
        for task in [self._tasks[key] for key in keys if key in self._tasks]:
            line = self._lines[task.key.client]
            for later in line[line.index(task) :]:
                # Those that follow started from what it left.
                self._recall(later)
            self._drop(task)

    def close(self) -> None:
        """Take back what an executor has not done, and end one that was made here."""
        for task in list(self._out):
            self._recall(task)
        if self._ours is not None:
            self._ours.close()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _here(self, task: _Task) -> Outcome:
        task.memory = self._before(task)
        task.outcome = done(self._terms.errand(task.key, task.message, task.memory))
        return task.outcome

    def _elsewhere(self, task: _Task, workers: Workers) -> Outcome:
        self._hear(workers, wait=False)
        while task.outcome is None:
            if task in self._waiting:
                self._send(task, workers)
            self._employ(workers)
            self._hear(workers, wait=bool(self._out))
        self._employ(workers)
        return task.outcome

    def _employ(self, workers: Workers) -> None:
        """Keep the executor busy with what will be needed first."""
        count = workers.count
        # One at a time where executors break, to know with whose task.
        most = 1 if workers.broken else math.inf if count is None else QUEUED * count
        if not self._waiting or len(self._out) >= most:
            return
        limit = len(self._tasks) if count is None else min(len(self._tasks), AHEAD * count)
        keys = list(self._tasks)[:limit] if self._foresight is None else self._foresight.coming(limit)
        for key in keys:
            task = self._tasks.get(key)
            if task in self._waiting and self._is_ready(task):
                if len(self._out) >= most:
                    return
                self._send(task, workers)

    def _send(self, task: _Task, workers: Workers) -> None:
        task.memory = self._before(task)
        task.letter = Letter(self._terms, task.key, task.message, task.memory, whole=task.whole)
        try:
            task.future = workers.submit(task.letter)
        except Exception as error:
            self._break(error, task, workers)
            return
        self._waiting.discard(task)
        self._out.add(task)
        task.future.add_done_callback(lambda future: self._done.put((task, future)))

    def _hear(self, workers: Workers, *, wait: bool) -> None:
        """Take what has been done; with `wait` at least one piece of news."""
        while True:
            try:
                task, future = self._done.get(block=wait)
            except Empty:
                return
            wait = False
            if task.future is not future:
                continue
            error = CancelledError() if future.cancelled() else future.exception()
            if error is not None:
                self._break(error, task, workers)
                continue
            outcome = future.result()
            workers.broken = 0
            if outcome.missing:
                self._terms.shelf.far = task.whole = True
                self._recall(task)
            elif outcome.error is not None and not outcome.trained:
                raise outcome.error
            else:
                self._out.discard(task)
                # It knows this by what it calls when it is done.
                task.future = None
                task.letter = None
                task.outcome = outcome

    def _break(self, error: BaseException, task: _Task, workers: Workers) -> None:
        """The executor failed: what it was at is done again on another."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ArgumentError):
                raise cause
            cause = cause.__cause__ or cause.__context__
        workers.replace(error, task.key.client)
        for other in list(self._out):
            self._recall(other)

    def _is_ready(self, task: _Task) -> bool:
        line = self._lines[task.key.client]
        place = line.index(task)
        return place == 0 or line[place - 1].outcome is not None

    def _before(self, task: _Task) -> ClientState:
        line = self._lines[task.key.client]
        place = line.index(task)
        return line[place - 1].leaves() if place else self.memories.get(task.key.client)

    def _recall(self, task: _Task) -> None:
        future = task.future
        task.forget()
        self._out.discard(task)
        self._waiting.add(task)
        if future is not None:
            future.cancel()

    def _drop(self, task: _Task) -> None:
        del self._tasks[task.key]
        self._waiting.discard(task)
        self._out.discard(task)
        line = self._lines[task.key.client]
        line.remove(task)
        if not line:
            del self._lines[task.key.client]
