"""A server over HTTP: `python server.py --checkpoint server.checkpoint`, then clients with `client.py`.

It says where it listens, on the loopback, and stops by Ctrl-C or SIGTERM, with a checkpoint from which the next one
goes on. Who may call it, and whether a client is whom it says, is for what stands before it: a proxy with TLS and
tokens.
"""

import argparse
import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from manifoldagg import Server, wire
from manifoldagg.errors import ArgumentError, BusyError, ManifoldAggError, WireError
from manifoldagg.experiments import load_dataset
from manifoldagg.federated import suggest_rate
from manifoldagg.federated.rules import AsyncKrylov


class Door:
    """The four things that a client may ask for.

    Args:
        server: whose they are.
        limit: bytes of an upload.
        uploads: how many are held at once.
        patience: seconds that one may take.
        checkpoint: written when the application stops; beside it, who has which ticket.
    """

    def __init__(
        self, server: Server, *, limit: int, uploads: int = 4, patience: float = 60.0, checkpoint: Path | None = None
    ) -> None:
        self.server = server
        self.limit = limit
        self.uploads = uploads
        self.patience = patience
        self.checkpoint = checkpoint
        self.held = 0
        self.dispatching = asyncio.Lock()
        # The last ticket of each client: the key that it was asked for with, its id and its bytes.
        self.sent: dict[str, tuple[str, str, bytes]] = {}
        if self.names and self.names.exists():
            # The keys are gone, and whoever asks by one gets another ticket; its id says which one that ends.
            self.sent = {client: ("", ticket, b"") for client, ticket in json.loads(self.names.read_text()).items()}

    @property
    def names(self) -> Path | None:
        """The file that says who has which ticket."""
        return self.checkpoint and self.checkpoint.with_name(f"{self.checkpoint.name}.tickets")

    def application(self) -> Starlette:
        """What a web server runs."""
        routes = [
            Route("/spec", self.spec),
            Route("/status", self.status),
            Route("/dispatch/{client}", self.dispatch, methods=["POST"]),
            Route("/receive/{client}", self.receive, methods=["POST"]),
        ]
        return Starlette(routes=routes, lifespan=self.lifespan)

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Web servers stop asking when the last answer has gone out."""
        yield
        if self.checkpoint:
            await run_in_threadpool(self.server.save, self.checkpoint)
        if self.names:
            fresh = self.names.with_name(f"{self.names.name}.new")
            fresh.write_text(json.dumps({client: ticket for client, (_, ticket, _) in self.sent.items()}))
            fresh.replace(self.names)
        print(f"stopped at version {self.server.version}", flush=True)

    async def spec(self, _: Request) -> Response:
        """The space of the models."""
        return JSONResponse(self.server.spec())

    async def status(self, _: Request) -> Response:
        """Where the server is."""
        return JSONResponse({"version": self.server.version, "rejected": self.server.rejected})

    async def dispatch(self, request: Request) -> Response:
        """A ticket. A client has one: the same key gets the same one, another key ends the last."""
        client = request.path_params["client"]
        key = request.headers.get("Idempotency-Key", "")
        if not key:
            return refusal(400, "Idempotency-Key: expected one, the same for every try")
        async with self.dispatching:
            self.forget()
            last = self.sent.get(client)
            if last is None or last[0] != key:
                if last is not None:
                    del self.sent[client]
                    with contextlib.suppress(ArgumentError):  # it was answered, or is too old
                        self.server.drop(last[1])
                try:
                    ticket = await run_in_threadpool(self.server.dispatch, client)
                    last = (key, ticket.id, await run_in_threadpool(wire.pack, ticket))
                except BusyError as error:
                    return busy(str(error))
                except ManifoldAggError as error:
                    return refusal(422, str(error))
                self.sent[client] = last
        return Response(last[2], media_type="application/octet-stream")

    def forget(self) -> None:
        """Let go of the tickets that have ended: answered, dropped, or too old."""
        self.server.expire()
        out = set(self.server.tickets)
        self.sent = {client: last for client, last in self.sent.items() if last[1] in out}

    async def receive(self, request: Request) -> Response:
        """A receipt, the same one for who asks again."""
        if self.held >= self.uploads:
            return busy(f"server: busy: {self.held} uploads are under way")
        self.held += 1
        try:
            async with asyncio.timeout(self.patience):
                data = await self.body(request)
            if data is None:
                return refusal(413, f"body: expected at most {self.limit} bytes")
            client = request.path_params["client"]
            answer = await run_in_threadpool(self.answer, client, data)
            self.forget()
            return answer
        except TimeoutError:
            return refusal(408, f"body: expected it within {self.patience:g} s")
        except ClientDisconnect:
            return refusal(400, "body: ended early")
        finally:
            self.held -= 1

    async def body(self, request: Request) -> bytearray | None:
        """What comes, piece by piece, as long as it is no more than may be."""
        told = request.headers.get("Content-Length", "0")
        if not told.isdecimal() or float(told) > self.limit:
            return None
        data = bytearray()
        async for piece in request.stream():
            data += piece
            if len(data) > self.limit:
                return None
        return data

    def answer(self, client: str, data: bytearray) -> Response:
        """What the server says of an upload."""
        try:
            ticket = wire.ticket_of(data)
        except WireError as error:
            return refusal(400, str(error))
        receipt = self.server.receive(ticket or "", partial(wire.unpack, data, spec=self.server.space), client=client)
        try:
            receipt.check()
        except BusyError as error:
            return busy(str(error))
        except ArgumentError as error:
            return refusal(422, str(error))
        return JSONResponse(receipt.asdict())


def refusal(status: int, reason: str) -> Response:
    """No, and why."""
    return JSONResponse({"reason": reason}, status)


def busy(reason: str) -> Response:
    """Not now."""
    return JSONResponse({"reason": reason}, 503, {"Retry-After": "1"})


def main() -> None:
    """Serve until it is told to stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0: one that is free")
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    rule = AsyncKrylov(rate=suggest_rate(AsyncKrylov(), num_clients=3, concurrency=3))
    limits: dict[str, Any] = {"timeout": 600.0, "max_in_flight": 100, "max_queued_updates": 4}
    if options.checkpoint and options.checkpoint.exists():
        server = Server.resume(options.checkpoint, load_dataset("digits").model(), rule)
    else:
        server = Server.of(load_dataset("digits").model(), rule, **limits)
    # A path of four float32 models has 16 bytes for each parameter. The rest is a reserve for names and for float64.
    door = Door(server, limit=32 * server.space.layout.size + 2**16, checkpoint=options.checkpoint)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", options.port))
        print(f"listening on http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        config = uvicorn.Config(door.application(), log_level="warning", timeout_graceful_shutdown=10)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
