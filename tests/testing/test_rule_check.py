"""Laws of rules: every rule of the library obeys them, and each law catches the mutants that break it."""

from dataclasses import dataclass, replace

import pytest
import torch

from manifoldagg.corrections import OrthoDC
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Message, Outcome, Payload
from manifoldagg.federated.rules import AsyncCorrected, FedAsync, FedAvg, FedBuff
from manifoldagg.federated.types import extra_fields
from manifoldagg.kernels.tensor_list import TensorList
from manifoldagg.manifolds import Flat, ParameterSpace, Sphere
from manifoldagg.testing import RULE_LAWS, check_rule
from tests.federated.rules.registered import golden

pytestmark = pytest.mark.usefixtures("as_shipped")

CASES = golden() | {"OrthoDC by tensor": AsyncCorrected(0.5, correction=OrthoDC(0.0, granularity="tensor"))}
BY_TENSOR = {
    "AsyncKrylov",
    "HeLoCo",
    "HeLoCo without look ahead",
    "OrthoDC by tensor",
    "OrthoFL",
    "RadialDirectional",
}
"""The rules that treat each tensor of a model separately, so that their results depend on the split."""
SPLIT = "results_do_not_depend_on_the_split_into_tensors"
STATE_DICTS = "aggregate_equals_server"
CLIENTS = ("heavy", "light")
CURVED = ParameterSpace.of_state_dict({"turn": torch.eye(3)[:2], "bias": torch.zeros(4)}, {"turn": Sphere(3)})


def num_points(rule):
    """The number of control points that a rule requires."""
    return getattr(rule, "vertices", 2 if type(rule).__name__ == "AsyncCurve" else 1)


def near(message, generator):
    """The payload of a client whose model is as near to its start as `AdaMasFL` requires."""
    noise = torch.randn(2, *message.start.shape, generator=generator, dtype=message.start.dtype)
    points = (message.start + 1e-3 * noise[0])[None]
    return Payload(points, 1, {"gradient": noise[1]}, {"opening": message.numbers["opening"]})


@pytest.mark.parametrize("name", CASES)
def test_every_rule_obeys_every_law(name):
    rule = CASES[name]
    verdict = check_rule(
        rule,
        num_points=num_points(rule),
        clients=CLIENTS,
        make_payload=near if name == "AdaMasFL" else None,
        by_tensor=name in BY_TENSOR,
        seeds=1,
        verbose=False,
    )
    assert verdict.holds, f"\n{verdict}"
    omitted = {SPLIT} if name in BY_TENSOR else set()
    omitted |= set() if extra_fields(rule) == ({}, ()) else {STATE_DICTS}
    assert set(verdict.omitted) == omitted
    assert {finding.law for finding in verdict.findings} == RULE_LAWS.keys() - omitted


@pytest.mark.parametrize("name", sorted(BY_TENSOR))
def test_rules_that_work_by_tensor_depend_on_the_split(name):
    points = 3 if name == "AsyncKrylov" else 1
    verdict = check_rule(CASES[name], num_points=points, clients=CLIENTS, laws=[SPLIT], seeds=1, verbose=False)
    assert verdict.broken_laws == [SPLIT]


@pytest.mark.parametrize(
    ("rule", "points"), [(CASES["AsyncBezier by the parameter"], 2), (CASES["AsyncKrylov"], 3)], ids=["curve", "path"]
)
def test_updates_may_be_curves(rule, points):
    verdict = check_rule(rule, num_points=points, by_tensor=True, seeds=1, verbose=False)
    assert verdict.holds, f"\n{verdict}"


@pytest.mark.parametrize("name", ["FedAsync", "FedBuff", "FedOrtho"])
@pytest.mark.parametrize(
    ("space", "omitted"),
    [(CURVED, {SPLIT}), (Sphere(3), {SPLIT, STATE_DICTS}), (Flat(9), {STATE_DICTS})],
    ids=["named tensors", "sphere", "flat"],
)
def test_laws_hold_on_other_spaces(name, space, omitted):
    verdict = check_rule(CASES[name], space=space, seeds=1, num_updates=6, verbose=False)
    assert verdict.holds, f"\n{verdict}"
    assert set(verdict.omitted) == omitted


@dataclass(frozen=True)
class Right:
    """A correct rule: it steps along the mean of all displacements so far."""

    cohort = 1

    def init(self, space, start):
        return {"mean": torch.zeros_like(start), "count": 0}

    def message(self, space, state, current, client_state):
        return Message(current)

    def step(self, space, state, update, *, out=None):
        count = state["count"] + 1
        mean = state["mean"] + (update.points[-1] - update.base - state["mean"]) / count
        if not mean.isfinite().all():
            raise ArgumentError("points: expected finite displacements")
        client_state = {"last": mean.clone(), "count": 1 + (update.client_state or {"count": 0})["count"]}
        norm = 0.5 * mean.double().norm().item()
        return {"mean": mean, "count": count}, Outcome(update.current + 0.5 * mean, client_state, {"norm": norm})


MUTANTS = {}


def breaks(*laws):
    """Register a rule class with exactly the laws that it breaks."""

    def register(kind):
        MUTANTS[kind.__name__] = (kind, laws)
        return kind

    return register


class Mutant(Right):
    """A rule that changes the result of a correct step."""

    def step(self, space, state, update, *, out=None):
        return self.change(space, state, update, *super().step(space, state, update))


@breaks("step_is_pure")
class WritesThePoints(Mutant):
    def change(self, space, state, update, after, outcome):
        update.points.zero_()
        return after, outcome


@breaks("step_is_pure", "rejection_changes_nothing")
class WritesItsState(Right):
    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, state, update)
        state["mean"].copy_(after["mean"])
        return after, outcome


@breaks("step_is_pure", "rejection_changes_nothing", STATE_DICTS, SPLIT, "a_run_can_be_resumed")
class CountsInTheInstance(Mutant):
    count = 0

    def change(self, space, state, update, after, outcome):
        object.__setattr__(self, "count", self.count + 1)
        return after, replace(outcome, model=outcome.model + self.count)


@breaks("step_is_pure", STATE_DICTS)
class WritesTheModelInAMessage(Right):
    def message(self, space, state, current, client_state):
        return Message(current.add_(1))


@breaks("nothing_is_aliased")
class ReturnsThePoints(Mutant):
    def change(self, space, state, update, after, outcome):
        return after, replace(outcome, model=update.points[-1])


@breaks("nothing_is_aliased")
class StoresTheBase(Mutant):
    def change(self, space, state, update, after, outcome):
        return {**after, "base": [update.base[1:]]}, outcome


@breaks("nothing_is_aliased")
class StoresTheModel(Mutant):
    def change(self, space, state, update, after, outcome):
        return {**after, "model": outcome.model}, outcome


@breaks("nothing_is_aliased")
class SharesStateWithTheClient(Mutant):
    def change(self, space, state, update, after, outcome):
        return after, replace(outcome, client_state={**outcome.client_state, "mean": after["mean"]})


@breaks("nothing_is_aliased")
class StartsFromTheStartItself(Right):
    def init(self, space, start):
        return {**super().init(space, start), "start": start}

    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, state, update)
        return {**after, "start": state["start"].clone()}, outcome


@breaks("rejection_changes_nothing")
class ChangesItsStateBeforeItRaises(Right):
    def step(self, space, state, update, *, out=None):
        if update.points[-1].abs().max() > 1e30:
            state["mean"].add_(1)
            raise ArgumentError("points: expected smaller ones")
        return super().step(space, state, update)


@breaks("rejection_changes_nothing")
class RemembersARejection(Right):
    refused = 0

    def step(self, space, state, update, *, out=None):
        if update.points[-1].abs().max() > 1e30:
            object.__setattr__(self, "refused", 1)
            raise ArgumentError("points: expected smaller ones")
        after, outcome = super().step(space, state, update)
        return after, replace(outcome, model=outcome.model + self.refused)


@breaks("rejection_changes_nothing")
class AcceptsWhatIsNotFinite(Right):
    accepts_tensor_lists = True
    self_checked = ("points",)

    def init(self, space, start):
        return {"version": 0}

    def step(self, space, state, update, *, out=None):
        points = tuple(TensorList([x.nan_to_num() for x in row]) if isinstance(row, tuple) else row.nan_to_num()
                       for row in update.points)  # fmt: skip
        return FedAsync(0.5).step(space, state, replace(update, points=points), out=out)


@breaks(STATE_DICTS)
class DiffersWithoutAShare(Mutant):
    def change(self, space, state, update, after, outcome):
        return after, replace(outcome, model=outcome.model + 0.1 * (update.share is None))


@breaks(STATE_DICTS)
class ReportsAnotherNorm(Mutant):
    def change(self, space, state, update, after, outcome):
        norm = outcome.numbers["norm"] + (update.share is None)
        return after, replace(outcome, numbers={"norm": norm})


@breaks(SPLIT)
class CountsTheTensors(Mutant):
    def change(self, space, state, update, after, outcome):
        return after, replace(outcome, model=outcome.model + len(space.layout.leaves))


@breaks(SPLIT)
class SumsTensorByTensor(Mutant):
    def change(self, space, state, update, after, outcome):
        norm = sum(float(tensor.norm()) for tensor in space.views(outcome.model).values())
        return after, replace(outcome, numbers={"norm": norm})


class Opaque:
    """A value that no file can store."""


@breaks("a_run_can_be_resumed")
class StoresAnObject(Mutant):
    def change(self, space, state, update, after, outcome):
        return {**after, "object": Opaque()}, outcome


@breaks("a_run_can_be_resumed")
class KeepsTheStartInTheInstance(Right):
    """`Server.resume` initialises the rule with the saved model."""

    def init(self, space, start):
        object.__setattr__(self, "start", start.clone())
        return super().init(space, start)

    def step(self, space, state, update, *, out=None):
        after, outcome = super().step(space, state, update)
        return after, replace(outcome, model=outcome.model + 0.1 * self.start)


@breaks(*RULE_LAWS)
class Raises(Right):
    def step(self, space, state, update, *, out=None):
        raise KeyError("mean")


def test_a_correct_rule_obeys_every_law():
    verdict = check_rule(Right(), seeds=2, verbose=False)
    assert verdict.holds, f"\n{verdict}"
    assert not verdict.omitted


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught_by_its_laws(name, record_property):
    kind, laws = MUTANTS[name]
    verdict = check_rule(kind(), seeds=1, verbose=False)
    assert set(verdict.broken_laws) == set(laws), f"\n{verdict}"
    record_property("caught", (name, verdict.broken_laws))


def test_every_law_has_a_mutant_that_breaks_no_other_law():
    assert {laws[0] for _, laws in MUTANTS.values() if len(laws) == 1} == RULE_LAWS.keys()


def test_every_law_states_what_it_requires():
    assert all(law.__doc__.splitlines()[0].endswith((".", ",")) for _, law in RULE_LAWS.values())


def test_a_verdict_is_readable(capsys):
    verdict = check_rule(StoresTheBase(), laws=["step_is_pure", "nothing_is_aliased", SPLIT], by_tensor=True, seeds=1)
    assert str(verdict).splitlines() == capsys.readouterr().out.splitlines()
    assert str(verdict).splitlines() == [
        "StoresTheBase(): 1 of 2 laws hold",
        "  holds  step is pure",
        "  BROKEN nothing is aliased (seed 0): update 0: the new state['base'][0] shares memory with update.base",
        "  omitted results do not depend on the split into tensors: the rule works tensor by tensor (by_tensor=True)",
    ]


def test_a_verdict_names_the_options_of_the_rule():
    assert check_rule(FedBuff(2, rate=0.5), laws=["step_is_pure"], verbose=False).subject == "FedBuff(size=2, rate=0.5)"
    bare = type("Bare", (), {name: getattr(Right, name) for name in ("cohort", "init", "message", "step")})
    assert check_rule(bare(), laws=["step_is_pure"], verbose=False).subject == "a Bare"


def test_a_finding_contains_the_difference_or_the_exception():
    (finding,) = check_rule(WritesThePoints(), laws=["step_is_pure"], verbose=False).findings
    assert "update.points differs in 25 of 25 entries, by at most" in finding.location
    (finding,) = check_rule(Raises(), laws=["step_is_pure"], verbose=False).findings
    assert finding.location == " (seed 0): KeyError: 'mean'"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rule": FedAvg}, "rule: expected an instance, got the class FedAvg"),
        ({"rule": object()}, "rule: expected a rule"),
        ({"space": "flat"}, "space: expected a Manifold"),
        ({"num_points": 0}, "num_points: expected an integer >= 1"),
        ({"seeds": 0}, "seeds: expected an integer >= 1"),
        ({"num_updates": 0}, "num_updates: expected an integer >= 1"),
        ({"rule": FedBuff(20)}, "num_updates: expected enough updates to move the model, got 12"),
        ({"by_tensor": 1}, "by_tensor: expected one of True, False"),
        ({"make_payload": 1}, "make_payload: expected a function"),
        ({"clients": "ab"}, "clients: expected a sequence of names"),
        ({"clients": ()}, "clients: expected a sequence of names"),
        ({"clients": (0.5,)}, "clients: expected strings or integers"),
        ({"clients": ("a", "a")}, "clients: expected distinct names"),
        ({"laws": ()}, "laws: expected at least one"),
        ({"laws": ["purity"]}, "laws: expected one of"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(options, words):
    with pytest.raises(ArgumentError, match=words):
        check_rule(**{"rule": FedAsync(0.5), "verbose": False, **options})


def test_errors_of_the_library_are_broken_laws_too():
    verdict = check_rule(CASES["FLOCO"], laws=["step_is_pure"], num_points=1, verbose=False)
    assert "ArgumentError: points: expected 2 vertices" in verdict.findings[0].location
