"""BatchNorm statistics for a point: torch's own, for a model that is left alone."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from manifoldagg.curves.batchnorm import refresh_buffers
from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.manifolds import ParameterSpace
from tests.support import draw

INPUTS = list(draw(0, 3, 8, 4, dtype=torch.float32))


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=0.3)
        )


def states(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = network()

    def forward(self, *, values, scale=1.0):
        return self.inside(values * scale)


@pytest.mark.parametrize("form", ["tensor", "pair", "list"])
def test_the_statistics_equal_those_of_torch(form):
    model = network()
    space = ParameterSpace.of(model)
    point = space.point(model) + 0.1
    batches = {"tensor": INPUTS, "pair": [(x, None) for x in INPUTS], "list": [[x, None] for x in INPUTS]}[form]
    before, modes = states(model), [m.training for m in model.modules()]
    carried = refresh_buffers(space, model, point, batches)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert (modes, model[1].momentum, model[4].momentum) == ([m.training for m in model.modules()], 0.1, 0.3)
    other = space.load(copy.deepcopy(model), point)
    update_bn(INPUTS, other)
    expected = other.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in space.state_dict(point, carried).items())


def test_batches_of_keyword_arguments_are_supported():
    model = Named()
    space = ParameterSpace.of(model)
    carried = refresh_buffers(space, model, space.point(model), [{"values": x, "scale": 2.0} for x in INPUTS])
    inner = ParameterSpace.of(model.inside)
    expected = refresh_buffers(inner, model.inside, inner.point(model.inside), [2.0 * x for x in INPUTS])
    assert all(torch.equal(carried[f"inside.{name}"], tensor) for name, tensor in expected.items())


def test_one_batch_gives_its_own_moments():
    model = nn.Sequential(nn.BatchNorm1d(4))
    space = ParameterSpace.of(model)
    carried = refresh_buffers(space, model, space.point(model), INPUTS[:1])
    assert torch.allclose(carried["0.running_mean"], INPUTS[0].mean(0), atol=1e-6)
    assert torch.allclose(carried["0.running_var"], INPUTS[0].var(0), rtol=1e-5)


def test_dropout_is_inactive_and_no_random_numbers_are_drawn():
    model = nn.Sequential(nn.Dropout(0.5), network()).eval()
    space = ParameterSpace.of(model)
    drawn = torch.random.get_rng_state()
    carried = refresh_buffers(space, model, space.point(model), INPUTS)
    expected = refresh_buffers(
        ParameterSpace.of(model[1]), model[1], ParameterSpace.of(model[1]).point(model[1]), INPUTS
    )
    assert torch.equal(drawn, torch.random.get_rng_state())
    assert all(torch.equal(carried[f"1.{name}"], tensor) for name, tensor in expected.items())
    assert not any(module.training for module in model.modules())


def test_without_batch_norm_no_batch_is_read():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.BatchNorm1d(2, track_running_stats=False))
    space = ParameterSpace.of(model)

    def batches():
        raise AssertionError
        yield

    assert refresh_buffers(space, model, space.point(model), batches()) == {}


def test_the_model_does_not_change_if_a_batch_fails():
    model = network()
    space = ParameterSpace.of(model)
    before = states(model)
    with pytest.raises(RuntimeError):
        refresh_buffers(space, model, space.point(model), [INPUTS[0], INPUTS[0][:, :3]])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training
    assert model[4].momentum == 0.3


def test_an_infinite_mask_does_not_count_as_a_statistic():
    model = network()
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    space = ParameterSpace.of(model)
    carried = refresh_buffers(space, model, space.point(model), INPUTS)
    assert torch.equal(carried["mask"], model.mask)


@pytest.mark.usefixtures("as_shipped")
def test_invalid_arguments_are_rejected_by_name():
    model = network()
    space = ParameterSpace.of(model)
    point = space.point(model)
    for given, batches, words in (
        (point[1:], INPUTS, "point: expected shape"),
        (point * torch.nan, INPUTS, "point: expected finite"),
        (point, [], "batches: expected at least one batch"),
        (point, [3], "batches: expected tensors.*got int"),
    ):
        with pytest.raises(ArgumentError, match=words):
            refresh_buffers(space, model, given, batches)
    with pytest.raises(DivergenceError, match="running_mean"):
        refresh_buffers(space, model, point, [INPUTS[0] * torch.inf])
