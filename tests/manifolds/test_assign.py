"""Parameter spaces with curved leaves: which leaf lives where, and that a point is still the model, bit for bit."""

import pytest
import torch
from torch import nn

from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import (
    PRIMITIVES,
    Flat,
    ParameterSpace,
    PoincareBall,
    Power,
    SpecialOrthogonal,
    Sphere,
    distance,
    geodesic,
    karcher_mean,
)
from manifoldagg.testing import LAWS, check_manifold


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Linear(3, 4)
        self.turn = nn.Linear(4, 4, bias=False)
        self.table = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(4)
        for module, space in ((self.turn, SpecialOrthogonal(4)), (self.table, Power(PoincareBall(3), (5,)))):
            module.weight.data = space.random_point(generator=generator, dtype=torch.float32)

    def forward(self, x):
        return self.norm(self.turn(self.first(x)))


CURVED = {"turn.weight": SpecialOrthogonal(4), "table.*": PoincareBall(3)}
SPACE = ParameterSpace.of(Net(), CURVED)


def test_leaves_have_their_assigned_spaces():
    assert SPACE.manifolds == (("turn.weight", SpecialOrthogonal(4)), ("table.weight", Power(PoincareBall(3), (5,))))
    assert not SPACE.flat
    assert SPACE.symmetric
    assert SPACE.capabilities == PRIMITIVES - {"inverse_retract"}
    assert [(leaf.name, leaf.space) for leaf in SPACE.leaves(SPACE.point(Net()))] == [
        ("first.weight", Flat(12)),
        ("first.bias", Flat(4)),
        ("turn.weight", SpecialOrthogonal(4)),
        ("table.weight", Power(PoincareBall(3), (5,))),
        ("norm.weight", Flat(4)),
        ("norm.bias", Flat(4)),
    ]


def test_without_curved_leaves_the_space_is_flat():
    assert ParameterSpace.of(Net()).flat
    assert ParameterSpace.of(Net(), {"*": Flat(4), "table.weight": Flat(3), "first.weight": Flat(3)}).manifolds == ()


@pytest.mark.usefixtures("as_shipped")
def test_every_law_holds():
    verdict = check_manifold(SPACE, max_distance=2.0, seeds=1, verbose=False)
    assert verdict.holds, f"\n{verdict}"
    assert len(verdict.findings) == sum(primitives <= SPACE.capabilities for primitives, _ in LAWS.values())


def test_the_round_trip_of_curved_leaves_preserves_every_bit():
    model, other = Net(0), Net(1)
    point = SPACE.point(model)
    SPACE.load(other, point)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name))


def test_leaves_of_interpolated_models_are_on_their_manifolds():
    x, y = SPACE.point(Net(0)), SPACE.point(Net(1))
    assert distance(SPACE, x, y) > 0
    model = SPACE.load(Net(), geodesic(SPACE, x, y, 0.5))
    turn = model.turn.weight
    assert torch.allclose(turn @ turn.mT, torch.eye(4), atol=1e-6)
    assert torch.equal(SPACE.point(model), geodesic(SPACE, x, y, 0.5))
    mean = karcher_mean(SPACE, torch.stack([x, y]))
    assert mean.converged
    assert torch.allclose(mean.point, geodesic(SPACE, x, y, 0.5), atol=1e-6)


def test_names_have_precedence_over_patterns():
    manifolds = {"*weight": PoincareBall(3), "first.*": Sphere(3), "first.weight": Flat(3), "first.bias": Sphere(4)}
    with pytest.raises(
        ArgumentError,
        match=r"turn.weight: expected a space whose shape is \(4, 4\) or its last axes, got PoincareBall.* of shape \(3,\)",
    ):
        ParameterSpace.of(Net(), manifolds)
    space = ParameterSpace.of(Net(), manifolds | {"turn.weight": Flat(4), "norm.weight": Flat(4)})
    assert space.manifolds == (("first.bias", Sphere(4)), ("table.weight", Power(PoincareBall(3), (5,))))


def test_a_tied_leaf_can_be_assigned_by_any_of_its_names():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.table.weight

    assert ParameterSpace.of(Tied(), {"head.*": Sphere(3)}).manifolds == (("table.weight", Power(Sphere(3), (5,))),)


def test_a_state_dict_has_the_same_space():
    model = Net()
    space = ParameterSpace.of_state_dict(model.state_dict(), CURVED)
    assert space.manifolds == SPACE.manifolds
    assert torch.equal(space.point(model.state_dict()), SPACE.point(model))


def test_spaces_are_equal_by_content():
    assert ParameterSpace.of(Net(3), CURVED) == SPACE
    assert hash(ParameterSpace.of(Net(3), CURVED)) == hash(SPACE)
    assert ParameterSpace.of(Net()) != SPACE


def test_a_model_off_its_manifold_is_rejected_with_the_name_of_the_leaf():
    model = Net()
    model.turn.weight.data *= 1.01
    with pytest.raises(ArgumentError, match=r"turn.weight: expected a point of SpecialOrthogonal\(n=4\), got one"):
        SPACE.point(model)
    assert SPACE.point(model, validate=False).shape == SPACE.shape


def test_loading_a_point_off_its_manifold_does_not_modify_the_model():
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for call in (SPACE.load, lambda _, point: SPACE.state_dict(point)):
        with pytest.raises(ArgumentError, match=r"turn.weight: expected a point of SpecialOrthogonal\(n=4\)"):
            call(model, torch.zeros(SPACE.shape))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_leaves_can_have_arbitrary_names():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.rest = nn.Parameter(torch.tensor([1.0, 0.0, 0.0]))
            self.other = nn.Parameter(torch.zeros(2))

    space = ParameterSpace.of(Odd(), {"rest": Sphere(3)})
    assert space.base_space.shape == space.shape == (5,)
    layout = space.layout
    with pytest.raises(ArgumentError, match="manifolds: expected names of leaves, got 'typo'"):
        ParameterSpace(layout, (("typo", Sphere(3)),))
    with pytest.raises(ArgumentError, match=r"manifolds: rest: expected a space of shape \(3,\)"):
        ParameterSpace(layout, (("rest", Sphere(4)),))


def test_narrow_leaves_are_validated_with_their_own_rounding():
    model = Net().to(torch.bfloat16)
    assert ParameterSpace.of(model, CURVED).point(model).dtype == torch.float32


def test_the_loss_differentiates_through_curved_leaves():
    model = Net()
    loss = SPACE.loss(model, nn.functional.mse_loss)
    theta = SPACE.point(model).requires_grad_()
    loss(theta, (torch.ones(6, 3), torch.ones(6, 4))).backward()
    step = SPACE.project_tangent(theta.detach(), theta.grad)
    assert step.isfinite().all()
    assert distance(SPACE, theta.detach(), SPACE.exp(theta.detach(), -0.1 * step)) > 0


def test_a_geoopt_parameter_declares_its_manifold():
    from manifoldagg.manifolds.geoopt import geoopt

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            ball, sphere = geoopt.PoincareBall(), geoopt.Sphere()
            self.table = geoopt.ManifoldParameter(0.1 * torch.ones(5, 3), manifold=ball)
            self.axis = geoopt.ManifoldParameter(torch.eye(4)[0].clone(), manifold=sphere)
            self.scale = nn.Parameter(torch.ones(2))

    model = Words()
    space = ParameterSpace.of(model)
    assert space.manifolds == (("table", Power(PoincareBall(3), (5,))), ("axis", Sphere(4)))
    assert ParameterSpace.of(model, {"table": Flat(3), "axis": geoopt.Euclidean(1)}).flat
    assert ParameterSpace.of(model, {"table": geoopt.Sphere()}).manifolds[0] == ("table", Power(Sphere(3), (5,)))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("manifolds", "words"),
    [
        ({"nothing": Sphere(3)}, "manifolds: expected names or patterns of leaves, got 'nothing'"),
        ({"*.weigth": Sphere(3)}, r"manifolds: expected names or patterns of leaves, got '\*\.weigth'"),
        (
            {"first.weight": Sphere(4)},
            r"first.weight: expected a space whose shape is \(4, 3\) or its last axes, got Sphere\(n=4\) of shape \(4,\)",
        ),
        ({"first.bias": SpecialOrthogonal(4)}, "first.bias: expected a space whose shape is"),
        (
            {"first.weight": "sphere"},
            r"manifolds: first\.weight: expected a Manifold such as Sphere\(3\).*; got 'sphere'",
        ),
        (
            {"*.weight": Sphere},
            r"manifolds: \*\.weight: expected a Manifold such as Sphere\(3\).*; got the class Sphere",
        ),
        ([Sphere(3)], "manifolds: expected a mapping"),
        ({0: Sphere(3)}, "manifolds: expected names or patterns, got 0; write '0'"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(manifolds, words):
    with pytest.raises(ArgumentError, match=words):
        ParameterSpace.of(Net(), manifolds)
