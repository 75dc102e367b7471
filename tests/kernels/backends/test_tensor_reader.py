"""Laws of the native reader of tensor lists: each attribute is the one that PyTorch reports tensor by tensor."""

import ctypes
import gc
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from manifoldagg.kernels import TensorList, combine, gram, tensor_list
from manifoldagg.kernels.backends import cpu, tensor_reader
from tests.support import draw, seeds

pytestmark = pytest.mark.skipif(
    cpu.unavailable() is not None or tensor_list._reader is None, reason="no compiler, or no C exchange API of DLPack"
)
ATTRIBUTES = ("lengths", "size", "dtypes", "devices", "device", "is_contiguous", "addresses")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def outcome(call, *given):
    """What a call returns, in comparable types, or its error."""
    try:
        found = call(*given)
        if isinstance(found, np.ndarray):
            return found.tolist()
        if isinstance(found, Tensor):
            return found.dtype, found.tolist()
        if isinstance(found, TensorList):
            return [(x.dtype, x.shape, x.tolist(), x.requires_grad, x.is_neg()) for x in found]
        return found
    except Exception as error:
        return type(error), str(error)


def attributes(row):
    """Each attribute, read first from a list of its own, and all in sequence from one list."""
    names = (*ATTRIBUTES, "address_ranges", "describe")
    read = [lambda x, name=name: x.describe() if name == "describe" else getattr(x, name) for name in names]
    same = TensorList(row)
    return [[outcome(call, TensorList(row)) for call in read], [outcome(call, same) for call in read]]


def in_python(call, *given):
    """The outcome of a call without the native reader."""
    before = tensor_list.set_reader(None)
    try:
        return call(*given)
    finally:
        tensor_list.set_reader(before)


def is_read_natively(row):
    return bool(TensorList(row).form)


class Named(Tensor):
    """A subclass without changes."""


class Longer(Tensor):
    """A subclass that reports another length."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is Tensor.numel:
            return 1000
        return super().__torch_function__(function, types, args, kwargs or {})


def freed():
    x = torch.ones(3)
    x.untyped_storage().resize_(0)
    return x


def complex_tensor(*shape):
    return torch.complex(torch.ones(shape), torch.full(shape, 2.0))


READ = {
    "plain": lambda: torch.arange(6.0).view(2, 3),
    "parameter": lambda: nn.Parameter(torch.ones(2, 3)),
    "buffer": lambda: nn.Buffer(torch.ones(2, 3)),
    "tracked": lambda: torch.ones(2, requires_grad=True) * 2,
    "number": lambda: torch.tensor(3.0),
    "no entries": lambda: torch.empty(3, 0, 2),
    "no entries of a column": lambda: torch.ones(4, 4)[:, :0],
    "transposed": lambda: torch.arange(6.0).view(2, 3).T,
    "every second": lambda: torch.arange(6.0)[::2],
    "expanded": lambda: torch.ones(1).expand(5),
    "one of a column": lambda: torch.arange(6.0).view(2, 3)[:1, 1],
    "one wide row": lambda: torch.arange(6.0).view(2, 3)[:1, :],
    "odd stride of length one": lambda: torch.ones(3).as_strided((1, 3), (7, 1)),
    "channels last": lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "offset": lambda: torch.arange(6.0)[2:],
    "double": lambda: torch.ones(2, dtype=torch.float64),
    "bfloat16": lambda: torch.ones(2, dtype=torch.bfloat16),
    "half": lambda: torch.ones(2, dtype=torch.float16),
    "float8": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "integers": lambda: torch.arange(4),
    "booleans": lambda: torch.ones(2, dtype=torch.bool),
    "complex": lambda: complex_tensor(2),
    "conjugated": lambda: complex_tensor(2).conj(),
    "made in inference mode": lambda: torch.inference_mode()(torch.ones)(2),
    "copied on write": lambda: torch.ones(3)._lazy_clone(),
}
REFUSED = {
    "subclass": lambda: torch.ones(2).as_subclass(Named),
    "subclass that overrides": lambda: torch.ones(2).as_subclass(Longer),
    "subclass of Parameter": lambda: nn.UninitializedParameter(),
    "fake": lambda: FakeTensorMode().from_tensor(torch.ones(2)),
    "zeros that are not stored": lambda: torch._efficientzerotensor(3),
    "freed": freed,
    "negative view": lambda: torch._neg_view(torch.ones(3)),
    "negative imaginary part": lambda: complex_tensor(3).conj().imag,
    "negative number": lambda: complex_tensor(1).conj().imag,
    "meta": lambda: torch.ones(2, device="meta"),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "compressed": lambda: torch.eye(2).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(2, 2).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "None": lambda: None,
    "float": lambda: 1.0,
    "array": lambda: np.ones(2),
}
CASES = READ | REFUSED
ATTRIBUTES_ONLY = {"freed", "subclass that overrides"}
"""Kernels would read memory that is not there."""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_attributes_equal_those_of_torch(name, place):
    row = [torch.ones(2), torch.ones(4)]
    row.insert(place, CASES[name]())
    assert is_read_natively(row) == (name in READ)
    assert attributes(row) == in_python(attributes, row)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", sorted(CASES.keys() - ATTRIBUTES_ONLY))
def test_kernels_return_the_same_values_or_errors(name, grad):
    def work():
        row = (torch.ones(2), CASES[name]())
        with torch.set_grad_enabled(grad):
            return outcome(gram, [row, row]), outcome(combine, None, [row], [3.0])

    assert work() == in_python(work)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.grad(f)(torch.ones(3)),
        lambda f: torch.func.vmap(f)(torch.arange(6.0).view(2, 3)),
        lambda f: torch.func.jvp(f, (torch.ones(3),), (torch.ones(3),)),
        lambda f: torch.func.functionalize(f)(torch.ones(3)),
        lambda f: torch.func.vmap(torch.func.grad(f))(torch.arange(6.0).view(2, 3)),
    ],
    ids=["grad", "vmap", "jvp", "functionalize", "vmap of grad"],
)
def test_tensors_inside_transforms_are_read_in_python(transform):
    def work():
        seen = []

        def f(x):
            row = (torch.ones(2), x)
            seen.extend([is_read_natively(row), *[outcome(getattr, TensorList(row), name) for name in ATTRIBUTES[:6]]])
            seen.append(outcome(lambda: bool(TensorList(row).describe())))
            return gram([row]).sum()

        found = transform(f)
        return [x.tolist() for x in (found if isinstance(found, tuple) else (found,))], seen

    found = work()
    assert found[1][0] is False
    assert found == in_python(work)


def test_dual_numbers_and_escaped_transforms_are_read_in_python():
    escaped = []
    torch.func.grad(lambda x: escaped.append(x) or x.sum())(torch.ones(3))
    assert attributes(escaped) == in_python(attributes, escaped)
    with torch.autograd.forward_ad.dual_level():
        row = (torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2)), torch.ones(1))
        assert attributes(row) == in_python(attributes, row)
        tangents = [torch.autograd.forward_ad.unpack_dual(x).tangent for x in (gram([row]), in_python(gram, [row]))]
    assert tangents[0].item() == tangents[1].item() == 4


@given(seeds, st.integers(1, 12))
def test_any_strides_and_dtypes_are_read(seed, count):
    pick = np.random.default_rng(seed)
    row = []
    for _ in range(count):
        shape = pick.integers(0, 4, size=pick.integers(0, 5)).tolist()
        strides = pick.integers(0, 5, size=len(shape)).tolist()
        memory = draw(seed, 100, dtype=DTYPES[pick.integers(4)])
        row.append(memory.as_strided(shape, strides, pick.integers(0, 9)) if pick.integers(2) else torch.ones(shape))
    assert is_read_natively(row)
    assert attributes(row) == in_python(attributes, row)


@given(seeds)
def test_a_form_determines_shapes_and_dtypes(seed):
    pick = np.random.default_rng(seed)

    def some():
        shapes = [pick.integers(1, 3, size=pick.integers(0, 3)).tolist() for _ in range(pick.integers(1, 3))]
        return TensorList(torch.ones(shape, dtype=DTYPES[pick.integers(2)]) for shape in shapes)

    a, b = some(), some()
    equal = [(x.shape, x.dtype) for x in a] == [(x.shape, x.dtype) for x in b]
    assert (a.form == b.form) == equal


def test_large_numbers_of_entries_are_counted_exactly():
    row = [torch.ones(1).expand(2**62)] * 3
    assert TensorList(row).size == 3 * 2**62


def test_a_rejected_list_leaves_no_error_and_no_reference():
    row = (torch.ones(2), torch.ones(2, device="meta"), torch.ones(3).as_subclass(Named))
    kinds = [Tensor, nn.Parameter, Named]
    counts = [sys.getrefcount(x) for x in (*row, *kinds)]
    for _ in range(100):
        assert tensor_list._reader(row) == b""
        assert tensor_list._reader(row[::-1]) == b""
        assert tensor_list._reader(row[:1]) != b""
    assert [sys.getrefcount(x) for x in (*row, *kinds)] == counts
    seen = weakref.ref(row[0])
    del row
    gc.collect()
    assert seen() is None


def test_allocated_tensors_do_not_share_storage():
    like = TensorList([torch.ones(1000), torch.ones(1000)])
    new = like.new_empty()
    assert [x.untyped_storage().nbytes() for x in new] == [4000, 4000]
    assert len({x.untyped_storage().data_ptr() for x in new}) == 2


class API(ctypes.Structure):
    """The start of the API: its version, an older one, and the functions."""

    _fields_ = (
        *(("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)),
        *(("previous", ctypes.c_void_p), ("functions", ctypes.c_void_p * 5)),
    )


def test_another_major_version_of_dlpack_is_not_used():
    find = ctypes.CDLL(cpu._require_library()._name).manifoldagg_find_exchange_api
    find.argtypes, find.restype = (ctypes.c_void_p,), ctypes.c_void_p
    known = API(1, 9, None, (ctypes.c_void_p * 5)(*range(1, 6)))
    newer = API(2, 0, ctypes.addressof(known))
    newest = API(3, 0, ctypes.addressof(newer))
    assert find(ctypes.addressof(known)) == find(ctypes.addressof(newest)) == ctypes.addressof(known)
    assert find(ctypes.addressof(API(2, 0, None, known.functions))) is None
    assert find(ctypes.addressof(API(1, 3, None, (ctypes.c_void_p * 5)(1, 1, 1, None, 1)))) is None
    assert find(None) is None


def test_an_older_torch_has_no_native_reader(monkeypatch):
    path = Path(cpu._require_library()._name)
    assert tensor_reader.load_reader(path) is not None
    with monkeypatch.context() as patch:
        patch.setattr(tensor_reader, "METH_NOARGS", 8)  # another calling convention
        assert tensor_reader.load_reader(path) is None
    monkeypatch.setattr(tensor_reader, "Tensor", int)
    assert tensor_reader.load_reader(path) is None
