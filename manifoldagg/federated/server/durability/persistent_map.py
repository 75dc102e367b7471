"""Immutable values: a persistent map in insertion order, and an atomic reference to the latest value."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from immutables import Map

__all__ = ["AtomicReference", "PersistentOrderedMap"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")
R = TypeVar("R")
NEXT = 0
SPARSE_FACTOR = 8


class PersistentOrderedMap(Mapping[K, V]):
    """An immutable map in insertion order. A changed map shares its unchanged parts with the map before.

    Attributes:
        entries: the position and the value of each key, as a map without an order.
        next_index: the number of keys that were ever inserted.

    Example:
        >>> waiting = PersistentOrderedMap().set("a", 1).set("b", 2).set("a", 3)
        >>> dict(waiting), waiting.first_key, dict(waiting.remove("a"))
        ({'a': 3, 'b': 2}, 'a', {'b': 2})

    Cost: a change costs the logarithm of the size.
    """

    __slots__ = ("_first", "_keys", "entries", "next_index")

    def __init__(
        self,
        entries: Map[K, tuple[int, V]] | None = None,
        keys: Map[int, K] | None = None,
        first_index: int = 0,
        next_index: int = 0,
    ) -> None:
        self.entries: Map[K, tuple[int, V]] = Map() if entries is None else entries
        self._keys: Map[int, K] = Map() if keys is None else keys
        self._first = first_index
        self.next_index = next_index

    def __getitem__(self, key: K) -> V:
        return self.entries[key][1]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[K]:
        span = range(self._first, self.next_index)
        # If most positions are empty, sorting the others is faster than trying all.
        places = span if len(span) < SPARSE_FACTOR * len(self) else sorted(self._keys)
        return (self._keys[place] for place in places if place in self._keys)

    @property
    def first_key(self) -> K:
        """The first inserted key.

        Raises:
            KeyError: if the map is empty.
        """
        return self._keys[self._first]

    def set(self, key: K, value: V, limit: int | None = None) -> "PersistentOrderedMap[K, V]":
        """Return the map with `value` under `key`, reduced to its last `limit` keys; all of them for `None`.

        An existing key keeps its position.
        """
        entries, keys = self.entries.mutate(), self._keys.mutate()
        held = entries.get(key)
        place = self.next_index if held is None else held[0]
        first = self._first if keys else place
        entries[key] = (place, value)
        keys[place] = key
        while limit is not None and len(entries) > limit:
            del entries[keys.pop(first)]
            while keys and first not in keys:
                first += 1
        return PersistentOrderedMap(entries.finish(), keys.finish(), first, max(place + 1, self.next_index))

    def remove(self, *removed: K) -> "PersistentOrderedMap[K, V]":
        """Return the map without some keys.

        Raises:
            KeyError: if the map does not contain one of them.
        """
        entries, keys = self.entries.mutate(), self._keys.mutate()
        for key in removed:
            del keys[entries.pop(key)[0]]
        first = self._first
        # Each position is passed once in the life of a map.
        while keys and first not in keys:
            first += 1
        return PersistentOrderedMap(entries.finish(), keys.finish(), first, self.next_index)

    def tail(self, limit: int | None) -> "PersistentOrderedMap[K, V]":
        """Return the last `limit` inserted keys; all of them for `None`."""
        kept = self
        while limit is not None and len(kept.entries) > limit:
            kept = kept.remove(kept.first_key)
        return kept


class AtomicReference(Generic[T]):
    """An atomic reference to the latest of a sequence of immutable values. It never blocks.

    A change is computed from the latest value and takes effect in a single instruction of the interpreter. If another
    change came first, it is computed again. There is no lock, because a signal handler or a finaliser can run between
    any two instructions of the same thread and may read and change the value too. An exception of such code leaves
    either the value before the change or the value after it.

    Example:
        >>> state = AtomicReference((0, "open"))
        >>> state.update(lambda now: ((now[0] + 1, now[1]), "taken"))
        'taken'
        >>> state.value
        (1, 'open')
    """

    __slots__ = ("_node",)

    def __init__(self, value: T) -> None:
        # A value and its successor, which is stored under one key as soon as there is one.
        self._node: tuple[T, dict[int, Any]] = (value, {})

    @property
    def value(self) -> T:
        """The latest value."""
        node = self._node
        while (successor := node[1].get(NEXT)) is not None:
            node = successor
        return node[0]

    def update(self, change: Callable[[T], tuple[T, R]]) -> R:
        """Replace the value.

        Args:
            change: a pure function from the value to the next value and a result. It may be called again. If it returns
                the same value, nothing changes. Its exceptions propagate and change nothing.

        Returns:
            The result that belongs to the new value.
        """
        node = self._node
        while True:
            if (successor := node[1].get(NEXT)) is not None:
                node = successor
                continue
            try:
                value, result = change(node[0])
            except BaseException:
                # A stored exception keeps this frame, and the node would keep all later values.
                del node
                raise
            if value is node[0]:
                return result
            mine: tuple[T, dict[int, Any]] = (value, {})
            if node[1].setdefault(NEXT, mine) is mine:
                # If an interrupt or another thread prevents this assignment, readers follow the successors.
                self._node = mine
                return result
