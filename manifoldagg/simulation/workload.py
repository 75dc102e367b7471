"""The workload of a run: the construction of its scheduler and its availability trace."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Rule
from manifoldagg.federated.server.client_sampling import sampler_for, shorten
from manifoldagg.simulation.availability import Availability, AvailabilityChange
from manifoldagg.simulation.delays import Delay, Delays
from manifoldagg.simulation.empirical_delays import Empirical, assign_profiles
from manifoldagg.simulation.event_loop import EventLoop
from manifoldagg.simulation.federated_dataset import FederatedDataset
from manifoldagg.simulation.schedulers import IndependentClients, PriorityScheduler, Scheduler, SchedulerLike

__all__ = ["build_event_loop"]

SCHEDULER_STREAM, DELAY_STREAM, AVAILABILITY_STREAM, SAMPLING_STREAM = 1, 4, 5, 6
"""Streams of random numbers under the seed of a federation, beside those in `federated_dataset`."""
Clients: TypeAlias = Sequence[int]


def build_event_loop(
    federation: FederatedDataset,
    rule: Rule,
    *,
    scheduler: SchedulerLike = None,
    delays: Delays = None,
    availability: Availability = None,
    concurrency: int | None = None,
) -> EventLoop:
    """Build the event loop of a run from the arguments of [`run`][manifoldagg.simulation.run].

    Raises:
        ArgumentError: naming the one that does not fit, with the clients that it does not fit.
    """
    clients = federation.trainable_clients

    def stream(name: int) -> np.random.Generator:
        return np.random.default_rng([federation.seed, name])

    who = sampler_for(rule, clients, concurrency, stream(SAMPLING_STREAM))
    if scheduler is not None and delays is not None:
        raise ArgumentError("delays: expected either a scheduler or delays, got both")
    if delays is not None:
        made: object = IndependentClients(
            _resolve_delays(delays, clients, stream(DELAY_STREAM)), stream(SCHEDULER_STREAM)
        )
    elif scheduler is None:
        made = PriorityScheduler[int](len(clients), stream(SCHEDULER_STREAM))
    else:
        made = scheduler(clients, stream(SCHEDULER_STREAM)) if callable(scheduler) else scheduler
    if not isinstance(made, Scheduler):
        raise ArgumentError(f"scheduler: expected a Scheduler, or a function that makes one, got {short_repr(made)}")
    changes = availability(clients, stream(AVAILABILITY_STREAM)) if callable(availability) else availability or ()
    given: object = changes
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ArgumentError(
            f"availability: expected AvailabilityChanges, or a function that makes them, got {short_repr(changes)}"
        )
    idle = set(range(len(federation.train))).difference(clients)
    return EventLoop(
        clients, who, made, [c for c in changes if not (isinstance(c, AvailabilityChange) and c.client in idle)]
    )


def _resolve_delays(delays: Delays, clients: Clients, generator: np.random.Generator) -> Mapping[int, Delay] | Delay:
    """One delay for all, or one for each of them."""
    if isinstance(delays, str | Path):
        return assign_profiles(Empirical.from_csv(delays), clients, generator)
    made = delays(clients, generator) if callable(delays) else delays
    if isinstance(made, Delay):
        return made
    if not isinstance(made, Mapping):
        raise ArgumentError(f"delays: expected a Delay, or a mapping from clients, got {short_repr(made)}")
    missing = [client for client in clients if client not in made]
    if missing:
        raise ArgumentError(f"delays: expected one for each client that takes part; missing for {shorten(missing)}")
    return {client: made[client] for client in clients}
