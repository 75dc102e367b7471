"""Tests on a GPU: results stay on the GPU, and agree with those on the CPU. Without a GPU, they are skipped."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from manifoldagg import AsyncAggregator, average, tensor_file
from manifoldagg.averaging import SWA, average_adapters, fit_subspace, karcher
from manifoldagg.corrections import rotate_control
from manifoldagg.curves import (
    ASAM,
    SAM,
    Bezier,
    Complex,
    Control,
    Piecewise,
    Simplex,
    Training,
    Tunnel,
    curvature,
    fit,
    parameter_at_distance,
    plane,
    refresh_buffers,
)
from manifoldagg.federated import Message, Server, clients
from manifoldagg.federated.rules import AsyncKrylov, FedBuff, FedOrtho
from manifoldagg.kernels import combine, gram, set_backend
from manifoldagg.manifolds import Flat, ParameterSpace, Sphere
from manifoldagg.optim import Outer
from manifoldagg.testing.rule_case import RuleCase
from tests.federated.rules.test_golden import CASES, works_on
from tests.manifolds.test_laws import CASES as SPACES
from tests.optim.test_outer import RULES as OUTER_RULES
from tests.support import draw, relative
from tests.testing.test_rule_check import CLIENTS, near, num_points

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

SHAPES = {"hidden.weight": (4, 3), "hidden.bias": (4,), "out.weight": (2, 4), "scale": ()}
SPACE = ParameterSpace.of_state_dict({name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()})
CURVED = ParameterSpace.of_state_dict(
    {"turn": torch.eye(30, dtype=torch.float64)[:2], "bias": torch.zeros(4, dtype=torch.float64)}, {"turn": Sphere(30)}
)
TOLERANCE = 1e-8
"""The largest relative difference between float64 results. The devices add in different orders, and a rule such as
`RadialDirectional` increases the difference a hundredfold."""
BIT_DEPENDENT = {"Private"}
"""Rules whose noise depends on every bit of the sum of the updates, so that it differs between devices."""
PAIRS = [(draw(i, 5, 3), draw(i, 5)) for i in range(4)]


def seeded():
    """A new generator, so that two runs have the same draws."""
    return torch.Generator().manual_seed(3)


def moved(tree, device=DEVICE):
    """A copy of a tree with its tensors on a device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to(device, copy=True), tree)


def assert_agrees(found, expected, tolerance=TOLERANCE):
    """Assert that two trees agree, and that the first is on the GPU."""
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    for on_gpu, on_cpu in pairs:
        if isinstance(on_gpu, torch.Tensor):
            assert on_gpu.device.type == DEVICE
            assert relative(on_gpu.detach().cpu(), on_cpu.detach()) <= tolerance
        else:
            assert on_gpu == on_cpu


def run_of(name, space=SPACE):
    """An asynchronous run of a registered rule on the CPU."""
    rule = CASES[name]
    payload = near if name == "AdaMasFL" else None
    return RuleCase(rule, space, num_points=num_points(rule), clients=CLIENTS, make_payload=payload)


def replay(case, records, server, tickets):
    """Send the updates of a run to another server, and compare the models."""
    for record in records:
        place, following = case.schedule[server.updates]
        server.receive(tickets.pop(place), moved_payload(record.payload)).check()
        tickets.append(server.dispatch(following))
        assert_agrees(server.model, record.model)


def moved_payload(payload):
    """A payload on the GPU."""
    return replace(payload, points=moved(payload.points), tensors=moved(dict(payload.tensors)))


@pytest.mark.parametrize("name", sorted(CASES.keys() - BIT_DEPENDENT))
def test_a_server_on_the_gpu_agrees_with_one_on_the_cpu(name, tmp_path):
    case = run_of(name)
    records = case.server_run().finish().records
    server = Server(case.space, case.rule, moved(case.start), weights=case.sample_counts)
    tickets = [server.dispatch(client) for client in case.clients]
    assert all(ticket.message.start.device.type == DEVICE for ticket in tickets)
    replay(case, records[:6], server, tickets)
    server.save(tmp_path / "checkpoint")
    resumed = Server.resume(tmp_path / "checkpoint", case.space, case.rule)
    assert resumed.model.device.type == DEVICE
    assert torch.equal(resumed.model, server.model)
    replay(case, records[6:], resumed, tickets)


def supported(space):
    """The rules that need only models and support a space."""
    start = space.random_point(generator=seeded(), dtype=torch.float64)
    return sorted(set(works_on(space, start)) & CASES.keys() - BIT_DEPENDENT)


@pytest.mark.parametrize(
    ("space", "name"),
    [
        pytest.param(space, name, id=f"{name}-{kind}")
        for kind, space in (("flat", SPACE), ("curved", CURVED))
        for name in supported(space)
    ],
)
def test_aggregate_on_the_gpu_agrees_with_the_cpu(name, space):
    case = run_of(name, space)
    records = case.server_run().advance(6).records
    runs = [case.aggregate_run(space, records) for _ in range(4)]
    on_cpu, on_gpu, from_cpu, split = runs
    on_cpu.advance(6)
    for _ in range(6):
        current, base, update = on_gpu.next_models()
        on_gpu.models.append(step(on_gpu, moved(current), moved(base), moved(update)))
        current, base, update = from_cpu.next_models()
        from_cpu.models.append(step(from_cpu, moved(current), base, update))
        current, base, update = (on_two_devices(tree) for tree in split.next_models())
        split.models.append(step(split, current, base, update))
    assert_agrees(on_gpu.models[-1], on_cpu.models[-1])
    # Updates on the CPU are copied to the devices of the model.
    assert_agrees(from_cpu.models[-1], on_cpu.models[-1])
    devices = {key: tensor.device.type for key, tensor in split.models[-1].items()}
    assert devices == {key: tensor.device.type for key, tensor in on_two_devices(on_cpu.models[-1]).items()}
    assert_agrees(moved(split.models[-1]), on_cpu.models[-1])


def step(run, current, base, update):
    model, run.state, _ = run.step(current, base, update)
    return model


def on_two_devices(tree):
    """A copy of state dicts with every second tensor on the GPU."""
    if isinstance(tree, list):
        return [on_two_devices(part) for part in tree]
    return {name: tensor.to([DEVICE, "cpu"][i % 2], copy=True) for i, (name, tensor) in enumerate(tree.items())}


def test_an_aggregator_copies_updates_to_the_device_of_the_model():
    model = nn.Linear(4, 3).double().to(DEVICE)
    start = dict(model.state_dict())
    aggregator = AsyncAggregator(FedOrtho(0.5), start)
    assert_agrees(aggregator.checkout("a"), moved(dict(start), "cpu"))
    aggregator.submit("a", {name: tensor.cpu() + 1 for name, tensor in start.items()}, samples=3)
    assert_agrees(aggregator.model, {name: tensor.cpu() + 0.5 for name, tensor in start.items()})


@pytest.mark.parametrize("name", OUTER_RULES)
def test_an_outer_optimiser_on_the_gpu_agrees_with_one_on_the_cpu(name):
    tensors = [draw(i, *shape) for i, shape in enumerate([(7, 5), (3,), (2, 2, 2)])]
    params = [[nn.Parameter(moved(tensor, device)) for tensor in tensors] for device in ("cpu", DEVICE)]
    outers = [Outer(own, OUTER_RULES[name]) for own in params]
    for turn in range(4):
        if turn == 2:
            saved = outers[1].state_dict()
            outers[1] = Outer(params[1], OUTER_RULES[name])
            outers[1].load_state_dict(saved)
        for own, outer in zip(params, outers, strict=True):
            for i, p in enumerate(own):
                p.grad = draw(10 * turn + i, *p.shape).to(p.device)
            outer.step()
    assert_agrees(params[1], params[0])


def loss(theta, batch):
    inputs, targets = batch
    return (inputs.to(theta.device) @ theta - targets.to(theta.device)).square().mean()


TRAINERS = [
    clients.Local(rate=0.1, proximal=0.1),
    clients.Local(rate=0.1, sharpness=SAM(0.1)),
    clients.Local(rate=0.1, proximal=clients.LorentzProximal(0.3, 0.7, 1.5)),
    clients.Local(rate=0.1, sharpness=ASAM(0.1)),
    clients.Gradient(),
    clients.Curve(degree=3, rate=0.1),
    clients.AsyncCurve(rate=0.1),
    clients.Trajectory(rate=0.1),
]


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: type(trainer).__name__)
def test_a_trainer_on_the_gpu_agrees_with_the_cpu(trainer):
    start = draw(0, 3)
    found, expected = (
        trainer.train(Flat(3), Message(own), loss, PAIRS, None, generator=seeded()) for own in (moved(start), start)
    )
    assert_agrees(found.points, expected.points, 1e-9)


@pytest.mark.parametrize("space", [space for spaces in SPACES.values() for space in spaces], ids=lambda s: str(s)[:30])
def test_a_manifold_on_the_gpu_agrees_with_the_cpu(space):
    generator = seeded()
    x = space.random_point(generator=generator, dtype=torch.float64)
    v, w = (0.05 * space.random_tangent(x, generator) for _ in range(2))
    y = space.exp(x, v) if "exp" in space.capabilities else space.retract(x, v)
    calls = {
        "exp": lambda x, y, v, w: space.exp(x, v),
        "retract": lambda x, y, v, w: space.retract(x, v),
        "log": lambda x, y, v, w: space.log(x, y),
        "inverse_retract": lambda x, y, v, w: space.inverse_retract(x, y),
        "transport": lambda x, y, v, w: space.transport(x, y, w),
        "inner": lambda x, y, v, w: space.inner(x, v, w),
        "project_tangent": lambda x, y, v, w: space.project_tangent(x, v + w),
        "project": lambda x, y, v, w: space.project(x),
    }
    for name, call in calls.items():
        if name in space.capabilities:
            assert_agrees(call(*map(moved, (x, y, v, w))), call(x, y, v, w), 1e-9)


EMBEDDINGS = [
    Bezier(Flat(3), 3),
    Bezier(Sphere(3)),
    Piecewise(Flat(3), degree=1, pieces=3),
    Simplex(Flat(3), 3),
    Complex(Flat(3), ((0, 1, 2), (1, 2, 3))),
    Tunnel(Bezier(Flat(3)), 0.02),
]


@pytest.mark.parametrize("curve", EMBEDDINGS, ids=lambda curve: type(curve).__name__)
def test_an_embedding_on_the_gpu_agrees_with_the_cpu(curve):
    start = draw(0, 3)
    start = start / start.norm()
    found, expected = (
        fit(curve, loss, PAIRS, start=own, training=Training(rate=0.05), generator=seeded())
        for own in (moved(start), start)
    )
    assert_agrees(found.phi, expected.phi, 1e-9)
    phi = expected.phi + 0.1 * draw(5, *expected.phi.shape)
    if not curve.space.flat:
        phi = curve.space.project(phi)
    if isinstance(curve, Tunnel):
        curve = replace(curve, form="subspace")
    x = curve.sample(4, generator=seeded())
    at = partial(torch.Tensor.to, x)
    calls = [lambda phi: curve(phi, at(phi.device))]
    if isinstance(curve, Bezier | Piecewise):
        calls += [
            curve.length,
            lambda phi: curve.velocity(phi, at(phi.device)),
            lambda phi: curve.acceleration(phi, at(phi.device)),
        ]
        values = [
            lambda phi: curve.parameter_at_length(phi, 0.3),
            lambda phi: curve.nearest(phi, phi.mean(0) + 1)[1],
            lambda phi: curve.contains(phi, phi[0]),
            lambda phi: curvature(curve, phi).total,
        ]
        if isinstance(curve, Bezier):
            values.append(lambda phi: curve.split(phi, 0.3)[0])
        values = values if curve.space.flat else values[:1]
    else:
        calls += [curve.log_volume, curve.volume]
        values = [lambda phi: curve.nearest(phi, phi.mean(0) + 1)[1], lambda phi: curve.contains(phi, phi.mean(0))]
        values = [values[0]] if isinstance(curve, Tunnel) else values
        if hasattr(curve, "log_volume_gradient"):
            values.append(curve.log_volume_gradient)
    for call in calls + values:
        assert_agrees(call(moved(phi)), call(phi), 1e-6)
    for call in calls:
        gradients = []
        for own in (moved(phi), phi.clone()):
            call(own.requires_grad_()).sum().backward()
            gradients.append(own.grad)
        assert_agrees(*gradients, 1e-6)


def test_means_on_the_gpu_agree_with_the_cpu():
    models = [{"a": draw(i, 50, 30), "b": draw(i + 9, 4).float()} for i in range(4)]
    found = average(moved(models), [1, 2, 3, 4])
    assert_agrees(found, average(models, [1, 2, 3, 4]), 1e-6)
    points = Sphere(5).project(draw(0, 5) + 0.2 * draw(1, 4, 5))
    assert_agrees(karcher(Sphere(5), moved(points)).point, karcher(Sphere(5), points).point)


def test_other_averages_on_the_gpu_agree_with_the_cpu():
    versions = [draw(i, 60) for i in range(6)]
    averages = [SWA(Flat(60), start=2, cycle=2) for _ in range(2)]
    for version, model in enumerate(versions):
        averages[0].update(version, moved(model))
        averages[1].update(version, model)
    assert_agrees(averages[0].average, averages[1].average)
    adapters = [{"q.lora_A.weight": draw(i, 2, 9), "q.lora_B.weight": draw(i + 9, 8, 2)} for i in range(3)]
    found, expected = average_adapters(moved(adapters)), average_adapters(adapters)
    products = [one["q.lora_B.weight"] @ one["q.lora_A.weight"] for one in (found, expected)]
    assert_agrees(*products)
    points = torch.stack(versions)
    found, expected = (fit_subspace(own, Bezier(Flat(60), 1)) for own in (moved(points), points))
    assert found.phi.device.type == DEVICE
    # The ends of the line may be exchanged.
    assert found.value == pytest.approx(expected.value, rel=1e-6)


def test_other_operations_on_the_gpu_agree_with_the_cpu():
    rows = [draw(i, 50) for i in range(5)]
    assert_agrees(rotate_control(*moved(rows)), rotate_control(*rows))
    displacements = torch.stack(rows[:3])
    assert parameter_at_distance(moved(displacements), 0.5) == pytest.approx(parameter_at_distance(displacements, 0.5))
    corners = draw(0, 3, 30)
    found, expected = (
        plane(Bezier(Flat(30)), own, lambda theta: theta.square().sum().item(), resolution=5)
        for own in (moved(corners), corners)
    )
    assert relative(torch.as_tensor(found.values).cpu(), torch.as_tensor(expected.values)) <= 1e-9
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    space = ParameterSpace.of(model)
    point, batches = draw(0, *space.shape), [draw(1, 6, 2)]
    found = refresh_buffers(space, model.to(DEVICE), moved(point), moved(batches))
    assert_agrees(found, refresh_buffers(space, model.cpu(), point, batches))
    vertices = draw(4, 3, 3)
    found, expected = (
        fit(Simplex(Flat(3), 3), loss, PAIRS, phi=own, control=Control(free=[1, 2], volume=0.1), generator=seeded())
        for own in (moved(vertices), vertices)
    )
    assert_agrees(found.phi, expected.phi)


def test_tensor_files_restore_the_device(tmp_path):
    tree = {"a": draw(0, 3).to(DEVICE), "b": [draw(1, 2), 3]}
    tensor_file.save(tmp_path / "file", "test", tree)
    loaded = tensor_file.load(tmp_path / "file", "test")
    assert loaded["a"].device.type == DEVICE
    assert loaded["b"][0].device.type == "cpu"
    assert torch.equal(loaded["a"], tree["a"])


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("lengths", [[70_001], [5, 40_000, 0, 29_996]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_kernels_on_the_gpu_agree_with_the_cpu(backend, lengths, dtype):
    rows = [draw(i, 70_001, dtype=dtype) for i in range(10)]
    given = rows if len(lengths) == 1 else [row.split(lengths) for row in rows]
    coefficients = [[(i + 1) / (j + 2) for j in range(9)] for i in range(len(lengths))]
    before = set_backend(backend)
    try:
        found = gram(moved(given[:9]), minus=[moved(given[9])] * 9, segments=lengths)
        new = combine(moved(given[0]), moved(given[1:]), coefficients, segments=lengths)
    finally:
        set_backend(before)
    expected = gram(given[:9], minus=[given[9]] * 9, segments=lengths)
    assert relative(torch.as_tensor(found.tolist()), torch.as_tensor(expected.tolist())) <= 1e-12
    expected = combine(given[0], given[1:], coefficients, segments=lengths)
    pairs = zip(list(new), list(expected), strict=True) if len(lengths) > 1 else [(new, expected)]
    for one, other in pairs:
        assert one.device.type == DEVICE
        # The CPU uses fused multiply-add, so a result can be rounded to a neighbouring number.
        assert relative(one.cpu(), other) <= {torch.float64: 1e-15, torch.float32: 1e-9, torch.bfloat16: 1e-5}[dtype]


def test_derivatives_of_the_kernels_on_the_gpu_agree_with_the_cpu():
    results = []
    for device in (DEVICE, "cpu"):
        rows = [draw(i, 500).to(device).requires_grad_() for i in range(3)]
        value = gram(rows)[0].sum() + combine(rows[0], rows[1:], [0.5, 2.0]).square().sum().cpu()
        value.backward()
        results.append([row.grad for row in rows])
    assert_agrees(*results)


@pytest.mark.parametrize("rule", [FedBuff(2), AsyncKrylov(0.5), FedOrtho(0.5)], ids=lambda rule: type(rule).__name__)
def test_a_step_on_the_gpu_returns_the_same_bits_each_time(rule):
    models = [{name: draw(10 * i + n, 300, 200).to(DEVICE) for n, name in enumerate("abc")} for i in range(3)]
    space = ParameterSpace.of_state_dict(models[0])
    start = space.point(models[0])
    results = []
    for _ in range(2):
        server = Server(space, rule, start.clone())
        for turn in range(4):
            ticket = server.dispatch("a")
            server.receive_model(ticket.id, models[turn % 3], samples=1)
        results.append(server.model)
    assert torch.equal(*results)
