"""Base class and helpers of client trainers.

- `BaseTrainer` is the base class of all trainers.
- `TrainingTask` contains the inputs of one training task.
- `count_samples` counts the samples in the batches of a client.
"""

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
"""The largest number of buffer names that an error message lists."""


@dataclass(frozen=True, eq=False)
class TrainingTask:
    """Inputs of one training task of a client.

    Attributes:
        space: the space of the models.
        message: the message from the server, which contains the start model.
        loss: a function `loss(theta, batch)` that returns the loss of the model `theta` on a batch as a scalar.
        batches: an iterable of the client's batches that can be iterated several times.
        client_state: the client state from this client's previous payload. `None` before the client's first payload.
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
        except TypeError:  # `len` of a DataLoader fails if its iterable data set has no length
            return None

    def buffers(self, at: Tensor | None = None) -> dict[str, Tensor]:
        """Return the model buffers that the server requests, such as running means.

        Each evaluation of the loss updates the buffers, so call this method at the end of the training. If the training
        has not evaluated the loss at the final model, set `at` to the final model.

        Args:
            at: a point (P,). If it is given, the statistics of BatchNorm layers in training mode are recomputed at this
                point in one pass over the batches. Layers in evaluation mode keep their statistics.

        Returns:
            The requested buffers by name. The dict is empty if the message requests no buffers, or if the loss is not a
            `ModelLoss`.
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
        """Fit an embedding to the client's batches, from the start model of the message.

        Args:
            embedding: the embedding, such as a curve.
            options: further keyword arguments of [`fit`][manifoldagg.fit].
        """
        start = self.message.start
        return fit(embedding, self.loss, self.batches, start=start, generator=self.generator, **options)


class BaseTrainer(KeywordHints, abc.ABC):
    """Base class for trainers, which carry out the local training of a client.

    A subclass implements two methods: `_train` trains a model and returns the payload, and `num_steps` predicts the
    number of training steps. If the subclass has options, declare them as fields of a frozen dataclass.

    The base class handles the buffers of the model, such as running means:

    - Before the training, it creates a copy of the loss function with the buffers from the server's message.
    - After the training, it adds the buffers that the server requests to the payload, unless the payload already
      contains buffers.

    A trainer need not be a subclass. Any object with a `train` method is a [`Trainer`][manifoldagg.federated.Trainer].

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
        """Train from the start model in the message, and return the payload for the server.

        Args:
            space: the space of the models.
            message: the message from the server. It contains the start model, and any additional tensors and numbers of
                the rule.
            loss: a function `loss(theta, batch)` that returns the loss of the model `theta` on a batch as a scalar. The
                trainer does not modify this object. If the message requests buffers, create the function with
                [`ParameterSpace.loss`][manifoldagg.manifolds.ParameterSpace.loss].
            batches: an iterable of the client's batches that can be iterated several times.
            client_state: the client state from this client's previous payload. `None` before the client's first
                payload.
            generator: the random number generator of the task.

        Returns:
            The payload for the server.

        Raises:
            ArgumentError: if the message does not come from a rule that this trainer supports, if the message requests
                buffers that the loss does not have, or if [`fit`][manifoldagg.fit] rejects its arguments.
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
            ArgumentError: if the message does not come from a rule that this trainer supports.
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
    """Return the number of samples in one pass over a client's batches.

    The function uses the first of these sources that is available:

    1. The attribute `batches.samples`.
    2. The length of the sampler, if `batches` is a `DataLoader` with automatic batching. With `drop_last`, the samples
       of an incomplete last batch do not count.
    3. One pass over the batches. Each batch must be a tensor, a mapping of tensors, or a sequence whose first element
       contains the inputs.

    Args:
        batches: an iterable that can be iterated several times.

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
