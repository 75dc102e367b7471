"""Client tasks: their inputs, and their deterministic execution in any process."""

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from manifoldagg.federated import Message, Payload, Ticket, Trainer
from manifoldagg.federated.clients.determinism import deterministic
from manifoldagg.federated.pytrees import Tree, tree_map
from manifoldagg.federated.types import ClientState
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.simulation.dataset import FederatedDataset, TaskId

__all__ = ["ClientTask", "GradientCounter", "MessageTensors", "bitwise_equal", "run_task"]

ALIGNMENT = 64
"""The alignment in bytes of memory that torch allocates."""


@dataclass(frozen=True, eq=False)
class ClientTask:
    """One training task of a client, with all inputs that determine the payload that the client returns.

    Attributes:
        federation: the federated data set, which contains the client's samples, the loss function and the seed.
        trainer: the trainer that the client runs.
        task_id: the identifier of the client, and the index of this task among the client's tasks.
        message: the message that the server sent to the client.
        client_state: the state that the client's previous task left, or `None` if there is no such state.
    """

    federation: FederatedDataset
    trainer: Trainer
    task_id: TaskId
    message: Message
    client_state: ClientState = None


class MessageTensors:
    """A cache through which messages of the same model version share equal tensors."""

    def __init__(self) -> None:
        self._version = -1
        self._shared: dict[str, Tensor] = {}

    def share(self, ticket: Ticket) -> Message:
        """Return the server's message in a ticket, with equal tensors of earlier messages reused.

        If a tensor is bitwise equal to the first tensor with the same name and model version, the result refers to that
        first tensor.
        """
        if ticket.version != self._version:
            self._version = ticket.version
            self._shared = {}
        sent = ticket.message
        return replace(
            sent,
            start=self._share("start", sent.start),
            tensors={name: self._share(f"tensors: {name}", tensor) for name, tensor in sent.tensors.items()},
            buffers={name: self._share(f"buffers: {name}", tensor) for name, tensor in sent.buffers.items()},
        )

    def _share(self, name: str, tensor: Tensor) -> Tensor:
        first = self._shared.setdefault(name, tensor)
        return first if first is tensor or bitwise_equal(first, tensor) else tensor


class GradientCounter:
    """A loss function that counts how many gradients a trainer computes.

    Each call whose result requires a gradient increases the attribute `gradients` by 1. A call inside `torch.func.vmap`
    also counts once, even if it evaluates the loss at several points.

    Example:
        >>> loss = GradientCounter(nn.functional.mse_loss)
        >>> w = torch.ones(3, requires_grad=True)
        >>> with torch.no_grad():
        ...     _ = loss(w, torch.zeros(3))
        >>> loss(w, torch.zeros(3)).backward()
        >>> loss.gradients
        1
    """

    def __init__(self, criterion: Callable[[Any, Any], Tensor]) -> None:
        self._criterion = criterion
        self.gradients = 0

    def __call__(self, output: Any, target: Any) -> Tensor:
        value = self._criterion(output, target)
        self.gradients += value.requires_grad
        return value


class _ThreadModelCache(threading.local):
    """A cache for each thread, with the model of the data set that the thread used last."""

    federation: weakref.ref[FederatedDataset] | None = None
    model: nn.Module
    space: ParameterSpace

    def prepare(self, federation: FederatedDataset) -> None:
        if self.federation is None or self.federation() is not federation:
            self.model = federation.model()
            self.space = ParameterSpace.of(self.model)
            self.federation = weakref.ref(federation)


_MODEL_CACHE = _ThreadModelCache()


def run_task(task: ClientTask, criterion: Callable[[Any, Any], Tensor] | None = None) -> Payload:
    """Run a training task of a client and return the client's payload.

    The training is [`deterministic`][manifoldagg.federated.clients.determinism.deterministic], so the payload depends
    only on the task. The trainer receives copies of all tensors and may therefore modify them.

    Args:
        task: the task to run.
        criterion: a `GradientCounter` of the criterion of the data set. The default is the criterion itself.

    Raises:
        DivergenceError: if a loss is not finite.

    Example:
        >>> from manifoldagg.federated import clients
        >>> from manifoldagg.manifolds import ParameterSpace
        >>> from manifoldagg.experiments import load_dataset
        >>> from manifoldagg.simulation import iid_partition
        >>> federation = FederatedDataset.split(load_dataset("digits"), 30, partition=iid_partition, seed=0)
        >>> model = federation.model()
        >>> message = Message(ParameterSpace.of(model).point(model))
        >>> task = ClientTask(federation, clients.Local(epochs=1), TaskId(client=3, task_index=0), message)
        >>> torch.equal(run_task(task).points, run_task(task).points)
        True
    """
    federation = task.federation
    trainer = task.trainer
    client, nth = task.task_id
    generator = federation.generator(client, nth)
    _MODEL_CACHE.prepare(federation)
    space = _MODEL_CACHE.space
    loss = space.loss(_MODEL_CACHE.model, federation.dataset.criterion if criterion is None else criterion)
    with deterministic(generator):
        payload = trainer.train(
            space,
            _copy_message(task.message),
            loss,
            federation.batches(client, nth),
            tree_map(task.client_state, _copy),
            generator=generator,
        )
    return replace(
        payload,
        points=_align(payload.points),
        tensors=_map_tensors(payload.tensors),
        client_state=align_tensors(payload.client_state),
        buffers=_map_tensors(payload.buffers),
        base=align_tensors(payload.base),
    )


def align_tensors(tree: Tree) -> Tree:
    """Return a nested container in which each dense tensor is contiguous, with an aligned storage of its own.

    A dense tensor is copied only if it is not contiguous, not aligned, a view of a larger storage, or requires a
    gradient. Other values are unchanged.
    """
    return tree_map(tree, _align)


def _align(tensor: Tensor) -> Tensor:
    # The memory layout affects the vectorisation of sums, and thus their rounding.
    if tensor.layout is not torch.strided:
        return tensor
    alone = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous() and not tensor.requires_grad
    return tensor if alone and tensor.data_ptr() % ALIGNMENT == 0 else _copy(tensor)


def _copy(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        return tensor.detach().clone()
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor.detach())


def _map_tensors(tensors: Mapping[str, Tensor], function: Callable[[Tensor], Tensor] = _align) -> dict[str, Tensor]:
    return {name: function(tensor) for name, tensor in tensors.items()}


def _copy_message(message: Message) -> Message:
    """Copy the tensors of a message, because messages of the same version share tensors."""
    tensors = _map_tensors(message.tensors, _copy)
    buffers = _map_tensors(message.buffers, _copy)
    return replace(message, start=_copy(message.start), tensors=tensors, buffers=buffers)


def bitwise_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are bitwise equal. Positive and negative zero differ.

    Example:
        >>> bitwise_equal(torch.zeros(2), torch.zeros(2)), bitwise_equal(torch.zeros(2), -torch.zeros(2))
        (True, False)
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
