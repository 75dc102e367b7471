"""A client over HTTP: `python client.py http://127.0.0.1:8000 ward-7 --part 0/3`; the data are a part of the digits.

With `--pieces 1`, the client sends one model as a safetensors file. Use this form if the rule needs only the trained
model. With more pieces, the client sends a curve of several models as the bytes of `manifoldagg.wire`.
"""

import argparse
import io
import secrets
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from safetensors.torch import save_file

from manifoldagg import ParameterSpace, wire
from manifoldagg.experiments import load_dataset
from manifoldagg.federated import clients, train_client
from manifoldagg.simulation.dataset import Batches

PIECE = 2**16


def ask(http: httpx.Client, method: str, path: str, *, tries: int = 8, data: bytes | Path = b"", **options: Any) -> Any:
    """Send a request, and return the response.

    If the connection fails or the server is busy, the function repeats the request. The server may therefore receive
    each request several times.
    """
    pause = 0.1
    for attempt in range(1, tries + 1):
        try:
            # The body is sent in pieces, so that the server can reject a large body before it has arrived.
            content = {"content": pieces(data)} if data else {}
            answer = http.request(method, path, **content, **options)
            if answer.status_code != 503 or attempt == tries:
                return answer
            wait = seconds(answer.headers.get("Retry-After", ""), pause)
        except httpx.TransportError:
            if attempt == tries:
                raise
            wait = pause
        time.sleep(wait)
        pause = min(2 * pause, 10.0)
    raise AssertionError("no tries")


def seconds(header: str, otherwise: float) -> float:
    """Return the seconds of a `Retry-After` header, at most 60. A date is ignored, because a clock may be wrong."""
    return min(float(header), 60.0) if header.isdecimal() else otherwise


def pieces(data: bytes | Path) -> Iterator[bytes]:
    """Yield the bytes, or the bytes of a file, one piece after another."""
    with data.open("rb") if isinstance(data, Path) else io.BytesIO(data) as file:
        yield from iter(partial(file.read, PIECE), b"")


def main() -> None:
    """Train the given number of tasks, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("name")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th sample, from the i-th on")
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--pieces", type=int, default=4, help="the number of models that a task returns")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    torch.set_num_threads(1)
    digits = load_dataset("digits")
    batches = Batches(digits.inputs[part::parts], digits.labels[part::parts], 32, np.random.default_rng(part))
    model, trainer, client_state = digits.model(), clients.Trajectory(pieces=options.pieces, epochs=1, rate=0.01), None
    generator = torch.Generator().manual_seed(part)
    with httpx.Client(base_url=options.url, timeout=30.0) as http, tempfile.TemporaryDirectory() as folder:
        space = ParameterSpace.of_spec(ask(http, "GET", "/spec").raise_for_status().json())
        for _ in range(options.tasks):
            headers = {"Idempotency-Key": secrets.token_hex(16)}
            sent = ask(http, "POST", f"/dispatch/{options.name}", headers=headers).raise_for_status()
            ticket = wire.unpack(sent.content, spec=space)
            payload = train_client(
                model, ticket.message, trainer, batches, client_state=client_state, generator=generator
            )
            client_state = payload.client_state  # It remains on the client.
            headers = {"Ticket-Id": ticket.id}
            data: bytes | Path
            if len(payload.points) == 1 and not (payload.tensors or payload.numbers):  # one model
                data = Path(folder) / "update.safetensors"
                save_file(space.state_dict(payload.points[0]) | dict(payload.buffers), data)
                headers["Samples"] = str(payload.samples)
            else:
                data = wire.pack(replace(payload, client_state=None), spec=space, ticket=ticket)
            answer = ask(http, "POST", f"/receive/{options.name}", data=data, headers=headers)
            receipt = answer.json()
            if answer.status_code == 200:
                print(f"{options.name}: version {receipt['version']}, {receipt['staleness']} late", flush=True)
            else:
                print(f"{options.name}: refused: {receipt['reason']}", flush=True)


if __name__ == "__main__":
    main()
