"""Trees: walked in one order, each storage counted once, set apart where memory is shared."""

import torch

from manifoldagg.federated.trees import disjoint, replaced, size_of, spoils, tensors
from tests.federated.fingerprint import bits


def test_trees_are_walked_compared_and_set_apart():
    x = torch.zeros(8)
    y = torch.ones(2)
    tree = {"a": [x[:2], 3], "b": (x[2:], {"c": y, "d": None}), "e": "word"}
    assert [tensor.shape[0] for tensor in tensors(tree)] == [2, 6, 2]
    assert size_of([tree, tree]) == 40
    assert replaced(tree, lambda tensor: tensor) is tree
    apart = disjoint(tree, {"elsewhere": [x]})
    assert apart["b"][1] is tree["b"][1]
    assert not {t.untyped_storage().data_ptr() for t in tensors(apart)} & {x.untyped_storage().data_ptr()}
    assert bits(apart) == bits(tree)
    inf = torch.tensor([float("inf")])
    assert [
        spoils(x, y) for x, y in (([inf], []), ({"a": inf + 0}, {"a": inf}), ((inf.half().to_sparse(),), None))
    ] == [True, False, True]
    assert spoils(torch.tensor([complex(1, float("nan"))]), None)
    assert not spoils({"n": float("inf"), "i": torch.tensor(3), "e": torch.zeros(0), "f": torch.ones(1)}, None)
    # Neither has memory that the other could share.
    assert disjoint([torch.zeros(0), torch.zeros(2).to_sparse()], [torch.zeros(0)])[1].is_sparse
