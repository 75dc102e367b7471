"""Tests of Private: bounded updates, noise of the documented size, counted participations, and rejections."""

import math
import re
from dataclasses import replace

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError, RuleError
from manifoldagg.federated import (
    Durability,
    Payload,
    Server,
    ServerLimits,
    Update,
    UpdateInfo,
    UpdateLimits,
    aggregate,
    rules,
)
from manifoldagg.federated.rules import FADAS, DeFedAvg, FedAdam, FedAvg, FedBuff, Momentum, Private
from manifoldagg.federated.rules._base import commit
from manifoldagg.federated.staleness import Constant
from manifoldagg.manifolds import Flat, ParameterSpace, Sphere
from tests.federated.mutants import Catalogue
from tests.federated.rules.registered import RULES, golden
from tests.support import draw, relative, seeds

NAN = float("nan")
P = 9
SPACE = Flat(P)
SUMS = [
    FedAvg(3, 0.7, weighted=False),
    DeFedAvg(3),
    FedBuff(3, 0.7),
    FedBuff(3, normalise=True),
    FADAS(3, 0.1),
    FedAdam(3, 0.1, weighted=False),
]
GOLDEN = {"Private": Private(FedBuff(3, rate=0.5), clip=0.2, noise=0.3, seed=1)}
CATALOGUE = Catalogue({"Private": Private, "FedBuff": FedBuff})
LAWS, MUTANTS, law, caught_by = CATALOGUE.laws, CATALOGUE.mutants, CATALOGUE.law, CATALOGUE.caught_by


def play(rule, seed, rounds, clients=range(4), space=SPACE):
    """Return the models, states and numbers of several stale updates. The client states are stored."""
    models, states, told, memories = [draw(seed, P)], [], [], {}
    state = rule.init(space, models[0])
    for i in range(rounds):
        client = clients[i % len(clients)]
        base = models[max(0, len(models) - 1 - i % 3)]
        late = min(i % 3, len(models) - 1)
        brought = Update(client, base, models[-1], base[None] + draw(seed + i + 1, 1, P), late, client_state=memories.get(client))  # fmt: skip
        state, outcome = rule.step(space, state, brought)
        memories[client] = outcome.client_state
        states.append(state)
        told.append(outcome.numbers)
        if outcome.model is not None:
            models.append(outcome.model)
    return models, states, told


@law
def one_update_moves_a_sum_by_no_more_than_its_bound(kit):
    """Compare a run with one arbitrarily long update and a run with a zero update instead.

    The difference is smaller for a late update.
    """
    rule = kit.Private(kit.FedBuff(2), clip=0.5, noise=0.0)
    base, other = draw(0, P), 0.1 * draw(1, P)
    for late, share in ((0, 1.0), (3, 0.5)):
        for scale in (1e-3, 1.0, 1e6):
            models = []
            for mine in (scale * draw(2, P), torch.zeros(P).double()):
                state, _ = rule.step(SPACE, rule.init(SPACE, base), Update(0, base, base, (base + mine)[None], late))
                models.append(rule.step(SPACE, state, Update(1, base, base, (base + other)[None]))[1].model)
            moved = 2 * (models[0] - models[1]).norm().item()
            expected = share * min(0.5, scale * draw(2, P).norm().item())
            assert moved == pytest.approx(expected, rel=1e-9)


@law
def noise_has_the_stated_size(kit):
    """The noise in each coordinate is normal with the standard deviation sigma C / K. Another key gives other noise."""
    n = 40_000
    zero = torch.zeros(n).double()
    found = []
    for seed in range(2):
        rule = kit.Private(kit.FedBuff(2, staleness=Constant()), clip=0.5, noise=3.0, seed=seed)
        state, _ = rule.step(Flat(n), rule.init(Flat(n), zero), Update(0, zero, zero, zero[None]))
        found.append(rule.step(Flat(n), state, Update(1, zero, zero, zero[None]))[1].model / 0.75)
    for z in (*found, (found[0] - found[1]) / math.sqrt(2)):
        # Of n normal numbers: five deviations of the mean, the variance, the fourth moment and the next one's product.
        root = 5 / math.sqrt(n)
        assert abs(z.mean().item()) <= root
        assert abs(z.square().mean().item() - 1) <= math.sqrt(2) * root
        assert abs(z.pow(4).mean().item() - 3) <= math.sqrt(96) * root
        assert abs((z[1:] * z[:-1]).mean().item()) <= root


@law
def another_sum_has_another_noise(kit):
    """Two sums with the same key, version and client have different noise.

    A server that was resumed from an older checkpoint therefore does not reveal the difference of two sums.
    """
    rule = kit.Private(kit.FedBuff(1), clip=1.0, noise=1.0, seed=0)
    base = torch.zeros(1000).double()
    state = rule.init(Flat(1000), base)
    sums = [torch.full((1, 1000), x, dtype=torch.float64) for x in (1e-9, 2e-9)]
    one, two, again = (rule.step(Flat(1000), state, Update(0, base, base, x))[1].model for x in (*sums, sums[0]))
    assert torch.equal(one, again)
    assert (one - two).norm() >= 0.9 * math.sqrt(2000)


@caught_by("Private", "one_update_moves_a_sum_by_no_more_than_its_bound", "noise_has_the_stated_size")
class NoiseByTheOtherBound(rules.Private):
    def __init__(self, rule, clip, noise, **options):
        super().__init__(rule, 2 * clip, noise, **options)


@caught_by("FedBuff", "one_update_moves_a_sum_by_no_more_than_its_bound", "noise_has_the_stated_size")
class NobodyBinds(rules.FedBuff):
    def plan_with_noise(self, space, state, update, mechanism=None, *, out=None):
        return super().plan_with_noise(space, state, update, out=out)


@caught_by("FedBuff", "another_sum_has_another_noise")
class NoiseOfTheVersionAlone(rules.FedBuff):
    def plan_with_noise(self, space, state, update, mechanism=None, *, out=None):
        plan = super().plan_with_noise
        zero = Update(0, update.base, update.current, update.base[None])
        noise = commit(plan(space, state, zero, mechanism))[1].model
        after, outcome = commit(plan(space, state, update))
        if outcome.model is None or mechanism.noise == 0 or noise is None:
            return plan(space, state, update, mechanism)
        return after, type(outcome)(outcome.model + noise - update.current, outcome.client_state, outcome.numbers)


test_every_law_holds, test_every_mutant_is_caught_by_its_laws = CATALOGUE.tests()


@pytest.mark.parametrize("rule", SUMS, ids=lambda rule: type(rule).__name__)
def test_without_noise_and_bound_private_equals_its_rule(rule):
    plain, private = play(rule, 3, 7), play(Private(rule, math.inf, 0.0), 3, 7)
    assert all(map(torch.equal, plain[0], private[0]))
    assert len(plain[0]) == 3
    for mine, theirs in zip(plain[2], private[2], strict=True):
        assert {**theirs, **mine} == theirs


@pytest.mark.parametrize("rule", SUMS[1:], ids=lambda rule: type(rule).__name__)
def test_private_rule_uses_only_the_noised_mean(rule):
    """The noise acts like one more update, and the rule never reads the sum without noise."""
    models, states, _ = play(Private(rule, 1e6, 1e-6, seed=5), 3, 3)
    plain = play(rule, 3, 3)
    assert relative(models[1], plain[0][1]) >= 1e-3
    noise_free = play(Private(rule, 1e6, 1e-12, seed=5), 3, 3)[0]
    assert relative(noise_free[1], plain[0][1]) <= 1e-4
    assert "buffer" not in states[2]["rule"]


@settings(max_examples=10)
@given(seeds, st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_participations_equal_the_largest_sum_of_squares(seed, clients):
    told = play(Private(FedBuff(3), 1.0, 0.0), seed, len(clients), clients)[2]
    for count, numbers in enumerate(told, 1):
        taken = {}
        for i, client in enumerate(clients[:count]):
            taken.setdefault(client, {}).setdefault(i // 3, 0)
            taken[client][i // 3] += 1
        assert numbers["participations"] == max(sum(m * m for m in mine.values()) for mine in taken.values())


def test_client_at_participation_limit_is_rejected():
    server = Server(SPACE, Private(FedBuff(2), 1.0, 1.0, participations=2), torch.zeros(P))
    answers = [server.receive(server.dispatch(client), Payload(torch.ones(1, P), 1)) for client in "abaccab"]
    assert [answer.accepted for answer in answers] == [True] * 5 + [False, True]
    assert answers[5].reason == "client: expected at most 2 participations, got 3 with this update"
    assert server.history[-1]["participations"] == 2.0


@pytest.mark.parametrize("rule", [SUMS[2], FADAS(2), Momentum(Private(FedBuff(2), 0.5, 1.0))], ids=str)
def test_resumed_private_rule_is_bitwise_equal(rule, tmp_path):
    rule = rule if isinstance(rule, Momentum) else Private(rule, 0.5, 1.0)
    one = Server(SPACE, rule, torch.zeros(P), durability=Durability(journal=tmp_path / "journal"))
    for i in range(3):
        one.receive(one.dispatch("abc"[i]), Payload(draw(i, 1, P, dtype=torch.float32), 1))
    one.save(tmp_path / "saved")
    rest = [(one.dispatch("ab"[i % 2]), Payload(draw(9 + i, 1, P, dtype=torch.float32), 1)) for i in range(3)]
    one.save(tmp_path / "saved")
    for ticket, payload in rest:
        one.receive(ticket, payload)
    expected, told = one.model, one.history[-1]["participations"]
    two = Server.resume(tmp_path / "saved", SPACE, rule, ignore_journal=True)
    for ticket, payload in rest:
        two.receive(ticket, payload)
    assert torch.equal(two.model, expected)
    assert (two.history[-1]["participations"], two.version) == (told, one.version)
    one.close()
    # The journal tells of all that came since.
    three = Server.resume(tmp_path / "saved", SPACE, rule, durability=Durability(journal=tmp_path / "journal"))
    assert torch.equal(three.model, expected)
    three.close()


def test_every_server_has_its_own_secret():
    zero = torch.zeros(P)
    rule = Private(FedBuff(1), 1.0, 1.0)
    models = [rule.step(SPACE, rule.init(SPACE, zero), Update(0, zero, zero, zero[None]))[1].model for _ in range(2)]
    assert not torch.equal(*models)
    seeded = [Private(FedBuff(1), 1.0, 1.0, seed=seed).init(SPACE, zero)["key"] for seed in (0, 0, 1)]
    assert seeded[0] == seeded[1] != seeded[2]


def test_aggregate_counts_the_participations_of_clients():
    rule, model = Private(FedBuff(1), 1.0, 1.0), {"w": torch.zeros(4, dtype=torch.bfloat16)}
    state, told = None, []
    for client in "aab":
        model, state, numbers = aggregate(rule, state, model, model, {"w": model["w"] + 1}, info=UpdateInfo(client))
        told.append(numbers["participations"])
    assert told == [1.0, 2.0, 2.0]
    assert model["w"].isfinite().all()


WHY = {
    "FedAsync": "every update moves the model",
    "AsyncBezier": "every update moves the model",
    "DelayedNesterov": "every update moves the model",
    "ACE": "it stores each client's update and adds it again",
    "CA2FL": "it stores each client's update and adds it again",
    "MasFL": "it stores a control variate of each client",
    "OrthoFL": "clients start from their own updates",
    "RadialDirectional": "it divides each tensor of an update by its length",
    "Momentum": "use Momentum(Private(rule))",
    "Private": "it is already private",
    "AsyncFedED": "its step is not a sum of updates",
    "HeLoCo": "its step is not a sum of updates",
}


@pytest.mark.parametrize("name", RULES)
def test_private_accepts_each_rule_or_states_the_reason(name):
    (rule, *_) = [rule for rule in golden().values() if type(rule).__name__ == name]
    if name in {type(rule).__name__ for rule in SUMS}:
        if getattr(rule, "weighted", False):
            rule = replace(rule, weighted=False)
        assert Private(rule, 1.0, 1.0).rule == rule
        return
    why = re.escape(WHY.get(name, ""))
    with pytest.raises(ArgumentError, match=rf"^rule: {name} cannot be private: (.*; )?{why}"):
        Private(rule, 1.0, 1.0)


def descended(rule):
    """Take a step along a pseudo-gradient."""
    zero = torch.zeros(P)
    return rule.step(SPACE, rule.init(SPACE, zero), Update(0, zero, zero, (zero,), is_pseudo_gradient=True))


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Private(FedAvg(2), 1.0, 1.0), r"rule: expected FedAvg\(weighted=False\), as sample counts"),
        (lambda: Private(FedBuff(2), 0.0, 1.0), "clip: expected a finite number > 0, got 0.0"),
        (lambda: Private(FedBuff(2), math.inf, 1.0), "clip: expected a finite number > 0, got inf"),
        (lambda: Private(FedBuff(2), 1.0, -1.0), "noise: expected a finite number >= 0, got -1.0"),
        (lambda: Private(FedBuff(2), 1.0, 1.0, participations=0), "participations: expected an integer >= 1, got 0"),
        (lambda: Private("fedbuff", 1.0, 1.0), "rule: expected a rule of manifoldagg.federated.rules, got 'fedbuff'"),
        (
            lambda: Server(Sphere(3), Private(FedBuff(2), 1.0, 1.0), torch.eye(3)[0]),
            r"space: expected flat leaves for the clipping and noise of Private, got curved leaves: .*Sphere",
        ),
        (
            lambda: Server(
                SPACE,
                Private(FedBuff(2), 1.0, 1.0),
                torch.zeros(P),
                limits=ServerLimits(UpdateLimits(norm_factor=10.0)),
            ),
            "limits: update: norm_factor: expected None with Private: updates of some clients would limit those of others",
        ),
        (
            lambda: Server(
                SPACE, Private(FedBuff(2), 1.0, 1.0), torch.zeros(P), limits=ServerLimits(UpdateLimits(clip_factor=2.0))
            ),
            "limits: update: clip_factor: expected None with Private",
        ),
        (
            lambda: Server(
                SPACE, Private(FedBuff(2), 1.0, 1.0), torch.zeros(P), limits=ServerLimits(UpdateLimits(max_norm=1.0))
            ),
            "limits: update: max_norm: expected None with Private: a rejection would reveal the update of a client",
        ),
        (
            lambda: Server(
                SPACE,
                Momentum(Private(FedBuff(2), 1.0, 1.0)),
                torch.zeros(P),
                limits=ServerLimits(UpdateLimits(min_cosine=0.0)),
            ),
            "limits: update: min_cosine: expected None with Private",
        ),
        (
            lambda: Server.of(torch.nn.BatchNorm1d(2), Momentum(Private(FedBuff(2), 1.0, 1.0))),
            "buffer_policy: running_mean: expected 'leave' with Private, which adds no noise to them",
        ),
        (lambda: descended(Private(FedBuff(1), 1.0, 1.0)), "which an outer optimizer does not have"),
    ],
)
def test_options_that_break_privacy_raise_argument_error(make, words):
    with pytest.raises(ArgumentError, match=words):
        make()


def world(rule, special, *, noise=0.0, wrap=lambda rule: rule, **options):
    """Return the models and receipts of a run of ten updates. The fourth update moves the whole model by `special`."""
    rule = wrap(Private(rule, 0.5, noise, seed=0))
    server = Server(SPACE, rule, torch.zeros(P), weights="uniform", **options)
    models, receipts = [], []
    for i in range(10):
        ticket = server.dispatch(i % 4)
        points = torch.full((1, P), 0.01 * (i + 1) if i != 3 else special)
        receipts.append(server.receive(ticket, Payload(ticket.message.start + points, 1)))
        models.append(server.model)
    return models, receipts


TWO_WORLDS = [
    FedBuff(3),
    FedBuff(3, normalise=True),
    FedAvg(3, weighted=False),
    FADAS(3, 0.1),
    FedAdam(3, 0.1, weighted=False),
    DeFedAvg(3),
]


@pytest.mark.parametrize("special", [NAN, math.inf, 3e38, 1e25])
@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize("rule", TWO_WORLDS, ids=repr)
def test_invalid_update_is_replaced_by_a_zero_update(rule, noise, special):
    """Two runs differ in one update, which must not shift later updates into other buffers."""
    (odd, told), (zero, receipts) = (world(rule, x, noise=noise) for x in (special, 0.0))
    assert all(map(torch.equal, odd, zero))
    assert [receipt.version for receipt in told] == [receipt.version for receipt in receipts]
    assert all(receipt.accepted for receipt in told)
    assert told[3].clipped


@pytest.mark.parametrize("rule", [FedBuff(3), FedAdam(3, 0.1, weighted=False)], ids=repr)
@pytest.mark.parametrize("clip", [None, 0.3])
def test_invalid_update_is_replaced_with_momentum_and_clip(rule, clip):
    limits = UpdateLimits(clip=clip)
    runs = [world(rule, x, wrap=Momentum, limits=limits) for x in (NAN, 0.0)]
    assert all(map(torch.equal, *(models for models, _ in runs)))
    assert all(receipt.accepted for receipt in runs[0][1])


@pytest.mark.parametrize("special", [1.0, -1.0, 1e3])
def test_two_runs_that_differ_in_one_update_differ_by_its_bound(special):
    (odd, _), (zero, _) = (world(FedBuff(3), x) for x in (special, 0.0))
    away = [(one - other).norm().item() for one, other in zip(odd, zero, strict=True)]
    assert away[:5] == [0.0] * 5
    assert away[5:] == pytest.approx([0.5 / 3] * 5, rel=1e-4)


@pytest.mark.parametrize("rule", [FedBuff(2), FedAdam(2, 0.1, weighted=False)], ids=repr)
def test_a_state_dict_that_is_not_finite_counts_as_a_zero_update(rule):
    models = []
    for value in (NAN, 0.0):
        space = ParameterSpace.of(torch.nn.Linear(2, 2, bias=False))
        server = Server(space, Private(rule, 1.0, 0.0), torch.zeros(4), weights="uniform")
        for moved in (value, 0.5, 0.25):
            ticket = server.dispatch("a")
            state = {name: tensor + moved for name, tensor in ticket.state_dict().items()}
            server.receive_model(ticket, state, samples=1).check()
        models.append(server.model)
    assert torch.equal(*models)
    assert server.version == 1


def test_a_base_that_is_not_finite_counts_as_a_zero_update():
    server = Server(SPACE, Private(FedBuff(1), 1.0, 0.0), torch.zeros(P))
    ticket = server.dispatch("a", retain_base=False)
    payload = Payload(torch.ones(1, P), 1, base=torch.full((P,), NAN))
    assert server.receive(ticket, payload).accepted
    assert not server.model.any()


def test_receipts_report_the_clipping_factor():
    server = Server(SPACE, Private(FedBuff(2), 0.5, 1.0), torch.zeros(P), limits=UpdateLimits(clip=1.0))
    for length, clip in ((0.25, 1.0), (0.75, 2 / 3), (4.0, 1 / 8)):
        point = torch.zeros(1, P)
        point[0, 0] = length
        ticket = server.dispatch("a")
        receipt = server.receive(ticket, Payload(ticket.message.start + point, 1))
        assert receipt.clipped is (clip < 1)
        assert server.history[-1]["clip"] == pytest.approx(clip, rel=1e-6)


def test_private_allows_buffers_that_are_not_updated():
    server = Server.of(torch.nn.BatchNorm1d(2), Private(FedBuff(1), 1.0, 1.0), buffer_policy={"*": "leave"})
    assert isinstance(server.space, ParameterSpace)
    ticket = server.dispatch("a")
    assert server.receive_model(ticket, ticket.state_dict(), samples=1).accepted


def test_weight_above_one_raises_rule_error():
    rule = Private(FedBuff(1, staleness=lambda late: 2.0), 1.0, 1.0)
    with pytest.raises(RuleError, match="staleness: expected a weight of at most 1 under Private, got 2"):
        rule.step(SPACE, rule.init(SPACE, draw(0, P)), Update(0, draw(0, P), draw(0, P), draw(1, 1, P)))


def delta_of(epsilon, mu):
    """Return delta by Balle and Wang 2018, Theorem 8, with 30 digits."""
    with mpmath.workdps(30):
        low, high = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
        return mpmath.ncdf(low) - mpmath.exp(epsilon) * mpmath.ncdf(high)


@pytest.mark.parametrize("sigma", [0.5, 1.1, 5.0])
@pytest.mark.parametrize("n", [1, 20, 1000])
def test_accountant_equals_the_closed_form(sigma, n):
    accounting = pytest.importorskip("manifoldagg.integrations.accounting")
    dp_accounting = pytest.importorskip("dp_accounting")
    epsilon = accounting.epsilon(sigma, participations=n, delta=1e-5)
    assert float(delta_of(epsilon, math.sqrt(n) / sigma)) == pytest.approx(1e-5, rel=1e-6)
    assert accounting.noise_for(epsilon, participations=n, delta=1e-5) == pytest.approx(sigma, rel=1e-6)
    # The library's own composition of n of them, an upper bound by Rényi divergences.
    composed = dp_accounting.rdp.RdpAccountant().compose(
        dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(sigma), n)
    )
    assert epsilon <= composed.get_epsilon(1e-5) <= 1.35 * epsilon + 0.1


@pytest.mark.usefixtures("as_shipped")
def test_accountant_names_arguments_out_of_range(monkeypatch):
    accounting = pytest.importorskip("manifoldagg.integrations.accounting")
    for options, words in (
        ({"noise": 0.0}, "noise: expected a finite number > 0"),
        ({"participations": 0}, "participations: expected an integer >= 1"),
        ({"delta": 1.0}, r"delta: expected a number in \(0, 1\), got 1.0"),
    ):
        with pytest.raises(ArgumentError, match=words):
            accounting.epsilon(**{"noise": 1.0, "participations": 1, "delta": 1e-5, **options})
    # The metric `participations` of a receipt is a float.
    assert accounting.epsilon(5.0, participations=20.0, delta=1e-5) == accounting.epsilon(
        5.0, participations=20, delta=1e-5
    )
    with pytest.raises(ArgumentError, match=r"participations: expected an integer >= 1, got 2.5"):
        accounting.epsilon(1.0, participations=2.5, delta=1e-5)
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(ModuleNotFoundError, match=r"dp_accounting: pip install 'manifoldagg\[privacy\]'"):
        accounting.epsilon(1.0, participations=1, delta=1e-5)
