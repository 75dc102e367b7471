"""The store: what a server keeps for others, in memory or in files, as a value that is replaced and never written."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from immutables import Map

from manifoldagg.federated.pytrees import Tree, size_of
from manifoldagg.federated.server.durability.persistent_map import Ordered
from manifoldagg.federated.server.durability.spill import Filed

__all__ = ["Kept", "Key", "Store"]

Key = tuple[str, Hashable]
"""A kind (`"version"`, `"base"`, `"client"`) and a name."""
SPILLED = "spilled"


class Kept:
    """A tree in memory. Whoever needs it has a reference; with the last of them it is over.

    Args:
        tree: nobody writes it.
        freed: gets the tree when nobody needs it any more.

    Example:
        >>> import torch
        >>> spare = []
        >>> kept = ParamState(torch.zeros(2), freed=spare.append)
        >>> kept.size, spare
        (8, [])
        >>> del kept
        >>> spare
        [tensor([0., 0.])]
    """

    __slots__ = ("_freed", "size", "tree")

    def __init__(self, tree: Tree, freed: Callable[[Tree], object] | None = None) -> None:
        self.tree = tree
        self.size = size_of(tree)
        self._freed = freed

    def load(self) -> Tree:
        """The tree."""
        return self.tree

    def __del__(self) -> None:
        freed = getattr(self, "_freed", None)
        if freed is not None:
            freed(self.tree)


class Store(NamedTuple):
    """Trees by key, each with how many hold it. Every change is a new store that shares what it can.

    Attributes:
        places: each tree, and how many hold it.
        movable: keys of what is in memory and may go to a file, the oldest first: to find it no one else is asked.
        used: bytes by kind, in memory; those in files are `"spilled"`.

    Example:
        >>> import torch
        >>> first = Store().held(("version", 0), ParamState(torch.zeros(2)))
        >>> both = first.held(("version", 0))
        >>> ("version", 0) in both.released(("version", 0)), ("version", 0) in first.released(("version", 0))
        (True, False)
    """

    places: Map[Key, tuple[Kept | Filed, int]] = Map()
    movable: Ordered[Key, None] = Ordered()
    used: Map[str, int] = Map()

    def __contains__(self, key: object) -> bool:
        return key in self.places

    def find(self, key: Key) -> Kept | Filed | None:
        """What is kept under a key, if anything."""
        held = self.places.get(key)
        return None if held is None else held[0]

    def load(self, key: Key | None) -> Tree:
        """The tree under a key, on its devices; `None` where there is none.

        Raises:
            SpillError: if its file is not what was written.
        """
        held = None if key is None else self.places.get(key)
        return None if held is None else held[0].load()

    def held(self, key: Key, kept: Kept | Filed | None = None) -> "Store":
        """With one more holder of what is under a key; of `kept`, where nothing is."""
        there = self.places.get(key)
        if there is not None:
            return self._replace(places=self.places.set(key, (there[0], there[1] + 1)))
        if kept is None:
            raise KeyError(key)
        movable = self.movable.put(key, None) if isinstance(kept, Kept) and kept.size else self.movable
        return Store(self.places.set(key, (kept, 1)), movable, self._counted(key, kept, 1))

    def released(self, key: Key | None) -> "Store":
        """With one holder less, where there is something to let go of."""
        if key is None:
            return self
        kept, holders = self.places[key]
        if holders > 1:
            return self._replace(places=self.places.set(key, (kept, holders - 1)))
        movable = self.movable.without(key) if key in self.movable else self.movable
        return Store(self.places.delete(key), movable, self._counted(key, kept, -1))

    def moved(self, key: Key, kept: Kept, filed: Filed) -> "Store":
        """With a tree in its file; the same store where something else is kept there by now."""
        there = self.places.get(key)
        if there is None or there[0] is not kept:
            return self
        used = self._counted(key, kept, -1)
        moved = Store(self.places.set(key, (filed, there[1])), self.movable.without(key), used)
        return moved._replace(used=moved._counted(key, filed, 1))

    def stuck(self, key: Key, kept: Kept) -> "Store":
        """With a tree that stays in memory for good."""
        fits = key in self.movable and self.find(key) is kept
        return self._replace(movable=self.movable.without(key)) if fits else self

    def over(self, limit: int, without: Key) -> tuple[Key, Kept] | None:
        """The oldest tree that may go to a file, where those but `without` take more than `limit` bytes of memory."""
        used = self.usage(without)
        if sum(used.values()) - used[SPILLED] <= limit:
            return None
        for key in self.movable:
            kept = self.find(key)
            if key != without and isinstance(kept, Kept):
                return key, kept
        return None

    def usage(self, without: Key) -> dict[str, int]:
        """Bytes in memory by kind, but for one key, and bytes in files."""
        used = {kind: self.used.get(kind, 0) for kind in ("version", "base", "client", SPILLED)}
        kept = self.find(without)
        if kept is not None:
            used[_kind(without, kept)] -= kept.size
        return used

    def _counted(self, key: Key, kept: Kept | Filed, sign: int) -> Map[str, int]:
        kind = _kind(key, kept)
        return self.used.set(kind, self.used.get(kind, 0) + sign * kept.size) if kept.size else self.used


def _kind(key: Key, kept: Any) -> str:
    return SPILLED if isinstance(kept, Filed) else key[0]
