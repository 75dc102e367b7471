"""Format of the journal files: the encoding of records, and the search for records in a file.

A journal consists of segments, each of which is a file. A segment starts with a tensor file, which contains the name of
the journal and a random magic number. The tensor file also contains a snapshot of the server, unless a checkpoint
contains the same state. The rest of the segment is a sequence of records. A record has three parts:

- The header contains the magic number, the log sequence number (LSN), the durability mark, the lengths of the other two
  parts, and the checksum of the header and the content. The durability mark is an LSN. When the record was written, all
  records before this LSN were already synced to the disk.
- The content contains the kind of the change and its inputs as JSON.
- The payload is a tensor file with its own checksum. Only the records of accepted updates have a payload.
"""

import json
import mmap
import os
import struct
import weakref
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from manifoldagg import tensor_file
from manifoldagg._io import os_errors
from manifoldagg._json_tree import decode, encode
from manifoldagg.errors import CheckpointError
from manifoldagg.federated.server.state import LogRecord
from manifoldagg.federated.types import Payload

__all__ = ["KIND", "Segment", "StoredRecord", "encode_record", "pack_payload", "read_payload", "scan"]

KIND = "journal"
VERSION = 1
RECORD_HEADER = struct.Struct("<8sQQQQL")
PAYLOAD_FIELDS = ("points", "samples", "tensors", "numbers", "buffers", "base")


class StoredRecord(NamedTuple):
    """Record that was read from a segment, with the position of its payload."""

    lsn: int
    kind: str
    content: dict[str, Any]
    path: Path
    payload_offset: int
    payload_length: int


class Segment(NamedTuple):
    """One of the files of a journal, called a segment. It consists of a header and a sequence of records.

    Attributes:
        path: the path of the file.
        header: the content of the header.
        offset: the offset of the first record in bytes.
    """

    path: Path
    header: dict[str, Any]
    offset: int

    @property
    def first_lsn(self) -> int:
        """The LSN of the first record."""
        return int(self.header["first_lsn"])

    @classmethod
    def read(cls, path: Path, first_lsn: int) -> "Segment":
        """Read the header of a segment.

        Raises:
            CheckpointError: if the header is corrupted or has another version, or if the file was renamed, so that its
                first record is not `first_lsn`.
        """
        try:
            with os_errors("cannot be read"), open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                header: dict[str, Any] = tensor_file.load_from(file, KIND, size, allow_trailing=True)
                if header["version"] != VERSION:
                    problem = f"has version {header['version']} of the journal format"
                    raise CheckpointError(f"{problem}, and this version of the package reads {VERSION}")
                if header["first_lsn"] != first_lsn:
                    raise CheckpointError(f"starts with record {header['first_lsn']}: the file was renamed")
                return cls(path, header, file.tell())
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error


def pack_payload(payload: Payload, free_list: deque[bytearray]) -> memoryview:
    """Copy a payload to the bytes of a tensor file.

    Args:
        payload: the payload.
        free_list: the reusable buffers. The function uses one of them if there is one. After the last reference to the
            result is deleted, the buffer returns to this list.

    Raises:
        CheckpointError: if a file cannot store a value of the payload.
    """
    tree = {name: getattr(payload, name) for name in PAYLOAD_FIELDS}
    try:
        buffer = free_list.pop()
    except IndexError:  # A check before `pop` is not sufficient, because another thread may remove the last buffer.
        buffer = None
    packed = tensor_file.dumps("payload", tree, buffer)
    used: Any = packed.obj
    weakref.finalize(packed, free_list.append, used).atexit = False
    return packed


def read_payload(record: StoredRecord) -> Payload:
    """Read the payload of an update.

    Raises:
        CheckpointError: if the payload is corrupted.
        OSError: if the file cannot be read.
    """
    with open(record.path, "rb") as file:
        file.seek(record.payload_offset)
        return Payload(**tensor_file.load_from(file, "payload", record.payload_length))


def encode_record(magic: bytes, lsn: int, durable_lsn: int, record: LogRecord) -> Iterator[memoryview]:
    """Yield the bytes of a record in several parts.

    Args:
        magic: the magic number of the segment.
        lsn: the log sequence number of the record.
        durable_lsn: the durability mark. All records before this LSN are synced to the disk.
        record: the record.

    Raises:
        CheckpointError: if a file cannot store a value of the record.
    """
    text = encode((record.kind, record.content), _reject_tensor, CheckpointError).encode()
    header = RECORD_HEADER.pack(magic, lsn, durable_lsn, len(text), len(record.payload), 0)[:-4]
    yield memoryview(header + zlib.crc32(text, zlib.crc32(header)).to_bytes(4, "little") + text)
    yield memoryview(record.payload)


def scan(segment: Segment) -> tuple[list[StoredRecord], int, int]:
    """Find the valid records of a segment.

    Returns:
        The valid records from the start of the segment up to the first invalid record, the largest durability mark in
        the whole segment, and the number of bytes after the valid records.

    Raises:
        CheckpointError: if another program has written a record, or if the file cannot be read.
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
        # The durability mark of a later record may prove that the invalid record was synced to the disk.
        while (offset := data.find(header["magic"], offset)) >= 0:
            found = _read_record(data, offset, header["magic"], path)
            durable_lsn = max(durable_lsn, found[1] if found else 0)
            offset += 1
    return records, durable_lsn, num_trailing


def _read_record(data: mmap.mmap, offset: int, magic: bytes, path: Path) -> tuple[StoredRecord, int] | None:
    """Read the record at an offset of a journal file.

    Returns:
        The record and its durability mark. `None` if there is no complete, valid record at this offset.
    """
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
    except Exception as error:  # The checksum is valid, so another program has written the record.
        raise CheckpointError(f"{path}: record {lsn} was not written by this package: {error!r}") from None
    return StoredRecord(lsn, kind, content, path, end, payload_length), durable_lsn


def _reject_tensor(*_: Any) -> Any:
    raise CheckpointError("record: expected plain values, got a tensor")
