"""The folder in which a comparison of methods stores its finished runs, a checkpoint of the current run, and a log."""

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manifoldagg import tensor_file
from manifoldagg._io import FileLock, os_errors
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import CheckpointPolicy
from manifoldagg.simulation.cost import Evaluation, StartEvaluation
from manifoldagg.simulation.metadata import check_compatible, versions
from manifoldagg.simulation.method import RunResult
from manifoldagg.simulation.trace import TaskRecord

__all__ = ["ComparisonProgress", "LearnedCurve", "remove"]

CHECKPOINT_SECONDS = 30.0
"""The interval between the checkpoints of a run."""
OWN_FILES = re.compile(
    r"\.?(lock|settings|log\.jsonl|[0-9a-f]{16}\.curve|[0-9a-f]{16}-\d+\.run(\.checkpoint)?)(\.[0-9a-f]{16}\.tmp)?"
)


class LearnedCurve(NamedTuple):
    """A curve that a client learned, with the control points `phi` (n + 1, P)."""

    method: str
    update_index: int
    client: int
    phi: Tensor


class ComparisonProgress:
    """A context manager that stores the progress of a comparison in a folder.

    No other process can use the folder until the end of the `with` block. The files remain after the block, so that the
    comparison can resume later. If `resume` is false, the files of an earlier comparison are removed first.

    Raises:
        ArgumentError: if the folder contains other files, cannot be written, or is in use by another process.
        CheckpointError: if the progress is damaged or belongs to other settings. The message contains the first
            difference.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        _check_own_files(folder)
        self._folder = folder
        with os_errors(f"folder: {folder} cannot be written", ArgumentError), ExitStack() as held:
            folder.mkdir(parents=True, exist_ok=True)
            held.callback(_lock_folder(folder).close)
            if not resume:
                _clear(folder)
            path = folder / "settings"
            given = {**settings, "versions": versions()}
            if path.exists():
                check_compatible(folder, tensor_file.load(path, "comparison"), given)
            else:
                tensor_file.save(path, "comparison", given)
            self._log = held.enter_context(open(folder / "log.jsonl", "w", encoding="utf-8", buffering=1))
            self._resources = held.pop_all()

    def __enter__(self) -> "ComparisonProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def log_evaluation(self, method: str, seed: int, evaluation: Evaluation) -> None:
        """Append a line to the log. A resumed comparison rewrites the log."""
        self._log.write(json.dumps({"method": method, "seed": seed} | evaluation.asdict(), allow_nan=False) + "\n")

    def checkpoint_policy(self, method: str, seed: int) -> CheckpointPolicy:
        """Return the checkpoint policy of the current run."""
        return CheckpointPolicy(f"{self._run_path(method, seed)}.checkpoint", every_seconds=CHECKPOINT_SECONDS, keep=1)

    def load_run(self, method: str, seed: int) -> RunResult | None:
        """Load a finished run, or return `None` if it has not finished."""
        path = self._run_path(method, seed)
        if not path.exists():
            return None
        tree: Any = tensor_file.load(path, "finished run")
        check_compatible(path, tree["key"], {"method": method, "seed": seed})
        columns = [tree["trace"][one.name].tolist() for one in fields(TaskRecord)]
        return RunResult(
            [Evaluation(**row) for row in tree["evaluations"]],
            [TaskRecord(*task) for task in zip(*columns, strict=True)],
            tree["client_accuracy"],
            tree["seconds"],
            tree["evaluation_seconds"],
            # A run of an earlier version has no start models.
            [StartEvaluation(**row) for row in tree.get("starts", ())],
        )

    def save_run(self, method: str, seed: int, run: RunResult) -> None:
        """Save a finished run."""
        trace = {}
        for one in fields(TaskRecord):
            dtype = torch.int64 if one.name in ("client", "staleness") else torch.float64
            trace[one.name] = torch.tensor([getattr(task, one.name) for task in run.trace], dtype=dtype)
        tree = {
            "key": {"method": method, "seed": seed},
            "evaluations": [asdict(row) for row in run.evaluations],
            "trace": trace,
            "client_accuracy": run.client_accuracy,
            "seconds": run.seconds,
            "evaluation_seconds": run.evaluation_seconds,
            "starts": [asdict(row) for row in run.starts],
        }
        tensor_file.save(self._run_path(method, seed), "finished run", tree)
        Path(self.checkpoint_policy(method, seed).path).unlink(missing_ok=True)

    def load_curves(self, methods: Iterable[str]) -> dict[str, LearnedCurve]:
        """Load the stored curves by method."""
        paths = {method: self._curve_path(method) for method in methods}
        return {name: LearnedCurve(*tensor_file.load(path, "curve")) for name, path in paths.items() if path.exists()}

    def save_curve(self, curve: LearnedCurve) -> None:
        """Save a learned curve for the plot of its plane."""
        tensor_file.save(self._curve_path(curve.method), "curve", tuple(curve))

    def _curve_path(self, method: str) -> Path:
        return self._folder / f"{_method_key(method)}.curve"

    def _run_path(self, method: str, seed: int) -> Path:
        return self._folder / f"{_method_key(method)}-{seed}.run"


def remove(folder: Path) -> None:
    """Remove the progress directory of a comparison.

    Raises:
        ArgumentError: if the folder contains other files.
    """
    _check_own_files(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _method_key(method: str) -> str:
    """Return the part of a file name that identifies a method."""
    return hashlib.sha256(method.encode()).hexdigest()[:16]


def _check_own_files(folder: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ArgumentError(f"folder: {folder} exists and is not a folder")
    others = [path.name for path in folder.glob("*") if not OWN_FILES.fullmatch(path.name)]
    if others:
        raise ArgumentError(f"folder: expected the folder of a comparison, got {folder} with {min(others)!r}")


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():  # the draft of a killed process
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


def _lock_folder(folder: Path) -> FileLock:
    try:
        return FileLock(folder / "lock")
    except BlockingIOError:
        raise ArgumentError(f"folder: another process uses {folder}") from None
