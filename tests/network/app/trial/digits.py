"""The data of each node, the test set, and the model of the app."""

import os

import numpy as np
import torch

from manifoldagg.experiments import load_dataset

__all__ = ["TASK", "TEST", "note", "part", "right"]

TASK = load_dataset("digits")
ORDER = np.random.default_rng(0).permutation(len(TASK.labels))
TEST = ORDER[:360]


def part(number: int, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of a node."""
    index = torch.from_numpy(ORDER[360:][number::nodes])
    return TASK.inputs[index], TASK.labels[index]


@torch.no_grad()
def right(model: torch.nn.Module) -> float:
    """Return the accuracy of a model on the test set."""
    model.eval()
    return (model(TASK.inputs[TEST]).argmax(1) == TASK.labels[TEST]).float().mean().item()


def note(folder: str, name: str, line: str) -> None:
    """Append one line to a file atomically."""
    file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{line}\n".encode())
    os.close(file)
