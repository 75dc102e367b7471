"""Letters: errands on their way to whoever does them, in this process or another, and what comes back."""

import os
import threading
import traceback
from collections import OrderedDict
from functools import cached_property
from typing import Any, NamedTuple

import torch

from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Message, Payload, Trainer
from manifoldagg.federated.types import ClientState
from manifoldagg.kernels import set_backend
from manifoldagg.kernels.backends import selection
from manifoldagg.simulation.executors.client_task import Counted, Errand, perform
from manifoldagg.simulation.executors.shared_tensors import Lying, Missing, Parcel, Shelf, packed, unpacked
from manifoldagg.simulation.federated_dataset import Federation, Key

__all__ = ["Letter", "Outcome", "Terms", "attempt", "done"]

MADE = 4
"""How many terms a process keeps: a federation holds data."""


class _Surroundings(NamedTuple):
    """What else in a process the bits of an errand follow from."""

    dtype: torch.dtype
    backend: str

    @staticmethod
    def here() -> "_Surroundings":
        return _Surroundings(torch.get_default_dtype(), _backend())

    def hold(self) -> None:
        """Have them in this process."""
        if torch.get_default_dtype() is not self.dtype:
            torch.set_default_dtype(self.dtype)
        if _backend() != self.backend:
            set_backend(self.backend)


class _Common(NamedTuple):
    """The terms as another process has them."""

    surroundings: _Surroundings
    federation: Federation
    trainer: Trainer


def _backend() -> str:
    return str(selection.backend_for(torch.device("cpu")).__name__.rpartition(".")[2])


class Terms:
    """What all errands of a run have in common, sealed once for all of their letters.

    Args:
        federation: which data, minibatches and seeds.
        trainer: what is done with them.
    """

    def __init__(self, federation: Federation, trainer: Trainer) -> None:
        self.federation = federation
        self.trainer = trainer
        self._sealed: Lying | None = None
        self._lock = threading.Lock()

    @cached_property
    def shelf(self) -> Shelf:
        """Where tensors lie for other processes."""
        return Shelf()

    def errand(self, key: Key, message: Message, memory: ClientState) -> Errand:
        """What is to be done for a task."""
        return Errand(self.federation, self.trainer, key, message, memory)

    def seal(self) -> Lying:
        """The terms as they lie on the shelf, as bytes.

        Raises:
            ArgumentError: if they cannot be pickled.
        """
        with self._lock:
            if self._sealed is None:
                try:
                    inside, _ = packed((self.federation, self.trainer))
                except Exception as error:
                    raise ArgumentError(
                        "executor: the federation or the trainer cannot be sent to another process: split a `task` of "
                        f"a function that can be imported, or give an executor of threads ({error})"
                    ) from error
                data, _ = packed((_Surroundings.here(), inside))
                self._sealed = self.shelf.put(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            return self._sealed


class Letter:
    """An errand that pickles as references to what it is made of, however large the model.

    Args:
        terms: of the run.
        key: whose task, and which.
        message: from the server.
        memory: what the client's task before this one left.
        whole: bring it all by value, as it was not found.
    """

    def __init__(self, terms: Terms, key: Key, message: Message, memory: ClientState, *, whole: bool = False) -> None:
        self._terms = terms
        self._parts = (key, message, memory)
        self._whole = whole
        self._lying: list[Lying] = []

    def errand(self) -> Errand:
        """What is to be done."""
        return self._terms.errand(*self._parts)

    def __reduce__(self) -> tuple[Any, ...]:
        sealed = self._terms.seal()
        data, lying = packed(self._parts, self._terms.shelf, whole=self._whole)
        # What it refers to lies there for as long as it does.
        self._lying += lying
        return _Received, (self._terms.shelf.parcel(sealed, whole=self._whole), data)

    def __dask_tokenize__(self) -> str:
        """A name that nothing else has: dask does not look whether the work is equal to some that it knows."""
        return os.urandom(16).hex()


class _Received:
    """A letter in another process. Nothing of it was opened yet: what goes wrong then is answered."""

    def __init__(self, terms: Parcel, data: bytes) -> None:
        self._common = terms
        self._data = data

    def errand(self) -> Errand:
        """What is to be done.

        Raises:
            Missing: if something of it is not here.
            ArgumentError: if the federation or the trainer cannot be made here.
        """
        common = _KNOWN.get(self._common)
        common.surroundings.hold()
        return Errand(common.federation, common.trainer, *unpacked(self._data))


class _Known:
    """The terms that were made in this process, the latest last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: OrderedDict[str | bytes | None, _Common] = OrderedDict()

    def get(self, parcel: Parcel) -> _Common:
        name = parcel.name or parcel.data
        with self._lock:
            made = self._made.pop(name, None)
            if made is None:
                surroundings, inside = unpacked(parcel.open().numpy().tobytes())
                surroundings.hold()
                try:
                    made = _Common(surroundings, *unpacked(inside))
                except Exception as error:
                    raise ArgumentError(
                        f"executor: a worker cannot make the federation or the trainer: {error}"
                    ) from error
            self._made[name] = made
            while len(self._made) > MADE:
                self._made.popitem(last=False)
            return made


_KNOWN = _Known()


class Outcome:
    """What became of a letter: a payload, or what was raised. It pickles as plain bytes.

    Args:
        payload: of the task.
        error: what was raised.
        trained: whether the training raised it.
        gradients: that were computed, also by a training that raised.
    """

    def __init__(
        self,
        payload: Payload | None = None,
        error: Exception | None = None,
        *,
        trained: bool = True,
        gradients: int = 0,
    ) -> None:
        self.payload = payload
        self.error = error
        self.trained = trained
        self.gradients = gradients

    @property
    def missing(self) -> bool:
        """Whether the letter was not understood, as something of it is not where it was read."""
        return self.payload is None and self.error is None

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            data, _ = packed((self.payload, self.error, self.trained, self.gradients))
            if self.error is not None:
                unpacked(data)
        except Exception as problem:
            told = RuntimeError(f"{self.error or problem!r}, which cannot be sent to another process")
            data, _ = packed((None, told, self.trained, self.gradients))
        return _outcome, (data, "" if self.error is None else "".join(traceback.format_exception(self.error)))


def _outcome(data: bytes, trace: str) -> Outcome:
    payload, error, trained, gradients = unpacked(data)
    if error is not None:
        error.add_note(f"in another process:\n{trace}")
    return Outcome(payload, error, trained=trained, gradients=gradients)


def attempt(letter: Letter | _Received) -> Outcome:
    """Do what a letter asks for. Nothing is raised: what an executor raises is its own."""
    try:
        errand = letter.errand()
    except Missing:
        return Outcome()
    except Exception as error:
        return Outcome(error=error, trained=False)
    return done(errand)


def done(errand: Errand) -> Outcome:
    """Do an errand, and keep what its training raises; the gradients are counted where they are computed."""
    criterion = Counted()
    try:
        payload = perform(errand, criterion)
    except Exception as error:
        return Outcome(error=error, gradients=criterion.gradients)
    return Outcome(payload, gradients=criterion.gradients)
