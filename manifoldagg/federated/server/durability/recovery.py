"""Recovery of a server: the replay of the journal records that follow a checkpoint.

A journal can contain an invalid record for two reasons:

- The process or the machine crashed during the last write. Recovery then ignores the incomplete records at the end.
- The file was corrupted after the write. Recovery then raises an error with the log sequence number (LSN) of the
  record.

To distinguish these cases, each record states which earlier records were already synced to the disk when it was
written. If a later record states that the invalid record was synced, the file was corrupted.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from immutables import Map
from torch import Tensor

from manifoldagg._io import os_errors
from manifoldagg._validation import warn_caller
from manifoldagg.errors import CheckpointError, ManifoldAggError
from manifoldagg.federated.limits import with_norm
from manifoldagg.federated.server.durability.checkpoint import LoadedCheckpoint
from manifoldagg.federated.server.durability.journal import Journal
from manifoldagg.federated.server.durability.log_format import Segment, StoredRecord, read_payload, scan
from manifoldagg.federated.server.durability.persistent_map import AtomicReference
from manifoldagg.federated.server.durability.store import InMemoryTree, StoredTree
from manifoldagg.federated.server.state import PendingTicket, ServerState
from manifoldagg.federated.types import Payload, Receipt

__all__ = ["JournalReplay", "recover"]

LOG = logging.getLogger("manifoldagg")


@dataclass
class JournalReplay:
    """Replay of the journal records that follow a checkpoint.

    The log sequence number (LSN) of a record is its position in the journal.

    Attributes:
        name: the name of the journal.
        next_lsn: the LSN of the next record to replay.
        chain: the chained checksum of all records before the next record.
        time: the time of the last replayed record in seconds, as the server's clock returned it.
        ancestors: the earlier journals and checkpoints that this journal continues, as in `JournalWriter`.
        records: the records to replay.
        durable_lsn: the LSN before which all records were synced to the disk, as the journal states.
        is_deterministic: whether all replayed updates so far have returned their recorded receipts.
    """

    name: str
    next_lsn: int
    chain: str
    time: float
    ancestors: Mapping[str, int]
    records: list[StoredRecord] = field(default_factory=list)
    durable_lsn: int = 0
    is_deterministic: bool = True

    @property
    def lineage(self) -> dict[str, int]:
        """The ancestors of the new journal that the server starts after the replay."""
        return {**self.ancestors, self.name: self.next_lsn}

    def clock(self) -> float:
        """Return the time of the last replayed record. During a replay, this method is the clock of the server."""
        # A method has an importable name, which a checkpoint can store, whereas a lambda has none.
        return self.time

    def read(self, segments: Sequence[Segment]) -> None:
        """Read the records from `next_lsn` on.

        Raises:
            CheckpointError: if a record is missing or corrupted, or if it belongs to another copy of the server.
        """
        chains = {self.next_lsn: self.chain}
        for segment, after in zip(segments, [*segments[1:], None], strict=True):
            if after is not None and after.first_lsn <= self.next_lsn:
                continue
            if segment is segments[0] and segment.first_lsn > self.next_lsn:
                problem = f"the checkpoint ends before record {self.next_lsn}; pass a newer checkpoint"
                raise CheckpointError(f"{segment.path}: starts with record {segment.first_lsn}, but {problem}")
            found, durable_lsn, num_trailing = scan(segment)
            self.durable_lsn = durable_lsn if after is None else after.first_lsn
            end = segment.first_lsn + len(found)
            if num_trailing:
                LOG.warning("%s: %d bytes after record %d are not a record", segment.path, num_trailing, end - 1)
            for record in found:
                for lsn, chain in enumerate(record.content["chain"], record.lsn):
                    if chains.setdefault(lsn, chain) != chain:
                        raise CheckpointError(f"{segment.path}: record {lsn} belongs to another copy of this server")
            self.records += [record for record in found if record.lsn >= self.next_lsn + len(self.records)]
            if end < self.durable_lsn and self.durable_lsn > self.next_lsn:
                raise _corruption_error(segment.path, end)

    def replay(
        self,
        state: AtomicReference[ServerState],
        apply_update: Callable[[Payload, dict[str, Any]], Receipt],
        round_base: Callable[[Tensor], Tensor | None],
    ) -> None:
        """Replay the records on a server that was restored from the checkpoint.

        Args:
            state: the state of the server.
            apply_update: a function that applies a payload with the inputs of its record and returns the receipt.
            round_base: a function that rounds a model in the same way as `Server.dispatch`.

        Raises:
            CheckpointError: if a record is corrupted, or if the server rejects an update. The message contains the LSN.

        Warns:
            RuntimeWarning: if a replayed update returns another receipt than the recorded one.
        """
        # The record of a ticket may follow the record of the update that has replaced the ticket's version. The models
        # of such versions are kept until the last ticket that needs them.
        last_use = {record.content["pending"][1]: record.lsn for record in self.records if record.kind == "dispatched"}
        models: dict[int, StoredTree | None] = {}
        for record in self.records:
            now = state.value
            content = record.content
            version = now.model_state.version
            if record.kind == "accepted":
                payload = self._payload(record)
                if payload is None:
                    break
                if last_use.get(version, -1) > record.lsn:
                    models[version] = now.store.find(now.current_key)
                self._apply(record, payload, apply_update)
                now = state.value
            elif record.kind == "dispatched":
                ticket = PendingTicket(*content["pending"])
                base: Any = None if ticket.base_key is None else now.store.find(ticket.base_key)
                if ticket.base_key is not None and base is None:
                    base = models.get(ticket.version) or now.store.find(now.current_key)
                    base = InMemoryTree(round_base(base.load())) if ticket.base_key[0] == "base" else base
                now = now.with_ticket(content["ticket"], ticket, base)
                self.time = ticket.issued_at  # If the clock was set back, this is earlier than the previous time.
            elif record.kind == "norm":
                client, norm = content["norm"]
                norms = with_norm(now.model_state.norms, client, norm, content["window"])
                now = now._replace(model_state=replace(now.model_state, norms=norms))
            else:
                ended = Receipt(False, content["reason"], version) if record.kind == "ended" else None
                for ticket_id in content.get("tickets") or [content["ticket"]]:
                    if ticket_id in now.tickets:  # A checkpoint omits the tickets whose base was lost.
                        now = now.without_ticket(ticket_id, ended)
            if "rejected" in content:
                now = now._replace(rejected=Map(content["rejected"]))
            state.update(lambda _, now=now: (now, None))  # type: ignore[misc]
            models = {version: model for version, model in models.items() if last_use[version] > record.lsn}
            self.next_lsn = record.lsn + 1
            self.time = max(self.time, content.get("time", self.time))

    def _payload(self, record: StoredRecord) -> Payload | None:
        """Return the payload of an accepted update, or `None` if its write was incomplete."""
        try:
            with os_errors(f"{record.path}: cannot be read"):
                return read_payload(record)
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):  # The system cannot read the file, which may be intact.
                raise
            if record.lsn < self.durable_lsn:
                raise _corruption_error(record.path, record.lsn) from error
            LOG.warning("%s: truncated before record %d, whose write was incomplete", record.path, record.lsn)
            return None

    def _apply(
        self, record: StoredRecord, payload: Payload, apply_update: Callable[[Payload, dict[str, Any]], Receipt]
    ) -> None:
        place = f"{record.path}: record {record.lsn}"
        recorded = record.content["receipt"]
        try:
            receipt = apply_update(payload, record.content)
        except ManifoldAggError as error:
            raise CheckpointError(f"{place}: {error}") from error
        if self.is_deterministic and repr(dict(vars(receipt))) != repr(recorded):
            self.is_deterministic = False
            problem = f"the receipt was {Receipt(**recorded)}, and is {receipt} in the replay"
            warn_caller(f"{place}: {problem}: the rule is not deterministic", RuntimeWarning)


def recover(
    path: str | Path | LoadedCheckpoint, journal: Journal | None, *, ignore_journal: bool = False
) -> tuple[LoadedCheckpoint, JournalReplay | None]:
    """Find the latest complete state of a server in its checkpoint and its journal.

    Args:
        path: a checkpoint or its path. The file may be missing if the journal contains a snapshot of the server.
        journal: the journal, which the caller must have locked. `None` means to resume without a journal.
        ignore_journal: whether to resume a checkpoint that has a journal without this journal, if `journal` is `None`.

    Returns:
        The checkpoint or the snapshot of the journal, whichever is later, and the replay of the journal records after
        it. The replay is `None` if `journal` is `None`.

    Raises:
        CheckpointError: if the checkpoint or the journal cannot be read, or if they belong to different servers.
    """
    firsts = [] if journal is None else journal.segments()
    saved = path if isinstance(path, LoadedCheckpoint) else None
    if saved is None and not (firsts and isinstance(path, str | Path) and not os.path.lexists(path)):
        saved = LoadedCheckpoint(path)  # type: ignore[arg-type]
    if saved is not None and (journal is None or not firsts):
        if saved.position[2] and journal is not None:
            raise CheckpointError(f"{journal.path}: the journal does not exist, but {saved.path} requires it")
        if saved.position[2] and not ignore_journal:
            raise CheckpointError(
                f"{saved.path}: expected the journal of this checkpoint; pass durability=Durability(journal=...), or "
                "ignore_journal=True to resume without the updates after the checkpoint"
            )
        return saved, None if journal is None else JournalReplay(*saved.position, saved.time, {})
    assert journal is not None
    segments = [Segment.read(journal.segment_path(first), first) for first in firsts]
    name = segments[-1].header["name"]
    ancestors = segments[-1].header["ancestors"]
    lineage = [(segment.header["name"], segment.first_lsn) for segment in segments]
    _, lsn, chain = (name, 0, name) if saved is None else saved.position
    lineage += [] if saved is None else [saved.position[:2]]
    if any(part != name and first > ancestors.get(part, -1) for part, first in lineage):
        problem = f"belongs to another server than {path if saved is None else saved.path}"
        raise CheckpointError(f"{journal.path}: {problem}, or to another copy of this server")
    for segment in segments:
        if segment.header["snapshot"] is not None and segment.first_lsn >= lsn:
            lsn = segment.first_lsn
            chain = segment.header["name"]
            saved = LoadedCheckpoint(segment.path, segment.header["snapshot"])
    if saved is None:
        raise CheckpointError(f"{path}: does not exist, and the journal {journal.path} does not start with a snapshot")
    replay = JournalReplay(name, lsn, chain, saved.time, ancestors)
    replay.read(segments)
    return saved, replay


def _corruption_error(path: Path, lsn: int) -> CheckpointError:
    return CheckpointError(f"{path}: record {lsn} is corrupted: a later record states that it was on the disk")
