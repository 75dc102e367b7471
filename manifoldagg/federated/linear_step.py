"""Linear steps: steps whose coefficients do not depend on the inner products of their rows."""

from dataclasses import replace

from manifoldagg.corrections import Gram
from manifoldagg.corrections.combination import Combination
from manifoldagg.federated.pytrees import combinations, materialize
from manifoldagg.federated.types import LinearStep, Outcome, State
from manifoldagg.kernels.operands import Operand, check_target

__all__ = ["measure"]


def measure(
    state: State, outcome: Outcome, numbers: dict[str, float], *, compute: bool, out: Operand | None = None
) -> tuple[State, Outcome, dict[str, float]]:
    """Check the rows of a linear step and add the metrics of the step. Other steps are returned unchanged.

    Args:
        state: the next state.
        outcome: the outcome of a plan.
        numbers: the metrics of the outcome.
        compute: whether to compute the new model and the sums in the same pass that measures the rows. Otherwise, the
            caller computes them later, possibly in memory that the step reads.
        out: an output buffer for the new model. The buffer is written even if the update is then rejected.

    Returns:
        The next state, the outcome and the metrics including those of the linear step.

    Raises:
        ArgumentError: if a row or the new model is not finite, or if the rule rejects the update.

    Cost: one pass over the rows. With `compute=False`, computing the model later needs a second pass.
    """
    model = outcome.model
    linear = outcome.linear
    if linear is None:
        # A wrapper may return a new outcome without the linear step. The rows of the model are then still unchecked.
        if not isinstance(model, Combination) or model.frame.has_norm_bounds:
            return state, outcome, numbers
        linear = LinearStep(model.frame, _no_metrics)
    frame = linear.frame
    pending = combinations([state, model]) if compute else []
    rows = {one: out if one is model and out is not None else one.new_row() for one in pending}
    if out is not None and rows:
        check_target(out, frame.operands, None)
    gram = frame.gram(combinations=[one.fused(row) for one, row in rows.items()])
    numbers = {**numbers, **linear.metrics(gram)}
    if isinstance(model, Combination):
        known = gram if model.frame is frame else None
        if not model.frame.stays_finite(known, model.coefficients):
            model.check_finite(computed=rows.get(model))
        outcome = replace(outcome, model=rows.get(model, model))
    return materialize(state, rows) if compute else state, outcome, numbers


def _no_metrics(gram: Gram) -> dict[str, float]:
    return {}
