"""Tests of the models of the papers: numbers of parameters, layers, causality, and training in a run."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from manifoldagg.errors import ArgumentError
from manifoldagg.experiments import load_dataset, models
from manifoldagg.experiments.models import Signature
from manifoldagg.experiments.registry import method
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.simulation import FederatedDataset, iid_partition, processes, run

MNIST, FEMNIST = Signature((1, 28, 28), 10), Signature((1, 28, 28), 62)
CIFAR10, CIFAR100 = Signature((3, 32, 32), 10), Signature((3, 32, 32), 100)


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def conv(inputs, outputs, size):
    return inputs * outputs * size**2 + outputs


def dense(inputs, outputs):
    return inputs * outputs + outputs


def test_lenet5_has_the_number_of_parameters_of_the_papers():
    # Table 3 of OrthoFL states 44K parameters. The side lengths are 28, 24, 12, 8 and 4 pixels.
    assert (
        num_parameters(models.lenet5(MNIST)) == conv(1, 6, 5) + conv(6, 16, 5) + dense(256, 120) + dense(120, 84) + 850
    )
    assert round(num_parameters(models.lenet5(MNIST)) / 1000) == 44
    # This is the network of LeCun et al. (1998) with a dense second convolution.
    # The side lengths are 32, 28, 14, 10 and 5 pixels.
    assert (
        num_parameters(models.lenet5(MNIST, padding=2))
        == num_parameters(models.lenet5(Signature((1, 32, 32), 10)))
        == 61_706
    )
    assert num_parameters(models.lenet5(FEMNIST)) == 44_426 + 52 * 85


def test_cnn7x7_and_blockcnn_have_the_number_of_parameters_of_their_paper():
    # The side lengths are 28, 22, 16 and 8 pixels.
    assert num_parameters(models.cnn7x7(MNIST)) == conv(1, 20, 7) + conv(20, 40, 7) + dense(40 * 64, 10) == 65_850
    blocks = [(3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)]
    body = sum(conv(*pair, 3) + 2 * pair[1] for pair in blocks)
    # The side lengths are 32, 16, 8 and 4 pixels.
    assert num_parameters(models.blockcnn(CIFAR10)) == body + dense(128 * 16, 128) + dense(128, 10) == 551_466
    assert num_parameters(models.blockcnn(CIFAR100)) == body + dense(128 * 16, 128) + dense(128, 100)
    assert num_parameters(models.blockcnn(CIFAR10, groups=32)) == 551_466


def test_lenet5_and_cnn7x7_equal_the_composition_of_their_layers():
    torch.manual_seed(0)
    inputs = torch.randn(3, 1, 28, 28)
    for activation in (torch.relu, torch.tanh):
        model = models.lenet5(MNIST, activation=activation.__name__)
        w = list(model.parameters())
        hidden = functional.max_pool2d(activation(functional.conv2d(inputs, w[0], w[1])), 2)
        hidden = functional.max_pool2d(activation(functional.conv2d(hidden, w[2], w[3])), 2).flatten(1)
        hidden = activation(activation(hidden @ w[4].T + w[5]) @ w[6].T + w[7])
        torch.testing.assert_close(model(inputs), hidden @ w[8].T + w[9])
    model = models.cnn7x7(MNIST)
    w = list(model.parameters())
    hidden = torch.relu(functional.conv2d(torch.relu(functional.conv2d(inputs, w[0], w[1])), w[2], w[3]))
    torch.testing.assert_close(model(inputs), functional.max_pool2d(hidden, 2).flatten(1) @ w[4].T + w[5])


def test_blockcnn_normalises_after_relu_and_applies_dropout_only_in_training():
    torch.manual_seed(0)
    model = models.blockcnn(CIFAR10)
    names = [type(layer).__name__ for layer in model]
    assert names[:8] == ["Conv2d", "ReLU", "GroupNorm", "Conv2d", "ReLU", "GroupNorm", "MaxPool2d", "Dropout"]
    assert [layer.p for layer in model if isinstance(layer, torch.nn.Dropout)] == [0.25] * 4
    inputs = torch.randn(4, 3, 32, 32)
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


SHAKESPEARE = Signature((80,), 65, 65, per_token=True)


def test_gpt_has_the_width_of_the_paper_and_requires_heads_that_divide_it():
    layer = 4 * 128 + dense(128, 384) + dense(128, 128) + dense(128, 512) + dense(512, 128)
    for tokens in (65, 80):
        model = models.gpt(Signature((80,), tokens, tokens))
        assert num_parameters(model) == 6 * layer + (tokens + 80) * 128 + 2 * 128 == 1_200_128 + 128 * tokens
    assert num_parameters(models.gpt(SHAKESPEARE, heads=4)) == num_parameters(models.gpt(SHAKESPEARE))
    with pytest.raises(ArgumentError, match="width: expected a multiple of 6 heads, got 128"):
        models.gpt(SHAKESPEARE, heads=6)


def test_gpt_is_initialised_like_gpt2():
    torch.manual_seed(0)
    model = models.gpt(SHAKESPEARE)
    assert model.head.weight is model.embedding.weight
    for layer in model.layers:
        for weight, std in (
            (layer.attention.joint.weight, 0.02),
            (layer.grow.weight, 0.02),
            (layer.attention.project.weight, 0.02 / math.sqrt(12)),
            (layer.shrink.weight, 0.02 / math.sqrt(12)),
        ):
            # The sample standard deviation of 16,384 normal numbers has a relative standard error of 0.0055.
            assert weight.std().item() == pytest.approx(std, rel=0.03)
        assert not layer.shrink.bias.any()
    # If the number of classes differs from the number of tokens, the last layer has its own weights.
    assert num_parameters(models.gpt(Signature((80,), 3, 65))) == num_parameters(model) + 3 * 128


def test_gpt_equals_transformer_layers_of_torch():
    torch.manual_seed(0)
    model = models.gpt(Signature((9,), 13, 13, per_token=True), width=8, heads=2, layers=2).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # The noise moves the parameters away from their initial values, where biases are 0 and scales are 1.
            parameter.add_(0.3 * torch.randn_like(parameter))
    tokens = torch.randint(0, 13, (3, 9))
    features = model.embedding.weight[tokens] + model.places.weight
    mask = torch.nn.Transformer.generate_square_subsequent_mask(9)
    for layer in model.layers:
        other = torch.nn.TransformerEncoderLayer(8, 2, 32, 0.1, "gelu", batch_first=True, norm_first=True).eval()
        pairs = {
            "self_attn.in_proj_": layer.attention.joint,
            "self_attn.out_proj.": layer.attention.project,
            "linear1.": layer.grow,
            "linear2.": layer.shrink,
            "norm1.": layer.attention_norm,
            "norm2.": layer.norm,
        }
        given = {f"{name}{kind}": getattr(part, kind) for name, part in pairs.items() for kind in ("weight", "bias")}
        other.load_state_dict(given)
        features = other(features, src_mask=mask, is_causal=True)
    scores = functional.layer_norm(features, (8,), model.norm.weight, model.norm.bias) @ model.embedding.weight.T
    torch.testing.assert_close(model(tokens), scores.transpose(1, 2))


def test_gpt_is_causal():
    torch.manual_seed(0)
    model = models.gpt(Signature((6,), 9, 9, per_token=True), width=8, heads=2, layers=2).eval()
    tokens = torch.arange(6)[None]
    later = tokens.clone()
    later[0, 4:] = 0
    here, there = model(tokens), model(later)
    torch.testing.assert_close(here[..., :4], there[..., :4])
    assert not torch.allclose(here[..., 4:], there[..., 4:])
    assert models.gpt(Signature((6,), 9, 9), width=8, heads=2)(tokens).shape == (1, 9)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: models.lenet5(MNIST), (1, 28, 28)),
        (lambda: models.cnn7x7(MNIST), (1, 28, 28)),
        (lambda: models.blockcnn(Signature((3, 8, 8), 10), dropout=0.0), (3, 8, 8)),
        (lambda: models.gpt(Signature((5,), 7, 7), width=8, heads=2, layers=1, dropout=0.0), (5,)),
    ],
    ids=["lenet5", "cnn7x7", "blockcnn", "gpt"],
)
def test_the_loss_of_a_point_equals_the_loss_of_the_loaded_model(make, shape):
    """The point contains the tied weights of `gpt` once."""
    torch.manual_seed(0)
    model = make()
    inputs = torch.randint(0, 7, (4, *shape)) if len(shape) == 1 else torch.randn(4, *shape)
    labels = torch.randint(0, 7, (4,))
    space = ParameterSpace.of(model)
    assert space.point(model).numel() == num_parameters(model)
    theta = space.point(model) + 0.1
    loss = space.loss(model, functional.cross_entropy)(theta, (inputs, labels))
    space.load(model, theta)
    torch.testing.assert_close(loss, functional.cross_entropy(model(inputs), labels))


@pytest.mark.parametrize("name", ["fedasync", "orthofl", "asyncbezier"])
def test_gpt_with_dropout_is_bitwise_equal_in_every_executor(name, tmp_path):
    (tmp_path / "input.txt").write_text(f"Romeo:\n{'to be or not ' * 30}\n\nJuliet:\n{'a rose is ' * 30}\n")
    made = load_dataset(f"shakespeare:{tmp_path},length=8", "gpt:width=16,heads=2,layers=1")
    federation = FederatedDataset.split(made, 2, partition=iid_partition, seed=0, batch=16)
    here = run(federation, method(name), num_updates=4, eval_every=2)
    assert here.rejected == 0
    assert here.accuracy[-1] > here.accuracy[0]
    assert run(federation, method(name), num_updates=4, eval_every=2, executor=processes(2)) == here


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: models.lenet5(Signature((1, 12, 28), 10)), "expected a data set of images .* at least 16 x 16 pixels"),
        (lambda: models.lenet5(Signature((5,), 7, 7)), "expected a data set of numbers"),
        (lambda: models.lenet5(MNIST, padding=3), "padding: expected one of 0, 1, 2; got 3"),
        (lambda: models.lenet5(MNIST, activation="rulu"), "activation: expected one of relu, tanh.*did you mean relu"),
        (lambda: models.cnn7x7(Signature((1, 8, 8), 10)), "at least 14 x 14 pixels"),
        (lambda: models.blockcnn(Signature((8,), 10)), "at least 8 x 8 pixels, got inputs of shape"),
        (lambda: models.blockcnn(CIFAR10, groups=5), "groups: expected a divisor of 32, got 5"),
        (lambda: models.blockcnn(CIFAR10, dropout=1.0), "dropout: expected"),
        (lambda: models.gpt(MNIST), "expected a data set of token sequences"),
        (lambda: models.gpt(SHAKESPEARE, layers=0), "layers: expected an integer >= 1"),
    ],
)
def test_unsuitable_data_and_options_are_rejected(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_models_can_be_selected_by_name(tmp_path):
    images = np.zeros((20, 28, 28), dtype=np.float32)
    np.savez(tmp_path / "images.npz", inputs=images[:, None], labels=np.arange(20) % 10)
    for text, count in (("lenet5:padding=2", 61_706), ("lenet5", 44_426), ("cnn7x7", 65_850)):
        assert num_parameters(load_dataset(f"npz:{tmp_path}/images.npz", text).model()) == count
