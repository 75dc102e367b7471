r"""Server rules, which compute the next server model from a client update.

A rule is an immutable object. Its state is a separate value that the server stores. The docstrings use this notation:

- $\Theta^\tau$ is the current server model, and $\tau$ is its version, the number of steps so far.
- $\Theta^t$ is the base of an update: the model from which the client started.
- $v = \Theta_i - \Theta^t$ is the displacement of the update, where $\Theta_i$ is the model that client $i$ returned.
- $g = \Theta^\tau - \Theta^t$ is the drift: the movement of the server model since the dispatch.
- $\tau - t$ is the staleness of the update, in versions.
- $w_i$ is the client's share of the training data.

The line `Source` of a rule names the paper and the number of the equation. Five papers have short names, such as
Manifold and Report, which [Deviations from the papers](../guide/deviations.md) explains.

The line `Cost` of a rule states the memory traffic of one call of `Server.receive`, in 32-bit words per parameter: the
words that are read, written and allocated. The assumptions are:

- Models are in float32, and updates are stale.
- A curve has two control points, and a buffer has room for three updates.
- Data that stays in the cache between operations counts once.
"""

from manifoldagg.federated.rules.ace import ACE
from manifoldagg.federated.rules.adamasfl import AdaMasFL
from manifoldagg.federated.rules.asgd import ASGD
from manifoldagg.federated.rules.asyncbezier import AsyncBezier
from manifoldagg.federated.rules.asynccorrected import AsyncCorrected
from manifoldagg.federated.rules.asynccurve import AsyncCurve
from manifoldagg.federated.rules.asyncfeded import AsyncFedED
from manifoldagg.federated.rules.asynckrylov import AsyncKrylov
from manifoldagg.federated.rules.ca2fl import CA2FL
from manifoldagg.federated.rules.dcasgd import DCASGD
from manifoldagg.federated.rules.defedavg import DeFedAvg
from manifoldagg.federated.rules.delayednesterov import DelayedNesterov
from manifoldagg.federated.rules.dominance import Dominance
from manifoldagg.federated.rules.fadas import FADAS
from manifoldagg.federated.rules.fedadam import FedAdam
from manifoldagg.federated.rules.fedasync import FedAsync
from manifoldagg.federated.rules.fedavg import FedAvg
from manifoldagg.federated.rules.fedbuff import FedBuff
from manifoldagg.federated.rules.fedgs import FedGS
from manifoldagg.federated.rules.fedortho import FedOrtho
from manifoldagg.federated.rules.floco import FLOCO
from manifoldagg.federated.rules.generalizedasyncsgd import GeneralizedAsyncSGD
from manifoldagg.federated.rules.heloco import HeLoCo
from manifoldagg.federated.rules.krum import Krum
from manifoldagg.federated.rules.masfl import MasFL
from manifoldagg.federated.rules.median import Median
from manifoldagg.federated.rules.momentum import Momentum
from manifoldagg.federated.rules.orthofl import OrthoFL
from manifoldagg.federated.rules.private import Private
from manifoldagg.federated.rules.radialdirectional import RadialDirectional
from manifoldagg.federated.rules.trimmedmean import TrimmedMean

__all__ = [
    "ACE",
    "ASGD",
    "CA2FL",
    "DCASGD",
    "FADAS",
    "FLOCO",
    "AdaMasFL",
    "AsyncBezier",
    "AsyncCorrected",
    "AsyncCurve",
    "AsyncFedED",
    "AsyncKrylov",
    "DeFedAvg",
    "DelayedNesterov",
    "Dominance",
    "FedAdam",
    "FedAsync",
    "FedAvg",
    "FedBuff",
    "FedGS",
    "FedOrtho",
    "GeneralizedAsyncSGD",
    "HeLoCo",
    "Krum",
    "MasFL",
    "Median",
    "Momentum",
    "OrthoFL",
    "Private",
    "RadialDirectional",
    "TrimmedMean",
]
