"""OrthoFL's calibration: where a client starts next, so that the others' progress does not undo its own."""

from collections.abc import Mapping, Sequence
from typing import Any, cast, overload

import torch
from torch import Tensor

from manifoldagg.corrections.algebra import span_coefficients, total
from manifoldagg.corrections.frame import GRANULARITIES, Matrix, require_flat
from manifoldagg.corrections.orthogonal import OrthoDC
from manifoldagg.corrections.place import leaves_of
from manifoldagg.errors import ArgumentError, check_choice, check_finite, check_shape
from manifoldagg.kernels import combine, gram
from manifoldagg.kernels.rows import bounds, is_transformed
from manifoldagg.manifolds import Layout, Manifold, ParameterSpace

State = Mapping[str, Tensor]


@overload
def calibrate(
    start: Tensor,
    global_shift: Tensor,
    client_shift: Tensor,
    granularity: str = ...,
    against: Sequence[Tensor] | Tensor | None = ...,
    *,
    space: Manifold | None = ...,
    segments: Sequence[int] | None = ...,
) -> Tensor: ...
@overload
def calibrate(
    start: State,
    global_shift: State,
    client_shift: State,
    granularity: str = ...,
    against: Sequence[State] | None = ...,
    *,
    space: Manifold | None = ...,
    segments: None = ...,
) -> dict[str, Tensor]: ...
def calibrate(
    start: Any,
    global_shift: Any,
    client_shift: Any,
    granularity: str = "tensor",
    against: Any = None,
    *,
    space: Manifold | None = None,
    segments: Sequence[int] | None = None,
) -> Any:
    r"""The model from which a client trains next: its own, moved by what the global model gained beside its update.

    $$W_m + \Delta - \operatorname{proj}_{\Delta_m} \Delta, \qquad
    \operatorname{proj}_{\Delta_m} \Delta = \frac{\langle \Delta, \Delta_m\rangle}{\langle \Delta_m, \Delta_m\rangle}
    \,\Delta_m$$

    for each named tensor. Among the shifts orthogonal to $\Delta_m$, this one is nearest to $\Delta$. Where $\Delta_m$
    is zero, $\Delta$ is added whole. With `against`, the pairwise ablation, it is the client's update that loses what
    lies in the span of the others': $W_m + \Delta - \operatorname{proj}_{\operatorname{span}(o_1, \dots)} \Delta_m$.

    Args:
        start: $W_m$, the client's model as it arrived: a point, or a mapping from names to tensors.
        global_shift: $\Delta$, how far the global model moved, before aggregation, since the client had started.
        client_shift: $\Delta_m$, how far the client moved in that time.
        granularity: `"tensor"` (OrthoFL), or `"model"` (full projection).
        against: the most recent updates of the other clients, for the pairwise form.
        space: of points: its named tensors are those of `granularity="tensor"`; of a mapping: which tensors are
            parameters. A curved one is refused.
        segments: instead of a space: the lengths of the named tensors in a point; without either, a point is one.

    Returns:
        In kind: a new point, or a new dict. Of a mapping, what is no parameter (frozen, or not floating) is copied from
        `start`. Each number is rounded once.

    Raises:
        ArgumentError: if shapes, names or kinds differ, a value is not finite, or `space` is curved.

    Source: OrthoFL (6), (7), §5.3. Server and client get bit-identical starts from the same shifts. Cost: one pass that
    reads the shifts, one that writes.

    Example:
        >>> import torch
        >>> start, shift, own = torch.tensor([1.0, 1.0]), torch.tensor([2.0, 3.0]), torch.tensor([0.5, 0.0])
        >>> calibrate(start, shift, own)
        tensor([1., 4.])
        >>> calibrate({"w": start}, {"w": shift}, {"w": own})
        {'w': tensor([1., 4.])}
    """
    check_choice("granularity", granularity, GRANULARITIES)
    if not (against is None or isinstance(against, Sequence | Tensor)):
        raise ArgumentError(f"against: expected a sequence of updates, got {type(against).__name__}")
    if space is not None:
        require_flat(space)
    if isinstance(start, Mapping):
        return _calibrate_state(
            start, global_shift, client_shift, granularity, cast("Sequence[State] | None", against), space, segments
        )
    shape = check_shape("start", start, *getattr(start, "shape", ())).shape
    rows = {"start": start, "global_shift": global_shift, "client_shift": client_shift}
    rows |= {f"against[{i}]": row for i, row in enumerate(() if against is None else against)}
    for name, row in rows.items():
        check_finite(name, check_shape(name, row, *shape))
    if space is not None:
        check_shape("start", start, *space.axes)
        segments = [leaf.part.stop - leaf.part.start for leaf in leaves_of(space, start)]
    vectors = [row.flatten() for row in rows.values()]
    pieces = [[vector[low:high] for vector in vectors] for low, high in bounds(segments, start.numel())]
    moved = _moved(pieces, granularity, pairwise=against is not None)
    return torch.cat(moved).view(shape) if moved else start.clone()


def _calibrate_state(
    start: State,
    global_shift: State,
    client_shift: State,
    granularity: str,
    against: Sequence[State] | None,
    space: Manifold | None,
    segments: Sequence[int] | None,
) -> dict[str, Tensor]:
    if segments is not None or not (space is None or isinstance(space, ParameterSpace)):
        raise ArgumentError("start: named tensors are their own segments; give a ParameterSpace, or neither")
    layout = Layout.of_state_dict(start, dtype=torch.float64) if space is None else space.layout
    layout.check(start)
    states = {"start": start, "global_shift": global_shift, "client_shift": client_shift}
    states |= {f"against[{i}]": state for i, state in enumerate(against or ())}
    for name, state in states.items():
        if not isinstance(state, Mapping):
            raise ArgumentError(f"{name}: expected named tensors as in start, got {type(state).__name__}")
        if extra := sorted(map(str, state.keys() - start.keys())):
            raise ArgumentError(f"{name}: start has no {', '.join(extra)}")
        for leaf in layout.leaves:
            if leaf.name not in state:
                raise ArgumentError(f"{name}: expected a tensor {leaf.name!r} as in start")
            label = f"{name}[{leaf.name!r}]"
            check_finite(label, check_shape(label, state[leaf.name], *leaf.shape))
    pieces = [tuple(state[leaf.name].flatten() for state in states.values()) for leaf in layout.leaves]
    moved = _moved(pieces, granularity, pairwise=against is not None)
    new = {leaf.name: value.view(leaf.shape) for leaf, value in zip(layout.leaves, moved, strict=True)}
    new |= {alias: new[name] for alias, name in layout.aliases}
    return {name: new[name] if name in new else start[name].clone() for name in start}


def _moved(pieces: Sequence[Sequence[Tensor]], granularity: str, *, pairwise: bool) -> list[Tensor]:
    r"""$W + C r$ for each piece (W, Δ, Δₘ, others)."""
    tensors = [gram(rows)[0] for _, *rows in pieces]
    for i, inner in enumerate(tensors):
        check_finite(f"shifts: inner products of tensor {i}", inner.detach())
    # Numbers that a derivative follows stay on its path.
    grams: list[Matrix] = [inner if is_transformed([inner]) else inner.tolist() for inner in tensors]
    if granularity == "model" and grams:
        grams = [total(grams)] * len(grams)

    def weights(inner: Any) -> list[Any]:
        others = range(2, len(inner))
        if not pairwise:
            return OrthoDC(1.0).coefficients(inner)[0][0]
        along = [inner[1][j] for j in others]
        return [1.0, 0.0, *(-x for x in span_coefficients([[inner[i][j] for j in others] for i in others], along))]

    moved = [combine(start, rows, weights(inner)) for (start, *rows), inner in zip(pieces, grams, strict=True)]
    for i, piece in enumerate(moved):
        if not is_transformed([piece]):
            check_finite(f"the calibrated start: tensor {i}", piece)
    return moved
