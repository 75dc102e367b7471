"""The comparison of trees: the first difference in bits, and shared memory."""

import pytest
import torch

from manifoldagg.federated import Message
from manifoldagg.testing.trees import first_difference, shared_memory


class Opaque:
    """A value that is compared by its attributes."""


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), "x differs in 1 of 1 entries, by at most 0"),
        (torch.zeros(2), torch.zeros(3), "x has the shape torch.Size([3]) instead of torch.Size([2])"),
        (torch.zeros(2), torch.zeros(2).double(), "x has the dtype torch.float64 instead of torch.float32"),
        ({"a": 1}, {"b": 1}, "x contains 'b' instead of 'a'"),
        ({"a": [1, 2]}, {"a": [1, 3]}, "x['a'][1] is 3 instead of 2"),
        ({}, {"b": 1}, "x contains 'b' instead of nothing"),
        ((1,), [1], "x is a list instead of a tuple"),
        (1, 1.0, "x is a float instead of a int"),
        (Message(torch.zeros(1)), Message(torch.ones(1)), "x.start differs in 1 of 1 entries, by at most 1"),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), ""),
        (torch.zeros(0), torch.zeros(0), ""),
        (float("nan"), float("nan"), ""),
        (Opaque(), Opaque(), ""),
    ],
)  # fmt: skip
def test_the_first_difference_is_described(a, b, words):
    assert first_difference("x", a, b) == words


def test_memory_is_shared_by_views_and_by_arrays():
    x = torch.zeros(4)
    assert shared_memory({"a": [x[2:].numpy()]}, {"b": {"c": x}}) == "a[0] shares memory with b['c']"
    assert shared_memory({"a": x, "b": torch.zeros(0)}, {"c": x.clone(), "d": torch.zeros(0)}) == ""
