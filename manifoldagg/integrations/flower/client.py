"""The client side of the Flower integration: a `ClientApp` that runs a trainer."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import flwr.app
import flwr.clientapp
import torch
from torch import Tensor, nn

from manifoldagg._validation import check_count, renamed_arguments, short_repr
from manifoldagg.errors import ArgumentError, WireError
from manifoldagg.federated import Message, Payload, Ticket, Trainer, train_client
from manifoldagg.federated.clients.base import count_samples
from manifoldagg.federated.clients.compression import Codec, ErrorFeedback
from manifoldagg.federated.clients.determinism import deterministic, seeded_model, task_generator
from manifoldagg.federated.clients.personal import load_personal
from manifoldagg.federated.pytrees import tree_map
from manifoldagg.federated.types import ClientState
from manifoldagg.integrations.flower.records import (
    RECORD_KEY,
    bytes_to_record,
    codec_from_record,
    record_to_bytes,
    state_dict,
)
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.manifolds.personal import check_patterns
from manifoldagg.wire import pack, unpack

__all__ = ["client_app"]

NUM_EXAMPLES_KEY = "num-examples"
METRICS_KEY = "metrics"
NUM_TASKS_KEY = "num_tasks"
CLIENT_STATE_KEY = "client_state"
FEEDBACK_KEY = "error_feedback"
FlowerContext: TypeAlias = flwr.app.Context
FlowerMessage: TypeAlias = flwr.app.Message


def client_app(
    trainer: Trainer | Callable[[FlowerContext], Trainer],
    model: nn.Module | Callable[[], nn.Module],
    data: Callable[[FlowerContext, int], Iterable[Any]],
    *,
    criterion: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy,
    personal: Sequence[str] = (),
    seed: int = 0,
    evaluate: Callable[[nn.Module, FlowerContext], Mapping[str, float]] | None = None,
    mods: Sequence[Callable[..., FlowerMessage]] | None = None,
    threads: int | None = 1,
) -> flwr.clientapp.ClientApp:
    """Build a Flower `ClientApp` that runs a trainer of this package. The app works with every aggregation rule.

    - **Messages.** The app reads both message formats: an `ArrayRecord` with a state dict, and the wire format of
      `manifoldagg.wire`. Its reply contains all outputs of the trainer.
    - **State.** The node stores the client state of the trainer and the number of its tasks in `context.state`.
    - **Random numbers.** The random numbers of a task depend only on `seed`, the node and the number of its earlier
      tasks. A simulation of the same federation therefore computes the same bits. A node is identified by the
      `partition-id` in `context.node_config`. Without this entry, it is identified by its node id.
    - **Failures.** If training raises an exception, Flower sends an error reply, and the server continues.

    Args:
        trainer: the trainer, or a function of the Flower context that returns a trainer. The context contains the
            configuration of the run.
        model: a function that returns the module, such as its class, or a module, which the app copies. Training runs
            on the device of the module.
        data: a function of the context and the task number (starting from 0) that returns the batches of a task. The
            batches must be re-iterable.
        criterion: the loss, a function of output and target.
        personal: names or glob patterns of parameters and buffers that stay on the node. Pass the same value to
            `Asynchronous`. The node stores these values in `context.state` and trains them. For an evaluation, the node
            combines them with the model of the server.
        seed: the seed of all random numbers.
        evaluate: a function of the module in evaluation mode and the context. It returns metrics that include
            `"num-examples"`. With `None`, the app computes the metric `"loss"`, the mean of the criterion over
            `data(context, 0)`.
        mods: Flower mods for training and evaluation. They receive messages in the wire format as bytes.
        threads: the number of PyTorch threads in training. With `None`, PyTorch uses all threads, and the rounding
            errors of sums can differ between runs.

    Raises:
        ArgumentError: if an argument is invalid.

    Example:
        >>> import torch
        >>> from manifoldagg.federated import clients
        >>> batches = [(torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))]
        >>> app = client_app(clients.Curve(degree=2), lambda: nn.Linear(2, 3), lambda context, nth: batches)
        >>> type(app).__name__
        'ClientApp'
    """
    if isinstance(trainer, type) or not (isinstance(trainer, Trainer) or callable(trainer)):
        raise ArgumentError(
            f"trainer: expected an instance with `train`, or a function of a context, got {short_repr(trainer)}"
        )
    for name, given in (("model", model), ("data", data), ("criterion", criterion), ("evaluate", evaluate)):
        if not callable(given) and not (name == "evaluate" and given is None):
            raise ArgumentError(f"{name}: expected a function, got {short_repr(given)}")
    check_count("seed", seed, at_least=0)
    if threads is not None:
        check_count("threads", threads)
    client = _Client(
        trainer,
        model,
        data,
        criterion,
        seed,
        evaluate or _mean_loss(criterion, data),
        threads,
        check_patterns(personal),
    )
    app = flwr.clientapp.ClientApp(mods=list(mods or ()))
    app.train()(client.train)
    app.evaluate()(client.evaluate)
    return app


@dataclass(frozen=True, eq=False)
class _Client:
    trainer: Trainer | Callable[[FlowerContext], Trainer]
    model: nn.Module | Callable[[], nn.Module]
    data: Callable[[FlowerContext, int], Iterable[Any]]
    criterion: Callable[[Any, Any], Tensor]
    seed: int
    evaluate_fn: Callable[[nn.Module, FlowerContext], Mapping[str, float]]
    threads: int | None
    personal: tuple[str, ...]

    def train(self, message: FlowerMessage, context: FlowerContext) -> FlowerMessage:
        model = self._make_model()
        space = ParameterSpace.of(model, personal=self.personal)
        order, ticket = _read_message(message.content, model, space)
        node_state = _NodeState(context)
        nth = node_state.num_tasks
        memory = tree_map(node_state.client_state, lambda x: x.to(order.start.device))
        node_state.num_tasks = nth + 1  # before training, so that a failed task also counts
        trainer: Any = self.trainer if isinstance(self.trainer, Trainer) else self.trainer(context)
        generator = task_generator(self.seed, _client_id(context), nth)
        with deterministic(generator, threads=self.threads):
            batches = _reiterable_batches(self.data, context, nth)
            payload = train_client(
                model,
                order,
                trainer,
                batches,
                self.criterion,
                client_state=memory,
                personal=self.personal,
                generator=generator,
            )
        node_state.client_state = payload.client_state
        payload = replace(payload, client_state=None)
        codec = codec_from_record(message.content)
        if codec is None:
            answer = pack(payload, spec=space, ticket=ticket)
        else:
            feedback = node_state.error_feedback(codec)
            answer = pack(feedback.encode_payload(payload, order.start), ticket=ticket)
            node_state.save_error_feedback(feedback)
        metrics = flwr.app.MetricRecord({**_as_python_numbers(payload.numbers), NUM_EXAMPLES_KEY: int(payload.samples)})
        return FlowerMessage(
            flwr.app.RecordDict({RECORD_KEY: bytes_to_record(answer), METRICS_KEY: metrics}), reply_to=message
        )

    def evaluate(self, message: FlowerMessage, context: FlowerContext) -> FlowerMessage:
        model = self._make_model()
        space = ParameterSpace.of(model, personal=self.personal)
        order, _ = _read_message(message.content, model, space)
        # If the message contains no buffers, the module keeps its own buffers.
        model.load_state_dict(space.state_dict(order.start, order.buffers or None), strict=False)
        if self.personal:
            load_personal(model, _NodeState(context).client_state)
        with deterministic(task_generator(self.seed, _client_id(context), 0), threads=self.threads):
            found = self.evaluate_fn(model.eval(), context)
        if not isinstance(found, Mapping) or NUM_EXAMPLES_KEY not in found:
            raise ArgumentError(f"evaluate: expected metrics with {NUM_EXAMPLES_KEY!r}, got {short_repr(found)}")
        metrics = flwr.app.MetricRecord({**_as_python_numbers(found), NUM_EXAMPLES_KEY: int(found[NUM_EXAMPLES_KEY])})
        return FlowerMessage(flwr.app.RecordDict({METRICS_KEY: metrics}), reply_to=message)

    def _make_model(self) -> nn.Module:
        """Return a new module. Several nodes may share a process, so the module must not be shared."""
        made = copy.deepcopy(self.model) if isinstance(self.model, nn.Module) else seeded_model(self.model, self.seed)
        if not isinstance(made, nn.Module):
            raise ArgumentError(f"model: expected a function that returns a module, got {type(made).__name__}")
        return made


class _NodeState:
    """State that a node stores in `context.state` between its tasks."""

    def __init__(self, context: FlowerContext) -> None:
        self._context = context

    def _entries(self) -> dict[str, Any]:
        return dict(self._context.state.get(RECORD_KEY) or {})

    def _set_entry(self, name: str, value: Any) -> None:
        self._context.state[RECORD_KEY] = flwr.app.ConfigRecord(self._entries() | {name: value})

    @property
    def num_tasks(self) -> int:
        """The number of tasks that the node has started."""
        return int(self._entries().get(NUM_TASKS_KEY, 0))

    @num_tasks.setter
    def num_tasks(self, count: int) -> None:
        self._set_entry(NUM_TASKS_KEY, count)

    @property
    def client_state(self) -> ClientState:
        """The client state of the trainer, or `None`."""
        data = self._entries().get(CLIENT_STATE_KEY)
        return unpack(data).client_state if data else None

    @client_state.setter
    def client_state(self, tree: ClientState) -> None:
        bare = Payload(torch.empty(0, 0), samples=0, client_state=tree)
        self._set_entry(CLIENT_STATE_KEY, b"" if tree is None else pack(bare))

    def error_feedback(self, codec: Codec) -> ErrorFeedback:
        """Return the node's error feedback, which adds the compression error of earlier updates to the next update.

        If the node encoded its last update with a codec other than `codec`, the method discards the saved error.
        """
        feedback = ErrorFeedback(codec)
        data = self._entries().get(FEEDBACK_KEY)
        saved: Any = unpack(data).client_state if data else {"codec": None}
        if saved["codec"] == codec.spec():
            feedback.load_state_dict(saved["state"])
        return feedback

    def save_error_feedback(self, feedback: ErrorFeedback) -> None:
        """Store the residual of the error feedback for the next update."""
        tree = {"codec": feedback.codec.spec(), "state": feedback.state_dict()}
        self._set_entry(FEEDBACK_KEY, pack(Payload(torch.empty(0, 0), samples=0, client_state=tree)))


def _read_message(
    content: flwr.app.RecordDict, model: nn.Module, space: ParameterSpace
) -> tuple[Message, Ticket | None]:
    """Decode the message of a training or evaluation task, and move its tensors to the device of the model.

    Returns:
        The message, and its ticket. The ticket is `None` unless the message has the wire format of `manifoldagg.wire`.
    """
    device = next(model.parameters(), torch.empty(0)).device
    data = record_to_bytes(content)
    if data is None:
        return _message_from_state_dict(content, model, space, device), None
    ticket = unpack(data, spec=space)
    if not isinstance(ticket, Ticket):
        raise WireError(f"wire: expected a ticket, got {type(ticket).__name__}")
    sent = ticket.message
    tensors, buffers = ({name: x.to(device) for name, x in part.items()} for part in (sent.tensors, sent.buffers))
    return replace(sent, start=sent.start.to(device), tensors=tensors, buffers=buffers), ticket


def _message_from_state_dict(
    content: flwr.app.RecordDict, model: nn.Module, space: ParameterSpace, device: torch.device
) -> Message:
    """Convert a Flower message with a state dict to a `manifoldagg.federated.Message`."""
    records = list(content.array_records.values())
    if len(records) != 1:
        raise ArgumentError(f"message: expected one ArrayRecord, a model, got {len(records)}")
    dtypes = {entry.name: entry.dtype for entry in (*space.layout.leaves, *space.layout.buffers)}
    state = {
        # Flower has no bfloat16. The server sends float32 instead, and converting back is exact.
        name: x.to(dtypes[name]) if name in dtypes and x.is_floating_point() else x
        for name, x in state_dict(records[0]).items()
    }
    # The space counts frozen parameters as buffers, but the node need not return them.
    frozen = {name for name, x in model.named_parameters(remove_duplicate=False) if not x.requires_grad}
    asked = tuple(entry.name for entry in space.layout.buffers if entry.name not in frozen)
    with renamed_arguments({"source": "message"}):
        buffers = {name: x.to(device) for name, x in space.buffers(state).items()}
        return Message(space.point(state, device=device), buffers=buffers, requested_buffers=asked)


def _client_id(context: FlowerContext) -> int:
    """Return the number of the node's data partition, or the node id if it has no partition."""
    # The number seeds the random generators. A simulation of the same federation uses the partition numbers as well.
    part = context.node_config.get("partition-id")
    return part if type(part) is int and part >= 0 else context.node_id


def _reiterable_batches(
    data: Callable[[FlowerContext, int], Iterable[Any]], context: FlowerContext, task_index: int
) -> Iterable[Any]:
    """Return the batches of a task. If they can be iterated only once, raise `ArgumentError`."""
    batches = data(context, task_index)
    # An iterator would be empty after the first epoch.
    if isinstance(batches, Iterator):
        kind = type(batches).__name__
        raise ArgumentError(f"data: expected a re-iterable object, such as a list; it returned a {kind}")
    return batches


def _mean_loss(
    criterion: Callable[[Any, Any], Tensor], data: Callable[[FlowerContext, int], Iterable[Any]]
) -> Callable[[nn.Module, FlowerContext], dict[str, float]]:
    def evaluate(model: nn.Module, context: FlowerContext) -> dict[str, float]:
        total = 0.0
        count = 0
        with torch.no_grad():
            for batch in _reiterable_batches(data, context, 0):
                inputs, targets = batch
                samples = count_samples([batch])
                total += samples * criterion(model(inputs), targets).item()
                count += samples
        return {"loss": total / max(count, 1), NUM_EXAMPLES_KEY: count}

    return evaluate


def _as_python_numbers(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x.item() if hasattr(x, "item") else x for name, x in numbers.items()}
