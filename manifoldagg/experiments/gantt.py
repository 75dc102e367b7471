"""A Gantt chart of a trace, coloured by staleness."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from manifoldagg._io import check_matplotlib, new_figure
from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.trace import TaskRecord, check_records

__all__ = ["draw_trace"]

MAX_LABELS = 30
"""The maximum number of labelled rows. With more clients, every second or third row is labelled."""
MAX_OUTLINED_BARS = 2000
"""The maximum number of tasks whose bars have outlines."""
MIN_OUTLINED_WIDTH = 0.01
"""The minimum median length of bars with outlines, as a fraction of the time axis."""


def draw_trace(records: Sequence[TaskRecord[Any]], axes: Any = None, *, title: str = "") -> Any:
    """Draw a Gantt chart with a row for each client and a bar for each task, coloured by staleness.

    A thin line connects a task's dispatch and its start. Rows are sorted by the clients' names, in natural order.

    Args:
        records: the records, of which there must be at least one.
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
