"""Fitted delays of measured devices against scipy, statistics and the formulas of OrthoFL D.4."""

import math
import statistics

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.experiments import workloads
from manifoldagg.simulation import (
    Delay,
    Exponential,
    Gaussian,
    HalfNormal,
    IndependentClients,
    LogNormal,
    PerTask,
    Uniform,
    assign_profiles,
    fit_profiles,
)
from manifoldagg.simulation.fitted_delays import FAMILIES

CSV = "gateway,client,computation_s,round_s\n1,pi,1.0,2.0\n1,phone,0.5,0.75\n2,pi,3.0,7.0\n2,pi,2.0,3.0\n"
times = st.lists(st.floats(0.1, 1e3), min_size=1, max_size=30)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "delays.csv"
    path.write_text(CSV)
    return path


def log_normal_of(mean, deviation):
    """The distribution of OrthoFL D.4, in the parameters of scipy."""
    variance = math.log(deviation**2 / mean**2 + 1)
    return scipy.stats.lognorm(math.sqrt(variance), scale=math.exp(math.log(mean) - variance / 2))


def oracle(family, x):
    """The fitted distribution in scipy, from the moments of the standard library."""
    mean, deviation = statistics.fmean(x), statistics.pstdev(x)
    if family == "uniform":
        low, *_, high = statistics.quantiles(x, n=20, method="inclusive")
        return scipy.stats.uniform(low, high - low)
    return {
        "gaussian": lambda: scipy.stats.truncnorm(-mean / deviation, math.inf, mean, deviation),
        "lognormal": lambda: log_normal_of(mean, deviation),
        "halfnormal": lambda: scipy.stats.halfnorm(scale=mean * math.sqrt(math.pi / 2)),
        "exponential": lambda: scipy.stats.expon(scale=mean),
    }[family]()


@pytest.mark.parametrize("family", FAMILIES)
@given(x=st.lists(st.floats(1.0, 100.0), min_size=3, max_size=30).filter(lambda x: statistics.pstdev(x) > 1))
def test_fits_have_the_quantiles_of_scipy(family, x):
    fitted, expected = FAMILIES[family](np.array(x)), oracle(family, x)
    for probability in (0.01, 0.25, 0.5, 0.75, 0.99):
        # The spread is at least 1 and the delays at most about 1e3. Both sides round a few operations.
        assert fitted.quantile(probability) == pytest.approx(expected.ppf(probability), rel=1e-9, abs=1e-9)


def test_fits_of_three_measurements_are_those_on_paper(path):
    # The mean of 2, 7 and 3 is 4. The variance is (4 + 9 + 1) / 3.
    deviation = math.sqrt(14 / 3)
    gaussian, lognormal = (fit_profiles(path, family)["pi"] for family in ("gaussian", "lognormal"))
    assert isinstance(gaussian, Gaussian)
    assert isinstance(lognormal, LogNormal)
    assert (gaussian.location, gaussian.scale) == (4.0, pytest.approx(deviation, rel=1e-15))
    assert (lognormal.mean, lognormal.deviation) == (4.0, pytest.approx(deviation, rel=1e-15))
    assert fit_profiles(path, "halfnormal")["pi"] == HalfNormal(4.0)
    assert fit_profiles(path, "exponential")["pi"] == Exponential(4.0)
    # The positions are 0.1 and 1.9 in the sorted delays 2, 3 and 7.
    uniform = fit_profiles(path, "uniform")["pi"]
    assert (uniform.low, uniform.high) == pytest.approx((2.1, 6.6), rel=1e-15)


@pytest.mark.parametrize("family", ["gaussian", "lognormal", "uniform"])
@given(st.floats(0.1, 1e3))
def test_one_measurement_gives_a_constant_delay(family, seconds):
    fitted = FAMILIES[family](np.array([seconds]))
    assert all(fitted.quantile(p) == pytest.approx(seconds, rel=1e-14) for p in (1e-9, 0.5, 0.999))


@given(times)
def test_halfnormal_and_exponential_fits_have_the_measured_mean(x):
    for family in ("halfnormal", "exponential", "lognormal"):
        assert FAMILIES[family](np.array(x)).expected() == pytest.approx(statistics.fmean(x), rel=1e-14)


@pytest.mark.parametrize("family", FAMILIES)
@given(times, st.floats(0.1, 10))
def test_a_fit_scales_with_the_unit_of_time(family, x, unit):
    """Seconds or minutes: all five families are scale families."""
    one, other = FAMILIES[family](np.array(x)), FAMILIES[family](np.array(x) * unit)
    # A quantile at 0.9 is at most 4 means. The scale of a constant has rounding errors of about 1e-16 means.
    assert other.quantile(0.9) == pytest.approx(unit * one.quantile(0.9), rel=1e-7)


def test_devices_are_in_the_order_of_the_file(path):
    assert list(fit_profiles(path, "uniform")) == ["pi", "phone"]
    assert fit_profiles(path, "gaussian")["phone"] == Gaussian(0.75, 0.0)


def test_communication_scales_with_the_size_and_time_with_the_work(path):
    # Communication times are 1, 4 and 1.
    expected = [(1 + 3 * 1) / 2, (3 + 3 * 4) / 2, (2 + 3 * 1) / 2]
    fitted = fit_profiles(path, "gaussian", work=2.0, size_ratio=3.0)["pi"]
    assert fitted == Gaussian.fit(expected)
    # A task with the work of a measured task takes the measured time.
    assert fitted.expected(work=2.0) == pytest.approx(Gaussian.fit([2 * x for x in expected]).expected(), rel=1e-14)


def test_a_delay_per_task_ignores_the_work(path):
    fitted, per_task = fit_profiles(path, "gaussian")["pi"], fit_profiles(path, "gaussian", per_task=True)["pi"]
    assert per_task == PerTask(fitted)
    assert isinstance(per_task, Delay)
    assert per_task.expected(work=50.0) == per_task.expected() == fitted.expected()
    assert per_task.quantile(0.3) == fitted.quantile(0.3)
    draws = [delay.draw(np.random.default_rng(0), work) for delay, work in ((fitted, 1.0), (per_task, 50.0))]
    assert draws[0] == draws[1]
    # The bound of a scheduler holds for work below 1 too.
    IndependentClients({0: per_task}, np.random.default_rng(0)).dispatch(0, work=0.5)


CLIENTS = [0, 1, 3]


def test_the_spec_assigns_fitted_devices_to_clients(path):
    def generator():
        return np.random.default_rng(7)

    for family in FAMILIES:
        found = workloads.delays(f"measured:{path},as={family}")(CLIENTS, generator())
        assert found == assign_profiles(fit_profiles(path, family), CLIENTS, generator())
    assert workloads.delays(f"measured:{path},as=uniform,work=4,size_ratio=0.5,per_task=true")(
        CLIENTS, generator()
    ) == assign_profiles(fit_profiles(path, "uniform", work=4.0, size_ratio=0.5, per_task=True), CLIENTS, generator())
    nested = workloads.scheduler(f"independent:delays=measured,delays.path={path},delays.as=gaussian")
    assert isinstance(nested(CLIENTS, generator()), IndependentClients)
    assert list(workloads.referenced_files(f"measured:{path},as=gaussian")) == [str(path)]


def test_a_delay_per_task_has_a_name():
    found = workloads.delays("pertask:delay=lognormal,delay.mean=10,delay.deviation=5")
    assert found == PerTask(LogNormal(10.0, 5.0))
    nested = workloads.scheduler(
        "independent:delays=pertask,delays.delay=uniform,delays.delay.low=1,delays.delay.high=3"
    )
    clients = nested(CLIENTS, np.random.default_rng(0))
    clients.dispatch(0, work=50.0)
    assert 1 <= clients.next().time <= 3


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "delays: measured: as: expected one of gaussian, lognormal, halfnormal, uniform"),
        (",as=gauss", "as: expected one of .*; got 'gauss': did you mean gaussian?"),
        (",as=gaussian,family=uniform", "no option 'family'"),
        (",as=gaussian,work=0", "work: expected a finite number > 0"),
        (",as=gaussian,size_ratio=-1", "size_ratio: expected a finite number >= 0"),
        (",as=gaussian,per_task=1", "per_task: expected a bool, got int"),
    ],
)
def test_invalid_spec_is_rejected_by_name(path, options, words):
    with pytest.raises(ArgumentError, match=words):
        workloads.delays(f"measured:{path}{options}")


@pytest.mark.usefixtures("as_shipped")
def test_device_without_time_is_rejected_by_name(path):
    path.write_text(CSV + "3,clock,0.0,0.0\n")
    with pytest.raises(ArgumentError, match=r"path: .*delays.csv, client clock: lognormal: mean: expected .* > 0"):
        fit_profiles(path, "lognormal")
    assert fit_profiles(path, "uniform")["clock"] == Uniform(0.0, 0.0)
    with pytest.raises(ArgumentError, match="delay: expected a Delay"):
        PerTask(1.0)
