"""A node: it trains on its own digits, as the method says, and is marked on those that it held out."""

import torch
from task import federation_of, method_of

from manifoldagg.experiments import load_dataset
from manifoldagg.integrations.flower import client_app


def trainer(context):
    """What the method does with a message."""
    return method_of(context.run_config, context.node_config["num-partitions"]).trainer


def data(context, nth):
    """Minibatches of this node's digits, in another order for each of its tasks."""
    federation = federation_of(context.run_config, context.node_config["num-partitions"])
    return federation.batches(context.node_config["partition-id"], nth)


def evaluate(model, context):
    """The accuracy on what this node held out."""
    federation = federation_of(context.run_config, context.node_config["num-partitions"])
    held_out = federation.held_out[context.node_config["partition-id"]]
    with torch.no_grad():
        guess = model(federation.dataset.inputs[held_out]).argmax(1)
    right = (guess == federation.dataset.labels[held_out]).sum().item()
    return {"accuracy": right / max(len(held_out), 1), "num-examples": len(held_out)}


app = client_app(trainer, load_dataset("digits").model, data, evaluate=evaluate)
