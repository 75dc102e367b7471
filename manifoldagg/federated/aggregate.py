"""The front door for other codebases: one server step on plain state dicts or lists of arrays."""

import copy
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manifoldagg.errors import ArgumentError, check_count, check_number
from manifoldagg.federated.buffers import Packed, Patterns, Waiting, policies
from manifoldagg.federated.contract import Memory, Rule, State, Update, check_rule, extras
from manifoldagg.federated.snapshot import Snapshot
from manifoldagg.federated.step import Terms, step
from manifoldagg.federated.weights import check_client
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.manifolds.assign import Assignment
from manifoldagg.manifolds.layout import OPAQUE

__all__ = ["aggregate"]

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
) -> tuple[Any, State, dict[str, float]]:
    r"""One step of `rule`: take a client's (stale) model into the server's.

    A model is a state dict, or a list of tensors or NumPy arrays; the result is of the same kind, in the same
    order, dtypes and devices. Nothing that is passed in is written. For models in float32 or float64 it agrees with
    a [`Server`][manifoldagg.Server] bit for bit; you keep the versions. (Narrower models are rounded at every
    call, where a server keeps a float32 master.) Tensors that share storage are tied and count once; copies are not.

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
        buffers: glob patterns of floating entries that are no parameters, such as `"*running_*"`, or a mapping from
            patterns to `"average"`, `"latest"` or `"leave"`. Averaged buffers, the default, move linearly by the
            rule's step towards the client's; integer and boolean entries become the client's unless they are left.
        manifolds: name or pattern to the space of those entries, as in
            [`ParameterSpace.of_state_dict`][manifoldagg.manifolds.ParameterSpace.of_state_dict].

    Returns:
        The new model, the rule's next state, and its numbers (such as `cosine`, `step`, `norm`). A rule that waits for
        more updates returns a copy of `current`.

    Raises:
        ArgumentError: naming the argument, and the tensor in it, that does not fit.

    Example:
        >>> import numpy as np
        >>> from manifoldagg.federated.rules import FedAsync
        >>> current, base, update = [np.array([1.0])], [np.array([0.0])], [np.array([3.0])]
        >>> new, state, numbers = aggregate(FedAsync(0.5), None, current, base, update)
        >>> new, numbers["norm"]
        ([array([2.])], 1.0)
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
    models: dict[str, Any] = {"current": current, "base": base}
    models |= {"update" if len(points) == 1 else f"update[{i}]": model for i, model in enumerate(points)}
    tensors = {name: _tensors(name, model) for name, model in models.items()}
    *_, newest = tensors.values()
    now = tensors["current"]
    space = ParameterSpace.of_state_dict(now, manifolds, buffers=list(buffers))
    here, then, *brought = space.points(tensors)
    chosen = policies(space.layout.carried, buffers)
    kept = state if isinstance(state, ServerState) else ServerState(state)
    before = Snapshot(
        current=here,
        state=rule.init(space, here.clone()) if kept.state is None else kept.state,
        buffers=Packed.of(chosen, now),
        waiting=kept.buffers,
    )
    taken = Update(
        client=client,
        base=then.to(here.device),
        current=here,
        points=torch.stack(brought).to(here.device),
        staleness=staleness,
        weight=weight,
        samples=samples,
        memory=kept.memory.get(client),
    )
    terms = Terms(space, rule, chosen, points="update", buffers="update")
    after, outcome = step(terms, before, taken, newest, torch.empty_like(here))
    moved = outcome.model is not None
    new = space._state_dict(after.current, after.buffers) if moved else {name: x.clone() for name, x in now.items()}
    memory = {name: tree for name, tree in kept.memory.items() if name != client}
    if outcome.memory is not None:
        memory[client] = outcome.memory
    held = ServerState(after.state, after.waiting, memory) if memory or after.waiting is not None else after.state
    return _like(current, new, now), held, dict(outcome.numbers)


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


def _tensors(name: str, model: Any) -> dict[str, Tensor]:
    """The entries of a model as tensors; arrays are copied, tensors are not."""
    tensors = {}
    for key, array in _entries(name, model):
        if str(key).rpartition(".")[2] == OPAQUE:
            continue
        if isinstance(array, np.ndarray | np.generic):
            try:
                array = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
            except TypeError:
                raise ArgumentError(f"{name}: {key}: expected a numeric array, got dtype {array.dtype}") from None
        if not isinstance(array, Tensor):
            raise ArgumentError(f"{name}: {key}: expected a tensor or an array, got {type(array).__name__}")
        tensors[str(key)] = array.detach()
    return tensors


def _like(current: Model, new: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> Any:
    """`new` as the kind of `current`: its container, order, devices, arrays where arrays were."""
    entries: dict[Any, Any] = {}
    for key, array in _entries("current", current):
        if str(key) not in new:  # what a module keeps beside its tensors
            entries[key] = copy.copy(array)
            continue
        tensor = new[str(key)].to(now[str(key)].device)
        entries[key] = tensor if isinstance(array, Tensor) else tensor.numpy().astype(array.dtype, copy=False)
    if isinstance(current, dict):
        same = copy.copy(current)
        same.update(entries)
        return same
    if isinstance(current, Mapping):
        return entries
    return tuple(entries.values()) if isinstance(current, tuple) else list(entries.values())
