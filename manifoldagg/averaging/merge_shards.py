"""The names, headers and tensors of the files of a merged checkpoint."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manifoldagg._validation import check_count
from manifoldagg.averaging.checkpoints import FOREIGN_DTYPES, CheckpointFiles
from manifoldagg.errors import ArgumentError, StateDictError
from manifoldagg.tensor_file import TensorEntry, with_length

__all__ = ["Shard", "divide_into_shards"]

DTYPE_NAMES = {dtype: name for name, dtype in FOREIGN_DTYPES.items()}


@dataclass(frozen=True, eq=False)
class Shard:
    """A safetensors file of a merged checkpoint.

    Attributes:
        name: the name of the file.
        header: the bytes that precede the tensors.
        begins: a mapping from the name of each tensor to its byte offset in the file.
        size: the size of the file in bytes.
    """

    name: str
    header: bytes
    begins: Mapping[str, int]
    size: int


def divide_into_shards(
    first: CheckpointFiles, entries: Mapping[str, TensorEntry], file: str | None, shard_size: int | None
) -> tuple[Shard, ...]:
    """Divide the tensors of the result into files, by size or as in the first checkpoint.

    Args:
        first: the first checkpoint.
        entries: the tensors of the result by name.
        file: the name of a single file, or `None` for a folder.
        shard_size: the maximum number of bytes of the tensors in a file. `None` uses the shards of the first
            checkpoint.

    Raises:
        ArgumentError: if `shard_size` is invalid.
    """
    if shard_size is not None:
        check_count("shard_size", shard_size)
        if file is not None:
            raise ArgumentError("shard_size: expected None, because out is a single file; use a folder")
    if shard_size is None and file is None and len(first.shards) > 1:
        shards = first.shards
    else:
        groups = [[*first.tensors]] if shard_size is None else _groups_by_size(first, entries, shard_size)
        stem = _stem(first)
        labels = [f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
        if len(groups) == 1:
            labels = [file or f"{stem}.safetensors"]
        shards = dict(zip(labels, groups, strict=True))
    return tuple(_shard(label, [entries[n] for n in names], first.metadata) for label, names in shards.items())


def _stem(first: CheckpointFiles) -> str:
    """Return the common file name of the shards, without number and suffix."""
    file = next(iter(first.shards), "model.safetensors")
    return "adapter_model" if file.startswith("adapter_model") else "model"


def _groups_by_size(first: CheckpointFiles, entries: Mapping[str, TensorEntry], shard_size: int) -> list[list[str]]:
    """Group the names of consecutive tensors into shards of at most `shard_size` bytes.

    A tensor that is larger than `shard_size` gets a shard of its own.
    """
    groups: list[list[str]] = [[]]
    size = 0
    for name in first.tensors:
        if groups[-1] and size + entries[name].num_bytes > shard_size:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += entries[name].num_bytes
    return groups


def _shard(name: str, entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> Shard:
    # Readers require that a tensor begins at a multiple of its item size. Sorting is stable.
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    # Some versions of transformers reject a file whose metadata do not contain a format.
    lines: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    begins: dict[str, int] = {}
    position = 0
    for entry in ordered:
        end = position + entry.num_bytes
        name_of_dtype = DTYPE_NAMES.get(entry.dtype)
        if name_of_dtype is None:
            raise StateDictError(f"models: {entry.name}: expected a dtype of safetensors files, got {entry.dtype}")
        lines[entry.name] = {"dtype": name_of_dtype, "shape": [*entry.shape], "data_offsets": [position, end]}
        begins[entry.name] = position
        position = end
    # A header is UTF-8 text, so names are written without escapes.
    header = with_length(json.dumps(lines, separators=(",", ":"), ensure_ascii=False).encode())
    return Shard(name, header, {n: len(header) + begin for n, begin in begins.items()}, len(header) + position)
