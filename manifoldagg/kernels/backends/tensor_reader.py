"""The native reader of tensor lists, which reads the attributes of all tensors in a single C call.

The attributes are the address, shape, strides and dtype. The reader needs the C exchange API of DLPack. If the
installed PyTorch does not have this API, [`TensorList`][manifoldagg.kernels.TensorList] reads each attribute in Python,
which is slower.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import BuiltinMethodType

import torch
from torch import Tensor

__all__ = ["load_reader"]

METH_NOARGS = 4
"""Python's flag for C functions that take an object and no further arguments."""
PYTHON_FUNCTIONS = (
    *("PyTuple_GetItem", "PyTuple_Size", "PyObject_Type"),
    *("Py_DecRef", "PyBytes_FromStringAndSize", "PyErr_Clear"),
)
"""The functions of the stable ABI that `tensor_reader.cpp` calls, in the order of its struct `Python`."""


def load_reader(path: Path) -> Callable[[tuple[Tensor, ...]], bytes] | None:
    """Return a native function that reads the attributes of tensors, or `None` if it is not supported.

    The native function expects a tuple of tensors. It returns a byte string that encodes their addresses, shapes and
    dtypes. If it cannot read one of the tensors, it returns `b""`. It can only read tensors that meet all of these
    conditions:

    - The values of the tensor are stored in CPU memory.
    - The tensor is not a negative view, whose memory contains the negatives of its values.
    - The type of the tensor is exactly `Tensor` or `Parameter`.

    Args:
        path: the shared library that contains the function. The file `tensor_reader.cpp` describes the table.

    Returns:
        The function. `None` if PyTorch lacks the C exchange API of DLPack, or if the Python interpreter is not CPython.
    """
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None or sys.implementation.name != "cpython":  # `id` is an address in CPython only.
        return None
    # DLPack does not report negative views, so the reader calls `is_neg` through its C function pointer.
    method = torch.empty(0).is_neg
    flags_of = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)(("PyCFunction_GetFlags", ctypes.pythonapi))
    function_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyCFunction_GetFunction", ctypes.pythonapi))
    if not isinstance(method, BuiltinMethodType) or flags_of(method) != METH_NOARGS:
        return None
    # The reader calls Python, so `PyDLL` retains the GIL.
    library = ctypes.PyDLL(str(path))
    find = library.manifoldagg_find_exchange_api
    find.argtypes, find.restype = (ctypes.c_void_p,), ctypes.c_void_p
    pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    exchange = find(pointer_of(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, b"dlpack_exchange_api"))
    if exchange is None:
        return None
    # The library is not linked against Python. It receives the addresses of the functions and objects, in the order of
    # its struct `Python`: six functions, `is_neg`, three objects, and the exchange API.
    functions = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p) for name in PYTHON_FUNCTIONS]
    addresses = [function.value for function in functions]
    objects = (function_of(method), id(False), id(Tensor), id(torch.nn.Parameter))
    python = (ctypes.c_void_p * 11)(*addresses, *objects, exchange)
    read = library.manifoldagg_read_tensors
    read.argtypes, read.restype = (ctypes.c_void_p, ctypes.py_object), ctypes.py_object
    return partial(read, python)
