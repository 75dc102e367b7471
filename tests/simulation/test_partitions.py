"""Partitions: every sample goes to one client at most; who gets which label, and what the papers state of it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.simulation import (
    cyclic_partition,
    dirichlet_partition,
    disjoint_partition,
    grouped_partition,
    iid_partition,
    shards_partition,
    sizes_partition,
)
from tests.support import seeds

concentrations = st.sampled_from([0, 1e-3, 0.1, 0.5, 1.0, 100.0, 1e308, math.inf])


@given(seeds, st.lists(st.integers(-3, 3), min_size=1, max_size=80), st.data(), concentrations)
def test_each_sample_belongs_to_exactly_one_client(seed, labels, data, concentration):
    clients = data.draw(st.integers(1, len(labels)))
    parts = dirichlet_partition(labels, clients, concentration, np.random.default_rng(seed))
    assert len(parts) == clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert all((np.diff(part) > 0).all() and part.dtype == np.int64 for part in parts)


labelled = st.lists(st.integers(-3, 3), min_size=1, max_size=80).map(np.array)


def is_split(parts, clients, labels, whole=True):
    """One sorted array a client, none with what another has; with `whole` they are everything."""
    together = np.concatenate(parts).tolist()
    assert len(parts) == clients
    assert len(set(together)) == len(together)
    assert set(together) <= set(range(len(labels)))
    assert not whole or len(together) == len(labels)
    assert all((np.diff(part) > 0).all() and part.dtype == np.int64 for part in parts)


@given(seeds, labelled, st.data())
def test_iid_parts_have_equal_sizes(seed, labels, data):
    clients = data.draw(st.integers(1, len(labels)))
    parts = iid_partition(labels, clients, np.random.default_rng(seed))
    is_split(parts, clients, labels)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_iid_partition_is_independent_of_the_labels():
    labels = np.repeat(np.arange(4), 500)
    counts = [np.bincount(labels[part], minlength=4) for part in iid_partition(labels, 4, np.random.default_rng(0))]
    # Hypergeometric counts of mean 125 and standard deviation 8.4; five of these.
    assert np.abs(np.array(counts) - 125).max() <= 42
    other = iid_partition(np.zeros(2000, int), 4, np.random.default_rng(0))
    assert all(
        np.array_equal(a, b) for a, b in zip(iid_partition(labels, 4, np.random.default_rng(0)), other, strict=True)
    )


@given(seeds, labelled, st.data())
def test_shards_are_consecutive_samples_sorted_by_label(seed, labels, data):
    clients = data.draw(st.integers(1, len(labels)))
    shards = data.draw(st.integers(1, len(labels) // clients))
    parts = shards_partition(labels, clients, shards, np.random.default_rng(seed))
    is_split(parts, clients, labels)
    # A cut between two shards is the only place where a label can go on at another client.
    cuts = clients * shards - 1
    assert sum(len(set(labels[part])) for part in parts) <= len(set(labels)) + cuts
    assert max(map(len, parts)) - min(map(len, parts)) <= shards


def test_clients_have_two_labels_if_each_shard_is_one_label():
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(20), 7))
    parts = shards_partition(labels, 10, 2, np.random.default_rng(0))
    assert all(sorted(np.bincount(labels[part], minlength=20))[-3:] == [0, 7, 7] for part in parts)


@given(seeds, labelled, st.data())
def test_cyclic_partition_assigns_labels_modulo_their_number(seed, labels, data):
    kinds = sorted(set(labels.tolist()))
    clients = data.draw(st.integers(1, len(labels)))
    each = data.draw(st.integers(1, len(kinds)))
    parts = cyclic_partition(labels, clients, each, np.random.default_rng(seed))
    is_split(parts, clients, labels, whole=clients * each >= len(kinds))
    allowed = [{kinds[(i * each + j) % len(kinds)] for j in range(each)} for i in range(clients)]
    assert all(set(labels[part].tolist()) <= mine for part, mine in zip(parts, allowed, strict=True))
    for kind in kinds:
        counts = [int((labels[part] == kind).sum()) for part, mine in zip(parts, allowed, strict=True) if kind in mine]
        assert not counts or max(counts) - min(counts) <= 1
        assert sum(counts) == (labels == kind).sum() * bool(counts)


def test_cyclic_partition_equals_the_example_of_queue_g3():
    labels = np.repeat(np.arange(10), 30)
    parts = cyclic_partition(labels, 10, 3, np.random.default_rng(0))
    assert [sorted(set(labels[part].tolist())) for part in parts[:4]] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 9]]
    assert set(map(len, parts)) == {30}


@given(seeds, labelled, st.data())
def test_disjoint_partition_assigns_whole_labels(seed, labels, data):
    kinds = set(labels.tolist())
    clients = data.draw(st.integers(1, len(kinds)))
    parts = disjoint_partition(labels, clients, np.random.default_rng(seed))
    is_split(parts, clients, labels)
    held = [set(labels[part].tolist()) for part in parts]
    assert sum(map(len, held)) == len(kinds)
    assert max(map(len, held)) - min(map(len, held)) <= 1


@pytest.mark.parametrize(
    ("split", "options"),
    [(dirichlet_partition, {"concentration": 0.5}), (iid_partition, {}), (shards_partition, {"shards_per_client": 2}),
     (cyclic_partition, {"labels_per_client": 2}), (disjoint_partition, {})],
)  # fmt: skip
def test_equal_seeds_give_equal_partitions(split, options):
    labels = np.tile(np.arange(8), 9)
    one, again, other = (split(labels, 6, **options, generator=np.random.default_rng(s)) for s in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@given(seeds, concentrations)
def test_dropping_remainders_drops_fewer_than_one_sample_a_client_and_label(seed, concentration):
    labels = np.repeat(np.arange(5), 100)
    parts = dirichlet_partition(labels, 7, concentration, np.random.default_rng(seed), remainder="drop")
    kept = np.concatenate(parts)
    assert len(np.unique(kept)) == len(kept)
    assert 500 - 5 * 7 < len(kept) <= 500


def test_concentrations_zero_and_infinity_are_the_limits():
    labels = np.repeat(np.arange(4), 30)
    alone = dirichlet_partition(labels, 6, 0, np.random.default_rng(0))
    assert all(len(set(np.bincount(labels[part], minlength=4)) - {0, 30}) == 0 for part in alone)
    for large in (math.inf, 1e308):
        for remainder in ("largest", "drop"):
            even = dirichlet_partition(labels, 6, large, np.random.default_rng(0), remainder=remainder)
            assert all(np.bincount(labels[part], minlength=4).tolist() == [5] * 4 for part in even)
    ties = dirichlet_partition(np.repeat(np.arange(10), 15), 30, math.inf, np.random.default_rng(0))
    assert max(map(len, ties)) < 10


def test_dirichlet_partition_has_the_statistics_of_the_paper():
    """SPEC §7: α = .5, N = 30, K = 62: top 9 labels .524, top 30 .913, sizes 1.40 and 2.87 label units."""
    labels = np.repeat(np.arange(62), 2000)
    top9, top30, smallest, largest = [], [], [], []
    for seed in range(40):
        parts = dirichlet_partition(labels, 30, 0.5, np.random.default_rng(seed))
        counts = np.array([np.bincount(labels[part], minlength=62) for part in parts])
        shares = -np.sort(-counts, axis=1) / counts.sum(1, keepdims=True)
        top9.append(shares[:, :9].sum(1).mean())
        top30.append(shares[:, :30].sum(1).mean())
        smallest.append(counts.sum(1).min() / 2000)
        largest.append(counts.sum(1).max() / 2000)
    for values, expected in ((top9, 0.524), (top30, 0.913), (smallest, 1.40), (largest, 2.87)):
        # Four standard errors of the mean over 40 draws, and half a unit of the last printed digit.
        slack = 4 * np.std(values, ddof=1) / math.sqrt(len(values)) + (0.0005 if expected < 1 else 0.005)
        assert np.mean(values) == pytest.approx(expected, abs=slack)


@pytest.mark.usefixtures("as_shipped")
def test_concentration_may_be_a_numpy_number():
    ours, plain = (dirichlet_partition([0, 1] * 9, 3, a, np.random.default_rng(0)) for a in (np.float32(0.5), 0.5))
    assert all(np.array_equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_labels_may_be_strings():
    parts = dirichlet_partition(["a", "b", "a"], 2, 0.5, np.random.default_rng(0))
    assert sum(map(len, parts)) == 3


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": []}, "labels: expected a non-empty vector"),
        ({"labels": np.zeros((2, 2), int)}, "labels: expected a non-empty vector"),
        ({"clients": 0}, "clients: expected an integer >= 1"),
        ({"clients": 5}, "clients: expected at most one for each of 4 samples, got 5"),
        ({"concentration": -0.5}, "concentration: expected a number >= 0"),
        ({"concentration": float("nan")}, "concentration: expected"),
        ({"concentration": True}, "concentration: expected"),
        ({"concentration": "much"}, "concentration: expected"),
        ({"remainder": "keep"}, "remainder: expected one of largest, drop"),
        ({"generator": 0}, "generator: expected a numpy.random.Generator, got int"),
    ],
)
def test_invalid_input_is_rejected_by_name(change, words):
    arguments = {"labels": [0, 0, 1, 1], "clients": 2, "concentration": 0.5, "generator": np.random.default_rng(0)}
    with pytest.raises(ArgumentError, match=words):
        dirichlet_partition(**(arguments | change))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda g: iid_partition([], 1, g), "labels: expected a non-empty vector"),
        (lambda g: iid_partition([0, 1], 3, g), "clients: expected at most one for each of 2 samples, got 3"),
        (lambda g: iid_partition([0, 1], 2, 0), "generator: expected a numpy.random.Generator, got int"),
        (lambda g: shards_partition([0, 1, 0, 1], 2, 3, g), "shards_per_client: expected at most 2 a client, got 3"),
        (lambda g: shards_partition([0, 1], 2, 0, g), "shards_per_client: expected an integer >= 1, got 0"),
        (
            lambda g: cyclic_partition([0, 1], 2, 3, g),
            "labels_per_client: expected at most the number of labels, 2, got 3",
        ),
        (lambda g: cyclic_partition([0, 1], 2, 0, g), "labels_per_client: expected an integer >= 1, got 0"),
        (lambda g: disjoint_partition([0, 1, 0], 3, g), "clients: expected at most one for each of 2 labels, got 3"),
    ],
)
def test_impossible_partitions_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call(np.random.default_rng(0))


owned = st.lists(st.integers(0, 30), min_size=1, max_size=120).map(np.array)


@given(seeds, owned, st.data(), st.sampled_from(["owners", "samples"]))
def test_grouped_partition_keeps_owners_whole_and_drops_no_sample(seed, owners, data, balance):
    count = len(set(owners.tolist()))
    clients = data.draw(st.integers(1, count))
    options = {"user_ids": owners, "balance": balance}
    parts = grouped_partition(np.zeros(len(owners)), clients, np.random.default_rng(seed), **options)
    is_split(parts, clients, owners)
    held = [set(owners[part].tolist()) for part in parts]
    # The sets are disjoint if their sizes add up.
    assert sum(map(len, held)) == count
    assert all(held)
    if balance == "owners":
        assert {len(one) for one in held} <= {count // clients, -(-count // clients)}
    again = grouped_partition(np.zeros(len(owners)), clients, np.random.default_rng(seed), **options)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_grouped_partition_of_35_plays_equals_the_paper():
    plays = np.repeat(np.arange(35), np.random.default_rng(1).integers(1, 90, 35))
    splits = [
        grouped_partition(np.zeros(len(plays)), 30, np.random.default_rng(seed), user_ids=plays) for seed in (0, 1)
    ]
    for parts in splits:
        counts = np.bincount([len(set(plays[part].tolist())) for part in parts])
        assert counts.tolist() == [0, 25, 5]
    # The clients with two plays depend on the seed, and are not always the first ones.
    first, second = ([len(set(plays[part].tolist())) for part in parts] for parts in splits)
    assert first != second
    assert first != sorted(first, reverse=True)


def test_grouped_partition_of_30805_patients_equals_the_paper():
    patients = np.random.default_rng(0).permutation(np.resize(np.arange(30_805), 112_120))
    parts = grouped_partition(np.zeros(112_120), 30, np.random.default_rng(0), user_ids=patients)
    assert sum(map(len, parts)) == 112_120
    assert sorted(len(set(patients[part].tolist())) for part in parts) == [1026] * 5 + [1027] * 25


@given(seeds, st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 4))
def test_balanced_samples_are_within_grahams_bound(seed, sizes, clients):
    """The best assignment is found by trying all of them."""
    clients = min(clients, len(sizes))
    owners = np.repeat(np.arange(len(sizes)), sizes)
    parts = grouped_partition(
        np.zeros(len(owners)), clients, np.random.default_rng(seed), user_ids=owners, balance="samples"
    )
    loads = np.zeros((1, clients), int)
    for size in sizes:
        loads = np.unique(np.sort((loads[:, None, :] + size * np.eye(clients, dtype=int)).reshape(-1, clients)), axis=0)
    best = loads.max(1).min()
    assert 3 * clients * max(map(len, parts)) <= (4 * clients - 1) * best


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "user_ids: expected the owner of each sample, got a data set without owners"),
        ({"user_ids": [0, 1]}, r"user_ids: expected one for each of 4 samples, got shape \(2,\)"),
        ({"user_ids": [0, 0, 1, 1]}, "clients: expected at most one for each of 2 owners, got 3"),
        ({"user_ids": [0, 1, 2, 3], "balance": "size"}, "balance: expected one of owners, samples"),
    ],
)
def test_impossible_groups_are_rejected_by_name(options, said):
    with pytest.raises(ArgumentError, match=said):
        grouped_partition(np.zeros(4), 3, np.random.default_rng(0), **options)


@given(seeds, labelled, st.data())
def test_sizes_are_proportional_to_the_weights_up_to_one_sample(seed, labels, data):
    clients = data.draw(st.integers(1, len(labels)))
    weights = data.draw(st.lists(st.floats(0, 1e300), min_size=clients, max_size=clients).filter(any))
    parts = sizes_partition(labels, clients, np.random.default_rng(seed), weights=weights)
    is_split(parts, clients, labels)
    exact = len(labels) * (np.array(weights) / max(weights)) / (np.array(weights) / max(weights)).sum()
    # 1e-9 covers the rounding errors of the sum of at most 80 weights.
    assert (np.abs(exact - [len(part) for part in parts]) < 1 + 1e-9).all()


def test_linear_sizes_are_those_of_the_report():
    parts = sizes_partition(np.zeros(3600), 8, np.random.default_rng(0))
    assert [len(part) for part in parts] == [100 * i for i in range(1, 9)]
    same = sizes_partition(np.zeros(3600), 8, np.random.default_rng(0), weights=lambda client: 7 * client)
    assert all(np.array_equal(a, b) for a, b in zip(parts, same, strict=True))
    squares = sizes_partition(np.zeros(1400), 3, np.random.default_rng(0), weights="quadratic")
    assert [len(part) for part in squares] == [100, 400, 900]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("cubic", "weights: expected one of equal, linear, quadratic"),
        ([1, 2], "weights: expected one for each of 3 clients, got 2"),
        ([1, 2, -1], r"weights\[2\]: expected a finite number >= 0, got -1"),
        ([0, 0, 0], "weights: expected at least one positive weight, got zeros"),
        (lambda client: "a", "weights: expected real numbers"),
    ],
)
def test_invalid_weights_are_rejected_by_name(weights, said):
    with pytest.raises(ArgumentError, match=said):
        sizes_partition(np.zeros(9), 3, np.random.default_rng(0), weights=weights)
