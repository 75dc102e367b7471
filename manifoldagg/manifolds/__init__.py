"""Where models live: manifolds whose points are tensors."""

from manifoldagg.manifolds.flat import Flat
from manifoldagg.manifolds.layout import MASTER_DTYPES, Entry, Layout
from manifoldagg.manifolds.manifold import Manifold
from manifoldagg.manifolds.parameters import Loss, ParameterSpace

__all__ = ["MASTER_DTYPES", "Entry", "Flat", "Layout", "Loss", "Manifold", "ParameterSpace"]
