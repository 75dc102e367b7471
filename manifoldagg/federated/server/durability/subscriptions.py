"""Who watches: those who are told of every event in the books, one at a time and in order, whoever brings them."""

import logging
import threading
from collections.abc import Callable

from manifoldagg.errors import ArgumentError
from manifoldagg.federated.server.durability.persistent_map import Atomic
from manifoldagg.federated.server.events import Event, Watcher
from manifoldagg.federated.server.state import Books, Watching

__all__ = ["Watch"]

LOG = logging.getLogger("manifoldagg")


class Watch:
    """Tells of the events in the books.

    An event is entered with what it tells of, in the same instant, and leaves when everybody has heard of it: nothing
    is left out, and who is interrupted in between tells it again, to those who have not heard of it. Nobody waits:
    where somebody is telling already, in another thread or further out in this one, it is left to them.

    Args:
        books: of the server.
    """

    def __init__(self, books: Atomic[Books]) -> None:
        self._books = books
        # Held as long as its owner tells, whatever ends that.
        self._telling = Atomic(threading.Lock())
        # An event, and who has heard of it: written by who tells.
        self._heard: tuple[int, tuple[Watching, ...]] = (-1, ())

    def add(self, watcher: Watcher) -> Callable[[], None]:
        """Tell somebody of all that happens from now on; returns what ends that.

        Raises:
            ArgumentError: if it cannot be called.
        """
        if not callable(watcher):
            raise ArgumentError(f"callback: expected a function of an event, got {watcher!r}")

        def added(now: Books) -> tuple[Books, Watching]:
            mine = Watching(watcher, now.events.count)
            return now._replace(watching=(*now.watching, mine)), mine

        mine = self._books.update(added)

        def remove() -> None:
            def removed(now: Books) -> tuple[Books, None]:
                return now._replace(watching=tuple(one for one in now.watching if one is not mine)), None

            self._books.update(removed)
            self.tell()  # what is left for nobody

        return remove

    def note(self, kind: Callable[..., Event], **fields: object) -> None:
        """Enter an event, and tell of it."""
        self._books.update(lambda now: (now.noting(kind, **fields), None))
        self.tell()

    def tell(self) -> None:
        """Tell of all that nobody has heard of, unless somebody is doing so."""
        while self._books.value.events and self._told():
            pass  # what came when the last look was over

    def _told(self) -> bool:
        """Tell of all that there is, as the only one; whether it was up to us."""
        mine = threading.Lock()
        with mine:
            if self._telling.update(lambda held: (held, held) if held.locked() else (mine, mine)) is not mine:
                return False
            while events := self._books.value.events:
                self._tell_of(events.oldest, events[events.oldest])
        return True

    def _tell_of(self, number: int, event: Event) -> None:
        if self._heard[0] != number:
            self._heard = (number, ())
        for one in self._books.value.watching:
            heard = self._heard[1]
            # Who was told before may have ended what `one` hears.
            if one.since > number or _among(one, heard) or not _among(one, self._books.value.watching):
                continue
            try:
                one.watcher(event)
            except Exception:
                LOG.exception("on_event: %r raised, told of %s", one.watcher, event)
            self._heard = (number, (*heard, one))
        self._books.update(lambda now: (now._replace(events=now.events.without(number)), None))
        self._heard = (-1, ())


def _among(one: Watching, some: tuple[Watching, ...]) -> bool:
    """Whether it is one of them itself: two that are told alike are two."""
    return any(other is one for other in some)
