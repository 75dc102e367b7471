"""The front door for other codebases: one server step on plain state dicts or lists of arrays, where they lie."""

import copy
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manifoldagg.errors import ArgumentError, check_count, check_number
from manifoldagg.federated.buffers import Packed, Patterns, Waiting, check_patterns, policies
from manifoldagg.federated.contract import Memory, Rule, State, Update, by_rows, check_rule, extras
from manifoldagg.federated.doubts import check_parameters, warn_of_difference, warn_of_integers
from manifoldagg.federated.snapshot import Snapshot
from manifoldagg.federated.step import Terms, step
from manifoldagg.federated.trees import widened
from manifoldagg.federated.weights import check_client
from manifoldagg.kernels import Tensors
from manifoldagg.kernels.rows import check_apart
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.manifolds.assign import Assignment
from manifoldagg.manifolds.layout import OPAQUE, Layout

__all__ = ["aggregate"]

TENSORS = {Tensor, torch.nn.Parameter}
"""What most models consist of."""
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Integers that torch does not add, and those whose sums have the same bits."""
POINTS = re.compile(r"^points(\[\d+\])?")
"""What messages call the points of an update, which came as `update` here."""

Array = Tensor | np.ndarray | np.generic
Model = Mapping[Any, Array] | Sequence[Array]
"""A state dict, or a list of arrays."""


@dataclass(frozen=True)
class ServerState:
    """A rule's state, with what a server keeps beside it.

    Attributes:
        state: the rule's.
        buffers: of the updates that wait for the model to move.
        memory: what is kept for each client.
    """

    state: State
    buffers: Waiting | None = None
    memory: Mapping[Hashable, Memory] = field(default_factory=dict)


@torch.no_grad()
def aggregate(
    rule: Rule,
    state: State,
    current: Model,
    base: Model,
    update: Model | Sequence[Model],
    *,
    staleness: int = 0,
    weight: float = 1.0,
    samples: int = 1,
    client: Hashable = None,
    buffers: Patterns = (),
    manifolds: Assignment | None = None,
    difference: bool = False,
    out: Model | None = None,
) -> tuple[Any, State, dict[str, float]]:
    r"""One step of `rule`: take a client's (stale) model into the server's.

    A model is a state dict, or a list of tensors or NumPy arrays; the result is of the same kind, in the same
    order, dtypes and devices. Nothing that is passed in is written but `out`. For models in float32 or float64 it
    agrees with a [`Server`][manifoldagg.Server] bit for bit; you keep the versions. (Narrower models are rounded at
    every call, where a server keeps a float32 master.) Tensors that share storage are tied and count once; copies are
    not.

    Args:
        rule: such as `FedAsync(0.6)` or `AsyncBezier(threshold=1.0, rate=0.5)`.
        state: what the last call returned, with what the rule keeps for clients; `None` the first time.
        current: $\Theta^\tau$, the server's model now.
        base: $\Theta^t$, the model that the client started from.
        update: the client's model; for a curve a sequence of models, the control points
            $\varphi_1, \dots, \varphi_n$ with the client's model last.
        staleness: $\tau - t$ in versions.
        weight: $w_i$, the client's share of the data.
        samples: how many samples the client trained on.
        client: who trained, for rules that tell clients apart.
        buffers: glob patterns of floating entries that are no parameters, such as `"*mask"`, or a mapping from patterns
            to `"average"`, `"latest"` or `"leave"`. Entries called `running_mean`, `running_var` or
            `num_batches_tracked` are buffers without being named. Averaged ones, the default, move linearly by the
            rule's step towards the client's; integer and boolean entries become the client's unless they are left.
        manifolds: name or pattern to the space of those entries, as in
            [`ParameterSpace.of_state_dict`][manifoldagg.manifolds.ParameterSpace.of_state_dict].
        difference: whether `update` is new minus old, $\varphi_i - \Theta^t$, entry by entry, and not the model. Their
            sum is taken, rounded once to the dtype of the entry: the bits are those of an update that was formed so.
            They are those of $\varphi_i$ itself, but for the sign of a zero, where the client's subtraction was exact,
            as it is between numbers within a factor of 2 of each other. Buffers are differences too, but booleans are
            the client's own. Flat spaces only.
        out: a model like `current`, `current` itself or another one that is passed in, into which the new one is
            written, each entry in memory of its own. It is written when the step is known to fit: whatever is refused
            leaves it as it was.

    Returns:
        The new model (`out` where that is given), the rule's next state, and its numbers (such as `cosine`, `step`,
        `norm`). A rule that waits for more updates returns a copy of `current`.

    Raises:
        ArgumentError: naming the argument, and the tensor in it, that does not fit; or if no entry is a parameter.
        RuleError: if the rule, or a schedule in it, gives what cannot be used.

    Warns:
        UserWarning: naming an update that looks like a difference of models, and an entry of integers, no single one,
            which becomes the client's though `buffers` does not name it. Nothing has changed then.

    Cost: with a rule that works on rows (its docstring says how often it reads and writes a model) the tensors are read
    and written where they lie, and no more memory is taken than the result. Copied, one by one, are arrays of foreign
    byte order, tensors that are not contiguous or lie on another device than the first, and those of eight bits. With
    other rules and on curved spaces every model is gathered into a vector. With `difference` the models are
    formed first.

    Example:
        >>> import numpy as np
        >>> from manifoldagg.federated.rules import FedAsync
        >>> current, base, update = [np.array([1.0])], [np.array([0.0])], [np.array([3.0])]
        >>> new, state, numbers = aggregate(FedAsync(0.5), None, current, base, update)
        >>> new, numbers["norm"]
        ([array([2.])], 1.0)
        >>> _ = aggregate(FedAsync(0.5), state, current, base, update, out=current)
        >>> current
        [array([2.])]
    """
    if any(extras(check_rule(rule))):
        raise ArgumentError(f"rule: {type(rule).__name__} asks clients for more than models; use a Server")
    check_count("staleness", staleness, at_least=0)
    check_count("samples", samples)
    check_number("weight", weight, above=0)
    check_client(client)
    points = list(update) if _is_curve(current, update) else [update]
    if not points:
        raise ArgumentError("update: expected a model or a sequence of models, got an empty sequence")
    now = _tensors("current", current)
    models = {"current: ": now, "base: ": _tensors("base", base)}
    for i, model in enumerate(points):
        name = "update" if len(points) == 1 else f"update[{i}]"
        models[f"{name}: "] = newest = _tensors(name, model)
    buffers = check_patterns(buffers)
    space = ParameterSpace.of_state_dict(now, manifolds, buffers=list(buffers))
    layout = space.layout
    if difference:
        _check_flat(space)
        for label in [label for label in models if label.startswith("update")]:
            models[label] = newest = _moved(layout, models["base: "], models[label], label)
    target = None if out is None else _target(layout, out, models)
    rows = by_rows(rule, space)
    chosen = policies(layout.carried, buffers)
    check_parameters("current", layout)
    kept = state if isinstance(state, ServerState) else ServerState(state)
    read: list[Any] = [*(layout.rows(models) if rows else space.points(models))]
    here, then, *brought = read
    if not difference:
        warn_of_difference(name, layout, newest, models["base: "])
    warn_of_integers(name, layout, newest, now, buffers)
    before = Snapshot(
        current=here,
        state=rule.init(space, here) if kept.state is None else kept.state,
        buffers=Packed.of(chosen, now),
        waiting=kept.buffers,
    )
    taken = Update(
        client=client,
        base=then if rows else then.to(here.device),
        current=here,
        points=tuple(brought) if rows else torch.stack(brought).to(here.device),
        staleness=staleness,
        weight=weight,
        samples=samples,
        memory=kept.memory.get(client),
    )
    terms = Terms(space, rule, chosen, buffers="update")
    blank = torch.empty_like(here) if not rows else None if target is None else _row(layout, target)
    try:
        after, outcome = step(terms, before, taken, newest, blank)
    except ArgumentError as error:
        if rows:
            layout.check_values(models)
        error.args = (POINTS.sub("update" if len(points) == 1 else r"update\1", str(error)),)
        raise
    if outcome.model is not None:
        named = layout.named if rows else space._state_dict
        new = named(after.current, after.buffers)
    elif target is None:
        new = layout.named([now[leaf.name].clone() for leaf in layout.leaves], before.buffers)
    else:
        new = now
    if target is not None:
        _write(target, new)
    returned = _like(current, new, now) if out is None else out
    memory = {name: tree for name, tree in kept.memory.items() if name != client}
    if outcome.memory is not None:
        memory[client] = outcome.memory
    held = ServerState(after.state, after.waiting, memory) if memory or after.waiting is not None else after.state
    return returned, held, dict(outcome.numbers)


def _is_curve(current: Model, update: Model | Sequence[Model]) -> bool:
    """A sequence whose entries are models of the kind of `current`."""
    if isinstance(update, Mapping) or not isinstance(update, Sequence):
        return False
    inner = Mapping if isinstance(current, Mapping) else list | tuple
    return len(update) == 0 or isinstance(update[0], inner)


def _entries(name: str, model: Any) -> Iterable[tuple[Any, Any]]:
    """Key and array of each entry of a model."""
    if isinstance(model, Mapping):
        return model.items()
    if isinstance(model, Sequence) and not isinstance(model, str):
        return enumerate(model)
    raise ArgumentError(f"{name}: expected a state dict or a list of arrays, got {type(model).__name__}")


def _tensors(name: str, model: Any, *, written: bool = False) -> dict[str, Tensor]:
    """The entries of a model as tensors over the same memory, which are `written` or only read."""
    entries = model if isinstance(model, Mapping) else dict(_entries(name, model))
    keys = [key if type(key) is str else str(key) for key in entries]
    tensors = dict(zip(keys, entries.values(), strict=True))
    if OPAQUE in "".join(keys):
        tensors = {key: x for key, x in tensors.items() if key.rpartition(".")[2] != OPAQUE}
    if not set(map(type, tensors.values())) <= TENSORS:
        for key, array in tensors.items():
            if isinstance(array, np.ndarray | np.generic):
                tensors[key] = _over(f"{name}: {key}", array, written)
            elif not isinstance(array, Tensor):
                raise ArgumentError(f"{name}: {key}: expected a tensor or an array, got {type(array).__name__}")
    return tensors


def _over(name: str, array: Any, written: bool) -> Tensor:
    """A tensor over the memory of an array; over a copy where torch knows no such memory."""
    apart = not (isinstance(array, np.ndarray) and array.dtype.isnative and min(array.strides, default=0) >= 0)
    if written and (apart or not array.flags.writeable):
        raise ArgumentError(f"{name}: expected a writable array in the byte order of this machine")
    try:
        if apart:
            return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
        # torch has no tensors that are read only, and warns of arrays that are.
        return torch.from_numpy(array if array.flags.writeable else np.asarray(_Open(array)))
    except (TypeError, ValueError):
        raise ArgumentError(f"{name}: expected a numeric array, got dtype {array.dtype}") from None


def _check_flat(space: ParameterSpace) -> None:
    """That a point and a difference of points have a sum.

    Raises:
        ArgumentError: naming a leaf where they have none.
    """
    for name, curved in space.manifolds:
        if not curved.flat:
            raise ArgumentError(f"difference: expected models, as {name} lives on {curved}, where points have no sums")


def _moved(
    layout: Layout, base: Mapping[str, Tensor], difference: Mapping[str, Tensor], label: str
) -> dict[str, Tensor]:
    """The model that is so far from the base.

    Raises:
        ArgumentError: if one of them is not of this layout.
    """
    layout.match(base, "base: ")
    layout.match(difference, label)
    return {name: _sum(base[name], difference[name]) for name in difference}


def _sum(start: Tensor, difference: Tensor) -> Tensor:
    step = difference.to(start.device)
    if start.dtype is torch.bool:
        return step
    signed = SIGNED.get(start.dtype)
    if signed is not None:
        return (start.view(signed) + step.view(signed)).view(start.dtype)
    return (widened(start) + widened(step)).to(start.dtype)


class _Open:
    """A read-only array, for those who will not write into it; it lives as long as what is made of it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def _target(layout: Layout, out: Model, models: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of a model to write into, into which nothing can fail to be written.

    Raises:
        ArgumentError: if they are not those of the layout, on the devices of the first of `models`, or share memory
            with one another or with another entry of these.
    """
    target = _tensors("out", out, written=True)
    layout.match(target, "out: ")
    first, *_ = models.values()
    for name, tensor in target.items():
        if tensor.device != first[name].device:
            raise ArgumentError(f"out: {name}: expected device {first[name].device}, got {tensor.device}")
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ArgumentError(f"out: {name}: expected a tensor that was not made in inference mode")
    names = [entry.name for entry in (*layout.leaves, *layout.carried)]
    names += [alias for alias, name in layout.aliases if target[alias].data_ptr() != target[name].data_ptr()]
    written = Tensors([target[name] for name in names])
    check_apart(written, [Tensors([model[name] for name in names]) for model in models.values()], written.lengths)
    return target


def _row(layout: Layout, target: Mapping[str, Tensor]) -> Tensors:
    """The leaves of a model to write into, and where kernels cannot write there, others."""
    row = Tensors([target[leaf.name] for leaf in layout.leaves])
    if row.whole and len(row.devices) == 1 and all(dtype.itemsize > 1 for dtype in row.dtypes):
        return row
    return Tensors([torch.empty(x.shape, dtype=x.dtype, device=row[0].device) for x in row])


def _write(target: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Copy what is not there already: nothing can fail any more."""
    for name, tensor in target.items():
        if new[name] is not tensor:
            tensor.copy_(new[name])


def _like(current: Model, new: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> Any:
    """`new` as the kind of `current`: its container, order, devices, arrays where arrays were."""
    entries: dict[Any, Any] = {}
    for key, array in _entries("current", current):
        if str(key) not in new:  # what a module keeps beside its tensors
            entries[key] = copy.copy(array)
            continue
        tensor = new[str(key)]
        if tensor.device != now[str(key)].device:
            tensor = tensor.to(now[str(key)].device)
        entries[key] = tensor if isinstance(array, Tensor) else tensor.numpy().astype(array.dtype, copy=False)
    if isinstance(current, dict):
        same = copy.copy(current)
        same.update(entries)
        return same
    if isinstance(current, Mapping):
        return entries
    return tuple(entries.values()) if isinstance(current, tuple) else list(entries.values())
