"""Functions that build schedulers, delays, availability changes and partitions from text like `priority:workers=2`.

The text is a name with options. If the name is unknown or an option is invalid, the functions raise an `ArgumentError`.
For an unknown name, the message suggests the nearest known name.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from manifoldagg._validation import check_choice, check_count, renamed_arguments, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.spec_parser import (
    OptionReaders,
    Reader,
    bind,
    build,
    choose,
    error_context,
    import_object,
    parse_literal,
    parse_spec,
    parse_value,
    reader,
    user_reader,
)
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
from manifoldagg.simulation.delays import Delay, DelayFactory, Delays, Empirical, Exponential, assign_profiles
from manifoldagg.simulation.fitted_delays import FAMILIES, PerTask, fit_profiles
from manifoldagg.simulation.jackson import JacksonNetwork
from manifoldagg.simulation.partitions import Partition
from manifoldagg.simulation.schedulers import IndependentClients, PriorityScheduler, Scheduler, SchedulerFactory
from manifoldagg.simulation.trace import ReplayScheduler, read_trace

__all__ = ["availability", "delays", "parse_workload", "partition", "referenced_files", "scheduler"]

Clients: TypeAlias = Sequence[int]
SUFFIX = "_partition"
UNBOUNDED = 2**62


def scheduler(text: str) -> SchedulerFactory:
    """Build a function that creates a scheduler, from a text such as `independent:delays=uniform,delays.low=1`.

    The function has two arguments: the clients and a random generator. The text has one of these names:

    | name | options |
    | --- | --- |
    | `priority` | the options of [`PriorityScheduler`][manifoldagg.simulation.PriorityScheduler] |
    | `independent` | `delays`: a name as in the function `delays`, with options after a dot; by default one second |
    | `jackson` | `rates`: a number, or a CSV file as for `manifoldagg route`; `concurrency` |
    | `replay` | `path`: a trace file |
    | `module:name` | the arguments of your own function, except for the clients and the generator |

    The options of a delay have the prefix `delays` and a dot, such as `delays.low=1` for the delay `uniform`. The rates
    are in units of work per second. `concurrency` is the largest number of tasks in flight, by default unlimited.

    Example:
        >>> make = scheduler("independent:delays=uniform,delays.low=1,delays.high=3")
        >>> clients = make(range(2), np.random.default_rng(0))
        >>> clients.dispatch(0, work=1)
        >>> 1 <= clients.next().time <= 3
        True
    """
    made: SchedulerFactory = parse_value("scheduler", text, SCHEDULER_READERS)
    return made


def delays(text: str) -> Delay | DelayFactory:
    """Return the named delay.

    - The names of the distributions of `manifoldagg.simulation.delays` are written in lower case, with their options.
      The delay applies to all clients.
    - `csv` returns a function that assigns a measured device to each client. Its options are the arguments of
      [`Empirical.from_csv`][manifoldagg.simulation.Empirical.from_csv].
    - `measured:FILE,as=FAMILY` fits a distribution to each measured device, and assigns a fitted distribution to each
      client. Its options are the arguments of [`fit_profiles`][manifoldagg.simulation.fit_profiles], with `as` for
      `family`.
    - `pertask:delay=NAME` draws one time for each task, whatever its work. Options of the distribution follow a dot:
      `pertask:delay=lognormal,delay.mean=10,delay.deviation=5`.
    - `module:name` is your own delay, a class or a function that returns a delay, or a function of the clients and a
      generator.

    Example:
        >>> delays("exponential:mean=10")
        Exponential(mean=10.0)
    """
    made: Delay | DelayFactory = parse_value("delays", text, DELAY_READERS | MEASURED_READERS | USER_DELAYS)
    return made


def availability(text: str) -> list[AvailabilityChange[int | str]] | AvailabilityFactory:
    """Parse a text that specifies when clients become available or unavailable.

    The text has one of these forms:

    - `churn:up=200,down=40,until=1000` generates random times with [`churn`][manifoldagg.simulation.churn]. Each client
      is repeatedly available and then unavailable. By default, both durations have exponential distributions with the
      means `up` and `down` in seconds. An option can also name another distribution, such as
      `up=uniform,up.low=100,up.high=300`.
    - `file:changes.csv` reads a CSV file with the columns `time`, `client` and `kind`.
    - `module:name` is your own list of changes, or your own function of the clients and a generator.

    Returns:
        A list of changes, or a function of the clients and a generator that returns such a list.

    Example:
        >>> make = availability("churn:up=deterministic,up.seconds=3,down=1e9,until=5")
        >>> make([7], np.random.default_rng(0))
        [AvailabilityChange(time=3.0, client=7, kind='fail', lost_tasks=0)]
    """
    made: list[AvailabilityChange[int | str]] | AvailabilityFactory = parse_value(
        "availability", text, AVAILABILITY_READERS
    )
    return made


def partition(text: str) -> Partition:
    """Return the named partition with its options, for `FederatedDataset.split`.

    - The names are `dirichlet`, `iid`, `natural`, `grouped`, `sizes`, `shards`, `cyclic` and `disjoint`, for the
      functions in `manifoldagg.simulation.partitions`.
    - `natural:clients=30` is the partition `grouped` for this number of clients: every owner with all its samples goes
      to one client, and no sample is dropped. It has the option `balance`.
    - The option `weights` of `sizes` is `linear`, `quadratic`, `equal`, numbers joined by `+` (`weights=1+2+5`), or
      `module:name`, your own function of the index of a client.
    - `module:name` is your own function of the labels, the number of clients and `generator=`, with its options.

    Example:
        >>> split = partition("shards:shards_per_client=2")
        >>> [len(part) for part in split([0, 0, 1, 1, 2, 2], 3, generator=np.random.default_rng(0))]
        [2, 2, 2]
        >>> split = partition("natural:clients=2")
        >>> owners = ["ann", "bob", "bob", "eve"]
        >>> [len(part) for part in split([0, 0, 1, 1], 2, generator=np.random.default_rng(0), user_ids=owners)]
        [1, 3]
    """
    known = {name.removesuffix(SUFFIX): name for name in partitions.__all__ if name.endswith(SUFFIX)}
    chosen = parse_spec("partition", text, known)
    where = f"partition: {chosen.name}"
    options = dict(chosen.options)
    if ":" in chosen.name:
        split = import_object(where, chosen.name, f"a partition ({', '.join(known)})")
        if not callable(split) or isinstance(split, type):
            raise ArgumentError(f"{where}: expected a function, got {short_repr(split)}")
    elif chosen.name == "natural" and "clients" in options:
        with error_context(where):
            split = partial(_natural_groups, check_count("clients", parse_literal(options.pop("clients"))))
    else:
        split = getattr(partitions, known[choose("partition", "partition", chosen.name, known)])
    arguments = ("labels", "clients", "generator", "user_ids")
    return bind(where, split, options, arguments, PARTITION_READERS)


def _natural_groups(
    groups: int,
    labels: np.ndarray | Sequence[int] | Sequence[str],
    clients: int,
    generator: np.random.Generator,
    *,
    user_ids: np.ndarray | Sequence[int] | Sequence[str] | None = None,
    balance: str = "owners",
) -> list[np.ndarray]:
    """Apply the grouped partition, and check the number of clients."""
    if clients != groups:
        raise ArgumentError(f"clients: expected {groups}, as in the partition natural:clients={groups}, got {clients}")
    return partitions.grouped_partition(labels, clients, generator, user_ids=user_ids, balance=balance)


def parse_workload(
    scheduler: SchedulerFactory | str | None, delays: Delays, availability: Availability | str
) -> dict[str, Any]:
    """Parse the arguments `scheduler`, `delays` and `availability` of [`run`][manifoldagg.simulation.run].

    A string such as `"exponential:mean=10"` is the name of an object with its options, and is replaced by this object.
    Other values are unchanged.

    Example:
        >>> parse_workload(None, "exponential:mean=10", None)
        {'scheduler': None, 'delays': Exponential(mean=10.0), 'availability': None}
    """
    given = {"scheduler": scheduler, "delays": delays, "availability": availability}
    return {name: PARSERS[name](value) if isinstance(value, str) else value for name, value in given.items()}


def referenced_files(*specs: object) -> dict[str, str]:
    """Return the files to which specs such as `csv:measured.csv` refer, with the SHA-256 hash of each file.

    Args:
        *specs: the settings. Only strings can refer to files.

    Example:
        >>> referenced_files("exponential:mean=10", "csv:not-there.csv", None)
        {}
    """
    options = [
        value for text in specs if isinstance(text, str) for value in parse_spec("settings", text).options.values()
    ]
    return {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in options if Path(path).is_file()}


def _priority(where: str, options: Mapping[str, str]) -> SchedulerFactory:
    build_scheduler = bind(where, PriorityScheduler, options, ("clients", "generator"))

    def make(clients: Clients, generator: np.random.Generator) -> Scheduler[int]:
        made: PriorityScheduler[int] = build_scheduler(len(clients), generator)
        return made

    with error_context(where):
        make([0], np.random.default_rng(0))
    return make


def _independent(delays: Delay | DelayFactory = distributions.Deterministic(1.0)) -> SchedulerFactory:  # noqa: B008
    if not (isinstance(delays, Delay) or callable(delays)):
        raise ArgumentError(f"delays: expected one by name, such as exponential; got {short_repr(delays)}")

    def make(clients: Clients, generator: np.random.Generator) -> Scheduler[int]:
        return IndependentClients(delays(clients, generator) if callable(delays) else delays, generator)

    return make


def _jackson(rates: float | str, concurrency: int = UNBOUNDED) -> SchedulerFactory:
    common, by_name = (1.0, _read_rates(rates)) if isinstance(rates, str) else (rates, {})

    def make(clients: Clients, generator: np.random.Generator) -> Scheduler[int]:
        if missing := [client for client in clients if by_name and str(client) not in by_name]:
            raise ArgumentError(f"rates: {rates} has no rate for client {missing[0]}")
        speeds = [by_name.get(str(client), common) for client in range(max(clients) + 1)]
        # The run chooses the clients, so the routing of the network is not used.
        return JacksonNetwork([1 / len(speeds)] * len(speeds), speeds, generator, concurrency=concurrency)

    if not by_name:
        make([0], np.random.default_rng(0))
    return make


def _read_rates(path: str) -> dict[str, float]:
    read = read_rates(Path(path))
    return dict(zip(read.names, read.rates.tolist(), strict=True))


def _replay(path: str) -> SchedulerFactory:
    records = read_trace(path)
    ReplayScheduler(records)  # checks the records
    return lambda clients, generator: ReplayScheduler(records)


def _empirical(path: str, work: float = 1.0, size_ratio: float = 1.0) -> DelayFactory:
    return partial(assign_profiles, Empirical.from_csv(path, work=work, size_ratio=size_ratio))


def _read_fitted(where: str, options: Mapping[str, str]) -> DelayFactory:
    # `as` is a keyword of Python, so it cannot be a parameter of a function.
    given = dict(options)
    with error_context(where):
        family = check_choice("as", given.pop("as", ""), FAMILIES)
    made: DelayFactory = build(where, partial(_fitted, family), given)
    return made


def _fitted(family: str, path: str, work: float = 1.0, size_ratio: float = 1.0, per_task: bool = False) -> DelayFactory:
    return partial(assign_profiles, fit_profiles(path, family, work=work, size_ratio=size_ratio, per_task=per_task))


def _churn(up: float | Delay, down: float | Delay, until: float) -> AvailabilityFactory:
    with renamed_arguments({"mean": "up"}):
        here = up if isinstance(up, Delay) else Exponential(up)
    with renamed_arguments({"mean": "down"}):
        gone = down if isinstance(down, Delay) else Exponential(down)

    def make(clients: Clients, generator: np.random.Generator) -> Iterable[AvailabilityChange[int]]:
        return churn(clients, here, gone, until, generator)

    make([], np.random.default_rng(0))
    return make


def _weights_name(name: str) -> Reader:
    """Return a reader of the name of predefined weights, which has no options."""

    def read(where: str, options: Mapping[str, str]) -> str:
        if options:
            raise ArgumentError(f"{where}: {name} has no options of its own")
        return name

    return read


DELAY_READERS: dict[str, Reader] = {
    name.lower(): reader(made)
    for name, made in vars(distributions).items()
    if name in distributions.__all__
    and isinstance(made, type)
    and issubclass(made, Delay)
    and made not in (Delay, Empirical)
}
MEASURED_READERS: dict[str, Reader] = {
    "csv": reader(_empirical),
    "measured": _read_fitted,
    "pertask": reader(PerTask, option_readers={"delay": DELAY_READERS}),
}
USER_DELAYS = user_reader("a Delay", Delay, num_arguments=2)
DURATION_READERS: OptionReaders = dict.fromkeys(("up", "down"), DELAY_READERS | USER_DELAYS)
SCHEDULER_READERS: Mapping[str, Reader] = {
    "priority": _priority,
    "independent": reader(_independent, option_readers={"delays": DELAY_READERS | MEASURED_READERS | USER_DELAYS}),
    "jackson": reader(_jackson),
    "replay": reader(_replay),
    # A run changes its scheduler, so an instance cannot serve several runs.
    **user_reader("a function of the clients and a generator", (), num_arguments=2),
}
PARTITION_READERS: OptionReaders = {
    "weights": {
        **{name: _weights_name(name) for name in partitions.WEIGHTS},
        **user_reader("a function of the index of a client", (), num_arguments=1),
    }
}
AVAILABILITY_READERS: Mapping[str, Reader] = {
    "churn": reader(_churn, option_readers=DURATION_READERS),
    "file": reader(read_changes),
    **user_reader("a list of AvailabilityChanges", list | tuple, num_arguments=2),
}
PARSERS = {"scheduler": scheduler, "delays": delays, "availability": availability}
