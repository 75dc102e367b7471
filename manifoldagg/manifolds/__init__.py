"""Riemannian manifolds whose points are tensors, and spaces of the parameters of models."""

from typing import TYPE_CHECKING, Any

from manifoldagg.manifolds.flat import Flat
from manifoldagg.manifolds.grassmann import Grassmann
from manifoldagg.manifolds.hyperbolic import Lorentz, PoincareBall
from manifoldagg.manifolds.layout import Layout
from manifoldagg.manifolds.lora.lowrank import LowRank
from manifoldagg.manifolds.loss import Loss, ModelLoss
from manifoldagg.manifolds.manifold import PRIMITIVES, Leaf, Manifold
from manifoldagg.manifolds.mean import KarcherMean, RunningMean, karcher_mean
from manifoldagg.manifolds.operations import distance, geodesic, norm, pole_ladder, schild_ladder
from manifoldagg.manifolds.optimizers import RiemannianAdam, RiemannianSGD
from manifoldagg.manifolds.parameters import ParameterSpace
from manifoldagg.manifolds.power import Power
from manifoldagg.manifolds.product import Product
from manifoldagg.manifolds.rotations import SpecialOrthogonal
from manifoldagg.manifolds.sphere import Sphere
from manifoldagg.manifolds.stiefel import Stiefel
from manifoldagg.manifolds.symmetric import SymmetricPositiveDefinite
from manifoldagg.manifolds.validate import Validated, check_point, check_tangent

if TYPE_CHECKING:
    from manifoldagg.manifolds.geoopt import from_geoopt

__all__ = [
    "PRIMITIVES",
    "Flat",
    "Grassmann",
    "KarcherMean",
    "Layout",
    "Leaf",
    "Lorentz",
    "Loss",
    "LowRank",
    "Manifold",
    "ModelLoss",
    "ParameterSpace",
    "PoincareBall",
    "Power",
    "Product",
    "RiemannianAdam",
    "RiemannianSGD",
    "RunningMean",
    "SpecialOrthogonal",
    "Sphere",
    "Stiefel",
    "SymmetricPositiveDefinite",
    "Validated",
    "check_point",
    "check_tangent",
    "distance",
    "from_geoopt",
    "geodesic",
    "karcher_mean",
    "norm",
    "pole_ladder",
    "schild_ladder",
]


def __getattr__(name: str) -> Any:
    """Import `from_geoopt` on first access, because importing geoopt is slow."""
    if name == "from_geoopt":
        from manifoldagg.manifolds.geoopt import from_geoopt

        return from_geoopt
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
