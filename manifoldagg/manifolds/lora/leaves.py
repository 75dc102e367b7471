"""Conversion between the LoRA adapters of a state dict and the points of a parameter space.

A LoRA adapter changes a weight matrix by the product $B A$ of two factors, which are two tensors of the state dict.
This module replaces the two factors by one tensor, which represents their product. It also converts this tensor back to
two factors.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from manifoldagg._validation import is_finite
from manifoldagg.errors import ArgumentError, StateDictError
from manifoldagg.manifolds.layout import Entry, Layout, check_memory, check_names
from manifoldagg.manifolds.lora.factors import TruncatedSVD, truncate
from manifoldagg.manifolds.lora.lowrank import LowRank
from manifoldagg.manifolds.lora.peft import FactorPair, classify_tensors
from manifoldagg.manifolds.lora.scaling import ScaledModule, Scaling, resolve_scalings
from manifoldagg.manifolds.manifold import Manifold

__all__ = ["Adapters", "FactorEntries", "ScaledBias", "trainable_factors"]


@dataclass(frozen=True)
class FactorEntries:
    """The two factors of a LoRA adapter in a state dict, and the scaling of their product.

    In a parameter space, one tensor (a leaf) represents the scaled product $X = s B A$ of the two factors.

    Attributes:
        first: the name, shape and dtype of $A$ (r, ...). All axes after the first count as one axis.
        second: the name, shape and dtype of $B$ (m, r), or (m, r, 1, 1) for a convolution.
        scaling: the scaling $s$.

    Raises:
        ArgumentError: if the factors cannot be multiplied, or their names do not form a pair.
    """

    first: Entry
    second: Entry
    scaling: float

    def __post_init__(self) -> None:
        sizes = self.first.size * self.second.size
        if classify_tensors([self.first.name, self.second.name]).pairs != (self.pair,):
            raise ArgumentError(
                f"{self.first.name}: expected the name of a first factor that matches {self.second.name}"
            )
        if self.first.shape[:1] != self.second.shape[1:2] or math.prod(self.second.shape[2:]) != 1 or not sizes:
            raise ArgumentError(
                f"{self.second.name}: expected a factor that can be multiplied by {self.first.name}, got shapes "
                f"{self.second.shape} and {self.first.shape}"
            )
        if not 0 < self.scaling < math.inf:
            raise ArgumentError(f"{self.pair.module_name}: expected a scaling > 0, got {self.scaling}")

    @cached_property
    def pair(self) -> FactorPair:
        return FactorPair(self.first.name, self.second.name)

    @cached_property
    def leaf(self) -> Entry:
        """The name, shape and dtype of the tensor that replaces the two factors $A$ and $B$ of the adapter.

        The dtype is wide enough to represent the values of both factors without rounding.
        """
        return Entry(self.pair.leaf_name, self.space.shape, _wider_dtype(self.first.dtype, self.second.dtype))

    @cached_property
    def space(self) -> LowRank:
        """The manifold of the leaf. Its rank cannot exceed the number of rows or columns."""
        m, n = self.second.shape[0], math.prod(self.first.shape[1:])
        return LowRank(m, n, min(self.rank, m, n))

    @property
    def rank(self) -> int:
        """The number of rows of A."""
        return self.first.shape[0]

    def check(self, state: Mapping[str, Tensor], prefix: str) -> int:
        """Check the two factors $A$ and $B$ of this adapter in the state dict of a client, and return their rank.

        The rank may differ from the rank of this adapter. All other sizes of the factors must be equal.

        Raises:
            StateDictError: if a tensor does not match, or has a wider dtype than the combined tensor `leaf`. The
                message contains the name of the tensor.
        """
        rank = self.pair.check(state, prefix=prefix)
        for entry in (self.first, self.second):
            if state[entry.name].dtype.itemsize > self.leaf.dtype.itemsize:
                raise StateDictError(f"{prefix}{entry.name}: expected {entry.dtype}, got {state[entry.name].dtype}")
        own = [entry.shape for entry in (self.first, self.second)]
        given = [tuple(state[entry.name].shape) for entry in (self.first, self.second)]
        if (own[0][1:], own[1][0]) != (given[0][1:], given[1][0]):
            names = f"{prefix}{self.first.name}, {self.second.name}"
            raise StateDictError(
                f"{names}: expected shapes {own[0]}, {own[1]} up to the rank, got {given[0]}, {given[1]}"
            )
        return rank

    def stack(self, state: Mapping[str, Tensor], scaling: float, prefix: str) -> Tensor:
        """Convert the factors $A$ and $B$ of a state dict to one tensor that represents the product $s B A$.

        The number $s$ is the argument `scaling`. If the rank of the product is too high for this adapter, the product
        is replaced by the nearest matrix of the permitted rank.

        Raises:
            StateDictError: if a tensor is not finite, or overflows when it is scaled.
        """
        stack = self.pair.stack(state, prefix=prefix).double()
        # Only B is scaled, in float64, so that the scaling is rounded together with the truncation.
        stack[: self.space.m] *= scaling
        for entry in (self.first, self.second):
            if not is_finite(state[entry.name]):
                raise StateDictError(f"{prefix}{entry.name}: expected finite values, got NaN or infinity")
        point = self.space.project(stack).to(self.leaf.dtype) if is_finite(stack) else stack
        if not is_finite(point):
            problem = f"expected finite values in {self.leaf.dtype} after scaling by {scaling}, got an overflow"
            raise StateDictError(f"{prefix}{self.second.name}: {problem}")
        return point

    def split(self, point: Tensor) -> dict[str, Tensor]:
        r"""Convert the tensor that represents this adapter back to the factors $A$ and $B$ of a state dict.

        The factors have their original dtypes, and their product does not include the scaling. In general, the factors
        are balanced: $B^\top B = A A^\top$. There are two exceptions:

        - If exactly one factor is 0, as in a new adapter, the factors are returned without balancing.
        - If the product has a lower rank than the factors, some rows of $A$ are multiplied by columns of $B$ that are
          0. These rows are initialised as in PEFT.

        Raises:
            StateDictError: if the dtype of a tensor overflows.
        """
        m = self.space.m
        # The scaling belongs to B alone, as in `stack`. The division is in place, so it needs a copy.
        x = point.detach().to(torch.float64, copy=True)
        x[:m] /= self.scaling
        # If exactly one factor is 0, the adapter is in its initial state, and its factors are returned unchanged.
        is_initial = x.shape[-1] == self.rank and bool(x[:m].any()) != bool(x[m:].any())
        x = x if is_initial else trainable_factors(truncate(x, m, self.rank), m, point.dtype)
        tensors = self.pair.unstack(x, {entry.name: entry for entry in (self.first, self.second)})
        return {entry.name: _cast_checked(tensors[entry.name], entry) for entry in (self.first, self.second)}


@dataclass(frozen=True)
class ScaledBias:
    """The bias of the layer `lora_B` of a LoRA adapter.

    The model multiplies the output of this layer by the scaling of the adapter, so the bias is scaled as well.

    Attributes:
        entry: the name, shape and dtype of the bias.
        factor_name: the name of the weight of `lora_B`.
        scaling: the scaling of the adapter.
    """

    entry: Entry
    factor_name: str
    scaling: float


@dataclass(frozen=True)
class Adapters:
    """The LoRA adapters of a state dict, with methods that combine the two factors of each adapter into one tensor.

    A state dict of the library PEFT contains two factors for each adapter, $A$ (`lora_A`) and $B$ (`lora_B`). A
    *stacked* state dict instead contains one tensor for each adapter, which represents the product $s B A$ with the
    scaling $s$. If the layer `lora_B` has a bias, the stacked state dict contains the bias multiplied by $s$. All other
    entries are the same in both state dicts.

    Attributes:
        factors: the two factors of each adapter.
        biases: the biases of the layers `lora_B`, which only some adapters have.
    """

    factors: tuple[FactorEntries, ...]
    biases: tuple[ScaledBias, ...] = ()

    @staticmethod
    def of(state: Mapping[str, Tensor], scaling: Scaling = 1.0, *, prefix: str = "") -> "Adapters":
        """Return the adapters of a state dict.

        Args:
            state: the state dict.
            scaling: the scaling, as for
                [`resolve_scalings`][manifoldagg.manifolds.lora.scaling.resolve_scalings].
            prefix: the start of error messages.

        Raises:
            StateDictError: if there are no adapters, or a tensor does not match. The message contains its name.
            ArgumentError: if the scaling is invalid.
        """
        parts = classify_tensors(state, prefix=prefix)
        if not parts.pairs:
            raise StateDictError(
                f"{prefix}expected pairs such as q.lora_A.weight and q.lora_B.weight, got names without a pair"
            )
        own = _pair_scalings(scaling, {pair: pair.check(state, prefix=prefix) for pair in parts.pairs}, prefix)
        entries = {name: Entry(name, tuple(x.shape), x.dtype) for name, x in state.items()}
        pairs = [FactorEntries(entries[pair.first], entries[pair.second], own[pair]) for pair in parts.pairs]
        # Only some adapters have biases. A bias belongs to the pair whose second factor has the same name.
        biases = []
        for pair in parts.pairs:
            if pair.bias_name in parts.scaled_biases:
                biases.append(ScaledBias(entries[pair.bias_name], pair.second, own[pair]))
        if conflicts := {pair.leaf_name for pair in parts.pairs} & entries.keys():
            raise StateDictError(f"{prefix}{min(conflicts)}: expected another name, got the name of a pair of factors")
        if unmatched := set(parts.scaled_biases) - {bias.entry.name for bias in biases}:
            raise StateDictError(
                f"{prefix}{min(unmatched)}: expected the bias of a factor, got a bias without its factor"
            )
        return Adapters(tuple(pairs), tuple(biases))

    def __post_init__(self) -> None:
        seconds = {pair.second.name for pair in self.factors}
        own = [*self._factors_by_leaf, *self._adapter_entries]
        # Each pair has three names: the leaf and two factors. Repeated names would make the set smaller.
        once = len(set(own)) == 3 * len(self.factors) + len(self.biases)
        if not once or not {bias.factor_name for bias in self.biases} <= seconds:
            raise ArgumentError("adapters: expected distinct pairs of entries and their biases, got repeated names")

    def check_space(self, layout: Layout, manifolds: tuple[tuple[str, Manifold], ...]) -> None:
        """Check that each adapter is a leaf of a space, with the matching manifold.

        Raises:
            ArgumentError: if a leaf does not match. The message contains its name.
        """
        leaves = {leaf.name: leaf for leaf in layout.leaves}
        curved = dict(manifolds)
        for pair in self.factors:
            name = pair.leaf.name
            space = curved.get(name)
            own = isinstance(space, LowRank) and replace(space, state_rank=None) == pair.space
            if leaves.get(name) != pair.leaf or not own:
                raise ArgumentError(
                    f"adapters: {name}: expected a leaf of shape {pair.leaf.shape} on {pair.space}, got "
                    f"{leaves.get(name)} on {space}"
                )
        for entry in self._stacked_biases:
            if leaves.get(entry.name) != entry:
                raise ArgumentError(
                    f"adapters: {entry.name}: expected a leaf of shape {entry.shape}, got {leaves.get(entry.name)}"
                )

    @property
    def spaces(self) -> dict[str, LowRank]:
        """The manifold of each leaf by name."""
        return {pair.leaf.name: pair.space for pair in self.factors}

    @cached_property
    def _factors_by_leaf(self) -> dict[str, FactorEntries]:
        """The pairs of entries by the name of their leaf."""
        return {pair.leaf.name: pair for pair in self.factors}

    def entries(self, stacked: Mapping[str, Entry]) -> dict[str, Entry]:
        """Replace the entry of each LoRA adapter by the entries of its two factors.

        An entry is the name, shape and dtype of one tensor of a state dict.

        Args:
            stacked: a mapping from names to entries, of a state dict that contains one tensor for each adapter.
        """
        biases = {bias.entry.name: bias.entry for bias in self.biases}
        entries: dict[str, Entry] = {}
        for name, entry in stacked.items():
            pair = self._factors_by_leaf.get(name)
            entries |= {e.name: e for e in (pair.first, pair.second)} if pair else {name: biases.get(name, entry)}
        return entries

    def gauge_free_norms(self, stacked: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Replace the factors of each LoRA adapter by the approximate Frobenius norm of their product.

        Different factors can have the same product, so the norms of the factors of two models are not comparable. The
        norms of the products are comparable.

        Args:
            stacked: a state dict in which one tensor contains both factors of an adapter.
        """
        norms = dict(stacked)
        for name, pair in self._factors_by_leaf.items():
            x = stacked[name].detach().double().view(pair.leaf.shape)
            b, a = x[: pair.space.m], x[pair.space.m :]
            # |B A|² = <BᵀB, A Aᵀ> needs only matrices of the size of the rank. Gram matrices square the condition
            # number of the factors, so the result is approximate, and rounding can make it negative.
            norms[name] = ((b.mT @ b) * (a.mT @ a)).sum().clamp(min=0).sqrt()[None]
        return norms

    @cached_property
    def _adapter_entries(self) -> dict[str, Entry]:
        """The entries of all factors and scaled biases in a state dict, by name."""
        factors = {entry.name: entry for pair in self.factors for entry in (pair.first, pair.second)}
        return factors | {bias.entry.name: bias.entry for bias in self.biases}

    def empty_stacked(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict in which one placeholder tensor replaces the two factors of each LoRA adapter.

        The placeholder has the name, shape and dtype of the tensor that represents the product of the factors, but
        uninitialised values. The biases of the adapters are also uninitialised.
        """
        entries = (*(pair.leaf for pair in self.factors), *self._stacked_biases)
        return self._replace_factors(
            state, {entry.name: torch.empty(entry.shape, dtype=entry.dtype) for entry in entries}
        )

    def stack_factors(
        self, state: Mapping[str, Tensor], prefix: str = "", scaling: Scaling | None = None
    ) -> dict[str, Tensor]:
        """Convert a state dict to a stacked state dict. Its adapters may have any ranks.

        Args:
            state: a state dict with these adapters.
            prefix: the start of error messages.
            scaling: the scaling of `state`, if it differs from the scaling of these adapters.

        Raises:
            StateDictError: if a tensor is missing or does not match. The message contains its name.
            ArgumentError: if the scaling is invalid.
        """
        # Only the names of adapters are compared here. The layout checks the other entries after the replacement.
        check_names(
            self._adapter_entries.keys(),
            state.keys() & (self._adapter_entries.keys() | self._factors_by_leaf.keys()),
            prefix,
        )
        # The config of a client refers to its own ranks, so the ranks of its tensors determine its scalings.
        ranks = {pair.pair: pair.check(state, prefix) for pair in self.factors}
        own = {pair.second.name: pair.scaling for pair in self.factors}
        if scaling is not None:
            own = {pair.second: value for pair, value in _pair_scalings(scaling, ranks, prefix).items()}
        stacks = {pair.leaf.name: pair.stack(state, own[pair.second.name], prefix) for pair in self.factors}
        for bias in self.biases:
            name = bias.entry.name
            given = state[name]
            if (
                not isinstance(given, Tensor)
                or tuple(given.shape) != bias.entry.shape
                or given.dtype != bias.entry.dtype
            ):
                what = (
                    f"{given.dtype} of shape {tuple(given.shape)}"
                    if isinstance(given, Tensor)
                    else type(given).__name__
                )
                raise StateDictError(
                    f"{prefix}{name}: expected {bias.entry.dtype} of shape {bias.entry.shape}, got {what}"
                )
            check_memory({name: given}, prefix)
            # The product is formed in float64, so a bf16 or fp16 bias is rounded only once.
            stacks[name] = (own[bias.factor_name] * given.detach().double()).to(_wider_dtype(given.dtype))
        return self._replace_factors(state, stacks)

    def split(self, stacked: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert a stacked state dict to a state dict with the original ranks, dtypes and scaling.

        Raises:
            StateDictError: if the dtype of a tensor overflows. The message contains its name.
        """
        biases = {bias.entry.name: bias for bias in self.biases}
        state: dict[str, Tensor] = {}
        for name, x in stacked.items():
            if name in self._factors_by_leaf:
                state |= self._factors_by_leaf[name].split(x)
            elif name in biases:
                state[name] = _cast_checked(x.detach().double() / biases[name].scaling, biases[name].entry)
            else:
                state[name] = x
        return state

    @cached_property
    def _stacked_biases(self) -> tuple[Entry, ...]:
        """The entries of the scaled biases in a stacked state dict, where they have a wider dtype."""
        return tuple([Entry(b.entry.name, b.entry.shape, _wider_dtype(b.entry.dtype)) for b in self.biases])

    def _replace_factors(self, state: Mapping[str, Tensor], stacks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Replace each first factor of a state dict by its stack, and remove the second factors."""
        # A stack takes the position of the first factor, so the order of the other entries does not change.
        leaf_names = {pair.first.name: pair.leaf.name for pair in self.factors}
        removed = {pair.second.name for pair in self.factors}
        names = {leaf_names.get(name, name): name for name in state if name not in removed}
        return {new: stacks[new] if new in stacks else state[name] for new, name in names.items()}


def trainable_factors(truncated_svd: TruncatedSVD, m: int, dtype: torch.dtype) -> Tensor:
    r"""Factorise a matrix into $B$ (m, r) and $A$ (r, n) such that gradient descent can train both factors completely.

    If the rank of the matrix is r, the factors are balanced: $B^\top B = A A^\top$. If the rank is lower, balanced
    factors would have zero columns in $B$ and zero rows in $A$. The gradients of these columns and rows would also be
    0, so training would never change them. The function therefore initialises the zero rows of $A$ as in PEFT, with
    uniform random numbers from the interval $[-1 / \sqrt n, 1 / \sqrt n]$. The seed is fixed. The zero columns of $B$
    remain 0, so the product does not change.

    Args:
        truncated_svd: the SVD of the matrix.
        m: the number of rows of the matrix.
        dtype: the dtype of the original factors. Singular values at the level of its rounding errors count as 0.

    Returns:
        A tensor (m + n, rank) with $B$ on top of $A^\top$.
    """
    point = truncated_svd.point
    # A singular value at the rounding level of the original factors does not count as rank. The tolerance has the form
    # of numpy.linalg.matrix_rank: a dimension times the machine epsilon times the largest singular value.
    rounding = len(truncated_svd.values) * torch.finfo(dtype).eps * truncated_svd.values[:1]
    numerical_rank = int((truncated_svd.values[: truncated_svd.rank] > rounding).sum())
    if numerical_rank < truncated_svd.rank:
        n = len(point) - m
        point[:m, numerical_rank:] = 0
        point[m:, numerical_rank:] = _initial_factor(n, truncated_svd.rank - numerical_rank).to(point)
    return point


@lru_cache(maxsize=16)
def _initial_factor(n: int, rank: int) -> Tensor:
    # The fixed seed makes the result of `split` reproducible.
    """Return the columns (n, rank) with which PEFT initialises A, drawn with a fixed seed."""
    bound = 1 / math.sqrt(n)
    drawn = torch.rand(n, rank, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return bound * (2 * drawn - 1)


def _pair_scalings(scaling: Scaling, ranks: Mapping[FactorPair, int], prefix: str) -> dict[FactorPair, float]:
    """Return the scaling of each pair of factors with the given ranks."""
    values = resolve_scalings(
        scaling, [ScaledModule(pair.module_name, rank) for pair, rank in ranks.items()], prefix=prefix
    )
    return dict(zip(ranks, values, strict=True))


def _cast_checked(x: Tensor, entry: Entry) -> Tensor:
    """Convert a tensor to the dtype of an entry.

    Raises:
        StateDictError: if a value overflows.
    """
    converted = x.to(entry.dtype)
    if not is_finite(converted):
        raise StateDictError(f"{entry.name}: expected values in the range of {entry.dtype}, got an overflow")
    return converted


def _wider_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return float32 or float64, the narrower dtype that represents all given dtypes exactly."""
    wide = torch.float32
    for dtype in dtypes:
        wide = torch.promote_types(wide, dtype)
    return wide
