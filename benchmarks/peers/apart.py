"""Separate Python environments and network namespaces for peers of the benchmarks."""

import fcntl
import os
import socket
import struct
import subprocess
import sys
import tomllib
import venv
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = HERE / ".environments"
BARE = "bare "
SILENT = {
    "OMP_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Environment variables that disable telemetry and update checks of Flower and Ray, and multithreading."""
NAMESPACE = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
)
"""A command prefix that isolates a command. Its only network interface is a loopback that is down, and its processes
end with the command or with this process.
"""


def environment(name: str) -> Path:
    """Return the Python of an environment, which is created if it is missing, incomplete or outdated.

    The environment contains this process's PyTorch and the packages in `NAME.txt`. The name `manifoldagg` stands for
    all dependencies of this package. A package after `bare` is installed without its dependencies.
    """
    folder = ENVIRONMENTS / name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {"manifoldagg": [*project["dependencies"], *project["optional-dependencies"]["wire"]]}
    lines = [line for line in (HERE / f"{name}.txt").read_text().splitlines() if not line.startswith("#")]
    asked = [f"torch=={version('torch').split('+')[0]}", *(word for line in lines for word in ours.get(line, [line]))]
    made = folder / "made.txt"
    python = folder / "bin" / "python"
    if not (made.exists() and made.read_text().splitlines() == asked):
        print(f"making the environment of {name}", file=sys.stderr, flush=True)
        venv.create(folder, clear=True, with_pip=True)
        install = [python, "-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check"]
        whole = [line for line in asked if not line.startswith(BARE)]
        subprocess.run([*install, *whole], check=True, timeout=1800)
        if bare := [line.removeprefix(BARE) for line in asked if line.startswith(BARE)]:
            subprocess.run([*install, "--no-deps", *bare], check=True, timeout=1800)
        made.write_text("\n".join(asked) + "\n")
    return python


def variables(*paths: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment variables, without logging, with only these folders on the import path."""
    return os.environ | SILENT | {"PYTHONPATH": os.pathsep.join(map(str, paths))} | dict(more or {})


def alone() -> bool:
    """Return whether this process has no network interface except the loopback."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def raise_loopback() -> None:
    """Enable the loopback interface, as `ip link set lo up` does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: up and running
