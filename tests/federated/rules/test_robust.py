"""Tests of the median, the trimmed mean and Krum.

The tests check the published definitions, and the number of attackers that each rule tolerates.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Update
from manifoldagg.federated.rules import Krum, Median, TrimmedMean, krum
from manifoldagg.federated.rules._update_buffer import oddeven_sort
from manifoldagg.federated.staleness import Constant
from manifoldagg.manifolds import Flat, LowRank, Sphere
from tests.federated.mutants import Catalogue
from tests.support import draw, relative, seeds

GOLDEN = {
    "Median": Median(3, 0.5),
    "TrimmedMean": TrimmedMean(4, trim=1, rate=0.5),
    "Krum": Krum(3, num_byzantine=0, rate=0.5),
}

P = 9
SPACE = Flat(P)
FRESH = Constant()
CATALOGUE = Catalogue({"Median": Median, "TrimmedMean": TrimmedMean, "Krum": Krum})
LAWS, MUTANTS, law, caught_by = CATALOGUE.laws, CATALOGUE.mutants, CATALOGUE.law, CATALOGUE.caught_by


def went(rule, displacements, late=None):
    """Return the movement of the model for updates that have different bases."""
    k = len(displacements)
    dtype = displacements.dtype
    current = draw(1, P, dtype=dtype)
    state = rule.init(SPACE, current)
    for i, displacement in enumerate(displacements):
        base = current if late is None else current + draw(100 + i, P, dtype=dtype)
        given_ = Update(i, base, current, (base + displacement)[None], staleness=0 if late is None else late[i])
        state, outcome = rule.step(SPACE, state, given_)
        assert (outcome.model is None) == (i + 1 < k)
    return outcome.model - current


def literature(name, x, f=1, m=1):
    """Return the result by Yin et al.

    2018, Definitions 1 and 2, or Blanchard et al. 2017, Section 4, for an array (K, P).
    """
    x = x.double().numpy()
    k = len(x)
    if name == "Median":
        return torch.from_numpy(np.median(x, axis=0))
    if name == "TrimmedMean":
        return torch.tensor([np.mean(sorted(column)[f : k - f]) for column in x.T], dtype=torch.float64)
    scores = []
    for i in range(k):
        far = sorted(float(((x[i] - x[j]) ** 2).sum()) for j in range(k) if j != i)
        scores.append(sum(far[: k - f - 2]))
    return torch.from_numpy(x[sorted(range(k), key=scores.__getitem__)[:m]].mean(axis=0))


def made(name, k, f, m=1, kit=None, **options):
    kinds = vars(kit) if kit else CATALOGUE.right
    given_ = {"TrimmedMean": {"trim": f}, "Krum": {"num_byzantine": f, "num_selected": m}}.get(name, {})
    return kinds[name](k, **given_, **{"staleness": FRESH, **options})


def holds_the_definition(name):
    def check(kit):
        for k, f, m, seed in ((5, 1, 2, 0), (6, 1, 1, 1), (9, 3, 4, 2), (8, 2, 3, 3)):
            x = draw(seed, k, P)
            late = [seed, 0, 1, 3, 2, 5, 0, 1, 4][:k]
            rule = made(name, k, f, m, kit, rate=0.5, staleness=lambda late: 1 / (1 + late))
            scaled = x / torch.tensor([1.0 + i for i in late])[:, None]
            # Some roundings of displacements of size 4.
            assert relative(went(rule, x, late), 0.5 * literature(name, scaled, f, m)) <= 1e-13

    check.__name__ = f"{name.lower()}_is_that_of_the_literature"
    return check


for each in GOLDEN:
    law(holds_the_definition(each))


@law
def the_middle_stays_in_the_range_of_the_honest(kit):
    """The result stays in the range of the honest updates.

    This holds for as many attackers as the rule tolerates, whatever valid updates they send.
    """
    for k in (3, 4, 7):
        f = (k - 1) // 2
        for name in ("Median", "TrimmedMean"):
            for seed, lie in enumerate((1e100, -1e100, 1.0, 0.0)):
                honest = draw(seed, k - f, P)
                x = torch.cat([draw(seed + 9, f, P).sign() * lie, honest])
                step = went(made(name, k, f, kit=kit), x)
                # What bases and sums have rounded.
                assert (step <= honest.max(0).values + 1e-14).all()
                assert (step >= honest.min(0).values - 1e-14).all()


@law
def krums_choice_is_no_farther_from_the_honest_than_these_are_from_each_other(kit):
    for k, f in ((5, 1), (7, 2), (10, 3)):
        for seed, lie in enumerate((1e100, 30.0, 3.0, 1.0, 0.5)):
            honest = draw(seed, k - f, P)
            # They agree with each other, in a place that is theirs.
            x = torch.cat([honest, lie * draw(seed + 50, 1, P).expand(f, P)]).roll(seed, 0)
            step = went(made("Krum", k, f, kit=kit), x)
            apart = torch.cdist(honest, honest).square().sort(1).values[:, 1:]
            least = apart[:, : k - f - 2].sum(1).min()
            near = (honest - step).square().sum(1).sort().values[: k - 2 * f - 2].sum()
            assert near <= least * (1 + 1e-12)


@caught_by("Median", "median_is_that_of_the_literature")
class MedianTakesTheLowerMiddle(Median):
    @property
    def num_trimmed(self):
        return (self.size - 1) // 2 + (0 if self.size % 2 else -1)


@caught_by("TrimmedMean", "trimmedmean_is_that_of_the_literature", "the_middle_stays_in_the_range_of_the_honest")
class TrimmedMeanTrimsTooFew(TrimmedMean):
    @property
    def num_trimmed(self):
        return max(0, self.trim - 1)


@caught_by("Krum", "krum_is_that_of_the_literature")
class KrumExpectsFewerByzantineClients(Krum):
    def combine(self, *given_):
        bolder = Krum(self.size, max(0, self.num_byzantine - 1), self.num_selected)
        return bolder.combine(*given_)


@caught_by(
    "Krum",
    "krum_is_that_of_the_literature",
    "krums_choice_is_no_farther_from_the_honest_than_these_are_from_each_other",
)
class KrumTakesTheLast(Krum):
    def combine(self, space, update, frame, stored, factors, out):
        return super().combine(space, update, frame, {}, factors[-1:], out)


test_every_law_holds, test_every_mutant_is_caught_by_its_laws = CATALOGUE.tests()

RULES = [("Median", 7, 3, 1), ("Median", 8, 3, 1), ("TrimmedMean", 8, 2, 1), ("Krum", 8, 2, 1), ("Krum", 8, 2, 4)]
cases = pytest.mark.parametrize(("name", "k", "f", "m"), RULES, ids=lambda x: str(x))


@cases
@settings(max_examples=6)
@given(seeds)
def test_the_order_of_updates_does_not_matter(name, k, f, m, seed):
    x = draw(seed, k, P)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    rule = made(name, k, f, m)
    # A displacement is the difference of rounded points; sums of chosen ones are taken in another order.
    assert relative(went(rule, x), went(rule, x[order])) <= 1e-13


@cases
@settings(max_examples=6)
@given(seeds)
def test_robust_step_is_translation_equivariant(name, k, f, m, seed):
    x, shift = draw(seed, k, P), draw(seed + 1, P)
    rule = made(name, k, f, m)
    assert relative(went(rule, x + shift), went(rule, x) + shift) <= 1e-12


@pytest.mark.parametrize(
    ("name", "k", "f", "liars"), [("Median", 7, 3, 4), ("Median", 8, 3, 4), ("TrimmedMean", 8, 2, 3), ("Krum", 8, 2, 5)]
)
def test_one_attacker_above_the_limit_controls_the_step(name, k, f, liars):
    for far in (1e3, 1e6, 1e9):
        x = torch.cat([draw(0, k - liars, P), torch.full((liars, P), far, dtype=torch.float64)])
        # The median of an even number is half-way, the trimmed mean one part of those that are left.
        least = {"Median": 0.4, "TrimmedMean": 0.2, "Krum": 0.99}[name] * far
        assert (went(made(name, k, f), x) >= least).all()


def test_krum_satisfies_the_resilience_bound_of_blanchard_et_al():
    r"""Proposition 1: $\|E\,Kr - g\|^2 \le \eta^2 d \sigma^2$.

    The angle between the expectation and g is therefore less than 90°.
    """
    n, f, d, sigma = 11, 2, 5, 0.1
    eta2 = 2 * (n - f + (f * (n - f - 2) + f**2 * (n - f - 1)) / (n - 2 * f - 2))
    g = np.ones(d)
    assert math.sqrt(eta2 * d) * sigma < np.linalg.norm(g)
    generator = np.random.default_rng(0)
    for lie in (-g, 0.9 * g, 1e6 * g, 0 * g):
        chosen = []
        for _ in range(300):
            x = np.concatenate([g + sigma * generator.standard_normal((n - f, d)), np.broadcast_to(lie, (f, d))])
            chosen.append(x[krum.krum_select(x @ x.T, f, 1)[0]])
        # The mean of 300 draws is known to .1 in each of five entries at the very worst.
        assert np.square(np.mean(chosen, 0) - g).sum() <= eta2 * d * sigma**2
        assert np.mean(chosen, 0) @ g > 0


@settings(max_examples=10)
@given(seeds, st.integers(1, 12), st.sampled_from([torch.float32, torch.float64]))
def test_odd_even_sort_equals_torch_sort(seed, k, dtype):
    x = draw(seed, k, 20, dtype=dtype)
    x[:, :5] = x[:, :5].round()
    found = oddeven_sort([row.clone() for row in x], torch.empty(20, dtype=dtype))
    assert torch.equal(torch.stack(found), x.sort(0).values)


def test_half_precision_models_are_processed_in_single_precision():
    from manifoldagg import aggregate

    for dtype in (torch.float16, torch.bfloat16):
        model, state = {"w": torch.zeros(3, dtype=dtype)}, None
        for value in (1.0, 100.0, 2.0):
            update = {"w": torch.full((3,), value, dtype=dtype)}
            model, state, _ = aggregate(Median(3), state, model, {"w": torch.zeros(3, dtype=dtype)}, update)
        assert model["w"].dtype == dtype
        assert model["w"].tolist() == [2.0] * 3


def test_claimed_samples_do_not_change_robust_step():
    x = draw(0, 3, P)
    current = torch.zeros(P, dtype=torch.float64)
    for rule in (Median(3, staleness=FRESH), Krum(3, num_byzantine=0, staleness=FRESH)):
        ends = []
        for weight in (1.0, 1e6):
            state = rule.init(SPACE, current)
            for i, row in enumerate(x):
                given_ = Update(i, current, current, row[None], weight=weight if i == 0 else 1.0, share=weight)
                state, outcome = rule.step(SPACE, state, given_)
            ends.append(outcome.model)
        assert torch.equal(*ends)


@settings(max_examples=8)
@given(seeds)
def test_krum_on_a_sphere_selects_an_update_or_a_mean(seed):
    space = Sphere(4)
    generator = torch.Generator().manual_seed(seed)
    x = space.random_point(generator=generator, dtype=torch.float64)
    tangents = 0.1 * space.random_tangent(x.expand(5, 4), generator=generator)
    tangents[2] *= 20 / tangents[2].norm() / 10
    points = space._exp(x.expand(5, 4), tangents)
    rule, state = Krum(5, num_byzantine=1, staleness=FRESH), None
    state = rule.init(space, x)
    for i, point in enumerate(points):
        state, outcome = rule.step(space, state, Update(i, x, x, point[None]))
    others = [0, 1, 3, 4]
    assert min(relative(outcome.model, points[i]) for i in others) <= 1e-9
    i = int(np.argmin([relative(outcome.model, point) for point in points]))
    assert [i] == krum.krum_select((tangents @ tangents.T).numpy(), 1, 1)


def test_krum_on_low_rank_leaves_selects_a_matrix():
    space = LowRank(5, 4, 2)
    current = space.random_point(generator=torch.Generator().manual_seed(0))
    near = [space.project(current + 0.01 * draw(i, *current.shape, dtype=torch.float32)) for i in range(4)]
    points = [*near[:2], space.random_point(generator=torch.Generator().manual_seed(1)), *near[2:]]
    rule = Krum(5, num_byzantine=1, staleness=FRESH)
    state = rule.init(space, current.flatten())
    for i, point in enumerate(points):
        state, outcome = rule.step(space, state, Update(i, current.flatten(), current.flatten(), point.flatten()[None]))
    reached = outcome.model.view(current.shape)
    assert min(relative(reached[:5] @ reached[5:].T, p[:5] @ p[5:].T) for p in near) <= 1e-4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Median(0), "size: expected an integer >= 1"),
        (lambda: TrimmedMean(4, trim=2), "size: expected at least 5 with trim = 2, got 4"),
        (lambda: TrimmedMean(4, trim=-1), "trim: expected an integer >= 0"),
        (
            lambda: Krum(6, num_byzantine=2),
            "size: expected at least 7 with num_byzantine = 2, got 6",
        ),
        (
            lambda: Krum(8, num_byzantine=2, num_selected=5),
            "num_selected: expected at most size - num_byzantine - 2 = 4, got 5",
        ),
        (
            lambda: Median().init(Sphere(3), torch.eye(3)[0]),
            "space: expected flat leaves for the entrywise medians of Median",
        ),
        (
            lambda: TrimmedMean().init(Sphere(3), torch.eye(3)[0]),
            "space: expected flat leaves for the entrywise trimmed means of TrimmedMean",
        ),
    ],
)
def test_invalid_options_and_spaces_are_rejected(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


@pytest.mark.parametrize(
    "rule", [Median(3), TrimmedMean(3, trim=1), Krum(3, num_byzantine=0)], ids=lambda r: type(r).__name__
)
def test_displacement_that_could_overflow_is_rejected(rule):
    base = torch.zeros(P)
    state = rule.init(SPACE, base)
    for _ in range(3):
        with pytest.raises(ArgumentError, match="points: size of the displacement"):
            rule.step(SPACE, state, Update(0, base, base, torch.full((1, P), 3e38)))
        state, outcome = rule.step(SPACE, state, Update(0, base, base, torch.ones(1, P)))
    assert torch.equal(outcome.model, torch.ones(P))
