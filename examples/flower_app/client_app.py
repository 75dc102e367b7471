"""The ClientApp: each node trains on its own digits with the trainer of the method."""

import torch
from task import federation_of, method_of

from manifoldagg.experiments import load_dataset
from manifoldagg.integrations.flower import client_app


def trainer(context):
    """Return the trainer of the method."""
    return method_of(context.run_config, context.node_config["num-partitions"]).trainer


def data(context, nth):
    """Return the minibatches of the node's n-th task; each task has another order."""
    federation = federation_of(context.run_config, context.node_config["num-partitions"])
    return federation.batches(context.node_config["partition-id"], nth)


def evaluate(model, context):
    """Return the accuracy on the node's held-out digits."""
    federation = federation_of(context.run_config, context.node_config["num-partitions"])
    held_out = federation.held_out[context.node_config["partition-id"]]
    with torch.no_grad():
        predicted = model(federation.dataset.inputs[held_out]).argmax(1)
    num_correct = (predicted == federation.dataset.labels[held_out]).sum().item()
    return {"accuracy": num_correct / max(len(held_out), 1), "num-examples": len(held_out)}


app = client_app(trainer, load_dataset("digits").model, data, evaluate=evaluate)
