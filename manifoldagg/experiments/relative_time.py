r"""The time to a common target accuracy relative to a baseline, which is OrthoFL's measure of speed.

Let $\bar a_m$ be the mean final accuracy of method $m$ over its seeds. The target accuracy of a problem is

$$ a^* = 0.95 \min_m \bar a_m. $$

Let $t_{m,s}$ be the virtual time at which the run of method $m$ with seed $s$ first has an accuracy of at least $a^*$.
The relative time of the run is $t_{m,s} / t_{b,s}$ for the baseline $b$, paired by seed.

A run can end before it reaches the target. Its time is then right-censored: the time to the target is greater than the
time $T_{m,s}$ at the end of the run. Censored runs are counted, and they contribute only to a lower bound.

Source: OrthoFL §5.1 (evaluation metrics) and Table 2.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from manifoldagg._validation import check_number
from manifoldagg.experiments.report import LoggedRun, Runs
from manifoldagg.experiments.spec_parser import choose
from manifoldagg.experiments.statistics import interval_columns, mean_ci
from manifoldagg.simulation.cost import first_reaching

__all__ = ["FRACTION", "common_target", "relative_times"]

FRACTION = 0.95
"""The target as a fraction of the lowest mean final accuracy."""


def common_target(methods: Mapping[str, Mapping[int, LoggedRun]], fraction: float = FRACTION) -> float:
    r"""Compute the target accuracy $a^* = f \min_m \bar a_m$ of the methods of one problem.

    Args:
        methods: the runs by method and seed.
        fraction: the fraction f, in (0, 1].

    Raises:
        ArgumentError: if the fraction is out of range.
    """
    check_number("fraction", fraction, above=0, at_most=1)
    means = [mean_ci([run.evaluations[-1].accuracy for run in seeds.values()]).value for seeds in methods.values()]
    return fraction * min(means)


def relative_times(runs: Runs, baseline: str = "FedAvg", *, fraction: float = FRACTION) -> pd.DataFrame:
    """Compute the time to the common target relative to a baseline, for each problem and method.

    Args:
        runs: the runs by problem, method and seed.
        baseline: the method whose time is 1.
        fraction: the target as a fraction of the lowest mean final accuracy, in (0, 1].

    Returns:
        A row for each problem that contains the baseline, and each of its methods, with these columns:

        - `problem`, `method`, `baseline`, and the `target`.
        - `seeds`: the number of runs of the method.
        - `num_censored`: the number of runs of the method that end before the target.
        - `num_pairs`: the number of seeds for which both runs reach the target at a positive time.
        - `num_unpaired`: the number of seeds without a relative time or a bound. The baseline has no run with this
          seed, does not reach the target, or reaches it at time 0.
        - `relative_time`, `relative_time_low` and `relative_time_high`: the mean over the `num_pairs` seeds with its
          95 % interval. The values are NaN without a pair.
        - `relative_time_bound`: the mean in which each censored run counts with its final time. If a run is censored,
          the mean relative time of all these seeds is greater than this bound. Otherwise, the two are equal.

    Raises:
        ArgumentError: if no problem contains the baseline, or the fraction is out of range.
    """
    choose("baseline", "method", baseline, dict.fromkeys(name for methods in runs.values() for name in methods))
    rows = []
    for problem, methods in runs.items():
        if baseline not in methods:
            continue
        target = common_target(methods, fraction)
        for method, seeds in methods.items():
            row = {"problem": problem, "method": method, "baseline": baseline, "target": target, "seeds": len(seeds)}
            rows.append(row | _relative_time(seeds, methods[baseline], target))
    return pd.DataFrame(rows)


def _relative_time(seeds: Mapping[int, LoggedRun], base: Mapping[int, LoggedRun], target: float) -> dict[str, object]:
    reached = []
    bounds = []
    num_censored = 0
    for seed, run in seeds.items():
        hit = first_reaching(run.evaluations, target)
        num_censored += hit is None
        start = first_reaching(base[seed].evaluations, target) if seed in base else None
        if start is not None and start.time > 0:
            bounds.append((hit or run.evaluations[-1]).time / start.time)
            reached += [] if hit is None else bounds[-1:]
    return {
        "num_censored": num_censored,
        "num_pairs": len(reached),
        "num_unpaired": len(seeds) - len(bounds),
        **interval_columns("relative_time", reached),
        "relative_time_bound": mean_ci(bounds).value if bounds else np.nan,
    }
