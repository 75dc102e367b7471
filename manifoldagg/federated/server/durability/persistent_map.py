"""An immutable, ordered map, and an atomic reference to an immutable value."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
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
    """Immutable map that keeps its keys in insertion order.

    A change returns a new map, which shares its unchanged parts with the old map. Each change therefore takes only
    logarithmic time.

    Attributes:
        entries: the position of each key in the insertion order, and its value.
        next_index: the position that the next new key receives.

    Example:
        >>> waiting = PersistentOrderedMap().set("a", 1).set("b", 2).set("a", 3)
        >>> dict(waiting), waiting.first_key, dict(waiting.remove("a"))
        ({'a': 3, 'b': 2}, 'a', {'b': 2})
    """

    __slots__ = ("_first", "_keys", "entries", "next_index")

    def __init__(
        self,
        entries: Map[K, tuple[int, V]] = Map(),
        keys: Map[int, K] = Map(),
        first_index: int = 0,
        next_index: int = 0,
    ) -> None:
        self.entries = entries
        self._keys = keys
        self._first = first_index
        self.next_index = next_index

    @classmethod
    def of(cls, pairs: Iterable[tuple[K, V]], first_index: int = 0) -> "PersistentOrderedMap[K, V]":
        """Return a map of pairs with distinct keys. The first pair has the position `first_index`."""
        placed = [*enumerate(pairs, first_index)]
        entries = Map({key: (place, value) for place, (key, value) in placed})
        keys = Map({place: key for place, (key, _) in placed})
        return cls(entries, keys, first_index, first_index + len(placed))

    def __getitem__(self, key: K) -> V:
        return self.entries[key][1]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[K]:
        span = range(self._first, self.next_index)
        # If most positions are empty, sorting the occupied positions is faster than a loop over all positions.
        places = span if len(span) < SPARSE_FACTOR * len(self) else sorted(self._keys)
        return (self._keys[place] for place in places if place in self._keys)

    @property
    def first_key(self) -> K:
        """The first key in insertion order. If the map is empty, the property raises `KeyError`."""
        return self._keys[self._first]

    def set(self, key: K, value: V, limit: int | None = None) -> "PersistentOrderedMap[K, V]":
        """Return a new map in which `key` has the value `value`. The original map does not change.

        A new key is added at the end, and an existing key keeps its position. If the new map has more than `limit`
        keys, the method removes the keys that were added first. `None` disables this limit.
        """
        entries = self.entries.mutate()
        keys = self._keys.mutate()
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
        """Return the map without some keys. If a key is missing, raise `KeyError`."""
        entries = self.entries.mutate()
        keys = self._keys.mutate()
        for key in removed:
            del keys[entries.pop(key)[0]]
        first = self._first
        # The loop takes constant time on average, because it skips each position only once.
        while keys and first not in keys:
            first += 1
        return PersistentOrderedMap(entries.finish(), keys.finish(), first, self.next_index)


class AtomicReference(Generic[T]):
    """Reference to an immutable value, which threads can read and replace atomically without a lock.

    A lock is not suitable, because a signal handler or a finaliser may interrupt the thread that owns the lock. If the
    handler also needed the lock, it would wait forever. A change therefore takes effect in one instruction of the
    interpreter. If another thread has changed the value in the meantime, the change is computed again from the new
    value.

    Example:
        >>> state = AtomicReference((0, "open"))
        >>> state.update(lambda now: ((now[0] + 1, now[1]), "taken"))
        'taken'
        >>> state.value
        (1, 'open')
    """

    __slots__ = ("_node",)

    def __init__(self, value: T) -> None:
        # A node is a pair of a value and a dict. After the value was replaced, the dict contains the next node.
        self._node: tuple[T, dict[int, Any]] = (value, {})

    @property
    def value(self) -> T:
        """The latest value."""
        node = self._node
        while (successor := node[1].get(NEXT)) is not None:
            node = successor
        return node[0]

    def update(self, change: Callable[[T], tuple[T, R]]) -> R:
        """Replace the value, and return a result of the change.

        Args:
            change: a function that receives the value, and returns the next value and a result. It must have no side
                effects, because it may be called several times. If it raises an exception, the value is unchanged, and
                the exception propagates.
        """
        node = self._node
        while True:
            if (successor := node[1].get(NEXT)) is not None:
                node = successor
                continue
            try:
                value, result = change(node[0])
            except BaseException:
                # A stored exception refers to this frame and to its node, which would keep all later values in memory.
                del node
                raise
            if value is node[0]:
                return result
            mine: tuple[T, dict[int, Any]] = (value, {})
            if node[1].setdefault(NEXT, mine) is mine:
                # An interrupt may prevent this assignment. The value is correct nevertheless, because readers follow
                # the successors of a node.
                self._node = mine
                return result
