"""The Gaussian mechanism: clipping of displacements, and noise on their sum."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manifoldagg.corrections import Frame
from manifoldagg.errors import RuleError

__all__ = ["GaussianMechanism", "derive_key"]

SAMPLE_BLOCK_SIZE = 2**18
"""The number of samples per call of the generator."""


@dataclass(frozen=True)
class GaussianMechanism:
    r"""Gaussian mechanism $\sum_i a_i \min(1, C / \|\Delta_i\|) \Delta_i + \sigma C z$, $z \sim N(0, I)$, $a_i \le 1$.

    Args:
        clip: the clipping norm C.
        noise: the noise multiplier $\sigma$.
        key: the secret key.
    """

    clip: float
    noise: float
    key: Sequence[int]

    def clipped_weight(self, weight: float, norm: float) -> tuple[float, float]:
        r"""Return $a \min(1, C / \|\Delta\|)$ for a displacement of this norm, and the second factor alone.

        Raises:
            RuleError: if a exceeds 1, for which the noise is not calibrated.
        """
        if weight > 1:
            raise RuleError(f"staleness: expected a weight of at most 1 under Private, got {weight:g}")
        factor = min(1.0, self.clip / norm) if norm > 0 else 1.0
        return weight * factor, factor

    def add_noise(
        self, frame: Frame, coefficients: list[float], scale: float, version: int
    ) -> tuple[Frame, list[float]]:
        """Add noise to the combination of frame rows with `coefficients`, as a further row in units of `scale`."""
        if not (self.noise and scale):
            return frame, coefficients
        total: Tensor = frame.materialize(coefficients)
        return frame.with_row("noise", self._sample_noise(total, version)), [
            *coefficients,
            self.noise * self.clip / scale,
        ]

    def _sample_noise(self, total: Tensor, version: int) -> Tensor:
        """Sample z from the key and the sum. Equal sums get equal noise, and different sums get different noise.

        A server that resumes from an older checkpoint computes different sums than before. If the noise were the same,
        it would cancel in the difference of the two models.
        """
        number = hashlib.blake2b(key=_key_bytes(self.key), digest_size=16)
        number.update(version.to_bytes(8, "little"))
        number.update(total.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(number.digest(), "little")))
        drawn = torch.empty(total.shape, dtype=total.dtype)
        for piece in drawn.split(SAMPLE_BLOCK_SIZE):
            piece.copy_(torch.from_numpy(generator.standard_normal(len(piece))))
        return drawn.to(total.device)


def derive_key(secret: bytes) -> list[int]:
    """Return the key for the state of a rule: 32-bit integers.

    Example:
        >>> len(derive_key(b"secret"))
        16
    """
    return [int(word) for word in np.frombuffer(hashlib.blake2b(secret).digest(), dtype="<u4")]


def _key_bytes(key: Sequence[int]) -> bytes:
    return np.array(key, dtype="<u4").tobytes()
