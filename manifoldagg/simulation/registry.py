"""Schedulers, delays, who takes part and partitions by name, such as `priority:workers=2`: what `run` takes."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from manifoldagg.errors import ArgumentError
from manifoldagg.routing.plan import read_rates
from manifoldagg.simulation import delays as distributions
from manifoldagg.simulation import partitions
from manifoldagg.simulation.availability import Change, MakesParticipation, Participations, churn, read_changes
from manifoldagg.simulation.delays import Delay, Delays, Deterministic, Exponential, MakesDelays
from manifoldagg.simulation.empirical_delays import Empirical, assign
from manifoldagg.simulation.jackson import JacksonNetwork
from manifoldagg.simulation.partitions import Partition
from manifoldagg.simulation.priority import PriorityScheduler
from manifoldagg.simulation.replay import Replay
from manifoldagg.simulation.schedulers import IndependentClients, MakesScheduler, Scheduler
from manifoldagg.simulation.spec_parser import Kinds, Reader, arguments, build, kind, named, pick
from manifoldagg.simulation.trace import read_trace

__all__ = ["delays", "participation", "partition", "scenario", "scheduler"]

Clients: TypeAlias = Sequence[int]
SUFFIX = "_partition"
UNBOUNDED = 2**62


def scheduler(text: str) -> MakesScheduler:
    """The scheduler of that name, as a function of the clients and a generator.

    | name | options |
    | --- | --- |
    | `priority` | those of [`PriorityScheduler`][manifoldagg.simulation.PriorityScheduler] |
    | `independent` | `delays`, as of the function below, with a dot before theirs: one second a minibatch by default |
    | `jackson` | `rates`, a number or a CSV file as `manifoldagg route` takes; `tasks`, the most in flight |
    | `replay` | `path` of a trace |

    Raises:
        ArgumentError: naming what is not known, with the nearest right word, or what does not fit.

    Example:
        >>> make = scheduler("independent:delays=uniform,delays.low=1,delays.high=3")
        >>> clients = make(range(2), np.random.default_rng(0))
        >>> clients.dispatch(0, work=1)
        >>> 1 <= clients.next().time <= 3
        True
    """
    made: MakesScheduler = _read("scheduler", text, SCHEDULERS)
    return made


def delays(text: str) -> Delay | MakesDelays:
    """The delay of that name, for all clients, or with `csv` a function that gives each a measured device.

    The distributions of `manifoldagg.simulation.delays` in lower case, with their options; `csv` has those of
    [`Empirical.from_csv`][manifoldagg.simulation.Empirical.from_csv].

    Raises:
        ArgumentError: naming what is not known, with the nearest right word, or what does not fit.

    Example:
        >>> delays("exponential:mean=10")
        Exponential(mean=10.0)
    """
    made: Delay | MakesDelays = _read("delays", text, DELAYS | {"csv": kind(_measured)})
    return made


def participation(text: str) -> list[Change[int | str]] | MakesParticipation:
    """Who comes and goes: `churn:up=200,down=40,until=1000`, or `file:changes.csv`.

    `up` and `down` of [`churn`][manifoldagg.simulation.churn] are means of exponential times, or distributions by name
    (`up=uniform,up.low=100,up.high=300`). A file has the columns `time`, `client` and `kind`.

    Raises:
        ArgumentError: naming what is not known, with the nearest right word, or what does not fit.

    Example:
        >>> make = participation("churn:up=deterministic,up.seconds=3,down=1e9,until=5")
        >>> make([7], np.random.default_rng(0))
        [Change(time=3.0, client=7, kind='fail', lost=0)]
    """
    made: list[Change[int | str]] | MakesParticipation = _read("participation", text, PARTICIPATIONS)
    return made


def partition(text: str) -> Partition:
    """The partition of that name with its options, for `Federation.split`.

    They are those of `manifoldagg.simulation.partitions`: `dirichlet`, `iid`, `natural`, `shards`,
    `cyclic`, `disjoint`.

    Raises:
        ArgumentError: naming what is not known, with the nearest right word.

    Example:
        >>> split = partition("shards:shards=2")
        >>> [len(part) for part in split([0, 0, 1, 1, 2, 2], 3, generator=np.random.default_rng(0))]
        [2, 2, 2]
    """
    chosen = named("partition", text)
    known = {name.removesuffix(SUFFIX): name for name in partitions.__all__ if name.endswith(SUFFIX)}
    split = getattr(partitions, known[pick("partition", "partition", chosen.name, known)])
    taken = ("labels", "clients", "generator", "owners")
    return partial(split, **arguments(f"partition: {chosen.name}", split, chosen.options, taken=taken))


def scenario(
    scheduler: MakesScheduler | str | None, delays: Delays, participation: Participations | str
) -> dict[str, Any]:
    """What [`run`][manifoldagg.simulation.run] takes: strings are read, all else is as it was given.

    Raises:
        ArgumentError: as the functions above.

    Example:
        >>> scenario(None, "exponential:mean=10", None)
        {'scheduler': None, 'delays': Exponential(mean=10.0), 'participation': None}
    """
    given = {"scheduler": scheduler, "delays": delays, "participation": participation}
    return {name: READERS[name](value) if isinstance(value, str) else value for name, value in given.items()}


def _read(what: str, text: str, readers: Mapping[str, Reader]) -> Any:
    chosen = named(what, text)
    return readers[pick(what, what, chosen.name, readers)](f"{what}: {chosen.name}", chosen.options)


def _priority(where: str, options: Mapping[str, str]) -> MakesScheduler:
    given = arguments(where, PriorityScheduler, options, taken=("clients", "generator"))

    def make(clients: Clients, generator: np.random.Generator) -> Scheduler[int]:
        return PriorityScheduler(len(clients), generator, **given)

    build(where, partial(make, [0], np.random.default_rng(0)), {})
    return make


def _independent(delays: Delay | MakesDelays = Deterministic(1.0)) -> MakesScheduler:  # noqa: B008
    if not (isinstance(delays, Delay) or callable(delays)):
        raise ArgumentError(f"delays: expected one by name, such as exponential; got {delays!r}")

    def make(clients: Clients, generator: np.random.Generator) -> Scheduler[int]:
        return IndependentClients(delays(clients, generator) if callable(delays) else delays, generator)

    return make


def _jackson(rates: float | str, tasks: int = UNBOUNDED) -> MakesScheduler:
    common, by_name = _rates(rates)

    def make(clients: Clients, generator: np.random.Generator) -> Scheduler[int]:
        if missing := [client for client in clients if by_name and str(client) not in by_name]:
            raise ArgumentError(f"rates: {rates} has none for client {missing[0]}")
        speeds = [by_name.get(str(client), common) for client in range(max(clients) + 1)]
        # Who is asked next is not the network's matter here.
        return JacksonNetwork([1 / len(speeds)] * len(speeds), speeds, generator, tasks=tasks)

    if not by_name:
        make([0], np.random.default_rng(0))
    return make


def _rates(given: float | str) -> tuple[float, dict[str, float]]:
    """The rate of clients without one of their own, and those of a file, by the client's name."""
    if not isinstance(given, str):
        return given, {}
    read = read_rates(Path(given))
    return 1.0, dict(zip(read.names, read.rates.tolist(), strict=True))


def _replay(path: str) -> MakesScheduler:
    records = read_trace(path)

    def make(clients: Clients, generator: np.random.Generator) -> Scheduler[int]:
        return Replay(records)

    make([], np.random.default_rng(0))
    return make


def _measured(path: str, work: float = 1.0, size: float = 1.0) -> MakesDelays:
    profiles = Empirical.from_csv(path, work=work, size=size)

    def make(clients: Clients, generator: np.random.Generator) -> dict[int, Empirical]:
        return assign(profiles, clients, generator)

    return make


def _churn(up: float | Delay, down: float | Delay, until: float) -> MakesParticipation:
    here, gone = (stay if isinstance(stay, Delay) else Exponential(stay) for stay in (up, down))

    def make(clients: Clients, generator: np.random.Generator) -> Iterable[Change[int]]:
        return churn(clients, here, gone, until, generator)

    make([], np.random.default_rng(0))
    return make


def _delays() -> dict[str, Reader]:
    """The distributions there are, in lower case."""
    found = {name.lower(): getattr(distributions, name) for name in distributions.__all__}
    return {
        name: kind(made)
        for name, made in found.items()
        if isinstance(made, type) and issubclass(made, Delay) and not inspect.isabstract(made)
    }


DELAYS = _delays()
STAYS: Kinds = {"up": DELAYS, "down": DELAYS}
SCHEDULERS: Mapping[str, Reader] = {
    "priority": _priority,
    "independent": kind(_independent, kinds={"delays": DELAYS | {"csv": kind(_measured)}}),
    "jackson": kind(_jackson),
    "replay": kind(_replay),
}
PARTICIPATIONS: Mapping[str, Reader] = {"churn": kind(_churn, kinds=STAYS), "file": kind(read_changes)}
READERS = {"scheduler": scheduler, "delays": delays, "participation": participation}
