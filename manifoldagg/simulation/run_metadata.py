"""Run metadata: all settings and versions that determine the results, for comparison by a later process."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manifoldagg import __version__
from manifoldagg.errors import CheckpointError
from manifoldagg.federated.pytrees import Tree
from manifoldagg.federated.server.durability.fingerprint import first_difference
from manifoldagg.simulation.federated_dataset import FederatedDataset
from manifoldagg.simulation.spec_parser import parse_spec
from manifoldagg.simulation.stable_repr import stable_repr

__all__ = ["check_compatible", "referenced_files", "run_metadata", "versions"]


def run_metadata(federation: FederatedDataset, method: Any, **options: object) -> dict[str, object]:
    """Return all settings that determine a run.

    Args:
        federation: the federated data set.
        method: the method with a `name`, a `rule` and a `trainer`, before it is bound to clients.
        **options: the options of `run`.
    """
    task = federation.dataset
    return {
        "data": {"name": task.name, "checksum": f"{task.checksum:08x}"},
        "split": f"{federation.checksum:08x}",
        "model": stable_repr(task.model),
        "batch": federation.batch,
        "seed": federation.seed,
        "method": method.name,
        "rule": stable_repr(method.rule),
        "trainer": stable_repr(method.trainer),
        **{name: value if isinstance(value, int | None) else stable_repr(value) for name, value in options.items()},
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of the programs that determine the bits of a result.

    Example:
        >>> list(versions())
        ['manifoldagg', 'torch', 'numpy']
    """
    return {"manifoldagg": __version__, "torch": torch.__version__, "numpy": np.__version__}


def referenced_files(*specs: object) -> dict[str, str]:
    """Return the files that specs such as `csv:measured.csv` refer to, with the SHA-256 hash of each file.

    Args:
        *specs: the settings. Only strings can refer to files.

    Example:
        >>> referenced_files("exponential:mean=10", "csv:not-there.csv", None)
        {}
    """
    options = [
        value for text in specs if isinstance(text, str) for value in parse_spec("settings", text).options.values()
    ]
    return {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in options if Path(path).is_file()}


def check_compatible(path: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Check that the given settings equal those in a file or a folder.

    Raises:
        CheckpointError: if they differ. The message contains the first difference.

    Example:
        >>> saved, current = ({"num_updates": 200, "methods": {"FedGS": count}} for count in (1, 2))
        >>> check_compatible(Path("run"), saved, current)
        Traceback (most recent call last):
            ...
        manifoldagg.errors.CheckpointError: run: settings: methods: FedGS: was 1, got 2
    """
    told = first_difference("settings", _as_fingerprint(saved), _as_fingerprint(current))
    if told is not None:
        raise CheckpointError(f"{path}: {told}")


def _as_fingerprint(settings: Any) -> Tree:
    """Convert settings to a fingerprint, so that a difference is reported with its full path."""
    if isinstance(settings, Mapping):
        return {"fields": {str(name): _as_fingerprint(value) for name, value in settings.items()}}
    return [_as_fingerprint(value) for value in settings] if isinstance(settings, list | tuple) else settings
