"""Writing where parameters lie: a model and what is kept beside it, window by window, while their rows are in cache."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from manifoldagg.corrections.frame import Frame, Motion, Sum
from manifoldagg.kernels import Row, Tensors
from manifoldagg.kernels.windows import WINDOW
from manifoldagg.optim._memory import meets

__all__ = ["write"]

T = TypeVar("T", Motion, Sum)
Part = tuple[int, int, int]
"""Which tensor of a row, and from where to where in it."""


@dataclass(frozen=True)
class Window:
    """Some tensors of rows that follow one another, or a part of one."""

    parts: tuple[Part, ...]
    start: int

    def of(self, row: Row) -> Tensors:
        """The entries of a row that lie in it."""
        if isinstance(row, Tensor):
            cut = self.start
            found = []
            for _, a, b in self.parts:
                found.append(row[cut : cut + b - a])
                cut += b - a
            return Tensors(found)
        return Tensors([row[i].view(-1)[a:b] if b - a < row[i].numel() else row[i] for i, a, b in self.parts])


def write(motion: Motion | None, sums: Mapping[str, Sum], targets: Mapping[str, Tensors], out: Tensors) -> None:
    """Form a model in `out` and sums in their targets, which may be rows of theirs.

    Args:
        motion: that makes the model; `None`: it rests.
        sums: what a state keeps, by name.
        targets: where it goes, by the same names.
        out: the parameters.
    """
    rows = [*out, *(tensor for target in targets.values() for tensor in target)]
    frames = [one.frame for one in (motion, *sums.values()) if one is not None]
    for frame in frames:
        for row in (*frame.rows, *frame.minus):
            rows += row if isinstance(row, tuple) else []
    # What still reads the model, or what another sum will be written over, is formed apart.
    apart = len(sums) > 1 or any(_reads(one, out) for one in sums.values())
    lengths = out.lengths
    whole = out[0].is_cpu and all(tensor.is_contiguous() for tensor in rows)
    for window in _windows(lengths) if whole else [None]:
        places = {name: row if window is None else window.of(row) for name, row in targets.items()}
        parts = {name: _part(one, window, lengths) for name, one in sums.items()}
        formed = {name: one.formed(places[name].fresh()) for name, one in parts.items()} if apart else {}
        if motion is not None:
            _part(motion, window, lengths).formed(out if window is None else window.of(out))
        for name, one in parts.items():
            if name not in formed:
                one.formed(places[name])
                continue
            for tensor, value in zip(places[name], formed[name], strict=True):
                tensor.copy_(value)


def _reads(one: Sum, out: Tensors) -> bool:
    """Whether a sum is made of entries of the model, or of a gradient that lies there."""
    frame = one.frame
    used = [i for i in range(len(frame.rows)) if one.coefficients[..., i].any()]
    return any(i == frame.displacements or meets(row, out) for i in used for row in (frame.rows[i], frame.minus[i]))


def _windows(lengths: Sequence[int]) -> Iterator[Window]:
    """Windows over tensors of these lengths: large ones are cut, small ones go together."""
    width = WINDOW * torch.get_num_threads()
    parts: list[Part] = []
    start = held = 0
    for i, length in enumerate(lengths):
        if held + length > width and parts:
            yield Window(tuple(parts), start)
            parts, start, held = [], start + held, 0
        cut = 0
        while length - cut > width:
            yield Window(((i, cut, cut + width),), start)
            start += width
            cut += width
        parts.append((i, cut, length))
        held += length - cut
    if parts:
        yield Window(tuple(parts), start)


def _part(one: T, window: Window | None, lengths: Sequence[int]) -> T:
    """That of the entries in a window."""
    if window is None:
        return one
    frame = one.frame
    lines = one.coefficients
    segments = None
    if lines.ndim == 2 and len(lines) > 1:
        lines = lines[window.parts[0][0] : window.parts[-1][0] + 1]
        segments = {str(i): b - a for i, a, b in window.parts}
    elif lines.ndim == 2:
        lines = lines[0]
    made: Frame = replace(
        frame,
        rows=tuple([window.of(row) for row in frame.rows]),
        minus=tuple([None if row is None else window.of(row) for row in frame.minus]),
        segments=segments,
    )
    return replace(one, frame=made, coefficients=lines)
