"""Buffers: what a model carries beside its geometry, and how it follows the steps of the server."""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manifoldagg.errors import ArgumentError, StateDictError, check_choice
from manifoldagg.federated.trees import widened
from manifoldagg.manifolds import Manifold, ParameterSpace
from manifoldagg.manifolds.layout import Entry

__all__ = ["Patterns", "Waiting", "collect", "of_model", "policies", "settle"]

POLICIES = ("average", "latest", "leave")
Patterns = Mapping[str, str] | Sequence[str]
"""Policy by name or glob pattern; or patterns alone, that are averaged."""


@dataclass(frozen=True)
class Waiting:
    """The buffers of the updates since the model last moved: their weighted sum in float64, and the latest."""

    weight: float
    total: Mapping[str, Tensor]
    latest: Mapping[str, Tensor]
    count: int = 1

    def mean(self, name: str) -> Tensor:
        """The weighted mean of a floating buffer; of a single update it is that update's, bit for bit."""
        return self.latest[name] if self.count == 1 else self.total[name] / self.weight


def policies(entries: Sequence[Entry], patterns: Patterns) -> dict[str, str]:
    """Each entry's policy: `"average"`, `"latest"` or `"leave"`.

    A name goes before a pattern, an earlier pattern before a later one. What no pattern matches is averaged. Where
    averaging makes no sense, in all that is no floating number of 16 bits or more, the latest is taken in its place.

    Raises:
        ArgumentError: if a policy is none, or a pattern of a mapping matches nothing.

    Example:
        >>> entries = [Entry("1.running_mean", (4,), torch.float32), Entry("1.num_batches_tracked", (), torch.int64)]
        >>> policies(entries, {"*running*": "leave"})
        {'1.running_mean': 'leave', '1.num_batches_tracked': 'latest'}
    """
    named = dict(patterns) if isinstance(patterns, Mapping) else dict.fromkeys(patterns, "average")
    for pattern, policy in named.items():
        check_choice(f"buffers: {pattern}", policy, POLICIES)
        if isinstance(patterns, Mapping) and not any(fnmatch.fnmatchcase(entry.name, pattern) for entry in entries):
            raise ArgumentError(f"buffers: {pattern!r} matches nothing that the model carries")
    chosen = {}
    for entry in entries:
        matches = (policy for pattern, policy in named.items() if fnmatch.fnmatchcase(entry.name, pattern))
        policy = named.get(entry.name) or next(matches, "average")
        averages = entry.dtype.is_floating_point and entry.dtype.itemsize > 1
        chosen[entry.name] = "latest" if policy == "average" and not averages else policy
    return chosen


def collect(
    chosen: Mapping[str, str],
    waiting: Waiting | None,
    brought: Mapping[str, Tensor],
    now: Mapping[str, Tensor],
    weight: float,
    *,
    name: str = "buffers",
) -> Waiting:
    """Add copies of the buffers that an update brought to those that wait for the model to move.

    Raises:
        ArgumentError: if a value is not finite and not the server's own (such as the infinities of a mask).
    """
    latest = {key: brought[key].to(now[key].device, copy=True) for key, policy in chosen.items() if policy != "leave"}
    for key, tensor in latest.items():
        given = widened(tensor)
        if not bool((given.isfinite() | (given == widened(now[key]))).all()):
            raise ArgumentError(f"{name}: {key}: expected finite values, or those of the current model")
    if waiting is None:
        return Waiting(weight, {}, latest)
    total = {}
    for key in (key for key, policy in chosen.items() if policy == "average"):
        before = waiting.total[key] if waiting.count > 1 else waiting.weight * waiting.latest[key].double()
        total[key] = before + weight * latest[key].double()
    return Waiting(waiting.weight + weight, total, latest, waiting.count + 1)


def settle(
    chosen: Mapping[str, str], waiting: Waiting, now: Mapping[str, Tensor], numbers: Mapping[str, float]
) -> dict[str, Tensor]:
    r"""The buffers after a step: averaged ones go to $b + s\,(\bar b - b)$, as far as the model along its curve.

    Args:
        chosen: as from `policies`.
        waiting: what the updates brought.
        now: the server's buffers; they are not written.
        numbers: of the outcome: its `step` is $s$, in [0, 1]; 1 where it has none.
    """
    told = numbers.get("step", 1.0)
    part = min(max(told, 0.0), 1.0) if math.isfinite(told) else 1.0
    after = dict(now)
    for key, policy in chosen.items():
        mine = now[key]
        if policy == "latest":
            after[key] = waiting.latest[key]
        elif policy == "average":
            mean = waiting.mean(key)
            on_the_way = mean if part == 1 else torch.lerp(mine.double(), mean.double(), part)
            # What agrees stays as it is: infinities have no way between them.
            after[key] = torch.where(mean == mine, mine, on_the_way.to(mine.dtype))
    return after


def of_model(
    space: Manifold, carried: Mapping[str, Tensor] | None, patterns: Patterns
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Copies of the buffers that a server starts from, and the policy of each; nothing where it keeps none.

    Raises:
        ArgumentError: if they are not what the space carries.
    """
    if carried is None:
        if patterns:
            raise ArgumentError("carried: expected the buffers to start from, as `buffers` says what becomes of them")
        return {}, {}
    if not isinstance(space, ParameterSpace):
        raise ArgumentError(f"carried: expected a ParameterSpace to carry them, got {type(space).__name__}")
    try:
        space.layout.check_carried(carried)
    except StateDictError as error:
        raise StateDictError(f"carried: {error}") from None
    copies = {entry.name: carried[entry.name].detach().clone() for entry in space.layout.carried}
    return copies, policies(space.layout.carried, patterns)
