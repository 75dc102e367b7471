"""The Triton backend without a GPU: its laws under the interpreter, its kernels compiled ahead of time."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.kernels.backends import triton as backend
from manifoldagg.kernels.backends._triton_launch import opaque, opaque_floats
from manifoldagg.kernels.blocks import Blocks
from manifoldagg.kernels.operands import Operands
from manifoldagg.kernels.tensor_list import TensorList

triton = pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]
DTYPES = {
    "float32": [torch.float32],
    "float64": [torch.float64],
    "bfloat16": [torch.bfloat16],
    "float16": [torch.float16],
    "mixed": [torch.float32, torch.float64, torch.bfloat16, torch.float16],
}


def in_a_process(arguments, **variables):
    """Run Python apart: what Triton reads from the environment when it is imported cannot be changed in this process."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=inherited | variables, capture_output=True, text=True
    )


LAWS = ["-m", "pytest", "-p", "no:cacheprovider", "-W", "error", "tests/kernels/backends/interpreted.py"]


def test_the_laws_hold_in_the_interpreter():
    done = in_a_process(LAWS, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[0-9]+ passed", done.stdout, flags=re.M)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_laws_hold_on_a_gpu():
    done = in_a_process(LAWS)
    assert done.returncode == 0, done.stdout + done.stderr


class Recorder:
    """In the place of a kernel: keeps what it would be launched with."""

    def __init__(self, kernel, calls):
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.calls.append((self.kernel, grid, arguments, options))


@pytest.fixture
def launches(monkeypatch):
    """The launches of one gram and one combine on these rows."""
    calls = []
    for name in ("_block_products_kernel", "_combine_kernel"):
        monkeypatch.setattr(backend, name, Recorder(getattr(backend, name), calls))
    monkeypatch.setattr(backend, "_device", lambda: "cpu")

    def record(k, dtypes, *, stride=1, offset=0, segments=1, shared=True, pieces=None):
        def vector(i):
            row = torch.ones(offset + 64 * stride, dtype=dtypes[i % len(dtypes)])[offset::stride]
            return row if pieces is None else TensorList(row.split(pieces))

        rows = Operands.of([vector(i) for i in range(k)], [vector(k)] * k if shared else None)
        blocks = Blocks.of(tuple((64 // segments * s, 64 // segments * (s + 1)) for s in range(segments)))
        calls.clear()
        backend.block_products(rows, blocks)
        backend.combine(vector(0), rows, [[s + 0.5] * k for s in range(segments)], blocks, vector(0))
        return list(calls)

    return record


def signature(argument):
    if isinstance(argument, tuple):
        return tuple(signature(part) for part in argument)
    return "i64" if isinstance(argument, int) else {torch.int64: "*i64", torch.float64: "*fp64"}[argument.dtype]


def compiled(launch, capability):
    """The kernel of a launch, compiled for a GPU of this capability."""
    kernel, _, arguments, constants = launch
    options = {name: constants[name] for name in ("num_warps", "enable_fp_fusion")}
    constants = {name: value for name, value in constants.items() if name not in options}
    types = {name: signature(value) for name, value in zip(kernel.arg_names, arguments, strict=False)}
    source = triton.compiler.ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants)
    return triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", capability, 32), options=options)


def vectors(code, operation):
    """How many of these operations of global memory move 16 bytes at once."""
    return len(re.findall(rf"{operation}\.global\.(v4\.b32|v2\.b64|v8\.b16)\b", code))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("layout", ["aligned", "offset", "pieces"])
def test_every_kernel_compiles(launches, monkeypatch, tmp_path, capability, name, layout):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    dtypes = DTYPES[name]
    gram, combine = launches(2, dtypes, offset=int(layout == "offset"), pieces=7 if layout == "pieces" else None)
    for launch, stores in ((gram, 0), (combine, 1)):
        found = compiled(launch, capability)
        code = found.asm["ptx"]
        assert any(tmp_path.iterdir())
        assert found.asm["cubin"]
        assert f".target sm_{capability}" in code
        # No conversion flushes denormals, nothing is fused, nothing is added in an order that is not fixed.
        assert not re.search(r"\.ftz|\bfma|\batom\.|\bred\.", code)
        # 16 bytes an instruction, one for each tensor; the wider dtypes of a mixture take several.
        if layout != "aligned":
            assert vectors(code, "ld") == vectors(code, "st") == 0
        else:
            assert vectors(code, "ld") >= len(launch[2][3 if launch is gram else 2]) - stores
            assert vectors(code, "st") >= stores


@pytest.mark.parametrize(
    "case",
    [
        {"k": 1, "shared": False},
        {"k": 2, "segments": 2},
        {"k": 2, "stride": 2, "segments": 2},
        {"k": 9},
        {"k": 2, "pieces": 16},
        {"k": 9, "pieces": 7, "segments": 2},
    ],
    ids=str,
)
def test_every_shape_of_a_launch_compiles(launches, monkeypatch, tmp_path, case):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    different = {}
    for kernel, grid, arguments, constants in launches(case.pop("k"), DTYPES["float32"], **case):
        key = (kernel, tuple(map(signature, arguments)), tuple(sorted(constants.items(), key=str)))
        different[str(key)] = (kernel, grid, arguments, constants)
    for launch in different.values():
        assert compiled(launch, 90).asm["cubin"]


def test_a_step_is_two_launches(launches):
    for k in (1, 4, 8):
        gram, combine = launches(k, DTYPES["float32"])
        assert gram[1] == combine[1] == (1,)
    # However many tensors there are.
    assert len(launches(3, DTYPES["float32"], pieces=1)) == 2
    # Groups of 4, 4 and 1 rows: three squares of the diagonal and three below it.
    assert len(launches(9, DTYPES["float32"])) == 6 + 1


def test_launches_with_other_addresses_use_the_same_kernel(launches):
    """What Triton would specialise on: an integer that is 1, fits into 32 bits, or is divisible by 16."""
    seen = {"aligned": set(), "not": set()}
    for offset in (0, 1, 2, 3, 4, 8):
        for _, _, arguments, constants in launches(3, DTYPES["float32"], offset=offset):
            for part in arguments:
                for number in part if isinstance(part, tuple) else ():
                    assert number % 16 != 0
                    assert 2**32 < number < 2**63
            seen["aligned" if constants["ALIGNED"] else "not"].add(str(sorted(constants.items())))
    # Two kernels in two variants; a stride other than 1 makes one more of each.
    assert {name: len(variants) for name, variants in seen.items()} == {"aligned": 2, "not": 2}


@given(st.integers(0, 2**61))
def test_an_opaque_integer_is_odd_and_wide_and_decodes(value):
    found = opaque(value)
    assert found % 2 == 1
    assert 2**32 < found < 2**63
    assert (found >> 1) - 2**40 == value


@given(st.floats())
def test_encoded_floats_preserve_every_bit(value):
    low, high = ((half >> 1) - 2**40 for half in opaque_floats([value]))
    bits = torch.tensor([value], dtype=torch.float64).view(torch.int64).item() % 2**64
    assert high << 32 | low == bits


def test_it_reports_why_it_is_unavailable(monkeypatch):
    for there, answer in ((False, "torch finds no CUDA device"), (True, None)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert backend.unavailable() == answer
    monkeypatch.setattr(triton, "__version__", "3.3.1")
    assert backend.unavailable() == "triton 3.4 or newer is required, but 3.3.1 is installed"


ASK = "from manifoldagg.kernels.backends import triton as backend; print(backend.unavailable())"


def test_it_can_be_imported_without_triton():
    done = in_a_process(["-W", "error", "-c", f"import sys; sys.modules['triton'] = None; {ASK}"])
    assert (done.stdout, done.stderr) == ("triton is not installed\n", "")


def test_the_interpreter_must_be_chosen_before_triton_is_imported():
    late = f"import os, triton; os.environ['TRITON_INTERPRET'] = '1'; {ASK}"
    assert in_a_process(["-c", late]).stdout.startswith("TRITON_INTERPRET was changed after")
    assert in_a_process(["-c", ASK], TRITON_INTERPRET="1").stdout == "None\n"


def test_cpu_tensors_are_not_processed_by_the_gpu():
    rows = Operands.of([torch.ones(3)])
    out = torch.zeros(3)
    assert backend.block_products(rows, Blocks.of(((0, 3),))) is None
    assert backend.combine(None, rows, [[1.0]], Blocks.of(((0, 3),)), out) is None
    assert not out.any()
