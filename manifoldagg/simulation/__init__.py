"""When things happen: a virtual clock, delays, schedulers, traces, and runs of several methods beside one another."""

from manifoldagg.simulation.clocks.clock import VirtualClock
from manifoldagg.simulation.clocks.delays import (
    Delay,
    Deterministic,
    Exponential,
    Gaussian,
    HalfNormal,
    LogNormal,
    Uniform,
)
from manifoldagg.simulation.clocks.gantt import draw_trace
from manifoldagg.simulation.clocks.jackson import JacksonNetwork
from manifoldagg.simulation.clocks.measurements import Empirical, assign
from manifoldagg.simulation.clocks.participation import Change, Participation, churn
from manifoldagg.simulation.clocks.priority import PriorityScheduler
from manifoldagg.simulation.clocks.replay import Replay
from manifoldagg.simulation.clocks.schedulers import Completion, IndependentClients, Scheduler
from manifoldagg.simulation.clocks.trace import Record, read_trace, write_trace
from manifoldagg.simulation.data.partitions import (
    Partition,
    cyclic_partition,
    dirichlet_partition,
    disjoint_partition,
    iid_partition,
    natural_partition,
    shards_partition,
)
from manifoldagg.simulation.data.readers import images, read_idx
from manifoldagg.simulation.data.sets import task
from manifoldagg.simulation.data.tasks import Batches, Task
from manifoldagg.simulation.fairness import gini, theil
from manifoldagg.simulation.federation import Federation, Key
from manifoldagg.simulation.log import Evaluation
from manifoldagg.simulation.run import Method, Run, run
from manifoldagg.simulation.under_way import Event
from manifoldagg.simulation.workers.errands import Errand, perform
from manifoldagg.simulation.workers.pool import Workers, processes

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
    "draw_trace",
    "gini",
    "iid_partition",
    "images",
    "natural_partition",
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
