"""Parcels: tensors on their way between processes: in files that those of a machine share, or by value."""

import io
import os
import pickle
import tempfile
import threading
from collections import OrderedDict
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from manifoldagg.errors import SpillError
from manifoldagg.federated.pytrees import Tree
from manifoldagg.federated.server.durability.raw_io import tensor_bytes
from manifoldagg.federated.server.durability.spill import Spill, SpilledTree

__all__ = ["Lying", "Missing", "Parcel", "Shelf", "packed", "unpacked"]

SMALL = 2**10
"""Bytes up to which a tensor is no parcel: a file costs more."""
SHARED = "/dev/shm"
"""Where files are memory, on Linux."""
KEPT = 2**28
"""Bytes of parcels that came by value, beyond which a process forgets the oldest."""


class Missing(Exception):
    """A process has not got a parcel: it is to be sent by value."""


class Parcel(NamedTuple):
    """What travels for a tensor.

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

    def open(self) -> Tensor:
        """The tensor, in memory of its own, as torch lays it.

        Raises:
            Missing: if its values lie on another machine, and came neither with this nor with an earlier parcel.
        """
        data = _RECEIVED.keep(self.name, self.data) if self.name else self.data
        made = torch.empty(self.shape, dtype=self.dtype)
        target = tensor_bytes(made)
        if data is not None:
            target[:] = data
        else:
            try:
                _read(self.name, target)
            except OSError:
                raise Missing(self.name) from None
        return made.to(self.device)


def _read(name: str, target: memoryview) -> None:
    with open(name, "rb", buffering=0) as file:
        while target and (count := file.readinto(target)):
            target = target[count:]


class _Received:
    """What came by value, the latest last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0

    def keep(self, name: str, data: bytes | None) -> bytes | None:
        """What goes by that name: `data` from now on, where it came."""
        with self._lock:
            before = self._held.pop(name, None)
            found = before if data is None else data
            if found is None:
                return None
            self._held[name] = found
            self._size += len(found) - len(before or b"")
            while self._size > KEPT and len(self._held) > 1:
                self._size -= len(self._held.popitem(last=False)[1])
            return found


_RECEIVED = _Received()


class Lying:
    """A tensor on a shelf, for as long as somebody refers to this."""

    def __init__(self, tensor: Tensor, filed: SpilledTree | None) -> None:
        self.tensor = tensor
        self.filed = filed
        self.sent = False


class Shelf:
    """Where tensors lie that other processes read: each is written once, however often it is sent.

    A tensor is known as the object that it is, and must not be written. It lies there for as long as somebody keeps
    what `put` returned: in a file in memory, in the folder of temporary files where memory is short, or nowhere, and
    travels by value, where no file can be written. The files go with this process, however it ends, as those of a
    [`Spill`][manifoldagg.federated.server.durability.spill.Spill] do.

    Example:
        >>> shelf, model = Shelf(), torch.zeros(1000)
        >>> lying = shelf.put(model)
        >>> parcel = shelf.parcel(lying)
        >>> parcel.data is None, torch.equal(parcel.open(), model)
        (True, True)
    """

    def __init__(self) -> None:
        folders = [SHARED] if os.access(SHARED, os.W_OK) else []
        self._spills = [Spill(folder) for folder in (*folders, tempfile.gettempdir())]
        self._lying: WeakValueDictionary[int, Lying] = WeakValueDictionary()
        self._lock = threading.Lock()
        self.far = False
        """Whether some process does not find the files."""

    def put(self, tensor: Tensor) -> Lying:
        """The tensor as it lies here."""
        with self._lock:
            lying = self._lying.get(id(tensor))
            if lying is None:
                self._lying[id(tensor)] = lying = Lying(tensor, self._filed(tensor))
            return lying

    def parcel(self, lying: Lying, *, whole: bool = False) -> Parcel:
        """What is sent for a tensor: where it lies; its values too if `whole`, or when it first goes far."""
        tensor = lying.tensor
        with self._lock:
            by_value = whole or lying.filed is None or (self.far and not lying.sent)
            lying.sent = lying.sent or by_value
        name = "" if lying.filed is None else os.fspath(lying.filed.path)
        data = bytes(tensor_bytes(tensor)) if by_value else None
        return Parcel(name, data, tensor.dtype, tuple(tensor.shape), tensor.device)

    def _filed(self, tensor: Tensor) -> SpilledTree | None:
        for spill in self._spills:
            try:
                return spill.write(tensor)
            except SpillError:
                continue
        return None


def packed(tree: Tree, shelf: Shelf | None = None, *, whole: bool = False) -> tuple[bytes, list[Lying]]:
    """Whatever can be pickled as bytes: dense tensors as their values, which no process holds for another.

    Args:
        tree: to pack.
        shelf: where tensors are put that are not small; only parcels of them are packed.
        whole: these bring the values.

    Returns:
        The bytes, and what must lie on the shelf for as long as somebody may unpack them.

    Example:
        >>> unpacked(packed({"m": torch.ones(4)[1:], "count": 3})[0])
        {'m': tensor([1., 1., 1.]), 'count': 3}
    """
    file = io.BytesIO()
    pickler = _Pickler(file, shelf, whole)
    pickler.dump(tree)
    return file.getvalue(), pickler.lying


def unpacked(data: bytes) -> Tree:
    """What was packed, in memory of its own; tensors lie as torch lays them.

    Raises:
        Missing: if a parcel in it cannot be opened.
    """
    return _Unpickler(io.BytesIO(data)).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, shelf: Shelf | None, whole: bool) -> None:
        super().__init__(file, protocol=5)
        self._shelf = shelf
        self._whole = whole
        self.lying: list[Lying] = []

    def persistent_id(self, obj: Any) -> Parcel | None:
        if self._shelf is None or not _is_dense(obj) or obj.nbytes <= SMALL:
            return None
        lying = self._shelf.put(obj)
        self.lying.append(lying)
        return self._shelf.parcel(lying, whole=self._whole)

    def reducer_override(self, obj: Any) -> Any:
        if not _is_dense(obj):
            return NotImplemented
        return _Pickler._opened, (bytes(tensor_bytes(obj)), obj.dtype, tuple(obj.shape), obj.device)

    @staticmethod
    def _opened(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return Parcel("", data, dtype, shape, device).open()


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Tensor:
        opened: Tensor = pid.open()
        return opened


def _is_dense(obj: Any) -> bool:
    return type(obj) is Tensor and obj.layout is torch.strided and not obj.is_meta and not obj.is_quantized
