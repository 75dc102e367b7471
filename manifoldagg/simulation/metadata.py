"""The settings and package versions that determine the results of a run.

A run can resume from a checkpoint only if they equal the saved ones. Objects are compared as text without memory
addresses, because the addresses of equal objects differ between processes.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from manifoldagg import __version__
from manifoldagg.errors import CheckpointError
from manifoldagg.federated.pytrees import Tree
from manifoldagg.federated.server.durability.fingerprint import first_difference
from manifoldagg.simulation.dataset import FederatedDataset

__all__ = ["check_compatible", "run_metadata", "stable_repr", "versions"]


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
        "augment": stable_repr(task.augment),
        # `None` is the default, so that checkpoints of versions without these fields can be resumed.
        "criterion": None if task.criterion is cross_entropy else stable_repr(task.criterion),
        "metrics": None if task.has_default_metrics else stable_repr(task.metrics),
        "batch": federation.batch,
        "seed": federation.seed,
        "method": method.name,
        "rule": stable_repr(method.rule),
        "trainer": stable_repr(method.trainer),
        **{name: value if isinstance(value, int | None) else stable_repr(value) for name, value in options.items()},
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages on which the exact result of a run depends.

    Example:
        >>> list(versions())
        ['manifoldagg', 'torch', 'numpy']
    """
    return {"manifoldagg": __version__, "torch": torch.__version__, "numpy": np.__version__}


def check_compatible(path: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Check that the current settings of a run are equal to the saved settings.

    If only one of the two contains a setting, the other one is treated as if this setting were `None`.

    Args:
        path: the path of the saved run, for the error message.
        saved: the saved settings by name.
        current: the current settings by name.

    Raises:
        CheckpointError: if the settings differ. The message contains the first difference.

    Example:
        >>> saved, current = ({"num_updates": 200, "methods": {"FedGS": count}} for count in (1, 2))
        >>> check_compatible(Path("run"), saved, current)
        Traceback (most recent call last):
            ...
        manifoldagg.errors.CheckpointError: run: settings: methods: FedGS: was 1, got 2
    """
    names = dict.fromkeys([*saved, *current])
    before, now = ({name: given.get(name) for name in names} for given in (saved, current))
    told = first_difference("settings", _as_fingerprint(before), _as_fingerprint(now))
    if told is not None:
        raise CheckpointError(f"{path}: {told}")


def _as_fingerprint(settings: Any) -> Tree:
    """Convert settings to a fingerprint, so that a difference is reported with its full path."""
    if isinstance(settings, Mapping):
        return {"fields": {str(name): _as_fingerprint(value) for name, value in settings.items()}}
    return [_as_fingerprint(value) for value in settings] if isinstance(settings, list | tuple) else settings


def stable_repr(value: object) -> str | None:
    """Represent a setting as text without memory addresses. Strings and `None` are unchanged.

    Example:
        >>> stable_repr(partial(max, 2)), stable_repr("priority:workers=2"), stable_repr(None)
        ('max(2)', 'priority:workers=2', None)
    """
    return value if value is None or isinstance(value, str) else _repr(value)


def _repr(value: object) -> str:
    if isinstance(value, partial):
        inside = [*map(_repr, value.args), *(f"{key}={_repr(given)}" for key, given in value.keywords.items())]
        return f"{_repr(value.func)}({', '.join(inside)})"
    if is_dataclass(value) and not isinstance(value, type):
        shown = [f"{one.name}={_repr(getattr(value, one.name))}" for one in fields(value) if one.repr]
        return f"{type(value).__qualname__}({', '.join(shown)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_repr(key)}: {_repr(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        inner = ", ".join(map(_repr, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.ndarray | Tensor):
        return _repr(value.tolist())
    if isinstance(value, str | int | float | None):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)
