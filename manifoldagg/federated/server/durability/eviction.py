"""Memory limit of a server. If it is exceeded, the server moves the oldest models and client states to files."""

import ctypes
import logging
import sys

from manifoldagg.errors import SpillError
from manifoldagg.federated.server.durability.persistent_map import AtomicReference
from manifoldagg.federated.server.durability.spill import Spill
from manifoldagg.federated.server.state import ServerState

__all__ = ["Evictor"]

LOG = logging.getLogger("manifoldagg")
MIN_TRIM_BYTES = 2**20
"""The number of evicted bytes after which `malloc_trim` is called. If a quarter of the limit is larger, it applies."""
# Freed aligned blocks leave holes that are too small for the next aligned block of the same size. Without
# `malloc_trim`, the memory of a process would grow by the size of the evicted trees.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


class Evictor:
    """Evictor that keeps the stored trees of a server within a memory limit.

    Args:
        state: the state of the server.
        limit: the limit in bytes. `None` disables the limit.
        spill: the writer of the files.
    """

    def __init__(self, state: AtomicReference[ServerState], limit: int | None, spill: Spill) -> None:
        self.limit = limit
        self._state = state
        self._spill = spill
        self._untrimmed_bytes = 0

    def evict(self) -> None:
        """Move the oldest stored models and client states to files, until the memory usage is within the limit."""
        while self.limit is not None and (size := self._evict_one(self.limit)):
            self._untrimmed_bytes += size
            if self._untrimmed_bytes > max(self.limit // 4, MIN_TRIM_BYTES):
                self._untrimmed_bytes = 0
                if _malloc_trim is not None:
                    _malloc_trim(0)

    def _evict_one(self, limit: int) -> int:
        """Evict the oldest tree if the memory usage exceeds the limit.

        Returns:
            The size of the tree in bytes. 0 if the memory usage is within the limit, or if no tree can be evicted.
        """
        state = self._state.value
        over = state.store.next_victim(limit, exclude=state.current_key)
        if over is None:
            return 0
        key, kept = over
        try:
            filed = self._spill.write(kept.tree)
        except SpillError as error:
            LOG.warning("memory: %s stays in memory: %s", key, error)
            if error.temporary:
                return 0
            self._state.update(lambda now: (now._replace(store=now.store.pinned(key, kept)), None))
        else:
            self._state.update(lambda now: (now._replace(store=now.store.evicted(key, kept, filed)), None))
        return kept.size
