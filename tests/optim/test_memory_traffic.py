"""Tests of the memory traffic of a step of `Outer`, in words of 32 bits per parameter: read, written, allocated."""

import pytest
import torch
from torch import nn

from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules import (
    ASGD,
    DelayedNesterov,
    FedAvg,
    FedOrtho,
    HeLoCo,
    Momentum,
    RadialDirectional,
)
from manifoldagg.kernels import available_backends
from manifoldagg.optim import Outer
from tests.federated.rules.memory_traffic import SIZE, counted
from tests.optim.test_outer import RULES, run
from tests.support import draw

# The step reads the gradient once for its checks. Then it reads the gradient and each written tensor once.
MOMENTUM = [(4, 2, 0)]
# The first update of a cohort is stored. The last update changes the model.
MEAN = [(2, 1, 1), (3, 1, 0), (4, 1, 0)]
CASES = {
    "ASGD": (ASGD(0.7), [(3, 1, 0)]),
    "Momentum": (Momentum(ASGD(0.7)), MOMENTUM),
    "Nesterov": (Momentum(ASGD(0.7), nesterov=True), MOMENTUM),
    # The cosines require an additional read of the momentum.
    "HeLoCo": (HeLoCo(0.7), [(5, 2, 0)]),
    "DelayedNesterov": (DelayedNesterov(3), [(3, 2, 1), (4, 2, 0), (5, 2, 0)]),
    "FedAvg": (FedAvg(3, 0.7), MEAN),
    "DiLoCo": (Momentum(FedAvg(3, 0.7), nesterov=True), [*MEAN[:2], (5, 2, 0)]),
    # The length of the sum of directions requires an additional read of the sum.
    "RadialDirectional": (RadialDirectional(3, 0.7), [*MEAN[:2], (5, 1, 0)]),
}


def parameters():
    """Return one large parameter, whose traffic is counted, and small parameters, whose traffic is negligible."""
    shapes = [(64, SIZE // 64), (3,), (2, 2), ()]
    return [nn.Parameter(torch.full(shape, 0.5)) for shape in shapes]


def step(outer, seed, **known):
    params = outer.param_groups[0]["params"]
    for i, p in enumerate(params):
        p.grad = 1e-3 * draw(seed + i, max(1, p.numel()), dtype=torch.float32)[: p.numel()].view(p.shape)
    with counted() as words:
        outer.step(**known)
    return words


@pytest.mark.skipif("cpu" not in available_backends(), reason="other backends form one sum after another")
@pytest.mark.parametrize("name", CASES)
def test_memory_traffic_of_a_step(name):
    rule, cycle = CASES[name]
    outer = Outer(parameters(), rule)
    for i in range(2 * len(cycle)):
        step(outer, i)
    for i, expected in enumerate(cycle):
        words = step(outer, 100 + i)
        assert words.counts == expected, f"step {i}"
        assert (words.grams, words.combines) == (1, 1)


@pytest.mark.skipif("cpu" not in available_backends(), reason="as above")
def test_a_late_step_reads_the_base_once_more():
    outer = Outer(parameters(), FedOrtho(0.7))
    step(outer, 1)  # The first step with these shapes builds their space.
    base = [p.detach() - 1 for p in outer.param_groups[0]["params"]]
    words = step(outer, 0, staleness=1, base=base)
    assert (words.counts, words.grams, words.combines) == ((6, 1, 0), 1, 1)


@pytest.mark.skipif("cpu" not in available_backends(), reason="as above")
@pytest.mark.parametrize("name", ["Momentum", "DelayedNesterov"])
def test_a_loaded_or_modified_state_is_read_again(name):
    rule, cycle = CASES[name]
    outer = Outer(parameters(), rule)
    least = [step(outer, i).read for i in range(9)][-len(cycle) :]
    outer.load_state_dict(outer.state_dict())
    assert [step(outer, i).read for i in range(len(cycle))] > least
    assert [step(outer, i).read for i in range(len(cycle))] == least
    (kept,) = {"velocity", "momentum"} & outer.state[outer.param_groups[0]["params"][0]].keys()
    outer.state[outer.param_groups[0]["params"][0]][kept][0, 0] = torch.nan
    before = [p.detach().clone() for p in outer.param_groups[0]["params"]]
    with pytest.raises(ArgumentError, match=f"{kept}: squared length: expected"):
        step(outer, 0)
    assert all(map(torch.equal, before, outer.param_groups[0]["params"]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_norm_bounds_are_upper_bounds(name, dtype):
    params = [nn.Parameter(draw(i, n, dtype=dtype)) for i, n in enumerate((35, 3, 8))]
    outer = Outer(params, RULES[name])
    for i in range(9):
        run(outer, params, i, 1)
        for bound in outer._norm_bounds[params[0]].values():
            assert sum(x.double().square().sum() for x in bound.row).sqrt() <= bound.norm
            assert bound.applies_to(bound.row)
