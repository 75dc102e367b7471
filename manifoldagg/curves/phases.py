"""The schedule of a fit: the batches of each step, early stopping, and the state for resuming.

A fit trains the control points of a curve of models, or of another map from coordinates to models. Each control point
is a model. The fit has two phases. The first phase trains only the last control point, like an ordinary model. The
second phase trains all free control points, which are usually those between the first and the last one.
"""

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
    """Settings for the two phases of a fit: their lengths, whether they alternate, and their early stopping.

    A fit trains the control points of a curve of models, or of another map from coordinates to models. The first phase
    trains only the last control point. The second phase trains all free control points, which are by default the points
    between the first and the last one.

    Args:
        epochs: the number of passes over the batches in the first and in the second phase.
        steps: the number of optimiser steps ($K_1$, $K - K_1$), instead of `epochs`. The batches are repeated as often
            as necessary.
        alternate: whether the phases alternate after each pass over the batches. The inner control points then retain
            their displacements from the chord when the end point moves. The optimiser state of these displacements is
            reset before each pass of the second phase. The option requires a flat space.
        patience: a phase ends after this number of steps without an improvement of the running mean of the losses. A
            resumed fit does not continue such a phase.
        plateau: the minimum relative improvement.
        callback: a function `callback(step, loss, phi)` that is called after every step with a copy of the points. The
            steps start at 0. If it returns `True`, the fit stops.
        watch: a function `watch(point)` that is called after every step of the first phase. `point` is the last point
            itself and not a copy. The function must not store or modify `point`.

    Raises:
        ArgumentError: if an option is invalid.

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
                raise ArgumentError(f"{name}: expected a pair for the two phases, got {short_repr(pair)}")
            for i, amount in enumerate(pair):
                check_count(f"{name}[{i}]", amount, at_least=0)
        if self.patience is not None:
            check_count("patience", self.patience)
        check_number("plateau", self.plateau, at_least=0)

    @classmethod
    def first(cls, epochs: int, steps: int | None = None) -> "Phases":
        """Return phases with only the first phase, which is ordinary training."""
        return cls((epochs, 0), None if steps is None else (steps, 0))

    @property
    def limits(self) -> tuple[int, int]:
        """The limits of both phases: `steps` if given, and `epochs` otherwise."""
        return self.epochs if self.steps is None else self.steps


class Schedule:
    """An iterable that yields the phase (0 or 1) and the batch of each step of a fit.

    A fit has two phases, which train different control points. By default, phase 1 starts after the end of phase 0.
    With the option `alternate`, the two phases alternate after each pass over the batches. Each phase has a limit,
    which is a number of steps or of passes. A phase ends before its limit if its losses reach a plateau.

    To interrupt a fit, store the result of the method `state` between two steps. To continue at the same position, pass
    this result as the argument `resume` of a new `Schedule`.

    Args:
        batches: a re-iterable object, which is iterated once for each pass.
        phases: the lengths of the phases.
        generator: the generator of a shuffling loader. Its state at the start of a pass is stored, so that a resumed
            schedule can repeat the order of the batches.
        resume: a result of `state`.

    Raises:
        ArgumentError: if the resumed schedule is in its second phase, and the limit of the first phase is larger.

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
        # The lists of the progress are modified in place, so the state of the caller is copied.
        self.progress = _Progress(**copy.deepcopy(dict(resume or {})))
        if not phases.alternate and self.progress.steps[1] and not self._finished(0):
            raise ArgumentError("resume: expected a first phase of the same length, got a longer one after its end")

    @property
    def converged(self) -> bool:
        """Whether every phase with at least one step ended on a plateau."""
        ended = [done for done, limit in zip(self.progress.done, self.phases.limits, strict=True) if limit]
        return bool(ended) and all(ended)

    def state(self) -> dict[str, Any]:
        """Return the position in the schedule as numbers and tensors."""
        return asdict(self.progress)

    def record(self, loss: float) -> None:
        r"""Record the loss of the latest step, and end the current phase of the fit if its losses stop decreasing.

        Let $n$ be the option `patience`. Each loss $\ell$ changes the running mean $a$ to $a + (\ell - a) / n$. The
        phase ends if this mean has not improved for $n$ steps. An improvement is a mean below $b - c |b|$, where $b$ is
        the mean at the previous improvement and $c$ is the option `plateau`. If `patience` is `None`, no phase ends
        early.
        """
        now = self.progress
        patience = self.phases.patience
        if patience is None:
            return
        last = now.mean[now.phase]
        best = now.best[now.phase]
        mean = loss if last is None else last + (loss - last) / patience
        # The first mean is always the best mean. The comparison would be false, because inf - inf is NaN.
        better = best == math.inf or mean < best - self.phases.plateau * abs(best)
        now.mean[now.phase] = mean
        now.best[now.phase] = mean if better else best
        now.stale[now.phase] = 0 if better else now.stale[now.phase] + 1
        now.done[now.phase] = now.stale[now.phase] >= patience

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        now = self.progress
        while True:
            # Alternating phases prefer the other phase, and continue with the same phase if the other has ended.
            order = [1 - now.phase, now.phase] if self.phases.alternate and now.phase >= 0 else [0, 1]
            # A resumed schedule first finishes the pass in which it was stopped.
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
        """Yield the batches of the current pass that are not yet used."""
        now = self.progress
        used = now.position
        current = None if self.generator is None else self.generator.get_state()
        # A shuffling loader draws its order at the start of the iteration. To repeat this order, the generator is reset
        # to the start of the pass. After the used batches are skipped, it is set to the state at which the fit stopped.
        if used:
            self._rewind(now.opening)
        else:
            now.opening = current
        iterator = iter(self.batches)
        # An iterator is its own iterator. It could not be iterated again in the next pass.
        if iterator is self.batches:
            raise ArgumentError("batches: expected a re-iterable object, such as a list, got an iterator")
        if used:
            skipped = sum(1 for _ in islice(iterator, used))
            if skipped < used:
                raise ArgumentError(f"batches: expected at least the {used} batches of the stopped fit, got {skipped}")
            self._rewind(current)
        for batch in iterator:
            now.position += 1
            now.steps[now.phase] += 1
            yield now.phase, batch
            # A limit in steps can end a phase within a pass. The position then remains, so that a resumed fit continues
            # this pass.
            if now.done[now.phase] or (self.phases.steps is not None and self._finished(now.phase)):
                return
        if now.position == 0:
            raise ArgumentError("batches: expected at least one batch, got an empty iterable")
        now.passes[now.phase] += 1
        now.position = 0

    def _finished(self, phase: int) -> bool:
        """Return whether a phase has reached its limit or a plateau."""
        counted = self.progress.passes if self.phases.steps is None else self.progress.steps
        return self.progress.done[phase] or counted[phase] >= self.phases.limits[phase]

    def _rewind(self, state: Tensor | None) -> None:
        """Set the generator to an earlier state, if there is a generator and a stored state."""
        if self.generator is not None and state is not None:
            self.generator.set_state(state)


@dataclass
class _Progress:
    """The counters of a schedule for both phases, and its position in the current pass."""

    steps: list[int] = field(default_factory=lambda: [0, 0])
    passes: list[int] = field(default_factory=lambda: [0, 0])
    done: list[bool] = field(default_factory=lambda: [False, False])
    mean: list[float | None] = field(default_factory=lambda: [None, None])
    best: list[float] = field(default_factory=lambda: [math.inf, math.inf])
    stale: list[int] = field(default_factory=lambda: [0, 0])
    phase: int = -1  # before the first step
    position: int = 0
    opening: Tensor | None = None
