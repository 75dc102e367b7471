"""Torch optimizers: rules as outer optimizers of training across data centres."""

from manifoldagg.optim.outer import Outer

__all__ = ["Outer"]
