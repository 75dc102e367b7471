"""Torch optimizers that apply server rules, as outer optimizers of training across data centres."""

from manifoldagg.optim.outer import Outer

__all__ = ["Outer"]
