"""Storage of the models and the client states of a server, in memory or in files.

The class `Store` is immutable, so a change returns a new store.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple

from immutables import Map

from manifoldagg.federated.pytrees import Tree, size_of
from manifoldagg.federated.server.durability.persistent_map import PersistentOrderedMap
from manifoldagg.federated.server.durability.spill import SpilledTree

__all__ = ["InMemoryTree", "Store", "StoreKey", "StoredTree"]

StoreKey = tuple[str, Hashable]
"""The key of a stored tree: a pair of a kind and a name. The kinds and names are `"version"` (a model) and `"base"` (a
rounded model) with the number of the version, and `"client"` (a client state) with the client."""
SPILLED = "spilled"


class InMemoryTree:
    """Tree in memory. The tree must not be modified.

    Args:
        tree: the tree.
        on_free: a function that receives the tree when the last reference to this object is deleted.
        size: the number of bytes of the tree. `None` means to compute it.
    """

    __slots__ = ("_on_free", "size", "tree")

    def __init__(self, tree: Tree, on_free: Callable[[Tree], object] | None = None, size: int | None = None) -> None:
        self.tree = tree
        self.size = size_of(tree) if size is None else size
        self._on_free = on_free

    def load(self, *, copy: bool = True) -> Tree:
        """Return the tree itself. The argument `copy` has no effect."""
        return self.tree

    def __del__(self) -> None:
        freed = getattr(self, "_on_free", None)
        if freed is not None:
            freed(self.tree)


StoredTree = InMemoryTree | SpilledTree


class Store(NamedTuple):
    """Immutable store of models and client states, with a reference count for each key.

    The method `retain` adds a reference to a key, and `release` removes one. A key without references is removed from
    the store. Every change returns a new store.

    Attributes:
        entries: the stored tensors and the number of references, by key.
        evictable: the keys of the entries in memory, with the oldest key first. These entries can be moved to files.
        used_bytes: the total size in bytes by kind of entry. In memory, the kinds are `"version"` (models), `"base"`
            (models that were rounded to a smaller dtype) and `"client"` (client states). The kind `"spilled"` contains
            all entries in files.

    Example:
        >>> import torch
        >>> first = Store().retain(("version", 0), InMemoryTree(torch.zeros(2)))
        >>> both = first.retain(("version", 0))
        >>> ("version", 0) in both.release(("version", 0)), ("version", 0) in first.release(("version", 0))
        (True, False)
    """

    entries: Map[StoreKey, tuple[StoredTree, int]] = Map()
    evictable: PersistentOrderedMap[StoreKey, None] = PersistentOrderedMap()
    used_bytes: Map[str, int] = Map()

    def __contains__(self, key: object) -> bool:
        return key in self.entries

    def find(self, key: StoreKey) -> StoredTree | None:
        """Return the stored tree of a key, or `None` if the key does not exist."""
        held = self.entries.get(key)
        return None if held is None else held[0]

    def load(self, key: StoreKey | None, *, copy: bool = True) -> Tree:
        """Return the tree of tensors that is stored under a key. If the key does not exist, return `None`.

        A tree in a file is copied to memory by default. With `copy=False`, its tensors refer to the mapped file.
        """
        stored = None if key is None else self.find(key)
        return None if stored is None else stored.load(copy=copy)

    def retain(self, key: StoreKey, tree: StoredTree | None = None) -> "Store":
        """Return the store with one more reference to a key. For a new key, `tree` is required."""
        return self.replaced((), {key: tree})

    def release(self, key: StoreKey) -> "Store":
        """Return the store with one reference less to a key. Without references, the key is removed."""
        return self.replaced((key,), {})

    def replaced(self, released: Iterable[StoreKey], retained: Mapping[StoreKey, StoredTree | None]) -> "Store":
        """Release some keys, and then retain others.

        Args:
            released: the keys that lose one reference. A key may occur several times.
            retained: the keys that gain one reference, with their trees. The tree of a new key is required. The trees
                of existing keys are ignored.
        """
        entries = self.entries.mutate()
        changed: list[tuple[StoreKey, StoredTree, int]] = []
        for key in released:
            tree, references = entries[key]
            if references > 1:
                entries[key] = (tree, references - 1)
            else:
                del entries[key]
                changed.append((key, tree, -1))
        for key, value in retained.items():
            if (held := entries.get(key)) is not None:
                entries[key] = (held[0], held[1] + 1)
            elif value is None:
                raise KeyError(key)
            else:
                entries[key] = (value, 1)
                changed.append((key, value, 1))
        used = self.used_bytes.mutate()
        gone = [key for key, _, sign in changed if sign < 0 and key in self.evictable.entries]
        evictable = self.evictable.remove(*gone) if gone else self.evictable
        for key, tree, sign in changed:
            kind = SPILLED if isinstance(tree, SpilledTree) else key[0]
            used[kind] = used.get(kind, 0) + sign * tree.size
            if sign > 0 and tree.size and isinstance(tree, InMemoryTree):
                evictable = evictable.set(key, None)
        return Store(entries.finish(), evictable, used.finish())

    def evicted(self, key: StoreKey, tree: InMemoryTree, spilled: SpilledTree) -> "Store":
        """Return a new store in which one entry is in a file instead of in memory.

        If another thread has replaced or removed the entry in the meantime, return the store `self` unchanged.

        Args:
            key: the key of the entry.
            tree: the tensors of the entry in memory.
            spilled: the file with the same tensors.
        """
        found, references = self.entries.get(key, (None, 0))
        if found is not tree:
            return self
        used = self.used_bytes.mutate()
        used[key[0]] -= tree.size
        used[SPILLED] = used.get(SPILLED, 0) + spilled.size
        return Store(self.entries.set(key, (spilled, references)), self.evictable.remove(key), used.finish())

    def pinned(self, key: StoreKey, tree: InMemoryTree) -> "Store":
        """Return the store with a tree excluded from eviction, because a file cannot store it."""
        fits = key in self.evictable.entries and self.find(key) is tree
        return self._replace(evictable=self.evictable.remove(key)) if fits else self

    def next_victim(self, limit: int, exclude: StoreKey) -> tuple[StoreKey, InMemoryTree] | None:
        """Return the entry that must be moved from memory to a file next.

        Args:
            limit: the largest permitted memory usage of all entries, in bytes.
            exclude: the key of an entry that does not count as memory usage and is never moved.

        Returns:
            The key and the tensors of the oldest entry that can be moved. `None` if the memory usage is within the
                limit, or if no entry can be moved.
        """
        used = self.memory_usage(exclude)
        if sum(used.values()) - used[SPILLED] <= limit:
            return None
        for key in self.evictable:
            kept = self.find(key)
            if key != exclude and isinstance(kept, InMemoryTree):
                return key, kept
        return None

    def memory_usage(self, exclude: StoreKey) -> dict[str, int]:
        """Return the values of `used_bytes` without the tree of the key `exclude`."""
        used = {kind: self.used_bytes.get(kind, 0) for kind in ("version", "base", "client", SPILLED)}
        kept = self.find(exclude)
        if kept is not None:
            used[SPILLED if isinstance(kept, SpilledTree) else exclude[0]] -= kept.size
        return used
