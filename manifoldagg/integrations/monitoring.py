"""Monitoring of a server with `logging`, TensorBoard and Prometheus.

Each function returns a callback for `server.on_event`.
"""

import logging
import math
from typing import TYPE_CHECKING, Any

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

__all__ = ["to_logging", "to_prometheus", "to_tensorboard"]

WARNING_EVENTS = (Rejected, Expired, CheckpointFailed)
"""The events that are logged with the level `WARNING`."""
STALENESS_BUCKETS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""The bucket bounds of the staleness histogram."""
SECONDS_BUCKETS = tuple(digit * 10.0**power for power in range(-4, 5) for digit in (1, 2, 5))
"""The bucket bounds of the time histograms, from 0.1 milliseconds to 14 hours."""


def to_logging(logger: logging.Logger) -> Callback:
    """Create a callback that logs one line per event.

    Rejections, expired tickets and failed checkpoints have the level `WARNING`. Other events have the level `INFO`.
    Each log record has the attribute `event`, for handlers that write JSON.

    Args:
        logger: the logger to use. Errors are logged by the server itself to `logging.getLogger("manifoldagg")`.

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
                # The event contains the complete receipt and row.
                fields |= {"staleness": event.receipt.staleness, "weight": event.receipt.weight}
                del fields["receipt"], fields["row"], fields["memory"]
            line = " ".join(
                f"{name}={x:.4g}" if isinstance(x, float) else f"{name}={x!r}" for name, x in fields.items()
            )
            logger.log(level, "%s %s", type(event).__name__, line, extra={"event": event})

    return watch


def to_tensorboard(writer: "SummaryWriter") -> Callback:
    """Create a callback that writes scalars to TensorBoard. The step of each scalar is the model version.

    The scalars are:

    - `updates/staleness`, `updates/latency` and others: the numbers in the rows of the history.
    - `rejected/points` and others: the number of rejected updates by field, since the callback was created.
    - `memory/versions` and others: the memory in bytes.
    - `tickets`: the number of tickets in flight.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`. The caller must close the writer.
    """
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
    """Create a callback that exports metrics to Prometheus.

    The names of all metrics begin with `manifoldagg_`. The metrics are event counters, histograms of staleness and
    seconds, and gauges. The memory gauges show the bytes after the last accepted update.

    Args:
        registry: a registry of `prometheus_client`. A registry can contain each metric only once. The default is the
            global registry.

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
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("prometheus_client: pip install 'manifoldagg[prometheus]'", name=error.name) from None
    where = REGISTRY if registry is None else registry
    kinds = {Dispatched: "dispatched", Accepted: "accepted", Dropped: "dropped", Expired: "expired"}
    kinds |= {CheckpointWritten: "checkpoints_written", CheckpointFailed: "checkpoints_failed"}
    counters = {
        kind: Counter(f"manifoldagg_{name}", f"{name.replace('_', ' ')} so far", registry=where)
        for kind, name in kinds.items()
    }
    rejected = Counter("manifoldagg_rejected", "rejected updates by field", ["field"], registry=where)
    staleness = Histogram(
        "manifoldagg_staleness_versions", "staleness of applied updates", buckets=STALENESS_BUCKETS, registry=where
    )
    latency = Histogram(
        "manifoldagg_latency_seconds", "time from dispatch to the update", buckets=SECONDS_BUCKETS, registry=where
    )
    step = Histogram("manifoldagg_step_seconds", "time of a server step", buckets=SECONDS_BUCKETS, registry=where)
    version = Gauge("manifoldagg_version", "version of the model", registry=where)
    tickets = Gauge("manifoldagg_tickets", "tickets in flight", registry=where)
    memory = Gauge("manifoldagg_memory_bytes", "memory by kind", ["kind"], registry=where)

    def watch(event: Event) -> None:
        version.set(event.version)
        tickets.set(event.in_flight)
        if type(event) in counters:
            counters[type(event)].inc()
        if isinstance(event, Rejected):
            rejected.labels(event.field).inc()
        if isinstance(event, Accepted):
            staleness.observe(event.receipt.staleness)
            for histogram, seconds in ((latency, event.latency), (step, event.seconds)):
                if not math.isnan(seconds):
                    histogram.observe(seconds)
            for kind, size in event.memory.items():
                memory.labels(kind).set(size)

    return watch
