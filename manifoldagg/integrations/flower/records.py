"""Conversion of models, codecs and bytes to Flower records and back."""

import io
import json
import math
from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.lib import format as npy
from torch import Tensor

from manifoldagg.errors import WireError
from manifoldagg.federated.clients.compression import Codec, codec_from_spec
from manifoldagg.kernels.alloc import in_huge_pages
from manifoldagg.manifolds.model_io import as_tensors
from manifoldagg.tensor_file import tensor_bytes

__all__ = [
    "RECORD_KEY",
    "array_record",
    "bytes_to_record",
    "codec_from_record",
    "codec_to_record",
    "num_bytes",
    "numpy_supports",
    "record_to_bytes",
    "state_dict",
]

RECORD_KEY = "manifoldagg"
"""The key of the record that contains bytes in the wire format."""
CODEC_KEY = "manifoldagg-codec"
"""The key of the record that contains the codec of the updates."""
ENTRY_NAME = "wire"
WIRE_STYPE = "manifoldagg.wire"
NUMPY_STYPE = "numpy.ndarray"
"""Flower's name for the serialization of an array in the `.npy` format."""
HEADER_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def array_record(state_dict: Mapping[str, Tensor]) -> ArrayRecord:
    """Convert a state dict to a Flower `ArrayRecord`.

    A tensor whose dtype NumPy lacks, such as bfloat16, is converted to float32.

    Args:
        state_dict: the state dict of a model with its buffers.

    Cost: one pass that reads the tensors and writes the bytes.

    Example:
        >>> record = array_record(torch.nn.Linear(2, 1).state_dict())
        >>> record["weight"].numpy().shape, state_dict(record)["bias"].dtype
        ((1, 2), torch.float32)
    """
    return ArrayRecord({name: _encode_array(tensor) for name, tensor in state_dict.items()})


def state_dict(record: ArrayRecord) -> dict[str, Tensor]:
    """Convert a Flower `ArrayRecord` to a state dict.

    The tensors share the memory of the arrays, so you must not modify them. An array is copied only if it is not
    aligned, not in row-major order, or not in the native byte order. The function checks the size of an array before it
    allocates memory.

    Raises:
        WireError: if an entry of the record is not an array of numbers.
    """
    return {name: _tensor_from_array(name, array) for name, array in record.items()}


def codec_to_record(codec: Codec | None) -> dict[str, ConfigRecord]:
    """Return the part of a Flower message that requests an update encoded with a codec.

    Args:
        codec: the codec. `None` requests no codec.

    Returns:
        A dict with one record under its key in the message. If `codec` is `None`, the dict is empty.

    Example:
        >>> from manifoldagg.federated.clients import Int8
        >>> codec_from_record(RecordDict(codec_to_record(Int8(block=64))))
        Int8(block=64)
    """
    return {} if codec is None else {CODEC_KEY: ConfigRecord({"spec": json.dumps(codec.spec())})}


def codec_from_record(content: RecordDict) -> Codec | None:
    """Return the codec with which the receiver of a message must encode its update.

    If the message requests no codec, return `None`.

    Raises:
        ArgumentError: if this version of the library does not have the codec.
    """
    record = content.config_records.get(CODEC_KEY)
    return None if record is None else codec_from_spec(json.loads(str(record["spec"])))


def num_bytes(content: RecordDict) -> int:
    """Return the size of all arrays of a message in bytes.

    Example:
        >>> num_bytes(RecordDict({"update": bytes_to_record(b"12345")}))
        5
    """
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def numpy_supports(dtype: torch.dtype) -> bool:
    """Return whether NumPy has an equivalent of a PyTorch dtype.

    Example:
        >>> numpy_supports(torch.float16), numpy_supports(torch.bfloat16)
        (True, False)
    """
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        return False
    return True


def bytes_to_record(data: bytes) -> ArrayRecord:
    """Convert bytes in the wire format to a Flower record.

    The caller stores the record in a message under the key `RECORD_KEY`.

    Args:
        data: the result of `wire.pack`.

    Example:
        >>> record_to_bytes(RecordDict({RECORD_KEY: bytes_to_record(b"any")}))
        b'any'
    """
    return ArrayRecord({ENTRY_NAME: Array(dtype="uint8", shape=(len(data),), stype=WIRE_STYPE, data=data)})


def record_to_bytes(content: RecordDict) -> bytes | None:
    """Extract the encoded bytes from a Flower message. This function is the inverse of `bytes_to_record`.

    If the message contains no encoded bytes, return `None`.
    """
    record = content.array_records.get(RECORD_KEY)
    array = None if record is None else record.get(ENTRY_NAME)
    return array.data if array is not None and array.stype == WIRE_STYPE else None


def _encode_array(tensor: Tensor) -> Array:
    tensor = tensor.detach() if numpy_supports(tensor.dtype) else tensor.detach().float()
    values = torch.empty(0, dtype=tensor.dtype).numpy()
    shape = tuple(tensor.shape)
    head = io.BytesIO()
    npy.write_array_header_1_0(head, {"descr": values.dtype.str, "fortran_order": False, "shape": shape})
    data = b"".join([head.getvalue(), tensor_bytes(tensor)])
    return Array(dtype=str(values.dtype), shape=shape, stype=NUMPY_STYPE, data=data)


def _tensor_from_array(name: str, array: Array) -> Tensor:
    try:
        return _decode_array(array)
    except Exception as error:  # NumPy raises many types of exceptions for invalid bytes
        problem = repr(str(error)[:200])[1:-1]
        raise WireError(f"wire: {name}: expected an array of numbers: {problem}") from None


def _decode_array(array: Array) -> Tensor:
    if array.stype != NUMPY_STYPE:
        raise ValueError(f"got the format {array.stype!r}")
    data = memoryview(array.data)
    file = io.BytesIO(data[: 2**16])
    shape, by_columns, dtype = HEADER_READERS[npy.read_magic(file)](file)
    start = file.tell()
    if dtype.hasobject or dtype.shape or any(size < 0 for size in shape):
        raise ValueError(f"got the dtype {dtype} and the shape {shape}")
    if math.prod(shape) * dtype.itemsize != len(data) - start:
        raise ValueError(f"got {len(data) - start} bytes for the shape {shape}")
    # The equivalent PyTorch dtype, in native byte order.
    kind = torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    values = np.frombuffer(data, dtype, offset=start).reshape(shape, order="F" if by_columns else "C")
    if kind is torch.bool and values.view(np.uint8).max(initial=0) > 1:
        raise ValueError("got a boolean other than 0 and 1")
    # The header can have any length, so the values may start at an unaligned address. The kernels cannot read unaligned
    # values.
    if dtype.isnative and values.flags.aligned and values.flags.c_contiguous:
        return as_tensors("array", [values])["0"]
    tensor = in_huge_pages(torch.empty(shape, dtype=kind))
    tensor.numpy()[...] = values
    return tensor
