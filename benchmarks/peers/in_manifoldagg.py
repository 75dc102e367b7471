"""The shared workload in `manifoldagg.simulation.run`: `in_manifoldagg.py WORK STARTED`."""

from functools import partial

import equal

import manifoldagg
from manifoldagg.experiments import load_dataset
from manifoldagg.federated import clients
from manifoldagg.federated.rules import FedAvg
from manifoldagg.simulation import FederatedDataset, Method, dirichlet_partition, processes, run


def main() -> None:
    """Run all rounds in one call."""
    work, clock = equal.read()
    answers = (work.warm + work.rounds) * work.cohort
    federation = FederatedDataset.split(
        load_dataset("digits"), len(work.train), partition=partial(dirichlet_partition, concentration=0.5), seed=0
    )
    if [part.tolist() for part in federation.train] != work.train:
        raise RuntimeError("the work is of another split")
    method = Method("FedAvg", FedAvg(cohort=work.cohort), clients.Local(steps=work.steps, rate=work.rate))
    answered = 0

    def progress() -> None:
        nonlocal answered
        answered += 1
        if answered % work.cohort == 0:
            clock.mark()

    executor = None if work.jobs == 1 else processes(work.jobs)
    clock.mark()
    run(federation, method, num_updates=answers, eval_every=answers, executor=executor, progress=progress)
    clock.report(engine="manifoldagg", version=manifoldagg.__version__)


if __name__ == "__main__":
    main()
