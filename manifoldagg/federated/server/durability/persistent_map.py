"""Immutable values: a persistent map in insertion order, and an atomic reference to the latest value."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Generic, TypeVar

from immutables import Map

__all__ = ["AtomicReference", "PersistentOrderedMap"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")
R = TypeVar("R")
NEXT = 0
SPARSE_FACTOR = 8


class PersistentOrderedMap(Mapping[K, V]):
    """An immutable map in insertion order.

    What it has in common with the map that it was made of is shared.

    Example:
        >>> waiting = PersistentOrderedMap().set("a", 1).set("b", 2).set("a", 3)
        >>> dict(waiting), waiting.first_key, dict(waiting.remove("a"))
        ({'a': 3, 'b': 2}, 'a', {'b': 2})

    Cost: of a change, the logarithm of the size.
    """

    __slots__ = ("_entries", "_first", "_keys", "_next")

    def __init__(
        self,
        entries: Map[K, tuple[int, V]] | None = None,
        keys: Map[int, K] | None = None,
        first_index: int = 0,
        next_index: int = 0,
    ) -> None:
        self._entries: Map[K, tuple[int, V]] = Map() if entries is None else entries
        self._keys: Map[int, K] = Map() if keys is None else keys
        self._first = first_index
        self._next = next_index

    def __getitem__(self, key: K) -> V:
        return self._entries[key][1]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        span = range(self._first, self._next)
        # Where most places are empty, those that are not are put in order.
        places = span if len(span) < SPARSE_FACTOR * len(self) else sorted(self._keys)
        return (self._keys[place] for place in places if place in self._keys)

    @property
    def next_index(self) -> int:
        """The number of keys that were ever inserted."""
        return self._next

    @property
    def first_key(self) -> K:
        """The first inserted key.

        Raises:
            KeyError: if there is none.
        """
        return self._keys[self._first]

    def set(self, key: K, value: V) -> "PersistentOrderedMap[K, V]":
        """Return the map with `value` under `key`, which keeps its position if it exists."""
        held = self._entries.get(key)
        if held is not None:
            entries = self._entries.set(key, (held[0], value))
            return PersistentOrderedMap(entries, self._keys, self._first, self._next)
        place = self._next
        first = self._first if self._keys else place
        return PersistentOrderedMap(
            self._entries.set(key, (place, value)), self._keys.set(place, key), first, place + 1
        )

    def remove(self, key: K) -> "PersistentOrderedMap[K, V]":
        """Return the map without `key`, which must exist."""
        place, _ = self._entries[key]
        keys = self._keys.delete(place)
        first = self._first
        # Each place is passed once in the life of a map.
        while keys and first not in keys:
            first += 1
        return PersistentOrderedMap(self._entries.delete(key), keys, first, self._next)

    def tail(self, limit: int | None) -> "PersistentOrderedMap[K, V]":
        """Return the last `limit` inserted keys; all of them for `None`."""
        kept = self
        while limit is not None and len(kept) > limit:
            kept = kept.remove(kept.first_key)
        return kept


class _VersionNode(Generic[T]):
    """A value and its successor."""

    __slots__ = ("successor", "value")

    def __init__(self, value: T) -> None:
        self.value = value
        self.successor: dict[int, _VersionNode[T]] = {}


class AtomicReference(Generic[T]):
    """An atomic reference to the latest of a sequence of immutable values. It never blocks.

    A change is made of the value that is there and takes effect in a single instruction of the interpreter, unless
    another came first: then it is made anew. There is no lock, so that a signal handler or a finaliser, which may run
    between any two instructions of the same thread, can read and change it too; and an exception from there finds the
    value before or the value after.

    Example:
        >>> state = AtomicReference((0, "open"))
        >>> state.update(lambda now: ((now[0] + 1, now[1]), "taken"))
        'taken'
        >>> state.value
        (1, 'open')
    """

    __slots__ = ("_node",)

    def __init__(self, value: T) -> None:
        self._node = _VersionNode(value)

    @property
    def value(self) -> T:
        """The latest value."""
        return self._last_node().value

    def update(self, change: Callable[[T], tuple[T, R]]) -> R:
        """Replace the value.

        Args:
            change: from the value to the next and a result. It may be called again and must change nothing itself;
                where it returns the same value, nothing happens. What it raises comes out, and nothing has changed.

        Returns:
            The result that belongs to the value that was put.
        """
        while True:
            link = self._last_node()
            try:
                value, result = change(link.value)
            except BaseException:
                # Who keeps the error keeps this frame, and the link would keep all that is to come.
                del link
                raise
            if value is link.value:
                return result
            mine = _VersionNode(value)
            if link.successor.setdefault(NEXT, mine) is mine:
                # Should this not be reached, or be overtaken, readers go on from link to link.
                self._node = mine
                return result

    def _last_node(self) -> _VersionNode[T]:
        link = self._node
        while (after := link.successor.get(NEXT)) is not None:
            link = after
        return link
