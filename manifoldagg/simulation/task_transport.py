"""Serialization of client tasks and their results for executors."""

import io
import os
import pickle
import threading
import traceback
from collections import OrderedDict
from functools import cached_property
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Message, Payload, Trainer
from manifoldagg.federated.types import ClientState
from manifoldagg.kernels import set_backend
from manifoldagg.kernels.backends import selection
from manifoldagg.simulation.client_task import ALIGNMENT, ClientTask, GradientCounter, run_task
from manifoldagg.simulation.dataset import FederatedDataset, TaskId
from manifoldagg.tensor_file import tensor_bytes

__all__ = ["Packed", "RunContext", "TaskEnvelope", "TaskResult", "execute", "execute_local", "execute_scattered"]

MIN_SHARED_BYTES = 2**20
"""The minimum number of bytes of a block in shared memory. For smaller blocks, a pipe is faster."""
MAX_CACHED_CONTEXTS = 4
"""The number of contexts in the cache of a process. Each context contains a data set."""
_SHARE_LOCK = threading.Lock()


class Packed:
    """A value to send to another process. Its tensors are copied into one block of memory.

    The receiver reads the copies, so it cannot change the original tensors. `multiprocessing` sends a large block
    through shared memory, with a single file descriptor for all tensors. Otherwise, the block is part of the pickle.

    Args:
        value: any value that can be pickled.
        copies: whether the receiver copies the tensors out of the block. The block is then released.

    Example:
        >>> pickle.loads(pickle.dumps(Packed({"m": torch.ones(4)[1:], "count": 3}))).value
        {'m': tensor([1., 1., 1.]), 'count': 3}
    """

    def __init__(self, value: Any, *, copies: bool = False) -> None:
        self.value = value
        self.copies = copies

    @cached_property
    def value(self) -> Any:
        """The value. A receiver unpickles it on first access."""
        data, block = self.parts
        return _TensorUnpickler(io.BytesIO(data), block, self.copies).load()

    @cached_property
    def parts(self) -> tuple[bytes, Tensor]:
        """The pickled value without its tensors, and the block of the tensors."""
        file = io.BytesIO()
        pickler = _TensorPickler(file)
        pickler.dump(self.value)
        return file.getvalue(), pickler.pack()

    def __reduce__(self) -> tuple[Any, ...]:
        data, block = self.parts
        return _receive, (data, bytes(tensor_bytes(block)), self.copies)


def _reduce_through_shared_memory(packed: Packed) -> tuple[Any, ...]:
    data, block = packed.parts
    if block.nbytes < MIN_SHARED_BYTES:
        return packed.__reduce__()
    try:
        with _SHARE_LOCK:
            block.share_memory_()
    except (RuntimeError, OSError):  # The shared memory or the file descriptors are exhausted.
        return packed.__reduce__()
    return _receive, (data, block, packed.copies)


ForkingPickler.register(Packed, _reduce_through_shared_memory)


def _receive(data: bytes, block: Tensor | bytes, copies: bool) -> Packed:
    if isinstance(block, bytes):
        received = torch.empty(len(block), dtype=torch.uint8)
        tensor_bytes(received)[:] = block
        block = received
    packed = Packed.__new__(Packed)
    packed.copies = copies
    packed.parts = data, block
    return packed


class _TensorPickler(pickle.Pickler):
    """A pickler that replaces each dense tensor by its position in a block."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self._places: dict[int, tuple[Any, ...]] = {}
        self._tensors: list[tuple[int, Tensor]] = []
        self._size = 0

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.is_meta or obj.is_quantized:
            return None
        place = self._places.get(id(obj))
        if place is None:
            self._places[id(obj)] = place = (self._size, obj.dtype, tuple(obj.shape), obj.device)
            self._tensors.append((self._size, obj.detach()))
            self._size += -(-obj.nbytes // ALIGNMENT) * ALIGNMENT
        return place

    def pack(self) -> Tensor:
        """Return the block of all tensors that were pickled."""
        block = torch.empty(self._size, dtype=torch.uint8)
        for start, tensor in self._tensors:
            _view(block, start, tensor.dtype, tensor.shape).copy_(tensor)
        return block


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, block: Tensor, copies: bool) -> None:
        super().__init__(file)
        self._block = block
        self._copies = copies
        self._tensors: dict[Any, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        if pid not in self._tensors:
            start, dtype, shape, device = pid
            tensor = _view(self._block, start, dtype, shape)
            self._tensors[pid] = (tensor.clone() if self._copies else tensor).to(device)
        return self._tensors[pid]


def _view(block: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return block[start : start + size].view(dtype).view(shape)


class _Environment(NamedTuple):
    """The settings of a process on which the exact result of a task depends."""

    dtype: torch.dtype
    backend: str

    @staticmethod
    def current() -> "_Environment":
        backend = selection.backend_for(torch.device("cpu")).__name__
        return _Environment(torch.get_default_dtype(), str(backend.rpartition(".")[2]))

    def activate(self) -> None:
        """Apply the settings to this process."""
        now = _Environment.current()
        if now.dtype is not self.dtype:
            torch.set_default_dtype(self.dtype)
        if now.backend != self.backend:
            set_backend(self.backend)


class RunContext:
    """The data that all tasks of a run share. Each process receives and unpickles them once."""

    def __init__(self, federation: FederatedDataset, trainer: Trainer) -> None:
        self.federation = federation
        self.trainer = trainer
        self.key = os.urandom(16)
        """The name of the context in the caches of other processes."""

    @cached_property
    def packed(self) -> Packed:
        """The context for another process. Raises an `ArgumentError` if it cannot be pickled."""
        packed = Packed((_Environment.current(), self.federation, self.trainer))
        try:
            packed.parts  # noqa: B018
        except Exception as error:
            raise ArgumentError(
                "executor: the federation or the trainer cannot be sent to another process: use a model and a trainer "
                f"that can be pickled, such as a function of a module, or an executor of threads ({error})"
            ) from error
        return packed


class TaskEnvelope:
    """A client task in the form that is sent to an executor.

    Its pickle usually excludes the data set and the trainer, because all tasks of a run share them. If a worker process
    does not have them yet, it returns an empty `TaskResult`. The task is then sent again, with the data set and the
    trainer.

    Args:
        context: the data set and the trainer.
        task_id: the identifier of the task.
        message: the server's message to the client, with the start model.
        client_state: the state of the client after its previous task.
        with_context: whether the pickled envelope includes `context`.
    """

    def __init__(
        self,
        context: RunContext,
        task_id: TaskId,
        message: Message,
        client_state: ClientState,
        *,
        with_context: bool = False,
    ) -> None:
        self.context = context
        self.parts = Packed((task_id, message, client_state))
        self._with_context = with_context

    def open_task(self) -> ClientTask:
        """Return the client task."""
        return ClientTask(self.context.federation, self.context.trainer, *self.parts.value)

    def __reduce__(self) -> tuple[Any, ...]:
        context = self.context.packed if self._with_context else None
        return ReceivedEnvelope, (self.context.key, context, self.parts)


class ReceivedEnvelope:
    """A client task that a worker process has received.

    `context` contains the data set and the trainer of the run, or is `None` if the sender omitted them.
    """

    def __init__(self, key: bytes, context: Packed | None, parts: Packed) -> None:
        self._key = key
        self._context = context
        self._parts = parts

    def open_task(self) -> ClientTask | None:
        """Return the client task, or `None` if the process does not have the context."""
        context = _CONTEXTS.get(self._key, self._context)
        if context is None:
            return None
        environment, federation, trainer = context.value
        environment.activate()
        return ClientTask(federation, trainer, *self._parts.value)


class _ContextCache:
    """Least-recently-used (LRU) cache of the contexts that this process received."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts: OrderedDict[bytes, Packed] = OrderedDict()

    def get(self, key: bytes, received: Packed | None) -> Packed | None:
        """Return the first context that was received for a key, so that cached models stay valid."""
        with self._lock:
            context = self._contexts.pop(key, received)
            if context is not None:
                self._contexts[key] = context
                while len(self._contexts) > MAX_CACHED_CONTEXTS:
                    self._contexts.popitem(last=False)
            return context


_CONTEXTS = _ContextCache()


class TaskResult:
    """The result of a client task: an update, an exception, or nothing if the task could not start.

    A worker process needs the data set and the trainer of the run. Without them, the task cannot start. It must then
    be sent again, together with the data set and the trainer.

    Args:
        payload: the update that the task returned.
        error: the exception that the task raised.
        gradients: the number of gradients that the task computed, including those before an exception.
    """

    def __init__(self, payload: Payload | None = None, error: Exception | None = None, *, gradients: int = 0) -> None:
        self.payload = payload
        self.error = error
        self.gradients = gradients

    @property
    def needs_context(self) -> bool:
        """Whether the process did not have the context of the run."""
        return self.payload is None and self.error is None

    def __reduce__(self) -> tuple[Any, ...]:
        trace = "" if self.error is None else "".join(traceback.format_exception(self.error))
        packed = Packed((self.payload, self.error, self.gradients), copies=True)
        try:
            packed.parts  # noqa: B018
            if self.error is not None:
                pickle.loads(pickle.dumps(packed)).value  # noqa: B018
        except Exception as problem:
            told = RuntimeError(f"{self.error or problem!r}, which cannot be sent to another process")
            packed = Packed((None, told, self.gradients), copies=True)
        return _rebuild_result, (packed, trace)


def _rebuild_result(packed: Packed, trace: str) -> TaskResult:
    payload, error, gradients = packed.value
    if error is not None:
        error.add_note(f"in another process:\n{trace}")
    return TaskResult(payload, error, gradients=gradients)


def execute(envelope: TaskEnvelope | ReceivedEnvelope) -> TaskResult:
    """Run the task of an envelope. If the task raises an exception, the result contains it."""
    try:
        task = envelope.open_task()
    except Exception as error:
        return TaskResult(
            error=ArgumentError(f"executor: a worker cannot unpickle the federation or the trainer: {error}")
        )
    return TaskResult() if task is None else execute_local(task)


def execute_scattered(key: bytes, context: Packed, parts: Packed) -> TaskResult:
    """Run a task that Dask has scattered."""
    return execute(ReceivedEnvelope(key, context, parts))


def execute_local(task: ClientTask) -> TaskResult:
    """Run a client task in this process and count its gradients.

    If the training raises an exception, the result contains this exception.
    """
    criterion = GradientCounter(task.federation.dataset.criterion)
    try:
        payload = run_task(task, criterion)
    except Exception as error:
        return TaskResult(error=error, gradients=criterion.gradients)
    return TaskResult(payload, gradients=criterion.gradients)
