"""Tests that `average` and `average_adapters` return equal values and errors with and without the native reader."""

from collections import OrderedDict

import pytest
import torch

from manifoldagg import average
from manifoldagg.averaging import average_adapters
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import tensor_list
from manifoldagg.manifolds import Sphere
from tests.kernels.backends.test_tensor_reader import CASES, in_python, outcome, pytestmark  # noqa: F401
from tests.support import draw

LYING = "subclass that overrides"
"""The name of a case that reports a false length, so the kernels would read outside of its memory."""


def values(state):
    """Convert a state dict to types that support `==`."""
    return type(state), [(key, x.dtype, x.shape, x.double().tolist()) for key, x in state.items()]


def model(seed, *others, **changed):
    return {"w": draw(seed, 3, 2), "b": draw(seed + 1, 2), "steps": torch.tensor(seed)} | dict(others) | changed


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


def tied(seed, value=None):
    x = draw(seed, 2)
    return {"a": x, "b": x if value is None else x + value, "c": draw(seed, 1)}


def reordered(state):
    return dict(reversed(state.items()))


MODELS = {
    "plain": lambda: [model(0), model(1)],
    "another order": lambda: [model(0), reordered(model(1))],
    "buffers between": lambda: [{"n.running_mean": torch.ones(2)} | model(i) for i in range(2)],
    "ordered": lambda: [OrderedDict(model(0)), OrderedDict(model(1))],
    "only parameters": lambda: [{"w": draw(i, 3), "b": draw(i, 2)} for i in range(3)],
    "only parameters, another order": lambda: [{"w": draw(0, 3), "b": draw(0, 2)}, {"b": draw(1, 2), "w": draw(1, 3)}],
    "arrays": lambda: [{"w": draw(i, 3).numpy()} for i in range(2)],
    "an array after a tensor": lambda: [{"w": draw(0, 3)}, {"w": draw(1, 3).numpy()}],
    "a tensor after an array": lambda: [{"w": draw(0, 3).numpy()}, {"w": draw(1, 3)}],
    "lists": lambda: [[draw(i, 3), draw(i, 2)] for i in range(2)],
    "numbers as keys": lambda: [{0: draw(i, 3), 1: draw(i, 2)} for i in range(2)],
    "tied": lambda: [tied(0), tied(1)],
    "tied only in the first": lambda: [tied(0), tied(1, value=1.0)],
    "missing": lambda: [model(0), {"w": draw(1, 3, 2), "b": draw(2, 2)}],
    "extra": lambda: [model(0), model(1, v=torch.ones(1))],
    "another name": lambda: [{"w": draw(0, 3)}, {"v": draw(1, 3)}],
    "another name of a buffer": lambda: [model(0), {"w": draw(1, 3, 2), "b": draw(2, 2), "step": torch.tensor(1)}],
    "another shape": lambda: [model(0), model(1, w=draw(1, 2, 3))],
    "another shape of a buffer": lambda: [model(0), model(1, steps=torch.tensor([1]))],
    "another dtype": lambda: [model(0), model(1, b=draw(1, 2, dtype=torch.float32))],
    "another dtype of a buffer": lambda: [model(0), model(1, steps=torch.tensor(1, dtype=torch.int32))],
    "freed": lambda: [model(0), model(1, w=freed(draw(1, 3, 2)))],
    "freed in the first": lambda: [model(0, w=freed(draw(1, 3, 2))), model(1)],
    "freed buffer": lambda: [model(0), model(1, steps=freed(torch.tensor(1)))],
    "meta": lambda: [model(0), model(1, w=draw(1, 3, 2).to("meta"))],
    "not finite": lambda: [model(0), model(1, b=torch.tensor([torch.nan, 0.0], dtype=torch.float64))],
    "no tensor": lambda: [model(0), model(1, b=None)],
}
MODELS |= {
    f"{name} {where}": lambda make=make, both=both: [
        {"w": torch.ones(2), "x": make() if both else torch.ones(2)},
        {"w": torch.ones(2), "x": make()},
    ]
    for name, make in CASES.items()
    if name != LYING
    for where, both in (("in both", True), ("in the second", False))
}


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_an_average_has_the_same_values_or_errors(name):
    def work():
        found = outcome(lambda: average(MODELS[name](), [1, 3]))
        return outcome(values, found) if isinstance(found, dict) else outcome(repr, found)

    assert work() == in_python(work)


def test_equal_models_are_read_natively_and_each_tensor_once(monkeypatch):
    read = []
    original = tensor_list._reader
    monkeypatch.setattr(tensor_list, "_reader", lambda row: read.extend(map(id, row)) or original(row))
    models = [{"w": draw(i, 3, 2), "b": draw(i, 2)} for i in range(4)]
    average(models)
    given = [id(x) for state in models for x in state.values()]
    assert sorted(x for x in read if x in set(given)) == sorted(given)


def test_the_result_is_a_new_state_dict():
    models = [{"w": draw(i, 3), "b": draw(i, 2)} for i in range(2)]
    before = [values(state) for state in models]
    found = average(models)
    found["w"].zero_()
    assert type(found) is dict
    assert not any(found is state for state in models)
    assert [values(state) for state in models] == before


def test_means_on_manifolds_are_the_same_with_the_native_reader():
    def work():
        models = [{"v": torch.nn.functional.normalize(draw(i, 3), dim=0), "w": draw(i, 2)} for i in range(2)]
        return values(average(models, manifolds={"v": Sphere(3)}))

    assert work() == in_python(work)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", sorted(CASES.keys() - {LYING}))
def test_an_average_of_adapters_has_the_same_values_or_errors(name):
    def work():
        adapters = [
            {"q.lora_A.weight": draw(i, 1, 3), "q.lora_B.weight": draw(i, 2, 1), "head": CASES[name]()} for i in (0, 1)
        ]
        found = outcome(lambda: average_adapters(adapters, [1, 3]))
        return outcome(values, found) if isinstance(found, dict) else outcome(repr, found)

    assert work() == in_python(work)


@pytest.mark.parametrize("place", [(0, "q.lora_A.weight"), (1, "q.lora_B.weight"), (2, "head")])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_an_adapter_that_is_not_finite_is_named(place, value):
    i, name = place
    adapters = [
        {"q.lora_A.weight": draw(i, 1, 3), "q.lora_B.weight": draw(i, 2, 1), "head": draw(i, 4)} for i in range(3)
    ]
    adapters[i][name].view(-1)[1] = value
    with pytest.raises(ArgumentError, match=rf"adapters\[{i}\]: {name}: expected finite values, got"):
        average_adapters(adapters)


def test_large_finite_adapters_are_averaged():
    """The values are finite, but their squares overflow float64."""
    adapters = [{"q.lora_A.weight": draw(i, 1, 3), "q.lora_B.weight": draw(i, 2, 1)} for i in range(2)]
    for state in adapters:
        state["head"] = torch.tensor([1e200, 1e200], dtype=torch.float64)
    assert average_adapters(adapters)["head"].tolist() == [1e200, 1e200]
