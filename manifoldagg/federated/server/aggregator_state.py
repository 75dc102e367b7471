"""The immutable state of an `AsyncAggregator`."""

from collections.abc import Hashable
from typing import Any, NamedTuple

from immutables import Map

from manifoldagg._validation import other_type_hint, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.server.options import UpdateInfo
from manifoldagg.federated.types import State
from manifoldagg.federated.weights import Weights
from manifoldagg.manifolds.model_io import Model

__all__ = ["AggregatorState", "TaskKey", "TaskStart"]

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
