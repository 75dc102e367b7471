"""Comparable bytes of all parts of a server that a rejected update must not change."""

from collections.abc import Mapping
from dataclasses import is_dataclass

import numpy as np
import torch
from torch import Tensor

from manifoldagg.federated import Message, Outcome


def bits(tree):
    """Return a tree with its tensors as bytes. NaN equals NaN, and -0.0 differs from 0.0."""
    if isinstance(tree, Tensor):
        return (
            tuple(tree.shape),
            str(tree.dtype),
            tree.detach().clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
    if is_dataclass(tree) and not isinstance(tree, Mapping):
        return {name: bits(branch) for name, branch in vars(tree).items()}
    if isinstance(tree, Mapping):
        return {name: bits(branch) for name, branch in tree.items()}
    return [bits(branch) for branch in tree] if isinstance(tree, list | tuple) else repr(tree)


def versions(server):
    """Return the versions that the store of a server contains."""
    return [name for kind, name in server._state.value.store.entries if kind == "version"]


def fingerprint(server):
    """Return all parts of a server that a rejected update must not change.

    The result contains the model, state, versions and their references, tickets, memory, weights, norms, history,
    buffers and generators.
    """
    state = server._state.value
    entries = state.store.entries
    kept = {key: (holders, kept.size, str(getattr(kept, "path", ""))) for key, (kept, holders) in entries.items()}
    return {
        "model": bits(server.model),
        "version": server.version,
        "state": bits(state.model_state.state),
        "buffers": bits(state.model_state.buffers),
        "pending_buffers": bits(state.model_state.pending_buffers),
        "kept": kept,
        "contents": {key: bits(state.store.load(key)) for key in kept},
        "memory": server.memory,
        "tickets": dict(state.tickets),
        "weights": state.weights,
        "norms": list(state.model_state.norms),
        "history": bits(server.history),
        # Not of the module `random`, of which the type checks of the tests make use.
        "generators": (bits(torch.get_rng_state()), repr(np.random.get_state())),
    }


class Adds:
    """Rule that adds each displacement to the model.

    With displacements of 1, the entries of the model count the updates.
    """

    cohort = 1

    def init(self, space, start):
        return {"steps": 0}

    def message(self, space, state, current, client_state):
        answers = 0 if client_state is None else client_state["answers"]
        return Message(current, numbers={"steps": state["steps"], "memory": answers})

    def step(self, space, state, update, *, out=None):
        answers = 1 + (0 if update.client_state is None else update.client_state["answers"])
        out = torch.empty_like(update.current) if out is None else out
        torch.add(update.current, update.points[-1] - update.base, out=out)
        client_state = {"answers": answers, "last": update.points[-1]}
        return {"steps": state["steps"] + 1}, Outcome(out, client_state, {"step": 1.0})


class Gathers(Adds):
    """Rule that buffers `cohort` updates, and then adds their sum to the model."""

    def __init__(self, cohort, patient=True):
        self.cohort = cohort if patient else 1
        self.buffer_size = cohort

    def init(self, space, start):
        return {"steps": 0, "waiting": ()}

    def step(self, space, state, update, *, out=None):
        waiting = (*state["waiting"], update.points[-1] - update.base)
        if len(waiting) < self.buffer_size:
            return {**state, "waiting": waiting}, Outcome(None, update.client_state, {"buffered": len(waiting)})
        model = update.current + sum(waiting)
        numbers = {"step": 1.0, "buffered": 0}
        return {"steps": state["steps"] + 1, "waiting": ()}, Outcome(model, update.client_state, numbers)


class Listens:
    """Base class of averages for tests, without `update`. It averages nothing and has no state."""

    average = None

    def state(self):
        return None

    def load(self, state):
        pass
