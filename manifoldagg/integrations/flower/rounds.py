"""Progress and metrics of finished rounds, in memory and in a file next to the checkpoint."""

from pathlib import Path
from typing import Any

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from manifoldagg import tensor_file

__all__ = ["Rounds"]

FILE_KIND = "rounds"
METRIC_TABLES = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


class Rounds:
    """Finished rounds: their metrics, and the number of accepted updates after each round.

    Args:
        path: the path of the server's checkpoint. The method `write` stores the rounds in the file `path.rounds`. With
            `None`, the rounds are not stored.

    Attributes:
        cumulative_updates: the total number of accepted updates before the first round and after each round.
        result: the metrics and the last model as a Flower `Result`.

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
        """Record the end of a round.

        Args:
            updates: the total number of accepted updates since the start of the first round.
        """
        self.cumulative_updates.append(updates)

    def record(self, table: str, server_round: int, metrics: MetricRecord | None) -> None:
        """Add the metrics of a round to a table of `result`. With `None` as metrics, do nothing."""
        if metrics is not None:
            getattr(self.result, table)[server_round] = metrics

    def write(self) -> None:
        """Write the rounds to the file. The write is atomic.

        Raises:
            CheckpointError: if the file cannot be written.
        """
        if self._path is not None:
            tables = {name: {n: dict(x) for n, x in getattr(self.result, name).items()} for name in METRIC_TABLES}
            tensor_file.save(self._path, FILE_KIND, {"cumulative_updates": self.cumulative_updates, "tables": tables})

    def read(self, updates: int) -> None:
        """Read the finished rounds from the file, except the rounds that the server has to repeat.

        The server repeats the last rounds in the file if it has resumed from a checkpoint that is older than the file.

        Args:
            updates: the total number of updates that the server has accepted.

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
