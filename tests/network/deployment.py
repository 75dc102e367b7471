"""Processes of Flower in a network namespace: SuperLink, SuperNodes and `flwr run`, with signals to each process."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["Deployment", "until"]

BIN = Path(sys.executable).parent


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: if the condition does not hold within `seconds`.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)


def listens(port: int) -> bool:
    """Return whether a process listens on a port of the loopback interface."""
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


class Deployment:
    """A context that owns processes of Flower. It kills them at its end, and log files contain their output.

    Args:
        folder: the folder of Flower's home, the apps and the logs.
        flower: the version of Flower.
    """

    def __init__(self, folder: Path, flower: tuple[int, ...]) -> None:
        self.folder = folder
        self.http = flower >= (1, 41)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._variables = os.environ | {
            "FLWR_HOME": str(folder / "home"),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
        (folder / "home").mkdir()
        if self.http:
            connections = '[superlink]\n[superlink.trial]\naddress = "127.0.0.1:8000"\ninsecure = true\n'
            (folder / "home" / "config.toml").write_text(connections + '[superlink.local]\naddress = ":local:"\n')

    def __enter__(self) -> "Deployment":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            _signal(process, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()

    def begin(self, name: str, *command: str) -> None:
        """Start a process in its own process group."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [BIN / command[0], *command[1:]],
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,
            )

    def superlink(self) -> None:
        """Start Flower's SuperLink and wait until it listens."""
        where = (
            ["--host", "127.0.0.1", "--port", "8000"]
            if self.http
            else [
                word
                for name, port in (("serverappio", 9091), ("fleet", 9092), ("control", 9093))
                for word in (f"--{name}-api-address", f"127.0.0.1:{port}")
            ]
        )
        self.begin("superlink", "flower-superlink", "--insecure", *where)
        until(lambda: listens(8000 if self.http else 9093), 60, "the SuperLink")

    def supernode(self, number: int, nodes: int) -> None:
        """Start one SuperNode of Flower."""
        link = "127.0.0.1:8000" if self.http else "127.0.0.1:9092"
        port = 9100 + number
        where = ["--port", str(port)] if self.http else ["--clientappio-api-address", f"127.0.0.1:{port}"]
        settings = f"partition-id={number} num-partitions={nodes}"
        self.begin(
            f"node-{number}",
            *("flower-supernode", "--insecure", "--superlink", link, *where, "--node-config", settings),
        )

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process and its children."""
        _signal(self._processes[name], number)

    def flwr_run(self, app: Path, where: str, config: Mapping[str, object], *more: str) -> None:
        """Submit an app. The simulation of an older Flower runs to its end."""
        words = " ".join(
            f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in config.items()
        )
        command = [
            BIN / "flwr",
            "run",
            app,
            where,
            *more,
            "--run-config",
            words.replace("True", "true").replace("False", "false"),
        ]
        done = subprocess.run(
            command,
            env=self._variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            cwd=self.folder,
        )
        with (self.folder / "flwr.log").open("a") as log:
            log.write(done.stdout + done.stderr)
        assert done.returncode == 0, f"flwr run: {done.stdout}{done.stderr}"

    def alive(self, name: str) -> bool:
        """Return whether a process is running."""
        return self._processes[name].poll() is None


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process and its children, if the process exists."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
