"""The two functions that process one part of the model in a merge of checkpoints.

A part is a range of entries of a tensor, or a pair of LoRA factors. Both functions read the part from all checkpoints:

- `gram_of` computes the inner products of the checkpoints, restricted to the part.
- `write_part` computes the mean of the part, and writes it to the result.
"""

from collections.abc import Callable
from itertools import starmap

import torch
from jaxtyping import Float64
from torch import Tensor

from manifoldagg._validation import is_finite
from manifoldagg.averaging.coefficients import Mean
from manifoldagg.averaging.entries import is_batch_counter, labelled_karcher_mean, largest_counter
from manifoldagg.averaging.lora import average_adapters
from manifoldagg.averaging.merge_plan import CELL_SIZE, Part, result_entries
from manifoldagg.errors import StateDictError
from manifoldagg.kernels import combine, gram
from manifoldagg.manifolds import Manifold
from manifoldagg.manifolds.formulas import distance
from manifoldagg.manifolds.layout import Entry
from manifoldagg.manifolds.lora.factors import JointBasis
from manifoldagg.manifolds.lora.peft import FactorPair
from manifoldagg.manifolds.power import Power

__all__ = ["Buffers", "Write", "gram_of", "write_part"]

Write = Callable[[str, int, Tensor], None]
"""Writes values of a tensor of the result: the name, the first entry, and the values."""


class Buffers:
    """Memory that all steps reuse, so that it is allocated only once."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, Tensor] = {}

    def get(self, dtype: torch.dtype, size: int) -> Tensor:
        """Return a vector of at most `CELL_SIZE` entries with undefined values."""
        if dtype not in self._buffers:
            self._buffers[dtype] = torch.empty(CELL_SIZE, dtype=dtype)
        return self._buffers[dtype][:size]


def gram_of(part: Part, start: int, stop: int) -> Float64[Tensor, "r r"]:
    """Compute the inner products of the models in one part: a range of entries of a tensor, or a pair of LoRA factors.

    For a pair of LoRA factors, the inner products are those of the products of the two factors, and the range is
    ignored. Models whose weight in the mean is 0 are omitted.

    Returns:
        The Gram matrix of one model and of the differences of the other models from it, as in `InnerProducts`.

    Raises:
        StateDictError: if an entry is not finite. The message contains the file and the name of the tensor.
    """
    origin = part.origin
    if part.kind == "factors":
        # Row i is X_i - X_h, and row h is X_h, as in `InnerProducts`.
        basis = torch.eye(len(part.used), dtype=torch.float64)
        basis[:, origin] -= 1.0
        basis[origin, origin] = 1.0
        matrix = JointBasis.of(_stacks(part), part.shape_of_second[0]).gram(basis)
    else:
        rows = _rows(part, start, stop)
        matrix = gram(rows, minus=[None if i == origin else rows[origin] for i in range(len(rows))])[0]
    if not bool(matrix.isfinite().all()):
        _raise_invalid(part, start, stop)
    return matrix


def write_part(part: Part, mean: Mean, write: Write, buffers: Buffers, start: int, stop: int) -> list[float]:
    """Compute and write a range of a part.

    Returns:
        The numbers to record:

        - For flat tensors and factors: the squared rounding error and the inner products. The inner products are
          omitted if they were recorded before.
        - For a manifold: the squared residual, and the squared distances from the mean to the manifold, to the
          arithmetic mean and to the used models.

    Raises:
        StateDictError: if an entry of a model is not finite, or the mean overflows the dtype.
    """
    if part.kind == "copied":
        _write_copied(part, write, start, stop)
        return []
    if part.kind == "manifold":
        return _write_curved(part, write, start, stop)
    if part.kind == "factors":
        error = _write_factors(part, mean, write)
    else:
        error = _write_flat(part, mean, write, buffers, start, stop)
    return [error] if part.has_gram_step else [error, *gram_of(part, start, stop).flatten().tolist()]


def _write_flat(part: Part, mean: Mean, write: Write, buffers: Buffers, start: int, stop: int) -> float:
    """Write a range of a flat tensor, and return the squared norm of its rounding errors."""
    dtype = part.first.entry.dtype
    # The sum is stored in float64 first, because the rounding error is measured against it.
    exact = buffers.get(torch.float64, stop - start)
    combine(None, _rows(part, start, stop), mean.coefficients[part.used].tolist(), out=exact)
    if dtype is torch.float64:
        error = 0.0 if is_finite(exact) else float("nan")
        result = exact
    else:
        # The second rounding is exact, so the result has the bits of a combination with this dtype.
        result = buffers.get(dtype, stop - start)
        combine(None, [exact], [1.0], out=result)
        error = gram([result], minus=exact).item()
    # The comparison also rejects NaN. Either an input is not finite, or the mean has overflowed.
    if not 0 <= error < float("inf"):
        _raise_invalid(part, start, stop)
    write(part.names[0], start, result)
    return error


def _write_copied(part: Part, write: Write, start: int, stop: int) -> None:
    """Write a range of an integer or boolean tensor, which is copied instead of averaged."""
    name = part.names[0]
    column = part.tensors[0]
    # The value is copied from the model with the largest weight. A batch counter gets the largest value of all models.
    heaviest = column[int(part.method.barycentric.argmax())]
    value = heaviest.read(start, stop)
    if is_batch_counter(name):
        value = largest_counter([x.read(start, stop) for x in column])
    elif not Entry(name, tuple(heaviest.entry.shape), heaviest.entry.dtype).is_counter:
        for label, x in zip(part.labels, column, strict=True):
            # A tensor with several entries must be equal in all models. Bytes are compared, because torch cannot
            # compare all unsigned integers.
            if not torch.equal(x.read(start, stop).view(torch.uint8), value.view(torch.uint8)):
                expected = f"expected {value.dtype} equal to that of the other models, as it has no mean"
                raise StateDictError(f"{label}: {name}: {expected}")
    write(name, start, value)


def _write_curved(part: Part, write: Write, start: int, stop: int) -> list[float]:
    """Write the Karcher means of a range of copies of a manifold."""
    space = _space_of_range(part.space, stop - start)
    points = [row.view(space.shape) for row in _rows(part, start, stop)]
    used = part.used
    weights = part.method.barycentric[used]
    labels = [f"{part.labels[i]}: {part.names[0]}" for i in used]
    mean = labelled_karcher_mean(space, part.names[0], dict(zip(labels, points, strict=True)), weights)
    write(part.names[0], start, mean.point.flatten())
    # The written point has the dtype of the models, so its rounding error appears as a distance from the manifold.
    exact = mean.point.double()
    arithmetic = sum(starmap(torch.mul, zip(weights.tolist(), (x.double() for x in points), strict=True)))
    gaps = [exact - space.project(exact), exact - arithmetic]
    distances = [float(distance(space, exact, x.double()).square().sum()) for x in points]
    # All recorded numbers are squares, so that their sums over all ranges are the squares for the whole tensor.
    return [float(mean.residual) ** 2, *[float(gap.square().sum()) for gap in gaps], *distances]


def _space_of_range(space: Manifold | None, size: int) -> Manifold:
    """Return the manifold of a range of `size` entries of a tensor on the manifold `space`."""
    # If the tensor is on a power, that is, on several copies of a manifold, the range contains some of the copies.
    assert space is not None
    if not isinstance(space, Power):
        return space
    return Power(space.space, (size // torch.Size(space.space.shape).numel(),))


def _write_factors(part: Part, mean: Mean, write: Write) -> float:
    """Write the LoRA factors of the mean, and return the squared error of their product."""
    pair = FactorPair(*part.names)
    states = [_factors(part, i) for i in part.used]
    c = mean.coefficients[part.used]
    # Coefficients that are not valid weights are passed as scalings. The equal weights 1 / k are compensated by the
    # factor k.
    if bool((c >= 0).all()) and abs(float(c.sum()) - 1.0) < 1e-15:
        result = average_adapters(states, c)
    else:
        result = average_adapters(states, scaling=(c * len(states)).tolist())
    for entry, axis in zip(result_entries(part), (0, 1), strict=True):
        factor = result[entry.name]
        padded = factor.new_zeros(entry.shape)
        # The file has the largest rank of all models. The mean has a lower rank if models with the weight 0 have the
        # largest rank. Zeros complete the factors without a change of their product.
        padded.narrow(axis, 0, factor.shape[axis]).copy_(factor)
        write(entry.name, 0, padded.flatten())
    # The error is the norm of the written product minus the exact mean. It consists of the truncation to the rank of
    # the result and of rounding errors.
    stacks = [pair.stack(result), *_stacks(part)]
    coefficients = torch.cat([torch.ones(1, dtype=torch.float64), -c])
    return float(JointBasis.of(stacks, part.shape_of_second[0]).gram(coefficients[None]))


def _factors(part: Part, i: int) -> dict[str, Tensor]:
    """Read the two LoRA factors of model i."""
    return {
        name: column[i].read().view(tuple(column[i].entry.shape))
        for name, column in zip(part.names, part.tensors, strict=True)
    }


def _stacks(part: Part) -> list[Tensor]:
    """Read the LoRA factors of the used models as stacks."""
    pair = FactorPair(*part.names)
    return [pair.stack(_factors(part, i), prefix=f"{part.labels[i]}: ") for i in part.used]


def _rows(part: Part, start: int, stop: int) -> list[Tensor]:
    """Return a range of entries of the used models on the CPU, in a common dtype."""
    return [part.tensors[0][i].read(start, stop) for i in part.used]


def _raise_invalid(part: Part, start: int, stop: int) -> None:
    """Raise a `StateDictError` for a mean that is not finite.

    The message names the first model whose entries are not finite. If the entries of all models are finite, the message
    states that the mean has overflowed.
    """
    for name, column in zip(part.names, part.tensors, strict=True):
        for i in part.used:
            whole = part.kind == "factors"
            if not is_finite(column[i].read(*(() if whole else (start, stop)))):
                raise StateDictError(f"{part.labels[i]}: {name}: expected finite values, got NaN or infinity")
    raise StateDictError(
        f"models: {part.label}: expected a finite mean, got an overflow; entries are as large as the dtype allows"
    )
