"""Outer optimizers: server rules as PyTorch optimizers, for training across data centres."""

from manifoldagg.optim.outer import Outer

__all__ = ["Outer"]
