"""The coordinator of a consortium over HTTP: `python coordinator.py FOLDER --tokens tokens.json`.

The coordinator stores everything in FOLDER before it answers. Kill it at any time and start it again with the same
command. Clients send models in the safetensors format, so they need neither this library nor PyTorch.
"""

import argparse
import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from manifoldagg import ParameterSpace, Server
from manifoldagg.errors import ArgumentError, BusyError, ManifoldAggError, WireError
from manifoldagg.federated import Durability, Receipt, ServerLimits
from manifoldagg.federated.rules import FedAsync

TICKET = re.compile(r"[0-9a-f]{1,64}")
KEY = re.compile(r"[0-9A-Za-z-]{1,64}")
PIECE = 2**16


def network() -> nn.Module:
    """Return the model of the consortium: a linear regression with four inputs."""
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


class Coordinator:
    """The state of the coordinator: a server with a journal, the issued tickets, and the unfinished uploads.

    Args:
        folder: the folder of all files.
        tokens: the secret token of each client.
        timeout: the seconds after which a ticket without an update expires.
    """

    def __init__(self, folder: Path, tokens: dict[str, str], timeout: float = 86_400.0) -> None:
        self.folder = folder
        self.tokens = tokens
        self.lock = threading.Lock()
        for name in ("tickets", "uploads"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        model = network()
        space = ParameterSpace.of(model)
        # The journal stores each change before a call returns. `open` starts a server or resumes it.
        self.server = Server.open(
            folder / "checkpoint",
            space,
            FedAsync(rate=0.5),
            space.point(model),
            durability=Durability(journal=folder / "journal"),
            limits=ServerLimits(timeout=timeout, max_in_flight=10 * len(tokens)),
            weights="uniform",
        )
        # Uploads whose tickets were closed before the last kill.
        for path in (folder / "uploads").iterdir():
            if path.name not in self.server.tickets:
                path.unlink()
        # A float32 number has 4 bytes. The rest is a reserve for float64 and for the names of the tensors.
        self.max_bytes = 16 * space.layout.size + 2**16

    def client_of(self, token: str) -> str | None:
        """Return the client that has a token, in constant time for each client."""
        found = [name for name, own in self.tokens.items() if hmac.compare_digest(own.encode(), token.encode())]
        return found[0] if found else None

    def ticket(self, client: str, key: str) -> tuple[str, bytes]:
        """Return the id of a ticket and its model. The same key returns the same ticket."""
        path = self.folder / "tickets" / client
        with self.lock:
            if path.exists():
                head, _, model = path.read_bytes().partition(b"\n")
                last = json.loads(head)
                if last["key"] == key:
                    return last["ticket"], model
                # The client has begun a new task, so the last ticket is not needed if it is still in flight.
                with contextlib.suppress(ArgumentError):
                    self.server.drop(last["ticket"])
            ticket = self.server.dispatch(client)
            model = safetensors.torch.save(ticket.state_dict())
            head = json.dumps({"key": key, "ticket": ticket.id}).encode()
            write(path, head + b"\n" + model)
            return ticket.id, model

    def receipt(self, client: str, ticket: str) -> Receipt | None:
        """Return the receipt of a closed ticket, or `None` if the ticket is in flight.

        Raises:
            ArgumentError: if the ticket is unknown or belongs to another client.
        """
        try:
            return self.server.receive(ticket, raise_open, client=client).check()
        except TicketOpen:
            return None

    def received(self, ticket: str) -> int:
        """Return the number of bytes of an upload that are stored."""
        path = self.upload(ticket)
        return path.stat().st_size if path.exists() else 0

    def append(self, ticket: str, offset: int, piece: bytes) -> bool:
        """Append a piece to an upload, and return whether it is stored. A piece that is stored already is accepted."""
        with self.lock, self.upload(ticket).open("a+b") as file:
            size = file.tell()
            if offset + len(piece) <= size:
                file.seek(offset)
                return file.read(len(piece)) == piece
            if offset != size:
                return False
            file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            return True

    def finish(self, client: str, ticket: str, digest: str) -> Receipt:
        """Apply a complete upload and return its receipt. Its file is then not needed.

        Raises:
            ArgumentError: if the digest differs or the server rejects the update. The client may upload again.
        """
        path = self.upload(ticket)
        with self.lock:
            if not path.exists():  # another request has finished this upload
                receipt = self.receipt(client, ticket)
                if receipt is None:
                    raise ArgumentError("upload: expected all pieces again, as the last upload was rejected")
                return receipt
            try:
                return self.apply(client, ticket, digest, path.read_bytes())
            finally:
                path.unlink()

    def apply(self, client: str, ticket: str, digest: str, data: bytes) -> Receipt:
        """Apply an update, which the server writes to its journal, and return its receipt."""
        if hashlib.sha256(data).hexdigest() != digest:
            raise ArgumentError("digest: expected the SHA-256 of the upload, got another one")
        model, samples = parse(data)
        return self.server.receive_model(ticket, model, samples=samples, client=client).check()

    def upload(self, ticket: str) -> Path:
        """Return the file of an upload."""
        return self.folder / "uploads" / ticket


class TicketOpen(Exception):
    """The ticket is in flight: the server asks for its update."""


def raise_open() -> Any:
    """Stand in for an update. The server calls this function only if the ticket is in flight."""
    raise TicketOpen


def parse(data: bytes) -> tuple[dict[str, torch.Tensor], int]:
    """Return the model and the number of samples of a safetensors file.

    Raises:
        WireError: if it is not such a file.
    """
    try:
        head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return safetensors.torch.load(data), int(head["__metadata__"]["samples"])
    except Exception as error:
        raise WireError(f"model: expected a safetensors file with samples in its metadata: {error!r:.200}") from None


def write(path: Path, data: bytes) -> None:
    """Replace a file at once, on the disk."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with fresh.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


class Handler(BaseHTTPRequestHandler):
    """The HTTP interface. `docs/guide/coordinator.md` describes each call."""

    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds until a connection without data is closed
    coordinator: Coordinator

    def do_POST(self) -> None:
        """POST /tasks: return a ticket."""
        key = self.headers.get("Idempotency-Key", "")
        if self.path != "/tasks" or not KEY.fullmatch(key):
            return self.answer(404 if self.path != "/tasks" else 400, {"reason": "expected POST /tasks with a key"})
        return self.guarded(lambda client: self.task(client, key))

    def task(self, client: str, key: str) -> None:
        """Send a ticket."""
        ticket, model = self.coordinator.ticket(client, key)
        self.send(200, model, {"Ticket": ticket})

    def do_GET(self) -> None:
        """GET /uploads/TICKET: the number of stored bytes. GET /receipts/TICKET: the receipt."""
        kind, ticket = self.route()
        if kind == "uploads":
            return self.guarded(lambda client: self.progress(client, ticket))
        if kind == "receipts":
            return self.guarded(lambda client: self.send_receipt(client, ticket))
        return self.answer(404, {"reason": "unknown path"})

    def progress(self, client: str, ticket: str) -> None:
        """Send the receipt if the ticket is closed, else the number of stored bytes."""
        if self.coordinator.receipt(client, ticket) is not None:
            return self.send_receipt(client, ticket)
        return self.answer(202, {"received": self.coordinator.received(ticket)})

    def send_receipt(self, client: str, ticket: str) -> None:
        """Send the receipt of a closed ticket."""
        receipt = self.coordinator.receipt(client, ticket)
        if receipt is None:
            return self.answer(404, {"reason": "the ticket has no update yet"})
        return self.answer(200, receipt.asdict())

    def do_PUT(self) -> None:
        """PUT /uploads/TICKET with Content-Range: store a piece. The last piece returns the receipt."""
        kind, ticket = self.route()
        found = re.fullmatch(r"bytes (\d{1,12})-(\d{1,12})/(\d{1,12})", self.headers.get("Content-Range", ""))
        length = self.headers.get("Content-Length", "")
        if kind != "uploads" or found is None or not length.isdecimal() or int(length) > PIECE:
            self.close_connection = True  # the body is not read
            return self.answer(400, {"reason": f"expected a Content-Range and at most {PIECE} bytes"})
        start, end, total = map(int, found.groups())
        piece = self.rfile.read(int(length))
        if len(piece) != end - start + 1 or not start <= end < total <= self.coordinator.max_bytes:
            return self.answer(400, {"reason": "Content-Range: expected the range of the body"})
        return self.guarded(lambda client: self.store(client, ticket, start, piece, total))

    def store(self, client: str, ticket: str, start: int, piece: bytes, total: int) -> None:
        """Store a piece of an upload whose ticket is in flight, and apply a complete upload."""
        if self.coordinator.receipt(client, ticket) is not None:
            return self.send_receipt(client, ticket)
        if not self.coordinator.append(ticket, start, piece):
            return self.answer(409, {"received": self.coordinator.received(ticket)})
        if start + len(piece) < total:
            return self.answer(202, {"received": start + len(piece)})
        receipt = self.coordinator.finish(client, ticket, self.headers.get("Upload-Digest", ""))
        return self.answer(200, receipt.asdict())

    def route(self) -> tuple[str, str]:
        """Return the kind and the ticket of a path, or two empty strings."""
        kind, _, ticket = self.path.removeprefix("/").partition("/")
        return (kind, ticket) if TICKET.fullmatch(ticket) else ("", "")

    def guarded(self, call: Any) -> None:
        """Call a function of the authenticated client, and answer with the reason of an error."""
        client = self.coordinator.client_of(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if client is None:
            return self.answer(401, {"reason": "expected the token of a client"})
        try:
            return call(client)
        except BusyError as error:
            return self.answer(503, {"reason": str(error)}, {"Retry-After": "1"})
        except ManifoldAggError as error:
            return self.answer(422, {"reason": str(error)})

    def answer(self, status: int, value: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        """Send JSON."""
        self.send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        """Send bytes."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Write no line for each request."""


def main() -> None:
    """Serve until the process ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=Path, required=True, help="a JSON file: the token of each client")
    parser.add_argument("--port", type=int, default=0, help="0: a free port")
    options = parser.parse_args()
    Handler.coordinator = Coordinator(options.folder, json.loads(options.tokens.read_text()))
    with ThreadingHTTPServer(("127.0.0.1", options.port), Handler) as http:
        version = Handler.coordinator.server.version
        print(f"listening on http://127.0.0.1:{http.server_port} at version {version}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            http.serve_forever()


if __name__ == "__main__":
    main()
