"""Routing plans, which compare three ways to divide the tasks among the clients.

A plan contains optimised shares, equal shares, and shares proportional to the service rates of the clients. The command
`manifoldagg route` prints the plan and writes it to files.
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from manifoldagg._io import atomic_write, check_matplotlib, new_figure
from manifoldagg.errors import ArgumentError
from manifoldagg.routing._arguments import ShortRepr, rate_vector
from manifoldagg.routing.bounds import Bound
from manifoldagg.routing.network import ClosedNetwork
from manifoldagg.routing.optimise import Routing, balanced, optimise_routing, uniform

__all__ = ["Clients", "Group", "Plan", "check_output_path", "group_clients", "make_plan", "read_rates", "write_files"]

MAX_GROUPS = 6
COLOURS = {"optimised": "#0072b2", "uniform": "#e69f00", "balanced": "#009e73"}
COLUMNS = ("client", "group", "rate", "share", "mean_queue", "relative_delay", "uniform", "balanced")


@dataclass(frozen=True, repr=False)
class Clients(ShortRepr):
    """The names, rates and groups of n clients, with one entry per client in each field."""

    names: tuple[str, ...]
    rates: np.ndarray
    groups: tuple[str, ...]

    def members(self) -> dict[str, np.ndarray]:
        """Return a dictionary from the name of each group to the indices of its clients.

        The groups are sorted by their first occurrence in the list of clients.
        """
        return {group: np.flatnonzero(np.array(self.groups) == group) for group in dict.fromkeys(self.groups)}


@dataclass(frozen=True, repr=False)
class Group(ShortRepr):
    """A summary of a group of clients: the means of several quantities over the group, for one routing.

    A routing assigns each client its share of the tasks.

    Attributes:
        name: the name of the group.
        clients: the number of clients in the group.
        rate: the mean service rate of a client, in tasks per unit of time.
        share: the mean share of the tasks that a client gets.
        queue: the mean number of tasks at a client.
        delay: the mean of `ClosedNetwork.relative_delay`, in updates of the server model.
    """

    name: str
    clients: int
    rate: float
    share: float
    queue: float
    delay: float


@dataclass(frozen=True)
class Plan:
    """The best routing for a bound, and the uniform and the balanced routing for comparison."""

    clients: Clients
    bound: Bound
    optimum: Routing
    routings: dict[str, np.ndarray]
    networks: dict[str, ClosedNetwork]
    values: dict[str, float]

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value:.3g}" for name, value in self.values.items())
        return f"Plan(clients={len(self.clients.names)}, {values})"

    def groups(self, routing: str = "optimised") -> list[Group]:
        """Return the table rows of one routing."""
        network = self.networks[routing]
        return [
            Group(
                name,
                len(members),
                float(self.clients.rates[members].mean()),
                float(self.routings[routing][members].mean()),
                float(network.mean_tasks[members].mean()),
                float(network.relative_delay[members].mean()),
            )
            for name, members in self.clients.members().items()
        ]

    def plot(self, axes: Any = None) -> Any:
        """Plot the shares, mean queues and relative delays of the clients, sorted by rate.

        Args:
            axes: three axes of matplotlib; `None` creates a new figure.

        Returns:
            The axes.
        """
        panels = new_figure(13, 4.4).subplots(1, 3) if axes is None else axes
        order = np.argsort(self.clients.rates, kind="stable")
        at = np.arange(1, len(order) + 1)
        for name, p in self.routings.items():
            network = self.networks[name]
            label = f"{name}: {self.values[name]:.4g}, {network.throughput:.4g} updates per unit of time"
            for panel, values in zip(panels, (p, network.mean_tasks, network.relative_delay), strict=True):
                style = {"color": COLOURS[name], "marker": "o", "markersize": 3, "linewidth": 1}
                panel.plot(at, values[order], label=label, **style)
        titles = ("share $p_i$", "mean queue $E[\\xi_i]$, tasks", "relative delay $E[D_i]$, updates")
        for panel, title in zip(panels, titles, strict=True):
            panel.set_title(title)
            panel.set_xlabel("client, slowest first")
            panel.set_yscale("log")
            panel.grid(alpha=0.25)
        figure = panels[0].figure
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
        figure.suptitle(
            f"{len(order)} clients, concurrency {self.bound.concurrency}: bound and throughput of three routings"
        )
        return panels


def make_plan(clients: Clients, bound: Bound) -> Plan:
    """Find the routing with the smallest convergence bound, and compare it with two simple routings.

    The uniform routing gives all clients equal shares of the tasks. The balanced routing gives each client a share that
    is proportional to its service rate.

    Example:
        >>> from manifoldagg.routing import TimeBound
        >>> bound = TimeBound([1.0, 2.0], concurrency=4, rate=0.01, smoothness=1.0, noise=10.0, gap=1.0)
        >>> plan = make_plan(group_clients(("a", "b"), [1.0, 2.0]), bound)
        >>> [(row.name, round(row.queue, 2)) for row in plan.groups("balanced")]
        [('rate 1', 2.0), ('rate 2', 2.0)]
    """
    found = optimise_routing(bound)
    routings = {"optimised": found.p, "uniform": uniform(clients.rates), "balanced": balanced(clients.rates)}
    networks = {name: ClosedNetwork(p, clients.rates, bound.concurrency) for name, p in routings.items()}
    return Plan(clients, bound, found, routings, networks, {name: bound(p) for name, p in routings.items()})


def group_clients(
    names: tuple[str, ...], rates: np.ndarray | list[float], groups: tuple[str, ...] | None = None
) -> Clients:
    """Divide clients into groups, so that a short table can describe them.

    By default, the groups depend on the service rates of the clients. With at most six distinct rates, each rate forms
    a group. Otherwise, the sorted distinct rates are split into six groups of about equal size.

    Example:
        >>> group_clients(("a", "b", "c"), [2.0, 1.0, 2.0]).groups
        ('rate 2', 'rate 1', 'rate 2')
    """
    mu = rate_vector(rates)
    if groups is None:
        distinct = np.unique(mu)
        few = len(distinct) <= MAX_GROUPS
        parts = np.array_split(distinct, len(distinct) if few else MAX_GROUPS)
        cuts = np.array([part[0] for part in parts])
        digits = _distinguishing_digits(cuts, 6 if few else 3)
        titles = [f"rate {part[0]:.{digits}g}" + ("" if few else f" to {part[-1]:.{digits}g}") for part in parts]
        groups = tuple(titles[g] for g in np.searchsorted(cuts, mu, side="right") - 1)
    return Clients(names, mu, groups)


def read_rates(path: Path) -> Clients:
    """Read the service rates of clients from a CSV file.

    The file must have a column `rate`. It can also have a column `client` with the names of the clients, and a column
    `group` with the names of their groups.

    Raises:
        ArgumentError: if the file cannot be read, or a line is invalid. The message contains the file and the line.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True, strict=True)
            columns = [column.strip() for column in reader.fieldnames or ()]
            if "rate" not in columns or len(set(columns)) != len(columns):
                raise ArgumentError(
                    f"rates: {path}: expected a column 'rate', and optional columns 'client' and 'group', "
                    f"got {', '.join(columns) or 'an empty file'}"
                )
            reader.fieldnames = columns
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ArgumentError(f"rates: {path} cannot be read: {error}") from None
    if not rows:
        raise ArgumentError(f"rates: {path}: expected at least one client, got only a header")
    rates = []
    for line, row in rows:
        if None in row or None in row.values():
            raise ArgumentError(f"rates: {path}, line {line}: expected {len(columns)} fields, got another number")
        try:
            rates.append(float(rate_vector([float(row["rate"])])[0]))
        except ValueError:
            expected = "a positive number (tasks per unit of time)"
            raise ArgumentError(f"rates: {path}, line {line}: expected {expected}, got {row['rate']!r}") from None
    names = tuple(row["client"] if "client" in columns else str(i) for i, (_, row) in enumerate(rows))
    first: dict[str, int] = {}
    for (line, _), name in zip(rows, names, strict=True):
        if first.setdefault(name, line) != line:
            raise ArgumentError(
                f"rates: {path}, line {line}: expected a new name, got {name!r}, which line {first[name]} contains"
            )
    groups = tuple(row["group"] for _, row in rows) if "group" in columns else None
    return group_clients(names, rates, groups)


def check_output_path(out: Path) -> None:
    """Check before the computation that the files can be written.

    Raises:
        ArgumentError: if `out` is not the path of a `.csv` file in an existing folder.
    """
    if out.suffix != ".csv" or out.is_dir():
        raise ArgumentError(f"out: expected the path of a .csv file, got {out}")
    if not out.parent.is_dir():
        raise ArgumentError(f"out: expected a path in an existing folder, got {out}")
    check_matplotlib()


def write_files(plan: Plan, out: Path) -> list[Path]:
    """Write the table of a plan to a CSV file, and its plot to a PNG file in the same folder.

    Each of the two files is written atomically.

    Returns:
        The paths of both files.

    Raises:
        ArgumentError: if a file cannot be written.
    """
    check_output_path(out)
    files = [out, out.with_suffix(".png")]
    try:
        with atomic_write(files[0]) as draft:
            write_csv(plan, draft)
        with atomic_write(files[1]) as draft:
            plan.plot()[0].figure.savefig(draft)
    except OSError as error:
        raise ArgumentError(f"out: {out} cannot be written: {error}") from None
    return files


def write_csv(plan: Plan, path: Path) -> None:
    """Write a CSV file with one line for each client, and with all digits of each number."""
    network = plan.networks["optimised"]
    columns = (
        plan.clients.names,
        plan.clients.groups,
        plan.clients.rates.tolist(),
        plan.routings["optimised"].tolist(),
        network.mean_tasks.tolist(),
        network.relative_delay.tolist(),
        plan.routings["uniform"].tolist(),
        plan.routings["balanced"].tolist(),
    )
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(zip(*columns, strict=True))


def _distinguishing_digits(values: np.ndarray, minimum: int) -> int:
    """Return the number of significant digits that makes distinct values print differently."""
    return next(d for d in range(minimum, 18) if d == 17 or len({f"{x:.{d}g}" for x in values}) == len(values))
