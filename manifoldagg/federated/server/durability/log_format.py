"""Frames: how a change lies in a file of a journal, and how it is found there.

A file begins with an archive, which is there whole or not at all: the name of the journal, a mark that nobody can guess
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

from manifoldagg.errors import CheckpointError
from manifoldagg.federated.server.durability import tensor_file
from manifoldagg.federated.server.durability.tree_codec import decoded, encoded
from manifoldagg.federated.server.state import Change
from manifoldagg.federated.types import Payload

__all__ = ["KIND", "Told", "frame", "indexed", "opened", "packed", "payload_of", "unreadable"]

KIND = "journal"
"""Of the archive that a file begins with."""
PAYLOAD = "payload"
HEAD = struct.Struct("<8sQQQQL")
"""Of a frame: mark, number, how many were on the disk, bytes of JSON, bytes of the payload, checksum but of these."""
FIELDS = ("points", "samples", "tensors", "numbers", "buffers", "base")
LOG = logging.getLogger("manifoldagg")


class Told(NamedTuple):
    """A change that is in a file: its number, what it was, and where its payload lies."""

    number: int
    kind: str
    content: dict[str, Any]
    path: Path
    place: int
    length: int


def packed(payload: Payload) -> bytearray:
    """A payload for the journal: its bytes are taken now, and it may be written afterwards.

    Raises:
        CheckpointError: naming what no file can hold.
    """
    return tensor_file.packed(PAYLOAD, {name: getattr(payload, name) for name in FIELDS})


def frame(mark: bytes, number: int, synced: int, change: Change) -> Iterator[memoryview]:
    """The parts of a frame.

    Args:
        mark: of the file.
        number: of the change.
        synced: how many changes are on the disk.
        change: what it holds.

    Raises:
        CheckpointError: naming what no file can hold.
    """
    text = encoded((change.kind, change.content), lambda tensor, way: None, CheckpointError).encode()
    head = HEAD.pack(mark, number, synced, len(text), len(change.payload), 0)[:-4]
    checksum = zlib.crc32(text, zlib.crc32(head))
    yield memoryview(head + checksum.to_bytes(4, "little") + text)
    yield memoryview(change.payload)


def payload_of(told: Told) -> Payload:
    """What came with an update.

    Raises:
        CheckpointError: if it was altered.
        OSError: if it cannot be read.
    """
    with open(told.path, "rb") as file:
        file.seek(told.place)
        return Payload(**tensor_file.read_from(file, PAYLOAD, told.length))


def opened(path: Path) -> tuple[dict[str, Any], int]:
    """What a file begins with, and where that ends.

    Raises:
        CheckpointError: if it cannot be read, or does not begin so.
    """
    try:
        with open(path, "rb") as file:
            head: dict[str, Any] = tensor_file.read_from(file, KIND, os.fstat(file.fileno()).st_size, more=True)
            return head, file.tell()
    except OSError as error:
        raise unreadable(path, error) from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def indexed(path: Path, first: int) -> tuple[list[Told], int]:
    """The changes in a file up to one that is bad, and how many were on the disk as far as any frame says.

    Raises:
        CheckpointError: if it cannot be read, or was not written by this package.
    """
    try:
        return _searched(path, first)
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """What to raise where the system does not read."""
    return CheckpointError(f"{path}: cannot be read: {error.strerror or error}")


def _searched(path: Path, first: int) -> tuple[list[Told], int]:
    head, place = opened(path)
    mark = head["mark"]
    if head["first"] != first:
        raise CheckpointError(f"{path}: begins with change {head['first']}: it has another's name")
    found: list[Told] = []
    vouched = first
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while (frame := _read(data, place, mark)) is not None and frame[0] == first + len(found):
            number, synced, text, begin, length = frame
            kind, content = _content(path, number, text)
            found.append(Told(number, kind, content, path, begin, length))
            vouched = max(vouched, synced)
            place = begin + length
        if place < len(data):
            LOG.warning("%s: %d bytes after change %d are no change", path, len(data) - place, first + len(found) - 1)
        while (place := data.find(mark, place)) >= 0:
            frame = _read(data, place, mark)
            vouched = vouched if frame is None else max(vouched, frame[1])
            place += 1
    return found, vouched


def _read(data: mmap.mmap, place: int, mark: bytes) -> tuple[int, int, bytes, int, int] | None:
    """The frame at a place: number, how many were on the disk, JSON, where its payload begins and how long it is."""
    if place + HEAD.size > len(data):
        return None
    given, number, synced, length, payload, checksum = HEAD.unpack_from(data, place)
    begin = place + HEAD.size
    if given != mark or begin + length > len(data):
        return None
    text = data[begin : begin + length]
    if zlib.crc32(text, zlib.crc32(data[place : begin - 4])) != checksum or begin + length + payload > len(data):
        return None
    return number, synced, text, begin + length, payload


def _content(path: Path, number: int, text: bytes) -> tuple[str, dict[str, Any]]:
    try:
        kind, content = decoded(json.loads(text), _no_tensor)
        return kind, content
    except Exception as error:  # it was written so by somebody who can make a checksum
        raise CheckpointError(f"{path}: change {number} was not written by this package: {error!r}") from None


def _no_tensor(_: Any) -> Tensor:
    raise ValueError("a tensor")
