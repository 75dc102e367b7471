"""Line search for the global learning rate of each method, before a comparison of methods.

The training runs of the search and those of the comparison have different random seeds.
"""

import hashlib
import json
import math
import statistics
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from manifoldagg import __version__
from manifoldagg._io import atomic_write, os_errors
from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_choice, check_count, check_number, short_repr
from manifoldagg.errors import ArgumentError, DivergenceError, RuleError, StabilityWarning
from manifoldagg.experiments import workloads
from manifoldagg.experiments.registry import Factory
from manifoldagg.experiments.spec_parser import error_context, field_values
from manifoldagg.experiments.workloads import referenced_files
from manifoldagg.federated.clients.determinism import single_threaded
from manifoldagg.federated.stability import has_buffer
from manifoldagg.simulation.availability import Availability
from manifoldagg.simulation.dataset import FederatedDataset, check_federation
from manifoldagg.simulation.delays import Delays
from manifoldagg.simulation.engine import run
from manifoldagg.simulation.executors import ExecutorLike, shared_executor
from manifoldagg.simulation.metadata import stable_repr
from manifoldagg.simulation.method import Method, RunResult, check_method
from manifoldagg.simulation.schedulers import SchedulerFactory
from manifoldagg.tensor_file import tensor_bytes

__all__ = [
    "Search",
    "Tuning",
    "find_rate",
    "line_search",
    "tail_accuracy",
    "tune",
    "tuning_seeds",
    "with_option",
    "with_rate",
]

MAX_DOUBLINGS = 5
"""The maximum number of doublings or halvings of the first rate of a search."""
NUM_EVALUATIONS = 40
"""The number of evaluations in a tuning run. The score uses the last quarter of them."""


@dataclass(frozen=True)
class Tuning:
    """The settings for tuning the global learning rates of methods before a comparison.

    Attributes:
        seeds: the seeds of the tuning runs. The comparison must use other seeds.
        validation: the fraction of the training samples on which tuning runs are evaluated. If the comparison sets a
            validation fraction, tuning uses that fraction instead. Tuning never uses the test set.
        length: the length of a tuning run as a fraction of the length of a run in the comparison. The number of updates
            and the duration are both multiplied by this fraction.
        cache: the folder that stores finished tuning runs for later searches. `None` disables the cache.
    """

    seeds: Sequence[int] = (100, 101, 102)
    validation: float = 0.2
    length: float = 1.0
    cache: Path | None = None

    def apply(
        self,
        methods: Sequence[Method],
        split: Callable[..., FederatedDataset],
        *,
        validation: float,
        used_seeds: Collection[int],
        num_updates: int,
        duration: float | None = None,
        **options: Any,
    ) -> tuple[list[Method], dict[str, object]]:
        """Tune the global learning rate of each method with a line search.

        A method is not tuned if its rate is fixed, or if it has no rate.

        Args:
            methods: the methods. Their rates are the starts of the searches.
            split: a function of `validation` and `seed` that returns a federated data set.
            validation: the setting of the comparison.
            used_seeds: the seeds of the comparison.
            num_updates: the number of updates of a run of the comparison.
            duration: the duration of a run of the comparison, in seconds.
            options: further arguments of `tune`.

        Returns:
            The methods with their tuned rates, and a dictionary of JSON values. The dictionary contains the settings of
            the search. Its entry `"methods"` contains the tried rates of each method with their scores. The entry of a
            method is `"by hand"` if its rate is fixed, and `None` if it has no rate.

        Raises:
            ArgumentError: for the same reasons as in `tune`, if `seeds` is empty, or if the comparison uses one of the
                seeds.
        """
        if not self.seeds:
            raise ArgumentError("tuning: seeds: expected at least one seed, got an empty sequence")
        seeds = [check_count("tuning: seeds", seed, at_least=0) for seed in self.seeds]
        if shared := sorted(set(seeds).intersection(used_seeds)):
            raise ArgumentError(f"tuning: seeds: expected seeds that the comparison does not use, got {shared}")
        length = check_number("tuning: length", self.length, above=0, at_most=1)
        options["num_updates"] = max(1, round(length * num_updates))
        options["duration"] = None if duration is None else length * duration
        share = validation or check_number("tuning: validation", self.validation, at_least=0, at_most=0.9)
        with error_context("tuning"):
            federations = [split(validation=share, seed=seed) for seed in seeds]
        tuned: list[Method] = []
        results: dict[str, object] = {}
        for method in methods:
            found = tune(method, federations, cache=self.cache, **options)
            tuned.append(method if found is None else with_rate(method, found.best_rate))
            results[method.name] = found.to_dict() if found else "by hand" if method.rate_field is None else None
        shortened = {} if length == 1 else {"length": length}
        return tuned, {"seeds": seeds, "validation": share, **shortened, "methods": results}


def tuning_seeds(used_seeds: range, count: int) -> range:
    """Return `count` consecutive seeds for tuning, none of which is in `used_seeds`.

    The seeds start at 100. If this range overlaps with `used_seeds`, the seeds instead start after the last used seed.

    Example:
        >>> tuning_seeds(range(5), 2), tuning_seeds(range(98, 103), 2)
        (range(100, 102), range(103, 105))
    """
    usual = range(Tuning.seeds[0], Tuning.seeds[0] + count)
    is_free = usual.stop <= used_seeds.start or used_seeds.stop <= usual.start
    return usual if is_free else range(used_seeds.stop, used_seeds.stop + count)


@dataclass(frozen=True)
class Search:
    """The result of a line search for the best rate.

    Attributes:
        start: the first rate of the search.
        scores: the scores of each tried rate, with one score for each repetition. The key k stands for the rate $2^k$
            times `start`. The keys are in increasing order.
    """

    start: float
    scores: Mapping[int, Sequence[float]]

    def __repr__(self) -> str:
        return format_result(self, best_rate=self.best_rate, rates=[self.start * 2.0**power for power in self.scores])

    @property
    def best_power(self) -> int:
        """The exponent k of the best rate $2^k s$, where s is the attribute `start`.

        The best rate has the highest mean of its `scores`. If several rates share the highest mean, the k nearest to 0
        is selected. If two of them are equally near to 0, the negative k is selected. If all scores are 0, the lowest k
        is selected.
        """
        means = {power: statistics.fmean(scores) for power, scores in self.scores.items()}
        if not any(means.values()):
            return min(means)
        return max(means, key=lambda power: (means[power], -abs(power), -power))

    @property
    def best_rate(self) -> float:
        """The best rate."""
        return self.start * 2.0**self.best_power

    @property
    def is_at_boundary(self) -> bool:
        """Whether the best rate is the lowest or the highest tried rate."""
        return self.best_power in (min(self.scores), max(self.scores))

    def to_dict(self) -> dict[str, object]:
        """Return the search as a JSON-compatible dictionary."""
        tried = [
            {"rate": self.start * 2.0**power, "tail_accuracy": list(scores)} for power, scores in self.scores.items()
        ]
        return {"start": self.start, "chosen": self.best_rate, "tried": tried}


def line_search(
    score: Callable[[float], Sequence[float]], start: float, *, max_doublings: int = MAX_DOUBLINGS
) -> Search:
    r"""Search for the rate with the highest mean score by doubling and halving the rate `start`.

    The search tries rates $s\,2^k$, where $s$ is `start` and $k$ is an integer with $|k| \le$ `max_doublings`. It
    begins with $k = -1, 0, 1$. In each further step, it tries half and twice the best rate so far, if they are new and
    within the limit. It ends when there is no such rate. While all scores are 0, the lowest rate counts as the best.

    Args:
        score: a function of a rate that returns a score >= 0 for each repetition.
        start: the first rate $s$.
        max_doublings: the largest $|k|$.

    Raises:
        ArgumentError: if `max_doublings` is less than 1.

    Example:
        >>> found = line_search(lambda rate: [1 - abs(rate - 3)] if rate < 4 else [0.0], 0.75)
        >>> found.best_rate, [0.75 * 2.0**power for power in found.scores]
        (3.0, [0.375, 0.75, 1.5, 3.0, 6.0])
    """
    check_count("max_doublings", max_doublings)
    scores: dict[int, Sequence[float]] = {}
    wanted = [-1, 0, 1]
    while wanted:
        scores |= {power: score(start * 2.0**power) for power in wanted}
        found = Search(start, dict(sorted(scores.items())))
        neighbours = (found.best_power - 1, found.best_power + 1)
        wanted = [power for power in neighbours if power not in scores and abs(power) <= max_doublings]
    return found


def tail_accuracy(result: RunResult) -> float:
    """Compute the mean accuracy over the last quarter of a run's updates.

    This mean is less noisy than the accuracy at the end of the run.
    """
    updates = result.evaluations[-1].updates
    begin = updates - max(1, updates // 4)
    return statistics.fmean(row.accuracy for row in result.evaluations if row.updates > begin)


def tune(
    method: Method,
    federations: Sequence[FederatedDataset],
    *,
    num_updates: int,
    duration: float | None = None,
    scheduler: SchedulerFactory | str | None = None,
    delays: Delays = None,
    availability: Availability | str = None,
    task_cost: str = "fixed",
    concurrency: int | None = None,
    buffer: int | None = None,
    refill: int | None = None,
    executor: ExecutorLike = None,
    cache: Path | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Search | None:
    """Search for the global learning rate with which a method has the highest mean accuracy.

    For each rate, the search simulates one run on each federated data set. The score of a run is its mean accuracy over
    the last quarter of the updates (`tail_accuracy`). The score is 0 if the training diverges, or if the aggregation
    rule of the method rejects the rate or raises a `RuleError`.

    Args:
        method: the method. Its rate is the start of the search.
        federations: a federated data set for each repetition.
        num_updates: the number of updates. This and the next nine arguments are as in
            [`run`][manifoldagg.simulation.run].
        duration: the virtual time in seconds after which each run ends, if it has fewer than `num_updates` updates.
        scheduler: a function that returns a scheduler, or its name.
        delays: the delays of clients that work independently, or their name.
        availability: the availability of the clients, or its name.
        task_cost: `"fixed"` or `"trainer"`.
        concurrency: the number of tasks in flight.
        buffer: the number of updates in each step of a rule with a buffer. Other rules ignore this argument.
        refill: the number of free slots at which the server dispatches again.
        executor: the executor that trains.
        cache: a folder with a file for each search. Each finished run is stored immediately. A search is identified by
            all its inputs, including the contents of data and files. Functions are identified by their names.
        progress: a function that is called with the method's name and rate, and the seed, after each update.

    Returns:
        The tried rates with their scores, or `None` if the method has no rate or a fixed rate.

    Raises:
        ArgumentError: for the same reasons as in `run`, if `rate_field` of the method is not a field of its rule, if a
            file in `cache` is damaged or the folder cannot be written, or if `cache` is set and the scheduler, the
            delays or the availability is not a name.
    """
    check_count("num_updates", num_updates)
    check_method("method", method)
    if not isinstance(federations, Sequence):
        raise ArgumentError(f"federations: expected a list of FederatedDatasets, got {type(federations).__name__}")
    for i, federation in enumerate(federations):
        check_federation(f"federations[{i}]", federation)
    if not federations:
        raise ArgumentError("federations: expected at least one FederatedDataset, got an empty list")
    clients = federations[0].trainable_clients
    with error_context(f"methods: {method.name}"):
        rule = method.bind(clients).rule
        start = find_rate(rule, method.rate_field)
    if start is None:
        return None
    given = {"buffer": buffer if has_buffer(rule) else None, "refill": refill, "duration": duration}
    options: dict[str, Any] = {
        "num_updates": num_updates,
        "task_cost": task_cost,
        "concurrency": concurrency,
        "eval_every": max(1, num_updates // NUM_EVALUATIONS),
        **{name: value for name, value in given.items() if value is not None},
    }
    specs = {"scheduler": scheduler, "delays": delays, "availability": availability}
    finished = _TuningCache(cache, method, {} if cache is None else _cache_key(method, federations, options, specs))
    workload = workloads.parse_workload(scheduler, delays, availability)

    def run_once(rate: float, federation: FederatedDataset) -> float:
        advance = progress and partial(progress, f"{method.name}, rate {rate:g}", federation.seed)
        try:
            rated = with_rate(method, rate)
            rated.bind(clients, options.get("buffer"))
        except ValueError:
            return 0.0
        # The search exceeds the stability limit on purpose.
        with warnings.catch_warnings(action="ignore", category=StabilityWarning):
            try:
                result = run(federation, rated, **options, **workload, executor=workers, progress=advance)
            except (DivergenceError, RuleError):
                return 0.0
        return tail_accuracy(result)

    def score(rate: float) -> list[float]:
        return [finished.get_or_run(rate, one.seed, partial(run_once, rate, one)) for one in federations]

    with single_threaded(), shared_executor(executor) as workers, error_context(f"methods: {method.name}"):
        return line_search(score, start)


def with_rate(method: Method, rate: float) -> Method:
    """Return the method with another global rate.

    Raises:
        ArgumentError: if its rate is fixed, or its rule rejects the rate.

    Example:
        >>> from manifoldagg.experiments.registry import method
        >>> with_rate(method("momentum"), 2.0).rule.rule.rate
        2.0
    """
    if method.rate_field is None:
        raise ArgumentError(f"method: expected a method with a rate, got {method.name}, whose rate is fixed")
    return with_option(method, method.rate_field, rate)


def with_option(method: Method, option: str, value: Any) -> Method:
    """Return a copy of a federated method in which one option of the server's rule has another value.

    Args:
        method: the method, which consists of a rule and a trainer.
        option: the name of the option. If the rule wraps another rule, `"rule.rate"` is the rate of the inner rule.
        value: the new value.

    Raises:
        ArgumentError: if the rule has no such option.
    """
    rule: Any = method.rule
    if callable(rule) and not (isinstance(rule, Factory) or hasattr(rule, "step")):
        return replace(method, rule=OptionOverride(rule, option, value))
    return replace(method, rule=_with_option(rule, option, value))


@dataclass(frozen=True)
class OptionOverride:
    """A rule factory with another value of an option."""

    factory: Callable[[Sequence[int]], Any]
    option: str
    value: Any

    def __call__(self, clients: Sequence[int]) -> Any:
        return _with_option(self.factory(clients), self.option, self.value)


def find_rate(rule: Any, rate_field: str | None) -> float | None:
    """Return the global rate of a rule, or `None` if the rate is not a positive number.

    Args:
        rule: the rule.
        rate_field: the path of the field with the rate, such as `"rate"` or `"rule.rate"`, or `None` for a fixed rate.

    Raises:
        ArgumentError: if the rule has no such field. A rule without a field called `rate` has no rate.
    """
    if rate_field is None:
        return None
    *outer, name = rate_field.split(".")
    for part in outer:
        rule = getattr(rule, _check_field(rule, part))
    if name == "rate" and not (is_dataclass(rule) and name in field_values(rule)):
        return None
    given = getattr(rule, _check_field(rule, name))
    # If the field is `None`, the rule derives its rate from other options as the property `rate`.
    rate: Any = getattr(rule, "rate", None) if given is None else given
    return float(rate) if type(rate) in (int, float) and 0 < rate < math.inf else None


def _check_field(rule: Any, name: str) -> str:
    known = [*field_values(rule)] if is_dataclass(rule) else []
    if not known:
        raise ArgumentError(f"rate: expected a dataclass with a field {name!r}, got {type(rule).__name__}")
    return check_choice("rate", name, known)


def _with_option(rule: Any, option: str, value: Any) -> Any:
    """Return a rule, or its `Factory`, with a new value of an option."""
    name, _, inner = option.partition(".")
    before = rule.options.get(name) if isinstance(rule, Factory) else getattr(rule, _check_field(rule, name))
    after = _with_option(before, inner, value) if inner else value
    changed = {"options": {**rule.options, name: after}} if isinstance(rule, Factory) else {name: after}
    return replace(rule, **changed)


def _cache_key(
    method: Method, federations: Sequence[FederatedDataset], options: Mapping[str, object], specs: Mapping[str, object]
) -> dict[str, object]:
    """Return all settings, except for the rate, that determine the runs of a search."""
    for name, given in specs.items():
        if given is not None and not isinstance(given, str):
            raise ArgumentError(
                f"cache: expected a name for {name}, as functions cannot be identified; got {short_repr(given)}"
            )
    data = federations[0].dataset
    return {
        "manifoldagg": __version__,
        "rule": stable_repr(method.rule),
        "trainer": stable_repr(method.trainer),
        "rate": method.rate_field,
        "data": {"name": data.name, "checksum": f"{data.checksum:08x}", "model": stable_repr(data.model)},
        **({} if data.augment is None else {"augment": stable_repr(data.augment)}),
        "federations": {str(federation.seed): _digest(federation) for federation in federations},
        **options,
        **specs,
        "files": referenced_files(*specs.values()),
    }


class _TuningCache:
    """A cache of finished tuning runs, in a file that is named after a hash of the settings."""

    def __init__(self, folder: Path | None, method: Method, key: Mapping[str, object]) -> None:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        name = "".join(filter(str.isalnum, method.name.partition("(")[0]))
        self._path = None if folder is None else Path(folder) / f"{name}-{digest}.json"
        self._key = key
        self._scores: dict[str, dict[str, float]] = self._read()

    def get_or_run(self, rate: float, seed: int, execute: Callable[[], float]) -> float:
        """Return the cached result of a run, or run it and cache the result."""
        done = self._scores.setdefault(repr(rate), {})
        if str(seed) not in done:
            done[str(seed)] = execute()
            self._write()
        return done[str(seed)]

    def _read(self) -> dict[str, dict[str, float]]:
        if self._path is None or not self._path.exists():
            return {}
        with os_errors(f"cache: {self._path} cannot be read", ArgumentError):
            data = self._path.read_bytes()
        try:
            tree = json.loads(data)
            found: dict[str, dict[str, float]] = tree["tail_accuracy"]
            numbers = [value for seeds in found.values() for value in seeds.values()]
            valid = tree["key"] == self._key and all(type(value) is float and 0 <= value <= 1 for value in numbers)
        except (AttributeError, KeyError, TypeError, ValueError):
            valid = False
        if not valid:
            raise ArgumentError(f"cache: {self._path}: expected the file of a search; delete it to search again")
        return found

    def _write(self) -> None:
        if self._path is None:
            return
        tree = {"key": self._key, "tail_accuracy": self._scores}
        with os_errors(f"cache: {self._path} cannot be written", ArgumentError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._path) as draft:
                draft.write_text(json.dumps(tree, indent=1, allow_nan=False) + "\n")


def _digest(federation: FederatedDataset) -> str:
    """Compute a digest of the split and of the initial model with its weights."""
    model = federation.model()
    digest = hashlib.sha256(repr((federation.batch, model)).encode())
    for part in (*federation.train, *federation.held_out):
        digest.update(repr(len(part)).encode() + part.astype("<i8").tobytes())
    for name, tensor in model.state_dict().items():
        digest.update(repr((name, tensor.dtype, tensor.shape)).encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()
