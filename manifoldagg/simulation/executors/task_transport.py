"""Task envelopes: the transport of client tasks to an executor, and of their results back."""

import os
import threading
import traceback
from collections import OrderedDict
from functools import cached_property
from typing import Any, NamedTuple

import torch

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Message, Payload, Trainer
from manifoldagg.federated.types import ClientState
from manifoldagg.kernels import set_backend
from manifoldagg.kernels.backends import selection
from manifoldagg.simulation.client_task import ClientTask, GradientCounter, run_task
from manifoldagg.simulation.executors.shared_tensors import (
    SharedTensorStore,
    StoredTensor,
    TensorNotFound,
    TensorRef,
    deserialize,
    serialize,
)
from manifoldagg.simulation.federated_dataset import FederatedDataset, TaskId

__all__ = ["RunContext", "TaskEnvelope", "TaskResult", "execute", "execute_local"]

MAX_CACHED_CONTEXTS = 4
"""How many contexts a process keeps: a federation holds data."""


class _Environment(NamedTuple):
    """What else in a process the bits of a task follow from."""

    dtype: torch.dtype
    backend: str

    @staticmethod
    def current() -> "_Environment":
        return _Environment(torch.get_default_dtype(), _backend_name())

    def activate(self) -> None:
        """Have them in this process."""
        if torch.get_default_dtype() is not self.dtype:
            torch.set_default_dtype(self.dtype)
        if _backend_name() != self.backend:
            set_backend(self.backend)


class _LoadedContext(NamedTuple):
    """The context of a run as another process has it."""

    environment: _Environment
    federation: FederatedDataset
    trainer: Trainer


def _backend_name() -> str:
    return str(selection.backend_for(torch.device("cpu")).__name__.rpartition(".")[2])


class RunContext:
    """The common data of all tasks of a run, serialised once for all of their envelopes.

    Args:
        federation: which data, minibatches and seeds.
        trainer: what is done with them.
    """

    def __init__(self, federation: FederatedDataset, trainer: Trainer) -> None:
        self.federation = federation
        self.trainer = trainer
        self._serialized: StoredTensor | None = None
        self._lock = threading.Lock()

    @cached_property
    def tensor_store(self) -> SharedTensorStore:
        """The store of tensors for other processes."""
        return SharedTensorStore()

    def make_task(self, task_id: TaskId, message: Message, client_state: ClientState) -> ClientTask:
        """Return the client task of a task id."""
        return ClientTask(self.federation, self.trainer, task_id, message, client_state)

    def serialize_context(self) -> StoredTensor:
        """Return the context, which refers to the tensor store, as bytes.

        Raises:
            ArgumentError: if they cannot be pickled.
        """
        with self._lock:
            if self._serialized is None:
                try:
                    inside, _ = serialize((self.federation, self.trainer))
                except Exception as error:
                    raise ArgumentError(
                        "executor: the federation or the trainer cannot be sent to another process: split a `dataset` "
                        f"of a function that can be imported, or give an executor of threads ({error})"
                    ) from error
                data, _ = serialize((_Environment.current(), inside))
                self._serialized = self.tensor_store.put(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            return self._serialized


class TaskEnvelope:
    """A task that is pickled as references to its data; its size is independent of the model.

    Args:
        context: of the run.
        task_id: whose task, and which.
        message: from the server.
        client_state: what the client's task before this one left.
        by_value: bring it all by value, as it was not found.
    """

    def __init__(
        self,
        context: RunContext,
        task_id: TaskId,
        message: Message,
        client_state: ClientState,
        *,
        by_value: bool = False,
    ) -> None:
        self._context = context
        self._parts = (task_id, message, client_state)
        self._by_value = by_value
        self._stored: list[StoredTensor] = []

    def open_task(self) -> ClientTask:
        """Return the client task."""
        return self._context.make_task(*self._parts)

    def __reduce__(self) -> tuple[Any, ...]:
        sealed = self._context.serialize_context()
        data, lying = serialize(self._parts, self._context.tensor_store, by_value=self._by_value)
        # What it refers to lies there for as long as it does.
        self._stored += lying
        return _ReceivedEnvelope, (self._context.tensor_store.reference(sealed, force_by_value=self._by_value), data)

    def __dask_tokenize__(self) -> str:
        """Return a unique token, so that dask does not deduplicate tasks."""
        return os.urandom(16).hex()


class _ReceivedEnvelope:
    """A received, unopened envelope; errors on opening it are returned as results."""

    def __init__(self, context: TensorRef, data: bytes) -> None:
        self._context = context
        self._data = data

    def open_task(self) -> ClientTask:
        """What is to be done.

        Raises:
            Missing: if something of it is not here.
            ArgumentError: if the federation or the trainer cannot be made here.
        """
        common = _CONTEXT_CACHE.get(self._context)
        common.environment.activate()
        return ClientTask(common.federation, common.trainer, *deserialize(self._data))


class _ContextCache:
    """The contexts that were made in this process, the latest last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts: OrderedDict[str | bytes | None, _LoadedContext] = OrderedDict()

    def get(self, ref: TensorRef) -> _LoadedContext:
        name = ref.name or ref.data
        with self._lock:
            made = self._contexts.pop(name, None)
            if made is None:
                surroundings, inside = deserialize(ref.load().numpy().tobytes())
                surroundings.activate()
                try:
                    made = _LoadedContext(surroundings, *deserialize(inside))
                except Exception as error:
                    raise ArgumentError(
                        f"executor: a worker cannot make the federation or the trainer: {error}"
                    ) from error
            self._contexts[name] = made
            while len(self._contexts) > MAX_CACHED_CONTEXTS:
                self._contexts.popitem(last=False)
            return made


_CONTEXT_CACHE = _ContextCache()


class TaskResult:
    """The result of a task, a payload or an exception, pickled as plain bytes.

    Args:
        payload: of the task.
        error: what was raised.
        from_training: whether the training raised it.
        gradients: that were computed, also by a training that raised.
    """

    def __init__(
        self,
        payload: Payload | None = None,
        error: Exception | None = None,
        *,
        from_training: bool = True,
        gradients: int = 0,
    ) -> None:
        self.payload = payload
        self.error = error
        self.from_training = from_training
        self.gradients = gradients

    @property
    def has_missing_tensors(self) -> bool:
        """Whether the envelope refers to tensors that the process could not read."""
        return self.payload is None and self.error is None

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            data, _ = serialize((self.payload, self.error, self.from_training, self.gradients))
            if self.error is not None:
                deserialize(data)
        except Exception as problem:
            told = RuntimeError(f"{self.error or problem!r}, which cannot be sent to another process")
            data, _ = serialize((None, told, self.from_training, self.gradients))
        return _rebuild_result, (data, "" if self.error is None else "".join(traceback.format_exception(self.error)))


def _rebuild_result(data: bytes, trace: str) -> TaskResult:
    payload, error, trained, gradients = deserialize(data)
    if error is not None:
        error.add_note(f"in another process:\n{trace}")
    return TaskResult(payload, error, from_training=trained, gradients=gradients)


def execute(envelope: TaskEnvelope | _ReceivedEnvelope) -> TaskResult:
    """Run the task of an envelope and return exceptions as results; only the executor itself raises."""
    try:
        task = envelope.open_task()
    except TensorNotFound:
        return TaskResult()
    except Exception as error:
        return TaskResult(error=error, from_training=False)
    return execute_local(task)


def execute_local(task: ClientTask) -> TaskResult:
    """Run a task and return exceptions of its training as results; gradients are counted in this process."""
    criterion = GradientCounter()
    try:
        payload = run_task(task, criterion)
    except Exception as error:
        return TaskResult(error=error, gradients=criterion.gradients)
    return TaskResult(payload, gradients=criterion.gradients)
