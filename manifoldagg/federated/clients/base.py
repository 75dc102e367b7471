"""The base class of trainers, the training task, and the count of samples."""

import abc
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from manifoldagg._validation import KeywordHints, check_count
from manifoldagg.curves import Embedding, Fit, fit
from manifoldagg.curves.batchnorm import batch_norm_layers, refreshed_buffers
from manifoldagg.errors import ArgumentError, StateDictError
from manifoldagg.federated.types import ClientState, Message, Payload
from manifoldagg.manifolds import Loss, Manifold, ModelLoss

__all__ = ["BaseTrainer", "TrainingTask", "count_samples"]

MAX_LISTED = 3
"""The largest number of names in an error message."""


@dataclass(frozen=True, eq=False)
class TrainingTask:
    """The inputs of one training task of a client.

    Attributes:
        space: the space of the models.
        message: the message from the server.
        loss: a function `loss(theta, batch)` that returns a scalar.
        batches: a re-iterable object that yields batches.
        client_state: the client state in this client's last payload.
        generator: the random number generator of the task.
    """

    space: Manifold
    message: Message
    loss: Loss
    batches: Iterable[Any]
    client_state: ClientState
    generator: torch.Generator

    @property
    def samples(self) -> int:
        """The number of samples of one pass over the batches."""
        return count_samples(self.batches)

    @property
    def num_batches(self) -> int | None:
        """The number of batches of one pass, or `None` if `batches` has no length."""
        try:
            return len(self.batches) if isinstance(self.batches, Sized) else None
        except TypeError:  # a loader of an iterable data set defines __len__, but raises an exception
            return None

    def buffers(self, at: Tensor | None = None) -> dict[str, Tensor]:
        """Return the buffers that the message requests, after the evaluations of the loss.

        Args:
            at: a point (P,) at which the loss was not evaluated. The statistics of batch normalisation are recomputed
                at this point, in one pass over the batches. Layers in evaluation mode retain their statistics.
        """
        loss = self.loss
        if not self.message.requested_buffers or not isinstance(loss, ModelLoss):
            return {}
        carried = loss.buffers
        if at is not None:
            carried = refreshed_buffers(
                loss, at, self.batches, [norm for norm in batch_norm_layers(loss.model) if norm.training]
            )
        return {name: carried[name] for name in self.message.requested_buffers}

    def fit(self, embedding: Embedding, **options: Any) -> Fit:
        """Run [`fit`][manifoldagg.fit] from the message's start."""
        start = self.message.start
        return fit(embedding, self.loss, self.batches, start=start, generator=self.generator, **options)


class BaseTrainer(KeywordHints, abc.ABC):
    """Base class of trainers. Subclasses implement `_train`.

    The options are the fields of a frozen dataclass.

    The base class handles buffers. It initialises the buffers of the loss from the message. If `_train` returns a
    payload without buffers, the base class adds the buffers that the message requests.

    Subclassing is optional: any object with a `train` method is a [`Trainer`][manifoldagg.federated.Trainer].

    Example:
        >>> from manifoldagg.manifolds import Flat
        >>> class Identity(BaseTrainer):
        ...     def _train(self, task):
        ...         return Payload(task.message.start[None], task.samples)
        ...     def num_steps(self, message, num_batches):
        ...         return 0
        >>> loss = lambda theta, batch: (theta - batch).square().sum()
        >>> message, batches = Message(torch.ones(1)), [torch.zeros(3)]
        >>> Identity().train(Flat(1), message, loss, batches, None, generator=torch.Generator()).samples
        3
    """

    def train(
        self,
        space: Manifold,
        message: Message,
        loss: Loss,
        batches: Iterable[Any],
        client_state: ClientState,
        *,
        generator: torch.Generator,
    ) -> Payload:
        """Train from `message.start`.

        Args:
            space: the space of the models.
            message: the message from the server, which contains the start model, and further tensors and numbers of the
                rule.
            loss: a function `loss(theta, batch)` that returns a scalar. If the message requests buffers, the function
                must be a result of [`ParameterSpace.loss`][manifoldagg.manifolds.ParameterSpace.loss]. It is not
                modified.
            batches: a re-iterable object.
            client_state: the client state of this client's last payload.
            generator: the random number generator of the task.

        Returns:
            The payload for the server.

        Raises:
            ArgumentError: if the message is not from the rule of this trainer, or requests buffers that the loss does
                not have. Also for the same reasons as in [`fit`][manifoldagg.fit].
            DivergenceError: if a loss is not finite.
        """
        loss = _with_buffers(loss, message)
        given = TrainingTask(space, message, loss, batches, client_state, generator)
        payload = self._train(given)
        return payload if payload.buffers else replace(payload, buffers=given.buffers())

    @abc.abstractmethod
    def num_steps(self, message: Message, num_batches: int) -> int:
        """Return the number of steps that `train` will take.

        Args:
            message: the message from the server.
            num_batches: the number of batches of one pass.

        Raises:
            ArgumentError: if the message is not from the rule of this trainer.
        """

    @abc.abstractmethod
    def _train(self, task: TrainingTask) -> Payload: ...


def _with_buffers(loss: Loss, message: Message) -> Loss:
    """Return a copy of the loss whose buffers are initialised from the message."""
    carried = {entry.name for entry in loss.layout.buffers} if isinstance(loss, ModelLoss) else set()
    if missing := [name for name in message.requested_buffers if name not in carried]:
        listed = ", ".join(missing[:MAX_LISTED])
        raise ArgumentError(f"loss: expected one with the requested buffers {listed}; use ParameterSpace.loss")
    if not isinstance(loss, ModelLoss):
        return loss
    try:
        return loss.with_buffers(message.buffers or None)
    except StateDictError as error:
        raise StateDictError(f"message: buffers: {error}") from None


def count_samples(batches: Iterable[Any]) -> int:
    """Return the number of samples of one pass over `batches`.

    The function uses the first available source:

    - the attribute `batches.samples`;
    - the sampler of a `DataLoader` with automatic batching;
    - one pass over the batches. A batch is then a tensor, a mapping of tensors, or a sequence whose first element
      contains the inputs.

    Raises:
        ArgumentError: if a batch has no length, if `batches.samples` is not a valid count, or if `batches` is an
            iterator.

    Example:
        >>> count_samples([(torch.zeros(5, 3), torch.zeros(5)), (torch.zeros(2, 3), torch.zeros(2))])
        7
        >>> count_samples([torch.zeros(5, 3), {"inputs": torch.zeros(2, 3)}])
        7
    """
    known = getattr(batches, "samples", None)
    if known is not None:
        return check_count("batches: samples", known)
    if isinstance(batches, Iterator):
        raise ArgumentError("batches: expected a re-iterable object, such as a list; got an iterator")
    if isinstance(batches, DataLoader) and batches.batch_size and isinstance(batches.sampler, Sized):
        drawn = len(batches.sampler)
        return drawn - drawn % batches.batch_size if batches.drop_last else drawn
    try:
        return sum(map(_batch_size, batches))
    except (TypeError, LookupError):
        raise ArgumentError("batches: expected pairs (inputs, targets), or an object with `samples`") from None


def _batch_size(batch: Any) -> int:
    inputs = batch if hasattr(batch, "shape") or isinstance(batch, Mapping) else batch[0]
    while isinstance(inputs, Mapping | tuple):
        inputs = next(iter(inputs.values()), None) if isinstance(inputs, Mapping) else inputs[0]
    return len(inputs)
