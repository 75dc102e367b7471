"""The command line: `manifoldagg compare`, `report`, `route` and `doctor`."""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich import progress
    from rich.console import Console
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing.name} is not installed: pip install 'manifoldagg[cli]'")

from manifoldagg import __version__
from manifoldagg._configured import Misuse, run_each
from manifoldagg._interrupt import unwinding
from manifoldagg._output import check_plots
from manifoldagg._route_command import route_command
from manifoldagg._tables import comparison_table, joined_tables, kernel_table, rates_found, refusals
from manifoldagg.errors import ManifoldAggError, check_choice, check_count
from manifoldagg.kernels.choice import explain
from manifoldagg.simulation.compare import compare
from manifoldagg.simulation.data.sets import task
from manifoldagg.simulation.joined import join
from manifoldagg.simulation.log import AXES
from manifoldagg.simulation.methods import methods as methods_by_name
from manifoldagg.simulation.report import check_destination, read_report, write_report
from manifoldagg.simulation.summary import FILES, write_summary
from manifoldagg.simulation.tuning import Tuning
from manifoldagg.simulation.unfinished import discard
from manifoldagg.simulation.words import describe
from manifoldagg.simulation.workers.pool import processes

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
    except (ManifoldAggError, Misuse) as error:
        message = error.format_message() if isinstance(error, Misuse) else str(error)
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
    context: typer.Context,
    data: Annotated[
        str,
        typer.Option(
            help="The data set: `digits` (1,797 handwritten digits, in scikit-learn), `idx:FOLDER` (MNIST and its "
            "kin), `shakespeare:FILE`, `leaf:FOLDER`, `npz:FILE`, or `module:name`, a Task of your own."
        ),
    ] = "digits",
    model: Annotated[
        str | None,
        typer.Option(
            help="What learns it: `mlp`, `cnn:norm=batch`, `gru:hidden=128`, `transformer`.  [default: the data set's]",
            show_default=False,
        ),
    ] = None,
    clients: Annotated[int, typer.Option(help="Clients that share the data (see --partition).")] = 30,
    rounds: Annotated[int, typer.Option(help="Answers that the server gets in each run, one client's each.")] = 200,
    seeds: Annotated[int, typer.Option(help="Repetitions with another split, initial model and order of events.")] = 3,
    methods: Annotated[
        str,
        typer.Option(
            help="What to compare, separated by commas: rules in lower case, with options, such as "
            "`fedasync,asyncbezier:degree=3,threshold=auto`, or `module:name:option=value`, a rule of your own."
        ),
    ] = "fedasync,fedortho,asynckrylov,asyncbezier",
    rate: Annotated[
        list[str] | None,
        typer.Option(help="Global learning rate for all methods (`0.5`) or one (`fedasync=0.5`); may be repeated."),
    ] = None,
    partition: Annotated[
        str, typer.Option(help="How the data are split: `dirichlet`, `iid`, `natural`, `shards`, `cyclic`, `disjoint`.")
    ] = "dirichlet:concentration=0.5",
    holdout: Annotated[
        float | None,
        typer.Option(
            help="Which part of each client's samples is the test set.  [default: the data's test split, or 0.2]",
            show_default=False,
        ),
    ] = None,
    validation: Annotated[
        float,
        typer.Option(
            help="Test on this part of the training samples instead, to choose settings: nobody sees the test set."
        ),
    ] = 0.0,
    batch: Annotated[int, typer.Option(help="Samples a minibatch.")] = 16,
    scheduler: Annotated[
        str | None,
        typer.Option(
            help="Who finishes when: `priority:workers=2`, `independent`, `jackson:rates=rates.csv`, "
            "`replay:trace.csv`.  [default: priority]",
            show_default=False,
        ),
    ] = None,
    delays: Annotated[
        str | None,
        typer.Option(help="Clients that work alone, each for so long: `exponential:mean=10`, `csv:measured.csv`, ..."),
    ] = None,
    participation: Annotated[
        str | None,
        typer.Option(help="Who comes and goes: `churn:up=200,down=40,until=1000`, `file:changes.csv`."),
    ] = None,
    work: Annotated[
        str,
        typer.Option(
            help="Of a task: `data`, its client's minibatches for every method, or `dispatched`, the steps that the "
            "method asks for."
        ),
    ] = "data",
    tasks: Annotated[
        int | None, typer.Option(help="How many are under way at a time.  [default: one a client]", show_default=False)
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Search each method's global rate first, alike for all, on other seeds and validation samples. What "
            "is tried is kept in --out, in `.tuned`.",
        ),
    ] = False,
    tune_seeds: Annotated[int, typer.Option(help="Repetitions of each rate that --tune tries.")] = 3,
    jobs: Annotated[
        int, typer.Option(help="Processes that train. The results are the same, however many there are.")
    ] = 1,
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
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on where a comparison of the same settings was interrupted, with the same results."
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object: what the files hold, and `files`. The rest is said on stderr.",
        ),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A TOML file with a table for each comparison, and `[defaults]`: options by their long names. Those "
            "of the command line go before. Reports are named after the tables.",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Which tables of --config, separated by commas; may be repeated.")
    ] = None,
) -> None:
    """Compare methods in virtual time, on equal terms.

    Every method sees the same split and the same initial model, and those that ask clients in the same way see the same
    order of events. By default two workers train the clients' models, out of a queue that favours clients with little
    data; a client starts again from the server's model as soon as it has answered, and waits in the queue with it: that
    is where staleness comes from.

    Names take options, `name:option=value,option=value`; what is wrong is answered with the nearest right word.

    Prints a table and writes `results.json` and `log.jsonl`, a line for each evaluation (equal settings give equal
    bits), `timing.json`, `accuracy.png`, `clients.png` (their accuracies from the worst to the best), `gantt.png` (who
    trained when) and `plane.png` (the loss over the plane of one learned curve).

    Example: `manifoldagg compare --data digits --clients 30 --rounds 200 --seeds 3`
    """
    if config is not None:
        return run_each(context, config, only or [])
    if only:
        raise typer.BadParameter("it chooses tables of --config, which is not given", param_hint="--only")
    # Where a module of the user's is looked for, as by `python -m`.
    sys.path.insert(0, "")
    chosen = methods_by_name(methods, rate or [])
    if name is not None and (os.sep in name or name in ("", ".", "..")):
        raise typer.BadParameter(f"expected the name of a folder, got {name!r}", param_hint="--name")
    problem = task(data, model)
    check_plots()
    settings: dict[str, Any] = {
        "partition": partition,
        "holdout": holdout,
        "validation": validation,
        "batch": batch,
        "target": target,
        "scheduler": scheduler,
        "delays": delays,
        "participation": participation,
        "work": work,
        "tasks": tasks,
        "every": every,
    }
    first = max(Tuning.seeds[0], seeds)
    apart = range(first, first + check_count("tune-seeds", tune_seeds)) if tune else None
    digest = hashlib.sha256(repr((data, model, describe(chosen), settings, apart)).encode()).hexdigest()[:8]
    folder = out / (name or f"{problem.name}-{clients}-clients-{rounds}-rounds-{seeds}-seeds-{digest}")
    executor = processes(jobs) if check_count("jobs", jobs) > 1 else None
    say = errors if as_json else screen
    kept = f" but what was tried, in {out / '.tuned'}" if tune else ""
    unfinished = folder.with_name(f"{folder.name}.unfinished")

    def left() -> str:
        if unfinished.exists():
            return f"interrupted: what is done is kept in {unfinished}; --resume goes on"
        return f"interrupted: nothing was written{kept}"

    with unwinding(left):
        check_destination(folder)
        for line in _begun(unfinished, resume):
            say.print(line, highlight=False, markup=False, soft_wrap=True)
        with ExitStack() as shown:
            advance = _bars(say, rounds, shown)
            comparison = compare(
                problem,
                chosen,
                clients=clients,
                rounds=rounds,
                seeds=seeds,
                **settings,
                executor=executor,
                progress=advance,
                tuning=None if apart is None else Tuning(apart, cache=out / ".tuned"),
                folder=unfinished,
                resume=resume,
            )
        files = write_report(comparison, folder)
        discard(unfinished)
    say.print(comparison_table(comparison))
    for line in [*rates_found(comparison), *refusals(comparison)]:
        say.print(line, highlight=False, markup=False, soft_wrap=True)
    if comparison.landscape is None:
        say.print("No method learned a curve, so there is no plane.png.")
    names = ", ".join(file.name for file in files)
    say.print(f"Written to {folder}: {names}", highlight=False, markup=False, soft_wrap=True)
    if as_json:
        print(json.dumps(read_report(folder)), flush=True)


def _begun(unfinished: Path, resume: bool) -> list[str]:
    """What becomes of what an interrupted comparison has left, where that may surprise."""
    if resume:
        return [
            f"Going on with {unfinished}" if unfinished.exists() else f"{unfinished} is not there: from the beginning"
        ]
    return [f"{unfinished} is begun anew; --resume would go on"] if unfinished.exists() else []


def _bars(say: Console, rounds: int, shown: ExitStack) -> Callable[[str, int], None]:
    """What moves a bar on for each method and seed; there are bars, until `shown` closes, once one of them moves."""
    columns = (
        progress.TextColumn("{task.description:<24}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    bars = progress.Progress(*columns, console=say)
    tracks: dict[tuple[str, int], progress.TaskID] = {}

    def advance(method: str, seed: int) -> None:
        if not tracks:
            shown.enter_context(bars)
        if (method, seed) not in tracks:
            tracks[method, seed] = bars.add_task(f"{method}, seed {seed}", total=rounds)
        bars.advance(tracks[method, seed])

    return advance


@app.command("report")
def report_command(
    folders: Annotated[list[Path], typer.Argument(help="Reports of `manifoldagg compare`.", show_default=False)],
    axis: Annotated[
        str,
        typer.Option(
            help="Along what accuracy is drawn, and on which equal terms methods are compared: `round`, `time`, "
            "`gradients`, `bytes`."
        ),
    ] = "round",
    against: Annotated[
        str | None,
        typer.Option(
            help="A method by its name in the reports: all others are put beside it, seed by seed and on all axes.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder to write; a joined report there is replaced.")] = Path("joined"),
) -> None:
    """Join comparisons into one table, and say how sure the differences are.

    Runs are read at their end and, on equal terms, where each had spent what all methods of the task reached: in
    virtual time, in gradients computed and in bytes sent. With 15 pairs of task and seed or more, methods are compared
    by Wilcoxon's signed-rank test with Holm's correction.

    Prints a table for each task and writes `report.md`, `table.csv`, `pairs.csv`, with --against `against.csv`, and
    pictures of accuracy and of clients.

    Example: `manifoldagg report runs/digits runs/mnist --axis gradients --out joined`
    """
    check_choice("axis", axis, AXES)
    with unwinding("interrupted: nothing was written"):
        check_destination(out, FILES, option="out")
        joined = join(folders)
        files = write_summary(joined, out, axis=axis, against=against)
    for grid in joined_tables(joined):
        screen.print(grid)
    for note in joined.notes:
        screen.print(f"Settings differ: {note}", highlight=False, markup=False, soft_wrap=True)
    names = ", ".join(file.name for file in files)
    screen.print(f"Written to {out}: {names}", highlight=False, markup=False, soft_wrap=True)


app.command("route")(route_command)


@app.command("doctor")
def doctor_command() -> None:
    """Say which kernels work on this machine, which one is chosen, and why.

    Builds the compiled kernels if they are not built yet, and times what there is.
    """
    with unwinding():
        rows = explain()
    screen.print(kernel_table(rows))
