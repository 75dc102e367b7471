"""Tests of the released packages: reproducible builds, and the first snippet of the README on the wheel alone."""

import re
import subprocess
import sys
import tarfile
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from manifoldagg import __version__
from manifoldagg.kernels.backends import cpu

ROOT = Path(__file__).parent.parent


def done(*command, folder):
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def build(source, folder):
    """Build the source distribution and the wheel. Return their bytes by file name."""
    pytest.importorskip("hatchling")
    done(sys.executable, "-m", "hatchling", "build", "-d", str(folder), folder=source)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The folder of the built source distribution and wheel."""
    folder = tmp_path_factory.mktemp("released")
    build(ROOT, folder)
    return folder


def test_builds_are_reproducible_in_another_folder(released, tmp_path):
    names = {f"manifoldagg-{__version__}.tar.gz", f"manifoldagg-{__version__}-py3-none-any.whl"}
    first = {path.name: path.read_bytes() for path in released.iterdir()}
    assert first.keys() == names
    with tarfile.open(released / f"manifoldagg-{__version__}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    (source / "PKG-INFO").unlink()  # The build creates this file again.
    for path in source.rglob("*"):
        path.touch()
    assert build(source, tmp_path / "again") == first


def test_build_hook_and_cpu_backend_have_the_same_levels_sources_and_flags():
    pytest.importorskip("hatchling")
    spec = spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    spec.loader.exec_module(hook := module_from_spec(spec))
    assert set(hook.LEVELS) == set(cpu.CPU_LEVELS)
    assert tuple(source.name for source in cpu.SOURCES) == hook.SOURCES
    assert {*hook.FLAGS} - {"-s"} == {*cpu.COMPILER_FLAGS} - {"-march=native"}


def test_the_first_readme_snippet_runs_with_only_the_wheel_installed(released, tmp_path):
    """The environment contains the installed dependencies but not the checkout."""
    snippet = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S).group(1)
    (wheel,) = released.glob("*.whl")
    done(sys.executable, "-m", "venv", "--without-pip", "clean", folder=tmp_path)
    python = str(tmp_path / "clean" / "bin" / "python")
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(done(python, "-c", ask, folder=tmp_path).strip())
    # Python does not read .pth files in these folders, such as the file of the checkout.
    beside = {str(Path(find_spec(name).origin).parents[1]) for name in ("torch", "pip")}
    (own / "beside.pth").write_text("\n".join(beside))
    done(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel), folder=tmp_path)
    say = "print(manifoldagg.__file__, manifoldagg.__version__)"
    told = done(python, "-I", "-W", "error", "-c", f"{snippet}\n{say}", folder=tmp_path)
    assert told.endswith(f"{own / 'manifoldagg' / '__init__.py'} {__version__}\n")
