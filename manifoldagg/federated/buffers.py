"""Server-side updates of model buffers, which are the untrained tensors of a model, such as running means.

Each buffer has a policy. With the policy `"average"`, the server averages the values that clients return. With
`"latest"`, it uses the latest value. With `"leave"`, it does not change the buffer.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from manifoldagg._validation import short_repr
from manifoldagg.errors import ArgumentError, StateDictError
from manifoldagg.federated.pytrees import upcast_8bit
from manifoldagg.kernels import TensorList
from manifoldagg.kernels.tensor_list import CPU
from manifoldagg.manifolds import Manifold, ParameterSpace
from manifoldagg.manifolds.buffer_policies import COUNTER, BufferPolicy, resolve_policies

__all__ = [
    "PackedBuffers",
    "PendingBuffers",
    "accumulate",
    "apply_pending",
    "initial_buffers",
]

VARIANCE_SUFFIX = "running_var"
MAX_COUNT = 2**53
"""The largest counter that clients may return. It is low enough that counting further batches cannot overflow."""
_shape = attrgetter("shape")
_dtype = attrgetter("dtype")
_device = attrgetter("device")
_is_cpu = attrgetter("is_cpu")


@dataclass(frozen=True)
class BufferGroup:
    """Group of model buffers whose values are stored together in one vector.

    All buffers of a group have the same update policy, dtype and device. Running variances are never in the same group
    as buffers of another kind. The same holds for batch counters (`num_batches_tracked`).

    Attributes:
        policy: the update policy of these buffers, such as `"average"`.
        names: the name of each buffer.
        shapes: the shape of each buffer.
    """

    policy: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def is_variance(self) -> bool:
        """Whether the buffers are variances, which must not be negative."""
        return self.names[0].endswith(VARIANCE_SUFFIX)

    @cached_property
    def is_counter(self) -> bool:
        """Whether the buffers are counters of batches, which must not decrease."""
        return self.names[0].endswith(COUNTER)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each buffer."""
        return tuple(map(math.prod, self.shapes))

    @cached_property
    def is_1d(self) -> bool:
        """Whether all buffers are one-dimensional, as in batch normalisation."""
        return all(len(shape) == 1 for shape in self.shapes)


@dataclass(frozen=True, eq=False)
class PackedBuffers(Mapping[str, Tensor]):
    """Mapping from names to buffers, which stores each group of buffers in one vector.

    Args:
        groups: the groups of buffers.
        vectors: the vector of each group, which is the concatenation of the buffers of the group.
        order: the names of all buffers in their original order.
    """

    groups: tuple[BufferGroup, ...] = ()
    vectors: tuple[Tensor, ...] = ()
    order: tuple[str, ...] = ()

    @classmethod
    def of(cls, policy_by_name: Mapping[str, str], tensors: Mapping[str, Tensor]) -> "PackedBuffers":
        """Copy buffers into groups.

        Args:
            policy_by_name: the policy of each buffer.
            tensors: the buffers, by name.
        """
        held = TensorList([tensors[name] for name in policy_by_name])
        devices = CPU if held.devices <= {CPU} else tuple(map(_device, held))
        groups = _group_buffers(
            tuple(policy_by_name.items()), tuple(map(_shape, held)), tuple(map(_dtype, held)), devices
        )
        vectors = tuple(_concatenate(tensors, group, tensors[group.names[0]].device) for group in groups)
        return cls(groups, vectors, tuple(policy_by_name))

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedBuffers, (self.groups, self.vectors, self.order)

    def clone(self) -> "PackedBuffers":
        return replace(self, vectors=tuple(vector.clone() for vector in self.vectors))

    def tree(self) -> dict[str, Any]:
        """Return the buffers as a tree of plain values and tensors for `of_tree`.

        Example:
            >>> PackedBuffers().tree()
            {'groups': [], 'vectors': (), 'order': ()}
        """
        groups = [(group.policy, group.names, group.shapes) for group in self.groups]
        return {"groups": groups, "vectors": self.vectors, "order": self.order}

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> "PackedBuffers":
        """Restore buffers from a result of `tree`.

        Example:
            >>> PackedBuffers.of_tree(PackedBuffers().tree()) == PackedBuffers()
            True
        """
        return cls(tuple([BufferGroup(*group) for group in tree["groups"]]), tree["vectors"], tree["order"])

    def to_dict(self) -> dict[str, Tensor]:
        """Return copies of the buffers by name. Each group is copied by one call of torch."""
        return self._split(torch.split_with_sizes_copy)

    @cached_property
    def requested_names(self) -> tuple[str, ...]:
        """The names of the buffers that clients must return: all buffers except those with the policy `"leave"`."""
        left = {name for group in self.groups if group.policy == "leave" for name in group.names}
        return tuple(name for name in self.order if name not in left)

    @cached_property
    def _views(self) -> dict[str, Tensor]:
        return self._split(torch.split_with_sizes)

    def _split(self, split: Callable[..., Any]) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for group, vector in zip(self.groups, self.vectors, strict=True):
            pieces = split(vector, group.sizes)
            if not group.is_1d:
                pieces = [piece.view(shape) for shape, piece in zip(group.shapes, pieces, strict=True)]
            found.update(zip(group.names, pieces, strict=True))
        return found


@dataclass(frozen=True)
class PendingBuffers:
    """Model buffers that clients have returned since the server model last changed.

    The server stores sums for the buffers that it averages over clients, and the latest values of the other buffers.

    Attributes:
        weight: the sum of the weights of the updates.
        total: the weighted sum of the returned buffers in float64, as one vector for each `BufferGroup` with the policy
            `"average"`. The vectors of the other groups are unused. With only one update, the tuple is empty.
        latest: the buffers of the latest update, with two exceptions. Buffers with the policy `"leave"` are those of
            the server. Each integer batch counter is the maximum over the updates.
        count: the number of updates.
    """

    weight: float
    total: tuple[Tensor, ...]
    latest: PackedBuffers
    count: int = 1

    def tree(self) -> dict[str, Any]:
        """Return the pending buffers as a tree of plain values and tensors for `of_tree`."""
        return {**vars(self), "latest": self.latest.tree()}

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> "PendingBuffers":
        """Restore pending buffers from a result of `tree`."""
        return cls(**{**tree, "latest": PackedBuffers.of_tree(tree["latest"])})


def accumulate(
    pending: PendingBuffers | None,
    received: Mapping[str, Tensor],
    current: PackedBuffers,
    weight: float,
    *,
    name: str = "buffers",
) -> PendingBuffers:
    """Add a client's model buffers, such as running means, to the buffers of earlier updates in `pending`.

    The function copies the buffers, and checks their values:

    - Floating-point values must be finite, and variances must not be negative. A value that equals the server's own
      value is always valid, for example an infinity in an attention mask.
    - Batch counters (`num_batches_tracked`) with an integer dtype must be at most $2^{53}$.

    Args:
        pending: the waiting buffers of earlier updates. `None` if no update is waiting.
        received: the buffers of the update.
        current: the server's buffers.
        weight: the weight of the update in averages.
        name: the start of error messages.

    Raises:
        ArgumentError: if a value is invalid, or if `pending` contains buffers with other names or policies.
    """
    vectors = []
    if pending is not None and pending.latest.groups != current.groups:
        raise ArgumentError(f"{name}: expected the buffers and policies of the buffered updates")
    for i, (group, mine) in enumerate(zip(current.groups, current.vectors, strict=True)):
        if group.policy == "leave":
            vectors.append(mine)
            continue
        theirs = _concatenate(received, group, mine.device)
        if not _is_finite(theirs, mine, group):
            # The copy in `theirs` is searched, because another process may change a mapped file in the meantime.
            pairs = zip(group.names, theirs.split(group.sizes), mine.split(group.sizes), strict=True)
            odd = next(key for key, value, own in pairs if not _is_finite(value, own, group))
            raise ArgumentError(f"{name}: {odd}: expected {_expected_values(group, mine.dtype)}")
        if group.is_counter and not mine.is_floating_point():
            theirs = torch.maximum(theirs, mine if pending is None else pending.latest.vectors[i])
        vectors.append(theirs)
    latest = replace(current, vectors=tuple(vectors))
    if pending is None:
        return PendingBuffers(weight, (), latest)
    total = list(vectors)
    for i, group in enumerate(current.groups):
        if group.policy == "average":
            before = pending.total[i] if pending.total else pending.weight * pending.latest.vectors[i].double()
            total[i] = before + weight * vectors[i].double()
    return PendingBuffers(pending.weight + weight, tuple(total), latest, pending.count + 1)


def apply_pending(pending: PendingBuffers, current: PackedBuffers, numbers: Mapping[str, float]) -> PackedBuffers:
    r"""Return the new values of the server's model buffers, such as running means, when the model changes.

    The policy of a buffer determines its new value:

    - `"average"`: the server's value $b$ moves towards the weighted mean $\bar b$ of the clients' values. The new value
      is $b + s\,(\bar b - b)$, where $s \in [0, 1]$ is the metric `step` in `numbers`.
    - `"latest"`: the value in the latest update. For integer batch counters, it is the largest value instead.
    - `"leave"`: the server's value does not change.

    Args:
        pending: the buffers of the updates since the last step.
        current: the server's buffers before the step.
        numbers: the metrics of the step. The metric `step`, the position of the new model on the curve of the update,
            is $s$ after clipping to [0, 1]. If it is missing or not finite, $s$ is 1.
    """
    told = numbers.get("step", 1.0)
    part = min(max(told, 0.0), 1.0) if math.isfinite(told) else 1.0
    after = []
    for i, group in enumerate(current.groups):
        mine = current.vectors[i]
        latest = pending.latest.vectors[i]
        if group.policy != "average":
            after.append(latest)
            continue
        mean = pending.total[i] / pending.weight if pending.total else latest
        on_the_way = mean if part == 1 else torch.lerp(mine.double(), mean.double(), part)
        # Equal values are copied, because the interpolation between equal infinities is NaN.
        after.append(torch.where(mean == mine, mine, on_the_way.to(mine.dtype)))
    return replace(current, vectors=tuple(after))


def initial_buffers(
    space: Manifold, buffers: Mapping[str, Tensor] | None, buffer_policy: BufferPolicy
) -> tuple[PackedBuffers, dict[str, str]]:
    """Return copies of the initial buffers of a server, and the policy of each buffer by name.

    Args:
        space: the space of the models.
        buffers: the initial buffers. `None` means that the server has no buffers.
        buffer_policy: the policies of the buffers, as in `InitialModel`.

    Raises:
        ArgumentError: if there are policies but no buffers, or if the space is not a `ParameterSpace`.
        StateDictError: if the buffers do not match the layout of the space.
    """
    if buffers is None:
        if buffer_policy:
            raise ArgumentError("buffers: expected the initial buffers, as `buffer_policy` is given")
        return PackedBuffers(), {}
    if not isinstance(space, ParameterSpace):
        raise ArgumentError(f"buffers: expected a ParameterSpace as the space, got {type(space).__name__}")
    if not isinstance(buffers, Mapping):
        raise ArgumentError(f"buffers: expected a mapping from names to tensors, got {short_repr(buffers)}")
    try:
        space.layout.check_buffers(buffers)
    except StateDictError as error:
        raise StateDictError(f"buffers: {error}") from None
    chosen = resolve_policies(space.layout.buffers, buffer_policy, space.layout.entries)
    return PackedBuffers.of(chosen, {name: buffers[name].detach() for name in chosen}), chosen


# The groups are cached, because callers of `aggregate` pass models with the same names and shapes in each call.
@lru_cache(maxsize=64)
def _group_buffers(
    policy_items: tuple[tuple[str, str], ...],
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    devices: torch.device | tuple[torch.device, ...],
) -> tuple[BufferGroup, ...]:
    """Group buffers by policy, dtype, device and kind.

    Args:
        policy_items: the name and the policy of each buffer.
        shapes: the shape of each buffer.
        dtypes: the dtype of each buffer.
        devices: one device for all buffers, or the device of each buffer.
    """
    found: dict[tuple[str, torch.dtype, torch.device, tuple[bool, bool]], dict[str, tuple[int, ...]]] = {}
    each = devices if isinstance(devices, tuple) else repeat(devices)
    for (name, policy), shape, dtype, device in zip(policy_items, shapes, dtypes, each, strict=False):
        kind = (name.endswith(VARIANCE_SUFFIX), name.endswith(COUNTER))
        found.setdefault((policy, dtype, device, kind), {})[name] = tuple(shape)
    return tuple(BufferGroup(policy, tuple(mine), tuple(mine.values())) for (policy, *_), mine in found.items())


def _concatenate(tensors: Mapping[str, Tensor], group: BufferGroup, device: torch.device) -> Tensor:
    """Concatenate the buffers of a group into one vector."""
    # This function calls torch only once, because hundreds of calls would take milliseconds.
    mine = [tensors[name] for name in group.names]
    if device != CPU or not all(map(_is_cpu, mine)):
        mine = [tensor.to(device) for tensor in mine]
    return torch.cat(mine if group.is_1d else [tensor.reshape(-1) for tensor in mine])


def _expected_values(group: BufferGroup, dtype: torch.dtype) -> str:
    if not (dtype.is_floating_point or dtype.is_complex):
        return "a counter <= 2^53"
    return f"finite values{' >= 0' if group.is_variance else ''}, or the values of the current model"


def _is_finite(received: Tensor, current: Tensor, group: BufferGroup) -> bool:
    """Return whether all values that a client returned for a buffer group are valid."""
    if not (received.is_floating_point() or received.is_complex()):
        # Only batch counters have an upper limit. Other integers are always valid.
        return not group.is_counter or bool((received <= MAX_COUNT).all())
    theirs = upcast_8bit(received)
    fit = theirs.isfinite()
    if group.is_variance:
        fit &= theirs >= 0
    # The server's own value is always valid, for example an infinity in an attention mask.
    return bool((fit | (theirs == upcast_8bit(current))).all())
