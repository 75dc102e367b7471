"""The story: what a journal tells beyond a checkpoint, and the record that goes on from both.

What is bad at the end of a journal, and of which no later frame says that it was on the disk, was being written when
the machine stopped, and is cut. Anything else that is bad was altered.
"""

import logging
import math
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from immutables import Map
from torch import Tensor

from manifoldagg.errors import CheckpointError, ManifoldAggError
from manifoldagg.federated.server.durability.checkpoint import Saved
from manifoldagg.federated.server.durability.journal import Journal
from manifoldagg.federated.server.durability.log_format import Told, indexed, opened, payload_of, unreadable
from manifoldagg.federated.server.durability.persistent_map import Atomic
from manifoldagg.federated.server.durability.store import Kept
from manifoldagg.federated.server.state import Books, Open
from manifoldagg.federated.types import Payload, Receipt

__all__ = ["UNSAID", "Living", "Story", "recovered"]

UNSAID = object()
"""Stands for a journal of which nothing was said, which is not to be without one."""
LOG = logging.getLogger("manifoldagg")


class Story:
    """What a journal tells beyond what a checkpoint holds.

    Attributes:
        name: of the journal.
        number: of the next change.
        time: of the last one, in seconds of the clock.
        after: what the journal goes on from, where that is not of this journal.
    """

    def __init__(self, name: str, number: int, time: float, after: list[Any] | None = None) -> None:
        self.name = name
        self.number = number
        self.time = time
        self.after = after
        self.told: list[Told] = []
        self._vouched = 0

    def now(self) -> float:
        """The clock of who lives through it."""
        return self.time

    def read(self, journal: Journal) -> None:
        """Find the changes from `number` on.

        Raises:
            CheckpointError: naming a change that is missing, or a file that was altered.
        """
        files = journal.files()
        begun = [first for first in files if first <= self.number]
        if not begun:
            raise CheckpointError(
                f"{journal.path}: begins with change {files[0]}, and the checkpoint holds what was before "
                f"{self.number}: it is an older one"
            )
        files = [first for first in files if first >= begun[-1]]
        for first, after in zip(files, [*files[1:], None], strict=True):
            found, vouched = indexed(journal.file(first), first)
            self._vouched = vouched if after is None else after
            self.told += [told for told in found if told.number >= self.number + len(self.told)]
            last = found[-1].number + 1 if found else first
            if last < self._vouched and self._vouched > self.number:
                raise _altered(journal.file(first), last)

    def live(self, server: "Living") -> None:
        """Let a server go through all of it once more.

        Raises:
            CheckpointError: naming the change that was altered, or that the rule does not take any more.

        Warns:
            RuntimeWarning: if a receipt is another than that which was given.
        """
        wanted = {told.content["open"][1]: told.number for told in self.told if told.kind == "dispatched"}
        models: dict[int, Kept] = {}
        warned = False
        for told in self.told:
            content = told.content
            if told.kind == "accepted":
                try:
                    payload = payload_of(told)
                except OSError as error:  # what is there may be sound
                    raise unreadable(told.path, error) from error
                except CheckpointError as error:
                    if told.number < self._vouched:
                        raise _altered(told.path, told.number) from error
                    LOG.warning("%s: cut before change %d, which was being written", told.path, told.number)
                    break
                books = server.books.value
                version = books.now.version
                if wanted.get(version, -1) > told.number:
                    current = books.store.find(books.current)
                    assert isinstance(current, Kept)
                    models[version] = current
                try:
                    receipt = server.take(payload, content)
                except ManifoldAggError as error:
                    raise CheckpointError(f"{told.path}: change {told.number}: {error}") from error
                if not warned and repr(dict(vars(receipt))) != repr(content["receipt"]):
                    warned = True
                    warnings.warn(
                        f"{told.path}: change {told.number}: its receipt was {Receipt(**content['receipt'])}, "
                        f"and is {receipt} now: the rule does not repeat itself here",
                        RuntimeWarning,
                        stacklevel=4,
                    )
            else:
                _relive(server, told, models)
            if "refused" in content:
                server.books.update(partial(_refused, Map(content["refused"])))
            models = {version: kept for version, kept in models.items() if wanted[version] > told.number}
            self.number = told.number + 1
            time = content.get("time", content["open"][3] if told.kind == "dispatched" else math.nan)
            self.time = self.time if math.isnan(time) else max(self.time, time)


class Living(NamedTuple):
    """What of a server lives through a story.

    Attributes:
        books: of the server.
        take: takes an update as it was taken.
        narrow: rounds a model to what is kept of it for clients.
    """

    books: Atomic[Books]
    take: Callable[[Payload, dict[str, Any]], Receipt]
    narrow: Callable[[Tensor], Tensor | None]


def recovered(path: str | Path | Saved, journal: Journal | None, *, unsaid: bool = False) -> tuple[Saved, Story | None]:
    """The latest whole record that there is, and what the journal tells beyond it; `None` without a journal.

    Args:
        path: of a checkpoint, which need not be there yet where the journal begins with the record; or what was read.
        journal: which its caller holds, or `None` to go on without one.
        unsaid: whether nothing was said of one.

    Raises:
        CheckpointError: if either cannot be read, or they do not belong together.
    """
    files = [] if journal is None else journal.files()
    if isinstance(path, Saved):
        saved: Saved | None = path
    elif files and isinstance(path, str | Path) and not os.path.lexists(path):
        saved = None
    else:
        saved = Saved(path)
    if journal is None:
        if unsaid and saved is not None and saved.journal is not None:
            raise CheckpointError(
                f"{saved.path}: a journal was written beside it: give it as `journal`, or journal=None to go on "
                "without what was taken since"
            )
        assert saved is not None
        return saved, None
    if not files:
        assert saved is not None
        if saved.journal is not None:
            raise CheckpointError(f"{journal.path}: there is no journal, and one was written beside {saved.path}")
        return saved, Story(os.urandom(16).hex(), 0, saved.time, saved.identity)
    heads = {first: opened(journal.file(first))[0] for first in files}
    name = heads[files[-1]]["name"]
    after = heads[files[-1]]["after"]
    number = -1
    if saved is not None:
        ours = after == saved.identity if saved.journal is None else saved.journal[0] == name
        if not ours or any(head["name"] != name for head in heads.values()):
            raise CheckpointError(f"{journal.path}: is the journal of another server than {saved.path}")
        number = -1 if saved.journal is None else saved.journal[1]
    whole = [first for first in files if heads[first]["moment"] is not None and first >= number]
    if whole:
        number = whole[-1]
        saved = Saved(journal.file(number), heads[number]["moment"])
    if saved is None:
        raise CheckpointError(f"{path}: is not there, and {journal.path} does not begin with the whole record")
    if number < 0:
        number = 0
    story = Story(name, number, saved.time, after)
    story.read(journal)
    return saved, story


def _refused(refused: Map[str, int], now: Books) -> tuple[Books, None]:
    return now._replace(refused=refused), None


def _relive(server: Living, told: Told, models: dict[int, Kept]) -> None:
    """Do what was done with tickets."""
    content = told.content
    books = server.books

    def ended(now: Books) -> tuple[Books, None]:
        receipt = Receipt(False, content["reason"], now.now.version)
        for name in content["tickets"]:
            if name in now.tickets:  # unless its base was lost, and it was not saved
                now = now.ended(name, receipt)
        return now, None

    def dropped(now: Books) -> tuple[Books, None]:
        return now.ended(content["ticket"]) if content["ticket"] in now.tickets else now, None

    if told.kind == "ended":
        books.update(ended)
    elif told.kind == "dropped":
        books.update(dropped)
    else:
        ticket = Open(*content["open"])
        now = books.value
        base: Any = None if ticket.base is None else now.store.find(ticket.base)
        if ticket.base is not None and base is None:
            # Its version had moved on when the ticket was entered.
            base = models.get(ticket.version) or now.store.find(now.current)
            if ticket.base[0] == "base":
                base = Kept(server.narrow(base.load()))
        books.update(lambda now: (now.dispatched(content["ticket"], ticket, base), None))


def _altered(path: Path, number: int) -> CheckpointError:
    return CheckpointError(f"{path}: change {number} is altered: it was on the disk when later ones were written")
