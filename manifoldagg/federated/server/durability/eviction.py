"""The overflow: what is held for clients beyond a limit of memory goes to files, the oldest first."""

import logging
from collections.abc import Callable

from manifoldagg.errors import SpillError
from manifoldagg.federated.server.durability.persistent_map import Atomic
from manifoldagg.federated.server.durability.spill import Spill, trim
from manifoldagg.federated.server.durability.store import Store
from manifoldagg.federated.server.state import Books

__all__ = ["Overflow"]

LOG = logging.getLogger("manifoldagg")
TRIMMED = 2**20
"""Bytes that go to files between two requests that freed memory be returned, or a quarter of the limit."""


class Overflow:
    """Keeps what is held for clients within a limit.

    Args:
        books: of the server.
        limit: in bytes; `None` for none.
        spill: where files go.
    """

    def __init__(self, books: Atomic[Books], limit: int | None, spill: Spill) -> None:
        self.limit = limit
        self._books = books
        self._spill = spill
        self._untrimmed = 0

    def move(self) -> None:
        """Bring what is held within the limit, and let go of the memory that leaves."""
        while self.limit is not None and (size := self._move_one(self.limit)):
            self._untrimmed += size
            if self._untrimmed > max(self.limit // 4, TRIMMED):
                self._untrimmed = 0
                trim()

    def close(self) -> None:
        """Remove all files."""
        self._spill.close()

    def _move_one(self, limit: int) -> int:
        """Move the oldest tree to a file; its size, or 0 where none has to move, or none can."""
        books = self._books.value
        over = books.store.over(limit, without=books.current)
        if over is None:
            return 0
        key, kept = over
        try:
            filed = self._spill.write(kept.tree)
        except SpillError as error:
            LOG.warning("memory_limit: %s stays in memory: %s", key, error)
            if error.temporary:
                return 0
            self._store(lambda store: store.stuck(key, kept))
        else:
            self._store(lambda store: store.moved(key, kept, filed))
        return kept.size

    def _store(self, change: Callable[[Store], Store]) -> None:
        self._books.update(lambda now: (now._replace(store=change(now.store)), None))
