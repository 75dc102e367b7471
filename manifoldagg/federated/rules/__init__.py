"""Server rules: frozen values with pure methods, one file each."""

from manifoldagg.federated.rules.asyncbezier import AsyncBezier
from manifoldagg.federated.rules.fedasync import FedAsync
from manifoldagg.federated.rules.fedgs import FedGS
from manifoldagg.federated.rules.fedortho import FedOrtho

__all__ = ["AsyncBezier", "FedAsync", "FedGS", "FedOrtho"]
