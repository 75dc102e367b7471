"""Metrics that nodes report: limits on their number and size, and weighted means."""

import math
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from manifoldagg.federated.limits import DEFAULT_LIMITS

__all__ = [
    "MAX_METRICS",
    "MAX_METRIC_VALUES",
    "MAX_NAME_LENGTH",
    "MAX_SAMPLES",
    "bounded_metrics",
    "sample_count",
    "weighted_mean",
    "with_sample_count",
]

MAX_SAMPLES = DEFAULT_LIMITS.max_samples
"""The maximum sample count of a node, which is the default of `UpdateLimits`."""
MAX_METRICS = 100
"""The maximum number of metrics in a message or a mean."""
MAX_METRIC_VALUES = 2_000
"""The maximum number of values in the metrics of a message. Each character of a text counts as one value."""
MAX_NAME_LENGTH = 100
"""The maximum length of the name of a metric, in characters."""
SCALAR = -1
"""The value that `weighted_mean` uses as the length of a metric that is a number and not a list."""


def bounded_metrics(content: RecordDict, key: str, *, keeps_config: bool) -> RecordDict:
    """Return the metrics in a node's reply, limited in number and size.

    The result contains no arrays. It contains at most `MAX_METRICS` metrics with `MAX_METRIC_VALUES` values in total,
    and no names with more than `MAX_NAME_LENGTH` characters. It always contains the number of samples.

    Args:
        content: the content of the reply.
        key: the name of the metric with the number of samples.
        keeps_config: whether to include each `ConfigRecord`. The same limits apply to its entries.

    Example:
        >>> records = {"metrics": MetricRecord({"loss": 0.5}), "config": ConfigRecord()}
        >>> content = RecordDict(records)
        >>> list(bounded_metrics(content, "num-examples", keeps_config=False))
        ['metrics']
    """
    limits = _Limits(MAX_METRICS, MAX_METRIC_VALUES)
    found: dict[str, MetricRecord | ConfigRecord] = {}
    chosen = _record_with_samples(content, key)
    # The record with the number of samples comes first, so that no other record uses up the limits.
    names = sorted(content.metric_records, key=lambda name: name != chosen)
    names += list(content.config_records) if keeps_config else []
    for name in names[:MAX_METRICS]:
        record: Any = content[name]
        if _is_short(name):
            bounded = {entry: value for entry, value in record.items() if entry == key or limits.admit(entry, value)}
            found[name] = type(record)(bounded)
    return RecordDict({name: found[name] for name in content if name in found})


def with_sample_count(content: RecordDict, key: str, samples: int) -> RecordDict:
    """Replace the number of samples in the records of a message.

    Example:
        >>> with_sample_count(RecordDict({"m": MetricRecord({"n": 9})}), "n", 3)["m"]
        {'n': 3}
    """
    name = _record_with_samples(content, key)
    changed = {} if name is None else {name: MetricRecord({**content.metric_records[name], key: samples})}
    return RecordDict({**content, **changed})


def sample_count(content: RecordDict, key: str) -> int | None:
    """Return the number of samples that a node reports.

    If the number is missing or invalid, return `None`. A valid number is an integer from 1 to `MAX_SAMPLES`.

    Example:
        >>> sample_count(RecordDict({"metrics": MetricRecord({"num-examples": 10.0})}), "num-examples")
        10
    """
    name = _record_with_samples(content, key)
    return None if name is None else int(content.metric_records[name][key])  # type: ignore[arg-type]


def _record_with_samples(content: RecordDict, key: str) -> str | None:
    for name, record in content.metric_records.items():
        given = record.get(key) if _is_short(name) else None
        if isinstance(given, int | float) and 0 < given <= MAX_SAMPLES and given == int(given):
            return name
    return None


def weighted_mean(contents: list[RecordDict], key: str) -> MetricRecord:
    """Compute the mean of each metric over the nodes that report it, weighted by their numbers of samples.

    - A list is averaged entry by entry.
    - Values that are not finite are excluded. If no finite value remains, the mean is NaN.
    - If several records of a node contain the same metric, only the first record counts.
    - If nodes report the same metric with different lengths, only the values of one length are averaged. This is the
      length with the largest total number of samples. In a tie, a number takes precedence over a list, and a shorter
      list over a longer list.
    - The result contains at most `MAX_METRICS` metrics. If there are more, the metrics with the largest numbers of
      reporting nodes take precedence.

    Args:
        contents: the contents of replies, each of which includes the number of samples.
        key: the name of the metric with the number of samples. This metric is not averaged.

    Example:
        >>> records = [MetricRecord({"n": n, "loss": loss}) for n, loss in ((1, 0.25), (3, 1.25))]
        >>> weighted_mean([RecordDict({"metrics": record}) for record in records], "n")
        {'loss': 1.0}
    """
    told: dict[str, dict[int, list[_WeightedMean]]] = {}
    reports: Counter[str] = Counter()
    for content in contents:
        samples = sample_count(content, key)
        reported: dict[str, None] = {}
        for record in content.metric_records.values() if samples else ():
            for name, value in record.items():
                if name != key and name not in reported:
                    reported[name] = None
                    values = value if isinstance(value, list) else [value]
                    length = len(values) if values is value else SCALAR
                    means = told.setdefault(name, {}).setdefault(length, [_WeightedMean() for _ in values])
                    for mean, each in zip(means, values, strict=True):
                        mean.add(each, samples or 0)
        reports.update(list(reported))
    found: dict[str, float | list[float]] = {}
    kept = {name for name, _ in reports.most_common(MAX_METRICS)}
    for name, shapes in ((name, shapes) for name, shapes in told.items() if name in kept):
        length = min(shapes, key=lambda n: (-max((mean.samples for mean in shapes[n]), default=0), n))
        all_of = [mean.value for mean in shapes[length]]
        found[name] = all_of[0] if length == SCALAR else all_of
    return MetricRecord(found)  # type: ignore[arg-type]


def _is_short(name: str) -> bool:
    return len(name) <= MAX_NAME_LENGTH and name.isprintable()


@dataclass
class _Limits:
    """Remaining capacity for metrics in the result of `bounded_metrics`.

    Attributes:
        names: the number of metrics that may still be added.
        values: the total number of values that these metrics may have.
    """

    names: int
    values: int

    def admit(self, name: str, value: object) -> bool:
        """Return whether an entry is within the limits. An admitted entry reduces the limits."""
        size = sum(map(_num_bytes, value)) if isinstance(value, list) else _num_bytes(value)
        if not self.names or size > self.values or not _is_short(name):
            return False
        self.names -= 1
        self.values -= size
        return True


def _num_bytes(value: object) -> int:
    return max(len(value), 1) if isinstance(value, str | bytes) else 1


@dataclass
class _WeightedMean:
    total: float = 0.0
    samples: int = 0

    def add(self, value: float, samples: int) -> None:
        if abs(value) <= sys.float_info.max:
            self.total += samples * float(value)
            self.samples += samples

    @property
    def value(self) -> float:
        return self.total / self.samples if self.samples else math.nan
