"""Resuming a server from a module or a state dict, as it was created."""

import pytest
import torch
from torch import nn

from manifoldagg import Server
from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.federated import CheckpointPolicy, Durability, Payload
from manifoldagg.federated.rules import FedAsync, FedBuff, GeneralizedAsyncSGD
from manifoldagg.manifolds import Flat, ParameterSpace, Sphere
from tests.federated.fingerprint import bits
from tests.server_options import grouped

pytestmark = pytest.mark.usefixtures("as_shipped")
RULE = FedAsync(0.5)


def net(seed=0):
    """Return a module with buffers and a frozen layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[2].requires_grad_(False)
    return model


def trained(ticket):
    return {name: x + 0.1 if x.is_floating_point() else x + 1 for name, x in ticket.state_dict().items()}


def masked(seed=0):
    """Return a state dict with a floating tensor that is a buffer only by its policy."""
    return dict(net(seed).state_dict(), mask=torch.ones(4))


def factors(seed=0):
    """Return a state dict of adapters."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q.lora_A.weight": (2, 5), "q.lora_B.weight": (4, 2), "head.weight": (3, 3)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("make", "options", "resume_options"),
    [
        (net, {}, {}),
        (net, {"buffer_policy": {"*running*": "latest"}}, {}),
        (lambda seed=0: net(seed).state_dict(), {}, {}),
        (masked, {"buffer_policy": {"*mask": "leave"}}, {}),
        (masked, {"buffer_policy": ["*mask"]}, {"buffer_policy": ["*mask"]}),
        (factors, {"adapters": True, "scaling": 2.0}, {"adapters": True, "scaling": 2.0}),
    ],
)
def test_a_server_resumes_from_the_model_that_it_was_created_from(make, options, resume_options, tmp_path):
    server = Server.of(make(), RULE, **grouped(max_staleness=9, **options))
    assert server.receive_model(server.dispatch("a"), trained(server.dispatch("b")), samples=10).accepted
    late = server.dispatch("c")
    server.save(tmp_path / "server")
    # The values of the model do not matter.
    resumed = Server.resume(tmp_path / "server", make(seed=1), RULE, **grouped(**resume_options))
    assert resumed.space == server.space
    assert resumed._updates.plan.policies == server._updates.plan.policies
    assert bits(resumed.state_dict()) == bits(server.state_dict())
    assert resumed.tickets == server.tickets
    update = trained(late)
    assert resumed.receive_model(late, update, samples=10) == server.receive_model(late, update, samples=10)
    assert bits(resumed.state_dict()) == bits(server.state_dict())


def test_new_policies_keep_frozen_parameters_unchanged(tmp_path):
    server = Server.of(net(), RULE)
    server.save(tmp_path / "server")
    resumed = Server.resume(tmp_path / "server", net(), RULE, buffer_policy={"*running*": "latest"})
    policies = resumed._updates.plan.policies
    assert policies["2.weight"] == "leave"
    assert policies["1.running_mean"] == "latest"


def test_spaces_of_parameters_are_passed_as_to_of(tmp_path):
    model = nn.Linear(4, 2, bias=False)
    nn.init.eye_(model.weight)
    for given in (model, model.state_dict()):
        server = Server.of(given, RULE, manifolds={"weight": Sphere(4)})
        server.save(tmp_path / "server")
        resumed = Server.resume(tmp_path / "server", given, RULE, manifolds={"weight": Sphere(4)})
        assert resumed.space == server.space
        with pytest.raises(CheckpointError, match="/server: model: "):
            Server.resume(tmp_path / "server", given, RULE)


def test_a_journal_resumes_from_a_module(tmp_path):
    server = Server.of(net(), RULE, durability=Durability(journal=tmp_path / "journal"))
    ticket = server.dispatch("a")
    receipt = server.receive_model(ticket, trained(ticket), samples=10)
    expected = bits(server.state_dict())
    del server
    resumed = Server.resume(tmp_path / "server", net(1), RULE, durability=Durability(journal=tmp_path / "journal"))
    assert resumed.version == 1
    assert bits(resumed.state_dict()) == expected
    assert resumed.receive_model(ticket, {}, samples=10) == receipt
    resumed.close()


def test_a_space_is_accepted_too(tmp_path):
    server = Server(Flat(2), RULE, torch.zeros(2))
    server.save(tmp_path / "server")
    assert Server.resume(tmp_path / "server", Flat(2), RULE).space == Flat(2)
    server = Server.of(net(), RULE)
    server.save(tmp_path / "module")
    assert Server.resume(tmp_path / "module", ParameterSpace.of(net()), RULE).space == server.space


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda path: Server.resume(path, nn.Linear(4, 8), RULE),
            "{path}: model: layout: leaves[0]: name: was 0.weight, got weight",
        ),
        (
            lambda path: Server.resume(path, ParameterSpace.of(nn.Linear(4, 8)), RULE),
            "{path}: space: layout: leaves[0]: name: was 0.weight, got weight",
        ),
        (
            lambda path: Server.resume(path, net(), FedAsync(0.6)),
            "{path}: rule: rate: was 0.5, got 0.6; pass replace=True to replace it",
        ),
        (lambda path: Server.resume(path, 3, RULE), "model: expected a torch.nn.Module, a state dict or a Manifold, got 3; write Server.resume(path, model, rule)"),
        (lambda path: Server.resume(path, RULE, net()), "rule: expected a rule of manifoldagg.federated.rules, got Sequential with 83 parameters; write Server.resume(path, model, rule)"),
        (lambda path: Server.resume(path, nn.ReLU(), RULE), "model: expected floating parameters, got none"),
        (lambda path: Server.resume(path, ParameterSpace.of(net()), RULE, adapters=True), "adapters: expected None if model is a space, got True"),
        (lambda path: Server.resume(path, ParameterSpace.of(net()), RULE, scaling=2.0), "scaling: expected 1.0 if model is a space, got 2.0"),
        (lambda path: Server.resume(path, net(), RULE, buffer_policy={"*mask": "leave"}), "buffer_policy: '*mask' matches no entry of the model"),
        (lambda path: Server.resume(path, net(), RULE, replace="yes"), "replace: expected one of True, False; got 'yes'"),
    ],
)  # fmt: skip
def test_error_names_what_does_not_match_the_checkpoint(call, message, tmp_path):
    path = tmp_path / "server"
    Server.of(net(), RULE).save(path)
    with pytest.raises((ArgumentError, CheckpointError)) as caught:
        call(path)
    assert str(caught.value) == message.replace("{path}", str(path))


def test_a_replaced_rule_that_does_not_support_the_model_is_rejected(tmp_path):
    model = nn.Linear(4, 2, bias=False)
    nn.init.eye_(model.weight)
    curved = {"weight": Sphere(4)}
    Server.of(model, RULE, manifolds=curved).save(tmp_path / "server")
    rule = GeneralizedAsyncSGD([1.0])
    with pytest.raises(ArgumentError, match="^model: expected flat leaves for the gradients of GeneralizedAsyncSGD"):
        Server.resume(tmp_path / "server", model, rule, manifolds=curved, replace=True)


def test_orphaned_tickets_are_the_difference_of_two_sets(tmp_path):
    """The test runs the recipe of the guide on fault tolerance."""
    path = tmp_path / "server"
    server = Server(
        Flat(2), FedBuff(2), torch.zeros(2), durability=Durability(checkpoint=CheckpointPolicy(path, every_updates=1))
    )
    known, lost = server.dispatch("a"), server.dispatch("b")
    server.save()
    resumed = Server.resume(path, Flat(2), FedBuff(2))
    orphans = set(resumed.tickets) - {known.id}
    assert orphans == {lost.id}
    for ticket in orphans:
        resumed.drop(ticket)
    assert resumed.tickets == [known.id]
    assert resumed.receive(lost, Payload(torch.ones(1, 2), 1)).reason == "ticket: unknown, or used already"
