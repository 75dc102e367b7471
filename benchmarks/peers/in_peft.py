"""PEFT's own combinations of adapters: `in_peft.py FOLDER KIND` reads `given.pt` and writes `KIND.pt`.

KIND is a `combination_type` of `add_weighted_adapter`. The scaling is 1, so the weights apply to the products of
factors.
"""

import os
import sys
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import torch
from peft import LoraConfig, get_peft_model
from torch import nn


def main(folder: Path, kind: str) -> None:
    """Combine the adapters once, and write the factors and the seconds."""
    torch.set_num_threads(1)
    given = torch.load(folder / "given.pt", weights_only=True)
    (rank, n), m = given[0]["a"].shape, given[0]["b"].shape[0]
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=["q"])
    names = [f"client-{i}" for i in range(len(given))]
    plain = nn.ModuleDict({"q": nn.Linear(n, m, bias=False)})
    model = get_peft_model(plain, config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    layer = model.base_model.model["q"]
    with torch.no_grad():
        for name, state in zip(names, given, strict=True):
            layer.lora_A[name].weight.copy_(state["a"])
            layer.lora_B[name].weight.copy_(state["b"])
        started = time.perf_counter()
        model.add_weighted_adapter(names, [1 / len(given)] * len(given), "mean", combination_type=kind)
        seconds = time.perf_counter() - started
    found = {"a": layer.lora_A["mean"].weight.detach(), "b": layer.lora_B["mean"].weight.detach()}
    torch.save({**found, "seconds": seconds}, folder / f"{kind}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
