"""The command `manifoldagg inspect`."""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from manifoldagg import tensor_file
from manifoldagg._io import os_errors
from manifoldagg._signals import graceful_shutdown
from manifoldagg.cli._console import console, error_console, new_table
from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.federated.server.durability import checkpoint, log_format
from manifoldagg.federated.server.durability.journal import Journal
from manifoldagg.federated.server.durability.log_format import Segment, StoredRecord, read_payload, scan

__all__ = ["Summary", "inspect_command"]

MAX_LISTED = 5
"""The maximum number of listed rejections and client names."""


def inspect_command(
    path: Annotated[Path, typer.Argument()],
    records: Annotated[bool, typer.Option("--records")] = False,
) -> None:
    """Report the content of a checkpoint or a journal of a server.

    The command prints:

    - the size and the format version of the file
    - the version of the model
    - the clients that the server knows
    - the number of accepted updates for each value of the staleness
    - the number of rejections, and the reasons for the last ones
    - for a journal, the number of records of each kind

    The command does not keep models in memory. It neither locks nor modifies a file, so it can inspect the journal of a
    running server.

    If a file is corrupted, the exit code is 1, and the message names the corrupted record. An incomplete last record is
    not an error, because a server truncates it when it resumes.

    Example: `manifoldagg inspect runs/server.journal --records`

    Args:
        path: A checkpoint, a journal (its path without `.N.journal`), or a segment of a journal.
        records: Print the records as JSON lines, without tensors.
    """
    summary = Summary(path)
    with graceful_shutdown():
        try:
            for line in read(path, summary):
                if records:
                    print(json.dumps(_json_value(line)))
        except CheckpointError as error:
            summary.damage = str(error)
    if summary.kind and not records:
        for part in summary.tables():
            console.print(part)
    for note in summary.notes:
        error_console.print(f"note: {note}", markup=False, soft_wrap=True)
    if summary.damage:
        error_console.print(f"error: {summary.damage}", markup=False, soft_wrap=True)
        raise typer.Exit(1)


@dataclass
class Summary:
    """The summary of a checkpoint or a journal of a server, which the command `inspect` prints.

    Attributes:
        path: the path of the checkpoint or the journal.
        kind: `"checkpoint"` or `"journal"`. It is empty if the header cannot be read.
        formats: the versions of the file format.
        num_bytes: the total size of the files.
        version: the number of the server's latest model. It is `None` if the file does not contain it.
        num_updates: the number of accepted updates. It is `None` if the file does not contain it.
        clients: the known clients, as the keys of a dictionary that preserves their order.
        staleness: the number of accepted updates for each value of the staleness.
        rejections: the client and the reason of each rejected update or ended task. Records of a journal contain the
            ticket (the identifier of the task) instead of the client.
        counts: the number of rejected updates by the field of the update that was invalid.
        records: the number of records by kind. It is empty for a checkpoint.
        notes: a message for each incomplete write at the end of a file.
        damage: the error message if a file is corrupted, otherwise an empty string.
    """

    path: Path
    kind: str = ""
    formats: set[str] = field(default_factory=set)
    num_bytes: int = 0
    version: int | None = None
    num_updates: int | None = None
    clients: dict[Any, None] = field(default_factory=dict)
    staleness: Counter[int] = field(default_factory=Counter)
    rejections: list[tuple[Any, str]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    records: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    damage: str = ""

    def add_snapshot(self, tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Add the content of a checkpoint to the summary, and yield the rows of its history."""
        heads = tree["history"]["heads"]
        rows = [dict(zip(heads[head], values, strict=True)) for head, *values in tree["history"]["lines"]]
        self.version = tree["version"]
        self.num_updates = tree["updates"]
        known = [*tree["weights"]["sample_counts"], *tree["weights"]["reported"], *(t[1] for t in tree["tickets"])]
        self.clients.update(dict.fromkeys([*known, *(row["client"] for row in rows)]))
        self.staleness = Counter(row["staleness"] for row in rows)
        closed = [(client, receipt) for _, client, receipt in tree["closed_tickets"]]
        self.clients.update(dict.fromkeys(client for client, _ in closed))
        self.rejections = [(client, receipt["reason"]) for client, receipt in closed if not receipt["accepted"]]
        self.counts = tree["rejected"]
        yield from rows

    def add_record(self, record: StoredRecord) -> None:
        """Add a record of a journal to the summary."""
        content = record.content
        self.records[record.kind] += 1
        self.counts = content.get("rejected", self.counts)
        if record.kind == "dispatched":
            self.clients[content["pending"][0]] = None
            self.version = content["pending"][1] if self.version is None else self.version
        elif record.kind == "accepted":
            self.version = content["receipt"]["version"]
            self.num_updates = None if self.num_updates is None else self.num_updates + 1
            self.staleness[content["receipt"]["staleness"]] += 1
        elif record.kind == "ended":
            self.rejections += [(f"ticket {ticket}", content["reason"]) for ticket in content["tickets"]]

    def tables(self) -> Iterator[Table]:
        """Format the numbers as tables."""
        names = [*map(str, self.clients)]
        listed = ", ".join(names[:MAX_LISTED]) + (", …" if len(names) > MAX_LISTED else "")
        lines = {
            "kind": self.kind,
            "format version": ", ".join(sorted(self.formats)),
            "size": f"{self.num_bytes:,} bytes",
            "model version": self.version,
            "accepted updates": self.num_updates,
            "clients": f"{len(names)}: {listed}" if names else 0,
        }
        yield _table("file", self.path.name, lines)
        if self.kind == "journal":
            yield _table("record", "number", self.records)
        if self.staleness:
            yield _table("staleness", "updates", dict(sorted(self.staleness.items())))
        if self.counts:
            yield _table("invalid field", "rejections", self.counts)
        if self.rejections:
            last = new_table("closed by")
            last.add_column("reason of the last rejections")
            for client, reason in self.rejections[-MAX_LISTED:]:
                last.add_row(Text(str(client)), Text(reason))
            yield last


def read(path: Path, summary: Summary) -> Iterator[dict[str, Any]]:
    """Yield the entries of a checkpoint or a journal, and count them in `summary`.

    The entries of a journal are its records. The entries of a checkpoint are the rows of the server's update history.

    Raises:
        ArgumentError: if the path is neither a checkpoint nor a journal.
        CheckpointError: if a file is corrupted.
    """
    segments = [] if path.is_file() else [*map(Journal(path).segment_path, Journal(path).segments())]
    if path.is_file():
        with os_errors(f"{path}: cannot be read"), open(path, "rb") as file:
            kind, tree = _read_head(path, file, summary)
        if kind == checkpoint.KIND:
            summary.kind = "checkpoint"
            yield from summary.add_snapshot(tree)
            return
        if kind == log_format.KIND:
            segments = [path]
    if not segments and not path.exists():
        raise ArgumentError(f"path: {path} does not exist")
    if not segments:
        raise ArgumentError(f"path: expected a checkpoint or a journal of a server, got {str(path)!r}")
    summary.kind = "journal"
    summary.formats = set()
    summary.num_bytes = 0
    found = []
    for place in segments:
        with os_errors(f"{place}: cannot be read"), open(place, "rb") as file:
            _, header = _read_head(place, file, summary)
            found.append(Segment(place, header, file.tell()))
    for record in _records(found, summary):
        yield {"lsn": record.lsn, "kind": record.kind, **record.content, "payload_bytes": record.payload_length}


def _records(segments: Sequence[Segment], summary: Summary) -> Iterator[StoredRecord]:
    """Yield the records of a journal, with the same checks as recovery."""
    for segment, after in zip(segments, [*segments[1:], None], strict=True):
        if segment.header["snapshot"] is not None:
            for _ in summary.add_snapshot(segment.header["snapshot"]):
                pass
        records, durable_lsn, num_trailing = scan(segment)
        durable_lsn = durable_lsn if after is None else after.first_lsn
        for record in records:
            if record.kind == "accepted":
                try:
                    read_payload(record)
                except CheckpointError as error:
                    if record.lsn < durable_lsn:
                        raise CheckpointError(f"{segment.path}: record {record.lsn}: its payload {error}") from None
                    summary.notes.append(f"{segment.path}: the write of record {record.lsn} is incomplete")
                    return
            summary.add_record(record)
            yield record
        end = segment.first_lsn + len(records)
        if end < durable_lsn:
            raise CheckpointError(f"{segment.path}: record {end} is corrupted: it was on the disk")
        if num_trailing:
            summary.notes.append(f"{segment.path}: {num_trailing} bytes after record {end - 1} are an incomplete write")


def _read_head(path: Path, file: BufferedReader, summary: Summary) -> tuple[str, dict[str, Any]]:
    """Read the header of a file, add it to the summary, and return its kind and content."""
    try:
        metadata, tree = tensor_file.load_structure(file, os.fstat(file.fileno()).st_size)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    summary.formats.add(str(metadata["version"]))
    summary.num_bytes += os.fstat(file.fileno()).st_size
    return metadata["kind"], tree


def _table(first: str, second: str, lines: Any) -> Table:
    """Format names and values as a table."""
    grid = new_table(first, second)
    for name, value in lines.items():
        grid.add_row(Text(str(name)), Text("unknown" if value is None else str(value)))
    return grid


def _json_value(value: Any) -> Any:
    """Convert a value for JSON. Non-finite numbers become `null`."""
    if isinstance(value, dict):
        return {key: _json_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_json_value, value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
