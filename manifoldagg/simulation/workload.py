"""The scenario of a run: what makes its scheduler and its changes for the clients of a federation."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Rule
from manifoldagg.federated.server.client_sampling import sampler_for, shorten
from manifoldagg.simulation.availability import Change, Participations
from manifoldagg.simulation.delays import Delay, Delays
from manifoldagg.simulation.empirical_delays import Empirical, assign
from manifoldagg.simulation.event_loop import Course
from manifoldagg.simulation.federated_dataset import Federation
from manifoldagg.simulation.priority import PriorityScheduler
from manifoldagg.simulation.schedulers import IndependentClients, Scheduler, Schedulers

__all__ = ["course_of"]

SCHEDULE, DELAYS, CHANGES, ASKING = 1, 4, 5, 6
"""Streams of random numbers under the seed of a federation, beside those in `federation`."""
Clients: TypeAlias = Sequence[int]


def course_of(
    federation: Federation,
    rule: Rule,
    *,
    scheduler: Schedulers = None,
    delays: Delays = None,
    participation: Participations = None,
    tasks: int | None = None,
) -> Course:
    """The course of a run; arguments are those of [`run`][manifoldagg.simulation.run].

    Raises:
        ArgumentError: naming the one that does not fit, with the clients that it does not fit.
    """
    clients = federation.scheduled

    def stream(name: int) -> np.random.Generator:
        return np.random.default_rng([federation.seed, name])

    who = sampler_for(rule, clients, tasks, stream(ASKING))
    if scheduler is not None and delays is not None:
        raise ArgumentError("scheduler, delays: expected one of them; delays are those of clients that work alone")
    if delays is not None:
        made: object = IndependentClients(_delays(delays, clients, stream(DELAYS)), stream(SCHEDULE))
    elif scheduler is None:
        made = PriorityScheduler[int](len(clients), stream(SCHEDULE))
    else:
        made = scheduler(clients, stream(SCHEDULE)) if callable(scheduler) else scheduler
    if not isinstance(made, Scheduler):
        raise ArgumentError(f"scheduler: expected a Scheduler, or a function that makes one, got {made!r}")
    changes = participation(clients, stream(CHANGES)) if callable(participation) else participation or ()
    given: object = changes
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ArgumentError(f"participation: expected Changes, or a function that makes them, got {changes!r}")
    idle = set(range(len(federation.train))).difference(clients)
    return Course(clients, who, made, [c for c in changes if not (isinstance(c, Change) and c.client in idle)])


def _delays(delays: Delays, clients: Clients, generator: np.random.Generator) -> Mapping[int, Delay] | Delay:
    """One delay for all, or one for each of them."""
    if isinstance(delays, str | Path):
        return assign(Empirical.from_csv(delays), clients, generator)
    made = delays(clients, generator) if callable(delays) else delays
    if isinstance(made, Delay):
        return made
    if not isinstance(made, Mapping):
        raise ArgumentError(f"delays: expected a Delay, or a mapping from clients, got {made!r}")
    missing = [client for client in clients if client not in made]
    if missing:
        raise ArgumentError(f"delays: expected one for each client that takes part; none for {shorten(missing)}")
    return {client: made[client] for client in clients}
