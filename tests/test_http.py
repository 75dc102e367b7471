"""Tests of the HTTP example: three client processes, repeated and invalid uploads, limits, and restarts."""

import asyncio
import errno
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from manifoldagg import ParameterSpace, Server, wire
from manifoldagg.errors import WireError
from manifoldagg.experiments import load_dataset
from manifoldagg.federated import Payload
from manifoldagg.federated.rules import AsyncKrylov, FedAsync, FedBuff, FedOrtho, MasFL
from tests.server_options import grouped

FOLDER = Path(__file__).parent.parent / "examples" / "http"
Endpoints = runpy.run_path(str(FOLDER / "server.py"))["Endpoints"]


TICKET = "Ticket-Id"


@pytest.fixture(autouse=True)
def uploads(tmp_path, monkeypatch):
    """The folder of the uploads, which each test must leave empty."""
    folder = tmp_path / "uploads"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert [*folder.iterdir()] == []


def make_endpoints(limit=10_000, *, uploads=4, patience=5.0, grace=5.0, min_rate=1000.0, **options):
    server = Server.of(nn.Linear(2, 1), FedAsync(0.5), **grouped(**options))
    return Endpoints(server, limit=limit, uploads=uploads, patience=patience, grace=grace, min_rate=min_rate)


def model_upload(sent, change=1.0):
    """Return the headers and the safetensors file of a client that sends one model."""
    state = {name.removeprefix("start/"): x + change for name, x in load(sent).items() if name.startswith("start/")}
    return {"headers": {TICKET: wire.ticket_of(sent), "Samples": "10"}, "content": save(state)}


def in_process(endpoints, talk):
    """Run `talk` with the application in one event loop, so that bodies arrive in pieces."""

    async def run():
        transport = httpx.ASGITransport(endpoints.application())
        async with httpx.AsyncClient(transport=transport, base_url="http://endpoints") as http:
            return await talk(http)

    return asyncio.run(run())


class Http:
    """An HTTP client that makes one call at a time."""

    def __init__(self, endpoints):
        self.endpoints = endpoints

    def get(self, path):
        return in_process(self.endpoints, lambda http: http.get(path))

    def post(self, path, **options):
        """Post a payload with its ticket, or a body that is not a payload with the ticket of its client."""
        _, call, client = path.split("/")
        if call == "receive" and "headers" not in options:
            try:
                ticket = wire.ticket_of(options["content"])
            except WireError:
                ticket = self.endpoints.sent[client][1]
            options["headers"] = {TICKET: ticket or ""}
        return in_process(self.endpoints, lambda http: http.post(path, **options))


@pytest.fixture
def endpoints():
    return make_endpoints()


@pytest.fixture
def http(endpoints):
    return Http(endpoints)


def dispatched(http, client="ward-7", key="first"):
    answer = http.post(f"/dispatch/{client}", headers={"Idempotency-Key": key})
    assert answer.status_code == 200
    return answer.content


def upload(endpoints, sent, **changes):
    ticket = wire.unpack(sent, spec=endpoints.server.space)
    payload = Payload(ticket.message.start[None] + 1, samples=10)
    return wire.pack(replace(payload, **changes), spec=endpoints.server.space, ticket=ticket)


def tickets(endpoints):
    return len(endpoints.server._state.value.tickets)


def test_spec_endpoint_returns_the_parameter_space(http, endpoints):
    assert ParameterSpace.of_spec(http.get("/spec").json()) == endpoints.server.space


def test_dispatch_is_idempotent_for_the_same_key(http, endpoints):
    first = dispatched(http)
    assert dispatched(http) == first
    assert tickets(endpoints) == 1
    # A restarted client requests with another key, which drops its previous ticket.
    second = dispatched(http, key="second")
    assert wire.ticket_of(second) != wire.ticket_of(first)
    assert tickets(endpoints) == 1
    assert http.post("/receive/ward-7", content=upload(endpoints, first)).status_code == 422
    assert http.post("/dispatch/ward-7").status_code == 400


def test_a_repeated_upload_gets_the_same_receipt(http, endpoints):
    data = upload(endpoints, dispatched(http))
    first, again = (http.post("/receive/ward-7", content=data) for _ in range(2))
    assert (first.status_code, again.status_code) == (200, 200)
    assert first.json() == again.json()
    assert first.json()["version"] == endpoints.server.version == 1
    assert (tickets(endpoints), endpoints.sent) == (0, {})


def test_a_late_copy_of_an_upload_does_not_change_the_next_ticket(http, endpoints):
    data = upload(endpoints, dispatched(http))
    assert http.post("/receive/ward-7", content=data).status_code == 200
    second = dispatched(http, key="second")
    assert http.post("/receive/ward-7", content=data).status_code == 200
    assert dispatched(http, key="second") == second
    assert tickets(endpoints) == 1


def test_endpoints_forget_tickets_that_have_ended():
    now = [0.0]
    endpoints = make_endpoints(timeout=600.0, clock=lambda: now[0])
    http = Http(endpoints)
    gone = dispatched(http)
    now[0] = 601.0
    dispatched(http, "ward-8")
    assert list(endpoints.sent) == ["ward-8"]
    # The key of an expired ticket gets a new valid ticket.
    fresh = dispatched(http)
    assert wire.ticket_of(fresh) != wire.ticket_of(gone)
    assert http.post("/receive/ward-7", content=upload(endpoints, fresh)).status_code == 200
    endpoints.server.drop(endpoints.sent["ward-8"][1])
    dispatched(http)
    assert list(endpoints.sent) == ["ward-7"]


def test_a_ticket_from_before_a_restart_is_accepted_or_replaced(tmp_path):
    file = tmp_path / "server.checkpoint"
    endpoints = Endpoints(Server.of(nn.Linear(2, 1), FedAsync(0.5)), limit=10_000, checkpoint=file)
    http = Http(endpoints)
    sent = [dispatched(http, client) for client in ("ward-7", "ward-8")]

    async def stops():
        async with endpoints.lifespan(None):
            pass

    asyncio.run(stops())
    endpoints = Endpoints(Server.resume(file, endpoints.server.space, FedAsync(0.5)), limit=10_000, checkpoint=file)
    http = Http(endpoints)
    assert http.post("/receive/ward-7", content=upload(endpoints, sent[0])).status_code == 200
    dispatched(http, "ward-8")
    assert tickets(endpoints) == 1
    assert http.post("/receive/ward-8", content=upload(endpoints, sent[1])).status_code == 422


def test_a_rejected_dispatch_gives_the_reason():
    http = Http(make_endpoints(weights={"ward-7": 3}))
    answer = http.post("/dispatch/ward-8", headers={"Idempotency-Key": "a"})
    assert (answer.status_code, answer.json()["reason"][:8]) == (422, "client: ")
    endpoints = make_endpoints()
    endpoints.server.close()
    answer = Http(endpoints).post("/dispatch/ward-8", headers={"Idempotency-Key": "a"})
    assert (answer.status_code, "closed" in answer.json()["reason"]) == (422, True)


@pytest.mark.parametrize(
    ("spoil", "status", "reason"),
    [
        (lambda data: b"", 400, "wire: expected the result of `pack`"),
        (lambda data: b"of my own making", 400, "wire: expected the result of `pack`"),
        (lambda data: data[:-1], 400, "wire: expected the result of `pack`"),
        (lambda data: data[:300] + b"!" + data[301:], 422, "wire: "),
    ],
    ids=["nothing", "text", "cut", "altered"],
)
def test_an_invalid_payload_is_rejected_with_a_reason(http, endpoints, spoil, status, reason):
    answer = http.post("/receive/ward-7", content=spoil(upload(endpoints, dispatched(http))))
    assert answer.status_code == status
    assert answer.json()["reason"].startswith(reason)
    assert (endpoints.server.version, tickets(endpoints)) == (0, 1)


@pytest.mark.usefixtures("as_shipped")
def test_a_rejected_payload_leaves_the_ticket_valid(http, endpoints):
    sent = dispatched(http)
    broken = upload(endpoints, sent, points=torch.full((1, 3), float("nan")))
    refused = http.post("/receive/ward-7", content=broken)
    assert (refused.status_code, refused.json()["reason"]) == (
        422,
        "points: expected finite values, got nan at (0, 0)",
    )
    assert http.post("/receive/ward-8", content=upload(endpoints, sent)).status_code == 422
    other = Server.of(nn.Linear(3, 1), FedAsync(0.5))
    ticket = wire.unpack(sent)
    foreign = wire.pack(Payload(torch.ones(1, 4), samples=1), spec=other.space, ticket=ticket)
    assert http.post("/receive/ward-7", content=foreign).json()["reason"].startswith("wire: layout")
    nobodys = wire.pack(Payload(torch.ones(1, 3), samples=1), spec=endpoints.server.space)
    assert http.post("/receive/ward-7", content=nobodys).json()["reason"] == "ticket: unknown, or used already"
    assert http.post("/receive/ward-7", content=upload(endpoints, sent)).status_code == 200
    assert http.get("/status").json()["version"] == 1


def test_a_body_that_is_too_large_is_rejected_early(endpoints):
    taken = []

    async def endless():
        for i in range(1000):
            taken.append(i)
            yield bytes(1000)

    ticket = {TICKET: wire.ticket_of(dispatched(Http(endpoints)))}
    answer = in_process(endpoints, lambda http: http.post("/receive/ward-7", content=endless(), headers=ticket))
    assert (answer.status_code, answer.json()["reason"]) == (413, "body: expected at most 10000 bytes")
    assert len(taken) == 11
    # If `Content-Length` exceeds the limit, the server reads nothing.
    taken.clear()
    told = {"Content-Length": "10001", **ticket}
    answer = in_process(endpoints, lambda http: http.post("/receive/ward-7", content=endless(), headers=told))
    assert (answer.status_code, taken) == (413, [])
    assert endpoints.num_uploads == 0


def test_an_upload_that_exceeds_the_patience_times_out():
    endpoints = make_endpoints(patience=0.05)

    async def stalled():
        yield b"a"
        await asyncio.sleep(60)

    ticket = {TICKET: wire.ticket_of(dispatched(Http(endpoints)))}
    answer = in_process(endpoints, lambda http: http.post("/receive/ward-7", content=stalled(), headers=ticket))
    assert (answer.status_code, endpoints.num_uploads) == (408, 0)


def test_a_busy_server_responds_with_retry_after():
    endpoints = make_endpoints(uploads=1, max_in_flight=2)

    async def talk(http):
        sent, other = [
            (await http.post(f"/dispatch/{name}", headers={"Idempotency-Key": "a"})).content
            for name in ("ward-7", "ward-8")
        ]
        full = await http.post("/dispatch/ward-9", headers={"Idempotency-Key": "b"})
        begun, go = asyncio.Event(), asyncio.Event()

        async def slowly():
            begun.set()
            await go.wait()
            yield upload(endpoints, sent)

        named = [{TICKET: wire.ticket_of(x)} for x in (sent, other)]
        first = asyncio.create_task(http.post("/receive/ward-7", content=slowly(), headers=named[0]))
        await begun.wait()
        second = await http.post("/receive/ward-8", content=b"", headers=named[1])
        go.set()
        return full, second, await first

    full, second, first = in_process(endpoints, talk)
    for answer in (full, second):
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert answer.json()["reason"].startswith("server: busy")
    assert (first.status_code, endpoints.num_uploads) == (200, 0)


def test_client_repeats_requests_after_timeouts_and_busy_responses():
    ask = runpy.run_path(str(FOLDER / "client.py"))["ask"]
    seen = []

    def flaky(request):
        seen.append(request.read())
        if len(seen) == 1:
            raise httpx.ReadTimeout("lost")
        if len(seen) == 2:
            return httpx.Response(503, headers={"Retry-After": "0"})
        return httpx.Response(200)

    with httpx.Client(transport=httpx.MockTransport(flaky), base_url="http://endpoints") as http:
        assert ask(http, "POST", "/receive/a", data=b"all of it").status_code == 200
        assert seen == [b"all of it"] * 3
        seen.clear()
        with pytest.raises(httpx.ReadTimeout):
            ask(http, "POST", "/receive/a", tries=1)


@pytest.mark.parametrize("told", ["Wed, 21 Oct 2026 07:28:00 GMT", "-1", "nan", "inf", "", "9" * 400])
def test_client_handles_every_retry_after_header(told, monkeypatch):
    client = runpy.run_path(str(FOLDER / "client.py"))
    waited = []
    monkeypatch.setattr(client["time"], "sleep", waited.append)
    answers = iter([httpx.Response(503, headers={"Retry-After": told}), httpx.Response(200)])
    with httpx.Client(transport=httpx.MockTransport(lambda _: next(answers)), base_url="http://endpoints") as http:
        assert client["ask"](http, "GET", "/spec").status_code == 200
    assert waited == [60.0 if told.isdecimal() else 0.1]


class Process:
    """A running program of the example, with the lines that it prints. It ends with the test."""

    def __init__(self, *command):
        # `timeout` ends the program even if the test process is killed.
        self.process = subprocess.Popen(
            ["timeout", "300", sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines = []
        self.first = threading.Event()
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            self.first.set()
        self.first.set()

    def end(self, number=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.reader.join(30)
        self.process.stdout.close()


def test_three_client_processes_train_over_loopback(tmp_path):
    file = tmp_path / "server.checkpoint"
    running = []

    def start(*command):
        running.append(Process(*command))
        return running[-1]

    try:
        server = start(FOLDER / "server.py", "--checkpoint", file)
        assert server.first.wait(200)
        url = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+)", server.lines[0])[1]
        command = (FOLDER / "client.py", url)
        # The first client sends models, and the other clients send curves.
        forms = ("1", "4", "4")
        options = [("--part", f"{i}/3", "--tasks", "2", "--pieces", form) for i, form in enumerate(forms)]
        clients = [start(*command, f"ward-{i}", *options[i]) for i in range(3)]
        for client in clients:
            assert client.process.wait(200) == 0, client.lines
            client.reader.join(30)
            assert len(client.lines) == 2
            assert all(re.fullmatch(r"ward-\d: version \d, \d late", line) for line in client.lines)
        # The server closes an oversized upload early and releases it.
        with httpx.Client(base_url=url) as http:
            sent = http.post("/dispatch/ward-0", headers={"Idempotency-Key": "a"}).content
            ticket = {TICKET: wire.ticket_of(sent)}
            big = iter([bytes(2**16)] * 100)
            assert http.post("/receive/ward-0", content=big, headers=ticket).status_code == 413
            assert http.get("/status").json() == {"version": 6, "rejected": {}}
        server.end()
        assert server.lines[1:] == ["stopped at version 6"]
        assert [*file.with_name("server.checkpoint.uploads").iterdir()] == []
        model = load_dataset("digits").model()
        assert Server.resume(file, model, AsyncKrylov(rate=0.75)).version == 6
    finally:
        for process in running:
            process.end()


async def trickle(piece=b"a", pause=0.01, times=10**6):
    for _ in range(times):
        yield piece
        await asyncio.sleep(pause)


def test_slow_uploads_without_a_ticket_do_not_block_valid_uploads():
    endpoints = make_endpoints(uploads=4)

    async def talk(http):
        sent = (await http.post("/dispatch/ward-7", headers={"Idempotency-Key": "a"})).content
        other = (await http.post("/dispatch/ward-8", headers={"Idempotency-Key": "a"})).content
        named = [{}, {TICKET: ""}, {TICKET: "f" * 32}, {TICKET: wire.ticket_of(other)}]
        slow = [asyncio.create_task(http.post("/receive/ward-9", content=trickle(), headers=x)) for x in named]
        await asyncio.sleep(0.1)
        held = endpoints.num_uploads
        honest = await http.post(
            "/receive/ward-7", content=upload(endpoints, sent), headers={TICKET: wire.ticket_of(sent)}
        )
        return held, honest.status_code, [(await answer).status_code for answer in slow]

    assert in_process(endpoints, talk) == (0, 200, [422] * 4)
    assert len(endpoints.server.tickets) == 1


def test_a_client_occupies_one_upload_slot_and_slow_uploads_are_ended():
    endpoints = make_endpoints(uploads=4, grace=0.3, min_rate=1e5)

    async def talk(http):
        sent = [
            (await http.post(f"/dispatch/{name}", headers={"Idempotency-Key": "a"})).content
            for name in ("slow", "fast")
        ]
        tickets = [{TICKET: wire.ticket_of(x)} for x in sent]
        slow = [
            asyncio.create_task(http.post("/receive/slow", content=trickle(), headers=tickets[0])) for _ in range(4)
        ]
        await asyncio.sleep(0.1)
        held = endpoints.num_uploads
        honest = await http.post("/receive/fast", content=upload(endpoints, sent[1]), headers=tickets[1])
        ended = sorted([(await answer).status_code for answer in slow])
        again = await http.post("/receive/slow", content=upload(endpoints, sent[0]), headers=tickets[0])
        return held, honest.status_code, ended, again.status_code

    assert in_process(endpoints, talk) == (1, 200, [408, 503, 503, 503], 200)
    assert (endpoints.num_uploads, endpoints.server.version) == (0, 2)


def test_a_steady_upload_may_last_longer_than_the_grace_period():
    endpoints = make_endpoints(grace=0.1, min_rate=1000.0)

    async def talk(http):
        sent = (await http.post("/dispatch/ward-7", headers={"Idempotency-Key": "a"})).content
        data = upload(endpoints, sent)

        async def steady():
            for start in range(0, len(data), 50):
                yield data[start : start + 50]
                await asyncio.sleep(0.02)

        return await http.post("/receive/ward-7", content=steady(), headers={TICKET: wire.ticket_of(sent)})

    assert in_process(endpoints, talk).status_code == 200


def test_the_ticket_header_must_equal_the_ticket_of_the_payload(http, endpoints):
    sent, other = dispatched(http), dispatched(http, "ward-8")
    answer = http.post("/receive/ward-7", content=upload(endpoints, other), headers={TICKET: wire.ticket_of(sent)})
    assert answer.status_code == 422
    assert answer.json()["reason"].startswith("ticket: expected")
    assert tickets(endpoints) == 2


@pytest.mark.parametrize("rule", [FedAsync(0.5), FedOrtho(0.5), FedBuff(2)], ids=lambda rule: type(rule).__name__)
def test_a_model_file_is_bitwise_equal_to_a_payload(rule):
    all_endpoints = [Endpoints(Server.of(nn.Linear(2, 1), rule), limit=10_000) for _ in range(2)]
    all_endpoints[1].server = Server.of(all_endpoints[0].server.state_dict(), rule)
    for change in (1.0, -0.3):
        sent = [
            [dispatched(Http(endpoints), name, f"{change}") for endpoints in all_endpoints]
            for name in ("ward-7", "ward-8")
        ]
        for name, (one, two) in zip(("ward-7", "ward-8"), sent, strict=True):
            points = wire.unpack(one, spec=all_endpoints[0].server.space).message.start[None] + change
            packed = Http(all_endpoints[0]).post(
                f"/receive/{name}", content=upload(all_endpoints[0], one, points=points)
            )
            answer = Http(all_endpoints[1]).post(f"/receive/{name}", **model_upload(two, change))
            assert (packed.status_code, answer.status_code) == (200, 200)
            assert packed.json() == answer.json()
            assert torch.equal(all_endpoints[0].server.model, all_endpoints[1].server.model)
    assert all_endpoints[1].server.version > 0


def test_a_repeated_model_file_gets_the_same_receipt(http, endpoints):
    data = model_upload(dispatched(http))
    first, again = (http.post("/receive/ward-7", **data) for _ in range(2))
    assert (first.status_code, again.status_code, again.json()) == (200, 200, first.json())
    assert endpoints.server.version == 1


def test_a_large_model_is_stored_in_a_private_file_and_not_in_memory(uploads):
    """The Python heap contains bytes and bytearrays, but neither tensors nor mapped files."""
    size = 1 << 25
    endpoints = Endpoints(Server.of(nn.Linear(size // 4, 1), FedAsync(0.5)), limit=2 * size)
    model = model_upload(dispatched(Http(endpoints)))
    data, step = memoryview(model.pop("content")), 1 << 20
    modes, sizes = set(), []

    async def slowly():
        for start in range(0, len(data), step):
            yield bytes(data[start : start + step])
            (file,) = uploads.iterdir()
            modes.add(file.stat().st_mode & 0o777)
            sizes.append(file.stat().st_size)

    tracemalloc.start()
    try:
        answer = in_process(endpoints, lambda http: http.post("/receive/ward-7", content=slowly(), **model))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer.status_code == 200
    assert peak < size // 4
    assert modes == {0o600}
    assert sizes == sorted(sizes)
    assert sizes[-1] > size // 2


async def interrupted_upload(endpoints, path, data, headers):
    """Send a part of a body and close the connection. Return the status of the answer."""
    messages = iter([{"type": "http.request", "body": data, "more_body": True}, {"type": "http.disconnect"}])
    answers = []
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "root_path": ""}
    scope["headers"] = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def receive():
        return next(messages)

    async def send(message):
        answers.append(message)

    await endpoints.application()(scope, receive, send)
    return answers[0]["status"]


def test_an_interrupted_upload_leaves_no_file_and_the_ticket_valid(http, endpoints, uploads):
    model = model_upload(dispatched(http))
    half = model["content"][:50]
    assert asyncio.run(interrupted_upload(endpoints, "/receive/ward-7", half, model["headers"])) == 400
    assert [*uploads.iterdir()] == []
    assert (tickets(endpoints), endpoints.num_uploads, endpoints.server.version) == (1, 0, 0)
    assert http.post("/receive/ward-7", **model).status_code == 200


def test_an_error_of_the_server_leaves_no_file_and_the_ticket_valid(http, endpoints, uploads, monkeypatch):
    model = model_upload(dispatched(http))
    seen = []

    def fails(*_, **options):
        seen.extend(uploads.iterdir())
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(endpoints.server, "receive_model", fails)
        with pytest.raises(ZeroDivisionError):
            http.post("/receive/ward-7", **model)
    assert len(seen) == 1
    assert [*uploads.iterdir()] == []
    assert http.post("/receive/ward-7", **model).status_code == 200


def test_a_full_disk_is_reported_and_the_upload_may_be_repeated(http, endpoints, monkeypatch):
    model = model_upload(dispatched(http))

    async def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(endpoints, "store", full)
        answer = http.post("/receive/ward-7", **model)
    reason = f"server: busy: the upload could not be stored: {os.strerror(errno.ENOSPC)}"
    assert (answer.status_code, answer.json()["reason"], endpoints.num_uploads) == (503, reason, 0)
    assert http.post("/receive/ward-7", **model).status_code == 200


def test_a_model_file_that_is_too_large_is_rejected_before_it_is_written(http, endpoints, uploads):
    headers = model_upload(dispatched(http))["headers"]
    sizes = []

    async def endless():
        while True:
            yield bytes(1000)
            sizes.extend(file.stat().st_size for file in uploads.iterdir())

    answer = in_process(endpoints, lambda http: http.post("/receive/ward-7", content=endless(), headers=headers))
    assert (answer.status_code, answer.json()["reason"]) == (413, "body: expected at most 10000 bytes")
    assert len(sizes) == 10
    assert max(sizes) <= 10_000
    headers["Content-Length"] = "10001"
    sizes.clear()
    answer = in_process(endpoints, lambda http: http.post("/receive/ward-7", content=endless(), headers=headers))
    assert (answer.status_code, sizes, tickets(endpoints)) == (413, [], 1)


def with_header(length, text=b"", data=b""):
    return length.to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("junk", "reason"),
    [
        (b"", "an upload that is not a complete safetensors file: it has 0 bytes"),
        (b"of my own making", "a header of 8606133118822278767 bytes, which is more than 1048576"),
        (with_header(2**20 + 1, b" " * 100), "a header of 1048577 bytes, which is more than 1048576"),
        (with_header(3, b"{]}"), "an upload that is not a safetensors file: "),
        (with_header(2, b"{}", b"1234"), "an upload that is not complete: it has 14 bytes, expected 10"),
    ],
)
def test_a_body_that_is_not_a_model_file_is_rejected(http, endpoints, junk, reason):
    model = model_upload(dispatched(http))
    answer = http.post("/receive/ward-7", **{**model, "content": junk})
    assert answer.status_code == 422
    assert answer.json()["reason"].startswith(f"model: expected a safetensors file, got {reason}")
    assert "upload-" not in answer.json()["reason"]
    # The names in the answer to `/status` must be those of arguments and not those of files.
    assert http.get("/status").json() == {"version": 0, "rejected": {"model": 1}}
    assert tickets(endpoints) == 1
    assert http.post("/receive/ward-7", **model).status_code == 200


def test_a_model_file_with_other_tensors_is_rejected(http, endpoints):
    model = model_upload(dispatched(http))
    for content in (save({"weight": torch.ones(1, 2)}), upload(endpoints, endpoints.sent["ward-7"][2])):
        answer = http.post("/receive/ward-7", **{**model, "content": content})
        assert (answer.status_code, answer.json()["reason"][:7]) == (422, "model: ")
    assert http.post("/receive/ward-7", **model).status_code == 200


@pytest.mark.parametrize("samples", ["", "ten", "-1", "1.5", "9" * 5000])
def test_an_invalid_number_of_samples_is_rejected_before_the_body_is_read(http, endpoints, samples):
    model = model_upload(dispatched(http))
    headers = {**model["headers"], "Samples": samples}
    taken = []

    async def body():
        taken.append(1)
        yield b""

    answer = in_process(endpoints, lambda http: http.post("/receive/ward-7", content=body(), headers=headers))
    assert (answer.status_code, taken) == (400, [])
    assert answer.json()["reason"] == f"Samples: expected a number of samples, got {samples[:20]!r}"
    model["headers"]["Samples"] = "0"
    answer = http.post("/receive/ward-7", **model)
    assert (answer.status_code, answer.json()["reason"][:9]) == (422, "samples: ")


def test_a_rule_that_requires_more_than_models_rejects_a_model_file():
    endpoints = Endpoints(Server.of(nn.Linear(2, 1), MasFL(2)), limit=10_000)
    http = Http(endpoints)
    sent = dispatched(http)
    answer = http.post("/receive/ward-7", **model_upload(sent))
    assert answer.status_code == 422
    assert "requires more than models from clients" in answer.json()["reason"]


def test_a_new_server_deletes_the_uploads_of_a_killed_server(tmp_path):
    folder = tmp_path / "server.uploads"
    for _ in range(2):
        Endpoints(Server.of(nn.Linear(2, 1), FedAsync(0.5)), limit=10_000, folder=folder)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert [file.name for file in folder.iterdir()] in ([], ["other"])
        (folder / "upload-abc.safetensors").write_bytes(b"1")
        (folder / "other").write_bytes(b"1")
    endpoints = Endpoints(Server.of(nn.Linear(2, 1), FedAsync(0.5)), limit=10_000, folder=folder)
    assert Http(endpoints).post("/receive/ward-7", **model_upload(dispatched(Http(endpoints)))).status_code == 200
    assert [file.name for file in folder.iterdir()] == ["other"]


def test_client_repeats_a_file_upload_in_pieces_after_an_error(tmp_path):
    client = runpy.run_path(str(FOLDER / "client.py"))
    file = tmp_path / "update.safetensors"
    file.write_bytes(data := bytes(range(256)) * 1000)
    assert [*client["pieces"](file)] == [*client["pieces"](data)]
    assert len([*client["pieces"](file)]) == 4
    seen = []

    def flaky(request):
        seen.append(request.read())
        if len(seen) == 1:
            raise httpx.ReadTimeout("lost")
        return httpx.Response(200)

    with httpx.Client(transport=httpx.MockTransport(flaky), base_url="http://endpoints") as http:
        assert client["ask"](http, "POST", "/receive/a", data=file).status_code == 200
    assert seen == [data] * 2
