"""A server over HTTP: `python server.py --checkpoint server.checkpoint`, then clients with `client.py`.

The server prints its address, which is on the loopback interface. Ctrl-C and SIGTERM stop it. It then writes a
checkpoint, from which the next server resumes. It does not authenticate clients: run it behind a proxy with TLS and
tokens.

A client sends its result in one of two forms:

- One model, as a safetensors file. The header `Samples` contains the number of samples that the client trained on. The
  server maps the file into memory.
- A payload, as the bytes of `manifoldagg.wire`. Rules with curves (AsyncKrylov, AsyncBezier) or with further tensors
  need this form. The server loads the payload into memory.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from manifoldagg import Server, wire
from manifoldagg.averaging.checkpoints import FilePool, open_checkpoint
from manifoldagg.errors import ArgumentError, BusyError, CheckpointError, ManifoldAggError, WireError
from manifoldagg.experiments import load_dataset
from manifoldagg.federated import Receipt, ServerLimits, suggest_rate
from manifoldagg.federated.rules import AsyncKrylov

MAX_HEADER = 2**20
"""The maximum length of the header of a safetensors file in bytes. A tensor needs about 100 bytes."""


class Endpoints:
    """The four HTTP endpoints of a server: `/spec`, `/status`, `/dispatch/{client}` and `/receive/{client}`.

    Args:
        server: the server that issues tickets and applies updates.
        limit: the maximum size of an upload in bytes.
        uploads: the maximum number of simultaneous uploads, at most one for each client.
        patience: the maximum duration of an upload in seconds.
        grace: the time in seconds after which an upload must have the minimum rate.
        min_rate: the minimum transfer rate of an upload in bytes per second.
        checkpoint: the checkpoint that is written when the application stops. The tickets of the clients are stored
            next to it, in a file with the suffix `.tickets`.
        folder: the folder of the uploads, which no other program uses; `None` for the system's temporary folder. It
            must be on a disk. A file in a tmpfs occupies memory.
    """

    def __init__(
        self,
        server: Server,
        *,
        limit: int,
        uploads: int = 4,
        patience: float = 60.0,
        grace: float = 5.0,
        min_rate: float = 10_000.0,
        checkpoint: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        self.server = server
        self.limit = limit
        self.uploads = uploads
        self.patience = patience
        self.grace = grace
        self.min_rate = min_rate
        self.checkpoint = checkpoint
        self.folder = folder
        if folder is not None:
            folder.mkdir(mode=0o700, exist_ok=True)
            for file in folder.glob("upload-*"):  # A killed server could not delete them.
                file.unlink()
        # The clients with an upload under way.
        self.uploading: set[str] = set()
        self.dispatching = asyncio.Lock()
        # The last ticket of each client: its idempotency key, its identifier and its message.
        self.sent: dict[str, tuple[str, str, bytes]] = {}
        if self.ticket_file and self.ticket_file.exists():
            # The keys are not stored. A client that repeats a request receives a new ticket, which ends the stored one.
            self.sent = {
                client: ("", ticket, b"") for client, ticket in json.loads(self.ticket_file.read_text()).items()
            }

    @property
    def num_uploads(self) -> int:
        """The number of uploads under way."""
        return len(self.uploading)

    @property
    def ticket_file(self) -> Path | None:
        """The file with the identifier of each client's ticket."""
        return self.checkpoint and self.checkpoint.with_name(f"{self.checkpoint.name}.tickets")

    def application(self) -> Starlette:
        """Return the ASGI application."""
        routes = [
            Route("/spec", self.spec),
            Route("/status", self.status),
            Route("/dispatch/{client}", self.dispatch, methods=["POST"]),
            Route("/receive/{client}", self.receive, methods=["POST"]),
        ]
        return Starlette(routes=routes, lifespan=self.lifespan)

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Write the checkpoint and the tickets after the last response."""
        yield
        if self.checkpoint:
            await run_in_threadpool(self.server.save, self.checkpoint)
        if self.ticket_file:
            fresh = self.ticket_file.with_name(f"{self.ticket_file.name}.new")
            fresh.write_text(json.dumps({client: ticket for client, (_, ticket, _) in self.sent.items()}))
            fresh.replace(self.ticket_file)
        print(f"stopped at version {self.server.version}", flush=True)

    async def spec(self, _: Request) -> Response:
        """Return the specification of the models."""
        return JSONResponse(self.server.spec())

    async def status(self, _: Request) -> Response:
        """Return the version and the numbers of rejected updates."""
        return JSONResponse({"version": self.server.version, "rejected": self.server.rejected})

    async def dispatch(self, request: Request) -> Response:
        """Return a ticket. A repeated request with the same key returns the same ticket. A new key ends it."""
        client = request.path_params["client"]
        key = request.headers.get("Idempotency-Key", "")
        if not key:
            return error_response(400, "Idempotency-Key: expected a header with the same value in each attempt")
        async with self.dispatching:
            self.remove_finished()
            last = self.sent.get(client)
            if last is None or last[0] != key:
                if last is not None:
                    del self.sent[client]
                    with contextlib.suppress(ArgumentError):  # The ticket has an answer, or has expired.
                        self.server.drop(last[1])
                try:
                    ticket = await run_in_threadpool(self.server.dispatch, client)
                    last = (key, ticket.id, await run_in_threadpool(wire.pack, ticket))
                except BusyError as error:
                    return busy_response(str(error))
                except ManifoldAggError as error:
                    return error_response(422, str(error))
                self.sent[client] = last
        return Response(last[2], media_type="application/octet-stream")

    def remove_finished(self) -> None:
        """Remove the tickets that were answered, dropped or have expired."""
        self.server.expire()
        out = set(self.server.tickets)
        self.sent = {client: last for client, last in self.sent.items() if last[1] in out}

    async def receive(self, request: Request) -> Response:
        """Return a receipt. A repeated request returns the same receipt."""
        client = request.path_params["client"]
        ticket = request.headers.get("Ticket-Id", "")
        samples = request.headers.get("Samples")
        if samples is not None and not (samples.isdecimal() and len(samples) < 20):
            return error_response(400, f"Samples: expected a number of samples, got {samples[:20]!r}")
        # Before the body is read, so that only a client with a ticket can occupy a slot.
        known = await run_in_threadpool(self.receipt_of, client, ticket)
        if known is not None:
            return known
        if client in self.uploading:
            return busy_response("client: busy: another upload of this client is under way")
        if self.num_uploads >= self.uploads:
            return busy_response(f"server: busy: {self.num_uploads} uploads are under way")
        self.uploading.add(client)
        try:
            # The file has the mode 0600. The end of the block deletes it, also after an error.
            with tempfile.NamedTemporaryFile(prefix="upload-", suffix=".safetensors", dir=self.folder) as file:
                if not await self.store(request, file):
                    return error_response(413, f"body: expected at most {self.limit} bytes")
                answer = await run_in_threadpool(self.answer, client, ticket, samples, Path(file.name))
            self.remove_finished()
            return answer
        except TimeoutError:  # A subclass of OSError.
            rate = f"at least {self.min_rate:g} bytes per second after {self.grace:g} s"
            return error_response(408, f"body: expected {rate}, and the end within {self.patience:g} s")
        except ClientDisconnect:
            return error_response(400, "body: ended early")
        except OSError as error:
            return busy_response(f"server: busy: the upload could not be stored: {error.strerror}")
        finally:
            self.uploading.discard(client)

    def receipt_of(self, client: str, ticket: str) -> Response | None:
        """Return the answer for a ticket that is closed or not the client's; `None` if the ticket is open."""
        try:
            return receipt_response(self.server.receive(ticket, raise_open, client=client))
        except TicketOpen:
            return None

    async def store(self, request: Request, file: IO[bytes]) -> bool:
        """Write the body to a file piece by piece. Return `False` if the body exceeds the limit.

        Raises:
            TimeoutError: if the body arrives too slowly or takes too long.
        """
        length = request.headers.get("Content-Length", "0")
        if not length.isdecimal() or float(length) > self.limit:
            return False
        size = 0
        start = asyncio.get_running_loop().time()
        async with asyncio.timeout_at(start + min(self.grace, self.patience)) as deadline:
            async for piece in request.stream():
                size += len(piece)
                if size > self.limit:
                    return False
                await run_in_threadpool(file.write, piece)
                deadline.reschedule(start + min(self.grace + size / self.min_rate, self.patience))
        await run_in_threadpool(file.flush)
        return True

    def answer(self, client: str, ticket: str, samples: str | None, path: Path) -> Response:
        """Return the answer for an upload: a model with its number of samples, or a payload without `samples`."""
        try:
            if samples is not None:
                model = partial(checked, path)
                return receipt_response(self.server.receive_model(ticket, model, samples=int(samples), client=client))
            data = path.read_bytes()
            if wire.ticket_of(data) != ticket:
                return error_response(422, "ticket: expected that of the header Ticket-Id")
        except WireError as error:
            return error_response(400, str(error))
        except ArgumentError as error:  # The rule requires more than a model.
            return error_response(422, str(error))
        return receipt_response(
            self.server.receive(ticket, partial(wire.unpack, data, spec=self.server.space), client=client)
        )


def checked(path: Path) -> Path:
    """Return the path of an upload if its header is valid. Clients must not see the path, so no error contains it.

    Raises:
        ArgumentError: if the upload is not a safetensors file.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER:  # Parsed JSON needs much more memory than its text.
        got = f"a header of {length} bytes, which is more than {MAX_HEADER}"
        raise ArgumentError(f"model: expected a safetensors file, got {got}")
    try:
        open_checkpoint("model", path, FilePool())
    except CheckpointError as error:
        got = f"an upload that{str(error).removeprefix(f'{path}:')}"
        raise ArgumentError(f"model: expected a safetensors file, got {got}") from None
    return path


class TicketOpen(Exception):
    """The ticket is open: the server asks for its payload."""


def raise_open() -> Any:
    """Stand in for a payload that has not arrived. The server calls this function only if the ticket is open."""
    raise TicketOpen


def receipt_response(receipt: Receipt) -> Response:
    """Return the answer with a receipt."""
    try:
        receipt.check()
    except BusyError as error:
        return busy_response(str(error))
    except ArgumentError as error:
        return error_response(422, str(error))
    return JSONResponse(receipt.asdict())


def error_response(status: int, reason: str) -> Response:
    """Return an error response with a reason."""
    return JSONResponse({"reason": reason}, status)


def busy_response(reason: str) -> Response:
    """Return a response that asks the client to try again after one second."""
    return JSONResponse({"reason": reason}, 503, {"Retry-After": "1"})


def main() -> None:
    """Run the server until a signal stops it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="the port; 0 selects a free port")
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    rule = AsyncKrylov(rate=suggest_rate(AsyncKrylov(), num_clients=3, concurrency=3))
    limits = ServerLimits(timeout=600.0, max_in_flight=100, max_queued_updates=4)
    if options.checkpoint and options.checkpoint.exists():
        server = Server.resume(options.checkpoint, load_dataset("digits").model(), rule)
    else:
        server = Server.of(load_dataset("digits").model(), rule, limits=limits)
    # A path of four float32 models has 16 bytes for each parameter. The rest is a reserve for names and for float64.
    limit = 32 * server.space.layout.size + 2**16
    folder = options.checkpoint and options.checkpoint.with_name(f"{options.checkpoint.name}.uploads")
    endpoints = Endpoints(server, limit=limit, checkpoint=options.checkpoint, folder=folder)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", options.port))
        print(f"listening on http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        config = uvicorn.Config(endpoints.application(), log_level="warning", timeout_graceful_shutdown=10)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
