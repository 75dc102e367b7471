"""The store of trees in memory or in files, as an immutable value."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from immutables import Map

from manifoldagg.federated.pytrees import Tree, size_of
from manifoldagg.federated.server.durability.persistent_map import PersistentOrderedMap
from manifoldagg.federated.server.durability.spill import SpilledTree

__all__ = ["InMemoryTree", "Store", "StoreKey"]

StoreKey = tuple[str, Hashable]
"""A kind (`"version"`, `"base"`, `"client"`) and a name."""
SPILLED = "spilled"


class InMemoryTree:
    """A reference-counted tree in memory.

    Args:
        tree: an immutable tree.
        on_free: a function that receives the tree after its last reference is gone.

    Example:
        >>> import torch
        >>> spare = []
        >>> kept = InMemoryTree(torch.zeros(2), on_free=spare.append)
        >>> kept.size, spare
        (8, [])
        >>> del kept
        >>> spare
        [tensor([0., 0.])]
    """

    __slots__ = ("_on_free", "size", "tree")

    def __init__(self, tree: Tree, on_free: Callable[[Tree], object] | None = None) -> None:
        self.tree = tree
        self.size = size_of(tree)
        self._on_free = on_free

    def load(self) -> Tree:
        """Return the tree."""
        return self.tree

    def __del__(self) -> None:
        freed = getattr(self, "_on_free", None)
        if freed is not None:
            freed(self.tree)


class Store(NamedTuple):
    """Reference-counted trees by key. Every change is a new store that shares its unchanged parts.

    Attributes:
        entries: each tree, and how many hold it.
        evictable: keys of what is in memory and may go to a file, the oldest first: to find it no one else is asked.
        used_bytes: bytes by kind, in memory; those in files are `"spilled"`.

    Example:
        >>> import torch
        >>> first = Store().retain(("version", 0), InMemoryTree(torch.zeros(2)))
        >>> both = first.retain(("version", 0))
        >>> ("version", 0) in both.release(("version", 0)), ("version", 0) in first.release(("version", 0))
        (True, False)
    """

    entries: Map[StoreKey, tuple[InMemoryTree | SpilledTree, int]] = Map()
    evictable: PersistentOrderedMap[StoreKey, None] = PersistentOrderedMap()
    used_bytes: Map[str, int] = Map()

    def __contains__(self, key: object) -> bool:
        return key in self.entries

    def find(self, key: StoreKey) -> InMemoryTree | SpilledTree | None:
        """Return the entry of a key, if it exists."""
        held = self.entries.get(key)
        return None if held is None else held[0]

    def load(self, key: StoreKey | None) -> Tree:
        """Return the tree of a key, on its devices; `None` if it does not exist.

        Raises:
            SpillError: if its file is not what was written.
        """
        held = None if key is None else self.entries.get(key)
        return None if held is None else held[0].load()

    def retain(self, key: StoreKey, tree: InMemoryTree | SpilledTree | None = None) -> "Store":
        """Return the store with one more reference to a key; `tree` is its value if the key is new."""
        there = self.entries.get(key)
        if there is not None:
            return self._replace(entries=self.entries.set(key, (there[0], there[1] + 1)))
        if tree is None:
            raise KeyError(key)
        movable = self.evictable.set(key, None) if isinstance(tree, InMemoryTree) and tree.size else self.evictable
        return Store(self.entries.set(key, (tree, 1)), movable, self._updated_usage(key, tree, 1))

    def release(self, key: StoreKey | None) -> "Store":
        """Return the store with one reference less, if the key exists."""
        if key is None:
            return self
        kept, holders = self.entries[key]
        if holders > 1:
            return self._replace(entries=self.entries.set(key, (kept, holders - 1)))
        movable = self.evictable.remove(key) if key in self.evictable else self.evictable
        return Store(self.entries.delete(key), movable, self._updated_usage(key, kept, -1))

    def evicted(self, key: StoreKey, tree: InMemoryTree, spilled: SpilledTree) -> "Store":
        """Return the store with a tree moved to its file; unchanged if the key has another value by now."""
        there = self.entries.get(key)
        if there is None or there[0] is not tree:
            return self
        used = self._updated_usage(key, tree, -1)
        moved = Store(self.entries.set(key, (spilled, there[1])), self.evictable.remove(key), used)
        return moved._replace(used_bytes=moved._updated_usage(key, spilled, 1))

    def pinned(self, key: StoreKey, tree: InMemoryTree) -> "Store":
        """Return the store with a tree pinned in memory."""
        fits = key in self.evictable and self.find(key) is tree
        return self._replace(evictable=self.evictable.remove(key)) if fits else self

    def next_victim(self, limit: int, exclude: StoreKey) -> tuple[StoreKey, InMemoryTree] | None:
        """Return the oldest evictable tree if trees other than `exclude` use more than `limit` bytes of memory."""
        used = self.memory_usage(exclude)
        if sum(used.values()) - used[SPILLED] <= limit:
            return None
        for key in self.evictable:
            kept = self.find(key)
            if key != exclude and isinstance(kept, InMemoryTree):
                return key, kept
        return None

    def memory_usage(self, exclude: StoreKey) -> dict[str, int]:
        """Return the bytes in memory by kind, without one key, and the bytes in files."""
        used = {kind: self.used_bytes.get(kind, 0) for kind in ("version", "base", "client", SPILLED)}
        kept = self.find(exclude)
        if kept is not None:
            used[_usage_kind(exclude, kept)] -= kept.size
        return used

    def _updated_usage(self, key: StoreKey, tree: InMemoryTree | SpilledTree, sign: int) -> Map[str, int]:
        kind = _usage_kind(key, tree)
        return (
            self.used_bytes.set(kind, self.used_bytes.get(kind, 0) + sign * tree.size) if tree.size else self.used_bytes
        )


def _usage_kind(key: StoreKey, tree: Any) -> str:
    return SPILLED if isinstance(tree, SpilledTree) else key[0]
