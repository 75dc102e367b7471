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
from deployment import Deployment, wait_until  # noqa: E402

VERSIONS = ("flower", "flower-oldest")
NODES = 8
MALICIOUS = 0
KILLED = 3
STOPPED = 6
HONEST = [number for number in range(NODES) if number not in (MALICIOUS, KILLED, STOPPED)]
MIN_ACCURACY = 0.85
NUM_ATTACKS = 5
"""The number of kinds of invalid updates. The malicious node sends them in turn."""
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
        return str(self.lines(f"received-{number}")[0]["node"])

    def reasons(self, number: int) -> list[str]:
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

    def wait_for_result(self, seconds: float) -> dict[str, Any]:
        """Wait for the result, and return it."""
        wait_until(lambda: self.read("result.json"), seconds, "the end of the run")
        return self.read("result.json")


def deployment_part(deployment: Deployment, folder: Path) -> None:
    """Test nodes that fail, and then a server that fails."""
    trial = Trial(folder)
    deployment.superlink()
    for number in range(NODES):
        deployment.supernode(number, NODES)
    failing = {"malicious": MALICIOUS, "killed": KILLED, "stopped": STOPPED, "task_timeout": TASK_TIMEOUT}
    trial.run(deployment, "trial", nodes=NODES, least=NODES, **failing)

    wait_until(lambda: len(trial.lines(f"received-{KILLED}")) == 2, 300, "the second task of the node to kill")
    deployment.send(f"node-{KILLED}", signal.SIGKILL)
    wait_until(lambda: len(trial.lines(f"received-{STOPPED}")) == 2, 300, "the second task of the node to stop")
    deployment.send(f"node-{STOPPED}", signal.SIGSTOP)
    log("killed one node and stopped one node")
    wait_until(
        lambda: trial.node(STOPPED) not in trial.read("status.json")["in_flight"],
        2 * TASK_TIMEOUT,
        "the timeout of the task of the stopped node",
    )
    deployment.send(f"node-{STOPPED}", signal.SIGCONT)
    last_seen = [time.monotonic()]

    def is_gone() -> bool:
        if trial.node(KILLED) in trial.read("status.json")["in_flight"]:
            last_seen[0] = time.monotonic()
        return time.monotonic() - last_seen[0] > 10

    wait_until(is_gone, 400, "the end of the tasks of the killed node")
    wait_until(
        lambda: len(trial.lines(f"sent-{MALICIOUS}")) > NUM_ATTACKS, 400, "all invalid updates of the malicious node"
    )
    wait_until(
        lambda: min(len(trial.lines(f"sent-{number}")) for number in HONEST) >= 4,
        400,
        "four updates of each honest node",
    )
    trial.stop()
    result, first = trial.wait_for_result(300), trial.read("status.json")
    log(f"stopped after {first['version']} updates, {result['final']:.1%} accuracy")
    for number in HONEST:
        num_sent = len(trial.lines(f"sent-{number}"))
        reasons = trial.reasons(number)
        assert 0 <= num_sent - len(reasons) <= 1, f"node {number} sent {num_sent} updates, {len(reasons)} were received"
        assert not any(reasons), f"node {number}: {reasons}"
    reasons = trial.reasons(MALICIOUS)
    assert len(reasons) >= NUM_ATTACKS, f"the malicious node: {reasons}"
    assert all(reasons), f"the malicious node: {reasons}"
    assert trial.node(KILLED) not in first["in_flight"]
    assert result["final"] > MIN_ACCURACY, result

    options = {"nodes": NODES, "least": NODES - 1, "resume": True, "task_timeout": TASK_TIMEOUT, "malicious": MALICIOUS}
    trial.run(deployment, "trial", **options)
    wait_until(
        lambda: trial.read("status.json").get("version", 0) >= first["version"] + 8,
        300,
        "eight updates of the second run",
    )
    second = trial.read("status.json")
    os.kill(second["pid"], signal.SIGKILL)
    log(f"server killed after {second['version']} updates")
    rounds = second["updates"] // NODES + 3
    trial.run(deployment, "trial", **options, rounds=rounds)
    result, third = trial.wait_for_result(300), trial.read("status.json")
    log(f"resumed to {third['version']} updates, {result['final']:.1%} accuracy")
    starts = [line["version"] for line in trial.lines("starts")]
    assert starts[0] == 0, starts
    assert starts[1] == first["version"], starts
    assert starts[2] >= second["version"] - 1, starts  # the last checkpoint may not have been written
    assert third["updates"] >= NODES * rounds
    assert set(result["accuracies"]) == {str(number) for number in range(rounds + 1)}, result
    assert result["final"] > MIN_ACCURACY, result


def simulation_part(deployment: Deployment, folder: Path) -> None:
    """Test Flower's simulation engine on Ray."""
    trial = Trial(folder)
    size = ("--federation-config", "num-supernodes=4 client-resources-num-cpus=1") if deployment.http else ()
    trial.run(deployment, "local", *size, nodes=4, least=4, rounds=6, evaluate=1.0)
    result = trial.wait_for_result(400)
    log(f"{trial.read('status.json')['version']} updates, {result['final']:.1%} accuracy")
    assert result["final"] > MIN_ACCURACY, result
    assert result["client_metrics"], result


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


def log(line: str) -> None:
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
        log(f"Flower {flwr.__version__}, {part}")
        with Deployment(folder, version) as deployment:
            if not deployment.http:
                with (folder / "app" / "pyproject.toml").open("a") as file:
                    file.write(CONNECTIONS)
            try:
                PARTS[part](deployment, folder)
            except BaseException:
                for file in sorted(folder.rglob("*.log")):
                    print(f"--- {file.name}\n{file.read_text(errors='replace')[-6000:]}")
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
