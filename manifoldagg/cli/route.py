"""The command `manifoldagg route`."""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table
from rich.text import Text

from manifoldagg._signals import graceful_shutdown
from manifoldagg._validation import check_choice, check_count
from manifoldagg.cli._console import console, new_table
from manifoldagg.routing import Bound, TimeBound, UpdateBound
from manifoldagg.routing.plan import Plan, check_output_path, make_plan, read_rates, write_files

__all__ = ["objective_bound", "route_command", "routing_tables"]


def route_command(
    rates: Annotated[Path, typer.Option()],
    concurrency: int = 100,
    objective: str = "time",
    rate: float = 0.01,
    smoothness: float = 1.0,
    noise: float = 209.0,
    gap: float = 15.0,
    num_updates: Annotated[int, typer.Option("--updates")] = 3000,
    out: Path = Path("routing.csv"),
) -> None:
    """Compute the optimal routing of tasks to clients with queueing theory.

    The clients are the queues of a closed network. The command writes the optimal routing to routing.csv, and a plot
    to routing.png. For each group of clients, it prints means over the clients under the optimal routing: the share of
    the tasks, the queue length and the staleness of the updates. A second table compares the throughput and the
    convergence bound of the optimal routing with those of two other routings: the uniform routing, and the routing in
    proportion to the clients' speeds.

    Example: `manifoldagg route --rates rates.csv --concurrency 100 --objective time --rate 0.01 --out routing.csv`

    Args:
        rates: A CSV file with a column `rate` (tasks per unit of time) and optional columns `client` and `group`.
        concurrency: The number of tasks at the clients at any time, queued or in service.
        objective: `time`: the bound per unit of time. `update`: the bound after --updates updates.
        rate: The server's learning rate η.
        smoothness: The Lipschitz constant L of the gradients.
        noise: B = 2M² + σ², with heterogeneity M and σ² gradient noise.
        gap: The gap A between the initial loss and the lowest loss. For `time`: the mean decrease per update.
        num_updates: The total number T of updates, for the objective `update`.
        out: The CSV file of the routing. The plot is written next to it as .png.
    """
    constants = {"rate": rate, "smoothness": smoothness, "noise": noise, "gap": gap}
    with graceful_shutdown():
        check_output_path(out)
        check_count("updates", num_updates)
        clients = read_rates(rates)
        bound = objective_bound(objective, clients.rates, concurrency, num_updates=num_updates, **constants)
        plan = make_plan(clients, bound)
        files = write_files(plan, out)
    for grid in routing_tables(plan):
        console.print(grid)
    if not plan.optimum.converged:
        console.print(f"The optimiser stopped at a gradient of {plan.optimum.gradient_norm:.1e}.", highlight=False)
    console.print(f"Written: {', '.join(map(str, files))}", highlight=False, markup=False, soft_wrap=True)


def objective_bound(
    objective: str, rates: np.ndarray, concurrency: int, *, num_updates: int, **constants: float
) -> Bound:
    """Return the convergence bound for an objective, `"time"` or `"update"`."""
    if check_choice("objective", objective, ("time", "update")) == "time":
        return TimeBound(rates, concurrency, **constants, rounds=1)
    return UpdateBound(rates, concurrency, **constants, num_updates=num_updates)


def routing_tables(plan: Plan) -> tuple[Table, Table]:
    """Format the groups of clients under the optimal routing, and the three routings."""
    title = f"{len(plan.clients.names)} clients, {plan.bound.concurrency} tasks"
    groups = new_table("group", "clients", "rate", "share of each", "mean queue", "relative delay", title=title)
    for g in plan.groups():
        # `Text` prevents rich from interpreting a name as markup.
        groups.add_row(
            Text(g.name), str(g.clients), f"{g.rate:.4g}", f"{g.share:.5f}", f"{g.queue:.3f}", f"{g.delay:.3f}"
        )
    sides = new_table("routing", "throughput", "bound")
    for name, value in plan.values.items():
        sides.add_row(name, f"{plan.networks[name].throughput:.5g}", f"{value:.5g}")
    return groups, sides
