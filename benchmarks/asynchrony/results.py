"""Compute the tables, the figure and the page of benchmark results from the logs.

    python benchmarks/asynchrony/results.py [--check]

The script writes a table for each task and `pooled.md` to `benchmarks/results/asynchrony`, and draws
`docs/assets/evidence/time_to_target.png`. It renders `docs/benchmark_results.md` from `page.md.j2`, so
that the measured numbers of the page come from the logs. With `--check`, it writes nothing, and fails if the page or a
table differs from the logs.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from scipy import stats

from manifoldagg._io import new_figure
from manifoldagg.experiments.combined_report import load_reports, markdown_table
from manifoldagg.experiments.statistics import MeanCI, holm, mean_ci
from manifoldagg.simulation.cost import first_reaching

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "asynchrony"
PAPERS = ROOT / "benchmarks" / "results" / "papers"
PAGE = ROOT / "docs" / "benchmark_results.md"
TEMPLATE = Path(__file__).with_name("page.md.j2")
FIGURE = ROOT / "docs" / "assets" / "evidence" / "time_to_target.png"
TASKS = {"fashion": "Fashion-MNIST", "shakespeare": "Shakespeare", "watch": "Watch"}
PARTS = ("", "-more", "-ca2fl", "-last", "-curves", "-rounds")
"""The endings of the tables of one task in scenario A."""
BASELINE = "FedAvg"
OVER = "FedAvg, 30 % over-selection"
FORWARD = "AsyncKrylov"
TIME_LIMITS = (150, 12_000)
TIME_TICKS = (300, 1_000, 3_000, 10_000)
"""The time axis of the figure, in seconds."""
NAMES = {
    "FedAvg(cohort=10, trainer.epochs=1)": "FedAvg",
    "FedAvg(cohort=10, over_selection=0.3, trainer.epochs=1)": OVER,
    "FedAvg(cohort=7, trainer.epochs=1)": "FedAvg",
    "FedAvg(cohort=7, over_selection=0.3, trainer.epochs=1)": OVER,
    "AsyncKrylov(pieces=2, epochs=1)": "AsyncKrylov",
    "AsyncCorrected(correction=autothreshold, epochs=1)": "AutoThreshold",
    "FedOrtho(epochs=1)": "FedOrtho",
    "ASGD(epochs=1)": "ASGD",
    "FedAsync(epochs=1)": "FedAsync",
    "FedBuff(epochs=1)": "FedBuff",
    "CA2FL(epochs=1)": "CA²FL",
    "OrthoFL(epochs=1)": "OrthoFL",
    "AsyncBezier(epochs=1+1)": "AsyncBezier",
}
"""The display names of the methods of scenario A."""
LONG_TASKS = ("mnist", "shakespeare")
"""The tasks of scenario D."""
CONCURRENCIES = (2, 5, 10, 30)
"""The numbers of clients in flight of scenario C."""
SHORT_RUN = 200
"""The number of updates of a short run."""


@cache
def runs(task: str, delays: str = "measured") -> pd.DataFrame:
    """Return a row for each run of scenario A.

    The columns are `method`, `seed`, `target`, `time` (the virtual seconds to the target, or the whole virtual time),
    `reached`, `final`, `ended` (whether the run used the whole virtual time), `gini` and `megabytes`.
    """
    found = [RESULTS / f"{task}-{delays}{part}" for part in PARTS]
    combined = load_reports([folder for folder in found if folder.is_dir()])
    ((problem, methods),) = combined.runs.items()
    rows = []
    for method, seeds in methods.items():
        for seed, run in seeds.items():
            settings = read_settings(run.folder)
            hit = first_reaching(run.evaluations, combined.targets[problem])
            last = run.evaluations[-1]
            rows.append(
                {
                    "method": NAMES[method],
                    "seed": seed,
                    "target": combined.targets[problem],
                    "time": float(settings["duration"]) if hit is None else hit.time,
                    "reached": hit is not None,
                    "final": last.accuracy,
                    "ended": last.updates < settings["num_updates"],
                    "gini": last.gini,
                    "megabytes": (last.bytes_up + last.bytes_down) / 1e6,
                }
            )
    return pd.DataFrame(rows)


@cache
def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a report."""
    settings: dict[str, Any] = json.loads((folder / "results.json").read_text())["settings"]
    return settings


def tasks(delays: str = "measured") -> dict[str, str]:
    """Return the names of the tasks of scenario A whose runs are stored."""
    return {task: name for task, name in TASKS.items() if (RESULTS / f"{task}-{delays}").is_dir()}


def log_ratios(task: str, method: str, delays: str = "measured") -> list[float]:
    """Return the logarithm of the time to the target relative to FedAvg, for each seed."""
    times = runs(task, delays).pivot(index="seed", columns="method", values="time")
    return [float(value) for value in np.log(times[method] / times[BASELINE])]


def format_ratio(ratio: MeanCI) -> str:
    """Format the mean of a log ratio as a ratio with its 95 % interval.

    >>> format_ratio(MeanCI(0.0, 0.5, 5))
    '1.00 (0.61 to 1.65)'
    """
    if ratio.low is None or ratio.high is None:
        return f"{np.exp(ratio.value):.2f}"
    return f"{np.exp(ratio.value):.2f} ({np.exp(ratio.low):.2f} to {np.exp(ratio.high):.2f})"


def format_percent(values: pd.Series) -> str:
    """Format the mean of accuracies with its 95 % interval, in percent."""
    found = mean_ci([100 * value for value in values])
    return f"{found.value:.1f} ± {found.half_width or 0:.1f}"


def task_table(task: str, delays: str = "measured") -> pd.DataFrame:
    """Return the table of one task, with the soonest method first."""
    rows = []
    frame = runs(task, delays)
    for method, found in frame.groupby("method"):
        ratio = mean_ci(log_ratios(task, str(method), delays))
        rows.append(
            {
                "order": ratio.value,
                "method": method,
                "time relative to FedAvg": "1" if method == BASELINE else format_ratio(ratio),
                "seconds to the target": f"{found['time'].mean():,.0f}",
                "reached": f"{found['reached'].sum()} of {len(found)}",
                "accuracy at the end, %": format_percent(found["final"]) + ("" if found["ended"].all() else " *"),
                "Gini": f"{found['gini'].mean():.3f}",
                "MB sent": f"{found['megabytes'].mean():,.0f}",
            }
        )
    return pd.DataFrame(rows).sort_values("order", kind="stable").drop(columns="order")


def pooled_tests(delays: str = "measured") -> pd.DataFrame:
    """Test whether AsyncKrylov is sooner than each other method, over all pairs of task and seed.

    The test is Wilcoxon's one-sided signed-rank test on the logarithms of the times, with Holm's correction.
    """
    times = pd.concat([runs(task, delays).assign(task=task) for task in tasks(delays)])
    logs = np.log(times.pivot(index=["task", "seed"], columns="method", values="time"))
    rows = []
    for method in sorted(set(logs) - {FORWARD}):
        difference = (logs[FORWARD] - logs[method]).dropna().round(12)
        counted = difference[difference != 0]
        p_value = float(stats.wilcoxon(counted, alternative="less").pvalue) if len(counted) else 1.0
        rows.append(
            (
                method,
                len(difference),
                int((difference < 0).sum()),
                int((difference > 0).sum()),
                float(np.exp(difference.median())),
                p_value,
            )
        )
    frame = pd.DataFrame(rows, columns=["method", "pairs", "sooner", "later", "median", "p"])
    return frame.assign(holm=holm(frame["p"].to_list())).sort_values("median", kind="stable")


def pooled_table(delays: str = "measured") -> pd.DataFrame:
    """Return the tests as text."""
    found = pooled_tests(delays)
    return pd.DataFrame(
        {
            "AsyncKrylov compared with": found["method"],
            "pairs": found["pairs"].astype(str),
            "sooner": found["sooner"].astype(str),
            "later": found["later"].astype(str),
            "median ratio of times": found["median"].map("{:.2f}".format),
            "p": found["p"].map("{:.2g}".format),
            "p, Holm": found["holm"].map("{:.2g}".format),
        }
    )


def draw(path: Path, delays: str = "measured") -> None:
    """Draw the time to the target of all methods, with one panel for each task and a logarithmic axis."""
    found = tasks(delays)
    methods = order(delays)
    figure = new_figure(9.0, 3.6)
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, task in zip(panels, found, strict=True):
        frame = runs(task, delays)
        for place, method in enumerate(methods):
            if method not in set(frame["method"]):
                continue
            logs = mean_ci(np.log(frame[frame["method"] == method]["time"]).to_list())
            center, half = np.exp(logs.value), logs.half_width or 0.0
            error = [[center - np.exp(logs.value - half)], [np.exp(logs.value + half) - center]]
            color, marker = ("#d95f02", "s") if method.startswith(BASELINE) else ("#1b6ca8", "o")
            axes.errorbar([center], [place], xerr=error, fmt=marker, color=color, markersize=4, capsize=2)
            if method == BASELINE:
                axes.axvline(center, color="0.6", linewidth=1, linestyle="--")
        axes.set_xscale("log")
        axes.set_xlim(*TIME_LIMITS)
        axes.set_xticks(TIME_TICKS, [f"{tick:,}" for tick in TIME_TICKS])
        axes.set_xticks([], minor=True)
        axes.set_title(f"{TASKS[task]}, target {100 * frame['target'].iloc[0]:.0f} %", fontsize="medium")
        axes.set_xlabel("virtual time to the target, s")
        axes.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(range(len(methods)), methods)
    panels[0].invert_yaxis()
    figure.savefig(path)


def order(delays: str = "measured") -> list[str]:
    """Return the methods, sorted by the mean of the log time relative to FedAvg over the tasks with this method."""
    ratios: dict[str, list[float]] = {}
    for task in tasks(delays):
        for method in dict.fromkeys(runs(task, delays)["method"]):
            ratios.setdefault(str(method), []).append(float(np.mean(log_ratios(task, method, delays))))
    return sorted(ratios, key=lambda method: float(np.mean(ratios[method])))


def ratio(task: str, method: str, delays: str = "measured") -> str:
    """Return the time relative to FedAvg with its interval, for the page."""
    return format_ratio(mean_ci(log_ratios(task, method, delays)))


def speedup(task: str, method: str, delays: str = "measured") -> float:
    """Return how many times sooner than FedAvg a method reaches the target."""
    return float(np.exp(-np.mean(log_ratios(task, method, delays))))


def largest_change(task: str) -> float:
    """Return the largest factor between the times relative to FedAvg with measured and with fitted delays."""
    methods = set(runs(task)["method"]) & set(runs(task, "lognormal")["method"])
    means = [[np.mean(log_ratios(task, method, delays)) for delays in ("measured", "lognormal")] for method in methods]
    return float(np.exp(max(abs(fitted - measured) for measured, fitted in means)))


def asynchronous() -> list[str]:
    """Return the asynchronous methods of scenario A."""
    return [method for method in order() if not method.startswith(BASELINE)]


def extreme(choose: Callable[[list[float]], float], methods: Sequence[str] = ()) -> float:
    """Return the smallest or the largest speedup of the asynchronous (or the given) methods over all tasks."""
    return choose(
        [
            speedup(task, method)
            for task in tasks()
            for method in methods or asynchronous()
            if method in set(runs(task)["method"])
        ]
    )


def behind(task: str) -> float:
    """Return the time of FedAvg with over-selection as a multiple of the time of the soonest asynchronous method."""
    times = [speedup(task, method) for method in asynchronous() if method in set(runs(task)["method"])]
    return max(times) / speedup(task, OVER)


def slowdown(choose: Callable[[list[float]], float], method: str) -> float:
    """Return the smallest or the largest time of a method as a multiple of the time of AsyncKrylov, over all tasks."""
    return choose([speedup(task, FORWARD) / speedup(task, method) for task in tasks()])


def percent(task: str, method: str) -> str:
    """Return the accuracy at the end of the runs of scenario A, in percent, with its interval."""
    frame = runs(task)
    return format_percent(frame[frame["method"] == method]["final"])


def cell(file: str, row: str, column: str, section: str = "") -> str:
    """Return a cell of a Markdown table below `benchmarks/results`.

    Args:
        file: the path of the file.
        row: the text of the first cell of the row.
        column: the heading of the column.
        section: the heading above the table. The default is the start of the file.
    """
    text = (RESULTS.parent / file).read_text()
    lines = text[text.index(section) :].splitlines()
    heads: list[str] = []
    for line in lines:
        cells = [part.strip() for part in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            heads = []
        elif not heads:
            heads = cells
        elif cells[0] == row and column in heads:
            return cells[heads.index(column)].replace("+-", "±")
    raise KeyError(f"{file}: no cell {row!r}, {column!r} below {section!r}")


def number(text: str) -> float:
    """Return the first number of a cell.

    >>> number("90.0 ± 6.7")
    90.0
    """
    found = re.search(r"-?\d+(?:,\d{3})*(?:\.\d+)?", text)
    assert found is not None, text
    return float(found.group().replace(",", ""))


def points(report: str, method: str, axis: str = "gradients") -> str:
    """Return the difference to OrthoDC with an automatic threshold, in percentage points, with its interval."""
    frame = pd.read_csv(PAPERS / "joined" / report / "baseline.csv")
    ((mean, high),) = frame[frame["method"] == method][[f"at_{axis}", f"at_{axis}_high"]].to_numpy()
    return f"{100 * mean:.1f} ± {100 * (high - mean):.1f}"


def final(report: str, method: str, column: str = "accuracy") -> str:
    """Return the accuracy at the end of the runs of a method, in percent, with its interval."""
    rows = pd.read_json(PAPERS / report / "log.jsonl", lines=True)
    last = rows[rows["method"] == method].groupby("seed").last()
    return format_percent(last[column])


@cache
def evaluations(report: str) -> pd.DataFrame:
    """Return the rows of a log, with the names of the rules instead of the names of the methods."""
    rows = pd.read_json(RESULTS / report / "log.jsonl", lines=True)
    rules = rows["method"].str.partition("(")[0].replace("AsyncCorrected", "AutoThreshold")
    return rows.assign(method=rules)


def accuracies(report: str, rule: str, updates: int) -> pd.Series:
    """Return the accuracy of each seed after a number of updates."""
    rows = evaluations(report)
    return rows[(rows["method"] == rule) & (rows["updates"] == updates)].set_index("seed")["accuracy"]


def long_tasks() -> list[str]:
    """Return the tasks of scenario D whose runs are stored."""
    return [task for task in LONG_TASKS if all((RESULTS / f"{task}-long{part}").is_dir() for part in ("", "-falling"))]


def long_table(task: str) -> pd.DataFrame:
    """Return the accuracy of each rule in long runs, with constant and with falling rates."""
    constant, falling = f"{task}-long", f"{task}-long-falling"
    length = read_settings(RESULTS / constant)["num_updates"]
    rows = []
    for rule in dict.fromkeys(evaluations(constant)["method"]):
        ends = [accuracies(report, rule, length) for report in (constant, falling)]
        gain = mean_ci([100 * value for value in ends[1] - ends[0]])
        rows.append(
            {
                "rule": rule,
                f"after {SHORT_RUN} updates, constant rate": format_percent(accuracies(constant, rule, SHORT_RUN)),
                f"after {length:,} updates, constant rate": format_percent(ends[0]),
                f"after {length:,} updates, falling rate": format_percent(ends[1]),
                "gain of the falling rate, points": f"{gain.value:+.1f} ± {gain.half_width or 0:.1f}",
            }
        )
    return pd.DataFrame(rows)


def concurrencies(task: str) -> list[int]:
    """Return the numbers of clients in flight whose runs of scenario C are stored."""
    return [count for count in CONCURRENCIES if (RESULTS / f"{task}-concurrency-{count}").is_dir()]


def concurrency_tasks() -> dict[str, str]:
    """Return the names of the tasks of scenario C with at least two stored concurrencies."""
    return {task: name for task, name in TASKS.items() if len(concurrencies(task)) > 1}


def concurrency_table(task: str) -> pd.DataFrame:
    """Return the accuracy of each rule in short and long runs by the number of clients in flight."""
    reports = {count: f"{task}-concurrency-{count}" for count in concurrencies(task)}
    first, *_ = reports.values()
    rows = []
    for updates in (SHORT_RUN, read_settings(RESULTS / first)["num_updates"]):
        for rule in dict.fromkeys(evaluations(first)["method"]):
            cells = {
                f"{count} in flight": format_percent(accuracies(report, rule, updates))
                for count, report in reports.items()
            }
            rows.append({"rule": rule, "updates": f"{updates:,}", **cells})
    return pd.DataFrame(rows)


def loss_from_concurrency(task: str, rule: str, updates: int, many: int) -> float:
    """Return how many percentage points less a rule reaches with `many` clients in flight than with 2."""
    low, high = (accuracies(f"{task}-concurrency-{count}", rule, updates).mean() for count in (2, many))
    return 100 * float(low - high)


def gain_at_concurrency(task: str, better: str, other: str, updates: int, count: int) -> float:
    """Return how many percentage points more the first of two rules reaches with `count` clients in flight."""
    high, low = (accuracies(f"{task}-concurrency-{count}", rule, updates).mean() for rule in (better, other))
    return 100 * float(high - low)


def rewrap(page: str, width: int = 120) -> str:
    """Wrap the paragraphs and list items of a page, whose lines have other lengths after the numbers are filled in.

    >>> print(rewrap("One\\ntwo.\\n\\n| a |\\n- An\\n  item.\\n"))
    One two.
    <BLANKLINE>
    | a |
    - An item.
    <BLANKLINE>
    """
    item = re.compile(r"(- |\d+\. )")
    text = re.compile(r"- |\d+\. |\w|\*|`|\[")
    blocks: list[str] = []
    for line in page.splitlines():
        starts_block = not line.strip() or item.match(line) or not (text.match(line) or line.startswith("  "))
        if starts_block or line.startswith("    ") or not blocks or not text.match(blocks[-1]):
            blocks.append(line)
        else:
            blocks[-1] += " " + line.strip()
    wrapped = []
    for block in blocks:
        found = item.match(block)
        indent = " " * len(found.group()) if found else ""
        options = {"subsequent_indent": indent, "break_on_hyphens": False, "break_long_words": False}
        wrapped.append(textwrap.fill(block, width, **options) if text.match(block) else block)
    return "\n".join(wrapped) + "\n"


def render() -> dict[Path, str]:
    """Return the texts of all generated files."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    functions = (
        behind,
        cell,
        concurrency_tasks,
        extreme,
        final,
        gain_at_concurrency,
        largest_change,
        loss_from_concurrency,
        number,
        percent,
        points,
        ratio,
        slowdown,
        speedup,
        tasks,
    )
    context = {one.__name__: one for one in functions} | {"min": min, "max": max, "over": OVER}
    page = environment.from_string(TEMPLATE.read_text()).render(context)
    texts = {PAGE: rewrap(page), RESULTS / "pooled.md": markdown_table(pooled_table()) + "\n"}
    texts |= {RESULTS / f"{task}.md": markdown_table(task_table(task)) + "\n" for task in tasks()}
    tables = {f"{task}-lognormal": task_table(task, "lognormal") for task in tasks("lognormal")}
    tables |= {f"{task}-long": long_table(task) for task in long_tasks()}
    tables |= {f"{task}-concurrency": concurrency_table(task) for task in concurrency_tasks()}
    return texts | {RESULTS / f"{name}.md": markdown_table(table) + "\n" for name, table in tables.items()}


def main() -> None:
    """Write the files, or compare them with the logs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the files with the logs, and write nothing")
    texts = render()
    if parser.parse_args().check:
        different = [str(path.relative_to(ROOT)) for path, text in texts.items() if path.read_text() != text]
        sys.exit(f"differ from the logs: {', '.join(different)}" if different else 0)
    for path, text in texts.items():
        path.write_text(text)
    draw(FIGURE)


if __name__ == "__main__":
    main()
