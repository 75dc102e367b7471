"""The outer optimizer, which applies a server rule to the pseudo-gradients of workers."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from operator import is_
from typing import Any

import torch
from torch import Tensor

from manifoldagg._validation import check_count, check_number, is_finite
from manifoldagg.corrections.combination import Combination
from manifoldagg.corrections.frame import overflow_headroom
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Rule, Update
from manifoldagg.federated.pytrees import introduces_nonfinite
from manifoldagg.federated.server.validation import check_rule
from manifoldagg.federated.step import StepPlan, run_rule
from manifoldagg.federated.types import extra_fields, has_plan
from manifoldagg.kernels import TensorList, across_ranks
from manifoldagg.kernels.alloc import empty_like
from manifoldagg.kernels.backends import selection
from manifoldagg.kernels.operands import dtensors_in
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.optim._memory import MemoryAccess, check_no_alias
from manifoldagg.optim._state import (
    RULE_ENTRY,
    NormBound,
    check_state,
    common,
    flatten_state,
    rule_key,
    unflatten_state,
)

__all__ = ["Outer"]

WORKER_NAME = re.compile(r"[\w-]+")
WORKER_PREFIX = "worker "
"""The prefix of the names of state entries that belong to one worker."""


class Outer(torch.optim.Optimizer):
    r"""Outer optimizer, which applies a server rule to the pseudo-gradients of workers.

    Use this class to train one model in several data centres, as in DiLoCo. Each worker $i$ starts from the model
    $\Theta^t$ and trains it to the model $\Theta_i$. The pseudo-gradient of the worker is $\Theta^t - \Theta_i$. Before
    each call of `step`, store the pseudo-gradient in the `grad` of the parameters.

    The method `step` passes the displacement $-\mathrm{grad}$ to the rule. It multiplies the step of the rule by
    `group["lr"]`, and adds the product to the parameters. For example:

    - `Outer(params, ASGD(0.7))` is SGD with learning rate 0.7.
    - `Outer(params, Momentum(ASGD(0.7), nesterov=True))` is the outer optimizer of DiLoCo.

    The class is a `torch.optim.Optimizer`. Learning rate schedulers, hooks, closures and checkpoints work as usual. The
    options `maximize`, `differentiable` and `capturable` are not supported. The following properties depend on the
    rule:

    - **Parameter groups.** The rule treats each parameter group as one model. It computes cosines and norms over all
      tensors of the group. If the granularity of the rule is `"tensor"`, it computes them for each tensor.
    - **Missing gradients.** If the `grad` of a parameter is `None`, `step` does not change the parameter or its state.
    - **Errors.** If `step` raises an exception, all parameters and states are unchanged.
    - **State.** `state[p]` contains the numbers and tensors that the rule stores for the parameter `p`. The tensors
      have the shape of `p`, and their dtype is float32 or wider. Saving and loading preserves the state bit for bit.
      The state also identifies the class of the rule. `load_state_dict` rejects the state of another class.
    - **Sharded parameters.** Parameters may be `DTensor`s that are sharded along one dimension of the mesh, such as
      those of `fully_shard`. All ranks must call `step`. The ranks exchange only inner products.

    Args:
        params: parameters, named parameters or parameter groups, as in other optimizers. The parameters must be dense
            floating tensors.
        rule: a rule that accepts tensor lists and needs only the models of workers. Examples are `ASGD`, `FedOrtho`,
            `FedBuff`, `HeLoCo`, `DelayedNesterov` and `RadialDirectional`, and `Momentum` of such a rule.
        lr: the factor by which the step of the rule is multiplied. It is the default of `group["lr"]`.

    Raises:
        ArgumentError: if the rule does not accept tensor lists, if it needs more than models, if `lr` is negative, or
            if a parameter is sparse or not floating.

    Example:
        >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> from manifoldagg.federated.rules import ASGD
        >>> outer = Outer([p], ASGD(0.5))
        >>> p.grad = torch.tensor([2.0, -2.0])
        >>> outer.step()
        >>> p.tolist()
        [0.0, 3.0]
    """

    def __init__(self, params: Iterable[Any], rule: Rule, *, lr: float = 1.0) -> None:
        if not has_plan(check_rule(rule)) or any(extra_fields(rule)):
            raise ArgumentError(
                f"rule: expected one that accepts tensor lists and needs only models, got {type(rule).__name__}"
            )
        check_number("lr", float(lr), at_least=0)
        self.rule = rule
        self._norm_bounds: dict[Tensor, dict[str, NormBound]] = {}
        super().__init__(params, {"lr": lr})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._norm_bounds = {}

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state | {"rule": self.rule}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the optimizer.

        Args:
            param_group: a dict with the parameters as `params`, and optionally the learning rate as `lr`.

        Raises:
            ArgumentError: if a parameter is sparse or not floating. The optimizer is then unchanged.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for i, p in enumerate(group["params"]):
            if not p.is_floating_point() or p.layout is not torch.strided:
                self.param_groups.pop()
                raise ArgumentError(
                    f"params: {_param_name(group, i)}: expected a dense floating tensor, got {p.dtype}, {p.layout}"
                )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of the optimizer.

        In contrast to `torch.optim.Optimizer.load_state_dict`, this method does not convert the tensors of the state to
        the dtypes of the parameters. They retain the dtypes in which they were saved.

        Args:
            state_dict: the result of `state_dict()`.

        Raises:
            ArgumentError: if the state was saved with a rule of another class, lacks an entry, or contains a tensor of
                a wrong shape. The optimizer is then unchanged.
        """
        params = [p for group in self.param_groups for p in group["params"]]
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        for p, key in zip(params, saved, strict=False):
            stored = state_dict["state"].get(key)
            if stored:
                local = _local_rows([p])
                initial = self.rule.init(_parameter_space(((local[0].shape, local[0].dtype),)), local)
                check_state(f"state_dict: state: {key}", stored, self.rule, initial, p.shape)
        super().load_state_dict(dict(state_dict))
        for p, key in zip(params, saved, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor) and value.dtype != self.state[p][name].dtype:
                    self.state[p][name] = value.detach().to(p.device, copy=True)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        staleness: int = 0,
        worker: int | str | None = None,
        weight: float = 1.0,
        base: Sequence[Tensor] | None = None,
    ) -> Any:
        r"""Apply the pseudo-gradients in `grad` to the parameters, as one update of one worker.

        An update is stale if the parameters have changed since the worker started. Some rules, such as `FedOrtho`,
        depend on this change, which is called the drift. To apply a stale update with such a rule, pass the model from
        which the worker started as `base`. `HeLoCo`, `Momentum(ASGD(...))` and buffered rules do not use the drift.

        Args:
            closure: a function that computes the gradients and returns the loss. With `None`, the gradients must
                already be stored in `grad`.
            staleness: the staleness $\tau - t$ of the update. It is the number of steps between the start $t$ of the
                worker and the current step $\tau$.
            worker: the name of the worker, for rules that store a state for each worker. The name is an integer, or a
                string of letters, digits, underscores and dashes.
            weight: the share $w_i$ of the worker in the data.
            base: the start model $\Theta^t$ of the worker. It is a sequence with one tensor for each parameter of all
                groups, in order. A `DTensor` must have the placements of its parameter. The default is the current
                parameters.

        Returns:
            The return value of the closure, or `None` without a closure.

        Raises:
            ArgumentError: if an argument is invalid, or if a gradient is sparse or not finite. The error is also raised
                if the rule uses the drift, the staleness is positive, and `base` is missing.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_count("staleness", staleness, at_least=0)
        check_number("weight", weight, above=0)
        if not (worker is None or type(worker) is int or WORKER_NAME.fullmatch(str(worker))):
            raise ArgumentError(
                f"worker: expected an int, or a string of letters, digits, underscores and dashes, got {worker!r}"
            )
        if base is None and staleness and getattr(self.rule, "uses_drift", True):
            expected = f"the start model of the worker, which {type(self.rule).__name__} requires for a stale update"
            raise ArgumentError(f"base: expected {expected}, got None")
        with torch.no_grad():
            bases = self._check_bases(base)
            update_info = {"staleness": staleness, "client": worker, "weight": weight}
            steps = [
                self._plan(model, bases, update_info)
                for group in self.param_groups
                for model in self._param_sets(group)
            ]
            check_no_alias([planned.memory_access for planned in steps])
            for planned in steps:
                self._norm_bounds[planned.params[0]] = planned.apply(self.state)
        return loss

    def _check_bases(self, base: Sequence[Tensor] | None) -> dict[Tensor, Tensor]:
        if base is None:
            return {}
        params = [p for group in self.param_groups for p in group["params"]]
        if not isinstance(base, Sequence):
            raise ArgumentError(f"base: expected a sequence of tensors, got {type(base).__name__}")
        if len(base) != len(params):
            raise ArgumentError(f"base: expected {len(params)} tensors, one for each parameter, got {len(base)}")
        for i, (p, b) in enumerate(zip(params, base, strict=True)):
            if not isinstance(b, Tensor) or not b.is_floating_point() or b.layout is not torch.strided:
                kind = f"{b.layout} of {b.dtype}" if isinstance(b, Tensor) else repr(b)
                raise ArgumentError(f"base[{i}]: expected a dense floating tensor, got {kind}")
            if b.shape != p.shape or b.device != p.device or _placement(b) != _placement(p):
                raise ArgumentError(
                    f"base[{i}]: expected a tensor like the parameter, of shape {tuple(p.shape)}, got {tuple(b.shape)}"
                )
        return dict(zip(params, base, strict=True))

    def _param_sets(self, group: dict[str, Any]) -> list["ParamSet"]:
        """Divide the parameters of a group into sets with the same shared state.

        Parameters without a gradient are omitted. The state of a rule contains numbers that apply to a whole model. If
        the parameters of a group have completed different numbers of steps, these numbers differ. The group is then
        divided into several sets.
        """
        rate = check_number("lr", float(group["lr"]), at_least=0)
        sets: list[ParamSet] = []
        for i, p in enumerate(group["params"]):
            if p.grad is None:
                continue
            state = self.state.get(p, {})
            numbers = common(state)
            model = next((one for one in sets if one.common_state == numbers), None)
            if model is None:
                model = ParamSet(numbers, rate)
                sets.append(model)
            model.params.append(p)
            model.names.append(_param_name(group, i))
            model.gradients.append(p.grad)
            model.states.append(state)
        for model in sets:
            _check_tensors(model)
        return sets

    def _plan(
        self, param_set: "ParamSet", bases: Mapping[Tensor, Tensor], update_info: Mapping[str, Any]
    ) -> "PlannedStep":
        """Validate and plan the step of the rule for a set of parameters. No tensor is written."""
        params = param_set.params
        current = _local_rows(params)
        gradients = _local_rows(param_set.gradients)
        states = param_set.states
        is_sharded = bool(dtensors_in(params))
        if is_sharded:
            states = [{name: _local_shard(x) for name, x in one.items()} for one in states]
        state = unflatten_state(states, self._norm_bounds.get(params[0], {}))
        worker_key = None if update_info["client"] is None else f"{WORKER_PREFIX}{update_info['client']}"
        worker_states = {name: state.pop(name) for name in [*(state or ())] if name.startswith(WORKER_PREFIX)}
        worker_state = worker_states.pop(worker_key, None)
        space = _parameter_space(tuple([(x.shape, x.dtype) for x in current]))
        base = _local_rows([bases[p] for p in params]) if bases else current
        update = Update(
            base=base,
            current=current,
            points=(gradients,),
            client_state=worker_state,
            is_pseudo_gradient=True,
            **update_info,
        )
        try:
            with _reduce_across_ranks(params[0]) if is_sharded else nullcontext():
                before = self.rule.init(space, current) if state is None else state
                state, outcome, numbers = run_rule(StepPlan(space, self.rule, {}), before, update, compute=False)
        except ArgumentError as error:
            for name, gradient in zip(param_set.names, gradients, strict=True):
                if not is_finite(gradient):
                    raise ArgumentError(f"params: {name}: expected a finite gradient, got NaN or infinity") from error
            for i, (p, tensor) in enumerate(bases.items()):
                if any(p is one for one in params) and not is_finite(_local_shard(tensor)):
                    raise ArgumentError(f"base[{i}]: expected finite values, got NaN or infinity") from error
            # All inputs of this rank are finite. Either another rank has a non-finite input, or the square of a
            # gradient overflows.
            error.args = (str(error).replace("displacements[0]", "params: gradient"),)
            raise
        pending_step: Any = outcome.model
        if pending_step is not None:
            pending_step = replace(pending_step, coefficients=param_set.rate * pending_step.coefficients)
            if not param_set.rate * numbers.get("norm", math.inf) <= overflow_headroom(current):
                pending_step.check_finite()
        if worker_key is not None and outcome.client_state is not None:
            worker_states[worker_key] = outcome.client_state
        leaves = {RULE_ENTRY: rule_key(self.rule)} | flatten_state({**state, **worker_states}, current.lengths)
        bounds = None if is_sharded else self._norm_bounds.get(params[0], {})
        planned = PlannedStep(params, param_set.names, current, states, pending_step, leaves, bounds)
        for name, one in planned.pending_sums.items():
            one.check_finite(planned.dtypes(name))
        if not outcome.state_is_finite and (
            introduces_nonfinite(state, before) or introduces_nonfinite(outcome.client_state, worker_state)
        ):
            raise ArgumentError("points: the rule's state would not be finite")
        return planned


@dataclass
class ParamSet:
    """A set of parameters that the server rule processes as one model.

    Attributes:
        params: the parameters.
        names: the names of the parameters in error messages.
        gradients: the gradient of each parameter.
        states: the stored optimizer state of each parameter.
        common_state: the part of the state that is the same for all parameters of the set.
        rate: the learning rate of the parameter group.
    """

    common_state: dict[str, Any]
    rate: float
    params: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class PlannedStep:
    """An optimizer step that has been validated but not yet applied.

    Attributes:
        params: the parameters that the step changes.
        names: the names of the parameters, for error messages.
        current: the local tensors of the parameters. For a sharded parameter, this is the local shard.
        previous_states: the stored state of each parameter before the step.
        pending_step: the change of the parameters, as a linear combination of tensors that is not yet computed. It is
            `None` if the parameters do not change.
        new_state: the entries of the new state of the optimizer, by name.
        norm_bounds: known upper bounds on the norms of stored tensors, by name of the entry. It is `None` for sharded
            parameters.
    """

    params: list[Tensor]
    names: list[str]
    current: TensorList
    previous_states: list[dict[str, Any]]
    pending_step: Combination | None
    new_state: dict[str, Any]
    norm_bounds: Mapping[str, NormBound] | None

    @cached_property
    def pending_sums(self) -> dict[str, Combination]:
        """The linear combinations in the new state that have not been computed yet, by name."""
        return {name: leaf for name, leaf in self.new_state.items() if isinstance(leaf, Combination)}

    @cached_property
    def existing_rows(self) -> dict[str, TensorList]:
        """The stored tensors that the combinations in `pending_sums` overwrite, by name."""
        return {
            name: TensorList([one[name] for one in self.previous_states])
            for name in self.pending_sums
            if name in self.previous_states[0]
        }

    @property
    def memory_access(self) -> MemoryAccess:
        """The tensors that the step writes and reads."""
        frames = {
            id(one.frame): one.frame for one in (self.pending_step, *self.pending_sums.values()) if one is not None
        }
        read = [row for frame in frames.values() for row in (*frame.rows, *frame.minus) if row is not self.current]
        return MemoryAccess(self.names, [self.current, *self.existing_rows.values()], read)

    def apply(self, states: dict[Tensor, dict[str, Any]]) -> dict[str, NormBound]:
        """Apply the step to the parameters, and store the new state.

        Args:
            states: the states of the optimizer. The entries of the parameters are replaced.

        Returns:
            The known upper bounds of the norms of the stored rows, by name.
        """
        targets = {name: self._output_row(name) for name in self.pending_sums}
        goals = [] if self.pending_step is None else [self.pending_step.fused(self.current)]
        goals += [one.fused(targets[name]) for name, one in self.pending_sums.items()]
        if goals:
            selection.combine_many(goals)
        columns = [self._state_column(states, name, targets.get(name, leaf)) for name, leaf in self.new_state.items()]
        for p, values in zip(self.params, zip(*columns, strict=True), strict=True):
            states[p] = dict(zip(self.new_state, values, strict=True))
        if self.norm_bounds is None:
            return {}
        bounds = {name: bound for name, bound in self.norm_bounds.items() if name in self.new_state}
        for name, one in self.pending_sums.items():
            bound = NormBound.of(targets[name], one.frame.norm_bound(one.coefficients))
            bounds |= {} if bound is None else {name: bound}
        return bounds

    def dtypes(self, name: str) -> list[torch.dtype]:
        """Return the dtype in which the state entry `name` is stored, for each parameter."""
        if name in self.existing_rows:
            return [tensor.dtype for tensor in self.existing_rows[name]]
        return [torch.promote_types(tensor.dtype, torch.float32) for tensor in self.current]

    def _output_row(self, name: str) -> TensorList:
        if name in self.existing_rows:
            return self.existing_rows[name]
        kinds = zip(self.current, self.dtypes(name), strict=True)
        form = torch.contiguous_format
        return TensorList([empty_like(tensor, dtype=dtype, memory_format=form) for tensor, dtype in kinds])

    def _state_column(self, states: dict[Tensor, dict[str, Any]], name: str, leaf: Any) -> list[Any]:
        if not isinstance(leaf, list | tuple):
            return [leaf] * len(self.params)
        if leaf and not isinstance(leaf[0], Tensor):
            return [*leaf]
        before = [one.get(name) for one in self.previous_states]
        if all(map(is_, before, leaf)):
            return [states[p][name] for p in self.params]
        pieces = [
            x if x.shape == here.shape else x.view(here.shape) for x, here in zip(leaf, self.current, strict=True)
        ]
        if not dtensors_in(self.params):
            return pieces
        return [_to_dtensor(x, p) for x, p in zip(pieces, self.params, strict=True)]


def _param_name(group: Mapping[str, Any], i: int) -> str:
    return str(group["param_names"][i]) if "param_names" in group else f"parameter {i}"


def _check_tensors(model: ParamSet) -> None:
    """Check that the parameters of a set and their gradients have suitable dtypes, layouts, devices and placements."""
    is_sharded = bool(dtensors_in((model.params, model.gradients)))
    first = model.params[0]
    for name, p, gradient in zip(model.names, model.params, model.gradients, strict=True):
        if gradient.layout is not torch.strided or not gradient.is_floating_point():
            kind = f"{gradient.layout} of {gradient.dtype}"
            raise ArgumentError(f"params: {name}: expected a dense floating gradient, got {kind}")
        if is_sharded and _placement(gradient) != _placement(p):
            raise ArgumentError(f"params: {name}: expected a gradient with the placements of the parameter, got others")
        if p.device != first.device or (is_sharded and _placement(p) != _placement(first)):
            expected = f"the device, mesh and placements of {model.names[0]}"
            raise ArgumentError(f"params: {name}: expected {expected}, got others")


def _placement(tensor: Tensor) -> Any:
    dtensor: Any = tensor
    return (dtensor.device_mesh, tuple(dtensor.placements)) if dtensors_in((tensor,)) else None


def _local_shard(x: Any) -> Any:
    return x.to_local() if dtensors_in((x,)) else x


def _local_rows(tensors: Sequence[Any]) -> TensorList:
    return TensorList([_local_shard(tensor) for tensor in tensors] if dtensors_in(tensors) else tensors)


def _to_dtensor(shard: Tensor, p: Any) -> Any:
    """Return a `DTensor` with the given local shard and the placements of the parameter `p`."""
    dtensor_type: Any = type(p.data)
    return dtensor_type.from_local(
        shard, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def _reduce_across_ranks(p: Any) -> AbstractContextManager[None]:
    """Return a context manager that adds up inner products over all ranks with a shard of `p`.

    Raises:
        ArgumentError: if `p` is sharded along more than one dimension of the mesh, or if `p` is a partial sum.
    """
    sharded_dims = [d for d, place in enumerate(p.placements) if place.is_shard()]
    if len(sharded_dims) > 1 or any(place.is_partial() for place in p.placements):
        raise ArgumentError(f"params: expected DTensors with one sharded mesh dimension, got {p.placements}")
    return across_ranks(p.device_mesh.get_group(sharded_dims[0])) if sharded_dims else nullcontext()


@lru_cache(maxsize=64)
def _parameter_space(kinds: tuple[tuple[torch.Size, torch.dtype], ...]) -> ParameterSpace:
    return ParameterSpace.of_state_dict(
        {f"{i}": torch.empty(shape, dtype=dtype) for i, (shape, dtype) in enumerate(kinds)}
    )
