"""The data set, the model, and a log file for the test."""

import os

import numpy as np
import torch

from manifoldagg.experiments import load_dataset

__all__ = ["TASK", "TEST", "append_line", "client_samples", "test_accuracy"]

TASK = load_dataset("digits")
ORDER = np.random.default_rng(0).permutation(len(TASK.labels))
TEST = ORDER[:360]


def client_samples(number: int, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and labels of a node."""
    index = torch.from_numpy(ORDER[360:][number::nodes])
    return TASK.inputs[index], TASK.labels[index]


@torch.no_grad()
def test_accuracy(model: torch.nn.Module) -> float:
    """Return the accuracy of a model on the test set."""
    model.eval()
    return (model(TASK.inputs[TEST]).argmax(1) == TASK.labels[TEST]).float().mean().item()


def append_line(folder: str, name: str, line: str) -> None:
    """Append a line to a file with one write, so that lines of several processes do not mix."""
    file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{line}\n".encode())
    os.close(file)
