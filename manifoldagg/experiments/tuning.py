"""Tuning: one line search for the global rate of every method, on seeds that no comparison uses."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from manifoldagg._validation import check_choice, check_count, check_number
from manifoldagg.errors import ArgumentError, DivergenceError, RuleError
from manifoldagg.experiments.registry import Recipe
from manifoldagg.experiments.tuning_cache import Kept, known_by, place
from manifoldagg.federated.clients.determinism import single_threaded
from manifoldagg.simulation import registry
from manifoldagg.simulation.availability import Participations
from manifoldagg.simulation.delays import Delays
from manifoldagg.simulation.executors.executor import Executors, serving
from manifoldagg.simulation.federated_dataset import Federation, check_federation
from manifoldagg.simulation.run import Method, Run, check_method, run
from manifoldagg.simulation.schedulers import MakesScheduler
from manifoldagg.simulation.spec_parser import blamed

__all__ = ["Search", "Tuning", "late", "line_search", "tune", "with_rate"]

FARTHEST = 5
"""So many doublings away from where it begins a search ends."""
LOOKS = 40
"""Evaluations of a run, a quarter of which count."""


@dataclass(frozen=True)
class Tuning:
    """How a comparison chooses the methods' global rates before it begins.

    Attributes:
        seeds: of the runs of a search, beyond those of the comparison.
        validation: which part of the training samples they are tested on, where the comparison itself does not say:
            nobody sees the test set.
        cache: a folder that keeps what is done, for the next time.
    """

    seeds: Sequence[int] = (100, 101, 102)
    validation: float = 0.2
    cache: Path | None = None

    def apply(
        self,
        methods: Sequence[Method],
        split: Callable[..., Federation],
        *,
        validation: float,
        used: int,
        **options: Any,
    ) -> tuple[list[Method], dict[str, object]]:
        """Methods with the best rates that [`tune`][manifoldagg.experiments.tuning.tune] finds; for JSON what it tried.

        Of a method whose rate is to stay as it is, that is `"by hand"`, and of one without a rate `None`.

        Args:
            methods: to begin with.
            split: makes a federation, of `validation` and `seed`.
            validation: what the comparison says.
            used: how many seeds it uses, from 0.
            options: of `tune`.

        Raises:
            ArgumentError: as `tune`; if the comparison uses one of the seeds, or there is none.
        """
        if not self.seeds:
            raise ArgumentError("tuning: seeds: expected at least one, got none")
        seeds = [check_count("tuning: seeds", seed, at_least=used) for seed in self.seeds]
        share = validation or check_number("tuning: validation", self.validation, at_least=0, at_most=0.9)
        with blamed("tuning"):
            federations = [split(validation=share, seed=seed) for seed in seeds]
        chosen: list[Method] = []
        told: dict[str, object] = {}
        for method in methods:
            found = tune(method, federations, cache=self.cache, **options)
            chosen.append(method if found is None else with_rate(method, found.rate))
            told[method.name] = found.told() if found else "by hand" if method.rate is None else None
        return chosen, {"seeds": seeds, "validation": share, "methods": told}


@dataclass(frozen=True)
class Search:
    """What a line search tried.

    Attributes:
        start: where it began.
        scores: by the power of 2 that `start` was multiplied by, in their order; one number a repetition.
    """

    start: float
    scores: Mapping[int, Sequence[float]]

    @property
    def best(self) -> int:
        """The power with the highest mean; of equal ones the nearest to the start, and the lower of these.

        Where all means are 0, as nothing learned, it is the lowest.
        """
        means = {power: statistics.fmean(scores) for power, scores in self.scores.items()}
        if not any(means.values()):
            return min(means)
        return max(means, key=lambda power: (means[power], -abs(power), -power))

    @property
    def rate(self) -> float:
        """The best."""
        return self.start * 2.0**self.best

    @property
    def is_open(self) -> bool:
        """Whether the best is the last that was tried on its side: it may go on beyond."""
        return self.best in (min(self.scores), max(self.scores))

    def told(self) -> dict[str, object]:
        """For JSON."""
        tried = [{"rate": self.start * 2.0**power, "late": list(scores)} for power, scores in self.scores.items()]
        return {"start": self.start, "chosen": self.rate, "tried": tried}


def line_search(score: Callable[[float], Sequence[float]], start: float, *, farthest: int = FARTHEST) -> Search:
    r"""The best of $s\,2^k$: for $k = -1, 0, 1$, and on from the best until it has a worse one on both sides.

    Where every rate scores 0 it goes on to lower ones. No $|k|$ is beyond `farthest`.

    Args:
        score: of a rate: one number a repetition, none negative, of which the mean counts.
        start: $s$.
        farthest: the largest $|k|$.

    Raises:
        ArgumentError: if `farthest` is less than 1.

    Example:
        >>> found = line_search(lambda rate: [1 - abs(rate - 3)] if rate < 4 else [0.0], 0.75)
        >>> found.rate, [0.75 * 2.0**power for power in found.scores]
        (3.0, [0.375, 0.75, 1.5, 3.0, 6.0])
    """
    check_count("farthest", farthest)
    scores: dict[int, Sequence[float]] = {}
    wanted = [-1, 0, 1]
    while wanted:
        for power in wanted:
            scores[power] = score(start * 2.0**power)
        found = Search(start, dict(sorted(scores.items())))
        wanted = [power for power in (found.best - 1, found.best + 1) if power not in scores and abs(power) <= farthest]
    return found


def late(found: Run) -> float:
    """The mean accuracy over the last quarter of the rounds, of which a single one says little.

    Each update moves the model.
    """
    rounds = found.evaluations[-1].round
    begin = rounds - max(1, rounds // 4)
    return statistics.fmean(row.accuracy for row in found.evaluations if row.round > begin)


def tune(
    method: Method,
    federations: Sequence[Federation],
    *,
    rounds: int,
    scheduler: MakesScheduler | str | None = None,
    delays: Delays = None,
    participation: Participations | str = None,
    work: str = "data",
    tasks: int | None = None,
    executor: Executors = None,
    cache: Path | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Search | None:
    """Search the global rate of a method: the one with the best mean of [`late`][manifoldagg.experiments.tuning.late].

    Every method has as many runs a rate and as many rounds a run. A run in which the method fails scores 0, and so does
    a rate that its rule does not take.

    Args:
        method: whose rate begins the search.
        federations: one a repetition.
        rounds: as in [`run`][manifoldagg.simulation.run], and so are the next ones; or their names.
        scheduler: who finishes when.
        delays: of clients that work alone.
        participation: who comes and goes.
        work: of a task.
        tasks: how many are under way at a time.
        executor: what trains.
        cache: a folder, with a file for each search: each run that is done is kept there at once and not done again. A
            search is known by all that it depends on, by what is in data and files too, but functions by their names.
        progress: called with the method's name and rate, and the seed, after each round.

    Returns:
        What was tried; `None` where the method has no rate to search, or `rate=None`.

    Raises:
        ArgumentError: as `run`; if the method's `rate` is no field of its rule; if a file in `cache` is not what was
            kept, or the folder cannot be written; or with a `cache` if scheduler, delays or participation are no names.
    """
    check_count("rounds", rounds)
    check_method("method", method)
    given: object = federations
    if not isinstance(given, Sequence):
        raise ArgumentError(f"federations: expected a list of Federations, got {type(given).__name__}")
    for nth, federation in enumerate(federations):
        check_federation(f"federations[{nth}]", federation)
    if not federations:
        raise ArgumentError("federations: expected at least one, got none")
    clients = federations[0].scheduled
    with blamed(f"methods: {method.name}"):
        start = _rate(method.bound(clients).rule, method.rate)
    if start is None:
        return None
    options: dict[str, Any] = {"rounds": rounds, "work": work, "tasks": tasks, "every": max(1, rounds // LOOKS)}
    words = {"scheduler": scheduler, "delays": delays, "participation": participation}
    of = {} if cache is None else known_by(method, federations, options, words)
    kept = Kept(None if cache is None else place(Path(cache), method, of), of)
    scenario = registry.scenario(scheduler, delays, participation)

    def once(rate: float, federation: Federation) -> float:
        told = progress and partial(progress, f"{method.name}, rate {rate:g}", federation.seed)
        try:
            rated = with_rate(method, rate)
            rated.bound(clients)
        except ValueError:
            return 0.0
        try:
            return late(run(federation, rated, **options, **scenario, executor=workers, progress=told))
        except (DivergenceError, RuleError):
            return 0.0

    def score(rate: float) -> list[float]:
        return [kept.late(rate, federation.seed, partial(once, rate, federation)) for federation in federations]

    with single_threaded(), serving(executor) as workers, blamed(f"methods: {method.name}"):
        return line_search(score, start)


def with_rate(method: Method, rate: float) -> Method:
    """The method with another global rate.

    Raises:
        ArgumentError: if it has none, or its rule does not take this one.

    Example:
        >>> from manifoldagg.experiments.registry import method
        >>> with_rate(method("momentum"), 2.0).rule.rule.rate
        2.0
    """
    if method.rate is None:
        raise ArgumentError(f"method: expected one with a rate, got {method!r}")
    rule: Any = method.rule
    if callable(rule) and not (isinstance(rule, Recipe) or hasattr(rule, "step")):
        return replace(method, rule=Rated(rule, method.rate, rate))
    return replace(method, rule=_changed(rule, method.rate, rate))


@dataclass(frozen=True)
class Rated:
    """A rule that a function makes for the clients, with another rate."""

    make: Callable[[Sequence[int]], Any]
    where: str
    rate: float

    def __call__(self, clients: Sequence[int]) -> Any:
        return _changed(self.make(clients), self.where, self.rate)


def _rate(rule: Any, where: str | None) -> float | None:
    """The global rate of a rule, if it is a positive number that can be replaced.

    Raises:
        ArgumentError: if it has no such field; but a rule need not have one that is called `rate`.
    """
    if where is None:
        return None
    *outer, name = where.split(".")
    for part in outer:
        rule = getattr(rule, _field(rule, part))
    if name == "rate" and name not in _fields(rule):
        return None
    given = getattr(rule, _field(rule, name))
    # Where it is `None` it follows from other options, and the rule says how.
    rate: Any = getattr(rule, "rate", None) if given is None else given
    return float(rate) if type(rate) in (int, float) and 0 < rate < math.inf else None


def _field(rule: Any, name: str) -> str:
    """The name of a field that can be replaced.

    Raises:
        ArgumentError: if the rule has none of that name.
    """
    if not _fields(rule):
        raise ArgumentError(f"rate: expected a dataclass with a field {name!r}, got {type(rule).__name__}")
    return check_choice("rate", name, _fields(rule))


def _fields(rule: Any) -> list[str]:
    """Those that can be replaced."""
    return [one.name for one in fields(rule) if one.init] if is_dataclass(rule) else []


def _changed(rule: Any, where: str, value: Any) -> Any:
    """A rule, or its recipe, with another value for an option."""
    name, _, inner = where.partition(".")
    if isinstance(rule, Recipe):
        new = _changed(rule.options[name], inner, value) if inner else value
        return replace(rule, options={**rule.options, name: new})
    return replace(rule, **{_field(rule, name): _changed(getattr(rule, name), inner, value) if inner else value})
