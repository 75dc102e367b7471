"""Logging and counting of rejected updates, failed tasks and finished rounds in a Flower run."""

import logging
from collections import Counter
from collections.abc import Mapping

from flwr.app import ArrayRecord, MetricRecord

from manifoldagg._validation import one_line
from manifoldagg.federated.server.events import Callback, CheckpointFailed, Event

__all__ = ["RunReport", "log_metrics", "log_start"]

LOG = logging.getLogger("flwr")
MAX_REASON_LENGTH = 300
"""The maximum length of a reason in a log line, in characters."""
MAX_LISTED_NODES = 5
"""The maximum number of nodes in the line that `flush` logs."""
REJECTED = "update rejected"
TRAINING_FAILED = "training failed"
EVALUATION_FAILED = "evaluation failed"
METRICS_DROPPED = "metrics dropped"


class RunReport:
    """Logger and counter of the rejected updates and the failed tasks of a run.

    - An update is rejected if a node has replied but the server has not accepted the reply.
    - A task fails if the node raises an exception, sends an unreadable reply, or does not reply in time.

    To keep the log short, the class logs only the 1st, 2nd, 4th, 8th, 16th, ... rejection of each node. It also logs
    the first rejection of a node for each invalid field. The same applies to training failures and to evaluation
    failures, which are counted separately. At the end of a round, one line counts the events that were not logged.

    Example:
        >>> report = RunReport()
        >>> report.accept(staleness=2)
        >>> report.reject(7, "model: expected finite values")
        >>> report.fail(8, "timeout", "no reply in time")
        >>> report.metrics(accepted=1)
        {'accepted': 1, 'rejected': 1, 'rejected-model': 1, 'failed': 1, 'failed-timeout': 1}
    """

    def __init__(self) -> None:
        self._staleness: list[int] = []
        self._num_bytes = 0
        self._rejected: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._events: Counter[tuple[int, str]] = Counter()
        self._known_kinds: set[tuple[int, str, str]] = set()
        self._unlogged: Counter[tuple[int, str]] = Counter()

    def accept(self, staleness: int) -> None:
        self._staleness.append(staleness)

    def add_bytes(self, count: int) -> None:
        """Add the size of a reply to the count of received bytes, even if the server rejects the reply."""
        self._num_bytes += count

    def reject(self, node: int, reason: str) -> None:
        """Log a rejected update, and count it under the name of its invalid field.

        Args:
            node: the node that sent the update.
            reason: the reason for the rejection, which starts with the name of the invalid field.
        """
        field = reason.partition(":")[0].partition("[")[0]
        self._rejected[field] += 1
        self._log(node, REJECTED, field, reason)

    def fail(self, node: int, kind: str, reason: str, *, in_evaluation: bool = False) -> None:
        """Log and count a failed training task. A failed evaluation is only logged.

        Args:
            node: the node of the task.
            kind: the kind of failure: `"error"`, `"timeout"` or `"unreadable"`.
            reason: the reason for the log line.
            in_evaluation: whether the task was an evaluation.
        """
        if not in_evaluation:
            self._failed[kind] += 1
        self._log(node, EVALUATION_FAILED if in_evaluation else TRAINING_FAILED, kind, f"{kind}: {reason}")

    def drop_metrics(self, node: int, count: int) -> None:
        """Log that `count` metrics of an accepted update were dropped because they exceeded a limit."""
        self._log(node, METRICS_DROPPED, "metrics", f"{count} metrics exceed the limits of number, length and name")

    def on_event(self, event: Event) -> None:
        """Log a failed checkpoint. The strategy passes this method to `Server.on_event`."""
        if isinstance(event, CheckpointFailed):
            LOG.error("checkpoint: %s: %s", event.path, event.reason)

    def guarded(self, callback: Callback) -> Callback:
        """Wrap an event callback in a function that logs the callback's exceptions instead of raising them.

        The function logs only the 1st, 2nd, 4th, 8th, ... exception.
        """
        name = getattr(callback, "__qualname__", type(callback).__name__)
        num_errors = 0

        def call(event: Event) -> None:
            nonlocal num_errors
            try:
                callback(event)
            except Exception:
                num_errors += 1
                if _is_power_of_two(num_errors):
                    LOG.exception("on_event: %s raised an exception (%d so far)", name, num_errors)

        return call

    def metrics(self, accepted: int) -> dict[str, int]:
        """Return the counts of the current round as metrics.

        Args:
            accepted: the number of accepted updates.

        Returns:
            The counts `accepted`, `rejected` and `failed`. Counts by reason, named `rejected-FIELD` and `failed-KIND`,
            are included if they are not 0. The count `received-bytes` is included if `add_bytes` was called.
        """
        found = {"accepted": accepted}
        for name, counts in (("rejected", self._rejected), ("failed", self._failed)):
            found[name] = counts.total()
            found |= {f"{name}-{kind}": count for kind, count in sorted(counts.items())}
        return found | ({"received-bytes": self._num_bytes} if self._num_bytes else {})

    def extend(self, metrics: MetricRecord | None, accepted: int) -> MetricRecord:
        """Combine the nodes' aggregated metrics with the server's counts, such as the number of rejected updates.

        The counts cover the current round. If a metric and a count have the same name, the result contains the metric.

        Args:
            metrics: the aggregated metrics of the nodes. `None` means no metrics.
            accepted: the number of accepted updates.
        """
        theirs = dict(metrics or {})
        ours = self.metrics(accepted)
        if shared := sorted(ours.keys() & theirs.keys()):
            LOG.warning("aggregate_train: the aggregated metrics hide the server's own: %s", ", ".join(shared))
        return MetricRecord({**theirs, **{name: count for name, count in ours.items() if name not in theirs}})

    def end_round(self, accepted: int, seconds: float) -> None:
        """Log the summary of a round, and reset the counts.

        Args:
            accepted: the number of accepted updates.
            seconds: the duration of the round in seconds.
        """
        self.flush()
        stale = self._staleness
        spread = f"; staleness mean {sum(stale) / len(stale):.2f}, max {max(stale)}" if stale else ""
        LOG.info(
            "aggregate_train: %d %s accepted, %d rejected%s, %d %s failed%s%s; %.2f s",
            *(accepted, "update" if accepted == 1 else "updates"),
            *(self._rejected.total(), _in_parentheses(self._rejected)),
            *(self._failed.total(), "task" if self._failed.total() == 1 else "tasks", _in_parentheses(self._failed)),
            spread,
            seconds,
        )
        self._staleness = []
        self._num_bytes = 0
        self._rejected.clear()
        self._failed.clear()

    def flush(self) -> None:
        """Log one line with the number of events per node that were not logged individually."""
        if not self._unlogged:
            return
        listed = [
            f"node {node}: {what} {_times(count)}"
            for (node, what), count in self._unlogged.most_common(MAX_LISTED_NODES)
        ]
        others = len(self._unlogged) - len(listed)
        more = f"; and {others} more" if others else ""
        LOG.warning("Not shown above (%d): %s%s", self._unlogged.total(), "; ".join(listed), more)
        self._unlogged.clear()

    def _log(self, node: int, what: str, kind: str, reason: str) -> None:
        self._events[node, what] += 1
        count = self._events[node, what]
        is_new = (node, what, kind) not in self._known_kinds
        self._known_kinds.add((node, what, kind))
        if is_new or _is_power_of_two(count):
            LOG.warning("node %d: %s (%d so far): %s", node, what, count, one_line(reason, MAX_REASON_LENGTH))
        else:
            self._unlogged[node, what] += 1


def log_start(name: str, num_rounds: int, arrays: ArrayRecord, configs: Mapping[str, Mapping[str, object]]) -> None:
    """Log the arguments of `start` in the format of Flower's strategies.

    Args:
        name: the name of the strategy.
        num_rounds: the number of rounds.
        arrays: the initial model.
        configs: the configurations for `"train"` and `"evaluate"`.
    """
    LOG.info("Starting %s strategy:", name)
    LOG.info("\t├── Number of rounds: %d", num_rounds)
    LOG.info("\t├── ArrayRecord (%.2f MB)", sum(len(array.data) for array in arrays.values()) / 2**20)
    for purpose, config in configs.items():
        LOG.info("\t├── ConfigRecord (%s): %s", purpose, dict(config) or "(empty!)")


def log_metrics(metrics: MetricRecord | None, name: str = "Aggregated MetricRecord") -> None:
    """Log the metrics of a round in the format of Flower's strategies."""
    if metrics is not None:
        LOG.info("\t└──> %s: %s", name, metrics)


def _in_parentheses(counts: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{kind} {count}' for kind, count in sorted(counts.items()))})" if counts else ""


def _is_power_of_two(count: int) -> bool:
    return count & (count - 1) == 0


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
