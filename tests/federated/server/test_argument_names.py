"""Tests that every error message names the argument of the caller in one line and does not print a model."""

import copy
import inspect
import pickle
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from manifoldagg import AsyncAggregator, Server, UpdateInfo, aggregate
from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.federated import (
    CheckpointPolicy,
    Journal,
    Payload,
    Receipt,
    UpdateLimits,
    clients,
    rules,
    stability_limit,
    suggest_rate,
    train_client,
)
from manifoldagg.federated.rules import ASGD, FedAsync, FedBuff, GeneralizedAsyncSGD, Krum, Private, TrimmedMean
from manifoldagg.manifolds import Flat, ParameterSpace, Sphere

pytestmark = pytest.mark.usefixtures("as_shipped")


class Verbose:
    """An object with a representation of many lines."""

    def __repr__(self):
        return "\n".join(["line"] * 100)


def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


BAD = [3, -1, "words", Verbose(), net(), [1, 2], torch.ones(3), object(), float("nan"), FedAsync, {"a": net()}]
MODEL = net()
STATE = MODEL.state_dict()
SPACE = ParameterSpace.of(MODEL)
RULE = FedAsync(0.5)


def check_messages(call, good, skip=()):
    """Call a function with each bad value in place of each good argument, and check the name in the message."""
    call(**good)
    for name in good.keys() - set(skip):
        for bad in BAD:
            try:
                answer = call(**{**good, name: bad})
            except (ArgumentError, CheckpointError) as error:
                message = str(error)
            else:
                if not isinstance(answer, Receipt) or answer.accepted:
                    continue  # the value is valid
                message = answer.reason
            assert message.startswith(name), (name, bad, message)
            assert "\n" not in message
            assert len(message) < 250


def test_the_constructor_names_its_arguments():
    def call(space, rule, start, **options):
        Server(space, rule, start, **options)

    good = {"space": SPACE, "rule": RULE, "start": SPACE.point(MODEL)}
    options = inspect.signature(Server).parameters.values()
    good |= {option.name: option.default for option in options if option.name not in good}
    check_messages(call, good, skip=("clock",))


@pytest.mark.parametrize("model", [MODEL, STATE], ids=["a module", "a state dict"])
def test_constructors_from_a_model_name_their_arguments(model, tmp_path):
    def of(**arguments):
        Server.of(**arguments)

    good = {
        "rule": RULE,
        "buffer_policy": (),
        "manifolds": None,
        "adapters": None,
        "scaling": 1.0,
        "weights": "uniform",
    }
    check_messages(of, {"model": model, **good})
    Server.of(model, RULE).save(tmp_path / "server")

    def resume(path, **arguments):
        Server.resume(tmp_path / "server" if path == "saved" else path, **arguments)

    good = {**good, "replace": False, "ignore_journal": False}
    # A path that does not exist is named by itself.
    check_messages(resume, {"path": "saved", "model": model, **good}, skip=("path",))
    with pytest.raises(ArgumentError, match="^path: expected a path, got Sequential with 83 parameters$"):
        Server.resume(net(), model, RULE)


def test_the_methods_of_a_server_name_their_arguments(tmp_path):
    server = Server.of(MODEL, RULE)

    def receive(payload, client):
        return server.receive(server.dispatch("a"), payload, client=client)

    def receive_model(model, **arguments):
        return server.receive_model(server.dispatch("a"), model, **arguments)

    payload = Payload(SPACE.point(MODEL)[None], samples=10, buffers=SPACE.buffers(MODEL))
    check_messages(receive, {"payload": payload, "client": "a"})
    check_messages(receive_model, {"model": STATE, "samples": 10, "client": "a", "scaling": None})
    check_messages(lambda ticket: server.drop(ticket or server.dispatch("a")), {"ticket": ""}, skip=("ticket",))
    check_messages(server.on_event, {"callback": print})
    check_messages(server.save, {"path": str(tmp_path / "server")}, skip=("path",))
    for ticket in ("words", 3, net()):
        with pytest.raises(ArgumentError, match="^ticket: "):
            server.drop(ticket)
    check_messages(lambda **arguments: server.dispatch(**arguments) and None, {"client": "a", "retain_base": True})


def test_the_aggregator_names_its_arguments():
    check_messages(AsyncAggregator, {"rule": RULE, "model": STATE, "weights": "observed", "space": None})
    aggregator = AsyncAggregator(RULE, STATE)

    def submit(**arguments):
        aggregator.checkout("a", restart=True)
        aggregator.submit(**arguments)

    good = {"client": "a", "update": STATE, "samples": 10, "task": None, "difference": False, "scaling": None}
    check_messages(submit, good)
    check_messages(aggregator.checkout, {"client": "a", "task": None, "version": None, "restart": True})
    check_messages(aggregator.load, {"state": aggregator.state()})


@pytest.mark.filterwarnings("ignore:weight. expected the client's share")
def test_aggregate_names_its_arguments():
    good = {"rule": RULE, "state": None, "current": STATE, "base": STATE, "update": STATE}
    check_messages(aggregate, {**good, "info": UpdateInfo(), "staleness": None, "space": None, "out": None})
    check_messages(UpdateInfo, {option.name: option.default for option in fields(UpdateInfo)})
    options = {"manifolds": None, "buffer_policy": (), "dtype": None, "adapters": False, "scaling": 1.0}
    check_messages(ParameterSpace.of_state_dict, {"state": STATE, **options})
    check_messages(ParameterSpace.of, {"model": MODEL, "manifolds": None, "buffer_policy": (), "dtype": None})


def test_train_client_names_its_arguments():
    message = Server.of(MODEL, RULE).dispatch("a").message
    batches = [(torch.ones(4, 4), torch.tensor([0, 1, 2, 0]))]
    good = {"model": net(), "message": message, "trainer": clients.Local(epochs=1), "generator": torch.Generator()}
    check_messages(lambda **arguments: train_client(batches=batches, **arguments), good)
    with pytest.raises(ArgumentError, match="^criterion: expected a function of outputs and targets, got 3$"):
        train_client(**good, batches=batches, criterion=3)
    with pytest.raises(ArgumentError, match="^batches: expected"):
        train_client(**good, batches=3)


def normed(width=8, batch_norm=True):
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if batch_norm else nn.Identity(), nn.Linear(8, width))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # from torch.compile
@pytest.mark.parametrize("batch_norm", [False, True])
def test_train_client_accepts_compiled_modules_and_names_other_models(batch_norm):
    initial = normed(batch_norm=batch_norm)
    batches = [(torch.ones(4, 4), torch.tensor([0, 1, 2, 0]))]

    def train(model):
        server = Server.of(initial, RULE)
        ticket = server.dispatch("a")
        given = train_client(model, ticket.message, clients.Local(epochs=1), batches, generator=torch.Generator())
        return given, server.receive(ticket, given)

    plain = normed(batch_norm=batch_norm)
    nested = nn.Sequential(*plain)
    nested[0] = torch.compile(nested[0], backend="eager")
    payload, _ = train(plain)
    for model in (torch.compile(plain, backend="eager"), nested):
        found, receipt = train(model)
        assert receipt.accepted
        assert found.buffers.keys() == payload.buffers.keys()
        assert all(torch.allclose(tensor, payload.buffers[name]) for name, tensor in found.buffers.items())
    number = sum(parameter.numel() for parameter in initial.parameters())
    with pytest.raises(ArgumentError, match=f"^model: expected the server's model with {number} trainable parameters"):
        train(normed(9, batch_norm))
    with pytest.raises(ArgumentError, match=r"^model: .*DataParallel.*model\.module"):
        train(nn.DataParallel(plain))
    if batch_norm:
        with pytest.raises(ArgumentError, match="^model: missing: 1.num_batches_tracked, 1.running_mean, 1.running_v"):
            train(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # from torch.compile
def test_train_client_trains_the_shared_part_of_a_compiled_module():
    server = Server.of(normed(), RULE, personal=["2.*"])
    batches = [(torch.ones(4, 4), torch.tensor([0, 1, 2, 0]))]
    model, state = torch.compile(normed(), backend="eager"), None
    for _ in range(2):
        ticket = server.dispatch("a")
        payload = train_client(
            model,
            ticket.message,
            clients.Local(epochs=1),
            batches,
            client_state=state,
            personal=["*2.*"],
            generator=torch.Generator(),
        )
        state = payload.client_state
        server.receive(ticket, payload).check()


def test_options_name_themselves(tmp_path):
    limits = {option.name: getattr(UpdateLimits(), option.name) for option in fields(UpdateLimits)}
    check_messages(UpdateLimits, limits)
    check_messages(
        CheckpointPolicy, {"path": str(tmp_path / "a"), "every_updates": 1, "every_seconds": None, "keep": 1}
    )
    check_messages(Journal, {"path": str(tmp_path / "journal"), "fsync": "batch", "fsync_every": 3})
    check_messages(stability_limit, {"concurrency": 9, "buffer_size": 1})
    check_messages(suggest_rate, {"rule": RULE, "num_clients": 9, "concurrency": 3}, skip=("num_clients",))


REQUIRED = {
    rules.Momentum: {"rule": FedAsync()},
    rules.Private: {"rule": FedBuff(2), "clip": 1.0, "noise": 1.0},
    rules.GeneralizedAsyncSGD: {"routing": [0.5, 0.5]},
    **{
        key: {"cohort": 4}
        for key in [rules.FedAvg, rules.FedAdam, rules.DeFedAvg, rules.FLOCO, rules.RadialDirectional]
    },
    **{key: {"clients": 4} for key in [rules.AsyncCurve, rules.Dominance]},
    clients.LorentzProximal: {"weight": 1.0},
    clients.Scheduled: {"trainer": clients.Local()},
}
RULES = [getattr(rules, name) for name in rules.__all__]
TRAINERS = [getattr(clients, name) for name in clients.__all__]
OPTIONED = [kind for kind in [*RULES, *TRAINERS] if is_dataclass(kind) and not inspect.isabstract(kind)]


@pytest.mark.parametrize("kind", OPTIONED, ids=lambda kind: f"{kind.__module__.split('.')[-2]}.{kind.__name__}")
def test_rules_and_trainers_name_their_options(kind):
    made = kind(**REQUIRED.get(kind, {}))
    check_messages(kind, {option.name: getattr(made, option.name) for option in fields(kind) if option.init})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Krum(size=6), "size: expected at least 7 with num_byzantine = 2, got 6"),
        (lambda: Krum(num_byzantine=5), "num_byzantine: expected at most (size - 3) / 2 with size = 10, got 5"),
        (lambda: TrimmedMean(size=4), "size: expected at least 5 with trim = 2, got 4"),
        (lambda: TrimmedMean(4, trim=3), "trim: expected a finite number <= 1, got 3"),
        (lambda: UpdateLimits(norm_window=3), "norm_window: expected at least norm_after = 5, got 3"),
        (lambda: UpdateLimits(norm_after=102), "norm_after: expected at most norm_window = 101, got 102"),
        (lambda: Private(FedAsync, 1.0, 1.0), "rule: expected an instance, got the class FedAsync; write FedAsync()"),
        (
            lambda: GeneralizedAsyncSGD(net()),
            "routing[0]: expected a finite number >= 0, got Linear with 40 parameters",
        ),
        (
            lambda: Server.of(net(), RULE, adapters=True),
            "adapters: expected False for a module, got True; pass the state dict that get_peft_model_state_dict of PEFT "
            "returns",
        ),
        (lambda: Server.of(net(), RULE, scaling=2.0), "scaling: expected 1 without adapters=True, got 2.0"),
    ],
)
def test_messages_name_what_the_caller_passed(call, message):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert str(caught.value) == message


def test_a_rule_that_does_not_support_the_space_is_reported_under_the_callers_arguments():
    rule = GeneralizedAsyncSGD([1.0])
    curved = {"weight": Sphere(4)}
    model = nn.Linear(4, 2, bias=False)
    nn.init.eye_(model.weight)
    state, words = model.state_dict(), "expected flat leaves for the gradients of GeneralizedAsyncSGD"
    for call, name in (
        (lambda: Server.of(model, rule, manifolds=curved), "model"),
        (lambda: Server.of(state, rule, manifolds=curved), "model"),
        (lambda: AsyncAggregator(rule, state, space=ParameterSpace.of_state_dict(state, curved)), "model"),
        (
            lambda: aggregate(rule, None, state, state, state, space=ParameterSpace.of_state_dict(state, curved)),
            "current",
        ),
        (lambda: Server(Sphere(4), rule, torch.eye(4)[0]), "space"),
    ):
        with pytest.raises(ArgumentError, match=f"^{name}: {words}"):
            call()
    with pytest.raises(ArgumentError, match="^rule: transport: expected None on a flat space, got 'ladder'$"):
        Server.of(net(), ASGD(transport="ladder"))


def test_a_state_dict_is_rejected_under_the_name_model():
    server = Server.of(net(), RULE, limits=UpdateLimits(max_norm=1.0))
    far = {name: x + 10 if x.is_floating_point() else x for name, x in STATE.items()}
    for model, reason in (
        (far, r"^model: expected a norm <= 1, got"),
        ([STATE, STATE], r"^model: expected one model, \(1, P\), for FedAsync, got 2$"),
        (STATE | {"1.running_var": torch.full((8,), -1.0)}, "^model: 1.running_var: expected finite values >= 0"),
    ):
        receipt = server.receive_model(server.dispatch("a"), model, samples=1)
        with pytest.raises(ArgumentError, match=reason):
            receipt.check()
    assert server.rejected == {"model": 3}
    payload = Payload(SPACE.point(far)[None], samples=1, buffers=SPACE.buffers(MODEL))
    assert server.receive(server.dispatch("a"), payload).reason.startswith("points: expected a norm <= 1, got")


@pytest.mark.parametrize(
    ("call", "usage"),
    [
        (lambda model: Server(RULE, SPACE, SPACE.point(model)), "space: expected a Manifold, got FedAsync"),
        (lambda model: Server(SPACE, SPACE.point(model), RULE), "start: expected a point, got FedAsync"),
        (lambda model: Server(SPACE, model, SPACE.point(model)), "rule: expected a rule"),
        (lambda model: Server.of(RULE, model), "model: expected a torch.nn.Module or a state dict, got FedAsync("),
        (lambda model: Server.of(model, model), "rule: expected a rule"),
        (lambda model: Server.resume("x", RULE, model), "rule: expected a rule"),
        (lambda model: AsyncAggregator(model.state_dict(), RULE), "rule: expected a rule"),
        (lambda model: aggregate(model.state_dict(), None, RULE, RULE, RULE), "rule: expected a rule"),
    ],
)
def test_exchanged_arguments_get_the_right_order(call, usage):
    with pytest.raises(ArgumentError) as caught:
        call(net())
    message = str(caught.value)
    assert message.startswith(usage)
    assert message.partition("; write ")[2] in (
        "Server(space, rule, start)",
        "Server.of(model, rule)",
        "Server.resume(path, model, rule)",
        "AsyncAggregator(rule, model)",
        "aggregate(rule, state, current, base, update)",
    )
    assert len(message) < 250


def test_a_model_is_represented_by_its_type_and_size():
    model = net()
    for value, text in (
        (model, "Sequential with 83 parameters"),
        (model.state_dict(), "OrderedDict of 9 tensors"),
        ([model], "list of 1 module"),
        ({"model": model, "rate": 0.5}, "dict of 2 entries"),
        (np.ones((2, 3)), "ndarray of shape (2, 3)"),
        (torch.tensor(0.5), "tensor(0.5000)"),
        (Verbose(), "a Verbose"),
        (dict.fromkeys(range(1000), 0), "dict of 1,000 entries"),
        (replace(FedBuff(3), rate=0.5), str(FedBuff(3, 0.5))[:97] + "..."),
    ):
        assert short_repr(value) == text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FedAsync(rat=0.5), "FedAsync() got an unexpected keyword argument 'rat'; did you mean 'rate'?"),
        (lambda: replace(RULE, weigthed=True), "FedAsync() got an unexpected keyword argument 'weigthed'; did you mean 'weighted'?"),
        (lambda: rules.Momentum(RULE, betta=0.5), "Momentum() got an unexpected keyword argument 'betta'; did you mean 'beta'?"),
        (lambda: clients.Local(epoch=3), "Local() got an unexpected keyword argument 'epoch'; did you mean 'epochs'?"),
        (lambda: UpdateLimits(max_nrm=1.0), "UpdateLimits() got an unexpected keyword argument 'max_nrm'; did you mean 'max_norm'?"),
        (lambda: Server(Flat(1), RULE, torch.zeros(1), limit=3), "Server() got an unexpected keyword argument 'limit'; did you mean 'limits'?"),
        (lambda: Server.of(net(), RULE, adapter=True), "Server.of() got an unexpected keyword argument 'adapter'; did you mean 'adapters'?"),
        (lambda: Server.of(net(), RULE, memry=3), "Server.of() got an unexpected keyword argument 'memry'; did you mean 'memory'?"),
        (lambda: Server.resume("x", net(), RULE, replce=True), "Server.resume() got an unexpected keyword argument 'replce'; did you mean 'replace'?"),
        (lambda: AsyncAggregator(RULE, STATE, weight="uniform"), "AsyncAggregator() got an unexpected keyword argument 'weight'; did you mean 'weights'?"),
        (lambda: AsyncAggregator(RULE, STATE, adapters=True), "AsyncAggregator() got an unexpected keyword argument 'adapters'; pass space=ParameterSpace.of_state_dict(model, adapters=...)"),
        (lambda: aggregate(RULE, None, STATE, STATE, STATE, buffer_policy=["a"]), "aggregate() got an unexpected keyword argument 'buffer_policy'; pass space=ParameterSpace.of_state_dict(model, buffer_policy=...)"),
        (lambda: aggregate(RULE, None, STATE, STATE, STATE, weight=0.5), "aggregate() got an unexpected keyword argument 'weight'; pass info=UpdateInfo(weight=...)"),
        (lambda: aggregate(RULE, None, STATE, STATE, STATE, stalenes=1), "aggregate() got an unexpected keyword argument 'stalenes'; did you mean 'staleness'?"),
        (lambda: UpdateInfo(sample=3), "UpdateInfo() got an unexpected keyword argument 'sample'; did you mean 'samples'?"),
        (lambda: FedAsync(colour=3), "FedAsync() got an unexpected keyword argument 'colour'; expected one of rate, staleness, weighted, transport, rungs"),
    ],
)  # fmt: skip
def test_an_unknown_keyword_gets_the_closest_one(call, message):
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value) == message


def test_a_subclass_with_its_own_constructor_keeps_its_keywords():
    class Slow(FedAsync):
        def __init__(self, speed):
            super().__init__(rate=speed)

    class Any_(FedAsync):
        def __init__(self, **options):
            super().__init__(rate=options["anything"])

    assert Slow(speed=0.25).rate == Any_(anything=0.25).rate == 0.25
    with pytest.raises(TypeError, match="Slow.* got an unexpected keyword argument 'sped'; did you mean 'speed'"):
        Slow(sped=0.25)


@pytest.mark.parametrize(
    "rule", [FedAsync(0.25), rules.Momentum(FedBuff(3)), UpdateLimits(clip=1.0), clients.Local()], ids=str
)
def test_the_check_of_keywords_leaves_copies_alone(rule):
    assert pickle.loads(pickle.dumps(rule)) == copy.copy(rule) == copy.deepcopy(rule) == replace(rule) == rule


def test_the_signatures_are_those_of_the_constructors():
    assert list(inspect.signature(FedAsync).parameters) == ["rate", "staleness", "weighted", "transport", "rungs"]
    assert list(inspect.signature(Server).parameters)[:4] == ["space", "rule", "start", "weights"]
    assert list(inspect.signature(Server.resume).parameters)[:4] == ["path", "model", "rule", "replace"]


def test_names_hint_at_the_same_integer_of_the_other_type():
    server = Server.of(net(), RULE, weights={"1": 10, 2: 20})
    for client, hint in (
        (1, "1 (int); did you mean '1' (str)?"),
        ("2", "'2' (str); did you mean 2 (int)?"),
        ("3", "'3'"),
    ):
        with pytest.raises(ArgumentError) as caught:
            server.dispatch(client)
        assert str(caught.value) == f"client: expected a client of weights, got {hint}"
    ticket = server.dispatch("1")
    reason = server.receive_model(ticket, STATE, samples=1, client=1).reason
    assert reason == "client: expected the client that the ticket was issued to, got 1 (int); did you mean '1' (str)?"
    aggregator = AsyncAggregator(RULE, STATE)
    aggregator.checkout("1", task=7)
    for call, message in (
        (lambda: aggregator.cancel(1, 7), "client: expected a client with a task in flight, got 1 (int); did you mean '1' (str)?"),
        (lambda: aggregator.submit(1, STATE, samples=1), "client: expected a client with a task in flight, got 1 (int); did you mean '1' (str)?"),
        (lambda: aggregator.cancel("1", "7"), "task: expected the name of a task of client '1' in flight, got '7' (str); did you mean 7 (int)?"),
        (lambda: aggregator.cancel("1"), "task: expected the name of a task of client '1' in flight, got None"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError) as caught:
            call()
        assert str(caught.value) == message
    with pytest.raises(
        ArgumentError, match=r"^client: expected a client with a share of the routing, got '1' \(str\); did you"
    ):
        aggregate(GeneralizedAsyncSGD({1: 1.0}), None, STATE, STATE, STATE, info=UpdateInfo("1"))
