"""Settings of the weight average (SWA) that every run of a comparison computes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from manifoldagg._validation import check_count, check_number
from manifoldagg.averaging import SWA
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.spec_parser import build, parse_spec
from manifoldagg.experiments.tuning import with_option
from manifoldagg.federated import Rule
from manifoldagg.federated.server.client_sampling import rule_attribute
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.simulation.method import Method

__all__ = ["WeightAveraging"]


@dataclass(frozen=True)
class WeightAveraging:
    """The settings of the weight average ([`SWA`][manifoldagg.averaging.SWA]) that every run of a comparison computes.

    The server numbers the versions of its model. The average includes each version whose number is at least `start` and
    a multiple of `cycle`. By default, the average is evaluated, but it does not change the model. With `period`, the
    average replaces the model at regular intervals.

    Args:
        start: the first version. A number below 1 is a fraction of the versions of a run. A run has `num_updates`
            versions, or `num_updates` / K versions if a step of the rule needs K updates.
        cycle: the interval between averaged versions.
        period: the interval after which a rule overwrites the model with its own average and starts a new average. Only
            rules with an option `periodic`, such as `AsyncCurve`, use `period`. `period` sets their options
            `start`, `cycle` and `periodic`.

    Raises:
        ArgumentError: if a value is invalid. The message names it.

    Source: Izmailov et al. 2018; Guo et al. 2022 (periodic).

    Example:
        >>> from manifoldagg.federated.rules import FedAsync, FedBuff
        >>> settings = WeightAveraging.parse("start=0.75,cycle=5")
        >>> [settings.first_version(rule, num_updates=200) for rule in (FedAsync(), FedBuff(size=5))]
        [150, 30]
    """

    start: float = 0.75
    cycle: int = 1
    period: int | None = None

    def __post_init__(self) -> None:
        if check_number("start", self.start, at_least=0) >= 1:
            check_count("start", self.start)  # type: ignore[arg-type]
        check_count("cycle", self.cycle)
        if self.period is not None:
            check_count("period", self.period)

    @staticmethod
    def parse(text: str) -> "WeightAveraging":
        """Parse the options of `manifoldagg compare --swa`, such as `"start=0.75,cycle=5"`.

        Raises:
            ArgumentError: if an option is unknown, or its value is invalid.
        """
        return build("swa", WeightAveraging, parse_spec("swa", f"swa:{text}").options)

    def first_version(self, rule: Rule, num_updates: int) -> int:
        """Return the number of the first averaged version in a run with the given rule."""
        if self.start >= 1:
            return int(self.start)
        buffered = rule_attribute(rule, "buffer_size") or rule_attribute(rule, "size") or 1
        return math.ceil(self.start * num_updates / buffered)

    def for_run(self, rule: Rule, num_updates: int) -> Callable[[ParameterSpace], SWA]:
        """Return the argument `averaging` of [`run`][manifoldagg.simulation.run]."""
        return partial(SWA, start=self.first_version(rule, num_updates), cycle=self.cycle)

    def apply(self, methods: Sequence[Method], num_updates: int, clients: Sequence[int]) -> list[Method]:
        """Return the methods, with periodic averaging in their rules if `period` is set.

        Raises:
            ArgumentError: if `period` is given, and no rule has an option `periodic`.
        """
        if self.period is None:
            return list(methods)
        found = []
        for method in methods:
            rule: Any = method.bind(clients).rule
            if hasattr(rule, "periodic"):
                start = self.first_version(rule, num_updates)
                for name, value in (("start", start), ("cycle", self.cycle), ("periodic", self.period)):
                    method = with_option(method, name, value)
            found.append(method)
        if found == list(methods):
            raise ArgumentError("swa: period: expected a rule that writes its average, such as asynccurve; omit period")
        return found
