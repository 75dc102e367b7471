"""The Dirichlet partition loses nothing and has the statistics that the paper states."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.simulation import dirichlet_partition
from tests.support import seeds

concentrations = st.sampled_from([0, 1e-3, 0.1, 0.5, 1.0, 100.0, 1e308, math.inf])


@given(seeds, st.lists(st.integers(-3, 3), min_size=1, max_size=80), st.data(), concentrations)
def test_every_sample_goes_to_exactly_one_client(seed, labels, data, concentration):
    clients = data.draw(st.integers(1, len(labels)))
    parts = dirichlet_partition(labels, clients, concentration, np.random.default_rng(seed))
    assert len(parts) == clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert all((np.diff(part) > 0).all() and part.dtype == np.int64 for part in parts)


@given(seeds, concentrations)
def test_dropping_remainders_drops_fewer_than_one_sample_a_client_and_label(seed, concentration):
    labels = np.repeat(np.arange(5), 100)
    parts = dirichlet_partition(labels, 7, concentration, np.random.default_rng(seed), remainder="drop")
    kept = np.concatenate(parts)
    assert len(np.unique(kept)) == len(kept)
    assert 500 - 5 * 7 < len(kept) <= 500


def test_the_limits_of_concentration():
    labels = np.repeat(np.arange(4), 30)
    alone = dirichlet_partition(labels, 6, 0, np.random.default_rng(0))
    assert all(len(set(np.bincount(labels[part], minlength=4)) - {0, 30}) == 0 for part in alone)
    for large in (math.inf, 1e308):
        for remainder in ("largest", "drop"):
            even = dirichlet_partition(labels, 6, large, np.random.default_rng(0), remainder=remainder)
            assert all(np.bincount(labels[part], minlength=4).tolist() == [5] * 4 for part in even)
    ties = dirichlet_partition(np.repeat(np.arange(10), 15), 30, math.inf, np.random.default_rng(0))
    assert max(map(len, ties)) < 10


def test_the_statistics_of_the_paper():
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
def test_a_numpy_number_is_a_concentration():
    ours, plain = (dirichlet_partition([0, 1] * 9, 3, a, np.random.default_rng(0)) for a in (np.float32(0.5), 0.5))
    assert all(np.array_equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_strings_are_labels_too():
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
def test_bad_input_is_refused_by_name(change, words):
    arguments = {"labels": [0, 0, 1, 1], "clients": 2, "concentration": 0.5, "generator": np.random.default_rng(0)}
    with pytest.raises(ArgumentError, match=words):
        dirichlet_partition(**(arguments | change))
