"""Monitoring of a server: callbacks of `server.on_event` for `logging`, TensorBoard and Prometheus."""

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
"""What goes to a log as a warning."""
STALENESS_BUCKETS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Bounds of the histogram of staleness."""
SECONDS_BUCKETS = tuple(digit * 10.0**power for power in range(-4, 5) for digit in (1, 2, 5))
"""Bounds of the histograms of seconds: from a tenth of a millisecond to half a day."""


def to_logging(logger: logging.Logger) -> Callback:
    """Log a line for each event; rejections, expired tickets and failed checkpoints are warnings.

    Handlers that write JSON find the event itself as the record's `event`.

    Args:
        logger: of your own. To `logging.getLogger("manifoldagg")` the server itself writes what goes wrong.

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
                # What is long is in the event.
                fields |= {"staleness": event.receipt.staleness, "weight": event.receipt.weight}
                del fields["receipt"], fields["row"], fields["memory"]
            line = " ".join(
                f"{name}={x:.4g}" if isinstance(x, float) else f"{name}={x!r}" for name, x in fields.items()
            )
            logger.log(level, "%s %s", type(event).__name__, line, extra={"event": event})

    return watch


def to_tensorboard(writer: "SummaryWriter") -> Callback:
    """Write scalars by model version: metrics of each update, rejections, tickets in flight, memory.

    They are called `updates/staleness`, `updates/latency` and so on, one for each number of the history's rows;
    `rejected/points` and so on, counted from here on; `memory/versions` and so on; and `tickets`.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`; who made it closes it.
    """
    refused: dict[str, int] = {}

    def watch(event: Event) -> None:
        values: dict[str, Any] = {"tickets": event.in_flight}
        if isinstance(event, Accepted):
            taken = {**event.row, "latency": event.latency, "seconds": event.seconds}
            values |= {f"updates/{name}": x for name, x in taken.items() if name not in ("client", "version")}
            values |= {f"memory/{kind}": size for kind, size in event.memory.items()}
        if isinstance(event, Rejected):
            refused[event.field] = refused.get(event.field, 0) + 1
            values[f"rejected/{event.field}"] = refused[event.field]
        for name, x in values.items():
            if isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x):
                writer.add_scalar(name, x, event.version)

    return watch


def to_prometheus(registry: "CollectorRegistry | None" = None) -> Callback:
    """Export metrics named `manifoldagg_…`: event counters, histograms of staleness and seconds, gauges.

    Bytes in memory are those after the last update that was taken.

    Args:
        registry: of `prometheus_client`, where each name is good once; `None` for its own.

    Raises:
        ModuleNotFoundError: without `prometheus_client`.

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
        kind: Counter(f"manifoldagg_{name}", f"{name.replace('_', ' ')}, so far", registry=where)
        for kind, name in kinds.items()
    }
    refused = Counter("manifoldagg_rejected", "rejected updates, by field", ["field"], registry=where)
    staleness = Histogram(
        "manifoldagg_staleness_versions", "staleness of applied updates", buckets=STALENESS_BUCKETS, registry=where
    )
    latency = Histogram(
        "manifoldagg_latency_seconds", "time from dispatch to the update", buckets=SECONDS_BUCKETS, registry=where
    )
    step = Histogram("manifoldagg_step_seconds", "of the server's own work", buckets=SECONDS_BUCKETS, registry=where)
    version = Gauge("manifoldagg_version", "of the model", registry=where)
    tickets = Gauge("manifoldagg_tickets", "in flight", registry=where)
    memory = Gauge("manifoldagg_memory_bytes", "by what they are for", ["kind"], registry=where)

    def watch(event: Event) -> None:
        version.set(event.version)
        tickets.set(event.in_flight)
        if type(event) in counters:
            counters[type(event)].inc()
        if isinstance(event, Rejected):
            refused.labels(event.field).inc()
        if isinstance(event, Accepted):
            staleness.observe(event.receipt.staleness)
            for histogram, seconds in ((latency, event.latency), (step, event.seconds)):
                if not math.isnan(seconds):
                    histogram.observe(seconds)
            for kind, size in event.memory.items():
                memory.labels(kind).set(size)

    return watch
