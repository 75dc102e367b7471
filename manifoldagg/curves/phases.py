"""The two phases of a fit: their batches, their stopping criteria, and their state for resuming."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from manifoldagg._validation import check_count, check_number, short_repr
from manifoldagg.errors import ArgumentError

__all__ = ["Phases", "Schedule"]


@dataclass(frozen=True)
class Phases:
    """The lengths, the order and the early stopping of the two phases.

    The first trains the last point alone, the second the embedding.

    Args:
        epochs: passes over the batches in the first and in the second phase.
        steps: optimiser steps ($K_1$, $K - K_1$) in place of `epochs`; batches are cycled.
        alternate: let the phases take turns, a pass over the batches each; the inner control points keep their
            displacement from the chord when the end moves, and the optimiser forgets theirs before each turn. Flat
            spaces only.
        patience: end a phase when the running mean of its losses has not improved for so many steps; a phase that has
            ended so stays ended where a fit is resumed.
        plateau: the relative improvement that counts.
        callback: called as `callback(step, loss, phi)` after every step, counted from 0, with a copy of the points;
            the fit stops where it returns `True`.
        watch: called as `watch(point)` after every step of the first phase with the last point itself, which is to be
            read then, neither kept nor written: nothing is copied for it.

    Raises:
        ArgumentError: naming the option that is out of range.

    Example:
        >>> Phases(steps=(0, 200)).limits
        (0, 200)
    """

    epochs: tuple[int, int] = (2, 2)
    steps: tuple[int, int] | None = None
    alternate: bool = False
    patience: int | None = None
    plateau: float = 1e-3
    callback: Callable[[int, float, Tensor], object] | None = None
    watch: Callable[[Tensor], object] | None = None

    def __post_init__(self) -> None:
        for name, pair in (("epochs", self.epochs), ("steps", (0, 0) if self.steps is None else self.steps)):
            if not (isinstance(pair, Sequence) and len(pair) == 2):
                raise ArgumentError(f"{name}: expected a pair, first and second phase; got {short_repr(pair)}")
            for i, amount in enumerate(pair):
                check_count(f"{name}[{i}]", amount, at_least=0)
        if self.patience is not None:
            check_count("patience", self.patience)
        check_number("plateau", self.plateau, at_least=0)

    @classmethod
    def first(cls, epochs: int, steps: int | None = None) -> "Phases":
        """Return the first phase alone: ordinary training."""
        return cls((epochs, 0), None if steps is None else (steps, 0))

    @property
    def limits(self) -> tuple[int, int]:
        """The limits of each phase: steps if given, else passes."""
        return self.epochs if self.steps is None else self.steps


class Schedule:
    """The (phase, batch) of every step, phase 0 for the end point and 1 for the embedding.

    One phase after the other, or in turn, a pass over the batches each. A phase is done after its amount of steps or
    passes, or when its losses have reached a plateau. Where it stands can be asked for, and gone on from, between any
    two steps.

    Args:
        batches: iterated once a pass.
        phases: how long.
        generator: whose state at the beginning of a pass is kept, so that a pass that shuffles with it can be repeated.
        resume: from `state()`.

    Raises:
        ArgumentError: if the second phase of what is resumed had begun and the first one is to go on.

    Example:
        >>> list(Schedule("ab", Phases(steps=(3, 1))))
        [(0, 'a'), (0, 'b'), (0, 'a'), (1, 'a')]
    """

    def __init__(
        self,
        batches: Iterable[Any],
        phases: Phases,
        generator: torch.Generator | None = None,
        resume: Mapping[str, Any] | None = None,
    ) -> None:
        self.batches = batches
        self.phases = phases
        self.generator = generator
        self.progress = _Progress(**copy.deepcopy(dict(resume or {})))
        if not phases.alternate and self.progress.steps[1] and not self._finished(0):
            raise ArgumentError("resume: the second phase had begun; the first cannot be made longer")

    @property
    def converged(self) -> bool:
        """Whether every phase that had steps to take ended on a plateau."""
        asked = [done for done, amount in zip(self.progress.done, self.phases.limits, strict=True) if amount]
        return bool(asked) and all(asked)

    def state(self) -> dict[str, Any]:
        """Return the position in the schedule as numbers and tensors."""
        return asdict(self.progress)

    def record(self, loss: float) -> None:
        r"""Record the loss of the latest step, and end its phase on a plateau.

        Compared are running means $a \leftarrow a + (\ell - a) / n$, n the patience, relative to the best of them.
        """
        now = self.progress
        patience = self.phases.patience
        if patience is None:
            return
        last = now.mean[now.phase]
        best = now.best[now.phase]
        mean = loss if last is None else last + (loss - last) / patience
        # inf - inf is NaN, to which nothing compares: the first mean is the best one whatever it is.
        better = best == math.inf or mean < best - self.phases.plateau * abs(best)
        now.mean[now.phase] = mean
        now.best[now.phase] = mean if better else best
        now.stale[now.phase] = 0 if better else now.stale[now.phase] + 1
        now.done[now.phase] = now.stale[now.phase] >= patience

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        now = self.progress
        while True:
            order = [1 - now.phase, now.phase] if self.phases.alternate and now.phase >= 0 else [0, 1]
            if now.position and not self._finished(now.phase):
                order = [now.phase]
            phase = next((phase for phase in order if not self._finished(phase)), None)
            if phase is None:
                return
            if phase != now.phase:
                now.position = 0
            now.phase = phase
            yield from self._remaining_batches()

    def _remaining_batches(self) -> Iterator[tuple[int, Any]]:
        """The batches of one pass, but those that were taken already."""
        now = self.progress
        taken = now.position
        standing = None if self.generator is None else self.generator.get_state()
        # A loader that shuffles draws its order when it is iterated: it has to draw the same one again, and what is
        # drawn after the batches that were taken comes from where the fit stood.
        if taken:
            self._rewind(now.opening)
        else:
            now.opening = standing
        iterator = iter(self.batches)
        if iterator is self.batches:
            raise ArgumentError("batches: expected a re-iterable object, such as a list; got an iterator")
        if taken:
            seen = sum(1 for _ in islice(iterator, taken))
            if seen < taken:
                raise ArgumentError(f"batches: expected at least {taken}, as when the fit was stopped; got {seen}")
            self._rewind(standing)
        for batch in iterator:
            now.position += 1
            now.steps[now.phase] += 1
            yield now.phase, batch
            if now.done[now.phase] or (self.phases.steps is not None and self._finished(now.phase)):
                return
        if now.position == 0:
            raise ArgumentError("batches: expected at least one batch, got none")
        now.passes[now.phase] += 1
        now.position = 0

    def _finished(self, phase: int) -> bool:
        counted = self.progress.passes if self.phases.steps is None else self.progress.steps
        return self.progress.done[phase] or counted[phase] >= self.phases.limits[phase]

    def _rewind(self, state: Tensor | None) -> None:
        if self.generator is not None and state is not None:
            self.generator.set_state(state)


@dataclass
class _Progress:
    """How far a schedule is: what it counts for both phases, and where it is in a pass."""

    steps: list[int] = field(default_factory=lambda: [0, 0])
    passes: list[int] = field(default_factory=lambda: [0, 0])
    done: list[bool] = field(default_factory=lambda: [False, False])
    mean: list[float | None] = field(default_factory=lambda: [None, None])
    best: list[float] = field(default_factory=lambda: [math.inf, math.inf])
    stale: list[int] = field(default_factory=lambda: [0, 0])
    phase: int = -1
    position: int = 0
    opening: Tensor | None = None
