"""Neural networks for the experiments: a perceptron, convolutional networks, a recurrent network and transformers.

`mlp`, `cnn` and `gru` are the default models of data sets. Four other functions build the models of published papers:

- `lenet5`: *Orthogonal Calibration for Asynchronous Federated Learning*
- `cnn7x7` and `blockcnn`: *Optimizing Asynchronous Federated Learning*
- `gpt`: *Aggregation on Learnable Manifolds for Asynchronous Federated Optimisation*
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from manifoldagg._validation import check_choice, check_count, check_number
from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.dataset import Signature

__all__ = ["blockcnn", "cnn", "cnn7x7", "gpt", "gru", "lenet5", "mlp", "transformer"]

NORMS = ("none", "batch", "group")
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh}


def mlp(signature: Signature, *, hidden: int = 64) -> nn.Module:
    """Build a multilayer perceptron with one hidden ReLU layer, for inputs of any shape.

    Args:
        signature: the signature of the data set.
        hidden: the number of units.

    Example:
        >>> mlp(Signature((4,), classes=3))(torch.zeros(5, 4)).shape
        torch.Size([5, 3])
    """
    _check_numbers(signature)
    check_count("hidden", hidden)
    size = torch.Size(signature.shape).numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, signature.classes))


def cnn(signature: Signature, *, width: int = 16, dense: int = 64, norm: str = "none") -> nn.Module:
    """Build a convolutional network with two convolutions and two dense layers.

    Each convolution has a 3 x 3 kernel, and is followed by ReLU and 2 x 2 max pooling.

    Args:
        signature: the signature of a data set of images (channels, height, width) of at least 4 x 4 pixels.
        width: the number of channels of the first convolution. The second convolution has twice as many.
        dense: the number of units of the first dense layer.
        norm: the normalisation after each convolution: `"none"`, `"batch"`, or `"group"` with at most 8 groups.

    Source: Manifold Figure 5, which shows such a network.

    Example:
        >>> cnn(Signature((1, 28, 28), classes=10), norm="batch")(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 10])
    """
    channels, height, across = _check_images(signature, 4)
    check_choice("norm", norm, NORMS)
    check_count("width", width)
    check_count("dense", dense)
    layers: list[nn.Module] = []
    for before, after in ((channels, width), (width, 2 * width)):
        layers.append(nn.Conv2d(before, after, 3, padding=1))
        if norm == "batch":
            layers.append(nn.BatchNorm2d(after))
        elif norm == "group":
            layers.append(nn.GroupNorm(max(g for g in range(1, 9) if after % g == 0), after))
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    left = 2 * width * (height // 4) * (across // 4)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(left, dense), nn.ReLU(), nn.Linear(dense, signature.classes))


def lenet5(signature: Signature, *, padding: int = 0, activation: str = "relu") -> nn.Module:
    """Build LeNet-5 with two 5 x 5 convolutions and three dense layers.

    The convolutions have 6 and 16 channels. Each one is followed by the activation and 2 x 2 max pooling. The dense
    layers have 120, 84 and `classes` units.

    On grey images of 28 x 28 pixels with 10 classes, the model has 44,426 parameters. With `padding=2`, it has 61,706
    parameters, as many as the original LeNet-5 for images of 32 x 32 pixels. The original differs from this model: it
    has scaled tanh activations, trainable average pooling and a sparse second convolution.

    Args:
        signature: the signature of a data set of images (channels, height, width) of at least 16 x 16 pixels.
        padding: the number of pixels around the image in the first convolution: 0, 1 or 2.
        activation: `"relu"` or `"tanh"`.

    Source: OrthoFL Table 3 and Report §3, which do not state the activation and the pooling. OrthoFL states 44 thousand
    parameters.

    Example:
        >>> model = lenet5(Signature((1, 28, 28), classes=10))
        >>> sum(parameter.numel() for parameter in model.parameters())
        44426
    """
    channels, height, width = _check_images(signature, 16)
    check_choice("padding", padding, (0, 1, 2))
    act = ACTIVATIONS[check_choice("activation", activation, ACTIVATIONS)]
    left = [((side + 2 * padding - 4) // 2 - 4) // 2 for side in (height, width)]
    return nn.Sequential(
        *(nn.Conv2d(channels, 6, 5, padding=padding), act(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), act(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(16 * left[0] * left[1], 120), act(), nn.Linear(120, 84), act()),
        nn.Linear(84, signature.classes),
    )


def cnn7x7(signature: Signature) -> nn.Module:
    """Build the network of the paper *Optimizing Asynchronous Federated Learning* for Fashion-MNIST and KMNIST.

    Two 7 x 7 convolutions without padding have 20 and 40 channels, and each is followed by ReLU. The last two layers
    are 2 x 2 max pooling and a dense layer. There is no softmax layer, because the cross-entropy loss contains the
    softmax. On images of 28 x 28 pixels with 10 classes, the model has 65,850 parameters. The paper states neither the
    number of parameters nor the padding.

    Args:
        signature: the signature of a data set of images (channels, height, width) of at least 14 x 14 pixels.

    Source: Queue G.1.

    Example:
        >>> model = cnn7x7(Signature((1, 28, 28), classes=10))
        >>> sum(parameter.numel() for parameter in model.parameters())
        65850
    """
    channels, height, width = _check_images(signature, 14)
    return nn.Sequential(
        *(nn.Conv2d(channels, 20, 7), nn.ReLU(), nn.Conv2d(20, 40, 7), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten()),
        nn.Linear(40 * ((height - 12) // 2) * ((width - 12) // 2), signature.classes),
    )


def blockcnn(signature: Signature, *, groups: int = 8, dropout: float = 0.25) -> nn.Module:
    """Build the network of the paper *Optimizing Asynchronous Federated Learning* for CIFAR-10 and CIFAR-100.

    The network has three blocks with 32, 64 and 128 channels. Each block contains two 3 x 3 convolutions, each followed
    by ReLU and group normalisation. Each block ends with 2 x 2 max pooling and dropout. Two dense layers follow the
    blocks. The first one has 128 units, ReLU and dropout, and the second one computes the class scores.

    On images of 3 x 32 x 32 pixels with 10 classes, the model has 551,466 parameters. The paper does not state this
    number, the padding (here 1), the number of groups (by default 8), or whether ReLU follows the first dense layer.

    Args:
        signature: the signature of a data set of images (channels, height, width) of at least 8 x 8 pixels.
        groups: the number of groups of each normalisation, a divisor of 32.
        dropout: the dropout rate.

    Source: Queue G.1.

    Example:
        >>> model = blockcnn(Signature((3, 32, 32), classes=10))
        >>> sum(parameter.numel() for parameter in model.parameters())
        551466
    """
    channels, height, width = _check_images(signature, 8)
    check_number("dropout", dropout, at_least=0, at_most=0.9)
    if 32 % check_count("groups", groups):
        raise ArgumentError(f"groups: expected a divisor of 32, got {groups}")
    layers: list[nn.Module] = []
    for before, after in ((channels, 32), (32, 64), (64, 128)):
        for inner in (before, after):
            layers += [nn.Conv2d(inner, after, 3, padding=1), nn.ReLU(), nn.GroupNorm(groups, after)]
        layers += [nn.MaxPool2d(2), nn.Dropout(dropout)]
    return nn.Sequential(
        *(*layers, nn.Flatten(), nn.Linear(128 * (height // 8) * (width // 8), 128), nn.ReLU()),
        *(nn.Dropout(dropout), nn.Linear(128, signature.classes)),
    )


def gru(signature: Signature, *, embedding: int = 16, hidden: int = 64, layers: int = 1) -> nn.Module:
    """Build a recurrent network: an embedding, gated recurrent units (GRU) and a linear layer.

    Args:
        signature: the signature of a data set of tokens.
        embedding: the size of an embedding.
        hidden: the number of units of a recurrent layer.
        layers: the number of recurrent layers.

    Example:
        >>> gru(Signature((80,), classes=65, tokens=65, per_token=True))(torch.zeros(5, 80, dtype=torch.int64)).shape
        torch.Size([5, 65, 80])
    """
    _check_tokens(signature)
    for name, count in (("embedding", embedding), ("hidden", hidden), ("layers", layers)):
        check_count(name, count)
    return _Recurrent(signature, embedding, hidden, layers)


def transformer(
    signature: Signature, *, width: int = 64, heads: int = 4, layers: int = 2, dropout: float = 0.0
) -> nn.Module:
    """Build a causal transformer with learned positions.

    Args:
        signature: the signature of a data set of tokens.
        width: the size of an embedding, a multiple of `heads`. The feed-forward layers are four times as wide.
        heads: the number of attention heads.
        layers: the number of layers.
        dropout: the dropout rate.

    Example:
        >>> transformer(Signature((8,), classes=5, tokens=5))(torch.zeros(3, 8, dtype=torch.int64)).shape
        torch.Size([3, 5])
    """
    _check_transformer(signature, width, heads, layers, dropout)
    return _Transformer(signature, width, heads, layers, dropout)


def gpt(signature: Signature, *, width: int = 128, heads: int = 8, layers: int = 6, dropout: float = 0.1) -> nn.Module:
    """Build a GPT-2 with the width and the number of layers of Manifold's Shakespeare experiment (Manifold B.2).

    Each layer applies layer normalisation, causal attention, layer normalisation and a GELU network of four times the
    width, with two residual connections. As in GPT-2, the weights have the standard deviation 0.02. The weights at the
    end of a residual branch are smaller by the factor `1 / sqrt(2 * layers)`. If there is one class for each token, the
    last layer shares its weights with the embedding.

    The paper states 6 heads, which do not divide the width of 128. nanoGPT rejects such a model, so the default is 8
    heads. The number of parameters does not depend on the number of heads. With V tokens and sequences of 80 tokens,
    the model has 1,200,128 + 128 V parameters. The paper does not state a number.

    Args:
        signature: the signature of a data set of tokens.
        width: the size of an embedding, a multiple of `heads`.
        heads: the number of attention heads.
        layers: the number of layers.
        dropout: the dropout rate of the embeddings, of the attention weights, and at the end of each residual branch.

    Example:
        >>> model = gpt(Signature((80,), classes=65, tokens=65, per_token=True))
        >>> sum(parameter.numel() for parameter in model.parameters())
        1208448
    """
    _check_transformer(signature, width, heads, layers, dropout)
    return _GPT(signature, width, heads, layers, dropout)


class _Classifier(nn.Module):
    """A linear layer that computes class scores from features (samples, length, width).

    If each token has a label, the scores have the shape (samples, classes, length). Otherwise, they are computed from
    the last token of each sequence and have the shape (samples, classes).
    """

    def __init__(self, signature: Signature, width: int) -> None:
        super().__init__()
        self.per_token = signature.per_token
        self.head = nn.Linear(width, signature.classes)

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.head(features if self.per_token else features[:, -1])
        return scores.transpose(1, 2) if self.per_token else scores


class _Recurrent(nn.Module):
    def __init__(self, signature: Signature, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(signature.tokens, embedding)
        self.cells = nn.GRU(embedding, hidden, layers, batch_first=True)
        self.classifier = _Classifier(signature, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        features, _ = self.cells(self.embedding(tokens))
        scores: Tensor = self.classifier(features)
        return scores


class _Transformer(nn.Module):
    def __init__(self, signature: Signature, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(signature.tokens, width)
        self.places = nn.Parameter(0.02 * torch.randn(signature.shape[0], width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.classifier = _Classifier(signature, width)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        features = self.layers(self.embedding(tokens) + self.places[:length], mask=later, is_causal=True)
        scores: Tensor = self.classifier(features)
        return scores


class _GPT(nn.Module):
    def __init__(self, signature: Signature, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(signature.tokens, width)
        self.places = nn.Embedding(signature.shape[0], width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(*(_GPTLayer(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, signature.classes, bias=False)
        self.per_token = signature.per_token
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:
                at_end = name.endswith(("attention.project.weight", "shrink.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if at_end else 0.02)
        if signature.classes == signature.tokens:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        features = self.norm(self.layers(self.dropout(self.embedding(tokens) + self.places(places))))
        scores: Tensor = self.head(features if self.per_token else features[:, -1])
        return scores.transpose(1, 2) if self.per_token else scores


class _GPTLayer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.norm = nn.LayerNorm(width)
        self.attention = _CausalAttention(width, heads, dropout)
        self.grow = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)
        self.activation = nn.GELU()
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor) -> Tensor:
        features = features + self.dropout(self.attention(self.attention_norm(features)))
        hidden: Tensor = self.dropout(self.shrink(self.activation(self.grow(self.norm(features)))))
        return features + hidden


class _CausalAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.rate = dropout
        self.joint = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, features: Tensor) -> Tensor:
        # Each of the three tensors has the shape (samples, heads, length, width / heads).
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.joint(features).chunk(3, -1)
        )
        rate = self.rate if self.training else 0.0
        mixed = scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        projected: Tensor = self.project(mixed.transpose(1, 2).flatten(-2))
        return projected


def _check_transformer(signature: Signature, width: int, heads: int, layers: int, dropout: float) -> None:
    _check_tokens(signature)
    for name, count in (("width", width), ("heads", heads), ("layers", layers)):
        check_count(name, count)
    check_number("dropout", dropout, at_least=0, at_most=0.9)
    if width % heads:
        raise ArgumentError(f"width: expected a multiple of {heads} heads, got {width}")


def _check_images(signature: Signature, pixels: int) -> tuple[int, int, int]:
    """Check the minimum size of images, and return their channels, height and width."""
    _check_numbers(signature)
    if len(signature.shape) != 3 or min(signature.shape[1:]) < pixels:
        raise ArgumentError(
            f"expected a data set of images (channels, height, width) of at least {pixels} x {pixels} pixels, got "
            f"inputs of shape {signature.shape}; use mlp"
        )
    channels, height, width = signature.shape
    return channels, height, width


def _check_numbers(signature: Signature) -> None:
    if signature.tokens:
        raise ArgumentError("expected a data set of numbers, got a data set of tokens; use gru or transformer")


def _check_tokens(signature: Signature) -> None:
    if not signature.tokens or len(signature.shape) != 1:
        raise ArgumentError(
            f"expected a data set of token sequences, got inputs of shape {signature.shape}; use mlp or cnn"
        )
