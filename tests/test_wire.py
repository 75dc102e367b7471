"""Tests of serialization: bitwise round trips of every field, and rejection of invalid bytes with bounded memory."""

import json
import math
import struct
import sys
import tracemalloc
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial

import jaxtyping
import numpy as np
import pytest
import safetensors.torch
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg import ParameterSpace, Server, _compression, _json_tree, wire
from manifoldagg._json_tree import MAX_DEPTH, MAX_INT_KEYS
from manifoldagg.errors import ArgumentError, WireError
from manifoldagg.federated import Message, Payload, Receipt, Ticket
from manifoldagg.federated.rules import FedAsync
from manifoldagg.manifolds import Flat, Sphere
from manifoldagg.tensor_file import with_length
from manifoldagg.wire import pack, ticket_of, unpack
from tests.support import draw, seeds
from tests.test_tensor_file import DTYPES, LEAVES, QUANTIZED, alike

MODEL = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2).double().half())
SPACE = ParameterSpace.of(MODEL)
P = SPACE.layout.size
KINDS = (Message, Payload, Receipt, Ticket)
TREES = st.recursive(
    LEAVES,
    lambda below: (
        st.lists(below, max_size=4)
        | st.lists(below, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(-9, 9), below, max_size=4)
    ),
    max_leaves=12,
)
SENT = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])
NAMES = st.text(max_size=4)
FREED = torch.ones(1000)
FREED.untyped_storage().resize_(0)


def tensors(*dtypes):
    def made(seed, shape, dtype):
        return draw(seed, math.prod(shape), scale=10).reshape(shape).to(dtype)

    return st.builds(made, seeds, st.lists(st.integers(0, 4), max_size=3), st.sampled_from(dtypes))


EXTRA = {
    "tensors": st.dictionaries(NAMES, tensors(torch.float32, torch.bfloat16), max_size=3),
    "numbers": st.dictionaries(NAMES, st.floats() | st.integers(-(2**70), 2**70), max_size=3),
    "buffers": st.dictionaries(NAMES, tensors(torch.float32, torch.int64, torch.uint8, torch.bool), max_size=3),
}
# The strategies return functions, because the type checks of constructors draw random samples themselves.
MESSAGES = st.builds(
    lambda seed, dtype, asked, extra: lambda: Message(draw(seed, P).to(dtype), requested_buffers=tuple(asked), **extra),
    *(seeds, SENT, st.lists(NAMES, max_size=2)),
    st.fixed_dictionaries({"version": st.none() | st.integers(0), **EXTRA}),
)
PAYLOADS = st.builds(
    lambda seed, n, dtype, based, rest: (
        lambda: Payload(draw(seed, n, P).to(dtype), base=draw(seed + 1, P).to(dtype) if based else None, **rest)
    ),
    *(seeds, st.integers(1, 3), SENT, st.booleans()),
    st.fixed_dictionaries({"samples": st.integers(0, 2**70), "client_state": TREES, **EXTRA}),
)
TICKETS = st.builds(
    lambda name, version, sent: lambda: Ticket(name, version, sent()), st.text(), st.integers(0), MESSAGES
)
RECEIPTS = st.builds(
    lambda *told: lambda: Receipt(*told),
    *(st.booleans(), st.text(), st.integers(0), st.integers(0)),
    *(4 * [st.floats()] + 2 * [st.booleans()]),
)
VALUES = st.one_of(MESSAGES, PAYLOADS, TICKETS, RECEIPTS)


@contextmanager
def shipped():
    """Disable the shape checks, so that the code itself must detect errors."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def tree(value):
    """Convert a value to a tree for bitwise comparison."""
    found = {field.name: getattr(value, field.name) for field in fields(value) if field.name != "space"}
    return {name: tree(part) if isinstance(part, Message) else part for name, part in found.items()}


@given(VALUES, st.booleans(), st.booleans())
def test_round_trip_of_every_field_is_bitwise_exact(make, named, compress):
    value = make()
    spec = SPACE if named else None
    back = unpack(pack(value, spec=spec, compress=compress), spec=spec)
    assert type(back) is type(value)
    assert alike(tree(back), tree(value))


@given(VALUES, st.none() | st.text(min_size=1))
def test_ticket_of_reads_the_ticket_of_every_kind(make, ticket):
    value = make()
    expected = value.id if isinstance(value, Ticket) else ticket
    assert ticket_of(pack(value, ticket=ticket)) == expected


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in QUANTIZED], ids=str)
@pytest.mark.parametrize("compress", [False, True])
def test_round_trip_of_every_dtype_is_bitwise_exact(dtype, compress):
    random = torch.from_numpy(np.random.default_rng(3).integers(0, 3, 1200 * dtype.itemsize, np.uint8))
    if dtype is torch.bool:
        random = random % 2
    x = random.view(dtype).reshape(300, 4)
    memory = [x, x[0, 0].reshape(()), x[:0]]
    assert alike(
        unpack(pack(Payload(torch.zeros(1, 2), 1, client_state=memory), compress=compress)).client_state, memory
    )


def test_views_are_packed_by_value():
    x = torch.arange(12.0).reshape(3, 4).requires_grad_()
    start, *memory = x[:, 1], x.T, x[1:, ::2], x[0, 0].expand(5), torch.nn.Parameter(x), torch.ones(9)[::9]
    back = unpack(pack(Payload(start[None], 1, client_state=memory)))
    assert alike([back.points[0], *back.client_state], [torch.tensor(part.tolist()) for part in (start, *memory)])


def test_safetensors_can_read_messages_with_the_names_of_the_model():
    message = Message(SPACE.point(MODEL), buffers=SPACE.buffers(MODEL), requested_buffers=("1.running_mean",))
    found = safetensors.torch.load(pack(message, spec=SPACE))
    state = MODEL.state_dict()
    expected = {f"start/{leaf.name}": state[leaf.name].float() for leaf in SPACE.layout.leaves}
    expected |= {f"buffers/{entry.name}": state[entry.name] for entry in SPACE.layout.buffers}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_a_ticket_is_packed_with_names_and_unpacked_with_its_space():
    server = Server.of(MODEL, FedAsync(rate=0.5))
    ticket = server.dispatch("ward-7")
    data = pack(ticket)
    assert "start/0.weight" in safetensors.torch.load(data)
    back = unpack(data, spec=server.space)
    assert back.space == server.space
    assert alike(back.state_dict(), ticket.state_dict())


def test_leaves_are_found_by_name_in_any_order():
    payload = Payload(draw(3, 2, P).float(), 5)
    data = pack(payload, spec=SPACE)
    with shipped():
        moved = safetensors.torch.save(safetensors.torch.load(data), header_of(data)["__metadata__"])
    assert moved != data
    assert alike(tree(unpack(moved, spec=SPACE)), tree(payload))


def test_unpacked_tensors_have_their_own_writable_memory():
    data = pack(Message(torch.ones(4), tensors={"a": torch.ones(3)}))
    first = unpack(data)
    first.start.zero_()
    first.tensors["a"].zero_()
    assert torch.equal(unpack(data).start, torch.ones(4))
    for kind in (bytearray, memoryview):
        assert torch.equal(unpack(kind(data)).start, torch.ones(4))


# The compression ratio is limited, so that a small message cannot exhaust the memory.


@given(st.integers(0, 10**6), st.booleans())
def test_highly_compressible_data_is_padded_to_the_maximal_ratio(size, large):
    payload = Payload(torch.full((1, 2), 0.5), 1, client_state=torch.full((size,), float(large)))
    data = pack(payload, compress=True)
    assert len(data) * wire.MAX_COMPRESSION_RATIO >= 4 * size
    assert alike(tree(unpack(data)), tree(payload))


def test_compression_reduces_size_and_is_lossless():
    payload = Payload(0.02 * draw(1, 1, 40_000, dtype=torch.float32), 1)
    plain, small, rounded = pack(payload), pack(payload, compress=True), pack(payload, error=1e-4)
    assert len(small) < 0.9 * len(plain)
    assert len(rounded) < 0.45 * len(plain)
    assert torch.equal(unpack(small).points, payload.points)


NUMBERS = st.floats(width=64) | st.sampled_from([math.nan, math.inf, -math.inf, 5e-324, 1.7e308, 65504.0, -65520.0])


@given(
    st.lists(NUMBERS, min_size=1, max_size=50),
    st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    st.floats(min_value=5e-324, max_value=1.7e308) | st.sampled_from([1e-4, 0.5, 2.0**-10]),
)
def test_rounding_errors_do_not_exceed_the_error_bound(numbers, dtype, error):
    x = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    payload = Payload(x[None], 1, tensors={"t": x}, client_state=x, base=x, buffers={"b": x})
    back = unpack(pack(payload, error=error))
    assert alike([back.client_state, back.base, back.buffers], [x, x, {"b": x}])
    for found in (back.points[0], back.tensors["t"]):
        finite = x.isfinite()
        assert alike(found[~finite], x[~finite])
        moved = [abs(a - b) for a, b in zip(found[finite].tolist(), x[finite].tolist(), strict=True)]
        # Differences of nearby floats are exact. The rounding of other differences is monotone.
        assert max(moved, default=0.0) <= error


def test_curved_leaves_are_not_rounded():
    space = ParameterSpace.of(torch.nn.Linear(3, 2), {"weight": Sphere(3)})
    points = space.random_point(generator=torch.Generator().manual_seed(0))[None]
    back = unpack(pack(Payload(points, 1), spec=space, error=0.01), spec=space)
    assert torch.equal(back.points[:, :6], points[:, :6])
    assert not torch.equal(back.points, points)


def test_an_error_bound_for_a_message_is_rejected():
    with pytest.raises(ArgumentError, match="^error: expected 0 for a Message"):
        pack(Message(torch.ones(2)), error=0.1)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"client_state": {"a": {1}}}, r"^wire: \['client_state'\]\['a'\]: .* a set cannot"),
        ({"client_state": {2**70: 1}}, r"^wire: \['client_state'\]: .* key 1180591620717411303424"),
        (
            {"client_state": {"m": dict.fromkeys(range(MAX_INT_KEYS + 1))}},
            r"^wire: \['client_state'\]\['m'\]: .* more than 4096 integer keys",
        ),
        ({"client_state": {"m": FREED}}, "^wire: client_state/m: .* whose storage was freed"),
        ({"client_state": torch.ones(2).to_sparse()}, r"^wire: \['client_state'\]: .*not dense"),
        ({"samples": True}, "^wire: samples: expected another type"),
        ({"numbers": {"a": torch.ones(())}}, "^wire: numbers: expected another type"),
        ({"buffers": {3: torch.ones(())}}, "^wire: buffers: expected another type"),
        ({"client_state": [0] * 2**20}, "^wire: a header of more than"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_values_are_rejected_with_their_path(as_shipped, value, told):
    with pytest.raises(WireError, match=told):
        pack(Payload(**{"points": torch.ones(1, 2), "samples": 1} | value))


def test_nesting_depth_is_limited_in_pack_and_unpack():
    def nested(depth):
        return [nested(depth - 1)] if depth else None

    value = Payload(torch.ones(1, 2), 1, client_state=nested(MAX_DEPTH - 1))
    assert unpack(pack(value)).client_state == value.client_state
    with pytest.raises(WireError, match="^wire: the tree cannot be saved: it has more than 64 nested branches"):
        pack(replace(value, client_state=nested(MAX_DEPTH)))


def test_integer_keys_are_limited_in_pack_and_unpack():
    """Inserting an integer key whose hash collides takes time proportional to the number of keys."""
    memory = {"m": dict.fromkeys(range(MAX_INT_KEYS))}
    data = pack(Payload(torch.ones(1, 2), 1, client_state=memory))
    assert unpack(data).client_state == memory
    value = header_of(data)["__metadata__"]["tree"].replace("[[0, null]", "[[-1, null], [0, null]")
    with pytest.raises(WireError, match="more than 4096 integer keys"):
        unpack(altered(data, tree=value))
    words = {str(n): n for n in range(MAX_INT_KEYS + 1)}
    assert unpack(pack(Payload(torch.ones(1, 2), 1, client_state=words))).client_state == words


def test_tensors_are_unpacked_to_the_cpu_for_any_default_device():
    payload = Payload(torch.ones(1, 400), 1)
    for data in (pack(payload), pack(payload, compress=True)):
        with torch.device("meta"):
            assert torch.equal(unpack(data).points, payload.points)


def test_unpack_accepts_any_memoryview(as_shipped):
    data = pack(Receipt(True, "", 3))
    spread = bytearray(2 * len(data))
    spread[::2] = data
    assert unpack(memoryview(spread)[::2]).version == 3
    swapped = memoryview(data).cast("B", (len(data) // 8, 8)) if len(data) % 8 == 0 else memoryview(data)
    assert unpack(swapped).version == 3
    for view in (np.zeros((0, 4)), np.asfortranarray(np.ones((4, 4))), np.ones((3, 3), ">i2"), np.ones((4, 4), "c").T):
        with pytest.raises(WireError):
            unpack(memoryview(view))
    released = memoryview(data)
    released.release()
    for read in (unpack, ticket_of):
        with pytest.raises(ArgumentError, match="^data: expected bytes, got a memoryview that was released"):
            read(released)


def test_an_empty_payload_with_a_spec_is_rejected():
    with pytest.raises(ArgumentError, match="^points: expected at least one point"):
        pack(Payload(torch.ones(0, P), 1), spec=SPACE)
    assert unpack(pack(Payload(torch.ones(0, P), 1))).points.shape == (0, P)


def test_invalid_arguments_are_rejected_by_name(as_shipped):
    value = Message(torch.ones(2))
    for told, call in {
        "value: expected a Message": lambda: pack({}),
        "ticket: expected a Ticket or the id of a ticket": lambda: pack(value, ticket=3),
        "compress: expected one of True, False; got 'x'": lambda: pack(value, compress="x"),
        "error: expected a finite": lambda: pack(value, error=-1),
        "spec: expected a result of `spec": lambda: pack(value, spec=3),
        "start: expected points of": lambda: pack(value, spec=SPACE),
        "data: expected bytes": lambda: unpack("text"),
    }.items():
        with pytest.raises(ArgumentError, match=f"^{told}"):
            call()


def test_compression_without_zstandard_names_the_missing_extra(monkeypatch):
    value = Payload(torch.zeros(1, 4000), 1)
    data = pack(value, compress=True)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert torch.equal(unpack(pack(value)).points, value.points)
    with pytest.raises(ArgumentError, match=r"manifoldagg\[wire\]"):
        pack(value, compress=True)
    with pytest.raises(WireError, match=r"manifoldagg\[wire\]"):
        unpack(data)


# Invalid and malicious bytes.


def header_of(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length])


def forged(data, header):
    length = int.from_bytes(data[:8], "little")
    return with_length((header if isinstance(header, str) else json.dumps(header)).encode()) + data[8 + length :]


def check_rejected_or_unpacked(data):
    """Check that each function returns a value or raises a `WireError` with a short message."""
    told = []
    with shipped():
        for read in (unpack, partial(unpack, spec=SPACE), ticket_of):
            try:
                assert isinstance(read(data), (*KINDS, str, type(None)))
            except WireError as error:
                told.append(str(error))
    assert all(why.startswith("wire: ") and len(why) < 400 and "\n" not in why for why in told)


SAMPLES = [
    pack(
        Message(SPACE.point(MODEL), buffers=SPACE.buffers(MODEL), numbers={"turn": 3.0}, requested_buffers=("a",)),
        spec=SPACE,
    ),
    pack(
        Payload(
            *(torch.ones(2, P), 10),
            client_state={"m": [torch.zeros(400), (math.nan, b"x")]},
            tensors={"t": torch.ones(P, dtype=torch.complex64)},
        ),
        spec=SPACE,
        ticket="7f",
        compress=True,
    ),
    pack(Receipt(True, "", 3)),
    pack(Ticket("7f", 1, Message(torch.ones(3)))),
]


@given(st.binary(max_size=200))
def test_random_bytes_are_rejected(data):
    with pytest.raises(WireError, match="^wire: expected the result of `pack`: "):
        unpack(data)
    check_rejected_or_unpacked(with_length(data.decode("latin1").encode()))


@pytest.mark.parametrize("data", SAMPLES, ids=lambda data: unpack(data).__class__.__name__)
def test_every_truncation_is_rejected(data):
    for length in range(len(data)):
        with pytest.raises(WireError):
            unpack(data[:length])
    with pytest.raises(WireError):
        unpack(data + b"\0")


@given(
    st.sampled_from(SAMPLES), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=5)
)
def test_altered_bytes_are_rejected_or_unpacked(data, changes):
    altered = bytearray(data)
    for place, value in changes:
        altered[place % len(data)] = value
    check_rejected_or_unpacked(bytes(altered))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats() | st.text(max_size=5)
    | st.sampled_from(["$tensor", "$dict", "$tuple", "F32", "U8", "float32", "qint8", "bool", "start", "points", [0, 8], [2**62] * 3]),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5), below, max_size=3),
    max_leaves=5,
)  # fmt: skip


def places(node, way=()):
    yield way
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield from places(node[key], (*way, key))


def with_junk(node, way, junk):
    if not way:
        return junk
    node = dict(node) if isinstance(node, dict) else list(node)
    node[way[0]] = with_junk(node[way[0]], way[1:], junk)
    return node


@given(st.sampled_from(SAMPLES), st.data())
def test_headers_with_random_changes_are_rejected_or_unpacked(data, draws):
    header = header_of(data)
    for name in ("tree", "coded", "leaves"):  # These values are JSON texts inside the JSON text.
        if name in header["__metadata__"]:
            header["__metadata__"][name] = json.loads(header["__metadata__"][name])
    for _ in range(draws.draw(st.integers(1, 2))):
        ways = [way for way in places(header) if way]
        header = with_junk(header, draws.draw(st.sampled_from(ways)), draws.draw(JUNK))
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict) and draws.draw(st.booleans()):
        header["__metadata__"] = {key: x if isinstance(x, str) else json.dumps(x) for key, x in metadata.items()}
    check_rejected_or_unpacked(forged(data, header))


def altered(data, **changes):
    """Return the bytes with other entries or metadata in the header."""
    header = header_of(data)
    metadata = header["__metadata__"]
    for name, change in changes.items():
        if name in metadata or change is None:
            metadata[name] = change
        else:
            header[name.replace("_", "/")] = change
    return forged(data, header)


PLAIN = pack(Message(torch.ones(4), tensors={"t": torch.ones(2)}))
VALUE = header_of(PLAIN)["__metadata__"]["tree"]
NESTED = "[" * 100_000 + "]" * 100_000
SMALL = pack(Payload(torch.ones(1, 4), 1, client_state=torch.zeros(4000)), compress=True)
FRAME = zstandard.ZstdCompressor().compress(bytes(10**6))


def coded(data, code):
    return altered(data, coded=json.dumps({"client_state": code}))


def line(dtype, shape, *offsets):
    return {"dtype": dtype, "shape": shape, "data_offsets": [*offsets]}


HOSTILE = {
    "a header longer than all": (struct.pack("<Q", 2**63) + PLAIN[8:], "the header is longer"),
    "a header of many bytes": (with_length(b'{"__metadata__":{"a":"' + b"x" * 2**24 + b'"}}'), "more than 16777216 bytes"),
    "a header of many values": (with_length(b'{"a":[' + b"[]," * 2**20 + b"0]}"), "more than 1048576 values"),
    "deep brackets": (with_length(NESTED.encode()), "RecursionError|a header"),
    "deep text": (altered(PLAIN, tree=NESTED), "RecursionError"),
    "a name twice": (forged(PLAIN, '{"a":1,"a":2}'), "a duplicate name"),
    "NaN": (forged(PLAIN, '{"__metadata__":NaN}'), "NaN is not JSON"),
    "digits": (forged(PLAIN, '{"__metadata__":' + "9" * 5000 + "}"), "digits"),
    "utf-16": (with_length(b"x") + PLAIN, "wire"),
    "another format": (altered(PLAIN, format="pt"), "metadata were not written by this package"),
    "a newer version": (altered(PLAIN, version="2"), "expected format version '1', got '2'"),
    "another kind": (altered(PLAIN, kind="outcome"), "KeyError"),
    "a key twice": (
        altered(PLAIN, tree='{"$dict": [["start", 1], ["start", 2]]}'),
        "a duplicate key",
    ),
    "a tensor twice": (altered(PLAIN, tree=VALUE.replace('"tensors/t"', '"start"')), "KeyError: 'start'"),
    "an entry that nothing names": (altered(PLAIN, tree=VALUE.replace('{"$tensor": "tensors/t"}', "1")), "unreferenced entries"),
    "an overlap": (altered(PLAIN, tensors_t=line("F32", [2], 8, 16)), "are not contiguous"),
    "a hole": (altered(PLAIN, tensors_t=line("F32", [1], 20, 24)), "are not contiguous"),
    "less than all": (altered(PLAIN, tensors_t=line("F32", [1], 16, 20)), "do not cover the data"),
    "more than all": (altered(PLAIN, tensors_t=line("F32", [2**40], 16, 16 + 2**42)), "do not cover the data"),
    "backwards": (altered(PLAIN, tensors_t=line("F32", [0], 16, 8)), "a negative length"),
    "a shape of more": (altered(PLAIN, tensors_t=line("F32", [2**40], 16, 24)), "does not match its number of bytes"),
    "a shape of less than none": (altered(PLAIN, tensors_t=line("F32", [-1, -2], 16, 24)), "an invalid shape"),
    "a shape of many axes": (altered(PLAIN, tensors_t=line("F32", [1] * 70 + [2], 16, 24)), "an invalid shape"),
    "a huge shape of nothing": (altered(PLAIN, start=line("F32", [2**61, 2**61, 0], 0, 0)), "wire"),
    "another dtype": (altered(PLAIN, tensors_t=line("F77", [2], 16, 24)), "KeyError: 'F77'"),
    "a truth value": (altered(PLAIN, tensors_t=line("BOOL", [8], 16, 24)), "an invalid boolean"),
    "a quantised dtype": (coded(SMALL, ["quint8", [16000], True]), "unknown dtype quint8"),
    "no dtype": (coded(SMALL, ["Tensor", [16000], True]), "unknown dtype Tensor"),
    "a bomb": (coded(SMALL, ["float32", [10**9], True]), "at most 100 times as large"),
    "a frame of more": (coded(SMALL, ["float32", [3999], True]), "of another size"),
    "no frame": (SMALL[:-160] + b"\0" * 160, "wire"),
    "points of no entries": (
        altered(SAMPLES[1], tree=header_of(SAMPLES[1])["__metadata__"]["tree"].replace('["points", [2,', f'["points", [{2**61},')),
        "points without entries",
    ),
    "points of no leaves": (altered(PLAIN, tree=VALUE.replace('"start"}', f'["points", [{2**18}, 0]]}}')), "points without entries"),
    "a product that takes a day": (
        altered(SAMPLES[1], tree=header_of(SAMPLES[1])["__metadata__"]["tree"].replace('["points", [2,', f'["points", [{"9" * 4000},')),
        "an invalid shape",
    ),
    "leaves twice": (altered(SAMPLES[1], leaves='["0.weight", "0.weight"]'), "invalid leaves"),
    "a ticket of another type": (altered(PLAIN, ticket=None), "metadata were not written by this package"),
    "bytes that are none": (altered(PLAIN, tree=VALUE.replace('{"$tensor": "tensors/t"}', '{"$bytes": "?"}')), "Error"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_malicious_bytes_are_rejected_with_a_reason(name):
    data, told = HOSTILE[name]
    with shipped(), pytest.raises(WireError, match=told):
        unpack(data)
    check_rejected_or_unpacked(data)


def test_decompression_allocates_the_data_once():
    """The decompressed data is in a tensor of torch, and the Python heap contains no second copy."""
    data = pack(Payload(torch.zeros(1, 4_000_000), 1), compress=True)
    tracemalloc.start()
    try:
        points = unpack(data).points
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert torch.equal(points, torch.zeros(1, 4_000_000))
    assert peak < 4_000_000


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float64])
def test_byte_planes_are_joined_across_chunks(monkeypatch, dtype):
    monkeypatch.setattr(_compression, "CHUNK_BYTES", 100)
    for size in (512, 700, 701):
        x = (draw(size, size, dtype=torch.float64).abs() % 2).round().to(dtype)
        data = pack(Payload(torch.ones(1, 2), 1, client_state=x), compress=True)
        assert "coded" in header_of(data)["__metadata__"]
        assert torch.equal(unpack(data).client_state, x)


@pytest.mark.parametrize("name", ["tree", "coded", "leaves"])
def test_values_in_escape_sequences_of_the_header_are_counted(monkeypatch, name):
    escapes = "\\u007b\\u007d\\u002c"
    header = header_of(SAMPLES[1])
    header["__metadata__"][name] = "HERE"
    data = forged(SAMPLES[1], json.dumps(header).replace("HERE", "[" + 300 * escapes + "0]"))
    monkeypatch.setattr(_json_tree, "MAX_HEADER_VALUES", 500)
    with pytest.raises(WireError, match="a header of more than 500 values"):
        unpack(data)


def test_a_frame_with_a_false_size_is_rejected():
    """The header of the frame claims a terabyte, and the header of the message claims 50 times the received bytes."""
    lying = bytearray(zstandard.ZstdCompressor(write_content_size=True).compress(bytes(10**6)))
    assert zstandard.frame_content_size(bytes(lying)) == 10**6
    lying[4] = 0xE0  # The flag for a size of eight bytes, with a window descriptor.
    lying[5:9] = struct.pack("<Q", 2**40)
    value = pack(Payload(torch.ones(1, 4), 1, client_state=torch.zeros(len(lying), dtype=torch.uint8)))
    data = bytearray(coded(value, ["uint8", [len(lying)], True]))
    header = header_of(value)
    header["__metadata__"]["coded"] = json.dumps({"client_state": ["uint8", [len(lying) * 50], True]})
    start, end = header["client_state"]["data_offsets"]
    body = bytearray(value[8 + int.from_bytes(value[:8], "little") :])
    body[start:end] = lying
    data = with_length(json.dumps(header).encode()) + bytes(body)
    with pytest.raises(WireError):
        unpack(data)


# Use with a server.


def junk(calls):
    calls.append(1)
    return unpack(b"of my own making")


def test_invalid_bytes_give_a_rejecting_receipt_and_leave_the_ticket_valid(as_shipped):
    server = Server(Flat(2), FedAsync(rate=0.5), torch.zeros(2))
    ticket = server.dispatch("ward-7")
    receipt = server.receive(ticket.id, partial(unpack, b"of my own making"))
    assert (receipt.accepted, server.rejected, server.version) == (False, {"wire": 1}, 0)
    assert receipt.reason.startswith("wire: expected the result of `pack`")
    data = pack(Payload(torch.tensor([[2.0, 4.0]]), samples=10))
    assert server.receive(ticket.id, partial(unpack, data)).accepted
    assert torch.equal(server.model, torch.tensor([1.0, 2.0]))
    message = pack(Message(torch.ones(2)))
    assert server.receive(server.dispatch(1), partial(unpack, message)).reason.startswith("payload: expected a Payload")


def test_payloads_without_an_open_ticket_are_not_unpacked():
    server = Server(Flat(2), FedAsync(rate=0.5), torch.zeros(2))
    calls = []
    assert server.receive("0" * 32, partial(junk, calls)).reason.startswith("ticket: unknown")
    ticket = server.dispatch("ward-7")
    first = server.receive(ticket, Payload(torch.tensor([[2.0, 4.0]]), samples=10))
    assert server.receive(ticket, partial(junk, calls)) is first
    assert calls == []


def test_other_exceptions_of_the_payload_function_propagate_and_change_nothing():
    server = Server(Flat(2), FedAsync(rate=0.5), torch.zeros(2))
    ticket = server.dispatch("ward-7")
    with pytest.raises(ZeroDivisionError):
        server.receive(ticket, lambda: 1 / 0)
    assert server.rejected == {}
    assert server.receive(ticket, Payload(torch.tensor([[2.0, 4.0]]), samples=10)).accepted


def test_a_payload_of_another_model_is_rejected():
    server = Server.of(MODEL, FedAsync(rate=0.5))
    other = ParameterSpace.of(torch.nn.Linear(P - 1, 1))
    ticket = server.dispatch("ward-7")
    named = pack(Payload(torch.zeros(1, P), 1), spec=other)
    plain = pack(Payload(torch.zeros(1, P + 1), 1))
    for data, told in ((named, "wire: layout: "), (plain, "wire: points: expected points of the space")):
        receipt = server.receive(ticket, partial(unpack, data, spec=server.space))
        assert not receipt.accepted
        assert receipt.reason.startswith(told)
    assert server.rejected == {"wire": 2}


def test_error_names_the_wrapper_of_the_model():
    server = Server.of(MODEL, FedAsync(rate=0.5))
    wrapped = ParameterSpace.of(torch.nn.DataParallel(MODEL))
    data = pack(Payload(torch.zeros(1, P), 1), spec=wrapped)
    receipt = server.receive(server.dispatch("ward-7"), partial(unpack, data, spec=server.space))
    assert "got 'module.' in names, which DataParallel" in receipt.reason


def test_a_spec_from_json_replaces_the_space():
    server = Server.of(MODEL, FedAsync(rate=0.5))
    spec = json.loads(json.dumps(server.spec()))
    payload = Payload(draw(3, 1, P).float(), 4)
    assert pack(payload, spec=spec) == pack(payload, spec=server.space)
    assert unpack(pack(server.dispatch("ward-7")), spec=spec).space == server.space


def test_packed_and_direct_payloads_give_bitwise_equal_models():
    models = []
    for wired in (False, True):
        server = Server.of(MODEL, FedAsync(rate=0.3))
        for turn in range(3):
            ticket = server.dispatch("ward-7")
            sent = unpack(pack(ticket), spec=server.space) if wired else ticket
            buffers = {name: sent.message.buffers[name] + 1 for name in sent.message.requested_buffers}
            payload = Payload((sent.message.start + 0.1 * draw(turn, P).float())[None], 4, buffers=buffers)
            data = pack(payload, spec=server.space, ticket=sent, compress=True)
            answer = partial(unpack, data, spec=server.space) if wired else payload
            receipt = server.receive(ticket_of(data), answer)
            assert receipt.accepted
            assert alike(tree(unpack(pack(receipt))), tree(receipt))
        models.append(server.state_dict())
    assert alike(*models)
