"""The command `manifoldagg merge`."""

import ast
import math
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from manifoldagg._signals import graceful_shutdown
from manifoldagg.averaging import Certificate, MergeInfo, MergePlan, plan_merge, run_merge
from manifoldagg.cli._console import console, error_console, new_table
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds.spec import SPACES_BY_NAME

__all__ = ["certificate_table", "merge_command", "parse_manifold", "parse_size", "plan_table"]

MAX_ROWS = 12
"""The maximum number of tensors in the table. The certificate file contains all tensors."""
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]?I?B?)", re.IGNORECASE)
MANIFOLD = re.compile(r"(?P<pattern>.+)=(?P<name>[A-Za-z]+)\((?P<arguments>[^()]*)\)")


def merge_command(
    models: Annotated[list[Path], typer.Argument(show_default=False)],
    out: Annotated[Path, typer.Option(show_default=False)],
    method: str = "arithmetic",
    weights: str | None = None,
    t: Annotated[float | None, typer.Option("--t")] = None,
    scope: str = "tensor",
    manifold: list[str] | None = None,
    shard_size: str | None = None,
    dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
    resume: Annotated[bool, typer.Option("--resume/--no-resume")] = True,
) -> None:
    """Average model checkpoints that do not fit in memory.

    The command reads each checkpoint at most twice and uses constant memory. It prints the distances between the
    average and the checkpoints, and writes the distances for each tensor to `certificate.json`.

    To continue an interrupted merge, repeat the same command. The output is created or replaced only when the merge is
    complete.

    Example: `manifoldagg merge a.safetensors b.safetensors --method karcher --out mean.safetensors`

    Args:
        models: Safetensors files, indices of shards, or folders of checkpoints.
        out: The result: a file if the path ends in `.safetensors`, else a folder with the shards of the first
            checkpoint.
        method: The mean: `arithmetic`, `karcher`, `slerp`, `bezier` or `radial`.
        weights: The weights, such as `2,1,1`. The default is equal weights.
        t: The parameter in [0, 1] of `slerp` and `bezier`.
        scope: The vectors whose directions are averaged: each `tensor`, or the whole `model`.
        manifold: The manifold of the tensors of a pattern, such as `'*.rot=SpecialOrthogonal(8)'`. Repeat the option
            for each pattern.
        shard_size: The maximum size of the tensors in a file, such as `5GB`.
        dry_run: Print what would be read and written, and an estimate of the time.
        resume: Continue an interrupted merge, or start it again.
    """
    with graceful_shutdown("interrupted: repeat the command to continue"):
        plan = plan_merge(
            models,
            parse_weights(weights),
            out=out,
            method=method,
            scope=scope,
            t=t,
            manifolds=dict(map(parse_manifold, manifold)) if manifold else None,
            shard_size=None if shard_size is None else parse_size(shard_size),
        )
        try:
            if dry_run:
                console.print(plan_table(plan))
                return
            info = _run(plan, resume)
        finally:
            plan.pool.close()
    console.print(certificate_table(info))
    for reason in info.warnings:
        error_console.print(f"warning: {reason}", markup=False, soft_wrap=True)
    console.print(
        f"Written to {out}; certificates: {plan.certificate_path}", highlight=False, markup=False, soft_wrap=True
    )


def parse_weights(text: str | None) -> list[float] | None:
    """Parse the weights of a command line.

    Example:
        >>> parse_weights("2,1,0.5")
        [2.0, 1.0, 0.5]
    """
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"weights: expected numbers such as 2,1,1, got {text!r}") from None


def parse_size(text: str) -> int:
    """Parse a number of bytes.

    Example:
        >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size("100")
        (5000000000, 1572864, 100)
    """
    found = SIZE.fullmatch(text.strip())
    unit = found["unit"].upper() if found else ""
    unit = unit if unit.endswith("B") or not unit else f"{unit}B"
    if found is None or (unit != "B" and unit not in UNITS):
        raise ArgumentError(f"shard_size: expected a size such as 5GB, got {text!r}")
    return int(float(found["number"]) * UNITS.get(unit, 1))


def parse_manifold(text: str) -> tuple[str, Any]:
    """Parse a pattern and its manifold.

    Example:
        >>> parse_manifold("*.rot=SpecialOrthogonal(8)")
        ('*.rot', SpecialOrthogonal(n=8))
    """
    found = MANIFOLD.fullmatch(text.strip())
    if found is None or found["name"] not in SPACES_BY_NAME:
        raise ArgumentError(f"manifold: expected a pattern and a manifold such as '*.rot=Sphere(8)', got {text!r}")
    try:
        arguments = [ast.literal_eval(part.strip()) for part in found["arguments"].split(",") if part.strip()]
        return found["pattern"], SPACES_BY_NAME[found["name"]](*arguments)
    except (SyntaxError, TypeError, ValueError) as error:
        raise ArgumentError(f"manifold: expected the arguments of {found['name']}, got {text!r}: {error}") from None


def plan_table(plan: MergePlan) -> Table:
    """Format the files and the number of bytes that a merge reads and writes."""
    grid = new_table("merge", "", title=Text(str(plan.out)))
    seconds = plan.estimate_seconds()
    for name, value in (
        ("checkpoints", str(len(plan.models))),
        ("method", f"{plan.method.name}, {plan.scope} by {plan.scope}" if plan.method.needs_gram else plan.method.name),
        ("tensors", f"{sum(len(part.names) for part in plan.parts):,}"),
        ("bytes to read", f"{plan.bytes_read:,}"),
        ("bytes to write", f"{plan.bytes_written:,}"),
        ("files", f"{len(plan.shards):,}"),
        ("estimated time", f"{seconds:,.1f} s"),
    ):
        grid.add_row(name, Text(value))
    return grid


def certificate_table(info: MergeInfo) -> Table:
    """Format the certificates of the whole model and of the tensors that differ most."""
    heads = ("largest\ndistance", "residual", "to the\narithmetic mean", "rounding\nerror", "largest\nangle, °")
    grid = new_table("tensor", "norm", *heads)
    ordered = sorted(info.tensors, key=_relative_distance, reverse=True)
    for part in (info.model, *ordered[:MAX_ROWS]):
        angle = None if part.largest_angle is None else math.degrees(part.largest_angle)
        numbers = (
            part.norm,
            _largest_distance(part),
            part.residual,
            part.arithmetic_distance,
            part.rounding_error,
            angle,
        )
        grid.add_row(Text(part.name), *["-" if x is None else f"{x:.3g}" for x in numbers])
    if len(ordered) > MAX_ROWS:
        grid.caption = f"{MAX_ROWS} of {len(ordered)} tensors: those with the largest relative distance"
    return grid


def _largest_distance(part: Certificate) -> float | None:
    return max((x for x in part.distances if x is not None), default=None)


def _relative_distance(part: Certificate) -> float:
    return (_largest_distance(part) or 0.0) / (part.norm or 1.0)


def _run(plan: MergePlan, resume: bool) -> MergeInfo:
    """Run a merge with a progress bar."""
    columns = (TextColumn("merge"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=error_console, transient=True) as bar:
        task = bar.add_task("merge", total=plan.bytes_read + plan.bytes_written)
        return run_merge(
            plan, resume=resume, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
