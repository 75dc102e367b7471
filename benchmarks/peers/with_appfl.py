"""The recipe with APPFL's asynchronous scheduler and the calls of its server agent, without a network."""

import logging
import runpy
import sys

import torch
from appfl.algorithm.scheduler import AsyncScheduler
from omegaconf import OmegaConf

Corrected = runpy.run_path(sys.argv[1])["Corrected"]


def trained(model):
    return {name: x + 0.1 * torch.rand_like(x) for name, x in model.items()}


def main():
    torch.manual_seed(0)
    aggregator = Corrected(torch.nn.Linear(3, 2), OmegaConf.create({}), logging.getLogger("appfl"))
    scheduler = AsyncScheduler(OmegaConf.create({"num_clients": 3}), aggregator, logging.getLogger("appfl"))
    for i, client in enumerate("abc"):
        aggregator.set_client_sample_size(client, 10 + i)
    # All clients start from the same model, which the scheduler returns after the last request.
    asked = [scheduler.get_parameters(client_id=client, init_model=True) for client in "abc"]
    models = {client: future.result() for client, future in zip("abc", asked, strict=True)}
    told = []
    submit = aggregator.versions.submit

    def listened(*args, **named):
        told.append(submit(*args, **named))
        return told[-1]

    aggregator.versions.submit = listened
    for client in "abacba":
        models[client] = scheduler.schedule(client, trained(models[client]))
    assert [numbers["staleness"] for numbers in told] == [0, 1, 1, 3, 2, 2]
    # A client that fetches the model again starts from the current model.
    scheduler.get_parameters(client_id="b", init_model=False)
    scheduler.schedule("b", trained(aggregator.versions.model))
    assert told[-1]["staleness"] == 0
    assert scheduler.get_num_global_epochs() == aggregator.versions.version == 7
    print(f"APPFL: {len(told)} answers, up to {max(numbers['staleness'] for numbers in told)} versions late")


if __name__ == "__main__":
    main()
