"""The store of a server: models and client states in memory or in files, as an immutable value."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple

from immutables import Map

from manifoldagg.federated.pytrees import Tree, size_of
from manifoldagg.federated.server.durability.persistent_map import PersistentOrderedMap
from manifoldagg.federated.server.durability.spill import SpilledTree

__all__ = ["InMemoryTree", "Store", "StoreKey", "StoredTree"]

StoreKey = tuple[str, Hashable]
"""A kind (`"version"`, `"base"` or `"client"`) and a name."""
SPILLED = "spilled"


class InMemoryTree:
    """Tree in memory, which must not be modified.

    Args:
        tree: the tree.
        on_free: a function that receives the tree when the last reference to this object is deleted.
        size: the bytes of the tree; `None` to compute them.
    """

    __slots__ = ("_on_free", "size", "tree")

    def __init__(self, tree: Tree, on_free: Callable[[Tree], object] | None = None, size: int | None = None) -> None:
        self.tree = tree
        self.size = size_of(tree) if size is None else size
        self._on_free = on_free

    def load(self, *, copy: bool = True) -> Tree:
        """Return the tree without a copy."""
        return self.tree

    def __del__(self) -> None:
        freed = getattr(self, "_on_free", None)
        if freed is not None:
            freed(self.tree)


StoredTree = InMemoryTree | SpilledTree


class Store(NamedTuple):
    """Immutable store of trees by key, with reference counts. Every change returns a new store.

    Attributes:
        entries: the tree and the number of references of each key.
        evictable: the keys of the trees that can be evicted to files, the oldest first.
        used_bytes: the bytes in memory by kind, and the bytes in files as `"spilled"`.

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
        """Return the stored tree of a key; `None` if the key does not exist."""
        held = self.entries.get(key)
        return None if held is None else held[0]

    def load(self, key: StoreKey | None, *, copy: bool = True) -> Tree:
        """Load the tree of a key, as in `SpilledTree.load`; return `None` if the key does not exist."""
        stored = None if key is None else self.find(key)
        return None if stored is None else stored.load(copy=copy)

    def retain(self, key: StoreKey, tree: StoredTree | None = None) -> "Store":
        """Return the store with one more reference to a key. A new key requires `tree`."""
        return self.replaced((), {key: tree})

    def release(self, key: StoreKey) -> "Store":
        """Return the store with one less reference to a key."""
        return self.replaced((key,), {})

    def replaced(self, released: Iterable[StoreKey], retained: Mapping[StoreKey, StoredTree | None]) -> "Store":
        """Return the store with one less reference to each released key, and then one more to each retained key.

        A key may be released several times. A new key requires a tree; other trees are ignored.
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
        """Return the store with a tree replaced by its file, unless another thread has replaced the tree."""
        found, references = self.entries.get(key, (None, 0))
        if found is not tree:
            return self
        used = self.used_bytes.mutate()
        used[key[0]] -= tree.size
        used[SPILLED] = used.get(SPILLED, 0) + spilled.size
        return Store(self.entries.set(key, (spilled, references)), self.evictable.remove(key), used.finish())

    def pinned(self, key: StoreKey, tree: InMemoryTree) -> "Store":
        """Return the store after excluding a tree from eviction."""
        fits = key in self.evictable.entries and self.find(key) is tree
        return self._replace(evictable=self.evictable.remove(key)) if fits else self

    def next_victim(self, limit: int, exclude: StoreKey) -> tuple[StoreKey, InMemoryTree] | None:
        """Return the oldest evictable tree if all trees except `exclude` use more than `limit` bytes of memory."""
        used = self.memory_usage(exclude)
        if sum(used.values()) - used[SPILLED] <= limit:
            return None
        for key in self.evictable:
            kept = self.find(key)
            if key != exclude and isinstance(kept, InMemoryTree):
                return key, kept
        return None

    def memory_usage(self, exclude: StoreKey) -> dict[str, int]:
        """Return the bytes in memory by kind and the bytes in files, without the tree of one key."""
        used = {kind: self.used_bytes.get(kind, 0) for kind in ("version", "base", "client", SPILLED)}
        kept = self.find(exclude)
        if kept is not None:
            used[SPILLED if isinstance(kept, SpilledTree) else exclude[0]] -= kept.size
        return used
