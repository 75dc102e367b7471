"""Computation of linear steps, which add a linear combination of vectors with known coefficients to the model.

An example is a step with a fixed step size along the difference between a client's models after and before training.
The same pass over the vectors also computes their inner products, for checks and metrics.
"""

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
    """Check that the vectors of a linear step are finite, and compute the metrics of the step.

    A linear step adds a linear combination of vectors, such as a client's displacement, to the model. The function uses
    the inner products of these vectors for the check and for the metrics.

    Args:
        state: the next state of the rule.
        outcome: the outcome that the method `plan` of the rule has returned.
        numbers: the metrics of the outcome.
        compute: whether to compute the new model and the sums in the state in the same pass as the inner products.
            Otherwise, the caller computes them later. It may then write them to memory that the step reads.
        out: an output buffer for the new model. The function may write to it even if it then rejects the update.

    Returns:
        The next state, the outcome, and the metrics including those of the linear step. If the outcome contains no
        `LinearStep` and the rule has already checked its vectors, these are the unchanged arguments.

    Raises:
        ArgumentError: if an input vector or the new model is not finite, or if the rule rejects the update.

    Cost: one pass over the input vectors. If `compute` is false, the caller needs a second pass to compute the new
    model.
    """
    model = outcome.model
    linear = outcome.linear
    if linear is None:
        # A wrapper of the rule may have returned a new outcome without the linear step. Nothing has then checked the
        # rows of the model.
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
