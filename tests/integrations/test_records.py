"""Records: models as Flower carries them, and what hostile bytes make of them."""

import io
import math

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib import format as npy

from manifoldagg.errors import WireError
from manifoldagg.integrations.flower.records import (
    RECORD_KEY,
    array_record,
    bytes_to_record,
    record_to_bytes,
    state_dict,
)
from tests.support import draw, seeds

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]
SHAPES = [(), (0,), (1,), (3, 2), (2, 0, 5), (2, 3, 4)]


def entry(data, stype="numpy.ndarray"):
    return ArrayRecord({"x": Array(dtype="float32", shape=(1,), stype=stype, data=data)})


def file_of(header, body=b""):
    file = io.BytesIO()
    npy.write_array_header_1_0(file, header)
    return file.getvalue() + body


@given(seeds, st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.booleans())
def test_records_roundtrip_and_equal_the_records_of_flower(seed, dtype, shape, turned):
    tensor = (10 * draw(seed, 24)[: math.prod(shape)].reshape(shape)).to(dtype)
    tensor = tensor.T.contiguous().T if turned and len(shape) == 2 else tensor
    record = array_record({"x": tensor})
    theirs = ArrayRecord({"x": tensor.contiguous()})
    assert (record["x"].dtype, record["x"].shape, record["x"].data) == (
        theirs["x"].dtype,
        theirs["x"].shape,
        theirs["x"].data,
    )
    back = state_dict(record)["x"]
    assert back.dtype is dtype
    assert torch.equal(back, tensor)
    assert torch.equal(state_dict(ArrayRecord([np.asarray(tensor.numpy(), order="F")]))["0"], tensor)


def test_dtypes_without_numpy_equivalent_are_sent_as_float32():
    tensor = draw(0, 5).to(torch.bfloat16)
    assert torch.equal(state_dict(array_record({"x": tensor}))["x"], tensor.float())


def test_arrays_in_another_byte_order_are_read():
    values = np.arange(4, dtype=">f8")
    assert torch.equal(state_dict(ArrayRecord([values]))["0"], torch.arange(4.0, dtype=torch.float64))


def lies_in(tensor, data):
    """Whether the memory of a tensor is that of the bytes."""
    return 0 <= tensor.data_ptr() - np.frombuffer(data, np.uint8).ctypes.data < len(data)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_is_read_in_place(dtype):
    record = array_record({"x": draw(0, 6).reshape(2, 3).to(dtype)})
    before = bytes(bytearray(record["x"].data))
    tensor = state_dict(record)["x"]
    assert lies_in(tensor, record["x"].data)
    tensor.sum()
    assert record["x"].data == before


def unaligned(values):
    """The file of an array whose values begin at an odd byte."""
    data = file_of({"descr": values.dtype.str, "fortran_order": False, "shape": values.shape}, values.tobytes())
    length = int.from_bytes(data[8:10], "little")
    return data[:8] + (length + 1).to_bytes(2, "little") + data[10 : 9 + length] + b" \n" + data[10 + length :]


def test_arrays_that_cannot_be_read_in_place_are_copied():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    by_columns = file_of(
        {"descr": "<f4", "fortran_order": True, "shape": values.shape}, np.asfortranarray(values).tobytes("F")
    )
    swapped = file_of({"descr": ">f4", "fortran_order": False, "shape": values.shape}, values.astype(">f4").tobytes())
    for data in (by_columns, swapped, unaligned(values)):
        tensor = state_dict(entry(data))["x"]
        assert torch.equal(tensor, torch.from_numpy(values))
        assert tensor.is_contiguous()
        assert not lies_in(tensor, data)
        tensor.zero_()


PLAIN = {"descr": "<f4", "fortran_order": False, "shape": (2,)}
HOSTILE = {
    "none": b"",
    "junk": b"of my own making",
    "a header only": file_of(PLAIN),
    "too few": file_of(PLAIN, bytes(7)),
    "too many": file_of(PLAIN, bytes(9)),
    "huge": file_of({**PLAIN, "shape": (2**40,)}, bytes(8)),
    "overflowing": file_of({**PLAIN, "shape": (2**62, 4)}, bytes(8)),
    "huge beside none": file_of({**PLAIN, "shape": (0, 2**62, 2**62)}),
    "negative": file_of({**PLAIN, "shape": (-1, -2)}, bytes(8)),
    "objects": file_of({**PLAIN, "descr": "|O"}, bytes(16)),
    "structured": file_of({**PLAIN, "descr": [("a", "<f4")]}, bytes(8)),
    "text": file_of({**PLAIN, "descr": "<U1"}, bytes(8)),
    "longdouble": file_of({**PLAIN, "descr": "<f16"}, bytes(32)),
    "neither true nor false": file_of({**PLAIN, "descr": "|b1"}, bytes([1, 7])),
    "of a later format": b"\x93NUMPY\x09\x00" + bytes(64),
    "a pickle": b"\x80\x04K\x01.",
    "nested": b"\x93NUMPY\x01\x00" + (9000).to_bytes(2, "little") + b"(" * 9000,
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_malicious_arrays_are_rejected_by_name(data):
    with pytest.raises(WireError, match="wire: x: expected an array of numbers"):
        state_dict(entry(data))


@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_are_either_read_or_rejected(noise, place):
    data = bytearray(file_of(PLAIN, bytes(8)))
    data[place : place + len(noise)] = noise
    try:
        state_dict(entry(bytes(data)))
    except WireError:
        return


def test_another_serialization_is_rejected():
    with pytest.raises(WireError, match="got the format 'pickle'"):
        state_dict(entry(b"", "pickle"))


def test_wire_bytes_coexist_with_other_records():
    data = b"anything"
    assert record_to_bytes(RecordDict({RECORD_KEY: bytes_to_record(data), "arrays": array_record({})})) == data
    assert record_to_bytes(RecordDict({"arrays": bytes_to_record(data)})) is None
    assert record_to_bytes(RecordDict({RECORD_KEY: array_record({"wire": torch.ones(2)})})) is None
