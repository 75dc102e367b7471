"""The log of a run: what is counted, by hand; and readings of it."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from manifoldagg.curves import ASAM, SAM
from manifoldagg.errors import ArgumentError, DivergenceError
from manifoldagg.experiments import load_dataset
from manifoldagg.experiments.compare import compare
from manifoldagg.experiments.registry import method
from manifoldagg.federated import Payload, rules
from manifoldagg.federated import clients as trainers
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.simulation import (
    AvailabilityChange,
    ClientTask,
    Deterministic,
    Evaluation,
    FederatedDataset,
    IndependentClients,
    Method,
    TaskId,
    gini,
    iid_partition,
    run,
    run_task,
    theil,
)
from manifoldagg.simulation.cost import AXES, first_reaching, last_within_budget
from manifoldagg.simulation.evaluation import Evaluator
from manifoldagg.simulation.task_transport import execute_local
from tests.simulation.executors.runners import Posted, clouds
from tests.simulation.test_run import clusters

# The default rates of the methods are tuned for 30 clients, and these tests have fewer.
pytestmark = pytest.mark.filterwarnings("ignore::manifoldagg.errors.StabilityWarning")
SPENT = ("updates", "time", "gradients", "bytes_down", "bytes_up", "rejected")


def split(of, clients=4):
    return FederatedDataset.split(of, clients, partition=iid_partition, seed=0)


@pytest.fixture(scope="module")
def federation():
    return split(load_dataset(clusters))


def logged(federation, name="fedasync", num_updates=10, **options):
    return run(federation, method(name) if isinstance(name, str) else name, num_updates=num_updates, **options)


@pytest.mark.parametrize("name", ["fedasync", "asyncbezier", "fedbuff", "fedavg:cohort=2", "orthofl", "masfl"])
def test_costs_start_at_zero_and_never_decrease(federation, name):
    one = logged(federation, name, eval_every=3)
    first, *rest = one.evaluations
    assert [getattr(first, field) for field in SPENT] == [0] * 6
    assert [row.updates for row in rest] == [3, 6, 9, 10]
    for before, after in zip([first, *rest], rest, strict=False):
        assert all(getattr(before, field) <= getattr(after, field) for field in SPENT)
        for field in ("updates", "gradients", "bytes_up", "bytes"):
            assert getattr(before, field) < getattr(after, field)
    for row in rest:
        assert row.time == one.trace[row.updates - 1].finished == one.times[row.updates - 1]


def test_staleness_covers_the_updates_since_the_previous_evaluation(federation):
    one = logged(federation, num_updates=10, eval_every=4)
    late = one.staleness
    parts = [late[:4], late[4:8], late[8:]]
    assert [(row.staleness, row.staleness_max) for row in one.evaluations] == [
        (0, 0),
        *((sum(part) / len(part), max(part)) for part in parts),
    ]


def test_accuracy_and_loss_are_those_of_the_held_out_samples(federation):
    """Computed anew by hand, for the model that all begin with; and that which clients' accuracies make."""
    first, *_ = logged(federation, num_updates=1).evaluations
    model = federation.model().eval()
    parts = [(federation.dataset.inputs[part], federation.dataset.labels[part]) for part in federation.held_out]
    scores = [model(inputs).detach() for inputs, _ in parts]
    labels = torch.cat([labels for _, labels in parts])
    accuracies = [(x.argmax(1) == y).double().mean().item() for x, (_, y) in zip(scores, parts, strict=True)]
    assert first.accuracy == (torch.cat(scores).argmax(1) == labels).double().mean().item()
    # One rounding of float32 for each sample.
    assert first.loss == pytest.approx(nn.functional.cross_entropy(torch.cat(scores).double(), labels).item(), rel=1e-6)
    assert (first.gini, first.theil) == (gini(accuracies), theil(accuracies))


def test_the_clients_accuracies_are_those_of_the_best_model(federation):
    one = logged(federation, num_updates=20)
    best = max(one.evaluations, key=lambda row: row.accuracy)
    assert (one.gini, one.theil) == (best.gini, best.theil)


def test_a_loss_that_is_not_finite_is_none(federation):
    model = federation.model()
    exam = Evaluator(federation)
    with torch.no_grad():
        next(model.parameters()).fill_(3e38)
        model[2].weight.fill_(3e38)
    assert not torch.tensor(exam.evaluate(model.state_dict()).loss).isfinite().all()

    class Far:
        def train(self, space, message, loss, batches, memory, *, generator):
            return Payload(torch.full((1, *space.shape), 3e38), 1)

    rule = rules.FedAsync(rate=1.0, weighted=False)
    _, row = run(federation, Method("far", rule, Far()), num_updates=1).evaluations
    assert row.rejected or row.loss is None


FEW = {"epochs": 2}
COUNTED = {
    "local": (trainers.Local(**FEW), rules.FedAsync(), 2),
    "proximal": (trainers.Proximal(**FEW, proximal=0.1), rules.FedAsync(), 2),
    "uphill": (trainers.Local(**FEW, sharpness=SAM()), rules.FedAsync(), 4),
    "path": (trainers.Trajectory(**FEW), rules.AsyncBezier(), 2),
    "curve": (trainers.Curve(epochs=(1, 2)), rules.AsyncBezier(), 3),
    "curve, two places": (trainers.Curve(epochs=(1, 2), samples=2), rules.AsyncBezier(), 1 + 2 * 2),
    "curve, uphill": (trainers.Curve(epochs=(1, 2), samples=2, sharpness=ASAM()), rules.AsyncBezier(), 2 + 4 * 2),
    "in turn": (trainers.AsyncCurve(epochs=2), rules.AsyncCurve(clients=4, rate=0.1), 4),
    "vertices": (trainers.FLOCO(epochs=2, samples=3), rules.FLOCO(cohort=2), 6),
    "calibrated": (trainers.Calibrated(trainers.Local(**FEW)), rules.OrthoFL(protocol="client"), 2),
    "control variate": (trainers.ControlVariate(epochs=2), rules.MasFL(size=1, clients=4, rate=0.1, initial="zero"), 2),
    "as asked": (trainers.Epochs(), rules.AsyncFedED(rate=0.1, epochs=2, target=1e9), 2),
}


@pytest.mark.parametrize("name", COUNTED)
def test_gradient_counts_equal_counts_by_hand(federation, name):
    trainer, rule, passes = COUNTED[name]
    one = run(federation, Method(name, rule, trainer), num_updates=6, eval_every=2)
    lengths = [federation.num_batches(client) for client in one.clients]
    assert [row.gradients for row in one.evaluations] == [passes * sum(lengths[:n]) for n in (0, 2, 4, 6)]


def test_a_gradient_task_counts_one_gradient(federation):
    one = run(federation, Method("one", rules.FedAsync(), trainers.Gradient()), num_updates=5)
    assert [row.gradients for row in one.evaluations] == list(range(6))


@dataclass(frozen=True)
class Counts:
    """Looks at the loss in every way that there is, and takes three gradients; then diverges, if asked to."""

    diverges: bool = False

    def train(self, space, message, loss, batches, memory, *, generator):
        batch = next(iter(batches))
        theta = message.start.clone()
        with torch.no_grad():
            loss(theta.requires_grad_(), batch)
        loss(theta.detach(), batch)
        loss(theta, batch).backward()
        torch.func.grad(loss)(theta.detach(), batch)
        torch.func.vjp(lambda x: loss(x, batch), theta.detach())[1](torch.ones(()))
        if self.diverges:
            raise DivergenceError("the loss is nan")
        return Payload(message.start[None], 1, client_state={"kept": torch.zeros(1000)})


@pytest.mark.parametrize("diverges", [False, True])
@pytest.mark.parametrize("executor", [None, lambda: Posted(0, 2)])
def test_gradients_of_custom_trainers_are_counted(federation, diverges, executor):
    method = Method("odd", rules.FedAsync(), Counts(diverges))
    one = run(federation, method, num_updates=4, eval_every=2, executor=executor and executor())
    size = 4 * ParameterSpace.of(federation.model()).layout.size
    assert [row.gradients for row in one.evaluations] == [0, 6, 12]
    assert [row.rejected for row in one.evaluations] == [0, 2 * diverges, 4 * diverges]
    # What a client keeps for itself does not travel, nor anything of a task that diverged.
    assert one.evaluations[-1].bytes_up == 4 * size * (not diverges)


def test_counting_gradients_does_not_change_the_payload(federation):
    from manifoldagg.federated import Server

    message = Server.of(federation.model(), rules.FedAsync()).dispatch(0).message
    errand = ClientTask(federation, trainers.Local(epochs=1), TaskId(0, 0), message)
    outcome = execute_local(errand)
    assert outcome.gradients == federation.num_batches(0)
    assert torch.equal(outcome.payload.points, run_task(errand).points)


def test_bytes_count_all_sent_tensors(federation):
    size = 4 * ParameterSpace.of(federation.model()).layout.size
    plain = logged(federation, "fedasync", num_updates=5).evaluations
    curve = logged(federation, "asyncbezier:degree=3", num_updates=5).evaluations
    # Four clients are asked at first, and who has answered again: the last answer before it is settled.
    assert [row.bytes_down for row in plain] == [0, *(size * (4 + i) for i in range(5))]
    assert [row.bytes_up for row in plain] == [size * i for i in range(6)]
    assert [row.bytes_down for row in curve] == [row.bytes_down for row in plain]
    assert [row.bytes_up for row in curve] == [3 * size * i for i in range(6)]
    # Control variates: a direction and an own control go down, a mean gradient comes back beside the model.
    variates = Method("masfl", rules.MasFL(size=1, clients=4, rate=0.1), trainers.ControlVariate())
    assert run(federation, variates, num_updates=5).evaluations[-1].bytes_up == 2 * 5 * size


def test_bytes_include_buffers():
    federation = split(clouds())
    model = federation.model()
    state = sum(tensor.nbytes for tensor in model.state_dict().values())
    one = logged(federation, "fedasync", num_updates=3).evaluations[-1]
    assert one.bytes_down == (4 + 2) * state
    assert one.bytes_up == 3 * state


def test_tasks_that_are_lost_cost_a_message_and_no_gradient(federation):
    delays = {0: Deterministic(100.0), 1: Deterministic(1.0), 2: Deterministic(1.5), 3: Deterministic(1.7)}
    fails = [AvailabilityChange(5.0, 0, "fail")]
    like = {
        "num_updates": 12,
        "scheduler": lambda clients, generator: IndependentClients(delays, generator),
        "availability": fails,
    }
    alone = logged(federation, **like)
    assert 0 not in alone.clients
    assert alone == logged(federation, **like, executor=Posted(3, 2))
    last = alone.evaluations[-1]
    size = 4 * ParameterSpace.of(federation.model()).layout.size
    assert last.bytes_down == size * (4 + 11)
    assert last.gradients == sum(4 * federation.num_batches(client) for client in alone.clients)


def test_a_log_has_a_row_for_each_evaluation_of_each_run():
    found = compare(
        clusters(), [method("fedasync"), method("asyncbezier")], clients=4, num_updates=4, seeds=2, eval_every=2
    )
    rows = found.log()
    assert [(row["method"], row["seed"], row["updates"]) for row in rows] == [
        (name, seed, round_) for name in ("FedAsync", "AsyncBezier") for seed in (0, 1) for round_ in (0, 2, 4)
    ]
    columns = "updates time gradients bytes_down bytes_up rejected accuracy loss gini theil staleness staleness_max"
    columns += " average_accuracy average_loss"
    assert list(rows[0]) == ["method", "seed", *columns.split()]
    one = found.runs["AsyncBezier"][1].evaluations[2]
    back = {key: value for key, value in json.loads(json.dumps(rows[-1])).items() if key not in ("method", "seed")}
    assert Evaluation(**back) == one


def rows_of(steps):
    rows = [Evaluation(accuracy=0.0, loss=1.0, gini=0.0, theil=0.0)]
    for accuracy, *added in steps:
        spent = [getattr(rows[-1], field) + more for field, more in zip(SPENT[:5], added, strict=True)]
        rows.append(replace(rows[-1], accuracy=accuracy, **dict(zip(SPENT[:5], spent, strict=True))))
    return rows


COSTS = st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0]), *[st.integers(0, 3)] * 5)


@given(st.lists(COSTS, max_size=8), st.sampled_from(AXES), st.floats(0, 30))
def test_last_row_within_a_budget_is_found(steps, axis, budget):
    rows = rows_of(steps)
    found = last_within_budget(rows, axis, budget)
    place = max(i for i, row in enumerate(rows) if row is found)
    assert found.value_on(axis) <= budget
    assert all(row.value_on(axis) > budget for row in rows[place + 1 :])
    more = last_within_budget(rows, axis, budget + 1)
    assert more.updates >= found.updates
    assert last_within_budget(rows, axis, rows[-1].value_on(axis)) is rows[-1]


@given(st.lists(COSTS, max_size=8), st.sampled_from([0.0, 0.25, 0.4, 1.0]))
def test_first_row_that_reaches_a_target_is_found(steps, target):
    rows = rows_of(steps)
    row = first_reaching(rows, target)
    before = rows if row is None else rows[: next(i for i, one in enumerate(rows) if one is row)]
    assert all(one.accuracy < target for one in before)
    assert row is None or row.accuracy >= target


@pytest.mark.usefixtures("as_shipped")
def test_unknown_axes_and_too_small_budgets_are_rejected():
    rows = rows_of([])
    with pytest.raises(ArgumentError, match="axis: expected one of updates, time, gradients, bytes; got 'update'"):
        last_within_budget(rows, "update", 1)
    with pytest.raises(ArgumentError, match="budget: expected a row with at most -1 bytes"):
        last_within_budget(rows, "bytes", -1)
