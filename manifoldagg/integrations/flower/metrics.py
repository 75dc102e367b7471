"""Metrics: what nodes say beside their models, and the mean of it."""

import math
from collections.abc import Sequence

from flwr.app import ArrayRecord, MetricRecord, RecordDict

__all__ = ["bare", "samples_of", "weighted_mean"]


def bare(content: RecordDict) -> RecordDict:
    """The records of a message but its arrays, which are large.

    Example:
        >>> list(bare(RecordDict({"arrays": ArrayRecord(), "metrics": MetricRecord({"loss": 0.5})})))
        ['metrics']
    """
    return RecordDict({name: record for name, record in content.items() if not isinstance(record, ArrayRecord)})


def samples_of(content: RecordDict, key: str) -> int | None:
    """How many samples a node says that it has; `None` where no metric of that name is a number of some.

    Example:
        >>> samples_of(RecordDict({"metrics": MetricRecord({"num-examples": 10.0})}), "num-examples")
        10
    """
    for record in content.metric_records.values():
        given = record.get(key)
        if isinstance(given, int | float) and math.isfinite(given) and given == int(given) and given > 0:
            return int(given)
    return None


def weighted_mean(contents: list[RecordDict], key: str) -> MetricRecord:
    """The mean of each metric by the samples of those who tell it, which is Flower's own where all tell the same.

    A list is taken entry by entry; one that is not as long as the first, and a list in place of a number, do not count.

    Args:
        contents: of messages, each of which says how many samples it stands for.
        key: where it says so, which is no metric itself.

    Example:
        >>> told = [MetricRecord({"n": n, "loss": loss}) for n, loss in ((1, 0.25), (3, 1.25))]
        >>> weighted_mean([RecordDict({"metrics": record}) for record in told], "n")
        {'loss': 1.0}
    """
    sums: dict[str, list[float]] = {}
    scalar: dict[str, bool] = {}
    weights: dict[str, float] = {}
    for content in contents:
        samples = samples_of(content, key) or 0
        for record in content.metric_records.values():
            for name, value in record.items():
                values = _values(value)
                if name == key or len(sums.setdefault(name, [0.0] * len(values))) != len(values):
                    continue
                if scalar.setdefault(name, values is not value) != (values is not value):
                    continue
                weights[name] = weights.get(name, 0.0) + samples
                sums[name] = [old + samples * new for old, new in zip(sums[name], values, strict=True)]
    means = {name: [x / weights[name] for x in sums[name]] for name in weights if weights[name]}
    return MetricRecord({name: x[0] if scalar[name] else x for name, x in means.items()})


def _values(value: float | Sequence[float]) -> Sequence[float]:
    return value if isinstance(value, list) else [value]  # type: ignore[list-item]
