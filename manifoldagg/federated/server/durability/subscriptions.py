"""Subscriptions to the events of a server, and the ordered delivery of these events."""

import logging
import threading
from collections.abc import Callable

from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.server.durability.persistent_map import AtomicReference
from manifoldagg.federated.server.events import Callback, Event
from manifoldagg.federated.server.state import ServerState, Subscription

__all__ = ["EventDispatcher"]

LOG = logging.getLogger("manifoldagg")


class EventDispatcher:
    """Dispatcher that delivers the events of a server to its subscribers.

    - Order: each subscriber receives one event at a time, in the order of the changes. The server records a change and
      its event atomically, and removes the event after all subscribers have received it.
    - Time: the call that causes an event delivers it before the call returns. There is one exception. If another thread
      or an outer call is already delivering events, the call returns immediately, and the other thread or the outer
      call delivers the new event.
    - Exceptions: if a callback raises an `Exception`, the dispatcher logs it to `logging.getLogger("manifoldagg")` and
      continues. The change stays in effect.
    - Interrupts: `KeyboardInterrupt`, `SystemExit` and `asyncio.CancelledError` propagate to the caller, and the change
      stays in effect. The next call delivers the event again, starting with the interrupted callback. A callback that
      raises one of these exceptions for every event therefore blocks all later events until it is unsubscribed.
    """

    def __init__(self, state: AtomicReference[ServerState]) -> None:
        self._state = state
        # The thread that owns this lock delivers events. A `with` statement releases the lock even after an interrupt.
        self._drain_lock = AtomicReference(threading.Lock())
        # The number of the current event, and the subscribers that have received it. Only the owner of the lock writes
        # this value.
        self._delivered: tuple[int, tuple[Subscription, ...]] = (-1, ())

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Subscribe a callback to all later events, as `Server.on_event` describes.

        Returns:
            A function without arguments that unsubscribes the callback.

        Raises:
            ArgumentError: if `callback` is not callable.
        """
        if not callable(callback):
            raise ArgumentError(f"callback: expected a function of an event, got {short_repr(callback)}")

        def added(now: ServerState) -> tuple[ServerState, Subscription]:
            mine = Subscription(callback, now.pending_events.next_index)
            return now._replace(subscriptions=(*now.subscriptions, mine)), mine

        mine = self._state.update(added)

        def remove() -> None:
            def removed(now: ServerState) -> tuple[ServerState, None]:
                return now._replace(subscriptions=tuple(each for each in now.subscriptions if each is not mine)), None

            self._state.update(removed)
            self.drain()  # Without this call, events that only the removed subscriber had not received would remain.

        return remove

    def publish(self, kind: Callable[..., Event], **fields: object) -> None:
        """Record an event of a class with these fields, and deliver it."""
        self._state.update(lambda now: (now.with_event(kind, **fields), None))
        self.drain()

    def drain(self) -> None:
        """Deliver all pending events, unless another call is already delivering them."""
        while self._state.value.pending_events and self._drain_once():
            pass  # An event may have arrived after the last check and before the lock was released.

    def _drain_once(self) -> bool:
        """Deliver the pending events. Return `False` if another call is already delivering events."""
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
        for each in self._state.value.subscriptions:
            delivered = self._delivered[1]
            # A callback that was called before may have unsubscribed this callback.
            if each.first_event > index or each in delivered or each not in self._state.value.subscriptions:
                continue
            try:
                each.callback(event)
            except Exception:
                LOG.exception("on_event: the callback %r raised an exception for %s", each.callback, event)
            self._delivered = (index, (*delivered, each))
        self._state.update(lambda now: (now._replace(pending_events=now.pending_events.remove(index)), None))
        self._delivered = (-1, ())
