"""Memory for results: asked for in huge pages where it is large, and where the system has them."""

import mmap

import pytest
import torch

from manifoldagg.federated.pytrees import copy_tensor
from manifoldagg.kernels import TensorList, combine
from manifoldagg.kernels.alloc import HUGE_PAGE_BYTES, _madvise, empty_like, in_huge_pages

MANY = HUGE_PAGE_BYTES // 4 + 1000


def middle(tensor):
    return tensor.data_ptr() + tensor.nbytes // 2


@pytest.fixture
def huge_pages_advised(monkeypatch):
    """Whether the system was asked for huge pages, since the test began, in the middle of a tensor."""
    ranges, advise = [], _madvise()

    def told(start, size, advice):
        ranges.append((start, start + size))
        if advise(start, size, advice) != 0:
            pytest.skip("the system takes no such advice")

    monkeypatch.setattr("manifoldagg.kernels.alloc._madvise", lambda: told)
    return lambda tensor: any(start <= middle(tensor) < stop for start, stop in ranges)


needs_pages = pytest.mark.skipif(_madvise() is None, reason="no such advice on this system")


@needs_pages
@pytest.mark.parametrize(
    "make",
    [
        empty_like,
        copy_tensor,
        lambda x: combine(None, [x], [1.0]),
        lambda x: combine(None, [(x[:1000], x[1000:])], [1.0])[1],
        lambda x: TensorList([x.repeat(2).view(-1, 4)[:, :2]]).new_empty()[0],
    ],
)
def test_large_results_request_huge_pages(huge_pages_advised, make):
    assert huge_pages_advised(make(torch.zeros(MANY)))


@needs_pages
@pytest.mark.parametrize("make", [empty_like, copy_tensor, lambda x: TensorList([x] * 3).new_empty()[0]])
def test_small_results_request_no_huge_pages(huge_pages_advised, make):
    assert not huge_pages_advised(make(torch.zeros(HUGE_PAGE_BYTES // 8 - 1)))


@needs_pages
def test_the_kernel_reports_the_request():
    with open("/sys/kernel/mm/transparent_hugepage/enabled") as words:
        if "[never]" in words.read():
            pytest.skip("the system has no huge pages")
    tensor = empty_like(torch.zeros(1 << 24))  # more than glibc keeps and hands out again
    within = False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            first, *rest = line.split()
            if first == "VmFlags:" and within:
                assert "hg" in rest
                return
            if not first.endswith(":"):
                low, high = (int(part, 16) for part in first.split("-"))
                within = low <= middle(tensor) < high
    raise AssertionError("no such mapping")


@needs_pages
def test_only_pages_within_the_tensor_are_requested(monkeypatch):
    calls = []
    monkeypatch.setattr("manifoldagg.kernels.alloc._madvise", lambda: lambda *words: calls.append(words))
    memory = torch.empty(MANY + 5000, dtype=torch.uint8).repeat(4)
    for first in (0, 1, 4095, 4096, 4097):
        tensor = memory[first : first + HUGE_PAGE_BYTES + first]
        assert in_huge_pages(tensor) is tensor
        start, size, _ = calls.pop()
        assert start % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
        assert 0 <= start - tensor.data_ptr() < mmap.PAGESIZE
        assert 0 <= tensor.data_ptr() + tensor.nbytes - start - size < mmap.PAGESIZE
    assert not calls


@pytest.mark.parametrize(
    "make", [lambda: torch.empty(MANY, device="meta"), lambda: torch.empty(0), lambda: torch.empty(7)]
)
def test_small_or_foreign_memory_is_not_advised(make, monkeypatch):
    def never(*_):
        raise AssertionError

    monkeypatch.setattr("manifoldagg.kernels.alloc._madvise", lambda: never)
    tensor = make()
    assert in_huge_pages(tensor) is tensor
    assert empty_like(tensor).shape == tensor.shape


def test_vmap_and_compile_are_supported():
    x = torch.zeros(2, MANY)
    assert torch.func.vmap(lambda row: in_huge_pages(row) + 1)(x).shape == x.shape
    assert torch.compile(in_huge_pages, backend="eager")(x).shape == x.shape


def test_results_are_equal_without_madvise(monkeypatch):
    monkeypatch.setattr("manifoldagg.kernels.alloc._madvise", lambda: None)
    x = torch.arange(MANY, dtype=torch.float32)
    assert torch.equal(copy_tensor(x), x)
