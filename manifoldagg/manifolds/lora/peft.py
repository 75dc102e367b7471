"""Recognition of the tensors of LoRA adapters by the names that the library PEFT gives them."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldagg.errors import StateDictError
from manifoldagg.manifolds.layout import Entry, check_memory

__all__ = ["AdapterTensors", "FactorPair", "classify_tensors", "find_first_factor"]

# The tail is lazy, so that it does not match ".weight" as the name of an adapter such as ".default".
FIRST_FACTOR = re.compile(
    r"(?P<head>(?:.*\.)?)(?P<kind>lora_A|lora_embedding_A)(?P<tail>(?:\.[^.]+)??)(?P<weight>(?:\.weight)?)"
)
"""The pattern of the name of the first factor A. Files omit `.default`, and the names of embeddings omit `.weight`."""
UNPAIRED = re.compile(r"(?:.*\.)?lora_(?:magnitude_vector(?:\..+)?|B(?:\.[^.]+)?\.bias)")
"""The names of tensors of a low-rank adapter that are not factors."""
OTHER_ADAPTERS = re.compile(
    r"(?:.*\.)?(?:lora|ia3|hada|lokr|oft|boft|vera|vblora|randlora|delora|gralora|poly_lora|fourierft|waveft|hra|shira|c3a)"
    r"_[^.]+(?:\..+)?"
)
"""The names of tensors of other kinds of adapters."""


@dataclass(frozen=True)
class FactorPair:
    """The names of the two factors $A$ and $B$ of a LoRA adapter in a state dict.

    The adapter adds a multiple of the product $B A$ (m, n) to a weight matrix.

    Attributes:
        first: the name of $A$ (r, n). For a convolution, $A$ has more axes. All axes after the first are then flattened
            to one axis of length n.
        second: the name of $B$ (m, r). For a convolution, its shape is (m, r, 1, 1).
    """

    first: str
    second: str

    @property
    def module_name(self) -> str:
        """The name of the module to which the adapter belongs, without the names of the factors."""
        return re.sub(r"\.?lora_(?:embedding_)?A(?:\..*)?$", "", self.first)

    @property
    def leaf_name(self) -> str:
        """The name of the combined leaf: `….lora.weight` for `….lora_A.weight`."""
        found = FIRST_FACTOR.fullmatch(self.first)
        assert found is not None  # `classify_tensors` returns only matching names
        return f"{found['head']}{found['kind'].removesuffix('_A')}{found['tail']}{found['weight']}"

    @property
    def bias_name(self) -> str:
        """The name of the bias of the second factor, which exists only for some adapters."""
        return f"{self.second.removesuffix('.weight')}.bias"

    def check(self, state: Mapping[str, Tensor], *, prefix: str = "adapter: ") -> int:
        """Check the two tensors, and return their rank.

        Raises:
            StateDictError: if the tensors are not factors of one matrix. The message contains the name of a tensor.
        """
        a, b = state[self.first], state[self.second]
        for name, x in ((self.first, a), (self.second, b)):
            if not isinstance(x, Tensor) or not x.dtype.is_floating_point or x.ndim < 2 or x.numel() == 0:
                given = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                raise StateDictError(f"{prefix}{name}: expected a floating tensor with two or more axes, got {given}")
            if x.is_meta or x.layout is not torch.strided:
                storage = "on the meta device" if x.is_meta else f"with the layout {x.layout}"
                raise StateDictError(f"{prefix}{name}: expected a dense tensor with values, got a tensor {storage}")
        check_memory({self.first: a, self.second: b}, prefix)
        if b.shape[1] != a.shape[0] or math.prod(b.shape[2:]) != 1:
            expected = f"expected shape (any, {a.shape[0]}) because {self.first} has {a.shape[0]} rows"
            raise StateDictError(f"{prefix}{self.second}: {expected}, got {tuple(b.shape)}")
        return a.shape[0]

    def stack(self, state: Mapping[str, Tensor], *, prefix: str = "adapter: ") -> Tensor:
        r"""Concatenate the factors $B$ (m, r) and $A^\top$ (n, r) of a LoRA adapter into one tensor (m + n, r).

        If the factors in the state dict have different dtypes, the result has a dtype that represents all values of
        both factors without rounding.

        Raises:
            StateDictError: as in `check`.
        """
        self.check(state, prefix=prefix)
        a, b = state[self.first], state[self.second]
        # The promoted dtype of bf16 and fp16 is float32, which represents both exactly.
        wide = torch.promote_types(a.dtype, b.dtype)
        return torch.cat([b.detach().flatten(1).to(wide), a.detach().flatten(1).mT.to(wide)])

    def unstack(self, stack: Tensor, like: Mapping[str, Tensor | Entry]) -> dict[str, Tensor]:
        r"""Split a tensor (m + n, r), which contains $B$ on top of $A^\top$, into the factors $A$ and $B$.

        Args:
            stack: the tensor, whose rank r can be any number.
            like: the tensors or entries that determine the other sizes of the factors, by name.
        """
        a, b = like[self.first], like[self.second]
        m = b.shape[0]
        rank = stack.shape[-1]
        first = stack[m:].mT.contiguous().view(rank, *a.shape[1:])
        return {self.first: first, self.second: stack[:m].contiguous().view(m, rank, *b.shape[2:])}


@dataclass(frozen=True)
class AdapterTensors:
    """The names of the tensors of a LoRA adapter, grouped by their roles.

    Attributes:
        pairs: the names of the two factors `lora_A` and `lora_B` for each adapted layer, in the order of the state
            dict.
        scaled_biases: the names of the biases of the layers `lora_B`. The model multiplies these biases by the scaling
            of the adapter.
        unpaired: the names of all other tensors, such as the magnitudes of DoRA and classification heads.
    """

    pairs: tuple[FactorPair, ...]
    scaled_biases: tuple[str, ...]
    unpaired: tuple[str, ...]


def classify_tensors(names: Iterable[str], *, prefix: str = "adapter: ") -> AdapterTensors:
    """Classify the names of the tensors of an adapter.

    Raises:
        StateDictError: if the second factor of a pair is missing, or if a tensor belongs to another kind of adapter,
            whose tensors cannot be averaged.

    Example:
        >>> found = classify_tensors(["q.lora_A.weight", "q.lora_B.weight", "head.weight"])
        >>> found.pairs[0].module_name, found.unpaired
        ('q', ('head.weight',))
    """
    known = list(names)
    present = set(known)
    pairs: list[FactorPair] = []
    scaled: list[str] = []
    alone: list[str] = []
    taken: set[str] = set()
    # The first pass finds all pairs, because the second factor of a pair can precede the first.
    for name in known:
        second = _second_factor(name)
        if second is None:
            continue
        if second not in present:
            raise StateDictError(f"{prefix}{name}: expected {second} as the other factor, got a state dict without it")
        pairs.append(FactorPair(name, second))
        taken |= {name, second}
    for name in known:
        if name in taken:
            continue
        if UNPAIRED.fullmatch(name):
            (scaled if name.endswith(".bias") else alone).append(name)
        elif OTHER_ADAPTERS.fullmatch(name):
            raise StateDictError(f"{prefix}{name}: expected pairs lora_A and lora_B, got another kind of adapter")
        else:
            alone.append(name)
    return AdapterTensors(tuple(pairs), tuple(scaled), tuple(alone))


def find_first_factor(names: Iterable[str]) -> str | None:
    """Return the name of the factor `lora_A` of the first LoRA adapter among `names`.

    A factor `lora_A` without the matching factor `lora_B` does not count as an adapter. If there is no adapter, the
    result is `None`.

    Example:
        >>> find_first_factor(["w", "q.lora_A.weight", "q.lora_B.weight"])
        'q.lora_A.weight'
    """
    # For a model without adapters, one search in the joined names is faster than matching each name.
    known = list(names)
    if "lora_" not in "".join(known):
        return None
    present = set(known)
    return next((name for name in known if _second_factor(name) in present), None)


def _second_factor(name: str) -> str | None:
    """Return the name of B, given the name of A. The result is `None` for any other name."""
    found = FIRST_FACTOR.fullmatch(name)
    # The factors of a layer are modules with a `weight`. Only the factors of an embedding are parameters themselves.
    if found is None or (found["kind"] == "lora_A" and not found["weight"]):
        return None
    return f"{found['head']}{found['kind'][:-1]}B{found['tail']}{found['weight']}"
