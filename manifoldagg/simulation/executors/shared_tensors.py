"""Shared tensors: transport of tensors between processes, through shared files on one machine or by value."""

import io
import os
import pickle
import stat
import tempfile
import threading
from collections import OrderedDict
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from manifoldagg._io import write_all
from manifoldagg.federated.pytrees import Tree
from manifoldagg.federated.server.durability.spill import open_unlinked
from manifoldagg.tensor_file import tensor_bytes

__all__ = ["SharedTensorStore", "StoredTensor", "TensorNotFound", "TensorRef", "deserialize", "serialize"]

MIN_SHARED_BYTES = 2**10
"""Bytes up to which a tensor travels by value: a file costs more."""
SHARED_MEMORY_DIR = "/dev/shm"
"""Where files are memory, on Linux."""
TOKEN_BYTES = 16
"""Bytes of the random token in the name and at the start of a file. On another machine the path is another file."""
MAX_FILES = 256
"""Number of tensors in files at a time, each of which needs a descriptor; further tensors travel by value."""
MAX_CACHED_BYTES = 2**28
"""Bytes of tensors that came by value, beyond which a process forgets the oldest."""


class TensorNotFound(Exception):
    """Raised if a process cannot read a tensor, which must then be sent by value."""


class TensorRef(NamedTuple):
    """A serialisable reference to a tensor.

    Attributes:
        name: of the file where its values lie; also what a process knows it by that got them by value. Empty where
            there is no file.
        data: its values, where they travel.
        dtype: of the tensor.
        shape: likewise.
        device: likewise.
    """

    name: str
    data: bytes | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device

    def load(self) -> Tensor:
        """Return the tensor in its own memory, with torch's alignment.

        Raises:
            TensorNotFound: if its values lie on another machine, and came neither with this nor with an earlier
                reference.
        """
        data = _RECEIVED_VALUES.get_or_store(self.name, self.data) if self.name else self.data
        made = torch.empty(self.shape, dtype=self.dtype)
        target = tensor_bytes(made)
        if data is not None:
            target[:] = data
        else:
            try:
                _read_into(self.name, target)
            except OSError:
                raise TensorNotFound(self.name) from None
        return made.to(self.device)


def _read_into(name: str, target: memoryview) -> None:
    """Read the values of a [`SharedFile`][manifoldagg.simulation.executors.shared_tensors.SharedFile].

    Raises:
        OSError: if this process cannot read the file, or the name belongs to another file.
    """
    path, _, token = name.partition("#")
    # Opening a pipe or a device could block.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise FileNotFoundError(name)
    with open(path, "rb", buffering=0) as file:
        if file.read(TOKEN_BYTES) != bytes.fromhex(token):
            raise FileNotFoundError(name)
        while target and (count := file.readinto(target)):
            target = target[count:]


class SharedFile:
    """An unlinked file with the values of a tensor, which other processes of this machine and user read on Linux.

    Args:
        folder: the folder whose file system stores the file.
        tensor: the tensor to write.

    Attributes:
        name: the path of the open descriptor of this process, and a random token.

    Raises:
        OSError: if the file cannot be written, or the system does not list descriptors in `/proc`.
    """

    def __init__(self, folder: str, tensor: Tensor) -> None:
        token = os.urandom(TOKEN_BYTES)
        self._file = open_unlinked(folder)
        path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        self.name = f"{path}#{token.hex()}"
        os.stat(path)
        write_all(self._file.write, memoryview(token), 0)
        write_all(self._file.write, tensor_bytes(tensor), 0)


class _ReceivedValues:
    """What came by value, the latest last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0

    def get_or_store(self, name: str, data: bytes | None) -> bytes | None:
        """What goes by that name: `data` from now on, where it came."""
        with self._lock:
            before = self._values.pop(name, None)
            found = before if data is None else data
            if found is None:
                return None
            self._values[name] = found
            self._size += len(found) - len(before or b"")
            while self._size > MAX_CACHED_BYTES and len(self._values) > 1:
                self._size -= len(self._values.popitem(last=False)[1])
            return found


_RECEIVED_VALUES = _ReceivedValues()


class StoredTensor:
    """A tensor in a store; the store keeps it while this object is referenced."""

    def __init__(self, tensor: Tensor, file: SharedFile | None) -> None:
        self.tensor = tensor
        self.file = file
        self.was_sent = False


class SharedTensorStore:
    """A store of tensors that other processes read; each tensor is written once.

    A tensor is known as the object that it is, and must not be written. It lies there for as long as somebody keeps
    what `put` returned: in a file in memory, in the folder of temporary files where memory is short, or nowhere, and
    travels by value, where no file can be written. The files have no name in any folder: the system removes them when
    this process ends, even if it is killed.

    Example:
        >>> store, model = SharedTensorStore(), torch.zeros(1000)
        >>> stored = store.put(model)
        >>> ref = store.reference(stored)
        >>> ref.data is None, torch.equal(ref.load(), model)
        (True, True)
    """

    def __init__(self) -> None:
        self._folders = (SHARED_MEMORY_DIR, tempfile.gettempdir())
        self._stored: WeakValueDictionary[int, StoredTensor] = WeakValueDictionary()
        self._lock = threading.Lock()
        self.remote = False
        """Whether some process does not find the files."""

    def put(self, tensor: Tensor) -> StoredTensor:
        """Store the tensor without a copy."""
        with self._lock:
            lying = self._stored.get(id(tensor))
            if lying is None:
                self._stored[id(tensor)] = lying = StoredTensor(tensor, self._write(tensor))
            return lying

    def reference(self, stored: StoredTensor, *, force_by_value: bool = False) -> TensorRef:
        """Return a reference to a tensor, with values if `force_by_value` or if it is first sent off-machine."""
        tensor = stored.tensor
        with self._lock:
            by_value = force_by_value or stored.file is None or (self.remote and not stored.was_sent)
            stored.was_sent = stored.was_sent or by_value
        name = "" if stored.file is None else stored.file.name
        data = bytes(tensor_bytes(tensor)) if by_value else None
        return TensorRef(name, data, tensor.dtype, tuple(tensor.shape), tensor.device)

    def _write(self, tensor: Tensor) -> SharedFile | None:
        for folder in self._folders if len(self._stored) < MAX_FILES else ():
            with suppress(OSError, MemoryError):
                return SharedFile(folder, tensor)
        return None


def serialize(
    tree: Tree, store: SharedTensorStore | None = None, *, by_value: bool = False
) -> tuple[bytes, list[StoredTensor]]:
    """Serialise any picklable object to bytes; dense tensors are stored by value.

    Args:
        tree: to serialize.
        store: where tensors are put that are not small; only references to them are serialized.
        by_value: these bring the values.

    Returns:
        The bytes, and what must stay in the store for as long as somebody may deserialize them.

    Example:
        >>> deserialize(serialize({"m": torch.ones(4)[1:], "count": 3})[0])
        {'m': tensor([1., 1., 1.]), 'count': 3}
    """
    file = io.BytesIO()
    pickler = _Pickler(file, store, by_value)
    pickler.dump(tree)
    return file.getvalue(), pickler.stored


def deserialize(data: bytes) -> Tree:
    """Deserialise an object; its tensors have their own memory and torch's alignment.

    Raises:
        TensorNotFound: if a reference in it cannot be loaded.
    """
    return _Unpickler(io.BytesIO(data)).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, store: SharedTensorStore | None, by_value: bool) -> None:
        super().__init__(file, protocol=5)
        self._store = store
        self._by_value = by_value
        self.stored: list[StoredTensor] = []

    def persistent_id(self, obj: Any) -> TensorRef | None:
        if self._store is None or not _is_dense(obj) or obj.nbytes <= MIN_SHARED_BYTES:
            return None
        lying = self._store.put(obj)
        self.stored.append(lying)
        return self._store.reference(lying, force_by_value=self._by_value)

    def reducer_override(self, obj: Any) -> Any:
        if not _is_dense(obj):
            return NotImplemented
        return _Pickler._load_tensor, (bytes(tensor_bytes(obj)), obj.dtype, tuple(obj.shape), obj.device)

    @staticmethod
    def _load_tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return TensorRef("", data, dtype, shape, device).load()


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Tensor:
        opened: Tensor = pid.load()
        return opened


def _is_dense(obj: Any) -> bool:
    return type(obj) is Tensor and obj.layout is torch.strided and not obj.is_meta and not obj.is_quantized
