"""Helpers that several test files share: hypothesis strategies, random tensors, and searches in packages."""

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
    """Draw a tensor of independent normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


def rotation(seed: int, size: int) -> Tensor:
    """Return a random orthogonal matrix in float64."""
    return torch.linalg.qr(draw(seed, size, size)).Q


def relative(a: Tensor, b: Tensor) -> float:
    """Return ‖a − b‖ / max(‖a‖, ‖b‖), or 0 if both norms are 0."""
    a, b = a.double(), b.double()
    scale = max(a.norm().item(), b.norm().item())
    return 0.0 if scale == 0 else (a - b).norm().item() / scale


def numbers(gram) -> Tensor:
    """Convert a Gram matrix of floats to a tensor of shape (S, k, k), or (k, k) for one segment."""
    return torch.from_numpy(gram.parts.astype(float)).squeeze(0)


def exported(package: ModuleType) -> dict[str, Any]:
    """Return the values in `__all__` of all public modules of a package, by name, so that new modules are included."""
    prefix = f"{package.__name__}."
    names = [info.name for info in walk_packages(package.__path__, prefix) if "._" not in info.name]
    modules = [import_module(name) for name in names]
    return {name: getattr(module, name) for module in modules for name in getattr(module, "__all__", ())}


def import_sibling_tests(name: str, *others: str) -> Iterator[ModuleType]:
    """Import the other test modules in the folder of the module `name`, so that they register their laws and mutants.

    The modules `others` are skipped, because they use the registered laws and mutants.
    """
    folder, _, own = name.rpartition(".")
    for found in iter_modules(import_module(folder).__path__):
        if found.name.startswith("test_") and found.name not in (own, *others):
            yield import_module(f"{folder}.{found.name}")


def raises_under_trace(call, trace, error):
    """Run `call` with a trace function that may raise `error`. Return whether `call` raised this error."""
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except error:
        return True
    finally:
        sys.settrace(before)
    return False


class LargestTensor(TorchDispatchMode):
    """A context that records the number of entries of the largest tensor that any operation creates inside it."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(made) if isinstance(x, Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return made
