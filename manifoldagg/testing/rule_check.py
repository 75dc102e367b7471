"""The function `check_rule`, which tests an aggregation rule in random asynchronous runs."""

import warnings
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import torch

from manifoldagg._validation import check_choice, check_count, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Rule
from manifoldagg.federated.types import check_rule_protocol
from manifoldagg.manifolds import Manifold, ParameterSpace
from manifoldagg.manifolds.manifold import check_is_manifold
from manifoldagg.testing.rule_case import MakePayload, RuleCase
from manifoldagg.testing.rule_laws import RULE_LAWS, RuleLaw
from manifoldagg.testing.verdict import Verdict, exact_finding

__all__ = ["check_rule"]

DEFAULT_SHAPES = {"hidden.weight": (4, 3), "hidden.bias": (4,), "out.weight": (2, 4), "scale": ()}
"""The shapes of the tensors of the default model."""
CLIENTS = ("client-1", "client-2", "client-3")


def check_rule(
    rule: Rule,
    *,
    space: Manifold | None = None,
    num_points: int = 1,
    clients: Sequence[Hashable] = CLIENTS,
    make_payload: MakePayload | None = None,
    by_tensor: bool = False,
    seeds: int = 3,
    num_updates: int = 12,
    laws: Iterable[str] | None = None,
    verbose: bool = True,
) -> Verdict:
    """Check that an aggregation rule satisfies all requirements (laws) of the protocol `Rule`.

    Use this function to test a rule that you implement. It checks the laws in
    [`RULE_LAWS`][manifoldagg.testing.RULE_LAWS] that apply to the rule. For each seed, it checks the laws in a
    simulation of asynchronous federated learning:

    - As many tasks are in flight as there are clients.
    - The tasks return in a random order.
    - Each client returns a random model near the model that it received.

    The laws require bitwise equality. If the rule raises an exception, the law counts as broken, and the returned
    verdict contains the exception. Warnings are ignored.

    Args:
        rule: an instance of a rule. The rule must be deterministic. For example, `Private` requires a `seed`.
        space: the space of the models. The default is a flat space with four float32 tensors. The laws about state
            dicts require a [`ParameterSpace`][manifoldagg.manifolds.ParameterSpace].
        num_points: the number of control points of an update. For `FLOCO`, it must be the number of vertices.
        clients: the distinct names of the clients, strings or integers. Set this option if the rule depends on the
            names.
        make_payload: a function of the message and a random number generator that returns the payload of a client. By
            default, the points are near the start model, the additional tensors that the rule declares are random, and
            the additional numbers are copied from the message or set to 1.
        by_tensor: whether the rule processes each named tensor separately. The results of such a rule depend on the
            split of the model into tensors, so the law about the split is omitted.
        seeds: the number of runs.
        num_updates: the number of updates of a run.
        laws: the names of the laws to check. By default, all laws are checked.
        verbose: whether to print the verdict.

    Returns:
        The verdict. In a test, assert that `verdict.holds` is true.

    Raises:
        ArgumentError: if an argument is invalid, or if the model does not change within `num_updates` updates.

    Example:
        >>> from manifoldagg.federated.rules import FedBuff
        >>> verdict = check_rule(FedBuff(size=2), laws=["step_is_pure", "a_run_can_be_resumed"])
        FedBuff(size=2): 2 of 2 laws hold
          holds  step is pure
          holds  a run can be resumed
        >>> verdict.holds
        True
    """
    check_rule_protocol(rule)
    if space is not None:
        check_is_manifold(space)
    check_count("num_points", num_points)
    check_count("seeds", seeds)
    check_count("num_updates", num_updates)
    check_choice("by_tensor", by_tensor, (True, False))
    if make_payload is not None and not callable(make_payload):
        raise ArgumentError(f"make_payload: expected a function of a message, got {short_repr(make_payload)}")
    names = set(RULE_LAWS) if laws is None else {check_choice("laws", name, RULE_LAWS) for name in laws}
    if not names:
        raise ArgumentError("laws: expected at least one law, got an empty sequence")
    chosen = _default_space() if space is None else space
    known = _check_clients(clients)
    cases = [
        RuleCase(rule, chosen, seed, num_updates, num_points, known, make_payload, by_tensor) for seed in range(seeds)
    ]
    findings = []
    omitted = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _check_model_moves(cases[0])
        for name, (requirements, law) in RULE_LAWS.items():
            if name not in names:
                continue
            if reason := next(filter(None, (requirement(cases[0]) for requirement in requirements)), ""):
                omitted[name] = reason
                continue
            findings.append(exact_finding(name, next(filter(None, (_violation(law, case) for case in cases)), "")))
    verdict = Verdict(_describe(rule), tuple(findings), omitted)
    if verbose:
        print(verdict)
    return verdict


def _describe(rule: Any) -> str:
    """Return the class name of a rule with all options that differ from their defaults."""
    if not is_dataclass(rule):
        return short_repr(rule)
    changed = []
    for field in fields(rule):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = getattr(rule, field.name)
        # The code compares representations, because `==` between tensors returns a tensor instead of a boolean.
        if field.init and repr(value) != repr(default):
            changed.append(f"{field.name}={short_repr(value)}")
    return f"{type(rule).__name__}({', '.join(changed)})"


def _default_space() -> ParameterSpace:
    return ParameterSpace.of_state_dict({name: torch.zeros(shape) for name, shape in DEFAULT_SHAPES.items()})


def _check_clients(clients: Sequence[Hashable]) -> tuple[Hashable, ...]:
    if isinstance(clients, str) or not isinstance(clients, Sequence) or not clients:
        raise ArgumentError(f"clients: expected a sequence of names, got {short_repr(clients)}")
    for client in clients:
        if type(client) not in (str, int):
            raise ArgumentError(f"clients: expected strings or integers, got {short_repr(client)}")
    if len(set(clients)) < len(clients):
        raise ArgumentError(f"clients: expected distinct names, got {short_repr(clients)}")
    return tuple(clients)


def _check_model_moves(case: RuleCase) -> None:
    """Check that the rule changes the model at least once during a run.

    Raises:
        ArgumentError: if the model does not change.
    """
    # Many laws that `check_rule` tests hold trivially for a constant model.
    try:
        version = case.server_run().finish().server.version
    except Exception:  # the check of a law raises the same exception and reports it
        return
    if version == 0:
        raise ArgumentError(
            f"num_updates: expected enough updates to move the model, got {case.num_updates}, which are all buffered"
        )


def _violation(law: RuleLaw, case: RuleCase) -> str:
    """Describe the first violation of a law or the exception, or return "" if the law holds."""
    try:
        violation = law(case)
    except Exception as error:  # user-defined rules may raise any exception
        violation = f"{type(error).__name__}: {error}"
    return f" (seed {case.seed}): {violation}" if violation else ""
