"""Tests of ensembles of models that are sampled from embeddings, and of their accuracy and loss."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from manifoldagg.averaging import ensemble
from manifoldagg.curves import Bezier, Simplex, Tunnel, refresh_buffers
from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.manifolds import Flat, ParameterSpace
from tests.support import draw, seeds


class Named(nn.Module):
    """A network with a named input, batch normalisation and dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 4))

    def forward(self, pixels, scale=1.0):
        return self.layers(scale * pixels)


def classifier(norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(3, 5), nn.BatchNorm1d(5)] if norm else [nn.Linear(3, 5), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(5, 4)).double()


def data(seed=0, n=30, size=8):
    inputs, classes = draw(seed, n, 3), torch.randint(4, (n,), generator=torch.Generator().manual_seed(seed))
    return list(zip(inputs.split(size), classes.split(size), strict=True))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def embeddings(space):
    curve = Bezier(space, 2)
    return [curve, Simplex(space, 3), Tunnel(curve, 0.1), Tunnel(curve, 0.1, "subspace")]


@given(seeds, st.integers(1, 5))
def test_an_ensemble_of_a_constant_embedding_is_the_single_model(seed, draws):
    model = classifier()
    space = ParameterSpace.of(model)
    single = draw(seed, *space.shape)
    for embedding in (Bezier(space, 2), Simplex(space, 3)):
        found = ensemble(
            model,
            embedding,
            embedding.collapse(single),
            data(seed),
            single=single,
            generator=generator(),
            draws=draws,
        )
        for part in (found.combined, *found.members):
            assert part.accuracy == found.single.accuracy
            # The mean of equal numbers rounds at most twice per draw. A simplex also rounds when it combines φ.
            assert part.nll == pytest.approx(found.single.nll, rel=1e-12)


def test_the_ensemble_is_the_mean_of_probabilities():
    model = classifier()
    space = ParameterSpace.of(model)
    for embedding in embeddings(space):
        phi = draw(4, embedding.size, *space.shape)
        found = ensemble(model, embedding, phi, data(), single=phi[0], generator=generator(3), draws=4)
        inputs, classes = (torch.cat(part) for part in zip(*data(), strict=True))
        with torch.no_grad():
            p = [space.load(model, embedding(phi, x))(inputs).softmax(-1) for x in found.coordinates]
            alone = space.load(model, phi[0])(inputs).softmax(-1)
        for given_, numbers in (
            (torch.stack(p).mean(0), found.combined),
            (alone, found.single),
            (p[1], found.members[1]),
        ):
            assert numbers.samples == len(classes)
            assert numbers.accuracy == pytest.approx((given_.argmax(-1) == classes).double().mean().item(), rel=1e-15)
            assert numbers.nll == pytest.approx(nn.functional.nll_loss(given_.log(), classes).item(), rel=1e-12)
        # By Jensen's inequality, the loss of the mean prediction is at most the mean loss of the members.
        assert found.combined.nll <= sum(member.nll for member in found.members) / 4 + 1e-12


def test_equal_generators_draw_equal_coordinates():
    model = classifier()
    space = ParameterSpace.of(model)
    curve = Bezier(space)
    phi = draw(1, 3, *space.shape)
    options = {"single": phi[0], "draws": 3}
    a, b = (ensemble(model, curve, phi, data(), generator=generator(5), **options) for _ in range(2))
    assert a == b
    assert a.coordinates != ensemble(model, curve, phi, data(), generator=generator(6), **options).coordinates


def test_batches_are_read_once():
    model = classifier()
    space = ParameterSpace.of(model)
    phi = draw(1, 3, *space.shape)
    whole = ensemble(model, Bezier(space), phi, data(), single=phi[0], generator=generator(), draws=3)
    once = ensemble(model, Bezier(space), phi, iter(data()), single=phi[0], generator=generator(), draws=3)
    assert once == whole


@pytest.mark.parametrize("mapped", [False, True])
def test_batch_norm_statistics_are_those_of_each_model(mapped):
    model = classifier(norm=True)
    space = ParameterSpace.of(model)
    phi = draw(2, 3, *space.shape)
    curve, train = Bezier(space), data(7)
    if mapped:
        batches = [{"input": x, "labels": y} for x, y in data()]
        refresh = [{"input": x, "labels": y} for x, y in train]
    else:
        batches, refresh = data(), train
    before = {name: t.clone() for name, t in model.state_dict().items()}
    found = ensemble(
        model, curve, phi, batches,
        single=phi[0], generator=generator(), draws=2, refresh=refresh, targets="labels",
    )  # fmt: skip
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    inputs, classes = (torch.cat(part) for part in zip(*data(), strict=True))
    for x, member in zip(found.coordinates, found.members, strict=True):
        theta = curve(phi, x)
        other = classifier(norm=True).eval()
        other.load_state_dict(space.state_dict(theta, refresh_buffers(space, model, theta, train)))
        with torch.no_grad():
            expected = nn.functional.cross_entropy(other(inputs), classes).item()
        assert member.nll == pytest.approx(expected, rel=1e-12)


class Sum(nn.Module):
    """A network whose input is a pair of tensors. A buffer counts its calls."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, pair):
        self.calls += 1
        return self.layers(pair[0] + 10 * pair[1] if isinstance(pair, tuple) else pair)


def test_tuple_inputs_are_passed_whole_and_buffers_are_not_written():
    model = Sum().double()
    space = ParameterSpace.of(model)
    curve, single = Bezier(space), space.point(model)
    pairs = [((x, x.square()), y) for x, y in data()]
    summed = [(x + 10 * x.square(), y) for x, y in data()]
    a, b = (
        ensemble(model, curve, curve.collapse(single), part, single=single, generator=generator(), refresh=part)
        for part in (pairs, summed)
    )
    assert a == b
    assert model.calls == 0


def test_mapping_batches_are_passed_as_keyword_arguments():
    model = Named().double()
    space = ParameterSpace.of(model)
    single = space.point(model)
    batches = [{"pixels": x, "scale": 2.0, "targets": y} for x, y in data()]
    curve = Bezier(space)
    found = ensemble(
        model, curve, curve.collapse(single), batches, single=single, generator=generator(), refresh=batches
    )
    assert found.combined.nll == pytest.approx(found.single.nll, rel=1e-12)
    assert model.training
    assert str(found).splitlines()[0].split() == ["accuracy", "NLL"]


HUGE = torch.tensor(1e300, dtype=torch.float64)
NORMED = {"model": classifier(norm=True), "phi": torch.zeros(3, 54), "single": torch.zeros(54)}


def call(**changes):
    model = changes.pop("model", None) or classifier()
    space = ParameterSpace.of(model)
    curve = Bezier(space)
    given_ = {
        "embedding": curve,
        "phi": draw(0, 3, *space.shape),
        "batches": data(),
        "single": draw(0, *space.shape),
        "generator": generator(),
    } | changes
    return ensemble(model=model, **given_)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"embedding": Bezier(Flat(44))}, "embedding: expected an embedding on a ParameterSpace"),
        ({"generator": None}, "generator: expected a torch.Generator"),
        ({"phi": torch.zeros(2, 44)}, "phi: expected shape"),
        ({"phi": torch.full((3, 44), math.nan)}, "phi: expected finite"),
        ({"single": torch.zeros(3)}, "single: expected shape"),
        ({"draws": 0}, "draws: expected an integer >= 1"),
        ({"batches": []}, "batches: expected at least one sample"),
        ({"batches": None}, "batches: expected an iterable"),
        (NORMED | {"refresh": iter(data())}, "refresh: expected batches that can be read once for each model"),
        (NORMED | {"refresh": []}, "refresh: .*at least one batch"),
        (NORMED | {"refresh": data(size=29)}, "refresh: Expected more than 1 value per channel"),
        ({"batches": [torch.zeros(2, 3).double()]}, "batches: expected pairs"),
        ({"batches": [{"input": torch.zeros(2, 3).double()}]}, "batches: expected pairs, or mappings with 'targets'"),
        ({"batches": [(torch.zeros(2, 3).double(), torch.tensor([0, 4]))]}, "targets: expected classes from 0 to 3"),
        ({"batches": [(torch.zeros(2, 3).double(), torch.tensor([0]))]}, r"targets: expected shape \(2,\)"),
        ({"batches": [(torch.zeros(2, 3).double(), torch.zeros(2))]}, "targets: expected a tensor of class numbers"),
        (
            {"model": classifier(norm=True), "phi": torch.zeros(3, 54), "single": torch.zeros(54)},
            "refresh: expected training batches",
        ),
    ],
)
def test_invalid_input_is_rejected_by_name(changes, words):
    with pytest.raises(ArgumentError, match=words):
        call(**changes)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(("changes", "words"), [({}, r"members\[0\]"), ({"phi": torch.zeros(3, 44)}, "single")])
def test_nan_logits_are_rejected(changes, words):
    model = classifier()
    model[1] = nn.ReLU()
    huge = {"phi": HUGE.expand(3, 44), "single": HUGE.expand(44)} | changes
    batches = [(torch.tensor([[1e10, 0.0, 0.0]]).double(), torch.tensor([0]))]
    with pytest.raises(DivergenceError, match=words):
        call(model=model, batches=batches, **huge)


@pytest.mark.usefixtures("as_shipped")
def test_a_failing_model_retains_its_training_modes():
    model = classifier()
    with pytest.raises(ArgumentError):
        call(model=model, batches=[*data(), (torch.zeros(2, 3).double(), torch.tensor([0, 9]))])
    assert all(module.training for module in model.modules())
