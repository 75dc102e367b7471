"""Conversion between the server's tickets and payloads and Flower messages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from manifoldagg._validation import one_line, short_repr
from manifoldagg.errors import ManifoldAggError, WireError
from manifoldagg.federated import Payload, Receipt, Server, Ticket
from manifoldagg.federated.clients.compression import Codec
from manifoldagg.federated.server.durability.store import InMemoryTree
from manifoldagg.federated.types import check_parameter_space, extra_fields
from manifoldagg.integrations.flower.metrics import MAX_SAMPLES, sample_count
from manifoldagg.integrations.flower.records import (
    RECORD_KEY,
    array_record,
    bytes_to_record,
    codec_to_record,
    numpy_supports,
    record_to_bytes,
    state_dict,
)
from manifoldagg.integrations.flower.reporting import MAX_REASON_LENGTH
from manifoldagg.wire import pack, ticket_of, unpack

__all__ = ["MessageCodec"]

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _PackedModel:
    """Encoded arrays of one model version. All messages with this version share the arrays.

    Args:
        ticket: the ticket of a message that contains this model.
        arrays: the arrays by name. They are never modified.
        is_current: whether the arrays contain the server's model itself, instead of a rounded or client-specific model.
    """

    ticket: Ticket
    arrays: Mapping[str, Array]
    is_current: bool


class MessageCodec:
    """Encoder of the server's tickets and decoder of the nodes' replies.

    Args:
        server: the server of the run.
        wire: whether messages have the wire format of `manifoldagg.wire`. With `None`, messages have this format only
            if the rule sends or requires more than models.
        compress: whether to compress messages in the wire format losslessly.
        codec: the lossy codec with which the nodes encode their updates. With `None`, updates are not encoded.
        key: the key of the model in a message.
        weighted_by_key: the name of the metric with the number of samples of a node.
    """

    def __init__(
        self,
        server: Server,
        wire: bool | None,
        compress: bool,
        *,
        key: str,
        weighted_by_key: str,
        codec: Codec | None = None,
    ) -> None:
        self._server = server
        self._space = check_parameter_space(server.space)
        self._rule_needs_wire = any(extra_fields(server.rule))
        self._wire = codec is not None or (self._rule_needs_wire if wire is None else wire)
        self._codec = codec
        self._wire_if_needed = wire is None
        self._compress = compress
        self._key = key
        self._weighted_by_key = weighted_by_key
        # Flower stores NumPy arrays. Tensors whose dtype NumPy lacks are sent in a wider dtype without loss.
        self._widened_dtypes = {e.name: e.dtype for e in self._space.entries.values() if not numpy_supports(e.dtype)}
        # Only the latest encoded model is stored, because the server rarely sends an older version again.
        self._packed: _PackedModel | None = None

    def dispatch(self, node: int) -> tuple[str, dict[str, ArrayRecord | ConfigRecord]]:
        """Dispatch the current model to a node. Messages of the same version share their arrays.

        Returns:
            The identifier of the ticket, and the records of the message.
        """
        # The server does not reuse the memory of the model as long as `base` exists.
        ticket, base = self._server.dispatch_shared(node)
        message = ticket.message
        if self._wire or (self._wire_if_needed and (message.tensors or message.numbers)):
            records = codec_to_record(self._codec)
            return ticket.id, {RECORD_KEY: bytes_to_record(pack(ticket, compress=self._compress)), **records}
        if self._packed is None or not _have_same_model(self._packed.ticket, ticket):
            model = self._space.views(message.start) | dict(message.buffers)
            is_current = isinstance(base, InMemoryTree) and base.tree is message.start
            self._packed = _PackedModel(ticket, array_record(model), is_current)
        record = ArrayRecord()
        record.update(self._packed.arrays)  # the same Array objects, because each caches the hash of its data
        return ticket.id, {self._key: record}

    def model(self) -> ArrayRecord:
        """Return the current model as a Flower `ArrayRecord`.

        If an earlier message already contained the current version, the record shares the arrays of that message.
        """
        packed = self._packed
        if packed is None or not packed.is_current or packed.ticket.version != self._server.version:
            return array_record(self._server.state_dict())
        return ArrayRecord(dict(packed.arrays))  # new Array objects with the same immutable bytes

    def release(self) -> None:
        """Release the memory of the encoded model."""
        self._packed = None

    def receive(self, ticket: str, content: RecordDict) -> Receipt:
        """Decode the reply of a node, pass its update to the server, and return the receipt.

        If the reply cannot be decoded, the server rejects the update.
        """
        receipt = self._receive(ticket, content)
        if self._packed is not None and self._packed.ticket.version != self._server.version:
            self.release()
        return receipt

    def _receive(self, ticket: str, content: RecordDict) -> Receipt:
        data = record_to_bytes(content)
        if data is not None or self._rule_needs_wire or self._codec is not None:
            load = partial(_with_safe_errors, self._decode_payload, data, ticket)
            return self._server.receive(ticket, load, codec=self._codec)
        samples = sample_count(content, self._weighted_by_key) or 0
        decode = partial(_with_safe_errors, self._decode_model, content)
        return self._server.receive_model(ticket, decode, samples=samples)

    def _decode_payload(self, data: bytes | None, ticket: str) -> Payload:
        if data is None:
            needs = (
                f"{type(self._server.rule).__name__} requires more than the model"
                if self._codec is None
                else "the strategy has a codec"
            )
            raise WireError(f"wire: expected a reply of `client_app`, as {needs}")
        if (found := ticket_of(data)) not in (None, ticket):
            raise WireError(f"ticket: expected the ticket {ticket} of the task, got {found}")
        # An encoded payload has no named parameters.
        payload: Payload = unpack(data, spec=self._space if self._codec is None else None)
        return payload

    def _decode_model(self, content: RecordDict) -> dict[str, Tensor]:
        records = list(content.array_records.values())
        if len(records) != 1:
            raise WireError(f"wire: expected one ArrayRecord, a model, got {len(records)}")
        key = self._weighted_by_key
        if sample_count(content, key) is None:
            found = [short_repr(record[key]) for record in content.metric_records.values() if key in record]
            got = found[0] if found else "no such metric"
            raise WireError(f"samples: expected the metric {key!r}, an integer from 1 to {MAX_SAMPLES}, got {got}")
        model = state_dict(records[0])
        wide = {name for name, tensor in model.items() if tensor.dtype is torch.float32}
        return model | {name: model[name].to(dtype) for name, dtype in self._widened_dtypes.items() if name in wide}


def _with_safe_errors(decode: Callable[..., T], *args: Any) -> T:
    """Call a decoder, and sanitise the messages of its errors.

    The message of an error can quote text that a node has sent. Without sanitisation, a node could insert lines into
    the log or fill the log.

    Raises:
        WireError: if the decoder raises an error. The new message is the decoder's message as one printable line of at
            most `MAX_REASON_LENGTH` characters.
    """
    try:
        return decode(*args)
    except ManifoldAggError as error:
        raise WireError(one_line(str(error), MAX_REASON_LENGTH)) from None


def _have_same_model(a: Ticket, b: Ticket) -> bool:
    if a.version != b.version or not _are_equal(a.message.start, b.message.start):
        return False
    ours = a.message.buffers
    theirs = b.message.buffers
    return ours.keys() == theirs.keys() and all(_are_equal(ours[name], theirs[name]) for name in ours)


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return a is b or torch.equal(a, b)
