"""Geometry for asynchronous federated optimisation.

In asynchronous federated learning, a client often returns its update after the model on the server has changed. The
library provides three operations for such updates:

- *Correct*: map a stale client update to the tangent space of the current model.
- *Step*: move the model along the curve that a client update describes.
- *Average*: compute a weighted mean of models.

`import manifoldagg` is fast, because the library loads the names in `__all__` and the following packages only when they
are first accessed: `manifoldagg.averaging`,
`.corrections`, `.curves`, `.errors`, `.experiments`, `.federated`, `.integrations`, `.kernels`, `.manifolds`, `.optim`,
`.routing`, `.simulation`, `.testing`, and `.rules`, which is `manifoldagg.federated.rules`.
"""

TYPE_CHECKING = False  # Type checkers know this name. Importing it from `typing` would slow down the import.

if TYPE_CHECKING:
    from manifoldagg import averaging as averaging
    from manifoldagg import corrections as corrections
    from manifoldagg import curves as curves
    from manifoldagg import errors as errors
    from manifoldagg import experiments as experiments
    from manifoldagg import federated as federated
    from manifoldagg import integrations as integrations
    from manifoldagg import kernels as kernels
    from manifoldagg import manifolds as manifolds
    from manifoldagg import optim as optim
    from manifoldagg import routing as routing
    from manifoldagg import simulation as simulation
    from manifoldagg import testing as testing
    from manifoldagg.averaging import average, average_adapters
    from manifoldagg.curves import Bezier, Fit, fit
    from manifoldagg.errors import ManifoldAggError
    from manifoldagg.federated import AsyncAggregator, Server, UpdateInfo, aggregate
    from manifoldagg.federated import rules as rules
    from manifoldagg.manifolds import ParameterSpace

_PACKAGES = {
    "averaging": "manifoldagg.averaging",
    "corrections": "manifoldagg.corrections",
    "curves": "manifoldagg.curves",
    "errors": "manifoldagg.errors",
    "experiments": "manifoldagg.experiments",
    "federated": "manifoldagg.federated",
    "integrations": "manifoldagg.integrations",
    "kernels": "manifoldagg.kernels",
    "manifolds": "manifoldagg.manifolds",
    "optim": "manifoldagg.optim",
    "routing": "manifoldagg.routing",
    "rules": "manifoldagg.federated.rules",
    "simulation": "manifoldagg.simulation",
    "testing": "manifoldagg.testing",
}
_HOMES = {
    "AsyncAggregator": "federated",
    "Bezier": "curves",
    "Fit": "curves",
    "ManifoldAggError": "errors",
    "ParameterSpace": "manifolds",
    "Server": "federated",
    "UpdateInfo": "federated",
    "aggregate": "federated",
    "average": "averaging",
    "average_adapters": "averaging",
    "fit": "curves",
}

__version__ = "0.1.0"
__all__ = [
    "AsyncAggregator",
    "Bezier",
    "Fit",
    "ManifoldAggError",
    "ParameterSpace",
    "Server",
    "UpdateInfo",
    "aggregate",
    "average",
    "average_adapters",
    "fit",
]

if not TYPE_CHECKING:  # With `__getattr__`, a type checker would accept any attribute name.

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name in _PACKAGES:
            value = import_module(_PACKAGES[name])
        elif name in _HOMES:
            value = getattr(import_module(_PACKAGES[_HOMES[name]]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_PACKAGES})
