"""Rounds: what those so far have come to, in memory and beside a checkpoint."""

from pathlib import Path
from typing import Any

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from manifoldagg.federated.server.durability import tensor_file

__all__ = ["Rounds"]

KIND = "rounds"
TABLES = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


class Rounds:
    """The rounds that are over: how many updates the server had accepted by the end of each, and their metrics.

    Args:
        path: of the server's checkpoint, beside which they are kept as `path.rounds`; `None`: nowhere.

    Attributes:
        ends: accepted updates by the end of each round, and before the first.
        result: of Flower.

    Example:
        >>> rounds = Rounds()
        >>> rounds.enter("train_metrics_clientapp", 1, MetricRecord({"loss": 0.5}))
        >>> rounds.end(10)
        >>> rounds.count, rounds.ends, rounds.result.train_metrics_clientapp
        (1, [0, 10], {1: {'loss': 0.5}})
    """

    def __init__(self, path: Path | None = None) -> None:
        self._place = None if path is None else path.with_name(f"{path.name}.rounds")
        self.ends = [0]
        self.result = Result()

    @property
    def count(self) -> int:
        """How many are over."""
        return len(self.ends) - 1

    def end(self, updates: int) -> None:
        """Another one is over, after so many updates in all."""
        self.ends.append(updates)

    def enter(self, table: str, number: int, metrics: MetricRecord | None) -> None:
        """Enter metrics of a round in a table of the result, if there are any."""
        if metrics is not None:
            getattr(self.result, table)[number] = metrics

    def write(self) -> None:
        """Keep them, whole or not at all.

        Raises:
            CheckpointError: with what the system says.
        """
        if self._place is not None:
            tables = {name: {n: dict(x) for n, x in getattr(self.result, name).items()} for name in TABLES}
            tensor_file.write(self._place, KIND, {"ends": self.ends, "tables": tables})

    def read(self, updates: int) -> None:
        """Go on from those that were kept, as far as a server with so many accepted updates has come.

        Raises:
            CheckpointError: if the file is not what was written.
        """
        if self._place is None or not self._place.exists():
            return  # no round was over
        kept: Any = tensor_file.read(self._place, KIND)
        self.ends = [end for end in kept["ends"] if end <= updates]
        for name in TABLES:
            for number, metrics in kept["tables"][name].items():
                if number <= self.count:
                    self.enter(name, number, MetricRecord(metrics))
