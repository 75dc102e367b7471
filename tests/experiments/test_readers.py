"""Tests of IDX files: round trips, damaged files, and the file names of MNIST."""

import gzip
import itertools
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.readers import read_idx, read_images
from tests.support import seeds

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx(array):
    """Encode an array as an IDX file, as the specification defines it."""
    kind = array.dtype.str[1:]
    header = bytes([0, 0, CODES[kind], array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def numbers(seed, kind, shape):
    """Return random bit patterns of a dtype, including NaNs and infinities."""
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(size), kind).reshape(shape)


def packed(data):
    """Compress data with gzip and a fixed time stamp, so that the bytes are reproducible."""
    return gzip.compress(data, mtime=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("idx")


@given(seeds, st.sampled_from(sorted(CODES)), st.lists(st.integers(0, 5), min_size=1, max_size=4), st.booleans())
def test_idx_round_trip_is_bitwise_exact(folder, seed, kind, shape, gzipped):
    array = numbers(seed, kind, shape)
    path = folder / "file"
    path.write_bytes(packed(idx(array)) if gzipped else idx(array))
    read = read_idx(path).numpy()
    assert (read.dtype, read.shape) == (array.dtype, array.shape)
    assert read.tobytes() == array.tobytes()


def test_idx_tensors_are_writable(folder):
    path = folder / "bytes"
    path.write_bytes(idx(np.zeros(3, "u1")))
    assert read_idx(str(path)).add_(1).tolist() == [1, 1, 1]


@given(seeds, st.booleans(), st.data())
def test_truncated_idx_files_are_rejected(folder, seed, gzipped, data):
    whole = idx(numbers(seed, "i2", (2, 3)))
    whole = packed(whole) if gzipped else whole
    path = folder / "cut"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ArgumentError, match=f"path: {path}: expected"):
        read_idx(path)


GOOD = idx(np.arange(6, dtype="u1").reshape(2, 3))


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"", "expected a file that starts with 00 00, a type .* got an empty file"),
        (b"\x89PNG\r\n", "expected a file that starts with 00 00, .* got 89 50 4e 47"),
        (bytes([0, 0, 0x0A, 1, 0, 0, 0, 0]), r"a type \(08, 09, 0b, 0c, 0d, 0e\) .* got 00 00 0a 01"),
        (bytes([0, 0, 8, 0, 5]), "1 to 20 dimensions, got 00 00 08 00"),
        (bytes([0, 0, 8, 33]) + bytes(200), "1 to 20 dimensions, got 00 00 08 21"),
        (bytes([0, 0, 8, 2, 0, 0, 0, 1]), "expected 2 dimensions, but the file ends"),
        (GOOD[:-1], r"expected 6 bytes of numbers for dimensions \(2, 3\), got 5"),
        (GOOD + b"x", r"expected 6 bytes of numbers for dimensions \(2, 3\), got 7"),
        (packed(GOOD[:-1]), "expected 6 bytes of numbers .* got 5"),
        (packed(GOOD + b"x"), "expected 6 bytes of numbers .* got 7"),
        (packed(GOOD)[:-8] + bytes(8), "expected a whole gzip file, but: CRC check failed"),
        (packed(GOOD)[:10] + b"\xff" * 20, "expected a whole gzip file"),
        (packed(GOOD) + b"tail", "expected a whole gzip file"),
        # The product of these dimensions wraps to 0 in int64.
        (bytes([0, 0, 8, 3]) + b"\xff" * 12, "expected .* bytes of numbers"),
        (bytes([0, 0, 8, 2]) + struct.pack(">2I", 2**31, 2**31), "expected .* bytes of numbers"),
        (bytes([0, 0, 14, 4]) + struct.pack(">4I", 2**31, 2**31, 2**31, 0), "expected dimensions of an array"),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_damaged_idx_files_are_rejected(folder, contents, words):
    path = folder / "damaged"
    path.write_bytes(contents)
    with pytest.raises(ArgumentError, match=f"^path: {path}: .*{words}"):
        read_idx(path)


def test_missing_files_and_folders_are_rejected(folder):
    with pytest.raises(ArgumentError, match="absent: cannot be read: No such file"):
        read_idx(folder / "absent")
    with pytest.raises(ArgumentError, match="cannot be read: Is a directory"):
        read_idx(folder)


def written(folder, part="t10k", mark="-", suffix="", pixels=None, labels=None):
    """Write a data set of seven images. The first pixel of each image is 20 times its label."""
    labels = np.arange(7, dtype="u1") if labels is None else labels
    if pixels is None:
        pixels = np.zeros((7, 28, 28), "u1")
        pixels[:, 0, 0] = 20 * np.arange(7)
    for name, array, n in (("images", pixels, 3), ("labels", labels, 1)):
        data = idx(array)
        (folder / f"{part}-{name}{mark}idx{n}-ubyte{suffix}").write_bytes(packed(data) if suffix else data)
    return folder


@pytest.mark.parametrize("part", ["train", "t10k"])
@pytest.mark.parametrize("mark", ["-", "."])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_images_are_found_under_each_common_file_name(tmp_path, part, mark, suffix):
    inputs, targets = read_images(written(tmp_path, part, mark, suffix), part)
    assert (inputs.dtype, inputs.shape) == (torch.float32, (7, 1, 28, 28))
    assert (targets.dtype, targets.tolist()) == (torch.int64, list(range(7)))
    # The reader divides float32 numbers once, with correct rounding.
    assert torch.equal(inputs[:, 0, 0, 0], torch.arange(0, 140, 20) / 255)
    assert inputs[:, :, 1:].count_nonzero() == 0


def test_pixel_value_255_is_read_as_one(tmp_path):
    inputs, _ = read_images(written(tmp_path, pixels=np.full((7, 28, 28), 255, "u1")))
    assert (inputs == 1).all()


def test_error_for_missing_images_lists_the_expected_file_names(tmp_path):
    with pytest.raises(ArgumentError) as refused:
        read_images(tmp_path)
    for name in ("images-idx3-ubyte", "images-idx3-ubyte.gz", "images.idx3-ubyte", "images.idx3-ubyte.gz"):
        assert f"t10k-{name}" in str(refused.value)
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"pixels": np.zeros((7, 8, 8), "u1")}, r"images-idx3-ubyte: expected bytes of shape \(any, 28, 28\), got torch.uint8 of shape \(7, 8, 8\)"),
        ({"pixels": np.zeros((7, 784), "u1")}, "images-idx3-ubyte: expected bytes"),
        ({"pixels": np.zeros((7, 28, 28), "f4")}, "images-idx3-ubyte: expected bytes .* got torch.float32"),
        ({"labels": np.zeros(6, "u1")}, r"labels-idx1-ubyte: expected bytes of shape \(7,\), got torch.uint8 of shape \(6,\)"),
        ({"labels": np.zeros(7, "i4")}, "labels-idx1-ubyte: expected bytes"),
        ({"labels": np.zeros((7, 1), "u1")}, "labels-idx1-ubyte: expected bytes"),
    ],
)  # fmt: skip
def test_arrays_of_wrong_shape_or_dtype_are_rejected(tmp_path, arrays, words):
    with pytest.raises(ArgumentError, match=words):
        read_images(written(tmp_path, **arrays))


def test_an_unknown_part_is_rejected(tmp_path):
    with pytest.raises(ArgumentError, match="part: expected one of train, t10k; got 'test'"):
        read_images(tmp_path, "test")
