"""What the tests of task runners share and other processes import: a task, trainers of all tempers, executors that misbehave."""

import os
import pickle
import random
import signal
import threading
import time
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
from torch import nn

from manifoldagg.errors import DivergenceError
from manifoldagg.experiments import load_dataset
from manifoldagg.federated import Message, Payload
from manifoldagg.federated import clients as trainers
from manifoldagg.federated.rules import DeFedAvg, FedAsync, FedAvg, GeneralizedAsyncSGD, OrthoFL
from manifoldagg.simulation import (
    Exponential,
    FederatedDataset,
    JacksonNetwork,
    LabelledDataset,
    Method,
    churn,
    dirichlet_partition,
    iid_partition,
)


def model():
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


def clouds(samples=120):
    """Three clouds of points in the plane."""
    centres = torch.tensor([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]])
    labels = torch.arange(3).repeat(samples // 3)
    noise = torch.randn(samples, 2, generator=torch.Generator().manual_seed(0))
    return LabelledDataset("clouds", centres[labels] + 0.4 * noise, labels, model, 0.9)


def federation(clients=5, seed=0):
    return FederatedDataset.split(
        load_dataset(clouds), clients, partition=partial(dirichlet_partition, concentration=3.0), seed=seed, batch=32
    )


@dataclass(frozen=True)
class Remembers:
    """Starts from where it was: what it returns depends on all that its client did before."""

    def train(self, space, message, loss, batches, memory, *, generator):
        count, trace = (0, torch.zeros(space.shape)) if memory is None else (memory["count"], memory["trace"])
        step = torch.randn(space.shape, generator=generator)
        if count % 4 == 3:
            raise DivergenceError(f"the loss is nan in task {count}")
        trace = 0.5 * trace + step
        return Payload((message.start + 0.01 * trace)[None], 10, client_state={"count": count + 1, "trace": trace})


LOCAL = trainers.Local(epochs=1, rate=0.05)


@dataclass(frozen=True)
class WritesIt:
    """Writes whatever it is given, and sometimes stops in the middle of that."""

    def train(self, space, message, loss, batches, memory, *, generator):
        point = message.start
        point += 0.1
        trace = torch.zeros(space.shape) if memory is None else memory["trace"]
        trace.mul_(0.5).add_(torch.randn(space.shape, generator=generator))
        for tensor in message.buffers.values():
            tensor.add_(1)
        if float(torch.rand((), generator=generator)) < 0.2:
            raise DivergenceError("the loss is nan")
        return Payload((point + 0.01 * trace)[None], 10, buffers=message.buffers, client_state={"trace": trace})


@dataclass(frozen=True)
class DrawsLater:
    """Draws from torch's own generator, but not in its first task."""

    def train(self, space, message, loss, batches, memory, *, generator):
        step = 0 if memory is None else torch.randn(space.shape)
        buffers = {name: message.buffers[name] for name in message.requested_buffers}
        return Payload((message.start + 0.01 * step)[None], 10, buffers=buffers, client_state=1)


def normalised():
    """A mean over so many values that torch would sum it in several threads."""
    made = clouds(120)
    wide = torch.rand(120, 2000, generator=torch.Generator().manual_seed(0)) + 5
    inputs = made.inputs + ((wide - wide.mean()) / wide.std())[:, :2]
    return LabelledDataset("normalised", inputs, made.labels, model, 0.9)


def uniform(clients):
    return GeneralizedAsyncSGD({client: 1 / len(clients) for client in clients}, rate=0.05)


METHODS = {
    "fedasync": Method("fedasync", FedAsync(0.5), LOCAL),
    "fedavg": Method("fedavg", FedAvg(cohort=3), LOCAL),
    "defedavg": Method("defedavg", DeFedAvg(cohort=2), LOCAL),
    "routed": Method("routed", uniform, trainers.Gradient()),
    "orthofl": Method("orthofl", OrthoFL(protocol="client"), trainers.Calibrated(LOCAL)),
    "remembers": Method("remembers", FedAsync(0.5), Remembers()),
    "remembers, drawn": Method("remembers, drawn", DeFedAvg(cohort=2), Remembers()),
}


def queues(clients, generator):
    count = len(clients)
    return JacksonNetwork([1 / count] * count, [1.0 + client for client in clients], generator, concurrency=20)


def comes_and_goes(clients, generator):
    return churn(clients, Exponential(60.0), Exponential(30.0), 400.0, generator)


WORKLOADS = {
    "plain": {},
    "queues": {"scheduler": queues},
    "churn": {"availability": comes_and_goes},
}


@dataclass(frozen=True)
class Fails:
    """Raises for clients with so many samples; trains the others."""

    error: Exception
    samples: tuple[int, ...]

    def train(self, space, message, loss, batches, memory, *, generator):
        if batches.samples in self.samples:
            raise self.error
        return LOCAL.train(space, message, loss, batches, memory, generator=generator)


@dataclass(frozen=True)
class Dies:
    """Kills its process at the sight of a client, known by its samples: once, if there is a file to remember it by."""

    samples: int
    file: str | None = None

    def train(self, space, message, loss, batches, memory, *, generator):
        if batches.samples == self.samples and not (self.file and Path(self.file).exists()):
            if self.file:
                Path(self.file).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return LOCAL.train(space, message, loss, batches, memory, generator=generator)


@dataclass(frozen=True)
class Sleeps:
    """Says in a file that this process has begun, and never ends."""

    folder: str

    def train(self, space, message, loss, batches, memory, *, generator):
        (Path(self.folder) / str(os.getpid())).touch()
        time.sleep(600)


class Shuffled(Executor):
    """One thread that takes what waits in a random order."""

    def __init__(self, seed, workers=None):
        self._random = random.Random(seed)
        self._tasks = []
        self._news = threading.Condition()
        self._open = True
        if workers is not None:
            self._max_workers = workers
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        with self._news:
            self._tasks.append((future, partial(fn, *args, **kwargs)))
            self._news.notify()
        return future

    def shutdown(self, wait=True, *, cancel_futures=False):
        with self._news:
            self._open = False
            self._news.notify()
        if wait:
            self._thread.join()

    def _work(self):
        while True:
            with self._news:
                while not self._tasks:
                    if not self._open:
                        return
                    self._news.wait()
                future, call = self._tasks.pop(self._random.randrange(len(self._tasks)))
            if future.set_running_or_notify_cancel():
                self._do(future, call)

    def _do(self, future, call):
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)


class Posted(Shuffled):
    """Sends everything there and back as bytes, as to another process."""

    sizes: list[int]

    def submit(self, fn, /, *args, **kwargs):
        self.sizes = getattr(self, "sizes", [])
        future = Future()
        try:
            data = pickle.dumps((fn, args))
        except Exception as error:
            future.set_exception(error)
            return future
        self.sizes.append(len(data))
        return super().submit(_posted, data)

    def _do(self, future, call):
        try:
            future.set_result(pickle.loads(call()))
        except BaseException as error:
            future.set_exception(error)


def _posted(data):
    fn, args = pickle.loads(data)
    return pickle.dumps(fn(*args))


class Breaks(Shuffled):
    """Breaks with the task of one client; with all that come after it too."""

    def __init__(self, seed, fatal, workers=2):
        self.fatal = fatal
        self.broken = False
        super().__init__(seed, workers)

    def submit(self, fn, /, *args, **kwargs):
        if self.broken:
            raise BrokenProcessPool("broken before")
        return super().submit(self._call, fn, *args)

    def _call(self, fn, envelope):
        self.broken = self.broken or self.fatal(envelope.open_task().task_id)
        if self.broken:
            raise BrokenProcessPool("a process was killed")
        return fn(envelope)


class Listed:
    """A task order that is given."""

    def __init__(self, keys):
        self.keys = list(keys)

    def next_tasks(self, limit):
        return self.keys[:limit]


def message(of, size=None):
    """The initial model; of any size for trainers that do not look at it."""
    from manifoldagg.manifolds import ParameterSpace

    made = of.model()
    return Message(ParameterSpace.of(made).point(made)) if size is None else Message(torch.zeros(size))


@dataclass(frozen=True)
class Fixed:
    """Draws in torch's default dtype."""

    def train(self, space, message, loss, batches, memory, *, generator):
        drawn = torch.rand(message.start.shape, generator=generator)
        return Payload((message.start + drawn)[None], 1)


@dataclass(frozen=True)
class Carries:
    """Retains a part of the model in so many tensors, and returns the model with a small change."""

    tensors: int

    def train(self, space, message, loss, batches, memory, *, generator):
        point = message.start
        point += 1e-3 * torch.rand((), generator=generator) if memory is None else 1e-3 * memory[0][0]
        return Payload(point[None], 1, client_state=list(point.clone().chunk(self.tensors)))


def linear(parameters):
    return nn.Linear(2, parameters // 3, bias=True)


def wide(parameters):
    """A federation of a model with so many parameters."""
    made = clouds()
    return FederatedDataset.split(
        LabelledDataset("wide", made.inputs, made.labels, partial(linear, parameters), 0.9),
        5,
        partition=iid_partition,
        seed=0,
    )


@dataclass(frozen=True)
class DiesOnceSent:
    """Kills its process once, directly after it has written a result into the pipe."""

    file: str

    def train(self, space, message, loss, batches, memory, *, generator):
        if not Path(self.file).exists():
            Path(self.file).touch()
            put = SimpleQueue.put
            SimpleQueue.put = lambda queue, obj: (put(queue, obj), os.kill(os.getpid(), signal.SIGKILL))
        return Carries(3).train(space, message, loss, batches, memory, generator=generator)


@dataclass(frozen=True)
class DiesWhenCollected:
    """Kills its Dask worker once, when the scheduler collects the first result from this worker."""

    file: str

    def train(self, space, message, loss, batches, memory, *, generator):
        if not Path(self.file).exists():
            from distributed import get_worker

            async def die(*args, **kwargs):
                Path(self.file).touch()
                os.kill(os.getpid(), signal.SIGKILL)

            get_worker().handlers["get_data"] = die
        return Carries(3).train(space, message, loss, batches, memory, generator=generator)
