"""What several test files share: draws (a seeded generator makes tensors, hypothesis its seed), and what a package has."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules, walk_packages
from types import ModuleType
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

seeds = st.integers(0, 2**32 - 1)
sizes = st.sampled_from([1, 2, 3, 7, 64, 1023, 16383, 16384, 16385, 40009])
small_sizes = st.integers(1, 40)
scales = st.floats(-6, 6).map(lambda exponent: 10.0**exponent)
dtypes = st.sampled_from([torch.float32, torch.float64])


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    """A normal tensor."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


def rotation(seed: int, size: int) -> Tensor:
    """A random orthogonal matrix in float64."""
    return torch.linalg.qr(draw(seed, size, size)).Q


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / max(‖a‖, ‖b‖), 0 for two zeros."""
    a, b = a.double(), b.double()
    scale = max(a.norm().item(), b.norm().item())
    return 0.0 if scale == 0 else (a - b).norm().item() / scale


def numbers(gram) -> Tensor:
    """A Gram matrix of floats as a tensor: (S, k, k), or (k, k) of one part."""
    return torch.from_numpy(gram.parts.astype(float)).squeeze(0)


def exported(package: ModuleType) -> dict[str, Any]:
    """What the public modules of a package have in `__all__`: a new file is found without being listed anywhere."""
    prefix = f"{package.__name__}."
    names = [info.name for info in walk_packages(package.__path__, prefix) if "._" not in info.name]
    modules = [import_module(name) for name in names]
    return {name: getattr(module, name) for module in modules for name in getattr(module, "__all__", ())}


def beside(name: str, *others: str) -> Iterator[ModuleType]:
    """The other test files in the folder of one, by its `__name__`: what they register is found by their being there.

    Nor those that are called `others`, as they use what is registered.
    """
    folder, _, own = name.rpartition(".")
    for found in iter_modules(import_module(folder).__path__):
        if found.name.startswith("test_") and found.name not in (own, *others):
            yield import_module(f"{folder}.{found.name}")


def stopped(call, trace, error):
    """Whether `call` ended with `error`, which `trace` raises in the frames that it looks at."""
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except error:
        return True
    finally:
        sys.settrace(before)
    return False


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that anything makes inside."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(made) if isinstance(x, Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return made
