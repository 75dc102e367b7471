"""Model to point to model is the identity, bit for bit, whatever the model is made of."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from manifoldagg.errors import ArgumentError, StateDictError
from manifoldagg.manifolds import ParameterSpace
from tests.support import draw, seeds


class Tied(nn.Module):
    """Two names for one weight, a frozen layer, a buffer, 0-dim and empty parameters, two dtypes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.narrow = nn.Linear(3, 3).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("minus_infinity", torch.tensor([float("-inf")]))

    def forward(self, x):
        hidden = self.norm(self.frozen(self.embed(x)).tanh())
        return self.scale * self.out(self.narrow(hidden.bfloat16()).float())


def build(kind: str, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        match kind:
            case "tied":
                return Tied()
            case "double":
                return nn.Sequential(nn.Linear(3, 4).double(), nn.Linear(4, 2))
            case "half":
                return nn.Sequential(nn.Linear(3, 4).half(), nn.Linear(4, 2).bfloat16())
            case "convolution":
                model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.LazyLinear(4))
                model(torch.zeros(2, 2, 5, 5))
                return model.to(memory_format=torch.channels_last)
            case "parametrised":
                return nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
            case "empty":
                return nn.ReLU()
    raise AssertionError(kind)


KINDS = st.sampled_from(["tied", "double", "half", "convolution", "parametrised", "empty"])


def bits(tensors):
    return {
        name: (t.dtype, tuple(t.shape), t.detach().reshape(-1).contiguous().view(torch.uint8).tolist())
        for name, t in tensors.items()
    }


@given(KINDS, seeds)
def test_the_round_trip_preserves_every_bit(kind, seed):
    model = build(kind, seed)
    before = bits(model.state_dict())
    space = ParameterSpace.of(model)
    point = space.point(model)
    assert point.is_contiguous()
    assert point.shape == space.shape
    other = build(kind, seed + 1)
    space.load(other, point)
    leaves = {leaf.name for leaf in space.layout.leaves} | {alias for alias, _ in space.layout.aliases}
    after = bits(other.state_dict())
    assert {name: after[name] for name in leaves} == {name: before[name] for name in leaves}
    assert bits(space.state_dict(point, space.buffers(model))) == before
    assert torch.equal(space.point(other), point)


@given(KINDS, seeds)
def test_a_state_dict_and_its_module_have_the_same_point(kind, seed):
    model = build(kind, seed)
    state = model.state_dict()
    frozen = tuple(name for name, p in model.named_parameters() if not p.requires_grad)
    masks = tuple(name for name in state if name == "minus_infinity")
    bare = ParameterSpace.of_state_dict(state, buffer_policy=(*frozen, *masks))
    assert bare == ParameterSpace.of(model)
    assert hash(bare) == hash(ParameterSpace.of(model))
    assert torch.equal(bare.point(state), ParameterSpace.of(model).point(model))


def test_tied_weights_are_one_leaf():
    model = Tied()
    layout = ParameterSpace.of(model).layout
    assert ("out.weight", "embed.weight") in layout.aliases
    assert layout.size == sum(p.numel() for p in model.parameters() if p.requires_grad)
    state = ParameterSpace(layout).state_dict(torch.zeros(layout.size))
    assert state["out.weight"] is state["embed.weight"]


def test_only_trainable_parameters_are_leaves():
    layout = ParameterSpace.of(Tied()).layout
    carried = {entry.name for entry in layout.buffers}
    assert carried == {"frozen.weight", "frozen.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "mask", "minus_infinity"}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dtype"), [("tied", torch.float32), ("half", torch.float32), ("double", torch.float64)]
)
def test_the_dtype_of_points_represents_every_leaf_exactly(kind, dtype):
    model = build(kind, 0)
    assert ParameterSpace.of(model).point(model).dtype == dtype
    assert ParameterSpace.of(model, dtype=torch.float64).point(model).dtype == torch.float64


def test_the_loss_equals_that_of_the_model_and_does_not_modify_it():
    model = Tied().train()
    space = ParameterSpace.of(model)
    batch = torch.tensor([0, 1, 2, 4]), torch.tensor([1, 0, 3, 2])
    before = bits(model.state_dict())
    theta = space.point(model).requires_grad_()
    value = space.loss(model, nn.functional.cross_entropy)(theta, batch)
    (slope,) = torch.autograd.grad(value, theta)
    assert bits(model.state_dict()) == before
    assert all(p.grad is None for p in model.parameters())
    twin = copy.deepcopy(model)
    expected = nn.functional.cross_entropy(twin(batch[0]), batch[1])
    expected.backward()
    assert torch.equal(value, expected)
    parameters = dict(twin.named_parameters())
    used = [parameters[leaf.name] for leaf in space.layout.leaves if leaf.size]
    gradients = torch.cat([p.grad.float().reshape(-1) for p in used])
    assert torch.equal(slope, gradients)


def spoil(name, tensor):
    def change(state):
        state[name] = tensor if tensor is not None else state.pop(name)
        if tensor is None:
            del state[name]

    return change


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("scale"), "^source: missing: scale"),
        (lambda s: s.update(more=torch.ones(1)), "^source: extra: more"),
        (lambda s: s.update(scale=torch.ones(1)), r"scale: expected shape \(\), got \(1,\)"),
        (lambda s: s.update(scale=torch.tensor(1.0).double()), "scale: expected torch.float32, got torch.float64"),
        (lambda s: s.update(scale=torch.tensor(float("nan"))), "scale: expected finite values"),
        (lambda s: s.update({"narrow.bias": torch.full((3,), float("inf"), dtype=torch.bfloat16)}), "narrow.bias: expected finite"),
        (lambda s: s.update({"out.weight": torch.zeros(5, 3)}), "out.weight: expected the values of embed.weight, to which it is tied"),
        (lambda s: s.update(scale=1.5), "scale: expected a torch.Tensor, got float"),
        (lambda s: s.update(scale=torch.empty((), device="meta")), "scale: expected a dense tensor with values"),
        (lambda s: s.update({"half": torch.ones(2).to_sparse()}), "half: expected a dense tensor"),
        (lambda s: s.update({"out.weight": torch.full((5, 3), float("nan"))}), "out.weight: expected finite"),
    ],
)  # fmt: skip
def test_a_mismatched_state_dict_is_rejected_with_the_name_of_the_tensor(change, words):
    model = Tied()
    space = ParameterSpace.of(model)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    change(state)
    with pytest.raises(StateDictError, match=words):
        space.point(state)


@pytest.mark.usefixtures("as_shipped")
def test_loading_an_invalid_point_does_not_modify_the_model():
    model = Tied()
    space = ParameterSpace.of(model)
    before = bits(model.state_dict())
    for bad, words in (
        (torch.zeros(3), "point: expected shape"),
        (torch.full(space.shape, float("nan")), "point: expected finite values"),
        (torch.zeros(2, *space.shape), "point: expected shape"),
        ("point", "point: expected a floating tensor"),
    ):
        with pytest.raises(ArgumentError, match=words):
            space.load(model, bad)
    with pytest.raises(StateDictError, match="missing: embed.weight"):
        space.load(nn.Linear(3, 2), torch.zeros(space.shape))
    assert bits(model.state_dict()) == before


@pytest.mark.usefixtures("as_shipped")
def test_models_without_a_point_are_rejected():
    with pytest.raises(StateDictError, match="weight: expected an initialised parameter"):
        ParameterSpace.of(nn.LazyLinear(3))
    with pytest.raises(StateDictError, match=r"0\.weight: expected at most float32, got torch.float64"):
        ParameterSpace.of(build("double", 0), dtype=torch.float32)
    with pytest.raises(StateDictError, match="weight: expected a floating parameter, got torch.complex64"):
        ParameterSpace.of(nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(StateDictError, match="running_mean: expected an initialised"):
        ParameterSpace.of(nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(ArgumentError, match="model: expected a torch.nn.Module, got dict; use of_state_dict"):
        ParameterSpace.of({})
    with pytest.raises(ArgumentError, match="buffer_policy: expected a sequence of glob patterns"):
        ParameterSpace.of_state_dict({}, buffer_policy="*running_*")
    with pytest.raises(ArgumentError, match="state: expected a state dict or a list of arrays, got Linear: pass its"):
        ParameterSpace.of_state_dict(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="state: w: expected a tensor or an array, got float"):
        ParameterSpace.of_state_dict({"w": 1.0})
    with pytest.raises(ArgumentError, match="source: expected a torch.nn.Module or a state dict, got list"):
        ParameterSpace.of_state_dict({"0": torch.ones(2)}).point([torch.ones(2)])
    with pytest.raises(StateDictError, match="source: expected strings as names, got 0"):
        ParameterSpace.of_state_dict({"0": torch.ones(2)}).point({0: torch.ones(2)})
    with pytest.raises(ArgumentError, match="dtype: expected one of"):
        ParameterSpace.of(nn.Linear(2, 2), dtype=torch.float16)


@pytest.mark.parametrize("kind", [list, lambda patterns: dict.fromkeys(patterns, "leave")])
def test_pattern_of_a_buffer_policy_that_matches_no_buffer_is_rejected(kind):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].requires_grad_(False)
    with pytest.raises(ArgumentError, match=r"'0\.\*' matches no buffer, but the trainable parameter 0\.weight$"):
        ParameterSpace.of(model, buffer_policy=kind(["0.*"]))
    for source in (
        ParameterSpace.of,
        lambda model, **options: ParameterSpace.of_state_dict(model.state_dict(), **options),
    ):
        with pytest.raises(ArgumentError, match=r"^buffer_policy: 'typo\*' matches no entry of the model$"):
            source(model, buffer_policy=kind(["2.*", "typo*"]))
    found = dict(ParameterSpace.of(model, buffer_policy=kind(["1.*", "2.*"])).buffer_policies)
    assert found.keys() == {name for name in model.state_dict() if name[0] == "2" or name[:4] in ("1.ru", "1.nu")}


@pytest.mark.usefixtures("as_shipped")
def test_a_value_that_overflows_a_narrow_leaf_is_rejected():
    model = nn.Linear(2, 1).half()
    space = ParameterSpace.of(model)
    before = bits(model.state_dict())
    with pytest.raises(StateDictError, match="weight: expected values in the range of torch.float16, got an overflow"):
        space.load(model, torch.tensor([1.0, 1e6, 0.0]))
    assert bits(model.state_dict()) == before


def test_weights_that_are_equal_but_not_tied_are_all_loaded():
    tied, untied = Tied(), Tied()
    untied.out.weight = nn.Parameter(untied.embed.weight.detach().clone())
    space = ParameterSpace.of(tied)
    space.load(untied, torch.zeros(space.shape))
    assert not untied.out.weight.any()
    batch = torch.tensor([0, 1]), torch.tensor([1, 0])
    theta = draw(0, *space.shape, dtype=torch.float32)
    losses = [space.loss(model, nn.functional.cross_entropy) for model in (tied, untied)]
    untied.load_state_dict(tied.state_dict())
    assert torch.equal(losses[0](theta, batch), space.loss(untied, nn.functional.cross_entropy)(theta, batch))


def test_a_buffer_that_became_a_parameter_is_part_of_the_point():
    class Shifted(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("shift", torch.zeros(2))

        def forward(self, x):
            return x @ self.weight.T + self.shift

    model = Shifted()
    space = ParameterSpace.of_state_dict(model.state_dict())
    theta = space.point(model)
    batch = torch.zeros(3, 2), torch.zeros(3, 2)
    loss = space.loss(model, nn.functional.mse_loss)
    assert loss(theta, batch) == 0
    assert loss(theta + torch.tensor([0.0] * 6 + [5.0] * 2), batch) > 1


def test_extra_state_is_skipped_by_its_exact_name():
    class Stateful(nn.Linear):
        def get_extra_state(self):
            return {"version": 3}

        def set_extra_state(self, state):
            pass

    model = Stateful(2, 1)
    assert ParameterSpace.of(model).point(model.state_dict()).shape == (3,)
    assert ParameterSpace.of_state_dict({"rnn_extra_state": torch.ones(2)}).shape == (2,)


@pytest.mark.usefixtures("as_shipped")
def test_a_state_dict_hook_that_hides_a_parameter_is_rejected():
    model = nn.Linear(2, 1)
    model.register_state_dict_post_hook(lambda module, state, prefix, _: state.update(bias=state["bias"].clone()))
    with pytest.raises(StateDictError, match="bias: expected the parameter itself in the state dict"):
        ParameterSpace.of(model)


def test_buffers_are_copied_and_checked():
    model = nn.BatchNorm1d(2)
    space, carried = ParameterSpace.of(model), ParameterSpace.of(model).buffers(model)
    state = space.state_dict(space.point(model), carried)
    state["running_mean"].fill_(9)
    assert not carried["running_mean"].any()
    with pytest.raises(StateDictError, match="extra: weight"):
        space.state_dict(space.point(model), carried | {"weight": torch.ones(2)})


def test_signed_zeros_and_subnormals_survive_the_round_trip():
    values = torch.tensor([[0.0, -0.0, 1e-42, -3.4e38, 1.0]])
    model = nn.Linear(5, 1, bias=False)
    space = ParameterSpace.of(model)
    space.load(model, values[0])
    assert bits({"w": model.weight}) == bits({"w": values})
    assert torch.equal(space.point(model), values[0])


def test_freed_memory_is_reported_by_name():
    state = nn.Linear(3, 2).state_dict()
    space = ParameterSpace.of_state_dict(state)
    state["bias"].untyped_storage().resize_(0)
    for call in (
        lambda: space.point(state),
        lambda: space.layout.tensor_lists({"": state}),
        lambda: space.layout.tensor_lists({"": state}, reference=""),
    ):
        with pytest.raises(StateDictError, match="bias: expected a tensor with memory, got one whose memory was freed"):
            call()


@pytest.mark.parametrize("name", ["weight", "running_mean", "num_batches_tracked", "tied"])
def test_freed_memory_is_reported_before_anything_is_read(name):
    whole = nn.BatchNorm1d(3).state_dict()
    whole["tied"] = whole["weight"]
    space = ParameterSpace.of_state_dict(whole)
    state = {key: x.clone() for key, x in whole.items()}
    state[name].untyped_storage().resize_(0)
    carried = space.buffers(whole)
    calls = [
        lambda: space.point(state),
        lambda: space.buffers(state),
        lambda: space.layout.check_entries(state),
        lambda: space.layout.tensor_lists({"": state}),
        lambda: space.layout.tensor_lists({"": state}, reference=""),
    ]
    if name in carried:
        calls.append(lambda: space.state_dict(space.point(whole), carried | {name: state[name]}))
    for call in calls:
        with pytest.raises(StateDictError, match=f"{name}: expected a tensor with memory, got one whose memory"):
            call()
