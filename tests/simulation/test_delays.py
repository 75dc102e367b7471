"""Delays against closed forms, scipy, samples, and measurements in a file."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.simulation.delays import (
    Deterministic,
    Empirical,
    Exponential,
    Gaussian,
    HalfNormal,
    LogNormal,
    Uniform,
    assign_profiles,
)
from tests.support import seeds

SHARES = np.concatenate([[0.0], np.logspace(-6, -1, 11), np.linspace(0.1, 0.9, 17), 1 - np.logspace(-1, -6, 11)])
means = st.floats(-3, 3).map(lambda exponent: 10.0**exponent)
ratios = st.floats(-2, 1).map(lambda exponent: 10.0**exponent)


def truncated(location, scale):
    return scipy.stats.truncnorm(-location / scale, math.inf, location, scale)


def log_normal(mean, deviation):
    variance = math.log(1 + (deviation / mean) ** 2)
    return scipy.stats.lognorm(math.sqrt(variance), scale=math.exp(math.log(mean) - variance / 2))


FAMILIES = {
    "Gaussian": lambda a, r: (Gaussian(a, a * r), truncated(a, a * r)),
    "log-normal": lambda a, r: (LogNormal(a, a * r), log_normal(a, a * r)),
    "half-normal": lambda a, r: (HalfNormal(a), scipy.stats.halfnorm(scale=a * math.sqrt(math.pi / 2))),
    "uniform": lambda a, r: (Uniform(a, a + a * r), scipy.stats.uniform(a, a * r)),
    "exponential": lambda a, r: (Exponential(a), scipy.stats.expon(scale=a)),
}
CASES = [pytest.param(*family(3.0, 0.8), id=name) for name, family in FAMILIES.items()]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@given(means, ratios)
def test_quantiles_and_means_are_those_of_scipy(family, mean, ratio):
    delay, oracle = family(mean, ratio)
    found = np.array([delay.quantile(share) for share in SHARES[1:]])
    # A share that is off by ε moves a quantile by ε / density; the densities are at least about 1e-6 / scale here,
    # so 1e-9 of the spread, of which the first term is the median and the second the scale.
    slack = 1e-9 * (oracle.ppf(0.5) + oracle.std()) + 1e-12 * found
    assert (np.abs(found - oracle.ppf(SHARES[1:])) <= slack).all()
    # Rounding of a few operations; scipy's own mean of a truncated normal distribution has 1e-12.
    assert math.isclose(delay.expected(), oracle.mean(), rel_tol=1e-11)


def test_distributions_have_the_requested_means():
    assert LogNormal(3.0, 9.0).expected() == HalfNormal(3.0).expected() == Exponential(3.0).expected() == 3.0
    assert math.isclose(scipy.stats.halfnorm(scale=3.0 * math.sqrt(math.pi / 2)).mean(), 3.0, rel_tol=1e-15)
    assert math.isclose(log_normal(3.0, 9.0).std(), 9.0, rel_tol=1e-12)
    # Two standard deviations above 0: the mean moves by scale·φ(2)/Φ(2).
    assert math.isclose(Gaussian(2.0, 1.0).expected(), 2 + 0.05399096651318806 / 0.9772498680518208, rel_tol=1e-15)


@pytest.mark.parametrize(("delay", "oracle"), CASES)
def test_samples_follow_the_distribution(delay, oracle):
    count = 20_000
    generator = np.random.default_rng(5)
    sample = np.sort([delay.draw(generator) for _ in range(count)])
    assert sample[0] >= 0
    # Dvoretzky–Kiefer–Wolfowitz: P(sup |F_n − F| > e) ≤ 2 exp(−2ne²), which is 1e-9 here.
    bound = math.sqrt(math.log(2e9) / (2 * count))
    below = oracle.cdf(sample)
    assert max((np.arange(1, count + 1) / count - below).max(), (below - np.arange(count) / count).max()) <= bound
    # Six standard errors.
    assert abs(sample.mean() - delay.expected()) <= 6 * oracle.std() / math.sqrt(count)


@pytest.mark.parametrize(("delay", "_"), CASES)
@given(seeds, st.floats(0, 1e6))
def test_a_draw_is_linear_in_the_work(delay, _, seed, work):
    draw = delay.draw(np.random.default_rng(seed), work)
    assert draw == work * delay.draw(np.random.default_rng(seed))
    assert delay.expected(work) == work * delay.expected()


@pytest.mark.parametrize(("delay", "_"), [*CASES, (Deterministic(1.0), None), (Empirical((1.0, 2.0)), None)])
def test_each_draw_uses_one_random_number_and_quantiles_increase(delay, _):
    one, other = np.random.default_rng(0), np.random.default_rng(0)
    delay.draw(one)
    share = other.random()
    assert one.bit_generator.state == other.bit_generator.state
    assert delay.draw(np.random.default_rng(0)) == delay.quantile(share)
    quantiles = [delay.quantile(share) for share in [*SHARES, 1 - 2.0**-53]]
    assert quantiles == sorted(quantiles)
    assert quantiles[0] >= 0
    assert math.isfinite(quantiles[-1])


@pytest.mark.parametrize("location", [1e-9, 1.0, 50.0])
def test_a_truncated_normal_distribution_is_exact_at_both_ends_of_truncation(location):
    """Half of the mass cut off, or none of it."""
    delay = Gaussian(location, 1.0)
    expected = truncated(location, 1.0).ppf(0.5)
    assert math.isclose(delay.quantile(0.5), expected, rel_tol=1e-12)
    assert 0 <= delay.quantile(0) <= location


def test_distributions_without_deviation_are_constant():
    for delay in (Gaussian(2.0, 0.0), LogNormal(2.0, 0.0), Uniform(2.0, 2.0), Deterministic(2.0)):
        assert all(math.isclose(delay.quantile(share), 2.0, rel_tol=1e-15) for share in (1e-9, 0.3, 0.999))
        assert delay.expected() == 2.0


@given(st.lists(st.floats(0.1, 1e3), min_size=2, max_size=30))
def test_distributions_are_fitted_to_measurements(delays):
    mean, deviation = np.mean(delays), np.std(delays)
    assert Gaussian.fit(delays) == Gaussian(float(mean), float(deviation))
    assert LogNormal.fit(delays) == LogNormal(float(mean), float(deviation))
    assert HalfNormal.fit(delays).expected() == Exponential.fit(np.array(delays)).expected() == mean
    low, high = np.percentile(delays, [5, 95])
    assert Uniform.fit(delays) == Uniform(float(low), float(high))


def test_measured_tasks_are_drawn_whole_with_equal_probability():
    delay = Empirical((5.0, 1.0, 3.0), (0.5, 10.0, 0.0))
    assert delay.delays == (3.0, 5.5, 11.0)
    assert [delay.quantile(share) for share in (0.0, 0.3, 0.4, 0.6, 0.7, 1 - 2.0**-53)] == [3.0, 3.0, 5.5, 5.5, 11, 11]
    generator = np.random.default_rng(0)
    count = 9000
    draws, times = np.unique([delay.draw(generator, work=2.0) for _ in range(count)], return_counts=True)
    # Computation twice, communication once.
    assert draws.tolist() == [6.0, 10.5, 12.0]
    # Six standard deviations of a binomial count.
    assert (np.abs(times - count / 3) <= 6 * math.sqrt(count * 2 / 9)).all()
    assert math.isclose(delay.expected(), np.mean(delay.delays), rel_tol=1e-15)
    assert math.isclose(delay.expected(work=2.0), 9.5, rel_tol=1e-15)


HEADER = "gateway,row,client,computation_s,round_s\n"


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_profiles_are_read_by_client_and_scaled_by_work_and_size(tmp_path):
    rows = "1,0,37,4.0,10.0\n1,1,15,32.0,92.0\n2,0,37,2.0,5.0\n"
    path = write(tmp_path / "delays.csv", HEADER + rows)
    marked = "\ufeffclient" + HEADER.replace("client", "place")[len("gateway") :] + rows
    assert list(Empirical.from_csv(write(tmp_path / "marked.csv", marked))) == ["1", "2"]
    profiles = Empirical.from_csv(path)
    assert profiles == {"37": Empirical((4.0, 2.0), (6.0, 3.0)), "15": Empirical((32.0,), (60.0,))}
    assert profiles["37"].delays == (5.0, 10.0)
    # A unit of work is a quarter of a measured round; the model is ten times as large.
    scaled = Empirical.from_csv(path, work=4.0, size_ratio=10.0)["37"]
    assert scaled.delays == (0.5 + 30.0, 1.0 + 60.0)
    assert scaled.expected(work=4.0) == 3.0 + 45.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: expected one column for each of client, computation_s, round_s"),
        ("client,round_s\n", "line 1: expected one column for each of"),
        (HEADER.replace("row", "client"), "line 1: expected one column for each of"),
        (HEADER, "expected measured tasks, got .* without rows"),
        (HEADER + "1,0,37,4.0,10.0\n1,0,37,four,10.0\n", "line 3: could not convert string to float: 'four'"),
        (HEADER + "1,0,37,4.0\n", "line 2: float"),
        (HEADER + "1,0,37,4.0,10.0,9\n", "line 2: expected 5 fields"),
        (HEADER + "1,0,,4.0,5.0\n", "line 2: expected 5 fields with a name of the client"),
        (HEADER + "1,0,37,-4.0,10.0\n", "line 2: computation_s: expected a finite number >= 0"),
        (HEADER + "1,0,37,nan,10.0\n", "line 2: computation_s: expected"),
        (HEADER + "1,0,37,4.0,3.0\n", "line 2: round_s: expected a finite number >= 4, got 3"),
        (HEADER + "1,0,37,4.0,inf\n", "line 2: round_s: expected"),
    ],
)
def test_invalid_file_is_rejected_with_its_line(tmp_path, text, words):
    with pytest.raises(ArgumentError, match=words):
        Empirical.from_csv(write(tmp_path / "delays.csv", text))


def test_missing_file_and_invalid_scales_are_rejected(tmp_path):
    with pytest.raises(ArgumentError, match=r"path: .* cannot be read"):
        Empirical.from_csv(tmp_path / "none.csv")
    path = write(tmp_path / "delays.csv", HEADER + "1,0,37,4.0,10.0\n")
    with pytest.raises(ArgumentError, match="work: expected a finite number > 0"):
        Empirical.from_csv(path, work=0.0)
    with pytest.raises(ArgumentError, match="size_ratio: expected"):
        Empirical.from_csv(path, size_ratio=-1.0)


def test_profiles_are_assigned_at_random_and_reproducibly():
    profiles = {str(i): Deterministic(float(i)) for i in range(4)}
    count = 4000
    given = assign_profiles(profiles, range(count), np.random.default_rng(2))
    assert given == assign_profiles(profiles, range(count), np.random.default_rng(2))
    times = np.bincount([int(delay.seconds) for delay in given.values()], minlength=4)
    # Six standard deviations of a binomial count.
    assert (np.abs(times - count / 4) <= 6 * math.sqrt(count * 3 / 16)).all()


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Deterministic(-1.0), "seconds: expected"),
        (lambda: Gaussian(0.0, 1.0), "location: expected a finite number > 0"),
        (lambda: Gaussian(1.0, -1.0), "scale: expected a finite number >= 0"),
        (lambda: LogNormal(0.0, 1.0), "mean: expected"),
        (lambda: LogNormal(1e300, 1e306), "mean: expected finite delays"),
        (lambda: LogNormal(1.0, 1e7), "deviation: expected a finite number >= 0 and <= 1e\\+06"),
        (lambda: HalfNormal(math.nan), "mean: expected"),
        (lambda: Exponential(math.inf), "mean: expected"),
        (lambda: Uniform(-1.0, 1.0), "low: expected"),
        (lambda: Uniform(2.0, 1.0), "high: expected a finite number >= 2"),
        (lambda: Exponential(1.0).quantile(1.0), "probability: expected a number below 1"),
        (lambda: Exponential(1.0).quantile(-0.1), "probability: expected"),
        (lambda: Gaussian.fit([]), "delays: expected a non-empty vector"),
        (lambda: Gaussian.fit([1.0, math.nan]), r"delays\[1\]: expected a finite number >= 0, got nan"),
        (lambda: Uniform.fit(["a"]), "delays: expected real numbers"),
        (lambda: LogNormal.fit([0.0, 0.0]), "mean: expected"),
        (lambda: Empirical(()), "computation: expected a non-empty vector"),
        (lambda: Empirical((1.0, -1.0)), r"computation\[1\]: expected"),
        (lambda: Empirical((1.0, 1.0), (1.0,)), "communication: expected 2 tasks as in computation, got 1"),
        (lambda: Empirical((1.0,), 0.5), r"communication: expected a non-empty vector, got shape \(\)"),
        (lambda: assign_profiles({}, [1], np.random.default_rng(0)), "profiles: expected at least one"),
        (lambda: assign_profiles({"a": Deterministic(1.0)}, [1], 0), "generator: expected"),
    ],
)
def test_invalid_parameters_are_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
