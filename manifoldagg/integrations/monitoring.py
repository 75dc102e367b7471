"""Monitoring of a server with `logging`, TensorBoard and Prometheus.

Each function creates a callback for one of these systems. Pass the callback to `Server.on_event`, so that the server
calls it for each event.
"""

import logging
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.server.events import (
    Accepted,
    Callback,
    CheckpointFailed,
    CheckpointWritten,
    Dispatched,
    Dropped,
    Event,
    Expired,
    Rejected,
)

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["PROMETHEUS_METRICS", "PrometheusMetric", "to_logging", "to_prometheus", "to_tensorboard"]

WARNING_EVENTS = (Rejected, Expired, CheckpointFailed)
"""The types of events that `to_logging` logs at level `WARNING`."""
COUNTED_EVENTS: dict[type[Event], str] = {
    Dispatched: "dispatched",
    Accepted: "accepted",
    Dropped: "dropped",
    Expired: "expired",
    CheckpointWritten: "checkpoints_written",
    CheckpointFailed: "checkpoints_failed",
}
"""The Prometheus counters without labels, by the type of the event that increments each counter."""
STALENESS_BUCKETS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""The bucket bounds of the staleness histogram."""
SECONDS_BUCKETS = tuple(digit * 10.0**power for power in range(-4, 5) for digit in (1, 2, 5))
"""The bucket bounds of the time histograms, from 0.1 milliseconds to 14 hours."""


class PrometheusMetric(NamedTuple):
    """Definition of a metric that a server exports to Prometheus.

    The names, kinds, units and labels of the metrics are part of the public interface.

    Attributes:
        name: the name. Prometheus appends `_total` to a counter, and `_bucket`, `_sum` and `_count` to a histogram.
        kind: `"counter"`, `"gauge"` or `"histogram"`.
        unit: the unit of the value.
        description: the help text.
        label: the name of the label, or `""` if the metric has no label.
        buckets: the upper bounds of the buckets of a histogram. For other kinds, the tuple is empty.
    """

    name: str
    kind: str
    unit: str
    description: str
    label: str = ""
    buckets: tuple[float, ...] = ()


PROMETHEUS_METRICS = (
    PrometheusMetric("manifoldagg_dispatched", "counter", "tickets", "tickets issued to clients"),
    PrometheusMetric("manifoldagg_accepted", "counter", "updates", "updates applied or buffered"),
    PrometheusMetric("manifoldagg_rejected", "counter", "updates", "updates rejected, by invalid field", "field"),
    PrometheusMetric("manifoldagg_dropped", "counter", "tickets", "tickets dropped by the host"),
    PrometheusMetric("manifoldagg_expired", "counter", "tickets", "tickets without an update within the timeout"),
    PrometheusMetric("manifoldagg_checkpoints_written", "counter", "checkpoints", "checkpoints written"),
    PrometheusMetric("manifoldagg_checkpoints_failed", "counter", "checkpoints", "checkpoints that failed"),
    PrometheusMetric(
        "manifoldagg_staleness_versions",
        "histogram",
        "versions",
        "staleness of accepted updates",
        "",
        STALENESS_BUCKETS,
    ),
    PrometheusMetric(
        "manifoldagg_latency_seconds", "histogram", "seconds", "time from dispatch to update", "", SECONDS_BUCKETS
    ),
    PrometheusMetric("manifoldagg_step_seconds", "histogram", "seconds", "time of a server step", "", SECONDS_BUCKETS),
    PrometheusMetric("manifoldagg_version", "gauge", "versions", "version of the model"),
    PrometheusMetric("manifoldagg_tickets", "gauge", "tickets", "tickets in flight"),
    PrometheusMetric("manifoldagg_memory_bytes", "gauge", "bytes", "memory after the last accepted update", "kind"),
    PrometheusMetric(
        "manifoldagg_last_checkpoint_timestamp_seconds", "gauge", "seconds", "Unix time of the last written checkpoint"
    ),
)
"""The metrics that `to_prometheus` exports."""


def to_logging(logger: logging.Logger) -> Callback:
    """Create a callback that logs one line for each event of a server.

    Rejected updates, expired tickets and failed checkpoints are logged at level `WARNING`, and all other events at
    level `INFO`. The attribute `event` of each log record contains the event, so that a handler can write it as
    JSON.

    Args:
        logger: the logger for the events. The server logs its errors separately, to `logging.getLogger("manifoldagg")`.

    Example:
        >>> import sys, torch
        >>> from manifoldagg import Server
        >>> from manifoldagg.federated.rules import FedAsync
        >>> from manifoldagg.manifolds import Flat
        >>> logger = logging.getLogger("hospital")
        >>> logger.setLevel(logging.INFO)
        >>> handler = logging.StreamHandler(sys.stdout)
        >>> logger.addHandler(handler)
        >>> server = Server(Flat(2), FedAsync(), torch.zeros(2))
        >>> stop = server.on_event(to_logging(logger))
        >>> server.close()
        Closed version=0 in_flight=0
        >>> logger.removeHandler(handler)
    """

    def watch(event: Event) -> None:
        level = logging.WARNING if isinstance(event, WARNING_EVENTS) else logging.INFO
        if logger.isEnabledFor(level):
            fields = dict(vars(event))
            if isinstance(event, Accepted):
                # The complete receipt, row and memory would make the line too long.
                fields |= {"staleness": event.receipt.staleness, "weight": event.receipt.weight}
                del fields["receipt"], fields["row"], fields["memory"]
            line = " ".join(
                f"{name}={x:.4g}" if isinstance(x, float) else f"{name}={x!r}" for name, x in fields.items()
            )
            logger.log(level, "%s %s", type(event).__name__, line, extra={"event": event})

    return watch


def to_tensorboard(writer: "SummaryWriter") -> Callback:
    """Create a callback that writes the metrics of a server to TensorBoard.

    The step of each scalar is the version of the model. The scalars are:

    - `updates/NAME`: one value per accepted update. The name is `latency`, `seconds` (the duration of the step), or
      a column of `Server.history`, such as `staleness`.
    - `rejected/FIELD`, such as `rejected/points`: the number of updates that were rejected because this field was
      invalid. The count starts at 0 when the callback is created.
    - `memory/KIND`, such as `memory/versions`: the memory usage of the server in bytes, for one kind of data.
    - `tickets`: the number of tickets in flight.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`. The caller must close the writer.

    Raises:
        ArgumentError: if `writer` has no method `add_scalar`.
    """
    if not callable(getattr(writer, "add_scalar", None)):
        raise ArgumentError(f"writer: expected a SummaryWriter, got {short_repr(writer)}; write SummaryWriter(folder)")
    rejected: dict[str, int] = {}

    def watch(event: Event) -> None:
        values: dict[str, Any] = {"tickets": event.in_flight}
        if isinstance(event, Accepted):
            numbers = {**event.row, "latency": event.latency, "seconds": event.seconds}
            values |= {f"updates/{name}": x for name, x in numbers.items() if name not in ("client", "version")}
            values |= {f"memory/{kind}": size for kind, size in event.memory.items()}
        if isinstance(event, Rejected):
            rejected[event.field] = rejected.get(event.field, 0) + 1
            values[f"rejected/{event.field}"] = rejected[event.field]
        for name, x in values.items():
            if isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x):
                writer.add_scalar(name, x, event.version)

    return watch


def to_prometheus(registry: "CollectorRegistry | None" = None) -> Callback:
    """Create a callback that exports the metrics of a server to Prometheus.

    [`PROMETHEUS_METRICS`][manifoldagg.integrations.monitoring.PROMETHEUS_METRICS] lists these metrics.

    [The guide](../guide/monitoring.md#names-and-units-of-the-prometheus-metrics) explains their names and units.

    Args:
        registry: a registry of `prometheus_client`. The default is the global registry. A registry can contain each
            metric only once, so each call of this function needs its own registry.

    Raises:
        ModuleNotFoundError: if `prometheus_client` is not installed.

    Example:
        >>> import torch
        >>> from prometheus_client import CollectorRegistry
        >>> from manifoldagg import Server
        >>> from manifoldagg.federated.rules import FedAsync
        >>> from manifoldagg.manifolds import Flat
        >>> registry = CollectorRegistry()
        >>> server = Server(Flat(2), FedAsync(), torch.zeros(2))
        >>> stop = server.on_event(to_prometheus(registry))
        >>> ticket = server.dispatch("ward-7")
        >>> registry.get_sample_value("manifoldagg_dispatched_total")
        1.0
    """
    try:
        import prometheus_client
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("prometheus_client: pip install 'manifoldagg[prometheus]'", name=error.name) from None
    kinds: dict[str, Any] = {
        "counter": prometheus_client.Counter,
        "gauge": prometheus_client.Gauge,
        "histogram": prometheus_client.Histogram,
    }
    where = prometheus_client.REGISTRY if registry is None else registry
    metrics: dict[str, Any] = {}
    for one in PROMETHEUS_METRICS:
        options: dict[str, Any] = {"buckets": one.buckets} if one.buckets else {}
        labels = [one.label] if one.label else []
        metric = kinds[one.kind](one.name, one.description, labels, registry=where, **options)
        metrics[one.name.removeprefix("manifoldagg_")] = metric

    def watch(event: Event) -> None:
        metrics["version"].set(event.version)
        metrics["tickets"].set(event.in_flight)
        if type(event) in COUNTED_EVENTS:
            metrics[COUNTED_EVENTS[type(event)]].inc()
        if isinstance(event, CheckpointWritten):
            metrics["last_checkpoint_timestamp_seconds"].set_to_current_time()
        if isinstance(event, Rejected):
            metrics["rejected"].labels(event.field).inc()
        if isinstance(event, Accepted):
            metrics["staleness_versions"].observe(event.receipt.staleness)
            for name, seconds in (("latency_seconds", event.latency), ("step_seconds", event.seconds)):
                if not math.isnan(seconds):
                    metrics[name].observe(seconds)
            for kind, size in event.memory.items():
                metrics["memory_bytes"].labels(kind).set(size)

    return watch
