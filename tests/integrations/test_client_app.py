"""`client_app`: what a node answers is what the simulator's client does, bit for bit, in the form that was asked."""

import time
from dataclasses import replace

import pytest
import torch
from flwr.app import ConfigRecord, Context, Metadata, RecordDict
from flwr.app import Message as FlowerMessage
from torch import nn

from manifoldagg.errors import ArgumentError, DivergenceError, WireError
from manifoldagg.experiments.registry import method
from manifoldagg.federated import Message, Payload, Server, Ticket, clients, rules
from manifoldagg.integrations.flower import client_app
from manifoldagg.integrations.flower.records import RECORD_KEY, array_record, bytes_to_record, record_to_bytes
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.simulation import FederatedDataset, run
from manifoldagg.wire import pack, ticket_of, unpack
from tests.simulation.executors.test_client_task import dropping, same
from tests.simulation.test_run import clusters, dirichlet

CLIENTS = 3


def federation(model=None):
    made = clusters() if model is None else replace(clusters(), model=model)
    return FederatedDataset.split(made, CLIENTS, partition=dirichlet(5.0), seed=0)


def node(client=0, **config):
    return Context(run_id=1, node_id=1000 + client, node_config=config, state=RecordDict(), run_config={})


def flower_message(content, kind="train"):
    ids = {"run_id": 1, "message_id": "0", "src_node_id": 1, "dst_node_id": 1000, "reply_to_message_id": ""}
    told = Metadata(**ids, group_id="", created_at=time.time(), ttl=3600.0, message_type=kind)
    return FlowerMessage(content, metadata=told)


def wire_form(message, space):
    ticket = Ticket("7f0c", 0, message, space)
    return RecordDict({RECORD_KEY: bytes_to_record(pack(ticket)), "config": ConfigRecord({"server-round": 1})})


def plain_form(message, space):
    state = space.state_dict(message.start, message.buffers or None)
    return RecordDict({"arrays": array_record(state), "config": ConfigRecord({"server-round": 1})})


def app_of(of, trainer, **options):
    def data(context, nth):
        return of.batches(context.node_config["partition-id"], nth)

    return client_app(trainer, of.dataset.model, data, seed=of.seed, **options)


def answer(app, content, context, space):
    reply = app(flower_message(content), context)
    data = record_to_bytes(reply.content)
    return reply.content, data, unpack(data, spec=space)


BARE = ["asyncbezier:epochs=2+1", "fedbuff:size=2,epochs=2", "asyncbezier:trainer=trajectory,epochs=2"]
WHOLE = ["orthofl:protocol=client", "masfl:steps=3", "floco:cohort=2,epochs=1", "asyncfeded:epochs=2", *BARE]
CASES = [*((name, wire_form) for name in WHOLE), *((name, plain_form) for name in BARE)]


@pytest.mark.parametrize("model", [None, dropping], ids=["plain", "drawing-with-statistics"])
@pytest.mark.parametrize(("name", "form"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_node_and_simulated_client_return_equal_bits(name, form, model):
    of = federation(model)
    asked = method(name)
    space = ParameterSpace.of(of.model())
    nodes = [node(client, **{"partition-id": client}) for client in range(CLIENTS)]
    app = app_of(of, asked.trainer)
    seen = []

    def watch(event):
        content, data, payload = answer(app, form(event.message, space), nodes[event.client], space)
        assert ticket_of(data) == ("7f0c" if form is wire_form else None)
        assert payload.client_state is None
        assert same(payload, event.payload)
        assert payload.numbers == event.payload.numbers
        assert content["metrics"]["num-examples"] == event.payload.samples
        assert content["metrics"].keys() == {"num-examples", *event.payload.numbers}
        seen.append(event.client)

    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    run(of, asked, num_updates=9, on_update=watch)
    assert len(seen) == 9
    assert max(map(seen.count, seen)) > 1
    assert torch.equal(torch.random.get_rng_state(), before)


class Counts:
    """Returns where it started, and counts in its memory."""

    def train(self, space, message, loss, batches, memory, *, generator):
        count = 0 if memory is None else memory["count"]
        kept = {"count": count + 1, "start": message.start, "odd": (None, b"b", 2**40, [float("nan")])}
        return Payload(message.start[None], 1, numbers={"count": count}, client_state=kept)


def test_client_state_and_task_count_stay_on_the_node_without_code():
    of = federation()
    space = ParameterSpace.of(of.model())
    message = Message(space.point(of.model()))
    asked = []

    def data(context, nth):
        asked.append((context.node_id, nth))
        return of.batches(0, nth)

    app = client_app(Counts(), of.dataset.model, data)
    mine, other = node(0), node(1)
    for context in (mine, mine, other, mine):
        answer(app, wire_form(message, space), context, space)
    assert asked == [(1000, 0), (1000, 1), (1001, 0), (1000, 2)]
    kept = mine.state[RECORD_KEY]
    assert kept["num_tasks"] == 3
    assert unpack(kept["client_state"]).client_state["count"] == 3
    assert torch.equal(unpack(kept["client_state"]).client_state["start"], message.start)
    # It is written by this package's wire, which holds no code, and goes where Flower takes states.
    assert type(kept) is ConfigRecord
    assert ConfigRecord.inflate(kept.deflate()) == kept


@pytest.mark.parametrize("form", [wire_form, plain_form])
def test_exception_of_training_propagates_and_the_next_task_runs(form):
    of = federation()
    space = ParameterSpace.of(of.model())
    seen = []

    class Fails:
        def train(self, space, message, loss, batches, memory, *, generator):
            seen.append((generator.initial_seed(), memory))
            if len(seen) == 2:
                raise DivergenceError("the loss is nan")
            return Payload(message.start[None], 1, client_state={"kept": len(seen)})

    app = app_of(of, Fails())
    context = node(**{"partition-id": 0})
    content = form(Message(space.point(of.model())), space)
    answer(app, content, context, space)
    with pytest.raises(DivergenceError):
        answer(app, content, context, space)
    answer(app, content, context, space)
    assert [seed for seed, _ in seen] == [of.generator(0, nth).initial_seed() for nth in range(3)]
    assert [memory for _, memory in seen] == [None, {"kept": 1}, {"kept": 1}]


def test_trainer_may_depend_on_the_run_config():
    of = federation()
    space = ParameterSpace.of(of.model())
    context = node(**{"partition-id": 0})
    context.run_config = {"degree": 3}
    app = app_of(of, lambda context: clients.Curve(degree=context.run_config["degree"], steps=(1, 1)))
    *_, payload = answer(app, plain_form(Message(space.point(of.model())), space), context, space)
    assert payload.points.shape[0] == 3


def test_half_precision_and_frozen_parameters_roundtrip():
    def half():
        made = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).bfloat16()
        made[0].weight.requires_grad_(False)
        return made

    space = ParameterSpace.of(half())
    server = Server.of(half(), rules.FedAsync(rate=0.5))
    ticket = server.dispatch("ward-7")
    batches = [(torch.ones(4, 2, dtype=torch.bfloat16), torch.tensor([0, 1, 2, 0]))]
    app = client_app(clients.Local(epochs=1), half, lambda context, nth: batches)
    contents = (
        RecordDict({RECORD_KEY: bytes_to_record(pack(ticket))}),
        RecordDict({"arrays": array_record(ticket.state_dict())}),
    )
    payloads = [answer(app, content, node(), space)[2] for content in contents]
    assert same(*payloads)
    assert set(payloads[0].buffers) == set(ticket.message.requested_buffers)
    assert server.receive(ticket, payloads[1]).accepted


def test_mods_wrap_training_and_evaluation():
    of = federation()
    space = ParameterSpace.of(of.model())
    seen = []

    def mod(message, context, call):
        seen.append(message.metadata.message_type)
        return call(message, context)

    app = app_of(of, clients.Local(epochs=1), mods=[mod])
    content = plain_form(Message(space.point(of.model())), space)
    for kind in ("train", "evaluate"):
        app(flower_message(content, kind), node(**{"partition-id": 0}))
    assert seen == ["train", "evaluate"]


@pytest.mark.parametrize("form", [wire_form, plain_form])
def test_evaluation_uses_the_received_model(form):
    of = federation(dropping)
    server = Server.of(of.model(), rules.FedAsync())
    message = server.dispatch(0).message
    batches = list(of.batches(0, 0))
    inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    model = of.model()
    model.load_state_dict(server.state_dict())
    expected = nn.functional.cross_entropy(model.eval()(inputs), labels).item()

    def metrics(**options):
        app = client_app(clients.Local(), of.dataset.model, lambda context, nth: batches, **options)
        return dict(app(flower_message(form(message, server.space), "evaluate"), node()).content["metrics"])

    found = metrics()
    # A mean of means: the same up to the rounding of some twenty additions.
    assert found == {"loss": pytest.approx(expected, rel=1e-5), "num-examples": len(labels)}

    def own(model, context):
        return {"num-examples": torch.tensor(7), "same": float(torch.equal(model[0].weight, trained[0].weight))}

    trained = of.model()
    assert metrics(evaluate=own) == {"num-examples": 7, "same": 1.0}
    with pytest.raises(ArgumentError, match=r"^evaluate: expected metrics with 'num-examples'"):
        metrics(evaluate=lambda model, context: {"accuracy": 1.0})


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_invalid_message_is_rejected_by_name(kind):
    of = federation()
    space = ParameterSpace.of(of.model())
    app = app_of(of, clients.Local(epochs=1))
    start = space.point(of.model())
    other = ParameterSpace.of(nn.Linear(2, 2))
    refused = {
        r"^message: expected one ArrayRecord, a model, got 0": RecordDict(),
        r"^wire: expected a ticket, got Message": RecordDict(
            {RECORD_KEY: bytes_to_record(pack(Message(start), spec=space))}
        ),
        r"^wire: layout": wire_form(Message(torch.zeros(6)), other),
        r"missing": plain_form(Message(torch.zeros(6)), other),
    }
    for text, content in refused.items():
        context = node(**{"partition-id": 0})
        with pytest.raises((ArgumentError, WireError), match=text):
            app(flower_message(content, kind), context)
        assert RECORD_KEY not in context.state


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("trainer", {"trainer": clients.Local}),
        ("trainer", {"trainer": 3}),
        ("model", {"model": "resnet"}),
        ("data", {"data": []}),
        ("criterion", {"criterion": 1}),
        ("seed", {"seed": -1}),
        ("evaluate", {"evaluate": 0.5}),
        ("threads", {"threads": 0}),
    ],
)
def test_invalid_options_are_rejected_by_name(name, given):
    fits = {"trainer": clients.Local(), "model": clusters().model, "data": lambda context, nth: []}
    with pytest.raises(ArgumentError, match=f"^{name}: expected"):
        client_app(**fits | given)


@pytest.mark.usefixtures("as_shipped")
def test_factory_that_returns_no_module_is_rejected():
    app = client_app(clients.Local(), lambda: 3, lambda context, nth: [])
    with pytest.raises(ArgumentError, match=r"^model: expected a function that returns a module, got int"):
        app(flower_message(RecordDict()), node())


def test_iterators_of_batches_are_rejected():
    of = federation()
    space = ParameterSpace.of(of.model())
    content = plain_form(Message(space.point(of.model())), space)
    for once in (iter([]), (batch for batch in ())):
        app = client_app(clients.Local(epochs=2), of.dataset.model, lambda context, nth, once=once: once)
        for kind in ("train", "evaluate"):
            with pytest.raises(ArgumentError, match=r"^data: expected a re-iterable object, .* returned a "):
                app(flower_message(content, kind), node())
