"""Flower's rounds: the progress and the metrics of finished rounds, in memory and next to a checkpoint."""

from pathlib import Path
from typing import Any

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from manifoldagg import tensor_file

__all__ = ["Rounds"]

FILE_KIND = "rounds"
METRIC_TABLES = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


class Rounds:
    """The finished rounds: the number of accepted updates at the end of each round, and their metrics.

    Args:
        path: the path of the server's checkpoint; the rounds are stored as `path.rounds`. `None`: they are not stored.

    Attributes:
        cumulative_updates: the number of accepted updates before the first round and at the end of each round.
        result: the result in Flower's form.

    Example:
        >>> rounds = Rounds()
        >>> rounds.record("train_metrics_clientapp", 1, MetricRecord({"loss": 0.5}))
        >>> rounds.finish_round(10)
        >>> rounds.count, rounds.cumulative_updates, rounds.result.train_metrics_clientapp
        (1, [0, 10], {1: {'loss': 0.5}})
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = None if path is None else path.with_name(f"{path.name}.rounds")
        self.cumulative_updates = [0]
        self.result = Result()

    @property
    def count(self) -> int:
        """The number of finished rounds."""
        return len(self.cumulative_updates) - 1

    def finish_round(self, updates: int) -> None:
        """Record the end of a round and the total number of accepted updates."""
        self.cumulative_updates.append(updates)

    def record(self, table: str, server_round: int, metrics: MetricRecord | None) -> None:
        """Add the metrics of a round to a table of the result, if there are any."""
        if metrics is not None:
            getattr(self.result, table)[server_round] = metrics

    def write(self) -> None:
        """Write the rounds atomically.

        Raises:
            CheckpointError: if the file cannot be written.
        """
        if self._path is not None:
            tables = {name: {n: dict(x) for n, x in getattr(self.result, name).items()} for name in METRIC_TABLES}
            tensor_file.save(self._path, FILE_KIND, {"cumulative_updates": self.cumulative_updates, "tables": tables})

    def read(self, updates: int) -> None:
        """Read the saved rounds, up to the number of accepted updates of the server.

        Raises:
            CheckpointError: if the file is invalid.
        """
        if self._path is None or not self._path.exists():
            return  # no round was finished
        kept: Any = tensor_file.load(self._path, FILE_KIND)
        self.cumulative_updates = [end for end in kept["cumulative_updates"] if end <= updates]
        for name in METRIC_TABLES:
            for number, metrics in kept["tables"][name].items():
                if number <= self.count:
                    self.record(name, number, MetricRecord(metrics))
