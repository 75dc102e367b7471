"""Over-selection: a round ends with the fastest clients, and the tasks of the other clients are cancelled."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import CheckpointPolicy, rules
from manifoldagg.federated.server.client_sampling import AvailableClients, CohortSampler, sampler_for
from manifoldagg.simulation import Deterministic, Exponential, IndependentClients, Method, run
from manifoldagg.simulation.event_loop import CompletionEvent, DispatchEvent, DropoutEvent, EventLoop
from tests.simulation.executors.runners import LOCAL, federation

pytestmark = pytest.mark.filterwarnings("ignore::manifoldagg.errors.StabilityWarning")


def play(loop, num_updates, accepts=lambda count: True):
    """Return the rounds of a loop: the dispatched, finished and cancelled clients between two cohorts."""
    rounds = [([], [], [])]
    count = 0
    while count < num_updates:
        event = loop.next()
        if isinstance(event, DispatchEvent):
            if rounds[-1][1] and not loop._scheduler.in_flight:
                rounds.append(([], [], []))
            rounds[-1][0].append(event.client)
            loop.submit(event.client, 1.0)
        elif isinstance(event, CompletionEvent):
            rounds[-1][1].append(event.task_id.client)
            count += 1
            loop.acknowledge(accepts(count))
        else:
            rounds[-1][2].extend(task_id.client for task_id in event.task_ids)
    return rounds


@given(st.integers(1, 5), st.integers(0, 200), st.integers(0, 2**31))
def test_a_round_consists_of_the_fastest_clients_of_a_larger_cohort(cohort, percent, seed):
    assume(cohort > 1 or percent > 0)  # Otherwise, the rule is asynchronous and has no rounds.
    over_selection = percent / 100
    rng = np.random.default_rng(seed)
    clients = list(range(12))
    seconds = {client: float(second) for client, second in enumerate(rng.permutation(12) + 1)}
    sampler = sampler_for(rules.FedAvg(cohort, over_selection=over_selection), clients, None, rng)
    alone = IndependentClients({c: Deterministic(s) for c, s in seconds.items()}, np.random.default_rng(0))
    rounds = play(EventLoop(clients, sampler, alone), 4 * cohort)
    assert len(rounds) == 4
    for dispatched, finished, cancelled in rounds[:-1]:
        assert len(dispatched) == len(set(dispatched))
        assert len(dispatched) == min(len(clients), cohort + -(-percent * cohort // 100))
        assert finished == sorted(dispatched, key=seconds.get)[:cohort]
        assert set(cancelled) == set(dispatched) - set(finished)


def test_rejected_updates_use_the_additional_clients_before_new_ones():
    sampler = CohortSampler(2, np.random.default_rng(0), num_additional=1)
    everyone = AvailableClients(range(5))
    first = sampler.start(everyone)
    assert sampler.on_completion(first[0], False, everyone) == []
    assert sampler.on_completion(first[1], True, everyone) == []
    assert sampler.pop_stragglers() == []
    assert len(sampler.on_completion(first[2], True, everyone)) == 3
    assert sampler.pop_stragglers() == []


def test_after_dropouts_only_the_missing_updates_are_requested_again():
    sampler = CohortSampler(2, np.random.default_rng(0), num_additional=2)
    everyone = AvailableClients(range(8))
    first = sampler.start(everyone)
    assert len(first) == 4
    assert [sampler.on_dropout(client, 1, everyone) for client in first[:3]] == [[], [], []]
    again = sampler.on_completion(first[3], True, everyone)
    assert len(again) == 1
    assert again[0] not in first


def test_over_selection_shortens_a_run_and_counts_the_messages_of_cancelled_tasks():
    delays = {client: Deterministic(float(client + 1)) for client in range(5)}
    plain = run(federation(), Method("m", rules.FedAvg(2), LOCAL), num_updates=12, delays=delays)
    over = run(federation(), Method("m", rules.FedAvg(2, over_selection=0.5), LOCAL), num_updates=12, delays=delays)
    assert over.times[-1] < plain.times[-1]
    assert over.evaluations[-1].bytes_up == plain.evaluations[-1].bytes_up
    assert over.evaluations[-1].bytes_down == plain.evaluations[-1].bytes_down * 3 / 2
    assert max(over.staleness) == 0 == over.rejected
    all_clients = sampler_for(rules.FedAvg(2, over_selection=1e308), range(3), None, np.random.default_rng(0))
    assert len(all_clients.start(AvailableClients(range(3)))) == 3
    with pytest.raises(ArgumentError, match="over_selection: expected"):
        rules.FedAvg(2, over_selection=-0.1)
    with pytest.raises(ArgumentError, match="rule: over_selection: expected 0, as DeFedAvg draws its own clients"):
        run(federation(), Method("m", rules.DeFedAvg(2, over_selection=0.5), LOCAL), num_updates=2)


def test_a_run_with_over_selection_resumes_to_the_same_result(tmp_path):
    method = Method("m", rules.FedAvg(2, over_selection=0.5), LOCAL)
    options = {"num_updates": 10, "delays": Exponential(1.0), "eval_every": 2}
    whole = run(federation(), method, **options)

    class StopRun(Exception):
        pass

    def interrupt(event):
        if event.update_index == 7:
            raise StopRun

    policy = CheckpointPolicy(tmp_path / "run", every_updates=3)
    with pytest.raises(StopRun):
        run(federation(), method, **options, checkpoint=policy, on_update=interrupt)
    assert run(federation(), method, **options, checkpoint=policy, resume=True) == whole


def test_a_cancelled_client_can_get_a_task_of_the_next_round():
    sampler = sampler_for(rules.FedAvg(1 + 1, over_selection=0.5), [0, 1, 2], None, np.random.default_rng(0))
    alone = IndependentClients({c: Deterministic(c + 1.0) for c in range(3)}, np.random.default_rng(0))
    loop = EventLoop([0, 1, 2], sampler, alone)
    kinds = []
    for _ in range(12):
        event = loop.next()
        kinds.append(type(event))
        if isinstance(event, DispatchEvent):
            loop.submit(event.client, 1.0)
        elif isinstance(event, CompletionEvent):
            loop.acknowledge(True)
    assert kinds[:9] == [DispatchEvent] * 3 + [CompletionEvent] * 2 + [DropoutEvent] + [DispatchEvent] * 3
