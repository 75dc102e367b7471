"""Counter of the memory traffic of a call: the vectors of the size of a model that it reads, writes and allocates.

The unit is a word of 32 bits per parameter. Kernels and torch operations are counted in the same way. Each operation
counts a vector that it reads or writes once, by its number of bytes. If an operation accesses a vector again in the
current chunk of entries, the chunk is in the cache, and the access is not counted.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from manifoldagg.kernels import chunking
from manifoldagg.kernels.backends import selection

SIZE = 1 << 12
"""Of the model that is counted on."""
CHUNK = SIZE // 8


@dataclass
class Words:
    """The numbers of words per parameter that are read, written and allocated, and the number of kernel passes."""

    read: float = 0.0
    written: float = 0.0
    made: float = 0.0
    grams: int = 0
    combines: int = 0
    places: dict = field(default_factory=dict)
    held: list = field(default_factory=list)

    @property
    def counts(self):
        return round(self.read, 2), round(self.written, 2), round(self.made, 2)

    def touch(self, tensor, *, write):
        storage = tensor.untyped_storage()
        if storage.nbytes() < 2 * SIZE or tensor.numel() < 2:
            return
        place = (tensor.storage_offset(), tensor.numel())
        last, ways = self.places.get(storage.data_ptr(), (None, set()))
        if place != last or tensor.numel() >= SIZE:
            ways = set()
        self.places[storage.data_ptr()] = (place, ways)
        # What was read or written in the same window lies in cache; it has to be written back once.
        if ("written" if write else "any") not in ways:
            share = tensor.numel() * tensor.itemsize / (4 * SIZE)
            if write:
                self.written += share
            else:
                self.read += share
        ways.add("any")
        if write:
            ways.add("written")

    def make(self, tensor):
        storage = tensor.untyped_storage()
        if storage.nbytes() >= 2 * SIZE:
            # Held, so that no later one has its address.
            self.held.append(tensor)
            self.made += storage.nbytes() / (4 * SIZE)


class _Watch(TorchDispatchMode):
    def __init__(self, words):
        super().__init__()
        self.words = words

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = function._schema
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        result = function(*args, **kwargs)
        views = any(out.alias_info is not None and not out.alias_info.is_write for out in schema.returns)
        if views or "empty" in schema.name:
            if not views:
                self.words.make(result)
            return result
        own = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        overwrites = (
            schema.name in ("aten::copy_", "aten::_foreach_copy_", "aten::zero_", "aten::fill_") or "out" in own
        )
        for name, value in given.items():
            for tensor in _each(value):
                if isinstance(tensor, Tensor) and (name not in own or not overwrites):
                    self.words.touch(tensor, write=False)
        for name in own:
            for tensor in _each(given[name]):
                self.words.touch(tensor, write=True)
        if not own:
            for tensor in _each(result):
                if isinstance(tensor, Tensor):
                    self.words.make(tensor)
                    self.words.touch(tensor, write=True)
        return result


def _each(value):
    return value if isinstance(value, tuple | list) else [value]


def _parts(line):
    return [] if line is None else [line] if isinstance(line, Tensor) else [*line]


def _distinct(lines):
    """Return the tensors in `rows` without repetitions of the same memory."""
    return {(t.data_ptr(), t.numel()): t for line in lines for t in _parts(line)}.values()


@contextmanager
def counted():
    """Count the memory traffic in a `with` block, for models with `SIZE` parameters."""
    words = Words()
    plain = {name: getattr(selection, name) for name in ("block_products", "combine", "combine_many", "gram_combine")}

    def block_products(rows, *rest):
        words.grams += 1
        for tensor in {
            id(t): t for line in (*rows.plus, *rows.minus) if line is not None for t in _parts(line)
        }.values():
            words.touch(tensor, write=False)
        with torch.utils._python_dispatch._disable_current_modes():
            return plain["block_products"](rows, *rest)

    def gram_combine(rows, blocks, goals):
        # Without the compiled backend the products and each combination take a pass of their own, and are counted so.
        if selection.backend_for(rows.device).__name__.endswith("cpu"):
            words.grams += 1
            words.combines += 1
            inputs = [row for goal in goals for row in goal.inputs]
            for tensor in _distinct([*rows.distinct, *inputs]):
                words.touch(tensor, write=False)
            for tensor in _distinct([goal.out for goal in goals]):
                words.touch(tensor, write=True)
        with torch.utils._python_dispatch._disable_current_modes():
            return plain["gram_combine"](rows, blocks, goals)

    def combine(base, rows, coefficients, blocks, out):
        words.combines += 1
        used = [j for j in range(len(rows.plus)) if any(line[j] != 0 for line in coefficients)]
        for tensor in _distinct([base, *(rows.plus[j] for j in used), *(rows.minus[j] for j in used)]):
            words.touch(tensor, write=False)
        for tensor in _parts(out):
            words.touch(tensor, write=True)
        with torch.utils._python_dispatch._disable_current_modes():
            return plain["combine"](base, rows, coefficients, blocks, out)

    def combine_many(goals):
        # Without the compiled backend each goal is a combination by itself, and counted so.
        if selection.backend_for(goals[0].rows.device).__name__.endswith("cpu"):
            words.combines += 1
            for tensor in _distinct([row for goal in goals for row in goal.inputs]):
                words.touch(tensor, write=False)
            for tensor in _distinct([goal.out for goal in goals]):
                words.touch(tensor, write=True)
        with torch.utils._python_dispatch._disable_current_modes():
            return plain["combine_many"](goals)

    with (
        patch.object(selection, "block_products", block_products),
        patch.object(selection, "combine_many", combine_many),
        patch.object(selection, "gram_combine", gram_combine),
        patch.object(selection, "combine", combine),
        patch.object(chunking, "CHUNK_SIZE", CHUNK // torch.get_num_threads()),
        _Watch(words),
    ):
        yield words
