"""The clients. Nodes with even numbers use a plain `ClientApp`, and nodes with odd numbers use `client_app`."""

import json
import time

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy

from manifoldagg.federated.clients import Local
from manifoldagg.integrations.flower import client_app
from manifoldagg.integrations.flower.records import bytes_to_record
from trial.digits import TASK, append_line, client_samples, test_accuracy

torch.set_num_threads(1)
app = ClientApp()


def learn(message: Message, context: Context) -> tuple[dict[str, torch.Tensor], int]:
    """Train for three epochs in plain PyTorch. Return the state dict and the number of samples."""
    model = TASK.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, labels = client_samples(int(context.node_config["partition-id"]), int(context.run_config["nodes"]))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(3):
        for index in torch.randperm(len(labels)).split(16):
            optimizer.zero_grad()
            cross_entropy(model(inputs[index]), labels[index]).backward()
            optimizer.step()
    return dict(model.state_dict()), len(labels)


def batches(context: Context, task_index: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the minibatches of a node for `client_app`."""
    inputs, labels = client_samples(int(context.node_config["partition-id"]), int(context.run_config["nodes"]))
    return list(zip(inputs.split(16), labels.split(16), strict=True))


train_with_library = client_app(Local(epochs=3, rate=3e-3), TASK.model, batches)


def invalid_records(state: dict[str, torch.Tensor], task_index: int) -> dict[str, ArrayRecord]:
    """Return an invalid update. Its kind depends on the index of the task."""
    (name, first), *rest = state.items()
    kinds = {
        "nan": lambda: {"arrays": ArrayRecord({name: first * torch.nan, **dict(rest)})},
        "shape": lambda: {"arrays": ArrayRecord({name: first.flatten()[1:], **dict(rest)})},
        "missing": lambda: {"arrays": ArrayRecord(dict(rest))},
        "no message": lambda: {"manifoldagg": bytes_to_record(bytes(range(256)))},
        "huge header": lambda: {"manifoldagg": bytes_to_record((2**62).to_bytes(8, "little") + b"{}")},
    }
    return list(kinds.values())[task_index % len(kinds)]()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train for one task. The nodes `killed` and `stopped` sleep in their second task."""
    config = context.run_config
    number, folder = int(context.node_config["partition-id"]), str(config["folder"])
    task_index = int(context.state["tasks"]["count"]) if "tasks" in context.state else 0
    context.state["tasks"] = MetricRecord({"count": task_index + 1})
    line = json.dumps({"node": context.node_id, "task_index": task_index})
    append_line(folder, f"received-{number}", line)
    if number in (config["killed"], config["stopped"]) and task_index == 1:
        time.sleep(20)  # The test kills or stops the node during this time.
    if number % 2:
        reply = train_with_library(message, context)
    else:
        state, samples = learn(message, context)
        records = (
            invalid_records(state, task_index) if number == config["malicious"] else {"arrays": ArrayRecord(state)}
        )
        metrics = MetricRecord({"num-examples": samples, "task-index": task_index})
        reply = Message(content=RecordDict({**records, "metrics": metrics}), reply_to=message)
    append_line(folder, f"sent-{number}", line)
    return reply


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate a model."""
    model = TASK.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    metrics = MetricRecord({"num-examples": 1, "accuracy": test_accuracy(model)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)
