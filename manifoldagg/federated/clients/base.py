"""The base class of trainers, their training task, and the count of samples."""

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
"""How many names a complaint lists."""


@dataclass(frozen=True, eq=False)
class TrainingTask:
    """The inputs of one task of a client.

    Attributes:
        space: where models live.
        message: what the server sent.
        loss: `loss(theta, batch)` to a scalar.
        batches: a re-iterable object.
        client_state: what the last payload of this client left with it.
        generator: draws whatever is drawn.
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
        """The number of batches of one pass; `None` if they have no length."""
        try:
            return len(self.batches) if isinstance(self.batches, Sized) else None
        except TypeError:  # a loader has a length that it does not know
            return None

    def buffers(self, at: Tensor | None = None) -> dict[str, Tensor]:
        """The buffers that the message requests, after the evaluations of the loss.

        Args:
            at: (P,), a point that the loss has not been at: statistics are taken anew there, in one pass over the
                batches. Layers in evaluation keep theirs.
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
    """Base class of trainers, whose subclasses implement `_train`.

    Options are the fields of a frozen dataclass; what [`fit`][manifoldagg.fit] takes in groups is checked by these
    when they are made. Buffers that come with the message are those of the loss, and what the message asks for goes
    back with a payload that has none. Any object with `train` is a [`Trainer`][manifoldagg.federated.Trainer]: this
    base spares its signature.

    Example:
        >>> from manifoldagg.manifolds import Flat
        >>> class Still(BaseTrainer):
        ...     def _train(self, task):
        ...         return Payload(task.message.start[None], task.samples)
        ...     def num_steps(self, message, num_batches):
        ...         return 0
        >>> loss = lambda theta, batch: (theta - batch).square().sum()
        >>> message, batches = Message(torch.ones(1)), [torch.zeros(3)]
        >>> Still().train(Flat(1), message, loss, batches, None, generator=torch.Generator()).samples
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
            space: where models live.
            message: from the server: where to start, and what the rule sends besides.
            loss: `loss(theta, batch)` to a scalar; where the message asks for buffers, one of
                [`ParameterSpace.loss`][manifoldagg.manifolds.ParameterSpace.loss]. It is left as it was.
            batches: a re-iterable object.
            client_state: what the last payload of this client left with it.
            generator: draws whatever is drawn.

        Returns:
            The payload for the server.

        Raises:
            ArgumentError: if the message is not of the rule that the trainer belongs to, or asks for buffers that the
                loss does not have; and as [`fit`][manifoldagg.fit].
            DivergenceError: if a loss is not finite.
        """
        loss = _with_buffers(loss, message)
        given = TrainingTask(space, message, loss, batches, client_state, generator)
        payload = self._train(given)
        return payload if payload.buffers else replace(payload, buffers=given.buffers())

    @abc.abstractmethod
    def num_steps(self, message: Message, num_batches: int) -> int:
        """Return the number of steps of `train`, which is the cost of a task before it runs.

        Args:
            message: from the server.
            num_batches: how many batches one pass has.

        Raises:
            ArgumentError: if the message is not of the rule that the trainer belongs to.
        """

    @abc.abstractmethod
    def _train(self, task: TrainingTask) -> Payload: ...


def _with_buffers(loss: Loss, message: Message) -> Loss:
    """Bind the loss to buffers of its own, initialised from the message."""
    carried = {entry.name for entry in loss.layout.buffers} if isinstance(loss, ModelLoss) else set()
    if missing := [name for name in message.requested_buffers if name not in carried]:
        expected = "expected one of ParameterSpace.loss, which keeps the buffers that the message asks for"
        raise ArgumentError(f"loss: {expected}: {', '.join(missing[:MAX_LISTED])}")
    if not isinstance(loss, ModelLoss):
        return loss
    try:
        return loss.with_buffers(message.buffers or None)
    except StateDictError as error:
        raise StateDictError(f"message: buffers: {error}") from None


def count_samples(batches: Iterable[Any]) -> int:
    """Return the number of samples of one pass over `batches`.

    Asked of `batches.samples`, or of the sampler of a `DataLoader` that batches by itself, where there is one; counted
    over one pass otherwise, where a batch is a tensor, a mapping of tensors, or a sequence that begins with inputs.

    Raises:
        ArgumentError: if a batch has no length to count, `batches.samples` is no count, or `batches` is an iterator.

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
