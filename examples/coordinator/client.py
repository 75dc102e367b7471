"""A client that needs only the standard library: `python client.py URL --token TOKEN --state FOLDER --data FILE`.

The client trains a linear regression on a CSV file and sends its model to the coordinator. It stores its progress in
FOLDER, so it can be killed and started again, as the coordinator can.
"""

import argparse
import array
import csv
import hashlib
import json
import secrets
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PIECE = 2**16
RETRIES = 100


def call(
    method: str, url: str, token: str, data: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Send a request and return the status, the headers and the body. Retry while the coordinator does not answer.

    Every request of this client may arrive twice, because each of them is idempotent.
    """
    for attempt in range(RETRIES):
        request = urllib.request.Request(
            url, data, {"Authorization": f"Bearer {token}", **(headers or {})}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as answer:
            if answer.code != 503:
                return answer.code, dict(answer.headers), answer.read()
        except OSError:  # the coordinator is not running, or was killed during the request
            pass
        time.sleep(min(0.1 * 1.5**attempt, 2.0))
    sys.exit("the coordinator does not answer")


def read_model(data: bytes) -> dict[str, tuple[list[int], array.array]]:
    """Return the shape and the numbers of each float32 tensor of a safetensors file."""
    end = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:end]).items():
        if name != "__metadata__":
            numbers = array.array("f", data[end + entry["data_offsets"][0] : end + entry["data_offsets"][1]])
            if sys.byteorder == "big":
                numbers.byteswap()
            found[name] = entry["shape"], numbers
    return found


def write_model(model: dict[str, tuple[list[int], array.array]], samples: int) -> bytes:
    """Return a safetensors file with the number of samples in its metadata."""
    head: dict[str, Any] = {"__metadata__": {"samples": str(samples)}}
    body = b""
    for name, (shape, numbers) in model.items():
        stored = array.array("f", numbers)
        if sys.byteorder == "big":
            stored.byteswap()
        head[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(body), len(body) + 4 * len(stored)]}
        body += stored.tobytes()
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)  # readers require aligned data
    return len(text).to_bytes(8, "little") + text + body


def train(model: dict[str, tuple[list[int], array.array]], rows: list[list[float]], rate: float, epochs: int) -> None:
    """Run gradient descent for the mean squared error of a linear regression. The last column is the target."""
    weight, bias = model["weight"][1], model["bias"][1]
    for _ in range(epochs):
        for *inputs, target in rows:
            error = sum(w * x for w, x in zip(weight, inputs, strict=True)) + bias[0] - target
            for i, x in enumerate(inputs):
                weight[i] -= rate * error * x
            bias[0] -= rate * error


def write(path: Path, data: bytes) -> None:
    """Replace a file at once."""
    fresh = path.with_name(f".{path.name}")
    fresh.write_bytes(data)
    fresh.replace(path)


def task(options: argparse.Namespace) -> dict[str, Any]:
    """Run one task and return its receipt. After a kill, the next call continues the same task."""
    key, ticket, result = (options.state / name for name in ("key", "ticket", "result"))
    if not key.exists():
        write(key, secrets.token_hex(16).encode())
    if not result.exists():
        # The same key returns the same ticket, so a lost answer or a kill does not use up a second one.
        headers = {"Idempotency-Key": key.read_text()}
        status, told, data = call("POST", f"{options.url}/tasks", options.token, b"", headers)
        if status != 200:
            sys.exit(f"no task: {data.decode()}")
        with options.data.open(newline="") as file:
            rows = [[float(x) for x in row] for row in csv.reader(file)]
        model = read_model(data)
        train(model, rows, options.rate, options.epochs)
        write(ticket, told["Ticket"].encode())
        write(result, write_model(model, len(rows)))
    receipt = upload(options, ticket.read_text(), result.read_bytes())
    write(options.state / "receipt", json.dumps({"ticket": ticket.read_text(), "receipt": receipt}).encode())
    # The key first: after a kill in between, the next call finds the result and only fetches its receipt again.
    for path in (key, result, ticket):
        path.unlink()
    return receipt


def upload(options: argparse.Namespace, ticket: str, data: bytes) -> dict[str, Any]:
    """Upload a result from the first byte that the coordinator does not have, and return the receipt."""
    url, digest = f"{options.url}/uploads/{ticket}", hashlib.sha256(data).hexdigest()
    status, _, answer = call("GET", url, options.token)
    is_first = True
    while status in (202, 409):
        stored = json.loads(answer)["received"]
        # If all bytes are stored, but were not applied before a kill, the last byte is sent again.
        start = min(stored, len(data) - 1)
        piece = data[start : start + options.piece]
        if status == 202 and stored and is_first:
            print(f"continuing at byte {start} of {len(data)}", flush=True)
        is_first = False
        time.sleep(options.pause)
        span = f"bytes {start}-{start + len(piece) - 1}/{len(data)}"
        headers = {"Content-Range": span, "Upload-Digest": digest, "Content-Type": "application/octet-stream"}
        status, _, answer = call("PUT", url, options.token, piece, headers)
    if status != 200:
        sys.exit(f"rejected: {answer.decode()}")
    receipt: dict[str, Any] = json.loads(answer)
    return receipt


def main() -> None:
    """Run several tasks, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--token", required=True)
    parser.add_argument("--state", type=Path, required=True, help="the folder of the client's progress")
    parser.add_argument("--data", type=Path, required=True, help="a CSV file: four inputs and a target in each row")
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--piece", type=int, default=PIECE, help="the bytes of a piece of an upload")
    parser.add_argument("--pause", type=float, default=0.0, help="the seconds before each piece, for a slow network")
    options = parser.parse_args()
    options.state.mkdir(parents=True, exist_ok=True)
    for _ in range(options.tasks):
        receipt = task(options)
        print(f"version {receipt['version']}, staleness {receipt['staleness']}", flush=True)


if __name__ == "__main__":
    main()
