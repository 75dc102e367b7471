"""The average of LoRA adapters: the mean of their matrices, which is not that of their factors."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from manifoldagg._validation import check_choice, check_count, check_finite, check_number, check_vector, is_finite
from manifoldagg.averaging.karcher import check_weights
from manifoldagg.errors import ArgumentError, StateDictError
from manifoldagg.manifolds.layout import check_memory
from manifoldagg.manifolds.lora.factors import TruncatedSVD, combine_stacks, truncate
from manifoldagg.manifolds.lora.leaves import trainable_factors
from manifoldagg.manifolds.lora.peft import FactorPair, classify_tensors

__all__ = ["average_adapters"]

Adapter = Mapping[str, Tensor]
Scaling = float | Sequence[float]


@overload
def average_adapters(
    adapters: Sequence[Adapter],
    weights: Sequence[float] | None,
    rank: int,
    *,
    scaling: Scaling = ...,
    residual: None = ...,
) -> tuple[dict[str, Tensor], float]: ...


@overload
def average_adapters(
    adapters: Sequence[Adapter],
    weights: Sequence[float] | None,
    rank: int,
    *,
    scaling: Scaling = ...,
    residual: Literal["factors"],
) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]: ...


@torch.no_grad()
def average_adapters(
    adapters: Sequence[Adapter],
    weights: Sequence[float] | None,
    rank: int,
    *,
    scaling: Scaling = 1.0,
    residual: str | None = None,
) -> tuple[dict[str, Tensor], float] | tuple[dict[str, Tensor], float, dict[str, Tensor]]:
    r"""Compute the adapter of a rank that is nearest to the average of the adapters' weight changes.

    An adapter changes a weight by $s B A$, and there the average is $\bar X = \sum_i w_i s_i B_i A_i$. Averages of the
    $A_i$ and of the $B_i$ do not multiply to that: factors are known up to $B G$, $G^{-1} A$, and not even copies of
    one adapter in different $G$ come out as what they are. $\bar X$ is never formed. Its factors stand side by
    side, $[w_1 s_1 B_1, \dots, w_k s_k B_k]$ and $[A_1; \dots; A_k]$; two thin QRs and the SVD of their core, in
    float64, give the best matrix of the rank in Frobenius norm, as $U \sqrt\Sigma$ and $\sqrt\Sigma V^\top$:
    balanced, $B^\top B = A A^\top$, so that the same learning rates mean the same to everyone who goes on from there.
    Where there is less to keep than the rank, the rest of $B$ is 0 and that of $A$ drawn as PEFT draws it, from a fixed
    seed: the product is what it is, and all directions go on learning.

    Tensors are told apart by the names that PEFT gives them, in a file or in a module: pairs `lora_A`, `lora_B` and
    `lora_embedding_A`, `lora_embedding_B` are factors, also of convolutions; a bias of `lora_B` is scaled as they are;
    DoRA's magnitudes, heads and all else are averaged as the vectors that they are, integers must be equal. Time and
    memory are those of one pair after the other, $O((m + n) \sum_i r_i)$ numbers at once.

    Args:
        adapters: state dicts, of any ranks, with the same names otherwise.
        weights: one for each, not negative; they are normalised. `None`: equal.
        rank: of the result.
        scaling: what a model multiplies $B_i A_i$ with, $\alpha / r$ or with `use_rslora` $\alpha / \sqrt r$, over what
            the model that gets the result multiplies with: one number, or one for each. 1 where all are the same.
        residual: `"factors"` returns what the rank leaves out too.

    Returns:
        The adapter, in the dtypes, shapes and order of the first but for the rank; and
        $\|\bar X - \hat X\| / \|\bar X\|$ over all pairs, before the rounding to these dtypes: rounding where the rank
        allows. With `residual="factors"` also $\bar X - \hat X$, a state dict with the same names and the ranks that it
        needs, without the pairs of which nothing is left out. It is in the units of the adapter: added to a weight
        times the $s$ that the receiving model has for the adapter, its $\alpha / r$ whatever rank the rest has, it
        makes the average exact, $W + s B_{rest} A_{rest} + s \hat X$. `scaling` knows only ratios to this $s$.

    Raises:
        ArgumentError: naming the argument that does not fit.
        StateDictError: naming the adapter and the tensor that does not fit, or the tensor whose average is not finite
            in its dtype.

    Warns:
        UserWarning: where the last singular value kept equals the first left out: the best matrix is one of many.

    Source: Singhal et al. 2025 (FedEx-LoRA) for the residual.

    Example:
        >>> one = {"q.lora_A.weight": torch.tensor([[1.0, 0.0]]), "q.lora_B.weight": torch.tensor([[4.0], [0.0]])}
        >>> same = {"q.lora_A.weight": torch.tensor([[-2.0, 0.0]]), "q.lora_B.weight": torch.tensor([[-2.0], [0.0]])}
        >>> adapter, error = average_adapters([one, same], None, 1)
        >>> adapter["q.lora_B.weight"] @ adapter["q.lora_A.weight"], round(error, 12)
        (tensor([[4., 0.],
                [0., 0.]]), 0.0)
    """
    states = _check_adapters(adapters)
    shares = check_weights(weights, len(states))
    factors = _scalings(scaling, len(states)) * shares.numpy()
    check_count("rank", rank)
    check_choice("residual", residual, (None, "factors"))
    parts = classify_tensors(states[0], prefix="adapters[0]: ")
    if not parts.pairs:
        raise StateDictError("adapters[0]: expected pairs such as q.lora_A.weight and q.lora_B.weight, got none")
    found: dict[str, Tensor] = {}
    rest: dict[str, Tensor] = {}
    left_out, whole, tied = 0.0, 0.0, []
    for pair in parts.pairs:
        cut = _truncate_pair(pair, states, factors, rank)
        values = cut.values.tolist()
        left_out, whole = math.hypot(left_out, *values[rank:]), math.hypot(whole, *values)
        if not math.isfinite(whole):
            raise _overflow_error(f"{pair.first}, {pair.second}", torch.float64)
        if bool(cut.is_tied):
            tied.append(pair.module_name)
        found |= _round_pair(pair, trainable_factors(cut, states[0][pair.second].shape[0], torch.float64), states)
        if residual is not None and (kept := _significant_residual(cut)).shape[-1]:
            rest |= _round_pair(pair, kept, states)
    for names, coefficients in ((parts.scaled_biases, factors), (parts.unpaired, shares.numpy())):
        found |= {name: _mean_tensor(name, states, coefficients) for name in names}
    if tied:
        others = f" and at {len(tied) - 1} more" if tied[1:] else ""
        told = f"at {tied[0]}{others} two singular values are equal, and the best matrix of rank {rank} is one of many"
        warnings.warn(f"adapters: {told}", UserWarning, stacklevel=2)
    adapter = {name: found[name] for name in states[0]}
    error = left_out / whole if whole > 0 else 0.0
    return (adapter, error) if residual is None else (adapter, error, rest)


def _check_adapters(adapters: Sequence[Adapter]) -> list[Adapter]:
    """State dicts with the same names."""
    many = isinstance(adapters, Sequence) and not isinstance(adapters, str)
    if not many or not adapters or not all(isinstance(state, Mapping) for state in adapters):
        given = "none" if many and not adapters else type(adapters).__name__
        raise ArgumentError(f"adapters: expected a sequence of at least one state dict, got {given}")
    names = set(adapters[0])
    for i, state in enumerate(adapters):
        for name in state:
            if not isinstance(name, str):
                raise StateDictError(f"adapters[{i}]: expected names that are strings, got {name!r}")
        odd = sorted(map(str, names ^ set(state)))
        if odd:
            listed = ", ".join(odd[:3]) + (f" and {len(odd) - 3} more" if odd[3:] else "")
            raise StateDictError(f"adapters[{i}]: missing or extra beside adapters[0]: {listed}")
    return list(adapters)


def _scalings(scaling: Any, k: int) -> np.ndarray:
    values: Any = scaling.tolist() if isinstance(scaling, np.ndarray | Tensor) else scaling
    if not isinstance(values, list | tuple):
        return np.full(k, check_number("scaling", values))
    found = check_vector("scaling", values)
    if len(found) != k:
        raise ArgumentError(f"scaling: expected one number, or one for each of {k} adapters, got {len(found)}")
    return found


def _truncate_pair(pair: FactorPair, states: Sequence[Adapter], factors: np.ndarray, rank: int) -> TruncatedSVD:
    """The truncated sum of a pair, whose matrices must be of one size."""
    stacks = []
    for i, state in enumerate(states):
        stacks.append(pair.stack(state, prefix=f"adapters[{i}]: "))
        for name in (pair.first, pair.second):
            check_finite(f"adapters[{i}]: {name}", state[name])
        axes = [tuple(own[pair.first].shape[1:]) + tuple(own[pair.second].shape[:1]) for own in (states[0], state)]
        if axes[0] != axes[1]:
            given = [tuple(state[name].shape) for name in (pair.first, pair.second)]
            expected = [tuple(states[0][name].shape) for name in (pair.first, pair.second)]
            told = f"expected factors of {expected} but for the rank, as those of adapters[0], got {given}"
            raise StateDictError(f"adapters[{i}]: {pair.first}, {pair.second}: {told}")
    m = states[0][pair.second].shape[0]
    try:
        return truncate(combine_stacks(factors.tolist(), stacks, m), m, rank)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, and not in torch's stubs
        raise _overflow_error(f"{pair.first}, {pair.second}", torch.float64) from None


def _significant_residual(truncated: TruncatedSVD) -> Tensor:
    """The factors of what is left out and is not rounding."""
    size = len(truncated.values) * torch.finfo(torch.float64).eps * float(truncated.values[0])
    return truncated.remainder[:, truncated.values[truncated.rank :] > size]


def _round_pair(pair: FactorPair, stack: Tensor, states: Sequence[Adapter]) -> dict[str, Tensor]:
    found = pair.unstack(stack, states[0])
    return {name: _cast_checked(name, x, states[0][name].dtype) for name, x in found.items()}


def _cast_checked(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in the dtype of a result, which must hold it."""
    found = x.to(dtype)
    if not is_finite(found):
        raise _overflow_error(name, dtype)
    return found


def _overflow_error(name: str, dtype: torch.dtype) -> StateDictError:
    return StateDictError(f"adapters: {name}: expected a finite average, {dtype} holds none; is `scaling` too large?")


def _mean_tensor(name: str, states: Sequence[Adapter], coefficients: np.ndarray) -> Tensor:
    """The sum of a tensor that stands alone, in float64, rounded once; of integers the one that all have."""
    first = states[0][name]
    for i, state in enumerate(states):
        x = state[name]
        if not isinstance(x, Tensor) or x.shape != first.shape or x.is_floating_point() != first.is_floating_point():
            expected = f"{first.dtype} of shape {tuple(first.shape)}" if isinstance(first, Tensor) else "a tensor"
            given = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise StateDictError(f"adapters[{i}]: {name}: expected {expected}, got {given}")
        check_memory({name: x}, f"adapters[{i}]: ")
        if not x.is_floating_point() and not torch.equal(x, first):
            raise StateDictError(f"adapters[{i}]: {name}: expected integers equal to those of adapters[0]")
        if x.is_floating_point():
            check_finite(f"adapters[{i}]: {name}", x)
    if not first.is_floating_point():
        return first.detach().clone()
    terms: Iterator[Tensor] = (
        c * state[name].detach().double() for c, state in zip(coefficients.tolist(), states, strict=True)
    )
    return _cast_checked(name, reduce(torch.add, terms), first.dtype)
