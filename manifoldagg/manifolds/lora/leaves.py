"""LoRA adapters as leaves: two factors of a state dict become one stack, and are split again, balanced."""

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
    r"""Two entries of a state dict that form one leaf, $X = s B A$.

    Attributes:
        first: A (r, ...), whose other axes are taken for one.
        second: B (m, r), or (m, r, 1, 1) beside a convolution.
        scaling: $s$.

    Raises:
        ArgumentError: if they do not multiply.
    """

    first: Entry
    second: Entry
    scaling: float

    def __post_init__(self) -> None:
        sizes = self.first.size * self.second.size
        if classify_tensors([self.first.name, self.second.name]).pairs != (self.pair,):
            raise ArgumentError(
                f"{self.first.name}: expected the name of a first factor, and {self.second.name} beside it"
            )
        if self.first.shape[:1] != self.second.shape[1:2] or math.prod(self.second.shape[2:]) != 1 or not sizes:
            raise ArgumentError(f"{self.second.name}: expected a factor that {self.first.name} can be multiplied with")
        if not 0 < self.scaling < math.inf:
            raise ArgumentError(f"{self.pair.module_name}: expected a scaling above 0, got {self.scaling}")

    @cached_property
    def pair(self) -> FactorPair:
        """The names of the two entries."""
        return FactorPair(self.first.name, self.second.name)

    @cached_property
    def leaf(self) -> Entry:
        """The stack of both factors as a layout entry, in a dtype that represents both exactly."""
        return Entry(self.pair.leaf_name, self.space.shape, _wider_dtype(self.first.dtype, self.second.dtype))

    @cached_property
    def space(self) -> LowRank:
        """The manifold of the leaf; its rank is at most the number of rows or columns."""
        m, n = self.second.shape[0], math.prod(self.first.shape[1:])
        return LowRank(m, n, min(self.rank, m, n))

    @property
    def rank(self) -> int:
        """The number of rows of A."""
        return self.first.shape[0]

    def check(self, state: Mapping[str, Tensor], prefix: str) -> int:
        """Check two tensors against the entries and return their rank, which may differ.

        Raises:
            StateDictError: naming the tensor that does not.
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
                f"{names}: expected shapes {own[0]}, {own[1]} but for the rank, got {given[0]}, {given[1]}"
            )
        return rank

    def stack(self, state: Mapping[str, Tensor], scaling: float, prefix: str) -> Tensor:
        """Return the point of the leaf nearest to the product of two tensors of any rank.

        Raises:
            StateDictError: naming a tensor that is not finite, or that the scaling makes so.
        """
        stack = self.pair.stack(state, prefix=prefix).double()
        stack[: self.space.m] *= scaling
        for entry in (self.first, self.second):
            if not is_finite(state[entry.name]):
                raise StateDictError(f"{prefix}{entry.name}: expected finite values, got NaN or infinity")
        point = self.space.project(stack).to(self.leaf.dtype) if is_finite(stack) else stack
        if not is_finite(point):
            told = f"expected finite values, got one that {scaling} makes infinite in {self.leaf.dtype}"
            raise StateDictError(f"{prefix}{self.second.name}: {told}")
        return point

    def split(self, point: Tensor) -> dict[str, Tensor]:
        """Return the two tensors of a point of the leaf in their dtypes: balanced, without the scaling.

        Raises:
            StateDictError: naming a tensor whose dtype overflows.
        """
        m = self.space.m
        x = point.detach().to(torch.float64, copy=True)
        x[:m] /= self.scaling
        # Nothing is learned yet: what it begins with is told as it is.
        begins = x.shape[-1] == self.rank and bool(x[:m].any()) != bool(x[m:].any())
        x = x if begins else trainable_factors(truncate(x, m, self.rank), m, point.dtype)
        found = self.pair.unstack(x, {entry.name: entry for entry in (self.first, self.second)})
        return {entry.name: _cast_checked(found[entry.name], entry) for entry in (self.first, self.second)}


@dataclass(frozen=True)
class ScaledBias:
    """The bias of a second factor, which a model scales like the product.

    Attributes:
        entry: of the state dict.
        factor_name: the name of the factor.
        scaling: of the pair.
    """

    entry: Entry
    factor_name: str
    scaling: float


@dataclass(frozen=True)
class Adapters:
    """The adapters of a state dict: the entries that form leaves, and the scaled biases.

    State dicts have their entries by PEFT's names, *stacked* ones a stack for each pair; all else is the same in both.

    Attributes:
        factors: pairs of entries.
        biases: of them.
    """

    factors: tuple[FactorEntries, ...]
    biases: tuple[ScaledBias, ...] = ()

    @staticmethod
    def of(state: Mapping[str, Tensor], scaling: Scaling = 1.0, *, prefix: str = "") -> "Adapters":
        """Find the adapters of a state dict.

        Args:
            state: name to tensor.
            scaling: as [`resolve_scalings`][manifoldagg.manifolds.lora.scaling.resolve_scalings] takes it.
            prefix: what messages begin with.

        Raises:
            StateDictError: if it has none, or naming a tensor that does not fit.
            ArgumentError: if the scaling does not.
        """
        parts = classify_tensors(state, prefix=prefix)
        if not parts.pairs:
            raise StateDictError(f"{prefix}expected pairs such as q.lora_A.weight and q.lora_B.weight, got none")
        own = _pair_scalings(scaling, {pair: pair.check(state, prefix=prefix) for pair in parts.pairs}, prefix)
        entries = {name: Entry(name, tuple(x.shape), x.dtype) for name, x in state.items()}
        pairs = [FactorEntries(entries[pair.first], entries[pair.second], own[pair]) for pair in parts.pairs]
        biases = []
        for pair in parts.pairs:
            if pair.bias_name in parts.scaled_biases:
                biases.append(ScaledBias(entries[pair.bias_name], pair.second, own[pair]))
        if odd := {pair.leaf_name for pair in parts.pairs} & entries.keys():
            raise StateDictError(f"{prefix}{min(odd)}: expected another name, as a pair of factors is called so")
        if odd := set(parts.scaled_biases) - {bias.entry.name for bias in biases}:
            raise StateDictError(f"{prefix}{min(odd)}: expected the bias of a factor that is there too")
        return Adapters(tuple(pairs), tuple(biases))

    def __post_init__(self) -> None:
        seconds = {pair.second.name for pair in self.factors}
        own = [*self._factors_by_leaf, *self._adapter_entries]
        once = len(set(own)) == 3 * len(self.factors) + len(self.biases)
        if not once or not {bias.factor_name for bias in self.biases} <= seconds:
            raise ArgumentError("adapters: expected pairs of entries, each of them once, and their biases")

    def check_space(self, layout: Layout, manifolds: tuple[tuple[str, Manifold], ...]) -> None:
        """Check that a space has each stack as a leaf of the right rank.

        Raises:
            ArgumentError: naming a pair that it has otherwise.
        """
        leaves = {leaf.name: leaf for leaf in layout.leaves}
        curved = dict(manifolds)
        for pair in self.factors:
            name = pair.leaf.name
            space = curved.get(name)
            own = isinstance(space, LowRank) and replace(space, state_rank=None) == pair.space
            if leaves.get(name) != pair.leaf or not own:
                raise ArgumentError(f"adapters: {name} stands for two factors: expected a leaf of it, on {pair.space}")
        for entry in self._stacked_biases:
            if leaves.get(entry.name) != entry:
                raise ArgumentError(f"adapters: {entry.name} is the bias of a factor: expected a leaf of it")

    @property
    def spaces(self) -> dict[str, LowRank]:
        """The manifold of each leaf."""
        return {pair.leaf.name: pair.space for pair in self.factors}

    @cached_property
    def _factors_by_leaf(self) -> dict[str, FactorEntries]:
        return {pair.leaf.name: pair for pair in self.factors}

    def entries(self, stacked: Mapping[str, Entry]) -> dict[str, Entry]:
        """Convert the entries of a stacked state dict to those of a state dict."""
        own = {bias.entry.name: bias.entry for bias in self.biases}
        found: dict[str, Entry] = {}
        for name, entry in stacked.items():
            pair = self._factors_by_leaf.get(name)
            found |= {e.name: e for e in (pair.first, pair.second)} if pair else {name: own.get(name, entry)}
        return found

    def gauge_free_norms(self, stacked: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Replace each stack by the approximate norm of its matrix, which is independent of the gauge."""
        found = dict(stacked)
        for name, pair in self._factors_by_leaf.items():
            x = stacked[name].detach().double().view(pair.leaf.shape)
            b, a = x[: pair.space.m], x[pair.space.m :]
            found[name] = ((b.mT @ b) * (a.mT @ a)).sum().clamp(min=0).sqrt()[None]
        return found

    @cached_property
    def _adapter_entries(self) -> dict[str, Entry]:
        """What a state dict has of adapters."""
        found = {entry.name: entry for pair in self.factors for entry in (pair.first, pair.second)}
        return found | {bias.entry.name: bias.entry for bias in self.biases}

    def empty_stacked(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a stacked state dict with empty stacks, for code that needs shapes only."""
        entries = (*(pair.leaf for pair in self.factors), *self._stacked_biases)
        return self._replace_factors(
            state, {entry.name: torch.empty(entry.shape, dtype=entry.dtype) for entry in entries}
        )

    def stack_factors(
        self, state: Mapping[str, Tensor], prefix: str = "", scaling: Scaling | None = None
    ) -> dict[str, Tensor]:
        """Convert a state dict whose pairs may have any ranks to a stacked one.

        Args:
            state: with the names of this one.
            prefix: what messages begin with.
            scaling: where the model that it comes from has another than this one.

        Raises:
            StateDictError: naming a tensor that is missing or does not fit.
            ArgumentError: if the scaling does not.
        """
        check_names(
            self._adapter_entries.keys(),
            state.keys() & (self._adapter_entries.keys() | self._factors_by_leaf.keys()),
            prefix,
        )
        ranks = {pair.pair: pair.check(state, prefix) for pair in self.factors}
        own = {pair.second.name: pair.scaling for pair in self.factors}
        if scaling is not None:
            own = {pair.second: value for pair, value in _pair_scalings(scaling, ranks, prefix).items()}
        made = {pair.leaf.name: pair.stack(state, own[pair.second.name], prefix) for pair in self.factors}
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
            made[name] = (own[bias.factor_name] * given.detach().double()).to(_wider_dtype(given.dtype))
        return self._replace_factors(state, made)

    def split(self, stacked: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert a stacked state dict to one with the original ranks, dtypes and scaling.

        Raises:
            StateDictError: naming a tensor whose dtype overflows.
        """
        biases = {bias.entry.name: bias for bias in self.biases}
        found: dict[str, Tensor] = {}
        for name, x in stacked.items():
            if name in self._factors_by_leaf:
                found |= self._factors_by_leaf[name].split(x)
            elif name in biases:
                found[name] = _cast_checked(x.detach().double() / biases[name].scaling, biases[name].entry)
            else:
                found[name] = x
        return found

    @cached_property
    def _stacked_biases(self) -> tuple[Entry, ...]:
        """As a stacked state dict has them."""
        return tuple([Entry(b.entry.name, b.entry.shape, _wider_dtype(b.entry.dtype)) for b in self.biases])

    def _replace_factors(self, state: Mapping[str, Tensor], stacks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state dict with its stacks where their first factors are."""
        place = {pair.first.name: pair.leaf.name for pair in self.factors}
        left = {pair.second.name for pair in self.factors}
        names = {place.get(name, name): name for name in state if name not in left}
        return {new: stacks[new] if new in stacks else state[name] for new, name in names.items()}


def trainable_factors(truncated_svd: TruncatedSVD, m: int, dtype: torch.dtype) -> Tensor:
    r"""Return balanced factors (m + n, rank) of a matrix, all of whose directions can be trained.

    Where the matrix has a lower rank, both factors of the rest would be 0, and so would their derivatives be for ever.
    There B is 0 and A as PEFT begins with it: uniform in $\pm 1 / \sqrt n$, here from a fixed seed. The product is the
    same.

    Args:
        truncated_svd: of the matrix.
        m: its rows.
        dtype: of what it was made of: whose rounding is not a direction.
    """
    point = truncated_svd.point
    rounding = len(truncated_svd.values) * torch.finfo(dtype).eps * truncated_svd.values[:1]
    kept = int((truncated_svd.values[: truncated_svd.rank] > rounding).sum())
    if kept < truncated_svd.rank:
        n = len(point) - m
        point[:m, kept:] = 0
        point[m:, kept:] = _initial_factor(n, truncated_svd.rank - kept).to(point)
    return point


@lru_cache(maxsize=16)
def _initial_factor(n: int, rank: int) -> Tensor:
    bound = 1 / math.sqrt(n)
    drawn = torch.rand(n, rank, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return bound * (2 * drawn - 1)


def _pair_scalings(scaling: Scaling, ranks: Mapping[FactorPair, int], prefix: str) -> dict[FactorPair, float]:
    """The scaling of each pair, which has this rank."""
    values = resolve_scalings(
        scaling, [ScaledModule(pair.module_name, rank) for pair, rank in ranks.items()], prefix=prefix
    )
    return dict(zip(ranks, values, strict=True))


def _cast_checked(x: Tensor, entry: Entry) -> Tensor:
    """`x` in the dtype of an entry, which must hold it."""
    found = x.to(entry.dtype)
    if not is_finite(found):
        raise StateDictError(f"{entry.name}: a value of the point overflows {entry.dtype}")
    return found


def _wider_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """One that rounds none of these: float32 or float64."""
    wide = torch.float32
    for dtype in dtypes:
        wide = torch.promote_types(wide, dtype)
    return wide
