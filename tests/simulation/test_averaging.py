"""Runs with a weight average: its metrics, its BatchNorm statistics, and the same bits for any executor and resume."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from manifoldagg.averaging import SWA
from manifoldagg.curves import refresh_buffers
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.registry import method
from manifoldagg.federated import CheckpointPolicy
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.simulation import processes, run
from manifoldagg.simulation.evaluation import Evaluator
from tests.simulation.executors.runners import METHODS, federation

pytestmark = pytest.mark.filterwarnings("ignore::manifoldagg.errors.StabilityWarning")
UPDATES = 8
LATE = partial(SWA, start=3, cycle=2)


class Versions:
    """An average that stores every version, and whose value is the mean of the versions 4 and 6."""

    def __init__(self):
        self.models = {}

    @property
    def average(self):
        chosen = [self.models[version] for version in (4, 6) if version in self.models]
        return torch.stack(chosen).double().mean(0).float() if chosen else None

    def update(self, version, model):
        self.models[version] = model.clone()

    def state(self):
        return dict(self.models)

    def load(self, state):
        self.models = dict(state)


def without_average(result):
    rows = [replace(row, average_accuracy=None, average_loss=None) for row in result.evaluations]
    return replace(result, evaluations=rows)


def test_each_evaluation_contains_the_metrics_of_the_average():
    given = federation()
    averaging = SWA(ParameterSpace.of(given.model()), start=3, cycle=2)
    found = run(given, METHODS["fedasync"], num_updates=UPDATES, averaging=averaging)
    assert found.average_accuracy[:4] == [None] * 4
    assert None not in found.average_accuracy[4:]
    versions = Versions()
    same = run(given, METHODS["fedasync"], num_updates=7, averaging=versions)
    assert same.average_accuracy[7] == found.average_accuracy[7]
    assert same.evaluations[7].average_loss == pytest.approx(found.evaluations[7].average_loss, rel=1e-5)
    # Versions 4 and 5 have the same average, and version 6 changes it.
    losses = [row.average_loss for row in found.evaluations]
    assert losses[4] != losses[6] != losses[8]


def test_batchnorm_statistics_of_the_average_are_those_of_the_clients_training_samples():
    given = federation()
    versions = Versions()
    found = run(given, METHODS["fedasync"], num_updates=6, eval_every=6, averaging=versions)
    model = given.model()
    space = ParameterSpace.of(model)
    inputs = given.dataset.inputs[torch.from_numpy(np.concatenate(given.train))]
    buffers = refresh_buffers(space, model, versions.average, [inputs])
    metrics = Evaluator(given).evaluate(space.state_dict(versions.average, buffers))
    assert found.evaluations[-1].average_loss == float(metrics.loss.mean())
    stale = Evaluator(given).evaluate(space.state_dict(versions.average, space.buffers(model)))
    assert found.evaluations[-1].average_loss != float(stale.loss.mean())


@pytest.mark.parametrize("name", ["fedasync", "fedbuff", "asyncbezier", "asynccurve:periodic=3", "fedavg:cohort=2"])
def test_an_average_does_not_change_the_run_and_resumes_bit_for_bit(name, tmp_path):
    given, what = federation(), method(name)
    expected = run(given, what, num_updates=UPDATES, averaging=LATE)
    assert without_average(expected) == run(given, what, num_updates=UPDATES)
    policy = CheckpointPolicy(tmp_path / "run", every_updates=1, keep=1)
    for stop in (3, 6):
        calls = iter(range(stop - 1))

        def interrupt(calls=calls):
            if next(calls, None) is None:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(given, what, num_updates=UPDATES, averaging=LATE, checkpoint=policy, resume=True, progress=interrupt)
    assert run(given, what, num_updates=UPDATES, averaging=LATE, checkpoint=policy, resume=True) == expected


@pytest.mark.parametrize("executor", [partial(ThreadPoolExecutor, 2), processes(2)], ids=["threads", "processes"])
def test_every_executor_gives_the_same_average(executor):
    expected = run(federation(), METHODS["fedasync"], num_updates=UPDATES, averaging=LATE)
    assert run(federation(), METHODS["fedasync"], num_updates=UPDATES, averaging=LATE, executor=executor) == expected


@pytest.mark.usefixtures("as_shipped")
def test_an_invalid_average_is_rejected_by_name():
    space = ParameterSpace.of(federation().model())
    for averaging, words in (
        (3, "^averaging: expected an object with average, update, state and load, got 3$"),
        (SWA(space, periodic=2), "^averaging: expected periodic=None"),
    ):
        with pytest.raises(ArgumentError, match=words):
            run(federation(), METHODS["fedasync"], num_updates=2, averaging=averaging)
