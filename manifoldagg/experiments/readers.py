"""Readers of local files: images in the IDX format (MNIST and its successors), and text."""

import gzip
import math
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from manifoldagg._io import os_errors
from manifoldagg._validation import check_choice
from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.dataset import LabelledDataset
from manifoldagg.simulation.metrics import macro_auprc, macro_auroc

__all__ = ["LABEL_SET_FIELDS", "read_idx", "read_images", "read_text", "with_model"]

LABEL_SET_FIELDS: dict[str, Any] = {
    "criterion": binary_cross_entropy_with_logits,
    "metrics": {"AUROC": macro_auroc, "AUPRC": macro_auprc},
}
"""The criterion and the metrics of data sets whose samples can have several labels."""

DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: "i2", 0x0C: "i4", 0x0D: "f4", 0x0E: "f8"}
"""The NumPy dtype by the third byte of a file."""
PARTS = ("train", "t10k")
IMAGE_SIZE = 28
MAX_DIMENSIONS = 32
GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: str | os.PathLike[str]) -> Tensor:
    r"""Read an array from a file in the IDX format, which may be gzipped.

    The file begins with two zero bytes, one byte for the type of the numbers, and one byte for the number of
    dimensions. The size of each dimension follows as an unsigned 32-bit integer. The numbers come last, in row-major
    order. All values are big-endian.

    Args:
        path: the path of the file. The first bytes of the file determine whether it is gzipped. Its name is ignored.

    Returns:
        A tensor in the dtype of the file: uint8, int8, int16, int32, float32 or float64.

    Raises:
        ArgumentError: if the file cannot be read, has another magic number, is truncated, or has trailing bytes.

    Source: LeCun, Cortes, Burges, The MNIST database, file formats.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "two-by-three")
        ...     _ = path.write_bytes(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6]))
        ...     read_idx(path)
        tensor([[1, 2, 3],
                [4, 5, 6]], dtype=torch.uint8)
    """
    path = Path(path)
    with os_errors(f"path: {path}: cannot be read", ArgumentError):
        data = path.read_bytes()
    if data.startswith(GZIP_MAGIC):
        try:
            data = gzip.decompress(data)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ArgumentError(f"path: {path}: expected a whole gzip file, but: {error}") from None
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in DTYPES or not 1 <= data[3] <= MAX_DIMENSIONS:
        types = ", ".join(f"{code:02x}" for code in DTYPES)
        raise ArgumentError(
            f"path: {path}: expected a file that starts with 00 00, a type ({types}) and 1 to {MAX_DIMENSIONS:02x} "
            f"dimensions, got {data[:4].hex(' ') or 'an empty file'}"
        )
    begin = 4 + 4 * data[3]
    if len(data) < begin:
        raise ArgumentError(f"path: {path}: expected {data[3]} dimensions, but the file ends before they do")
    dimensions = struct.unpack(f">{data[3]}I", data[4:begin])
    dtype = np.dtype(DTYPES[data[2]])
    size = dtype.itemsize * math.prod(dimensions)
    if len(data) - begin != size:
        raise ArgumentError(
            f"path: {path}: expected {size} bytes of numbers for dimensions {dimensions}, got {len(data) - begin}"
        )
    try:
        return torch.from_numpy(np.ndarray(dimensions, dtype.newbyteorder(">"), data, begin).astype(dtype))
    except ValueError as error:
        raise ArgumentError(f"path: {path}: expected dimensions of an array, got {dimensions}: {error}") from None


def read_images(
    folder: str | os.PathLike[str], part: str = "t10k"
) -> tuple[Float32[Tensor, "samples 1 28 28"], Int64[Tensor, " samples"]]:
    r"""Read the images and labels of MNIST, Fashion-MNIST, KMNIST, or another data set with the same file names.

    Args:
        folder: the folder with `t10k-images-idx3-ubyte` and `t10k-labels-idx1-ubyte`, gzipped (`.gz`) or not. The names
            may have a dot instead of the dash before `idx`.
        part: the part of the data set: `"train"` or `"t10k"` (the test images).

    Returns:
        The inputs (samples, 1, 28, 28) in [0, 1] and the targets (samples,).

    Raises:
        ArgumentError: if a file is missing, is damaged, or does not contain bytes of the expected shape.
    """
    check_choice("part", part, PARTS)
    pixels, source = _find(Path(folder), f"{part}-images", 3)
    labels, origin = _find(Path(folder), f"{part}-labels", 1)
    if pixels.dtype != torch.uint8 or pixels.shape[1:] != (IMAGE_SIZE, IMAGE_SIZE):
        given = f"{pixels.dtype} of shape {tuple(pixels.shape)}"
        raise ArgumentError(f"folder: {source}: expected bytes of shape (any, {IMAGE_SIZE}, {IMAGE_SIZE}), got {given}")
    if labels.dtype != torch.uint8 or labels.shape != pixels.shape[:1]:
        given = f"{labels.dtype} of shape {tuple(labels.shape)}"
        raise ArgumentError(f"folder: {origin}: expected bytes of shape ({len(pixels)},), got {given}")
    return pixels.unsqueeze(1).to(torch.float32).div_(255), labels.to(torch.int64)


def read_text(path: Path) -> str:
    """Read a text file in UTF-8, with or without a byte order mark.

    Raises:
        ArgumentError: if the file cannot be read, or is not UTF-8.
    """
    try:
        with os_errors(f"path: {path}: cannot be read", ArgumentError):
            return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"path: {path}: expected text in UTF-8; {error.reason} at byte {error.start}") from None


def with_model(
    name: str, inputs: Tensor, labels: Tensor, model_factory: Callable[..., nn.Module], **fields: Any
) -> LabelledDataset:
    """Create a data set, and build its model from the shapes of its samples.

    Args:
        name: the name of the data set.
        inputs: the inputs.
        labels: the labels.
        model_factory: a function of the signature, such as `models.mlp`.
        **fields: further fields of the data set.
    """
    made = LabelledDataset(name, inputs, labels, partial(model_factory), **fields)
    return replace(made, model=partial(model_factory, made.signature))


def _find(folder: Path, stem: str, dimensions: int) -> tuple[Tensor, Path]:
    """Read the array in the file with one of the usual names, and return its path too."""
    names = [f"{stem}{mark}idx{dimensions}-ubyte{suffix}" for mark in "-." for suffix in ("", ".gz")]
    for name in names:
        if (folder / name).is_file():
            return read_idx(folder / name), folder / name
    raise ArgumentError(f"folder: {folder}: expected one of the files {', '.join(names)}")
