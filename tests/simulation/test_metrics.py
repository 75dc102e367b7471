"""Metrics and criteria of data sets: their formulas, and runs on data sets whose samples have several labels."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from sklearn.datasets import make_multilabel_classification
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from manifoldagg.errors import ArgumentError
from manifoldagg.experiments import load_dataset
from manifoldagg.experiments.compare import compare
from manifoldagg.experiments.registry import method, methods
from manifoldagg.experiments.report import read_report, write_report
from manifoldagg.federated import CheckpointPolicy, clients, rules
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.simulation import (
    FederatedDataset,
    LabelledDataset,
    Method,
    Metric,
    accuracy,
    dirichlet_partition,
    gini,
    iid_partition,
    macro_auprc,
    macro_auroc,
    processes,
    run,
    theil,
)
from manifoldagg.simulation.metadata import run_metadata
from tests.simulation.test_resume import Stop, stopping

pytestmark = pytest.mark.filterwarnings("ignore::manifoldagg.errors.StabilityWarning")
SHAPE = st.tuples(st.integers(1, 12), st.integers(1, 4))


def linear():
    return nn.Linear(12, 5)


def label_sets(samples=300, **fields):
    """A synthetic data set whose samples have two of five labels on average."""
    inputs, labels = make_multilabel_classification(samples, 12, n_classes=5, random_state=0)
    named = {"AUROC": macro_auroc, "AUPRC": macro_auprc}
    options = {"criterion": binary_cross_entropy_with_logits, "metrics": named, "target": 0.8} | fields
    numbers = torch.from_numpy(inputs).float() / 10
    return LabelledDataset("sets", numbers, torch.from_numpy(labels).float(), linear, **options)


def split(dataset=None, seed=0):
    return FederatedDataset.split(dataset or label_sets(), 5, partition=iid_partition, seed=seed)


@st.composite
def scored(draw):
    """Scores with ties, and labels of the same shape."""
    shape = draw(SHAPE)
    scores = draw(arrays.arrays(np.float32, shape, elements=st.sampled_from([-2.0, -0.5, 0.0, 0.25, 3.0])))
    labels = draw(arrays.arrays(np.float32, shape, elements=st.sampled_from([0.0, 1.0])))
    return torch.from_numpy(scores), torch.from_numpy(labels)


def auroc(scores, labels):
    """The probability that a sample with the label has a larger score than one without. A tie counts one half."""
    pairs = [(a > b) + (a == b) / 2 for a in scores[labels == 1] for b in scores[labels == 0]]
    return math.fsum(map(float, pairs)) / len(pairs)


def average_precision(scores, labels):
    """The sum over thresholds of the precision times the increase of the recall."""
    total, before = [], 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        chosen = scores >= threshold
        recall = float(labels[chosen].sum() / labels.sum())
        total.append((recall - before) * float(labels[chosen].mean()))
        before = recall
    return math.fsum(total)


@pytest.mark.parametrize(("metric", "formula"), [(macro_auroc, auroc), (macro_auprc, average_precision)])
@given(scored())
def test_macro_metrics_are_means_over_labels_with_both_values(metric, formula, sample):
    scores, labels = (part.numpy() for part in sample)
    mixed = [i for i in range(labels.shape[1]) if 0 < labels[:, i].sum() < len(labels)]
    found = metric(*sample)
    if not mixed:
        assert math.isnan(found)
    else:
        expected = [formula(*(part[:, i].astype(np.float64) for part in (scores, labels))) for i in mixed]
        assert found == pytest.approx(math.fsum(expected) / len(mixed), abs=1e-12)


@given(scored())
def test_macro_metrics_depend_only_on_the_order_of_scores(sample):
    scores, labels = sample
    for metric in (macro_auroc, macro_auprc):
        assert metric(scores, labels) == pytest.approx(metric(scores.double().exp() * 3 - 1, labels), nan_ok=True)


@given(scored(), st.integers(1, 12))
def test_statistics_of_batches_are_the_statistics_of_all_samples(sample, size):
    scores, labels = sample
    for metric in (macro_auroc, accuracy):
        targets = labels if metric is macro_auroc else labels.argmax(1)
        parts = [metric.statistics(*pair) for pair in zip(scores.split(size), targets.split(size), strict=True)]
        assert torch.equal(torch.cat(parts), metric.statistics(scores, targets))


def test_scores_that_are_not_finite_are_the_lowest_or_the_highest():
    labels = torch.tensor([[0.0], [1.0], [0.0], [1.0]])
    nan, inf = math.nan, math.inf
    assert macro_auroc(torch.tensor([[nan], [0.0], [-1.0], [inf]]), labels) == 1
    assert macro_auroc(torch.tensor([[inf], [0.0], [1.0], [nan]]), labels) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert macro_auroc(torch.full((4, 1), nan), labels) == 0.5


def test_accuracy_of_sequences_is_the_mean_fraction_of_correct_tokens():
    scores = nn.functional.one_hot(torch.tensor([[0, 1], [2, 2]]), 3).movedim(-1, 1).float()
    assert accuracy(scores, torch.tensor([[0, 1], [2, 0]])) == 0.75


def evaluated(federation, model):
    """The scores and the labels of the held-out samples of each client."""
    with torch.no_grad():
        parts = [part for part in federation.held_out if len(part)]
        dataset = federation.dataset
        return [(model(dataset.inputs[part]), dataset.labels[part]) for part in parts]


def test_a_run_records_the_metrics_of_its_data_set():
    federation, models = split(), []
    found = run(federation, Method("FedAsync", rules.FedAsync(0.5), clients.Local(epochs=4, rate=0.03)), num_updates=60,
                eval_every=20, on_update=lambda event: models.append(event.message))  # fmt: skip
    row, model = found.evaluations[0], federation.model()
    parts = evaluated(federation, model)
    scores, labels = (torch.cat([part[i] for part in parts]) for i in range(2))
    assert row.accuracy == row.metrics["AUROC"] == pytest.approx(macro_auroc(scores, labels), abs=1e-12)
    assert row.metrics["AUPRC"] == pytest.approx(macro_auprc(scores, labels), abs=1e-12)
    assert row.loss == pytest.approx(float(binary_cross_entropy_with_logits(scores, labels)), rel=1e-6)
    by_client = [macro_auroc(*part) for part in parts]
    assert row.gini == pytest.approx(gini(by_client), abs=1e-12)
    assert row.theil == pytest.approx(theil(by_client), abs=1e-12)
    assert found.evaluations[-1].metrics["AUROC"] > row.metrics["AUROC"] + 0.1
    assert found.evaluations[-1].metrics["AUPRC"] > row.metrics["AUPRC"] + 0.1


def test_local_training_minimises_the_criterion_of_the_data_set():
    """One gradient step on all samples of one client is a step along the gradient of the criterion."""

    def doubled(scores, labels, *, reduction="mean"):
        return 2 * binary_cross_entropy_with_logits(scores, labels, reduction=reduction)

    sent = []
    for criterion in (binary_cross_entropy_with_logits, doubled):
        dataset = label_sets(criterion=criterion)
        federation = FederatedDataset.split(dataset, 1, partition=iid_partition, seed=0, batch=1_000)
        trainer = clients.Local(steps=1, optimizer=torch.optim.SGD, rate=0.1, proximal=0.0)
        events = []
        run(federation, Method("FedAsync", rules.FedAsync(1.0), trainer), num_updates=1, on_update=events.append)
        sent.append(events[0].payload.points[0] - events[0].message.start)
    model = federation.model()
    index = federation.train[0]
    binary_cross_entropy_with_logits(model(dataset.inputs[index]), dataset.labels[index]).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    space = ParameterSpace.of(model)
    assert space.point(model).shape == gradient.shape
    torch.testing.assert_close(sent[0], -0.1 * gradient, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(sent[1], 2 * sent[0], rtol=1e-4, atol=1e-7)


def test_worker_processes_return_the_same_bits():
    given = {"num_updates": 8, "eval_every": 4}
    fedasync = method("fedasync:rate=0.5")
    assert run(split(), fedasync, **given, executor=processes(2)) == run(split(), fedasync, **given)


def test_an_interrupted_run_resumes_with_the_same_metrics(tmp_path):
    policy = CheckpointPolicy(tmp_path / "run", every_updates=1)
    fedasync = method("fedasync:rate=0.5")
    with pytest.raises(Stop):
        run(split(), fedasync, num_updates=8, checkpoint=policy, progress=stopping(5))
    found = run(split(), fedasync, num_updates=8, checkpoint=policy, resume=True)
    assert found == run(split(), fedasync, num_updates=8)
    assert [list(row.metrics) for row in found.evaluations] == [["AUROC", "AUPRC"]] * 9


def test_clients_without_a_defined_metric_are_omitted():
    """A client whose held-out samples have all labels has no AUROC."""
    dataset = label_sets(samples=60)
    labels = dataset.labels.clone()
    labels[:12] = 1.0
    parts = [np.arange(12), np.arange(12, 60)]
    dataset = LabelledDataset(
        "sets", dataset.inputs, labels, linear, 0.8, criterion=dataset.criterion, metrics=dataset.metrics
    )
    federation = FederatedDataset.split(dataset, 2, partition=lambda *_, **__: parts, seed=0, holdout=0.5)
    found = run(federation, method("fedasync:rate=0.5"), num_updates=4, eval_every=2, eval_starts=True)
    assert len(found.client_accuracy) == 1
    assert found.gini == found.theil == 0
    assert {row.client for row in found.starts} == {1}


def test_a_metric_that_is_undefined_for_all_samples_is_an_error():
    dataset = label_sets(samples=20)
    dataset = LabelledDataset(
        "sets", dataset.inputs, torch.ones(20, 5), linear, 0.8, criterion=dataset.criterion, metrics=dataset.metrics
    )
    with pytest.raises(ArgumentError, match="metrics: expected AUROC to be defined on the held-out samples, got NaN"):
        run(split(dataset), method("fedasync:rate=0.5"), num_updates=1)


def test_other_metrics_of_one_class_per_sample():
    """A data set with one class per sample can have further metrics, which leave the accuracy unchanged."""
    digits = load_dataset("digits", "mlp:hidden=4")
    top = Metric(_in_top_two, lambda values: float(values.mean()))
    named = LabelledDataset(
        "digits", digits.inputs, digits.labels, digits.model, 0.8, metrics={"accuracy": accuracy, "top-2": top}
    )
    plain = LabelledDataset("digits", digits.inputs, digits.labels, digits.model, 0.8)
    assert plain.criterion is cross_entropy
    one, other = (run(split(data), method("fedasync:rate=0.5"), num_updates=6, eval_every=3) for data in (plain, named))
    assert one.accuracy == other.accuracy
    assert all(row.metrics is None for row in one.evaluations)
    assert all(row.metrics["top-2"] >= row.metrics["accuracy"] == row.accuracy for row in other.evaluations)


def _in_top_two(scores, labels):
    return (scores.topk(2, 1).indices == labels[:, None]).any(1).double()


def test_a_partition_by_class_receives_the_first_label():
    dataset = label_sets()
    expected = [row.index(1.0) if 1.0 in row else 5 for row in dataset.labels.tolist()]
    assert dataset.classes.tolist() == expected
    assert dataset.signature.classes == 5
    FederatedDataset.split(dataset, 3, partition=lambda labels, clients, generator: dirichlet_partition(
        labels, clients, concentration=0.5, generator=generator), seed=0)  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"labels": torch.full((4, 2), 0.5)}, r"labels: expected zeros and ones of shape \(4, labels\), got shape"),
        ({"labels": torch.ones(3, 2)}, r"labels: expected zeros and ones of shape \(4, labels\), got shape \(3, 2\)"),
        ({"labels": torch.ones(4)}, "labels: expected int64"),
        ({"labels": torch.tensor([0, 1, -1, 0])}, "labels: expected classes >= 0, got -1"),
        ({"inputs": torch.zeros(0, 12), "labels": torch.zeros(0, dtype=torch.int64)}, "inputs: expected at least one"),
        ({"metrics": {}}, "metrics: expected at least one metric by name"),
        ({"metrics": ["accuracy"]}, "metrics: expected"),
        ({"user_ids": [0, 1, 2, 3]}, "user_ids: expected"),
        ({"criterion": None}, "criterion: expected a function such as"),
        ({"criterion": torch.nn.CrossEntropyLoss()}, "criterion: expected a function such as"),
    ],
)
@pytest.mark.usefixtures("as_shipped")
def test_invalid_label_sets_and_metrics_are_errors(fields, message):
    given = {"inputs": torch.zeros(4, 12), "labels": torch.ones(4, 5)} | fields
    with pytest.raises(ArgumentError, match=message):
        LabelledDataset("sets", model=linear, target=0.8, **given)


def test_metadata_contain_the_criterion_and_the_metrics_of_a_data_set():
    """A checkpoint of another criterion cannot be resumed. Data sets with defaults have the metadata of earlier versions."""
    plain = load_dataset("digits", "mlp:hidden=4")
    found = run_metadata(split(plain), method("fedasync"))
    assert (found["criterion"], found["metrics"]) == (None, None)
    found = run_metadata(split(), method("fedasync"))
    assert found["criterion"] == "binary_cross_entropy_with_logits"
    assert "_macro_auroc" in found["metrics"]


def test_a_report_names_the_metrics(tmp_path):
    found = compare(label_sets(), methods("fedasync:rate=0.5"), clients=5, num_updates=4, seeds=2)
    row = found.summary()["FedAsync(rate=0.5)"]
    last = [seeds.evaluations[-1].metrics for seeds in found.runs["FedAsync(rate=0.5)"]]
    assert row["final_mean"] == pytest.approx(np.mean([one["AUROC"] for one in last]))
    assert row["AUPRC_mean"] == pytest.approx(np.mean([one["AUPRC"] for one in last]))
    assert "AUROC_mean" not in row
    write_report(found, tmp_path / "report")
    stored = read_report(tmp_path / "report")
    assert stored["settings"]["metrics"] == ["AUROC", "AUPRC"]
    assert stored["log"][-1]["metrics"] == last[-1]
