"""When things happen: a virtual clock, delays, schedulers, traces, and runs of several methods beside one another."""

from manifoldagg.simulation.clock import VirtualClock
from manifoldagg.simulation.delays import Delay, Deterministic, Exponential, Gaussian, HalfNormal, LogNormal, Uniform
from manifoldagg.simulation.errands import Errand, perform
from manifoldagg.simulation.fairness import gini, theil
from manifoldagg.simulation.federation import Federation, Key
from manifoldagg.simulation.gantt import draw_trace
from manifoldagg.simulation.jackson import JacksonNetwork
from manifoldagg.simulation.measurements import Empirical, assign
from manifoldagg.simulation.participation import Change, Participation, churn
from manifoldagg.simulation.partitions import (
    Partition,
    cyclic_partition,
    dirichlet_partition,
    disjoint_partition,
    iid_partition,
    shards_partition,
)
from manifoldagg.simulation.priority import PriorityScheduler
from manifoldagg.simulation.readers import images, read_idx
from manifoldagg.simulation.replay import Replay
from manifoldagg.simulation.run import Event, Method, Run, run
from manifoldagg.simulation.schedulers import Completion, IndependentClients, Scheduler
from manifoldagg.simulation.tasks import Batches, Task, task
from manifoldagg.simulation.trace import Record, read_trace, write_trace
from manifoldagg.simulation.workers import Workers, processes

__all__ = [
    "Batches",
    "Change",
    "Completion",
    "Delay",
    "Deterministic",
    "Empirical",
    "Errand",
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
    "draw_trace",
    "gini",
    "iid_partition",
    "images",
    "perform",
    "processes",
    "read_idx",
    "read_trace",
    "run",
    "shards_partition",
    "task",
    "theil",
    "write_trace",
]
