"""Tests of AsyncBezier and its trainer with other embeddings than curves (AsyncManifold)."""

import pickle
from dataclasses import dataclass, replace

import pytest
import scipy.integrate
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.corrections import OrthoDC
from manifoldagg.curves import Bezier, Complex, Control, Embedding, Phases, Piecewise, Simplex, Training, Tunnel, fit
from manifoldagg.curves.end_path import EndPath
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.registry import method
from manifoldagg.federated import Message, Payload, Server, Update
from manifoldagg.federated.clients import Curve
from manifoldagg.federated.rules import ASGD, AsyncBezier, FedOrtho
from manifoldagg.federated.server.durability.fingerprint import fingerprint
from manifoldagg.manifolds import Flat, Manifold, Sphere, geodesic
from manifoldagg.simulation import FederatedDataset, iid_partition, run
from manifoldagg.testing import check_rule
from tests.simulation.test_run import clusters
from tests.support import draw, relative, seeds

pytestmark = pytest.mark.usefixtures("as_shipped")

P = 6
SPACE = Flat(P)
START = draw(0, P)
BATCHES = list(draw(1, 5, P))


@dataclass(frozen=True)
class Ribbon(Embedding):
    """Surface with two coordinates that is not linear in its control points. The path to its end is a bent curve."""

    space: Manifold = None

    @property
    def size(self):
        return 3

    @property
    def domain(self):
        return (2,)

    def __call__(self, phi, x):
        a, b = x[..., :1].to(phi), x[..., 1:].to(phi)
        side = (phi[1] - phi[0]) * (1 + (phi[1] - phi[0]).square())
        return phi[0] + a * (phi[2] - phi[0]) + b * side

    def sample(self, *batch, generator=None):
        return torch.rand(*batch, 2, generator=generator, dtype=torch.float64)

    def path_coordinates(self, s):
        return torch.stack([s, s * (1 - s)], -1)


def ribbon_point(rows, s):
    """Return a point on the path of the ribbon, by a transcription of its formula."""
    return s * rows[1] + s * (1 - s) * rows[0] * (1 + rows[0] ** 2)


def update(seed, n=2, **known):
    base, current = draw(seed, 2, P)
    return Update(0, base, current, base + draw(seed + 1, n, P), **known)


def step(rule, given_, space=SPACE):
    return rule.step(space, rule.init(space, given_.current), given_)[1]


def loss(theta, batch):
    return (theta - batch).square().sum() / 2


def seeded():
    return torch.Generator().manual_seed(3)


EMBEDDINGS = [
    (Bezier(SPACE, 3), SPACE),
    (Piecewise(SPACE, 2, 2), SPACE),
    (Tunnel(Bezier(SPACE, 3), 0.2), SPACE),
    (Tunnel(Bezier(SPACE, 2), 0.2, form="subspace"), SPACE),
    (Tunnel(radius=0.2).on(Sphere(P), 2), Sphere(P)),
    (Simplex(SPACE, 4), SPACE),
    (Simplex(vertices=3).on(Sphere(P)), Sphere(P)),
    (Simplex(SPACE, 1), SPACE),
    (Ribbon(SPACE), SPACE),
]


@pytest.mark.parametrize(("embedding", "space"), EMBEDDINGS, ids=lambda x: type(x).__name__)
def test_path_goes_from_first_to_last_control_point(embedding, space):
    near = torch.ones(P, dtype=torch.float64) + 0.3 * draw(5, embedding.size, P)
    phi = near / near.norm(dim=-1, keepdim=True) if isinstance(space, Sphere) else near
    path = EndPath(embedding)
    assert relative(path(phi, 0.0), phi[0]) <= 1e-12
    assert relative(path(phi, 1.0), phi[-1]) <= 1e-12
    s = torch.rand(2, 3, generator=seeded(), dtype=torch.float64)
    assert path(phi, s).shape == (2, 3, P)
    if isinstance(embedding, Tunnel):
        assert torch.equal(path(phi, s), embedding.curve(phi, s))
    if isinstance(embedding, Simplex):
        assert relative(path(phi, 0.3), geodesic(space, phi[0], phi[-1], 0.3)) <= 1e-12


def test_an_embedding_without_an_end_point_has_no_path():
    triangles = Complex(SPACE, ((0, 1, 2), (1, 2, 3)))
    with pytest.raises(NotImplementedError, match="Complex has no path to an end point"):
        EndPath(triangles)(draw(0, 4, P), 0.5)


@pytest.mark.parametrize("freeze_end", [True, False])
@pytest.mark.parametrize(
    ("given_", "bound"),
    [
        (Tunnel(radius=0.2), Tunnel(Bezier(SPACE, 3), 0.2)),
        (Simplex(vertices=4), Simplex(SPACE, 4)),
        (Ribbon(), Ribbon(SPACE)),
    ],
    ids=["tunnel", "simplex", "ribbon"],
)
def test_the_trainer_returns_the_points_of_fit(given_, bound, freeze_end):
    trainer = Curve(degree=3, epochs=(2, 2), rate=0.1, embedding=given_, freeze_end=freeze_end)
    payload = trainer.train(SPACE, Message(START), loss, BATCHES, None, generator=seeded())
    control = Control(free=None if freeze_end else range(1, bound.size))
    learned = fit(
        bound, loss, BATCHES, start=START, phases=Phases((2, 2)), training=Training(rate=0.1), control=control,
        generator=seeded(),
    )  # fmt: skip
    assert torch.equal(payload.points, learned.phi[1:])
    # The random points of the second phase move the inner control points off the chord.
    plain = Curve(degree=3, epochs=(2, 0), rate=0.1, embedding=given_)
    chord = plain.train(SPACE, Message(START), loss, BATCHES, None, generator=seeded()).points
    assert relative(payload.points[0], chord[0]) > 1e-3


def test_a_tunnel_with_a_curve_keeps_its_degree():
    trainer = Curve(degree=2, epochs=(1, 1), embedding=Tunnel(Bezier(Flat(1), 4), 0.1))
    assert len(trainer.train(SPACE, Message(START), loss, BATCHES, None, generator=seeded()).points) == 4


rates = st.floats(0.01, 1.5)
modes = st.sampled_from(["chord", "length", "none"])
thresholds = st.sampled_from([-1.0, 0.0, 1.0])


@given(seeds, rates, modes, thresholds)
def test_step_on_a_tunnel_equals_the_step_on_its_curve(seed, rate, pull_back, threshold):
    given_ = update(seed, 3)
    rule = AsyncBezier(rate, threshold=threshold, pull_back=pull_back)
    expected = step(rule, given_)
    for embedding in (Tunnel(radius=0.3), Bezier(Flat(1), 3)):
        outcome = step(replace(rule, embedding=embedding), given_)
        assert torch.equal(outcome.model, expected.model)
        assert outcome.numbers == expected.numbers


@given(seeds, rates, modes)
def test_step_on_a_simplex_follows_the_edge_to_the_last_vertex(seed, rate, pull_back):
    given_ = update(seed, 3)
    end = replace(given_, points=given_.points[-1:])
    for threshold, linear in ((-1.0, ASGD), (1.0, FedOrtho)):
        rule = AsyncBezier(rate, threshold=threshold, pull_back=pull_back, embedding=Simplex(vertices=4))
        assert torch.equal(step(rule, given_).model, step(linear(rate), end).model)


@given(seeds, rates, modes, thresholds)
@settings(max_examples=25)
def test_step_on_any_embedding_follows_its_path(seed, rate, pull_back, threshold):
    """Transcription of Manifold (9)-(12) for the ribbon: correct each control point, then follow the path."""
    given_ = update(seed)
    rule = AsyncBezier(rate, threshold=threshold, pull_back=pull_back, embedding=Ribbon())
    outcome = step(rule, given_)
    rows = OrthoDC(threshold)(SPACE, given_.base, given_.current, given_.points - given_.base)
    s, rho = outcome.numbers["step"], min(rate, 1.0)
    assert relative(outcome.model - given_.current, ribbon_point(rows, s)) <= 1e-9
    if pull_back == "none":
        assert s == rho
    elif pull_back == "chord":
        grid = torch.linspace(0, 1, 20001, dtype=torch.float64)
        far = torch.stack([ribbon_point(rows, t) for t in grid]).norm(dim=-1) - rho * rows[1].norm()
        first = float(grid[int((far >= -1e-12).int().argmax())])
        assert abs(s - first) <= 1e-4 or float(ribbon_point(rows, s).norm() / rows[1].norm()) == pytest.approx(rho)
    else:

        def length(end):
            side = rows[0] * (1 + rows[0] ** 2)
            return scipy.integrate.quad(lambda t: float((rows[1] + (1 - 2 * t) * side).norm()), 0, end, epsrel=1e-11)[0]

        assert length(s) == pytest.approx(rho * length(1), rel=1e-8)


@dataclass(frozen=True)
class Disguised(Ribbon):
    """A quadratic Bézier curve of a class that the rule does not recognise."""

    def __call__(self, phi, x):
        return Bezier(self.space, 2)(phi, x[..., 0])


@pytest.mark.parametrize("pull_back", ["chord", "length", "none"])
@pytest.mark.parametrize("space", [SPACE, Sphere(P)], ids=["flat", "sphere"])
def test_the_path_of_any_embedding_agrees_with_the_closed_form(space, pull_back):
    points = torch.ones(4, P, dtype=torch.float64) + 0.3 * draw(7, 4, P)
    points = points / points.norm(dim=-1, keepdim=True)
    given_ = Update(0, points[0], points[1], points[2:])
    rule = AsyncBezier(0.4, threshold=0.0, pull_back=pull_back)
    expected, outcome = (step(r, given_, space) for r in (rule, replace(rule, embedding=Disguised())))
    # The grid search brackets a distance to 1e-9.
    assert relative(outcome.model, expected.model) <= 1e-9
    assert outcome.numbers["step"] == pytest.approx(expected.numbers["step"], rel=1e-8)


@pytest.mark.parametrize(
    "embedding", [Tunnel(radius=0.1), Simplex(vertices=3), Ribbon()], ids=lambda x: type(x).__name__
)
def test_every_embedding_satisfies_the_laws_of_rules(embedding):
    rule = AsyncBezier(0.5, threshold=0.0, embedding=embedding)
    verdict = check_rule(rule, num_points=2, seeds=1, verbose=False)
    assert verdict.holds, f"\n{verdict}"
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert fingerprint("rule", rule) == fingerprint("rule", replace(rule))


@pytest.mark.parametrize(
    "embedding", [Tunnel(radius=0.05), Simplex(vertices=3), Ribbon()], ids=lambda x: type(x).__name__
)
def test_server_learns_with_embeddings(embedding):
    trainer = Curve(epochs=(2, 1), rate=0.05, embedding=embedding)
    server = Server(SPACE, AsyncBezier(1.0, embedding=embedding), START, weights={"a": 1, "b": 1})
    target = torch.stack(BATCHES).mean(0)
    tickets = [server.dispatch(name) for name in "ab"]
    for i in range(40):
        ticket = tickets.pop(0)
        payload = trainer.train(SPACE, ticket.message, loss, BATCHES, None, generator=seeded())
        assert isinstance(payload, Payload)
        assert server.receive(ticket, payload).accepted
        tickets.append(server.dispatch("ab"[i % 2]))
    assert float((server.model - target).norm()) < 0.5 * float((START - target).norm())


@pytest.mark.parametrize(
    ("text", "embedding"),
    [
        ("embedding=tunnel,embedding.radius=0.2", Tunnel(radius=0.2)),
        ("embedding=simplex,embedding.vertices=4", Simplex(vertices=4)),
    ],
)
def test_command_line_accepts_names_of_embeddings(text, embedding):
    made = method(f"asyncbezier:{text}")
    assert made.rule.embedding == made.trainer.embedding == embedding
    federation = FederatedDataset.split(clusters(), 6, partition=iid_partition, seed=0)
    one = run(federation, made, num_updates=30)
    assert one.rejected == 0
    assert max(one.accuracy) > max(0.6, one.accuracy[0] + 0.1)


def test_trainer_may_have_its_own_embedding():
    made = method("asyncbezier:trainer.embedding=tunnel,trainer.embedding.radius=0.2")
    assert made.rule.embedding is None
    assert made.trainer.embedding == Tunnel(radius=0.2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AsyncBezier(embedding=Tunnel), "embedding: expected an Embedding or None"),
        (lambda: AsyncBezier(embedding=Ribbon(), polygon=True), "polygon: expected the default with the embedding Ribbon"),
        (lambda: AsyncBezier(embedding=Simplex(), curve_weight=0.5), "curve_weight: expected the default with the embedding Simplex"),
        (lambda: AsyncBezier(embedding=Ribbon(), pull_back="conflict_free_prefix"), "pull_back: expected another mode"),
        (lambda: AsyncBezier(embedding=Ribbon(), overshoot="extend"), "overshoot: expected 'clamp'"),
        (lambda: step(AsyncBezier(embedding=Simplex(vertices=4)), update(0)), "points: expected 3 control points"),
        (lambda: Curve(embedding=3), "embedding: expected an Embedding, got 3"),
        (lambda: Curve(embedding=Tunnel(radius=0.1, form="subspace")), "embedding: expected a tunnel with form='ambient'"),
        (lambda: Curve(embedding=Tunnel(), sampling="length"), "sampling: expected 'uniform' for Tunnel"),
        (lambda: Tunnel(radius=0.1)(draw(0, 3, P), torch.zeros(1 + P)), r"space: expected a manifold, got None; call `on\(space\)`"),
        (lambda: Simplex(vertices=3)(draw(0, 3, P), torch.ones(3) / 3), "space: expected a manifold, got None"),
        (lambda: fit(Simplex(vertices=3), loss, BATCHES, start=START), "space: expected a manifold, got None"),
        (lambda: fit(Tunnel(), loss, BATCHES, start=START), "space: expected a manifold, got None"),
    ],
)  # fmt: skip
def test_invalid_options_are_rejected(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()
