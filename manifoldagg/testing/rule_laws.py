"""The laws of an aggregation rule: the properties that the protocol `Rule` requires.

Each law is a function that runs the rule in a [`RuleCase`][manifoldagg.testing.RuleCase]. The function returns a
description of the first violation, or an empty string if the law holds. The laws compare results bitwise, without a
tolerance.
"""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import AsyncAggregator, Message, Outcome, Payload, Server
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.testing.rule_case import AggregateRun, DirectRun, RuleCase, ServerRun
from manifoldagg.testing.trees import first_difference, shared_memory

__all__ = ["RULE_LAWS", "rule_law"]

RuleLaw = Callable[[RuleCase], str]
Requirement = Callable[[RuleCase], str]
"""A function that returns the reason why a law does not apply to a case, or an empty string if the law applies."""
RULE_LAWS: dict[str, tuple[tuple[Requirement, ...], RuleLaw]] = {}
"""All laws by name. Each value contains the requirements of the law, and the function."""
RECEIPT_METRICS = ("cosine", "step", "norm")
HUGE = "a huge number"
INVALID_ENTRIES: dict[str, Callable[[Tensor], Tensor]] = {
    "NaN": lambda tensor: torch.full_like(tensor, torch.nan),
    "infinity": lambda tensor: torch.full_like(tensor, torch.inf),
    "a tensor of the wrong shape": lambda tensor: torch.stack([tensor, tensor]),
    HUGE: lambda tensor: torch.full_like(tensor, torch.finfo(tensor.dtype).max),
}
"""Functions that return an invalid replacement for a tensor of an update, by a description of the defect."""
NUM_LAST = 3
"""The number of updates at the end of a run at which a law tries a huge update. With several such updates, the law also
tests different fill levels of a rule's buffer."""


def rule_law(*requirements: Requirement) -> Callable[[RuleLaw], RuleLaw]:
    """Return a decorator that registers a law.

    Args:
        requirements: functions of a case that return the reason why the law does not apply, or an empty string.
            `check_rule` omits the law if a requirement returns a reason.
    """

    def register(function: RuleLaw) -> RuleLaw:
        RULE_LAWS[function.__name__] = (requirements, function)
        return function

    return register


def needs_state_dicts(case: RuleCase) -> str:
    """Return the reason why `aggregate` cannot run a test case (a simulated run), or an empty string if it can.

    The function `aggregate` can run a test case if all of these conditions are met:

    - The space is a `ParameterSpace` without adapters, and all its tensors have the same dtype.
    - The clients exchange only models with the server.
    """
    space = case.space
    if not isinstance(space, ParameterSpace) or space.adapters is not None:
        return "it requires a ParameterSpace without adapters"
    if {leaf.dtype for leaf in space.layout.leaves} != {space.dtype}:
        return f"it requires tensors of {space.dtype}, because `aggregate` rounds to other dtypes at each call"
    return "" if case.requires_models_only else "the rule requires more than models, which `aggregate` does not accept"


def needs_flat_tensors(case: RuleCase) -> str:
    """Return why the law about splitting tensors does not apply to a case, or an empty string."""
    if case.by_tensor:
        return "the rule works tensor by tensor (by_tensor=True)"
    return "" if case.space.flat else "it requires a flat space"


@rule_law()
def step_is_pure(case: RuleCase) -> str:
    """For equal inputs, `rule.step` returns bitwise equal results. It writes to none of its inputs except `out`."""
    rule = case.rule
    space = case.space
    run = case.direct_run()
    first_results = []
    for index in range(case.num_updates):
        where = f"update {index}: "
        update = run.next_update()
        inputs = copy.deepcopy((run.state, update, run.current))

        def written_input(where: str = where, inputs: Any = inputs, update: Any = update) -> str:
            """Describe the first input that `step` modified, or return ""."""
            names = (f"{where}the state", f"{where}update", f"{where}the current model")
            differences = map(first_difference, names, inputs, (run.state, update, run.current))
            return next((f"{words}: an input was written" for words in differences if words), "")

        messages = [run.message(update.client) for _ in range(2)]
        results = []
        for out in (None, None, torch.full_like(update.current, torch.nan)):
            results.append(copy.deepcopy(_step(rule, space, run, update, out)))
            if violation := written_input():
                return violation
        if violation := first_difference(f"{where}the message of the same state", *messages):
            return violation
        for other, what in zip(results[1:], ("the same step again", "the same step with out="), strict=True):
            if violation := _result_difference(f"{where}{what}: ", results[0], other):
                return violation
        run.apply(update, *results[0])
        first_results.append(results[0])
    second_run = case.direct_run()
    for index, result in enumerate(first_results):
        update = second_run.next_update()
        state, outcome = _step(rule, space, second_run, update, None)
        if violation := _result_difference(f"update {index}: the same run again: ", result, (state, outcome)):
            return violation
        second_run.apply(update, state, outcome)
    return ""


@rule_law()
def nothing_is_aliased(case: RuleCase) -> str:
    """The results of `rule.step` do not share memory with each other or with the tensors of the update.

    The results are the new model, the new state of the rule and the new state of the client. The arguments of `step`
    also include the previous states of the rule and of the client. The new model must not share memory with them. The
    new states may share memory with them, because a rule never modifies a state in place.
    """
    rule = case.rule
    space = case.space
    start = case.start.clone()
    if violation := shared_memory({"the initial state": rule.init(space, start)}, {"the start": start}):
        return violation
    run = case.direct_run()
    for index in range(case.num_updates):
        update = run.next_update()
        out = torch.empty_like(update.current) if index % 2 else None
        state, outcome = _step(rule, space, run, update, out)
        model = {"the new model": outcome.model}
        new_state = {"the new state": state}
        client = {"the new client state": outcome.client_state}
        inputs = {f"update.{name}": getattr(update, name) for name in ("base", "current", "points", "tensors")}
        previous = {"the previous state": run.state, "the previous client state": update.client_state}
        for trees, others in (
            (model, inputs | new_state | client | previous),
            (new_state, inputs | client | {"out": out}),
            (client, inputs | {"out": out}),
        ):
            if violation := shared_memory(trees, others):
                return f"update {index}: {violation}"
        run.apply(update, state, outcome)
    return ""


@rule_law()
def rejection_changes_nothing(case: RuleCase) -> str:
    """A rejected update does not change the model, the state, the client states, the version or the history.

    The test sends invalid updates and very large updates to `Server` and to `aggregate`:

    - An update that is not finite or has an invalid shape must be rejected.
    - An update with entries near the largest finite number may be accepted.
    - A rule with differential privacy may accept an update that is not finite, because it replaces the update by zeros.

    After a rejection, all later results must be bitwise equal to those of a run without the rejected update.
    """
    run = case.server_run()
    twin = case.server_run()
    is_private = getattr(case.rule, "is_private", False)
    for index in range(case.num_updates):
        ticket, payload = run.next_task()
        invalid = _invalid_payloads(payload, is_private=is_private)
        what = [*invalid][index % len(invalid)]
        violation = _rejection(run, ticket, what, invalid[what])
        if violation is None or violation:
            return f"update {index}: {violation or f'{what}: the server accepted it'}"
        run.advance(1)
        twin.advance(1)
        if violation := first_difference(f"update {index}: record", twin.records[-1], run.records[-1]):
            return f"{violation}: a rejected update changed the run"
    for index in range(max(case.num_updates - NUM_LAST, 0), case.num_updates):
        run = case.server_run().advance(index)
        ticket, payload = run.next_task()
        violation = _rejection(run, ticket, "a huge update", _huge(payload))
        if violation:
            return f"update {index}: {violation}"
        if violation is not None:
            run.advance(1)
            if violation := first_difference(f"update {index}: record", twin.records[index], run.records[-1]):
                return f"{violation}: a rejected huge update changed the run"
    if isinstance(case.space, ParameterSpace) and not needs_state_dicts(case) and not is_private:
        return _aggregate_rejections(case, case.space, twin)
    return ""


@rule_law(needs_state_dicts)
def aggregate_equals_server(case: RuleCase) -> str:
    """`aggregate` on state dicts and `Server` on points return bitwise equal models and metrics."""
    assert isinstance(case.space, ParameterSpace)
    server = case.server_run().finish()
    run = case.aggregate_run(case.space, server.records)
    for index, record in enumerate(server.records):
        metrics = run.advance(1)
        if violation := first_difference(f"update {index}: the model of aggregate", record.model, run.current):
            return violation
        for name in RECEIPT_METRICS:
            expected = float(getattr(record.receipt, name))
            if name in metrics and repr(float(metrics[name])) != repr(expected):
                return f"update {index}: {name} is {metrics[name]} from aggregate and {expected} from Server"
    return ""


@rule_law(needs_flat_tensors)
def results_do_not_depend_on_the_split_into_tensors(case: RuleCase) -> str:
    """The results do not depend on how the entries of a model are split into tensors."""
    size = case.start.numel()
    dtype = case.start.dtype
    expected: Any = None
    for sizes in ([size], [size // 3, size - size // 3], [1] * size):
        named = {str(i): torch.zeros(part, dtype=dtype) for i, part in enumerate(sizes) if part}
        space = ParameterSpace.of_state_dict(named)
        run = case.server_run(space).finish()
        found: dict[str, Any] = {"server": run.records}
        if case.requires_models_only:
            other = case.aggregate_run(space, run.records)
            found["aggregate"] = [(other.advance(1), other.current) for _ in run.records]
        expected = found if expected is None else expected
        if violation := first_difference(f"as {len(named)} tensors: run", expected, found):
            return violation
    return ""


@rule_law()
def a_run_can_be_resumed(case: RuleCase) -> str:
    """A run that is saved to a file and resumed is bitwise equal to an uninterrupted run.

    The test uses the methods `Server.save` and `Server.resume`. If the server and its clients exchange only models, the
    test is repeated with the methods `AsyncAggregator.state` and `AsyncAggregator.load`.
    """
    count = case.num_updates // 2
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "server"
        run = case.server_run().advance(count)
        saved = copy.deepcopy(run.contents())
        run.server.save(path)
        paused = run.resumed(run.server)
        # The original run ends before the second server exists, so that the two servers cannot interact through the
        # shared rule object.
        run.finish()
        resumed = paused.resumed(Server.resume(path, case.space, case.rule))
        if violation := first_difference("after the resume: server", saved, resumed.contents()):
            return violation
        resumed.finish()
        for index in range(count, case.num_updates):
            if violation := first_difference(
                f"update {index}: record of the resumed server", run.records[index], resumed.records[index]
            ):
                return violation
    if isinstance(case.space, ParameterSpace) and not needs_state_dicts(case) and _sends_models_only(run):
        return _aggregator_resumes(case, case.space, run, count)
    return ""


def _step(rule: Any, space: Any, run: DirectRun, update: Any, out: Any) -> tuple[Any, Outcome]:
    state, outcome = rule.step(space, run.state, update, out=out)
    return state, outcome


def _result_difference(where: str, expected: tuple[Any, Outcome], found: tuple[Any, Outcome]) -> str:
    trees = [
        {
            "the new state": state,
            "the new model": outcome.model,
            "the new client state": outcome.client_state,
            "the metrics": dict(outcome.numbers),
        }
        for state, outcome in (expected, found)
    ]
    violation = (first_difference(f"{where}{name}", trees[0][name], trees[1][name]) for name in trees[0])
    return next((words for words in violation if words), "")


def _invalid_payloads(payload: Payload, *, is_private: bool) -> dict[str, Payload]:
    """Return client updates that a server must reject. The keys of the result describe the defects."""
    points = payload.points
    invalid = {}
    # A rule with differential privacy does not reject points that are not finite, because a rejection would reveal
    # information about the update.
    values = () if is_private else (("NaN in the points", torch.nan), ("infinity in the points", torch.inf))
    for what, value in values:
        modified = points.clone()
        modified[-1].view(-1)[-1] = value
        invalid[what] = replace(payload, points=modified)
    invalid["points of the wrong shape"] = replace(payload, points=torch.cat([points, points[:, :1]], 1))
    invalid["an update without points"] = replace(payload, points=points[:0])
    for name, tensor in payload.tensors.items():
        modified = tensor.clone()
        modified.view(-1)[0] = torch.nan
        invalid[f"NaN in the tensor {name}"] = replace(payload, tensors={**payload.tensors, name: modified})
    for name in payload.numbers:
        invalid[f"NaN as the number {name}"] = replace(payload, numbers={**payload.numbers, name: torch.nan})
    return invalid


def _huge(payload: Payload) -> Payload:
    """Return an update that is so large that most computations with it overflow."""
    largest = torch.finfo(payload.points.dtype).max
    return replace(payload, points=payload.points.sign() * largest)


def _rejection(run: ServerRun, ticket: Any, what: str, payload: Payload) -> str | None:
    """Send a payload to a server, and check that the server does not change if it rejects the payload.

    Returns:
        `None` if the server accepts the payload. Otherwise, a description of the first change of the server or of the
        payload, or "" if nothing has changed.
    """
    before = copy.deepcopy(run.contents())
    original = copy.deepcopy(payload)
    if run.server.receive(ticket, payload).accepted:
        return None
    violation = first_difference(f"{what}: payload", original, payload)
    violation = violation or first_difference(f"{what}: server", before, run.contents())
    return f"{violation}, after a rejected update" if violation else ""


def _aggregate_rejections(case: RuleCase, space: ParameterSpace, twin: ServerRun) -> str:
    """Check that `aggregate` rejects invalid updates, and that a rejected update does not change later models.

    The result is a description of the first violation, or an empty string.
    """
    plain = case.aggregate_run(space, twin.records)
    run = case.aggregate_run(space, twin.records)
    for index in range(case.num_updates):
        kind = [*INVALID_ENTRIES][index % len(INVALID_ENTRIES)]
        if violation := _aggregate_rejection(run, kind):
            return f"update {index}: aggregate: {violation}"
        run.advance(1)
        plain.advance(1)
        if violation := first_difference(f"update {index}: aggregate: the model", plain.models[-1], run.models[-1]):
            return f"{violation}, after a rejected update"
    return ""


def _aggregate_rejection(run: AggregateRun, kind: str) -> str:
    """Check that `aggregate` rejects an invalid update without modifying its inputs.

    For a very large update, acceptance is also correct. The result is a description of the first violation, or an empty
    string.
    """
    current, base, update = run.next_models()
    for model in update if isinstance(update, list) else [update]:
        name, tensor = [*model.items()][-1]
        model[name] = INVALID_ENTRIES[kind](tensor)
    out = {name: torch.full_like(tensor, 7.0) for name, tensor in current.items()}
    inputs = copy.deepcopy((run.state, current, base, update, out))
    names = ("the state", "current", "base", "update", "out")
    try:
        run.step(current, base, update, out)
    except ArgumentError:
        differences = map(first_difference, names, inputs, (run.state, current, base, update, out))
        return next((f"{words}, after {kind} in the update was rejected" for words in differences if words), "")
    return "" if kind == HUGE else f"{kind} in the update was accepted"


def _sends_models_only(run: ServerRun) -> bool:
    messages: list[Message] = [record.message for record in run.records]
    return not any(message.tensors or message.numbers for message in messages)


def _aggregator_resumes(case: RuleCase, space: ParameterSpace, run: ServerRun, count: int) -> str:
    """Describe the first difference between a resumed and an uninterrupted run of an `AsyncAggregator`.

    The result is "" if the two runs are bitwise equal.
    """
    first = space.state_dict(case.start)

    def make() -> AsyncAggregator:
        return AsyncAggregator(case.rule, first, weights=case.sample_counts, space=space)

    def play(aggregator: AsyncAggregator, begin: int, end: int, tasks: list[Any]) -> list[Any]:
        results = []
        for index in range(begin, end):
            place, next_client = case.schedule[index]
            client, task = tasks.pop(place)
            record = run.records[index]
            models = [space.state_dict(point) for point in record.payload.points]
            results.append(
                aggregator.submit(
                    client, models if len(models) > 1 else models[0], samples=record.payload.samples, task=task
                )
            )
            results.append(aggregator.model)
            aggregator.checkout(next_client, index)
            tasks.append((next_client, index))
        return results

    aggregator = make()
    tasks: list[Any] = [(client, -1) for client in case.clients]
    for client, task in tasks:
        aggregator.checkout(client, task)
    play(aggregator, 0, count, tasks)
    saved = aggregator.state()
    pending = [*tasks]
    expected = play(aggregator, count, case.num_updates, tasks)
    other = make()
    other.load(saved)
    return first_difference(
        "the run of a loaded AsyncAggregator", expected, play(other, count, case.num_updates, pending)
    )
