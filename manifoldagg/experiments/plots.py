"""Plots: accuracy, clients, start models, loss planes, and tasks over time (Gantt charts)."""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from manifoldagg._io import check_matplotlib, new_figure
from manifoldagg.curves import Plane
from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.cost import Evaluation, StartEvaluation
from manifoldagg.simulation.trace import TaskRecord, check_records

__all__ = [
    *("axis_unit", "draw_accuracy", "draw_clients", "draw_planes", "draw_starts", "draw_sweep"),
    *("draw_trace", "draw_traces", "metric_name"),
    "format_percent",
]

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
"""The palette of Okabe and Ito, which colour-blind readers can distinguish."""
DASHES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)))
"""The dashes of lines of the same colour."""
MARKERS = ("o", "s", "^", "D", "v", "P")
MAX_LINE_WIDTH = 2.6
"""The width of the first line in points. Later lines are thinner, so that overlapping lines are all visible."""
MIN_LINE_WIDTH = 1.2
"""The width of the last line in points."""
INTERLEAVED_DASH = 8
"""The length of the dashes of equal lines, in line widths."""
LABEL_WIDTH = 32
"""The maximum number of characters in a line of a legend."""
WIDTH = 6.4
"""The width of a figure in inches. At 80 % of a page's width, letters have the size of footnotes."""
LOG_SCALE_FACTOR = 30
"""The ratio of the largest to the smallest value of a sweep above which its axis is logarithmic."""
MAX_TICKS = 8
"""The maximum number of values of a sweep that are all labelled."""
MAX_PANELS = 3
"""The maximum number of traces, or of clients, in one plot."""
UNITS = {
    "updates": ("updates", ((1, ""),)),
    "time": ("virtual time", ((1, "s"),)),
    "gradients": ("minibatch gradients computed", ((1, ""), (1e3, "thousands"), (1e6, "millions"), (1e9, "billions"))),
    "bytes": ("sent down and up", ((1, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB"))),
}


def axis_unit(axis: str, maximum: float) -> tuple[float, str, str]:
    """Return the scale, the unit and the label of an axis whose largest value is `maximum`.

    Example:
        >>> axis_unit("bytes", 2.5e6)
        (1000000.0, 'MB', 'sent down and up')
    """
    name, units = UNITS[axis]
    size, unit = next((pair for pair in reversed(units) if maximum >= pair[0]), units[0])
    return float(size), unit, name


def format_percent(fraction: float) -> str:
    """Format a fraction as a percentage with all its digits.

    Example:
        >>> [format_percent(share) for share in (0.85, 0.925, 0.999)]
        ['85%', '92.5%', '99.9%']
    """
    return f"{100 * fraction:.10g}%"


def metric_name(runs: Mapping[str, Sequence[Sequence[Evaluation]]]) -> str:
    """Return the name of the primary metric in the evaluations of each seed, by method."""
    return next(seeds[0][0].metric_name for seeds in runs.values())


def draw_accuracy(
    path: Path,
    runs: Mapping[str, Sequence[Sequence[Evaluation]]],
    *,
    target: float,
    title: str,
    axis: str = "updates",
    budget: float | None = None,
) -> None:
    """Plot the accuracy of each method against the cost of training, averaged over the seeds.

    If the primary metric of the data set is not the accuracy, the plot shows the primary metric. At each cost, a curve
    shows the mean over the latest evaluations of all seeds up to this cost. The curve ends at the largest cost that all
    seeds of the method reach. With several seeds, a band shows one standard deviation, unless there are more methods
    than colours.

    Args:
        path: the path of the plot.
        runs: the evaluations of each seed, by method.
        target: an accuracy to mark.
        title: the title. The number of seeds is added to it.
        axis: one of `AXES`.
        budget: a cost on this axis to mark.
    """
    most = max(rows[-1].value_on(axis) for seeds in runs.values() for rows in seeds)
    size, unit, name = axis_unit(axis, most)
    several = max(map(len, runs.values())) > 1
    banded = several and len(runs) <= len(COLOURS)
    axes = _axes(runs, 3.9)
    by_updates = axis == "updates"
    for i, (label, seeds) in enumerate(runs.items()):
        x, accuracy = _align_on_axis(seeds, axis)
        mean = 100 * accuracy.mean(0)
        style = _style(label, i, len(runs), len(x))
        axes.plot(x / size, mean, drawstyle="default" if by_updates else "steps-post", **style)
        if banded and len(seeds) > 1:
            spread = 100 * accuracy.std(0, ddof=1)
            shade = {"color": style["color"], "alpha": 0.15, "linewidth": 0, "step": None if by_updates else "post"}
            axes.fill_between(x / size, mean - spread, mean + spread, **shade)
    axes.axhline(100 * target, color="0.35", linestyle=(0, (1, 2)), linewidth=1, zorder=2)
    beside = axes.get_yaxis_transform()
    axes.text(1.01, 100 * target, f"target\n{format_percent(target)}", transform=beside, va="center", fontsize="small")
    if budget is not None:
        axes.axvline(budget / size, color="0.35", linestyle=(0, (1, 2)), linewidth=1, zorder=2)
        said = {"transform": axes.get_xaxis_transform(), "rotation": 90, "fontsize": "small"}
        paper = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        axes.text(budget / size, 0.03, "reached by all runs", ha="right", va="bottom", zorder=99, bbox=paper, **said)
    axes.set_xlabel(f"{name}, {unit}" if unit else name)
    axes.set_ylabel(f"{metric_name(runs)} on held-out samples, %")
    few, many = min(map(len, runs.values())), max(map(len, runs.values()))
    over = f"mean of {many if few == many else f'{few} to {many}'} seeds" if several else "1 seed"
    axes.set_xlim(0, most / size or 1)
    axes.set_ylim(0, 100)
    _save(axes, path, runs, f"{title}; {over}{', band ± 1 sd' if banded else ''}", axes.lines[: len(runs)])


def draw_clients(
    path: Path, clients: Mapping[str, Sequence[Sequence[float]]], *, title: str, metric: str = "accuracy"
) -> None:
    """Plot the accuracies of the clients for each method, from the worst to the best client.

    The clients are sorted separately for each seed, and each point is a mean over the seeds.

    Args:
        path: the path of the plot.
        clients: the accuracies of each seed, by method. A seed with fewer clients is resampled.
        title: the title.
        metric: the name of the metric, if it is not the accuracy.
    """
    from matplotlib.ticker import MaxNLocator

    count = max(len(seed) for seeds in clients.values() for seed in seeds)
    places = (np.arange(count) + 0.5) / count
    axes = _axes(clients, 3.6)
    for i, (label, seeds) in enumerate(clients.items()):
        ranked = np.array([np.quantile(seed, places, method="inverted_cdf") for seed in seeds])
        axes.plot(np.arange(1, count + 1), 100 * ranked.mean(0), **_style(label, i, len(clients), count))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlim(0.5, count + 0.5)
    axes.set_ylim(0, 102)
    axes.set_xlabel("client, from the worst to the best")
    axes.set_ylabel(f"{metric} on own held-out samples, %")
    several = max(map(len, clients.values())) > 1
    _save(axes, path, clients, f"{title}; the best model{', mean over seeds' if several else ''}", axes.lines)


def draw_sweep(path: Path, frame: Any, *, option: str, title: str, metric: str = "accuracy") -> None:
    """Plot the mean final accuracy of each method over the values of an option, with 95 % intervals.

    If all values are positive and the largest is more than 30 times the smallest, the axis of the values is
    logarithmic.

    Args:
        path: the path of the plot.
        frame: a data frame with the columns of [`load_sweep`][manifoldagg.experiments.sweep.load_sweep].
        option: the name of the option.
        title: the title.
        metric: the name of the metric, if it is not the accuracy.
    """
    methods = {str(name): rows for name, rows in frame.groupby("method", sort=False)}
    axes = _axes(methods, 3.6)
    for i, (label, rows) in enumerate(methods.items()):
        style = _style(label, i, len(methods), len(rows)) | {"markevery": 1}
        half = 100 * (rows["high"] - rows["mean"]).fillna(0.0)
        axes.errorbar(rows["value"], 100 * rows["mean"], yerr=half, capsize=2, elinewidth=1, **style)
    least, most = frame["value"].min(), frame["value"].max()
    if least > 0 and most > LOG_SCALE_FACTOR * least:
        axes.set_xscale("log")
    values = sorted(frame["value"].unique())
    if len(values) <= MAX_TICKS:
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.set_xticks([], minor=True)
    axes.set_xlabel(option)
    axes.set_ylabel(f"final {metric}, %")
    several = frame["seeds"].max() > 1
    _save(axes, path, methods, f"{title}; {'mean, bars: 95 % intervals' if several else '1 seed'}")


def draw_starts(
    path: Path, starts: Mapping[str, Sequence[StartEvaluation]], *, title: str, metric: str = "accuracy"
) -> None:
    """Plot the accuracy and the loss of the models that a few clients received as the starts of their training.

    Each row of panels shows one client. The horizontal axis numbers the models that this client received. The plot
    shows at most three clients: those that received the most models in the runs of all methods together.

    Args:
        path: the path of the plot.
        starts: the evaluations of start models of one run, by method. At least one method has an evaluation.
        title: the title.
        metric: the name of the metric, if it is not the accuracy.

    Source: OrthoFL Figure 6.
    """
    from matplotlib.ticker import MaxNLocator

    received = Counter(row.client for rows in starts.values() for row in rows)
    clients = sorted(received, key=lambda client: (-received[client], client))[:MAX_PANELS]
    figure = new_figure(WIDTH, 0.6 + 2.0 * len(clients) + _legend_height(starts))
    for client, row in zip(clients, figure.subplots(len(clients), 2, squeeze=False, sharex=True), strict=True):
        for i, (label, evaluations) in enumerate(starts.items()):
            own = [one for one in evaluations if one.client == client]
            x = np.arange(1, len(own) + 1)
            style = _style(label, i, len(starts), len(x))
            row[0].plot(x, [100 * one.accuracy for one in own], **style)
            row[1].plot(x, [math.nan if one.loss is None else one.loss for one in own], **style)
        row[0].set_ylim(0, 102)
        row[1].set_ylim(bottom=0)
        for axes, quantity in zip(row, (f"{metric}, %", "loss"), strict=True):
            axes.set_ylabel(f"client {client}: {quantity}", fontsize="small")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            axes.grid(alpha=0.25)
            _interleave_dashes(axes.lines)
    for axes in row:
        axes.set_xlabel("models received", fontsize="small")
    figure.suptitle(f"{_escape_math(title)}; start models on own held-out samples", fontsize="medium")
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=_columns(starts), fontsize="small", frameon=False)
    figure.savefig(path)


def draw_traces(path: Path, traces: Mapping[str, Sequence[TaskRecord[Any]]], *, title: str) -> None:
    """Draw a Gantt chart for the trace of each method. Equal traces share one chart."""
    panels: list[tuple[list[str], Sequence[TaskRecord[Any]]]] = []
    for name, trace in traces.items():
        for names, other in panels:
            if other == trace:
                names.append(name)
                break
        else:
            panels.append(([name], trace))
    shown = panels[:MAX_PANELS]
    rows = max(len({record.client for record in trace}) for _, trace in shown)
    figure = new_figure(WIDTH, 0.5 + len(shown) * min(5.5, 1.3 + 0.14 * rows))
    for (names, trace), axes in zip(shown, np.atleast_1d(figure.subplots(len(shown))), strict=True):
        draw_trace(trace, axes, title=_label(", ".join(names), 2 * LABEL_WIDTH))
        axes.title.set_fontsize("small")
    left_out = sum(len(names) for names, _ in panels[MAX_PANELS:])
    figure.suptitle(
        _escape_math(title) + (f"; without {left_out} further methods" if left_out else ""), fontsize="medium"
    )
    figure.savefig(path)


def draw_planes(path: Path, planes: Mapping[str, Plane], *, title: str) -> None:
    """Plot several losses on the plane through one curve in parameter space, one below the other.

    Each entry of `planes` contains the values of one loss, such as the loss on held-out data. Each plot has its own
    colour scale, and all plots share a legend.
    """
    figure = new_figure(WIDTH, 0.6 + 3.7 * len(planes))
    for i, (plane, axes) in enumerate(zip(planes.items(), figure.subplots(len(planes)), strict=True)):
        said, drawn = plane
        drawn.plot(axes, label="cross-entropy", legend=i == len(planes) - 1)
        axes.set_title(f"({chr(97 + i)}) {_escape_math(said)}", fontsize="medium")
    figure.suptitle(_label(title, 2 * LABEL_WIDTH), fontsize="medium")
    # The layout does not account for the width of a plot with equal axes.
    figure.savefig(path, bbox_inches="tight")


def _align_on_axis(seeds: Sequence[Sequence[Evaluation]], axis: str) -> tuple[np.ndarray, np.ndarray]:
    """Return costs that the runs of all seeds cover, and the accuracies (seeds, costs) there."""
    places = [np.array([row.value_on(axis) for row in rows]) for rows in seeds]
    x = np.unique(np.concatenate(places))
    # The seeds are evaluated at different costs. Only costs between their latest start and their earliest end remain.
    x = x[(x >= max(place[0] for place in places)) & (x <= min(place[-1] for place in places))]
    worth = [np.array([row.accuracy for row in rows]) for rows in seeds]
    latest = [np.searchsorted(place, x, side="right") - 1 for place in places]
    return x, np.array([w[i] for w, i in zip(worth, latest, strict=True)])


def _axes(names: Mapping[str, object], height: float) -> Any:
    """Return the axes of a new figure with room for a legend."""
    axes = new_figure(WIDTH, height + _legend_height(names)).subplots()
    axes.grid(alpha=0.25)
    return axes


def _style(label: str, i: int, count: int, points: int) -> dict[str, Any]:
    """Return the label, the colour, the dashes, the width and the markers of the i-th of `count` lines."""
    turn, colour = divmod(i, len(COLOURS))
    every = max(count, points // 8)
    return {
        "label": _label(label),
        "zorder": 3 + i,
        "color": COLOURS[colour],
        "linestyle": DASHES[turn % len(DASHES)],
        "linewidth": MAX_LINE_WIDTH - (MAX_LINE_WIDTH - MIN_LINE_WIDTH) * i / max(1, count - 1),
        "marker": MARKERS[i % len(MARKERS)],
        "markersize": 5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
        "markevery": (i * every // count, every),
    }


def _save(axes: Any, path: Path, names: Mapping[str, object], title: str, lines: Iterable[Any] = ()) -> None:
    """Add a title and a legend, draw equal `lines` with interleaved dashes, and save the plot."""
    axes.set_title(_escape_math(title), fontsize="medium")
    axes.figure.legend(loc="outside lower center", ncols=_columns(names), fontsize="small", frameon=False)
    _interleave_dashes(lines)
    axes.figure.savefig(path)


def _interleave_dashes(lines: Iterable[Any]) -> None:
    """Draw each of several equal lines in the gaps of the others."""
    groups: dict[tuple[bytes, ...], list[Any]] = {}
    for line in lines:
        groups.setdefault(tuple(np.asarray(x).tobytes() for x in line.get_data()), []).append(line)
    for same in groups.values():
        for i, line in enumerate(same if len(same) > 1 else ()):
            line.set(
                linewidth=(MAX_LINE_WIDTH + MIN_LINE_WIDTH) / 2,
                linestyle=(-i * INTERLEAVED_DASH, (INTERLEAVED_DASH, INTERLEAVED_DASH * (len(same) - 1))),
            )


def _legend_height(names: Mapping[str, object]) -> float:
    """Return the height of a legend in inches."""
    lines = sum(1 + _label(name).count("\n") for name in names)
    return 0.21 * math.ceil(lines / _columns(names))


def _columns(names: Mapping[str, object]) -> int:
    widest = max(len(line) for name in names for line in _label(name).split("\n"))
    most = max(1, 84 // (widest + 8))
    return math.ceil(len(names) / math.ceil(len(names) / most))


def _label(name: str, width: int = LABEL_WIDTH) -> str:
    """Wrap a name to lines of limited width."""
    return _escape_math(textwrap.fill(name, width))


def _escape_math(text: str) -> str:
    """Escape `$`, because matplotlib would parse text between two `$` as a formula."""
    return text.replace("$", r"\$")


MAX_LABELS = 30
"""The maximum number of labelled rows. With more clients, every second or third row is labelled."""
MAX_OUTLINED_BARS = 2000
"""The maximum number of tasks whose bars have outlines."""
MIN_OUTLINED_WIDTH = 0.01
"""The minimum median length of bars with outlines, as a fraction of the time axis."""


def draw_trace(records: Sequence[TaskRecord[Any]], axes: Any = None, *, title: str = "") -> Any:
    """Draw a Gantt chart of tasks, with a row for each client and a bar for each task.

    The colour of a bar shows the staleness of the task. A thin line before a bar shows the time between the dispatch
    and the start of the task. Rows are sorted by the clients' names in natural order, so that `pi-2` precedes `pi-10`.

    Args:
        records: one or more records.
        axes: matplotlib axes. The default is the axes of a new figure.
        title: the title of the axes.

    Returns:
        The axes, whose `figure` can be saved.

    Raises:
        ArgumentError: if `records` is empty, or matplotlib is missing.
    """
    check_matplotlib()
    from matplotlib.collections import LineCollection, PolyCollection
    from matplotlib.ticker import MaxNLocator

    check_records(records)
    if not records:
        raise ArgumentError("records: expected at least one record, got an empty sequence")
    clients = sorted({record.client for record in records}, key=_client_sort_key)
    row = {client: i for i, client in enumerate(clients)}
    if axes is None:
        axes = new_figure(10, min(12.0, 1.6 + 0.24 * len(clients))).subplots()
    y = np.array([row[record.client] for record in records], dtype=float)
    dispatched, start, end = (
        np.array([getattr(record, name) for record in records]) for name in ("dispatched", "started", "finished")
    )
    waits = [((a, i), (b, i)) for a, b, i in zip(dispatched, start, y, strict=True) if b > a]
    axes.add_collection(LineCollection(waits, colors="0.6", linewidths=0.8, zorder=1))
    low = y - 0.38
    high = y + 0.38
    corners = np.stack([start, low, start, high, end, high, end, low], axis=-1).reshape(-1, 4, 2)
    span = end.max() - dispatched.min() or 1.0
    # Outlines would cover narrow bars.
    few = len(records) <= MAX_OUTLINED_BARS and np.median(end - start) > MIN_OUTLINED_WIDTH * span
    bars = PolyCollection(
        list(corners), cmap="viridis", edgecolors="white" if few else "none", linewidths=0.4, zorder=2
    )
    bars.set_array(np.array([record.staleness for record in records], dtype=float))
    bars.set_clim(0, max(1, max(record.staleness for record in records)))
    axes.add_collection(bars)
    beside = axes.inset_axes((1.02, 0.0, 0.025, 1.0))
    axes.figure.colorbar(bars, cax=beside, label="staleness, versions", ticks=MaxNLocator(integer=True))
    axes.set_xlim(dispatched.min() - 0.005 * span, end.max() + 0.005 * span)
    axes.set_ylim(len(clients) - 0.4, -0.6)
    every = -(-len(clients) // MAX_LABELS)
    names = [str(client) for client in clients[::every]]
    axes.set_yticks(range(0, len(clients), every), names, fontsize="small", parse_math=False)
    axes.set_xlabel("virtual time, s")
    axes.set_ylabel("client")
    axes.set_title(title)
    return axes


def _client_sort_key(client: int | str) -> tuple[Any, ...]:
    """Return a sort key with integers before strings, and `pi-2` before `pi-10`."""
    if isinstance(client, int):
        return False, client
    # Text and digits alternate, so that numbers are only compared with numbers.
    return True, [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", client))], client
