"""`make test-flower`: Flower's real SuperLink, SuperNodes and simulation engine, of the newest and the oldest version.

    python tests/network/flower.py [--flower flower flower-oldest] [--parts deployment simulation]

Each version has its own environment, which is created once. It runs in its own network namespace (`unshare` of util-linux)
with only a loopback interface. All processes end with the namespace. The test takes minutes and is not part of `make test`.

- `deployment`: eight nodes. One node sends invalid updates, one is killed, and one is stopped during a task. No update of
  the other nodes is lost. The server drops the tickets of the killed node, rejects the invalid updates, and ignores the late
  reply of the stopped node. Then the server process is killed, and a new process resumes from its checkpoint.
- `simulation`: `flwr run` with the simulation engine on Ray.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "benchmarks" / "peers"))

import apart  # noqa: E402
from deployment import Deployment, until  # noqa: E402

VERSIONS = ("flower", "flower-oldest")
NODES = 8
LIAR, KILLED, HUNG = 0, 3, 6
HONEST = [number for number in range(NODES) if number not in (LIAR, KILLED, HUNG)]
BAR = 0.85
KINDS = 5
"""The number of kinds of invalid updates, which the malicious node sends in turn."""
TASK_TIMEOUT = 150.0


class Trial:
    """The folder of a deployment, with the files that the processes of the app write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the records of a file with one JSON object per line."""
        path = self._folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def read(self, name: str) -> dict[str, Any]:
        """Return the last status of the server, or an empty dictionary."""
        path = self._folder / name
        return json.loads(path.read_text()) if path.exists() else {}

    def node(self, number: int) -> str:
        """Return Flower's id of a node."""
        return str(self.lines(f"asked-{number}")[0]["node"])

    def told(self, number: int) -> list[str]:
        """Return the rejection reason of each update of a node; an empty string for an accepted update."""
        return [str(line["reason"]) for line in self.lines("events") if line["client"] == self.node(number)]

    def clear(self) -> None:
        """Delete the files of the last run."""
        for name in ("status.json", "result.json", "stop"):
            (self._folder / name).unlink(missing_ok=True)

    def run(self, deployment: Deployment, where: str, *more: str, **config: object) -> None:
        """Submit the app."""
        self.clear()
        deployment.flwr_run(self._folder / "app", where, {"folder": str(self._folder)} | config, *more)

    def stop(self) -> None:
        """Request the server to stop."""
        (self._folder / "stop").touch()

    def ended(self, seconds: float) -> dict[str, Any]:
        """Wait for the result, and return it."""
        until(lambda: self.read("result.json"), seconds, "the end of the run")
        return self.read("result.json")


def deployment_part(deployment: Deployment, folder: Path) -> None:
    """Test nodes that fail, and then a server that fails."""
    trial = Trial(folder)
    deployment.superlink()
    for number in range(NODES):
        deployment.supernode(number, NODES)
    failing = {"liar": LIAR, "killed": KILLED, "hung": HUNG, "task_timeout": TASK_TIMEOUT}
    trial.run(deployment, "trial", nodes=NODES, least=NODES, **failing)

    until(lambda: len(trial.lines(f"asked-{KILLED}")) == 2, 300, "a second task of the node that is killed")
    deployment.send(f"node-{KILLED}", signal.SIGKILL)
    until(lambda: len(trial.lines(f"asked-{HUNG}")) == 2, 300, "a second task of the node that is stopped")
    deployment.send(f"node-{HUNG}", signal.SIGSTOP)
    tell("one killed, one stopped")
    until(
        lambda: trial.node(HUNG) not in trial.read("status.json")["out"], 2 * TASK_TIMEOUT, "the end of a stopped task"
    )
    deployment.send(f"node-{HUNG}", signal.SIGCONT)
    gone = [time.monotonic()]

    def forgotten() -> bool:
        if trial.node(KILLED) in trial.read("status.json")["out"]:
            gone[0] = time.monotonic()
        return time.monotonic() - gone[0] > 10

    until(forgotten, 400, "the end of the tasks of a node that is dead")
    until(lambda: len(trial.lines(f"given-{LIAR}")) > KINDS, 400, "all that the liar sends")
    until(lambda: min(len(trial.lines(f"given-{number}")) for number in HONEST) >= 4, 400, "answers of all who can")
    trial.stop()
    result, first = trial.ended(300), trial.read("status.json")
    tell(f"stopped after {first['version']} updates, {result['right']:.1%} right")
    for number in HONEST:
        given, told = len(trial.lines(f"given-{number}")), trial.told(number)
        assert 0 <= given - len(told) <= 1, f"node {number} gave {given} answers, and {len(told)} were heard of"
        assert not any(told), f"node {number}: {told}"
    lies = trial.told(LIAR)
    assert len(lies) >= KINDS, f"the liar was told {lies}"
    assert all(lies), f"the liar was told {lies}"
    assert trial.node(KILLED) not in first["out"]
    assert result["right"] > BAR, result

    left = {"nodes": NODES, "least": NODES - 1, "resume": True, "task_timeout": TASK_TIMEOUT, "liar": LIAR}
    trial.run(deployment, "trial", **left)
    until(lambda: trial.read("status.json").get("version", 0) >= first["version"] + 8, 300, "updates of a second run")
    second = trial.read("status.json")
    os.kill(second["pid"], signal.SIGKILL)
    tell(f"server killed after {second['version']} updates")
    rounds = second["updates"] // NODES + 3
    trial.run(deployment, "trial", **left, rounds=rounds)
    result, third = trial.ended(300), trial.read("status.json")
    tell(f"went on to {third['version']} updates, {result['right']:.1%} right")
    begun = [line["version"] for line in trial.lines("begun")]
    assert begun[0] == 0, begun
    assert begun[1] == first["version"], begun
    assert begun[2] >= second["version"] - 1, begun  # the last checkpoint may not have been written
    assert third["updates"] >= NODES * rounds
    assert set(result["rights"]) == {str(number) for number in range(rounds + 1)}, result
    assert result["right"] > BAR, result


def simulation_part(deployment: Deployment, folder: Path) -> None:
    """Test Flower's simulation engine on Ray."""
    trial = Trial(folder)
    size = ("--federation-config", "num-supernodes=4 client-resources-num-cpus=1") if deployment.http else ()
    trial.run(deployment, "local", *size, nodes=4, least=4, rounds=6, evaluate=1.0)
    result = trial.ended(400)
    tell(f"{trial.read('status.json')['version']} updates, {result['right']:.1%} right")
    assert result["right"] > BAR, result
    assert result["asked"], result


PARTS = {"deployment": deployment_part, "simulation": simulation_part}
CONNECTIONS = """
[tool.flwr.federations.trial]
address = "127.0.0.1:9093"
insecure = true
[tool.flwr.federations.local]
options.num-supernodes = 4
options.backend.client-resources.num-cpus = 1
"""
"""The connections of Flower 1.21, which are in the app's `pyproject.toml`."""


def tell(line: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')}   {line}", flush=True)


def inside(part: str) -> None:
    """Run one part inside a network namespace, with one version of Flower."""
    import flwr

    if not apart.alone():
        sys.exit("--inside: expected a network namespace; run the script without this option")
    apart.raise_loopback()
    version = tuple(int(number) for number in flwr.__version__.split(".")[:2])
    with tempfile.TemporaryDirectory(prefix="flower", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        shutil.copytree(HERE / "app", folder / "app", ignore=shutil.ignore_patterns("__pycache__"))
        tell(f"Flower {flwr.__version__}, {part}")
        with Deployment(folder, version) as deployment:
            if not deployment.http:
                with (folder / "app" / "pyproject.toml").open("a") as file:
                    file.write(CONNECTIONS)
            try:
                PARTS[part](deployment, folder)
            except BaseException:
                for log in sorted(folder.rglob("*.log")):
                    print(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}")
                raise


def main() -> None:
    """Run both parts with both versions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flower", nargs="+", default=list(VERSIONS), choices=VERSIONS)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--inside", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.inside)
        return
    failed = []
    for name in options.flower:
        python = apart.environment(name)
        for part in options.parts:
            command = [*apart.NAMESPACE, str(python), __file__, "--inside", part]
            try:
                subprocess.run(command, env=apart.variables(ROOT), check=True, timeout=2400)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                failed.append(f"{name}, {part}: {error}")
    for line in failed:
        print(line, file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
