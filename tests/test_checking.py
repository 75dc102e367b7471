"""The checks of the tests themselves: they refuse what annotations do not say."""

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float
from torch import Tensor

from manifoldagg.federated import Payload
from manifoldagg.manifolds import distance
from tests.checking import checked


@checked
def cut(vector: Float[Tensor, " n"], other: Float[Tensor, " n"], count: int) -> Float[Tensor, " n"]:
    return (vector + other)[:count]


@pytest.mark.parametrize(
    "call",
    [
        lambda: distance("flat", torch.ones(2), torch.ones(2)),
        lambda: Payload([torch.ones(2)], samples=1),
        lambda: Payload(torch.ones(2), samples=1),
        lambda: cut(torch.ones(3), torch.ones(3), "3"),
        lambda: cut(torch.ones(3), torch.ones(1), 3),
        lambda: cut(torch.ones(3), torch.ones(3), 2),
    ],
    ids=["an argument", "a field", "dimensions", "a type", "sizes", "a result"],
)
def test_what_does_not_fit_an_annotation_is_refused(call):
    with pytest.raises(BeartypeCallHintViolation):
        call()


def test_each_call_has_sizes_of_its_own():
    for n in (2, 3):
        assert cut(torch.ones(n), torch.ones(n), n).tolist() == [2.0] * n


@pytest.mark.usefixtures("as_shipped")
def test_a_user_is_not_checked():
    assert cut(torch.ones(3), torch.ones(1), 2).tolist() == [2.0, 2.0]
