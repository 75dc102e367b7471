"""Tests of the type and shape checks in `tests.checking`: they reject calls that violate annotations."""

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float
from torch import Tensor

from manifoldagg.federated import Payload
from manifoldagg.manifolds import distance
from tests.checking import checked


@checked
def truncated_sum(vector: Float[Tensor, " n"], other: Float[Tensor, " n"], count: int) -> Float[Tensor, " n"]:
    return (vector + other)[:count]


@pytest.mark.parametrize(
    "call",
    [
        lambda: distance("flat", torch.ones(2), torch.ones(2)),
        lambda: Payload([torch.ones(2)], samples=1),
        lambda: Payload(torch.ones(2), samples=1),
        lambda: truncated_sum(torch.ones(3), torch.ones(3), "3"),
        lambda: truncated_sum(torch.ones(3), torch.ones(1), 3),
        lambda: truncated_sum(torch.ones(3), torch.ones(3), 2),
    ],
    ids=["an argument", "a field", "dimensions", "a type", "sizes", "a result"],
)
def test_calls_that_violate_annotations_are_rejected(call):
    with pytest.raises(BeartypeCallHintViolation):
        call()


def test_named_sizes_may_differ_between_calls():
    for n in (2, 3):
        assert truncated_sum(torch.ones(n), torch.ones(n), n).tolist() == [2.0] * n


@pytest.mark.usefixtures("as_shipped")
def test_checks_are_disabled_as_shipped():
    assert truncated_sum(torch.ones(3), torch.ones(1), 2).tolist() == [2.0, 2.0]
