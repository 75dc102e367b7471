"""Calibration of the model from which a client starts its next task, as in OrthoFL.

In OrthoFL, each client continues to train its own model instead of the global model. Between two tasks, the calibration
adds the progress of the other clients to this model. It first removes the component of that progress along the client's
own progress, so that the two do not conflict.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from manifoldagg._validation import check_choice, check_finite, check_shape
from manifoldagg.corrections.frame import GRANULARITIES, Frame, require_flat
from manifoldagg.corrections.gram import Gram
from manifoldagg.corrections.orthogonal import OrthoDC
from manifoldagg.corrections.surgery import span_coefficients
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import Row, combine, gram
from manifoldagg.kernels.operands import needs_autograd_path
from manifoldagg.manifolds import Layout, Manifold, ParameterSpace

__all__ = ["calibrate", "calibrate_frame"]

Model = TypeVar("Model", Tensor, Mapping[str, Tensor])


def calibrate(
    start: Model,
    global_shift: Model,
    client_shift: Model,
    granularity: str = "tensor",
    other_updates: Sequence[Model] | Tensor | None = None,
    *,
    space: Manifold | None = None,
) -> Model:
    r"""Compute the model from which a client starts its next task (OrthoFL's calibration).

    A client continues from its own model, so it has to receive the progress of the other clients. While the client
    trained, its model changed by $\Delta_m$ to $W_m$, and the other clients changed the global model by $\Delta$. To
    avoid a conflict with the client's own progress, only the component of $\Delta$ orthogonal to $\Delta_m$ is added:

    $$W_m + \Delta - \operatorname{proj}_{\Delta_m} \Delta, \qquad
    \operatorname{proj}_{\Delta_m} \Delta = \frac{\langle \Delta, \Delta_m\rangle}{\langle \Delta_m, \Delta_m\rangle}
    \,\Delta_m$$

    By default, the formula applies to each named tensor separately. The added vector is the vector nearest to $\Delta$
    that is orthogonal to $\Delta_m$. If $\Delta_m$ is zero, $\Delta$ is added unchanged.

    If `other_updates` $o_1, \dots$ are given, the function computes the pairwise variant from the ablation study of the
    paper instead: $W_m + \Delta - \operatorname{proj}_{\operatorname{span}(o_1, \dots)} \Delta_m$.

    Args:
        start: $W_m$, the client's model as the server received it: a point, or a mapping from names to tensors.
        global_shift: $\Delta$, the change of the global model since the client started, before aggregation.
        client_shift: $\Delta_m$, the change of the client's model in that time.
        granularity: `"tensor"` (OrthoFL), or `"model"` (one projection of the whole model).
        other_updates: the most recent updates of the other clients, for the pairwise form.
        space: the space of the models, which must be flat. For points, its named tensors define
            `granularity="tensor"`; without a space, a point is a single tensor. For mappings, it is the
            `ParameterSpace` that selects the parameters.

    Returns:
        A new point, or a new dict if `start` is a mapping. Entries of a mapping that are not parameters (frozen, or not
        floating) are copied from `start`. Each number is rounded once.

    Raises:
        ArgumentError: if shapes, names or types differ, if a value is not finite, or if `space` is curved.

    Source: OrthoFL (6), (7), §5.3. The server and the client compute bit-identical results from the same shifts.

    Cost: one pass that reads the shifts and one that writes the result.

    Example:
        >>> import torch
        >>> start, shift, own = torch.tensor([1.0, 1.0]), torch.tensor([2.0, 3.0]), torch.tensor([0.5, 0.0])
        >>> calibrate(start, shift, own)
        tensor([1., 4.])
        >>> calibrate({"w": start}, {"w": shift}, {"w": own})
        {'w': tensor([1., 4.])}
    """
    check_choice("granularity", granularity, GRANULARITIES)
    if not (other_updates is None or isinstance(other_updates, Sequence | Tensor)):
        raise ArgumentError(f"other_updates: expected a sequence of updates, got {type(other_updates).__name__}")
    if space is not None:
        require_flat(space)
    given: dict[str, Any] = {"start": start, "global_shift": global_shift, "client_shift": client_shift}
    given |= {f"other_updates[{i}]": other for i, other in enumerate(() if other_updates is None else other_updates)}
    split = _split_state_dicts if isinstance(start, Mapping) else _split_points
    pieces, joined = split(given, space)
    # One Gram matrix per tensor serves both granularities, because that of the model is their sum.
    inner = [gram(rows)[0] for _, *rows in pieces]
    for i, numbers in enumerate(inner):
        # All entries are finite, so this check only fails if the square of an entry or a sum of squares overflows.
        check_finite(f"shifts: inner products of tensor {i}", numbers.detach())
    # The rows are the shift, the client's own shift in place of the drift, and the other updates.
    extra = tuple(name for name in given if name.startswith("other_updates"))
    moved = []
    for i, ((model, *rows), part) in enumerate(zip(pieces, _segment_grams(inner, granularity, extra), strict=True)):
        piece = combine(model, rows, _shift_coefficients(part, pairwise=other_updates is not None))
        moved.append(
            piece if needs_autograd_path([piece]) else check_finite(f"the calibrated start: tensor {i}", piece)
        )
    result: Model = joined(moved)
    return result


def calibrate_frame(
    shifts: Frame, start: Row, granularity: str = "tensor", other_updates: Sequence[Row] | None = None
) -> Any:
    r"""Compute the model from which a client starts its next task, given models instead of their changes.

    By default, the function adds the change $\Delta$ of the global model to the client's model. It first removes the
    component of $\Delta$ along the change $\Delta_m$ of the client's model. The result is the same as that of
    `calibrate`, but `shifts` contains the models before and after each change. No difference of models is stored.

    Args:
        shifts: a frame whose displacement is $\Delta$ and whose drift is $\Delta_m$. It needs `segments` if the model
            has named tensors.
        start: $W_m$, the client's model.
        granularity: `"tensor"` or `"model"`, with the same meaning as in `calibrate`.
        other_updates: the most recent updates of the other clients, for the pairwise form of `calibrate`.

    Returns:
        A new point.
    """
    for i, row in enumerate(() if other_updates is None else other_updates):
        shifts = shifts.with_row(f"other_updates[{i}]", row)
    gram = shifts.gram(granularity)
    matrix: Any = [_shift_coefficients(part, pairwise=other_updates is not None) for part in gram]
    return shifts.combine(start, matrix if granularity == "tensor" else matrix[0])


def _segment_grams(inner: list[Tensor], granularity: str, extra: Sequence[str]) -> list[Gram]:
    """Return, for each tensor of the model, the Gram matrix of the changes of this tensor.

    With `granularity="model"`, every tensor gets the Gram matrix of the changes of the whole model.
    """
    if not inner:
        return []
    every = Gram.of(torch.stack(inner), extra=extra)
    return [*every] if granularity == "tensor" else [every.total] * len(inner)


def _shift_coefficients(inner: Gram, *, pairwise: bool) -> list[Any]:
    """Compute the coefficient of each model change in the sum that calibration adds to a client's model.

    The changes are, in this order, those of the global model, of the client's own model and, if `pairwise` is true, of
    the models of other clients.
    """
    if not pairwise:
        matrix, _ = OrthoDC(1.0).coefficients(inner)
        weights: list[Any] = matrix[0].tolist()
        return weights
    # Row 0 is Δ and row 1 is Δₘ. Only the projection of Δₘ onto the span of the others is subtracted, so Δₘ itself has
    # the coefficient 0.
    others = inner.matrix[2:, 2:]
    return [1.0, 0.0, *(-x for x in span_coefficients(others, inner.matrix[1, 2:]))]


Split = tuple[list[list[Tensor]], Callable[[list[Tensor]], Any]]
"""The rows (W, Δ, Δₘ, others) of each named tensor, and the function that assembles the result from the new tensors."""


def _split_points(models: dict[str, Any], space: Manifold | None) -> Split:
    """Split each model vector into its named tensors, and return a function that joins them.

    Raises:
        ArgumentError: if the shape of a point is wrong, or if a point is not finite.
    """
    start = models["start"]
    shape = check_shape("start", start, *getattr(start, "shape", ())).shape
    if space is not None:
        check_shape("start", start, *space.axes)
    for name, row in models.items():
        check_finite(name, check_shape(name, row, *shape))
    # Without a space, a point has no named tensors, so all its entries form one tensor.
    parts = [slice(None)] if space is None else [leaf.part for leaf in space.leaves(start)]
    pieces = [[row.flatten()[part] for row in models.values()] for part in parts]
    return pieces, lambda moved: torch.cat(moved).view(shape) if moved else start.clone()


def _split_state_dicts(models: dict[str, Any], space: Manifold | None) -> Split:
    """Collect the parameters of each state dict, and return a function that rebuilds a dict.

    Raises:
        ArgumentError: if the names or shapes differ from those of `start`, or if a parameter is not finite.
    """
    start = models["start"]
    if not (space is None or isinstance(space, ParameterSpace)):
        raise ArgumentError(f"space: expected a ParameterSpace or None for a state dict, got {space}")
    # A float64 layout represents the floating dtypes of every state dict.
    layout = Layout.of_state_dict(start, dtype=torch.float64) if space is None else space.layout
    layout.check(start)
    for name, state in models.items():
        if not isinstance(state, Mapping):
            raise ArgumentError(f"{name}: expected named tensors as in start, got {type(state).__name__}")
        if extra := sorted(map(str, state.keys() - start.keys())):
            raise ArgumentError(f"{name}: expected the names of start, got also {', '.join(extra)}")
        # The shifts need only the parameters. Other entries of the result are copied from `start`.
        for leaf in layout.leaves:
            if leaf.name not in state:
                raise ArgumentError(f"{name}: expected a tensor {leaf.name!r} as in start, got a mapping without it")
            label = f"{name}[{leaf.name!r}]"
            check_finite(label, check_shape(label, state[leaf.name], *leaf.shape))

    def joined(moved: list[Tensor]) -> dict[str, Tensor]:
        new = {leaf.name: value.view(leaf.shape) for leaf, value in zip(layout.leaves, moved, strict=True)}
        # A tied parameter has several names but is computed once, so that all its names share the result.
        new |= {alias: new[name] for alias, name in layout.aliases}
        return {name: new[name] if name in new else start[name].clone() for name in start}

    return [[state[leaf.name].flatten() for state in models.values()] for leaf in layout.leaves], joined
