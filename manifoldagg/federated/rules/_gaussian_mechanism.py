"""Gaussian mechanism of differential privacy: clipped displacements, and noise on their sum."""

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
"""The number of samples that one call of the generator draws."""


@dataclass(frozen=True)
class GaussianMechanism:
    r"""Gaussian mechanism of differential privacy for a weighted sum of displacements.

    The mechanism clips each displacement $\Delta_i$ to the norm $C$, and adds Gaussian noise to the weighted sum:

    $$\sum_i a_i \min\Bigl(1, \frac{C}{\|\Delta_i\|}\Bigr) \Delta_i + \sigma C z, \qquad z \sim N(0, I).$$

    Here, $a_i$ is the weight of $\Delta_i$, and $\sigma$ is the noise multiplier. Each weight is at most 1, so one
    displacement changes the sum by at most $C$.

    Args:
        clip: the clipping norm C.
        noise: the noise multiplier $\sigma$.
        key: the secret key.
    """

    clip: float
    noise: float
    key: Sequence[int]

    def clipped_weight(self, weight: float, norm: float) -> tuple[float, float]:
        r"""Return $a \min(1, C / \|\Delta\|)$ and the clipping factor $\min(1, C / \|\Delta\|)$.

        Args:
            weight: the weight $a$ of the displacement.
            norm: the norm of the displacement.

        Raises:
            RuleError: if the weight is above 1, because the noise is calibrated for weights of at most 1.
        """
        if weight > 1:
            raise RuleError(f"staleness: expected a weight of at most 1 under Private, got {weight:g}")
        factor = min(1.0, self.clip / norm) if norm > 0 else 1.0
        return weight * factor, factor

    def add_noise(
        self, frame: Frame, coefficients: list[float], scale: float, version: int
    ) -> tuple[Frame, list[float]]:
        r"""Add the noise $\sigma C z$ as a further row to a linear combination of frame rows.

        Args:
            frame: the frame.
            coefficients: the coefficients of the combination.
            scale: the unit of the coefficients.
            version: the version of the model, which enters the key of the noise.

        Returns:
            The frame with the noise as an additional row, and the coefficients of all rows.
        """
        if not (self.noise and scale):
            return frame, coefficients
        total: Tensor = frame.materialize(coefficients)
        return frame.with_row("noise", self._sample_noise(total, version)), [
            *coefficients,
            self.noise * self.clip / scale,
        ]

    def _sample_noise(self, total: Tensor, version: int) -> Tensor:
        """Sample standard normal noise with a seed from the secret key, `version` and `total`."""
        number = hashlib.blake2b(key=_key_bytes(self.key), digest_size=16)
        number.update(version.to_bytes(8, "little"))
        # A server that resumes from an older checkpoint can compute the same version a second time from other updates.
        # With the same noise, the difference between the two models would reveal the updates. The seed therefore
        # depends on the sum of the updates.
        number.update(total.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(number.digest(), "little")))
        drawn = torch.empty(total.shape, dtype=total.dtype)
        for piece in drawn.split(SAMPLE_BLOCK_SIZE):
            piece.copy_(torch.from_numpy(generator.standard_normal(len(piece))))
        return drawn.to(total.device)


def derive_key(secret: bytes) -> list[int]:
    """Derive the key of the noise generator from a secret.

    The key is a list of 32-bit integers, so the state of a rule can contain it.

    Example:
        >>> len(derive_key(b"secret"))
        16
    """
    return [int(word) for word in np.frombuffer(hashlib.blake2b(secret).digest(), dtype="<u4")]


def _key_bytes(key: Sequence[int]) -> bytes:
    return np.array(key, dtype="<u4").tobytes()
