"""Tests of tensor files: bitwise round trips, detection of damage, and atomic replacement despite faults."""

import errno
import json
import math
import os
import zlib
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from manifoldagg import _io, tensor_file
from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.tensor_file import dumps, load, save, with_length
from tests.federated.faults import Disk, each

OLD = {
    "model": torch.arange(5.0),
    "momentum": torch.arange(10, dtype=torch.float64),
    "clients": {"a": [1, 2.5, None], 7: (math.inf, b"x")},
}
NEW = {"model": torch.arange(9.0), "momentum": torch.arange(3, dtype=torch.int16), "clients": {}}


def alike(a, b):
    """Return whether two trees are bitwise equal, including types and the order of keys."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        same = (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        return same and raw(a) == raw(b)
    if isinstance(a, dict):
        return [*map(typed, a)] == [*map(typed, b)] and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return repr(a) == repr(b) if isinstance(a, float) else a == b


def typed(key):
    return type(key), key


def raw(tensor):
    line = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return line.as_strided(line.shape, (1,)).view(torch.uint8).numpy().tobytes()


def round_trip(tree, path):
    save(path, "tree", tree)
    return load(path, "tree")


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(max_size=20),
    st.integers(0, 2**32 - 1).map(lambda seed: torch.from_numpy(np.random.default_rng(seed).normal(size=seed % 7))),
)
TREES = st.recursive(
    LEAVES,
    lambda below: (
        st.lists(below, max_size=4)
        | st.lists(below, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), below, max_size=4)
    ),
    max_leaves=12,
)


@given(TREES)
def test_round_trip_preserves_types_and_bits(tmp_path_factory, tree):
    path = tmp_path_factory.getbasetemp() / "tree"
    assert alike(round_trip(tree, path), tree)


def test_string_and_integer_keys_are_distinct_and_keep_their_order(tmp_path):
    tree = {"7": 1, 7: 2, "": 3, -1: 4}
    assert [*round_trip(tree, tmp_path / "x").items()] == [*tree.items()]


DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in QUANTIZED], ids=str)
def test_round_trip_of_every_dtype_is_bitwise_exact(tmp_path, dtype):
    random = torch.from_numpy(np.random.default_rng(3).integers(0, 256, 12 * dtype.itemsize, np.uint8))
    if dtype is torch.bool:
        random = random % 2
    x = random.view(dtype).reshape(3, 4)
    found = round_trip([x, x[0, 0].reshape(()), x[:0]], tmp_path / "x")
    assert alike(found, [x, x[0, 0].reshape(()), x[:0]])


def test_views_and_tied_tensors_are_loaded_with_their_own_memory(tmp_path):
    x = torch.arange(12.0).reshape(3, 4)
    z = torch.complex(x, x)
    views = [x, x, x.T, x[1:, ::2], x[0, 0].expand(5), torch.nn.Parameter(x), (2 * x.requires_grad_()).relu()]
    views += [
        torch.ones(9)[::9],
        torch.ones(9)[4::9][:0],
        torch.ones(1, 1).as_strided((1, 1), (0, 0)),
        torch.ones(2, 3)[:, 1:2],
    ]
    views += [z.conj(), z.conj().imag, x.detach().to(torch.bfloat16).T]
    found = round_trip(views, tmp_path / "x")
    for was, now in zip(views, found, strict=True):
        assert torch.equal(now, was)
        assert (type(now), now.requires_grad, now.is_contiguous()) == (torch.Tensor, False, True)
        assert now.untyped_storage().nbytes() == now.nbytes
        assert now.data_ptr() % now.itemsize == 0
    assert len({now.data_ptr() for now in found}) == len(found)


def test_tensors_are_loaded_to_the_cpu_for_any_default_device(tmp_path):
    save(tmp_path / "state", "server", {"x": torch.ones(3)})
    with torch.device("meta"):
        found = load(tmp_path / "state", "server")
    assert torch.equal(found["x"], torch.ones(3))


def test_large_tensors_are_written_in_chunks(tmp_path):
    x = torch.arange(3 * 2**20 // 4 + 17, dtype=torch.int32)
    assert torch.equal(round_trip({"x": x}, tmp_path / "x")["x"], x)


def test_round_trip_of_large_trees_is_exact(tmp_path):
    clients = {
        f"ward-{i}": {"when": 0.1 * i, "receipt": (i, "", math.nan), i: [None, {"$": True}]} for i in range(2000)
    }
    tree = {"clients": clients, "large": [*range(10_000)], 5: {-(2**70): -math.inf}}
    assert alike(round_trip(tree, tmp_path / "x"), tree)


def test_numpy_numbers_are_loaded_as_python_numbers(tmp_path):
    found = round_trip([np.float32(0.5), np.float64("inf"), np.int64(3), np.bool_(True)], tmp_path / "x")
    assert alike(found, [0.5, math.inf, 3, True])


def test_safetensors_can_read_the_file(tmp_path):
    save(
        tmp_path / "x", "sums", {"b": torch.ones(3, dtype=torch.bool), "f": torch.arange(2.0), "c": torch.ones(1) * 1j}
    )
    loaded = load_file(tmp_path / "x")
    assert torch.equal(loaded["b"], torch.ones(3, dtype=torch.bool))
    assert torch.equal(loaded["f"], torch.arange(2.0))
    assert torch.equal(loaded["c"].view(torch.complex64), torch.ones(1) * 1j)
    with safe_open(tmp_path / "x", "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["tree"]) == {name: {"$tensor": name} for name in "bfc"}
    assert json.loads(metadata["coded"]) == {"c": ["complex64", [1], False]}
    assert (metadata["format"], metadata["version"], metadata["kind"]) == ("manifoldagg", "1", "sums")
    assert len(metadata["checksum"]) == 8


def test_tensors_with_equal_path_names_are_stored_under_distinct_names(tmp_path):
    x = torch.arange(4.0)
    tree = {"a": {"b": x[0], "1": x[1], 1: x[2]}, "a/b": x[3], "__metadata__": x, "tree": x}
    assert alike(round_trip(tree, tmp_path / "x"), tree)
    assert {"a/b", "a/b'", "a/1", "a/1'", "__metadata__'", "tree"} == {*load_file(tmp_path / "x")}
    assert alike(round_trip(x, tmp_path / "x"), x)


def test_round_trip_preserves_keys_that_look_like_tags(tmp_path):
    tree = {"$tuple": [1], "x": {"$float": "nan"}, "y": {"$": 1, "z": {}}, "": {"a": 1, "$b": 2}}
    assert alike(round_trip(tree, tmp_path / "x"), tree)


class Named(torch.Tensor):
    """A tensor subclass, which a file cannot represent."""


Pair = namedtuple("Pair", "a b")
LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"a": [1, {2, 3}]}, r"^\['a'\]\[1\]: expected dicts .* a set cannot be saved$"),
        (object(), "^the tree: expected dicts"),
        ({"f": lambda: 0}, "a function"),
        ({"clients": {("a", 1): 0}}, r"^\['clients'\]: .* key \('a', 1\)"),
        ({True: 0}, "key True"),
        ({None: 0}, "key None"),
        ({1.0: 0}, "key 1.0"),
        (Pair(1, 2), "a Pair"),
        (OrderedDict(), "an? OrderedDict"),
        (10**5000, "digits"),
        ({10**5000: 1}, "digits"),
        (1j, "complex"),
        (np.ones(2), "ndarray"),
        (LOOP, "contains itself"),
        ([torch.ones(2).to_sparse()], r"^\[0\]: .*not dense .*sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "not dense"),
        (torch.ones(2).as_subclass(Named), "Named"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_values_are_rejected_with_their_path(tmp_path, tree, told):
    save(tmp_path / "x", "tree", OLD)
    with pytest.raises(CheckpointError, match=told):
        save(tmp_path / "x", "tree", tree)
    assert os.listdir(tmp_path) == ["x"]
    assert alike(load(tmp_path / "x", "tree"), OLD)


def test_invalid_paths_are_rejected(tmp_path, as_shipped):
    for path in (tmp_path / "none" / "x", tmp_path, 3, None):
        with pytest.raises(ArgumentError, match="^path: expected"):
            save(path, "tree", OLD)
    with pytest.raises(ArgumentError, match="^path: expected"):
        load(3, "tree")
    with pytest.raises(CheckpointError, match="none/x: cannot be read: No such file"):
        load(tmp_path / "none" / "x", "tree")
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        load(tmp_path, "tree")


def test_a_symbolic_link_is_followed(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "there" / "x")
    save(tmp_path / "latest", "tree", OLD)
    assert (tmp_path / "latest").is_symlink()
    assert alike(load(tmp_path / "there" / "x", "tree"), OLD)


def test_every_truncation_is_detected(tmp_path):
    save(tmp_path / "x", "tree", OLD)
    whole = (tmp_path / "x").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "x").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="is truncated: it has"):
            load(tmp_path / "x", "tree")


@pytest.mark.parametrize("mask", [0x01, 0x20, 0xFF])
def test_every_altered_byte_is_detected(tmp_path, mask):
    save(tmp_path / "x", "tree", OLD)
    whole = (tmp_path / "x").read_bytes()
    for i in range(len(whole)):
        altered = bytearray(whole)
        altered[i] ^= mask
        (tmp_path / "x").write_bytes(altered)
        with pytest.raises(CheckpointError, match="is altered|is truncated|was not written by this package"):
            load(tmp_path / "x", "tree")
    (tmp_path / "x").write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="is altered: it has"):
        load(tmp_path / "x", "tree")


def with_valid_checksum(header, data):
    """Return a file with this header and a valid checksum."""
    header["__metadata__"]["checksum"] = "00000000"
    content = bytearray(with_length(json.dumps(header, separators=(",", ":")).encode()) + data)
    start = 8 + tensor_file.CHECKSUM.start
    content[start : start + 8] = b"%08x" % zlib.crc32(content)
    return bytes(content)


def forged(content, change):
    """Return a file whose header a function has changed, with a valid checksum."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header, header["__metadata__"])
    return with_valid_checksum(header, content[8 + length :])


def load_bytes(path, content, kind):
    path.write_bytes(content)
    return load(path, kind)


def test_newer_formats_other_kinds_and_foreign_files_are_rejected(tmp_path):
    path = tmp_path / "x"
    save(path, "clock", OLD)
    with pytest.raises(CheckpointError, match=r"x: contains a clock, expected a server$"):
        load(path, "server")
    assert alike(load_bytes(path, forged(path.read_bytes(), lambda header, metadata: None), "clock"), OLD)
    with pytest.raises(CheckpointError, match="has format version 2, and this version of the package reads 1"):
        load_bytes(path, forged(path.read_bytes(), lambda header, metadata: metadata.update(version="2")), "clock")
    torch.save({"x": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match="was not written by this package"):
        load(path, "clock")
    save_file({"x": torch.ones(2)}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match="was not written by this package"):
        load(path, "clock")


FORGED = {
    "an unknown dtype": lambda header, metadata: header["model"].update(dtype="F99"),
    "another length": lambda header, metadata: header["model"].update(shape=[6]),
    "an unknown encoding": lambda header, metadata: metadata.update(coded='{"model": ["float99", [5], false]}'),
    "an encoding of numbers": lambda header, metadata: metadata.update(coded='{"model": ["float32", [5], false]}'),
    "an encoding without an entry": lambda header, metadata: metadata.update(
        coded='{"other": ["float32", [5], false]}'
    ),
    "an unknown name": lambda header, metadata: metadata.update(tree='{"$tensor": "other"}'),
    "a tensor twice": lambda header, metadata: metadata.update(tree='[{"$tensor": "model"}, {"$tensor": "model"}]'),
    "an unknown tag": lambda header, metadata: metadata.update(tree='{"$tupel": [1]}'),
    "two tags": lambda header, metadata: metadata.update(tree='{"$tuple": [1], "$float": "1"}'),
    "an invalid key": lambda header, metadata: metadata.update(tree='{"$dict": [[1.5, 1]]}'),
    "a key twice": lambda header, metadata: metadata.update(tree='{"$dict": [[1, 1], [1, 1]]}'),
    "no JSON": lambda header, metadata: metadata.update(tree="{"),
    "no bytes": lambda header, metadata: metadata.update(tree='{"$bytes": "eA=!"}'),
    "no number": lambda header, metadata: metadata.update(tree='{"$float": "x"}'),
    "an unknown device": lambda header, metadata: metadata.update(tree='{"$tensor": ["model", "cow"]}'),
    "no tree": lambda header, metadata: metadata.pop("tree"),
    "no format": lambda header, metadata: metadata.pop("format"),
    "metadata that are no text": lambda header, metadata: metadata.update(kind=1),
    "a hole": lambda header, metadata: header["model"].update(data_offsets=[4, 24]),
    "a negative length": lambda header, metadata: header["model"].update(data_offsets=[0, -20]),
    "another field": lambda header, metadata: header["model"].update(more=1),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_tree_is_rejected(tmp_path, name):
    content = bytes(dumps("tree", {"model": torch.arange(5.0)}))
    assert alike(load_bytes(tmp_path / "x", content, "tree"), {"model": torch.arange(5.0)})
    with pytest.raises(CheckpointError, match="was not written by this package|is altered|is truncated"):
        load_bytes(tmp_path / "x", forged(content, FORGED[name]), "tree")


def test_a_missing_device_is_replaced_by_the_cpu(tmp_path):
    content = bytes(dumps("tree", torch.ones(5)))
    assert torch.equal(load_bytes(tmp_path / "x", content, "tree"), torch.ones(5))

    def elsewhere(header, metadata):
        metadata["tree"] = '{"$tensor": ["", "cuda:63"]}'

    found = load_bytes(tmp_path / "x", forged(content, elsewhere), "tree")
    assert found.device.type == "cpu"
    assert torch.equal(found, torch.ones(5))


def structure(path):
    with open(path, "rb") as file:
        return tensor_file.load_structure(file, path.stat().st_size)


def test_the_structure_is_read_without_the_tensors(tmp_path, monkeypatch):
    path = tmp_path / "x"
    tree = {"model": torch.zeros(10**6), "z": [torch.ones(2, 3) * 1j, torch.ones(0)], "sums": (1, b"x")}
    save(path, "server", tree)
    counts = []
    read = tensor_file._read_exactly

    def counted(file, count):
        counts.append(count)
        return read(file, count)

    monkeypatch.setattr(tensor_file, "_read_exactly", counted)
    metadata, found = structure(path)
    assert (metadata["kind"], metadata["version"]) == ("server", "1")
    assert found == {
        "model": "torch.float32 [1000000]",
        "z": ["torch.complex64 [2, 3]", "torch.float32 [0]"],
        "sums": (1, b"x"),
    }
    assert max(counts) == _io.CHUNK_BYTES
    assert sum(counts) > 4 * 10**6
    content = bytearray(path.read_bytes())
    with open(path, "ab") as file:
        file.write(b"more")
    assert structure(path) == (metadata, found)
    for place in (100, 5000, len(content) - 1):
        content[place] ^= 1
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="is altered"):
            structure(path)
        content[place] ^= 1
    for length in (0, 7, 100, 5000, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="is truncated"):
            structure(path)


def test_errors_name_the_older_file_and_do_not_read_it(tmp_path):
    path = tmp_path / "x"
    for i in range(3):
        save(path, "tree", i, keep=3)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"x: is truncated: it has 0 bytes; an older file is .*x\.1$"):
        load(path, "tree")
    path.unlink()
    (tmp_path / "x.1").unlink()
    (tmp_path / "x.txt").touch()
    with pytest.raises(CheckpointError, match=r"x: cannot be read: No such file .*; an older file is .*x\.2$"):
        load(path, "tree")


def test_keep_retains_the_latest_files_in_order(tmp_path):
    for i in range(5):
        save(tmp_path / "x", "tree", i, keep=3)
    assert sorted(os.listdir(tmp_path)) == ["x", "x.1", "x.2"]
    assert [load(tmp_path / name, "tree") for name in ("x", "x.1", "x.2")] == [4, 3, 2]
    save(tmp_path / "x", "tree", 5)
    assert [load(tmp_path / name, "tree") for name in ("x", "x.1", "x.2")] == [5, 3, 2]


def saved(folder, monkeypatch, keep):
    """Return a function that replaces `OLD` by `NEW` on a simulated disk."""

    def run(disk):
        for name in os.listdir(folder):
            os.unlink(folder / name)
        for i in range(keep - 1):
            save(folder / "x", "tree", i, keep=keep)
        save(folder / "x", "tree", OLD, keep=keep)
        with monkeypatch.context() as patch:
            for module in (_io, tensor_file):
                patch.setattr(module, "os", disk)
            save(folder / "x", "tree", NEW, keep=keep)

    return run


@pytest.mark.parametrize("keep", [1, 3])
def test_a_fault_at_any_call_leaves_a_complete_file_and_no_draft(tmp_path, monkeypatch, keep):
    seen = set()
    names = {"x", *(f"x.{i}" for i in range(1, keep))}
    for disk, call, error in each(saved(tmp_path, monkeypatch, keep)):
        assert error is None or (isinstance(error, CheckpointError) and "could not be written" in str(error))
        now = load(tmp_path / "x", "tree")
        seen.add((call, disk.fault, alike(now, NEW)))
        assert alike(now, OLD) or alike(now, NEW)
        if not disk.dead and call != "close":
            assert {*os.listdir(tmp_path)} <= names, (disk.at, call)
        # The next save succeeds and removes the draft of the failed save.
        save(tmp_path / "x", "tree", NEW, keep=keep)
        assert {*os.listdir(tmp_path)} <= names, (disk.at, call)
        assert alike(load(tmp_path / "x", "tree"), NEW)
        for name in os.listdir(tmp_path):
            load(tmp_path / name, "tree")
    assert {("write", errno.ENOSPC, False), ("fsync", errno.EACCES, False), ("replace", errno.EACCES, False)} <= seen
    assert {("write", "short", True), ("write", "torn", False), ("replace", "killed", False)} <= seen
    assert {call for call, *_ in seen} >= {
        "mkdir",
        "open",
        "write",
        "fsync",
        "replace",
        *(["link"] if keep > 1 else []),
    }


def test_an_interrupt_leaves_the_old_file(tmp_path, monkeypatch):
    class Interrupted(Disk):
        def _call(self, name, call, given):
            if name == "fsync":
                raise KeyboardInterrupt
            return super()._call(name, call, given)

    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, monkeypatch, 1)(Interrupted())
    assert os.listdir(tmp_path) == ["x"]
    assert alike(load(tmp_path / "x", "tree"), OLD)


@pytest.mark.parametrize("keep", [1, 2])
def test_the_file_is_synced_before_and_its_folder_after_the_rename(tmp_path, monkeypatch, keep):
    disk = Disk()
    saved(tmp_path, monkeypatch, keep)(disk)
    log = [(name, *given[:1]) for name, *given in disk.log]
    file = next(given[0] for name, *given in disk.log if name == "write")
    (done,) = (i for i, (name, *given) in enumerate(disk.log) if name == "replace" and given[1] == tmp_path / "x")
    last = max(i for i, (name, *_) in enumerate(log) if name == "write")
    assert ("fsync", file) in log[last:done]
    assert "fsync" in [name for name, *_ in log[done:]]
    assert [given for name, *given in disk.log[done:] if name == "open"] == [[tmp_path, os.O_RDONLY | os.O_DIRECTORY]]
