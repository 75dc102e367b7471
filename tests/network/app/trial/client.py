"""The clients of the app: an unmodified ClientApp, `client_app`, and clients that fail."""

import json
import time

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy

from manifoldagg.federated.clients import Local
from manifoldagg.integrations.flower import client_app
from manifoldagg.integrations.flower.records import bytes_to_record
from trial.digits import TASK, note, part, right

torch.set_num_threads(1)
app = ClientApp()


def learn(message: Message, context: Context) -> tuple[dict[str, torch.Tensor], int]:
    """Train three epochs on the samples of a node, like any ClientApp."""
    model = TASK.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, labels = part(int(context.node_config["partition-id"]), int(context.run_config["nodes"]))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(3):
        for index in torch.randperm(len(labels)).split(16):
            optimizer.zero_grad()
            cross_entropy(model(inputs[index]), labels[index]).backward()
            optimizer.step()
    return dict(model.state_dict()), len(labels)


def batches(context: Context, nth: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of a node for `client_app`."""
    inputs, labels = part(int(context.node_config["partition-id"]), int(context.run_config["nodes"]))
    return list(zip(inputs.split(16), labels.split(16), strict=True))


ours = client_app(Local(epochs=3, rate=3e-3), TASK.model, batches)


def lie(state: dict[str, torch.Tensor], told: int) -> dict[str, ArrayRecord]:
    """Return one of several invalid or malicious updates, in turn."""
    (name, first), *rest = state.items()
    kinds = {
        "nan": lambda: {"arrays": ArrayRecord({name: first * torch.nan, **dict(rest)})},
        "shape": lambda: {"arrays": ArrayRecord({name: first.flatten()[1:], **dict(rest)})},
        "missing": lambda: {"arrays": ArrayRecord(dict(rest))},
        "junk": lambda: {"manifoldagg": junk(bytes(range(256)))},
        "huge": lambda: {"manifoldagg": junk((2**62).to_bytes(8, "little") + b"{}")},
    }
    return list(kinds.values())[told % len(kinds)]()


def junk(data: bytes) -> ArrayRecord:
    """Return a record of bytes that claims to contain a packed payload."""
    return bytes_to_record(data)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on a node and return its reply. A node that must fail sleeps during its second task."""
    config = context.run_config
    number, folder = int(context.node_config["partition-id"]), str(config["folder"])
    nth = int(context.state["told"]["nth"]) if "told" in context.state else 0
    context.state["told"] = MetricRecord({"nth": nth + 1})
    line = json.dumps({"node": context.node_id, "nth": nth})
    note(folder, f"asked-{number}", line)
    if number in (config["killed"], config["hung"]) and nth == 1:
        time.sleep(20)  # The test kills or stops the node during this task.
    if number % 2:
        answer = ours(message, context)
    else:
        state, samples = learn(message, context)
        records = lie(state, nth) if number == config["liar"] else {"arrays": ArrayRecord(state)}
        metrics = MetricRecord({"num-examples": samples, "nth": nth})
        answer = Message(content=RecordDict({**records, "metrics": metrics}), reply_to=message)
    note(folder, f"given-{number}", line)
    return answer


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate a model on a node."""
    model = TASK.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    metrics = MetricRecord({"num-examples": 1, "accuracy": right(model)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)
