"""The spec: the same space on both sides, from a value that fits into JSON."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn

from manifoldagg import ParameterSpace, Server
from manifoldagg.errors import ArgumentError, StateDictError
from manifoldagg.federated.rules import FedAsync
from manifoldagg.manifolds import (
    Flat,
    Grassmann,
    Lorentz,
    LowRank,
    Manifold,
    PoincareBall,
    Power,
    Product,
    SpecialOrthogonal,
    Sphere,
    Stiefel,
    SymmetricPositiveDefinite,
    Validated,
    from_geoopt,
)
from manifoldagg.manifolds.layout import Entry, Layout
from manifoldagg.manifolds.spec import SPACES_BY_NAME, layout_digest
from tests.manifolds.test_parameters import KINDS, build
from tests.support import draw, exported, seeds

CURVED = {
    "Sphere": Sphere(6),
    "PoincareBall": PoincareBall(6, curvature=-0.3),
    "Lorentz": Lorentz(5),
    "LowRank": LowRank(4, 2, 2),
    "Stiefel": Stiefel(6, 6),
    "Grassmann": Grassmann(6, 2),
    "SpecialOrthogonal": SpecialOrthogonal(6),
    "SymmetricPositiveDefinite": SymmetricPositiveDefinite(6),
    "Power": Power(Power(Sphere(2), (3,)), (6,)),
    "Product": Product({"a": PoincareBall(2, curvature=-0.1), "b": Flat(4)}),
    "Flat": Flat(6),
}


def through(spec):
    """As it arrives, and how long it is."""
    text = json.dumps(spec, allow_nan=False)
    return json.loads(text)


@given(KINDS, seeds)
def test_layout_names_buffers_and_tied_tensors_agree(kind, seed):
    model = build(kind, seed)
    space = ParameterSpace.of(model)
    there = ParameterSpace.of_spec(through(space.spec()))
    assert there == space
    assert hash(there) == hash(space)
    assert there.shape == space.shape
    assert layout_digest(there.layout) == layout_digest(space.layout)
    assert torch.equal(there.point(model), space.point(model))
    carried = there.buffers(model)
    back = there.state_dict(there.point(model), carried)
    assert back.keys() == model.state_dict().keys()


@pytest.mark.parametrize("name", CURVED)
def test_curved_leaves_agree_with_their_parameters(name):
    space = CURVED[name]
    copies = () if len(space.shape) > 1 else (2,)
    layout = Layout((Entry("b", (3,), torch.float32), Entry("w", (*copies, *space.shape), torch.float32)))
    leaf = Power(space, copies) if copies else space
    mine = ParameterSpace(layout, (("w", leaf),))
    there = ParameterSpace.of_spec(through(mine.spec()))
    assert there == mine
    assert there.base_space == mine.base_space
    x, y = (mine.random_point(generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in (1, 2))
    v = mine.random_tangent(x, torch.Generator().manual_seed(3))
    assert torch.equal(there.inner(x, v, v), mine.inner(x, v, v))
    assert torch.equal(there.project(y), mine.project(y))


def test_numpy_numbers_are_written_as_plain_numbers(as_shipped):
    spaces = {
        "a": Sphere(np.int64(3)),
        "b": PoincareBall(np.int32(3), curvature=np.float32(-0.3)),
        "c": Power(Sphere(3), (np.int64(2),)),
    }
    layout = Layout(tuple(Entry(name, tuple(map(int, x.shape)), torch.float32) for name, x in spaces.items()))
    mine = ParameterSpace(layout, tuple(spaces.items()))
    assert ParameterSpace.of_spec(through(mine.spec())) == mine


def test_every_space_of_this_package_has_a_spec():
    import manifoldagg.manifolds as package

    spaces = {name: value for name, value in exported(package).items() if isinstance(value, type)}
    plain = {name for name, value in spaces.items() if issubclass(value, Manifold)}
    others = {"Manifold", "Embedded", "Composite", "Delegate", "ParameterSpace", "Validated", "GeooptManifold"}
    assert (
        plain - others - {name for name in plain if "Matri" in name or "Smooth" in name}
        == set(SPACES_BY_NAME)
        == set(CURVED)
    )


def test_spaces_outside_the_package_are_rejected_with_the_name_of_the_leaf():
    import geoopt

    class Mine(Sphere):
        """A subclass, of which nobody there knows."""

    for space in (Mine(3), Validated(Sphere(3)), from_geoopt(geoopt.SphereProjection(), (3,))):
        layout = Layout((Entry("head.weight", (3,), torch.float32),))
        mine = ParameterSpace(layout, (("head.weight", space),))
        with pytest.raises(ArgumentError, match=r"^spec: head\.weight: expected a space of this package, got \w+"):
            mine.spec()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": 2}, "expected format 1, got 2"),
        ({"leaves": [["w", [-1], "float32"]]}, "an entry with name 'w'"),
        ({"leaves": [["w", [3], "Tensor"]]}, "the invalid dtype"),
        ({"leaves": [["w", [3], "int64"]]}, "spec: w: expected a floating parameter"),
        ({"aliases": [["v", "u"]]}, "an alias of an unknown leaf"),
        ({"dtype": "float16"}, "spec: dtype: expected one of"),
        ({"manifolds": [["w", {"Plane": {}}]]}, "KeyError"),
        ({"manifolds": [["w", {"Sphere": {"m": 3}}]]}, "TypeError"),
        ({"leaves": None}, "TypeError"),
        ({"format": True}, "expected format 1, got True"),
        ({"leaves": 2 * [["w", [3], "float32"]]}, "a repeated name"),
        ({"buffers": [["w", [3], "float32"]]}, "a repeated name"),
        ({"buffers": 2 * [["b", [3], "float32"]]}, "a repeated name"),
        ({"aliases": [["w", "w"]]}, "a repeated name"),
        ({"aliases": 2 * [["v", "w"]]}, "a repeated name"),
        ({"manifolds": 2 * [["w", {"Sphere": {"n": 3}}]]}, "a repeated name"),
        ({"leaves": [["w", [2**62], "float32"]]}, "an invalid shape"),
        ({"leaves": [["w", 65 * [1], "float32"]]}, "an invalid shape"),
        ({"leaves": [["w", [2**31, 2**31], "float32"]]}, "a size of 2\\^62 or more"),
        ({"leaves": [["w", [0, 2**31, 2**31], "float32"]]}, "a size of 2\\^62 or more"),
        ({"manifolds": [["w", {"Sphere": {"n": 10**400}}]]}, "an integer of 2"),
    ],
    ids=str,
)
def test_malformed_specs_are_rejected(as_shipped, change, told):
    spec = ParameterSpace(Layout((Entry("w", (3,), torch.float32),))).spec()
    with pytest.raises(ArgumentError, match=f"^spec: .*{told}|^{told}"):
        ParameterSpace.of_spec(spec | change)


def test_a_digest_depends_on_names_shapes_dtypes_and_order():
    entries = [Entry("a", (2,), torch.float32), Entry("b", (2,), torch.float32)]
    layouts = [
        Layout(tuple(entries)),
        Layout(tuple(reversed(entries))),
        Layout((entries[0],), (entries[1],)),
        Layout((entries[0],), (), (("b", "a"),)),
        Layout(tuple(entries), dtype=torch.float64),
        Layout((entries[0], Entry("b", (2, 1), torch.float32))),
        Layout((entries[0], Entry("b", (2,), torch.float16))),
    ]
    assert len({layout_digest(layout) for layout in layouts}) == len(layouts)


def test_a_space_from_a_spec_gives_the_same_points_without_the_module():
    """A bare state dict does not tell what is frozen: P would be 90 there."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    server = Server.of(model, FedAsync(rate=0.5))
    client = ParameterSpace.of_spec(through(server.spec()))
    assert client.shape == server.space.shape == server.model.shape
    assert ParameterSpace.of_state_dict(model.state_dict()).shape != client.shape
    ticket = server.dispatch("ward-7")
    assert client.state_dict(ticket.message.start).keys() | server.space.buffers(model).keys() == set(
        model.state_dict()
    )


class Wrapped(nn.Module):
    """As torch.compile wraps a module."""

    def __init__(self, model):
        super().__init__()
        self._orig_mod = model


@pytest.mark.parametrize(
    ("wrap", "told"),
    [
        (nn.DataParallel, r"'module\.' in names, which DataParallel .*`model\.module`"),
        (Wrapped, r"'_orig_mod\.' in names, which torch.compile"),
        (lambda model: nn.DataParallel(Wrapped(model)), r"'module\.' in names"),
        (lambda model: nn.Sequential(Wrapped(model[0]), model[1]), r"'_orig_mod\.' in names"),
    ],
    ids=["parallel", "compiled", "both", "a part"],
)
def test_wrapper_prefixes_are_reported(wrap, told):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    server = Server.of(model, FedAsync(rate=0.5))
    ticket = server.dispatch("ward-7")
    wrapped = wrap(model)
    with pytest.raises(StateDictError, match=told):
        server.space.point(wrapped)
    receipt = server.receive_model(ticket, wrapped.state_dict(), samples=3)
    assert "missing" in receipt.reason
    with pytest.raises(ArgumentError, match=told):
        receipt.check()
    with pytest.raises(StateDictError, match=told.replace("in them", "in those that are expected")):
        ParameterSpace.of(wrapped).point(model)


def test_other_differences_of_names_give_no_wrapper_hint():
    space = ParameterSpace.of(nn.Linear(4, 8))
    for names in (
        {"module.weight": draw(0, 8, 4).float()},
        {"module.w": draw(0, 8, 4).float(), "bias": draw(0, 8).float()},
    ):
        with pytest.raises(StateDictError) as refusal:
            space.point(names)
        assert "module.' is" not in str(refusal.value)
