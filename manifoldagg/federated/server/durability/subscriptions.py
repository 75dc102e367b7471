"""Who watches: those who are told of every event in the state, one at a time and in order, whoever brings them."""

import logging
import threading
from collections.abc import Callable

from manifoldagg.errors import ArgumentError
from manifoldagg.federated.server.durability.persistent_map import AtomicReference
from manifoldagg.federated.server.events import Callback, Event
from manifoldagg.federated.server.state import ServerState, Subscription

__all__ = ["EventDispatcher"]

LOG = logging.getLogger("manifoldagg")


class EventDispatcher:
    """Tells of the events in the state.

    An event is entered with what it tells of, in the same instant, and leaves when everybody has heard of it: nothing
    is left out, and who is interrupted in between tells it again, to those who have not heard of it. Nobody waits:
    where somebody is telling already, in another thread or further out in this one, it is left to them.

    Args:
        state: of the server.
    """

    def __init__(self, state: AtomicReference[ServerState]) -> None:
        self._state = state
        # Held as long as its owner tells, whatever ends that.
        self._drain_lock = AtomicReference(threading.Lock())
        # An event, and who has heard of it: written by who tells.
        self._delivered: tuple[int, tuple[Subscription, ...]] = (-1, ())

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Tell somebody of all that happens from now on; returns what ends that.

        Raises:
            ArgumentError: if it cannot be called.
        """
        if not callable(callback):
            raise ArgumentError(f"callback: expected a function of an event, got {callback!r}")

        def added(now: ServerState) -> tuple[ServerState, Subscription]:
            mine = Subscription(callback, now.pending_events.next_index)
            return now._replace(subscriptions=(*now.subscriptions, mine)), mine

        mine = self._state.update(added)

        def remove() -> None:
            def removed(now: ServerState) -> tuple[ServerState, None]:
                return now._replace(subscriptions=tuple(one for one in now.subscriptions if one is not mine)), None

            self._state.update(removed)
            self.drain()  # what is left for nobody

        return remove

    def publish(self, kind: Callable[..., Event], **fields: object) -> None:
        """Enter an event, and tell of it."""
        self._state.update(lambda now: (now.with_event(kind, **fields), None))
        self.drain()

    def drain(self) -> None:
        """Tell of all that nobody has heard of, unless somebody is doing so."""
        while self._state.value.pending_events and self._drain_once():
            pass  # what came when the last look was over

    def _drain_once(self) -> bool:
        """Tell of all that there is, as the only one; whether it was up to us."""
        mine = threading.Lock()
        with mine:
            if self._drain_lock.update(lambda held: (held, held) if held.locked() else (mine, mine)) is not mine:
                return False
            while events := self._state.value.pending_events:
                self._deliver(events.first_key, events[events.first_key])
        return True

    def _deliver(self, index: int, event: Event) -> None:
        if self._delivered[0] != index:
            self._delivered = (index, ())
        for one in self._state.value.subscriptions:
            heard = self._delivered[1]
            # Who was told before may have ended what `one` hears.
            if (
                one.first_event > index
                or _contains_identity(one, heard)
                or not _contains_identity(one, self._state.value.subscriptions)
            ):
                continue
            try:
                one.callback(event)
            except Exception:
                LOG.exception("on_event: %r raised, told of %s", one.callback, event)
            self._delivered = (index, (*heard, one))
        self._state.update(lambda now: (now._replace(pending_events=now.pending_events.remove(index)), None))
        self._delivered = (-1, ())


def _contains_identity(one: Subscription, some: tuple[Subscription, ...]) -> bool:
    """Whether it is one of them itself: two that are told alike are two."""
    return any(other is one for other in some)
