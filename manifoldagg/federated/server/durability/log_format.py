"""The format of the journal: the bytes of its records, and their detection in a segment.

A segment starts with a tensor file: the name of the journal, a random magic number and, if no checkpoint contains it,
a snapshot of the server. Records follow. A record has three parts:

- A header: the magic number, the log sequence number (LSN), the durability mark (the first LSN that may not have been
  on the disk at the time of the write), the lengths of the other parts, the checksum of the header and the content.
- The content as JSON: the kind of the change and its inputs.
- The payload of an accepted update: a tensor file, which has its own checksum.
"""

import json
import mmap
import os
import struct
import weakref
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from manifoldagg import tensor_file
from manifoldagg._json_tree import decode, encode
from manifoldagg.errors import CheckpointError
from manifoldagg.federated.server.records import LogRecord
from manifoldagg.federated.types import Payload

__all__ = ["KIND", "Segment", "StoredRecord", "encode_record", "os_errors", "pack_payload", "read_payload", "scan"]

KIND = "journal"
VERSION = 1
RECORD_HEADER = struct.Struct("<8sQQQQL")
PAYLOAD_FIELDS = ("points", "samples", "tensors", "numbers", "buffers", "base")
CHECKSUM_OFFSET = 8 + len(tensor_file.HEADER_PREFIX)
CHUNK_BYTES = 2**18  # After its copy, a chunk is in the cache when its checksum is computed.


class StoredRecord(NamedTuple):
    """A record in a segment, and the position of its payload."""

    lsn: int
    kind: str
    content: dict[str, Any]
    path: Path
    payload_offset: int
    payload_length: int


class Segment(NamedTuple):
    """A segment: its path, its header, and the offset of its first record."""

    path: Path
    header: dict[str, Any]
    offset: int

    @property
    def first_lsn(self) -> int:
        """The LSN of its first record."""
        return int(self.header["first_lsn"])

    @classmethod
    def read(cls, path: Path, first_lsn: int) -> "Segment":
        """Read the header of a segment; raise `CheckpointError` if it is corrupted or the file was renamed."""
        try:
            with os_errors("cannot be read"), open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                header: dict[str, Any] = tensor_file.load_from(file, KIND, size, allow_trailing=True)
                if header["version"] != VERSION:
                    told = f"has version {header['version']} of the journal format"
                    raise CheckpointError(f"{told}, and this version of the package reads {VERSION}")
                if header["first_lsn"] != first_lsn:
                    raise CheckpointError(f"begins with record {header['first_lsn']}: the file was renamed")
                return cls(path, header, file.tell())
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error


def pack_payload(payload: Payload, free_list: deque[bytearray]) -> memoryview:
    """Copy a payload into the bytes of a tensor file. Later writes to its tensors do not change the result.

    The copy reuses a buffer of `free_list`, because the first write to new memory is slow. The buffer returns to the
    list with the last reference to the result. Raises `CheckpointError` if a file cannot store a value.
    """
    parts = [*tensor_file._serialize("payload", {name: getattr(payload, name) for name in PAYLOAD_FIELDS})]
    size = sum(map(len, parts))
    try:
        buffer = free_list.pop()
    except IndexError:
        buffer = bytearray()
    buffer = buffer if len(buffer) >= size else bytearray(size)
    packed = memoryview(buffer)[:size]
    weakref.finalize(packed, free_list.append, buffer).atexit = False
    end = checksum = 0
    for chunk in (part[i : i + CHUNK_BYTES] for part in parts for i in range(0, len(part), CHUNK_BYTES)):
        start, end = end, end + len(chunk)
        packed[start:end] = chunk
        checksum = zlib.crc32(packed[start:end], checksum)  # Other threads may write the source, but not the copy.
    packed[CHECKSUM_OFFSET : CHECKSUM_OFFSET + 8] = b"%08x" % checksum
    return packed


def read_payload(record: StoredRecord) -> Payload:
    """Read the payload of an accepted update.

    Raises:
        CheckpointError: if it is corrupted.
        OSError: if it cannot be read.
    """
    with open(record.path, "rb") as file:
        file.seek(record.payload_offset)
        return Payload(**tensor_file.load_from(file, "payload", record.payload_length))


def encode_record(magic: bytes, lsn: int, durable_lsn: int, record: LogRecord) -> Iterator[memoryview]:
    """Return the parts of a record. Raises `CheckpointError` if a file cannot store a value."""
    text = encode((record.kind, record.content), _reject_tensor, CheckpointError).encode()
    header = RECORD_HEADER.pack(magic, lsn, durable_lsn, len(text), len(record.payload), 0)[:-4]
    yield memoryview(header + zlib.crc32(text, zlib.crc32(header)).to_bytes(4, "little") + text)
    yield memoryview(record.payload)


@contextmanager
def os_errors(message: str) -> Iterator[None]:
    """Raise a system error of the block as a `CheckpointError` with this message."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{message}: {error.strerror or error}") from error


def scan(segment: Segment) -> tuple[list[StoredRecord], int, int]:
    """Return the valid records of a segment, the largest durability mark, and the number of bytes after these records.

    Raises `CheckpointError` if a record was not written by this package, or the file cannot be read.
    """
    path, header, offset = segment
    records: list[StoredRecord] = []
    durable_lsn = segment.first_lsn
    with os_errors(f"{path}: cannot be read"), open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        while found := _read_record(data, offset, header["magic"], path):
            record, mark = found
            if record.lsn != segment.first_lsn + len(records):
                break
            records.append(record)
            durable_lsn = max(durable_lsn, mark)
            offset = record.payload_offset + record.payload_length
        num_trailing = len(data) - offset
        # A later record may state that an invalid one was on the disk.
        while (offset := data.find(header["magic"], offset)) >= 0:
            found = _read_record(data, offset, header["magic"], path)
            durable_lsn = max(durable_lsn, found[1] if found else 0)
            offset += 1
    return records, durable_lsn, num_trailing


def _read_record(data: mmap.mmap, offset: int, magic: bytes, path: Path) -> tuple[StoredRecord, int] | None:
    """Return the record at an offset and its durability mark; `None` if there is no complete, valid record."""
    start = offset + RECORD_HEADER.size
    if start > len(data):
        return None
    found, lsn, durable_lsn, length, payload_length, checksum = RECORD_HEADER.unpack_from(data, offset)
    end = start + length
    if found != magic or end + payload_length > len(data):
        return None
    text = data[start:end]
    if zlib.crc32(text, zlib.crc32(data[offset : start - 4])) != checksum:
        return None
    try:
        kind, content = decode(json.loads(text), _reject_tensor)
    except Exception as error:  # The checksum is valid, so another program wrote the record.
        raise CheckpointError(f"{path}: record {lsn} was not written by this package: {error!r}") from None
    return StoredRecord(lsn, kind, content, path, end, payload_length), durable_lsn


def _reject_tensor(*_: Any) -> Any:
    raise CheckpointError("record: expected plain values, got a tensor")
