"""Metrics that nodes report, and their weighted mean."""

import math
import sys
from dataclasses import dataclass

from flwr.app import ArrayRecord, MetricRecord, RecordDict

from manifoldagg.federated.limits import DEFAULT_LIMITS

__all__ = ["MAX_SAMPLES", "sample_count", "weighted_mean", "without_arrays"]

MAX_SAMPLES = DEFAULT_LIMITS.max_samples
"""The maximum number of samples of a node; the default of `UpdateLimits`."""
SCALAR = -1
"""The length that represents a number, as opposed to a list."""


def without_arrays(content: RecordDict) -> RecordDict:
    """Return the records of a message without its arrays, which are large.

    Example:
        >>> list(without_arrays(RecordDict({"arrays": ArrayRecord(), "metrics": MetricRecord({"loss": 0.5})})))
        ['metrics']
    """
    return RecordDict({name: record for name, record in content.items() if not isinstance(record, ArrayRecord)})


def sample_count(content: RecordDict, key: str) -> int | None:
    """Return the number of samples that a node reports, at most `MAX_SAMPLES`, or `None`.

    Example:
        >>> sample_count(RecordDict({"metrics": MetricRecord({"num-examples": 10.0})}), "num-examples")
        10
    """
    for record in content.metric_records.values():
        given = record.get(key)
        if isinstance(given, int | float) and 0 < given <= MAX_SAMPLES and given == int(given):
            return int(given)
    return None


def weighted_mean(contents: list[RecordDict], key: str) -> MetricRecord:
    """Compute the sample-weighted mean of each metric over the nodes that report it.

    - The mean of lists is computed entry by entry.
    - Values that are not finite are excluded. The mean of no values is NaN.
    - If nodes report a metric in different shapes, the shape with the most samples counts. At equal numbers of samples,
      a number takes precedence over a list, and a shorter list over a longer one.

    Args:
        contents: the contents of replies, each with its number of samples.
        key: the name of the number of samples, which is not averaged.

    Example:
        >>> told = [MetricRecord({"n": n, "loss": loss}) for n, loss in ((1, 0.25), (3, 1.25))]
        >>> weighted_mean([RecordDict({"metrics": record}) for record in told], "n")
        {'loss': 1.0}
    """
    told: dict[str, dict[int, list[_WeightedMean]]] = {}
    for content in contents:
        samples = sample_count(content, key)
        for record in content.metric_records.values() if samples else ():
            for name, value in record.items():
                if name != key:
                    values = value if isinstance(value, list) else [value]
                    length = len(values) if values is value else SCALAR
                    means = told.setdefault(name, {}).setdefault(length, [_WeightedMean() for _ in values])
                    for mean, each in zip(means, values, strict=True):
                        mean.add(each, samples or 0)
    found: dict[str, float | list[float]] = {}
    for name, shapes in told.items():
        length = min(shapes, key=lambda n: (-max((mean.samples for mean in shapes[n]), default=0), n))
        all_of = [mean.value for mean in shapes[length]]
        found[name] = all_of[0] if length == SCALAR else all_of
    return MetricRecord(found)  # type: ignore[arg-type]


@dataclass
class _WeightedMean:
    """A sample-weighted mean of finite numbers."""

    total: float = 0.0
    samples: int = 0

    def add(self, value: float, samples: int) -> None:
        if abs(value) <= sys.float_info.max:
            self.total += samples * float(value)
            self.samples += samples

    @property
    def value(self) -> float:
        return self.total / self.samples if self.samples else math.nan
