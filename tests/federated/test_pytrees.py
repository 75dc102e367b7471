"""Tests of functions for trees.

They cover traversal in a fixed order, sizes without repeated storages, and copies of shared memory.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from manifoldagg._validation import is_finite
from manifoldagg.federated import Server
from manifoldagg.federated.pytrees import copy_tensor, introduces_nonfinite, size_of, tensors, tree_map, unalias
from manifoldagg.federated.rules import FedAsync
from manifoldagg.manifolds import Flat
from tests.federated.fingerprint import bits


def test_tree_functions_traverse_compare_and_unalias():
    x = torch.zeros(8)
    y = torch.ones(2)
    tree = {"a": [x[:2], 3], "b": (x[2:], {"c": y, "d": None}), "e": "word"}
    assert [tensor.shape[0] for tensor in tensors(tree)] == [2, 6, 2]
    assert size_of([tree, tree]) == 40
    assert tree_map(tree, lambda tensor: tensor) is tree
    apart = unalias(tree, {"elsewhere": [x]})
    assert apart["b"][1] is tree["b"][1]
    assert not {t.untyped_storage().data_ptr() for t in tensors(apart)} & {x.untyped_storage().data_ptr()}
    assert bits(apart) == bits(tree)
    inf = torch.tensor([float("inf")])
    assert [
        introduces_nonfinite(x, y)
        for x, y in (([inf], []), ({"a": inf + 0}, {"a": inf}), ((inf.half().to_sparse(),), None))
    ] == [True, False, True]
    assert introduces_nonfinite(torch.tensor([complex(1, float("nan"))]), None)
    assert not introduces_nonfinite(
        {"n": float("inf"), "i": torch.tensor(3), "e": torch.zeros(0), "f": torch.ones(1)}, None
    )
    # Neither has memory that the other could share.
    assert unalias([torch.zeros(0), torch.zeros(2).to_sparse()], [torch.zeros(0)])[1].is_sparse


class Pool(TorchDispatchMode):
    """Recorder of torch operators with so many entries that torch distributes them over threads."""

    def __init__(self):
        super().__init__()
        self.shared = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [tensor.numel() for tensor in tensors([list(args), kwargs, result])]
        if not func.is_view and func is not torch.ops.aten.empty_like.default and max(sizes, default=0) >= 2**15:
            self.shared.append(str(func))
        return result


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_medium_tensors_are_processed_in_the_thread_of_the_caller(dtype):
    x = torch.arange(2.0**16, dtype=dtype)
    with Pool() as pool:
        y = copy_tensor(x)
        assert is_finite(x)
    assert pool.shared == []
    assert bits(y) == bits(x)
    assert y.data_ptr() != x.data_ptr()
    for value in (float("nan"), float("inf"), -float("inf")):
        y[50_000] = value
        assert not is_finite(y)
    # What NumPy does not take goes as it went.
    for odd in (x.bfloat16(), x.view(256, 256).mT, x[::2]):
        assert bits(copy_tensor(odd)) == bits(odd)
        assert is_finite(odd)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("size", [1, 7, 10**5])
def test_finite_tensors_whose_sum_overflows_are_finite(dtype, size):
    x = torch.full((size,), torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
    assert is_finite(x)
    for value in (float("nan"), float("inf"), -float("inf")):
        for other in (float("inf"), 1.0):  # infinities of both signs add to NaN
            y = x.double()
            y[size // 2] = value
            y[0] = other if size > 1 else value
            assert not is_finite(y.to(dtype))


@pytest.mark.usefixtures("two_threads")
def test_dispatch_of_medium_model_starts_no_threads():
    server = Server(Flat(2**16), FedAsync(0.5), torch.zeros(2**16))
    with Pool() as pool:
        ticket = server.dispatch("a")
        assert ticket.message.start.eq(0).all()
        assert server.model.eq(0).all()
    assert pool.shared == ["aten.eq.Scalar", "aten.all.default"] * 2
