"""The class `AsyncAggregator`, which stores models and tasks between calls to the function `aggregate`."""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from immutables import Map
from torch import Tensor

from manifoldagg import tensor_file
from manifoldagg._validation import check_choice, check_count, other_type_hint, short_repr, suggests_keywords
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.buffers import PendingBuffers
from manifoldagg.federated.limits import DEFAULT_LIMITS
from manifoldagg.federated.pytrees import copy_tensor, has_structure, tree_map
from manifoldagg.federated.server.aggregate import (
    ADAPTERS_HINT,
    SPACE_KEYWORDS,
    AggregateState,
    aggregate_step,
    check_rule_needs_models_only,
    inferred_space,
)
from manifoldagg.federated.server.dispatch import make_message
from manifoldagg.federated.server.durability.fingerprint import fingerprint, first_difference, rule_difference
from manifoldagg.federated.server.durability.persistent_map import AtomicReference
from manifoldagg.federated.server.input_warnings import warn_if_adapter_factors
from manifoldagg.federated.server.lock import OwnedLock
from manifoldagg.federated.server.options import UpdateInfo
from manifoldagg.federated.server.state_dicts import map_paths
from manifoldagg.federated.server.validation import check_samples, initial_state
from manifoldagg.federated.stability import warn_if_unstable
from manifoldagg.federated.step import ModelState
from manifoldagg.federated.types import ClientState, Message, Rule, State, check_parameter_space
from manifoldagg.federated.weights import Weights, check_client
from manifoldagg.kernels.alloc import clone
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.manifolds.layout import signature_of
from manifoldagg.manifolds.lora.scaling import Scaling
from manifoldagg.manifolds.model_io import Model, as_tensors, convert_like

__all__ = ["AsyncAggregator"]

FILE_KIND = "async aggregator"
STATE_KEYS = {"rule", "version", "models", "in_flight", "weights", "state", "pending_buffers", "client_states"}
TaskKey = tuple[Hashable, Hashable]
"""The key of a task: the pair of the client and the name of the task."""


class TaskStart(NamedTuple):
    """Model from which a client starts a task.

    Attributes:
        version: the version of the server's model at the start of the task.
        custom_start: whether the rule chose another start model for the client instead of this version.
        model: the model of this version.
    """

    version: int
    custom_start: bool
    model: Model


class AggregatorState(NamedTuple):
    """Immutable state of an `AsyncAggregator`.

    Methods such as `with_task` return a new state instead of modifying this state. A failed method therefore has no
    effect.

    Attributes:
        version: the version of the current model.
        model: the current model.
        state: the state that the last call to `aggregate` returned.
        weights: the participating clients and their weights.
        tasks: the tasks in flight. The key is the pair of the client and the name of the task. The value contains the
            model from which the task started, so this model is retained until the last of its tasks has ended.
    """

    version: int
    model: Model
    state: State
    weights: Weights
    tasks: Map[TaskKey, TaskStart] = Map()

    def find_model(self, version: int) -> Model | None:
        """Return the model of a version, or `None` if this version is not retained."""
        if version == self.version:
            return self.model
        return next((start.model for start in self.tasks.values() if start.version == version), None)

    def task_start(self, task: TaskKey) -> TaskStart:
        """Return the version and the kind of start model of a task.

        Raises:
            ArgumentError: if the task is not in flight.
        """
        if task not in self.tasks:
            client, name = task
            mine = [other for owner, other in self.tasks if owner == client]
            given = short_repr(client)
            if mine:
                known = f"task: expected the name of a task of client {given} in flight"
                raise ArgumentError(f"{known}, got {short_repr(name)}{other_type_hint(name, mine)}")
            hint = other_type_hint(client, {owner for owner, _ in self.tasks})
            raise ArgumentError(f"client: expected a client with a task in flight, got {given}{hint}")
        return self.tasks[task]

    def with_task(self, task: TaskKey, start: TaskStart, restart: bool) -> "AggregatorState":
        """Return the state with a new task.

        Args:
            task: the key of the task.
            start: the start of the task.
            restart: whether to replace a task in flight with the same key.

        Raises:
            ArgumentError: if the task is already in flight and `restart` is false.
        """
        client, name = task
        state = self
        if task in self.tasks:
            if not restart:
                what = "a task" if name is None else f"a task {short_repr(name)}"
                raise ArgumentError(
                    f"client: expected a client without {what} in flight, got {short_repr(client)}; cancel the task, "
                    "pass restart=True, or pass another name as task="
                )
            state = self.with_cancelled_task(task)
        return state._replace(weights=state.weights.with_client(client), tasks=state.tasks.set(task, start))

    def with_cancelled_task(self, task: TaskKey) -> "AggregatorState":
        """Return the state after a task was cancelled.

        Raises:
            ArgumentError: if the task is not in flight.
        """
        state = self.without_task(task)
        return state._replace(weights=state.weights.without_ticket(task[0]))

    def without_task(self, task: TaskKey) -> "AggregatorState":
        """Return the state without a task. If the task is not in flight, raise `ArgumentError`."""
        self.task_start(task)
        return self._replace(tasks=self.tasks.delete(task))

    def with_update(self, task: TaskKey, info: UpdateInfo, result: Any) -> tuple["AggregatorState", int]:
        """Return the state after the update of a task, and the version of the model.

        Raises:
            ArgumentError: if the task was cancelled while the step was computed.
        """
        after = self.without_task(task)
        after = after._replace(state=result.state, weights=after.weights.with_report(info.client, info.samples))
        if not result.has_moved:
            return after, after.version
        return after._replace(version=self.version + 1, model=result.model), self.version + 1


class AsyncAggregator:
    """Asynchronous aggregator of client models for custom training loops.

    The class wraps the function [`aggregate`][manifoldagg.aggregate], and stores its state and the base models for the
    caller. For each task of a client, call `checkout` to get the start model, train it, and pass the trained model to
    `submit`. If the client will not submit a model, call `cancel`. A client may have several tasks at a time if each
    task has another name.

    - The aggregator stores the current model, each older version with a task in flight, the state of the rule, the
      buffered updates and the client states.
    - The aggregator determines the base, the staleness and the weight of each update.
    - For models in float32 or float64, the results are bit-identical to the results of a
      [`Server`][manifoldagg.Server].
    - An invalid update changes nothing. The task stays in flight until the client submits a valid update or `cancel`
      ends the task.
    - All methods may be called from any thread.

    Args:
        rule: the aggregation rule, such as `FedAsync(0.6)`. A rule whose clients receive or return more than models
            requires a `Server`.
        model: the initial model, as a state dict or a list of tensors or NumPy arrays. The aggregator copies it.
        weights: the weights of the clients, as in `Server`: `"observed"`, `"uniform"`, or a mapping from clients to
            sample counts. An observed count is capped at 100 times the median of the other clients' counts.
        space: the space of the models, with buffer policies, manifolds and adapters. The default is as in `aggregate`.

    Raises:
        ArgumentError: if an argument is invalid. The message starts with the names of the argument and the tensor.

    Example:
        >>> import numpy as np
        >>> from manifoldagg.federated.rules import FedAsync
        >>> aggregator = AsyncAggregator(FedAsync(0.5), [np.array([0.0])])
        >>> early, late = aggregator.checkout("ward-7"), aggregator.checkout("ward-8")
        >>> numbers = aggregator.submit("ward-7", [early[0] + 2], samples=30)
        >>> numbers = aggregator.submit("ward-8", [late[0] + 4], samples=10)
        >>> numbers["staleness"], numbers["weight"], aggregator.version, aggregator.model
        (1, 0.25, 2, [array([2.5])])
        >>> aggregator.submit("ward-8", [late[0] + 4], samples=10)
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: client: expected a client with a task in flight, got 'ward-8'
    """

    @suggests_keywords("AsyncAggregator", moved=SPACE_KEYWORDS)
    def __init__(
        self,
        rule: Rule,
        model: Model,
        *,
        weights: str | Mapping[Any, int] = "observed",
        space: ParameterSpace | None = None,
    ) -> None:
        self._rule = check_rule_needs_models_only(rule, "AsyncAggregator(rule, model)")
        if isinstance(space, ParameterSpace) and isinstance(model, Mapping):
            model = space.shared(model)
        self._template = model
        first = as_tensors("model", model)
        if space is None:
            space, has_factors = inferred_space(signature_of(first, "model: "))
            if has_factors:
                warn_if_adapter_factors("model", first, ADAPTERS_HINT)
        self._space = check_parameter_space(space)
        self._space.layout.check_parameters("model")
        point = self._point(first)
        # The stored models contain separate adapter factors, whereas the space contains their products.
        self._layout = self._space.state_layout(first, "model: ")
        self._template = self._build_model(first)
        state = initial_state(rule, self._space, point, {"space": "model", "start": "model"})
        self._make_message(ModelState(point, state), None)
        participants = Weights.of(weights, DEFAULT_LIMITS.samples_factor)
        self._state = AtomicReference(AggregatorState(0, self._template, state, participants))
        self._update_lock = OwnedLock()
        self._warned_unstable = False

    def checkout(
        self, client: Hashable, task: Hashable = None, *, version: int | None = None, restart: bool = False
    ) -> Any:
        """Start a task of a client, and return the start model that the client trains.

        Args:
            client: the name of the client. It may be any hashable value that equals itself, except a tensor.
            task: the name of the task. You need it only if the client has several tasks at a time.
            version: the version from which the client starts. Pass it if the client has already started before this
                call. `None` means the current version. The aggregator stores only the current version and the versions
                of tasks in flight.
            restart: whether to cancel a task in flight with the same client and name. Otherwise, such a task is an
                error.

        Returns:
            A copy of the model. Some rules choose another start model for the client.

        Raises:
            ArgumentError: in any of these cases:

                - The client already has a task with this name, and `restart` is false.
                - The name of the client is invalid, or `weights` is a mapping without this client.
                - The aggregator no longer stores the version.
                - The rule sends more than a model.

        Cost: three copies of the model.
        """
        place = (check_client(client), check_client(task, "task"))
        check_choice("restart", restart, (True, False))
        now = self._state.value
        began = now.version if version is None else check_count("version", version, at_least=0)
        kept = now.find_model(began)
        if began > now.version:
            raise ArgumentError(
                f"version: expected at most {now.version}, the current version, got {short_repr(began)}"
            )
        if kept is None:
            raise ArgumentError(f"version: {began} is no longer retained")
        now.weights.check(client)
        if version is None:
            model, apart = self._start_model(now, client)
        else:
            model, apart = self._copy_model(kept), False
        self._state.update(lambda now: (now.with_task(place, TaskStart(began, apart, kept), restart), None))
        return model

    def submit(
        self,
        client: Hashable,
        update: Model | str | Path | Sequence[Model | str | Path],
        *,
        samples: int,
        task: Hashable = None,
        difference: bool = False,
        scaling: Scaling | None = None,
    ) -> dict[str, float]:
        """End a task of a client, and apply the trained model of the client to the current model.

        Args:
            client: the name of the client.
            update: the client's model, or the sequence of control points of a curve, as in `aggregate`. A model may be
                the path of a safetensors file, which the aggregator maps into memory. The update is not modified.
            samples: the number of samples that the client trained on, at most 10⁹.
            task: the name of the task. `None` means the task without a name.
            difference: whether `update` is the trained model minus the start model. This must be false if the rule
                chose another start model for the client.
            scaling: the scaling of the client's adapters, if it differs from the scaling of the space.

        Returns:
            A dictionary with the metrics of the step (such as `cosine`, `step` and `norm`), the `version` of the model
            after the update, and the `staleness` and `weight` of the update. `aggregate` describes the metrics.

        Raises:
            ArgumentError: if the client has no such task in flight, or if an argument is invalid. A `Server` returns a
                receipt instead, as [Receipts and exceptions](../guide/errors.md#receipts-and-exceptions) explains.
            CheckpointError: if the file of the update is invalid, or is changed during the call.
            RuleError: if the rule, or a schedule in the rule, returns an invalid result.

        Warns:
            UserWarning: for the same reasons as in `aggregate`.
            StabilityWarning: if the step exceeds the stability limit for the observed staleness, which the number of
                tasks in flight bounds. The aggregator warns only once, and never for wrappers such as `Momentum` or for
                `ACE`.

        Cost: the cost of one call to `aggregate`.
        """
        place = (check_client(client), check_client(task, "task"))
        samples = check_samples(samples, DEFAULT_LIMITS.max_samples)
        check_choice("difference", difference, (True, False))
        models, checkpoints = map_paths("update", update, self._space.layout)
        if self._update_lock.held_by_me():
            raise ArgumentError(
                "async_aggregator: expected a call outside of an update; call this after `submit` has returned"
            )
        with self._update_lock.lock:
            now = self._state.value
            start = now.task_start(place)
            if difference and start.custom_start:
                name = type(self._rule).__name__
                raise ArgumentError(
                    f"difference: expected False, because {name} chose another start model for client "
                    f"{short_repr(client)}, got True"
                )
            believed = now.weights.capped(client, samples)
            known = UpdateInfo(
                client=client,
                staleness=now.version - start.version,
                weight=now.weights.weight(client, believed),
                samples=believed,
                difference=difference,
                scaling=scaling,
                share=now.weights.share(client, believed),
            )
            made = aggregate_step(
                self._rule,
                now.state,
                now.model,
                start.model,
                models,
                known,
                self._space,
                difference_option="difference=True",
            )
            for checkpoint in checkpoints:
                checkpoint.check_unchanged("update: ")
            if not self._warned_unstable:
                self._warned_unstable = warn_if_unstable(
                    self._rule,
                    made.numbers,
                    known.staleness,
                    num_in_flight=len(now.tasks),
                    weight=known.weight,
                    num_clients=now.weights.num_clients,
                )
            version = self._state.update(lambda now: now.with_update(place, known, made))
        return {**made.numbers, "version": version, "staleness": known.staleness, "weight": known.weight}

    def cancel(self, client: Hashable, task: Hashable = None) -> None:
        """End a task whose update will not arrive.

        Args:
            client: the name of the client.
            task: the name of the task. `None` means the task without a name.

        Raises:
            ArgumentError: if the task is not in flight.
        """
        place = (check_client(client), check_client(task, "task"))
        self._state.update(lambda now: (now.with_cancelled_task(place), None))

    @property
    def model(self) -> Any:
        """A copy of the current model."""
        return self._copy_model(self._state.value.model)

    @property
    def version(self) -> int:
        """The version of the model, which is the number of steps that have changed the model so far."""
        return self._state.value.version

    @property
    def in_flight(self) -> dict[TaskKey, int]:
        """The staleness of each task in flight, in versions of the model.

        The staleness is the current version minus the version at the start of the task. Each key of the dictionary is a
        pair of a client and the name of its task. The name is `None` if `checkout` received no name.

        Example:
            >>> import torch
            >>> from manifoldagg.federated.rules import FedAsync
            >>> aggregator = AsyncAggregator(FedAsync(0.5), [torch.ones(1)])
            >>> _ = aggregator.checkout("ward-7")
            >>> aggregator.in_flight
            {('ward-7', None): 0}
        """
        now = self._state.value
        return {place: now.version - begun.version for place, begun in now.tasks.items()}

    def state(self) -> dict[str, Any]:
        """Return a copy of the complete state of the aggregator, as nested containers of tensors and plain values.

        Pass the result to `load` to restore this state. You can store the result yourself, for example with
        `torch.save`. The method `save` writes the state directly to a file.

        Raises:
            CheckpointError: if the rule contains a function without an importable name, such as a lambda.
        """
        now = self._state.value
        held = AggregateState.of(now.state)
        waiting = held.pending_buffers
        models = {start.version: start.model for start in now.tasks.values()} | {now.version: now.model}
        tree = {
            "rule": fingerprint("rule", self._rule),
            "version": now.version,
            "models": {version: as_tensors("model", models[version]) for version in sorted(models)},
            "in_flight": [(*place, start.version, start.custom_start) for place, start in now.tasks.items()],
            "weights": now.weights.state(),
            "state": held.state,
            "pending_buffers": None if waiting is None else waiting.tree(),
            "client_states": list(held.client_states.items()),
        }
        return tree_map(tree, copy_tensor)  # type: ignore[no-any-return]

    def save(self, path: str | Path) -> None:
        """Write the complete state to a file, and replace an existing file atomically.

        Raises:
            ArgumentError: if the folder of `path` does not exist.
            CheckpointError: if the file cannot be written, or cannot store a value. An example of such a value is a
                client whose name is neither a string nor an integer. An existing file is unchanged.
        """
        tensor_file.save(path, FILE_KIND, self.state())

    @classmethod
    def open(
        cls,
        path: str | Path,
        rule: Rule,
        model: Model,
        *,
        weights: str | Mapping[Any, int] = "observed",
        space: ParameterSpace | None = None,
        replace: bool = False,
    ) -> "AsyncAggregator":
        """Resume an aggregator from a file. If the file does not exist, start a new aggregator.

        Tasks that were in flight when the file was saved are still in flight. For each of them, submit its update, call
        `cancel`, or call `checkout` again with `restart=True`.

        Args:
            path: the path of a file that `save` has written.
            rule: the aggregation rule, which must equal the saved rule.
            model: the initial model. A resumed aggregator ignores its values.
            weights: the weights of the clients, as in the constructor.
            space: the space of the models, as in the constructor.
            replace: whether to accept other options of the rule, as in `load`.

        Raises:
            ArgumentError: if an argument is invalid, or if the file contains another rule or another kind of model.
            CheckpointError: if the file is truncated, altered, or was not written by `save`.

        Example:
            >>> import tempfile, torch
            >>> from manifoldagg.federated.rules import FedAsync
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     for _run in range(2):  # starts, and then resumes
            ...         aggregator = AsyncAggregator.open(folder + "/state", FedAsync(0.5), [torch.zeros(1)])
            ...         base = aggregator.checkout("ward-7")
            ...         numbers = aggregator.submit("ward-7", [base[0] + 1], samples=10)
            ...         aggregator.save(folder + "/state")
            >>> aggregator.version, aggregator.model
            (2, [tensor([1.])])
        """
        aggregator = cls(rule, model, weights=weights, space=space)
        if tensor_file.check_path(path).exists():
            aggregator.load(tensor_file.load(path, FILE_KIND), replace=replace)
        return aggregator

    def load(self, state: Mapping[str, Any], *, replace: bool = False) -> None:
        """Replace the state of this aggregator by a saved state.

        The aggregator keeps the model format and the option `weights` that its constructor received.

        Args:
            state: the result of the method `state`.
            replace: whether to accept a rule with other options than the saved rule. The class of the rule, and the
                clip and the noise of `Private`, cannot be replaced.

        Raises:
            ArgumentError: if `state` is not a result of the method `state`, or if it contains another rule or another
                kind of model. The aggregator is then unchanged.

        Example:
            >>> import torch
            >>> from manifoldagg.federated.rules import FedAsync
            >>> aggregator = AsyncAggregator(FedAsync(0.5), [torch.zeros(1)])
            >>> base = aggregator.checkout("ward-7")
            >>> saved = aggregator.state()
            >>> aggregator = AsyncAggregator(FedAsync(0.5), [torch.zeros(1)])
            >>> aggregator.load(saved)
            >>> aggregator.submit("ward-7", [base[0] + 1], samples=10)["norm"]
            0.5
        """
        if not isinstance(state, Mapping) or set(state) != STATE_KEYS:
            raise ArgumentError("state: expected the result of AsyncAggregator.state()")
        given = fingerprint("rule", self._rule)
        saved = state["rule"]
        saved_class = saved.get("class") if isinstance(saved, dict) else saved
        difference = first_difference("rule", saved_class, given["class"])
        if difference is not None:
            raise ArgumentError(f"state: {difference}; a rule of another class requires a new AsyncAggregator")
        difference = rule_difference(saved, given, replace=replace)
        if difference is not None:
            raise ArgumentError(f"state: {difference}")
        tree = tree_map(dict(state), copy_tensor)
        with self._update_lock.lock:
            weights = self._state.value.weights
            shares = dict(weights.sample_counts) if weights.kind == "given" else weights.kind
            try:
                fresh = self._parse_state(tree, Weights.of_state(tree["weights"], shares, weights.cap_factor))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                if isinstance(error, ArgumentError):
                    raise
                raise ArgumentError("state: expected the result of AsyncAggregator.state()") from error
            self._state.update(lambda _: (fresh, None))

    def _parse_state(self, tree: Mapping[str, Any], weights: Weights) -> AggregatorState:
        models = tree["models"]
        for version, model in models.items():
            self._layout.check(model, f"state: models: {version}: ")
        memory = dict(tree["client_states"])
        waiting = tree["pending_buffers"]
        if waiting is not None:
            waiting = PendingBuffers.of_tree(waiting)
        current = check_count("state: version", tree["version"], at_least=0)
        point = self._point(models[current])
        if not has_structure(tree["state"], self._rule.init(self._space, point)):
            raise ArgumentError(f"state: state: expected the state of {type(self._rule).__name__} for this model")
        state = AggregateState(tree["state"], waiting, memory) if memory or waiting is not None else tree["state"]
        kept = {version: self._build_model(model) for version, model in models.items()}
        tasks: Map[TaskKey, TaskStart] = Map()
        for client, task, began, apart in tree["in_flight"]:
            weights.check(client)
            place = (client, check_client(task, "task"))
            if place in tasks or client not in weights.reported or began > current or type(apart) is not bool:
                raise ArgumentError(
                    f"state: in_flight: expected one task of {short_repr(client)} with each name, and a version up to "
                    f"{current}"
                )
            tasks = tasks.set(place, TaskStart(began, apart, kept[began]))
        return AggregatorState(current, kept[current], state, weights, tasks)

    def _start_model(self, now: AggregatorState, client: Hashable) -> tuple[Any, bool]:
        """Return a client's start model, and whether the rule chose it over the current model."""
        model = as_tensors("model", now.model)
        point = self._point(model)
        held = AggregateState.of(now.state)
        sent, apart = self._make_message(
            ModelState(point, held.state, version=now.version), held.client_states.get(client)
        )
        return self._build_model(model | self._space.state_dict(sent.start) if apart else model), apart

    def _make_message(self, now: ModelState, client_state: ClientState) -> tuple[Message, bool]:
        sent, apart = make_message(self._space, self._rule, now, client_state, None)
        if sent.tensors or sent.numbers:
            more = ", ".join([*sent.tensors, *sent.numbers])
            raise ArgumentError(
                f"rule: {type(self._rule).__name__} sends clients more than models, {more}; use a Server"
            )
        return sent, apart

    def _point(self, model: Mapping[str, Tensor]) -> Tensor:
        (point,) = self._space.points({"model: ": self._space.stack_factors(model, "model: ")})
        return point

    def _copy_model(self, model: Model) -> Any:
        return self._build_model(as_tensors("model", model))

    def _build_model(self, named: Mapping[str, Tensor]) -> Any:
        """Return copies of the tensors as a model in the format of the initial model."""
        layout = self._layout
        leaves = [clone(named[leaf.name].detach()) for leaf in layout.leaves]
        carried = {entry.name: named[entry.name].detach().clone() for entry in layout.buffers}
        return convert_like(self._template, layout.to_state_dict(leaves, carried), as_tensors("model", self._template))

    def __reduce__(self) -> NoReturn:
        raise TypeError("an AsyncAggregator has locks: it cannot be copied or pickled; pass its `state()` to `load`")
