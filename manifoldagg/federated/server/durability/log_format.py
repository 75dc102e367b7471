"""The frame format of journal records.

A file begins with an archive, which is there whole or not at all: the name of the journal, an unguessable mark
and, where no checkpoint holds it, the whole record. Then come changes in frames: the mark, the number, how many changes
were on the disk when it was written, the lengths of what follows, a checksum; what the change depends on as JSON; the
payload of an update as an archive with a checksum of its own. Nothing in a file is ever executed.
"""

import json
import logging
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from manifoldagg import tensor_file
from manifoldagg._json_tree import decode, encode
from manifoldagg.errors import CheckpointError
from manifoldagg.federated.server.state import LogRecord
from manifoldagg.federated.types import Payload

__all__ = [
    "KIND",
    "StoredRecord",
    "encode_record",
    "pack_payload",
    "read_error",
    "read_payload",
    "read_segment_header",
    "scan",
]

KIND = "journal"
"""Of the archive that a file begins with."""
PAYLOAD = "payload"
RECORD_HEADER = struct.Struct("<8sQQQQL")
"""Of a frame: mark, number, how many were on the disk, bytes of JSON, bytes of the payload, checksum but of these."""
PAYLOAD_FIELDS = ("points", "samples", "tensors", "numbers", "buffers", "base")
LOG = logging.getLogger("manifoldagg")


class StoredRecord(NamedTuple):
    """A journal record in a file: its number, its content, and the position of its payload."""

    lsn: int
    kind: str
    content: dict[str, Any]
    path: Path
    payload_offset: int
    payload_length: int


def pack_payload(payload: Payload) -> bytearray:
    """Pack a payload for the journal by copying its bytes, so that it may be overwritten afterwards.

    Raises:
        CheckpointError: naming what no file can hold.
    """
    return tensor_file.dumps(PAYLOAD, {name: getattr(payload, name) for name in PAYLOAD_FIELDS})


def encode_record(magic: bytes, lsn: int, durable_lsn: int, record: LogRecord) -> Iterator[memoryview]:
    """Return the parts of a frame.

    Args:
        magic: of the file.
        lsn: of the change.
        durable_lsn: how many changes are on the disk.
        record: what it holds.

    Raises:
        CheckpointError: naming what no file can hold.
    """
    text = encode((record.kind, record.content), lambda tensor, way: None, CheckpointError).encode()
    head = RECORD_HEADER.pack(magic, lsn, durable_lsn, len(text), len(record.payload), 0)[:-4]
    checksum = zlib.crc32(text, zlib.crc32(head))
    yield memoryview(head + checksum.to_bytes(4, "little") + text)
    yield memoryview(record.payload)


def read_payload(record: StoredRecord) -> Payload:
    """Return the payload of an update.

    Raises:
        CheckpointError: if it was altered.
        OSError: if it cannot be read.
    """
    with open(record.path, "rb") as file:
        file.seek(record.payload_offset)
        return Payload(**tensor_file.load_from(file, PAYLOAD, record.payload_length))


def read_segment_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a segment and its end.

    Raises:
        CheckpointError: if it cannot be read, or does not begin so.
    """
    try:
        with open(path, "rb") as file:
            head: dict[str, Any] = tensor_file.load_from(
                file, KIND, os.fstat(file.fileno()).st_size, allow_trailing=True
            )
            return head, file.tell()
    except OSError as error:
        raise read_error(path, error) from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def scan(path: Path, first_lsn: int) -> tuple[list[StoredRecord], int]:
    """Return the journal records of a file up to an invalid one, and the number on disk that any frame states.

    Raises:
        CheckpointError: if it was not written by this package.
        OSError: if it cannot be read.
    """
    head, place = read_segment_header(path)
    mark = head["magic"]
    if head["first_lsn"] != first_lsn:
        raise CheckpointError(f"{path}: begins with record {head['first_lsn']}: the file was renamed")
    found: list[StoredRecord] = []
    vouched = first_lsn
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while (frame := _read_record(data, place, mark)) is not None and frame[0] == first_lsn + len(found):
            number, synced, text, begin, length = frame
            kind, content = _decode_content(path, number, text)
            found.append(StoredRecord(number, kind, content, path, begin, length))
            vouched = max(vouched, synced)
            place = begin + length
        if place < len(data):
            LOG.warning(
                "%s: %d bytes after record %d are not a record", path, len(data) - place, first_lsn + len(found) - 1
            )
        while (place := data.find(mark, place)) >= 0:
            frame = _read_record(data, place, mark)
            vouched = vouched if frame is None else max(vouched, frame[1])
            place += 1
    return found, vouched


def read_error(path: Path, error: OSError) -> CheckpointError:
    """Return the exception for a failed read."""
    return CheckpointError(f"{path}: cannot be read: {error.strerror or error}")


def _read_record(data: mmap.mmap, offset: int, magic: bytes) -> tuple[int, int, bytes, int, int] | None:
    """Read the frame at a position: number, count on disk, JSON, and the position and length of the payload."""
    if offset + RECORD_HEADER.size > len(data):
        return None
    given, number, synced, length, payload, checksum = RECORD_HEADER.unpack_from(data, offset)
    begin = offset + RECORD_HEADER.size
    if given != magic or begin + length > len(data):
        return None
    text = data[begin : begin + length]
    if zlib.crc32(text, zlib.crc32(data[offset : begin - 4])) != checksum or begin + length + payload > len(data):
        return None
    return number, synced, text, begin + length, payload


def _decode_content(path: Path, lsn: int, text: bytes) -> tuple[str, dict[str, Any]]:
    try:
        kind, content = decode(json.loads(text), _reject_tensor)
        return kind, content
    except Exception as error:  # the checksum is valid, so that another program wrote it
        raise CheckpointError(f"{path}: record {lsn} was not written by this package: {error!r}") from None


def _reject_tensor(_: Any) -> Tensor:
    raise ValueError("a tensor")
