"""Recovery: the replay of journal records after a checkpoint.

What is bad at the end of a journal, and of which no later frame says that it was on the disk, was being written when
the machine stopped, and is cut. Anything else that is bad was altered.
"""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from immutables import Map
from torch import Tensor

from manifoldagg._validation import warn_caller
from manifoldagg.errors import CheckpointError, ManifoldAggError
from manifoldagg.federated.limits import with_norm
from manifoldagg.federated.server.durability.checkpoint import LoadedCheckpoint
from manifoldagg.federated.server.durability.journal import Journal
from manifoldagg.federated.server.durability.log_format import (
    StoredRecord,
    read_error,
    read_payload,
    read_segment_header,
    scan,
)
from manifoldagg.federated.server.durability.persistent_map import AtomicReference
from manifoldagg.federated.server.durability.store import InMemoryTree
from manifoldagg.federated.server.state import PendingTicket, ServerState
from manifoldagg.federated.types import Payload, Receipt

__all__ = ["UNSET", "JournalReplay", "recover"]

UNSET = object()
"""Stands for a journal of which nothing was said, which is not to be without one."""
LOG = logging.getLogger("manifoldagg")


class JournalReplay:
    """The replay of the journal records after a checkpoint.

    Attributes:
        name: of the journal.
        next_lsn: the number of the next record.
        chain: the checksum over the records before it.
        time: the time of the last record, in seconds of the clock.
        ancestors: the journals and checkpoints that the journal continues, and the number of the record from which on.
    """

    def __init__(self, name: str, next_lsn: int, chain: str, time: float, ancestors: Mapping[str, int]) -> None:
        self.name = name
        self.next_lsn = next_lsn
        self.chain = chain
        self.time = time
        self.ancestors = ancestors
        self.records: list[StoredRecord] = []
        self._durable_lsn = 0

    def clock(self) -> float:
        """The clock of the replay."""
        return self.time

    def read(self, journal: Journal) -> None:
        """Find the journal records from `next_lsn` on.

        Raises:
            CheckpointError: naming a missing record, or a file that was altered.
        """
        files = journal.segments()
        begun = [first for first in files if first <= self.next_lsn]
        if not begun:
            raise CheckpointError(
                f"{journal.path}: begins with record {files[0]}, and the checkpoint holds what was before "
                f"{self.next_lsn}: it is an older one"
            )
        files = [first for first in files if first >= begun[-1]]
        chains = {self.next_lsn: self.chain}
        for first, after in zip(files, [*files[1:], None], strict=True):
            try:
                found, vouched = scan(journal.segment_path(first), first)
            except OSError as error:
                raise read_error(journal.segment_path(first), error) from error
            self._durable_lsn = vouched if after is None else after
            for told in found:
                for lsn, chain in enumerate(told.content.get("chain", ("", "")), told.lsn):
                    if chains.setdefault(lsn, chain) != chain:
                        raise CheckpointError(f"{told.path}: record {told.lsn} is of another copy of this server")
            self.records += [told for told in found if told.lsn >= self.next_lsn + len(self.records)]
            last = found[-1].lsn + 1 if found else first
            if last < self._durable_lsn and self._durable_lsn > self.next_lsn:
                raise _corruption_error(journal.segment_path(first), last)

    def replay(
        self,
        server_state: AtomicReference[ServerState],
        apply_update: Callable[[Payload, dict[str, Any]], Receipt],
        round_base: Callable[[Tensor], Tensor | None],
    ) -> None:
        """Replay all records on a server, whose functions apply an update with recorded inputs and round a base.

        Raises:
            CheckpointError: naming a record that was altered, or that the rule now rejects.

        Warns:
            RuntimeWarning: if a receipt is another than that which was given.
        """
        wanted = {told.content["pending"][1]: told.lsn for told in self.records if told.kind == "dispatched"}
        models: dict[int, InMemoryTree] = {}
        warned = False
        for told in self.records:
            content = told.content
            if told.kind == "accepted":
                try:
                    payload = read_payload(told)
                except OSError as error:  # what is there may be sound
                    raise read_error(told.path, error) from error
                except CheckpointError as error:
                    if told.lsn < self._durable_lsn:
                        raise _corruption_error(told.path, told.lsn) from error
                    LOG.warning("%s: cut before record %d, which was being written", told.path, told.lsn)
                    break
                state = server_state.value
                version = state.model_state.version
                if wanted.get(version, -1) > told.lsn:
                    current = state.store.find(state.current_key)
                    assert isinstance(current, InMemoryTree)
                    models[version] = current
                try:
                    receipt = apply_update(payload, content)
                except ManifoldAggError as error:
                    raise CheckpointError(f"{told.path}: record {told.lsn}: {error}") from error
                if not warned and repr(dict(vars(receipt))) != repr(content["receipt"]):
                    warned = True
                    warn_caller(
                        f"{told.path}: record {told.lsn}: its receipt was {Receipt(**content['receipt'])}, "
                        f"and is {receipt} now: the rule is not deterministic",
                        RuntimeWarning,
                    )
            else:
                _apply_record(server_state, round_base, told, models)
            if "rejected" in content:
                server_state.update(partial(_with_rejected, Map(content["rejected"])))
            models = {version: kept for version, kept in models.items() if wanted[version] > told.lsn}
            self.next_lsn = told.lsn + 1
            if told.kind == "dispatched":  # also if the clock went back
                self.time = content["pending"][3]
            self.time = max(self.time, content.get("time", self.time))


def recover(
    path: str | Path | LoadedCheckpoint, journal: Journal | None, *, journal_unset: bool = False
) -> tuple[LoadedCheckpoint, JournalReplay | None]:
    """Return the latest complete checkpoint and the journal records after it; `None` without a journal.

    Args:
        path: of a checkpoint, which need not be there yet where the journal begins with the record; or what was read.
        journal: which its caller holds, or `None` to resume without one.
        journal_unset: whether the argument was not given.

    Raises:
        CheckpointError: if either cannot be read, or they do not belong together.
    """
    files = [] if journal is None else journal.segments()
    if isinstance(path, LoadedCheckpoint):
        saved: LoadedCheckpoint | None = path
    elif files and isinstance(path, str | Path) and not os.path.lexists(path):
        saved = None
    else:
        saved = LoadedCheckpoint(path)
    if journal is None:
        if journal_unset and saved is not None and saved.position[2]:
            raise CheckpointError(
                f"{saved.path}: it has a journal: pass it as `journal`, or pass journal=None to resume "
                "without the updates since"
            )
        assert saved is not None
        return saved, None
    if not files:
        assert saved is not None
        if saved.position[2]:
            raise CheckpointError(f"{journal.path}: the journal does not exist, but is required by {saved.path}")
        return saved, JournalReplay(*saved.position, saved.time, {})
    heads = {first: read_segment_header(journal.segment_path(first))[0] for first in files}
    name, ancestors = heads[files[-1]]["name"], heads[files[-1]].get("ancestors", {})
    chain, number = name, 0
    parts = [(head["name"], first) for first, head in heads.items()]
    if saved is not None:
        parent, number, chain = saved.position
        parts.append((parent, number))
    if any(part != name and first > ancestors.get(part, -1) for part, first in parts):
        raise CheckpointError(
            f"{journal.path}: is the journal of another server than {path if saved is None else saved.path}, or of "
            "another copy of it"
        )
    whole = [first for first in files if heads[first]["snapshot"] is not None and first >= number]
    if whole:
        chain, number = heads[whole[-1]]["name"], whole[-1]
        saved = LoadedCheckpoint(journal.segment_path(number), heads[number]["snapshot"])
    if saved is None:
        raise CheckpointError(f"{path}: is not there, and {journal.path} does not begin with the whole record")
    story = JournalReplay(name, number, chain, saved.time, ancestors)
    story.read(journal)
    return saved, story


def _with_rejected(rejected: Map[str, int], now: ServerState) -> tuple[ServerState, None]:
    return now._replace(rejected=rejected), None


def _apply_record(
    state: AtomicReference[ServerState],
    round_base: Callable[[Tensor], Tensor | None],
    record: StoredRecord,
    models: dict[int, InMemoryTree],
) -> None:
    """Apply a journal record of a ticket operation."""
    content = record.content

    def ended(now: ServerState) -> tuple[ServerState, None]:
        receipt = Receipt(False, content["reason"], now.model_state.version)
        for name in content["tickets"]:
            if name in now.tickets:  # unless its base was lost, and it was not saved
                now = now.without_ticket(name, receipt)
        return now, None

    def dropped(now: ServerState) -> tuple[ServerState, None]:
        return now.without_ticket(content["ticket"]) if content["ticket"] in now.tickets else now, None

    def counted(now: ServerState) -> tuple[ServerState, None]:
        client, norm = content["norm"]
        norms = with_norm(now.model_state.norms, client, norm, content["window"])
        return now._replace(model_state=replace(now.model_state, norms=norms)), None

    if record.kind == "ended":
        state.update(ended)
    elif record.kind == "norm":
        state.update(counted)
    elif record.kind == "dropped":
        state.update(dropped)
    else:
        ticket = PendingTicket(*content["pending"])
        now = state.value
        base: Any = None if ticket.base_key is None else now.store.find(ticket.base_key)
        if ticket.base_key is not None and base is None:
            # Its version had moved on when the ticket was entered.
            base = models.get(ticket.version) or now.store.find(now.current_key)
            if ticket.base_key[0] == "base":
                base = InMemoryTree(round_base(base.load()))
        state.update(lambda now: (now.with_ticket(content["ticket"], ticket, base), None))


def _corruption_error(path: Path, lsn: int) -> CheckpointError:
    return CheckpointError(f"{path}: record {lsn} is altered: it was on the disk when later ones were written")
