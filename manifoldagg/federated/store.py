"""Versions: every model that somebody still starts from, kept once."""

import torch
from torch import Tensor


class Versions:
    """Reference-counted models by version number.

    A model stays while something holds it. The storage of one that was freed is handed out again by `blank`,
    so that a steady run allocates nothing. The tensors never leave the server: it gives out copies.
    """

    def __init__(self, start: Tensor) -> None:
        self._models: dict[int, Tensor] = {0: start}
        self._holders: dict[int, int] = {0: 1}
        self._spare: Tensor | None = None

    def __len__(self) -> int:
        return len(self._models)

    def __getitem__(self, version: int) -> Tensor:
        return self._models[version]

    def add(self, version: int, model: Tensor) -> None:
        """Keep `model` as `version`, with one holder."""
        self._models[version], self._holders[version] = model, 1
        self._spare = None

    def hold(self, version: int) -> None:
        """Add a holder."""
        self._holders[version] += 1

    def release(self, version: int) -> None:
        """Take a holder away; the model goes with the last."""
        self._holders[version] -= 1
        if self._holders[version] == 0:
            del self._holders[version]
            self._spare = self._models.pop(version)

    def blank(self, like: Tensor) -> Tensor:
        """A tensor to write the next model into and then `add`; its values are arbitrary."""
        return torch.empty_like(like) if self._spare is None else self._spare
