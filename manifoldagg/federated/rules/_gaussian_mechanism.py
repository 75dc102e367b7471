"""Clipping and Gaussian noise between displacements and their sum."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manifoldagg.corrections import Frame
from manifoldagg.errors import RuleError

__all__ = ["Mechanism", "key_of"]

BLOCK = 2**18
"""Numbers that are drawn at once."""


@dataclass(frozen=True)
class Mechanism:
    r"""$\sum_i a_i \min(1, C / \|\Delta_i\|)\, \Delta_i + \sigma C z$ with $z \sim N(0, I)$ and $a_i \le 1$.

    Args:
        clip: C.
        noise: $\sigma$.
        key: nobody else knows it.
    """

    clip: float
    noise: float
    key: Sequence[int]

    def share(self, share: float, length: float) -> tuple[float, float]:
        r"""$a \min(1, C / \|\Delta\|)$ of a displacement of this length, and its second factor.

        Raises:
            RuleError: if a is above 1, more than the noise is made for.
        """
        if share > 1:
            raise RuleError(f"staleness: expected a weight of at most 1 under Private, got {share:g}")
        factor = min(1.0, self.clip / length) if length > 0 else 1.0
        return share * factor, factor

    def noised(self, frame: Frame, line: list[float], unit: float, version: int) -> tuple[Frame, list[float]]:
        """The sum that `line` makes of a frame, with noise as one row more; in units of `unit`."""
        if not (self.noise and unit):
            return frame, line
        total: Tensor = frame.materialize(line)
        return frame.with_row("noise", self._drawn(total, version)), [*line, self.noise * self.clip / unit]

    def _drawn(self, total: Tensor, version: int) -> Tensor:
        """z: the same for the same sum, so that what is done again gives the same bits; of another sum another.

        A server that goes on from an older checkpoint meets other sums. With the noise of those that it has forgotten,
        the difference of two models would have none.
        """
        number = hashlib.blake2b(key=_bytes(self.key), digest_size=16)
        number.update(version.to_bytes(8, "little"))
        number.update(total.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(number.digest(), "little")))
        drawn = torch.empty(total.shape, dtype=total.dtype)
        for piece in drawn.split(BLOCK):
            piece.copy_(torch.from_numpy(generator.standard_normal(len(piece))))
        return drawn.to(total.device)


def key_of(secret: bytes) -> list[int]:
    """What a state keeps of it: numbers of 32 bits.

    Example:
        >>> len(key_of(b"secret"))
        16
    """
    return [int(word) for word in np.frombuffer(hashlib.blake2b(secret).digest(), dtype="<u4")]


def _bytes(key: Sequence[int]) -> bytes:
    return np.array(key, dtype="<u4").tobytes()
