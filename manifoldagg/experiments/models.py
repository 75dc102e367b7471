"""Default models for data sets: multilayer perceptron, convolutional network, recurrent network and transformer."""

import torch
from torch import Tensor, nn

from manifoldagg._validation import check_choice, check_count, check_number
from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.dataset import Signature

__all__ = ["cnn", "gru", "mlp", "transformer"]

NORMS = ("none", "batch", "group")


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
    """Build a convolutional network with two convolutions and two dense layers (Manifold, Figure 5).

    Each 3 x 3 convolution is followed by ReLU and pooling by 2.

    Args:
        signature: the signature of a data set of images (channels, height, width) of at least 4 x 4 pixels.
        width: the number of channels of the first convolution. The second convolution has twice as many.
        dense: the number of units of the first dense layer.
        norm: the normalisation after each convolution: `"none"`, `"batch"`, or `"group"` with at most 8 groups.

    Example:
        >>> cnn(Signature((1, 28, 28), classes=10), norm="batch")(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 10])
    """
    _check_numbers(signature)
    check_choice("norm", norm, NORMS)
    check_count("width", width)
    check_count("dense", dense)
    if len(signature.shape) != 3 or min(signature.shape[1:]) < 4:
        raise ArgumentError(
            "expected a data set of images (channels, height, width) of at least 4 x 4 pixels, got inputs of shape "
            f"{signature.shape}; use mlp"
        )
    channels, height, across = signature.shape
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


def gru(signature: Signature, *, embedding: int = 16, hidden: int = 64, layers: int = 1) -> nn.Module:
    """Build a recurrent network with an embedding, gated recurrent units (GRU) and a linear layer.

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
    _check_tokens(signature)
    for name, count in (("width", width), ("heads", heads), ("layers", layers)):
        check_count(name, count)
    check_number("dropout", dropout, at_least=0, at_most=0.9)
    if width % heads:
        raise ArgumentError(f"width: expected a multiple of {heads} heads, got {width}")
    return _Transformer(signature, width, heads, layers, dropout)


class _Classifier(nn.Module):
    """Linear layer that maps features (samples, length, width) to scores.

    The scores are (samples, classes, length), or (samples, classes) if a sequence has one label.
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


def _check_numbers(signature: Signature) -> None:
    if signature.tokens:
        raise ArgumentError("expected a data set of numbers, got a data set of tokens; use gru or transformer")


def _check_tokens(signature: Signature) -> None:
    if not signature.tokens or len(signature.shape) != 1:
        raise ArgumentError(
            f"expected a data set of token sequences, got inputs of shape {signature.shape}; use mlp or cnn"
        )
