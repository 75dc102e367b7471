"""Selection of the backend that computes inner products and linear combinations of rows.

The function `set_backend` or the environment variable `MANIFOLDAGG_BACKEND` selects a backend. The default is `"auto"`,
which selects `triton` for CUDA tensors and `cpu` for CPU tensors, if these backends are available.

A backend is a module with two functions. `block_products` computes inner products over blocks of entries, which the
kernel `gram` adds to Gram matrices. `combine` computes linear combinations. Both functions receive rows that
`Operands.prepare` has returned. If a backend cannot read the tensors of a call, its function returns `None` without
side effects. The reference backend then computes the result.
"""

import functools
import importlib
import os
import timeit
import warnings
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from manifoldagg._validation import check_choice
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels.backends import reference
from manifoldagg.kernels.blocks import Blocks
from manifoldagg.kernels.fused import LinearCombination, must_defer
from manifoldagg.kernels.operands import Operand, Operands, blocks_of, bump_version
from manifoldagg.kernels.tensor_list import TensorList

__all__ = [
    "available_backends",
    "backend_for",
    "block_products",
    "combine",
    "combine_many",
    "describe_backends",
    "gram_combine",
    "load_backend",
    "set_backend",
]

BACKENDS = ("reference", "cpu", "triton")
AUTO = "auto"
ENV_VARIABLE = "MANIFOLDAGG_BACKEND"
BENCHMARK_SIZE = 1 << 20
"""The length of the rows with which `describe_backends` measures the speed."""

_selected: str | None = None


def set_backend(name: str) -> str:
    """Select the backend that executes the kernels, for all threads.

    The backend `cpu` supports CPU tensors, and `triton` supports CUDA tensors. If the selected backend does not support
    the tensors of a call, the reference backend computes the result of this call.

    Args:
        name: `"reference"`, `"cpu"`, `"triton"` or `"auto"`. `"auto"` selects `triton` for CUDA tensors and `cpu` for
            CPU tensors, if they are available.

    Returns:
        The name that was selected before.

    Raises:
        ArgumentError: if the name is unknown or the backend is unavailable. The selection is then unchanged.

    Example:
        >>> before = set_backend("reference")
        >>> set_backend(before)
        'reference'
    """
    global _selected
    before = _selected or _from_env()
    check_choice("backend", name, (AUTO, *BACKENDS))
    if name != AUTO and (why := load_backend(name).unavailable()) is not None:
        raise ArgumentError(f"backend: expected an available backend, got {name!r}: {why}")
    _selected = name
    # The cache contains the modules of the previous selection.
    backend_for.cache_clear()
    return before


def available_backends() -> list[str]:
    """Return the names of the backends that are available on this machine.

    Example:
        >>> "reference" in available_backends()
        True
    """
    return [name for name in BACKENDS if load_backend(name).unavailable() is None]


@functools.cache
def backend_for(device: torch.device) -> ModuleType:
    """Return the backend for tensors on this device.

    Raises:
        ArgumentError: if `MANIFOLDAGG_BACKEND` is an unknown name or an unavailable backend.
    """
    name = _selected or _validated_from_env()
    return load_backend(_default_backend(device.type) if name == AUTO else name)


def block_products(rows: Operands, blocks: Blocks) -> np.ndarray:
    r"""Compute the inner products of all pairs of rows, separately for each block of consecutive entries.

    For k rows $r_i$ and B blocks, the result is a float64 array (B, k(k+1)/2). It contains the sum
    $\sum_{p \in b} r_i[p]\, r_j[p]$ over the entries $p$ of each block $b$, for each pair of rows $r_i$ and $r_j$ with
    $j \le i$.
    """
    rows = rows.prepare()
    found: np.ndarray | None = backend_for(rows.device).block_products(rows, blocks)
    return reference.block_products(rows, blocks) if found is None else found


def combine(
    base: Operand | None, rows: Operands, coefficients: Sequence[Sequence[float]], blocks: Blocks, out: Operand
) -> None:
    r"""Compute a base row plus a linear combination of rows, and write the result into the row `out`.

    Each segment $s$ of the rows, such as the parameters of one layer, has its own coefficients $c^{(s)}_j$. With the
    rows $r_j$, the result in this segment is $out = base + \sum_j c^{(s)}_j\, r_j$. Each entry is computed in float64
    and rounded once.
    """
    rows = rows.prepare()
    # Backends read and write contiguous tensors. Other targets are written through a temporary copy.
    start = base.contiguous() if isinstance(base, TensorList) and not base.is_contiguous else base
    target = out.new_empty() if isinstance(out, TensorList) and not out.is_contiguous else out
    if backend_for(rows.device).combine(start, rows, coefficients, blocks, target) is None:
        reference.combine(start, rows, coefficients, blocks, target)
    if target is not out:
        for tensor, piece in zip(out, target, strict=True):
            tensor.copy_(piece)


def combine_many(combinations: Sequence[LinearCombination]) -> None:
    """Compute several linear combinations of rows, and write each result into its target row.

    A target may also be an operand. Every combination reads the original values of its operands, even if another
    combination overwrites them. If the backend supports it, a single pass over the rows computes all combinations.

    Args:
        combinations: linear combinations of tensor lists of equal lengths. A target must not overlap other targets.
            Each operand must be identical to a target or not overlap it.

    Cost: with the compiled backend, every row is read once from memory for all combinations, without temporary memory
    of size P. With other backends, each combination reads its rows. If a later combination reads an output, this output
    is first computed in temporary memory.

    Example:
        >>> model, velocity, step = (TensorList([torch.full((2,), x)]) for x in (0.0, 4.0, 1.0))
        >>> terms = [velocity, step], [[0.5, 1.0]], [None, None]
        >>> combine_many([LinearCombination.of(None, *terms, velocity), LinearCombination.of(model, *terms, model)])
        >>> velocity, model
        ((tensor([3., 3.]),), (tensor([3., 3.]),))
    """
    # The order of writes matters, because a target may be an operand of a later combination.
    aside = must_defer(combinations)
    rows = [row for goal in combinations for row in (goal.out, *goal.inputs)]
    # Only some backends implement the fused operation.
    together = getattr(backend_for(combinations[0].rows.device), "combine_many", None)
    whole = all(isinstance(row, Tensor) or row.is_contiguous for row in rows)
    if together is None or not whole or together(combinations, aside) is None:
        _combine_sequentially(combinations, aside)
    for goal in combinations:
        bump_version(goal.out)


def gram_combine(rows: Operands, blocks: Blocks, combinations: Sequence[LinearCombination]) -> np.ndarray:
    """Compute inner products and several linear combinations of vectors, in one pass if the backend supports it.

    The function writes each linear combination into its target. It returns the inner products of all pairs of `rows`,
    separately for each block of consecutive entries. For k rows and B blocks, the result is a float64 array
    (B, k(k+1)/2) in the order of `block_products`.
    """
    rows = rows.prepare()
    together = getattr(backend_for(rows.device), "gram_combine", None)
    sums: np.ndarray | None = None if together is None else together(rows, blocks, combinations)
    if sums is not None:
        return sums
    # The targets are in newly allocated memory, so the order of the combinations and the products has no effect.
    for goal in combinations:
        combine(goal.base, goal.rows, goal.coefficients, blocks, goal.out)
    return block_products(rows, blocks)


def _combine_sequentially(combinations: Sequence[LinearCombination], deferred: Sequence[bool]) -> None:
    # Deferred outputs are computed first, into temporary memory, while all operands still have their old values.
    """Compute several linear combinations one after another.

    This is the fallback for backends that cannot compute several combinations in one pass.
    """
    held = []
    for goal, late in sorted(zip(combinations, deferred, strict=True), key=lambda pair: not pair[1]):
        target = goal.target.new_empty() if late else goal.target
        size = goal.rows.size
        blocks = Blocks.of(((0, size),)) if len(goal.coefficients) == 1 else blocks_of(goal.target.lengths, size)
        combine(goal.base, goal.rows, goal.coefficients, blocks, target)
        held += [pair for pair in zip(goal.target, target, strict=True) if late]
    for tensor, piece in held:
        tensor.copy_(piece)


def describe_backends() -> list[tuple[str, str]]:
    """Return pairs of a name and a description: one for each backend, and a last one for the current selection.

    The description of a backend is its status. The last pair has the name `"chosen"`. If the selection is automatic,
    its description includes the measured duration of one aggregation step on the CPU.
    """
    why = {name: load_backend(name).unavailable() for name in BACKENDS}
    lines = [(name, _describe_available(name) if reason is None else reason) for name, reason in why.items()]
    if (name := _selected or _from_env()) != AUTO:
        source = "set_backend" if _selected is not None else ENV_VARIABLE
        status = f"{name}, by {source}" if name in BACKENDS else f"{source} is not one of them: {name!r}"
        return [*lines, ("chosen", status if why.get(name) is None else f"{status}, but it is unavailable")]
    times = ", ".join(f"{name} {1e3 * _time_step(name):.2f} ms" for name in BACKENDS[:2] if why[name] is None)
    chosen = f"{_default_backend('cpu')} on the CPU: one step of {BENCHMARK_SIZE} float32 entries took {times}"
    return [*lines, ("chosen", chosen if why["triton"] is not None else f"triton on CUDA; {chosen}")]


@functools.cache
def load_backend(name: str) -> ModuleType:
    """Import the module of a backend."""
    return reference if name == "reference" else importlib.import_module(f"manifoldagg.kernels.backends.{name}")


def _describe_available(name: str) -> str:
    """Return the status of an available backend, with the origin of its library if it has one."""
    origin = getattr(load_backend(name), "origin", None)
    return "works" if origin is None else f"works, {origin()}"


def _from_env() -> str:
    """Return the backend name in `MANIFOLDAGG_BACKEND`, or `"auto"`, without validation."""
    return os.environ.get(ENV_VARIABLE) or AUTO


@functools.cache
def _validated_from_env() -> str:
    """Return the backend that the environment variable names.

    Raises:
        ArgumentError: if the name is unknown, or if the backend is unavailable.
    """
    name = _from_env()
    check_choice(ENV_VARIABLE, name, (AUTO, *BACKENDS))
    if name != AUTO and (why := load_backend(name).unavailable()) is not None:
        raise ArgumentError(f"{ENV_VARIABLE}: expected an available backend, got {name!r}: {why}")
    return name


@functools.cache
def _default_backend(device: str) -> str:
    """Return the default backend for a device type. Warn once if the CPU backend is unavailable."""
    name = {"cuda": "triton", "cpu": "cpu"}.get(device, "reference")
    why = load_backend(name).unavailable()
    if why is not None and device == "cpu":
        warnings.warn(
            f"manifoldagg: the compiled kernels are unavailable, using the slower reference kernels: {why}",
            RuntimeWarning,
            stacklevel=2,
        )
    return name if why is None else "reference"


def _time_step(name: str) -> float:
    """Measure how many seconds a CPU backend needs for one aggregation step.

    A step consists of one call of `block_products` and one call of `combine`. The result is the minimum of three runs,
    because other processes can only slow down a run.
    """
    base, *vectors = [torch.full((BENCHMARK_SIZE,), float(i), dtype=torch.float32, device="cpu") for i in range(4)]
    rows = Operands.of(vectors, base).prepare()
    out = torch.empty_like(base)
    blocks = Blocks.of(((0, BENCHMARK_SIZE),))

    def step() -> None:
        load_backend(name).block_products(rows, blocks)
        load_backend(name).combine(base, rows, [[0.1, 0.2, 0.3]], blocks, out)

    return min(timeit.repeat(step, number=1, repeat=3))
