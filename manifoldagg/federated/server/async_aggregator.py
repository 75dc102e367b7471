"""Versions: for a loop of one's own, what every client started from, and the rule's state, step by step."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from immutables import Map
from torch import Tensor

from manifoldagg._validation import check_count
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.buffers import Patterns, Waiting, check_patterns, packed, policies, unpacked
from manifoldagg.federated.limits import UNLIMITED
from manifoldagg.federated.model_state import Snapshot
from manifoldagg.federated.pytrees import copied, covers, replaced
from manifoldagg.federated.server._aggregate import Known, ServerState, check_models, space_of, stepped
from manifoldagg.federated.server.dispatch import message
from manifoldagg.federated.server.durability.fingerprint import path_of
from manifoldagg.federated.server.durability.persistent_map import Atomic
from manifoldagg.federated.server.durability.spill import Filed
from manifoldagg.federated.server.durability.store import Kept, Store
from manifoldagg.federated.server.lock import Lock
from manifoldagg.federated.server.validation import check_samples
from manifoldagg.federated.types import Memory, Message, Rule, State
from manifoldagg.federated.weights import Weights, check_client
from manifoldagg.kernels.alloc import clone
from manifoldagg.manifolds import Layout
from manifoldagg.manifolds.assign import Assignment
from manifoldagg.manifolds.lora.scaling import Scaling
from manifoldagg.manifolds.model_io import Model, as_tensors, convert_like

__all__ = ["Versions"]

Task = tuple[Hashable, Hashable]
"""A client, and which of its tasks."""


class Versions:
    r"""What a loop of one's own needs around [`aggregate`][manifoldagg.aggregate]: two calls, `send` and `take`.

    It keeps the model, each older version once for as long as somebody works on it, the rule's state, what waits and
    what is kept for clients; and it knows of each answer its base, its staleness and its weight. For models in float32
    or float64 it agrees with a [`Server`][manifoldagg.Server] bit for bit. What is refused changes nothing: the client
    has its task still, may answer again, or is given up by `drop`. All methods may be called from any thread.

    A client has one task at a time, or several under names of their own.

    Args:
        rule: such as `FedAsync(0.6)`; one that asks clients for more than models, or sends them more, needs a server.
        model: to start from: a state dict, or a list of tensors or NumPy arrays. It is copied.
        weights: as of a server: `"observed"`, `"uniform"`, or a mapping from clients to samples. Of what is observed a
            claim counts at most 100 times the median of what others have told, once five others have.
        buffers: as of `aggregate`.
        manifolds: likewise.
        adapters: likewise.
        scaling: likewise, of the models that are sent.

    Raises:
        ArgumentError: naming the argument, and the tensor in it, that does not fit.

    Example:
        >>> import numpy as np
        >>> from manifoldagg.federated.rules import FedAsync
        >>> versions = Versions(FedAsync(0.5), [np.array([0.0])])
        >>> early, late = versions.send("ward-7"), versions.send("ward-8")
        >>> numbers = versions.take("ward-7", [early[0] + 2], samples=30)
        >>> numbers = versions.take("ward-8", [late[0] + 4], samples=10)
        >>> numbers["staleness"], numbers["weight"], versions.version, versions.model
        (1, 0.25, 2, [array([2.5])])
        >>> versions.take("ward-8", [late[0] + 4], samples=10)
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: client: 'ward-8' has no task: it was sent none, or has answered
    """

    def __init__(
        self,
        rule: Rule,
        model: Model,
        *,
        weights: str | Mapping[Any, int] = "observed",
        buffers: Patterns = (),
        manifolds: Assignment | None = None,
        adapters: bool | None = None,
        scaling: Scaling = 1.0,
    ) -> None:
        self._rule = check_models(rule)
        self._buffers = check_patterns(buffers)
        self._manifolds = manifolds
        self._like = model
        first = as_tensors("model", model)
        self._space = space_of("model", first, manifolds, self._buffers, adapters, scaling)
        self._adapters = self._space.adapters is not None
        self._scaling = scaling
        layout = self._space.layout
        layout.check_parameters("model")
        policies(layout.buffers, self._buffers)
        # Models are kept as they come.
        self._layout = Layout.of_state_dict(first, list(self._buffers)) if self._adapters else layout
        point = self._point(first)
        self._like = self._made(first)
        state = rule.init(self._space, point)
        self._message(Snapshot(point, state), None)
        store = Store().held(_at(0), Kept(self._like))
        self._record = Atomic(_Record(0, state, Weights.of(weights, UNLIMITED.samples_factor), store))
        self._turn = Lock()

    def send(self, client: Hashable, task: Hashable = None, *, version: int | None = None, again: bool = False) -> Any:
        """Note that a client begins with the current model.

        Args:
            client: any hashable name that equals itself; no tensor.
            task: a name, where the client has several at a time.
            version: that it began with, where a host learns that late; `None` for the current one. It is known as
                long as somebody works on it, under whatever name.
            again: give up the task that the client may have under this name.

        Returns:
            The model, in memory of its own: the server's, or another one where the rule lets this client begin there.

        Raises:
            ArgumentError: if the client has such a task already, is no such name or missing from the weights that were
                given, nobody has the version any more, or the rule sends this client more than a model.

        Cost: three copies of the model.
        """
        place = (check_client(client), check_client(task, "task"))
        now = self._record.value
        began = now.version if version is None else check_count("version", version, at_least=0)
        kept = now.store.find(_at(began))
        if kept is None:
            raise ArgumentError(f"version: nobody has {began} any more")
        now.weights.check(client)
        model, apart = self._start(now, client) if version is None else (self._copy(now.model(began)), False)
        self._record.update(lambda now: (now.sent(place, Begun(began, apart), kept, again), None))
        return model

    def take(
        self,
        client: Hashable,
        update: Model | Sequence[Model],
        *,
        samples: int,
        task: Hashable = None,
        difference: bool = False,
        scaling: Scaling | None = None,
    ) -> dict[str, float]:
        r"""Take what a client answers into the model. The update is only read.

        Args:
            client: that was sent a model.
            update: as of `aggregate`: the client's model, or for a curve a sequence of them.
            samples: how many it trained on, at most a billion.
            task: the name of its task, where it had one.
            difference: whether `update` is new minus old. Not of a client that the rule let begin with another model
                than the version's.
            scaling: of the client's adapters, where it is not that of the models that are sent.

        Returns:
            The rule's numbers (such as `cosine`, `step`, `norm`), with the `version` that the model now has, and the
            `staleness` and `weight` of the update.

        Raises:
            ArgumentError: if the client has no such task, or naming what does not fit.
            RuleError: as `aggregate`.

        Warns:
            UserWarning: as `aggregate`.

        Cost: that of `aggregate`.
        """
        place = (check_client(client), check_client(task, "task"))
        samples = check_samples(samples, UNLIMITED.max_samples)
        if self._turn.is_mine():
            raise ArgumentError("versions: an update cannot wait for itself; take this one after the other was taken")
        with self._turn.lock:
            now = self._record.value
            began, apart = now.began(place)
            if difference and apart:
                name = type(self._rule).__name__
                raise ArgumentError(f"difference: expected a model, as {name} let {client!r} begin with one of its own")
            believed = now.weights.believed(client, samples)
            known = Known(
                client=client,
                staleness=now.version - began,
                weight=now.weights.weight(client, believed),
                samples=believed,
                share=now.weights.share(client, believed),
            )
            made = stepped(
                self._rule,
                now.state,
                now.model(now.version),
                now.model(began),
                update,
                known,
                buffers=self._buffers,
                manifolds=self._manifolds,
                difference=difference,
                adapters=self._adapters,
                scaling=(self._scaling, scaling),
            )
            version = self._record.update(lambda now: now.taken(place, known, made))
        return {**made.numbers, "version": version, "staleness": known.staleness, "weight": known.weight}

    def drop(self, client: Hashable, task: Hashable = None) -> None:
        """Give a task up: nobody will answer it.

        Raises:
            ArgumentError: if there is none.
        """
        place = (check_client(client), check_client(task, "task"))
        self._record.update(lambda now: (now.without(place), None))

    @property
    def model(self) -> Any:
        """A copy of the current model."""
        now = self._record.value
        return self._copy(now.model(now.version))

    @property
    def version(self) -> int:
        """How often the model has moved."""
        return self._record.value.version

    @property
    def tasks(self) -> dict[Task, int]:
        """Who works on what, by client and the name of the task (`None` without), and how stale it is by now.

        Example:
            >>> import torch
            >>> from manifoldagg.federated.rules import FedAsync
            >>> versions = Versions(FedAsync(0.5), [torch.ones(1)])
            >>> _ = versions.send("ward-7")
            >>> versions.tasks
            {('ward-7', None): 0}
        """
        now = self._record.value
        return {place: now.version - begun.version for place, begun in now.tasks.items()}

    def state(self) -> dict[str, Any]:
        """All that `load` needs to go on from here: a tree of tensors and plain values, for `torch.save`.

        Cost: a copy of everything.
        """
        now = self._record.value
        held = _held(now.state)
        waiting = held.buffers
        tree = {
            "rule": path_of(type(self._rule)),
            "version": now.version,
            "models": {version: as_tensors("model", now.model(version)) for version in now.versions},
            "tasks": [(*place, *begun) for place, begun in now.tasks.items()],
            "weights": now.weights.state(),
            "state": held.state,
            "waiting": None if waiting is None else {**vars(waiting), "latest": unpacked(waiting.latest)},
            "memory": list(held.memory.items()),
        }
        return replaced(tree, copied)  # type: ignore[no-any-return]

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned, in place of all that is known here.

        The model that this was made with says what kind the models are, and `weights` what clients weigh; what they
        have told goes on.

        Raises:
            ArgumentError: if it is no such tree, or one of another rule or model. Nothing has changed then.

        Example:
            >>> import torch
            >>> from manifoldagg.federated.rules import FedAsync
            >>> versions = Versions(FedAsync(0.5), [torch.zeros(1)])
            >>> base = versions.send("ward-7")
            >>> saved = versions.state()
            >>> versions = Versions(FedAsync(0.5), [torch.zeros(1)])
            >>> versions.load(saved)
            >>> versions.take("ward-7", [base[0] + 1], samples=10)["norm"]
            0.5
        """
        if not isinstance(state, Mapping) or set(state) != FIELDS:
            raise ArgumentError("state: expected what Versions.state() returned")
        mine = path_of(type(self._rule))
        if state["rule"] != mine:
            raise ArgumentError(f"state: rule: expected {mine}, got {state['rule']}")
        tree = replaced(dict(state), copied)
        with self._turn.lock:
            weights = self._record.value.weights
            try:
                fresh = self._read(tree, Weights.of_state(tree["weights"], _given(weights), weights.factor))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                if isinstance(error, ArgumentError):
                    raise
                raise ArgumentError("state: expected what Versions.state() returned") from error
            self._record.update(lambda _: (fresh, None))

    def _read(self, tree: Mapping[str, Any], weights: Weights) -> "_Record":
        """The record of a tree."""
        models = tree["models"]
        for version, model in models.items():
            self._layout.check(model, f"state: models: {version}: ")
        memory = dict(tree["memory"])
        waiting = tree["waiting"]
        if waiting is not None:
            waiting = Waiting(**{**waiting, "latest": packed(waiting["latest"])})
        current = check_count("state: version", tree["version"], at_least=0)
        point = self._point(models[current])
        if not covers(tree["state"], self._rule.init(self._space, point)):
            raise ArgumentError(f"state: state: expected one of {type(self._rule).__name__} for this model")
        state = ServerState(tree["state"], waiting, memory) if memory or waiting is not None else tree["state"]
        kept = {version: Kept(self._made(model)) for version, model in models.items()}
        record = _Record(current, state, weights, Store().held(_at(current), kept[current]))
        for client, task, began, apart in tree["tasks"]:
            weights.check(client)
            place = (client, check_client(task, "task"))
            if place in record.tasks or client not in weights.told or began > current or type(apart) is not bool:
                raise ArgumentError(
                    f"state: tasks: expected one of {client!r} by each name, of a version up to {current}"
                )
            record = record.held(place, Begun(began, apart), kept[began])
        return record

    def _start(self, now: "_Record", client: Hashable) -> tuple[Any, bool]:
        """What a client begins with that the rule sends now, and whether it is another model than the current one."""
        model = as_tensors("model", now.model(now.version))
        point = self._point(model)
        held = _held(now.state)
        sent, apart = self._message(Snapshot(point, held.state, version=now.version), held.memory.get(client))
        return self._made(model | self._space.state_dict(sent.start) if apart else model), apart

    def _message(self, now: Snapshot, memory: Memory) -> tuple[Message, bool]:
        """What the rule sends to a client with this memory.

        Raises:
            ArgumentError: if that is more than a model.
        """
        sent, apart = message(self._space, self._rule, now, memory, None)
        if sent.tensors or sent.numbers:
            more = ", ".join([*sent.tensors, *sent.numbers])
            raise ArgumentError(
                f"rule: {type(self._rule).__name__} sends clients more than models, {more}; use a Server"
            )
        return sent, apart

    def _point(self, model: Mapping[str, Tensor]) -> Tensor:
        (point,) = self._space.points({"model: ": self._space.stack_factors(model, "model: ")})
        return point

    def _copy(self, model: Model) -> Any:
        return self._made(as_tensors("model", model))

    def _made(self, found: Mapping[str, Tensor]) -> Any:
        """A model of these tensors, in memory of its own and of the kind of the first."""
        layout = self._layout
        leaves = [clone(found[leaf.name].detach()) for leaf in layout.leaves]
        carried = {entry.name: found[entry.name].detach().clone() for entry in layout.buffers}
        return convert_like(self._like, layout.to_state_dict(leaves, carried), as_tensors("model", self._like))


class Begun(NamedTuple):
    """How a task began: with which version, and whether its client was let begin with another model than that."""

    version: int
    apart: bool


class _Record(NamedTuple):
    """All that is known, as one immutable value. Every method returns a new one, or says why there is none.

    Attributes:
        version: of the model.
        state: as `aggregate` returns it.
        weights: who takes part.
        store: the model, and older versions.
        tasks: how they began.
    """

    version: int
    state: State
    weights: Weights
    store: Store
    tasks: Map[Task, Begun] = Map()

    @property
    def versions(self) -> list[int]:
        """Those that somebody has, and the current one."""
        return sorted({self.version, *(begun.version for begun in self.tasks.values())})

    def model(self, version: int) -> Model:
        """A version that somebody has."""
        found: Model = self.store.load(_at(version))
        return found

    def began(self, task: Task) -> Begun:
        """How a task began.

        Raises:
            ArgumentError: if there is no such task.
        """
        if task not in self.tasks:
            client, name = task
            of = "task" if name is None else f"task {name!r}"
            raise ArgumentError(f"client: {client!r} has no {of}: it was sent none, or has answered")
        return self.tasks[task]

    def sent(self, task: Task, begun: Begun, kept: Kept | Filed, again: bool) -> "_Record":
        """With a task that begins with a version, which is `kept`; `again` in place of the one that there is.

        Raises:
            ArgumentError: if there is such a task.
        """
        client, name = task
        if task not in self.tasks:
            return self._replace(weights=self.weights.registered(client)).held(task, begun, kept)
        if not again:
            of = "a task" if name is None else f"a task {name!r}"
            raise ArgumentError(f"client: {client!r} has {of} already; drop it, send `again`, or name this `task`")
        return self.without(task).held(task, begun, kept)

    def held(self, task: Task, begun: Begun, kept: Kept | Filed) -> "_Record":
        """With a task that began with a version, which is `kept` where nobody has it."""
        return self._replace(store=self.store.held(_at(begun.version), kept), tasks=self.tasks.set(task, begun))

    def without(self, task: Task) -> "_Record":
        """Without a task.

        Raises:
            ArgumentError: if there is none.
        """
        return self._replace(store=self.store.released(_at(self.began(task).version)), tasks=self.tasks.delete(task))

    def taken(self, task: Task, known: Known, made: Any) -> tuple["_Record", int]:
        """With the answer to a task; and the version of the model.

        Raises:
            ArgumentError: if the task was dropped meanwhile.
        """
        after = self.without(task)
        after = after._replace(state=made.state, weights=after.weights.recorded(known.client, known.samples))
        if not made.moved:
            return after, after.version
        version = self.version + 1
        store = after.store.held(_at(version), Kept(made.model)).released(_at(self.version))
        return after._replace(version=version, store=store), version


FIELDS = {"rule", "version", "models", "tasks", "weights", "state", "waiting", "memory"}


def _held(state: State) -> ServerState:
    return state if isinstance(state, ServerState) else ServerState(state)


def _at(version: int) -> tuple[str, int]:
    return ("version", version)


def _given(weights: Weights) -> str | dict[Any, int]:
    return dict(weights.amounts) if weights.kind == "given" else weights.kind
