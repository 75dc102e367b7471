"""Combine the runs of `evidence.toml` into a report for each task, and compare every method with the proposed method.

    python benchmarks/papers/tables.py [--results benchmarks/results/papers]

The script skips missing reports, and prints their names. It writes these tables to the folder `joined`. The page
docs/benchmark_results.md includes them:

- `digits.md` and similar files: selected methods with few columns
- `underway.md`: the accuracy by concurrency
- `delays.md`: the time to a common target accuracy by distribution of the delays
- `pooled.md`: tests over all pairs of task and seed
"""

import argparse
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from records import RESULTS, ROOT, table

from manifoldagg._io import new_figure
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.combined_report import CombinedReport, load_reports, write_combined_report
from manifoldagg.experiments.plots import draw_accuracy
from manifoldagg.experiments.report import LoggedRun
from manifoldagg.experiments.statistics import MeanCI, compare_pairs, mean_ci
from manifoldagg.simulation.cost import AXES, first_reaching, last_within_budget

PICTURES = ROOT / "docs" / "assets" / "evidence"
FORWARD = "AsyncCorrected(correction=autothreshold)"
JOINED = {
    "{0}": ("{0}", "{0}-ace", "{0}-path", "{0}-fewer-2", "{0}-fewer-4", "{0}-gradients"),
    "{0}-five": ("{0}-five", "{0}-path-five", "{0}-cohorts"),
    "{0}-long": ("{0}-long", "{0}-long-cohorts", "{0}-long-path", "{0}-long-constant", "{0}-long-constant-cohorts"),
    "{0}-long-five": ("{0}-long-five",),
}
TASKS = ("digits", "mnist", "shakespeare")
DRAWN = ("FedAvg", "FedAvg, constant rate", "AsyncKrylov", FORWARD, "FedOrtho", "ASGD", "FedAsync", "OrthoFL")
"""The methods in the plots. More lines would not be distinguishable."""
SHOWN = (
    *("AsyncKrylov", "AsyncKrylov(pieces=4)", "AsyncKrylov(pieces=2)"),
    *("FedAvg", "HeLoCo", FORWARD, "FedOrtho", "OrthoFL", "AsyncBezier(threshold=auto)", "DCASGD", "FedBuff", "FedGS"),
    *("ASGD", "CA2FL", "ACE", "Momentum", "AsyncBezier", "FedAsync", "AsyncFedED"),
    *("AsyncBezier(trainer=trajectory, pull_back=none, threshold=auto)", "FedOrtho(trainer=scheduled, steps=0.5)"),
    *("GeneralizedAsyncSGD", "ASGD(trainer=local, steps=1)"),
)
"""The methods in the short tables."""
PICTURED = {name: f"{name}/accuracy-gradients.png" for name in (*TASKS, "digits-long")} | {"underway": "underway.png"}
UNDERWAY = {2: "digits-two", 5: "digits-five", 10: "digits-ten", 20: "digits-twenty", 30: "digits"}
COUNTED = (FORWARD, "ASGD", "FedAsync", "OrthoFL", "FedBuff")
DELAYS = ("measured", "lognormal", "halfnormal", "uniform")
SLOWEST_SHARE = 0.95
"""The target as a fraction of the final accuracy of the worst method, as in OrthoFL, Table 2."""
POOLED = (FORWARD, "AsyncKrylov")
POOLS = tuple((f"{task}{many}", f"{task}-path{many}") for task in TASKS for many in ("", "-five"))
FALLS = r"=cosine, trainer\.{0}\.start=1, trainer\.{0}\.end=0\.\d+, trainer\.{0}\.period=\d+"
SAID = (
    (re.compile(r"rate=cosine, rate\.end=0, rate\.period=\d+(, )?"), ""),
    (re.compile(r"trainer=scheduled, trainer\.rate" + FALLS.format("rate")), "local rate falls"),
    (re.compile(r"trainer=scheduled, trainer\.steps" + FALLS.format("steps")), "local steps fall"),
    (re.compile(r", (?=\))|\(\)"), ""),
)
"""Patterns that shorten the names of methods in tables of long runs, where the rate falls by default."""


def main() -> None:
    """Write the reports and print their names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    # The notes of a report contain the paths of its folders, so the paths must be relative to the repository.
    results = Path(os.path.relpath(given.results, ROOT))
    os.chdir(ROOT)
    for task in TASKS:
        for name, parts in JOINED.items():
            try:
                print(report(results, name.format(task), [part.format(task) for part in parts]))
            except ArgumentError as error:
                print(f"{name.format(task)}: {error}")
    if all((results / folder).is_dir() for folder in UNDERWAY.values()):
        underway(results)
    if kinds := [name for name in DELAYS if (results / f"digits-{name}").is_dir()]:
        delays(results, kinds)
    pooled(results)
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, file in PICTURED.items():
        if (results / "joined" / file).exists():
            shutil.copyfile(results / "joined" / file, PICTURES / f"{name}.png")


def report(results: Path, name: str, parts: Sequence[str]) -> str:
    """Write a combined report, and replace its plots by plots of selected methods."""
    joined = joined_of(results, parts)
    folder = results / "joined" / name
    ((task, methods),) = joined.runs.items()
    called = {_plain(method, name): method for method in methods}
    forward = called.get(FORWARD, FORWARD)
    for file in write_combined_report(joined, folder, axis="gradients", baseline=forward):
        if file.suffix in (".png", ".tex"):
            file.unlink()
    drawn = {
        method: [run.evaluations for run in methods[called[method]].values()] for method in DRAWN if method in called
    }
    for axis in AXES:
        draw_accuracy(folder / f"accuracy-{axis}.png", drawn, target=joined.targets[task], title=name, axis=axis)
    folder.with_suffix(".md").write_text(short(joined, name, forward) + "\n")
    missing = ", ".join(part for part in parts if not (results / part).is_dir())
    return f"{folder}{f': without {missing}' if missing else ''}"


def joined_of(results: Path, parts: Sequence[str]) -> CombinedReport:
    """Combine the existing reports.

    Raises:
        ArgumentError: if none of the reports exists.
    """
    return load_reports([results / part for part in parts if (results / part).is_dir()])


def short(joined: CombinedReport, name: str, forward: str) -> str:
    """Return a table of selected methods, sorted by the final accuracy."""
    beside = {one.method: one for one in joined.differences(forward).itertuples()}
    frame = joined.frame().sort_values("final", ascending=False, kind="stable")
    lines = []
    for row in frame.itertuples():
        if row.method not in SHOWN and "-long" not in name:
            continue
        there = beside.get(row.method)
        equal = "" if there is None else _points(there.at_gradients, there.at_gradients_high, "+")
        time = f"{row.time_to_target:.1f} ({row.num_reached} of {row.seeds})" if row.num_reached else "never"
        final = _points(row.final, row.final_high)
        lines.append([_plain(row.method, name), final, equal, time, f"{row.gini:.3f}"])
    return table(
        ["method", "final accuracy, %", "difference at equal gradients", "seconds to the target", "Gini"], lines
    )


def _plain(method: str, report: str) -> str:
    """Return the name of a method without the options that most methods of its table share."""
    if "-long" in report and "cosine" not in method:
        return f"{method}, constant rate"
    for pattern, words in SAID:
        method = pattern.sub(words, method)
    return method


def _points(mean: float, high: float, sign: str = "") -> str:
    return f"{100 * mean:{sign}.1f} ± {100 * (0 if math.isnan(high) else high - mean):.1f}"


def _mean_points(mean: MeanCI) -> str:
    return f"{100 * mean.value:.1f} ± {100 * (mean.half_width or 0):.1f}"


def underway(results: Path) -> None:
    """Write a table and a plot of the final accuracy by concurrency."""
    found: dict[str, dict[int, MeanCI]] = {method: {} for method in COUNTED}
    for count, folder in UNDERWAY.items():
        ((_, methods),) = joined_of(results, [folder]).runs.items()
        for method in COUNTED:
            found[method][count] = _final(methods[method])
    rows = [[method, *map(_mean_points, means.values())] for method, means in found.items()]
    text = table(["method, concurrency", *map(str, UNDERWAY)], rows)
    (results / "joined" / "underway.md").write_text(text + "\n")
    figure = new_figure(6.4, 3.6)
    axes = figure.subplots()
    for i, (method, means) in enumerate(found.items()):
        x = [count + 0.15 * (i - 2) for count in means]
        y, half = ([100 * getattr(mean, what) for mean in means.values()] for what in ("value", "half_width"))
        axes.errorbar(x, y, half, label=method, capsize=2, marker="o", markersize=3)
    axes.set_xlabel("concurrency (clients in flight)")
    axes.set_ylabel("accuracy after 200 updates, %")
    axes.legend(fontsize="small")
    figure.savefig(results / "joined" / "underway.png")


def delays(results: Path, kinds: Sequence[str]) -> None:
    """Write the final accuracy and the time to the target relative to FedAvg, by distribution of the delays.

    The target is 95 % of the final accuracy of the worst method, without variants of OrthoFL.
    """
    rows: dict[str, list[str]] = {}
    for name in kinds:
        ((_, methods),) = joined_of(results, [f"digits-{name}", f"digits-{name}-path"]).runs.items()
        ends = {method: _final(runs) for method, runs in methods.items()}
        target = SLOWEST_SHARE * min(mean.value for method, mean in ends.items() if "OrthoFL(" not in method)
        for method, runs in methods.items():
            parts = [
                hit.time / base.time
                for seed, run in runs.items()
                if (hit := first_reaching(run.evaluations, target))
                and (base := first_reaching(methods["FedAvg"][seed].evaluations, target))
            ]
            soon = f"{mean_ci(parts).value:.3f} ({len(parts)} of {len(runs)})" if parts else "never"
            rows.setdefault(method, []).extend([_mean_points(ends[method]), soon])
    heads = [f"{name}: {what}" for name in kinds for what in ("final accuracy, %", "time")]
    lines = [[method, *cells, *[""] * (len(heads) - len(cells))] for method, cells in rows.items()]
    (results / "joined" / "delays.md").write_text(table(["method", *heads], lines) + "\n")


def pooled(results: Path) -> None:
    """Write Wilcoxon's tests over all pairs of task, concurrency and seed, at equal updates and at equal gradients."""
    lines = []
    for axis, terms in (("updates", "equal updates"), ("gradients", "equal gradients")):
        for pair in compare_pairs(pd.DataFrame(_scores(results, axis))).itertuples():
            if not math.isnan(pair.adjusted_p_value) and {pair.first, pair.second} & {*POOLED}:
                sign = 1 if pair.first in POOLED else -1
                one, other = (pair.first, pair.second)[::sign]
                better, worse = (pair.wins, pair.losses)[::sign]
                cells = [one, other, terms, f"{100 * sign * pair.median_difference:+.1f}"]
                lines.append([*cells, f"{better} to {worse}", _probability(pair.adjusted_p_value)])
    heads = [
        "method",
        "compared with",
        "at",
        "median difference, percentage points",
        "pairs better to worse",
        "p, Holm",
    ]
    (results / "joined" / "pooled.md").write_text(table(heads, lines) + "\n")


def _probability(value: float) -> str:
    return f"{value:.4f}" if value >= 1e-4 else "< 0.0001"


def _scores(results: Path, axis: str) -> dict[str, dict[Any, float]]:
    """Return the accuracy of each run at the largest cost that all runs of its table reached, by method."""
    scores: dict[str, dict[Any, float]] = {}
    for parts in POOLS:
        if not any((results / part).is_dir() for part in parts):
            continue
        joined = joined_of(results, parts)
        ((task, methods),) = joined.runs.items()
        budget = joined.budget(task, axis)
        for method, runs in methods.items():
            for seed, run in runs.items():
                scores.setdefault(method, {})["+".join(parts), seed] = last_within_budget(
                    run.evaluations, axis, budget
                ).accuracy
    return scores


def _final(runs: Mapping[int, LoggedRun]) -> MeanCI:
    """Return the mean final accuracy of the runs of a method."""
    return mean_ci([run.evaluations[-1].accuracy for run in runs.values()])


if __name__ == "__main__":
    main()
