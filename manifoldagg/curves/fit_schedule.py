"""The order of a fit: which batch comes in which phase, when a phase has done enough, and how to come back to it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from manifoldagg.errors import ArgumentError

Phases = tuple[int, int]


class Schedule:
    """(phase, batch) of every step, phase 0 for the end point and 1 for the embedding.

    One phase after the other, or in turn, a pass over the batches each. A phase is done after its amount of steps or
    passes, or when `done` is set. Where it stands can be asked for, and gone on from, between any two steps.

    Args:
        batches: iterated once a pass.
        amounts: of either phase.
        count_steps: whether amounts are steps; passes otherwise.
        alternate: whether the phases take turns.
        generator: whose state at the beginning of a pass is kept, so that a pass that shuffles with it can be repeated.
        resume: from `state()`.

    Raises:
        ArgumentError: if the second phase of what is resumed had begun and the first one is to go on.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        amounts: Phases,
        *,
        count_steps: bool,
        alternate: bool,
        generator: torch.Generator | None,
        resume: Mapping[str, Any] | None = None,
    ) -> None:
        self.batches, self.amounts, self.generator = batches, amounts, generator
        self.count_steps, self.alternate = count_steps, alternate
        self.steps, self.passes, self.done = [0, 0], [0, 0], [False, False]
        self.phase, self.position = -1, 0
        self.opening: torch.Tensor | None = None
        if resume is not None:
            self.steps, self.passes, self.done = (list(resume[key]) for key in ("steps", "passes", "done"))
            self.phase, self.position, self.opening = resume["phase"], resume["position"], resume["opening"]
            if not alternate and self.steps[1] and not self._finished(0):
                raise ArgumentError("resume: the second phase had begun; the first cannot be made longer")

    def state(self) -> dict[str, Any]:
        """Where it stands, in numbers and tensors."""
        return {
            "steps": list(self.steps),
            "passes": list(self.passes),
            "done": list(self.done),
            "phase": self.phase,
            "position": self.position,
            "opening": self.opening,
        }

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        while True:
            order = [0, 1] if not self.alternate or self.phase < 0 else [1 - self.phase, self.phase]
            if self.position and not self._finished(self.phase):
                order = [self.phase]
            phase = next((phase for phase in order if not self._finished(phase)), None)
            if phase is None:
                return
            if phase != self.phase:
                self.position = 0
            self.phase = phase
            yield from self._pass(phase)

    def _pass(self, phase: int) -> Iterator[tuple[int, Any]]:
        """The batches of one pass, but those that were taken already."""
        taken, standing, seen = self.position, _state(self.generator), 0
        if taken:
            _set(self.generator, self.opening)
        else:
            self.opening = standing
        iterator = iter(self.batches)
        if iterator is self.batches:
            raise ArgumentError("batches: expected what can be iterated again, such as a list; got an iterator")
        for seen, batch in enumerate(iterator, 1):
            if seen == taken:
                _set(self.generator, standing)
            if seen <= taken:
                continue
            self.position = seen
            self.steps[phase] += 1
            yield phase, batch
            if self.done[phase] or (self.count_steps and self._finished(phase)):
                return
        if seen == 0:
            raise ArgumentError("batches: expected at least one batch, got none")
        if seen < taken:
            raise ArgumentError(f"batches: expected at least {taken}, as when the fit was stopped; got {seen}")
        self.passes[phase] += 1
        self.position = 0

    def _finished(self, phase: int) -> bool:
        counted = self.steps if self.count_steps else self.passes
        return self.done[phase] or counted[phase] >= self.amounts[phase]


class Plateau:
    r"""Whether losses have stopped to fall: in `patience` steps no improvement of their running mean by `least`.

    The mean is $a \leftarrow a + (\ell - a) / n$, n the patience; improvements are relative to the best mean.
    """

    def __init__(self, patience: int, least: float) -> None:
        self.patience, self.least = patience, least
        self.mean: float | None = None
        self.best, self.stale = float("inf"), 0

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`."""
        self.mean, self.best, self.stale = state["mean"], state["best"], state["stale"]

    def state(self) -> dict[str, Any]:
        """Where it stands, in numbers."""
        return {"mean": self.mean, "best": self.best, "stale": self.stale}

    def reached(self, loss: float) -> bool:
        """Take notice of one more loss."""
        self.mean = loss if self.mean is None else self.mean + (loss - self.mean) / self.patience
        if self.best == float("inf") or self.mean < self.best - self.least * abs(self.best):
            self.best, self.stale = self.mean, 0
        else:
            self.stale += 1
        return self.stale >= self.patience


def _state(generator: torch.Generator | None) -> torch.Tensor | None:
    return None if generator is None else generator.get_state()


def _set(generator: torch.Generator | None, state: torch.Tensor | None) -> None:
    if generator is not None and state is not None:
        generator.set_state(state)
