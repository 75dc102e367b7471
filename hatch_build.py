"""Build hook of Hatch for the Linux x86-64 wheel, which contains the compiled CPU kernels.

`make release` runs the hook. It compiles the kernels for two levels of the x86-64 instruction set. The compiler is the
clang of Zig, which is a package on PyPI. The libraries need glibc 2.17 or newer and no C++ library, and their bytes do
not depend on the machine that builds them. All other builds produce a wheel without compiled kernels and need no
compiler.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = ("native.cpp", "tensor_reader.cpp")
LEVELS = ("x86_64_v3", "x86_64_v4")
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-s")
GLIBC = (2, 17)
EXPORTS = "{ global: manifoldagg_*; local: *; };"
"""The version script of the linker. It hides all other symbols, which could clash with symbols of the process."""


def build(sources: Sequence[Path], folder: Path) -> list[Path]:
    """Compile the sources into one shared library for each level, and return the paths of the libraries."""
    exports = folder / "exports"
    exports.write_text(EXPORTS)
    target = ("-target", "x86_64-linux-gnu.{}.{}".format(*GLIBC), f"-Wl,--version-script={exports}")
    built = [folder / f"native-{level}.so" for level in LEVELS]
    for level, path in zip(LEVELS, built, strict=True):
        compiler = (sys.executable, "-m", "ziglang", "c++", *target, f"-mcpu={level}")
        subprocess.run([*compiler, *FLAGS, "-o", str(path), *map(str, sources)], check=True, timeout=900)
    return built


class Libraries(BuildHookInterface[Any]):
    """Hook that adds the compiled libraries to a wheel, next to their sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries in a temporary folder, except for an editable installation.

        An editable installation compiles the kernels when they are used for the first time.
        """
        if version == "editable":
            return
        self.folder = tempfile.TemporaryDirectory()
        target = Path("manifoldagg", "kernels", "backends")
        sources = [Path(self.root, target, name) for name in SOURCES]
        for path in build(sources, Path(self.folder.name)):
            build_data["force_include"][str(path)] = str(target / path.name)
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-manylinux_{}_{}_x86_64".format(*GLIBC)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete the temporary folder, after the wheel has been written."""
        if version != "editable":
            self.folder.cleanup()
