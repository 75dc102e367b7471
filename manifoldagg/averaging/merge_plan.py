"""The plan of a merge of checkpoints: the parts of the model, the steps of the merge, and the files of the result."""

import json
import math
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_choice, short_repr
from manifoldagg.averaging.certificate import MergeInfo
from manifoldagg.averaging.checkpoints import (
    ADAPTER_CONFIG,
    CheckpointFiles,
    FilePool,
    StoredTensor,
    as_path,
    check_alike,
    merged_adapter_config,
    open_checkpoint,
)
from manifoldagg.averaging.coefficients import MeanMethod
from manifoldagg.averaging.karcher import Weights
from manifoldagg.averaging.merge_shards import Shard, divide_into_shards
from manifoldagg.errors import ArgumentError, StateDictError
from manifoldagg.manifolds import Manifold
from manifoldagg.manifolds.assign import Assignment, assign_manifolds
from manifoldagg.manifolds.layout import Entry, ModelSignature, layout_of
from manifoldagg.manifolds.lora.peft import classify_tensors, find_first_factor
from manifoldagg.manifolds.power import Power
from manifoldagg.tensor_file import TensorEntry

__all__ = ["MergePlan", "Part", "Step", "plan_merge"]

MIN_MODELS = 2
MAX_MODELS = 32
CELL_SIZE = 1 << 20
"""The number of entries that one step reads of each model. The bits of a result do not depend on other sizes."""
CURVED_SIZE = 1 << 15
"""The number of entries of copies of a manifold that one step computes."""
SCOPES = ("tensor", "model")
CERTIFICATE_NAME = "certificate.json"
MAX_COPIED_BYTES = 1 << 28
"""The maximum size of a file that is copied to the folder of the result."""
COPIED_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja"})
"""The suffixes of configurations and tokenizers, which are copied from the folder of the first checkpoint."""
SAMPLE_BYTES = 1 << 25
"""The number of bytes with which the speed of a disk is estimated."""


@dataclass(frozen=True, eq=False)
class Part:
    """A part of the model that is averaged separately: one tensor, or a pair of LoRA factors.

    Attributes:
        kind: one of `"factors"` (a pair of LoRA factors), `"manifold"` (a tensor on a manifold), `"statistic"` (batch
            statistics), `"copied"` (integers, booleans and batch counters) and `"flat"` (any other tensor).
        names: the names of the tensors of the part. A pair of factors has two names, and any other part has one name.
        tensors: for each name, the tensors of all models.
        labels: the label of each model, such as its path.
        method: the averaging method of the part, with the weights of the models.
        space: the manifold of the part, or `None` if the part is not on a manifold.
    """

    kind: str
    names: tuple[str, ...]
    tensors: tuple[tuple[StoredTensor, ...], ...]
    labels: tuple[str, ...]
    method: MeanMethod
    space: Manifold | None = None

    @property
    def label(self) -> str:
        """The name in messages and certificates."""
        return ", ".join(self.names)

    @property
    def first(self) -> StoredTensor:
        """The first tensor of the first model."""
        return self.tensors[0][0]

    @cached_property
    def size(self) -> int:
        """The number of entries in the first model."""
        return sum(column[0].size for column in self.tensors)

    @property
    def used(self) -> list[int]:
        """The indices of the models that are read."""
        return self.method.used

    @property
    def origin(self) -> int:
        """The index, within `used`, of the model with the largest weight."""
        return self.used.index(int(self.method.barycentric.argmax()))

    @property
    def shape_of_second(self) -> tuple[int, ...]:
        """The shape of the second factor of a pair in the first model."""
        return tuple(self.tensors[1][0].entry.shape)

    @property
    def has_gram_step(self) -> bool:
        """Whether the merge reads the part twice: first for the inner products of the models, then for the mean."""
        return self.has_products and self.method.needs_gram

    @property
    def has_products(self) -> bool:
        """Whether the inner products of the part are included in the sums over the whole model."""
        return self.kind in ("flat", "factors")

    def cells(self) -> Iterator[tuple[int, int]]:
        """Yield the range of entries of each step."""
        width = CELL_SIZE
        if isinstance(self.space, Power):
            inner = math.prod(self.space.space.shape)
            # A range must contain whole copies of the manifold.
            width = max(CURVED_SIZE // max(inner, 1), 1) * inner
        elif self.kind in ("factors", "manifold"):
            width = max(self.size, 1)
        for start in range(0, self.size, width):
            yield start, min(start + width, self.size)

    def ranges(self, start: int, stop: int) -> Iterator[tuple[StoredTensor, int, int]]:
        """Yield the tensors of all models that a step reads, each with its range of entries."""
        for column in self.tensors:
            for i in self.used:
                # A step reads the factors of a pair as a whole.
                yield (column[i], 0, column[i].size) if self.kind == "factors" else (column[i], start, stop)

    def num_bytes(self, start: int, stop: int) -> int:
        """The number of bytes of a range in all models that are read."""
        sizes = [(b - a) * tensor.entry.dtype.itemsize for tensor, a, b in self.ranges(start, stop)]
        return sizes[0] if self.kind == "copied" and self.size == 1 else sum(sizes)

    def result_bytes(self, start: int, stop: int) -> int:
        """The number of bytes of a range in the result."""
        if self.kind == "factors":
            return sum(entry.num_bytes for entry in result_entries(self))
        return (stop - start) * self.first.entry.dtype.itemsize

    def prefetch(self, start: int, stop: int) -> None:
        """Ask the operating system to read a range of entries of all models, without waiting for it."""
        for tensor, a, b in self.ranges(start, stop):
            tensor.prefetch(a, b)

    def release(self, start: int, stop: int) -> None:
        """Release a range of entries of all models from the memory of the process."""
        for tensor, a, b in self.ranges(start, stop):
            tensor.release(a, b)


class Step(NamedTuple):
    """One step of a merge, which processes a range of entries of one tensor or one pair of LoRA factors.

    The step reads the same entries (`start` to `stop`) from all models. If `is_write` is `True`, it writes their mean
    to the merged model. Otherwise, it computes their inner products.
    """

    part: int
    is_write: bool
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class MergePlan:
    """The plan of a merge of checkpoints: its inputs, its averaging method and its output files.

    Attributes:
        out: the absolute path of the result.
        is_folder: whether the result is a folder instead of a single file.
        method: the averaging method and its weights.
        scope: whether the method treats each tensor (`"tensor"`) or the whole model (`"model"`) as one vector.
        models: the checkpoints to average.
        parts: the parts of the model that are averaged separately.
        shards: the safetensors files of the result.
        fingerprint: JSON text that identifies the plan.
        pool: the input files, which are mapped into memory. The caller must close the pool.
    """

    out: Path
    is_folder: bool
    method: MeanMethod
    scope: str
    models: tuple[CheckpointFiles, ...]
    parts: tuple[Part, ...]
    shards: tuple[Shard, ...]
    fingerprint: str
    pool: FilePool = field(repr=False)

    def __repr__(self) -> str:
        return format_result(
            self, out=str(self.out), read=self.bytes_read, written=self.bytes_written, shards=len(self.shards)
        )

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The steps of the merge, in the order of their execution.

        Some steps compute inner products of the models, and other steps write the mean. With `scope="tensor"`, the
        merge completes one tensor after the other. With `scope="model"`, it computes all inner products before it
        writes the first tensor, because the coefficients of the mean depend on all tensors.
        """
        grams: list[Step] = []
        steps: list[Step] = []
        for i, part in enumerate(self.parts):
            if part.has_gram_step:
                own = [Step(i, False, a, b) for a, b in part.cells()]
                (grams if self.scope == "model" else steps).extend(own)
            steps += [Step(i, True, a, b) for a, b in part.cells()]
        return (*grams, *steps)

    @cached_property
    def bytes_read(self) -> int:
        """The total number of bytes that the steps read. Bytes that two steps read are counted twice."""
        return sum(self.parts[step.part].num_bytes(step.start, step.stop) for step in self.steps)

    @cached_property
    def bytes_written(self) -> int:
        """The number of bytes of the files of the result, without the index and the certificate."""
        return sum(shard.size for shard in self.shards)

    def location(self, name: str) -> tuple[int, int]:
        """Return the index of the shard of a tensor, and the position of the tensor in the shard."""
        i = self._shard_of[name]
        return i, self.shards[i].begins[name]

    @cached_property
    def _shard_of(self) -> dict[str, int]:
        return {name: i for i, shard in enumerate(self.shards) for name in shard.begins}

    @property
    def certificate_path(self) -> Path:
        """The path of the JSON file with the certificates, which describe the quality of the mean.

        If the result is a folder, the path is `certificate.json` in this folder. If the result is a single file, such
        as `mean.safetensors`, the path is `mean.certificate.json` in the same folder.
        """
        return self.out / CERTIFICATE_NAME if self.is_folder else self.out.with_suffix(f".{CERTIFICATE_NAME}")

    def extra_files(self) -> dict[str, bytes]:
        """Return the files of a merged model, except its safetensors files.

        These are configuration files, most of which are copied from the first checkpoint. If the model consists of
        several safetensors files, they also include the index, which maps each tensor to its file.

        Returns:
            The contents of the files by name. The dict is empty if the merge writes a single file.
        """
        if not self.is_folder:
            return {}
        found = {}
        source = self.models[0].folder
        for path in sorted(source.iterdir()) if source is not None else ():
            # An index or a certificate of the source describes other files than those of the result.
            is_own = path.name.endswith(".index.json") or path.name == CERTIFICATE_NAME
            is_small = path.is_file() and path.stat().st_size <= MAX_COPIED_BYTES
            if is_small and path.suffix in COPIED_SUFFIXES and not is_own:
                found[path.name] = path.read_bytes()
        factors = [part.tensors[0] for part in self.parts if part.kind == "factors"]
        ranks = [max((column[i].entry.shape[0] for column in factors), default=0) for i in range(len(self.models))]
        if (config := merged_adapter_config(self.models, ranks)) is not None:
            found[ADAPTER_CONFIG] = json.dumps(config, indent=2).encode() + b"\n"
        if len(self.shards) > 1:
            tensors = {name: shard.name for shard in self.shards for name in shard.begins}
            # In the format of the index, the total size excludes the headers.
            total = self.bytes_written - sum(len(shard.header) for shard in self.shards)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(tensors.items()))}
            stem = self.shards[0].name.partition("-00001-of-")[0]
            found[f"{stem}.safetensors.index.json"] = json.dumps(index, indent=2).encode() + b"\n"
        return found

    def estimate_seconds(self) -> float:
        """Estimate the duration of the merge, by reading and writing a sample of `SAMPLE_BYTES`."""
        source = next((column[0] for part in self.parts for column in part.tensors if column[0].path is not None), None)
        read_speed = math.inf
        if source is not None and source.path is not None:
            start = time.perf_counter()
            with open(source.path, "rb") as file:
                count = len(file.read(SAMPLE_BYTES))
            read_speed = count / max(time.perf_counter() - start, 1e-9)
        sample = self.out.parent / f".{self.out.name}.{os.urandom(8).hex()}.sample"
        count = min(SAMPLE_BYTES, max(self.bytes_written, 1))
        try:
            start = time.perf_counter()
            with open(sample, "xb") as file:
                file.write(bytes(count))
                # Without `fsync`, only the speed of the page cache would be measured.
                file.flush()
                os.fsync(file.fileno())
            write_speed = count / max(time.perf_counter() - start, 1e-9)
        finally:
            sample.unlink(missing_ok=True)
        return self.bytes_read / read_speed + self.bytes_written / write_speed

    def check_space(self, present: int) -> None:
        """Check that the disk has enough free space for the result.

        Args:
            present: the number of bytes that an interrupted merge has already allocated.

        Raises:
            ArgumentError: if there is too little free space.
        """
        needed = self.bytes_written - present
        free = shutil.disk_usage(self.out.parent).free
        if needed > free:
            raise ArgumentError(f"out: expected {needed:,} free bytes in {self.out.parent}, got {free:,}")


def plan_merge(
    models: Sequence[Any],
    weights: Weights = None,
    *,
    out: str | os.PathLike[str],
    method: str = "arithmetic",
    scope: str = "tensor",
    t: float | None = None,
    manifolds: Assignment | None = None,
    shard_size: int | None = None,
) -> MergePlan:
    """Plan a merge of checkpoints without reading their tensors.

    The function reads the headers of the files, and checks that all checkpoints have the same names, shapes and dtypes.
    The arguments `models`, `weights`, `out`, `method`, `scope`, `t`, `manifolds` and `shard_size` have the same meaning
    as in [`merge`][manifoldagg.averaging.merge]. The errors are also the same.
    """
    given = len(models) if isinstance(models, Sequence) and not isinstance(models, str | bytes) else short_repr(models)
    if not isinstance(given, int) or not MIN_MODELS <= given <= MAX_MODELS:
        raise ArgumentError(f"models: expected a sequence of {MIN_MODELS} to {MAX_MODELS} models, got {given}")
    check_choice("scope", scope, SCOPES)
    mean = MeanMethod.of(method, given, weights, t)
    pool = FilePool()
    opened = tuple(open_checkpoint(f"models[{i}]", model, pool) for i, model in enumerate(models))
    names = [*opened[0].tensors]
    factors = find_first_factor(names)
    pairs = classify_tensors(names, prefix=f"{opened[0].label}: ").pairs if factors is not None else ()
    check_alike(opened, pairs)
    parts = _parts(opened, mean, scope, {pair.first: pair.second for pair in pairs}, manifolds)
    place, is_folder = _check_out(out, opened)
    entries = {entry.name: entry for part in parts for entry in result_entries(part)}
    shards = divide_into_shards(opened[0], entries, None if is_folder else place.name, shard_size)
    # The fingerprint contains everything that determines the bytes of the result.
    tree = {
        "version": 1,
        "method": [method, scope, t, mean.weights.tolist()],
        "manifolds": {part.label: repr(part.space) for part in parts if part.space is not None},
        "shards": [[shard.name, zlib.crc32(shard.header), shard.size] for shard in shards],
        "inputs": [model.identity for model in opened],
    }
    return MergePlan(place, is_folder, mean, scope, opened, parts, shards, json.dumps(tree), pool)


def _parts(
    models: Sequence[CheckpointFiles],
    mean: MeanMethod,
    scope: str,
    pairs: Mapping[str, str],
    manifolds: Assignment | None,
) -> tuple[Part, ...]:
    """Divide the model into parts, in the order of the first checkpoint."""
    first = models[0].tensors
    second_factors = set(pairs.values())
    entries = [(name, (*x.entry.shape,), x.entry.dtype) for name, x in first.items() if name not in second_factors]
    entries = [entry for entry in entries if entry[0] not in pairs]
    names, shapes, dtypes = zip(*entries, strict=True) if entries else ((), (), ())
    layout = layout_of(ModelSignature(names, shapes, dtypes, ()))
    spaces = dict(assign_manifolds(layout, manifolds))
    # Tensors without a meaningful direction, such as statistics, get the arithmetic mean with the same weights.
    barycentric = MeanMethod("arithmetic", mean.barycentric)
    labels = tuple(model.label for model in models)
    parts = []
    for name, tensor in first.items():
        if name in second_factors:
            continue
        kind = "flat"
        method = mean
        own: tuple[str, ...] = (name,)
        entry = Entry(name, (*tensor.entry.shape,), tensor.entry.dtype)
        if name in pairs:
            kind = "factors"
            own = (name, pairs[name])
        elif name in spaces:
            kind = "manifold"
            method = barycentric
        elif not entry.dtype.is_floating_point or name.rpartition(".")[2] == "num_batches_tracked":
            kind = "copied"
        elif entry.is_statistic:
            kind = "statistic"
            method = barycentric
        elif entry.size == 1 and scope == "tensor":
            # The direction of a single number is its sign. For equal signs, all methods compute the arithmetic mean.
            method = barycentric
        columns = tuple(tuple(model.tensors[part] for model in models) for part in own)
        parts.append(Part(kind, own, columns, labels, method, spaces.get(name)))
    if not any(part.kind != "copied" for part in parts):
        raise StateDictError(f"{models[0].label}: expected floating tensors, got none")
    return tuple(parts)


def _check_out(out: str | os.PathLike[str], models: Sequence[CheckpointFiles]) -> tuple[Path, bool]:
    """Return the absolute path of the result, and whether it is a folder."""
    if not isinstance(out, str | os.PathLike):
        raise ArgumentError(f"out: expected the path of a file or folder for models in files, got {short_repr(out)}")
    # Symbolic links are resolved, so that a link to an input is recognised as this input.
    place = Path(os.path.realpath(as_path("out", out)))
    if not place.parent.is_dir():
        raise ArgumentError(f"out: expected a path in an existing folder, got {short_repr(str(out))}")
    is_folder = place.suffix != ".safetensors"
    if is_folder:
        _check_replaceable(place, out)
    else:
        for target in (place, place.with_suffix(f".{CERTIFICATE_NAME}")):
            if target.is_dir():
                raise ArgumentError(f"out: expected the path of a file, got the folder {short_repr(str(target))}")
            if target.exists() and not target.is_file():
                raise ArgumentError(f"out: expected a new path or a file, got {short_repr(str(target))}")
    sources = {path for model in models for x in model.tensors.values() if (path := x.path) is not None}
    for path in sources:
        source = Path(os.path.realpath(path))
        if source == place or place in source.parents:
            raise ArgumentError(f"out: expected a path that contains no input, got {short_repr(str(out))}")
    return place, is_folder


def _check_replaceable(folder: Path, out: str | os.PathLike[str]) -> None:
    """Check that a merge can write its result to a folder without removing other files.

    A merge replaces the whole folder. The folder must therefore not exist, or it must contain only the files of an
    earlier merge.

    Raises:
        ArgumentError: if the folder contains other files. The message contains the name of the first of them.
    """
    if not os.path.lexists(folder):
        return
    expected = "expected a new folder or the result of a merge"
    try:
        written = {*MergeInfo.from_json((folder / CERTIFICATE_NAME).read_text()).files, CERTIFICATE_NAME}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ArgumentError(f"out: {expected}, got {short_repr(str(out))}") from None
    others = sorted({path.name for path in folder.iterdir()} - written)
    if others:
        raise ArgumentError(f"out: {expected}, got {short_repr(str(out))}, which also contains {short_repr(others[0])}")


def result_entries(part: Part) -> Iterator[TensorEntry]:
    """Yield the name, dtype and shape of each tensor that a merge writes for one part of the model.

    A part is one tensor or a pair of LoRA factors. If the models have different ranks for a pair, the written factors
    have the largest of these ranks.
    """
    rank = max(x.entry.shape[0] for x in part.tensors[0]) if part.kind == "factors" else 0
    for axis, column in enumerate(part.tensors):
        entry = column[0].entry
        if part.kind == "factors":
            shape = [*entry.shape]
            shape[axis] = rank
            entry = entry._replace(shape=tuple(shape), num_bytes=math.prod(shape) * entry.dtype.itemsize)
        yield entry
