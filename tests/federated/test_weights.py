"""Tests of weights: the shares of the data that the server assigns to clients."""

import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Payload, Server
from manifoldagg.federated.limits import UpdateLimits
from manifoldagg.federated.rules import FedAvg
from manifoldagg.federated.weights import Weights, check_client
from manifoldagg.manifolds import Flat
from tests.federated.fingerprint import Adds
from tests.server_options import grouped


def server(weights="observed", **options):
    return Server(Flat(1), Adds(), torch.zeros(1), weights=weights, **grouped(**options))


def payload(samples=1):
    return Payload(torch.ones(1, 1), samples)


def test_given_weights_override_reported_samples():
    s = server({"a": 30, "b": 10})
    assert s.receive(s.dispatch("a").id, payload(999)).weight == 0.75
    assert s.receive(s.dispatch("b").id, payload(999)).weight == 0.25


def test_uniform_weights_are_equal():
    s = server("uniform")
    s.dispatch("b")
    assert s.receive(s.dispatch("a").id, payload(999)).weight == 0.5


def test_observed_weights_follow_the_reported_samples():
    s = server()
    tickets = [s.dispatch(name) for name in "abcd"]
    assert s.receive(tickets[0].id, payload(10)).weight == pytest.approx(1 / 4)
    assert s.receive(tickets[1].id, payload(30)).weight == pytest.approx(30 / (4 * 20))
    again = s.dispatch("a")
    assert s.receive(again.id, payload(50)).weight == pytest.approx(50 / (4 * 40))
    assert s.receive(tickets[2].id, payload(10)).weight == pytest.approx(10 / (4 * 30))
    assert s.history[0]["weight"] == pytest.approx(1 / 4)


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 10**9)), max_size=40))
def test_observed_weights_equal_their_formula(script):
    """In the script, zero samples stand for a dispatch without an update."""
    weights, told, registered = Weights.of("observed", None), {}, set()
    for client, samples in script:
        weights = weights.with_client(client)
        registered.add(client)
        if samples:
            told[client] = samples
            mean = Fraction(sum(told.values()), len(told))
            exact = Fraction(samples) / (len(registered) * mean)
            # One rounding of the integers and one of the quotient.
            assert weights.weight(client, samples) == pytest.approx(float(exact), rel=4e-16)
            weights = weights.with_report(client, samples)


def test_observed_weights_sum_to_one_after_all_clients_reported():
    weights, amounts = Weights.of("observed", None), {"a": 3, "b": 8, "c": 1}
    for client, samples in amounts.items():
        weights = weights.with_client(client).with_report(client, samples)
    assert [weights.weight(*pair) for pair in amounts.items()] == pytest.approx([3 / 12, 8 / 12, 1 / 12])


def test_rejected_update_does_not_change_observed_weights():
    s = server()
    ticket = s.dispatch("a")
    s.receive(ticket.id, Payload(torch.tensor([[float("nan")]]), 10**6))
    s.receive(ticket.id, payload(10))
    s.dispatch("b")
    assert s.receive(s.dispatch("b").id, payload(30)).weight == pytest.approx(30 / (2 * 20))


@pytest.mark.parametrize("weights", ["observed", {"a": 1, "b": 99}, "uniform"])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_the_mean_of_a_cohort_does_not_depend_on_the_order(weights, order):
    """With `"observed"`, each $w_i$ is relative to the total that was known when the update arrived."""
    s = Server(Flat(1), FedAvg(2), torch.zeros(1), weights=weights)
    tickets, points, samples = {c: s.dispatch(c) for c in "ab"}, {"a": 100.0, "b": 0.0}, {"a": 1, "b": 99}
    for client in order:
        s.receive(tickets[client].id, Payload(torch.tensor([[points[client]]]), samples[client]))
    assert s.model.item() == pytest.approx(50.0 if weights == "uniform" else 1.0, rel=1e-6)


def test_mapping_of_weights_is_copied():
    amounts = {"a": 1, "b": 1}
    s = server(amounts)
    amounts["a"] = 100
    assert s.receive(s.dispatch("a").id, payload()).weight == 0.5


def test_one_huge_sample_count_does_not_suppress_other_clients():
    s = server()
    honest = [f"ward-{i}" for i in range(9)]
    for name in [*honest, "liar"]:
        s.receive(s.dispatch(name).id, payload(100))
    lie = s.receive(s.dispatch("liar").id, payload(10**9))
    assert (lie.accepted, lie.clipped) == (True, True)
    # 100 x the median of the others: what nine others have told, and 100 times as much.
    assert lie.weight == pytest.approx(10_000 * 10 / (10 * (900 + 10_000)))
    assert s.history[-1]["samples"] == 10**9
    for name in honest:
        receipt = s.receive(s.dispatch(name).id, payload(100))
        # Without the lie it was a tenth.
        assert receipt.weight == pytest.approx(100 / (900 + 10_000))
        assert not receipt.clipped


def test_huge_first_sample_count_does_not_suppress_other_clients():
    s = server()
    assert s.receive(s.dispatch("liar"), payload(10**9)).weight == 1.0
    honest = [f"ward-{i}" for i in range(9)]
    for name in honest:
        s.receive(s.dispatch(name), payload(100))
    for name in honest:
        assert s.receive(s.dispatch(name), payload(100)).weight == pytest.approx(100 / (900 + 10_000))
    # Nor what it tells again.
    assert s.receive(s.dispatch("liar"), payload(10**9)).clipped
    assert s.receive(s.dispatch("ward-0"), payload(100)).weight == pytest.approx(100 / (900 + 10_000))


@pytest.mark.parametrize("liar_at", range(5))
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_one_sample_count_is_capped_in_a_small_federation(count, liar_at):
    """Each of the n other clients keeps 1 / (factor + n) of its weight.

    This holds whenever the huge count arrives, also for the first update of a client.
    """
    s = server()
    names = [f"ward-{i}" for i in range(count)]
    liar = names[min(liar_at, count - 1)]
    tickets = [(name, s.dispatch(name)) for _ in range(2) for name in names]
    for i, (name, ticket) in enumerate(tickets):
        receipt = s.receive(ticket, payload(10**9 if name == liar else 100))
        assert receipt.clipped == (name == liar and i > 0)
        if name != liar:
            seen = min(i + 1, count)  # clients that have reported share their part of the weight
            if seen > names.index(liar):
                assert receipt.weight == pytest.approx(seen / count / (100 + seen - 1))


def test_one_of_two_other_clients_cannot_raise_the_cap():
    s = server()
    for name, samples in (("a", 100), ("liar", 10**9), ("second liar", 10**9)):
        s.receive(s.dispatch(name), payload(samples))
    assert s.receive(s.dispatch("a"), payload(100)).weight >= 100 / (100 + 2 * 10_000)


@pytest.mark.parametrize("first", ["liars", "honest"])
def test_colluding_sample_counts_of_a_minority_are_capped(first):
    """This also holds if the colluding clients report first, when there is no honest count to compare with."""
    s, count, colluders = server(), 20, 9
    names = [f"liar-{i}" for i in range(colluders)] + [f"ward-{i}" for i in range(count - colluders)]
    for name in names if first == "liars" else reversed(names):
        s.receive(s.dispatch(name), payload(10**9 if name.startswith("liar") else 100)).check()
    total = 100 * (100 * colluders + count - colluders)
    assert s.receive(s.dispatch("ward-0"), payload(100)).weight == pytest.approx(100 / total)
    assert s.receive(s.dispatch("liar-0"), payload(10**9)).weight == pytest.approx(100 * 100 / total)


def test_a_client_without_others_is_not_capped():
    s = server()
    for _ in range(2):
        assert not s.receive(s.dispatch("a").id, payload(10**9)).clipped


@pytest.mark.parametrize("kind", ["observed", "uniform"])
@pytest.mark.parametrize("end", ["drop", "expire", "stale"])
def test_clients_without_updates_do_not_reduce_other_weights(kind, end):
    now = [0.0]
    s = server(kind, timeout=1.0, clock=lambda: now[0], max_staleness=20)
    for i in range(4):
        s.receive(s.dispatch(f"ward-{i}"), payload(100)).check()
    tickets = [s.dispatch(f"name-{i}") for i in range(50)]
    assert s.receive(s.dispatch("ward-0"), payload(100)).weight == pytest.approx(1 / 54)
    if end == "drop":
        for ticket in tickets:
            s.drop(ticket)
    elif end == "expire":
        now[0] = 2.0
    else:
        for i in range(21):
            s.receive(s.dispatch(f"ward-{i % 4}"), payload(100)).check()
        for ticket in tickets:
            assert not s.receive(ticket, payload(100)).accepted
    assert s.receive(s.dispatch("ward-1"), payload(100)).weight == pytest.approx(1 / 4)
    # A contributor counts although a later ticket of it is dropped.
    s.drop(s.dispatch("ward-2"))
    assert s.receive(s.dispatch("ward-1"), payload(100)).weight == pytest.approx(1 / 4)


def test_client_counts_while_it_has_a_ticket():
    s = server()
    s.receive(s.dispatch("a"), payload(100)).check()

    def weight():
        return s.receive(s.dispatch("a"), payload(100)).weight

    tickets = [s.dispatch("b") for _ in range(3)]
    for ticket in tickets[:2]:
        s.drop(ticket)
        assert weight() == pytest.approx(1 / 2)
    assert Weights.of_state(s._state.value.weights.state(), None, 100.0) == s._state.value.weights
    s.drop(tickets[2])
    assert weight() == 1.0
    assert s.receive(s.dispatch("b"), payload(100)).weight == pytest.approx(1 / 2)
    assert weight() == pytest.approx(1 / 2)


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "uniform"},
        {"weights": dict.fromkeys(range(7), 1)},
        {"update_limits": UpdateLimits(samples_factor=None)},
    ],
)
def test_sample_counts_are_not_clipped_without_observed_weights(options):
    s = server(**options)
    for client in range(6):
        s.receive(s.dispatch(client).id, payload(1))
    receipt = s.receive(s.dispatch(6).id, payload(10**9))
    assert (receipt.accepted, receipt.clipped) == (True, False)


amounts = st.one_of(st.integers(1, 40), st.integers(1, 2**53))


@given(
    st.lists(st.tuples(st.integers(0, 9), amounts), max_size=30),
    amounts,
    st.sampled_from([1, 1.5, 2.75, 100, 1e6]),
)
def test_sample_cap_is_a_multiple_of_the_median_of_other_clients(script, samples, factor):
    weights, told = Weights.of("observed", factor), {}

    def plain(client, samples):
        others = [Fraction(amount) for other, amount in told.items() if other != client]
        middle = statistics.median if len(others) >= 5 else statistics.median_low
        limit = Fraction(factor) * middle(others) if others else math.inf
        return samples if samples <= limit else math.floor(limit)

    for client, amount in script:
        believed = weights.capped(client, amount)
        assert believed == plain(client, amount)
        weights = weights.with_client(client).with_report(client, believed)
        is_early = client not in told
        told[client] = believed
        if is_early:
            told = {client: plain(client, amount) for client, amount in told.items()}
    assert dict(weights.reported) == told
    assert weights.total == sum(told.values())
    assert weights == Weights.of_state(weights.state(), None, factor)
    for client in range(11):
        assert weights.capped(client, samples) == plain(client, samples)


def test_a_cap_does_not_look_at_every_client():
    class Looked(dict):
        def values(self):
            raise AssertionError("looked at every client")

        __iter__ = items = values

    weights = Weights.of("observed", 100.0)
    for client in range(9):
        weights = weights.with_client(client).with_report(client, 90 + client)
    object.__setattr__(weights, "reported", Looked(weights.reported))
    assert [weights.capped(3, samples) for samples in (6400, 10_000)] == [6400, 9450]


def test_weights_compare_by_value():
    first = Weights.of("observed", None)
    second = first.with_client("a").with_report("a", 3)
    assert first == Weights.of("observed", None)
    assert second.with_client("a").with_report("a", 3) is second
    assert second.with_report("a", 5).with_report("a", 3) == second


@given(
    st.sampled_from(["observed", "uniform", {"a": 3, 1: 4, "b": 2**53}]),
    st.lists(st.tuples(st.sampled_from(["a", 1, "b"]), st.integers(0, 10**9)), max_size=9),
)
def test_weights_resume_from_their_state(given, script):
    weights = Weights.of(given, None)
    for client, samples in script:
        weights = weights.with_client(client)
        weights = weights.with_report(client, samples) if samples else weights
    again = Weights.of_state(weights.state(), None, None)
    assert again == weights
    for client in ("a", 1, "b"):
        after = weights.with_client(client).with_report(client, 12)
        assert again.with_client(client).with_report(client, 12) == after
        assert again.with_client(client).weight(client, 12) == weights.with_client(client).weight(client, 12)


def test_weights_of_participants_can_be_replaced():
    told = Weights.of("observed", None).with_client("a").with_report("a", 30).with_client("b")
    given = Weights.of_state(told.state(), {"a": 1, "b": 3}, None)
    assert given.weight("a", 30) == 0.25
    assert Weights.of_state(given.state(), "observed", None) == told
    with pytest.raises(ArgumentError, match="client: expected a client of weights, got 'b'"):
        Weights.of_state(told.state(), {"a": 1}, None)
    with pytest.raises(ArgumentError, match="weights: state: expected the result of Weights.state"):
        Weights.of_state({"kind": "observed"}, None, None)


class Odd:
    def __hash__(self):
        return 0

    def __eq__(self, other):
        raise RuntimeError("compared")


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("client", "words"),
    [
        (torch.tensor(3), "client: expected a hashable name, got a tensor"),
        (torch.nn.Parameter(torch.ones(2)), "client: expected a hashable name, got a tensor"),
        (("ward", torch.tensor(3)), "client: expected a hashable name, got a tensor"),
        (frozenset([("ward", torch.tensor(3))]), "client: expected a hashable name, got a tensor"),
        (float("nan"), "client: expected a name that equals itself, got nan"),
        (("ward", float("nan")), "client: expected a name that equals itself"),
        (np.float64("nan"), "client: expected a name that equals itself"),
        (["a"], "client: expected a hashable name, got one of type list"),
        (("a", []), "client: expected a hashable name, got one of type tuple"),
        (Odd(), "client: expected a hashable name, got one of type Odd"),
    ],
)
def test_invalid_client_names_are_rejected(client, words):
    s = server()
    with pytest.raises(ArgumentError, match=words):
        s.dispatch(client)
    assert s.memory["versions"] == 0


def test_names_with_the_same_content_are_one_client():
    s = server("uniform")
    for make in (lambda: ("ward", 7), lambda: 10**30, lambda: np.int64(3), lambda: frozenset("ab")):
        s.dispatch(make())
        s.dispatch(make())
    assert s.receive(s.dispatch(("ward", 7)).id, payload()).weight == 1 / 4


NUMPY_NAMES = [np.int8(3), np.int64(3), np.uint64(2**63), np.float32(0.1), np.float64(0.1), np.bool_(True)]
NUMPY_NAMES += [np.str_("ward-7"), np.bytes_(b"ward-7"), np.complex64(1 + 2j), np.float64("inf")]


@pytest.mark.parametrize("name", NUMPY_NAMES, ids=lambda name: type(name).__name__)
def test_numpy_client_name_equals_its_python_value(name):
    """A NumPy scalar compared with a tuple is an array, so a map cannot look it up next to a tuple of the same hash."""
    found = check_client(name)
    assert not isinstance(found, np.generic)
    assert found == name
    assert hash(found) == hash(name)
    s = server("uniform")
    for client in (name, found, (found, 1)):
        s.dispatch(client)
    assert s.receive(s.dispatch(name).id, payload(), client=name).weight == 1 / 2
    assert type(s.history[-1]["client"]) is type(found)


def test_numpy_client_name_without_python_value_is_unchanged():
    name = np.datetime64("2026-01-01", "ns")
    assert check_client(name) is name


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ("heavy", "weights: expected one of observed, uniform; got 'heavy'"),
        ({"a": 0}, r"weights\['a'\]: expected an integer >= 1, got 0"),
        ({"a": 2, "b": -1}, r"weights\['b'\]: expected"),
        ({"a": 0.5}, r"weights\['a'\]: expected an integer"),
        ({"a": True}, r"weights\['a'\]: expected an integer"),
        ({"a": 10**400, "b": 1}, r"weights\['a'\]: expected at most 2\^53 samples, got a huge int"),
        ({}, "weights: expected at least one client"),
        (None, "weights: expected observed, uniform or a mapping from clients to samples, got None"),
        (["a"], r"weights: expected observed, uniform or a mapping from clients to samples, got \['a'\]"),
    ],
)
def test_invalid_weights_are_rejected_by_name(weights, words):
    with pytest.raises(ArgumentError, match=words):
        server(weights)


def test_a_restored_report_above_the_largest_count_is_rejected():
    state = Weights.of("observed", None).with_client("a").with_report("a", 2**53).state()
    assert Weights.of_state(state, None, None).reported["a"] == 2**53
    state["reported"]["a"] += 1
    with pytest.raises(ArgumentError, match=r"weights: reported\['a'\]: expected at most 2\^53 samples, got 90"):
        Weights.of_state(state, None, None)
