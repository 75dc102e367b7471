"""Registry of schedulers, delays, availability traces and partitions by name, such as `priority:workers=2`."""

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
from manifoldagg.simulation.availability import (
    Availability,
    AvailabilityChange,
    AvailabilityFactory,
    churn,
    read_changes,
)
from manifoldagg.simulation.delays import Delay, DelayFactory, Delays, Deterministic, Exponential
from manifoldagg.simulation.empirical_delays import Empirical, assign_profiles
from manifoldagg.simulation.jackson import JacksonNetwork
from manifoldagg.simulation.partitions import Partition
from manifoldagg.simulation.priority import PriorityScheduler
from manifoldagg.simulation.replay import ReplayScheduler
from manifoldagg.simulation.schedulers import IndependentClients, Scheduler, SchedulerFactory
from manifoldagg.simulation.spec_parser import OptionReaders, Reader, build, choose, parse_kwargs, parse_spec, reader
from manifoldagg.simulation.trace import read_trace

__all__ = ["availability", "delays", "parse_workload", "partition", "scheduler"]

Clients: TypeAlias = Sequence[int]
SUFFIX = "_partition"
UNBOUNDED = 2**62


def scheduler(text: str) -> SchedulerFactory:
    """Return the named scheduler as a function of the clients and a generator.

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
    made: SchedulerFactory = _parse("scheduler", text, SCHEDULER_READERS)
    return made


def delays(text: str) -> Delay | DelayFactory:
    """Return the named delay for all clients, or with `csv` a function that assigns a measured device to each client.

    The distributions of `manifoldagg.simulation.delays` in lower case, with their options; `csv` has those of
    [`Empirical.from_csv`][manifoldagg.simulation.Empirical.from_csv].

    Raises:
        ArgumentError: naming what is not known, with the nearest right word, or what does not fit.

    Example:
        >>> delays("exponential:mean=10")
        Exponential(mean=10.0)
    """
    made: Delay | DelayFactory = _parse("delays", text, DELAY_READERS | {"csv": reader(_empirical)})
    return made


def availability(text: str) -> list[AvailabilityChange[int | str]] | AvailabilityFactory:
    """Return the named availability: `churn:up=200,down=40,until=1000`, or `file:changes.csv`.

    `up` and `down` of [`churn`][manifoldagg.simulation.churn] are means of exponential times, or distributions by name
    (`up=uniform,up.low=100,up.high=300`). A file has the columns `time`, `client` and `kind`.

    Raises:
        ArgumentError: naming what is not known, with the nearest right word, or what does not fit.

    Example:
        >>> make = availability("churn:up=deterministic,up.seconds=3,down=1e9,until=5")
        >>> make([7], np.random.default_rng(0))
        [AvailabilityChange(time=3.0, client=7, kind='fail', lost_tasks=0)]
    """
    made: list[AvailabilityChange[int | str]] | AvailabilityFactory = _parse("availability", text, AVAILABILITY_READERS)
    return made


def partition(text: str) -> Partition:
    """Return the named partition with its options, for `FederatedDataset.split`.

    They are those of `manifoldagg.simulation.partitions`: `dirichlet`, `iid`, `natural`, `shards`,
    `cyclic`, `disjoint`.

    Raises:
        ArgumentError: naming what is not known, with the nearest right word.

    Example:
        >>> split = partition("shards:shards_per_client=2")
        >>> [len(part) for part in split([0, 0, 1, 1, 2, 2], 3, generator=np.random.default_rng(0))]
        [2, 2, 2]
    """
    chosen = parse_spec("partition", text)
    known = {name.removesuffix(SUFFIX): name for name in partitions.__all__ if name.endswith(SUFFIX)}
    split = getattr(partitions, known[choose("partition", "partition", chosen.name, known)])
    taken = ("labels", "clients", "generator", "user_ids")
    return partial(split, **parse_kwargs(f"partition: {chosen.name}", split, chosen.options, excluded=taken))


def parse_workload(
    scheduler: SchedulerFactory | str | None, delays: Delays, availability: Availability | str
) -> dict[str, Any]:
    """Parse the string arguments of [`run`][manifoldagg.simulation.run]; other values are unchanged.

    Raises:
        ArgumentError: as the functions above.

    Example:
        >>> parse_workload(None, "exponential:mean=10", None)
        {'scheduler': None, 'delays': Exponential(mean=10.0), 'availability': None}
    """
    given = {"scheduler": scheduler, "delays": delays, "availability": availability}
    return {name: WORKLOAD_READERS[name](value) if isinstance(value, str) else value for name, value in given.items()}


def _parse(where: str, text: str, readers: Mapping[str, Reader]) -> Any:
    chosen = parse_spec(where, text)
    return readers[choose(where, where, chosen.name, readers)](f"{where}: {chosen.name}", chosen.options)


def _priority(where: str, options: Mapping[str, str]) -> SchedulerFactory:
    given = parse_kwargs(where, PriorityScheduler, options, excluded=("clients", "generator"))

    def make(clients: Clients, generator: np.random.Generator) -> Scheduler[int]:
        return PriorityScheduler(len(clients), generator, **given)

    build(where, partial(make, [0], np.random.default_rng(0)), {})
    return make


def _independent(delays: Delay | DelayFactory = Deterministic(1.0)) -> SchedulerFactory:  # noqa: B008
    if not (isinstance(delays, Delay) or callable(delays)):
        raise ArgumentError(f"delays: expected one by name, such as exponential; got {delays!r}")

    def make(clients: Clients, generator: np.random.Generator) -> Scheduler[int]:
        return IndependentClients(delays(clients, generator) if callable(delays) else delays, generator)

    return make


def _jackson(rates: float | str, concurrency: int = UNBOUNDED) -> SchedulerFactory:
    common, by_name = _read_rates(rates)

    def make(clients: Clients, generator: np.random.Generator) -> Scheduler[int]:
        if missing := [client for client in clients if by_name and str(client) not in by_name]:
            raise ArgumentError(f"rates: {rates} has no rate for client {missing[0]}")
        speeds = [by_name.get(str(client), common) for client in range(max(clients) + 1)]
        # Who is asked next is not the network's matter here.
        return JacksonNetwork([1 / len(speeds)] * len(speeds), speeds, generator, concurrency=concurrency)

    if not by_name:
        make([0], np.random.default_rng(0))
    return make


def _read_rates(given: float | str) -> tuple[float, dict[str, float]]:
    """The rate of clients without one of their own, and those of a file, by the client's name."""
    if not isinstance(given, str):
        return given, {}
    read = read_rates(Path(given))
    return 1.0, dict(zip(read.names, read.rates.tolist(), strict=True))


def _replay(path: str) -> SchedulerFactory:
    records = read_trace(path)

    def make(clients: Clients, generator: np.random.Generator) -> Scheduler[int]:
        return ReplayScheduler(records)

    make([], np.random.default_rng(0))
    return make


def _empirical(path: str, work: float = 1.0, size_ratio: float = 1.0) -> DelayFactory:
    profiles = Empirical.from_csv(path, work=work, size_ratio=size_ratio)

    def make(clients: Clients, generator: np.random.Generator) -> dict[int, Empirical]:
        return assign_profiles(profiles, clients, generator)

    return make


def _churn(up: float | Delay, down: float | Delay, until: float) -> AvailabilityFactory:
    here, gone = (stay if isinstance(stay, Delay) else Exponential(stay) for stay in (up, down))

    def make(clients: Clients, generator: np.random.Generator) -> Iterable[AvailabilityChange[int]]:
        return churn(clients, here, gone, until, generator)

    make([], np.random.default_rng(0))
    return make


def _delay_readers() -> dict[str, Reader]:
    """The distributions there are, in lower case."""
    found = {name.lower(): getattr(distributions, name) for name in distributions.__all__}
    return {
        name: reader(made)
        for name, made in found.items()
        if isinstance(made, type) and issubclass(made, Delay) and not inspect.isabstract(made)
    }


DELAY_READERS = _delay_readers()
DURATION_READERS: OptionReaders = {"up": DELAY_READERS, "down": DELAY_READERS}
SCHEDULER_READERS: Mapping[str, Reader] = {
    "priority": _priority,
    "independent": reader(_independent, option_readers={"delays": DELAY_READERS | {"csv": reader(_empirical)}}),
    "jackson": reader(_jackson),
    "replay": reader(_replay),
}
AVAILABILITY_READERS: Mapping[str, Reader] = {
    "churn": reader(_churn, option_readers=DURATION_READERS),
    "file": reader(read_changes),
}
WORKLOAD_READERS = {"scheduler": scheduler, "delays": delays, "availability": availability}
