"""Empirical delays: measured computation and communication times of devices, read from a CSV file."""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from manifoldagg._validation import check_number, check_vector
from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.clock import check_generator
from manifoldagg.simulation.delays import Delay, set_fields

__all__ = ["Empirical", "assign_profiles"]

C = TypeVar("C", bound=int | str)
D = TypeVar("D", bound=Delay)
COLUMNS = ("client", "computation_s", "round_s")


@dataclass(frozen=True)
class Empirical(Delay):
    r"""Empirical distribution of measured tasks: `work` units take $\operatorname{work} \cdot t_i + c_i$ seconds.

    All measured tasks i are equally likely. The computation time is proportional to the work, but the communication
    time is not. Both times of a draw come from the same task.

    Args:
        computation: the computation times $t_i$ in seconds per unit of work, (n,).
        communication: the communication times $c_i$ in seconds per task, (n,). The default is 0.

    Raises:
        ArgumentError: if a number is invalid. The message names it.

    Example:
        >>> delay = Empirical((1.0, 3.0), (0.5, 0.25))
        >>> delay.quantile(0.75), delay.expected(), delay.expected(work=2.0)
        (3.25, 2.375, 4.375)
    """

    computation: tuple[float, ...]
    communication: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        computation = check_vector("computation", self.computation, at_least=0)
        none = isinstance(self.communication, tuple | list) and not self.communication
        sent = np.zeros_like(computation) if none else check_vector("communication", self.communication, at_least=0)
        if len(sent) != len(computation):
            raise ArgumentError(f"communication: expected {len(computation)} tasks as in computation, got {len(sent)}")
        order = np.argsort(computation + sent, kind="stable")
        set_fields(self, computation=tuple(computation[order].tolist()), communication=tuple(sent[order].tolist()))

    @property
    def delays(self) -> tuple[float, ...]:
        """The sorted delays of the measured tasks for one unit of work, (n,), for fits of other distributions."""
        return tuple(t + c for t, c in zip(self.computation, self.communication, strict=True))

    def expected(self, work: float = 1.0) -> float:
        return work * float(np.mean(self.computation)) + float(np.mean(self.communication))

    def draw(self, generator: np.random.Generator, work: float = 1.0) -> float:
        i = int(generator.random() * len(self.computation))
        return work * self.computation[i] + self.communication[i]

    def _mean(self) -> float:
        return float(np.mean(self.delays))

    def _invert(self, probability: float) -> float:
        return self.delays[int(probability * len(self.computation))]

    @staticmethod
    def from_csv(path: Path | str, *, work: float = 1.0, size_ratio: float = 1.0) -> "dict[str, Empirical]":
        """Read the profiles of measured devices, by the column `client`.

        The columns `computation_s` and `round_s` contain the seconds of the computation alone and of the whole task.
        Further columns are ignored.

        Args:
            path: the path of a CSV file with a header.
            work: the number of units of work per measured task. Computation times are divided by it.
            size_ratio: the ratio of the bytes of the simulated model to the bytes of the measured model. Communication
                times are multiplied by it.

        Returns:
            A profile for each client, in the order of their first rows.

        Raises:
            ArgumentError: if the file is invalid. The message names the file and the line.

        Source: OrthoFL D.4.
        """
        check_number("work", work, above=0)
        check_number("size_ratio", size_ratio, at_least=0)
        rounds: dict[str, list[tuple[float, float]]] = {}
        try:
            with Path(path).open(newline="", encoding="utf-8-sig") as file:
                rows = csv.DictReader(file, strict=True)
                columns = rows.fieldnames or ()
                missing = [name for name in COLUMNS if name not in columns]
                if missing:
                    raise ArgumentError(f"path: {path} has no column {', '.join(missing)}")
                double = [name for name in COLUMNS if list(columns).count(name) > 1]
                if double:
                    raise ArgumentError(f"path: {path} has several columns {', '.join(double)}")
                for row in rows:
                    if None in row:
                        raise ArgumentError(f"path: {path}, line {rows.line_num}: expected {len(columns)} fields")
                    client, computation, whole = (row[name] for name in COLUMNS)
                    if not client:
                        raise ArgumentError(
                            f"path: {path}, line {rows.line_num}: client: expected a name, got an empty string"
                        )
                    rounds.setdefault(client, []).append(
                        _parse_round(f"path: {path}, line {rows.line_num}", computation, whole)
                    )
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ArgumentError(f"path: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if not rounds:
            raise ArgumentError(f"path: {path} has no tasks")
        return {
            client: Empirical(tuple(t / work for t, _ in parts), tuple(c * size_ratio for _, c in parts))
            for client, parts in rounds.items()
        }


def assign_profiles(profiles: Mapping[str, D], clients: Iterable[C], generator: np.random.Generator) -> dict[C, D]:
    """Assign a random profile to each client, with replacement.

    Args:
        profiles: the profiles, such as the result of `Empirical.from_csv`.
        clients: the clients.
        generator: the random generator, which draws one number per client.

    Raises:
        ArgumentError: if `profiles` is empty.

    Source: OrthoFL §5.1.

    Example:
        >>> assign_profiles({"pi": Empirical((1.0,))}, range(2), np.random.default_rng(0))[1].delays
        (1.0,)
    """
    check_generator(generator)
    if not profiles:
        raise ArgumentError("profiles: expected at least one profile, got an empty mapping")
    listed = list(profiles.values())
    return {client: listed[int(generator.integers(len(listed)))] for client in clients}


def _parse_round(where: str, computation: str | None, whole: str | None) -> tuple[float, float]:
    """Parse the seconds of computation and of communication in a row."""
    try:
        seconds = float(computation or "")
        total = float(whole or "")
    except ValueError:
        raise ArgumentError(f"{where}: expected two numbers, got {computation!r} and {whole!r}") from None
    check_number(f"{where}: computation_s", seconds, at_least=0)
    return seconds, check_number(f"{where}: round_s", total, at_least=seconds) - seconds
