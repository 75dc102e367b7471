"""Cache of tuning runs. The name of its file is a digest of all settings that determine the runs."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from manifoldagg import __version__
from manifoldagg._io import atomic_write
from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.federated_dataset import FederatedDataset
from manifoldagg.simulation.method import Method
from manifoldagg.simulation.run_metadata import referenced_files
from manifoldagg.simulation.stable_repr import stable_repr
from manifoldagg.tensor_file import tensor_bytes

__all__ = ["TuningCache", "cache_key", "cache_path"]


def cache_key(
    method: Method, federations: Sequence[FederatedDataset], options: Mapping[str, object], specs: Mapping[str, object]
) -> dict[str, object]:
    """Return all settings, except for the rate, that determine the runs of a search."""
    for name, given in specs.items():
        if given is not None and not isinstance(given, str):
            raise ArgumentError(
                f"cache: expected a name for {name}, as functions cannot be identified; got {short_repr(given)}"
            )
    data = federations[0].dataset
    return {
        "manifoldagg": __version__,
        "rule": stable_repr(method.rule),
        "trainer": stable_repr(method.trainer),
        "rate": method.rate_field,
        "data": {"name": data.name, "checksum": f"{data.checksum:08x}", "model": stable_repr(data.model)},
        "federations": {str(federation.seed): _digest(federation) for federation in federations},
        **options,
        **specs,
        "files": referenced_files(*specs.values()),
    }


def cache_path(folder: Path, method: Method, key: Mapping[str, object]) -> Path:
    """Return the path of a search's file, which is named after the rule and a digest of all settings."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"{''.join(filter(str.isalnum, method.name.partition('(')[0]))}-{digest}.json"


class TuningCache:
    """The finished runs of a search, and their file."""

    def __init__(self, path: Path | None, key: Mapping[str, object]) -> None:
        self._path = path
        self._key = key
        self._tail_accuracy = self._read(path) if path is not None and path.exists() else {}

    def get_or_run(self, rate: float, seed: int, execute: Callable[[], float]) -> float:
        """Return the cached result of a run, or run it and cache the result."""
        done = self._tail_accuracy.setdefault(repr(rate), {})
        if str(seed) not in done:
            done[str(seed)] = execute()
            self._write()
        return done[str(seed)]

    def _read(self, path: Path) -> dict[str, dict[str, float]]:
        try:
            tree = json.loads(path.read_text())
            found: dict[str, dict[str, float]] = tree["tail_accuracy"]
            numbers = [value for seeds in found.values() for value in seeds.values()]
            if tree["key"] != self._key or not all(type(value) is float and 0 <= value <= 1 for value in numbers):
                raise ValueError
        except OSError as error:
            raise ArgumentError(f"cache: {path} cannot be read: {error.strerror or error}") from error
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ArgumentError(f"cache: {path}: expected the file of a search; delete it to search again") from None
        return found

    def _write(self) -> None:
        if self._path is None:
            return
        tree = {"key": self._key, "tail_accuracy": self._tail_accuracy}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._path) as draft:
                draft.write_text(json.dumps(tree, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise ArgumentError(f"cache: {self._path} cannot be written: {error.strerror or error}") from error


def _digest(federation: FederatedDataset) -> str:
    """Compute a digest of the split and of the initial model with its weights."""
    model = federation.model()
    digest = hashlib.sha256(repr((federation.batch, model)).encode())
    for part in (*federation.train, *federation.held_out):
        digest.update(repr(len(part)).encode() + part.astype("<i8").tobytes())
    for name, tensor in model.state_dict().items():
        digest.update(repr((name, tensor.dtype, tensor.shape)).encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()
