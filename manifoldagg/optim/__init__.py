"""Optimisers for hosts that speak torch: rules as outer optimisers of training across data centres."""

from manifoldagg.optim.outer import Outer

__all__ = ["Outer"]
