"""The average of LoRA adapters, computed as the mean of the products of their factors."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from manifoldagg._result_repr import format_result
from manifoldagg._validation import (
    check_choice,
    check_count,
    check_finite,
    check_number,
    check_vector,
    is_finite,
    short_repr,
)
from manifoldagg.averaging.entries import is_batch_counter, largest_counter
from manifoldagg.averaging.karcher import Weights, check_weights
from manifoldagg.errors import ArgumentError, StateDictError
from manifoldagg.kernels import TensorList, gram
from manifoldagg.kernels.operands import is_sharded
from manifoldagg.manifolds.layout import check_memory
from manifoldagg.manifolds.lora.factors import TruncatedSVD, combine_stacks, truncate
from manifoldagg.manifolds.lora.leaves import trainable_factors
from manifoldagg.manifolds.lora.peft import FactorPair, classify_tensors

__all__ = ["AdapterAverageInfo", "average_adapters"]

Adapter = Mapping[str, Tensor]
Scaling = float | Sequence[float]


@dataclass(frozen=True, eq=False)
class AdapterAverageInfo:
    r"""The truncation error of an average of LoRA adapters.

    A LoRA adapter changes a weight matrix by the product of two factors. The exact average $\bar X$ of these changes
    usually has a higher rank than the returned adapter, whose product $\hat X$ therefore only approximates it.

    Attributes:
        error: the relative error $\|\bar X - \hat X\| / \|\bar X\|$, before the factors are rounded to their dtype.
            Each norm includes the changes of all weight matrices. If the rank of the returned adapter suffices, only
            rounding errors remain.
        residual: a state dict with the names of the adapter, which contains two factors of $\bar X - \hat X$ for each
            weight matrix. The inner dimension of the factors is the rank of this difference. If the difference is 0,
            the two factors are omitted.
    """

    error: float
    residual: dict[str, Tensor]

    def __repr__(self) -> str:
        return format_result(self, error=self.error, residual=self.residual)


@overload
def average_adapters(
    adapters: Sequence[Adapter],
    weights: Weights = ...,
    rank: int | None = ...,
    *,
    return_info: Literal[False] = ...,
    scaling: Scaling = ...,
) -> dict[str, Tensor]: ...


@overload
def average_adapters(
    adapters: Sequence[Adapter],
    weights: Weights = ...,
    rank: int | None = ...,
    *,
    return_info: Literal[True],
    scaling: Scaling = ...,
) -> tuple[dict[str, Tensor], AdapterAverageInfo]: ...


@torch.no_grad()
def average_adapters(
    adapters: Sequence[Adapter],
    weights: Weights = None,
    rank: int | None = None,
    *,
    return_info: bool = False,
    scaling: Scaling = 1.0,
) -> dict[str, Tensor] | tuple[dict[str, Tensor], AdapterAverageInfo]:
    r"""Average LoRA adapters: return the adapter of a given rank that is nearest to the mean of their weight changes.

    An adapter changes a weight matrix by $s B A$, where $A$ and $B$ are its factors and $s$ is its scaling. The average
    of these changes is $\bar X = \sum_i w_i s_i B_i A_i$. An average of the $A_i$ and of the $B_i$ alone would be
    different. It would also depend on the choice of the factors, because $B G$ and $G^{-1} A$ have the same product for
    every invertible $G$.

    The matrix $\bar X$ is large, so the function does not compute it. It works with the factors
    $[w_1 s_1 B_1, \dots, w_k s_k B_k]$ and $[A_1; \dots; A_k]$ of $\bar X$ in float64:

    1. Two thin QR decompositions and the SVD $U \Sigma V^\top$ of their core give the nearest matrix $\hat X$ of the
       given rank in the Frobenius norm.
    2. The returned factors $U \sqrt\Sigma$ and $\sqrt\Sigma V^\top$ are balanced, $B^\top B = A A^\top$. The same
       learning rate therefore suits both factors.
    3. If $\bar X$ has a lower rank than requested, the remaining columns of $B$ are 0. The remaining rows of $A$ are
       drawn from PEFT's initial distribution with a fixed seed, so training can use them.

    PEFT's names determine how each tensor is averaged:

    - `lora_A` and `lora_B`, or `lora_embedding_A` and `lora_embedding_B`, are a pair of factors, also in a convolution.
    - A bias of `lora_B` is scaled like the product.
    - Counters called `num_batches_tracked` become the maximum over the adapters.
    - Other integers must be equal in all adapters.
    - All other tensors, such as heads and the magnitudes of DoRA, are averaged as vectors.

    Args:
        adapters: k state dicts with the same names. Their ranks may differ.
        weights: k numbers >= 0, not all zero, such as numbers of training samples. They are normalised. The default is
            equal weights.
        rank: the rank of every pair of the result. The default is the largest rank of the pair in the adapters.
        return_info: whether to return an [`AdapterAverageInfo`][manifoldagg.averaging.AdapterAverageInfo] too.
        scaling: for each adapter, the ratio of two factors. The numerator is the factor by which its model multiplies
            $B_i A_i$ ($\alpha / r$, or $\alpha / \sqrt r$ with `use_rslora`). The denominator is the same factor of the
            receiving model. One number applies to all adapters. The default 1 is right if all factors are equal.

    Returns:
        A state dict with the names, the order, the dtypes and, except for the rank, the shapes of the first adapter.
        With `return_info=True`, a pair of this state dict and an `AdapterAverageInfo`. The receiving model multiplies
        both the result and the residual by its own factor $s$. Its weights with the exact average are therefore
        $W + s B_{res} A_{res} + s \hat X$.

    Raises:
        ArgumentError: if an argument is invalid. The message starts with the name of the argument.
        StateDictError: if a tensor is invalid, or if its average overflows its dtype. The message contains the name
            of the tensor and, for an invalid tensor, the adapter.

    Warns:
        UserWarning: if the smallest retained singular value equals the largest discarded singular value. The nearest
            matrix is then not unique.

    Cost: pairs are processed one after the other, in $O((m + n) (\sum_i r_i)^2)$ time and
    $O((m + n) \sum_i r_i)$ memory each.

    Source: Singhal et al. 2025 (FedEx-LoRA) for the residual.

    Example:
        >>> one = {"q.lora_A.weight": torch.tensor([[1.0, 0.0]]), "q.lora_B.weight": torch.tensor([[4.0], [0.0]])}
        >>> same = {"q.lora_A.weight": torch.tensor([[-2.0, 0.0]]), "q.lora_B.weight": torch.tensor([[-2.0], [0.0]])}
        >>> adapter, info = average_adapters([one, same], return_info=True)
        >>> adapter["q.lora_B.weight"] @ adapter["q.lora_A.weight"], round(info.error, 12)
        (tensor([[4., 0.],
                [0., 0.]]), 0.0)
    """
    states = _check_adapters(adapters)
    shares = check_weights(weights, len(states))
    # The change of a model is s_i B_i A_i with the weight w_i. Both numbers can be applied to one of the factors.
    factors = _scalings(scaling, len(states)) * shares.numpy()
    if rank is not None:
        check_count("rank", rank)
    check_choice("return_info", return_info, (False, True))
    parts = classify_tensors(states[0], prefix="adapters[0]: ")
    if not parts.pairs:
        raise StateDictError(
            "adapters[0]: expected pairs such as q.lora_A.weight and q.lora_B.weight, got names without a pair"
        )
    finite = [_is_known_finite(state) for state in states]
    result: dict[str, Tensor] = {}
    residual: dict[str, Tensor] = {}
    error = 0.0
    norm = 0.0
    tied = []
    for pair in parts.pairs:
        cut = _truncate_pair(pair, states, finite, factors, rank)
        # `hypot` scales its arguments, so the squares of large singular values do not overflow.
        values = cut.values.tolist()
        error, norm = math.hypot(error, *values[cut.rank :]), math.hypot(norm, *values)
        if not math.isfinite(norm):
            raise _overflow_error(f"{pair.first}, {pair.second}", torch.float64)
        if bool(cut.is_tied):
            tied.append((pair.module_name, cut.rank))
        # The mean is computed in float64, so every singular value above the float64 rounding level counts as rank.
        result |= _round_pair(pair, trainable_factors(cut, states[0][pair.second].shape[0], torch.float64), states)
        if return_info and (remainder := _significant_residual(cut)).shape[-1]:
            residual |= _round_pair(pair, remainder, states)
    # A bias of `lora_B` is multiplied by the scaling of its model, and all other tensors are not.
    for names, coefficients in ((parts.scaled_biases, factors), (parts.unpaired, shares.numpy())):
        result |= {name: _mean_tensor(name, states, finite, coefficients) for name in names}
    if tied:
        name, size = tied[0]
        others = f" and at {len(tied) - 1} more" if tied[1:] else ""
        message = f"two singular values are equal at {name}{others}, so the nearest matrix of rank {size} is not unique"
        warnings.warn(f"adapters: {message}", UserWarning, stacklevel=2)
    # Pairs, biases and other tensors were averaged separately. The result has the order of the first adapter.
    adapter = {name: result[name] for name in states[0]}
    if not return_info:
        return adapter
    return adapter, AdapterAverageInfo(error / norm if norm > 0 else 0.0, residual)


def _check_adapters(adapters: Sequence[Adapter]) -> list[Adapter]:
    """Check that adapters are state dicts with the same names, and return them as a list."""
    is_sequence = isinstance(adapters, Sequence) and not isinstance(adapters, str)
    if not is_sequence or not adapters or not all(isinstance(state, Mapping) for state in adapters):
        given = "none" if is_sequence and not adapters else type(adapters).__name__
        raise ArgumentError(f"adapters: expected a sequence of at least one state dict, got {given}")
    names = set(adapters[0])
    for i, state in enumerate(adapters):
        for name in state:
            if not isinstance(name, str):
                raise StateDictError(f"adapters[{i}]: expected names that are strings, got {short_repr(name)}")
        different = sorted(map(str, names ^ set(state)))
        if different:
            listed = ", ".join(different[:3]) + (f" and {len(different) - 3} more" if different[3:] else "")
            raise StateDictError(f"adapters[{i}]: expected the names of adapters[0], got a difference in {listed}")
    return list(adapters)


def _scalings(scaling: Any, k: int) -> np.ndarray:
    """Return one scaling for each of k adapters.

    Raises:
        ArgumentError: if `scaling` is neither a number nor k numbers.
    """
    values: Any = scaling.tolist() if isinstance(scaling, np.ndarray | Tensor) else scaling
    if not isinstance(values, list | tuple):
        return np.full(k, check_number("scaling", values))
    factors = check_vector("scaling", values)
    if len(factors) != k:
        raise ArgumentError(f"scaling: expected one number, or one for each of {k} adapters, got {len(factors)}")
    return factors


def _is_known_finite(state: Adapter) -> bool:
    """Return whether a single pass over an adapter proves that all its floating-point tensors are finite.

    If the result is `False`, the tensors may still be finite, so the caller must check each tensor separately.
    """
    row = TensorList([x for x in state.values() if isinstance(x, Tensor) and x.is_floating_point()])
    # Without a form, the memory of a row may be unreadable. Within `across_ranks`, `gram` would wait for other ranks.
    return bool(row.form) and not is_sharded() and bool(gram([row]).isfinite())


def _truncate_pair(
    pair: FactorPair, states: Sequence[Adapter], finite: Sequence[bool], factors: np.ndarray, rank: int | None
) -> TruncatedSVD:
    """Compute the average of one pair of factors, truncated to a rank.

    Args:
        pair: the names of the two factors.
        states: the adapters.
        finite: for each adapter, whether its tensors are known to be finite.
        factors: the weight times the scaling of each adapter.
        rank: the rank of the result. By default, it is the largest rank in the adapters.
    """
    stacks = []
    for i, state in enumerate(states):
        stacks.append(pair.stack(state, prefix=f"adapters[{i}]: "))
        # The factors are checked before the decomposition, whose error could not name the invalid tensor.
        for name in () if finite[i] else (pair.first, pair.second):
            check_finite(f"adapters[{i}]: {name}", state[name])
        axes = [tuple(own[pair.first].shape[1:]) + tuple(own[pair.second].shape[:1]) for own in (states[0], state)]
        if axes[0] != axes[1]:
            given = [tuple(state[name].shape) for name in (pair.first, pair.second)]
            expected = [tuple(states[0][name].shape) for name in (pair.first, pair.second)]
            shapes = f"expected the shapes {expected} of adapters[0] except for the rank, got {given}"
            raise StateDictError(f"adapters[{i}]: {pair.first}, {pair.second}: {shapes}")
    m = states[0][pair.second].shape[0]
    try:
        combined = combine_stacks(factors.tolist(), stacks, m)
        return truncate(combined, m, max(stack.shape[-1] for stack in stacks) if rank is None else rank)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, and not in torch's stubs
        raise _overflow_error(f"{pair.first}, {pair.second}", torch.float64) from None


def _significant_residual(truncated: TruncatedSVD) -> Tensor:
    """Return two factors of the difference between a matrix and its truncation to a lower rank."""
    # Singular values that are as small as rounding errors are omitted.
    # The tolerance has the form of numpy.linalg.matrix_rank.
    size = len(truncated.values) * torch.finfo(torch.float64).eps * float(truncated.values[0])
    return truncated.remainder[:, truncated.values[truncated.rank :] > size]


def _round_pair(pair: FactorPair, stack: Tensor, states: Sequence[Adapter]) -> dict[str, Tensor]:
    """Split a stack into two factors, and round them to the dtypes of the first adapter."""
    factors = pair.unstack(stack, states[0])
    return {name: _cast_checked(name, x, states[0][name].dtype) for name, x in factors.items()}


def _cast_checked(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor to a dtype.

    Raises:
        StateDictError: if a value overflows.
    """
    result = x.to(dtype)
    if not is_finite(result):
        raise _overflow_error(name, dtype)
    return result


def _overflow_error(name: str, dtype: torch.dtype) -> StateDictError:
    """Return the error for an average that exceeds the range of a dtype."""
    return StateDictError(
        f"adapters: {name}: expected an average within the range of {dtype}, got an overflow; is `scaling` too large?"
    )


def _mean_tensor(name: str, states: Sequence[Adapter], finite: Sequence[bool], coefficients: np.ndarray) -> Tensor:
    """Compute the average over all adapters of a tensor that is not a LoRA factor.

    - The result for a floating-point tensor is a weighted sum, which is computed in float64 and rounded once.
    - The result for a batch counter (`num_batches_tracked`) is the maximum over the adapters.
    - The result for any other integer tensor is its value, which must be equal in all adapters.
    """
    first = states[0][name]
    for i, state in enumerate(states):
        x = state[name]
        if not isinstance(x, Tensor) or x.shape != first.shape or x.is_floating_point() != first.is_floating_point():
            expected = f"{first.dtype} of shape {tuple(first.shape)}" if isinstance(first, Tensor) else "a tensor"
            given = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise StateDictError(f"adapters[{i}]: {name}: expected {expected}, got {given}")
        check_memory({name: x}, f"adapters[{i}]: ")
        if not x.is_floating_point() and not is_batch_counter(name) and not torch.equal(x, first):
            raise StateDictError(
                f"adapters[{i}]: {name}: expected integers equal to those of adapters[0], got different values"
            )
        if x.is_floating_point() and not finite[i]:
            check_finite(f"adapters[{i}]: {name}", x)
    if is_batch_counter(name):
        return largest_counter([state[name] for state in states])
    if not first.is_floating_point():
        return first.detach().clone()
    # A generator converts one model at a time to float64, so the memory does not grow with the number of adapters.
    terms: Iterator[Tensor] = (
        c * state[name].detach().double() for c, state in zip(coefficients.tolist(), states, strict=True)
    )
    return _cast_checked(name, reduce(torch.add, terms), first.dtype)
