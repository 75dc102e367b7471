"""Encoding and decoding of Flower messages: state dicts as Flower's clients read them, or the wire format."""

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
    """The arrays of one version, which all messages with this version share; no one writes them.

    Args:
        ticket: the ticket of a message with this model.
        arrays: the arrays by name.
        is_current: whether the model is the server's own, as opposed to one that is rounded or made for a client.
    """

    ticket: Ticket
    arrays: Mapping[str, Array]
    is_current: bool


class MessageCodec:
    """Encodes a server's tickets as records, and decodes the records that nodes return.

    Args:
        server: the server of the run.
        wire: whether messages have the wire format. `None`: if the rule requires more than models, or the message
            contains more.
        compress: whether the wire format is compressed, without loss.
        codec: the codec of the nodes' updates; `None` if they are not encoded.
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
        # Tensors whose dtype NumPy does not have are sent in a wider dtype, without loss.
        self._widened_dtypes = {e.name: e.dtype for e in self._space.entries.values() if not numpy_supports(e.dtype)}
        # The latest packed model. Replies of nodes are rarely waited for, so that one version is enough.
        self._packed: _PackedModel | None = None

    def dispatch(self, node: int) -> tuple[str, dict[str, ArrayRecord | ConfigRecord]]:
        """Dispatch the current model to a node; messages of one version share their arrays.

        Returns:
            The id of the ticket, and the records of the message.
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
        record.update(self._packed.arrays)  # with the same Array objects, in which Flower caches the hashes of the data
        return ticket.id, {self._key: record}

    def model(self) -> ArrayRecord:
        """Return the current model, in the packed bytes of its version if there are any."""
        packed = self._packed
        if packed is None or not packed.is_current or packed.ticket.version != self._server.version:
            return array_record(self._server.state_dict())
        return ArrayRecord(dict(packed.arrays))  # with new Array objects over the same bytes, which cannot be written

    def release(self) -> None:
        """Release the packed model."""
        self._packed = None

    def receive(self, ticket: str, content: RecordDict) -> Receipt:
        """Decode a reply and pass it to the server, which rejects an unreadable reply."""
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
            raise WireError(f"ticket: expected that of the task, {ticket}, got {found}")
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
    """Call a decoder. Its errors quote names and tickets of a node, which must not forge lines of a log or fill it.

    Raises:
        WireError: with the message of the decoder, printable and in one line of limited length.
    """
    try:
        return decode(*args)
    except ManifoldAggError as error:
        raise WireError(one_line(str(error), MAX_REASON_LENGTH)) from None


def _have_same_model(a: Ticket, b: Ticket) -> bool:
    """Return whether two tickets have the same model and buffers."""
    if a.version != b.version or not _are_equal(a.message.start, b.message.start):
        return False
    ours, theirs = a.message.buffers, b.message.buffers
    return ours.keys() == theirs.keys() and all(_are_equal(ours[name], theirs[name]) for name in ours)


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return a is b or torch.equal(a, b)
