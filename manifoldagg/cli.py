"""The command line: `manifoldagg compare`, `route` and `doctor`."""

import hashlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np

try:
    import typer
    from rich import box, progress
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing.name} is not installed: pip install 'manifoldagg[cli]'")

from manifoldagg import __version__
from manifoldagg._interrupt import unwinding
from manifoldagg._output import check_plots
from manifoldagg.errors import ManifoldAggError, check_choice
from manifoldagg.kernels.choice import explain
from manifoldagg.routing import Bound, TimeBound, UpdateBound
from manifoldagg.routing.plan import Plan, check_out, make_plan, read_rates, write_files
from manifoldagg.simulation.compare import Comparison, compare
from manifoldagg.simulation.methods import methods as methods_by_name
from manifoldagg.simulation.partitions import dirichlet_partition
from manifoldagg.simulation.report import check_destination, machine, write_report
from manifoldagg.simulation.tasks import task

__all__ = ["main"]

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
)
screen = Console()
errors = Console(stderr=True, highlight=False)


def main() -> None:
    """Read the arguments and do what they say: what is wrong is one line and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except (ManifoldAggError, typer.TyperException) as error:
        message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        if message:
            errors.print(f"error: {message}", markup=False, soft_wrap=True)
        code = 2
    sys.exit(code or 0)


def _version(wanted: bool) -> None:
    if wanted:
        screen.print(f"manifoldagg {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Geometry for asynchronous federated optimisation.

    A stale update is *corrected* into the tangent space of the current model, the model *steps* along the
    curve that the update describes, and the models of a run are *averaged*.
    """


@app.command("compare")
def compare_command(
    data: Annotated[
        str, typer.Option(help="The data set: `digits` (1,797 handwritten digits, 8 x 8, in scikit-learn).")
    ] = "digits",
    clients: Annotated[
        int, typer.Option(help="Clients that share the data, split by label (see --concentration).")
    ] = 30,
    rounds: Annotated[int, typer.Option(help="Updates that the server takes in each run, one client's each.")] = 200,
    seeds: Annotated[int, typer.Option(help="Repetitions with another split, initial model and order of events.")] = 3,
    methods: Annotated[
        str, typer.Option(help="What to compare, separated by commas: `fedasync`, `fedortho`, `fedgs`, `asyncbezier`.")
    ] = "fedasync,fedortho,asyncbezier",
    rate: Annotated[
        list[str] | None,
        typer.Option(
            help="Global learning rate for all methods (`0.5`) or one (`fedasync=0.5`); may be repeated. "
            "The default of each was chosen by line search."
        ),
    ] = None,
    concentration: Annotated[
        float,
        typer.Option(
            help="Of the Dirichlet distribution that splits each label: 0 gives it to one client, large splits evenly."
        ),
    ] = 0.5,
    every: Annotated[int, typer.Option(help="Evaluate the model after so many rounds, and after the last.")] = 1,
    target: Annotated[
        float | None,
        typer.Option(help="The accuracy in [0, 1] to count rounds to.  [default: the data set's]", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where reports go.")] = Path("runs"),
    name: Annotated[
        str | None,
        typer.Option(
            help="The report's folder in --out; one of that name is replaced.  [default: from the settings]",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object: what the two JSON files hold, and `files`. The rest is said on stderr.",
        ),
    ] = False,
) -> None:
    """Compare asynchronous methods in virtual time, on equal terms.

    Every method sees the same split, the same initial model and the same order of events. Two workers train
    the clients' models, out of a queue that favours clients with little data; a client starts again from the
    server's model as soon as it has answered, and waits in the queue with it: that is where staleness comes from.

    Prints a table and writes `results.json` (equal settings give equal bits), `timing.json`, `accuracy.png`
    and `plane.png` (the loss over the plane of one learned curve).

    Example: `manifoldagg compare --data digits --clients 30 --rounds 200 --seeds 3`
    """
    chosen = methods_by_name([part.strip() for part in methods.split(",") if part.strip()], rate or [])
    if name is not None and (os.sep in name or name in ("", ".", "..")):
        raise typer.BadParameter(f"expected the name of a folder, got {name!r}", param_hint="--name")
    problem = task(data)
    check_plots()
    digest = hashlib.sha256(repr((chosen, concentration, target, every)).encode()).hexdigest()[:8]
    folder = out / (name or f"{data}-{clients}-clients-{rounds}-rounds-{seeds}-seeds-{digest}")
    say = errors if as_json else screen
    with unwinding("interrupted: nothing was written"):
        check_destination(folder)
        columns = (
            progress.TextColumn("{task.description:<24}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
        )
        with progress.Progress(*columns, console=say) as bars:
            tracks: dict[tuple[str, int], progress.TaskID] = {}

            def advance(method: str, seed: int) -> None:
                if (method, seed) not in tracks:
                    tracks[method, seed] = bars.add_task(escape(f"{method}, seed {seed}"), total=rounds)
                bars.advance(tracks[method, seed])

            comparison = compare(
                problem,
                chosen,
                clients=clients,
                rounds=rounds,
                seeds=seeds,
                partition=partial(dirichlet_partition, concentration=concentration),
                target=target,
                every=every,
                progress=advance,
            )
        files = write_report(comparison, folder)
    say.print(table(comparison))
    if comparison.landscape is None:
        say.print("No method learned a curve, so there is no plane.png.")
    names = ", ".join(file.name for file in files)
    say.print(f"Written to {folder}: {names}", highlight=False, markup=False, soft_wrap=True)
    if as_json:
        timing = comparison.timing() | machine()
        print(json.dumps(comparison.results() | {"timing": timing, "files": list(map(str, files))}), flush=True)


@app.command("route")
def route_command(
    rates: Annotated[
        Path,
        typer.Option(help="A CSV file with a column `rate`, tasks per unit of time; `client` and `group` may follow."),
    ],
    tasks: Annotated[int, typer.Option(help="Tasks at the clients at any time, queued or in service.")] = 100,
    objective: Annotated[
        str, typer.Option(help="`time`: the bound per unit of time. `update`: the bound after --rounds updates.")
    ] = "time",
    rate: Annotated[float, typer.Option(help="The server's learning rate η.")] = 0.01,
    smoothness: Annotated[float, typer.Option(help="L, the Lipschitz constant of the gradients.")] = 1.0,
    noise: Annotated[float, typer.Option(help="B = 2M² + σ²: clients that differ, and noisy gradients.")] = 209.0,
    gap: Annotated[float, typer.Option(help="A: the first loss less the lowest.")] = 15.0,
    rounds: Annotated[int, typer.Option(help="T, the updates that there will be; for `update`.")] = 3000,
    out: Annotated[Path, typer.Option(help="Where the routing goes; the picture goes beside it as .png.")] = Path(
        "routing.csv"
    ),
) -> None:
    """Say where tasks should go, by queueing theory.

    Clients are queues of a closed network. Prints what share of the tasks each group of clients should get, how long
    its queues are and how stale its updates, and the throughput and the bound beside those of uniform routing and of
    routing in proportion to speed. Writes routing.csv and routing.png.

    Example: `manifoldagg route --rates rates.csv --tasks 100 --objective time --rate 0.01 --out routing.csv`
    """
    constants = {"rate": rate, "smoothness": smoothness, "noise": noise, "gap": gap}
    with unwinding():
        check_out(out)
        clients = read_rates(rates)
        bound = objective_bound(objective, clients.rates, tasks, rounds=rounds, **constants)
        plan = make_plan(clients, bound)
        files = write_files(plan, out)
    for grid in routing_tables(plan):
        screen.print(grid)
    if not plan.found.converged:
        screen.print(f"The optimiser stopped at a gradient of {plan.found.gradient_norm:.1e}.", highlight=False)
    screen.print(f"Written: {', '.join(map(str, files))}", highlight=False, markup=False, soft_wrap=True)


@app.command("doctor")
def doctor_command() -> None:
    """Say which kernels work on this machine, which one is chosen, and why.

    Builds the compiled kernels if they are not built yet, and times what there is.
    """
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("backend", no_wrap=True)
    grid.add_column("", overflow="fold")
    with unwinding():
        for name, words in explain():
            grid.add_row(name, words)
    screen.print(grid)


def objective_bound(objective: str, rates: np.ndarray, tasks: int, *, rounds: int, **constants: float) -> Bound:
    """The bound that an objective's name means: "time" is H, "update" is G."""
    if check_choice("objective", objective, ("time", "update")) == "time":
        return TimeBound(rates, tasks, **constants)
    return UpdateBound(rates, tasks, **constants, rounds=rounds)


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


def table(comparison: Comparison) -> Table:
    """The summary as a table for the terminal."""
    settings = comparison.settings
    timing = comparison.timing()
    seeds = len(settings["seeds"])
    title = f"{settings['data']}: {settings['clients']} clients, {settings['rounds']} rounds, {seeds} seeds"
    numbers = (
        "final\nacc.",
        "best\nacc.",
        f"rounds\nto {settings['target']:.0%}",
        "stale\nmean/max",
        "Gini",
        "train\ns",
        "eval\ns",
    )
    grid = _grid("method", *numbers, title=title, caption="accuracies in %, staleness in versions")
    for column in grid.columns:
        column.no_wrap = True
    # What is long, and folded in a narrow terminal, is the name of a method with its options.
    names = grid.columns[0]
    names.no_wrap, names.overflow, names.min_width = False, "fold", min(11, max(map(len, comparison.runs)))
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


def _grid(first: str, *numbers: str, title: str | None = None, caption: str | None = None) -> Table:
    grid = Table(first, title=title, caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in numbers:
        grid.add_column(heading, justify="right")
    return grid


def _spread(mean: float | int | None, deviation: float | int | None) -> str:
    assert mean is not None
    return f"{100 * mean:.1f}" + ("" if deviation is None else f" ± {100 * deviation:.1f}")
