"""The command `manifoldagg compare`."""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from manifoldagg._io import check_matplotlib
from manifoldagg._signals import graceful_shutdown
from manifoldagg._validation import check_count, renamed_arguments
from manifoldagg.cli._comparison import PlannedComparison
from manifoldagg.cli._config_file import run_config
from manifoldagg.cli._console import console, error_console, fold_names, new_table, stability_warnings
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.compare import Comparison, compare
from manifoldagg.experiments.plots import format_percent
from manifoldagg.experiments.progress_dir import remove
from manifoldagg.experiments.report import check_destination, read_report, write_report
from manifoldagg.simulation.executors import processes

__all__ = ["compare_command", "comparison_table", "rate_lines", "rejection_lines"]

OPTION_NAMES = {
    "num_updates": "updates",
    "eval_every": "eval-every",
    "task_cost": "task-cost",
    "first_seed": "first-seed",
}
"""The command-line names of arguments of `compare`, where they differ."""


def compare_command(
    context: typer.Context,
    data: str = "digits",
    model: str | None = None,
    augment: str | None = None,
    clients: int = 30,
    num_updates: Annotated[int, typer.Option("--updates")] = 200,
    seeds: int = 3,
    first_seed: int = 0,
    methods: str = "fedasync:weighted=True,fedortho,asynckrylov,asyncbezier",
    rate: list[str] | None = None,
    partition: str = "dirichlet:concentration=0.5",
    holdout: float | None = None,
    validation: float = 0.0,
    batch: int = 16,
    scheduler: str | None = None,
    delays: str | None = None,
    availability: str | None = None,
    task_cost: str = "fixed",
    concurrency: int | None = None,
    buffer: int | None = None,
    refill: int | None = None,
    averaging: Annotated[str | None, typer.Option("--swa")] = None,
    tune: Annotated[bool, typer.Option("--tune")] = False,
    tune_seeds: int = 3,
    tune_length: float = 1.0,
    jobs: int = 1,
    eval_every: int = 1,
    eval_starts: Annotated[bool, typer.Option("--eval-starts")] = False,
    target: float | None = None,
    out: Path = Path("runs"),
    name: str | None = None,
    resume: Annotated[bool, typer.Option("--resume")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    config: Path | None = None,
    only: list[str] | None = None,
    duration: float | None = None,
) -> None:
    """Compare methods in virtual time under equal conditions.

    Every method has the same split and the same initial model. Methods with the same sampler have the same order of
    events. By default, two workers train the clients' models, from a queue that favours clients with little data. When
    a client has returned its update, it immediately receives the server's model again. Its new task waits in the queue,
    which causes staleness.

    Names accept options: `name:option=value,option=value`. The error for an unknown name suggests the nearest known
    name.

    `module:name` selects your own object: a rule, a correction (`correction=`), a trainer (`trainer=`), delays, a
    scheduler, an availability trace, a partition or a data set.

    Default rates were tuned with 30 clients in flight. For other numbers of clients, the command scales the default
    rates in proportion to the stability limit, and prints the scaled rates. It does not scale rates that --rate or
    --methods set. --tune starts its search at the scaled rates.

    The command prints a table and writes these files:

    - `results.json` and `log.jsonl` (a line for each evaluation), which are bit-identical for equal settings
    - `timing.json`
    - `accuracy.png`
    - `clients.png` (the accuracies of the clients, from the worst to the best)
    - `starts.png` (with --eval-starts, the accuracy and the loss of clients' start models over time)
    - `gantt.png` (the tasks of each client over time)
    - `plane.png` (the loss over the plane of one learned curve)

    Example: `manifoldagg compare --data digits --clients 30 --updates 200 --seeds 3`

    Args:
        data: The data set: `digits` (1,797 handwritten digits from scikit-learn), `fashion-mnist`, `watch`,
            `japanese-vowels`, `idx:FOLDER` (MNIST and data sets with its file names), `shakespeare:FILE`,
            `leaf:FOLDER`, `npz:FILE`, or `module:name` (your own LabelledDataset).
        model: The model: `mlp`, `cnn:norm=batch`, `gru:hidden=128`, `transformer`, `lenet5`, `gpt`, ...  [default: the
            model of the data set]
        augment: The augmentation of training minibatches: `cropflip:padding=4`, or `module:name` (your own function of
            inputs, labels and a generator).  [default: the augmentation of the data set]
        clients: The number of clients that share the data (see --partition).
        num_updates: The number of client updates that the server receives in each run.
        seeds: The number of repetitions with different splits, initial models and orders of events.
        first_seed: The seed of the first repetition. Each further repetition increments the seed by 1.
        methods: The methods, separated by commas: names of rules in lower case with options, such as
            `fedasync,asyncbezier:degree=3,threshold=auto`, or `module:name:option=value` for your own rule. The value
            of an option may be your own object: `asynccorrected:correction=my_module:MyCorrection`.
        rate: The global learning rate of all methods (`0.5`) or of one method (`fedasync=0.5`). May be repeated.
        partition: The split of the data: `dirichlet`, `iid`, `natural`, `natural:clients=30` (whole users), `sizes`,
            `shards`, `cyclic`, `disjoint`, or `module:name`.
        holdout: The fraction of each client's samples in the test set.  [default: the test split of the data set, or
            0.2]
        validation: Test on this fraction of the training samples instead, to choose settings without the test set.
        batch: The number of samples in a minibatch.
        scheduler: The scheduler: `priority:workers=2`, `independent`, `jackson:rates=rates.csv`,
            `replay:trace.csv`.  [default: priority]
        delays: The delays of clients that work independently: `exponential:mean=10`, `csv:measured.csv`,
            `measured:measured.csv,as=gaussian` (fitted to each device), ...
        availability: Client availability: `churn:up=200,down=40,until=1000`, `file:changes.csv`.
        task_cost: The cost of a task: `fixed` (the number of minibatches of its client, for every method) or `trainer`
            (the number of steps of the method's trainer).
        concurrency: The number of clients that train at the same time.  [default: all clients, with one task each]
        buffer: The number of updates in each step of the methods with a buffer.  [default: the size in the method]
        refill: Dispatch again when this number of slots is free, to all of them.  [default: 1]
        averaging: Also average the models of each run, and evaluate the average: `start=0.75,cycle=5` averages every
            fifth version of the last quarter. `period=20` lets `asynccurve` write its average to the model.
        tune: Search each method's global rate first, in the same way for all, on other seeds and validation samples.
            Finished runs are stored in --out, in `.tuned`.
        tune_seeds: The number of repetitions of each rate that --tune tries.
        tune_length: The length of a run of --tune, as a fraction of --updates and --duration.
        jobs: The number of processes that train. The results do not depend on it.
        eval_every: The number of updates between evaluations of the model.
        eval_starts: Also evaluate the start model of each task on the held-out samples of its client, and draw
            `starts.png`.
        target: The accuracy in [0, 1] up to which updates are counted.  [default: the target of the data set]
        out: The folder of the reports.
        name: The folder of the report in --out. An existing report is replaced.  [default: from the settings]
        resume: Resume an interrupted comparison of the same settings, with the same results.
        as_json: Print one JSON object: the content of the files, and `files`. Messages go to stderr.
        config: A TOML file with a table for each comparison and a table `[defaults]`. Tables contain options by their
            long names. Options on the command line override the file. Reports are named after the tables.
        only: The tables of --config to run, separated by commas. May be repeated.
        duration: End each run after this virtual time in seconds, if it has fewer updates than --updates.
    """
    if config is not None:
        return run_config(context, config, only or [], _run)
    if only:
        raise ArgumentError("only: expected --config, because --only selects its tables")
    # As with `python -m`, a user module may be in the working directory.
    sys.path.insert(0, "")
    _run(PlannedComparison.of(context.params))


def _run(planned: PlannedComparison) -> None:
    """Run a comparison, write its report, and print its results."""
    options = planned.options
    check_matplotlib()
    jobs = check_count("jobs", options["jobs"])
    screen = error_console if options["as_json"] else console
    say = partial(screen.print, highlight=False, markup=False, soft_wrap=True)
    folder = planned.folder
    unfinished = planned.unfinished

    def on_interrupt() -> str:
        if unfinished.exists():
            return f"interrupted: finished runs are stored in {unfinished}; --resume continues them"
        cache = None if planned.tuning is None else planned.tuning.cache
        tuned = f", except for finished runs of the search in {cache}" if cache else ""
        return f"interrupted: nothing was written{tuned}"

    with graceful_shutdown(on_interrupt):
        check_destination(folder)
        if options["resume"]:
            say(
                f"Resuming from {unfinished}"
                if unfinished.exists()
                else f"{unfinished} does not exist: starting from the beginning"
            )
        elif unfinished.exists():
            say(f"Replacing the unfinished {unfinished}; use --resume to continue it")
        with stability_warnings(), renamed_arguments(OPTION_NAMES), ExitStack() as stack:
            comparison = compare(
                planned.dataset,
                planned.methods,
                **{name: options[name] for name in ("clients", "num_updates", "seeds", "first_seed")},
                **planned.settings,
                executor=processes(jobs) if jobs > 1 else None,
                progress=_progress_bars(screen, options["num_updates"], stack, planned.scaled_rates),
                tuning=planned.tuning,
                folder=unfinished,
                resume=options["resume"],
            )
        files = write_report(comparison, folder)
        remove(unfinished)
    screen.print(comparison_table(comparison))
    for line in [*rate_lines(comparison), *rejection_lines(comparison)]:
        say(line)
    if comparison.landscape is None:
        say("No method learned a curve, so there is no plane.png.")
    say(f"Written to {folder}: {', '.join(file.name for file in files)}")
    if options["as_json"]:
        print(json.dumps(read_report(folder)), flush=True)


def _progress_bars(
    console: Console, num_updates: int, stack: ExitStack, notices: Sequence[str]
) -> Callable[[str, int], None]:
    """Return a callback `(method, seed)` that advances the progress bar of a run."""
    columns = (
        progress.TextColumn("{task.description:<24}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    bars = progress.Progress(*columns, console=console)
    tracks: dict[tuple[str, int], progress.TaskID] = {}

    def advance(method: str, seed: int) -> None:
        # The notices and the bars start with the first update. An invalid setting raises its error earlier, so no bars
        # surround it.
        if not tracks:
            for line in notices:
                console.print(line, highlight=False, markup=False, soft_wrap=True)
            stack.enter_context(bars)
        if (method, seed) not in tracks:
            tracks[method, seed] = bars.add_task(f"{method}, seed {seed}", total=num_updates)
        bars.advance(tracks[method, seed])

    return advance


def comparison_table(comparison: Comparison) -> Table:
    """Format the summary as a table for the terminal."""
    settings = comparison.settings
    timing = comparison.timing()
    seeds = len(settings["seeds"])
    counts = (settings["clients"], "client"), (settings["num_updates"], "update"), (seeds, "seed")
    size = ", ".join(f"{count} {word if count == 1 else word + 's'}" for count, word in counts)
    target = f"updates\nto {format_percent(settings['target'])}"
    primary, *others = settings.get("metrics", ["acc."])
    averages = (f"avg.\n{primary}", "loss", "avg.\nloss") if "averaging" in settings else ()
    # The columns of an average and of further metrics replace others, so that the table fits in 80 characters.
    best = () if averages else (f"best\n{primary}",)
    seconds = () if averages or others else ("train\ns", "eval\ns")
    finals = [f"final\n{name}" for name in (primary, *others)]
    grid = new_table(
        *("method", *finals, *averages, *best, target, "stale\nmean/max", "Gini", *seconds),
        title=f"{settings['data']['name']}: {size}",
        caption=f"{'metrics' if 'metrics' in settings else 'accuracies'} in %, staleness in versions",
    )
    fold_names(grid, comparison.runs)
    for name, row in comparison.summary().items():
        updates = row["updates_to_target_mean"]
        share = "" if row["reached_target"] == seeds else f" ({row['reached_target']}/{seeds})"
        grid.add_row(
            Text(name),
            _format_mean(row["final_mean"], row["final_sd"]),
            *(_format_mean(row[f"{name}_mean"], row[f"{name}_sd"]) for name in others),
            *([] if not averages else _average_cells(row)),
            *(_format_mean(row["best_mean"], row["best_sd"]) for _ in best),
            "never" if updates is None else f"{updates:.0f}{share}",
            f"{row['staleness_mean']:.1f}/{row['staleness_max']}",
            f"{row['gini_mean']:.3f}",
            *(f"{sum(timing[key][name]):.0f}" for key in ("seconds", "evaluation_seconds") if seconds),
        )
    return grid


def rejection_lines(comparison: Comparison) -> list[str]:
    """Return a warning for each method with rejected updates, because they lower its accuracy."""
    updates = comparison.settings["num_updates"] * len(comparison.settings["seeds"])
    counted = {name: row["rejected"] for name, row in comparison.summary().items()}
    return [f"{name}: {count} of {updates} updates were rejected" for name, count in counted.items() if count]


def rate_lines(comparison: Comparison) -> list[str]:
    """Return a line for each tuned method, with the tried rates and the best accuracy."""
    tuning = comparison.settings["tuning"] or {"methods": {}}
    return [f"{name}: {_format_search(result)}" for name, result in tuning["methods"].items()]


def _format_search(search: dict[str, Any] | str | None) -> str:
    if not isinstance(search, dict):
        return "the method has no rate to tune" if search is None else "the rate was set explicitly"
    scores = {one["rate"]: statistics.fmean(one["tail_accuracy"]) for one in search["tried"]}
    chosen = search["chosen"]
    end = ", at the end of the search" if chosen in (min(scores), max(scores)) else ""
    tried = ", ".join(f"{rate:g}" for rate in scores)
    return f"rate {chosen:g} of {tried} ({100 * scores[chosen]:.1f} % of validation samples{end})"


def _average_cells(row: dict[str, float | int | None]) -> list[str]:
    """Format the accuracy of the average, the loss of the model and the loss of the average."""
    losses = ["" if row[name] is None else f"{row[name]:.3f}" for name in ("loss_mean", "average_loss_mean")]
    return [_format_mean(row["average_mean"], row["average_sd"]), *losses]


def _format_mean(mean: float | int | None, deviation: float | int | None) -> str:
    if mean is None:
        return "none"
    return f"{100 * mean:.1f}" + ("" if deviation is None else f" ± {100 * deviation:.1f}")
