"""Errands: what a client was asked to do, and the doing of it, with the same bits wherever and whenever it is done."""

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from manifoldagg.federated import Message, Payload, Trainer, train_client
from manifoldagg.federated.clients.determinism import deterministic
from manifoldagg.federated.pytrees import Tree, tree_map
from manifoldagg.federated.types import ClientState
from manifoldagg.simulation.federated_dataset import Federation, Key

__all__ = ["Counted", "Errand", "perform"]

ALIGNED = 64
"""Bytes to a multiple of which torch lays what it allocates."""


@dataclass(frozen=True, eq=False)
class Errand:
    """A task: all that its payload follows from.

    Attributes:
        federation: which data, minibatches and seeds.
        trainer: what is done with them.
        key: whose task it is, and which of that client's.
        message: what the server sent.
        memory: what the client's task before this one left.
    """

    federation: Federation
    trainer: Trainer
    key: Key
    message: Message
    memory: ClientState = None


class Counted:
    """A criterion that counts the gradients it was asked for: its calls whose value can be differentiated.

    A call counts once, also where a trainer of one's own maps it over several points (`vmap`).

    Args:
        criterion: (output, target) to a scalar.

    Attributes:
        gradients: how many.

    Example:
        >>> loss = Counted(nn.functional.mse_loss)
        >>> w = torch.ones(3, requires_grad=True)
        >>> with torch.no_grad():
        ...     _ = loss(w, torch.zeros(3))
        >>> loss(w, torch.zeros(3)).backward()
        >>> loss.gradients
        1
    """

    def __init__(self, criterion: Callable[[Any, Any], Tensor] = cross_entropy) -> None:
        self._criterion = criterion
        self.gradients = 0

    def __call__(self, output: Any, target: Any) -> Tensor:
        value = self._criterion(output, target)
        self.gradients += value.requires_grad
        return value


class _Place(threading.local):
    """What a thread keeps for the next errand of the same federation: a module is lent to one at a time."""

    federation: weakref.ref[Federation] | None = None
    model: nn.Module

    def enter(self, federation: Federation) -> None:
        if self.federation is None or self.federation() is not federation:
            self.model = federation.model()
            self.federation = weakref.ref(federation)


_PLACE = _Place()


def perform(errand: Errand, criterion: Callable[[Any, Any], Tensor] = cross_entropy) -> Payload:
    """Do an errand, [`deterministic`][manifoldagg.federated.clients.determinism.deterministic]: its payload follows
    from it alone.

    The trainer may write what it is given.

    Args:
        errand: what is to be done.
        criterion: cross-entropy, as it is or counted.

    Raises:
        DivergenceError: if a loss is not finite.

    Example:
        >>> from manifoldagg.federated import clients
        >>> from manifoldagg.manifolds import ParameterSpace
        >>> from manifoldagg.experiments import task
        >>> from manifoldagg.simulation import iid_partition
        >>> federation = Federation.split(task("digits"), 30, partition=iid_partition, seed=0)
        >>> model = federation.model()
        >>> message = Message(ParameterSpace.of(model).point(model))
        >>> errand = Errand(federation, clients.Local(epochs=1), StoreKey(client=3, nth=0), message)
        >>> torch.equal(perform(errand).points, perform(errand).points)
        True
    """
    federation, trainer, (client, nth) = errand.federation, errand.trainer, errand.key
    generator = federation.generator(client, nth)
    _PLACE.enter(federation)
    with deterministic(generator):
        payload = train_client(
            _PLACE.model,
            _copied_message(errand.message),
            trainer,
            federation.batches(client, nth),
            criterion,
            client_state=tree_map(errand.memory, _copied),
            generator=generator,
        )
    return replace(
        payload,
        points=_own(payload.points),
        tensors=_each(payload.tensors),
        client_state=owned(payload.client_state),
        buffers=_each(payload.buffers),
        base=owned(payload.base),
    )


def owned(tree: Tree) -> Tree:
    """The tree with tensors that lie as torch would lay them: how a sum is vectorised depends on where it begins."""
    return tree_map(tree, _own)


def _own(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        return tensor
    alone = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous() and not tensor.requires_grad
    return tensor if alone and tensor.data_ptr() % ALIGNED == 0 else _copied(tensor)


def _copied(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        return tensor.detach().clone()
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor.detach())


def _each(tensors: Mapping[str, Tensor], change: Callable[[Tensor], Tensor] = _own) -> dict[str, Tensor]:
    return {name: change(tensor) for name, tensor in tensors.items()}


def _copied_message(message: Message) -> Message:
    """The message as its client's own: others have the same version."""
    tensors, buffers = _each(message.tensors, _copied), _each(message.buffers, _copied)
    return replace(message, start=_copied(message.start), tensors=tensors, buffers=buffers)
