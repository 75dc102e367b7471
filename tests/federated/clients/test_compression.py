"""Tests of codecs and error feedback: accuracy, sizes, invalid encodings, and decoding in a server."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg import wire
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Payload, Server
from manifoldagg.federated.clients import ErrorFeedback, Int8, TopK
from manifoldagg.federated.clients.compression import codec_from_spec, decode_payload
from manifoldagg.federated.rules import ASGD, FedAsync
from manifoldagg.manifolds import Flat, ParameterSpace, Sphere
from tests.federated.mutants import breaks
from tests.support import draw, seeds

CODECS = [TopK(1.0), TopK(0.25), TopK(1e-9), Int8(), Int8(1), Int8(7)]
DTYPES = [torch.float32, torch.float64]
SIZES = st.integers(1, 300)
EXPONENTS = st.integers(-30, 30)


def vector(seed, size, exponent, dtype=torch.float32):
    return (draw(seed, size) * 10.0**exponent).to(dtype)


def decoded(codec, tensors, like):
    return codec.decode(tensors, like.numel(), like.dtype)


def transmitted_and_residual_are_the_input(make, codec, seed, size, exponents, dtype):
    """Check that c + e equals v bitwise for updates of several sizes.

    v is the update plus the previous residual, c is the decoded update, and e is the new residual.
    """
    feedback, residual = make(codec), None
    for i, exponent in enumerate(exponents):
        update = vector(seed + i, size, exponent, dtype)
        total = update if residual is None else update + residual
        sent = decoded(codec, feedback.encode(update), update)
        residual = feedback.residual
        assert torch.equal(sent + residual, total)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(seed=seeds, size=SIZES, exponents=st.lists(EXPONENTS, min_size=1, max_size=5))
def test_transmitted_plus_residual_equals_the_input(codec, dtype, seed, size, exponents):
    transmitted_and_residual_are_the_input(ErrorFeedback, codec, seed, size, exponents, dtype)


class ForgetsTheResidual(ErrorFeedback):
    def encode(self, update):
        self.residual = None
        return super().encode(update)


class HalvesTheResidual(ErrorFeedback):
    def encode(self, update):
        tensors = super().encode(update)
        self.residual = self.residual / 2
        return tensors


class ResidualOfTheUpdateAlone(ErrorFeedback):
    def encode(self, update):
        tensors = super().encode(update)
        self.residual = update - self.codec.decode(tensors, update.numel(), update.dtype)
        return tensors


@pytest.mark.parametrize("mutant", [ForgetsTheResidual, HalvesTheResidual, ResidualOfTheUpdateAlone])
def test_wrong_error_feedback_breaks_the_law(mutant):
    law = partial(
        transmitted_and_residual_are_the_input, codec=TopK(0.25), seed=0, size=50, exponents=[0, 0, 0], dtype=DTYPES[0]
    )
    law(ErrorFeedback)
    assert breaks(law, mutant)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@given(seed=seeds, size=SIZES)
def test_the_sum_of_transmitted_updates_differs_from_the_sum_of_updates_by_the_residual(codec, seed, size):
    feedback, sent, updates = ErrorFeedback(codec), torch.zeros(size).double(), torch.zeros(size).double()
    for i in range(6):
        update = draw(seed + i, size)
        sent += decoded(codec, feedback.encode(update), update)
        updates += update
    # Six additions of numbers below 20, in float64.
    assert (sent + feedback.residual - updates).abs().max() <= 6 * 20 * 2**-52


@given(seed=seeds, size=SIZES, exponent=EXPONENTS, fraction=st.floats(1e-3, 1.0))
def test_top_k_transmits_the_largest_entries_exactly(seed, size, exponent, fraction):
    codec, x = TopK(fraction), vector(seed, size, exponent)
    found = decoded(codec, codec.encode(x), x)
    kept = found != 0
    assert int(kept.sum()) == len(codec.encode(x)["values"])
    assert torch.equal(found[kept], x[kept])
    assert not (~kept).any() or x[~kept].abs().max() <= x[kept].abs().min()


@pytest.mark.parametrize("block", [1, 7, 256])
@given(seed=seeds, size=SIZES, exponent=EXPONENTS)
def test_an_8_bit_entry_differs_by_at_most_half_a_scale(block, seed, size, exponent):
    codec, x = Int8(block), vector(seed, size, exponent)
    sent = codec.encode(x)
    scales = sent["scales"].repeat_interleave(block)[:size].double()
    # The scale, the quotient and the product are rounded once each: 3 * 127 * 2**-24 < 3e-5 scales.
    assert ((decoded(codec, sent, x).double() - x.double()).abs() <= (0.5 + 3e-5) * scales).all()


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(seed=seeds, size=SIZES)
def test_num_bytes_equals_the_size_of_the_tensors(codec, dtype, seed, size):
    sent = codec.encode(vector(seed, size, 0, dtype))
    assert codec.num_bytes(size, dtype) == sum(x.nbytes for x in sent.values())


def test_documented_sizes_are_correct():
    assert TopK(0.01).num_bytes(1_000_000) == 80_000
    assert Int8().num_bytes(1_000_000) == 1_000_000 + 4 * 3907


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_extreme_numbers_are_encoded(codec):
    largest, smallest = torch.finfo(torch.float32).max, 1e-45
    for x in (torch.zeros(5), torch.full((5,), largest), torch.tensor([smallest, -smallest, 0.0]), -torch.ones(3)):
        found = decoded(codec, codec.encode(x), x)
        assert found.isfinite().all()
        assert found.abs().max() <= x.abs().max()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_error_feedback_resumes_from_its_state_dict(codec):
    one, other = ErrorFeedback(codec), ErrorFeedback(codec)
    assert one.state_dict() == {}
    one.encode(draw(0, 2, 9))
    other.load_state_dict(one.state_dict())
    assert all(
        torch.equal(*pair) for pair in zip(*(x.encode(draw(1, 2, 9)).values() for x in (one, other)), strict=True)
    )
    assert torch.equal(one.residual, other.residual)
    assert one.residual.shape == (2, 9)
    other.load_state_dict({})
    assert other.residual is None


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_codec_is_rebuilt_from_its_spec(codec):
    assert codec_from_spec(codec.spec()) == codec


@pytest.mark.parametrize("codec", [TopK(0.3), Int8(4)], ids=str)
def test_a_server_decodes_updates_from_the_wire(codec):
    start = draw(0, 20, dtype=torch.float32)
    server, feedback = Server(Flat(20), FedAsync(1.0), start, weights="uniform"), ErrorFeedback(codec)
    for seed in (1, 2):
        ticket = server.dispatch("a")
        payload = Payload(ticket.message.start[None] + draw(seed, 1, 20, dtype=torch.float32), 10)
        encoded = feedback.encode_payload(payload, ticket.message.start)
        data = wire.pack(encoded, ticket=ticket)
        receipt = server.receive(wire.ticket_of(data), partial(wire.unpack, data), codec=codec)
        assert receipt.accepted, receipt.reason
        assert encoded.nbytes == codec.num_bytes(20)
        assert torch.equal(server.model, decode_payload(codec, encoded, ticket.message.start).points[0])


def test_a_curve_is_encoded_with_all_its_points():
    feedback, start = ErrorFeedback(Int8(1)), draw(0, 5)
    payload = Payload(start + draw(1, 3, 5), 1, tensors={"other": draw(2, 5)})
    found = decode_payload(feedback.codec, feedback.encode_payload(payload, start), start)
    # The relative error of an 8-bit entry in its own block is a few roundings.
    assert torch.allclose(found.points, payload.points, rtol=1e-12, atol=1e-12)
    assert found.tensors.keys() == {"other"}


def altered(codec, **changes):
    encoded = ErrorFeedback(codec).encode_payload(Payload(draw(0, 1, 6, dtype=torch.float32), 1), torch.zeros(6))
    return Payload(encoded.points, 1, {**encoded.tensors, **{f"codec/{name}": x for name, x in changes.items()}})


HOSTILE = {
    "another codec": (TopK(0.5), altered(Int8())),
    "an index beyond the end": (TopK(0.5), altered(TopK(0.5), indices=torch.tensor([0, 1, 6], dtype=torch.int32))),
    "a negative index": (TopK(0.5), altered(TopK(0.5), indices=torch.tensor([-1, 1, 2], dtype=torch.int32))),
    "a repeated index": (TopK(0.5), altered(TopK(0.5), indices=torch.tensor([1, 1, 2], dtype=torch.int32))),
    "fewer values": (TopK(0.5), altered(TopK(0.5), values=torch.zeros(2))),
    "a value that is not finite": (TopK(0.5), altered(TopK(0.5), values=torch.tensor([1.0, torch.nan, 0.0]))),
    "a scale that is not finite": (Int8(), altered(Int8(), scales=torch.tensor([torch.inf]))),
    "another tensor": (Int8(), altered(Int8(), more=torch.zeros(1))),
    "more points than data": (Int8(), Payload(torch.zeros(10**12, 0), 1, altered(Int8()).tensors)),
    "no points": (Int8(), Payload(torch.zeros(0, 0), 1, altered(Int8()).tensors)),
    "a plain model": (Int8(), Payload(torch.zeros(1, 6), 1)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_server_rejects_an_invalid_encoding_and_the_client_may_retry(name):
    codec, payload = HOSTILE[name]
    server = Server(Flat(6), ASGD(1.0), torch.zeros(6))
    ticket = server.dispatch("a")
    receipt = server.receive(ticket, payload, codec=codec)
    assert not receipt.accepted
    assert receipt.reason.startswith("points: ")
    assert server.receive(ticket, altered(codec), codec=codec).accepted


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: TopK(0.0), "fraction: expected"),
        (lambda: TopK(1.5), "fraction: expected"),
        (lambda: Int8(0), "block: expected"),
        (lambda: ErrorFeedback(TopK), "codec: expected a Codec"),
        (lambda: ErrorFeedback(Int8()).encode(torch.tensor([1.0, torch.nan])), "update: expected finite"),
        (lambda: ErrorFeedback(Int8()).encode(torch.arange(3)), "update: expected a vector of floating-point"),
        (lambda: ErrorFeedback(Int8()).load_state_dict({"residua": torch.zeros(1)}), "state: expected"),
        (lambda: codec_from_spec({"name": "zip"}), "codec: expected one of TopK, Int8"),
        (lambda: Server(Flat(1), ASGD(1.0), torch.zeros(1)).receive("7", altered(Int8()), codec="int8"), "codec: "),
    ],
)
def test_invalid_arguments_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_the_residual_is_unchanged_by_an_update_that_is_rejected():
    feedback = ErrorFeedback(Int8())
    feedback.encode(draw(0, 4))
    before = feedback.residual
    for update in (draw(1, 5), draw(1, 4).float(), torch.full((4,), torch.nan).double()):
        with pytest.raises(ArgumentError, match="^update: "):
            feedback.encode(update)
        assert feedback.residual is before


def test_compression_is_rejected_where_the_server_cannot_decode():
    space = ParameterSpace.of_state_dict({"turn": torch.eye(3)}, {"turn": Sphere(3)})
    curved = Server(space, FedAsync(0.5), torch.eye(3).flatten())
    with pytest.raises(ArgumentError, match="codec: expected None"):
        curved.receive(curved.dispatch("a"), altered(Int8()), codec=Int8())
    server = Server(Flat(6), ASGD(1.0), torch.zeros(6))
    receipt = server.receive(server.dispatch("a", retain_base=False), altered(Int8()), codec=Int8())
    assert receipt.reason.startswith("codec: expected None")
