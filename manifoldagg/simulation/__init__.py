"""Discrete-event simulation of federated learning: virtual time, task durations, schedulers, traces and runs."""

from manifoldagg.simulation.availability import AvailabilityChange, AvailabilityTrace, churn
from manifoldagg.simulation.client_task import ClientTask, run_task
from manifoldagg.simulation.clock import VirtualClock
from manifoldagg.simulation.cost import Evaluation
from manifoldagg.simulation.dataset import Batches, FederatedDataset, LabelledDataset, TaskId
from manifoldagg.simulation.delays import (
    Delay,
    Deterministic,
    Empirical,
    Exponential,
    Gaussian,
    HalfNormal,
    LogNormal,
    Uniform,
    assign_profiles,
)
from manifoldagg.simulation.engine import UpdateEvent, run
from manifoldagg.simulation.evaluation import gini, theil
from manifoldagg.simulation.executors import RestartingExecutor, processes
from manifoldagg.simulation.fitted_delays import PerTask, fit_profiles
from manifoldagg.simulation.jackson import JacksonNetwork
from manifoldagg.simulation.method import Method, RunResult
from manifoldagg.simulation.metrics import Metric, accuracy, macro_auprc, macro_auroc
from manifoldagg.simulation.partitions import (
    Partition,
    cyclic_partition,
    dirichlet_partition,
    disjoint_partition,
    grouped_partition,
    iid_partition,
    natural_partition,
    shards_partition,
    sizes_partition,
)
from manifoldagg.simulation.schedulers import Completion, IndependentClients, PriorityScheduler, Scheduler
from manifoldagg.simulation.trace import ReplayScheduler, TaskRecord, read_trace, write_trace

__all__ = [
    "AvailabilityChange",
    "AvailabilityTrace",
    "Batches",
    "ClientTask",
    "Completion",
    "Delay",
    "Deterministic",
    "Empirical",
    "Evaluation",
    "Exponential",
    "FederatedDataset",
    "Gaussian",
    "HalfNormal",
    "IndependentClients",
    "JacksonNetwork",
    "LabelledDataset",
    "LogNormal",
    "Method",
    "Metric",
    "Partition",
    "PerTask",
    "PriorityScheduler",
    "ReplayScheduler",
    "RestartingExecutor",
    "RunResult",
    "Scheduler",
    "TaskId",
    "TaskRecord",
    "Uniform",
    "UpdateEvent",
    "VirtualClock",
    "accuracy",
    "assign_profiles",
    "churn",
    "cyclic_partition",
    "dirichlet_partition",
    "disjoint_partition",
    "fit_profiles",
    "gini",
    "grouped_partition",
    "iid_partition",
    "macro_auprc",
    "macro_auroc",
    "natural_partition",
    "processes",
    "read_trace",
    "run",
    "run_task",
    "shards_partition",
    "sizes_partition",
    "theil",
    "write_trace",
]
