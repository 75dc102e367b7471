"""Start models on their own clients' held-out samples, against evaluations of the models that clients receive."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch.nn.functional import cross_entropy

from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.compare import compare
from manifoldagg.experiments.plots import draw_starts
from manifoldagg.experiments.registry import method, methods
from manifoldagg.experiments.report import read_report, write_report
from manifoldagg.federated import CheckpointPolicy
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.simulation import Exponential, FederatedDataset, iid_partition, run
from manifoldagg.simulation.cost import StartEvaluation
from tests.simulation.executors import runners
from tests.simulation.test_resume import Stop, stopping
from tests.simulation.test_run import clusters

pytestmark = pytest.mark.filterwarnings("ignore::manifoldagg.errors.StabilityWarning")
NORMALISED = runners.federation()
PLAIN = FederatedDataset.split(clusters(), 5, partition=iid_partition, seed=0)


def metrics_of(federation, message, client):
    """Accuracy and loss of the model in a message, in one forward pass of a new model."""
    model = federation.model().eval()
    model.load_state_dict(ParameterSpace.of(model).state_dict(message.start, message.buffers or None))
    index = torch.from_numpy(federation.held_out[client])
    labels = federation.dataset.labels[index]
    with torch.no_grad():
        scores = model(federation.dataset.inputs[index])
    return float((scores.argmax(1) == labels).double().mean()), float(cross_entropy(scores, labels))


@pytest.mark.parametrize("federation", [PLAIN, NORMALISED], ids=["plain", "batch norm"])
@pytest.mark.parametrize("name", ["fedasync", "orthofl"])
def test_starts_are_the_models_that_clients_receive(name, federation):
    events = []
    found = run(federation, method(name), num_updates=12, eval_every=5, eval_starts=True, on_update=events.append)
    for client in federation.trainable_clients:
        starts = [row for row in found.starts if row.client == client]
        own = [event for event in events if event.client == client]
        # The last task of a client is still in flight.
        assert len(own) <= len(starts) <= len(own) + 1
        for row, event in zip(starts, own, strict=False):
            accuracy, loss = metrics_of(federation, event.message, client)
            # Batches of other sizes change the rounding of float32, and a tie may then have another winner.
            assert row.accuracy == pytest.approx(accuracy, abs=1e-12)
            assert row.loss == pytest.approx(loss, rel=1e-5)


def test_starts_have_the_times_and_updates_of_their_tasks():
    found = run(PLAIN, method("fedasync"), num_updates=12, eval_starts=True, delays=Exponential(2.0))
    starts = {(row.client, row.time): row.updates for row in found.starts}
    for task in found.trace:
        before = [one for one in found.trace if one.finished <= task.dispatched]
        assert starts[task.client, task.dispatched] == len(before)
    assert len(found.starts) == 5 + 11


def test_clients_of_one_cohort_start_from_the_evaluated_model():
    """The mean over clients, weighted by held-out samples, is the accuracy of the server's model."""
    found = run(PLAIN, method("fedavg:cohort=5"), num_updates=15, eval_starts=True)
    weights = [len(part) for part in PLAIN.held_out]
    accuracy = dict(zip(found.evaluated_at, found.accuracy, strict=True))
    for updates in (0, 5, 10):
        by_client = {row.client: row.accuracy for row in found.starts if row.updates == updates}
        mean = np.average([by_client[client] for client in range(5)], weights=weights)
        assert mean == pytest.approx(accuracy[updates], rel=1e-12)


def test_the_option_changes_nothing_else():
    for name in ("fedasync", "orthofl"):
        plain, evaluated = (run(NORMALISED, method(name), num_updates=9, eval_starts=on) for on in (False, True))
        assert plain.starts == []
        assert (plain.evaluations, plain.trace, plain.client_accuracy) == (
            evaluated.evaluations,
            evaluated.trace,
            evaluated.client_accuracy,
        )


def test_clients_without_held_out_samples_have_no_entries():
    federation = FederatedDataset(
        PLAIN.dataset, PLAIN.train, [PLAIN.held_out[0], *[PLAIN.held_out[0][:0]] * 4], PLAIN.batch, PLAIN.seed
    )
    found = run(federation, method("fedasync"), num_updates=10, eval_starts=True)
    assert {row.client for row in found.starts} == {0}


def test_executors_and_resumed_runs_find_the_same_starts(tmp_path):
    options = {"num_updates": 12, "eval_every": 5, "eval_starts": True}
    whole = run(NORMALISED, method("orthofl"), **options)
    with ThreadPoolExecutor(2) as pool:
        assert run(NORMALISED, method("orthofl"), executor=pool, **options) == whole
    options |= {"checkpoint": CheckpointPolicy(tmp_path / "run", every_updates=2, keep=1), "resume": True}
    for stop in (3, 8):
        with pytest.raises(Stop):
            run(NORMALISED, method("orthofl"), progress=stopping(stop), **options)
    assert run(NORMALISED, method("orthofl"), **options) == whole


LIKE = {"clients": 5, "num_updates": 8, "seeds": 2, "eval_every": 4}


def test_a_comparison_records_starts_and_goes_on_with_them(tmp_path):
    def compared(**options):
        return compare(clusters(), methods("fedasync,orthofl"), **LIKE, **options)

    found = compared(eval_starts=True)
    assert found.settings["eval_starts"] is True
    assert "eval_starts" not in compared().settings
    assert compared().log() == found.log()
    for name, runs in found.runs.items():
        for one, saved in zip(runs, found.results()["methods"][name]["runs"], strict=True):
            columns = saved["starts"]
            assert [StartEvaluation(*row) for row in zip(*columns.values(), strict=True)] == one.starts
            assert list(columns) == ["client", "updates", "time", "accuracy", "loss"]
    folder = tmp_path / "some.unfinished"
    stop = stopping(13)
    with pytest.raises(Stop):
        compared(eval_starts=True, folder=folder, progress=lambda *_: stop())
    again = compared(eval_starts=True, folder=folder, resume=True)
    assert again == found
    assert json.dumps(again.results()) == json.dumps(found.results())
    files = write_report(found, tmp_path / "report")
    assert "starts.png" in [file.name for file in files]
    assert read_report(tmp_path / "report")["methods"]["OrthoFL"]["runs"][0]["starts"]["client"]
    assert "starts.png" not in [file.name for file in write_report(compared(), tmp_path / "report")]


def test_the_figure_shows_the_clients_with_the_most_models(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: figures.append(figure))
    counts = {0: 1, 1: 3, 2: 3, 3: 2}
    starts = {
        name: [
            StartEvaluation(client, i, float(i), 0.1 * (i + shift), None if i == 1 else 1.0)
            for client, count in counts.items()
            for i in range(count)
        ]
        for name, shift in (("FedAsync", 1), ("OrthoFL", 2))
    }
    draw_starts(tmp_path / "starts.png", starts, title="clusters")
    (figure,) = figures
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == [f"client {client}: {what}" for client in (1, 2, 3) for what in ("accuracy, %", "loss")]
    accuracy, loss = figure.axes[:2]
    assert [line.get_xdata().tolist() for line in accuracy.lines] == [[1, 2, 3]] * 2
    assert accuracy.lines[1].get_ydata().tolist() == pytest.approx([20.0, 30.0, 40.0])
    assert np.isnan(loss.lines[0].get_ydata()).tolist() == [False, True, False]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(starts)


@pytest.mark.usefixtures("as_shipped")
def test_the_option_is_a_bool():
    with pytest.raises(ArgumentError, match="eval_starts: expected a bool"):
        run(PLAIN, method("fedasync"), num_updates=2, eval_starts=1)
