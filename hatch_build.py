"""The wheel for Linux on x86-64 (`make release`): the compiled kernels for two levels of the processor lie in it.

They are built by Zig's clang, a package of PyPI, against the glibc of 2012 and with the C++ library inside: the same
bytes on whatever machine they are built, and nothing but glibc is asked for where they are loaded. Everything else
builds a wheel without them, which asks for no compiler.
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
"""Neither operators nor the C++ library meet those of the process that loads it."""


def build(sources: Sequence[Path], folder: Path) -> list[Path]:
    """Build a library of the sources for each level, in a folder."""
    exports = folder / "exports"
    exports.write_text(EXPORTS)
    target = ("-target", "x86_64-linux-gnu.{}.{}".format(*GLIBC), f"-Wl,--version-script={exports}")
    built = [folder / f"native-{level}.so" for level in LEVELS]
    for level, path in zip(LEVELS, built, strict=True):
        compiler = (sys.executable, "-m", "ziglang", "c++", *target, f"-mcpu={level}")
        subprocess.run([*compiler, *FLAGS, "-o", str(path), *map(str, sources)], check=True, timeout=900)
    return built


class Libraries(BuildHookInterface[Any]):
    """Puts them beside their source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Nothing is written into the checkout; an editable installation builds its own at first use."""
        if version == "editable":
            return
        self.folder = tempfile.TemporaryDirectory()
        beside = Path("manifoldagg", "kernels", "backends")
        sources = [Path(self.root, beside, name) for name in SOURCES]
        for path in build(sources, Path(self.folder.name)):
            build_data["force_include"][str(path)] = str(beside / path.name)
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-manylinux_{}_{}_x86_64".format(*GLIBC)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """What was built lies in the wheel by now."""
        if version != "editable":
            self.folder.cleanup()
