"""`Asynchronous`: runs on Flower's own grid and link state, with nodes that are threads."""

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from manifoldagg.federated import rules
from manifoldagg.integrations.flower import Asynchronous
from tests.integrations.engine import running


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def plain_app(train):
    """An app as Flower's users write it, around what is done with a state dict."""
    app = ClientApp()

    @app.train()
    def training(message, context):
        state = message.content["arrays"].to_torch_state_dict()
        arrays = ArrayRecord(train(state, context.node_config["partition-id"]))
        metrics = MetricRecord({"num-examples": 10, "loss": 0.5})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluating(message, context):
        part = context.node_config["partition-id"]
        metrics = MetricRecord({"num-examples": part + 1, "part": part})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def towards_one(state, part):
    return {name: torch.ones_like(x) if x.is_floating_point() else x + 1 for name, x in state.items()}


@pytest.mark.filterwarnings("ignore:model")
def test_an_unmodified_app_runs_for_so_many_rounds():
    torch.manual_seed(0)
    seen = []

    def look(number, arrays):
        seen.append(number)
        return MetricRecord({"tensors": len(arrays)})

    strategy = Asynchronous(rules.FedAsync(rate=0.5), model=Net)
    with running(plain_app(towards_one), 3) as engine:
        result = strategy.start(engine.grid, ArrayRecord(Net().state_dict()), num_rounds=2, evaluate_fn=look)
    assert seen == [0, 1, 2]
    assert (strategy.server.updates, strategy.server.version) == (6, 6)
    assert result.train_metrics_clientapp == {n: MetricRecord({"loss": 0.5}) for n in (1, 2)}
    assert {n: x["part"] for n, x in result.evaluate_metrics_clientapp.items()} == {
        n: pytest.approx((0 * 1 + 1 * 2 + 2 * 3) / 6) for n in (1, 2)
    }
    assert set(result.evaluate_metrics_serverapp) == {0, 1, 2}
    model = Net()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    assert model[1].num_batches_tracked.dtype is torch.int64
