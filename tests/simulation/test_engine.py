"""Runs in every scenario: schedulers, delays, availability, task costs, evaluation; what clients keep, and what it all takes."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from torch import nn

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Payload, rules
from manifoldagg.federated import clients as trainers
from manifoldagg.simulation import (
    AvailabilityChange,
    Deterministic,
    Exponential,
    FederatedDataset,
    IndependentClients,
    JacksonNetwork,
    Method,
    PriorityScheduler,
    ReplayScheduler,
    TaskRecord,
    churn,
    dirichlet_partition,
    run,
)
from tests.simulation.test_run import clusters


def split(task, clients, concentration):
    return FederatedDataset.split(
        task, clients, partition=partial(dirichlet_partition, concentration=concentration), seed=0
    )


LOCAL = trainers.Local(epochs=1, rate=1e-2)
ASYNC = Method("FedAsync", rules.FedAsync(0.5), LOCAL)


@pytest.fixture(scope="module")
def federation():
    return split(clusters(), 6, 1.0)


def shares(clients):
    return rules.GeneralizedAsyncSGD(dict.fromkeys(clients, 1 / len(clients)), rate=0.5)


METHODS = {
    "asynchronous": ASYNC,
    "cohort": Method("FedAvg", rules.FedAvg(3), LOCAL),
    "drawn": Method("DeFedAvg", rules.DeFedAvg(3), LOCAL),
    "routed": Method("AsyncSGD", shares, trainers.Gradient()),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_sampler_learns_in_every_scenario(federation, name):
    for scenario in (
        {},
        {
            "delays": Exponential(1.0),
            "availability": lambda c, g: churn(c, Exponential(20.0), Exponential(5.0), 99.0, g),
        },
        {"scheduler": lambda c, g: JacksonNetwork([1 / 6] * 6, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0], g, concurrency=20)},
    ):
        one = run(federation, METHODS[name], num_updates=60, eval_every=10, **scenario)
        assert (max(one.accuracy) > 0.75, one.rejected) == (True, 0)
        assert one.times == sorted(one.times)
        assert one == run(federation, METHODS[name], num_updates=60, eval_every=10, **scenario)


def test_cohorts_have_no_staleness(federation):
    late = {
        name: max(run(federation, method, num_updates=30, eval_every=30).staleness) for name, method in METHODS.items()
    }
    assert late["cohort"] == 0
    assert min(late[name] for name in METHODS if name != "cohort") > 0


def test_evaluations_are_before_the_first_and_after_the_last_update(federation):
    all_ = run(federation, ASYNC, num_updates=10)
    some = run(federation, ASYNC, num_updates=10, eval_every=4)
    assert (all_.evaluated_at, some.evaluated_at) == (list(range(11)), [0, 4, 8, 10])
    assert some.accuracy == [all_.accuracy[i] for i in some.evaluated_at]
    assert some.clients == all_.clients
    reached = some.updates_to(max(some.accuracy))
    assert some.accuracy[some.evaluated_at.index(reached)] == max(some.accuracy)
    assert some.updates_to(1.01) is None


def test_delays_may_be_common_per_client_or_measured(federation, tmp_path):
    clients = federation.trainable_clients
    same = run(federation, ASYNC, num_updates=12, delays=Deterministic(1.0))
    for delays in (dict.fromkeys(range(9), Deterministic(1.0)), lambda clients, generator: Deterministic(1.0)):
        assert run(federation, ASYNC, num_updates=12, delays=delays) == same
    assert same.times[: len(clients)] == sorted(float(federation.num_batches(client)) for client in clients)
    path = tmp_path / "measured.csv"
    path.write_text("client,computation_s,round_s\npi,1.0,3.0\njetson,0.25,0.5\n")
    measured = run(federation, ASYNC, num_updates=30, eval_every=30, delays=path)
    assert measured == run(federation, ASYNC, num_updates=30, eval_every=30, delays=str(path))
    # Two seconds of communication, or a quarter of one, beside a time that grows with the work.
    first = {}
    for client, time in zip(measured.clients, measured.times, strict=True):
        first.setdefault(client, time)
    assert all(
        time in (federation.num_batches(c) + 2.0, 0.25 * federation.num_batches(c) + 0.25) for c, time in first.items()
    )


def test_given_scheduler_serves_only_one_run(federation):
    default = run(federation, ASYNC, num_updates=9)
    mine = PriorityScheduler(6, np.random.default_rng([federation.seed, 1]))
    assert run(federation, ASYNC, num_updates=9, scheduler=mine) == default
    assert run(federation, ASYNC, num_updates=9, scheduler=lambda c, g: PriorityScheduler(len(c), g)) == default
    with pytest.raises(ArgumentError, match="scheduler: expected a new scheduler, got one at .* s with 5 tasks"):
        run(federation, ASYNC, num_updates=9, scheduler=mine)


def test_replay_of_a_run_equals_the_run(federation):
    """What was recorded of a run gives its order of events to another method."""
    one = run(federation, ASYNC, num_updates=25)
    records = [TaskRecord(c, 1.0, 0.0, 0.0, t, 0) for c, t in zip(one.clients, one.times, strict=True)]
    other = run(
        federation, Method("FedGS", rules.FedGS(1.0), LOCAL), num_updates=25, scheduler=ReplayScheduler(records)
    )
    assert (other.clients, other.times) == (one.clients, one.times)
    with pytest.raises(ArgumentError, match="expected a client with a task after 25 updates"):
        run(federation, ASYNC, num_updates=26, scheduler=ReplayScheduler(records))


def test_changes_of_clients_without_samples_are_ignored():
    sparse = split(clusters(), 30, 0.01)
    idle = next(client for client in range(30) if client not in sparse.trainable_clients)
    assert run(sparse, ASYNC, num_updates=5, availability=[AvailabilityChange(1e-9, idle, "fail")]) == run(
        sparse, ASYNC, num_updates=5
    )
    with pytest.raises(ArgumentError, match="expected changes of participating clients, got .*client=30"):
        run(sparse, ASYNC, num_updates=5, availability=[AvailabilityChange(1.0, 30, "fail")])


def test_task_cost_is_the_minibatches_or_the_steps(federation):
    """A client that does four times the steps takes four times as long, if these are what counts."""
    delays = Deterministic(1.0)
    long = replace(ASYNC, trainer=trainers.Local(epochs=4, rate=1e-2))
    by_data = [run(federation, method, num_updates=12, delays=delays).times for method in (ASYNC, long)]
    by_steps = [run(federation, m, num_updates=12, delays=delays, task_cost="trainer").times for m in (ASYNC, long)]
    assert by_data[0] == by_data[1] == by_steps[0]
    assert by_steps[1] == [4 * time for time in by_steps[0]]


def test_requested_epochs_take_virtual_time(federation):
    """AsyncFedED without staleness asks for ever more of them."""
    rule = rules.AsyncFedED(0.1, gain=1.0, target=3.0, epochs=2, warm_up=0)
    method = Method("AsyncFedED", rule, trainers.Epochs(LOCAL))
    only = replace(federation, train=[federation.train[0]], held_out=[federation.held_out[0]])
    asked = []
    one = run(
        only,
        method,
        num_updates=6,
        delays=Deterministic(1.0),
        task_cost="trainer",
        on_update=lambda event: asked.append(event.message.numbers["epochs"]),
    )
    assert asked[0] == 2
    assert asked[-1] > asked[0]
    assert np.diff([0.0, *one.times]).tolist() == [epochs * only.num_batches(0) for epochs in asked]


class Counting:
    """Remembers how many tasks there were before, and of which it was."""

    def __init__(self):
        self.seen = []

    def train(self, space, message, loss, batches, memory, *, generator):
        self.seen.append((memory, message))
        return Payload(
            message.start[None] + 0.01,
            1,
            client_state={"tasks": (memory or {"tasks": 0})["tasks"] + 1},
        )


def test_client_state_reaches_the_next_task(federation):
    """Also where tasks queue, and where some between were lost."""
    for method, scenario in (
        (
            METHODS["asynchronous"],
            {
                "delays": Deterministic(1.0),
                "availability": [AvailabilityChange(20.0, 0, "fail"), AvailabilityChange(21.0, 0, "return")],
            },
        ),
        (METHODS["drawn"], {}),
    ):
        trainer = Counting()
        one = run(federation, replace(method, trainer=trainer), num_updates=50, eval_every=50, **scenario)
        before = dict.fromkeys(federation.trainable_clients, 0)
        for client, (memory, _) in zip(one.clients, trainer.seen, strict=True):
            assert (memory or {"tasks": 0})["tasks"] == before[client]
            before[client] += 1


def test_messages_of_one_version_share_their_tensors(federation):
    seen = []
    run(federation, ASYNC, num_updates=12, delays=Deterministic(1.0), on_update=seen.append)
    starts = [event.message.start for event in seen[: len(federation.trainable_clients)]]
    assert len({start.data_ptr() for start in starts}) == 1
    later = [event.message.start for event in seen[len(federation.trainable_clients) :]]
    assert starts[0].data_ptr() not in {start.data_ptr() for start in later}


def normalised():
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def test_batchnorm_statistics_are_part_of_the_model():
    """The exam is taken with the server's, which come from the clients."""
    apart = clusters()
    moved = replace(apart, inputs=apart.inputs + 5.0, model=normalised)
    federation = split(moved, 6, 100.0)
    sent = []
    one = run(
        federation,
        Method("FedAvg", rules.FedAvg(3), trainers.Local(epochs=4, rate=1e-2)),
        num_updates=60,
        eval_every=10,
        on_update=sent.append,
    )
    assert one.accuracy[-1] > 0.9
    assert set(sent[0].message.requested_buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert sent[0].message.buffers["1.running_mean"].abs().max() == 0
    assert sent[-1].message.buffers["1.running_mean"].abs().max() > 1


def test_exception_of_a_trainer_is_not_a_rejection(federation):
    with pytest.raises(ArgumentError, match="message: numbers: epochs"):
        run(federation, replace(ASYNC, trainer=trainers.Epochs(LOCAL)), num_updates=3)


def test_rule_may_depend_on_the_participating_clients():
    method = METHODS["routed"].bind([3, 5])
    assert dict(method.rule.routing) == {3: 0.5, 5: 0.5}
    assert method.bind([1]) == method
    with pytest.raises(ArgumentError, match="rule: expected an instance, got the class FedAsync"):
        Method("odd", rules.FedAsync, LOCAL).bind([1])


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task_cost": "hard"}, "task_cost: expected one of fixed, trainer"),
        ({"eval_every": 0}, "eval_every: expected"),
        ({"concurrency": 0}, "concurrency: expected"),
        (
            {"delays": {0: Deterministic(1.0)}},
            "delays: expected a delay for each participating client; missing for 1, 2, 3",
        ),
        ({"delays": 3.0}, "delays: expected a Delay, or a mapping from clients, got 3.0"),
        ({"delays": "nowhere.csv"}, "path: nowhere.csv cannot be read"),
        ({"scheduler": lambda c, g: None}, "scheduler: expected a Scheduler, or a function that returns one, got None"),
        ({"scheduler": "priority"}, "scheduler: expected a Scheduler, or a function that returns one, got 'priority'"),
        ({"availability": 5}, "availability: expected AvailabilityChanges, or a function that returns them, got 5"),
        (
            {"availability": "churn"},
            "availability: expected AvailabilityChanges, or a function that returns them, got 'churn'",
        ),
        ({"on_update": 3}, "on_update: expected a function, got 3"),
        ({"progress": 3}, "progress: expected a function, got 3"),
        (
            {"scheduler": lambda c, g: IndependentClients(Deterministic(1.0), g), "delays": Deterministic(1.0)},
            "delays: expected either a scheduler or delays, got both",
        ),
    ],
)
def test_invalid_arguments_are_rejected_by_name(federation, options, words):
    with pytest.raises(ArgumentError, match=words):
        run(federation, ASYNC, num_updates=3, **options)


def test_run_without_trainable_clients_is_rejected(federation):
    nobody = replace(federation, train=[part[:0] for part in federation.train])
    with pytest.raises(ArgumentError, match="federation: expected clients with samples, got clients without samples"):
        run(nobody, ASYNC, num_updates=3)
    untested = replace(federation, held_out=[part[:0] for part in federation.held_out])
    with pytest.raises(
        ArgumentError, match="federation: expected clients with held-out samples, got clients without held-out samples"
    ):
        run(untested, ASYNC, num_updates=3)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("method", "words"),
    [
        (lambda: "fedasync", "method: expected a Method, got 'fedasync'"),
        (lambda: Method("odd", rules.FedAsync(), None), "trainer: expected an instance with `train`, got None"),
        (
            lambda: Method("odd", rules.FedAsync(), trainers.Local),
            "trainer: expected an instance with `train`, got <class",
        ),
    ],
    ids=["name", "none", "class"],
)
def test_invalid_methods_are_rejected(federation, method, words):
    with pytest.raises(ArgumentError, match=words):
        run(federation, method(), num_updates=3)
