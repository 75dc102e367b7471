"""When things happen: a virtual clock, delays, schedulers, traces, and runs of several methods beside one another."""

from manifoldagg.simulation.availability import Change, Participation, churn
from manifoldagg.simulation.clock import VirtualClock
from manifoldagg.simulation.cost import Evaluation
from manifoldagg.simulation.dataset import Batches, Task
from manifoldagg.simulation.delays import (
    Delay,
    Deterministic,
    Exponential,
    Gaussian,
    HalfNormal,
    LogNormal,
    Uniform,
)
from manifoldagg.simulation.empirical_delays import Empirical, assign
from manifoldagg.simulation.engine import Event
from manifoldagg.simulation.executors.client_task import Errand, perform
from manifoldagg.simulation.executors.executor import Workers, processes
from manifoldagg.simulation.fairness import gini, theil
from manifoldagg.simulation.federated_dataset import Federation, Key
from manifoldagg.simulation.jackson import JacksonNetwork
from manifoldagg.simulation.partitions import (
    Partition,
    cyclic_partition,
    dirichlet_partition,
    disjoint_partition,
    iid_partition,
    natural_partition,
    shards_partition,
)
from manifoldagg.simulation.priority import PriorityScheduler
from manifoldagg.simulation.replay import Replay
from manifoldagg.simulation.run import Method, Run, run
from manifoldagg.simulation.schedulers import Completion, IndependentClients, Scheduler
from manifoldagg.simulation.trace import Record, read_trace, write_trace

__all__ = [
    "Batches",
    "Change",
    "Completion",
    "Delay",
    "Deterministic",
    "Empirical",
    "Errand",
    "Evaluation",
    "Event",
    "Exponential",
    "Federation",
    "Gaussian",
    "HalfNormal",
    "IndependentClients",
    "JacksonNetwork",
    "Key",
    "LogNormal",
    "Method",
    "Participation",
    "Partition",
    "PriorityScheduler",
    "Record",
    "Replay",
    "Run",
    "Scheduler",
    "Task",
    "Uniform",
    "VirtualClock",
    "Workers",
    "assign",
    "churn",
    "cyclic_partition",
    "dirichlet_partition",
    "disjoint_partition",
    "gini",
    "iid_partition",
    "natural_partition",
    "perform",
    "processes",
    "read_trace",
    "run",
    "shards_partition",
    "theil",
    "write_trace",
]
