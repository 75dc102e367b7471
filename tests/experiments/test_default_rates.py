"""Tests of default rates that are scaled to a number of clients other than that of the tuning runs."""

import pytest

from manifoldagg.errors import ArgumentError
from manifoldagg.experiments import tuning
from manifoldagg.experiments.default_rates import methods_with_scaled_rates
from manifoldagg.experiments.registry import RULES, methods
from manifoldagg.federated import rules, stability_limit


def rates(names, **options):
    chosen, lines = methods_with_scaled_rates(names, **options)
    return {method.name: method.rule for method in chosen}, lines


@pytest.mark.parametrize("concurrency", [None, 30, 40])
def test_rates_are_unchanged_for_the_number_of_clients_of_the_tuning(concurrency):
    names = [name for name in RULES if name != "generalizedasyncsgd"]
    chosen, lines = methods_with_scaled_rates(names, clients=30, concurrency=concurrency)
    assert lines == []
    assert [method.rule for method in chosen] == [method.rule for method in methods(names)]


@pytest.mark.parametrize(("clients", "concurrency"), [(10, 10), (10, 2), (10, 1), (100, 10), (1000, 1000), (1, 1)])
def test_a_scaled_step_is_the_same_fraction_of_the_stability_limit(clients, concurrency):
    found, lines = rates("asgd", clients=clients, concurrency=concurrency)
    step = found["ASGD"].rate / clients
    part = 3.0 / 30 / stability_limit(30)
    # The scaled rate is rounded to three significant digits.
    assert step == pytest.approx(min(0.5, part * stability_limit(concurrency)), rel=6e-3)
    assert len(lines) == 1


@pytest.mark.parametrize(("clients", "rate"), [(10, 1.0), (30, 1.0), (100, 0.529), (1000, 0.163)])
def test_the_rate_of_a_buffered_rule_is_never_scaled_up(clients, rate):
    found, lines = rates("fedbuff,fedavg", clients=clients)
    assert found["FedBuff"].rate == rate
    assert found["FedBuff"].rate <= stability_limit(clients, 5)
    assert found["FedAvg"].rate == 1.0  # A synchronous cohort has no staleness.
    assert len(lines) == (rate < 1)


@pytest.mark.parametrize("clients", [2, 3, 6, 12, 50, 300])
def test_scaled_rates_do_not_exceed_the_stability_limit(clients):
    for made in methods_with_scaled_rates(list(RULES.keys() - {"defedavg"}), clients=clients)[0]:
        rule = made.bind(range(clients)).rule
        if rule.cohort > 1 or getattr(rule, "rate_kind", "") not in ("step", "mean"):
            continue
        size = getattr(rule, "buffer_size", None) or getattr(rule, "size", 1)
        step_size = tuning.find_rate(rule, "rate") / (clients if rule.rate_kind == "step" else 1)
        assert step_size <= stability_limit(clients, size), made.name


def test_only_default_rates_that_multiply_weights_are_scaled():
    names = "fedortho,fedasync,momentum,fedavg,fedbuff,orthofl,fedadam,asgd:rate=3"
    names += ",tests.simulation.custom:Signs,fedgs,asynckrylov:rate=cosine,rate.end=0,rate.period=9"
    found, lines = methods_with_scaled_rates(names, ["fedgs=2"], clients=10)
    assert lines == [
        "FedOrtho: default rate 5 scaled to 3.03 for 10 clients and a concurrency of 10",
        "FedAsync: default rate 3 scaled to 1.82 for 10 clients and a concurrency of 10",
        "Momentum: default rate 0.5 scaled to 0.303 for 10 clients and a concurrency of 10",
        "AsyncKrylov(rate=cosine, rate.end=0, rate.period=9): default rate 6 scaled to 3.63 for 10 clients and a concurrency of 10",
    ]
    before = {method.name: method.rule for method in methods(names, ["fedgs=2"])}
    after = {method.name: method.rule for method in found}
    assert after["FedOrtho"] == rules.FedOrtho(3.03)
    assert after["Momentum"].rule == rules.FedAsync(0.303, weighted=True)
    assert after["AsyncKrylov(rate=cosine, rate.end=0, rate.period=9)"].rate.start == 3.63
    for name in ("FedAvg", "FedBuff", "OrthoFL", "FedAdam", "ASGD(rate=3)", "FedGS"):
        assert after[name] == before[name]


def test_numbers_below_one_are_rejected():
    with pytest.raises(ArgumentError, match="^clients: "):
        methods_with_scaled_rates("asgd", clients=0)
    with pytest.raises(ArgumentError, match="^concurrency: "):
        methods_with_scaled_rates("asgd", clients=3, concurrency=0)


@pytest.mark.parametrize("clients", [10, 100, 1000])
def test_the_rate_of_ace_is_inversely_proportional_to_the_number_of_clients(clients):
    found, lines = rates("ace", clients=clients)
    tuned = methods(["ace"])[0].bind(range(30)).rule.rate
    assert found["ACE"](range(clients)).rate == pytest.approx(tuned * 30 / clients, rel=6e-3)
    assert len(lines) == 1
