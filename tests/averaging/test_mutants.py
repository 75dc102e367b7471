"""Mutation tests of merging checkpoint files: comparisons with the mean in memory must detect each deliberate bug."""

import json
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import manifoldagg
from manifoldagg.averaging import karcher, merge
from manifoldagg.averaging.certificate import certify
from manifoldagg.averaging.coefficients import Mean, MeanMethod
from manifoldagg.averaging.merge_journal import MergeDraft
from manifoldagg.averaging.merge_plan import CELL_SIZE, Part
from manifoldagg.averaging.merge_shards import DTYPE_NAMES, Shard
from manifoldagg.kernels import combine
from manifoldagg.manifolds import Sphere
from manifoldagg.tensor_file import tensor_bytes

pytestmark = pytest.mark.filterwarnings("ignore:models. expected:UserWarning")

# The name of this module is also the name of a function, which hides the module in its package.
MERGE = sys.modules["manifoldagg.averaging.merge"]
PARTS = sys.modules["manifoldagg.averaging.merge_parts"]
SHARDS = sys.modules["manifoldagg.averaging.merge_shards"]
WEIGHTS = [1, 2, 3]
SHARES = torch.tensor(WEIGHTS, dtype=torch.float64) / 6
SOLVE = MeanMethod.solve


@pytest.fixture(autouse=True, scope="module")
def _without_syncs():
    """Disable syncs to the disk, which take most of the time of a small merge and do not change the files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda file: None)
        yield


def states(dtype):
    """Return three versions of a model. One tensor has two cells, and the dtypes have several item sizes."""
    found = []
    for i in range(3):
        draws = [torch.Generator().manual_seed(seed) for seed in (1, 2 + i)]
        x, change = (torch.randn(CELL_SIZE + 10_001, generator=draw, dtype=torch.float64) for draw in draws)
        x = (1 + i) * (x + 0.2 * change)
        found.append(
            {"mask": torch.tensor([True, False, True]), "big": x[:-101].to(dtype), "small": x[-101:].to(dtype)}
        )
    return found


def merged(dtype, **options):
    """Merge three files. Return the state dicts, the result, its bytes, and the certificates."""
    models = states(dtype)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{i}.safetensors" for i in range(3)]
        for path, model in zip(paths, models, strict=True):
            save_file(model, path, {"license": "MIT"})
        out = Path(folder) / "out.safetensors"
        info = merge(paths, WEIGHTS, out=out, **options)
        return models, load_file(out), out.read_bytes(), info


def the_mean_has_the_bits_of_the_average_in_memory():
    models, found, _, _ = merged(torch.bfloat16)
    return all(torch.equal(found[name], x) for name, x in manifoldagg.average(models, WEIGHTS).items())


def the_karcher_mean_is_that_of_the_directions():
    models, found, _, _ = merged(torch.float64, method="karcher")
    for name in ("big", "small"):
        rows = [model[name] for model in models]
        norms = torch.stack([row.norm() for row in rows])
        units = [row / norm for row, norm in zip(rows, norms, strict=True)]
        point = karcher(Sphere(len(rows[0])), units, SHARES, tolerance=1e-14).point
        if not torch.allclose(found[name], point * (SHARES @ norms), rtol=1e-10, atol=1e-10):
            return False
    return True


def certificates_state_the_distances_of_the_result():
    models, found, _, info = merged(torch.bfloat16, method="karcher")
    for part in info.tensors:
        rows = torch.stack([model[part.name].double() for model in models])
        mean = torch.tensor(part.coefficients, dtype=torch.float64) @ rows
        measured = [part.norm, part.arithmetic_distance, part.rounding_error, *part.distances]
        exact = [mean.norm(), (mean - SHARES @ rows).norm(), (found[part.name].double() - mean).norm()]
        exact += (rows - mean).norm(dim=1)
        if not all(math.isclose(a, float(b), rel_tol=1e-6) for a, b in zip(measured, exact, strict=True)):
            return False
    return True


def tensors_are_aligned_and_the_metadata_are_kept():
    _, found, data, _ = merged(torch.bfloat16)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    begins = {name: end + header[name]["data_offsets"][0] for name in found}
    aligned = all(begin % found[name].itemsize == 0 for name, begin in begins.items())
    return aligned and header["__metadata__"] == {"format": "pt", "license": "MIT"}


LAWS = [
    the_mean_has_the_bits_of_the_average_in_memory,
    the_karcher_mean_is_that_of_the_directions,
    certificates_state_the_distances_of_the_result,
    tensors_are_aligned_and_the_metadata_are_kept,
]


def write_flat(rounding=torch.float64, offset=lambda start: start, terms=3):
    """Return a `_write_flat` that first rounds to another dtype, writes elsewhere, or sums fewer models."""

    def _write_flat(part, mean, write, buffers, start, stop):
        rows = PARTS._rows(part, start, stop)[:terms]
        exact = torch.empty(stop - start, dtype=torch.float64)
        combine(None, rows, mean.coefficients[part.used].tolist()[:terms], out=exact)
        result = exact.to(rounding).to(part.first.entry.dtype)
        write(part.names[0], offset(start), result)
        return float((result.double() - exact).square().sum())

    return _write_flat


def gram_of(minus=1.0, cells=2, product=lambda rows: rows @ rows.mT):
    """Return a `gram_of` with another multiple of the origin, fewer cells, or another product."""

    def gram_of(part, start, stop):
        rows = torch.stack([x.double() for x in PARTS._rows(part, start, stop)])
        origin = rows[part.origin].clone()
        rows -= minus * origin
        rows[part.origin] = origin
        return product(rows) if start < cells * CELL_SIZE else torch.zeros(len(rows), len(rows), dtype=torch.float64)

    return gram_of


def cells(overlap=0, begin=0, count=2):
    """Return a `Part.cells` whose ranges overlap, begin too late, or are too few."""

    def cells(self):
        width = CELL_SIZE - overlap
        for start in [*range(begin, self.size, width)][:count]:
            yield start, min(start + width + overlap, self.size)

    return cells


def write(unit=lambda values: values.itemsize, lost=0):
    """Return a `MergeDraft.write` with another unit of offsets, or that loses the last bytes."""

    def write(self, name, offset, values):
        i, begin = self.plan.location(name)
        data = tensor_bytes(values)
        self._pwrite(i, data[: len(data) - lost], begin + offset * unit(values))
        self._dirty.add(i)

    return write


def shard(order=lambda entry: -entry.dtype.itemsize, keeps_metadata=True):
    """Return a `_shard` with another order of the tensors, or without the metadata of the first checkpoint."""

    def _shard(name, entries, metadata):
        lines = {"__metadata__": {"format": "pt", **(metadata if keeps_metadata else {})}}
        begins, position = {}, 0
        for entry in sorted(entries, key=order):
            end = position + entry.num_bytes
            line = {"dtype": DTYPE_NAMES[entry.dtype], "shape": [*entry.shape], "data_offsets": [position, end]}
            lines[entry.name], begins[entry.name], position = line, position, end
        text = json.dumps(lines).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        places = {tensor: len(header) + begin for tensor, begin in begins.items()}
        return Shard(name, header, places, len(header) + position)

    return _shard


def certified(change):
    """Return a `certify` that changes some fields of the certificate."""

    def wrong(*args):
        found = certify(*args)
        return replace(found, **change(found))

    return wrong


def solve(weights=lambda w: w, length=lambda w, norms: 1.0):
    """Return a `MeanMethod.solve` with other weights, or with another length of the mean."""

    def solve(self, products):
        mean = SOLVE(MeanMethod(self.name, weights(self.weights), self.t), products)
        if products is None:
            return mean
        return Mean(mean.coefficients * length(self.weights, products.norms), mean.residual)

    return solve


WRITE_FLAT = [(PARTS, "_write_flat")]
GRAM_OF = [(MERGE, "gram_of"), (PARTS, "gram_of")]
CELLS = [(Part, "cells")]
WRITE = [(MergeDraft, "write")]
SHARD = [(SHARDS, "_shard")]
CERTIFY = [(MERGE, "certify")]
SOLVES = [(MeanMethod, "solve")]
BITS, KARCHER, CERTIFICATES, FORMAT = LAWS
MUTANTS = {
    "_write_flat: rounds to float16 first": (WRITE_FLAT, write_flat(rounding=torch.float16), BITS),
    "_write_flat: each cell at the start": (WRITE_FLAT, write_flat(offset=lambda start: 0), BITS),
    "_write_flat: omits the last model": (WRITE_FLAT, write_flat(terms=2), BITS),
    "gram_of: no differences": (GRAM_OF, gram_of(minus=0.0), KARCHER),
    "gram_of: sums instead of differences": (GRAM_OF, gram_of(minus=-1.0), CERTIFICATES),
    "gram_of: only the first cell": (GRAM_OF, gram_of(cells=1), CERTIFICATES),
    "gram_of: no mixed products": (GRAM_OF, gram_of(product=lambda rows: (rows @ rows.mT).diag().diag()), KARCHER),
    "cells: overlap": (CELLS, cells(overlap=5000), CERTIFICATES),
    "cells: the first entry is missing": (CELLS, cells(begin=1), BITS),
    "cells: the last cell is missing": (CELLS, cells(count=1), BITS),
    "write: offsets in entries": (WRITE, write(unit=lambda values: 1), BITS),
    "write: the last entry is missing": (WRITE, write(lost=1), BITS),
    "_shard: small items first": (SHARD, shard(order=lambda entry: entry.dtype.itemsize), FORMAT),
    "_shard: no metadata": (SHARD, shard(keeps_metadata=False), FORMAT),
    "certify: squared distances": (
        CERTIFY,
        certified(lambda found: {"distances": tuple(x * x for x in found.distances)}),
        CERTIFICATES,
    ),
    "certify: distances in reverse order": (
        CERTIFY,
        certified(lambda found: {"distances": found.distances[::-1]}),
        CERTIFICATES,
    ),
    "certify: squared rounding error": (
        CERTIFY,
        certified(lambda found: {"rounding_error": found.rounding_error**2}),
        CERTIFICATES,
    ),
    "certify: no distance to the arithmetic mean": (
        CERTIFY,
        certified(lambda found: {"arithmetic_distance": 0.0}),
        CERTIFICATES,
    ),
    "solve: equal weights": (SOLVES, solve(weights=lambda w: torch.full_like(w, 1 / len(w))), KARCHER),
    "solve: a unit vector": (SOLVES, solve(length=lambda w, norms: 1 / float(w @ norms)), KARCHER),
    "solve: the length of the longest model": (
        SOLVES,
        solve(length=lambda w, norms: float(norms.max() / (w @ norms))),
        KARCHER,
    ),
}
RIGHT = [
    (WRITE_FLAT, write_flat()),
    (GRAM_OF, gram_of()),
    (CELLS, cells()),
    (WRITE, write()),
    (SHARD, shard()),
    (CERTIFY, certified(lambda found: {})),
    (SOLVES, solve()),
]


def replaced(monkeypatch, places, function):
    for place, name in places:
        monkeypatch.setattr(place, name, function)


@pytest.mark.parametrize("law", LAWS)
def test_the_library_satisfies_all_laws(law):
    assert law()


@pytest.mark.parametrize(("places", "right"), RIGHT, ids=[places[0][1] for places, _ in RIGHT])
def test_mutant_factories_without_a_bug_satisfy_all_laws(places, right, monkeypatch):
    replaced(monkeypatch, places, right)
    assert all(law() for law in LAWS)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name, monkeypatch, record_property):
    places, wrong, law = MUTANTS[name]
    replaced(monkeypatch, places, wrong)
    assert not law()
    record_property("caught", (f"merging: {name}", [law.__name__]))
