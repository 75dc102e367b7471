"""Tests of the coordinator example: a client without dependencies, resumed uploads, and restarts after kills."""

import ast
import hashlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import safetensors.torch
import torch

from manifoldagg import ParameterSpace, Server
from manifoldagg.federated import Durability
from manifoldagg.federated.rules import FedAsync

FOLDER = Path(__file__).parent.parent / "examples" / "coordinator"
PAGES = Path(__file__).parent.parent / "docs" / "guide"
TOKENS = {"north": "secret-of-north", "south": "secret-of-south"}
MODULE = runpy.run_path(str(FOLDER / "coordinator.py"))
Coordinator, Handler = MODULE["Coordinator"], MODULE["Handler"]


def test_the_client_imports_the_standard_library_only():
    tree = ast.parse((FOLDER / "client.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


@contextmanager
def serving(folder):
    """Serve a coordinator in this process, and yield its address."""
    coordinator = Coordinator(folder, TOKENS)
    handler = type("Local", (Handler,), {"coordinator": coordinator})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}", coordinator
        finally:
            http.shutdown()
            thread.join()
    coordinator.server.close()


def call(method, url, data=None, token=TOKENS["north"], **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {token}", **named}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as answer:
        return answer.code, answer.headers, answer.read()


def task(url, key="one", **options):
    status, headers, data = call("POST", f"{url}/tasks", b"", Idempotency_Key=key, **options)
    assert status == 200, data
    return headers["Ticket"], safetensors.torch.load(data)


def result(model, change=1.0):
    return safetensors.torch.save({name: x + change for name, x in model.items()}, metadata={"samples": "10"})


def put(url, ticket, data, start=0, end=None, **options):
    end = len(data) if end is None else end
    return call(
        "PUT",
        f"{url}/uploads/{ticket}",
        data[start:end],
        Content_Range=f"bytes {start}-{end - 1}/{len(data)}",
        Upload_Digest=hashlib.sha256(data).hexdigest(),
        **options,
    )


def test_a_contribution_is_idempotent_and_its_receipt_can_be_fetched_again(tmp_path):
    with serving(tmp_path) as (url, coordinator):
        ticket, model = task(url)
        assert task(url)[0] == ticket
        assert call("GET", f"{url}/receipts/{ticket}")[0] == 404
        answers = [put(url, ticket, result(model)) for _ in range(3)]
        answers += [put(url, ticket, result(model, 9.0)), call("GET", f"{url}/receipts/{ticket}")]
        assert {(status, body) for status, _, body in answers} == {(200, answers[0][2])}
        assert coordinator.server.version == 1
        assert torch.equal(coordinator.server.model, torch.full((5,), 0.5))
        assert task(url, "two")[0] != ticket
    with serving(tmp_path) as (url, coordinator):
        assert call("GET", f"{url}/receipts/{ticket}")[2] == answers[0][2]
        assert coordinator.server.version == 1


def test_an_upload_continues_after_a_restart_from_the_last_stored_piece(tmp_path):
    with serving(tmp_path) as (url, _):
        ticket, model = task(url)
        data = result(model)
        assert put(url, ticket, data, 0, 40)[0] == 202
        status, _, body = put(url, ticket, data, 60, 80)
        assert (status, json.loads(body)) == (409, {"received": 40})
        assert put(url, ticket, data, 20, 40)[0] == 202  # This piece arrives twice.
    with serving(tmp_path) as (url, coordinator):
        status, _, body = call("GET", f"{url}/uploads/{ticket}")
        assert (status, json.loads(body)) == (202, {"received": 40})
        assert put(url, ticket, data, 40)[0] == 200
        assert torch.equal(coordinator.server.model, torch.full((5,), 0.5))
        assert [*(tmp_path / "uploads").iterdir()] == []


def test_a_complete_upload_that_was_not_applied_is_applied_by_its_last_byte(tmp_path):
    with serving(tmp_path) as (url, _):
        ticket, model = task(url)
        data = result(model)
        (tmp_path / "uploads" / ticket).write_bytes(
            data
        )  # The file is that of a coordinator killed between the last write and the update.
    with serving(tmp_path) as (url, coordinator):
        assert put(url, ticket, data, len(data) - 1)[0] == 200
        assert coordinator.server.version == 1


def test_invalid_requests_change_nothing(tmp_path):
    with serving(tmp_path) as (url, coordinator):
        ticket, model = task(url)
        data = result(model)
        nan = safetensors.torch.save({name: x * torch.nan for name, x in model.items()}, metadata={"samples": "10"})
        bare = safetensors.torch.save(model)
        assert call("POST", f"{url}/tasks", b"", token="guess", Idempotency_Key="one")[0] == 401
        assert call("POST", f"{url}/tasks", b"")[0] == 400
        assert call("GET", f"{url}/uploads/../tokens")[0] == 404
        assert put(url, ticket, data, token=TOKENS["south"])[0] == 422
        assert put(url, "ab12", data)[0] == 422
        for bad in (nan, bare, b"of my own making", data + b"!" * 2**17):
            assert put(url, ticket, bad, 0, min(len(bad), 2**16))[0] in (400, 422)
        wrong = {"Content_Range": f"bytes 0-{len(data) - 1}/{len(data)}", "Upload_Digest": "0" * 64}
        assert call("PUT", f"{url}/uploads/{ticket}", data, **wrong)[0] == 422
        assert coordinator.server.version == 0
        assert put(url, ticket, data)[0] == 200


class Process:
    """A running program of the example, with the lines that it prints."""

    def __init__(self, *command):
        command = ["timeout", "300", sys.executable, *map(str, command)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.lines = []
        self.condition = threading.Condition()
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            with self.condition:
                self.lines.append(line.rstrip())
                self.condition.notify_all()

    def await_line(self, pattern):
        with self.condition:
            assert self.condition.wait_for(lambda: any(re.search(pattern, line) for line in self.lines), 200), (
                self.lines
            )
            return next(found for line in self.lines if (found := re.search(pattern, line)))

    def kill(self):
        """Send SIGKILL to the program and to `timeout`, which leads its process group."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        self.reader.join(30)
        self.process.stdout.close()


def run(folder, kills):
    """Run a client of three tasks and kill the coordinator during uploads; return its model and the client's lines."""
    folder.mkdir()
    (folder / "tokens.json").write_text(json.dumps(TOKENS))
    rows = [[(7 * i + 3 * j) % 5 / 5 for j in range(4)] for i in range(20)]
    (folder / "data.csv").write_text("".join(f"{','.join(map(str, [*row, sum(row)]))}\n" for row in rows))
    command = (FOLDER / "coordinator.py", folder / "server", "--tokens", folder / "tokens.json", "--port")
    running = [Process(*command, 0)]
    try:
        url, port = running[0].await_line(r"listening on (http://127\.0\.0\.1:(\d+)) at version 0").groups()
        told = ("--token", TOKENS["north"], "--state", folder / "client", "--data", folder / "data.csv")
        slow = ("--piece", 40, "--pause", 0.25 if kills else 0.0)
        client = Process(FOLDER / "client.py", url, *told, *slow)
        running.append(client)
        for version in range(kills):
            # Wait for the middle of an upload: a piece is stored, and the client pauses before each piece.
            if version:
                client.await_line(rf"^version {version},")
            uploads = folder / "server" / "uploads"
            deadline = threading.Event()
            for _ in range(2000):
                if any(path.stat().st_size for path in uploads.iterdir()):
                    break
                deadline.wait(0.01)
            running[-1 if version else 0].kill()
            running.append(Process(*command, port))
            running[-1].await_line(rf"listening on .* at version {version}$")
        assert client.process.wait(200) == 0, client.lines
        client.reader.join(30)
        receipt = json.loads((folder / "client" / "receipt").read_text())
        status, _, body = call("GET", f"{url}/receipts/{receipt['ticket']}")
        assert (status, json.loads(body)) == (200, receipt["receipt"])
    finally:
        for process in running:
            process.kill()
    space = ParameterSpace.of(MODULE["network"]())
    server = Server.resume(
        folder / "server" / "checkpoint",
        space,
        FedAsync(rate=0.5),
        durability=Durability(journal=folder / "server" / "journal"),
    )
    assert (server.version, server.tickets) == (3, [])
    server.close()
    return server.model, client.lines


def test_a_coordinator_that_is_killed_twice_computes_the_same_model(tmp_path):
    expected, lines = run(tmp_path / "whole", kills=0)
    found, with_kills = run(tmp_path / "killed", kills=2)
    assert torch.equal(found, expected)
    assert lines == [f"version {version}, staleness 0" for version in (1, 2, 3)]
    assert [line for line in with_kills if line.startswith("version")] == lines


def test_the_pages_show_the_commands_and_the_guarantees():
    tutorial, guarantees = ((PAGES / name).read_text() for name in ("coordinator.md", "coordinator_guarantees.md"))
    assert "examples/coordinator" in tutorial
    named = set(re.findall(r"`(test_\w+)`", guarantees))
    assert named
    assert named <= set(globals())
