"""Tests that `AsyncAggregator` in a custom loop is bitwise equal to a server, whatever clients do."""

import copy
import io
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg import AsyncAggregator, Server
from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.federated import InitialModel, Message, Payload
from manifoldagg.federated.rules import (
    ASGD,
    FLOCO,
    AsyncBezier,
    AsyncFedED,
    Dominance,
    FedAdam,
    FedAsync,
    FedBuff,
    FedOrtho,
    Momentum,
    OrthoFL,
    Private,
)
from manifoldagg.manifolds import ParameterSpace, Sphere
from tests.federated.fingerprint import Gathers
from tests.federated.rules import test_golden
from tests.federated.rules.test_golden import BEYOND, POLICIES, network, policies, trained
from tests.support import seeds
from tests.test_tensor_file import alike


class Waits(Gathers):
    """Rule that sends only models."""

    def message(self, space, state, current, client_state):
        return Message(current)


TOLD = {"AsyncFedED", "FLOCO"}
"""They tell clients more than models."""
RULES = {name: rule for name, rule in test_golden.RULES.items() if name not in TOLD} | {"a rule that waits": Waits(2)}
CURVED = [name for name in test_golden.CURVED if name not in TOLD]
CLIENTS = ["heavy", "light"]
WEIGHTS = {"observed": "observed", "uniform": "uniform", "given": {"heavy": 3, "light": 1}}
events = st.tuples(
    st.sampled_from(CLIENTS),
    st.sampled_from(["checkout", "checkout", "submit", "submit", "submit", "cancel", "restart", "junk", "resume"]),
    st.integers(0, 9),
)


def through_a_file(state):
    """Save and load an object with torch's default, which only allows tensors and plain values."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def agree(name, seed, weights, script, manifolds=None):
    """Run the same events in a server and in an `AsyncAggregator`, and return the number of accepted updates."""
    rule = RULES[name]
    net = network()
    if manifolds:
        net[0].weight.data /= net[0].weight.data.norm(dim=-1, keepdim=True)
    first = net.state_dict()
    space = ParameterSpace.of_state_dict(first, manifolds, buffer_policy=policies(rule))
    start = InitialModel(space.point(first), space.buffers(first), policies(rule))
    server = Server(space, rule, start, weights=WEIGHTS[weights])
    versions = AsyncAggregator(rule, first, weights=WEIGHTS[weights], space=space)
    count = getattr(rule, "vertices", 1 if getattr(rule, "single_point", True) else 2)
    out, taken = [], 0
    for i, (client, what, place) in enumerate(script):
        if what == "resume":
            saved = through_a_file(versions.state())
            versions = AsyncAggregator(rule, first, weights=WEIGHTS[weights], space=space)
            versions.load(saved)
        elif what == "checkout" or not out:
            ticket = server.dispatch(client)
            # The first task of a client needs no name.
            task = None if (client, None) not in versions.in_flight else i
            base = versions.checkout(client, task)
            assert alike(dict(base), ticket.state_dict())
            out.append((ticket, client, task))
        elif what == "restart":
            ticket, client, task = out.pop(place % len(out))
            server.drop(ticket)
            out.append((server.dispatch(client), client, task))
            versions.checkout(client, task, restart=True)
        elif what == "cancel":
            ticket, client, task = out.pop(place % len(out))
            server.drop(ticket)
            versions.cancel(client, task)
        else:
            ticket, client, task = out[place % len(out)]
            pairs = [trained(space, seed + 31 * i + j, ticket.message.start, server.state_dict()) for j in range(count)]
            carried = {entry.name: pairs[-1][1][entry.name] for entry in space.layout.buffers}
            models = [space.state_dict(point, carried) for point, _ in pairs]
            if what == "junk" and getattr(rule, "is_private", False):
                continue  # An update that is not finite counts as a zero update, so that a rejection reveals nothing.
            if what == "junk":
                before = versions.state()
                models[-1]["1.bias"] = torch.full((3,), float("nan"))
                with pytest.raises(ArgumentError, match="1.bias: expected finite"):
                    versions.submit(client, models if count > 1 else models[0], samples=5, task=task)
                assert alike(versions.state(), before)
                continue
            del out[place % len(out)]
            samples = 1 + (seed + i) % 9
            points = torch.stack([point for point, _ in pairs])
            brought = carried if policies(rule) is POLICIES else {}
            receipt = server.receive(ticket, Payload(points, samples, buffers=brought)).check()
            numbers = versions.submit(client, models if count > 1 else models[0], samples=samples, task=task)
            told = [(numbers[key], getattr(receipt, key)) for key in ("version", "staleness", "weight")]
            told += [(numbers[key], getattr(receipt, key)) for key in ("cosine", "step", "norm") if key in numbers]
            assert all(repr(float(mine)) == repr(float(theirs)) for mine, theirs in told)
            taken += 1
        assert alike(dict(versions.model), server.state_dict())
        assert versions.version == server.version
        # A version is there as long as somebody has it.
        assert len(versions.state()["models"]) == len({server.version, *(t.version for t, *_ in out)})
        assert sorted(versions.in_flight.values()) == sorted(server.version - t.version for t, *_ in out)
    return taken


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=4)
@given(seed=seeds, weights=st.sampled_from(list(WEIGHTS)), script=st.lists(events, min_size=10, max_size=24))
def test_results_are_bitwise_equal_to_the_server(name, seed, weights, script):
    agree(name, seed % 10**6, weights, script)


@pytest.mark.parametrize("name", CURVED)
@settings(max_examples=2)
@given(seed=seeds, weights=st.sampled_from(list(WEIGHTS)), script=st.lists(events, min_size=8, max_size=12))
def test_results_equal_the_server_on_a_curved_space(name, seed, weights, script):
    agree(name, seed % 10**6, weights, script, {"0.weight": Sphere(3)})


def test_random_traces_contain_accepted_updates():
    script = [("heavy", "checkout", 0), ("light", "checkout", 0), ("heavy", "checkout", 0), ("light", "submit", 1)]
    assert agree("FedBuff", 3, "observed", [*script, ("light", "resume", 0), *script, ("light", "submit", 0)] * 3) >= 6


@pytest.mark.parametrize("name", BEYOND)
def test_rule_that_requires_more_than_models_raises_argument_error(name):
    with pytest.raises(ArgumentError, match="requires more than models from clients; use a Server"):
        AsyncAggregator(BEYOND[name], {"w": torch.ones(2)})


@pytest.mark.parametrize(
    ("rule", "more"),
    [(FLOCO(2), "vertices, radius"), (AsyncFedED(), "epochs"), (Momentum(AsyncFedED()), "epochs")],
    ids=["FLOCO", "AsyncFedED", "inside another"],
)
def test_rule_that_sends_more_than_models_raises_argument_error(rule, more):
    with pytest.raises(ArgumentError, match=f"sends clients more than models, {more}; use a Server"):
        made(rule)


def sends_a_more(client):
    """Return the protocol of OrthoFL for a client. Client "a" receives more than a model."""
    return "client" if client == "a" else "server"


def test_checkout_rejects_message_with_more_than_a_model():
    versions = made(OrthoFL(0.5, protocol=sends_a_more))
    for client in "ab":
        versions.submit(client, {"w": versions.checkout(client)["w"] + 1}, samples=1)
    unchanged(versions, "rule: OrthoFL sends clients more than models, rate, num_updates", versions.checkout, "a")
    versions.checkout("b")


@pytest.mark.usefixtures("as_shipped")
def test_difference_from_modified_start_model_is_rejected():
    """The difference is relative to the start model that the rule modified, and not to a version.

    The same update as a model is accepted.
    """
    versions = made(OrthoFL(0.5))
    first = versions.checkout("a"), versions.checkout("b")
    for client, base, step in zip("ab", first, (torch.tensor([1.0, 2, 0]), torch.tensor([1.0, 0, 3])), strict=True):
        # So far all begin with the model.
        assert torch.equal(base["w"], torch.zeros(3))
        versions.submit(client, {"w": step}, samples=1, difference=True)
    base = versions.checkout("a")
    assert not torch.equal(base["w"], versions.model["w"])
    step = {"w": torch.ones(3)}
    words = "difference: expected False, because OrthoFL chose another start model for client 'a', got True"
    unchanged(versions, words, versions.submit, "a", step, samples=1, difference=True)
    again = made(OrthoFL(0.5))
    again.load(through_a_file(versions.state()))
    unchanged(again, words, again.submit, "a", step, samples=1, difference=True)
    for each in (versions, again):
        each.submit("a", {"w": base["w"] + 1}, samples=1)
    assert alike(versions.state(), again.state())


def made(rule=None, **options):
    return AsyncAggregator(rule or FedAsync(0.5), {"w": torch.zeros(3)}, **options)


def unchanged(versions, words, call, *args, **named):
    before = versions.state()
    with pytest.raises(ArgumentError, match=words):
        call(*args, **named)
    assert alike(versions.state(), before)


@pytest.mark.usefixtures("as_shipped")
def test_invalid_calls_raise_argument_error_and_keep_the_state():
    versions = made()
    base = versions.checkout("a")
    update = {"w": torch.ones(3)}
    unchanged(
        versions,
        "client: expected a client without a task in flight, got 'a'; cancel the task, pass restart=True, or pass another "
        "name as task=",
        versions.checkout,
        "a",
    )
    unchanged(
        versions,
        "client: expected a client with a task in flight, got 'b'",
        versions.submit,
        "b",
        update,
        samples=1,
    )
    unchanged(
        versions,
        "task: expected the name of a task of client 'a' in flight, got 3",
        versions.submit,
        "a",
        update,
        samples=1,
        task=3,
    )
    unchanged(versions, "client: expected a client with a task in flight, got 'b'", versions.cancel, "b")
    unchanged(versions, "client: expected a hashable name", versions.checkout, torch.ones(1))
    unchanged(versions, "^task: expected a hashable name", versions.checkout, "b", [1])
    unchanged(versions, "^task: expected a hashable name", versions.cancel, "a", torch.ones(1))
    unchanged(
        versions, "^task: expected a name that equals", versions.submit, "a", update, samples=1, task=float("nan")
    )
    for odd in (0, 10**9 + 1, 10**300, 10**400, 10**5000, True, 1.0):
        unchanged(
            versions, "^samples: expected an integer from 1 to 1000000000", versions.submit, "a", update, samples=odd
        )
    unchanged(versions, "version: expected at most 0, the current version, got 1", versions.checkout, "b", version=1)
    unchanged(versions, "version: expected an integer >= 0", versions.checkout, "b", version=-1)
    for odd in ({"w": torch.ones(2)}, {"v": torch.ones(3)}, {"w": torch.tensor([1.0, 2.0, float("nan")])}, [], 3):
        unchanged(versions, "^update: ", versions.submit, "a", odd, samples=1)
    assert versions.submit("a", update, samples=1)["version"] == 1
    unchanged(
        versions,
        "client: expected a client with a task in flight, got 'a'",
        versions.submit,
        "a",
        update,
        samples=1,
    )
    assert torch.equal(base["w"], torch.zeros(3))
    only = made(weights={"a": 3})
    unchanged(only, "client: expected a client of weights, got 'b'", only.checkout, "b")


def test_task_names_distinguish_several_tasks_of_a_client():
    versions = made(FedAsync(1.0))
    for task in ("x", "y", None):
        versions.checkout("a", task)
        versions.checkout("b")
        versions.submit("b", {"w": torch.full((3,), 2.0)}, samples=1)
    assert versions.in_flight == {("a", "x"): 3, ("a", "y"): 2, ("a", None): 1}
    assert versions.submit("a", {"w": torch.ones(3)}, samples=1, task="y")["staleness"] == 2
    assert versions.in_flight == {("a", "x"): 4, ("a", None): 2}


def test_retained_version_can_be_assigned_to_a_client_later():
    """A host that sends a model without a client name learns the client only from the update."""
    versions = made(FedOrtho(0.5))
    versions.checkout("round")
    began = versions.version
    for client in "abc":
        versions.checkout(client, version=began)
        numbers = versions.submit(client, {"w": torch.ones(3)}, samples=1)
    assert (numbers["staleness"], versions.in_flight) == (2, {("round", None): 3})
    assert versions.checkout("round", restart=True)["w"].tolist() == versions.model["w"].tolist()
    assert list(versions.state()["models"]) == [3]
    # Who alone has a version can begin with it again.
    versions.checkout("late", version=3)
    versions.cancel("round")
    versions.checkout("a")
    versions.submit("a", {"w": torch.ones(3)}, samples=1)
    versions.checkout("late", version=3, restart=True)
    assert versions.in_flight == {("late", None): 1}


def test_models_of_callers_share_no_memory_with_the_aggregator():
    first = {"w": torch.zeros(3)}
    versions = AsyncAggregator(FedAsync(0.5), first)
    first["w"].fill_(9.0)
    base = versions.checkout("a")
    base["w"].fill_(9.0)
    versions.model["w"].fill_(9.0)
    saved = versions.state()
    for model in saved["models"].values():
        model["w"].fill_(9.0)
    update = {"w": torch.full((3,), 2.0)}
    versions.submit("a", update, samples=1)
    update["w"].fill_(9.0)
    assert versions.model["w"].tolist() == [1.0, 1.0, 1.0]


def test_client_may_train_the_model_in_place():
    """The base does not change, although the client trains the tensors that it received."""
    versions = made(FedOrtho(1.0))
    base = versions.checkout("a")
    base["w"] += 2
    versions.submit("a", base, samples=1)
    assert versions.model["w"].tolist() == [2.0, 2.0, 2.0]


def test_submit_accepts_differences_and_curves_like_aggregate():
    plain, short = made(FedOrtho(0.5)), made(FedOrtho(0.5))
    for client in "abc":
        base = plain.checkout(client), short.checkout(client)
        step = {"w": torch.arange(3.0) + ord(client)}
        plain.submit(client, {"w": base[0]["w"] + step["w"]}, samples=1)
        short.submit(client, step, samples=1, difference=True)
    assert alike(plain.model, short.model)
    curve = made(AsyncBezier(0.5))
    base = curve.checkout("a")
    curve.submit("a", [{"w": base["w"] + 1}, {"w": base["w"] + 2}], samples=1)
    assert curve.version == 1


def test_results_keep_array_types_and_tied_entries():
    shared = np.zeros((2, 2), np.float32)
    model = {"in": shared, "out": shared, "b": np.ones(2, ">f4")}
    versions = AsyncAggregator(FedAsync(0.5), model)
    base = versions.checkout("a")
    assert base["in"].base is base["out"].base or np.shares_memory(base["in"], base["out"])
    assert base["b"].dtype.str == ">f4"
    versions.submit("a", copy.deepcopy(base), samples=1)
    saved = through_a_file(versions.state())
    again = AsyncAggregator(FedAsync(0.5), model)
    again.load(saved)
    assert all(np.array_equal(again.model[key], versions.model[key]) for key in model)
    assert isinstance(AsyncAggregator(FedAsync(0.5), (np.ones(2),)).checkout("a"), tuple)


def test_saved_state_contains_client_states_and_buffered_updates():
    for rule in (ASGD(0.5, dominance=Dominance(4)), FedBuff(3)):
        whole, first = made(rule), made(rule)
        for i, client in enumerate("aabab"):
            if i == 2:
                saved = through_a_file(first.state())
                first = made(rule)
                first.load(saved)
            for versions in (whole, first):
                base = versions.checkout(client)
                numbers = versions.submit(client, {"w": base["w"] + i + 1}, samples=i + 1)
            assert numbers["staleness"] == 0
        assert alike(whole.state(), first.state())


@pytest.mark.usefixtures("as_shipped")
def test_load_rejects_state_of_another_aggregator():
    versions = made()
    versions.checkout("a")
    saved = versions.state()
    for change, words in [
        ({"rule": "x.Y"}, "state: rule: was x.Y, got .*FedAsync"),
        ({"models": {0: {"w": torch.ones(2)}}}, "state: models: 0: w: expected shape"),
        ({"models": {}}, "state: expected the result of AsyncAggregator.state"),
        ({"in_flight": [("a", None, 5, False)]}, "state: in_flight: "),
        ({"in_flight": [("a", None, 0)]}, "state: expected the result of AsyncAggregator.state"),
        ({"in_flight": [("a", None, 0, 3)]}, "state: in_flight: "),
        ({"in_flight": [("a", None, 0, False)] * 2}, "state: in_flight: "),
        ({"in_flight": [("b", None, 0, False)]}, "state: in_flight: "),
        ({"in_flight": [("a", [1], 0, False)]}, "task: expected a hashable"),
        ({"state": 17}, "state: state: expected the state of FedAsync"),
        ({"state": torch.zeros(99)}, "state: state: expected the state of FedAsync"),
        ({"state": {}}, "state: state: expected the state of FedAsync"),
        ({"version": -1}, "state: version"),
        ({"weights": 3}, "weights: state: expected"),
    ]:
        unchanged(versions, words, versions.load, saved | change)
    unchanged(versions, "state: expected the result of AsyncAggregator.state", versions.load, {})
    unchanged(versions, "state: expected the result of AsyncAggregator.state", versions.load, 3)


@pytest.mark.usefixtures("as_shipped")
def test_load_rejects_state_with_tensors_of_another_shape():
    rule = FedAdam(2)
    saved = made(rule).state()
    odd = {name: torch.ones(9) if isinstance(kept, torch.Tensor) else kept for name, kept in saved["state"].items()}
    assert not alike(odd, saved["state"])
    versions = made(rule)
    unchanged(versions, "state: state: expected the state of FedAdam", versions.load, saved | {"state": odd})
    versions.load(saved)


def test_claimed_samples_are_capped_at_100_medians():
    server = Server.of(torch.nn.Linear(2, 1), FedAsync(0.5))
    versions = AsyncAggregator(FedAsync(0.5), server.state_dict())
    for i, samples in enumerate([3, 5, 4, 6, 2, 3, 10**9]):
        receipt = server.receive_model(server.dispatch(i), server.state_dict(), samples=samples).check()
        versions.checkout(i)
        assert versions.submit(i, versions.model, samples=samples)["weight"] == receipt.weight
    assert receipt.clipped


def test_concurrent_calls_are_serialised():
    versions = made(FedBuff(4), weights="uniform")
    names = range(32)
    barrier = threading.Barrier(8)

    def work(mine):
        barrier.wait()
        for name in mine:
            base = versions.checkout(name)
            versions.submit(name, {"w": base["w"] + 1}, samples=1)

    threads = [threading.Thread(target=work, args=(names[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (versions.version, versions.in_flight) == (8, {})


@pytest.mark.usefixtures("as_shipped")
def test_load_with_other_rule_options_requires_replace_except_private(tmp_path):
    saved = made(FedAsync(0.5)).state()
    versions = made(FedAsync(0.25))
    unchanged(versions, "state: rule: rate: was 0.5, got 0.25; pass replace=True", versions.load, saved)
    versions.load(saved, replace=True)
    other = made(FedBuff(2))
    for replace in (False, True):
        unchanged(
            other, r"state: rule: was .*FedAsync, got .*FedBuff; ((?!replace).)*$", other.load, saved, replace=replace
        )
    counted = made(Private(FedBuff(2), clip=1.0, noise=1.0)).state()
    louder = made(Private(FedBuff(2), clip=1.0, noise=2.0))
    unchanged(louder, r"state: rule: \(clip, noise\) was", louder.load, counted, replace=True)


@pytest.mark.parametrize("model", [{"w": torch.zeros(3)}, [torch.zeros(2), torch.ones(1)]], ids=["names", "list"])
def test_open_starts_and_resumes_with_the_tasks_in_flight(tmp_path, model):
    def opened():
        return AsyncAggregator.open(tmp_path / "state", FedBuff(2), model)

    whole = AsyncAggregator(FedBuff(2), model)
    again = opened()
    for versions in (whole, again):
        for client in ("a", 7):
            versions.checkout(client)
        versions.submit("a", versions.model, samples=3)
    again.save(tmp_path / "state")
    again = opened()
    assert again.in_flight == whole.in_flight == {(7, None): 0}
    ones = [torch.ones_like(x) for x in model] if isinstance(model, list) else {"w": torch.ones(3)}
    assert again.submit(7, ones, samples=2) == whole.submit(7, ones, samples=2)
    assert alike(again.state(), whole.state())
    with pytest.raises(ArgumentError, match="rule: size: was 2, got 3"):
        AsyncAggregator.open(tmp_path / "state", FedBuff(3), model)
    again.checkout(("a", "tuple"))
    with pytest.raises(CheckpointError, match="weights|in_flight"):
        again.save(tmp_path / "state")
    assert alike(opened().state(), AsyncAggregator.open(tmp_path / "state", FedBuff(2), model).state())


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_aggregator_cannot_be_copied_and_names_its_state(copied):
    with pytest.raises(TypeError, match=r"^an AsyncAggregator has locks: .*; pass its `state\(\)` to `load`$"):
        copied(made(FedAsync(0.5)))
