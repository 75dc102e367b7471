"""Where models live: manifolds whose points are tensors."""

from manifoldagg.manifolds.flat import Flat
from manifoldagg.manifolds.hyperbolic import Lorentz, PoincareBall
from manifoldagg.manifolds.layout import MASTER_DTYPES, Entry, Layout
from manifoldagg.manifolds.manifold import PRIMITIVES, Manifold
from manifoldagg.manifolds.mean import Mean, karcher_mean
from manifoldagg.manifolds.operations import distance, geodesic, norm, pole_ladder, schild_ladder
from manifoldagg.manifolds.parameters import Loss, ParameterSpace
from manifoldagg.manifolds.product import Product
from manifoldagg.manifolds.rotations import SpecialOrthogonal
from manifoldagg.manifolds.sphere import Sphere
from manifoldagg.manifolds.symmetric import SymmetricPositiveDefinite

__all__ = [
    "MASTER_DTYPES",
    "PRIMITIVES",
    "Entry",
    "Flat",
    "Layout",
    "Lorentz",
    "Loss",
    "Manifold",
    "Mean",
    "ParameterSpace",
    "PoincareBall",
    "Product",
    "SpecialOrthogonal",
    "Sphere",
    "SymmetricPositiveDefinite",
    "distance",
    "geodesic",
    "karcher_mean",
    "norm",
    "pole_ladder",
    "schild_ladder",
]
