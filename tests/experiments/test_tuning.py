"""Tests of learning-rate tuning: the line search, its use in comparisons, and its cache."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from manifoldagg.errors import ArgumentError, RuleError
from manifoldagg.experiments import tuning
from manifoldagg.experiments.compare import compare
from manifoldagg.experiments.registry import RULES, method, methods
from manifoldagg.experiments.tuning import Tuning, line_search, tail_accuracy, tune, with_rate
from manifoldagg.federated import clients as trainers
from manifoldagg.federated import rules
from manifoldagg.federated.schedules import Cosine
from manifoldagg.federated.staleness import Polynomial
from manifoldagg.simulation import Exponential, FederatedDataset, Method, iid_partition, run
from tests.simulation.custom import Plain, Signs
from tests.simulation.test_run import clusters

LOCAL = trainers.Local(epochs=1, rate=0.01)
SCORES = st.floats(0, 1)


def split(**changes):
    options = {"partition": iid_partition, "validation": 0.2, "seed": 100} | changes
    return FederatedDataset.split(clusters(), 4, **options)


@pytest.fixture(scope="module")
def federations():
    return [split(), split(seed=101)]


def searched(scores, **options):
    """Search over powers of two with these scores, in ascending order. Also return the rates that were evaluated."""
    asked = []
    middle = len(scores) // 2

    def score(rate):
        asked.append(rate)
        power = next(k for k in range(-middle, middle + 1) if 3 * 2.0**k == rate)
        return [scores[power + middle]]

    return line_search(score, 3.0, **options), asked


@given(st.lists(SCORES, min_size=11, max_size=11))
def test_line_search_ends_at_a_rate_no_worse_than_its_neighbours(scores):
    found, asked = searched(scores)
    means = {power: score for power, (score,) in found.scores.items()}
    assert means[found.best_power] == max(means.values())
    assert found.best_rate == 3 * 2.0**found.best_power
    assert {-1, 0, 1, *(power for power in (found.best_power - 1, found.best_power + 1) if abs(power) <= 5)} <= set(
        means
    )
    assert list(means) == list(range(min(means), max(means) + 1))
    assert len(asked) == len(set(asked)) == len(means)
    assert found.is_at_boundary == (abs(found.best_power) == 5)


@given(st.integers(-5, 5), st.lists(st.floats(1e-3, 1), min_size=11, max_size=11))
def test_line_search_finds_the_peak_of_unimodal_scores(peak, steps):
    height = [0.0] * 11
    for k in range(-5, 6):
        height[k + 5] = -sum(steps[min(k, peak) + 5 : max(k, peak) + 5])
    found, _ = searched([20 + value for value in height])
    assert found.best_power == peak


@pytest.mark.parametrize(
    ("scores", "best", "asked"),
    [
        ([0.5] * 11, 0, 3),
        ([0.0] * 11, -5, 7),  # If no rate learns, the search continues to lower rates.
        ([0, 0, 0, 0.3, 0, 0, 0, 0, 0, 0, 0], -2, 5),
        (
            [0, 0, 0, 0, 0.4, 0.3, 0.4, 0, 0, 0, 0],
            -1,
            4,
        ),  # Of two equally near rates, the search selects the lower one.
        ([0, 0, 0, 0, 0.1, 0.2, 0.4, 0.4, 0, 0, 0], 1, 4),
    ],
)
def test_line_search_breaks_ties_by_distance_to_the_start(scores, best, asked):
    found, calls = searched(scores)
    assert (found.best_power, len(calls)) == (best, asked)


def test_max_doublings_limits_the_line_search():
    found, _ = searched([float(k) for k in range(11)], max_doublings=2)
    assert (found.best_power, found.is_at_boundary) == (2, True)
    with pytest.raises(ArgumentError, match="max_doublings: expected an integer >= 1"):
        line_search(lambda rate: [0.0], 1.0, max_doublings=0)


def test_tune_scores_equal_those_of_run(federations):
    fedasync = method("fedasync:trainer.epochs=1")
    found = tune(fedasync, federations, num_updates=8, delays="exponential:mean=10", concurrency=3)
    for power, scores in found.scores.items():
        rated = replace(fedasync, rule=replace(fedasync.rule, rate=3 * 2.0**power))
        runs = [run(one, rated, num_updates=8, delays=Exponential(10.0), concurrency=3) for one in federations]
        assert list(scores) == [sum(one.accuracy[-2:]) / 2 for one in runs]


def test_tail_accuracy_averages_the_last_quarter_of_the_evaluations(federations):
    for rounds, every, counted in ((1, 1, 1), (3, 1, 1), (8, 1, 2), (8, 3, 1), (9, 2, 2)):
        found = run(
            federations[0], Method("FedAsync", rules.FedAsync(1.0), LOCAL), num_updates=rounds, eval_every=every
        )
        assert tail_accuracy(found) == pytest.approx(sum(found.accuracy[-counted:]) / counted, rel=1e-15)


@pytest.mark.parametrize("name", RULES)
def test_with_rate_changes_the_rate_of_every_rule(name):
    chosen = method(name)
    clients = range(6)
    start = tuning.find_rate(chosen.bind(clients).rule, chosen.rate_field)
    if name == "floco":
        assert start is None
        return
    assert start > 0
    changed = with_rate(chosen, start / 2)
    assert tuning.find_rate(changed.bind(clients).rule, changed.rate_field) == start / 2
    assert with_rate(changed, start).bind(clients).rule == with_rate(chosen, start).bind(clients).rule
    by_name = method(name, rate=start / 2)
    assert by_name.bind(clients).rule == changed.bind(clients).rule
    assert by_name.rate_field is None


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("fedasync:rate=2", None),
        ("fedasync:rate=cosine,rate.start=3,rate.end=0.1,rate.period=200", None),
        ("fedasync:trainer.rate=2", "rate"),
        ("momentum:rule.rate=2", None),
        ("momentum:rule=fedbuff,rule.size=3", "rule.rate"),
        ("momentum:rule=masfl", "rule.rate"),
        ("adamasfl:gamma=0.2", None),
        ("adamasfl:eta=0.2", "gamma"),
    ],
)
def test_explicit_rates_are_not_tuned(text, rate):
    assert method(text).rate_field == rate


def test_tuning_searches_the_start_of_a_schedule_without_one():
    chosen = method("fedasync:rate=cosine,rate.end=0,rate.period=200")
    assert chosen.rate_field == "rate.start"
    assert chosen.rule.rate == Cosine(method("fedasync").rule.rate, 0, 200)
    assert with_rate(chosen, 0.7).rule.rate == Cosine(0.7, 0, 200)
    inner = method("momentum:rule=fedbuff,rule.rate=cosine,rule.rate.end=0,rule.rate.period=40")
    assert with_rate(inner, 0.7).rule.rule.rate == Cosine(0.7, 0, 40)


def test_tuning_is_independent_of_the_order_of_methods_and_the_executor():
    names = [
        "fedasync:trainer.epochs=1",
        "floco:cohort=2,epochs=1",
        "fedgs:rate=2,trainer.epochs=1",
        "momentum:trainer.epochs=1",
    ]
    options = {"clients": 4, "num_updates": 2, "seeds": 1, "partition": "iid", "tuning": Tuning(seeds=(100,))}
    found = compare(clusters(), methods(names), **options)
    with ThreadPoolExecutor(2) as executor:
        other = compare(clusters(), methods(names[::-1]), **options, executor=executor)
    assert found.runs == other.runs
    told = found.settings["tuning"]
    assert json.loads(json.dumps(told)) == other.settings["tuning"]
    assert (told["seeds"], told["validation"]) == ([100], 0.2)
    assert told["methods"]["FLOCO(cohort=2, epochs=1)"] is None
    assert told["methods"]["FedGS(rate=2, trainer.epochs=1)"] == "by hand"
    alone = tune(method(names[0]), [split()], num_updates=2)
    assert told["methods"]["FedAsync(trainer.epochs=1)"] == alone.to_dict()
    assert f"rate={alone.best_rate}" in found.settings["methods"]["FedAsync(trainer.epochs=1)"]["rule"]
    assert compare(clusters(), methods(names), **options | {"tuning": None}).settings["tuning"] is None


def test_tuning_uses_the_validation_fraction_of_the_comparison():
    options = {"clients": 4, "num_updates": 1, "seeds": 1, "partition": "iid", "validation": 0.4}
    found = compare(clusters(), [method("fedasync")], **options, tuning=Tuning(seeds=(100,)))
    assert found.settings["tuning"]["validation"] == 0.4
    alone = tune(method("fedasync"), [split(validation=0.4)], num_updates=1)
    assert found.settings["tuning"]["methods"]["FedAsync"] == alone.to_dict()


def test_length_shortens_the_tuning_runs():
    options = {"clients": 4, "num_updates": 5, "seeds": 1, "partition": "iid", "delays": "exponential:mean=10"}
    search = {"seeds": (100,), "length": 0.6}
    found = compare(clusters(), [method("fedasync")], **options, tuning=Tuning(**search), duration=20.0)
    assert found.settings["tuning"]["length"] == 0.6
    alone = tune(method("fedasync"), [split()], num_updates=3, duration=12.0, delays="exponential:mean=10")
    assert found.settings["tuning"]["methods"]["FedAsync"] == alone.to_dict()
    with pytest.raises(ArgumentError, match="tuning: length: expected a finite number > 0 and <= 1, got 1.5"):
        compare(clusters(), [method("fedasync")], **options, tuning=Tuning(seeds=(100,), length=1.5))


@dataclass(frozen=True)
class Picky(rules.FedAsync):
    """A rule that rejects rates above 1 and raises an error in `step` for rates below 1."""

    def __post_init__(self):
        super().__post_init__()
        if self.rate > 1:
            raise ArgumentError("rate: expected at most 1")

    def step(self, *arguments, **options):
        if self.rate < 1:
            raise RuleError("rate: too low")
        return super().step(*arguments, **options)


def test_a_rate_that_fails_scores_zero(federations):
    found = tune(Method("Picky", Picky(1.0), LOCAL), federations, num_updates=3)
    assert found.scores[-1] == found.scores[1] == [0.0, 0.0]
    assert (found.best_rate, min(found.scores[0]) > 0) == (1.0, True)


def test_a_cached_search_is_not_repeated(federations, tmp_path, monkeypatch):
    fedasync = Method("FedAsync(a/b)", rules.FedAsync(2.0, weighted=True), LOCAL)
    plain = tune(fedasync, federations, num_updates=6)
    first = tune(fedasync, federations, num_updates=6, cache=tmp_path / "new" / "tuned")
    (file,) = (tmp_path / "new" / "tuned").iterdir()
    assert file.name.startswith("FedAsync-")
    monkeypatch.setattr(tuning, "run", None)
    assert tune(fedasync, federations, num_updates=6, cache=tmp_path / "new" / "tuned") == first == plain


@pytest.mark.parametrize("rounds", [1, 7, 30])
def test_an_interrupted_search_resumes_from_its_cache(rounds, federations, tmp_path, monkeypatch):
    fedasync = Method("FedAsync", rules.FedAsync(2.0, weighted=True), LOCAL)
    left = iter(range(rounds))
    done = []

    def interrupt(name, seed):
        if next(left, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(fedasync, federations, num_updates=6, cache=tmp_path, progress=interrupt)
    counted = partial(tune, fedasync, federations, num_updates=6, progress=lambda name, seed: done.append((name, seed)))
    found = counted(cache=tmp_path)
    again = len(done)
    assert counted() == found
    assert again == len(done) - again - rounds // 6 * 6
    assert {seed for _, seed in done} == {100, 101}
    assert {name for name, _ in done} >= {"FedAsync, rate 1", "FedAsync, rate 2", "FedAsync, rate 4"}


CHANGES = {
    "num_updates": {"num_updates": 2},
    "task_cost": {"task_cost": "trainer"},
    "concurrency": {"concurrency": 2},
    "scheduler": {"scheduler": "priority:workers=1"},
    "delays": {"delays": "exponential:mean=10"},
    "availability": {"availability": "file:changes.csv"},
    "rate": {"method": Method("FedAsync", rules.FedAsync(1.0, weighted=True), LOCAL)},
    "rule": {"method": Method("FedAsync", rules.FedAsync(2.0, staleness=Polynomial(0.5), weighted=True), LOCAL)},
    "trainer": {"method": Method("FedAsync", rules.FedAsync(2.0, weighted=True), replace(LOCAL, rate=0.02))},
    "seeds": {"federations": [split(seed=102)]},
    "more seeds": {"federations": [split(), split(seed=102)]},
    "partition": {"partition": "other"},
    "validation": {"federations": [split(validation=0.3)]},
    "holdout": {"federations": [split(holdout=0.4)]},
    "batch": {"federations": [split(batch=8)]},
    "data": {"federations": [replace(split(), dataset=replace(clusters(), inputs=clusters().inputs * 2))]},
    "model": {"federations": [replace(split(), dataset=replace(clusters(), model=lambda: nn.Linear(2, 3)))]},
}
CHANGES["partition"] = {
    "federations": [
        split(partition=lambda labels, clients, generator: iid_partition(labels[:100], clients, generator=generator))
    ]
}


def test_different_searches_have_different_cache_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = tmp_path / "changes.csv"
    changes.write_text("time,client,kind\n900,1,leave\n")
    plain = {
        "method": Method("FedAsync", rules.FedAsync(2.0, weighted=True), LOCAL),
        "federations": [split()],
        "num_updates": 1,
    }

    def files(**options):
        merged = plain | options
        tune(merged.pop("method"), merged.pop("federations"), **merged, cache=tmp_path / "tuned")
        return set((tmp_path / "tuned").iterdir())

    seen = files()
    for name, change in CHANGES.items():
        now = files(**change)
        assert len(now) == len(seen) + 1, name
        assert files(**change) == now
        seen = now
    changes.write_text("time,client,kind\n901,1,leave\n")
    assert len(files(**CHANGES["availability"])) == len(seen) + 1
    monkeypatch.setattr("manifoldagg.experiments.tuning.__version__", "9")
    assert len(files()) == len(seen) + 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-20],
        lambda text: "[]",
        lambda text: text.replace('"tail_accuracy"', '"early"'),
        lambda text: text.replace('"num_updates": 1', '"num_updates": 2'),
        lambda text: json.dumps(json.loads(text) | {"tail_accuracy": {"2.0": {"100": 7.0}}}),
        lambda text: json.dumps(json.loads(text) | {"tail_accuracy": {"2.0": {"100": "much"}}}),
        lambda text: json.dumps(json.loads(text) | {"tail_accuracy": {"2.0": 0.5}}),
    ],
    ids=["empty", "cut", "list", "key", "other", "number", "word", "tree"],
)
def test_damaged_cache_files_are_rejected(damage, federations, tmp_path):
    fedasync = Method("FedAsync", rules.FedAsync(2.0, weighted=True), LOCAL)
    tune(fedasync, federations[:1], num_updates=1, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(damage(file.read_text()))
    with pytest.raises(ArgumentError, match=r"^cache: .*FedAsync-.*json: expected the file of a search; delete it"):
        tune(fedasync, federations[:1], num_updates=1, cache=tmp_path)


def test_the_rate_of_a_user_rule_is_tuned():
    names = [f"tests.simulation.custom:{name}" for name in ("Signs", "slow", "Plain", "bound", "Signs:rate=1")]
    chosen = compare(clusters(), methods(names), clients=4, num_updates=2, seeds=1, tuning=Tuning(seeds=(100,)))
    told = chosen.settings["tuning"]["methods"]
    starts = {name: one["start"] if isinstance(one, dict) else one for name, one in told.items()}
    assert starts == {"Signs": 0.1, "slow": 0.05, "Plain": None, "Bound": 0.25, "Signs(rate=1)": "by hand"}
    for name in ("Signs", "slow", "Bound"):
        assert f"={told[name]['chosen']}" in chosen.settings["methods"][name]["rule"]


def test_a_rate_that_a_user_rule_rejects_scores_zero(federations):
    assert tune(Method("Signs", Signs(1.0), LOCAL), federations[:1], num_updates=3).scores[1] == [0.0]


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda path: tune(Method("Mine", rules.FedGS(), LOCAL, "rat"), [split()], num_updates=3),
            "methods: Mine: rate: expected one of .*; got 'rat': did you mean rate",
        ),
        (
            lambda path: tune(Method("Mine", rules.FedGS(), LOCAL, "rule.rate"), [split()], num_updates=3),
            "methods: Mine: rate: expected one of .*; got 'rule'",
        ),
        (
            lambda path: tune(Method("Mine", Plain(), LOCAL, "speed"), [split()], num_updates=3),
            "methods: Mine: rate: expected a dataclass with a field 'speed', got Plain",
        ),
        (
            lambda path: with_rate(Method("Mine", rules.FedGS(), LOCAL, "rat"), 2.0),
            "rate: expected one of .*; got 'rat'",
        ),
        (
            lambda path: tune("fedgs", [split()], num_updates=3),
            r"method: expected a Method, got 'fedgs'; write method\('fedgs'\)",
        ),
        (
            lambda path: tune(method("fedgs"), split(), num_updates=3),
            "federations: expected a list of FederatedDatasets, got FederatedDataset",
        ),
        (
            lambda path: tune(method("fedgs"), [clusters()], num_updates=3),
            r"federations\[0\]: expected a FederatedDataset, got LabelledDataset; write FederatedDataset.split\(",
        ),
        (lambda path: tune(method("fedgs"), [], num_updates=3), "federations: expected at least one FederatedDataset"),
        (lambda path: tune(method("fedgs"), [split()], num_updates=0), "num_updates: expected"),
        (
            lambda path: tune(method("fedavg"), [split()], num_updates=3, concurrency=2),
            "methods: FedAvg: concurrency: expected None",
        ),
        (lambda path: tune(method("fedgs"), [split()], num_updates=3, delays="gauss"), "did you mean gaussian"),
        (
            lambda path: tune(method("fedgs"), [split()], num_updates=3, delays=Exponential(1.0), cache=path),
            r"cache: expected a name for delays, as functions cannot be identified; got Exponential\(",
        ),
        (
            lambda path: tune(method("fedgs"), [split()], num_updates=3, cache=path / "file" / "cache"),
            "cache: .* cannot be written: ",
        ),
        (lambda path: with_rate(method("fedgs:rate=2"), 2.0), "method: expected a method with a rate, got FedGS"),
        (
            lambda path: compare(
                clusters(), [method("fedgs")], clients=4, num_updates=2, seeds=2, tuning=Tuning(seeds=(1,))
            ),
            r"tuning: seeds: expected seeds that the comparison does not use, got \[1\]",
        ),
        (
            lambda path: compare(clusters(), [method("fedgs")], clients=4, num_updates=2, tuning=Tuning(seeds=())),
            "tuning: seeds: expected at least one seed",
        ),
        (
            lambda path: compare(clusters(), [method("fedgs")], clients=4, num_updates=2, tuning=Tuning(validation=1)),
            "tuning: validation: expected a finite number",
        ),
    ],
)
def test_invalid_tuning_arguments_are_rejected(call, words, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match=words):
        call(tmp_path)
