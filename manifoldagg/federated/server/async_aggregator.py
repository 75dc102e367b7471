"""The asynchronous aggregator: the versions, tasks and rule state of a custom training loop."""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from manifoldagg import tensor_file
from manifoldagg._validation import check_choice, check_count, short_repr, suggests_keywords
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.buffers import PendingBuffers, buffers_from_tree, buffers_to_tree
from manifoldagg.federated.limits import DEFAULT_LIMITS
from manifoldagg.federated.model_state import ModelState
from manifoldagg.federated.pytrees import copy_tensor, has_structure, tree_map
from manifoldagg.federated.server.aggregate import (
    ADAPTERS_HINT,
    SPACE_KEYWORDS,
    AggregateState,
    aggregate_step,
    check_rule_needs_models_only,
    inferred_space,
)
from manifoldagg.federated.server.aggregator_state import AggregatorState, TaskKey, TaskStart, version_key
from manifoldagg.federated.server.dispatch import make_message
from manifoldagg.federated.server.durability.fingerprint import fingerprint, rule_difference
from manifoldagg.federated.server.durability.persistent_map import AtomicReference
from manifoldagg.federated.server.durability.store import InMemoryTree, Store
from manifoldagg.federated.server.input_warnings import warn_if_adapter_factors
from manifoldagg.federated.server.lock import OwnedLock
from manifoldagg.federated.server.update_info import UpdateInfo
from manifoldagg.federated.server.validation import check_samples, initial_state
from manifoldagg.federated.stability import warn_if_unstable
from manifoldagg.federated.types import ClientState, Message, Rule, State, check_parameter_space
from manifoldagg.federated.weights import Weights, check_client
from manifoldagg.kernels.alloc import clone
from manifoldagg.manifolds import ParameterSpace
from manifoldagg.manifolds.layout import signature_of
from manifoldagg.manifolds.lora.scaling import Scaling
from manifoldagg.manifolds.model_io import Model, as_tensors, convert_like

__all__ = ["AsyncAggregator"]

FILE_KIND = "async aggregator"
"""The kind of the file of `save`."""


class AsyncAggregator:
    r"""Stateful wrapper of [`aggregate`][manifoldagg.aggregate] for custom training loops: `checkout` and `submit`.

    It stores the model, one copy of each older version with a task in flight, the rule's state, the buffered updates
    and the client states. It computes the base, the staleness and the weight of each update. For models in float32 or
    float64 its results equal those of a [`Server`][manifoldagg.Server] bit for bit. A rejected update changes nothing:
    the task stays in flight until the client returns a valid update or `cancel` ends it. All methods may be called from
    any thread.

    A client has one task at a time, or several tasks with names.

    Args:
        rule: such as `FedAsync(0.6)`. A rule whose clients receive or return more than models needs a server.
        model: the initial model: a state dict, or a list of tensors or NumPy arrays. It is copied.
        weights: as in a server: `"observed"`, `"uniform"`, or a mapping from clients to samples. An observed sample
            count is capped at 100 times the median of the other clients' reports.
        space: as in `aggregate`: the space of the models, with buffer policies, manifolds and adapters. Its scaling is
            that of the models that are sent.

    Raises:
        ArgumentError: naming the argument, and the tensor in it, that does not fit.

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
        # The stored models are state dicts, in which the factors of adapters are separate.
        self._layout = self._space.state_layout(first, "model: ")
        self._template = self._build_model(first)
        state = initial_state(rule, self._space, point, {"space": "model", "start": "model"})
        self._make_message(ModelState(point, state), None)
        store = Store().retain(version_key(0), InMemoryTree(self._template))
        self._state = AtomicReference(
            AggregatorState(0, state, Weights.of(weights, DEFAULT_LIMITS.samples_factor), store)
        )
        self._update_lock = OwnedLock()
        self._warned_unstable = False

    def checkout(
        self, client: Hashable, task: Hashable = None, *, version: int | None = None, restart: bool = False
    ) -> Any:
        """Register that a client starts from the current model.

        Args:
            client: any hashable name that equals itself, but not a tensor.
            task: the name of the task, if the client has several tasks at a time.
            version: the version that it started from, if the host learns that late; `None` for the current one. A
                version is retained while a task of any name has it.
            restart: cancel an existing task of this client and name.

        Returns:
            The model, in memory of its own: the server's, or another start model that the rule chooses for this client.

        Raises:
            ArgumentError: if the client already has such a task, has an invalid name or is missing from the given
                weights, if the version is no longer retained, or if the rule sends this client more than a model.

        Cost: three copies of the model.
        """
        place = (check_client(client), check_client(task, "task"))
        check_choice("restart", restart, (True, False))
        now = self._state.value
        began = now.version if version is None else check_count("version", version, at_least=0)
        kept = now.store.find(version_key(began))
        if began > now.version:
            raise ArgumentError(
                f"version: expected at most {now.version}, the current version, got {short_repr(began)}"
            )
        if kept is None:
            raise ArgumentError(f"version: {began} is no longer retained")
        now.weights.check(client)
        model, apart = (
            self._start_model(now, client) if version is None else (self._copy_model(now.model(began)), False)
        )
        self._state.update(lambda now: (now.with_task(place, TaskStart(began, apart), kept, restart), None))
        return model

    def submit(
        self,
        client: Hashable,
        update: Model | Sequence[Model],
        *,
        samples: int,
        task: Hashable = None,
        difference: bool = False,
        scaling: Scaling | None = None,
    ) -> dict[str, float]:
        r"""Apply a client's update to the model. The update is only read.

        Args:
            client: the client, which has a task in flight.
            update: as in `aggregate`: the client's model, or for a curve a sequence of them.
            samples: the number of samples that it trained on, at most a billion.
            task: the name of its task; `None` for a task without a name.
            difference: whether `update` is new minus old. It must be false if the rule let the client start from
                another model than the version's.
            scaling: the scaling of the client's adapters, if it differs from that of the models that are sent.

        Returns:
            The metrics of the step (such as `cosine`, `step`, `norm`), the new `version` of the model, and the
            `staleness` and `weight` of the update.

        Raises:
            ArgumentError: if the client has no such task, or an argument is invalid; why a server returns a receipt
                instead: [Receipts and exceptions](../guide/errors.md#receipts-and-exceptions).
            RuleError: as `aggregate`.

        Warns:
            UserWarning: as `aggregate`.
            StabilityWarning: once, if the step is above the stability limit of the concurrency.

        Cost: that of `aggregate`.
        """
        place = (check_client(client), check_client(task, "task"))
        samples = check_samples(samples, DEFAULT_LIMITS.max_samples)
        check_choice("difference", difference, (True, False))
        if self._update_lock.held_by_me():
            raise ArgumentError(
                "async_aggregator: an update cannot wait for itself; submit this one after the other was applied"
            )
        with self._update_lock.lock:
            now = self._state.value
            began, apart = now.task_start(place)
            if difference and apart:
                name = type(self._rule).__name__
                raise ArgumentError(
                    f"difference: expected False, as {name} lets client {short_repr(client)} start from another model "
                    "than the version's, got True"
                )
            believed = now.weights.capped(client, samples)
            known = UpdateInfo(
                client=client,
                staleness=now.version - began,
                weight=now.weights.weight(client, believed),
                samples=believed,
                difference=difference,
                scaling=scaling,
                share=now.weights.share(client, believed),
            )
            made = aggregate_step(
                self._rule,
                now.state,
                now.model(now.version),
                now.model(began),
                update,
                known,
                self._space,
                difference_option="difference=True",
            )
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
        """Cancel a task, whose update will not arrive.

        Raises:
            ArgumentError: if there is no such task.
        """
        place = (check_client(client), check_client(task, "task"))
        self._state.update(lambda now: (now.with_cancelled_task(place), None))

    @property
    def model(self) -> Any:
        """A copy of the current model."""
        now = self._state.value
        return self._copy_model(now.model(now.version))

    @property
    def version(self) -> int:
        """The number of times that the model has moved."""
        return self._state.value.version

    @property
    def in_flight(self) -> dict[TaskKey, int]:
        """The tasks in flight, by client and task name (`None` without one), and their current staleness.

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
        """Return the state for `load`: a tree of tensors and plain values, for `torch.save`.

        Raises:
            CheckpointError: if the rule contains a function without an importable name, such as a lambda.

        Cost: one copy of the complete state.
        """
        now = self._state.value
        held = _as_aggregate_state(now.state)
        waiting = held.pending_buffers
        tree = {
            "rule": fingerprint("rule", self._rule),
            "version": now.version,
            "models": {version: as_tensors("model", now.model(version)) for version in now.versions},
            "in_flight": [(*place, *begun) for place, begun in now.tasks.items()],
            "weights": now.weights.state(),
            "state": held.state,
            "pending_buffers": None
            if waiting is None
            else {**vars(waiting), "latest": buffers_to_tree(waiting.latest)},
            "client_states": list(held.client_states.items()),
        }
        return tree_map(tree, copy_tensor)  # type: ignore[no-any-return]

    def save(self, path: str | Path) -> None:
        """Write the state to a file, and replace an existing file atomically.

        Raises:
            ArgumentError: if the folder of `path` does not exist.
            CheckpointError: if the state cannot be stored, for example a client that is neither a string nor an
                integer, or the file cannot be written. The older file is then unchanged.
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
        """Start an aggregator, or resume it from the file of `save` if that exists.

        The tasks in flight of a resumed aggregator are those of the file. Submit their updates, `cancel` them, or check
        them out again with `restart=True`.

        Args:
            path: the file of `save`.
            rule: as in the constructor.
            model: the initial model, as in the constructor. A resumed aggregator uses only its kind.
            weights: as in the constructor.
            space: as in the constructor.
            replace: as in `load`.

        Raises:
            ArgumentError: if an argument is invalid, or the file is that of another rule or model.
            CheckpointError: if the file is truncated, altered, or not from `save`.

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
        """Resume from a state that `state` returned, in place of the current one.

        The constructor's `model` determines the kind of the models, and its `weights` the weights of the clients. The
        reported sample counts are restored.

        Args:
            state: the result of `state`.
            replace: accept other options of the rule, but not another class, nor another clip or noise of `Private`.

        Raises:
            ArgumentError: if it is not such a tree, or one of another rule or model. Nothing has changed then.

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
        difference = rule_difference(state["rule"], given, replace=replace)
        if difference is not None:
            raise ArgumentError(f"state: {difference}")
        saved_class = state["rule"].get("class") if isinstance(state["rule"], dict) else None
        if saved_class != given["class"]:
            raise ArgumentError(f"state: rule: expected {given['class']}, got {short_repr(saved_class)}")
        tree = tree_map(dict(state), copy_tensor)
        with self._update_lock.lock:
            weights = self._state.value.weights
            try:
                fresh = self._parse_state(
                    tree, Weights.of_state(tree["weights"], _weights_spec(weights), weights.cap_factor)
                )
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                if isinstance(error, ArgumentError):
                    raise
                raise ArgumentError("state: expected the result of AsyncAggregator.state()") from error
            self._state.update(lambda _: (fresh, None))

    def _parse_state(self, tree: Mapping[str, Any], weights: Weights) -> "AggregatorState":
        """Build the state from a tree."""
        models = tree["models"]
        for version, model in models.items():
            self._layout.check(model, f"state: models: {version}: ")
        memory = dict(tree["client_states"])
        waiting = tree["pending_buffers"]
        if waiting is not None:
            waiting = PendingBuffers(**{**waiting, "latest": buffers_from_tree(waiting["latest"])})
        current = check_count("state: version", tree["version"], at_least=0)
        point = self._point(models[current])
        if not has_structure(tree["state"], self._rule.init(self._space, point)):
            raise ArgumentError(f"state: state: expected one of {type(self._rule).__name__} for this model")
        state = AggregateState(tree["state"], waiting, memory) if memory or waiting is not None else tree["state"]
        kept = {version: InMemoryTree(self._build_model(model)) for version, model in models.items()}
        record = AggregatorState(current, state, weights, Store().retain(version_key(current), kept[current]))
        for client, task, began, apart in tree["in_flight"]:
            weights.check(client)
            place = (client, check_client(task, "task"))
            if place in record.tasks or client not in weights.reported or began > current or type(apart) is not bool:
                raise ArgumentError(
                    f"state: in_flight: expected one of {short_repr(client)} by each name, of a version up to {current}"
                )
            record = record.with_known_task(place, TaskStart(began, apart), kept[began])
        return record

    def _start_model(self, now: "AggregatorState", client: Hashable) -> tuple[Any, bool]:
        """Return the start model of a client under the rule, and whether it differs from the current model."""
        model = as_tensors("model", now.model(now.version))
        point = self._point(model)
        held = _as_aggregate_state(now.state)
        sent, apart = self._make_message(
            ModelState(point, held.state, version=now.version), held.client_states.get(client)
        )
        return self._build_model(model | self._space.state_dict(sent.start) if apart else model), apart

    def _make_message(self, now: ModelState, client_state: ClientState) -> tuple[Message, bool]:
        """Return the rule's message for a client with this client state.

        Raises:
            ArgumentError: if that is more than a model.
        """
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
        """Build a model from these tensors, in memory of its own and of the kind of the first model."""
        layout = self._layout
        leaves = [clone(named[leaf.name].detach()) for leaf in layout.leaves]
        carried = {entry.name: named[entry.name].detach().clone() for entry in layout.buffers}
        return convert_like(self._template, layout.to_state_dict(leaves, carried), as_tensors("model", self._template))


STATE_KEYS = {"rule", "version", "models", "in_flight", "weights", "state", "pending_buffers", "client_states"}


def _as_aggregate_state(state: State) -> AggregateState:
    return state if isinstance(state, AggregateState) else AggregateState(state)


def _weights_spec(weights: Weights) -> str | dict[Any, int]:
    return dict(weights.sample_counts) if weights.kind == "given" else weights.kind
