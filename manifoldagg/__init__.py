"""Geometry for asynchronous federated optimisation: correct stale updates, step along learned curves, average.

A stale update is *corrected* into the tangent space of the current model, the model *steps* along the curve
that the update describes, and the models of a run are *averaged*. The packages below are attributes, loaded when they
are first touched: `manifoldagg.averaging`, `.corrections`, `.curves`, `.federated`, `.kernels`, `.manifolds`,
`.routing`, `.simulation`, `.testing`, and `.rules` for `manifoldagg.federated.rules`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from manifoldagg.curves import Bezier, Fit, fit
from manifoldagg.errors import ManifoldAggError
from manifoldagg.federated import Server, aggregate
from manifoldagg.manifolds import ParameterSpace

_LATER = {
    "averaging": "manifoldagg.averaging",
    "corrections": "manifoldagg.corrections",
    "routing": "manifoldagg.routing",
    "rules": "manifoldagg.federated.rules",
    "simulation": "manifoldagg.simulation",
    "testing": "manifoldagg.testing",
}

if TYPE_CHECKING:
    from manifoldagg import averaging as averaging
    from manifoldagg import corrections as corrections
    from manifoldagg import curves as curves
    from manifoldagg import federated as federated
    from manifoldagg import kernels as kernels
    from manifoldagg import manifolds as manifolds
    from manifoldagg import routing as routing
    from manifoldagg import simulation as simulation
    from manifoldagg import testing as testing
    from manifoldagg.federated import rules as rules
else:

    def __getattr__(name: str) -> Any:
        if name in _LATER:
            return import_module(_LATER[name])
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"
__all__ = ["Bezier", "Fit", "ManifoldAggError", "ParameterSpace", "Server", "aggregate", "fit"]


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
