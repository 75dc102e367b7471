"""Tables for the terminal: comparisons, routings, kernels."""

import statistics
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from manifoldagg.routing.plan import Plan
from manifoldagg.simulation.compare import Comparison
from manifoldagg.simulation.joined import Joined
from manifoldagg.simulation.pictures import in_percent
from manifoldagg.simulation.summary import cells, headings

__all__ = ["comparison_table", "joined_tables", "kernel_table", "rates_found", "refusals", "routing_tables"]


def kernel_table(rows: Iterable[tuple[str, str]]) -> Table:
    """What is said of each backend."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("backend", no_wrap=True)
    grid.add_column("", overflow="fold")
    for name, words in rows:
        grid.add_row(name, words)
    return grid


def routing_tables(plan: Plan) -> tuple[Table, Table]:
    """Groups of clients under the routing found, and the three routings side by side."""
    title = f"{len(plan.clients.names)} clients, {plan.bound.tasks} tasks"
    groups = _grid("group", "clients", "rate", "share of each", "mean queue", "relative delay", title=title)
    for g in plan.groups():
        # A name is no markup.
        groups.add_row(
            Text(g.name), str(g.clients), f"{g.rate:.4g}", f"{g.share:.5f}", f"{g.queue:.3f}", f"{g.delay:.3f}"
        )
    sides = _grid("routing", "throughput", "bound")
    for name, value in plan.values.items():
        sides.add_row(name, f"{plan.networks[name].throughput:.5g}", f"{value:.5g}")
    return groups, sides


def comparison_table(comparison: Comparison) -> Table:
    """The summary as a table for the terminal."""
    settings = comparison.settings
    timing = comparison.timing()
    seeds = len(settings["seeds"])
    counts = (settings["clients"], "client"), (settings["rounds"], "round"), (seeds, "seed")
    told = ", ".join(f"{count} {word if count == 1 else word + 's'}" for count, word in counts)
    title = f"{settings['data']['name']}: {told}"
    numbers = (
        "final\nacc.",
        "best\nacc.",
        f"rounds\nto {in_percent(settings['target'])}",
        "stale\nmean/max",
        "Gini",
        "train\ns",
        "eval\ns",
    )
    grid = _grid("method", *numbers, title=title, caption="accuracies in %, staleness in versions")
    _fold_names(grid, comparison.runs)
    for name, row in comparison.summary().items():
        reached = row["rounds_to_target_mean"]
        share = "" if row["reached_target"] == seeds else f" ({row['reached_target']}/{seeds})"
        grid.add_row(
            Text(name),
            _spread(row["final_mean"], row["final_sd"]),
            _spread(row["best_mean"], row["best_sd"]),
            "never" if reached is None else f"{reached:.0f}{share}",
            f"{row['staleness_mean']:.1f}/{row['staleness_max']}",
            f"{row['gini_mean']:.3f}",
            f"{sum(timing['seconds'][name]):.0f}",
            f"{sum(timing['evaluation_seconds'][name]):.0f}",
        )
    return grid


def joined_tables(joined: Joined) -> Iterable[Table]:
    """A table for each task: what methods were worth at their end, and on equal terms."""
    rows = joined.rows()
    for task in joined.runs:
        _, *heads = headings(joined, task)
        few = [head.replace(", %", "").replace("at ", "at\n").replace(" to ", "\nto ") for head in heads[:5]]
        grid = _grid("method", *few, title=Text(task), caption="accuracies in %, means with their intervals of 95 %")
        _fold_names(grid, [row.method for row in rows])
        for row in rows:
            if row.task == task:
                grid.add_row(Text(row.method), *cells(row)[1:6])
        yield grid


def refusals(comparison: Comparison) -> list[str]:
    """A line for each method of which updates were refused: it may be no bad method, but one that nobody heard."""
    updates = comparison.settings["rounds"] * len(comparison.settings["seeds"])
    counted = {name: row["refused"] for name, row in comparison.summary().items()}
    return [f"{name}: {count} of {updates} updates were refused" for name, count in counted.items() if count]


def rates_found(comparison: Comparison) -> list[str]:
    """A line for each method on the rates that were tried, if they were, and the accuracy with the best."""
    tuning = comparison.settings["tuning"] or {"methods": {}}
    return [f"{name}: {_search(told)}" for name, told in tuning["methods"].items()]


def _search(told: dict[str, Any] | str | None) -> str:
    if told is None:
        return "has no rate to search"
    if isinstance(told, str):
        return "its rate was given by hand"
    late = {one["rate"]: statistics.fmean(one["late"]) for one in told["tried"]}
    chosen = told["chosen"]
    end = ", at the end of the search" if chosen in (min(late), max(late)) else ""
    tried = ", ".join(f"{rate:g}" for rate in late)
    return f"rate {chosen:g} of {tried} ({100 * late[chosen]:.1f} % of validation samples{end})"


def _grid(first: str, *numbers: str, title: str | Text | None = None, caption: str | None = None) -> Table:
    grid = Table(first, title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in numbers:
        grid.add_column(heading, justify="right")
    return grid


def _fold_names(grid: Table, methods: Iterable[str]) -> None:
    """What is long, and folded in a narrow terminal, is the name of a method with its options."""
    for column in grid.columns:
        column.no_wrap = True
    names = grid.columns[0]
    names.no_wrap, names.overflow, names.min_width = False, "fold", min(11, max(map(len, methods)))


def _spread(mean: float | int | None, deviation: float | int | None) -> str:
    assert mean is not None
    return f"{100 * mean:.1f}" + ("" if deviation is None else f" ± {100 * deviation:.1f}")
