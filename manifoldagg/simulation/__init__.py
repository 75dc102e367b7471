"""When things happen: a virtual clock, schedulers, partitions, and runs of several methods beside one another."""

from manifoldagg.simulation.clock import VirtualClock
from manifoldagg.simulation.fairness import gini, theil
from manifoldagg.simulation.partitions import dirichlet_partition
from manifoldagg.simulation.readers import images, read_idx
from manifoldagg.simulation.run import Event, Federation, Method, Run, run
from manifoldagg.simulation.schedulers import Completion, PriorityScheduler
from manifoldagg.simulation.tasks import Batches, Task, task

__all__ = [
    "Batches",
    "Completion",
    "Event",
    "Federation",
    "Method",
    "PriorityScheduler",
    "Run",
    "Task",
    "VirtualClock",
    "dirichlet_partition",
    "gini",
    "images",
    "read_idx",
    "run",
    "task",
    "theil",
]
