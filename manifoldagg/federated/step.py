"""The step: what a checked update makes of a snapshot. A server takes it, and so does `aggregate`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from manifoldagg.errors import ArgumentError, check_choice, check_shape, is_finite
from manifoldagg.federated.buffers import collect, settle
from manifoldagg.federated.contract import Outcome, Rule, Update
from manifoldagg.federated.intake import UNLIMITED, Checks
from manifoldagg.federated.snapshot import Snapshot
from manifoldagg.federated.trees import disjoint, spoils
from manifoldagg.manifolds import Manifold

__all__ = ["Terms", "step"]


@dataclass(frozen=True)
class Terms:
    """On which terms updates are taken.

    Args:
        space: of the models.
        rule: that steps.
        policies: of the buffers, by name.
        checks: limits on norms.
        points: what messages call the points of an update.
        buffers: what they call its buffers.
    """

    space: Manifold
    rule: Rule
    policies: Mapping[str, str]
    checks: Checks = UNLIMITED
    points: str = "points"
    buffers: str = "buffers"


def step(
    terms: Terms, before: Snapshot, update: Update, buffers: Mapping[str, Tensor], out: Tensor
) -> tuple[Snapshot, Outcome]:
    """Take one update, as a rule does, in memory of its own.

    Args:
        terms: on which it is taken.
        before: what it meets. Nothing in it is written.
        update: checked. It is not written, and what is kept of it is a copy.
        buffers: that it brought.
        out: where the new model goes, in memory that nobody reads.

    Returns:
        The next snapshot, and the outcome, of which nothing can fail any more. The client's memory is the same object
        where it is what it was.

    Raises:
        ManifoldAggError: naming what does not fit. Nothing but `out` has changed then.
    """
    norms = before.norms
    if terms.checks.measured:
        norms = terms.checks.passed(terms.space, update, norms)
    # A rule may write `out` while it reads the points, and what it keeps may share memory neither with what clients
    # hold nor with models that will be recycled.
    mine = [update.base, before.current, before.state, update.memory, out]
    points, tensors = disjoint((update.points, update.tensors), mine)
    apart = points is update.points and tensors is update.tensors
    brought = update if apart else replace(update, points=points, tensors=tensors)
    state, outcome = terms.rule.step(terms.space, before.state, brought, out=out)
    numbers = {name: float(value) for name, value in outcome.numbers.items()}
    model = _checked(terms, outcome.model, out)
    if spoils(state, before.state) or spoils(outcome.memory, update.memory):
        raise ArgumentError(f"{terms.points}: the rule's state would not be finite")
    foreign = [update.base, before.current, update.points, update.tensors, out]
    state, memory = disjoint((state, outcome.memory), foreign)
    after = before.buffers
    waiting = before.waiting
    if terms.policies:
        share = update.weight if update.share is None else update.share
        waiting = collect(waiting, buffers, after, share, name=terms.buffers)
    if model is None:
        return replace(before, state=state, waiting=waiting, norms=norms), Outcome(None, memory, numbers)
    if waiting is not None:
        after = settle(waiting, after, numbers)
    return Snapshot(model, state, after, None, before.version + 1, norms), Outcome(model, memory, numbers)


def _checked(terms: Terms, model: Tensor | None, out: Tensor) -> Tensor | None:
    """The new model, in `out`."""
    if model is None:
        return None
    if model is not out:
        check_shape("rule: new model", model, *terms.space.axes)
        check_choice("rule: new model: dtype", model.dtype, (out.dtype,))
        out.copy_(model.detach())
    if not is_finite(out):
        raise ArgumentError(f"{terms.points}: the new model would not be finite")
    return out
