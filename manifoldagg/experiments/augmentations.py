"""Data augmentations for the minibatches of local training.

An augmentation is a function of the inputs, the labels and a random generator. To use it, set it as the field `augment`
of a data set.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from manifoldagg._validation import check_count, check_number
from manifoldagg.errors import ArgumentError

__all__ = ["cropflip"]


def cropflip(
    inputs: Tensor, labels: Tensor, generator: torch.Generator, *, padding: int = 4, flip: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Crop and mirror images at random, as is common for CIFAR-10 and CIFAR-100.

    Each image is padded with zeros on all sides, and then cropped to its original size at a random position. With
    probability `flip`, the image is also mirrored left to right.

    Args:
        inputs: the images (samples, channels, height, width).
        labels: the labels (samples, ...), which do not change.
        generator: the generator. It draws three numbers for each image.
        padding: the number of pixels on each side.
        flip: the probability of mirroring, in [0, 1].

    Returns:
        The new images and the labels.

    Raises:
        ArgumentError: if the inputs are not images, or an option is out of range.

    Example:
        >>> images, labels = torch.arange(18.0).view(2, 1, 3, 3), torch.tensor([0, 1])
        >>> moved, _ = cropflip(images, labels, torch.Generator().manual_seed(0), padding=0, flip=1)
        >>> moved[0, 0].tolist()
        [[2.0, 1.0, 0.0], [5.0, 4.0, 3.0], [8.0, 7.0, 6.0]]
    """
    check_count("padding", padding, at_least=0)
    check_number("flip", flip, at_least=0, at_most=1)
    if inputs.ndim != 4:
        raise ArgumentError(
            f"inputs: expected images (samples, channels, height, width), got shape {tuple(inputs.shape)}"
        )
    samples, _, height, width = inputs.shape
    top, left = (torch.randint(2 * padding + 1, (samples, 1), generator=generator) for _ in range(2))
    mirrored = torch.rand(samples, 1, generator=generator) < flip
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    columns = torch.where(mirrored, columns.flip(1), columns)
    # Advanced indices around a slice move the channels to the end: (samples, height, width, channels).
    places = torch.arange(samples)[:, None, None], slice(None), rows[:, :, None], columns[:, None, :]
    return pad(inputs, (padding,) * 4)[places].movedim(-1, 1).contiguous(), labels
